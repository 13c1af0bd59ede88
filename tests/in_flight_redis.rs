//! Limits of calls in flight that many processes share: stores of their own stand for processes. With a real Redis.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::store::{RedisStore, StoreError};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitBuilder, RateLimitLayer};

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

fn builder(server: &RedisServer, quota: Quota) -> RateLimitBuilder {
    // Those who share this machine are no reason to fail.
    let store = RedisStore::builder(&server.url()).store_timeout(millis(3000)).build().unwrap();
    RateLimitLayer::builder(quota).store(Arc::new(store))
}

/// A process: a limiter with a store of its own.
fn process(server: &RedisServer, quota: Quota) -> Limiter {
    builder(server, quota).build().unwrap().limiter()
}

/// How many calls are in flight, and the most there ever were.
#[derive(Default)]
struct Upstream {
    now: AtomicUsize,
    most: AtomicUsize,
    calls: AtomicUsize,
}

impl Upstream {
    async fn call(&self, takes: Duration) {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        let _end = End(&self.now);
        self.most.fetch_max(now, Ordering::Relaxed);
        sleep(takes).await;
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

struct End<'a>(&'a AtomicUsize);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn free(limiter: &Limiter) -> u64 {
    limiter.peek(Key::ALL).await.unwrap().free
}

/// Waits until so many are free. A store far away needs a moment.
async fn until_free(limiter: &Limiter, wanted: u64) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while limiter.peek(Key::ALL).await.map(|peek| peek.free).ok() != Some(wanted) {
        assert!(Instant::now() < give_up, "not {wanted} free: {:?}", limiter.peek(Key::ALL).await);
        sleep(millis(5)).await;
    }
}

fn scripts_run(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
    line.and_then(|line| line.split("calls=").nth(1)?.split(',').next()?.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn processes_share_the_seats_and_nobody_polls() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let processes: Vec<_> = (0..4).map(|_| process(&server, Quota::in_flight(8))).collect();
    join_all(processes.iter().map(free)).await;
    let before = scripts_run(&server);
    let callers = processes.iter().flat_map(|limiter| vec![limiter.clone(); 16]).map(|limiter| {
        let upstream = upstream.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                let permit = limiter.acquire(Key::ALL).await.unwrap();
                upstream.call(millis(10)).await;
                drop(permit);
            }
        })
    });
    join_all(callers).await;
    assert_eq!((upstream.most(), upstream.calls()), (8, 640));
    let scripts = scripts_run(&server) - before;
    println!("{scripts} store calls for 640 calls in flight");
    // Each end and each coming are said at most once, and many at a time.
    assert!(scripts <= 2 * 640 + 100, "{scripts}");
    until_free(&processes[0], 8).await;
}

#[tokio::test]
async fn one_process_alone_passes_seats_on_without_the_store() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let limiter = process(&server, Quota::in_flight(4));
    free(&limiter).await;
    let before = scripts_run(&server);
    let callers = (0..16).map(|_| {
        let (limiter, upstream) = (limiter.clone(), upstream.clone());
        tokio::spawn(async move {
            for _ in 0..20 {
                let permit = limiter.acquire(Key::ALL).await.unwrap();
                upstream.call(millis(5)).await;
                drop(permit);
            }
        })
    });
    join_all(callers).await;
    assert_eq!((upstream.most(), upstream.calls()), (4, 320));
    let scripts = scripts_run(&server) - before;
    println!("{scripts} store calls for 320 calls in flight");
    assert!(scripts < 80, "{scripts}");
}

