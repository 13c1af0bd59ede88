//! Asking the store for those who wait, and what comes of its answer.

use std::time::{Duration, Instant};

use super::hold::Passage;
use super::refused::Refused;
use super::{CallNumber, Desk, Errand, Line};
use crate::clock;
use crate::error::StoreError;
use crate::limit::{Terms, Unused};
use crate::limiter::queue::{Answered, Gathering, HandedOut, Number};
use crate::limiter::reservation::{Settled, Slot};
use crate::limiter::session::Remembered;
use crate::quota::LIFE;
use crate::store::{Answer, Ask, Lease, Need, Refusal, Segment, trust};
use crate::wakers::Wakers;

/// The longest life, for windows that are not longer than twenty times that.
const LONGEST_LIFE: Duration = Duration::from_millis(20);

/// The most permits that a store is asked for in one call: one with a server is not to keep it long.
const MOST_ASKED: usize = 500;

/// A store that answers at once is asked so often in a row: once for each need that it refuses, and once more.
const MOST_ROUNDS: usize = 64;

/// A sweep that is so late will not come.
const LOST_SWEEP: Duration = Duration::from_secs(1);

/// How late a task may wake.
const WAKE_UP: Duration = Duration::from_millis(5);

impl Line {
    pub(super) fn ask<'a>(
        &mut self,
        desk: &'a Desk<'_>,
        needs: &'a [Need],
        prefetch: u32,
        latest: Instant,
        returns: &'a [Unused],
    ) -> Ask<'a> {
        let memory = self.memory.as_mut().map(|memory| {
            memory.forget(returns);
            memory.tell(desk.now)
        });
        Ask {
            key: desk.key,
            terms: desk.terms,
            needs,
            prefetch,
            latest: latest.saturating_duration_since(desk.now),
            life: self.life,
            prefetch_life: self.stock_life(desk),
            returns,
            charges: &[],
            memory: memory.unwrap_or_default(),
            held: self.held_for_store(desk.now),
            left: self.left(desk.terms, desk.max_hold, desk.now),
        }
    }

    /// Keeps what a lease says besides its segments. Answers between which moments its time was.
    pub(super) fn remember(
        &mut self,
        desk: &Desk<'_>,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> (Instant, Instant) {
        let mut bounds = lease.own.map_or((sent, now), |own| (own.at, own.at));
        if self.alone != lease.own.is_some() {
            // What the other granted is counted there. Who waited keeps its place.
            self.alone = lease.own.is_some();
            self.stock.clear();
            if let Some(queue) = &mut self.queue {
                queue.void();
            }
        }
        if lease.is_word_of_store() {
            (self.shared, self.free) = (lease.shared, if lease.own.is_none() { lease.free } else { 0 });
        }
        if !lease.is_word_of_store() {
            if let Some(memory) = &mut self.memory {
                memory.count(lease, desk.terms.quota().longest_memory(), now);
            }
        } else if self.later {
            let memory = self.memory.get_or_insert_with(|| Box::new(Remembered::new(lease, sent, now)));
            let lost = memory.incarnation() != lease.incarnation;
            if lost {
                // The store does not know of what it granted before.
                self.stock.clear();
                if let Some(queue) = &mut self.queue {
                    queue.void();
                }
            }
            memory.update(lease, desk.terms.quota().longest_memory(), sent, now);
            if lease.own.is_none() {
                bounds = memory.bounds();
            }
            if lost {
                self.hold_forgotten(now);
            }
        }
        if let Some(segment) = &lease.prefetched {
            self.stock.fill(&slot(lease, segment, (bounds.0, bounds.0)));
        }
        bounds
    }

    /// What is fetched ahead may live for a two-hundredth of the window.
    pub(super) fn stock_life(&self, desk: &Desk<'_>) -> Duration {
        self.life.max(desk.terms.quota().shortest_window() / 200)
    }

    /// Brings the line up to date: slots that are due go out, slots nobody needs go back, the store is asked for those
    /// who have none. `me` is being polled and needs no waking.
    pub(super) fn step(
        &mut self,
        desk: &Desk<'_>,
        me: Option<Number>,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        // An answer at once may bring slots that are due at once, which a second round hands out: what a store grants is
        // alive. And it may refuse one need and decide nothing of those after it.
        let (mut now, mut errand) = (desk.now, None);
        for _ in 0..MOST_ROUNDS {
            let (trusted, held) = (self.is_trusted(desk, now), self.held(now));
            let passage = self.passage(desk.max_hold, now);
            let queue = self.queue.as_mut()?;
            queue.take_from(&mut self.stock, now);
            let most = match passage {
                _ if !trusted => 0,
                Passage::Open => usize::MAX,
                Passage::Probe => 1,
                Passage::Probing(_) => 0,
            };
            let HandedOut { count, died } = queue.hand_out(most, now, me, wakers);
            let queue = match passage {
                Passage::Probe if count > 0 => {
                    self.probe_leaves(now);
                    continue;
                }
                _ => self.queue.as_mut()?,
            };
            let doubtful = !trusted && queue.is_due(now);
            queue.trim();
            if queue.is_calling(now) {
                break;
            }
            queue.give_up_call();
            let is_open = held.is_none() && passage == Passage::Open;
            let doubtful = doubtful || (is_open && self.confirms_next_slot(desk, now));
            let queue = self.queue.as_mut()?;
            let needs = queue.needs(match passage {
                Passage::Open if !self.later => usize::MAX,
                Passage::Open => MOST_ASKED,
                Passage::Probe | Passage::Probing(_) => 1,
            });
            if needs.is_empty() && !doubtful {
                break;
            }
            let probing = match passage {
                Passage::Probing(left) => Some(left),
                Passage::Open | Passage::Probe => None,
            };
            if let Some(left) = held.or(probing) {
                // What is booked when the hold ends, or the probe has passed, is booked by what is known then.
                if queue.gathering != Gathering::UnderWay {
                    queue.gather_for(left, now);
                    errand = Some(Errand::Gather(left));
                }
                break;
            }
            if self.later && !doubtful {
                match queue.gathering {
                    Gathering::NotYet => return Some(Errand::Gather(queue.gather(now))),
                    Gathering::UnderWay if !queue.gathers_too_long(now) => break,
                    Gathering::UnderWay | Gathering::Done => {}
                }
            }
            // Where slots lie ahead, permits are scarce.
            let scarce = queue.last_booked().is_some();
            let mut returns = std::mem::take(&mut queue.returns);
            let latest = queue.latest().unwrap_or(desk.now);
            let ahead = self.later && !scarce && !needs.is_empty() && passage == Passage::Open;
            let prefetch =
                if ahead { self.stock.order(desk.terms, self.stock_life(desk), desk.now) } else { 0 };
            returns.extend(self.stock.clear());
            if died {
                self.lengthen_life(desk);
            }
            match desk.store.lease(self.ask(desk, &needs, prefetch, latest, &returns)) {
                Answer::Now(answer) => {
                    // The store asked the time after we did.
                    now = clock::now();
                    if let Some(queue) = &mut self.queue {
                        queue.asking(&needs, desk.now, false);
                    }
                    self.answered(desk, answer, now, wakers);
                }
                Answer::Later(call) => {
                    self.later = true;
                    let queue = self.queue.get_or_insert_default();
                    return Some(Errand::Call(queue.asking(&needs, desk.now, desk.is_watched()), call));
                }
            }
        }
        let held = self.held(now).is_some() || self.passage(desk.max_hold, now) != Passage::Open;
        let queue = self.queue.as_mut()?;
        let next_call_is_near = queue.is_calling(now) || (queue.gathering == Gathering::UnderWay && !held);
        if !queue.returns.is_empty() && !next_call_is_near {
            desk.store.give_back(desk.key, desk.terms, &std::mem::take(&mut queue.returns));
        }
        errand
    }

    /// A call for nobody: it tells the store what is known here, and hears what is known there. Not while another is under
    /// way.
    pub(in crate::limiter) fn inquire(&mut self, desk: &Desk<'_>, wakers: &mut Wakers) -> Option<Errand> {
        if self.queue.as_ref().is_some_and(|queue| queue.is_calling(desk.now)) {
            return None;
        }
        let returns = self.queue.as_mut().map(|queue| std::mem::take(&mut queue.returns)).unwrap_or_default();
        match desk.store.lease(self.ask(desk, &[], 0, desk.now, &returns)) {
            Answer::Now(answer) => {
                self.answered(desk, answer, clock::now(), wakers);
                None
            }
            Answer::Later(call) => {
                self.later = true;
                let queue = self.queue.get_or_insert_default();
                queue.give_up_call();
                Some(Errand::Call(queue.asking(&[], desk.now, desk.is_watched()), call))
            }
        }
    }

    /// The call sent at `desk.now` has been answered.
    fn answered(
        &mut self,
        desk: &Desk<'_>,
        answer: Result<Lease, StoreError>,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        let sent = desk.now;
        let bounds = match &answer {
            Ok(lease) => self.remember(desk, lease, sent, now),
            Err(_) => (sent, now),
        };
        if let Ok(lease) = answer.as_ref()
            && lease.is_word_of_store()
        {
            self.hold_answered(lease.held, sent, bounds);
        }
        let (trusted, held) = (self.is_trusted(desk, now), self.held(now));
        // After a slow trip little is left of a permit's life: who wakes a little late would lose its slot. The next ones
        // live longer.
        let least =
            if self.life < self.longest_life(desk.terms) { desk.terms.life() / 2 } else { Duration::ZERO };
        let Some(queue) = &mut self.queue else { return };
        match answer {
            Ok(Lease { learning: Some(wait), .. }) => queue.pause(wait, now, wakers),
            Ok(lease) => {
                let slots = lease.segments.iter().map(|segment| slot(&lease, segment, bounds));
                let end = Settled::Refused(lease.refused.unwrap_or(Refusal::NEVER));
                let Answered { died, refused } = queue.answered(slots, Some(&end), least, now, wakers);
                // A request that would pass uncounted while the store is away has to ask.
                if self.later && lease.own.is_none() && !desk.fails_open {
                    let before = self.refused.as_deref().copied();
                    self.refused = Refused::after(before, refused, lease.refused, now).map(Box::new);
                }
                let uncertain = bounds.1.saturating_duration_since(bounds.0);
                let life = desk.terms.life();
                let trips = uncertain.saturating_mul(2).saturating_add(WAKE_UP);
                let life = if self.later { life.max(trips) } else { life };
                let lately = if died { self.life * 2 } else { self.life - self.life / 8 };
                self.life = life.max(lately).min(self.longest_life(desk.terms));
            }
            Err(error) => match held.filter(|_| desk.fails_open) {
                // Nobody passes uncounted while the key is held.
                Some(left) => queue.pause(left, now, wakers),
                None => {
                    if !trusted && queue.is_due(now) {
                        // Nobody knows whether the store still knows of them.
                        queue.void();
                    }
                    queue.answered([], Some(&Settled::Failed(error)), least, now, wakers);
                }
            },
        }
        self.obey(now, wakers);
    }

    /// The longest that a permit lives, if those before died before they were used.
    pub(super) fn longest_life(&self, terms: &Terms) -> Duration {
        if !self.later && terms.life() < LIFE {
            // It is as short as the rate that may be lost allows.
            return terms.life();
        }
        LONGEST_LIFE.max(terms.quota().shortest_window() / 20).max(terms.life())
    }

    /// Returns whether the store is to be asked now whether it still knows of the next slot, so that the answer is here when
    /// the slot is due. If that is later, the waiter of the slot wakes then.
    fn confirms_next_slot(&mut self, desk: &Desk<'_>, now: Instant) -> bool {
        let Some(slot) = self.queue.as_ref().and_then(|queue| queue.next_slot()) else { return false };
        if self.is_trusted(desk, slot) {
            return false;
        }
        let lead = trust(desk.terms.quota().longest_memory()) / 4;
        let at = slot.checked_sub(lead).unwrap_or(now);
        let Some(queue) = self.queue.as_mut().filter(|queue| queue.confirmed != Some(slot)) else {
            return false;
        };
        if at > now {
            queue.wake_before(slot, at);
            return false;
        }
        queue.confirmed = Some(slot);
        true
    }

    fn is_trusted(&self, desk: &Desk<'_>, now: Instant) -> bool {
        let trusted =
            |memory: &Remembered| memory.is_trusted(trust(desk.terms.quota().longest_memory()), now);
        self.alone || self.memory.as_deref().is_none_or(trusted)
    }

    /// The call sent at `sent`, which answered later, has been answered. If it counted as lost, what it brings goes back.
    pub(in crate::limiter) fn call_answered(
        &mut self,
        desk: &Desk<'_>,
        number: CallNumber,
        answer: Result<Lease, StoreError>,
        sent: Instant,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        if !self.queue.as_ref().is_some_and(|queue| queue.is_call(number)) {
            if let Ok(lease) = answer {
                desk.store.give_back(desk.key, desk.terms, &lease.unused());
            }
            return None;
        }
        // A permit's life counts from when the call was sent: of one that took longer, what was due at once is dead.
        let took = desk.now.saturating_duration_since(sent);
        let longest = self.longest_life(desk.terms);
        let dead = |segment: &Segment| segment.wait.saturating_add(segment.life) <= took;
        let too_slow = took >= self.life
            && self.life >= longest
            && answer.as_ref().is_ok_and(|lease| lease.own.is_none() && lease.segments.iter().any(dead));
        let answer = match answer {
            Ok(lease) if too_slow => {
                desk.store.give_back(desk.key, desk.terms, &lease.unused());
                Err(StoreError::TooSlow { took, longest })
            }
            answer => answer,
        };
        let failed = answer.is_err();
        self.answered(&Desk { now: sent, ..*desk }, answer, desk.now, wakers);
        if self.tightens {
            return self.tighten(desk, wakers);
        }
        // Where the store is told again, the step hands out only; where it is asked, it hears the upstream's word as well.
        let told = self.retell_hold(desk, wakers);
        let asked = self.step(desk, None, wakers);
        let errand = told.or(asked).or_else(|| self.pass_on(desk, wakers));
        self.close(desk);
        if failed { errand.or_else(|| self.asks_again(desk.now)) } else { errand }
    }

    /// Those who were to join the next call have joined, or who waited for that is gone with its runtime, and nobody has `joined`.
    pub(in crate::limiter) fn gathered(
        &mut self,
        desk: &Desk<'_>,
        joined: bool,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        let held = self.held(desk.now).is_some();
        let queue = self.queue.as_mut()?;
        if held && !joined {
            // The others have runtimes of their own.
            queue.gathering = Gathering::NotYet;
            queue.wake_all(wakers);
            return None;
        }
        queue.gathering = Gathering::Done;
        let errand = self.step(desk, None, wakers);
        if let Some(queue) = self.queue.as_mut().filter(|queue| queue.gathering == Gathering::Done) {
            queue.gathering = Gathering::NotYet;
        }
        self.close(desk);
        errand
    }

    /// When to [`sweep`](Line::sweep), should nobody be about to.
    pub(in crate::limiter) fn start_sweep(&mut self, now: Instant) -> Option<Instant> {
        // One that is late was lost with its runtime.
        let nobody = self.sweep_at.is_none_or(|at| clock::after(at, LOST_SWEEP) < now);
        let until = self.stock.until();
        (nobody && self.stock.units(now) > 0).then(|| *self.sweep_at.insert(until))
    }

    /// Gives back what was left over at hand when it died: an idle process takes nothing from the others. Answers when to
    /// look again.
    pub(in crate::limiter) fn sweep(&mut self, desk: &Desk<'_>) -> Option<Instant> {
        self.sweep_at = Some(self.stock.until()).filter(|until| *until > desk.now);
        if self.sweep_at.is_none()
            && let Some(left) = self.clear()
        {
            desk.store.give_back(desk.key, desk.terms, &[left]);
        }
        self.sweep_at
    }

    /// It makes room for others: what was left over goes back.
    pub(in crate::limiter) fn forgotten(&mut self, desk: &Desk<'_>) {
        if let Some(left) = self.stock.clear() {
            desk.store.give_back(desk.key, desk.terms, &[left]);
        }
    }

    /// Takes out what lies at hand, for the store.
    pub(in crate::limiter) fn clear(&mut self) -> Option<Unused> {
        let unused = self.stock.clear();
        if let Some(memory) = &mut self.memory {
            memory.forget(unused.as_slice());
        }
        unused
    }
}

/// When this process may use a segment of a lease, whose time was between two moments: never before its slot, and never
/// after its deadline. A microsecond is for the store's time being cut to whole ones.
pub(super) fn slot(lease: &Lease, segment: &Segment, (earliest, latest): (Instant, Instant)) -> Slot {
    let lasts = segment.wait.saturating_add(segment.life).saturating_sub(Duration::from_micros(1));
    Slot {
        at: clock::after(latest, segment.wait),
        until: clock::after(earliest, lasts),
        cost: segment.cost,
        count: segment.count,
        slot: segment.slot,
        stamp: segment.stamp,
        incarnation: lease.granted_in(),
    }
}
