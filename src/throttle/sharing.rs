//! How the processes that share the pace of a key take turns.
//!
//! The processes share one pace and one order of turns through a register of the store. The register holds the pace state,
//! and for each process how many requests wait and since when. A process that has something to write (an answer, a
//! departure, a waiter) applies it to the register as it last knew it, and compares and sets. If another process was
//! faster, it applies it to what that process has written, and tries again. A request leaves once the register has its
//! departure, so no slot is taken twice. The process that writes notifies the process whose turn is next.
//!
//! If nothing is scarce, requests leave without asking, and the process writes their departures later, many at a time.
//! During an outage of the store each process goes on alone with its part of the last known speed.
//!
//! The states of one process, in [`SyncState`](super::sync_state::SyncState):
//!
//! ```text
//!             next_cas                        next_cas
//!   ┌──────┐ ─────────▶ ┌────────┐    ┌──────┐ ─────────▶ ┌─────────┐
//!   │ Idle │            │ Asking │    │ Away │            │ Probing │
//!   └──────┘ ◀───────── └────────┘    └──────┘ ◀───────── └─────────┘
//!      ▲   written,         │             ▲      error          │
//!      │   conflict, read   └─────────────┘                     │
//!      │                         error                          │
//!      └────────────────────────────────────────────────────────┘
//!                 answer: goes on from the register again
//! ```
//!
//! | from | event | to | what the process does |
//! |---|---|---|---|
//! | Idle | something to write or to read | Asking | sends the compare-and-set |
//! | Asking | written | Idle | drops the written events; its granted requests may leave |
//! | Asking | read, or a conflict | Idle | adopts the register and replays its events; rests after every fourth conflict |
//! | Asking | error | Away | saves the pace state, divides the pace by the number of processes |
//! | Away | the pause is over | Probing | reads the register |
//! | Probing | error | Away | doubles the pause |
//! | Probing | answer | Idle | restores the saved pace state, then as after Asking |

use std::time::{Duration, Instant};

use super::pace_state::Load;
use super::paced_queue::PacedQueue;
use super::peer_view::{Event, Mark, PeerView};
use super::peers::{Peer, Peers};
use super::sync_state::{CasRequest, Outage, PendingCas, StoreChange, SyncState};
use crate::clock;
use crate::error::StoreError;
use crate::pace::{Call, Notes, Reply};
use crate::store::{Recipients, Register};

/// How long a process gathers events before it writes them, if no request waits: one round trip for each process, within
/// these bounds.
const GATHERING: Duration = Duration::from_millis(100);
const LONGEST_GATHERING: Duration = Duration::from_secs(1);
/// How long a process may rely on a version of the register to let requests leave without asking.
const FRESH: Duration = Duration::from_secs(2);
/// How many requests per request in flight the pace must have room for before requests leave without asking. Requests of
/// other processes may have left and ended since the last notification.
const ROOM: usize = 4;
/// After how many conflicts a process rests. Each further rest is up to four times as long, so that a thousand processes
/// that begin together are soon done with it.
const CONFLICTS_PER_REST: u32 = 4;
const MOST_RESTS: u32 = 4;
/// The most requests that leave with one compare-and-set.
const MOST_GRANTS: usize = 64;

/// Turns.
impl PacedQueue {
    /// Shares the pace from now on, as process `id`, which the store notifies at `address`.
    pub(super) fn share(&mut self, id: u64, address: u64, now: Instant) {
        self.view = Some(Box::new(PeerView::new(id, address, now)));
    }

    /// Reports whether the queue works alone: the pace is not shared, or the store is unreachable.
    pub(super) fn is_alone(&self) -> bool {
        self.view.as_ref().is_none_or(|view| view.sync.is_away())
    }

