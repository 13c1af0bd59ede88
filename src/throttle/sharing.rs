//! The line of a key as the processes of a fleet share it: one pace, one queue.
//!
//! What they share is the course, and which processes wait since when: a register of the store. Whoever has something to say
//! (an answer, a request that left, a place in the queue) applies it to the register as it was last known, and
//! compares and sets. If another was quicker, it begins anew with what that one has written. A request leaves when its
//! departure is in the register: so no slot is taken twice. Who is first is told by whoever changes anything.
//!
//! Where nothing is scarce nobody has to ask: requests leave at once, and it is said afterwards, for many at a time. While
//! the store is away each process goes on with what was known, at its part of the speed.

use std::time::{Duration, Instant};

use super::pace_state::Load;
use super::paced_queue::PacedQueue;
use super::peer_view::{CasRequest, Event, Mark, PeerView, PendingCas, StoreChange};
use super::peers::{Peer, Peers};
use crate::clock;
use crate::error::StoreError;
use crate::pace::{Call, Notes, Reply};
use crate::rng::jittered;
use crate::store::{Register, Tell};

/// Where nobody waits, what happened is told for so long at a time; longer where many tell over a slow network.
const GATHERING: Duration = Duration::from_millis(100);
const LONGEST_GATHERING: Duration = Duration::from_secs(1);
/// For so long after it was seen nobody needs to ask whether nothing is scarce.
const FRESH: Duration = Duration::from_secs(2);
/// How much room there must be for others who leave without asking: all who wait, and so many times as many as are on their
/// way, for they may have ended and others have left before anybody hears of it.
const ROOM: usize = 4;
/// Between tries to reach a store that is away, up to a few seconds.
const REST: Duration = Duration::from_millis(100);
/// After so many tries in which another was quicker one rests, and each time up to four times as long, so that a thousand who
/// begin together are done with it soon.
const TRIES: u32 = 4;
const MOST_RESTS: u32 = 4;
/// So many may leave by one exchange.
const MOST_GRANTS: usize = 64;

impl PacedQueue {
    /// From now on it is shared, by a process of this `id` that is told at `address`.
    pub(super) fn share(&mut self, id: u64, address: u64, now: Instant) {
        self.view = Some(Box::new(PeerView::new(id, address, now)));
    }

    /// Whether it goes by itself: it is not shared, or the store is away.
    pub(super) fn is_alone(&self) -> bool {
        self.view.as_ref().is_none_or(|view| view.is_away())
    }

    /// Whether a request may leave here without the others: the line goes by itself, or nothing is scarce.
    pub(super) fn may_leave_alone(&self, now: Instant) -> bool {
        let Some(view) = &self.view else { return true };
        let Load { waiting, in_flight } = self.load();
        view.is_away()
            || view.version.is_some()
                && now.saturating_duration_since(view.known_at) < FRESH
                && self.pace_state.is_open(ROOM * (in_flight + 2) + waiting, now)
    }

    /// Whether the others are yet to say whether the first who waits here may leave.
    pub(super) fn awaits_register(&self) -> bool {
        let is_told = |view: &PeerView| view.pending.is_none() && view.known == self.first_since();
        self.view.as_ref().is_some_and(|view| !view.is_away() && !is_told(view))
    }

    /// Takes a departure that is in the register.
    pub(super) fn take_grant(&mut self) -> bool {
        let Some(view) = &mut self.view else { return false };
        let is_there = view.granted > 0;
        view.granted -= usize::from(is_there);
        is_there
    }

    /// Nobody is there any more to take what was granted.
    pub(super) fn drop_grants(&mut self, now: Instant) {
        if let Some(view) = &mut self.view
            && std::mem::take(&mut view.granted) > 0
        {
            view.touch(now);
        }
    }

    /// Something happened that the others are to know. `event` is told how many releases this process knows of.
    pub(super) fn record(&mut self, now: Instant, event: impl FnOnce(Option<u32>) -> Event) {
        if let Some(view) = &mut self.view {
            if !view.is_away() {
                view.push(event(view.version.map(|_| self.pace_state.releases)));
            }
            view.touch(now);
        }
    }

