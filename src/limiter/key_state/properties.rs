//! Property tests of the state of a key, under any order of callers, effects and time. Each wait
//! ends, in order, because its task is woken. No limit is exceeded, and no booked permit is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tokio::sync::Notify;

use super::{Effect, HoldSource, KeyContext, KeyState, LeaseFuture, Ticket, Work};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::limiter::queue::{CallNumber, next_number};
use crate::limiter::reservation::{Reservation, Settled, WaitBound};
use crate::quota::Quota;
use crate::store::{
    HoldState, Lease, LeaseRequest, MemoryStore, Store, StoreReply, UnusedPermits, Usage,
};

#[derive(Clone, Debug)]
enum Step {
    /// A request arrives that can wait for `wait` milliseconds, by a deadline or by a bound of the
    /// limiter.
    Enter {
        cost: u32,
        wait: u64,
        by_deadline: bool,
    },
    /// A request is polled, whether it was woken or not.
    Poll(usize),
    Leave(usize),
    /// A request uses its permit, or waits again because the permit has expired.
    Use(usize),
    GiveBack(usize),
    /// An effect is run, if it is due.
    Effect(usize),
    /// An effect is dropped with its runtime.
    EffectLost(usize),
    /// The key is put on hold for this many milliseconds. The flag says whether the hold was cut.
    Hold(u64, bool),
    Release,
    /// A message may have been missed.
    Doubt,
    /// The store becomes unreachable (`true`) or reachable again.
    Away(bool),
    /// So many milliseconds pass.
    Passes(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0usize..64;
    let wait = prop_oneof![1 => Just(0u64), 1 => 1u64..2000, 4 => Just(LONGEST)];
    let span = prop_oneof![6 => 0u64..5, 3 => 5u64..60, 1 => 60u64..1500];
    prop_oneof![
        10 => (prop_oneof![4 => Just(1u32), 1 => 2u32..4], wait, prop::bool::weighted(0.3))
            .prop_map(|(cost, wait, by_deadline)| Step::Enter { cost, wait, by_deadline }),
        12 => which().prop_map(Step::Poll),
        3 => which().prop_map(Step::Leave),
        6 => which().prop_map(Step::Use),
        2 => which().prop_map(Step::GiveBack),
        12 => which().prop_map(Step::Effect),
        1 => which().prop_map(Step::EffectLost),
        1 => (1u64..3000, prop::bool::weighted(0.3)).prop_map(|(span, cut)| Step::Hold(span, cut)),
        1 => Just(Step::Release),
        1 => Just(Step::Doubt),
        1 => any::<bool>().prop_map(Step::Away),
        6 => span.prop_map(Step::Passes),
    ]
}

/// The longest wait of a request, in milliseconds.
const LONGEST: u64 = 60_000;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A store in memory that decides when it is called. With `later`, its answers arrive later. It
/// counts the units that it granted, and the units that were given back.
struct Wire {
    store: Arc<MemoryStore>,
    later: bool,
    away: AtomicBool,
    granted: AtomicU64,
    returned: AtomicU64,
}

impl Wire {
    fn count_back(&self, unused: &[UnusedPermits]) {
        self.returned.fetch_add(
            unused.iter().map(|unused| unused.units).sum(),
            Ordering::Relaxed,
        );
    }
}

impl Store for Wire {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.count_back(request.returns);
        let answer = if self.away.load(Ordering::Relaxed) {
            StoreReply::Ready(Err(StoreError::Away(Arc::new(std::io::Error::other(
                "no route",
            )))))
        } else {
            self.store.lease(request)
        };
        if let StoreReply::Ready(Ok(lease)) = &answer {
            let grants = lease.grants.iter().chain(&lease.prefetched);
            let units = grants
                .map(|grant| u64::from(grant.cost) * u64::from(grant.count))
                .sum();
            self.granted.fetch_add(units, Ordering::Relaxed);
        }
        match answer {
            StoreReply::Ready(answer) if self.later => {
                StoreReply::Pending(Box::pin(std::future::ready(answer)))
            }
            answer => answer,
        }
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.count_back(unused);
        self.store.give_back(key, spec, unused);
    }

    fn peek(&self, key: Key, spec: &Arc<LimitSpec>) -> StoreReply<Usage> {
        self.store.peek(key, spec)
    }
}

