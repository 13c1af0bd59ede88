//! The calls to the stores of a set: the search for a joint slot (see the [module](super)), and its confirmation when it is
//! due.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::smallvec;

use super::give_back;
use super::set::{JointSet, WantedSlot};
use crate::clock;
use crate::error::StoreError;
use crate::join::{join_all, join_each};
use crate::limiter::division;
use crate::limiter::key_state::{JointAnswer, JointAsk, ask_to_confirm, confirmed, near_booking};
use crate::limiter::part::{Costs, Part, PerPart, Slots};
use crate::limiter::queue::Number;
use crate::limiter::reservation::{NoSlot, Reservation, Stopped};
use crate::limiter::store_call::StoreCall;
use crate::store::{JointCall, Lease, StoreReply};
use crate::tuning::ANSWER;
use crate::wait_queue::WaitBound;

/// After so many rounds, the search rests for a while. Then other processes that search too can come
/// to an end.
const MOST_ROUNDS: u32 = 32;
const REST: Duration = Duration::from_millis(10);

/// Books for the requests of `set` that have no joint slot.
pub(super) async fn book(set: Arc<JointSet>) {
    while let Some(mut wanted) = set.next_wanted() {
        let outcome = match set.settles() {
            true => book_near(&set, &mut wanted).await,
            false => SlotSearch::new(&set, &mut wanted).run(wanted.bound).await,
        };
        set.booked(&wanted, outcome);
    }
}

/// Searches for a joint slot that is near, again and again: see [`near_booking`].
async fn book_near(set: &JointSet, wanted: &mut WantedSlot) -> Result<Slots, Stopped> {
    let since = clock::now();
    loop {
        let now = clock::now();
        let is_remote = set.parts.iter().any(Part::is_remote);
        let is_far_allowed = |part: &Part| near_booking::is_far_allowed(&part.quota(), since, now);
        let bound = match is_remote && set.parts.iter().all(is_far_allowed) {
            true => wanted.bound,
            false => near_booking::near(wanted.bound, now),
        };
        let outcome = SlotSearch::new(set, wanted).run(bound).await;
        let Err(Stopped {
            part,
            no_slot: NoSlot::TooLate(refusal),
        }) = outcome
        else {
            return outcome;
        };
        let pause = near_booking::pause(&set.parts[part].quota(), refusal);
        let now = clock::now();
        set.refused_near(part, refusal, now);
        let again = clock::after(now, pause);
        if again > wanted.bound.latest || refusal.wait.is_none() {
            return outcome;
        }
        set.rest(again).await;
        if !set.is_waiting(wanted.number, &wanted.costs) {
            return outcome;
        }
    }
}

/// A search for a joint slot. If it is dropped, the slots found so far are given back.
struct SlotSearch<'a> {
    set: &'a JointSet,
    parts: &'a [Part],
    /// The request to book for.
    number: Number,
    costs: Costs,
    /// When the search began. After a store has decided nothing for some time, it begins anew.
    began: Instant,
    slots: PerPart<Option<Reservation>>,
    /// How often the limits of each part had changed when its slot was booked.
    changes: PerPart<u32>,
    /// Slots of no use. Each goes back with the first call of its part, so that the store has its
    /// units again when it decides.
    given_up: PerPart<Option<Reservation>>,
    /// How much later than in the time of its store the last slot of a part could be used. The next
    /// slot is asked for that much earlier. Otherwise each part would move the joint slot.
    uncertain: PerPart<Duration>,
    /// The parts that need no slot.
    passes: PerPart<bool>,
    uncounted: Option<(usize, StoreError)>,
    /// When the request can leave at the earliest.
    earliest: Option<Instant>,
    /// The part that set `earliest`.
    last: usize,
}

impl Drop for SlotSearch<'_> {
    fn drop(&mut self) {
        give_back(self.parts, std::mem::take(&mut self.slots));
        give_back(self.parts, std::mem::take(&mut self.given_up));
    }
}

impl<'a> SlotSearch<'a> {
    fn new(set: &'a JointSet, wanted: &mut WantedSlot) -> Self {
        let slots: PerPart<Option<Reservation>> = smallvec![None; set.parts.len()];
        // It may have changed since the last search for this request.
        wanted.held_until = set.held_until();
        let given_up = match wanted.given_up.take() {
            Some(given_up) => given_up.slots.into_iter().collect(),
            None => slots.clone(),
        };
        for (Part { core, key, .. }, slot) in set.parts.iter().zip(&given_up) {
            if slot.is_some() {
                // A refusal while it was booked says nothing any more.
                core.states.find(*key, |state| state.store.forget_refusal());
            }
        }
        let needed = set.parts.iter().zip(&wanted.costs);
        let passes = needed.map(|(part, cost)| *cost == 0 || !part.core.has_rates());
        SlotSearch {
            set,
            parts: &set.parts,
            number: wanted.number,
            costs: wanted.costs.clone(),
            began: clock::now(),
            slots,
            changes: set.parts.iter().map(Part::changes).collect(),
            given_up,
            uncertain: smallvec![Duration::ZERO; set.parts.len()],
            passes: passes.collect(),
            uncounted: None,
            earliest: wanted.held_until,
            last: wanted.scarcest,
        }
    }

