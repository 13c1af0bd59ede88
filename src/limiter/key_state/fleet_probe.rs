//! Which process of a fleet sends the probe of a key.
//!
//! After a hold that was cut, one request of the whole fleet leaves as a probe: see [`probation`](super::probation). The
//! processes agree through a register of the key: how many probes were sent in a row, and whether one is on its way. A
//! process gets its *turn* by a change of the register, which only one of them can make. The others wait for the response,
//! or until the probe takes too long. From then on each process lets requests go by itself, as probation says. Without
//! registers, or while the store fails, each process probes for itself.
//!
//! How many probes were sent also says how long the next hold lasts: most processes have seen none of the refusals. So it is
//! counted when a process gets its turn, and not when its probe is refused.
//!
//! A process that has had a turn lets others ask first. It may send a [kind](crate::suspicion) of requests that is always
//! refused, and nothing else: if its way to the store is the shortest, each probe would be one of these.
//!
//! A *ban* is a wait that the upstream states beyond `max_hold`. Callers are told the stated end, because probes make some
//! bans longer. The key is on hold for `max_hold`, then a probe leaves. If it is refused and the stated end is confirmed,
//! the next probe leaves after half of what is left, and if that one confirms it, too, none does before the stated end; in
//! both cases for [`LONGEST`] at most. The register has the end, too, and all processes are notified. Nobody is notified
//! of a turn: a process that asks for one reads there that it comes too late.
//!
//! Simpler would be a random time before each process probes. By calculation, two of 20 processes then probe within one
//! round trip once in eight times.

use std::time::{Duration, Instant};

use super::probation::{LONGEST_PROBATION, Passage};
use super::upstream_refusals::SAME_END;
use crate::clock;
use crate::key::Key;
use crate::limiter::reservation::ProbeNumber;
use crate::store::{Recipients, Register, RegisterRequest};
use crate::tuning::ANSWER;

/// The longest time without a probe of a ban.
const LONGEST: Duration = Duration::from_secs(3600);

/// If the response to a probe of a ban takes longer, another request may leave.
pub(super) const PROBE_TAKES: Duration = Duration::from_secs(60);

/// How often the others look whether it was lost.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Two stated ends closer than this are one, stated in whole seconds.
const SAME: Duration = Duration::from_secs(1);

/// A turn that began longer than this before the end of a hold belongs to an earlier hold: the shortest one after a probe lasts
/// twice as long. One that began later may be that of a process that saw this hold end earlier.
const EARLIER: Duration = Duration::from_millis(200);

/// A process that has had a turn asks this much later than the others. They ask at the end of the hold, which they see within a trip.
const LATER: Duration = Duration::from_millis(100);

/// The number of its registers.
pub(in crate::limiter) const FLEET_PROBE: u64 = 0x62_61_6e;

/// What the processes of a fleet share about the probes of a key.
#[derive(Clone, Debug, Default)]
pub(in crate::limiter) struct FleetProbe {
    /// When the ban ends, as the upstream stated last. `None` if there was none.
    ban_ends: Option<Instant>,
    /// How many probes were sent since the upstream accepted a request, or since it stated an earlier end of the ban.
    sent: u8,
    /// The version of the register that this process knows.
    version: u64,
    turn: ProbeTurn,
    /// Whether this process has had a turn since the upstream accepted a request, and there may be others.
    had_turn: bool,
    /// The last probe of this process.
    number: Option<ProbeNumber>,
    /// Whether the register does not have the ban yet.
    is_news: bool,
    /// When the store was asked to change the register, until it answers.
    asked_at: Option<Instant>,
}

/// Which process sends the next probe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ProbeTurn {
    /// None yet.
    #[default]
    Free,
    /// This process, since this moment.
    Ours(Instant),
    /// One has got its turn at `since`. Others may send probes from `until` on.
    Away { since: Instant, until: Instant },
}

/// A call that changes the register.
pub(in crate::limiter) struct FleetCall {
    pub(in crate::limiter) request: RegisterRequest,
    /// Which probe in a row this process may send by it, if it is for that.
    pub(in crate::limiter) probe: Option<u8>,
}

/// The key whose probe it is, and its hold.
#[derive(Clone, Copy)]
pub(super) struct ProbedHold {
    pub(super) key: Key,
    pub(super) end: Instant,
    /// How often holds of the key were released.
    pub(super) releases: u32,
}

/// What a register has, from the moment when it was written.
struct Written {
    sent: u8,
    /// How long others wait for the response to the probe. Zero if none is on its way.
    takes: Duration,
    /// How long the ban lasts. Zero without one.
    left: Duration,
    /// How long the key stays on hold.
    held: Duration,
    /// How often holds of the key were released.
    releases: u32,
}

