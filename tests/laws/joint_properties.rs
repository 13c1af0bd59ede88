//! Random histories of requests with several keys, through whole limiters, against a brute-force
//! count of every window. Under a paused clock.

use crate::support::over;

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use http::StatusCode;
use over::over;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tollgate::limiter::{Acquire, KeyStatus};
use tollgate::quota::Limit;
use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreError, StoreReply};
use tollgate::{
    Key, Limiter, OnStoreError, Permit, Quota, RateLimitBuilder, RateLimitLayer, Signal,
};

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// The shortest time from when a permit is granted until the limiter is notified of a response, or
/// of a permit given back. In that time, the other requests whose turns came at the same moment
/// leave, in any order.
const RESPONSE: Duration = Duration::from_millis(1);

/// Two ends of a hold that are at most so far apart count as one end. The later one is ignored.
const SAME_END: Duration = Duration::from_millis(5);

/// The most keys of a history.
const MOST_KEYS: usize = 5;

/// A limiter.
#[derive(Clone, Debug)]
struct LimiterPlan {
    quota: Quota,
    max_wait: u64,
    max_keys: usize,
    fails_open: bool,
    store: StorePlan,
}

/// A store in memory, perhaps behind a network.
#[derive(Clone, Debug)]
struct StorePlan {
    /// How long a reply takes. Zero: the store replies at once.
    trip: u64,
    /// Whether the store has sessions, as a server has that may lose its state.
    has_sessions: bool,
    /// From when until when each call fails.
    fails: Option<(u64, u64)>,
}

#[derive(Clone, Debug)]
enum Step {
    Request(Request),
    Hold { key: usize, span: u64 },
    Release { key: usize },
}

#[derive(Clone, Debug)]
struct Request {
    keys: Costs,
    deadline: Option<u64>,
    patience: Patience,
    then: Then,
}

/// When a caller gives up.
#[derive(Clone, Copy, Debug)]
enum Patience {
    Endless,
    /// After this time.
    Time(u64),
    /// After so many polls.
    Polls(u32),
}

/// What a caller does with its permit.
#[derive(Clone, Copy, Debug)]
enum Then {
    GivesBack,
    /// Uses it after `delay` if it is still valid. The call takes `takes`.
    Uses {
        delay: u64,
        takes: u64,
    },
    /// Uses it, and the upstream refuses the request.
    Refused {
        /// In seconds, if the refusal states it.
        retry_after: Option<u64>,
    },
}

#[derive(Clone, Debug)]
struct History {
    limiters: Vec<LimiterPlan>,
    /// The number of the limiter of each key.
    keys: Vec<usize>,
    steps: Vec<(u64, Step)>,
}

fn quota() -> impl Strategy<Value = Quota> {
    prop_oneof![
        4 => (1u32..8, prop_oneof![50u64..300, Just(1000), Just(5000), Just(60_000), Just(7_200_000)])
            .prop_map(|(count, window)| Quota::new(count, millis(window))),
        2 => (5u32..20).prop_map(|count| Quota::per_second(count).burst(5)),
        2 => (2u32..6, 50u64..800, 3000u64..20_000).prop_map(|(count, short, long)| {
            Quota::new(count, millis(short)).and(Quota::new(count * 3, millis(long)))
        }),
        2 => (3u32..10, 1u32..20, 100u64..4000).prop_map(|(capacity, count, window)| {
            Quota::bucket(capacity).refill(count, millis(window))
        }),
        1 => (60u32..400).prop_map(Quota::per_second),
    ]
    // A small bucket that refills fast loses too much of its rate, and is refused by `build`.
    .prop_filter("too fine", |quota| RateLimitLayer::new(*quota).is_ok())
}

