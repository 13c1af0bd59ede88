//! The store in Redis when Redis is unreachable, slow, or of another version: a named error, in
//! time, and no restart needed.

#![cfg(feature = "redis")]

use crate::support::patient;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::aio::{ConnectionLike, ConnectionManager, MultiplexedConnection};
use redis::{Cmd, RedisFuture, Value};
use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::store::{
    RedisStore, RedisStoreBuilder, Store, StoreError, StoreEvent, StoreListener,
};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer};

fn limiter_of(builder: RedisStoreBuilder, quota: Quota, max_wait: Duration) -> Limiter {
    let store = Arc::new(builder.build().unwrap());
    RateLimitLayer::builder(quota)
        .store(store)
        .max_wait(max_wait)
        .build()
        .unwrap()
        .limiter()
}

fn limiter(url: &str, quota: Quota) -> Limiter {
    limiter_of(patient::builder(url), quota, Duration::ZERO)
}

/// How a call failed that must fail, and how long that took.
async fn failure(limiter: &Limiter) -> (StoreError, Duration) {
    let start = Instant::now();
    match limiter.acquire(Key::ALL).await {
        Err(Limited::Store { source, .. }) => (source, start.elapsed()),
        other => panic!("the store is unreachable: {other:?}"),
    }
}

/// Until a call succeeds.
async fn recovered(limiter: &Limiter) -> Duration {
    let start = Instant::now();
    while limiter
        .acquire(Key::new(format!("{:?}", start.elapsed())))
        .await
        .is_err()
    {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "the store never recovered"
        );
        sleep(Duration::from_millis(10)).await;
    }
    start.elapsed()
}

/// A port on which no process listens.
fn closed_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

#[tokio::test]
async fn refused_connection_is_an_error_at_once() {
    let limiter = limiter(
        &format!("redis://127.0.0.1:{}/", closed_port()),
        Quota::per_second(5),
    );
    for _ in 0..3 {
        let (error, took) = failure(&limiter).await;
        assert!(matches!(error, StoreError::Away(_)), "{error:?}");
        assert!(error.to_string().contains("refused"), "{error}");
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}

#[tokio::test]
async fn program_can_check_at_start_whether_redis_answers() {
    let server = RedisServer::start().unwrap();
    patient::store(&server.url()).connect().await.unwrap();
    let nowhere = RedisStore::new(&format!("redis://127.0.0.1:{}/", closed_port())).unwrap();
    let error = nowhere.connect().await.unwrap_err();
    assert!(
        error.to_string().starts_with("the store cannot be reached"),
        "{error}"
    );
}

/// Redis accepts connections and answers nothing, as a stopped process, or behind a network that
/// drops packets.
#[tokio::test]
async fn hanging_redis_is_detected_once_and_recovers_without_restart() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter_of(
        RedisStore::builder(&server.url()).store_timeout(Duration::from_millis(200)),
        Quota::per_second(1000),
        Duration::ZERO,
    );
    recovered(&limiter).await;
    server.pause();
    let (first, took) = failure(&limiter).await;
    assert!(
        first.to_string().contains("no answer within 200ms"),
        "{first}"
    );
    assert!(took >= Duration::from_millis(200), "{took:?}");
    // From now on no request waits for it.
    let start = Instant::now();
    for _ in 0..100 {
        failure(&limiter).await;
    }
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "100 calls took {:?}",
        start.elapsed()
    );
    server.resume();
    recovered(&limiter).await;
}

#[tokio::test]
async fn killed_redis_recovers_without_process_restart() {
    let mut server = RedisServer::start().unwrap();
    let limiter = limiter(&server.url(), Quota::per_second(1000));
    recovered(&limiter).await;
    server.kill();
    failure(&limiter).await;
    server.restart().unwrap();
    recovered(&limiter).await;
}

#[tokio::test]
async fn fail_open_lets_pass_what_it_cannot_count() {
    let server = RedisServer::start().unwrap();
    let store = patient::store(&server.url());
    let layer = RateLimitLayer::builder(Quota::per_minute(2))
        .store(store)
        .max_wait(Duration::ZERO);
    let limiter = layer
        .on_store_error(OnStoreError::FailOpen)
        .build()
        .unwrap()
        .limiter();
    let pass = async || limiter.acquire(Key::ALL).await.is_ok();
    assert_eq!(
        [pass().await, pass().await, pass().await],
        [true, true, false],
        "while it is there, it counts"
    );
    drop(server);
    assert_eq!(
        [pass().await, pass().await, pass().await],
        [true, true, true]
    );
}

