//! A ban: the upstream has stated a wait that is longer than `max_hold`.
//!
//! Callers are told the stated end, because probes make some bans longer. The key is on hold for `max_hold`, then one
//! request of the whole fleet leaves as a probe. If it is refused and the stated end is confirmed, the next probe leaves
//! after half of what is left, and if that one confirms it, too, none does before the stated end; in both cases for [`LONGEST`]
//! at most.
//!
//! The processes share a ban through a register of the key: its end, how often it was confirmed, and whether a probe is
//! on its way. A process becomes the one that sends the probe by a change of the register, which only one of them can
//! make. Without registers, or while the store fails, each process probes for itself.
//!
//! Simpler would be a random time before each process probes. By calculation, two of 20 processes then probe within one
//! round trip once in eight times.

use std::time::{Duration, Instant};

use super::upstream_refusals::SAME_END;
use crate::clock;
use crate::key::Key;
use crate::limiter::reservation::ProbeNumber;
use crate::store::{Recipients, Register, RegisterRequest};

/// The longest time without a probe.
const LONGEST: Duration = Duration::from_secs(3600);

/// If the response to a probe takes longer, another request may leave.
const PROBE_TAKES: Duration = Duration::from_secs(60);

/// The store is asked again if it has not answered for so long.
const ANSWER: Duration = Duration::from_secs(1);

/// How often the others look whether it was lost.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Two stated ends closer than this are one, stated in whole seconds.
const SAME: Duration = Duration::from_secs(1);

/// The number of its registers.
pub(in crate::limiter) const FLEET_PROBE: u64 = 0x62_61_6e;

/// A ban of a key.
#[derive(Clone, Debug)]
pub(in crate::limiter) struct FleetProbe {
    /// When it ends, as the upstream stated last.
    ends: Instant,
    /// How many probes have confirmed it.
    confirmed: u8,
    /// The version of the register that this process knows.
    version: u64,
    turn: Turn,
    /// The last probe of this process.
    number: Option<ProbeNumber>,
    /// Whether the register does not have this yet.
    is_news: bool,
    /// When the store was asked to change the register, until it answers.
    asked_at: Option<Instant>,
}

/// Who sends the next probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Nobody yet.
    Free,
    /// This process.
    Ours,
    /// It is on its way. Another one may leave from this moment on.
    Away(Instant),
}

/// A call that changes the register.
pub(in crate::limiter) struct FleetCall {
    pub(in crate::limiter) request: RegisterRequest,
    /// Whether it is to let this process send the probe.
    pub(in crate::limiter) is_for_probe: bool,
}

/// What a register has of a ban, from the moment when it was written.
struct Written {
    confirmed: u8,
    is_probing: bool,
    /// How long the ban lasts.
    left: Duration,
    /// How long the key stays on hold.
    held: Duration,
    /// How often holds of the key were released.
    releases: u32,
}

impl Written {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.confirmed, u8::from(self.is_probing)];
        for span in [self.left, self.held] {
            let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
            bytes.extend(micros.to_le_bytes());
        }
        bytes.extend(self.releases.to_le_bytes());
        bytes
    }

    /// Reads the bytes. `None` if they are not those of a ban.
    fn read(bytes: &[u8]) -> Option<Self> {
        let (&[confirmed, is_probing], rest) = bytes.split_first_chunk::<2>()?;
        let (left, rest) = rest.split_first_chunk::<8>()?;
        let (held, rest) = rest.split_first_chunk::<8>()?;
        let span = |micros| Duration::from_micros(u64::from_le_bytes(micros));
        Some(Written {
            confirmed,
            is_probing: is_probing != 0,
            left: span(*left),
            held: span(*held),
            releases: u32::from_le_bytes(rest.try_into().ok()?),
        })
    }
}

impl FleetProbe {
    /// Makes a ban that no other process knows.
    fn new(ends: Instant) -> Self {
        FleetProbe {
            ends,
            confirmed: 0,
            version: 0,
            turn: Turn::Free,
            number: None,
            is_news: true,
            asked_at: None,
        }
    }

    /// Takes in that the upstream has stated a wait of `stated`. It may have refused a probe by that.
    pub(super) fn stated(
        before: Option<FleetProbe>,
        stated: Duration,
        is_probe: bool,
        now: Instant,
    ) -> Self {
        let ends = clock::after(now, stated);
        let Some(mut ban) = before.filter(|ban| ban.ends > now) else {
            return FleetProbe::new(ends);
        };
        let is_confirmed = clock::after(ends, SAME) >= ban.ends;
        if is_probe {
            ban.confirmed = if is_confirmed {
                ban.confirmed.saturating_add(1)
            } else {
                0
            };
            ban.turn = Turn::Free;
        }
        ban.is_news |= is_probe || ends > clock::after(ban.ends, SAME_END);
        ban.ends = if is_probe { ends } else { ends.max(ban.ends) };
        ban
    }