fn limiter() -> impl Strategy<Value = LimiterPlan> {
    let trip = prop_oneof![5 => Just(0u64), 1 => 1u64..4, 1 => 4u64..12];
    let store = (
        trip,
        prop::bool::weighted(0.3),
        prop::option::weighted(0.2, (0u64..5000, 1u64..3000)),
    )
        .prop_map(|(trip, has_sessions, fails)| StorePlan {
            trip,
            has_sessions,
            fails: fails.map(|(from, span)| (from, from + span)),
        });
    (
        quota(),
        prop::option::weighted(0.2, 1u32..5),
        prop_oneof![1 => Just(0u64), 1 => 1u64..100, 6 => 1000u64..300_000],
        prop_oneof![1 => 1usize..4, 4 => Just(1000usize)],
        any::<bool>(),
        store,
    )
        .prop_map(
            |(quota, in_flight, max_wait, max_keys, fails_open, store)| {
                let quota = match in_flight {
                    Some(most) => quota.and(Quota::in_flight(most)),
                    None => quota,
                };
                LimiterPlan {
                    quota,
                    max_wait,
                    max_keys,
                    fails_open,
                    store,
                }
            },
        )
}

fn request(keys: usize) -> impl Strategy<Value = Request> {
    let cost = prop_oneof![1 => Just(0u32), 8 => Just(1u32), 2 => 2u32..4];
    let patience = prop_oneof![
        5 => Just(Patience::Endless),
        1 => (0u64..4000).prop_map(Patience::Time),
        1 => (0u32..4).prop_map(Patience::Polls),
    ];
    let then = prop_oneof![
        6 => (prop_oneof![Just(0u64), 1u64..20], prop_oneof![Just(0u64), 0u64..300])
            .prop_map(|(delay, takes)| Then::Uses { delay, takes }),
        1 => Just(Then::GivesBack),
        1 => prop::option::of(0u64..10).prop_map(|retry_after| Then::Refused { retry_after }),
    ];
    (
        prop::sample::subsequence((0..keys).collect::<Vec<_>>(), 1..=keys.min(4)),
        prop::collection::vec(cost, 4),
        prop::option::weighted(0.2, 0u64..20_000),
        patience,
        then,
    )
        .prop_map(|(keys, costs, deadline, patience, then)| Request {
            keys: keys.into_iter().zip(costs).collect(),
            deadline,
            patience,
            then,
        })
}

fn history() -> impl Strategy<Value = History> {
    let limiters = prop::collection::vec(limiter(), 1..=3);
    (limiters, 2usize..=MOST_KEYS).prop_flat_map(|(limiters, count)| {
        let keys = prop::collection::vec(0..limiters.len(), count);
        let after = prop_oneof![6 => Just(0u64), 3 => 1u64..50, 2 => 200u64..3000];
        let step = prop_oneof![
            12 => request(count).prop_map(Step::Request),
            1 => (0..count, 1u64..5000).prop_map(|(key, span)| Step::Hold { key, span }),
            1 => (0..count).prop_map(|key| Step::Release { key }),
        ];
        let steps = prop::collection::vec((after, step), 1..80);
        (Just(limiters), keys, steps).prop_map(|(limiters, keys, steps)| History {
            limiters,
            keys,
            steps,
        })
    })
}

/// A store in memory behind a network, which may fail.
struct Remote {
    store: MemoryStore,
    plan: StorePlan,
    start: Instant,
}

impl Store for Remote {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let StorePlan {
            trip,
            has_sessions,
            fails,
        } = self.plan;
        let at = self.start.elapsed().as_millis() as u64;
        let memory = request.spec.quota().limits();
        let longest = memory.iter().map(Limit::window).max().unwrap_or_default();
        let StoreReply::Ready(mut answer) = self.store.lease(request) else {
            unreachable!("memory replies at once")
        };
        if fails.is_some_and(|(from, until)| (from..until).contains(&at)) {
            answer = Err(StoreError::Away(Arc::new(std::io::Error::other(
                "no route",
            ))));
        }
        if trip == 0 {
            return StoreReply::Ready(answer);
        }
        if has_sessions && let Ok(lease) = &mut answer {
            (lease.incarnation, lease.writes) = (7, 1);
            lease.session_ttl = longest + Duration::from_secs(1);
        }
        StoreReply::Pending(Box::pin(async move {
            sleep(millis(trip)).await;
            answer
        }))
    }
}

/// A future that is dropped after so many polls.
struct Polls<F> {
    inner: F,
    left: u32,
}