    /// Asks the parts until their slots have a moment in common.
    async fn run(mut self, mut bound: WaitBound) -> Result<Slots, Stopped> {
        if let Some(stopped) = self.known_refusal(bound) {
            return Err(stopped);
        }
        for (part, Part { core, key, .. }) in self.parts.iter().enumerate() {
            if let Err(wait) = division::wait_for_statements(core, *key, bound.latest).await {
                return Err(NoSlot::for_span(wait).for_part(part));
            }
        }
        let mut rounds = 0;
        loop {
            let parts = self.next();
            let Some(&first) = parts.first() else {
                return Ok(self.found());
            };
            if rounds == MOST_ROUNDS {
                clock::sleep_until(clock::after(clock::now(), REST)).await;
                rounds = 0;
            }
            if rounds > 0 && !self.set.is_waiting(self.number, &self.costs) {
                // The request has left, so nobody reads this refusal.
                return Err(NoSlot::NEVER.for_part(first));
            }
            rounds += 1;
            if self.has_expired() && !self.aims_later(&mut bound) {
                return Err(NoSlot::NEVER.for_part(first));
            }
            for (part, asked) in self.ask(&parts, bound).await {
                match asked {
                    JointAnswer::Granted { .. } | JointAnswer::Again => {}
                    JointAnswer::Paused(wait) => self.pause(part, wait, bound).await?,
                    JointAnswer::No(NoSlot::Failed(error))
                        if self.parts[part].core.fails_open_on(&error) =>
                    {
                        let Part { core, key, .. } = &self.parts[part];
                        // No request passes uncounted while its key is on hold.
                        match core.held(*key, clock::now()) {
                            Some(left) => self.pause(part, left, bound).await?,
                            None => {
                                self.passes[part] = true;
                                self.uncounted = Some((part, error));
                            }
                        }
                    }
                    JointAnswer::No(no_slot) => return Err(no_slot.for_part(part)),
                }
            }
        }
    }

    /// Waits for `span`, in which a part lets no request pass, if the request can wait for so long. Meanwhile it takes nothing
    /// of its other keys. Then this part is asked first.
    async fn pause(
        &mut self,
        part: usize,
        span: Duration,
        bound: WaitBound,
    ) -> Result<(), Stopped> {
        let until = clock::after(clock::now(), span);
        if until > bound.latest {
            return Err(NoSlot::for_span(span).for_part(part));
        }
        give_back(self.parts, std::mem::take(&mut self.slots));
        let given_up = self.given_up.iter_mut().map(Option::take);
        give_back(self.parts, given_up);
        self.slots = smallvec![None; self.parts.len()];
        self.last = part;
        clock::sleep_until(until).await;
        self.began = clock::now();
        Ok(())
    }

    /// Returns a refusal for which no store need be called, if there is one.
    fn known_refusal(&self, bound: WaitBound) -> Option<Stopped> {
        let now = clock::now();
        for (part, Part { core, key, .. }) in self.parts.iter().enumerate() {
            if self.passes[part] {
                continue;
            }
            let cost = self.costs[part];
            let known = core
                .states
                .read(*key, |state| state.store.repeated_refusal(cost, bound, now));
            if let Some(refusal) = known {
                return Some(NoSlot::TooLate(refusal).for_part(part));
            }
        }
        None
    }

    /// Returns the parts that are asked next: those without a slot, or whose slot is too early. All
    /// are of one store.
    fn next(&self) -> PerPart<usize> {
        let from = self.earliest.unwrap_or_else(clock::now).max(clock::now());
        let mut lacking: PerPart<usize> = (0..self.parts.len()).collect();
        lacking.retain(|part| self.lacks_slot(*part, from));
        // The part that is expected to allow the request last comes first: then the others are asked once.
        let first = lacking
            .iter()
            .rev()
            .copied()
            .max_by_key(|part| (self.expected_after(*part, from), *part == self.last));
        let Some(first) = first else {
            return lacking;
        };
        lacking.retain(|part| *part != first && self.parts[*part].has_store_of(&self.parts[first]));
        lacking.insert(0, first);
        lacking
    }

