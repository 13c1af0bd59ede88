//! What classes of requests are promised: fleets over a remote store, in virtual time.

use crate::support::over;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use over::over;
use tokio::time::{Instant, sleep};
use tollgate::store::{
    Lease, LeaseRequest, LimitSpec, MemoryStore, Store, StoreReply, UnusedPermits,
};
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

const K: Key = Key::ALL;

/// What is measured here is measured with these dice: processes ask at random moments.
const SEED: u64 = 1;

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
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.shared)
    }

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
    crate::support::roll_dice(SEED);
    for (call, most_calls) in [(50, 1.0), (1000, 1.11)] {
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
    crate::support::roll_dice(SEED);
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
    crate::support::roll_dice(SEED);
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