impl<F: Future + Unpin> Future for Polls<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        Pin::new(&mut self.inner).poll(cx).map(Some)
    }
}

/// Keys by number, each with a cost.
type Costs = Vec<(usize, u32)>;

/// What happened.
#[derive(Default)]
struct Events {
    /// The units that were used of each key, in the order of time.
    uses: HashMap<usize, Vec<(Instant, u32)>>,
    /// The grants of requests with equal keys and costs: number of the request, and when.
    grants: HashMap<Costs, Vec<(usize, Instant)>>,
    /// The units of permits that were not given back.
    spent: HashMap<usize, u32>,
    /// When keys were put on hold.
    holds: Vec<Instant>,
    /// From when on a key may be on probation: its upstream refused a request and stated no wait, or
    /// zero.
    probations: HashMap<usize, Instant>,
    wrong: Vec<String>,
}

struct World {
    plans: Vec<LimiterPlan>,
    limiters: Vec<Limiter>,
    keys: Vec<usize>,
    in_flight: Vec<AtomicU32>,
    events: Mutex<Events>,
    start: Instant,
}

impl World {
    fn new(history: &History) -> Arc<Self> {
        let start = Instant::now();
        let build = |plan: &LimiterPlan| {
            let on_store_error = if plan.fails_open {
                OnStoreError::FailOpen
            } else {
                OnStoreError::FailClosed
            };
            let builder: RateLimitBuilder = RateLimitLayer::builder(plan.quota)
                .charged_by_hand()
                .max_wait(millis(plan.max_wait))
                .max_keys(plan.max_keys)
                .on_store_error(on_store_error)
                .store(Arc::new(Remote {
                    store: MemoryStore::default(),
                    plan: plan.store.clone(),
                    start,
                }));
            builder.build().unwrap().limiter()
        };
        Arc::new(World {
            plans: history.limiters.clone(),
            limiters: history.limiters.iter().map(build).collect(),
            keys: history.keys.clone(),
            in_flight: history.keys.iter().map(|_| AtomicU32::new(0)).collect(),
            events: Mutex::default(),
            start,
        })
    }

    fn limiter(&self, key: usize) -> &Limiter {
        &self.limiters[self.keys[key]]
    }

    fn plan(&self, key: usize) -> &LimiterPlan {
        &self.plans[self.keys[key]]
    }

    fn key(&self, key: usize) -> Key {
        if key == 0 {
            Key::ALL
        } else {
            Key::new([key as u8])
        }
    }

    fn peek(&self, key: usize) -> KeyStatus {
        let peek = self.limiter(key).peek(self.key(key)).now_or_never();
        peek.unwrap().unwrap()
    }

    fn wrong(&self, text: String) {
        let at = self.start.elapsed();
        self.events
            .lock()
            .unwrap()
            .wrong
            .push(format!("{at:?}: {text}"));
    }

    fn acquire(&self, request: &Request) -> Acquire {
        let mut all = request
            .keys
            .iter()
            .map(|&(key, cost)| self.limiter(key).acquire(self.key(key)).cost(cost));
        let first = all.next().unwrap();
        let acquire = all.fold(first, Acquire::and);
        match request.deadline {
            Some(span) => acquire.deadline((Instant::now() + millis(span)).into_std()),
            None => acquire,
        }
    }

    /// Returns how long a request may wait.
    fn longest_wait(&self, request: &Request) -> Duration {
        let waits = request.keys.iter().map(|(key, _)| self.plan(*key).max_wait);
        millis(waits.chain(request.deadline).min().unwrap_or(0))
    }