    /// Reports whether a request may leave without a compare-and-set: the queue is alone, or nothing is scarce.
    pub(super) fn may_leave_alone(&self, now: Instant) -> bool {
        let Some(view) = &self.view else { return true };
        let Load { waiting, in_flight } = self.load();
        view.sync.is_away()
            || view.version.is_some()
                && now.saturating_duration_since(view.version_seen_at) < FRESH
                && self.pace_state.is_open(ROOM * (in_flight + 2) + waiting, now)
    }

    /// Reports whether the store is still to answer whether the first waiter may leave.
    pub(super) fn awaits_register(&self) -> bool {
        let Some(view) = &self.view else { return false };
        match view.sync {
            SyncState::Idle { .. } => view.written_first != self.first_since(),
            SyncState::Asking(_) => true,
            SyncState::Away { .. } | SyncState::Probing { .. } => false,
        }
    }

    /// Uses a departure that the register has. Returns false if there is none.
    pub(super) fn take_grant(&mut self) -> bool {
        let Some(view) = &mut self.view else { return false };
        let is_granted = view.granted > 0;
        view.granted -= usize::from(is_granted);
        is_granted
    }

    /// Gives up the departures that the register has, because no request waits for them.
    pub(super) fn drop_grants(&mut self, now: Instant) {
        if let Some(view) = &mut self.view
            && std::mem::take(&mut view.granted) > 0
        {
            view.touch(now);
        }
    }

    /// Records an event for the other processes, unless the store is unreachable. `event` takes the number of releases
    /// that this process knows of.
    pub(super) fn record(&mut self, now: Instant, event: impl FnOnce(Option<u32>) -> Event) {
        if let Some(view) = &mut self.view {
            if !view.sync.is_away() {
                view.push(event(view.version.map(|_| self.pace_state.releases)));
            }
            view.touch(now);
        }
    }

    /// Notes that the number of requests in flight has changed.
    pub(super) fn touch(&mut self, now: Instant) {
        if let Some(view) = &mut self.view {
            view.touch(now);
        }
    }

    /// Returns the current point in the sequence of events; `None` if the pace is not shared.
    pub(super) fn mark(&self) -> Option<Mark> {
        self.view.as_ref().map(|view| view.mark())
    }

    /// Reports whether the register has all events before `mark`. Fails if the store has been away since.
    pub(super) fn is_written(&self, mark: Mark) -> Result<bool, StoreError> {
        self.view.as_ref().map_or(Ok(true), |view| view.is_written(mark))
    }

    /// Returns when the first waiter of this process arrived.
    fn first_since(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(_, call)| call.since)
    }
}

/// The next compare-and-set.
impl PacedQueue {
    /// Returns when the compare-and-set under way was sent.
    pub(super) fn cas_sent_at(&self) -> Option<Instant> {
        self.view.as_ref()?.sync.pending().map(|cas| cas.sent)
    }

    /// Returns when the next compare-and-set is due if nothing else happens.
    pub(super) fn next_cas_at(&self) -> Option<Instant> {
        let view = self.view.as_ref()?;
        let (write_rests_until, turn_rests_until) = match view.sync {
            SyncState::Asking(_) | SyncState::Probing { .. } => return None,
            // Turns do not rest: only one process at a time takes its turn.
            SyncState::Idle { rests_until } => (rests_until, None),
            SyncState::Away { rests_until, .. } => (Some(rests_until), Some(rests_until)),
        };
        let write_at = self.write_at(view).map(|at| write_rests_until.map_or(at, |until| at.max(until)));
        let turn_at = self.turn_at(view).map(|at| turn_rests_until.map_or(at, |until| at.max(until)));
        write_at.into_iter().chain(turn_at).min()
    }

    /// Returns when to write what the register lacks.
    fn write_at(&self, view: &PeerView) -> Option<Instant> {
        let first = self.first_since();
        if view.written_first != first {
            return Some(view.version_seen_at);
        }
        let since = view.unwritten_since?;
        let is_calm = first.is_none()
            && !view.peers.others.iter().any(Peer::is_waiting)
            && !view.events.iter().any(Event::holds);
        let gathering = view.round_trip.saturating_mul(view.process_count());
        match is_calm {
            true => Some(clock::after(since, gathering.clamp(GATHERING, LONGEST_GATHERING))),
            false => Some(since),
        }
    }