    /// Returns whether a part needs a slot that can be used from `from` on, and has none.
    fn lacks_slot(&self, part: usize, from: Instant) -> bool {
        !self.passes[part] && self.slots[part].is_none_or(|slot| !is_of_use(&slot, from))
    }

    /// Returns the slot that a part is expected to have, if it is later than `from`.
    fn expected_after(&self, part: usize, from: Instant) -> Option<Instant> {
        let Part { core, key, .. } = &self.parts[part];
        let slot = core.states.read(*key, |state| state.store.last_joint());
        slot.filter(|slot| *slot > from)
    }

    /// Returns whether a slot expired while other parts were asked. Slots before a moment ahead do
    /// not matter.
    fn has_expired(&self) -> bool {
        let now = clock::now();
        let aims_ahead = self.earliest.is_some_and(|earliest| earliest > now);
        let mut slots = self.slots.iter().flatten();
        !aims_ahead && slots.any(|slot| !is_of_use(slot, now))
    }

    /// Moves the moment that the search looks for further ahead, because a slot expired while other
    /// parts were asked. From then on the search may take as long as it has taken so far. Returns
    /// whether the request can wait until then. Even if it waits for no slot, it waits for its stores,
    /// up to [`ANSWER`].
    fn aims_later(&mut self, bound: &mut WaitBound) -> bool {
        let now = clock::now();
        let took = now.saturating_duration_since(self.began);
        // The slots of the parts differ a little.
        let latest = clock::after(now, 2 * took).min(clock::after(self.began, ANSWER));
        bound.extend_to(latest);
        let aim = clock::after(now, took).min(bound.latest);
        self.earliest = self.earliest.max(Some(aim));
        now < bound.latest
    }

    /// Asks the first of `parts`, and the others with it, unless they had better wait for its answer.
    /// Takes in the granted slots, and returns what became of each part.
    async fn ask(&mut self, parts: &[usize], bound: WaitBound) -> PerPart<(usize, JointAnswer)> {
        let mut outcomes = PerPart::new();
        let mut last = None;
        let all = self.parts;
        let mut sent = self.send(parts, bound);
        let mut take_in = |(part, asked): (usize, JointAnswer)| {
            if self.take_in(part, &asked) {
                last.get_or_insert(part);
            }
            outcomes.push((part, asked));
        };
        // Each answer is taken in when it comes. If the search is dropped before the others have come, it
        // gives back the slots that it has taken in.
        match sent.len() {
            1 => take_in(answer(all, sent.remove(0)).await),
            _ => join_each(sent.into_iter().map(|sent| answer(all, sent)), take_in).await,
        }
        self.last = last.unwrap_or(self.last);
        outcomes
    }

    /// Takes in what became of `part`. Returns whether its store has said that it allows the request last.
    fn take_in(&mut self, part: usize, asked: &JointAnswer) -> bool {
        let &JointAnswer::Granted {
            slot,
            uncertain,
            is_last,
            changes,
        } = asked
        else {
            return false;
        };
        self.uncertain[part] = uncertain;
        self.changes[part] = changes;
        if Some(slot.at) > self.earliest && slot.at > clock::now() {
            self.earliest = Some(slot.at);
            self.last = part;
        }
        self.slots[part] = Some(slot);
        is_last
    }

    /// Calls the store of `parts`. Returns the calls, or the outcomes that are known without a call.
    ///
    /// If the store decides about several keys in one step, all parts are in one call. Otherwise they
    /// are asked at the same time: one after the other takes so long that the first slots expire. But
    /// if the first part is expected to move the moment, the others are asked for that moment later.
    /// So are those of a store that replies at once.
    fn send(
        &mut self,
        parts: &[usize],
        bound: WaitBound,
    ) -> PerPart<Result<Call, (usize, JointAnswer)>> {
        let joint = JointCall::default();
        let from = self.earliest.unwrap_or_else(clock::now);
        let waits_for_first = parts
            .first()
            .is_some_and(|first| self.expected_after(*first, from).is_some());
        let mut sent = PerPart::new();
        for &part in parts {
            let call = self.send_one(part, bound, &joint);
            let goes_on = call.as_ref().is_ok_and(|call| {
                let is_pending = matches!(call.reply, StoreReply::Pending(_));
                joint.is_used() || is_pending && !waits_for_first
            });
            sent.push(call.map_err(|known| (part, known)));
            if !goes_on {
                break;
            }
        }
        joint.send();
        sent
    }