/// The task of a request that waits.
#[derive(Default)]
struct Task {
    woken: AtomicBool,
    any_woken: Arc<Notify>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Relaxed);
        self.any_woken.notify_one();
    }
}

struct Request {
    place: Ticket,
    task: Arc<Task>,
    stage: Stage,
    /// Whether another request was before it in the queue when its wait ended.
    overtakes: bool,
}

// Waiting => Has | Ended
// Has => Ended | Waiting, if its permit expired
enum Stage {
    Waiting,
    Has(Reservation),
    Ended,
}

/// An effect that is still to be run.
enum Pending {
    Call(CallNumber, LeaseFuture, Instant),
    Gather(Instant),
    PassOn(Instant),
    Sweep(Instant),
}

struct World {
    state: KeyState,
    wire: Arc<Wire>,
    store: Arc<dyn Store>,
    spec: Arc<LimitSpec>,
    /// Whether effects may be dropped and the store may become unreachable.
    faults: bool,
    /// Whether requests pass uncounted if the store fails.
    fails_open: bool,
    /// Whether an answer was lost that may have granted permits.
    answer_lost: bool,
    requests: Vec<Request>,
    pending: Vec<Pending>,
    uses: Vec<(Instant, u32)>,
    any_woken: Arc<Notify>,
}

impl World {
    fn new(quota: Quota, later: bool, faults: bool) -> Self {
        let wire = Arc::new(Wire {
            store: Arc::default(),
            later,
            away: AtomicBool::new(false),
            granted: AtomicU64::new(0),
            returned: AtomicU64::new(0),
        });
        World {
            state: KeyState::new(ms(10), clock::now()),
            store: wire.clone(),
            wire,
            spec: Arc::new(LimitSpec::new(quota, ms(10), ms(10))),
            faults,
            fails_open: false,
            answer_lost: faults,
            requests: Vec::new(),
            pending: Vec::new(),
            uses: Vec::new(),
            any_woken: Arc::default(),
        }
    }

