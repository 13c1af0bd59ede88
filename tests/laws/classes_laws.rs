//! What classes of requests are promised: fleets over a remote store, in virtual time, and random
//! requests of several keys, units and set quotas.

use crate::support::{self, over};

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use http::Request;
use over::over;
use proptest::prelude::*;
use support::paused;
use tokio::time::{Instant, sleep};
use tollgate::store::{
    Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Store, StoreListener, StoreReply,
    UnusedPermits, Usage,
};
use tollgate::{Cost, Key, Limiter, Quota, RateLimitBuilder, RateLimitLayer, RequestRef};
use tower::{Layer, ServiceExt, service_fn};

const K: Key = Key::ALL;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A store whose replies take a trip, and that counts its calls.
struct Remote {
    shared: MemoryStore,
    trip: Duration,
    calls: AtomicU64,
}

impl Remote {
    fn new(trip: Duration) -> Arc<Self> {
        Arc::new(Remote {
            shared: MemoryStore::default(),
            trip,
            calls: AtomicU64::new(0),
        })
    }
}

impl Store for Remote {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.calls.fetch_add(1, Relaxed);
        let StoreReply::Ready(reply) = self.shared.lease(request) else {
            unreachable!("memory replies at once")
        };
        let trip = self.trip;
        StoreReply::Pending(Box::pin(async move {
            sleep(trip).await;
            reply
        }))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.calls.fetch_add(1, Relaxed);
        self.shared.give_back(key, spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.shared.peek(request)
    }

    fn set_quota(&self, key: Key, spec: &Arc<LimitSpec>, life: Duration) -> StoreReply<u32> {
        self.shared.set_quota(key, spec, life)
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        self.shared.listen(listener);
    }
}

/// When permits were used, and their units.
#[derive(Clone, Default)]
struct Uses(Arc<Mutex<Vec<(Instant, u32)>>>);

impl Uses {
    fn add(&self, units: u32) {
        self.0.lock().unwrap().push((Instant::now(), units));
    }

    fn all(&self) -> Vec<(Instant, u32)> {
        self.0.lock().unwrap().clone()
    }
}

/// A fleet of jobs that ask again and again, and how long their calls take. Beside it, four processes of
/// the web send 10 requests per second in all, each of which waits for up to a second.
struct Fleet {
    shares: &'static [(&'static str, u8)],
    processes: usize,
    tasks: usize,
    call: u64,
}

/// How the fleet fared.
struct Seen {
    /// How much of 50 requests per second was used.
    used: f64,
    calls_per_grant: f64,
    waits: Vec<Duration>,
    refused: usize,
}

impl Fleet {
    fn process(&self, store: &Arc<Remote>, max_wait: u64) -> Limiter {
        let builder = RateLimitLayer::builder(Quota::per_second(50));
        let divided = self
            .shares
            .iter()
            .fold(builder, |builder, (class, percent)| {
                builder.share(class, *percent)
            });
        let divided = divided.store(store.clone()).max_wait(ms(max_wait));
        divided.build().unwrap().limiter()
    }

    async fn run(&self) -> Seen {
        let (store, uses) = (Remote::new(ms(1)), Uses::default());
        for _ in 0..self.processes {
            let limiter = self.process(&store, 60_000);
            for _ in 0..self.tasks {
                let (limiter, uses, call) = (limiter.clone(), uses.clone(), ms(self.call));
                tokio::spawn(async move {
                    loop {
                        if let Ok(permit) = limiter.acquire(K).class("jobs").await {
                            uses.add(1);
                            drop(permit);
                            sleep(call).await;
                        } else {
                            sleep(ms(100)).await;
                        }
                    }
                });
            }
        }
        sleep(ms(5000)).await;
        let (from, before) = (Instant::now(), store.calls.load(Relaxed));
        let waits = Arc::new(Mutex::new(Vec::new()));
        for number in 0..4 {
            let limiter = self.process(&store, 1000);
            let (uses, waits) = (uses.clone(), waits.clone());
            tokio::spawn(async move {
                sleep(ms(number * 73)).await;
                loop {
                    let (limiter, uses, waits) = (limiter.clone(), uses.clone(), waits.clone());
                    tokio::spawn(async move {
                        let begin = Instant::now();
                        let permit = limiter.acquire(K).class("web").await;
                        if permit.is_ok() {
                            uses.add(1);
                        }
                        let wait = permit.ok().map(|_| begin.elapsed());
                        waits.lock().unwrap().push(wait);
                    });
                    sleep(ms(400)).await;
                }
            });
        }
        let span = ms(20_000);
        sleep(span).await;
        let calls = store.calls.load(Relaxed) - before;
        let all = uses.all();
        assert_eq!(over(&Quota::per_second(50), &all), None);
        let grants = all.iter().filter(|(at, _)| *at >= from).count() as f64;
        let web = waits.lock().unwrap().clone();
        let mut waits: Vec<Duration> = web.iter().copied().flatten().collect();
        waits.sort_unstable();
        let seen = Seen {
            used: grants / (span.as_secs_f64() * 50.0 / 1.02),
            calls_per_grant: calls as f64 / grants,
            refused: web.len() - waits.len(),
            waits,
        };
        println!(
            "{:?}, {} processes with {} tasks, calls of {} ms: used {:.3}, {:.2} calls a grant, web {} sent, {} \
             refused, p99 {:?}",
            self.shares,
            self.processes,
            self.tasks,
            self.call,
            seen.used,
            seen.calls_per_grant,
            seen.waits.len(),
            seen.refused,
            seen.p99(),
        );
        seen
    }
}

