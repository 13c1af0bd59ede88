//! What one process knows of the register of a key.

use std::time::{Duration, Instant};

use super::local_queue::LocalQueue;
use super::pace_state::{Load, PaceState};
use super::peers::{Peer, Peers};
use super::sync_state::PendingCas;
use crate::clock;
use crate::pacing::StateCodec;
use crate::store::Register;

/// What one process knows of the register of a key.
#[derive(Debug)]
pub(super) struct PeerView {
    /// This process as the register lists it.
    pub(super) me: Peer,
    /// When the request arrived that the register lists as this process's first waiter, by the
    /// clock of this process. `me.since` is the same moment as the other processes know it.
    pub(super) written_first: Option<Instant>,
    /// The other processes as the register lists them.
    pub(super) peers: Peers,
    /// The moment from which the moments in the register count, by the clock of this process. A
    /// process keeps the origin that it found first. Otherwise each change would move all moments
    /// by the uncertainty of one round trip.
    origin: Option<Instant>,
    /// The last version of the register that this process has read or written.
    pub(super) version: Option<u64>,
    /// When the register had that version.
    pub(super) version_seen_at: Instant,
    /// How long a compare-and-set takes.
    pub(super) round_trip: Duration,
}

/// How long a process may leave its turn unused before the next process takes the turn. The process
/// after that waits twice as long, and so on, up to `MOST_GRACES` times as long.
const GRACE: Duration = Duration::from_millis(250);
const MOST_GRACES: u32 = 8;

/// How far the origin of a register may seem to move because of a slow round trip.
const ORIGIN_TOLERANCE: Duration = Duration::from_millis(250);

/// The most requests that leave with one compare-and-set.
const MOST_GRANTS: usize = 64;

impl PeerView {
    pub(super) fn new(id: u64, address: u64, now: Instant) -> Self {
        PeerView {
            me: Peer {
                id,
                address,
                in_flight: 0,
                waiting: 0,
                since: None,
                seen: now,
            },
            written_first: None,
            peers: Peers::default(),
            origin: None,
            version: None,
            version_seen_at: now,
            round_trip: Duration::ZERO,
        }
    }

    /// Adds the load of the other processes to the load of this one.
    pub(super) fn with_others(&self, own: Load) -> Load {
        let mut load = own;
        for other in &self.peers.others {
            load.waiting += other.waiting as usize;
            load.in_flight += other.in_flight as usize;
        }
        load
    }

    /// Returns how many processes have requests that wait or are in flight, this process included.
    pub(super) fn process_count(&self) -> u32 {
        let others = self
            .peers
            .others
            .iter()
            .filter(|other| other.is_active())
            .count();
        u32::try_from(others + 1).unwrap_or(u32::MAX)
    }

    /// Returns the arrival of a request of this process as the other processes know it.
    pub(super) fn place(&self, since: Instant) -> Instant {
        self.me
            .since
            .filter(|_| self.written_first == Some(since))
            .unwrap_or(since)
    }

    /// Returns when it may be the turn of this process's first waiter, which arrived at `first`.
    /// `slot` is the slot of the queue, and `interval` returns the time between two requests.
    pub(super) fn turn_at(
        &self,
        first: Instant,
        slot: Option<Instant>,
        interval: impl FnOnce() -> Duration,
    ) -> Instant {
        let before = self.peers.before(self.place(first), self.me.id).count();
        if before == 0 {
            return slot.unwrap_or(self.version_seen_at);
        }
        let from = self.peers.turn_from(slot).unwrap_or(self.version_seen_at);
        // Each of the processes in between leaves one interval after the one before it.
        let between = u32::try_from(before - 1).unwrap_or(u32::MAX);
        let turns = interval().saturating_mul(between);
        clock::after(from, turns.saturating_add(self.grace(before)))
    }

    /// Grants the turns of this process that are due, up to a bound, and returns their number.
    /// In `peers`, processes that were passed over no longer wait. `load` is the load of all
    /// processes before these turns.
    pub(super) fn grant_turns(
        &self,
        peers: &mut Peers,
        local: &mut LocalQueue,
        load: Load,
        now: Instant,
    ) -> usize {
        let mut grants = 0;
        for call in local.waiting.values().take(MOST_GRANTS) {
            let since = self.place(call.since);
            let load = Load {
                waiting: load.waiting - grants,
                in_flight: load.in_flight + grants,
            };
            let slot = local.pace_state.slot(load);
            let before = peers.before(since, self.me.id).count();
            let from = peers.turn_from(slot).unwrap_or(now);
            if slot.is_some_and(|slot| slot > now)
                || before > 0 && now < clock::after(from, self.grace(before))
            {
                break;
            }
            // The processes that are passed over write their waiters again when they can.
            peers.pass_over(since, self.me.id);
            local.pace_state.sent(load, now);
            grants += 1;
        }
        grants
    }

