//! Access to the state of a key, and the work that is done after its lock is released.
//!
//! The state of a key never awaits, spawns or wakes anything. It leaves [`Work`] in its
//! [`KeyContext`]: tasks to wake, [`Effect`]s, and when a task has to visit it next. [`Core::with_state`] and
//! [`Core::with_new_state`] lock the state, call a closure, release the lock and do the work. They
//! are the only callers of [`Core::run`].

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::engine::Core;
use super::key_state::{
    Effect, HeaderTrust, JoinedRound, KeyContext, KeyState, LeaseFuture, Lent, OWN_PART, Round,
    SentCall, StatedLimit, WholeLimits, Work, confirmed, fresh_for,
};
use super::queue::CallNumber;
use super::quotas::QuotaId;
use super::reservation::Reservation;
use super::settings::Settings;
use super::tasks;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::guarded::NewKey;
use crate::join::join_all;
use crate::key::Key;
use crate::key_map::Full;
use crate::limit::{Charge, LimitSpec, UnusedPermits};
use crate::store::{
    Claim, ClientSession, HoldState, Lease, LeaseRequest, OwnedLeaseRequest, PeekRequest, SetQuota,
    StoreListener, spawn,
};

/// How long a batching delay gives the tasks of the caller's runtime that are ready to run. If the
/// runtime does not run them in this time, the next call is sent without them.
const LONGEST_TURN: Duration = Duration::from_millis(5);