    /// Returns when it may be the turn of the first waiter of this process.
    fn turn_at(&self, view: &PeerView) -> Option<Instant> {
        let first = self.first_since()?;
        let before = view.peers.before(view.place(first), view.me.id).count();
        let slot = self.slot();
        if before == 0 {
            return Some(slot.unwrap_or(view.version_seen_at));
        }
        let from = view.peers.turn_from(slot).unwrap_or(view.version_seen_at);
        // Each of the processes in between leaves one interval after the one before it.
        let between = u32::try_from(before - 1).unwrap_or(u32::MAX);
        let turns = self.pace_state.interval(self.load()).saturating_mul(between);
        Some(clock::after(from, turns.saturating_add(view.grace(before))))
    }

    /// Returns the compare-and-set to send now, if one is due. The caller ends it with
    /// [`cas_answered`](Self::cas_answered).
    pub(super) fn next_cas(&mut self, now: Instant) -> Option<CasRequest> {
        if self.next_cas_at().is_none_or(|at| at > now) {
            return None;
        }
        let slot = self.slot();
        let (peers, grants) = self.grant_turns(now);
        let small = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let waiting = small(self.waiting.len() - grants);
        let in_flight = small(self.in_flight + grants);
        let first = self.waiting.values().nth(grants).map(|call| call.since);
        let view = self.view.as_mut()?;
        let since = first.map(|first| view.place(first));
        let me = Peer { waiting, since, in_flight, seen: now, ..view.me };
        let is_news = view.unwritten_since.is_some() || first != view.written_first || grants > 0;
        let seen = view.version.filter(|_| is_news && !view.sync.is_away());
        let writes = seen.is_some();
        let events = view.events.len();
        let mut cas = PendingCas { sent: now, events, grants, me, first, peers, writes };
        let request = match seen {
            Some(seen) => self.write(seen, &mut cas, slot, now)?,
            None => CasRequest { seen: 0, value: None, tell: Recipients::None },
        };
        self.view.as_mut()?.sync.begin(cas);
        Some(request)
    }

    /// Grants the turns that are due, if the register is as this process knows it. Returns the other processes after that,
    /// and the number of turns.
    fn grant_turns(&mut self, now: Instant) -> (Peers, usize) {
        let Some(view) = &self.view else { return (Peers::default(), 0) };
        let mut peers = view.peers.clone();
        let mut grants = 0;
        if view.version.is_none() || view.sync.is_away() {
            return (peers, grants);
        }
        let id = view.me.id;
        let load = self.load();
        for call in self.waiting.values().take(MOST_GRANTS) {
            let since = view.place(call.since);
            let load = Load { waiting: load.waiting - grants, in_flight: load.in_flight + grants };
            let slot = self.pace_state.slot(load);
            let before = peers.before(since, id).count();
            let from = peers.turn_from(slot).unwrap_or(now);
            if slot.is_some_and(|slot| slot > now)
                || before > 0 && now < clock::after(from, view.grace(before))
            {
                break;
            }
            // The processes that are passed over write their waiters again when they can.
            peers.pass_over(since, id);
            self.pace_state.sent(load, now);
            grants += 1;
        }
        (peers, grants)
    }

    /// Returns the request that writes `cas` over version `seen`. `slot` is the slot before the turns that `cas` grants.
    fn write(
        &mut self,
        seen: u64,
        cas: &mut PendingCas,
        slot: Option<Instant>,
        now: Instant,
    ) -> Option<CasRequest> {
        let view = self.view.as_mut()?;
        let me = cas.me;
        let next = cas.peers.settle(&me, slot, now);
        let tell = match next {
            _ if view.events.iter().any(Event::holds) => Recipients::All,
            Some(next) if next.id != me.id => Recipients::One(next.address),
            _ => Recipients::None,
        };
        let mut written_at = Some(clock::after(now, view.round_trip / 2));
        let origin = *view.origin.get_or_insert(now);
        let value = Notes::write(origin, |notes| {
            notes.moment(&mut written_at);
            cas.peers.share(&me, notes);
            self.pace_state.share(notes);
        });
        cas.peers.take(me.id);
        Some(CasRequest { seen, value: Some(value), tell })
    }
}

