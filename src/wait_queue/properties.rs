//! The queue against a model: a list of requests, for random sequences of calls under a paused
//! clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// All moments at which tasks wake lie between two moments at which the queue is called.
const STEP: Duration = Duration::from_millis(10);
const HALF_STEP: Duration = Duration::from_millis(5);

#[derive(Clone, Debug)]
enum Step {
    /// A request with this value enters, and wakes after so many steps.
    Enter(u8, u32),
    /// A request with this value enters with an outcome.
    EnterSettled(u8),
    /// A request that has left or was collected enters again, with its old number.
    Return(usize, u32),
    Poll(usize),
    WakeAt(usize, u32),
    /// Settles a request, from its own task or from another one.
    Settle(usize, bool),
    SettleFirst,
    /// Settles the requests with this value.
    SettleWhere(u8),
    WakeWhere(u8),
    Collect(usize),
    Leave(usize),
    Pass(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0_usize..16;
    prop_oneof![
        4 => (0..4_u8, 0..5_u32).prop_map(|(value, steps)| Step::Enter(value, steps)),
        1 => (0..4_u8).prop_map(Step::EnterSettled),
        1 => (which(), 0..5_u32).prop_map(|(which, steps)| Step::Return(which, steps)),
        4 => which().prop_map(Step::Poll),
        2 => (which(), 0..5_u32).prop_map(|(which, steps)| Step::WakeAt(which, steps)),
        1 => (which(), any::<bool>()).prop_map(|(which, is_running)| Step::Settle(which, is_running)),
        2 => Just(Step::SettleFirst),
        1 => (0..4_u8).prop_map(Step::SettleWhere),
        1 => (0..4_u8).prop_map(Step::WakeWhere),
        2 => which().prop_map(Step::Collect),
        2 => which().prop_map(Step::Leave),
        3 => (0..3_u32).prop_map(Step::Pass),
    ]
}

#[derive(Default)]
struct Task(AtomicBool);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Waiting,
    /// Its wait has ended with this outcome.
    Settled(usize),
    Gone,
}

/// A request as the model knows it.
struct Modelled {
    value: u8,
    place: Place,
    wakes_at: Instant,
    /// Whether the task is woken when the wait ends, and when the timer fires.
    has_waker: bool,
    has_timer: bool,
    is_woken: bool,
    task: Arc<Task>,
}

impl Modelled {
    fn new(value: u8, wakes_at: Instant) -> Self {
        Modelled {
            value,
            place: Place::Waiting,
            wakes_at,
            has_waker: false,
            has_timer: false,
            is_woken: false,
            task: Arc::default(),
        }
    }

    fn wake(&mut self) {
        self.is_woken |= std::mem::take(&mut self.has_waker);
    }

    fn end(&mut self, place: Place) {
        self.place = place;
        self.has_timer = false;
    }

    fn fire_timer(&mut self, now: Instant) {
        if self.has_timer && self.wakes_at <= now {
            self.has_timer = false;
            self.is_woken = true;
        }
    }
}

#[derive(Default)]
struct World {
    queue: WaitQueue<u8, usize>,
    /// Each request's index is its number.
    requests: Vec<Modelled>,
    outcomes: usize,
}

impl World {
    fn moment(steps: u32) -> Instant {
        clock::now() + STEP * steps - HALF_STEP
    }

    fn next_outcome(&mut self) -> usize {
        self.outcomes += 1;
        self.outcomes
    }