impl Written {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.sent];
        for span in [self.takes, self.left, self.held] {
            let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
            bytes.extend(micros.to_le_bytes());
        }
        bytes.extend(self.releases.to_le_bytes());
        bytes
    }

    /// Reads the bytes. `None` if they are no such bytes.
    fn read(bytes: &[u8]) -> Option<Self> {
        let (&sent, mut rest) = bytes.split_first()?;
        let mut spans = [Duration::ZERO; 3];
        for span in &mut spans {
            let micros;
            (micros, rest) = rest.split_first_chunk::<8>()?;
            *span = Duration::from_micros(u64::from_le_bytes(*micros));
        }
        let [takes, left, held] = spans;
        Some(Written {
            sent,
            takes,
            left,
            held,
            releases: u32::from_le_bytes(rest.try_into().ok()?),
        })
    }
}

impl FleetProbe {
    /// Forgets all but the version of the register: the upstream accepts requests, or no longer states the wait.
    pub(super) fn forget(&mut self) {
        *self = FleetProbe {
            version: self.version,
            ..FleetProbe::default()
        };
    }

    /// Returns how many probes were sent in a row.
    pub(super) fn sent(&self) -> u8 {
        self.sent
    }

    /// Takes in that the upstream has stated a wait of `stated`, beyond `max_hold`. It may have refused a probe by that.
    pub(super) fn banned(&mut self, stated: Duration, is_probe: bool, now: Instant) {
        let ends = clock::after(now, stated);
        let Some(before) = self.ban_ends.filter(|ends| *ends > now) else {
            self.forget();
            self.is_news = true;
            self.ban_ends = Some(ends);
            return;
        };
        if is_probe {
            let is_confirmed = clock::after(ends, SAME) >= before;
            self.sent = if is_confirmed { self.sent } else { 0 };
            self.turn = ProbeTurn::Free;
        }
        self.is_news |= is_probe || ends > clock::after(before, SAME_END);
        self.ban_ends = Some(if is_probe { ends } else { ends.max(before) });
    }

    /// Takes in that the machine has slept, while the ban went on.
    pub(super) fn wake(&mut self, slept: Duration) {
        self.ban_ends = self.ban_ends.and_then(|ends| ends.checked_sub(slept));
    }

    /// Returns for how long the ban lasts. `None` without one.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        self.ban_ends?
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// Returns for how long no probe of the ban leaves.
    pub(super) fn span(&self, max_hold: Duration, now: Instant) -> Duration {
        let left = self.left(now).unwrap_or_default();
        match self.sent {
            0 => max_hold,
            1 => max_hold.max(LONGEST.min(left / 2)),
            _ => max_hold.max(LONGEST),
        }
    }

    /// Returns whose turn it is after a hold that ended at `end`.
    fn turn(&self, end: Instant) -> ProbeTurn {
        match self.turn {
            ProbeTurn::Ours(since) | ProbeTurn::Away { since, .. }
                if clock::after(since, EARLIER) < end =>
            {
                ProbeTurn::Free
            }
            turn => turn,
        }
    }

    /// Returns from when on this process asks for its turn, after a hold that ended at `end`.
    fn asks_from(&self, end: Instant) -> Instant {
        match self.had_turn {
            true => clock::after(end, LATER),
            false => end,
        }
    }

    /// Returns which requests of this process may leave after a hold that ended at `end`, while one leaves first.
    pub(super) fn passage(&self, end: Instant, now: Instant) -> Passage {
        let asks_from = self.asks_from(end);
        match self.turn(end) {
            ProbeTurn::Free if asks_from > now => Passage::Probing(asks_from - now),
            ProbeTurn::Free => Passage::Asking,
            ProbeTurn::Away { until, .. } if until > now => {
                Passage::Probing(LOOK_AGAIN.min(until - now))
            }
            // It may be that of a process without requests. To ask first, as for the first probe, would give the right to
            // the next one of those.
            ProbeTurn::Away { .. } | ProbeTurn::Ours(_) => Passage::Probe,
        }
    }

    pub(super) fn probe_leaves(&mut self, number: ProbeNumber, now: Instant) {
        self.number = Some(number);
        self.turn = ProbeTurn::Away {
            since: now,
            until: clock::after(now, PROBE_TAKES),
        };
    }

    /// Notes that this probe was not sent. Returns whether another one may leave now.
    pub(super) fn probe_comes_back(&mut self, number: ProbeNumber, now: Instant) -> bool {
        let is_back = self.number.take_if(|last| *last == number).is_some();
        if is_back {
            self.turn = ProbeTurn::Ours(now);
        }
        is_back
    }

