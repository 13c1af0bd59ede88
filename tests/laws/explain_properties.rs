//! What `explain` says about a request is what happens to it: random histories, under a paused clock,
//! in memory and behind a network.

use crate::support;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use support::{ms, pass, settle};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance};
use tollgate::limiter::{Because, Verdict};
use tollgate::store::{Lease, LeaseRequest, MemoryStore, PeekRequest, Store, StoreReply, Usage};
use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer, Reason};

/// A history of one key.
#[derive(Clone, Debug)]
struct History {
    quota: Quota,
    /// How long an answer of the store takes. Zero: it answers at once.
    trip: u64,
    max_queue: usize,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    Pass(u64),
    /// A request enters and waits.
    Enter(u32),
    /// The request that entered last leaves the queue.
    Cancel,
    /// A request takes what is free, and keeps its permit.
    Take(u32),
    /// The last permit that was taken is given back.
    GiveBack,
    Hold(u64),
    Release,
    /// A request that cannot wait is explained, and then enters. It has a deadline if it is one of the
    /// limiter whose requests wait.
    Now {
        cost: u32,
        by_deadline: bool,
    },
    /// A request that waits is explained, and then enters.
    Wait(u32),
}

/// No fixed windows: they follow the wall clock, which goes on between two calls.
fn quota() -> impl Strategy<Value = Quota> {
    let second = Duration::from_secs(1);
    prop_oneof![
        (1_u32..12).prop_map(move |count| Quota::new(count, second)),
        (4_u32..12, 1_u32..4).prop_map(move |(count, short)| {
            Quota::new(count, second * 5).and(Quota::new(short, second))
        }),
        (1_u32..8, 1_u32..8)
            .prop_map(move |(burst, count)| Quota::bucket(burst).refill(count, second)),
        (2_u32..12).prop_map(|count| Quota::per_minute(count * 60).burst(count)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let cost = || prop_oneof![3 => Just(1_u32), 1 => 2_u32..5];
    prop_oneof![
        4 => prop_oneof![0_u64..60, 0_u64..1500].prop_map(Step::Pass),
        4 => cost().prop_map(Step::Enter),
        1 => Just(Step::Cancel),
        4 => cost().prop_map(Step::Take),
        1 => Just(Step::GiveBack),
        1 => (1_u64..3000).prop_map(Step::Hold),
        1 => Just(Step::Release),
        4 => (cost(), any::<bool>()).prop_map(|(cost, by_deadline)| Step::Now { cost, by_deadline }),
        2 => cost().prop_map(Step::Wait),
    ]
}

fn history() -> impl Strategy<Value = History> {
    let trip = prop_oneof![2 => Just(0_u64), 1 => 1_u64..6];
    let max_queue = prop_oneof![4 => Just(1000), 1 => 1_usize..4];
    let steps = prop::collection::vec(step(), 1..40);
    (quota(), trip, max_queue, steps).prop_map(|(quota, trip, max_queue, steps)| History {
        quota,
        trip,
        max_queue,
        steps,
    })
}

/// How far the stated wait may be off: the longest life of a permit and the transit slack, and for a
/// distant store its trips and the batching delay.
fn tolerance(trip: u64) -> Duration {
    let life = 50 + 10;
    let batching = if trip == 0 { 0 } else { 10 };
    ms(life + batching + 6 * trip + 2)
}

/// A store in memory whose answers take a trip to arrive.
struct Distant {
    store: MemoryStore,
    trip: Duration,
}

impl Distant {
    fn later<T: Send + 'static>(&self, answer: StoreReply<T>) -> StoreReply<T> {
        let trip = self.trip;
        let StoreReply::Ready(answer) = answer else {
            unreachable!("memory answers at once")
        };
        StoreReply::Pending(Box::pin(async move {
            pass(trip).await;
            answer
        }))
    }
}

impl Store for Distant {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.later(self.store.lease(request))
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.later(self.store.peek(request))
    }
}

struct World {
    /// Its requests wait.
    patient: Limiter,
    /// Its requests cannot wait.
    impatient: Limiter,
    waiters: Vec<JoinHandle<()>>,
    taken: Vec<Permit>,
    trip: Duration,
    held_until: Instant,
    tolerance: Duration,
}

impl World {
    fn new(history: &History) -> World {
        let store: Arc<dyn Store> = match history.trip {
            0 => Arc::new(MemoryStore::default()),
            trip => Arc::new(Distant {
                store: MemoryStore::default(),
                trip: ms(trip),
            }),
        };
        let limiter = |max_wait| {
            RateLimitLayer::builder(history.quota)
                .charged_by_hand()
                .store(store.clone())
                .max_wait(max_wait)
                .max_queue(history.max_queue)
                .build()
                .unwrap()
                .limiter()
        };
        World {
            patient: limiter(Duration::from_secs(3600)),
            impatient: limiter(Duration::ZERO),
            waiters: Vec::new(),
            taken: Vec::new(),
            trip: ms(history.trip),
            held_until: Instant::now(),
            tolerance: tolerance(history.trip),
        }
    }