    async fn step(&mut self, step: Step) {
        let mut wakers = Wakers::default();
        let len = self.requests.len();
        match step {
            Step::Enter(value, steps) => {
                self.queue.enter(len as Number, value, Self::moment(steps));
                self.requests
                    .push(Modelled::new(value, Self::moment(steps)));
            }
            Step::EnterSettled(value) => {
                let outcome = self.next_outcome();
                self.queue.enter_settled(len as Number, outcome);
                let mut request = Modelled::new(value, Self::moment(0));
                request.end(Place::Settled(outcome));
                self.requests.push(request);
            }
            Step::Pass(steps) => tokio::time::advance(STEP * steps).await,
            Step::SettleFirst => {
                let outcome = self.next_outcome();
                let settled = self.queue.settle_first(outcome, &mut wakers);
                let first = self
                    .requests
                    .iter_mut()
                    .find(|request| request.place == Place::Waiting);
                assert_eq!(settled, first.as_ref().map(|request| request.value));
                if let Some(request) = first {
                    request.wake();
                    request.end(Place::Settled(outcome));
                }
            }
            Step::SettleWhere(value) => {
                let outcome = self.next_outcome();
                let settled = self
                    .queue
                    .settle_where(|_, &of| (of == value).then_some(outcome), &mut wakers);
                let waiting = self
                    .requests
                    .iter_mut()
                    .filter(|request| request.place == Place::Waiting);
                let mut count = 0;
                for request in waiting.filter(|request| request.value == value) {
                    request.wake();
                    request.end(Place::Settled(outcome));
                    count += 1;
                }
                assert_eq!(settled, count);
            }
            Step::WakeWhere(value) => {
                self.queue.wake_where(|&of| of == value, &mut wakers);
                let waiting = self
                    .requests
                    .iter_mut()
                    .filter(|request| request.place == Place::Waiting);
                waiting
                    .filter(|request| request.value == value)
                    .for_each(Modelled::wake);
            }
            Step::Return(which, _)
            | Step::Poll(which)
            | Step::WakeAt(which, _)
            | Step::Settle(which, _)
            | Step::Collect(which)
            | Step::Leave(which) => {
                if len > 0 {
                    self.step_of(which % len, &step, &mut wakers);
                }
            }
        }
        wakers.wake();
        for request in &mut self.requests {
            request.fire_timer(clock::now());
        }
        self.check();
    }

    /// Runs a step of one request.
    fn step_of(&mut self, index: usize, step: &Step, wakers: &mut Wakers) {
        let number = index as Number;
        let outcome = self.next_outcome();
        let World {
            queue, requests, ..
        } = self;
        let request = &mut requests[index];
        let is_waiting = request.place == Place::Waiting;
        match *step {
            Step::Return(_, steps) if request.place == Place::Gone => {
                queue.enter(number, request.value, Self::moment(steps));
                *request = Modelled::new(request.value, Self::moment(steps));
            }
            Step::Poll(_) => {
                let Some(waiter) = queue.get_mut(number) else {
                    assert!(!is_waiting);
                    return;
                };
                request.is_woken = false;
                request.task.0.store(false, Ordering::Relaxed);
                waiter.register(&mut Context::from_waker(&request.task.clone().into()));
                let is_woken = request.task.0.load(Ordering::Relaxed);
                assert_eq!(is_woken, request.wakes_at <= clock::now());
                request.has_waker = true;
                request.has_timer = true;
            }
            Step::WakeAt(_, steps) => {
                if let Some(waiter) = queue.get_mut(number) {
                    waiter.wake_at(Self::moment(steps));
                    request.wakes_at = Self::moment(steps);
                }
            }
            Step::Settle(_, is_running) => {
                if is_running {
                    queue.runs(number);
                    request.has_waker = false;
                }
                let settled = queue.settle(number, outcome, wakers);
                assert_eq!(settled, if is_waiting { Ok(()) } else { Err(outcome) });
                if is_waiting {
                    request.wake();
                    request.end(Place::Settled(outcome));
                }
            }
            Step::Collect(_) => {
                let expected = match request.place {
                    Place::Settled(outcome) => Some(outcome),
                    Place::Waiting | Place::Gone => None,
                };
                assert_eq!(queue.collect(number), expected);
                if !is_waiting {
                    request.end(Place::Gone);
                }
            }
            Step::Leave(_) => {
                let expected = match request.place {
                    Place::Waiting => Some(Left::Waiting(request.value)),
                    Place::Settled(outcome) => Some(Left::Settled(outcome)),
                    Place::Gone => None,
                };
                assert_eq!(queue.leave(number), expected);
                request.end(Place::Gone);
            }
            _ => {}
        }
    }

    fn check(&self) {
        let numbered = || (0..).zip(&self.requests);
        let waiting = || numbered().filter(|(_, request)| request.place == Place::Waiting);
        assert!(
            self.queue
                .numbers(..)
                .eq(waiting().map(|(number, _)| number)),
            "first come, first served"
        );
        assert_eq!(self.queue.waiting(), waiting().count());
        let is_empty = self
            .requests
            .iter()
            .all(|request| request.place == Place::Gone);
        assert_eq!(self.queue.is_empty(), is_empty);
        for (number, request) in numbered() {
            assert_eq!(
                request.task.0.load(Ordering::Relaxed),
                request.is_woken,
                "the task of {number}"
            );
        }
    }
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn queue_behaves_as_a_list_of_requests(steps in prop::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            // The first moments at which tasks wake lie before the start.
            tokio::time::advance(STEP).await;
            let mut world = World::default();
            for step in steps {
                world.step(step).await;
            }
        });
    }
}