    /// Runs `act` on the state of the key, as the limiter does.
    fn act<R>(
        &mut self,
        act: impl FnOnce(&mut KeyState, &mut KeyContext<'_>, &mut [Request]) -> R,
    ) -> R {
        let now = clock::now();
        let is_waiting = |state: &KeyState, request: &Request| {
            let Ticket { number, cost, .. } = request.place;
            state
                .queue
                .as_ref()
                .is_some_and(|queue| queue.is_waiting(number, cost))
        };
        let before: Vec<bool> = self
            .requests
            .iter()
            .map(|request| is_waiting(&self.state, request))
            .collect();
        let mut ctx = KeyContext {
            key: Key::ALL,
            store: &self.store,
            spec: &self.spec,
            now,
            max_queue: 30,
            fails_open: self.fails_open,
            max_hold: ms(60_000),
            work: Work::default(),
        };
        let result = act(&mut self.state, &mut ctx, &mut self.requests);
        let Work { wakers, effects } = ctx.work;
        wakers.wake();
        self.pending
            .extend(effects.into_iter().map(|effect| match effect {
                Effect::Call(number, call) => Pending::Call(number, call, now),
                Effect::Gather(delay) => Pending::Gather(clock::after(now, delay)),
                Effect::PassOn(delay) => Pending::PassOn(clock::after(now, delay)),
            }));
        let after: Vec<bool> = self
            .requests
            .iter()
            .map(|request| is_waiting(&self.state, request))
            .collect();
        for index in 0..before.len() {
            let Ticket { number, cost, .. } = self.requests[index].place;
            let earlier = |(other, waits): (&Request, &bool)| {
                *waits && other.place.cost == cost && other.place.number < number
            };
            if before[index] && !after[index] {
                self.requests[index].overtakes = self.requests.iter().zip(&after).any(earlier);
            }
        }
        result
    }

    fn enter(&mut self, cost: u32, wait: u64, by_deadline: bool) {
        let now = clock::now();
        let deadline = by_deadline.then(|| clock::after(now, ms(wait)));
        let bound = WaitBound::new(
            deadline,
            now,
            ms(if by_deadline { LONGEST + 1 } else { wait }),
        );
        let number = next_number();
        let entered = self.act(|state, ctx, _| Ticket::new(number, cost, bound).enter(state, ctx));
        let (number, stage) = match entered {
            Some(Settled::Granted(slot)) => {
                self.assert_usable(&slot);
                let waits =
                    |request: &Request| request.place.cost == cost && self.is_waiting(request);
                assert!(
                    !self.requests.iter().any(waits),
                    "a later request overtook a waiter"
                );
                (0, Stage::Has(slot))
            }
            None => (number, Stage::Waiting),
            Some(Settled::Failed(_)) => {
                assert!(self.faults, "the store is there");
                return;
            }
            Some(Settled::Refused(_) | Settled::QueueFull) => return,
        };
        let task = Arc::new(Task {
            woken: AtomicBool::new(true),
            any_woken: self.any_woken.clone(),
        });
        let place = Ticket {
            number,
            cost,
            bound,
            turns: 1,
        };
        self.requests.push(Request {
            place,
            task,
            stage,
            overtakes: false,
        });
    }

    fn is_waiting(&self, request: &Request) -> bool {
        let Ticket { number, cost, .. } = request.place;
        self.state
            .queue
            .as_ref()
            .is_some_and(|queue| queue.is_waiting(number, cost))
    }

    fn assert_usable(&self, slot: &Reservation) {
        let now = clock::now();
        assert!(
            slot.at <= now && now < slot.until,
            "a permit is granted when it can be used"
        );
        assert!(
            self.state.hold.left(now).is_none(),
            "no request leaves while the key is held"
        );
    }

    fn poll(&mut self, index: usize) {
        let request = &self.requests[index];
        if !matches!(request.stage, Stage::Waiting) {
            return;
        }
        request.task.woken.store(false, Ordering::Relaxed);
        let waker = Waker::from(request.task.clone());
        let mut cx = Context::from_waker(&waker);
        let polled =
            self.act(|state, ctx, requests| requests[index].place.poll(state, ctx, &mut cx));
        let stage = match polled {
            Poll::Pending => {
                let waits = self.is_waiting(&self.requests[index]);
                self.requests[index].overtakes &= !waits;
                return;
            }
            Poll::Ready(Settled::Granted(slot)) => {
                self.assert_usable(&slot);
                assert!(
                    !self.requests[index].overtakes,
                    "requests leave in the order of their arrival"
                );
                Stage::Has(slot)
            }
            Poll::Ready(Settled::Failed(_))
                if self.fails_open && self.state.hold.left(clock::now()).is_some() =>
            {
                panic!("no request passes uncounted while the key is on hold");
            }
            // Its call is still under way.
            Poll::Ready(Settled::Failed(StoreError::NoAnswer { .. })) => Stage::Ended,
            Poll::Ready(Settled::Failed(error)) => {
                // Permits of an answer that took too long count as spent.
                let too_slow = matches!(error, StoreError::TooSlow { .. });
                assert!(self.faults || too_slow, "the store is there");
                self.answer_lost = true;
                Stage::Ended
            }
            Poll::Ready(Settled::Refused(_) | Settled::QueueFull) => Stage::Ended,
        };
        self.requests[index].stage = stage;
    }

    fn leave(&mut self, index: usize) {
        if matches!(self.requests[index].stage, Stage::Waiting) {
            self.requests[index].stage = Stage::Ended;
            self.act(|state, ctx, requests| requests[index].place.leave(state, ctx));
        }
    }

    fn use_permit(&mut self, index: usize) {
        let Stage::Has(slot) = self.requests[index].stage else {
            return;
        };
        let now = clock::now();
        let request = &mut self.requests[index];
        if now < slot.until {
            self.uses.push((now, slot.cost));
            request.stage = Stage::Ended;
            // The upstream accepts it at once.
            let passed = self.act(|state, ctx, _| {
                let passed = state.hold.accepted_upstream(now, now);
                if passed {
                    state.hold_changed(ctx);
                }
                passed
            });
            if passed {
                self.release();
            }
        } else if request.place.number == 0 {
            // A request that never waited has no place to return to.
            request.stage = Stage::Ended;
            self.act(|state, ctx, _| state.give_back(ctx, slot));
        } else {
            request.stage = Stage::Waiting;
            request.overtakes = false;
            request.task.woken.store(true, Ordering::Relaxed);
            self.act(|state, ctx, requests| {
                requests[index].place.return_late(state, ctx, slot);
            });
        }
    }

    fn give_back(&mut self, index: usize) {
        if let Stage::Has(slot) = self.requests[index].stage {
            self.requests[index].stage = Stage::Ended;
            self.act(|state, ctx, _| state.give_back(ctx, slot));
        }
    }

    /// Runs the effect at `index` if it is due. Returns whether it was due.
    fn run(&mut self, index: usize) -> bool {
        let now = clock::now();
        if self.pending[index].due() > now {
            return false;
        }
        match self.pending.swap_remove(index) {
            Pending::Call(number, mut call, since) => {
                let Poll::Ready(answer) =
                    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
                else {
                    unreachable!("it was answered when it was asked");
                };
                self.answered(number, answer, since);
            }
            Pending::Gather(_) => {
                self.act(|state, ctx, _| state.gathered(ctx, true));
            }
            Pending::PassOn(_) => {
                self.act(|state, ctx, _| state.pass_on_now(ctx));
            }
            Pending::Sweep(_) => {
                let next = self.act(|state, ctx, _| state.sweep(ctx));
                self.pending.extend(next.map(Pending::Sweep));
            }
        }
        true
    }

    fn answered(&mut self, number: CallNumber, answer: Result<Lease, StoreError>, since: Instant) {
        let sweep = self.act(|state, ctx, _| {
            state.call_answered(ctx, number, answer, since);
            state.start_sweep(ctx.now)
        });
        self.pending.extend(sweep.map(Pending::Sweep));
    }

    fn lose(&mut self, index: usize) {
        match self.pending.swap_remove(index) {
            Pending::Call(number, _, since) => self.answered(number, Err(StoreError::Lost), since),
            Pending::Gather(_) => {
                self.act(|state, ctx, _| state.gathered(ctx, false));
            }
            Pending::PassOn(_) | Pending::Sweep(_) => {}
        }
    }

    fn hold(&mut self, held: HoldState) {
        self.act(|state, ctx, _| state.adopt_hold(ctx, held, HoldSource::Seen));
    }

    fn release(&mut self) {
        if let StoreReply::Ready(Ok(held)) = self.wire.store.release(Key::ALL, &self.spec) {
            self.hold(held);
        }
    }

    async fn step(&mut self, step: &Step) {
        let index_of = |which: usize| which.checked_rem(self.requests.len());
        match *step {
            Step::Enter {
                cost,
                wait,
                by_deadline,
            } => self.enter(cost, wait, by_deadline),
            Step::Poll(which) => index_of(which).map_or((), |index| self.poll(index)),
            Step::Leave(which) => index_of(which).map_or((), |index| self.leave(index)),
            Step::Use(which) => index_of(which).map_or((), |index| self.use_permit(index)),
            Step::GiveBack(which) => index_of(which).map_or((), |index| self.give_back(index)),
            Step::Effect(which) => {
                if let Some(index) = which.checked_rem(self.pending.len()) {
                    self.run(index);
                }
            }
            Step::EffectLost(which) => {
                if let Some(index) = which.checked_rem(self.pending.len())
                    && self.faults
                {
                    self.lose(index);
                }
            }
            Step::Hold(span, cut) => {
                let held = HoldState {
                    remaining: ms(span),
                    releases: self.state.hold.releases(),
                    cut,
                };
                self.hold(held);
                if let StoreReply::Ready(Ok(held)) =
                    self.wire.store.hold(Key::ALL, &self.spec, held, None)
                {
                    self.hold(held);
                }
            }
            Step::Release => self.release(),
            Step::Doubt => self.state.doubt(),
            Step::Away(away) => self.wire.away.store(away && self.faults, Ordering::Relaxed),
            Step::Passes(span) => {
                // Only a fault makes a call take longer than permits live.
                let is_call = |effect: &Pending| matches!(effect, Pending::Call(..));
                while let Some(index) = self.pending.iter().position(is_call)
                    && span >= 20
                    && !self.faults
                {
                    self.run(index);
                }
                tokio::time::advance(ms(span)).await;
            }
        }
    }

    /// Polls only woken waiters, without faults, until none is left. Returns how long that took.
    async fn run_until_idle(&mut self) -> Duration {
        self.wire.away.store(false, Ordering::Relaxed);
        let (start, mut last) = (clock::now(), clock::now());
        loop {
            let mut idle = true;
            for index in 0..self.requests.len() {
                let request = &self.requests[index];
                if matches!(request.stage, Stage::Waiting)
                    && request.task.woken.load(Ordering::Relaxed)
                {
                    self.poll(index);
                    idle = false;
                }
                if matches!(self.requests[index].stage, Stage::Has(_)) {
                    self.use_permit(index);
                    idle = false;
                }
            }
            while let Some(index) =
                (0..self.pending.len()).find(|&index| self.pending[index].due() <= clock::now())
            {
                self.run(index);
                idle = false;
            }
            if !idle {
                continue;
            }
            let waiting = self
                .requests
                .iter()
                .filter(|request| !matches!(request.stage, Stage::Ended))
                .count();
            let due = self.pending.iter().map(Pending::due).min();
            if waiting > 0 {
                last = clock::now();
            }
            if waiting == 0 && due.is_none() {
                return last - start;
            }
            let latest = start + ms(2 * LONGEST);
            assert!(
                clock::now() < latest,
                "{waiting} requests wait, and none is woken"
            );
            tokio::select! {
                () = self.any_woken.notified() => {}
                () = clock::sleep_until(due.unwrap_or(latest).min(latest)) => {}
            }
        }
    }

    /// The most units used within `window`.
    fn most_used(&self, window: Duration) -> u32 {
        let within = |&(from, _): &(Instant, u32)| {
            let inside = self
                .uses
                .iter()
                .filter(move |(at, _)| *at >= from && *at < from + window);
            inside.map(|(_, units)| units).sum()
        };
        self.uses.iter().map(within).max().unwrap_or_default()
    }
}

impl Pending {
    fn due(&self) -> Instant {
        match *self {
            Pending::Call(_, _, since) => since,
            Pending::Gather(due) | Pending::PassOn(due) | Pending::Sweep(due) => due,
        }
    }
}

impl World {
    /// Asserts that each permit that was granted and not used was given back exactly once.
    fn assert_nothing_is_lost(&mut self) {
        // Permits at hand are given back when the state of the key is forgotten.
        self.act(|state, ctx, _| state.give_back_prefetched(ctx));
        let [granted, returned] =
            [&self.wire.granted, &self.wire.returned].map(|units| units.load(Ordering::Relaxed));
        let used: u64 = self.uses.iter().map(|(_, units)| u64::from(*units)).sum();
        assert_eq!(granted, used + returned, "{used} units were used");
    }
}

/// Runs the steps. Then the remaining requests go on, or leave if `quits`.
async fn run(count: u32, later: bool, faults: bool, quits: bool, steps: &[Step]) {
    let mut world = World::new(Quota::per_second(count), later, faults);
    // Half of the runs with faults fail open.
    world.fails_open = faults && count.is_multiple_of(2);
    for step in steps {
        world.step(step).await;
    }
    if quits {
        for index in 0..world.requests.len() {
            world.leave(index);
            world.give_back(index);
        }
    }
    let held = world.state.hold.left(clock::now()).unwrap_or_default();
    let left = world
        .requests
        .iter()
        .filter(|request| !matches!(request.stage, Stage::Ended));
    let units: u32 = left.map(|request| request.place.cost).sum();
    let took = world.run_until_idle().await;
    assert_eq!(world.state.waiting(), 0);
    assert!(world.state.queue.is_none(), "an empty queue is dropped");
    let most = world.most_used(ms(1000));
    assert!(
        most <= count,
        "{most} units within a second; at most {count} are allowed"
    );
    if !world.answer_lost {
        // A cost of 3 may leave 2 units of a window.
        let windows = units / (count - 2) + 2;
        assert!(
            took <= held + ms(1050) * windows + ms(1000),
            "{took:?} for {units} units, held for {held:?}"
        );
        world.assert_nothing_is_lost();
    }
}

/// All waiters leave during the batching delay of the next call, which would have returned their
/// permits.
#[tokio::test(start_paused = true)]
async fn permits_of_waiters_that_leave_early_go_back() {
    let mut world = World::new(Quota::per_second(5), true, false);
    for _ in 0..5 {
        world.enter(1, LONGEST, false);
    }
    world.run_until_idle().await;
    world.enter(1, LONGEST, false);
    while let Some(index) = world
        .pending
        .iter()
        .position(|effect| effect.due() <= clock::now())
    {
        world.run(index);
    }
    let booked = world
        .state
        .queue
        .as_ref()
        .and_then(|queue| queue.last_booked());
    assert!(booked.is_some(), "it has a slot");
    world.enter(1, LONGEST, false);
    for index in [5, 6] {
        world.leave(index);
    }
    world.run_until_idle().await;
    world.assert_nothing_is_lost();
}

/// The last waiter has its permit when the key is put on hold for longer than it can wait.
#[tokio::test(start_paused = true)]
async fn permits_of_waiters_held_too_long_go_back() {
    let mut world = World::new(Quota::per_second(5), false, false);
    for _ in 0..5 {
        world.enter(1, LONGEST, false);
    }
    world.run_until_idle().await;
    world.enter(1, 2000, false);
    // Another request hands the permit out, and the key is held before the waiter is polled.
    tokio::time::advance(ms(1025)).await;
    world.act(|state, ctx, _| state.step(ctx, None));
    assert_eq!(world.state.waiting(), 0, "the permit was handed out");
    world.hold(HoldState {
        remaining: ms(5000),
        ..HoldState::default()
    });
    world.poll(5);
    assert!(
        matches!(world.requests[5].stage, Stage::Ended),
        "it is refused"
    );
    world.assert_nothing_is_lost();
}

/// Short spans pass while a call is under way. Together they outlast the validity of a permit, so
/// the answer arrives too late.
#[tokio::test(start_paused = true)]
async fn answers_that_come_too_late_go_back() {
    let enter = |wait| Step::Enter {
        cost: 1,
        wait,
        by_deadline: false,
    };
    let steps = [
        Step::Hold(6, false),
        enter(6),
        enter(6),
        enter(6),
        Step::Release,
        Step::Passes(20),
        Step::Poll(28),
        Step::Poll(3),
        Step::Effect(0),
        enter(0),
        Step::Passes(15),
        Step::Passes(1),
        enter(0),
        Step::Passes(16),
        enter(0),
        Step::Poll(56),
        Step::Passes(18),
        enter(0),
    ];
    run(5, true, false, true, &steps).await;
}

/// A permit that comes back is taken for the probe's. The probe is accepted, and the others leave
/// then, not 5 s later.
#[tokio::test(start_paused = true)]
async fn a_probe_that_passes_ends_the_probation() {
    let enter = |cost, wait| Step::Enter {
        cost,
        wait,
        by_deadline: false,
    };
    let steps = [
        enter(1, 60_000),
        enter(1, 0),
        enter(1, 0),
        Step::Poll(0),
        enter(1, 60_000),
        enter(1, 60_000),
        enter(1, 60_000),
        Step::Release,
        enter(1, 0),
        Step::Leave(51),
        Step::Effect(0),
        Step::Effect(0),
        Step::Effect(0),
        Step::Hold(1, true),
        Step::Passes(10),
        enter(1, 0),
        Step::Effect(0),
        Step::Effect(0),
        Step::Poll(23),
        enter(1, 0),
        Step::GiveBack(43),
        enter(1, 60_000),
        enter(1, 60_000),
        Step::Leave(17),
        enter(3, 60_000),
    ];
    run(8, true, false, false, &steps).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn waits_end_in_order_and_no_permit_is_lost(
        count in prop_oneof![3 => 5u32..12, 1 => 100u32..300],
        (later, faults, quits) in any::<(bool, bool, bool)>(),
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run(count, later, faults, quits, &steps));
    }
}