    /// Returns what was wrong.
    async fn play(&mut self, step: &Step) -> Result<(), String> {
        match *step {
            Step::Pass(span) => advance(ms(span)).await,
            Step::Enter(cost) => {
                let request = self.patient.acquire(Key::ALL).cost(cost);
                self.waiters.push(tokio::spawn(async move {
                    drop(request.await);
                }));
            }
            Step::Cancel => {
                if let Some(waiter) = self.waiters.pop() {
                    waiter.abort();
                }
            }
            Step::Take(cost) => {
                let taken = self.impatient.acquire(Key::ALL).cost(cost).await;
                self.taken.extend(taken);
            }
            Step::GiveBack => {
                if let Some(permit) = self.taken.pop() {
                    permit.give_back();
                }
            }
            Step::Hold(span) => {
                self.held_until = self.held_until.max(Instant::now() + ms(span));
                self.patient.hold_for(Key::ALL, ms(span)).await.unwrap();
            }
            Step::Release => {
                self.held_until = Instant::now();
                self.patient.release(Key::ALL).await.unwrap();
            }
            Step::Now { cost, by_deadline } => {
                // To a distant store, a deadline that is now has passed when the answer arrives.
                return self.now(cost, by_deadline && self.trip.is_zero()).await;
            }
            Step::Wait(cost) => return self.wait(cost).await,
        }
        self.settle().await;
        Ok(())
    }

    /// Lets calls arrive that are on their way: what they will book is not known yet.
    async fn settle(&self) {
        settle().await;
        if !self.trip.is_zero() {
            pass(ms(12) + self.trip * 2).await;
        }
    }

    /// Lets a hold end that would end between two calls to a distant store: other requests book then.
    async fn avoid_the_end_of_a_hold(&self) {
        let left = self.held_until.duration_since(Instant::now());
        if !self.trip.is_zero() && left < ms(100) {
            pass(left).await;
            self.settle().await;
        }
    }