/// An error reply concerns one call: no other request waits for it.
#[tokio::test]
async fn redis_error_reply_is_reported_and_breaks_nothing() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&server.url(), Quota::per_minute(2));
    limiter.acquire(Key::new("one")).await.unwrap().give_back();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let name: Vec<String> = server.command(&["KEYS", "*"]);
    for name in &name {
        // Another version of tollgate wrote it.
        let () = server.command(&["SETRANGE", name, "0", "\u{9}"]);
    }
    let (error, _) = failure(&limiter).await;
    assert!(matches!(error, StoreError::Failed(_)), "{error:?}");
    assert!(
        error
            .to_string()
            .contains("format 9, this script understands 1"),
        "{error}"
    );
    for name in &name {
        let () = server.command(&["DEL", name]);
        let _: i64 = server.command(&["LPUSH", name, "not ours"]);
    }
    let (error, _) = failure(&limiter).await;
    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    assert!(limiter.acquire(Key::new("another")).await.is_ok());
}

#[tokio::test]
async fn full_redis_is_a_named_error() {
    let server = RedisServer::with_options(&["--save", "", "--maxmemory", "1mb"]).unwrap();
    let limiter = limiter(&server.url(), Quota::per_minute(2));
    let (error, _) = failure(&limiter).await;
    assert!(error.to_string().contains("OOM"), "{error}");
}

#[tokio::test]
async fn custom_connections_work_too() {
    let server = RedisServer::start().unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let given = RedisStore::with_connection(ConnectionManager::new(client.clone()).await.unwrap());
    let made = Arc::new(AtomicUsize::new(0));
    let factory = RedisStore::with_factory({
        let made = made.clone();
        move || {
            made.fetch_add(1, Ordering::Relaxed);
            let client = client.clone();
            async move { client.get_multiplexed_async_connection().await }
        }
    });
    for builder in [given, factory] {
        let limiter = limiter_of(
            builder.prefix("own").store_timeout(patient::TIMEOUT),
            Quota::per_minute(4),
            Duration::ZERO,
        );
        assert!(limiter.acquire(Key::ALL).await.is_ok());
        assert!(limiter.acquire(Key::ALL).await.is_ok());
    }
    assert_eq!(
        made.load(Ordering::Relaxed),
        1,
        "a factory makes one connection"
    );
}

// ── lost state ───────────────────────────────────────────────────────────────────────────────────

/// Both processes know what they were granted: Redis learns it from them before it grants more.
#[tokio::test]
async fn redis_without_state_grants_no_second_full_limit() {
    let server = RedisServer::start().unwrap();
    let quota = Quota::new(6, Duration::from_secs(2));
    let build = |max_wait| limiter_of(patient::builder(&server.url()), quota, max_wait);
    let (patient, hasty) = (build(Duration::from_secs(10)), build(Duration::ZERO));
    let start = Instant::now();
    for _ in 0..3 {
        drop(patient.acquire(Key::ALL).await.unwrap());
        drop(hasty.acquire(Key::ALL).await.unwrap());
    }
    let () = server.command(&["FLUSHALL"]);
    let refused = hasty.acquire(Key::ALL).await.unwrap_err();
    let retry_after = refused.retry_after().expect("the refusal has a retry time");
    // `retry_after` is rounded up.
    assert!(
        retry_after <= Duration::from_millis(3501),
        "a window, and as long as permits are trusted: {refused}"
    );
    assert_eq!(patient.peek(Key::ALL).await.unwrap().free, 0);
    drop(patient.acquire(Key::ALL).await.unwrap());
    assert!(
        start.elapsed() > Duration::from_secs(2),
        "six went {:?} ago",
        start.elapsed()
    );
    assert!(
        start.elapsed() < Duration::from_secs(8),
        "and it does not learn for ever"
    );
}

/// Nothing is charged yet, and the state under recovery must not be forgotten meanwhile.
#[tokio::test]
async fn recovering_state_lives_until_recovery_ends() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&server.url(), Quota::per_minute(1));
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let () = server.command(&["FLUSHALL"]);
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(
        refused.retry_after() > Some(Duration::from_secs(70)),
        "{refused}"
    );
    let names: Vec<String> = server.command(&["KEYS", "*"]);
    let ttl: i64 = server.command(&["PTTL", &names[0]]);
    assert!(ttl > 75_000, "lives for {ttl} ms");
}