/// The number of the part of all other requests. Its key is the whole one, which callers without a
/// division use.
const PART_OF_THE_REST: u8 = 0;

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
        let new = || {
            let mut state = KeyState::new(self.settings.spec.life());
            let stopped = guarded.and_then(|key| key.begins(&self.settings.tally, now));
            if let Some(left) = stopped {
                state.begin_held(left, now);
            }
            state
        };
        let mut gone: SmallVec<[Key; 4]> = SmallVec::new();
        let forgotten = |key, mut state: Box<KeyState>| {
            self.hosts.touch(key);
            if guard.is_some() {
                gone.push(key);
            }
            self.settings.tally.absorb(&state.counts);
            let own = self.own_spec(&mut state, now);
            state.give_back_prefetched(&self.ctx(key, now, own.as_ref()));
        };
        let visit = |state: &mut KeyState| self.visit(key, state, now, act);
        let entered = self.states.enter(key, now, new, forgotten, visit);
        if let Some(guard) = guard {
            gone.iter()
                .for_each(|key| guard.forget_key(self.whole(*key)));
        }
        self.run(key, now, entered?);
        Ok(())
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
        act(state, &mut ctx);
        state.take_lent_back(&mut ctx);
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
        state.take_lent_back(&mut ctx);
        ctx.work.visit_at = state.wants_visit(&ctx.work, now);
        ctx.work
    }

    /// Gives `key` the quota that a request states. Returns whether it had another one.
    pub(super) fn choose_quota(self: &Arc<Self>, key: Key, quota: QuotaId, now: Instant) -> bool {
        if self.has_quota(key, quota) {
            return false;
        }
        let spec = self.spec_of(quota);
        let choose =
            |state: &mut KeyState, _: &mut KeyContext<'_>| state.limits.choose(quota, spec);
        // If there is no room for the key, its request is refused.
        let _ = self.with_new_state(key, now, choose);
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
            if let Some((core, key)) = self.part_at(lender, key) {
                let slot = Reservation {
                    lender: None,
                    ..slot
                };
                core.give_back_by(key, slot, stays);
            }
            return;
        }
        let give_back = |state: &mut KeyState, ctx: &mut KeyContext<'_>| {
            state.give_back(ctx, slot, stays);
        };
        if self.with_state(key, clock::now(), give_back).is_none() {
            self.give_back_stateless(key, &[slot.unused()]);
        }
    }

    /// Takes back units of a permit of `key` that was used, because its request cost less.
    pub(super) fn refund(self: &Arc<Self>, key: Key, unused: UnusedPermits) {
        let refund = |state: &mut KeyState, ctx: &mut KeyContext<'_>| state.refund(ctx, unused);
        if self.with_state(key, clock::now(), refund).is_none() {
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
        let sent_at = now.checked_sub(settings.counted_within).unwrap_or(now);
        let charge = |state: &mut KeyState, ctx: &mut KeyContext<'_>| {
            state.charge(ctx, units, sent_at, permit)
        };
        if let Err(Full) = self.with_new_state(key, now, charge) {
            let session = ClientSession::default();
            let request = OwnedLeaseRequest::without_demands(key, &settings.spec, session);
            let charges = [Charge::new(now - sent_at, units)];
            let reply = settings.store.lease(LeaseRequest {
                returns: permit.as_slice(),
                charges: &charges,
                ..request.request(&[])
            });
            self.spawn(async move { drop(reply.arrives().await) });
        }
    }

    /// Sends the charges that wait for a call, and waits until the store has all charges.
    pub(super) async fn send_charges(self: &Arc<Self>) -> Result<(), StoreError> {
        loop {
            let now = clock::now();
            let mut keys = Vec::new();
            self.states.for_each(|key, state| {
                if state.has_charges() {
                    keys.push(key);
                }
            });
            if keys.is_empty() {
                return Ok(());
            }
            let flush = |key| self.with_state(key, now, KeyState::flush_charges).flatten();
            let calls = keys.into_iter().filter_map(|key| {
                let (call, reply) = flush(key)?;
                Some((StoreCall::new(self, key, call), reply))
            });
            let answers = calls.map(|(call, reply)| async move {
                let answer = reply.arrives().await;
                let outcome = answer.as_ref().map(drop).map_err(Clone::clone);
                call.answered(answer, confirmed);
                outcome
            });
            let answers = join_all(answers).await;
            if answers.is_empty() {
                // Other calls carry the charges. They are answered or lost soon.
                clock::sleep(CHARGES_UNDER_WAY).await;
            }
            answers.into_iter().collect::<Result<(), _>>()?;
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
                Effect::Call(number, call, answer) => self.call(key, number, call, answer),
                Effect::LimitInFlight(limit) => self.limit_in_flight(key, now, limit),
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
        if work.wants_statements {
            self.start(run_statements(self.clone(), key));
        }
        if work.borrows {
            self.start(borrow_for(self.clone(), key));
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

    /// Waits until the limits of the other parts are stated, if `key` is one of several parts. Only one
    /// round of statements is under way for a key: if there is one, waits for its end.
    ///
    /// # Errors
    ///
    /// How long the round waits until callers without a division have used what they have booked, if
    /// that is beyond `latest`.
    pub(super) async fn wait_for_statements(
        self: &Arc<Self>,
        key: Key,
        latest: Instant,
    ) -> Result<(), Duration> {
        if !self.is_divided() {
            return Ok(());
        }
        let waits_too_long = |now| {
            self.with_state(key, now, |state, ctx| state.undivided_beyond(ctx, latest))
                .flatten()
        };
        loop {
            let now = clock::now();
            match self.with_new_state(key, now, KeyState::join_round) {
                Ok(JoinedRound::IsStated) | Err(Full) => return Ok(()),
                Ok(JoinedRound::Begins) => run_statements(self.clone(), key).await,
                Ok(JoinedRound::IsUnderWay { until }) => {
                    if let Some(wait) = waits_too_long(now) {
                        return Err(wait);
                    }
                    let until = until.max(Some(clock::after(now, LONGEST_TURN)));
                    clock::sleep_until(until.unwrap_or(now)).await;
                }
            }
        }
    }

    /// Starts a task. What a store in memory answers at once is done when this returns, unless another
    /// task of this thread is just being polled: see [`tasks`].
    pub(super) fn start(&self, task: impl Future<Output = ()> + Send + 'static) {
        tasks::start(&self.settings.store, task);
    }

    /// Runs a call for the waiters of `key` to its end.
    fn call(self: &Arc<Self>, key: Key, number: CallNumber, call: SentCall, answer: LeaseFuture) {
        let mut open = StoreCall::new(self, key, call);
        open.number = Some(number);
        let Settings { learn, store, .. } = &self.settings;
        if *learn == HeaderTrust::Ignore && store.background().is_none() {
            return self.call_in_process(number, open, answer);
        }
        self.spawn(async move {
            let answer = answer.await;
            open.answered(answer, |state, ctx, call, answer| {
                state.call_answered(ctx, number, call, answer);
            });
        });
    }

    /// Runs a call to a store that may be in this process, although its answer is not at hand. This is so if the
    /// call ends a learned quota: see `store/unlearning.rs`. Then the waiter has its slot when it is first polled,
    /// which may be at its deadline, and later calls expect answers at once.
    fn call_in_process(&self, number: CallNumber, open: StoreCall, mut answer: LeaseFuture) {
        self.start(async move {
            let first = poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx))).await;
            let is_at_once = first.is_ready();
            let answer = match first {
                Poll::Ready(answer) => answer,
                Poll::Pending => answer.await,
            };
            open.answered(answer, |state, ctx, call, answer| {
                if is_at_once {
                    state.note_at_once();
                }
                state.call_answered(ctx, number, call, answer);
            });
        });
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
        let unless_lost = UnlessLost::new(move || {
            if let Some(core) = of_lost.upgrade() {
                core.with_state(key, clock::now(), |state, ctx| state.visit_lost(ctx, at));
            }
        });
        let is_elsewhere = at <= now && self.settings.store.background().is_some();
        let caller = Handle::try_current().ok().filter(|_| is_elsewhere);
        let turn = caller.map(|runtime| runtime.spawn(tokio::task::yield_now()));
        self.spawn(async move {
            match turn {
                Some(turn) => _ = timeout(LONGEST_TURN, turn).await,
                None if at <= now => tokio::task::yield_now().await,
                None => clock::sleep_until(at).await,
            }
            unless_lost.end();
            if let Some(core) = core.upgrade() {
                core.with_state(key, clock::now(), KeyState::on_time);
            }
        });
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&*self.settings.store, task);
    }
}

