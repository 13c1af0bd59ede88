//! Access to the state of a key, and the work that is done after its lock is released.
//!
//! The state of a key never awaits, spawns or wakes anything. It leaves [`Work`] in its
//! [`KeyContext`]: tasks to wake, [`Effect`]s, and when a task has to visit it next. [`Core::with_state`] and
//! [`Core::with_new_state`] lock the state, call a closure, release the lock and do the work. They
//! begin and end all visits.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::division;
use super::engine::Core;
use super::key_state::{
    ChargeNumber, Effect, FleetCall, HeaderTrust, KeyContext, KeyState, LeaseFuture, SentCall,
    StatedLimit, Work, confirmed,
};
use super::quotas::QuotaId;
use super::reservation::Reservation;
use super::settings::Settings;
use super::store_call::StoreCall;
use super::tasks;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::guarded::NewKey;
use crate::join::join_all;
use crate::key::Key;
use crate::key_map::Full;
use crate::limit::{Charge, UnusedPermits};
use crate::store::{Claim, LeaseRequest, SetQuota, StoreListener, spawn, unless_lost};

/// How long a batching delay gives the tasks of the caller's runtime that are ready to run. If the
/// runtime does not run them in this time, the next call is sent without them.
const LONGEST_TURN: Duration = Duration::from_millis(5);

/// How often a flush looks whether a call under way has carried its charges to the store.
const CHARGES_UNDER_WAY: Duration = Duration::from_millis(2);