    /// Returns the call to send now, if one is due. If requests wait for a probe, `takes` is how long others wait for the
    /// response to it.
    pub(super) fn call(
        &mut self,
        hold: ProbedHold,
        takes: Option<Duration>,
        now: Instant,
    ) -> Option<FleetCall> {
        let is_free = match self.turn(hold.end) {
            ProbeTurn::Free => self.asks_from(hold.end) <= now,
            ProbeTurn::Ours(_) => false,
            ProbeTurn::Away { until, .. } => until <= now,
        };
        let takes = takes.filter(|_| is_free);
        let is_asking = self
            .asked_at
            .is_some_and(|at| clock::after(at, ANSWER) > now);
        let ban = self.left(now);
        let has_news = self.is_news && ban.is_some();
        if is_asking || !(takes.is_some() || has_news) {
            return None;
        }
        self.asked_at = Some(now);
        let left = ban.unwrap_or_default();
        let probe = takes.map(|_| self.sent.saturating_add(1));
        let written = Written {
            sent: probe.unwrap_or(self.sent),
            takes: takes.unwrap_or_default(),
            left,
            held: hold.end.saturating_duration_since(now),
            releases: hold.releases,
        };
        let request = RegisterRequest {
            version: self.version,
            value: Some(written.bytes()),
            ttl: left.clamp(2 * LONGEST_PROBATION, LONGEST * 24),
            notify: match ban {
                Some(_) => Recipients::All,
                None => Recipients::None,
            },
            ..RegisterRequest::new(hold.key, FLEET_PROBE)
        };
        Some(FleetCall { request, probe })
    }

    /// Takes in that the store has made the change, or could not: then this process goes on alone.
    pub(super) fn changed(
        &mut self,
        version: Option<u64>,
        probe: Option<u8>,
        is_shared: bool,
        now: Instant,
    ) {
        self.asked_at = None;
        self.is_news = false;
        self.version = version.unwrap_or(self.version);
        if let Some(sent) = probe {
            self.sent = sent;
            self.had_turn = is_shared;
            self.turn = ProbeTurn::Ours(now);
        }
    }

    /// Takes in what another process has written. What it wrote before a release of the hold is over.
    pub(super) fn learn(&mut self, register: &Register, hold: ProbedHold, now: Instant) {
        self.asked_at = None;
        let is_known = self.version == register.version && register.version != 0;
        // An earlier message may arrive late.
        if is_known || matches!(self.turn(hold.end), ProbeTurn::Ours(_)) {
            return;
        }
        self.version = register.version;
        let written = Written::read(&register.value);
        let Some(written) = written.filter(|written| written.releases >= hold.releases) else {
            // The register has expired, or is over: the next call replaces it.
            return;
        };
        let since = clock::before(now, register.age);
        let theirs = clock::after(since, written.left);
        // A probe whose turn the store did not answer counts, too.
        let is_ahead =
            |ours: Instant| ours > clock::after(theirs, SAME) || self.sent > written.sent;
        if self.is_news && self.ban_ends.is_some_and(is_ahead) {
            self.sent = self.sent.max(written.sent);
            return;
        }
        *self = FleetProbe {
            ban_ends: Some(theirs).filter(|ends| *ends > now),
            sent: written.sent,
            had_turn: self.had_turn,
            version: register.version,
            turn: match written.takes.is_zero() {
                true => ProbeTurn::Free,
                false => ProbeTurn::Away {
                    since,
                    until: clock::after(since, written.takes),
                },
            },
            ..FleetProbe::default()
        };
    }

    /// Returns for how long the key stays on hold, as another process has written.
    pub(super) fn held(register: &Register) -> Option<Duration> {
        let held = Written::read(&register.value)?.held;
        held.checked_sub(register.age)
            .filter(|left| !left.is_zero())
    }

    /// Returns until when the ban matters to a key whose hold ends at `end`. `None` without one.
    pub(super) fn matters_until(&self, end: Instant) -> Option<Instant> {
        Some(self.ban_ends?.min(clock::after(end, LONGEST)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The store did not answer the process that asked for its turn. So it counts its probe alone, and another process has
    /// written meanwhile.
    #[test]
    fn probes_without_a_turn_count() {
        let (now, mut fleet) = (clock::now(), FleetProbe::default());
        let (ban, key) = (Duration::from_secs(7200), Key::ALL);
        fleet.banned(ban, false, now);
        fleet.changed(None, Some(1), true, now);
        fleet.probe_leaves(ProbeNumber::next(), now);
        fleet.banned(ban, true, now);
        let written = Written {
            sent: 0,
            takes: Duration::ZERO,
            left: ban,
            held: Duration::ZERO,
            releases: 0,
        };
        let register = Register {
            version: 7,
            value: written.bytes(),
            ..Register::default()
        };
        let (end, releases) = (now, 0);
        fleet.learn(&register, ProbedHold { key, end, releases }, now);
        assert_eq!((fleet.sent(), fleet.version), (1, 7));
    }
}