    fn send_one(
        &mut self,
        part: usize,
        bound: WaitBound,
        joint: &JointCall,
    ) -> Result<Call, JointAnswer> {
        let &Part { ref core, key, .. } = &self.parts[part];
        let now = clock::now();
        let earliest = self.earliest.unwrap_or(now);
        let mut replaces = self.slots[part]
            .take()
            .or_else(|| self.given_up[part].take());
        if let Some(lent) = replaces.take_if(|slot| slot.lender.is_some()) {
            // It goes back to the part that has lent it.
            core.give_back(key, lent);
        }
        let ask = JointAsk {
            cost: self.costs[part],
            earliest: clock::before(earliest, self.uncertain[part]),
            bound,
            replaces,
            changes: self.parts[part].changes(),
        };
        match core.with_new_state(key, now, |state, ctx| ask.send(state, ctx, joint)) {
            Ok(sent) => {
                let (call, reply) = sent?;
                let open = StoreCall::new(core, key, call);
                Ok(Call {
                    part,
                    ask,
                    open,
                    reply,
                })
            }
            Err(_) => {
                if let Some(slot) = ask.replaces {
                    core.give_back(key, slot);
                }
                Err(JointAnswer::No(NoSlot::Failed(core.full())))
            }
        }
    }

    /// Returns the joint slot.
    fn found(mut self) -> Slots {
        let slots = std::mem::take(&mut self.slots);
        let now = clock::now();
        let all = || slots.iter().flatten();
        let at = all().map(|slot| slot.at).max().unwrap_or(now);
        let at = at.max(self.earliest.unwrap_or(now));
        Slots {
            at,
            is_at_once: at <= now,
            until: all().map(|slot| slot.until).min(),
            last: self.last,
            uncounted: self.uncounted.take(),
            costs: std::mem::take(&mut self.costs),
            changes: std::mem::take(&mut self.changes),
            slots: slots.into_iter().collect(),
            probe: None,
        }
    }
}

/// A call to the store for one part, which is sent.
struct Call {
    part: usize,
    ask: JointAsk,
    open: StoreCall,
    reply: StoreReply<Lease>,
}

/// Returns the answer to a call, or the outcome that was known without it.
async fn answer(parts: &[Part], sent: Result<Call, (usize, JointAnswer)>) -> (usize, JointAnswer) {
    match sent {
        Ok(call) => answered(parts, call).await,
        Err(known) => known,
    }
}

/// Waits for the answer to a call, and takes it in.
async fn answered(parts: &[Part], call: Call) -> (usize, JointAnswer) {
    let Call {
        part,
        ask,
        open,
        reply,
    } = call;
    let answer = reply.arrives().await;
    let asked = open.answered(answer, |state, ctx, call, answer| {
        ask.answered(state, ctx, call, answer)
    });
    (
        part,
        asked.unwrap_or_else(|| JointAnswer::No(NoSlot::Failed(parts[part].core.full()))),
    )
}

/// Returns whether a slot can be used from `from` on, for at least half of its life.
fn is_of_use(slot: &Reservation, from: Instant) -> bool {
    let life = slot.until.saturating_duration_since(slot.at);
    clock::after(from, life / 2) <= slot.until
}

/// Returns the parts whose stores have to confirm their slots before `slot` may be used.
pub(in crate::limiter) fn doubtful(parts: &[Part], slot: &Slots, now: Instant) -> PerPart<usize> {
    let mut doubtful = PerPart::new();
    for (index, Part { core, key, .. }) in parts.iter().enumerate() {
        let Some(of_part) = &slot.slots[index] else {
            continue;
        };
        // No visit, which could wake tasks: the set is locked.
        let is_confirmed = core.states.read(*key, |state| {
            let own = core.own_spec(state, now);
            let spec = own.as_ref().unwrap_or(&core.settings.spec);
            state.has_confirmed(spec, of_part, slot.changes[index], now)
        });
        if !is_confirmed {
            doubtful.push(index);
        }
    }
    doubtful
}

/// Asks the stores of the parts `doubtful` to confirm what they have granted.
///
/// If a store has not replied for some time, it may have lost its state, and the slots with it. Then it has to confirm that
/// it still has them. Slots that were booked before the quota of a key changed are never confirmed, so that their requests
/// book anew. The set waits for the reply, and no request behind leaves before the first one: see [`JointSet`].
pub(super) async fn confirm(set: Arc<JointSet>, doubtful: PerPart<usize>) {
    let calls = doubtful.iter().map(|part| confirm_part(&set.parts[*part]));
    join_all(calls).await;
    set.confirmed();
}

async fn confirm_part(Part { core, key, .. }: &Part) {
    let asked = core.with_state(*key, clock::now(), ask_to_confirm);
    let Some((call, reply)) = asked else { return };
    let open = StoreCall::new(core, *key, call);
    open.answered(reply.arrives().await, confirmed);
}
