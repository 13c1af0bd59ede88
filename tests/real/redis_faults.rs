//! Each fault on a real server: the time to detection, the cost of a call meanwhile, and the time
//! to recovery. Each test also checks that no limit was exceeded and no call was made twice.
//!
//! `cargo test --all-features --test real redis_faults -- --nocapture --test-threads 1` prints the
//! figures. `TOLLGATE_CASES` multiplies the rounds of each fault (2; published figures need 20) and
//! the clients that lose a server together (150; 1000 need 6000 file descriptors).

#![cfg(feature = "redis")]

use crate::support::counted;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use counted::largest_count;
use futures::future::join_all;
use redis_server::{Proxy, RedisServer};
use tokio::time::{Instant, sleep};
use tollgate::store::RedisStore;
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The default `store_timeout`.
const STORE_TIMEOUT: Duration = ms(250);

/// How much a stalled machine may add.
const NOISE: Duration = ms(1500);

/// How long a fault lasts that does not end by itself.
const LASTS: Duration = ms(500);

/// The shared limit, a second.
const LIMIT: u32 = 50;

fn limiter(url: &str, quota: Quota) -> Limiter {
    over(RedisStore::new(url).unwrap(), quota)
}

/// A connection that observes other processes, with a generous timeout.
fn judge(url: &str) -> Limiter {
    over(
        RedisStore::builder(url)
            .store_timeout(Duration::from_secs(10))
            .build()
            .unwrap(),
        Quota::per_hour(5),
    )
}

fn over(store: RedisStore, quota: Quota) -> Limiter {
    RateLimitLayer::builder(quota)
        .store(Arc::new(store))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap()
        .limiter()
}

/// A call with a key of its own.
#[derive(Clone, Copy)]
struct Call {
    key: Key,
    asked: Instant,
    took: Duration,
    failed: bool,
}

struct Site {
    server: Mutex<RedisServer>,
    proxy: Proxy,
    /// A connection that no fault affects.
    admin: Mutex<redis::Connection>,
}

impl Site {
    fn new() -> Site {
        let options = ["--save", "", "--enable-debug-command", "yes"];
        // Reading a state from a file is slow: about half a second for ten thousand keys.
        let slowly = [
            "--key-load-delay",
            "50",
            "--loading-process-events-interval-bytes",
            "1024",
        ];
        let server = RedisServer::with_options(&[&options[..], &slowly].concat()).unwrap();
        let proxy = Proxy::start(server.port()).unwrap();
        let admin = Mutex::new(server.connect().unwrap());
        Site {
            server: Mutex::new(server),
            proxy,
            admin,
        }
    }

    fn admin(&self, words: &[&str]) {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(word);
        });
        let mut admin = self.admin.lock().unwrap();
        command
            .exec(&mut admin)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"));
    }

    fn restart(&self) {
        let mut server = self.server.lock().unwrap();
        server.restart().unwrap();
        *self.admin.lock().unwrap() = server.connect().unwrap();
    }

    /// The first part of a fault, and its end.
    fn make(&self, fault: &str) {
        let lasts = || std::thread::sleep(LASTS);
        match fault {
            "killed" => {
                self.server.lock().unwrap().kill();
                lasts();
                self.restart();
            }
            "connections reset" => self.proxy.break_all(),
            "hung (SIGSTOP)" => {
                self.server.lock().unwrap().pause();
                lasts();
                self.server.lock().unwrap().resume();
            }
            "silent partition" => {
                self.proxy.swallow(true);
                lasts();
                self.proxy.swallow(false);
            }
            "READONLY" => {
                self.admin(&["REPLICAOF", "127.0.0.1", "1"]);
                lasts();
                self.admin(&["REPLICAOF", "NO", "ONE"]);
            }
            "LOADING" => {
                // Each time the same data is loaded.
                self.admin(&["FLUSHALL"]);
                self.admin(&["DEBUG", "POPULATE", "10000"]);
                self.admin(&["SAVE"]);
                self.restart();
            }
            "password changed" => {
                self.admin(&["CONFIG", "SET", "requirepass", "another"]);
                self.admin(&["CLIENT", "KILL", "TYPE", "normal"]);
                lasts();
                self.admin(&["CONFIG", "SET", "requirepass", ""]);
            }
            "NOSCRIPT" => self.admin(&["SCRIPT", "FLUSH"]),
            "OOM" => {
                self.admin(&["CONFIG", "SET", "maxmemory", "1"]);
                lasts();
                self.admin(&["CONFIG", "SET", "maxmemory", "0"]);
            }
            _ => unreachable!("{fault}"),
        }
    }
}