/// Asks the other parts for slots for the waiters of `key`, one part after the other, and the own part
/// last. Each answer counts as a statement of the limits. A part whose store fails lends nothing.
async fn borrow_for(core: Arc<Core>, key: Key) {
    let wanted = |state: &mut KeyState, ctx: &mut KeyContext<'_>| state.wanted_loans(ctx);
    let Some(mut wanted) = core.with_state(key, clock::now(), wanted).flatten() else {
        return;
    };
    let mut round = Round::default();
    let own = core.part_index();
    let quota = core.quota_id(key);
    let parts: SmallVec<[_; 8]> = core.all_parts(key).enumerate().collect();
    let (before, after) = parts.split_at(own.min(parts.len()));
    // Each class begins with the part behind its own. Its own part is the last.
    let others = after.iter().skip(1).chain(before);
    for (index, (lender, lender_key)) in others.chain(after.first()) {
        let is_own = *index == own;
        let sent = clock::now();
        if !wanted.asks(*index, is_own, sent) {
            continue;
        }
        lender.choose_quota(*lender_key, quota.unwrap_or(QuotaId::CONFIGURED), sent);
        let lend =
            |state: &mut KeyState, ctx: &mut KeyContext<'_>| state.lend(ctx, &wanted, is_own);
        let Ok(Some(reply)) = lender.with_new_state(*lender_key, sent, lend) else {
            round.add(*index, is_own, Lent::default());
            continue;
        };
        let (call, reply) = reply;
        let open = StoreCall::new(lender, *lender_key, call);
        let answer = reply.arrives().await;
        if !is_own
            && answer.is_ok()
            && let Ok(number) = u8::try_from(*index)
        {
            let spec = lender.spec_of_part(*lender_key, quota);
            let note = |state: &mut KeyState| state.note_stated(&spec, number, sent, false);
            core.states.find(key, note);
        }
        let Some(lent) = open.answered(answer, KeyState::lent) else {
            continue;
        };
        wanted.take(&lent.slots);
        round.add(*index, is_own, lent);
    }
    let mut ended = Some(round);
    let end = |state: &mut KeyState, ctx: &mut KeyContext<'_>| {
        state.loans_ended(ctx, ended.take().unwrap_or_default());
    };
    core.with_state(key, clock::now(), end);
    for slot in ended.into_iter().flat_map(|round| round.slots) {
        core.give_back(key, slot);
    }
}

