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

use super::pace_state::Crowd;
use super::paced_queue::Line;
use super::peer::{Member, Members};
use super::peers::{Attempt, Away, Event, Exchange, Fleet, Mark};
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

impl Line {
    /// From now on it is shared, by a process of this `id` that is told at `address`.
    pub(super) fn share(&mut self, id: u64, address: u64, now: Instant) {
        self.fleet = Some(Box::new(Fleet::new(id, address, now)));
    }

    /// Whether it goes by itself: it is not shared, or the store is away.
    pub(super) fn is_alone(&self) -> bool {
        self.fleet.as_ref().is_none_or(|fleet| fleet.is_away())
    }

    /// Whether a request may leave here without the others: the line goes by itself, or nothing is scarce.
    pub(super) fn is_free(&self, now: Instant) -> bool {
        let Some(fleet) = &self.fleet else { return true };
        let Crowd { waiting, in_flight } = self.crowd();
        fleet.is_away()
            || fleet.version.is_some()
                && now.saturating_duration_since(fleet.known_at) < FRESH
                && self.course.is_open(ROOM * (in_flight + 2) + waiting, now)
    }

    /// Whether the others are yet to say whether the first who waits here may leave.
    pub(super) fn is_asking(&self) -> bool {
        let is_told = |fleet: &Fleet| fleet.attempt.is_none() && fleet.known == self.first_since();
        self.fleet.as_ref().is_some_and(|fleet| !fleet.is_away() && !is_told(fleet))
    }

    /// Takes a departure that is in the register.
    pub(super) fn take_turn(&mut self) -> bool {
        let Some(fleet) = &mut self.fleet else { return false };
        let is_there = fleet.granted > 0;
        fleet.granted -= usize::from(is_there);
        is_there
    }

    /// Nobody is there any more to take what was granted.
    pub(super) fn forfeit(&mut self, now: Instant) {
        if let Some(fleet) = &mut self.fleet
            && std::mem::take(&mut fleet.granted) > 0
        {
            fleet.touch(now);
        }
    }

    /// Something happened that the others are to know. `event` is told how many releases this process knows of.
    pub(super) fn happened(&mut self, now: Instant, event: impl FnOnce(Option<u32>) -> Event) {
        if let Some(fleet) = &mut self.fleet {
            if !fleet.is_away() {
                fleet.push(event(fleet.version.map(|_| self.course.releases)));
            }
            fleet.touch(now);
        }
    }

    /// Another number of requests is on the way.
    pub(super) fn changed(&mut self, now: Instant) {
        if let Some(fleet) = &mut self.fleet {
            fleet.touch(now);
        }
    }

    /// What happened here up to now; `None` if the line is not shared.
    pub(super) fn mark(&self) -> Option<Mark> {
        self.fleet.as_ref().map(|fleet| fleet.mark())
    }

    /// Whether all that happened before `mark` is in the register; an error if the store has been away since.
    pub(super) fn is_shared(&self, mark: Mark) -> Result<bool, StoreError> {
        self.fleet.as_ref().map_or(Ok(true), |fleet| fleet.is_shared(mark))
    }

    /// When the exchange under way began.
    pub(super) fn asked_at(&self) -> Option<Instant> {
        self.fleet.as_ref()?.attempt.as_ref().map(|attempt| attempt.asked)
    }

    /// When an exchange is due, if nothing else happens before.
    pub(super) fn exchange_at(&self) -> Option<Instant> {
        let fleet = self.fleet.as_ref().filter(|fleet| fleet.attempt.is_none())?;
        let rested = |at: Instant| fleet.rests_until.map_or(at, |until| at.max(until));
        // Whose turn it is does not rest, for it is but one at a time.
        let turn_at = self.turn_at(fleet).map(|at| if fleet.is_away() { rested(at) } else { at });
        self.told_at(fleet).map(rested).into_iter().chain(turn_at).min()
    }

    /// When what happened here is to be told.
    fn told_at(&self, fleet: &Fleet) -> Option<Instant> {
        let first = self.first_since();
        if fleet.known != first {
            // Another waits here than the others know.
            return Some(fleet.known_at);
        }
        let since = fleet.untold_since?;
        let is_calm = first.is_none()
            && !fleet.members.others.iter().any(Member::is_waiting)
            && !fleet.events.iter().any(Event::holds);
        let gathering = fleet.trip.saturating_mul(fleet.company()).clamp(GATHERING, LONGEST_GATHERING);
        Some(if is_calm { clock::after(since, gathering) } else { since })
    }