/// Responses and notifications of the store.
impl PacedQueue {
    /// Ends the compare-and-set that was sent at `sent` with the store's response. Returns whether the store became
    /// unreachable or reachable.
    pub(super) fn cas_answered(
        &mut self,
        answer: Result<Register, StoreError>,
        sent: Instant,
        now: Instant,
    ) -> Option<StoreChange> {
        let (cas, outage) = self.view.as_mut()?.sync.end()?;
        let register = match answer {
            Ok(register) => register,
            Err(error) => return self.on_error(error, outage, now),
        };
        let change = outage.is_some().then_some(StoreChange::Back);
        if let Some(outage) = outage {
            self.on_back(&outage, now);
        }
        let round_trip = now.saturating_duration_since(sent);
        let view = self.view.as_mut()?;
        view.measure(round_trip);
        if register.changed {
            self.on_written(cas, register.version, now);
        } else {
            if cas.writes && view.version != Some(register.version) {
                self.on_conflict(now);
            }
            let read_at = now.checked_sub(round_trip / 2).unwrap_or(now);
            self.adopt(&register, read_at, now);
        }
        if let Some(received) = self.view.as_mut()?.received.take() {
            self.register_changed(received, now);
        }
        change
    }

    /// Goes away, or stays away if this is not the first error of the `outage`.
    ///
    /// The store may have written the compare-and-set. Then the other processes wait once for a turn that is not taken.
    fn on_error(&mut self, error: StoreError, outage: Option<Outage>, now: Instant) -> Option<StoreChange> {
        let view = self.view.as_mut()?;
        if let Some(outage) = outage {
            view.sync.fail(outage, now);
            return None;
        }
        view.sync.fail(Outage::new(self.pace_state.save(now), now), now);
        view.outages += 1;
        view.last_error = Some(error.clone());
        // The other events are out of date by the time the store is back.
        view.events.retain(Event::is_release);
        self.pace_state.divide(view.process_count(), &mut self.dice, now);
        Some(StoreChange::Away(error))
    }

    /// Returns to the pace state from before the outage. The register may hold a later one, which is adopted next. A hold
    /// and a release of this process stay in force.
    fn on_back(&mut self, outage: &Outage, now: Instant) {
        let Some(view) = &mut self.view else { return };
        let held_until = self.pace_state.held_until.filter(|until| *until > now);
        let releases = view.version.map(|_| self.pace_state.releases);
        self.pace_state.restore(&outage.before, outage.began);
        if view.events.iter().any(Event::is_release) {
            self.pace_state.release();
        }
        if let Some(until) = held_until {
            self.pace_state.hold_until(until);
            view.push(Event::Hold { until, releases });
        }
    }

    /// Takes note that the register has `cas`, and so its grants.
    fn on_written(&mut self, cas: PendingCas, version: u64, now: Instant) {
        let Some(view) = &mut self.view else { return };
        view.events.drain(..cas.events.min(view.events.len()));
        view.me = cas.me;
        view.written_first = cas.first;
        view.peers = cas.peers;
        view.version = Some(version);
        view.version_seen_at = now;
        view.granted += cas.grants;
        view.conflicts = 0;
        let is_complete =
            view.events.is_empty() && self.in_flight + view.granted == view.me.in_flight as usize;
        view.unwritten_since = (!is_complete).then_some(now);
    }

