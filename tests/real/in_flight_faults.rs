//! In-flight limits when Redis loses its data, is unreachable, or blocks notifications: the limit
//! holds, and every slot is free again in the end.

#![cfg(feature = "redis")]

use crate::support::{in_flight, patient};

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::store::{RedisStore, StoreError};
use tollgate::{Key, Limited, Limiter, OnStoreError, Permit, Quota, RateLimitLayer};

use in_flight::{Upstream, builder, free, millis, process, until_free};

#[tokio::test]
async fn server_that_forgot_grants_nothing_during_calls_in_flight() {
    let server = RedisServer::start().unwrap();
    let build = || {
        builder(&server, Quota::in_flight(4))
            .in_flight_ttl(millis(900))
            .build()
            .unwrap()
            .limiter()
    };
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
async fn unreachable_store_is_reported_at_once_and_found_again() {
    let mut server = RedisServer::start().unwrap();
    let limiter = process(&server, Quota::in_flight(2));
    let held = limiter.acquire(Key::ALL).await.unwrap();
    server.kill();
    sleep(millis(100)).await;
    let error = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(
        matches!(
            error,
            Limited::Store {
                source: StoreError::Away(_),
                ..
            }
        ),
        "{error:?}"
    );
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
async fn call_past_in_flight_ttl_is_revoked_or_continues() {
    let mut server = RedisServer::start().unwrap();
    let life = millis(400);
    let closed = builder(&server, Quota::in_flight(2))
        .in_flight_ttl(life)
        .build()
        .unwrap()
        .limiter();
    let open = builder(&server, Quota::in_flight(2)).in_flight_ttl(life);
    let open = open
        .on_store_error(OnStoreError::FailOpen)
        .build()
        .unwrap()
        .limiter();
    let (one, two) = (
        closed.acquire(Key::ALL).await.unwrap().begin().unwrap(),
        open.acquire(Key::ALL).await.unwrap().begin().unwrap(),
    );
    server.kill();
    let lost = one.revoked().await;
    assert!(matches!(lost, StoreError::InFlightSlotLost), "{lost:?}");
    let goes_on = tokio::time::timeout(millis(500), two.revoked()).await;
    assert!(goes_on.is_err(), "{goes_on:?}");
    // A call that lost its slot ends like any other.
    drop((one, two));
    server.restart().unwrap();
    until_free(&closed, 2).await;
}

#[tokio::test]
async fn custom_connection_polls_without_notifications() {
    let server = RedisServer::start().unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let build = || {
        let client = client.clone();
        let store = RedisStore::with_factory(move || {
            let client = client.clone();
            async move { client.get_multiplexed_async_connection().await }
        });
        let store = Arc::new(store.build().unwrap());
        RateLimitLayer::builder(Quota::in_flight(1))
            .store(store)
            .build()
            .unwrap()
            .limiter()
    };
    let (ours, theirs) = (build(), build());
    let held = ours.acquire(Key::ALL).await.unwrap();
    let waits = tokio::spawn(async move { theirs.acquire(Key::ALL).await.map(drop) });
    sleep(millis(100)).await;
    drop(held);
    waits.await.unwrap().unwrap();
}

#[tokio::test]
async fn server_that_forgot_relearns_slots_granted_to_waiters() {
    let server = RedisServer::start().unwrap();
    let build = || {
        // A process that stalls for longer than this loses its slots.
        builder(&server, Quota::in_flight(4))
            .in_flight_ttl(millis(1800))
            .build()
            .unwrap()
            .limiter()
    };
    let (ours, theirs) = (build(), build());
    let permits = try_join_all((0..4).map(|_| ours.acquire(Key::ALL))).await;
    let begun = permits.unwrap().into_iter().map(Permit::begin);
    let held: Vec<_> = begun.collect::<Result<_, _>>().unwrap();
    let waits = tokio::spawn({
        let theirs = theirs.clone();
        async move { theirs.acquire(Key::ALL).await.map(drop) }
    });
    sleep(millis(100)).await;
    let () = server.command(&["FLUSHALL"]);
    // Longer than the server's recovery.
    let nobody = tokio::time::timeout(millis(2500), waits).await;
    assert!(nobody.is_err(), "{nobody:?}");
    let lost = tokio::time::timeout(millis(10), held[0].revoked()).await;
    assert!(lost.is_err(), "the store was there all the time");
    drop(held);
    until_free(&ours, 4).await;
}

#[tokio::test]
async fn recently_idle_process_detects_a_server_that_forgot() {
    let server = RedisServer::start().unwrap();
    let build = || {
        builder(&server, Quota::in_flight(4))
            .in_flight_ttl(millis(8000))
            .max_wait(millis(500))
    };
    let (ours, theirs) = (
        build().build().unwrap().limiter(),
        build().build().unwrap().limiter(),
    );
    drop(theirs.acquire(Key::ALL).await.unwrap());
    until_free(&ours, 4).await;
    let held = join_all((0..4).map(|_| ours.acquire(Key::ALL))).await;
    assert!(held.iter().all(Result::is_ok), "{held:?}");
    let () = server.command(&["FLUSHALL"]);
    let nobody = theirs.acquire(Key::ALL).await;
    assert!(nobody.is_err(), "four are in flight");
}

#[tokio::test]
async fn newer_process_detects_a_server_with_older_state() {
    let mut server = RedisServer::with_options(&["--save", "3600 1"]).unwrap();
    let build = || {
        builder(&server, Quota::in_flight(4))
            .in_flight_ttl(millis(8000))
            .max_wait(millis(500))
    };
    let (ours, theirs) = (
        build().build().unwrap().limiter(),
        build().build().unwrap().limiter(),
    );
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

/// A user's connection that is slow, and panics on request.
#[derive(Clone)]
struct Odd {
    takes: Duration,
    inner: redis::aio::MultiplexedConnection,
    next: Arc<std::sync::atomic::AtomicBool>,
}

impl redis::aio::ConnectionLike for Odd {
    fn req_packed_command<'a>(
        &'a mut self,
        cmd: &'a redis::Cmd,
    ) -> redis::RedisFuture<'a, redis::Value> {
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
    let store = RedisStore::with_connection(Odd {
        takes: Duration::ZERO,
        inner,
        next: next.clone(),
    })
    .build();
    let store = store.unwrap();
    let limiter = RateLimitLayer::builder(Quota::in_flight(1))
        .store(Arc::new(store))
        .max_wait(millis(5000));
    let limiter = limiter.build().unwrap().limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    until_free(&limiter, 1).await;
    next.store(true, Ordering::Relaxed);
    let error = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(matches!(error, Limited::Store { .. }), "{error:?}");
    assert!(limiter.acquire(Key::ALL).await.is_ok());
}

/// Processes that may subscribe but not publish: every change is as slow as polling, and no slower.
#[tokio::test]
async fn waiters_poll_when_publish_is_forbidden() {
    let server = RedisServer::start().unwrap();
    let app = [
        "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-publish",
    ];
    let () = server.command(&app);
    let url = server.url().replace("redis://", "redis://app:secret@");
    let build = || {
        let store = patient::store(&url);
        let builder = RateLimitLayer::builder(Quota::in_flight(1))
            .store(store)
            .max_wait(millis(4000));
        builder
            .in_flight_ttl(Duration::from_secs(60))
            .build()
            .unwrap()
            .limiter()
    };
    let (ours, theirs) = (build(), build());
    let held = ours.acquire(Key::ALL).await.unwrap();
    let waits = tokio::spawn(async move { theirs.acquire(Key::ALL).await.map(drop) });
    sleep(millis(500)).await;
    drop(held);
    waits.await.unwrap().unwrap();
}

/// A proxy between processes and Redis; from some moment on, subscribed connections receive
/// nothing, and are not closed.
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
        let (deaf, port) = (
            Arc::new(std::sync::atomic::AtomicBool::new(false)),
            server.port(),
        );
        let proxy = Proxy {
            url,
            deaf: deaf.clone(),
        };
        tokio::spawn(async move {
            while let Ok((caller, _)) = listener.accept().await {
                let deaf = deaf.clone();
                tokio::spawn(async move {
                    let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                    let ((mut from, mut to), (mut answers, mut back)) =
                        (caller.into_split(), server.into_split());
                    std::mem::swap(&mut to, &mut back);
                    let listens = Arc::new(std::sync::atomic::AtomicBool::new(false));
                    // A connection that is made later receives messages.
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
                        let cut = listens.load(Ordering::Relaxed)
                            && !later
                            && deaf.load(Ordering::Relaxed);
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
async fn connection_cut_silently_is_made_anew() {
    let server = RedisServer::start().unwrap();
    let proxy = Proxy::start(&server).await;
    let build = |url: &str| {
        let store = patient::store(url);
        let builder = RateLimitLayer::builder(Quota::in_flight(1)).store(store);
        builder
            .in_flight_ttl(Duration::from_secs(120))
            .build()
            .unwrap()
            .limiter()
    };
    let (ours, theirs) = (build(&server.url()), build(&proxy.url));
    // They are subscribed.
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
    println!("it had its in-flight slot after {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_what_others_say_meanwhile() {
    let server = RedisServer::start().unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let inner = client.get_multiplexed_async_connection().await.unwrap();
    let odd = Odd {
        takes: millis(20),
        inner,
        next: Arc::default(),
    };
    let store = RedisStore::with_connection(odd)
        .store_timeout(patient::TIMEOUT)
        .build()
        .unwrap();
    let store = Arc::new(store);
    let build = || {
        RateLimitLayer::builder(Quota::in_flight(2))
            .store(store.clone())
            .build()
            .unwrap()
            .limiter()
    };
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
    tokio::time::timeout(Duration::from_secs(10), leaves.shutdown())
        .await
        .expect("an answer")
        .unwrap();
    assert_eq!(free(&leaves).await, 2);
    others.iter().for_each(tokio::task::JoinHandle::abort);
}