/// What a visit does to the state of a key. It is called once.
type Act<'a> = &'a mut dyn FnMut(&mut KeyState, &mut KeyContext<'_>);

impl Core {
    /// Runs `act` on the state of `key`, then does the work it leaves. Returns `None` if the key
    /// has no state.
    // Only the shell is generic. A visit is a hundred lines with a lookup, a lock and effects, and sixty callers had a
    // copy each: a tenth of the build.
    pub(super) fn with_state<R>(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut KeyState, &mut KeyContext<'_>) -> R,
    ) -> Option<R> {
        let (mut act, mut done) = (Some(act), None);
        self.visit_known(key, now, &mut |state, ctx| {
            done = act.take().map(|act| act(state, ctx));
        });
        done
    }

    fn visit_known(self: &Arc<Self>, key: Key, now: Instant, act: Act<'_>) {
        let visited = self
            .states
            .find(key, |state| self.visit(key, state, now, act));
        if let Some(work) = visited {
            self.run(key, now, work);
        }
    }

    /// Runs `act` on the state of `key`, which is made if there is none, then does the work it
    /// leaves.
    ///
    /// # Errors
    ///
    /// [`Full`] if the key has no state and there is no room for one.
    pub(super) fn with_new_state<R>(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut KeyState, &mut KeyContext<'_>) -> R,
    ) -> Result<R, Full> {
        let (mut act, mut done) = (Some(act), None);
        self.visit_new(key, now, &mut |state, ctx| {
            done = act.take().map(|act| act(state, ctx));
        })?;
        done.ok_or(Full)
    }

    fn visit_new(self: &Arc<Self>, key: Key, now: Instant, act: Act<'_>) -> Result<(), Full> {
        let guard = self.settings.guard.as_ref();
        let guarded = guard.map(|guard| NewKey::new(guard, self.whole(key)));
        let mut gone: Vec<Key> = Vec::new();
        let entered = self.states.enter(
            key,
            now,
            || self.new_state(guarded, now),
            |key, state| {
                if guard.is_some() {
                    gone.push(key);
                }
                self.forget_state(key, state, now);
            },
            |state| self.visit(key, state, now, act),
        );
        if let Some(guard) = guard {
            gone.iter()
                .for_each(|key| guard.forget_key(self.whole(*key)));
        }
        self.run(key, now, entered?);
        Ok(())
    }

    /// Makes the state of a key, which a guard may stop.
    fn new_state(&self, guarded: Option<NewKey<'_>>, now: Instant) -> KeyState {
        let mut state = KeyState::new(self.settings.spec.life());
        let stopped = guarded.and_then(|key| key.begins(&self.settings.tally, now));
        if let Some(left) = stopped {
            state.begin_held(left, now);
        }
        state
    }

    /// Keeps the counts of a state that is evicted, and gives back its permits.
    fn forget_state(&self, key: Key, mut state: Box<KeyState>, now: Instant) {
        self.hosts.touch(key);
        self.settings.tally.absorb(&state.counts);
        let own = self.own_spec(&mut state, now);
        state.give_back_prefetched(&self.ctx(key, now, own.as_ref()));
    }

    /// Visits the state of `key`, whose lock the caller holds. Returns the work that the visit leaves.
    fn visit(&self, key: Key, state: &mut KeyState, now: Instant, act: Act<'_>) -> Work {
        self.hosts.touch(key);
        let own = self.own_spec(state, now);
        let mut ctx = self.ctx(key, now, own.as_ref());
        if state.limits.take_expiry() {
            // What the upstream stated was about limits that apply no more.
            state.quota_changed(&mut ctx);
        }
        state.catch_up(&mut ctx);
        // A request that enters without a queue may ask for itself alone.
        state.end_visit(&mut ctx);
        act(state, &mut ctx);
        state.end_visit(&mut ctx);
        if !state.limits.take_change() {
            ctx.work.visit_at = state.wants_visit(&ctx.work, now);
            return ctx.work;
        }
        self.settings.quotas.note_any();
        let work = std::mem::take(&mut ctx.work);
        let own = self.own_spec(state, now);
        let mut ctx = self.ctx(key, now, own.as_ref());
        ctx.work = work;
        state.quota_changed(&mut ctx);
        state.end_visit(&mut ctx);
        ctx.work.visit_at = state.wants_visit(&ctx.work, now);
        ctx.work
    }

    /// Gives `key` the quota that a request states. Returns whether it had another one.
    pub(super) fn choose_quota(self: &Arc<Self>, key: Key, quota: QuotaId, now: Instant) -> bool {
        if self.has_quota(key, quota) {
            return false;
        }
        let spec = self.spec_of(quota);
        // If there is no room for the key, its request is refused.
        let _ = self.with_new_state(key, now, |state, _| state.limits.choose(quota, spec));
        true
    }

    /// Gives back permits that were not used: to the part that has lent them, else to the next waiter of
    /// `key`, else to the permits at hand or to the store.
    pub(super) fn give_back(self: &Arc<Self>, key: Key, slot: Reservation) {
        self.give_back_by(key, slot, true);
    }

    /// The same without the permits at hand.
    pub(super) fn give_back_to_store(self: &Arc<Self>, key: Key, slot: Reservation) {
        self.give_back_by(key, slot, false);
    }

    fn give_back_by(self: &Arc<Self>, key: Key, slot: Reservation, stays: bool) {
        if let Some(lender) = slot.lender {
            if let Some(probe) = slot.probe {
                // The probe is that of the own key.
                self.with_state(key, clock::now(), |state, ctx| {
                    state.probe_not_sent(ctx, probe);
                });
            }
            if let Some((core, key)) = self.part_at(lender, key) {
                let slot = Reservation {
                    lender: None,
                    probe: None,
                    ..slot
                };
                core.give_back_by(key, slot, stays);
            }
            return;
        }
        let done = self.with_state(key, clock::now(), |state, ctx| {
            state.give_back(ctx, slot, stays);
        });
        if done.is_none() {
            self.give_back_stateless(key, &[slot.unused()]);
        }
    }

    /// Takes back units of a permit of `key` that was used, because its request cost less.
    pub(super) fn refund(self: &Arc<Self>, key: Key, unused: UnusedPermits) {
        let done = self.with_state(key, clock::now(), |state, ctx| state.refund(ctx, unused));
        if done.is_none() {
            self.give_back_stateless(key, &[unused]);
        }
    }

    /// Counts units of `key` that the upstream has counted by now: without a permit, or instead of
    /// the units of a `permit`. If there is no room for the state of the key, the store gets them in
    /// one call, which is not repeated.
    pub(super) fn charge(self: &Arc<Self>, key: Key, units: u64, permit: Option<UnusedPermits>) {
        let now = clock::now();
        let settings = &self.settings;
        // The store counts units for longer if the upstream counts late. These are counted already.
        let sent_at = clock::before(now, settings.counted_within);
        let charged = self.with_new_state(key, now, |state, ctx| {
            state.charge(ctx, units, sent_at, permit);
        });
        if let Err(Full) = charged {
            let charges = [Charge::new(now - sent_at, units)];
            let reply = settings.store.lease(LeaseRequest {
                returns: permit.as_slice(),
                charges: &charges,
                ..LeaseRequest::new(key, &settings.spec, &[])
            });
            self.spawn(async move { drop(reply.arrives().await) });
        }
    }

    /// Sends the charges that wait for a call, and waits until the store has all charges of requests that were settled
    /// before.
    pub(super) async fn send_charges(self: &Arc<Self>) -> Result<(), StoreError> {
        // Requests may be settled all the time. So calls that begin later than the first round of this one are not
        // waited for. Those before are answered, or count as lost after `ANSWER`.
        let mut last = None;
        loop {
            let now = clock::now();
            let mut keys = Vec::new();
            self.states.for_each(|key, state| {
                if state.has_charges() {
                    keys.push(key);
                }
            });
            let mut is_any_under_way = false;
            let mut flush = |key| {
                let flushed = self.with_state(key, now, |state, ctx| {
                    is_any_under_way |= state.are_charges_under_way(last);
                    state.flush_charges(ctx)
                });
                let (call, reply) = flushed.flatten()?;
                Some((StoreCall::new(self, key, call), reply))
            };
            let calls: Vec<_> = keys.into_iter().filter_map(&mut flush).collect();
            last.get_or_insert_with(ChargeNumber::next);
            let answers = calls.into_iter().map(|(call, reply)| async move {
                let answer = reply.arrives().await;
                let outcome = answer.as_ref().map(drop).map_err(Clone::clone);
                call.answered(answer, confirmed);
                outcome
            });
            let answers: Result<(), _> = join_all(answers).await.into_iter().collect();
            answers?;
            if !is_any_under_way {
                return Ok(());
            }
            clock::sleep(CHARGES_UNDER_WAY).await;
        }
    }

    /// Does the work that a visit to the state of `key` has left: wakes the tasks and starts the
    /// effects.
    ///
    /// An effect runs on the store's own thread if there is one, else in the current runtime. If
    /// that runtime is dropped, or there is none, a call ends as lost.
    fn run(self: &Arc<Self>, key: Key, now: Instant, work: Work) {
        work.wakers.wake();
        for effect in work.effects {
            match effect {
                Effect::Call(call, answer) => self.call(key, call, answer),
                Effect::ShareProbe(call) => self.share_probe(key, *call),
                Effect::LimitInFlight(limit) => self.limit_in_flight(key, now, limit),
                Effect::StateParts => self.start(division::run_statements(self.clone(), key)),
                Effect::Borrow => self.start(division::borrow_for(self.clone(), key)),
            }
        }
        if let Some(at) = work.visit_at {
            self.visit_at(key, at, now);
        }
        if let Some(set) = work.set_quota {
            self.report_set_quota(key, &set);
        }
        for StatedLimit { limit, name, .. } in work.learned {
            events::learned(&self.label(key, None), limit, name.as_deref());
        }
        for slot in work.lent_back {
            self.give_back(key, slot);
        }
    }

    /// Reports that a quota was set for `key`, or has ended. The state of the key has just taken it in.
    fn report_set_quota(&self, key: Key, set: &SetQuota) {
        let (tally, label) = (&self.settings.tally, self.label(key, None));
        match &set.quota {
            // The process that has received the response has reported its limits.
            Some(_) if set.is_learned() => {}
            Some(quota) => events::quota_set(tally, &label, quota),
            None => events::set_quota_ended(tally, &label),
        }
    }

    /// Starts a task. What a store in memory answers at once is done when this returns, unless another
    /// task of this thread is just being polled: see [`tasks`].
    pub(super) fn start(&self, task: impl Future<Output = ()> + Send + 'static) {
        tasks::start(&self.settings.store, task);
    }

    /// Changes the register that says which process probes.
    fn share_probe(self: &Arc<Self>, key: Key, call: FleetCall) {
        let FleetCall { request, probe } = call;
        let core = self.clone();
        let reply = self.settings.store.compare_and_set(request);
        self.start(async move {
            let answer = reply.arrives().await.ok();
            core.with_state(key, clock::now(), |state, ctx| {
                state.fleet_answered(ctx, answer.as_ref(), probe);
            });
        });
    }

    /// Runs a call for the waiters of `key` to its end.
    ///
    /// A store in this process answers later only if the call ends a learned quota: see `store/unlearning.rs`. Then
    /// the call is polled at once, so that the waiter has its slot when it is first polled, which may be at its deadline. If that brings the answer, later calls expect answers at once.
    fn call(self: &Arc<Self>, key: Key, call: SentCall, mut answer: LeaseFuture) {
        let open = StoreCall::new(self, key, call);
        let Settings { learn, store, .. } = &self.settings;
        let may_be_here = *learn == HeaderTrust::Ignore && store.background().is_none();
        let call = async move {
            let mut polls = 0;
            let answer = poll_fn(|cx| {
                polls += 1;
                answer.as_mut().poll(cx)
            });
            let answer = answer.await;
            open.answered(answer, |state, ctx, call, answer| {
                if may_be_here && polls == 1 {
                    state.note_at_once();
                }
                state.call_answered(ctx, call, answer);
            });
        };
        match may_be_here {
            true => self.start(call),
            false => self.spawn(call),
        }
    }

    /// Limits the calls in flight of `key`, if they are limited.
    fn limit_in_flight(self: &Arc<Self>, key: Key, now: Instant, limit: Option<u32>) {
        if let Some(in_flight) = &self.in_flight {
            self.claim(in_flight.set_limit(self.whole(key), limit, now));
        }
    }

    /// Sends a claim about calls in flight to the store.
    pub(super) fn claim(self: &Arc<Self>, claim: Option<Claim>) {
        if let Some(claim) = claim {
            let listener: Arc<dyn StoreListener> = self.clone();
            self.settings.store.claim(claim, &listener);
        }
    }

    /// Starts a task that visits the state of `key` at `at`: see `key_state/timer.rs`.
    ///
    /// If that is now, the tasks that are ready to run in the caller's runtime run first, because they may join the
    /// next call. If the new task runs on the thread of the store, another one waits for them in the caller's runtime.
    /// That runtime may have stopped, so the new task waits no longer than [`LONGEST_TURN`].
    fn visit_at(self: &Arc<Self>, key: Key, at: Instant, now: Instant) {
        // The task does not keep the core alive, because a store may ask for a long pause.
        let core = Arc::downgrade(self);
        let of_lost = core.clone();
        let is_elsewhere = at <= now && self.settings.store.background().is_some();
        let caller = Handle::try_current().ok().filter(|_| is_elsewhere);
        let turn = caller.map(|runtime| runtime.spawn(tokio::task::yield_now()));
        let visit = async move {
            match turn {
                Some(turn) => _ = timeout(LONGEST_TURN, turn).await,
                None if at <= now => tokio::task::yield_now().await,
                None => clock::sleep_until(at).await,
            }
            if let Some(core) = core.upgrade() {
                core.with_state(key, clock::now(), KeyState::on_time);
            }
        };
        self.spawn(unless_lost(visit, move || {
            if let Some(core) = of_lost.upgrade() {
                core.with_state(key, clock::now(), |state, ctx| state.visit_lost(ctx, at));
            }
        }));
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&*self.settings.store, Box::pin(task));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::holds;
    use crate::stats::Cause;
    use crate::{Quota, RateLimitLayer};

    /// A class is on probation, and its probe has a slot that another class has lent.
    #[tokio::test(start_paused = true)]
    async fn a_lent_slot_that_goes_back_frees_the_probe() {
        let builder = RateLimitLayer::builder(Quota::per_minute(10)).share("web", 50);
        let limiter = builder.build().unwrap().limiter();
        let (core, key) = limiter.0.first.part_of_class(Key::ALL, "web").unwrap();
        let hold = holds::begin(&core, key, Duration::from_secs(1), true, Cause::Operator);
        hold.arrives().await.unwrap();
        clock::sleep(Duration::from_secs(2)).await;
        let now = clock::now();
        // It asks the store whether another process has the turn.
        core.with_state(key, now, KeyState::bring_up_to_date);
        let pass = || holds::pass(&core, key, now);
        let probe = pass().unwrap().unwrap().into_number();
        assert!(pass().is_err());
        let slot = Reservation {
            at: now,
            until: now + Duration::from_secs(1),
            cost: 1,
            count: 1,
            slot: 1,
            stamp: 1,
            incarnation: 0,
            lender: Some(0),
            probe: Some(probe),
            is_at_once: true,
        };
        core.give_back(key, slot);
        assert!(pass().unwrap().is_some());
    }
}