    /// Rests if other processes were faster too often. Otherwise the next attempt follows at once: what was read is the
    /// latest version, so that attempt has the best chance.
    fn on_conflict(&mut self, now: Instant) {
        let Some(view) = &mut self.view else { return };
        view.conflicts += 1;
        if view.conflicts % CONFLICTS_PER_REST != 0 {
            return;
        }
        let times = 4_u32.pow((view.conflicts / CONFLICTS_PER_REST).min(MOST_RESTS));
        let rest = view.round_trip.saturating_mul(times);
        // Within this time each of the known processes would have had its turn.
        let all = view.round_trip.saturating_mul(view.process_count()).max(LONGEST_GATHERING);
        view.sync.rest(now, rest.min(all).mul_f64(self.dice.roll()));
    }

    /// Takes the register that another process has written, unless it is out of date or the store is unreachable.
    pub(super) fn register_changed(&mut self, register: Register, now: Instant) {
        let Some(view) = &mut self.view else { return };
        let is_later = |than: Option<u64>| than.is_none_or(|than| register.version > than);
        if view.sync.pending().is_some() {
            if is_later(view.received.as_ref().map(|received| received.version)) {
                view.received = Some(register);
            }
        } else if view.version.is_some() && is_later(view.version) && !view.sync.is_away() {
            self.adopt(&register, now, now);
        }
    }

    /// Notes that notifications may have been missed, so that this process reads the register if any request waits.
    /// Returns whether any does.
    pub(super) fn events_missed(&mut self, now: Instant) -> bool {
        let is_waiting = !self.waiting.is_empty();
        if is_waiting {
            self.touch(now);
        }
        is_waiting
    }

    /// Goes on from what another process has written, and applies the events of this process to it.
    fn adopt(&mut self, register: &Register, read_at: Instant, now: Instant) {
        let written_at = read_at.checked_sub(register.age).unwrap_or(read_at);
        let Some(view) = &mut self.view else { return };
        view.version = Some(register.version);
        view.version_seen_at = now;
        let me = view.me;
        let mut peers = Peers::default();
        let known = self.pace_state.save(now);
        let origin = view.origin_of(&register.value, written_at);
        let is_sound = Notes::read_from(&register.value, origin, written_at, |notes| {
            notes.moment(&mut None);
            peers.share(&me, notes);
            self.pace_state.share(notes);
        });
        if !is_sound {
            // The register is empty or damaged. What this process knows, its events included, replaces it.
            peers = Peers::default();
            self.pace_state.restore(&known, now);
        }
        view.me.since = peers.take(me.id).and_then(|mine| mine.since);
        view.written_first = view.written_first.filter(|_| view.me.since.is_some());
        view.peers = peers;
        if is_sound {
            let events = std::mem::take(&mut view.events);
            self.replay(&events);
            if let Some(view) = &mut self.view {
                view.events = events;
            }
        }
    }

    /// Applies the events that the adopted register lacks.
    ///
    /// A hold that this process saw before another process released it is not restored.
    fn replay(&mut self, events: &[Event]) {
        let load = self.load();
        let releases_read = self.pace_state.releases;
        let is_released = |releases: Option<u32>| releases.is_some_and(|releases| releases < releases_read);
        let mut released_here = false;
        for event in events {
            match event {
                Event::Sent(at) => {
                    let last_sent = self.pace_state.last_sent;
                    self.pace_state.sent(load, *at);
                    self.pace_state.last_sent = last_sent.max(Some(*at));
                }
                Event::Answered { signal, sent, at, releases } => {
                    let mut call = Call::default();
                    let held_until = self.pace_state.held_until;
                    let reply = Reply::new(signal, *sent, &mut call);
                    self.pace_state.answered(load, reply, &mut self.dice, *at);
                    if !released_here && is_released(*releases) {
                        self.pace_state.held_until = held_until;
                    }
                }
                Event::Hold { until, releases } => {
                    if released_here || !is_released(*releases) {
                        self.pace_state.hold_until(*until);
                    }
                }
                Event::Released => {
                    self.pace_state.release();
                    released_here = true;
                }
            }
        }
    }
}