fn percentile(spans: &mut [Duration], share: f64) -> Duration {
    spans.sort_unstable();
    let index = (spans.len() as f64 * share) as usize;
    spans
        .get(index.min(spans.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

/// What a fault did, over all its rounds.
#[derive(Default)]
struct Measured {
    found_out: Vec<Duration>,
    meanwhile: Vec<Duration>,
    recovered: Vec<Duration>,
    failed: usize,
    twice: usize,
    extra: usize,
}

async fn measure(fault: &'static str, rounds: usize) -> Measured {
    let site = Arc::new(Site::new());
    let url = site.proxy.url();
    let (calls, sent, over) = (
        Arc::<Mutex<Vec<Call>>>::default(),
        Arc::default(),
        Arc::new(AtomicBool::new(false)),
    );
    let number = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let (alone, shared) = (
            limiter(&url, Quota::per_hour(5)),
            limiter(&url, Quota::per_second(LIMIT)),
        );
        for _ in 0..2 {
            let (alone, calls, over, number) =
                (alone.clone(), calls.clone(), over.clone(), number.clone());
            tasks.push(tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let key = Key::new(format!("call {}", number.fetch_add(1, Ordering::Relaxed)));
                    let asked = Instant::now();
                    let failed = matches!(alone.acquire(key).await, Err(Limited::Store { .. }));
                    calls.lock().unwrap().push(Call {
                        key,
                        asked,
                        took: asked.elapsed(),
                        failed,
                    });
                    sleep(ms(3)).await;
                }
            }));
        }
        let (sent, over): (Arc<Mutex<Vec<Instant>>>, _) = (Arc::clone(&sent), over.clone());
        tasks.push(tokio::spawn(async move {
            while !over.load(Ordering::Relaxed) {
                match shared.acquire(Key::ALL).await {
                    Ok(_) => sent.lock().unwrap().push(Instant::now()),
                    Err(_) => sleep(ms(2)).await,
                }
            }
        }));
    }
    let mut measured = Measured::default();
    for _ in 0..rounds {
        sleep(ms(300)).await;
        let made = site.clone();
        let begins = Instant::now();
        tokio::task::spawn_blocking(move || made.make(fault))
            .await
            .unwrap();
        let ends = Instant::now();
        let good = |call: &&Call| call.asked >= ends && !call.failed;
        let recovered = loop {
            sleep(ms(5)).await;
            assert!(
                ends.elapsed() < Duration::from_secs(20),
                "{fault}: the store never recovered"
            );
            if let Some(call) = calls.lock().unwrap().iter().find(good) {
                break call.asked + call.took - ends;
            }
        };
        sleep(ms(100)).await;
        let all = std::mem::take(&mut *calls.lock().unwrap());
        let bad: Vec<_> = all
            .iter()
            .filter(|call| call.failed && call.asked + call.took >= begins)
            .collect();
        // Requests made when the fault began, or first after it, waited until it was detected.
        let first = bad.iter().map(|call| call.asked + call.took).min();
        if let Some(first) = first {
            let waiting = bad.iter().filter(|call| call.asked <= first);
            measured.found_out.extend(waiting.map(|call| call.took));
            measured.meanwhile.extend(
                bad.iter()
                    .filter(|call| call.asked > first)
                    .map(|call| call.took),
            );
            measured.recovered.push(recovered);
        }
        measured.failed += bad.len();
        // A call without an answer may have been made; no call was made twice.
        let judge = judge(&site.server.lock().unwrap().url());
        for call in bad {
            let used = judge.peek(call.key).await.unwrap().limits[0].used;
            measured.twice += usize::from(used > 1);
        }
    }
    over.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    measured.extra = largest_count(&sent.lock().unwrap(), ms(1000)).saturating_sub(LIMIT as usize);
    measured
}