    /// The request gets its permit if, and only if, that is stated: at once, or after the margin of its slot. Otherwise the
    /// reason is the stated one.
    async fn now(&mut self, cost: u32, by_deadline: bool) -> Result<(), String> {
        self.avoid_the_end_of_a_hold().await;
        let request = || {
            if by_deadline {
                let request = self.patient.acquire(Key::ALL).cost(cost);
                request.deadline(Instant::now().into_std())
            } else {
                self.impatient.acquire(Key::ALL).cost(cost)
            }
        };
        let explanation = request().explain().await.unwrap();
        let goes = matches!(explanation.verdict, Verdict::Goes | Verdict::Waits { .. });
        // Requests of the other limiter that wait for the end of a hold may be first, and no store knows of them.
        let others_wait = self.waiters.iter().any(|waiter| !waiter.is_finished());
        let happened = request().await;
        // The slot may come near enough between the two calls to a distant store.
        let is_near = match &explanation.verdict {
            Verdict::Refused {
                reason,
                retry_after: Some(left),
                ..
            } => {
                let margin = match reason {
                    Reason::MaxWait(margin) => *margin,
                    _ => Duration::ZERO,
                };
                !self.trip.is_zero() && *left <= margin + self.trip * 4
            }
            _ => false,
        };
        let stated = match &explanation.verdict {
            Verdict::Refused { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        let reason = happened.as_ref().err().and_then(Limited::reason);
        // Once a second, a request that is held asks the store for a release before it is refused.
        let asks = matches!(
            (&stated, &reason),
            (Some(Reason::Held), Some(Reason::QueueFull(_)))
        );
        let is_same = stated == reason || asks || !self.trip.is_zero();
        let is_right = goes == happened.is_ok() && is_same;
        let is_first_uncertain = others_wait
            && matches!(
                explanation.verdict,
                Verdict::Waits { because, .. } if because == Because::Held
            );
        if !is_right && !is_near && !is_first_uncertain {
            return Err(format!(
                "{explanation}\n{:?}\nbut {happened:?}",
                explanation.verdict
            ));
        }
        self.taken.extend(happened);
        Ok(())
    }

    /// The wait is the stated one.
    async fn wait(&mut self, cost: u32) -> Result<(), String> {
        self.avoid_the_end_of_a_hold().await;
        let request = || self.patient.acquire(Key::ALL).cost(cost);
        let explanation = request().explain().await.unwrap();
        let stated = match explanation.verdict {
            Verdict::Goes => Some(Duration::ZERO),
            Verdict::Waits { wait, .. } => Some(wait.expect("only rates and holds")),
            _ => None,
        };
        let since = Instant::now();
        let happened = request().await;
        let waited = happened.as_ref().ok().map(|_| since.elapsed());
        let is_right = match (stated, waited) {
            (Some(stated), Some(waited)) => stated.abs_diff(waited) <= self.tolerance,
            (stated, waited) => stated.is_none() && waited.is_none(),
        };
        if !is_right {
            return Err(format!(
                "{explanation}\n{:?}\nbut {waited:?}, {happened:?}",
                explanation.verdict
            ));
        }
        self.settle().await;
        Ok(())
    }
}

async fn wrong(history: &History) -> Option<String> {
    let mut world = World::new(history);
    if history.trip > 0 {
        // From its first answers a process learns how long a trip takes, and so for how long its
        // permits have to be valid.
        for _ in 0..3 {
            for limiter in [&world.patient, &world.impatient] {
                drop(limiter.acquire(Key::ALL).await);
                pass(Duration::from_secs(60)).await;
            }
        }
    }
    for (number, step) in history.steps.iter().enumerate() {
        if let Err(wrong) = world.play(step).await {
            return Some(format!("step {number}, {step:?}: {wrong}"));
        }
    }
    None
}

/// A step of a history of requests of two keys.
#[derive(Clone, Copy, Debug)]
enum JointStep {
    Pass(u64),
    /// A request of one of the keys takes what is free.
    Take {
        key: usize,
        cost: u32,
    },
    Hold {
        key: usize,
        span: u64,
    },
    /// A request of both keys is explained, and then enters. If it is patient, it waits.
    Joint {
        cost: u32,
        is_patient: bool,
    },
}

fn joint_step() -> impl Strategy<Value = JointStep> {
    let cost = || prop_oneof![3 => Just(1_u32), 1 => 2_u32..5];
    prop_oneof![
        4 => (0_u64..1500).prop_map(JointStep::Pass),
        4 => (0_usize..2, cost()).prop_map(|(key, cost)| JointStep::Take { key, cost }),
        1 => (0_usize..2, 1_u64..3000).prop_map(|(key, span)| JointStep::Hold { key, span }),
        6 => (cost(), any::<bool>()).prop_map(|(cost, is_patient)| JointStep::Joint { cost, is_patient }),
    ]
}

async fn wrong_jointly(quotas: &[Quota; 2], steps: &[JointStep]) -> Option<String> {
    let limiters = |max_wait: Duration, store: &[Arc<MemoryStore>; 2]| {
        [0, 1].map(|key| {
            let builder = RateLimitLayer::builder(quotas[key])
                .charged_by_hand()
                .store(store[key].clone());
            builder.max_wait(max_wait).build().unwrap().limiter()
        })
    };
    let stores = [(); 2].map(|()| Arc::new(MemoryStore::default()));
    let patient = limiters(Duration::from_secs(3600), &stores);
    let impatient = limiters(Duration::ZERO, &stores);
    for (number, step) in steps.iter().enumerate() {
        match *step {
            JointStep::Pass(span) => advance(ms(span)).await,
            JointStep::Take { key, cost } => {
                drop(impatient[key].acquire(Key::ALL).cost(cost).await)
            }
            JointStep::Hold { key, span } => {
                patient[key].hold_for(Key::ALL, ms(span)).await.unwrap();
            }
            JointStep::Joint { cost, is_patient } => {
                let limiters = if is_patient { &patient } else { &impatient };
                let request = || {
                    let first = limiters[0].acquire(Key::ALL).cost(cost);
                    first.and(limiters[1].acquire(Key::ALL))
                };
                let explanation = request().explain().await.unwrap();
                let stated = match explanation.verdict {
                    Verdict::Goes => Some(Duration::ZERO),
                    Verdict::Waits { wait, .. } => wait,
                    _ => None,
                };
                let since = Instant::now();
                let happened = request().await;
                let waited = happened.as_ref().ok().map(|_| since.elapsed());
                let is_right = match (stated, waited) {
                    // All keys have to allow the request at the same moment.
                    (Some(stated), Some(waited)) if !stated.is_zero() => {
                        waited + tolerance(0) >= stated
                    }
                    (stated, waited) => stated == waited,
                };
                if !is_right {
                    return Some(format!(
                        "step {number}: {explanation}\nbut {waited:?}, {happened:?}"
                    ));
                }
            }
        }
        settle().await;
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        max_shrink_time: 15_000,
        ..histories::config(64)
    })]

    #[test]
    fn requests_do_what_explain_says(history in history()) {
        let runtime = crate::support::paused_runtime();
        let wrong = runtime.block_on(wrong(&history));
        prop_assert!(wrong.is_none(), "{}", wrong.unwrap_or_default());
    }

    #[test]
    fn requests_of_two_keys_do_what_explain_says(
        quotas in [quota(), quota()],
        steps in prop::collection::vec(joint_step(), 1..30),
    ) {
        let runtime = crate::support::paused_runtime();
        let wrong = runtime.block_on(wrong_jointly(&quotas, &steps));
        prop_assert!(wrong.is_none(), "{}", wrong.unwrap_or_default());
    }
}