    /// Returns the value of the register with this `pace_state`, with this process as `me` and the
    /// other processes as `peers`.
    pub(super) fn value(
        &mut self,
        me: &Peer,
        peers: &mut Peers,
        pace_state: &mut PaceState,
        now: Instant,
    ) -> Vec<u8> {
        let mut written_at = Some(clock::after(now, self.round_trip / 2));
        let origin = *self.origin.get_or_insert(now);
        let value = StateCodec::write(origin, |codec| {
            codec.moment(&mut written_at);
            peers.share(me, codec);
            pace_state.share(codec);
        });
        peers.take(me.id);
        value
    }

    pub(super) fn written(&mut self, cas: PendingCas, version: u64, now: Instant) {
        self.me = cas.me;
        self.written_first = cas.first;
        self.peers = cas.peers;
        self.version = Some(version);
        self.version_seen_at = now;
    }

    /// Takes over the register that another process has written. Returns false if it is empty or
    /// damaged: then `pace_state` keeps what this process knows.
    pub(super) fn adopt(
        &mut self,
        register: &Register,
        pace_state: &mut PaceState,
        read_at: Instant,
        now: Instant,
    ) -> bool {
        let written_at = clock::before(read_at, register.age);
        self.version = Some(register.version);
        self.version_seen_at = now;
        let mut peers = Peers::default();
        let known = pace_state.save(now);
        let origin = self.origin_of(&register.value, written_at);
        let is_sound = StateCodec::read_from(&register.value, origin, written_at, |codec| {
            codec.moment(&mut None);
            peers.share(&self.me, codec);
            pace_state.share(codec);
        });
        if !is_sound {
            peers = Peers::default();
            pace_state.restore(&known);
        }
        self.me.since = peers.take(self.me.id).and_then(|mine| mine.since);
        self.written_first = self.written_first.filter(|_| self.me.since.is_some());
        self.peers = peers;
        is_sound
    }

    /// Returns the moment from which a register counts that was written at `written_at`.
    fn origin_of(&mut self, value: &[u8], written_at: Instant) -> Instant {
        let first = value.first_chunk().map(|first| f64::from_le_bytes(*first));
        let since = first
            .and_then(|first| Duration::try_from_secs_f64(first).ok())
            .unwrap_or_default();
        let seen = clock::before(written_at, since);
        // A larger distance means another register, or a clock that was stepped or drifts.
        let known = self
            .origin
            .filter(|known| seen.max(*known) - seen.min(*known) < ORIGIN_TOLERANCE);
        *self.origin.insert(known.unwrap_or(seen))
    }

    /// Returns how long `before` processes may leave their turn unused until the turn passes to the
    /// next process.
    pub(super) fn grace(&self, before: usize) -> Duration {
        let times = u32::try_from(before).unwrap_or(u32::MAX).min(MOST_GRACES);
        GRACE.max(self.round_trip * 4) * times
    }

    /// Averages the length of a round trip. The first round trip may include the time to connect,
    /// and any may include a stall. So a shorter one weighs more.
    pub(super) fn measure(&mut self, round_trip: Duration) {
        self.round_trip = match round_trip < self.round_trip {
            true => (self.round_trip + round_trip) / 2,
            false => (self.round_trip * 7 + round_trip) / 8,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::pacing::StateCodec;

    #[test]
    fn origin_stays_when_round_trips_are_slow() {
        let start = clock::now() + Duration::from_secs(7200);
        let mut view = PeerView::new(1, 1, start);
        let written = |millis: u32| {
            StateCodec::write(start, |codec| {
                codec.number(&mut (f64::from(millis) / 1000.0))
            })
        };
        let at = |millis: u64| start + Duration::from_millis(millis);
        assert_eq!(view.origin_of(&written(5000), at(5003)), at(3));
        for (written_at, late) in [(6000, 40), (3_000_000, 0), (3_000_500, 200)] {
            assert_eq!(
                view.origin_of(&written(written_at), at(u64::from(written_at) + late)),
                at(3)
            );
        }
        // Another process has created the register anew, with another origin.
        assert_eq!(view.origin_of(&written(1000), at(3_600_000)), at(3_599_000));
        assert_eq!(
            view.origin_of(&[], at(7_200_000)),
            at(7_200_000),
            "an empty register begins now"
        );
    }
}