    async fn run(self: Arc<Self>, number: usize, request: Request) {
        let bound = self.longest_wait(&request) + Duration::from_secs(1);
        let begin = Instant::now();
        let acquire = self.acquire(&request);
        let acquired = match request.patience {
            Patience::Endless => timeout(bound * 2 + Duration::from_secs(10), acquire)
                .await
                .ok(),
            Patience::Time(span) => timeout(millis(span), acquire).await.ok(),
            Patience::Polls(left) => {
                Polls {
                    inner: acquire,
                    left,
                }
                .await
            }
        };
        if begin.elapsed() > bound + millis(5) && !matches!(request.patience, Patience::Polls(_)) {
            let waited = begin.elapsed();
            self.wrong(format!(
                "request {number} ended after {waited:?}, not {bound:?}: {:?}",
                acquired.as_ref().map(|result| result.is_ok())
            ));
        }
        if let Some(Ok(permit)) = acquired {
            self.granted(number, &request, permit).await;
        }
    }

    async fn granted(&self, number: usize, request: &Request, permit: Permit) {
        {
            let mut events = self.events.lock().unwrap();
            let grants = events.grants.entry(request.keys.clone()).or_default();
            grants.push((number, Instant::now()));
        }
        let keys = || request.keys.iter().filter(|(_, cost)| *cost > 0);
        // A process without room for the state of a key learns of its hold from the store.
        let knows_hold = |key: usize| {
            let LimiterPlan {
                max_keys, store, ..
            } = self.plan(key);
            *max_keys >= MOST_KEYS || (store.trip == 0 && store.fails.is_none())
        };
        for &(key, _) in keys().filter(|(key, _)| knows_hold(*key)) {
            if let Some(held) = self.peek(key).held.filter(|held| *held > SAME_END) {
                self.wrong(format!(
                    "request {number} left while key {key} is held for {held:?}"
                ));
            }
        }
        let all_count = keys().count() == request.keys.len();
        if all_count {
            for &(key, _) in keys() {
                let calls = self.in_flight[key].fetch_add(1, Ordering::Relaxed) + 1;
                if let Some(most) = self.plan(key).quota.most_in_flight()
                    && calls > most
                {
                    self.wrong(format!("{calls} calls of key {key} in flight"));
                }
            }
        }
        let end = |uses: bool| {
            let mut events = self.events.lock().unwrap();
            for &(key, cost) in keys() {
                *events.spent.entry(key).or_default() += cost;
                if uses {
                    let uses = events.uses.entry(key).or_default();
                    uses.push((Instant::now(), cost));
                }
            }
        };
        let leave = || {
            if all_count {
                for &(key, _) in keys() {
                    self.in_flight[key].fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        match request.then {
            Then::GivesBack => {
                sleep(RESPONSE).await;
                leave();
                permit.give_back();
            }
            Then::Uses { delay, takes } => {
                sleep(millis(delay)).await;
                let Ok(sent) = permit.begin() else {
                    return leave();
                };
                end(true);
                if takes > 0 {
                    sleep(millis(takes)).await;
                }
                leave();
                drop(sent);
            }
            Then::Refused { retry_after } => {
                let sent = permit.begin().unwrap();
                end(true);
                sleep(RESPONSE).await;
                leave();
                let signal = Signal::default()
                    .with_refusal(StatusCode::TOO_MANY_REQUESTS)
                    .with_retry_after(retry_after.map(Duration::from_secs));
                assert!(sent.answered(&signal).is_some());
                let mut events = self.events.lock().unwrap();
                events.holds.push(Instant::now());
                if retry_after.is_none_or(|after| after == 0) {
                    for &(key, _) in keys() {
                        events.probations.entry(key).or_insert_with(Instant::now);
                    }
                }
            }
        }
    }

    /// Returns whether the grants of a key are all counted.
    fn is_counted(&self, key: usize) -> bool {
        let plan = self.plan(key);
        plan.store.fails.is_none() || !plan.fails_open
    }
}

async fn play(history: &History) -> Vec<String> {
    let world = World::new(history);
    let mut tasks = Vec::new();
    for (number, (after, step)) in history.steps.iter().enumerate() {
        sleep(millis(*after)).await;
        match step {
            Step::Request(request) => {
                tasks.push(tokio::spawn(world.clone().run(number, request.clone())));
                // Requests of one moment enter in their order.
                tokio::task::yield_now().await;
            }
            Step::Hold { key, span } => {
                let held = world.limiter(*key).hold_for(world.key(*key), millis(*span));
                held.await.unwrap();
                world.events.lock().unwrap().holds.push(Instant::now());
            }
            Step::Release { key } => {
                world.limiter(*key).release(world.key(*key)).await.unwrap();
            }
        }
    }
    for task in tasks {
        if let Err(error) = task.await {
            world.wrong(format!("{error}"));
        }
    }
    // Until then, all slots that were booked have passed.
    let longest = history.limiters.iter().map(|plan| plan.max_wait).max();
    sleep(millis(longest.unwrap_or(0)) + Duration::from_secs(400)).await;
    let elapsed = world.start.elapsed();
    let fails = |key: usize| world.plan(key).store.fails.is_some();
    let keys = 0..history.keys.len();
    for key in keys.clone() {
        let peek = world.peek(key);
        let spent = world.events.lock().unwrap().spent.get(&key).copied();
        let spent = u64::from(spent.unwrap_or(0));
        for usage in &peek.limits {
            match usage.limit {
                Limit::Sliding { window, .. }
                    if window > elapsed && !fails(key) && usage.used != spent =>
                {
                    world.wrong(format!("key {key}: {} used, {spent} spent", usage.used));
                }
                Limit::InFlight { .. } if usage.used != 0 => {
                    world.wrong(format!("key {key}: {} calls in flight", usage.used));
                }
                _ => {}
            }
        }
        if peek.waiting != 0 {
            world.wrong(format!("key {key}: {} wait", peek.waiting));
        }
    }
    sleep_until(world.start + Duration::from_secs(100_000)).await;
    for key in keys {
        let peek = world.peek(key);
        if let Some(usage) = peek.limits.iter().find(|usage| usage.used != 0) {
            world.wrong(format!(
                "key {key}: {} used at the end {peek:?}",
                usage.used
            ));
        }
    }
    let mut events = world.events.lock().unwrap();
    let mut wrong = std::mem::take(&mut events.wrong);
    for (key, uses) in &mut events.uses {
        if !world.is_counted(*key) {
            continue;
        }
        uses.sort();
        let over = over(&world.plan(*key).quota, uses);
        wrong.extend(over.map(|over| format!("key {key}: {over}")));
    }
    wrong.extend(overtaken(&world, &mut events));
    wrong
}

/// Returns the joint requests that later ones with equal keys and costs have overtaken.
fn overtaken(world: &World, events: &mut Events) -> Vec<String> {
    let mut overtaken = Vec::new();
    for (keys, grants) in events.grants.iter_mut().filter(|(keys, _)| keys.len() > 1) {
        // A store that fails refuses some requests and not others. Requests that get in-flight
        // slots at one moment enter the queue in any order.
        let is_ordered = |key: usize| {
            let plan = world.plan(key);
            plan.store.fails.is_none() && plan.quota.most_in_flight().is_none()
        };
        if !keys.iter().all(|(key, _)| is_ordered(*key)) {
            continue;
        }
        // Requests whose turns come at one moment run in any order. The first of them is the probe.
        let probation = keys
            .iter()
            .filter_map(|(key, _)| events.probations.get(key));
        let probation = probation.min().copied();
        grants.sort();
        for pair in grants.windows(2) {
            let ((early, early_at), (late, late_at)) = (pair[0], pair[1]);
            let has_hold = events.holds.contains(&late_at)
                || probation.is_some_and(|probation| probation <= late_at);
            if early_at > late_at && !has_hold {
                let (at, by) = (late_at - world.start, early_at - late_at);
                overtaken.push(format!("{late} overtook {early} at {at:?}, by {by:?}"));
            }
        }
    }
    overtaken
}

fn config() -> ProptestConfig {
    let failed_before = FileFailurePersistence::Direct("proptest-regressions/joint_properties.txt");
    ProptestConfig {
        failure_persistence: Some(Box::new(failed_before)),
        max_shrink_time: 15_000,
        ..histories::config(64)
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn joint_histories_keep_limits_order_and_holds(history in history()) {
        let runtime = crate::support::paused_runtime();
        let wrong = runtime.block_on(play(&history));
        prop_assert!(wrong.is_empty(), "{:#?}", wrong);
    }
}