impl Seen {
    fn p99(&self) -> Duration {
        self.waits[self.waits.len() * 99 / 100]
    }
}

#[tokio::test(start_paused = true)]
async fn a_fleet_of_jobs_leaves_the_web_its_share() {
    for (call, most_calls) in [(50, 1.0), (1000, 1.1)] {
        let fleet = Fleet {
            shares: &[("web", 50)],
            processes: 10,
            tasks: 100,
            call,
        };
        let seen = fleet.run().await;
        assert_eq!(seen.refused, 0);
        assert!(seen.p99() <= ms(200), "{:?}", seen.p99());
        assert!(seen.used >= 0.97, "{}", seen.used);
        assert!(
            seen.calls_per_grant <= most_calls,
            "{}",
            seen.calls_per_grant
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_class_with_the_whole_limit_goes_first() {
    let fleet = Fleet {
        shares: &[("web", 100)],
        processes: 10,
        tasks: 100,
        call: 1,
    };
    let seen = fleet.run().await;
    assert_eq!(seen.refused, 0);
    assert!(seen.p99() <= ms(120), "{:?}", seen.p99());
    assert!(seen.used >= 0.94, "{}", seen.used);
}

/// Returns when the last of 1000 jobs of 40 processes is sent, over a store whose replies take `trip`.
async fn drained(shares: &'static [(&'static str, u8)], trip: Duration) -> Duration {
    let fleet = Fleet {
        shares,
        processes: 40,
        tasks: 25,
        call: 0,
    };
    let (store, from) = (Remote::new(trip), Instant::now());
    let mut jobs = tokio::task::JoinSet::new();
    for _ in 0..fleet.processes {
        let limiter = fleet.process(&store, 60_000);
        for _ in 0..fleet.tasks {
            let limiter = limiter.clone();
            jobs.spawn(async move { drop(limiter.acquire(K).class("jobs").await.unwrap()) });
        }
    }
    while jobs.join_next().await.is_some() {}
    from.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_line_of_one_class_drains_as_fast_as_without_shares() {
    for trip in [1, 8, 20].map(ms) {
        let first_come = drained(&[], trip).await;
        let half = drained(&[("web", 50)], trip).await;
        println!(
            "trips of {trip:?}: 1000 jobs are sent in {half:?}, without shares in {first_come:?}"
        );
        // Processes ask at random moments.
        assert!(
            half <= first_come.mul_f64(1.15),
            "{half:?} of {first_come:?}"
        );
    }
}

/// A request of a random class: after how many milliseconds, its class, cost, and true cost.
type Step = (u64, usize, u32, u32);

const CLASSES: [&str; 3] = ["a", "b", "c"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((0u64..120, 0usize..3, 1u32..5, 0u32..5), 20..200)
}

fn shares() -> impl Strategy<Value = (u8, u8, u8)> {
    (
        20u8..60,
        20u8..40,
        prop::sample::select(vec![75u8, 97, 100]),
    )
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..histories::config(10)
    }
}

/// Two processes that divide `quota`.
fn two(
    quota: Quota,
    (a, b, lends): (u8, u8, u8),
    with: impl Fn(RateLimitBuilder) -> RateLimitBuilder,
) -> [RateLimitLayer; 2] {
    let store = Remote::new(ms(1));
    [0, 1].map(|_| {
        let builder = RateLimitLayer::builder(quota).store(store.clone());
        let builder = builder.share("a", a).share("b", b).lends("a", lends);
        with(builder.max_wait(ms(20_000))).build().unwrap()
    })
}

/// Starts `request` for each step, on one process after the other, and waits until all have ended.
async fn start<F>(steps: &[Step], request: impl Fn(usize, Step) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut tasks = tokio::task::JoinSet::new();
    for (number, step) in steps.iter().enumerate() {
        sleep(ms(step.0)).await;
        tasks.spawn(request(number, *step));
    }
    while tasks.join_next().await.is_some() {}
}

proptest! {
    #![proptest_config(config())]

    /// A limit with classes, and a limit for each of three channels.
    #[test]
    fn several_keys_are_each_kept(shares in shares(), steps in steps(), (all, each) in (10u32..60, 3u32..10)) {
        let (all, each) = (Quota::per_second(all), Quota::per_second(each));
        let class = |request: &RequestRef<'_>| {
            CLASSES.into_iter().find(|class| request.path().ends_with(class))
        };
        let layers = two(all, shares, |builder| {
            let channel = |request: &RequestRef<'_>| {
                let channel = request.path().split('/').nth(1);
                channel.filter(|channel| *channel != "all").map(Key::new)
            };
            builder.class(class).and_per("channel", each, channel)
        });
        let uses: [Uses; 4] = Default::default();
        paused(start(&steps, |number, (_, class, cost, channel)| {
            let uses = uses.clone();
            let of_channel = usize::try_from(channel % 4).unwrap();
            let service = layers[number % 2].layer(service_fn(move |_: Request<()>| {
                uses[0].add(1);
                if of_channel > 0 {
                    uses[of_channel].add(1);
                }
                async { Ok::<_, std::convert::Infallible>(http::Response::new(())) }
            }));
            let channel = ["all", "x", "y", "z"][of_channel];
            let path = format!("http://server/{channel}/{cost}/{}", CLASSES[class]);
            async move {
                let _ = service.oneshot(Request::get(path).body(()).unwrap()).await;
            }
        }));
        prop_assert_eq!(over(&all, &uses[0].all()), None);
        for uses in &uses[1..] {
            prop_assert_eq!(over(&each, &uses.all()), None);
        }
    }

    /// Requests and tokens, both divided.
    #[test]
    fn each_unit_is_kept(shares in shares(), steps in steps(), (requests, tokens) in (20u32..60, 60u32..200)) {
        let (requests, tokens) = (Quota::per_second(requests), Quota::new(tokens, ms(3000)));
        let layers = two(requests.and(tokens.of("tokens")), shares, |builder| builder);
        let (sent, used) = (Uses::default(), Uses::default());
        paused(start(&steps, |number, (_, class, cost, _)| {
            let (limiter, sent, used) = (layers[number % 2].limiter(), sent.clone(), used.clone());
            async move {
                let cost = cost * 3;
                let acquire = limiter.acquire(K).class(CLASSES[class]);
                if let Ok(permit) = acquire.cost(Cost::of("tokens", cost)).await {
                    sent.add(1);
                    used.add(cost);
                    drop(permit);
                }
            }
        }));
        prop_assert_eq!(over(&requests, &sent.all()), None);
        prop_assert_eq!(over(&tokens, &used.all()), None);
    }

    /// A quota that an operator sets while requests wait.
    #[test]
    fn a_set_quota_is_kept(shares in shares(), steps in steps(), (before, after) in (10u32..80, 10u32..80)) {
        let layers = two(Quota::per_second(before), shares, |builder| builder);
        let uses = Uses::default();
        let changed = Arc::new(Mutex::new(None));
        paused(async {
            let half = steps.len() / 2;
            let request = |number: usize, (_, class, cost, _): Step| {
                let (limiter, uses) = (layers[number % 2].limiter(), uses.clone());
                async move {
                    if let Ok(permit) = limiter.acquire(K).class(CLASSES[class]).cost(cost.min(2)).await {
                        uses.add(cost.min(2));
                        drop(permit);
                    }
                }
            };
            start(&steps[..half], request).await;
            layers[0].limiter().set_quota(K, Quota::per_second(after)).await.unwrap();
            *changed.lock().unwrap() = Some(Instant::now());
            start(&steps[half..], request).await;
        });
        let changed = changed.lock().unwrap().unwrap();
        prop_assert_eq!(over(&Quota::per_second(before.max(after)), &uses.all()), None);
        let later: Vec<_> = uses.all().into_iter().filter(|(at, _)| *at >= changed).collect();
        prop_assert_eq!(over(&Quota::per_second(after), &later), None);
    }

    /// Requests that cost less than was booked for them. What a part has lent goes back to that part.
    #[test]
    fn a_settled_limit_is_kept(shares in shares(), steps in steps(), count in 30u32..120) {
        let quota = Quota::new(count, ms(2000));
        let layers = two(quota, shares, RateLimitBuilder::settle_by_hand);
        let uses = Uses::default();
        paused(start(&steps, |number, (wait, class, cost, actual)| {
            let (limiter, uses) = (layers[number % 2].limiter(), uses.clone());
            async move {
                if let Ok(mut permit) = limiter.acquire(K).class(CLASSES[class]).cost(cost).await {
                    let actual = actual.min(cost);
                    uses.add(actual);
                    sleep(ms(wait * 10)).await;
                    permit.settle(actual);
                }
            }
        }));
        prop_assert_eq!(over(&quota, &uses.all()), None);
    }
}