#[tokio::test]
async fn those_who_came_first_go_first_whichever_process_they_are_in() {
    let server = RedisServer::start().unwrap();
    let (ours, theirs) = (process(&server, Quota::in_flight(1)), process(&server, Quota::in_flight(1)));
    let held = ours.acquire(Key::ALL).await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = VecDeque::new();
    for number in 0..12 {
        let limiter = if number % 3 == 0 { &ours } else { &theirs };
        let (limiter, order) = (limiter.clone(), order.clone());
        tasks.push_back(tokio::spawn(async move {
            let permit = limiter.acquire(Key::ALL).await.unwrap();
            order.lock().unwrap().push(number);
            drop(permit);
        }));
        // Each is heard of before the next comes.
        sleep(millis(30)).await;
    }
    drop(held);
    join_all(tasks).await;
    assert_eq!(*order.lock().unwrap(), (0..12).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_upstream_slower_than_the_life_never_sees_more() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let processes: Vec<_> = (0..3)
        .map(|_| builder(&server, Quota::in_flight(5)).in_flight_life(millis(600)).build().unwrap().limiter())
        .collect();
    let callers = processes.iter().flat_map(|limiter| vec![limiter.clone(); 5]).map(|limiter| {
        let upstream = upstream.clone();
        tokio::spawn(async move {
            let permit = limiter.acquire(Key::ALL).await.unwrap();
            upstream.call(millis(2000)).await;
            drop(permit);
        })
    });
    join_all(callers).await;
    assert_eq!((upstream.most(), upstream.calls()), (5, 15));
}

#[test]
fn a_runtime_that_is_dropped_with_fifty_held_leaves_none() {
    let server = RedisServer::start().unwrap();
    let (ours, theirs) = (process(&server, Quota::in_flight(60)), process(&server, Quota::in_flight(60)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for _ in 0..50 {
            let permit = ours.acquire(Key::ALL).await.unwrap();
            tokio::spawn(async move {
                std::future::pending::<()>().await;
                drop(permit);
            });
        }
        tokio::task::yield_now().await;
        until_free(&theirs, 10).await;
    });
    drop(runtime);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(until_free(&theirs, 60));
}

#[tokio::test]
async fn a_server_that_forgets_gives_nothing_to_others_while_calls_are_in_flight() {
    let server = RedisServer::start().unwrap();
    let build =
        || builder(&server, Quota::in_flight(4)).in_flight_life(millis(900)).build().unwrap().limiter();
    let (ours, theirs) = (build(), build());
    let upstream = Arc::new(Upstream::default());
    let call = |limiter: &Limiter, takes| {
        let (limiter, upstream) = (limiter.clone(), upstream.clone());
        tokio::spawn(async move {
            let permit = limiter.acquire(Key::ALL).await.unwrap();
            upstream.call(takes).await;
            drop(permit);
        })
    };
    let mut calls: Vec<_> = (0..4).map(|_| call(&ours, millis(2500))).collect();
    until_free(&theirs, 0).await;
    // Both processes know of the state that is about to be lost.
    calls.push(call(&theirs, millis(100)));
    sleep(millis(100)).await;
    let () = server.command(&["FLUSHALL"]);
    calls.extend((0..8).map(|_| call(&theirs, millis(300))));
    calls.extend((0..8).map(|_| call(&ours, millis(300))));
    join_all(calls).await;
    assert_eq!((upstream.most(), upstream.calls()), (4, 21));
}

#[tokio::test]
async fn a_store_that_is_away_is_told_at_once_and_found_again() {
    let mut server = RedisServer::start().unwrap();
    let limiter = process(&server, Quota::in_flight(2));
    let held = limiter.acquire(Key::ALL).await.unwrap();
    server.kill();
    sleep(millis(100)).await;
    let error = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(matches!(error, Limited::Store { source: StoreError::Away(_), .. }), "{error:?}");
    server.restart().unwrap();
    let give_up = Instant::now() + Duration::from_secs(20);
    let permit = loop {
        match limiter.acquire(Key::ALL).await {
            Ok(permit) => break permit,
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        sleep(millis(20)).await;
    };
    drop((held, permit));
    until_free(&limiter, 2).await;
}

#[tokio::test]
async fn a_call_whose_seat_may_be_anothers_is_given_up_or_goes_on_as_told() {
    let mut server = RedisServer::start().unwrap();
    let life = millis(400);
    let closed = builder(&server, Quota::in_flight(2)).in_flight_life(life).build().unwrap().limiter();
    let open = builder(&server, Quota::in_flight(2)).in_flight_life(life);
    let open = open.on_store_error(OnStoreError::FailOpen).build().unwrap().limiter();
    let (one, two) = (closed.acquire(Key::ALL).await.unwrap(), open.acquire(Key::ALL).await.unwrap());
    server.kill();
    let lost = one.lost().await;
    assert!(matches!(lost, StoreError::SeatLost), "{lost:?}");
    let goes_on = tokio::time::timeout(millis(500), two.lost()).await;
    assert!(goes_on.is_err(), "{goes_on:?}");
    // What is lost ends like any other.
    drop((one, two));
    server.restart().unwrap();
    until_free(&closed, 2).await;
}

#[tokio::test]
async fn a_connection_of_ones_own_asks_where_nobody_tells() {
    let server = RedisServer::start().unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let build = || {
        let client = client.clone();
        let store = RedisStore::with_factory(move || {
            let client = client.clone();
            async move { client.get_multiplexed_async_connection().await }
        });
        let store = Arc::new(store.build().unwrap());
        RateLimitLayer::builder(Quota::in_flight(1)).store(store).build().unwrap().limiter()
    };
    let (ours, theirs) = (build(), build());
    let held = ours.acquire(Key::ALL).await.unwrap();
    let waits = tokio::spawn(async move { theirs.acquire(Key::ALL).await.map(drop) });
    sleep(millis(100)).await;
    drop(held);
    waits.await.unwrap().unwrap();
}

#[tokio::test]
async fn shutdown_answers_when_the_store_has_heard_of_all_who_left() {
    let server = RedisServer::start().unwrap();
    let limiter = process(&server, Quota::in_flight(9).and(Quota::per_second(100)));
    let held = join_all((0..9).map(|_| limiter.acquire(Key::ALL))).await;
    assert_eq!(free(&limiter).await, 0);
    drop(held);
    limiter.shutdown().await.unwrap();
    assert_eq!(free(&limiter).await, 9);
}

#[tokio::test]
async fn one_call_after_the_other_gets_its_seat_each_time() {
    let server = RedisServer::start().unwrap();
    let limiter = builder(&server, Quota::in_flight(1)).max_wait(millis(2000)).build().unwrap().limiter();
    for _ in 0..20 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
        // The store has heard that nobody sits.
        until_free(&limiter, 1).await;
    }
}

#[tokio::test]
async fn those_who_cannot_wait_are_told_as_soon_as_the_store_has_answered() {
    let server = RedisServer::start().unwrap();
    let build = || builder(&server, Quota::in_flight(1)).max_wait(Duration::ZERO).build().unwrap().limiter();
    let (theirs, ours) = (build(), build());
    let held = theirs.acquire(Key::ALL).await.unwrap();
    for round in 0..5 {
        let start = Instant::now();
        // Some come while the store is asked for the others.
        let tries = join_all((0..3).map(|number| {
            let ours = ours.clone();
            async move {
                sleep(Duration::from_micros(100 * number)).await;
                ours.acquire(Key::ALL).await
            }
        }));
        assert!(tries.await.iter().all(Result::is_err));
        println!("round {round}: told after {:?}", start.elapsed());
    }
    drop(held);
    until_free(&theirs, 1).await;
    assert!(ours.acquire(Key::ALL).await.is_ok());
}

#[tokio::test]
async fn a_seat_that_was_wanted_by_those_who_left_is_not_kept_for_them() {
    let server = RedisServer::start().unwrap();
    let build = || {
        builder(&server, Quota::in_flight(1))
            .max_wait(millis(20))
            .in_flight_life(millis(600))
            .max_keys(1)
            .build()
            .unwrap()
            .limiter()
    };
    let (theirs, ours) = (build(), build());
    let held = theirs.acquire(Key::ALL).await.unwrap();
    // It gives up, and its gate has room for another key.
    assert!(ours.acquire(Key::ALL).await.is_err());
    drop(ours.acquire(Key::new("another")).await.unwrap());
    drop(held);
    until_free(&theirs, 1).await;
    assert!(theirs.acquire(Key::ALL).await.is_ok());
}

#[tokio::test]
async fn a_server_that_forgets_is_told_of_seats_that_were_waited_for() {
    let server = RedisServer::start().unwrap();
    let build =
        || builder(&server, Quota::in_flight(4)).in_flight_life(millis(900)).build().unwrap().limiter();
    let (ours, theirs) = (build(), build());
    let held = join_all((0..4).map(|_| ours.acquire(Key::ALL))).await;
    let waits = tokio::spawn({
        let theirs = theirs.clone();
        async move { theirs.acquire(Key::ALL).await.map(drop) }
    });
    sleep(millis(100)).await;
    let () = server.command(&["FLUSHALL"]);
    // Longer than the server learns.
    let nobody = tokio::time::timeout(millis(2500), waits).await;
    assert!(nobody.is_err(), "{nobody:?}");
    let lost = tokio::time::timeout(millis(10), held[0].as_ref().unwrap().lost()).await;
    assert!(lost.is_err(), "the store was there all the time");
    drop(held);
    until_free(&ours, 4).await;
}

#[tokio::test]
async fn one_who_left_a_moment_ago_finds_out_that_the_server_forgot_the_others() {
    let server = RedisServer::start().unwrap();
    let build = || builder(&server, Quota::in_flight(4)).in_flight_life(millis(1500)).max_wait(millis(100));
    let (ours, theirs) = (build().build().unwrap().limiter(), build().build().unwrap().limiter());
    drop(theirs.acquire(Key::ALL).await.unwrap());
    until_free(&ours, 4).await;
    let held = join_all((0..4).map(|_| ours.acquire(Key::ALL))).await;
    assert!(held.iter().all(Result::is_ok), "{held:?}");
    let () = server.command(&["FLUSHALL"]);
    let nobody = theirs.acquire(Key::ALL).await;
    assert!(nobody.is_err(), "four are in flight");
}

#[tokio::test]
async fn what_is_said_again_counts_no_seat_twice() {
    let server = RedisServer::start().unwrap();
    let limiter =
        builder(&server, Quota::in_flight(4)).in_flight_life(millis(300)).build().unwrap().limiter();
    let (permits, mut held) = tokio::sync::mpsc::unbounded_channel();
    let calls: Vec<_> = (0..6)
        .map(|_| {
            let (acquire, permits) = (limiter.acquire(Key::ALL), permits.clone());
            tokio::spawn(async move { permits.send(acquire.await.unwrap()) })
        })
        .collect();
    until_free(&limiter, 0).await;
    let before = scripts_run(&server);
    while scripts_run(&server) < before + 4 {
        sleep(millis(20)).await;
    }
    assert_eq!(limiter.peek(Key::ALL).await.unwrap().limits[0].used, 4);
    for _ in 0..6 {
        drop(held.recv().await.unwrap());
    }
    join_all(calls).await;
    until_free(&limiter, 4).await;
}

#[tokio::test]
async fn one_who_knows_of_more_finds_out_that_the_server_has_an_older_state() {
    let mut server = RedisServer::with_options(&["--save", "3600 1"]).unwrap();
    let build = || builder(&server, Quota::in_flight(4)).in_flight_life(millis(8000)).max_wait(millis(500));
    let (ours, theirs) = (build().build().unwrap().limiter(), build().build().unwrap().limiter());
    drop(theirs.acquire(Key::ALL).await.unwrap());
    until_free(&ours, 4).await;
    let () = server.command(&["SAVE"]);
    drop(theirs.acquire(Key::ALL).await.unwrap());
    until_free(&ours, 4).await;
    let held = join_all((0..4).map(|_| ours.acquire(Key::ALL))).await;
    assert!(held.iter().all(Result::is_ok), "{held:?}");
    server.restart().unwrap();
    until_free(&theirs, 4).await;
    let nobody = theirs.acquire(Key::ALL).await;
    assert!(nobody.is_err(), "four are in flight");
}

/// A connection of somebody's that takes its time, and panics when it is told to.
#[derive(Clone)]
struct Odd {
    takes: Duration,
    inner: redis::aio::MultiplexedConnection,
    next: Arc<std::sync::atomic::AtomicBool>,
}

impl redis::aio::ConnectionLike for Odd {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a redis::Cmd) -> redis::RedisFuture<'a, redis::Value> {
        assert!(!self.next.swap(false, Ordering::Relaxed), "as told");
        Box::pin(async move {
            sleep(self.takes).await;
            self.inner.req_packed_command(cmd).await
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        cmd: &'a redis::Pipeline,
        offset: usize,
        count: usize,
    ) -> redis::RedisFuture<'a, Vec<redis::Value>> {
        self.inner.req_packed_commands(cmd, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.inner.get_db()
    }
}

#[tokio::test]
async fn a_connection_that_panics_once_harms_one_call() {
    let server = RedisServer::start().unwrap();
    let next = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let client = redis::Client::open(server.url()).unwrap();
    let inner = client.get_multiplexed_async_connection().await.unwrap();
    let store = RedisStore::with_connection(Odd { takes: Duration::ZERO, inner, next: next.clone() }).build();
    let store = store.unwrap();
    let limiter = RateLimitLayer::builder(Quota::in_flight(1)).store(Arc::new(store)).max_wait(millis(5000));
    let limiter = limiter.build().unwrap().limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    until_free(&limiter, 1).await;
    next.store(true, Ordering::Relaxed);
    let error = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(matches!(error, Limited::Store { .. }), "{error:?}");
    assert!(limiter.acquire(Key::ALL).await.is_ok());
}

/// Processes that listen, and may not speak: all is as slow as asking, and no slower.
#[tokio::test]
async fn those_who_may_not_speak_ask() {
    let server = RedisServer::start().unwrap();
    let app = ["ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-publish"];
    let () = server.command(&app);
    let url = server.url().replace("redis://", "redis://app:secret@");
    let build = || {
        let store = Arc::new(RedisStore::new(&url).unwrap());
        let builder = RateLimitLayer::builder(Quota::in_flight(1)).store(store).max_wait(millis(4000));
        builder.in_flight_life(Duration::from_secs(60)).build().unwrap().limiter()
    };
    let (ours, theirs) = (build(), build());
    let held = ours.acquire(Key::ALL).await.unwrap();
    let waits = tokio::spawn(async move { theirs.acquire(Key::ALL).await.map(drop) });
    sleep(millis(500)).await;
    drop(held);
    waits.await.unwrap().unwrap();
}

/// Between processes and Redis; from some moment on, connections that listen hear nothing, and are not closed.
struct Proxy {
    url: String,
    deaf: Arc<std::sync::atomic::AtomicBool>,
}

impl Proxy {
    async fn start(server: &RedisServer) -> Proxy {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        use tokio::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let (deaf, port) = (Arc::new(std::sync::atomic::AtomicBool::new(false)), server.port());
        let proxy = Proxy { url, deaf: deaf.clone() };
        tokio::spawn(async move {
            while let Ok((caller, _)) = listener.accept().await {
                let deaf = deaf.clone();
                tokio::spawn(async move {
                    let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                    let ((mut from, mut to), (mut answers, mut back)) =
                        (caller.into_split(), server.into_split());
                    std::mem::swap(&mut to, &mut back);
                    let listens = Arc::new(std::sync::atomic::AtomicBool::new(false));
                    // One that is made later hears.
                    let later = deaf.load(Ordering::Relaxed);
                    let asks = listens.clone();
                    tokio::spawn(async move {
                        let mut bytes = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut bytes).await {
                            if String::from_utf8_lossy(&bytes[..count]).contains("SUBSCRIBE") {
                                asks.store(true, Ordering::Relaxed);
                            }
                            if to.write_all(&bytes[..count]).await.is_err() {
                                break;
                            }
                        }
                    });
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = answers.read(&mut bytes).await {
                        let cut = listens.load(Ordering::Relaxed) && !later && deaf.load(Ordering::Relaxed);
                        if !cut && back.write_all(&bytes[..count]).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        proxy
    }
}

#[tokio::test]
async fn a_connection_that_is_cut_without_a_sign_is_made_anew() {
    let server = RedisServer::start().unwrap();
    let proxy = Proxy::start(&server).await;
    let build = |url: &str| {
        let store = Arc::new(RedisStore::new(url).unwrap());
        let builder = RateLimitLayer::builder(Quota::in_flight(1)).store(store);
        builder.in_flight_life(Duration::from_secs(120)).build().unwrap().limiter()
    };
    let (ours, theirs) = (build(&server.url()), build(&proxy.url));
    // They listen.
    drop(theirs.acquire(Key::ALL).await.unwrap());
    sleep(millis(500)).await;
    until_free(&ours, 1).await;
    let held = ours.acquire(Key::ALL).await.unwrap();
    let start = Instant::now();
    let waits = tokio::spawn(async move { theirs.acquire(Key::ALL).await.map(drop) });
    sleep(millis(300)).await;
    proxy.deaf.store(true, Ordering::Relaxed);
    drop(held);
    waits.await.unwrap().unwrap();
    println!("it had its seat after {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_what_others_say_meanwhile() {
    let server = RedisServer::start().unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let inner = client.get_multiplexed_async_connection().await.unwrap();
    let odd = Odd { takes: millis(20), inner, next: Arc::default() };
    let store = Arc::new(RedisStore::with_connection(odd).build().unwrap());
    let build =
        || RateLimitLayer::builder(Quota::in_flight(2)).store(store.clone()).build().unwrap().limiter();
    let (leaves, stays) = (build(), build());
    let others: Vec<_> = (0..200u32)
        .map(|number| {
            let stays = stays.clone();
            tokio::spawn(async move {
                sleep(Duration::from_micros(200 * u64::from(number))).await;
                loop {
                    drop(stays.acquire(Key::new(number.to_le_bytes())).await);
                }
            })
        })
        .collect();
    let held = leaves.acquire(Key::ALL).await.unwrap();
    drop(held);
    tokio::time::timeout(Duration::from_secs(10), leaves.shutdown()).await.expect("an answer").unwrap();
    assert_eq!(free(&leaves).await, 2);
    others.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_hundred_processes_on_one_key_are_never_over_and_all_are_served() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let build = || builder(&server, Quota::in_flight(8)).max_wait(Duration::from_secs(60)).build().unwrap();
    let processes: Vec<_> = (0..100).map(|_| build().limiter()).collect();
    let (before, start) = (scripts_run(&server), Instant::now());
    let callers = processes.iter().flat_map(|limiter| vec![limiter.clone(); 4]).map(|limiter| {
        let upstream = upstream.clone();
        tokio::spawn(async move {
            for _ in 0..3 {
                let permit = limiter.acquire(Key::ALL).await.unwrap();
                upstream.call(millis(5)).await;
                drop(permit);
            }
        })
    });
    let watch = tokio::spawn({
        let mut redis = server.connect().unwrap();
        async move {
            let mut most = 0u64;
            loop {
                let keys: Vec<String> = redis::cmd("KEYS").arg("*:seats").query(&mut redis).unwrap();
                for key in keys {
                    most = most.max(redis::cmd("STRLEN").arg(&key).query(&mut redis).unwrap());
                }
                println!("a state of {most} bytes at most");
                sleep(millis(500)).await;
            }
        }
    });
    join_all(callers).await;
    watch.abort();
    let scripts = scripts_run(&server) - before;
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap_or_default();
    println!("1200 calls of 5 ms in {:?}, {scripts} store calls; {line}", start.elapsed());
    assert_eq!((upstream.most(), upstream.calls()), (8, 1200));
    until_free(&processes[0], 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_many_keys_stay_counted_when_all_are_to_be_said_at_once() {
    let server = RedisServer::start().unwrap();
    let store = Arc::new(RedisStore::new(&server.url()).unwrap());
    let builder = RateLimitLayer::builder(Quota::in_flight(1)).store(store);
    let limiter = builder.in_flight_life(millis(10_000)).max_wait(millis(60_000)).build().unwrap().limiter();
    let key = |number: u32| Key::new(number.to_le_bytes());
    let mut held = Vec::new();
    for chunk in 0..100 {
        held.extend(join_all((0..100).map(|number| limiter.acquire(key(100 * chunk + number)))).await);
    }
    let waits: Vec<_> = (0..100).map(|chunk| tokio::spawn(limiter.acquire(key(100 * chunk)))).collect();
    sleep(millis(1000)).await;
    let before = scripts_run(&server);
    for _ in 0..3 {
        // Nobody tells any more, and then somebody does: each time everybody asks.
        let () = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        sleep(millis(1500)).await;
    }
    println!("{} store calls in 4.5 s for {} calls in flight", scripts_run(&server) - before, held.len());
    drop(held.into_iter().collect::<Result<Vec<_>, _>>().unwrap());
    for waits in waits {
        drop(waits.await.unwrap().unwrap());
    }
}