/// States the limits of all parts for `key`, which is one of them: see `key_state/stated_parts.rs`. Also a round
/// that is dropped before its first poll has to end.
fn run_statements(core: Arc<Core>, key: Key) -> impl Future<Output = ()> + Send + 'static {
    let of_lost = core.clone();
    let unless_lost = UnlessLost::new(move || {
        of_lost.with_state(key, clock::now(), KeyState::statements_lost);
    });
    async move {
        let (undivided_until, again) = state_stale_parts(&core, key).await;
        unless_lost.end();
        core.with_state(key, clock::now(), |state, ctx| {
            state.parts_stated(ctx, undivided_until, again);
        });
    }
}

/// States the limits of the parts about which `key` has no fresh statement. Returns until when callers
/// without a division may use more than their part, and after what time to call this again at the latest.
/// A part whose store fails is stated again later.
async fn state_stale_parts(core: &Arc<Core>, key: Key) -> (Option<Instant>, Duration) {
    let now = clock::now();
    let known = core
        .states
        .find(key, |state| (state.stated_parts(), state.limits.quota_id()));
    let (stated, quota) = known.unwrap_or_default();
    let parts: SmallVec<[_; 8]> = core.all_parts(key).enumerate().collect();
    let specs = parts
        .iter()
        .map(|(_, (part, part_key))| part.spec_of_part(*part_key, quota));
    let specs: SmallVec<[Arc<LimitSpec>; 8]> = specs.collect();
    let again = specs.iter().map(|spec| fresh_for(spec)).min();
    let again = again.unwrap_or(LONGEST_TURN) / 2;
    // Parts that are about to need a statement get it in this round, too.
    let fresh_at = clock::after(now, again / 2);
    let whole = WholeLimits::new(&specs);
    let calls = parts
        .iter()
        .zip(&specs)
        .filter_map(|((index, (part, part_key)), spec)| {
            let number = match u8::try_from(*index).ok()? {
                own if usize::from(own) == core.part_index() => OWN_PART,
                other => other,
            };
            // Callers without a division use the part of the rest.
            let looks_for_undivided =
                *index == usize::from(PART_OF_THE_REST) && stated.needs_search(now);
            if stated.is_fresh(number, fresh_at) && !looks_for_undivided {
                return None;
            }
            let whole = looks_for_undivided.then_some(&whole);
            Some(async move {
                let sent = clock::now();
                let stated = state_part(part, *part_key, spec, whole).await;
                (number, spec, sent, whole.is_some(), stated)
            })
        });
    let mut undivided_until = None;
    for (number, spec, sent, was_search, stated) in join_all(calls).await {
        core.states.find(key, |state| {
            state.note_stated(spec, number, sent, stated.is_err());
            if was_search {
                state.note_search(stated.is_ok());
            }
            if let Ok(StatementOutcome { answered, .. }) = stated
                && number == OWN_PART
            {
                state.note_trip(spec, (sent, answered));
            }
        });
        if let Ok(StatementOutcome { hold, .. }) = stated
            && number == PART_OF_THE_REST
            && !hold.remaining.is_zero()
        {
            // A process without shares may have held the whole key before this one knew of its class.
            core.with_state(key, clock::now(), |state, ctx| {
                state.follow_whole(ctx, hold);
            });
        }
        let until = stated.ok().and_then(|stated| stated.undivided_until);
        undivided_until = undivided_until.max(until);
    }
    (undivided_until, again)
}