/// The permit of the probe expires before its waiter wakes. The next call to the store does not
/// wait for a probe that never left.
#[tokio::test(start_paused = true)]
async fn an_expired_probe_delays_no_call() {
    let enter = |cost, wait| Step::Enter {
        cost,
        wait,
        by_deadline: false,
    };
    let steps = [
        enter(1, 0),
        enter(1, 0),
        Step::Poll(0),
        Step::Poll(0),
        Step::Hold(1, true),
        Step::Poll(0),
        Step::Passes(1),
        enter(1, 0),
        enter(1, 0),
        enter(1, 60000),
        enter(1, 60000),
        enter(1, 0),
        enter(1, 60000),
        enter(1, 60000),
        Step::Poll(0),
        enter(1, 0),
        Step::Poll(0),
        enter(1, 0),
        enter(1, 60000),
        Step::Leave(13),
        Step::Leave(45),
        enter(1, 60000),
        enter(1, 60000),
        enter(3, 60000),
        Step::Leave(47),
        Step::Use(0),
        Step::Effect(0),
        Step::Passes(9),
    ];
    run(9, true, false, false, &steps).await;
}

/// A limiter keeps the state of each of many keys.
#[test]
fn states_of_keys_are_small() {
    assert!(
        size_of::<KeyState>() <= 168,
        "{} bytes",
        size_of::<KeyState>()
    );
}