/// A process without memory of a key is served at once: a fresh state is no loss.
#[tokio::test]
async fn expired_state_is_not_a_lost_state() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&server.url(), Quota::new(2, Duration::from_millis(100)));
    for _ in 0..2 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
        while !server.command::<Vec<String>>(&["KEYS", "*"]).is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    }
}

// ── unknown outcomes ─────────────────────────────────────────────────────────────────────────────

/// A proxy that cuts the connection when the server answers the script: the script ran, and the
/// caller does not know.
struct CutWire {
    port: u16,
    /// How often the script was requested through it.
    asked: Arc<AtomicUsize>,
}

impl CutWire {
    fn to(server: &RedisServer) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (port, target) = (listener.local_addr().unwrap().port(), server.port());
        let asked = Arc::new(AtomicUsize::new(0));
        let all = asked.clone();
        std::thread::spawn(move || {
            for caller in listener.incoming() {
                let (Ok(caller), Ok(server)) =
                    (caller, TcpStream::connect((Ipv4Addr::LOCALHOST, target)))
                else {
                    return;
                };
                let (mut from, mut to) = (caller.try_clone().unwrap(), server.try_clone().unwrap());
                let script = Arc::new(AtomicUsize::new(0));
                let (asked, all) = (script.clone(), all.clone());
                std::thread::spawn(move || {
                    let mut bytes = [0; 65_536];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        let calls = bytes[..count]
                            .windows(7)
                            .filter(|word| word == b"EVALSHA")
                            .count();
                        asked.fetch_add(calls, Ordering::SeqCst);
                        all.fetch_add(calls, Ordering::SeqCst);
                        if to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                });
                let (mut server, mut caller) = (server, caller);
                std::thread::spawn(move || {
                    let mut bytes = [0; 65_536];
                    while let Ok(count @ 1..) = server.read(&mut bytes) {
                        if script.load(Ordering::SeqCst) > 0 {
                            break;
                        }
                        let _ = caller.write_all(&bytes[..count]);
                    }
                    let _ = caller.shutdown(Shutdown::Both);
                });
            }
        });
        CutWire { port, asked }
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst) as u64
    }
}

#[tokio::test]
async fn call_with_lost_answer_is_spent_and_never_repeated() {
    let server = RedisServer::start().unwrap();
    // So few an hour that no permit is prefetched.
    let direct = limiter(&server.url(), Quota::per_hour(45));
    let used = async || direct.peek(Key::ALL).await.unwrap().limits[0].used;
    drop(direct.acquire(Key::ALL).await); // so that the server has the script
    let before = used().await;
    let wire = CutWire::to(&server);
    let cut = limiter(
        &format!("redis://127.0.0.1:{}/", wire.port),
        Quota::per_hour(45),
    );
    let (mut asked, start) = (0, Instant::now());
    while asked < 30 {
        // Without a connection no call is made; a call that was made and lost is spent once.
        let error = failure(&cut).await.0;
        asked = used().await - before;
        assert!(matches!(error, StoreError::Away(_)), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(30), "asked {asked}");
        sleep(Duration::from_millis(5)).await;
    }
    // Redis ran each script requested through the proxy once; the last may still be on its way.
    sleep(Duration::from_millis(100)).await;
    assert_eq!(used().await - before, wire.asked());
}

// ── giving back ──────────────────────────────────────────────────────────────────────────────────

/// Permits and places in the queue that end outside of any runtime, or with their runtime, are
/// given back.
#[test]
fn permits_dropped_outside_a_runtime_are_given_back() {
    let server = RedisServer::start().unwrap();
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let quota = Quota::new(5, Duration::from_secs(30));
    let build = || {
        limiter_of(
            patient::builder(&server.url()),
            quota,
            Duration::from_secs(600),
        )
    };
    let limiter = build();
    let (held, waiting) = (Key::new("held"), Key::new("waiting"));

    let first = runtime();
    let permits: Vec<_> = first.block_on(async {
        let mut permits = Vec::new();
        for _ in 0..5 {
            permits.push(limiter.acquire(held).await.unwrap());
            drop(limiter.acquire(waiting).await.unwrap());
        }
        for _ in 0..5 {
            tokio::spawn(limiter.acquire(waiting));
        }
        while limiter.peek(waiting).await.unwrap().limits[0].used < 10 {
            sleep(Duration::from_millis(5)).await;
        }
        permits
    });
    drop(first);
    permits.into_iter().for_each(tollgate::Permit::give_back);

    runtime().block_on(async {
        limiter.shutdown().await.unwrap();
        let other = build();
        let free = other.peek(held).await.unwrap().free;
        assert_eq!(free, 5, "permits that were held are free");
        let next = other.peek(waiting).await.unwrap().next_slot;
        assert!(
            next < Duration::from_secs(31),
            "slots that were booked are free, not the ones after: {next:?}"
        );
    });
}