    /// Another number of requests is on the way.
    pub(super) fn changed(&mut self, now: Instant) {
        if let Some(view) = &mut self.view {
            view.touch(now);
        }
    }

    /// What happened here up to now; `None` if the line is not shared.
    pub(super) fn mark(&self) -> Option<Mark> {
        self.view.as_ref().map(|view| view.mark())
    }

    /// Whether all that happened before `mark` is in the register; an error if the store has been away since.
    pub(super) fn is_written(&self, mark: Mark) -> Result<bool, StoreError> {
        self.view.as_ref().map_or(Ok(true), |view| view.is_written(mark))
    }

    /// When the exchange under way began.
    pub(super) fn cas_sent_at(&self) -> Option<Instant> {
        self.view.as_ref()?.pending.as_ref().map(|pending| pending.asked)
    }

    /// When an exchange is due, if nothing else happens before.
    pub(super) fn next_cas_at(&self) -> Option<Instant> {
        let view = self.view.as_ref().filter(|view| view.pending.is_none())?;
        let rested = |at: Instant| view.rests_until.map_or(at, |until| at.max(until));
        // Whose turn it is does not rest, for it is but one at a time.
        let turn_at = self.turn_at(view).map(|at| if view.is_away() { rested(at) } else { at });
        self.write_at(view).map(rested).into_iter().chain(turn_at).min()
    }

    /// When what happened here is to be told.
    fn write_at(&self, view: &PeerView) -> Option<Instant> {
        let first = self.first_since();
        if view.known != first {
            // Another waits here than the others know.
            return Some(view.known_at);
        }
        let since = view.unwritten_since?;
        let is_calm = first.is_none()
            && !view.peers.others.iter().any(Peer::is_waiting)
            && !view.events.iter().any(Event::holds);
        let gathering =
            view.round_trip.saturating_mul(view.process_count()).clamp(GATHERING, LONGEST_GATHERING);
        Some(if is_calm { clock::after(since, gathering) } else { since })
    }