/// What became of a statement.
struct StatementOutcome {
    /// When the store answered.
    answered: Instant,
    /// Until when callers without a division may use more than the part, if they were looked for.
    undivided_until: Option<Instant>,
    /// The hold of the part.
    hold: HoldState,
}

/// States the limits of one part. If it is given the `whole` limits, looks for callers without a division.
async fn state_part(
    part: &Core,
    key: Key,
    spec: &Arc<LimitSpec>,
    whole: Option<&WholeLimits>,
) -> Result<StatementOutcome, StoreError> {
    let store = &part.settings.store;
    let request = OwnedLeaseRequest::without_demands(key, spec, ClientSession::default());
    let lease = store.lease(request.request(&[])).arrives().await?;
    let answered = clock::now();
    let mut undivided_until = None;
    if let Some(whole) = whole.filter(|_| lease.foreign.is_some()) {
        let usage = store.peek(PeekRequest::new(key, spec)).arrives().await?;
        let wait = whole.undivided_for(&usage);
        undivided_until = wait.map(|wait| clock::after(clock::now(), wait));
    }
    Ok(StatementOutcome {
        answered,
        undivided_until,
        hold: lease.hold,
    })
}

/// A call to the store whose answer is still to come. If it is dropped before, it is lost: its waiters get
/// [`StoreError::Lost`], and the charges that it carries wait for another call.
pub(super) struct StoreCall {
    core: Arc<Core>,
    key: Key,
    call: SentCall,
    /// The number of a call that waiters of the key wait for.
    number: Option<CallNumber>,
    is_open: bool,
}

impl StoreCall {
    pub(super) fn new(core: &Arc<Core>, key: Key, call: SentCall) -> Self {
        StoreCall {
            core: core.clone(),
            key,
            call,
            number: None,
            is_open: true,
        }
    }

    /// Takes in the answer. Returns `None` if the state of the key is gone: then this process cannot use what was
    /// granted, and gives it back.
    pub(super) fn answered<R>(
        mut self,
        answer: Result<Lease, StoreError>,
        take_in: impl FnOnce(
            &mut KeyState,
            &mut KeyContext<'_>,
            SentCall,
            Result<Lease, StoreError>,
        ) -> R,
    ) -> Option<R> {
        self.is_open = false;
        let (core, key, call) = (&self.core, self.key, self.call);
        let foreign = answer.as_ref().ok().and_then(|lease| lease.foreign);
        if let Some(limit) = foreign
            // A key whose quota changed keeps its old limits for some time.
            && !core.settings.quotas.is_any()
            && !core.warned.swap(true, Ordering::Relaxed)
        {
            let quota = core.settings.spec.quota();
            let tally = &core.settings.tally;
            events::foreign_limit(tally, &core.label(key, None), limit, quota);
        }
        let mut answer = Some(answer);
        let taken_in = core.with_state(key, clock::now(), |state, ctx| {
            let answer = answer.take().unwrap_or(Err(StoreError::Lost));
            let done = take_in(state, ctx, call, answer);
            state.sweep_later();
            done
        });
        if let Some(Ok(lease)) = answer {
            core.give_back_stateless(key, &lease.unused());
        }
        taken_in
    }
}

impl Drop for StoreCall {
    fn drop(&mut self) {
        let &mut StoreCall { call, number, .. } = self;
        if self.is_open && (number.is_some() || call.has_charge()) {
            self.core
                .with_state(self.key, clock::now(), |state, ctx| match number {
                    Some(number) => state.call_answered(ctx, number, call, Err(StoreError::Lost)),
                    None => state.charge_answered(ctx, call, false),
                });
        }
    }
}

/// What is done if a task is dropped, with its runtime, before its end.
pub(super) struct UnlessLost<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> UnlessLost<F> {
    pub(super) fn new(act: F) -> Self {
        UnlessLost(Some(act))
    }

    /// The task has come to its end.
    pub(super) fn end(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for UnlessLost<F> {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}