// ── the store's own thread ───────────────────────────────────────────────────────────────────────

struct Panics;

impl StoreListener for Panics {
    fn on_event(self: Arc<Self>, _key: Key, _holder: u64, _news: StoreEvent) {
        panic!("a listener that panics");
    }
}

#[tokio::test]
async fn a_listener_that_panics_stops_no_store() {
    let server = RedisServer::start().unwrap();
    let store = patient::store(&server.url());
    let panics: Arc<dyn StoreListener> = Arc::new(Panics);
    store.listen(Arc::downgrade(&panics));
    let layer = RateLimitLayer::builder(Quota::in_flight(1)).store(store.clone());
    let limiter = layer.max_wait(Duration::ZERO).build().unwrap().limiter();
    let call = limiter.acquire(Key::ALL).await.unwrap();
    limiter
        .hold_for(Key::new("another"), Duration::from_secs(1))
        .await
        .unwrap();
    // The process is notified of the connection and of the hold.
    sleep(Duration::from_millis(500)).await;
    store.connect().await.unwrap();
    assert!(
        limiter.acquire(Key::ALL).await.is_err(),
        "one call is in flight"
    );
    drop(call);
    recovered(&limiter).await;
}

/// A user's connection whose second clone panics: that clone is made for a command of the store
/// itself.
struct Fragile {
    connection: MultiplexedConnection,
    clones: Arc<AtomicUsize>,
}

impl Clone for Fragile {
    fn clone(&self) -> Self {
        assert_ne!(
            self.clones.fetch_add(1, Ordering::Relaxed),
            1,
            "a connection that panics"
        );
        Fragile {
            connection: self.connection.clone(),
            clones: self.clones.clone(),
        }
    }
}

impl ConnectionLike for Fragile {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        self.connection.req_packed_command(command)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a redis::Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

#[tokio::test]
async fn a_connection_that_panics_is_made_anew() {
    let server = RedisServer::start().unwrap();
    let (client, clones) = (
        redis::Client::open(server.url()).unwrap(),
        Arc::new(AtomicUsize::new(0)),
    );
    let factory = RedisStore::with_factory(move || {
        let (client, clones) = (client.clone(), clones.clone());
        async move {
            Ok(Fragile {
                connection: client.get_multiplexed_async_connection().await?,
                clones,
            })
        }
    });
    let limiter = limiter_of(factory, Quota::per_second(1000), Duration::ZERO);
    for _ in 0..3 {
        recovered(&limiter).await;
        let _: i64 = server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
    recovered(&limiter).await;
}

/// Limits the memory that this process may map.
fn limit_memory(bytes: &str) {
    let limit = format!("--as={bytes}:");
    let limited = Command::new("prlimit")
        .args(["--pid", &std::process::id().to_string(), &limit])
        .status();
    assert!(
        limited.is_ok_and(|status| status.success()),
        "prlimit {limit} (Debian: apt-get install util-linux)"
    );
}

/// A process that cannot start threads gets an error, and its store works when threads can start
/// again. In a separate process, in which no other test runs.
#[test]
fn a_thread_that_cannot_be_started_is_started_later() {
    const CHILD: &str = "TOLLGATE_TEST_WITHOUT_THREADS";
    if let Ok(url) = std::env::var(CHILD) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        return runtime.block_on(without_threads(&url));
    }
    let server = RedisServer::start().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "redis_away::a_thread_that_cannot_be_started_is_started_later",
        "--nocapture",
    ]);
    let output = child.env(CHILD, server.url()).output().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&text)
    );
}

async fn without_threads(url: &str) {
    let store = patient::store(url);
    let memory = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = memory.split_whitespace().next().unwrap().parse().unwrap();
    // Less memory remains than the stack of a thread takes.
    limit_memory(&(pages * 4096 + (1 << 20)).to_string());
    let failed = store.connect().await;
    limit_memory("unlimited");
    let error = failed.unwrap_err();
    assert!(matches!(error, StoreError::Away(_)), "{error:?}");
    assert!(
        error.to_string().contains("thread cannot be started"),
        "{error}"
    );
    store.connect().await.unwrap();
}