    /// Since when the first waits who waits here.
    fn first_since(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(_, place)| place.since)
    }

    /// When it may be the turn of the first who waits here.
    fn turn_at(&self, fleet: &Fleet) -> Option<Instant> {
        let first = self.first_since()?;
        let before = fleet.members.before(fleet.place(first), fleet.me.id).count();
        let slot = self.slot();
        if before == 0 {
            return Some(slot.unwrap_or(fleet.known_at));
        }
        let from = fleet.members.turn_from(slot).unwrap_or(fleet.known_at);
        // Each of those between goes an interval after the one before it.
        let between = u32::try_from(before - 1).unwrap_or(u32::MAX);
        let turns = self.course.interval(self.crowd()).saturating_mul(between);
        Some(clock::after(from, turns.saturating_add(fleet.grace(before))))
    }

    /// The exchange to be made now, if one is due. It ends in [`exchanged`](Self::exchanged).
    pub(super) fn exchange(&mut self, now: Instant) -> Option<Exchange> {
        if self.exchange_at().is_none_or(|at| at > now) {
            return None;
        }
        let slot = self.slot();
        let (members, grants) = self.let_leave(now);
        let waits = self.waiting.len() - grants;
        let next = self.waiting.values().nth(grants).map(|place| place.since);
        let in_flight = self.in_flight + grants;
        let crowded = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let fleet = self.fleet.as_mut()?;
        let since = next.map(|next| fleet.place(next));
        let me =
            Member { waits: crowded(waits), since, in_flight: crowded(in_flight), seen: now, ..fleet.me };
        let is_news = fleet.untold_since.is_some() || next != fleet.known || grants > 0;
        let seen = fleet.version.filter(|_| is_news && !fleet.is_away());
        let writes = seen.is_some();
        let mut attempt =
            Attempt { asked: now, events: fleet.events.len(), grants, me, known: next, members, writes };
        let mut exchange = Exchange { seen: 0, value: None, tell: Tell::Nobody };
        if let Some(seen) = seen {
            let first = attempt.members.settle(&me, slot, now);
            exchange.tell = match first {
                _ if fleet.events.iter().any(Event::holds) => Tell::All,
                Some(first) if first.id != me.id => Tell::One(first.address),
                _ => Tell::Nobody,
            };
            exchange.seen = seen;
            let mut written_at = Some(clock::after(now, fleet.trip / 2));
            let origin = *fleet.origin.get_or_insert(now);
            exchange.value = Some(Notes::write(origin, |notes| {
                notes.moment(&mut written_at);
                attempt.members.share(&me, notes);
                self.course.share(notes);
            }));
            attempt.members.take(me.id);
        }
        fleet.attempt = Some(attempt);
        Some(exchange)
    }

    /// Lets those leave whose turn it is, if the register is as it is known. Answers who is left of the others, and how many
    /// may leave.
    fn let_leave(&mut self, now: Instant) -> (Members, usize) {
        let Some(fleet) = &self.fleet else { return (Members::default(), 0) };
        let mut members = fleet.members.clone();
        let mut grants = 0;
        if fleet.version.is_none() || fleet.is_away() {
            return (members, grants);
        }
        let (id, crowd) = (fleet.me.id, self.crowd());
        for place in self.waiting.values().take(MOST_GRANTS) {
            let since = fleet.place(place.since);
            let crowd = Crowd { waiting: crowd.waiting - grants, in_flight: crowd.in_flight + grants };
            let slot = self.course.slot(crowd);
            let before = members.before(since, id).count();
            let from = members.turn_from(slot).unwrap_or(now);
            if slot.is_some_and(|slot| slot > now)
                || before > 0 && now < clock::after(from, fleet.grace(before))
            {
                break;
            }
            // Those who did not take their turn come back when they can.
            members.pass_over(since, id);
            self.course.sent(crowd, now);
            grants += 1;
        }
        (members, grants)
    }

    /// The answer of the store to an exchange that began at `asked`. Answers whether the store went away or came back.
    pub(super) fn exchanged(
        &mut self,
        answer: Result<Register, StoreError>,
        asked: Instant,
        now: Instant,
    ) -> Option<Away> {
        let fleet = self.fleet.as_mut()?;
        let attempt = fleet.attempt.take()?;
        let register = match answer {
            Ok(register) => register,
            Err(error) => {
                // It may have been done. Then the others wait for nothing, once.
                fleet.failures = fleet.failures.saturating_add(1);
                let span = jittered(REST * 2_u32.pow(fleet.failures.min(5)));
                fleet.rest(now, span);
                if fleet.failures > 1 {
                    return None;
                }
                fleet.outages += 1;
                fleet.last_error = Some(error.clone());
                // By the time it is back the others will be of no interest to anybody.
                fleet.events.retain(Event::is_release);
                let processes = fleet.company();
                fleet.together = Some((Notes::write(now, |notes| _ = self.course.share(notes)), now));
                self.course.divide(processes, &mut self.dice, now);
                return Some(Away::Since(error));
            }
        };
        fleet.failures = 0;
        let together = fleet.together.take();
        if let Some((together, left_at)) = &together {
            // What was shared before, if there is nothing later. But what holds holds all.
            let held = self.course.held_until.filter(|until| *until > now);
            let releases = fleet.version.map(|_| self.course.releases);
            Notes::read(together, *left_at, |notes| _ = self.course.share(notes));
            if fleet.events.iter().any(Event::is_release) {
                self.course.release();
            }
            if let Some(until) = held {
                self.course.hold_until(until);
                fleet.push(Event::Held { until, releases });
            }
        }
        fleet.rests_until = None;
        let trip = now.saturating_duration_since(asked);
        // The first may have had to connect, and any may have met a stall: that is soon forgotten.
        fleet.trip = if trip < fleet.trip { (fleet.trip + trip) / 2 } else { (fleet.trip * 7 + trip) / 8 };
        if register.changed {
            fleet.events.drain(..attempt.events.min(fleet.events.len()));
            (fleet.me, fleet.known, fleet.members) = (attempt.me, attempt.known, attempt.members);
            (fleet.version, fleet.known_at) = (Some(register.version), now);
            fleet.granted += attempt.grants;
            fleet.conflicts = 0;
            let is_untold =
                !fleet.events.is_empty() || self.in_flight + fleet.granted != fleet.me.in_flight as usize;
            fleet.untold_since = is_untold.then_some(now);
        } else {
            if attempt.writes && fleet.version != Some(register.version) {
                // What it says now is the latest, so the next try has the best chance; later it would be old.
                fleet.conflicts += 1;
                if fleet.conflicts % TRIES == 0 {
                    let span =
                        fleet.trip.saturating_mul(4_u32.pow((fleet.conflicts / TRIES).min(MOST_RESTS)));
                    // By then each of those who are known would have had its turn.
                    let all = fleet.trip.saturating_mul(fleet.company()).max(LONGEST_GATHERING);
                    fleet.rest(now, span.min(all).mul_f64(self.dice.roll()));
                }
            }
            let made_at = now.checked_sub(trip / 2).unwrap_or(now);
            self.take_over(&register, made_at, now);
        }
        if let Some(heard) = self.fleet.as_mut()?.heard.take() {
            self.hear(heard, now);
        }
        together.map(|_| Away::Over)
    }

    /// Another process has changed the register.
    pub(super) fn hear(&mut self, register: Register, now: Instant) {
        let Some(fleet) = &mut self.fleet else { return };
        let is_later = |than: Option<u64>| than.is_none_or(|than| register.version > than);
        if fleet.attempt.is_some() {
            if is_later(fleet.heard.as_ref().map(|heard| heard.version)) {
                fleet.heard = Some(register);
            }
        } else if fleet.version.is_some() && is_later(fleet.version) && !fleet.is_away() {
            self.take_over(&register, now, now);
        }
    }

    /// What others did may have been missed: those who wait ask. Answers whether any do.
    pub(super) fn missed(&mut self, now: Instant) -> bool {
        let is_waiting = !self.waiting.is_empty();
        if is_waiting {
            self.changed(now);
        }
        is_waiting
    }

    /// Goes on from what another process has written, with what happened here since.
    fn take_over(&mut self, register: &Register, read_at: Instant, now: Instant) {
        let written_at = read_at.checked_sub(register.age).unwrap_or(read_at);
        let Some(fleet) = &mut self.fleet else { return };
        (fleet.version, fleet.known_at) = (Some(register.version), now);
        let mut members = Members::default();
        let me = fleet.me;
        let known = Notes::write(now, |notes| _ = self.course.share(notes));
        let origin = fleet.origin_of(&register.value, written_at);
        let is_sound = Notes::read_from(&register.value, origin, written_at, |notes| {
            notes.moment(&mut None);
            members.share(&me, notes);
            self.course.share(notes);
        });
        if !is_sound {
            // There is none, or it is spoilt: what is known here takes its place.
            members = Members::default();
            Notes::read(&known, now, |notes| _ = self.course.share(notes));
        }
        fleet.me.since = members.take(me.id).and_then(|mine| mine.since);
        fleet.known = fleet.known.filter(|_| fleet.me.since.is_some());
        fleet.members = members;
        if !is_sound {
            // What happened here since is in it.
            return;
        }
        let events = std::mem::take(&mut fleet.events);
        let crowd = self.crowd();
        // A hold that was seen here before another process released it does not come back.
        let (known, mut released) = (self.course.releases, false);
        for event in &events {
            match event {
                Event::Sent(at) => {
                    let last = self.course.last_sent;
                    self.course.sent(crowd, *at);
                    self.course.last_sent = last.max(Some(*at));
                }
                Event::Answered { signal, sent, at, releases } => {
                    let (mut call, held) = (Call::default(), self.course.held_until);
                    self.course.answered(crowd, Reply::new(signal, *sent, &mut call), &mut self.dice, *at);
                    if !released && releases.is_some_and(|releases| releases < known) {
                        self.course.held_until = held;
                    }
                }
                Event::Held { until, releases } => {
                    if released || releases.is_none_or(|releases| releases >= known) {
                        self.course.hold_until(*until);
                    }
                }
                Event::Released => {
                    self.course.release();
                    released = true;
                }
            }
        }
        if let Some(fleet) = &mut self.fleet {
            fleet.events = events;
        }
    }
}