/// Every fault is detected, costs little meanwhile, and ends without help.
async fn check(fault: &'static str) {
    let mut measured = measure(fault, histories::cases(2) as usize).await;
    let Measured {
        found_out,
        meanwhile,
        recovered,
        failed,
        twice,
        extra,
    } = &mut measured;
    let found = percentile(found_out, 0.99);
    let [then, then99] = [0.5, 0.99].map(|share| percentile(meanwhile, share));
    let [back, back99] = [0.5, 0.99].map(|share| percentile(recovered, share));
    println!(
        "{fault}: {failed} calls failed; found out p99 {found:.2?}; a call then p50 {then:.2?} p99 {then99:.2?}; back after \
         p50 {back:.2?} p99 {back99:.2?}; {extra} over the limit, {twice} done twice"
    );
    assert_eq!((*extra, *twice), (0, 0), "{fault}");
    assert!(
        found <= STORE_TIMEOUT + NOISE,
        "{fault}: found out after {found:?}"
    );
    // A retry or a timeout at each call would cost `STORE_TIMEOUT`.
    assert!(
        then <= STORE_TIMEOUT / 2,
        "{fault}: a call costs {then:?} meanwhile"
    );
    assert!(back99 <= ms(5000), "{fault}: over after {back99:?}");
    let harmless = ["NOSCRIPT", "connections reset"].contains(&fault);
    assert!(harmless || *failed > 0, "{fault}: it was none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed() {
    check("killed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_reset() {
    check("connections reset").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs() {
    check("hung (SIGSTOP)").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_swallows() {
    check("silent partition").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_becomes_a_replica() {
    check("READONLY").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_loads_its_data() {
    check("LOADING").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_changes() {
    check("password changed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_are_flushed() {
    check("NOSCRIPT").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_is_full() {
    check("OOM").await;
}

/// Each of `calls` calls loses its answer: the connection breaks after the script ran.
async fn lose_answers(store: usize, calls: usize, proxy: Proxy, through: Limiter) {
    for number in 0..calls {
        let start = Instant::now();
        while through.peek(Key::ALL).await.is_err() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the store never recovered"
            );
            sleep(ms(2)).await;
        }
        proxy.break_after_script();
        let lost = through.acquire(lost_key(store, number)).await;
        assert!(matches!(lost, Err(Limited::Store { .. })), "{lost:?}");
        assert!(proxy.has_broken(), "the script was run");
    }
}

fn lost_key(store: usize, number: usize) -> Key {
    Key::new(format!("{store} {number}"))
}

/// The call was made once, and never again.
async fn assert_each_done_once(what: &str, direct: &Limiter, stores: usize, calls: usize) {
    let mut done = [0; 3];
    for number in 0..stores * calls {
        let used = direct
            .peek(lost_key(number / calls, number % calls))
            .await
            .unwrap()
            .limits[0]
            .used;
        done[used.min(2) as usize] += 1;
    }
    println!(
        "{what}, {} calls without an answer: never, once, and more often done: {done:?}",
        stores * calls
    );
    assert_eq!(done, [0, stores * calls, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_calls_are_never_made_twice() {
    const STORES: usize = 10;
    const EACH: usize = 100;
    let server = RedisServer::start().unwrap();
    let direct = judge(&server.url());
    // The script is already loaded, so that each call is one command.
    drop(direct.acquire(Key::ALL).await.unwrap());
    let stores = (0..STORES).map(|store| {
        let proxy = Proxy::start(server.port()).unwrap();
        let through = limiter(&proxy.url(), Quota::per_hour(5));
        tokio::spawn(lose_answers(store, EACH, proxy, through))
    });
    for store in join_all(stores).await {
        store.unwrap();
    }
    assert_each_done_once("a server", &direct, STORES, EACH).await;
}

/// The client of a cluster would repeat the call by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_cluster_calls_are_never_made_twice() {
    let server = RedisServer::start_cluster_of_one().unwrap();
    let direct = judge(&server.url());
    drop(direct.acquire(Key::ALL).await.unwrap());
    let proxy = Proxy::start(server.port()).unwrap();
    // Clients connect to the address that the cluster announces.
    let () = server.command(&[
        "CONFIG",
        "SET",
        "cluster-announce-port",
        &proxy.port().to_string(),
    ]);
    let store = Arc::new(RedisStore::cluster([proxy.url()]).build().unwrap());
    let through = RateLimitLayer::builder(Quota::per_hour(5))
        .store(store)
        .max_wait(Duration::ZERO);
    lose_answers(0, 100, proxy, through.build().unwrap().limiter()).await;
    assert_each_done_once("a cluster", &direct, 1, 100).await;
}

/// Clients that lost a server together do not reconnect together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_do_not_reconnect_at_once() {
    let clients = histories::cases(150) as usize;
    let server = RedisServer::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let stores: Vec<_> = (0..clients)
        .map(|_| RedisStore::new(&proxy.url()).unwrap())
        .collect();
    for store in &stores {
        let start = Instant::now();
        while store.connect().await.is_err() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "it cannot be reached"
            );
            sleep(ms(10)).await;
        }
    }
    proxy.refuse(true);
    sleep(ms(3000)).await;
    proxy.refuse(false);
    let back = std::time::Instant::now();
    sleep(ms(2000)).await;
    let tries: Vec<_> = proxy
        .tries_since(back)
        .into_iter()
        .map(Instant::from_std)
        .collect();
    let largest = largest_count(&tries, ms(100));
    println!(
        "{clients} clients with two connections each came back by {} tries, at most {largest} ({} %) in 100 ms",
        tries.len(),
        largest * 100 / tries.len().max(1)
    );
    assert!(tries.len() >= clients, "{} tries", tries.len());
    assert!(
        largest * 2 <= tries.len(),
        "{largest} of {} within 100 ms",
        tries.len()
    );
}
