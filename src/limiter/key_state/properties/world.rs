//! The callers, tasks and effects around the state of a key, for the property tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::super::{Effect, FleetCall, HoldSource, KeyContext, KeyState, SentCall, Ticket, Work};
use super::Step;
use super::request::{Pending, Request, Stage, Task};
use super::wire::Wire;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::limiter::queue::next_number;
use crate::limiter::reservation::{NoSlot, ProbeNumber, Reservation};
use crate::quota::Quota;
use crate::store::{Change, HoldState, Lease, Store, StoreReply};
use crate::wait_queue::WaitBound;

/// The longest wait of a request, in milliseconds.
pub(super) const LONGEST: u64 = 60_000;

pub(super) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) struct World {
    pub(super) state: KeyState,
    wire: Arc<Wire>,
    store: Arc<dyn Store>,
    spec: Arc<LimitSpec>,
    /// Whether effects may be dropped and the store may become unreachable.
    faults: bool,
    /// Whether requests pass uncounted if the store fails.
    pub(super) fails_open: bool,
    /// Whether an answer was lost that may have granted permits.
    pub(super) answer_lost: bool,
    pub(super) requests: Vec<Request>,
    pub(super) pending: Vec<Pending>,
    /// The questions to the store which process probes.
    asked: Vec<FleetCall>,
    uses: Vec<(Instant, u32)>,
    any_woken: Arc<Notify>,
}

impl World {
    pub(super) fn new(quota: Quota, later: bool, faults: bool) -> Self {
        let wire = Arc::new(Wire {
            store: Arc::default(),
            later,
            away: AtomicBool::new(false),
            granted: AtomicU64::new(0),
            returned: AtomicU64::new(0),
        });
        World {
            state: KeyState::new(ms(10)),
            store: wire.clone(),
            wire,
            spec: Arc::new(LimitSpec::new(quota, ms(10), ms(10))),
            faults,
            fails_open: false,
            answer_lost: faults,
            requests: Vec::new(),
            pending: Vec::new(),
            asked: Vec::new(),
            uses: Vec::new(),
            any_woken: Arc::default(),
        }
    }