    /// Since when the first waits who waits here.
    fn first_since(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(_, place)| place.since)
    }

    /// When it may be the turn of the first who waits here.
    fn turn_at(&self, view: &PeerView) -> Option<Instant> {
        let first = self.first_since()?;
        let before = view.peers.before(view.place(first), view.me.id).count();
        let slot = self.slot();
        if before == 0 {
            return Some(slot.unwrap_or(view.known_at));
        }
        let from = view.peers.turn_from(slot).unwrap_or(view.known_at);
        // Each of those between goes an interval after the one before it.
        let between = u32::try_from(before - 1).unwrap_or(u32::MAX);
        let turns = self.pace_state.interval(self.load()).saturating_mul(between);
        Some(clock::after(from, turns.saturating_add(view.grace(before))))
    }

    /// The exchange to be made now, if one is due. It ends in [`exchanged`](Self::exchanged).
    pub(super) fn next_cas(&mut self, now: Instant) -> Option<CasRequest> {
        if self.next_cas_at().is_none_or(|at| at > now) {
            return None;
        }
        let slot = self.slot();
        let (peers, grants) = self.grant_due(now);
        let waits = self.waiting.len() - grants;
        let next = self.waiting.values().nth(grants).map(|place| place.since);
        let in_flight = self.in_flight + grants;
        let small = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let view = self.view.as_mut()?;
        let since = next.map(|next| view.place(next));
        let me = Peer { waits: small(waits), since, in_flight: small(in_flight), seen: now, ..view.me };
        let is_news = view.unwritten_since.is_some() || next != view.known || grants > 0;
        let seen = view.version.filter(|_| is_news && !view.is_away());
        let writes = seen.is_some();
        let mut pending =
            PendingCas { asked: now, events: view.events.len(), grants, me, known: next, peers, writes };
        let mut exchange = CasRequest { seen: 0, value: None, tell: Tell::Nobody };
        if let Some(seen) = seen {
            let first = pending.peers.settle(&me, slot, now);
            exchange.tell = match first {
                _ if view.events.iter().any(Event::holds) => Tell::All,
                Some(first) if first.id != me.id => Tell::One(first.address),
                _ => Tell::Nobody,
            };
            exchange.seen = seen;
            let mut written_at = Some(clock::after(now, view.round_trip / 2));
            let origin = *view.origin.get_or_insert(now);
            exchange.value = Some(Notes::write(origin, |notes| {
                notes.moment(&mut written_at);
                pending.peers.share(&me, notes);
                self.pace_state.share(notes);
            }));
            pending.peers.take(me.id);
        }
        view.pending = Some(pending);
        Some(exchange)
    }

    /// Lets those leave whose turn it is, if the register is as it is known. Answers who is left of the others, and how many
    /// may leave.
    fn grant_due(&mut self, now: Instant) -> (Peers, usize) {
        let Some(view) = &self.view else { return (Peers::default(), 0) };
        let mut peers = view.peers.clone();
        let mut grants = 0;
        if view.version.is_none() || view.is_away() {
            return (peers, grants);
        }
        let (id, load) = (view.me.id, self.load());
        for place in self.waiting.values().take(MOST_GRANTS) {
            let since = view.place(place.since);
            let load = Load { waiting: load.waiting - grants, in_flight: load.in_flight + grants };
            let slot = self.pace_state.slot(load);
            let before = peers.before(since, id).count();
            let from = peers.turn_from(slot).unwrap_or(now);
            if slot.is_some_and(|slot| slot > now)
                || before > 0 && now < clock::after(from, view.grace(before))
            {
                break;
            }
            // Those who did not take their turn come back when they can.
            peers.pass_over(since, id);
            self.pace_state.sent(load, now);
            grants += 1;
        }
        (peers, grants)
    }

    /// The answer of the store to an exchange that began at `asked`. Answers whether the store went away or came back.
    pub(super) fn cas_answered(
        &mut self,
        answer: Result<Register, StoreError>,
        asked: Instant,
        now: Instant,
    ) -> Option<StoreChange> {
        let view = self.view.as_mut()?;
        let pending = view.pending.take()?;
        let register = match answer {
            Ok(register) => register,
            Err(error) => {
                // It may have been done. Then the others wait for nothing, once.
                view.failures = view.failures.saturating_add(1);
                let span = jittered(REST * 2_u32.pow(view.failures.min(5)));
                view.rest(now, span);
                if view.failures > 1 {
                    return None;
                }
                view.outages += 1;
                view.last_error = Some(error.clone());
                // By the time it is back the others will be of no interest to anybody.
                view.events.retain(Event::is_release);
                let processes = view.process_count();
                view.before_outage = Some((Notes::write(now, |notes| _ = self.pace_state.share(notes)), now));
                self.pace_state.divide(processes, &mut self.dice, now);
                return Some(StoreChange::Away(error));
            }
        };
        view.failures = 0;
        let before_outage = view.before_outage.take();
        if let Some((before_outage, left_at)) = &before_outage {
            // What was shared before, if there is nothing later. But what holds holds all.
            let held = self.pace_state.held_until.filter(|until| *until > now);
            let releases = view.version.map(|_| self.pace_state.releases);
            Notes::read(before_outage, *left_at, |notes| _ = self.pace_state.share(notes));
            if view.events.iter().any(Event::is_release) {
                self.pace_state.release();
            }
            if let Some(until) = held {
                self.pace_state.hold_until(until);
                view.push(Event::Held { until, releases });
            }
        }
        view.rests_until = None;
        let round_trip = now.saturating_duration_since(asked);
        // The first may have had to connect, and any may have met a stall: that is soon forgotten.
        view.round_trip = if round_trip < view.round_trip {
            (view.round_trip + round_trip) / 2
        } else {
            (view.round_trip * 7 + round_trip) / 8
        };
        if register.changed {
            view.events.drain(..pending.events.min(view.events.len()));
            (view.me, view.known, view.peers) = (pending.me, pending.known, pending.peers);
            (view.version, view.known_at) = (Some(register.version), now);
            view.granted += pending.grants;
            view.conflicts = 0;
            let is_untold =
                !view.events.is_empty() || self.in_flight + view.granted != view.me.in_flight as usize;
            view.unwritten_since = is_untold.then_some(now);
        } else {
            if pending.writes && view.version != Some(register.version) {
                // What it says now is the latest, so the next try has the best chance; later it would be old.
                view.conflicts += 1;
                if view.conflicts % TRIES == 0 {
                    let span =
                        view.round_trip.saturating_mul(4_u32.pow((view.conflicts / TRIES).min(MOST_RESTS)));
                    // By then each of those who are known would have had its turn.
                    let all = view.round_trip.saturating_mul(view.process_count()).max(LONGEST_GATHERING);
                    view.rest(now, span.min(all).mul_f64(self.dice.roll()));
                }
            }
            let made_at = now.checked_sub(round_trip / 2).unwrap_or(now);
            self.adopt(&register, made_at, now);
        }
        if let Some(received) = self.view.as_mut()?.received.take() {
            self.register_changed(received, now);
        }
        before_outage.map(|_| StoreChange::Back)
    }

    /// Another process has changed the register.
    pub(super) fn register_changed(&mut self, register: Register, now: Instant) {
        let Some(view) = &mut self.view else { return };
        let is_later = |than: Option<u64>| than.is_none_or(|than| register.version > than);
        if view.pending.is_some() {
            if is_later(view.received.as_ref().map(|received| received.version)) {
                view.received = Some(register);
            }
        } else if view.version.is_some() && is_later(view.version) && !view.is_away() {
            self.adopt(&register, now, now);
        }
    }

    /// What others did may have been missed: those who wait ask. Answers whether any do.
    pub(super) fn events_missed(&mut self, now: Instant) -> bool {
        let is_waiting = !self.waiting.is_empty();
        if is_waiting {
            self.changed(now);
        }
        is_waiting
    }

    /// Goes on from what another process has written, with what happened here since.
    fn adopt(&mut self, register: &Register, read_at: Instant, now: Instant) {
        let written_at = read_at.checked_sub(register.age).unwrap_or(read_at);
        let Some(view) = &mut self.view else { return };
        (view.version, view.known_at) = (Some(register.version), now);
        let mut peers = Peers::default();
        let me = view.me;
        let known = Notes::write(now, |notes| _ = self.pace_state.share(notes));
        let origin = view.origin_of(&register.value, written_at);
        let is_sound = Notes::read_from(&register.value, origin, written_at, |notes| {
            notes.moment(&mut None);
            peers.share(&me, notes);
            self.pace_state.share(notes);
        });
        if !is_sound {
            // There is none, or it is spoilt: what is known here takes its place.
            peers = Peers::default();
            Notes::read(&known, now, |notes| _ = self.pace_state.share(notes));
        }
        view.me.since = peers.take(me.id).and_then(|mine| mine.since);
        view.known = view.known.filter(|_| view.me.since.is_some());
        view.peers = peers;
        if !is_sound {
            // What happened here since is in it.
            return;
        }
        let events = std::mem::take(&mut view.events);
        let load = self.load();
        // A hold that was seen here before another process released it does not come back.
        let (known, mut released) = (self.pace_state.releases, false);
        for event in &events {
            match event {
                Event::Sent(at) => {
                    let last = self.pace_state.last_sent;
                    self.pace_state.sent(load, *at);
                    self.pace_state.last_sent = last.max(Some(*at));
                }
                Event::Answered { signal, sent, at, releases } => {
                    let (mut call, held) = (Call::default(), self.pace_state.held_until);
                    self.pace_state.answered(load, Reply::new(signal, *sent, &mut call), &mut self.dice, *at);
                    if !released && releases.is_some_and(|releases| releases < known) {
                        self.pace_state.held_until = held;
                    }
                }
                Event::Held { until, releases } => {
                    if released || releases.is_none_or(|releases| releases >= known) {
                        self.pace_state.hold_until(*until);
                    }
                }
                Event::Released => {
                    self.pace_state.release();
                    released = true;
                }
            }
        }
        if let Some(view) = &mut self.view {
            view.events = events;
        }
    }
}