    /// Returns for how long it lasts. `None` if it is over.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        self.ends
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// Returns for how long no probe leaves.
    pub(super) fn span(&self, max_hold: Duration, now: Instant) -> Duration {
        let left = self.left(now).unwrap_or_default();
        match self.confirmed {
            0 => max_hold,
            1 => max_hold.max(LONGEST.min(left / 2)),
            _ => max_hold.max(LONGEST),
        }
    }

    /// Returns for how long no request of this process may leave, while the key is on probation. `None` if one may, as the
    /// probe.
    pub(super) fn waits_for_probe(&self, now: Instant) -> Option<Duration> {
        match self.turn {
            Turn::Ours => None,
            Turn::Away(until) if until > now => Some(LOOK_AGAIN.min(until - now)),
            // It may be that of a process without requests. To ask first, as for the first probe, would give the right to
            // the next one of those.
            Turn::Away(_) => None,
            Turn::Free => Some(ANSWER),
        }
    }

    pub(super) fn probe_leaves(&mut self, number: ProbeNumber, now: Instant) {
        self.number = Some(number);
        self.turn = Turn::Away(clock::after(now, PROBE_TAKES));
    }

    /// Notes that this probe was not sent. Returns whether another one may leave now.
    pub(super) fn probe_comes_back(&mut self, number: ProbeNumber) -> bool {
        let is_back = self.number.take_if(|last| *last == number).is_some();
        if is_back {
            self.turn = Turn::Ours;
        }
        is_back
    }

    /// Returns the call to send now, if one is due. The key may be on probation, and requests wait for a probe.
    /// The key is on hold for `held`, and its holds were released so often.
    pub(super) fn call(
        &mut self,
        key: Key,
        wants_probe: bool,
        (held, releases): (Duration, u32),
        now: Instant,
    ) -> Option<FleetCall> {
        let is_free = match self.turn {
            Turn::Free => true,
            Turn::Ours => false,
            Turn::Away(until) => until <= now,
        };
        let is_for_probe = wants_probe && is_free;
        let is_asking = self
            .asked_at
            .is_some_and(|at| clock::after(at, ANSWER) > now);
        if is_asking || !(is_for_probe || self.is_news) {
            return None;
        }
        let left = self.left(now)?;
        self.asked_at = Some(now);
        let written = Written {
            confirmed: self.confirmed,
            is_probing: is_for_probe,
            left,
            held,
            releases,
        };
        let request = RegisterRequest {
            version: self.version,
            value: Some(written.bytes()),
            ttl: left.min(LONGEST * 24),
            notify: Recipients::All,
            ..RegisterRequest::new(key, FLEET_PROBE)
        };
        Some(FleetCall {
            request,
            is_for_probe,
        })
    }

    /// Takes in that the store has made the change, or could not: then this process goes on alone.
    pub(super) fn changed(&mut self, version: Option<u64>, is_for_probe: bool) {
        self.asked_at = None;
        self.is_news = false;
        self.version = version.unwrap_or(self.version);
        if is_for_probe {
            self.turn = Turn::Ours;
        }
    }

    /// Takes in what another process has written. Holds of the key were released so often, as this process knows: a ban
    /// from before a release is over.
    pub(super) fn learn(
        before: Option<FleetProbe>,
        register: &Register,
        releases: u32,
        now: Instant,
    ) -> Option<Self> {
        let theirs = FleetProbe::read(register, releases, now);
        let Some(mut ban) = before else {
            return theirs;
        };
        ban.asked_at = None;
        let is_known = ban.version == register.version && register.version != 0;
        // An earlier message may arrive late.
        if is_known || ban.turn == Turn::Ours {
            return Some(ban);
        }
        ban.version = register.version;
        let Some(theirs) = theirs else {
            // The register has expired, or is about a ban that is over: the next call replaces it.
            return Some(ban);
        };
        let is_later = ban.is_news && ban.ends > clock::after(theirs.ends, SAME);
        if !is_later {
            return Some(theirs);
        }
        ban.confirmed = ban.confirmed.max(theirs.confirmed);
        Some(ban)
    }

    /// Returns for how long the key stays on hold, as another process has written.
    pub(super) fn held(register: &Register) -> Option<Duration> {
        let held = Written::read(&register.value)?.held;
        held.checked_sub(register.age)
            .filter(|left| !left.is_zero())
    }

    /// Reads what another process has written. `None` if that is over.
    fn read(register: &Register, releases: u32, now: Instant) -> Option<Self> {
        let written = Written::read(&register.value).filter(|ban| ban.releases >= releases)?;
        let made_at = now.checked_sub(register.age).unwrap_or(now);
        let ban = FleetProbe {
            confirmed: written.confirmed,
            version: register.version,
            turn: match written.is_probing {
                true => Turn::Away(clock::after(made_at, PROBE_TAKES)),
                false => Turn::Free,
            },
            is_news: false,
            ..FleetProbe::new(clock::after(made_at, written.left))
        };
        ban.left(now).map(|_| ban)
    }

    /// Returns until when it matters to a key whose hold ends at `end`.
    pub(super) fn matters_until(&self, end: Instant) -> Instant {
        self.ends.min(clock::after(end, LONGEST))
    }
}