    /// Runs `act` on the state of the key, as the limiter does. What is late is done before it: a request that comes back has
    /// no place in the line meanwhile.
    pub(super) fn act<R>(
        &mut self,
        act: impl FnOnce(&mut KeyState, &mut KeyContext<'_>, &mut [Request]) -> R,
    ) -> R {
        self.watched(|state, ctx, _| state.catch_up(ctx));
        let result = self.watched(act);
        // The store has no registers: this process is the only one.
        while let Some(call) = self.asked.pop() {
            self.watched(|state, ctx, _| state.fleet_answered(ctx, None, call.probe));
        }
        result
    }

    /// Runs `act`, and notes which requests overtake others.
    fn watched<R>(
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
            is_draining: false,
            key: Key::ALL,
            store: &self.store,
            spec: &self.spec,
            now,
            max_queue: 30,
            fails_open: self.fails_open,
            settles: false,
            max_hold: ms(60_000),
            work: Work::default(),
        };
        let result = act(&mut self.state, &mut ctx, &mut self.requests);
        self.state.end_visit(&mut ctx);
        let visit = self.state.wants_visit(&ctx.work, now).map(Pending::Visit);
        let Work {
            wakers, effects, ..
        } = ctx.work;
        wakers.wake();
        let calls = effects.into_iter().filter_map(|effect| match effect {
            Effect::ShareProbe(call) => {
                self.asked.push(*call);
                None
            }
            Effect::Call(call, answer) => Some(Pending::Call(call, answer)),
            Effect::LimitInFlight(_) | Effect::StateParts | Effect::Borrow => None,
        });
        self.pending.extend(calls.chain(visit));
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

    pub(super) fn enter(&mut self, cost: u32, wait: u64, by_deadline: bool) {
        let now = clock::now();
        let deadline = by_deadline.then(|| clock::after(now, ms(wait)));
        let bound = WaitBound::new(
            deadline,
            now,
            ms(if by_deadline { LONGEST + 1 } else { wait }),
            Duration::ZERO,
        );
        let number = next_number();
        let entered =
            self.act(|state, ctx, _| Ticket::new(number, cost, bound).enter(state, ctx, false));
        let (number, stage) = match entered {
            Some(Ok(slot)) => {
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
            Some(Err(NoSlot::Failed(_))) => {
                assert!(self.faults, "the store is there");
                return;
            }
            Some(Err(NoSlot::Uncounted(_, probe))) => return self.left_uncounted(probe),
            Some(Err(NoSlot::TooLate(_)) | Err(NoSlot::Refused(..))) => return,
        };
        let task = Arc::new(Task {
            woken: AtomicBool::new(true),
            any_woken: self.any_woken.clone(),
        });
        let place = Ticket {
            number,
            cost,
            bound,
        };
        self.requests.push(Request {
            place,
            task,
            stage,
            overtakes: false,
        });
    }

    pub(super) fn is_waiting(&self, request: &Request) -> bool {
        let Ticket { number, cost, .. } = request.place;
        self.state
            .queue
            .as_ref()
            .is_some_and(|queue| queue.is_waiting(number, cost))
    }

    pub(super) fn assert_usable(&self, slot: &Reservation) {
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

    pub(super) fn poll(&mut self, index: usize) {
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
            Poll::Ready(Ok(slot)) if slot.until <= clock::now() => {
                return self.come_back(index, slot);
            }
            Poll::Ready(Ok(slot)) => {
                self.assert_usable(&slot);
                assert!(
                    !self.requests[index].overtakes,
                    "requests leave in the order of their arrival"
                );
                Stage::Has(slot)
            }
            Poll::Ready(Err(NoSlot::Uncounted(_, probe))) => {
                self.left_uncounted(probe);
                self.answer_lost = true;
                Stage::Ended
            }
            // Its call is still under way.
            Poll::Ready(Err(NoSlot::Failed(StoreError::NoAnswer { .. }))) => Stage::Ended,
            Poll::Ready(Err(NoSlot::Failed(error))) => {
                // Permits of an answer that took too long count as spent.
                let too_slow = matches!(error, StoreError::TooSlow { .. });
                assert!(self.faults || too_slow, "the store is there");
                self.answer_lost = true;
                Stage::Ended
            }
            Poll::Ready(Err(NoSlot::TooLate(_)) | Err(NoSlot::Refused(..))) => Stage::Ended,
        };
        self.requests[index].stage = stage;
    }

    /// A request has left uncounted, as this probe if it is one. It has no response.
    fn left_uncounted(&mut self, probe: Option<ProbeNumber>) {
        assert!(self.faults && self.fails_open, "the store is there");
        let is_held = self.state.hold.left(clock::now()).is_some();
        assert!(
            !is_held,
            "no request passes uncounted while the key is on hold"
        );
        if let Some(number) = probe {
            self.act(|state, ctx, _| state.probe_not_sent(ctx, number));
        }
    }

    pub(super) fn leave(&mut self, index: usize) {
        if matches!(self.requests[index].stage, Stage::Waiting) {
            self.requests[index].stage = Stage::Ended;
            self.act(|state, ctx, requests| requests[index].place.leave(state, ctx));
        }
    }

    pub(super) fn use_permit(&mut self, index: usize) {
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
                let passed = state.hold.accepted_upstream(slot.probe, now, now);
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
            self.act(|state, ctx, _| state.give_back(ctx, slot, true));
        } else {
            self.come_back(index, slot);
        }
    }

    /// A request returns to its old place, because its permit has expired.
    fn come_back(&mut self, index: usize, slot: Reservation) {
        let request = &mut self.requests[index];
        request.stage = Stage::Waiting;
        request.overtakes = false;
        request.task.woken.store(true, Ordering::Relaxed);
        self.act(|state, ctx, requests| {
            requests[index].place.come_back(state, ctx, Some(slot));
        });
    }

    pub(super) fn give_back(&mut self, index: usize) {
        if let Stage::Has(slot) = self.requests[index].stage {
            self.requests[index].stage = Stage::Ended;
            self.act(|state, ctx, _| state.give_back(ctx, slot, true));
        }
    }

    /// Runs the effect at `index` if it is due. Returns whether it was due.
    pub(super) fn run(&mut self, index: usize) -> bool {
        let now = clock::now();
        if self.pending[index].due() > now {
            return false;
        }
        match self.pending.swap_remove(index) {
            Pending::Call(call, mut answer) => {
                let Poll::Ready(answer) = answer
                    .as_mut()
                    .poll(&mut Context::from_waker(Waker::noop()))
                else {
                    unreachable!("it was answered when it was asked");
                };
                self.answered(call, answer);
            }
            Pending::Visit(_) => self.act(|state, ctx, _| state.on_time(ctx)),
        }
        true
    }

    pub(super) fn answered(&mut self, call: SentCall, answer: Result<Lease, StoreError>) {
        self.act(|state, ctx, _| state.call_answered(ctx, call, answer));
    }

    pub(super) fn lose(&mut self, index: usize) {
        match self.pending.swap_remove(index) {
            Pending::Call(call, _) => self.answered(call, Err(StoreError::Lost)),
            Pending::Visit(at) => self.act(|state, ctx, _| state.visit_lost(ctx, at)),
        }
    }

    pub(super) fn hold(&mut self, held: HoldState) {
        self.act(|state, ctx, _| state.adopt_hold(ctx, held, HoldSource::Seen));
    }

    pub(super) fn release(&mut self) {
        self.change(Change::Release);
    }

    /// Makes a change of the hold, and takes in the one in force.
    fn change(&mut self, change: Change) {
        let changed = self.wire.store.change(Key::ALL, &self.spec, change);
        if let StoreReply::Ready(Ok(in_force)) = changed {
            self.hold(in_force.hold);
        }
    }

    pub(super) async fn step(&mut self, step: &Step) {
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
                self.change(Change::Hold {
                    hold: held,
                    remaining: None,
                });
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
    pub(super) async fn run_until_idle(&mut self) -> Duration {
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
    pub(super) fn most_used(&self, window: Duration) -> u32 {
        let within = |&(from, _): &(Instant, u32)| {
            let inside = self
                .uses
                .iter()
                .filter(move |(at, _)| *at >= from && *at < from + window);
            inside.map(|(_, units)| units).sum()
        };
        self.uses.iter().map(within).max().unwrap_or_default()
    }

    /// Asserts that each permit that was granted and not used was given back exactly once.
    pub(super) fn assert_nothing_is_lost(&mut self) {
        // Permits at hand are given back when the state of the key is forgotten.
        self.act(|state, ctx, _| state.give_back_prefetched(ctx));
        let [granted, returned] =
            [&self.wire.granted, &self.wire.returned].map(|units| units.load(Ordering::Relaxed));
        let used: u64 = self.uses.iter().map(|(_, units)| u64::from(*units)).sum();
        assert_eq!(granted, used + returned, "{used} units were used");
    }
}
