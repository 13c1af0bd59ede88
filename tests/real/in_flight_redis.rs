//! In-flight limits that many processes share: separate stores stand for processes. With a real
//! Redis.

#![cfg(feature = "redis")]

use crate::support::{in_flight, patient};

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use redis_server::{Proxy, RedisServer};
use tokio::time::{Instant, sleep};
use tollgate::store::RedisStore;
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer};

use in_flight::{Upstream, builder, free, millis, process, scripts_run, until_free};

#[tokio::test]
async fn processes_share_in_flight_slots_without_polling() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let processes: Vec<_> = (0..4)
        .map(|_| process(&server, Quota::in_flight(8)))
        .collect();
    join_all(processes.iter().map(free)).await;
    let before = scripts_run(&server);
    let callers = processes
        .iter()
        .flat_map(|limiter| vec![limiter.clone(); 16])
        .map(|limiter| {
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
    // Each end and each arrival is reported at most once, and many in one call.
    assert!(scripts <= 2 * 640 + 100, "{scripts}");
    until_free(&processes[0], 8).await;
}

#[tokio::test]
async fn lone_process_reuses_in_flight_slots_without_the_store() {
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
async fn waiters_go_in_order_across_processes() {
    let server = RedisServer::start().unwrap();
    let (ours, theirs) = (
        process(&server, Quota::in_flight(1)),
        process(&server, Quota::in_flight(1)),
    );
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
        // The store knows of each process before the next comes.
        sleep(millis(100)).await;
    }
    drop(held);
    join_all(tasks).await;
    assert_eq!(*order.lock().unwrap(), (0..12).collect::<Vec<_>>());
}

/// Two processes make jobs, which always ask. A third one is the web, which has half of the slots.
#[tokio::test]
async fn a_class_below_its_share_gets_the_next_free_slot() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let [jobs, more_jobs, web] = [(); 3].map(|()| {
        let builder = builder(&server, Quota::in_flight(10)).share("web", 50);
        builder.max_wait(millis(60_000)).build().unwrap().limiter()
    });
    for limiter in [jobs, more_jobs].iter().flat_map(|jobs| vec![jobs; 30]) {
        let (limiter, upstream) = (limiter.clone(), upstream.clone());
        tokio::spawn(async move {
            loop {
                let permit = limiter.acquire(Key::ALL).class("jobs").await.unwrap();
                upstream.call(millis(150)).await;
                drop(permit);
            }
        });
    }
    while upstream.begun() < 100 {
        sleep(millis(10)).await;
    }
    assert_eq!(
        upstream.most(),
        10,
        "jobs have all slots while the web is idle"
    );

    // About 50 jobs wait in front of each request. It does not wait for them to begin.
    let mut permits = Vec::new();
    let mut begun = Vec::new();
    for _ in 0..5 {
        let before = upstream.begun();
        permits.push(web.acquire(Key::ALL).class("web").await.unwrap());
        begun.push(upstream.begun() - before);
    }
    println!("jobs that began while the web waited: {begun:?}");
    assert!(begun.iter().all(|jobs| *jobs < 25), "{begun:?}");
    assert!(upstream.now() <= 5, "{}", upstream.now());

    // The web has its share, and the jobs have theirs.
    let next = tokio::spawn(async move { web.acquire(Key::ALL).class("web").await.unwrap() });
    let before = upstream.begun();
    while upstream.begun() < before + 100 {
        sleep(millis(10)).await;
    }
    assert!(!next.is_finished());
    permits.pop();
    permits.push(next.await.unwrap());

    let start = Instant::now();
    drop(permits);
    // On a busy machine, some of the slots are on their way from one job to the next.
    while upstream.now() < 10 {
        let is_soon = start.elapsed() < Duration::from_secs(10);
        assert!(is_soon, "jobs have all slots again");
        sleep(millis(1)).await;
    }
}

#[tokio::test]
async fn an_upstream_slower_than_the_life_never_sees_more() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let processes: Vec<_> = (0..3)
        .map(|_| {
            builder(&server, Quota::in_flight(5))
                .in_flight_ttl(millis(1500))
                .build()
                .unwrap()
                .limiter()
        })
        .collect();
    let callers = processes
        .iter()
        .flat_map(|limiter| vec![limiter.clone(); 5])
        .map(|limiter| {
            let upstream = upstream.clone();
            tokio::spawn(async move {
                let permit = limiter.acquire(Key::ALL).await.unwrap();
                upstream.call(millis(3200)).await;
                drop(permit);
            })
        });
    join_all(callers).await;
    assert_eq!((upstream.most(), upstream.calls()), (5, 15));
}

#[test]
fn runtime_dropped_with_fifty_calls_leaves_none() {
    let server = RedisServer::start().unwrap();
    let (ours, theirs) = (
        process(&server, Quota::in_flight(60)),
        process(&server, Quota::in_flight(60)),
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
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
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(until_free(&theirs, 60));
}

#[tokio::test]
async fn shutdown_returns_after_all_releases_reach_the_store() {
    let server = RedisServer::start().unwrap();
    let limiter = process(&server, Quota::in_flight(9).and(Quota::per_second(100)));
    let held = join_all((0..9).map(|_| limiter.acquire(Key::ALL))).await;
    // All have one, also if the machine stalled.
    assert!(held.iter().all(Result::is_ok), "{held:?}");
    drop(held);
    limiter.shutdown().await.unwrap();
    assert_eq!(free(&limiter).await, 9);
}

#[tokio::test]
async fn consecutive_calls_each_get_an_in_flight_slot() {
    let server = RedisServer::start().unwrap();
    let limiter = builder(&server, Quota::in_flight(1))
        .max_wait(millis(2000))
        .build()
        .unwrap()
        .limiter();
    for _ in 0..20 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
        // The store knows that no call is in flight.
        until_free(&limiter, 1).await;
    }
}

#[tokio::test]
async fn impatient_requests_are_refused_when_the_store_answers() {
    let server = RedisServer::start().unwrap();
    let build = |max_wait| {
        builder(&server, Quota::in_flight(1))
            .max_wait(max_wait)
            .build()
            .unwrap()
            .limiter()
    };
    let (theirs, ours) = (build(millis(5000)), build(Duration::ZERO));
    let held = theirs.acquire(Key::ALL).await.unwrap();
    for round in 0..5 {
        let start = Instant::now();
        // Some requests come during the store call for the others.
        let tries = join_all((0..3).map(|number| {
            let ours = ours.clone();
            async move {
                sleep(Duration::from_micros(100 * number)).await;
                ours.acquire(Key::ALL).await
            }
        }));
        assert!(tries.await.iter().all(Result::is_err));
        println!("round {round}: notified after {:?}", start.elapsed());
    }
    drop(held);
    until_free(&theirs, 1).await;
    assert!(ours.acquire(Key::ALL).await.is_ok());
}

#[tokio::test]
async fn in_flight_slot_is_not_kept_for_departed_waiters() {
    let server = RedisServer::start().unwrap();
    let build = || {
        builder(&server, Quota::in_flight(1))
            .in_flight_ttl(millis(600))
            .max_keys(1)
            .build()
            .unwrap()
            .limiter()
    };
    let (theirs, ours) = (build(), build());
    let held = theirs.acquire(Key::ALL).await.unwrap();
    // The request gives up, and its limiter has room for another key.
    let soon = (Instant::now() + millis(20)).into_std();
    assert!(ours.acquire(Key::ALL).deadline(soon).await.is_err());
    let give_up = Instant::now() + Duration::from_secs(10);
    while ours.acquire(Key::new("another")).await.is_err() {
        assert!(Instant::now() < give_up, "there is no room");
        sleep(millis(5)).await;
    }
    drop(held);
    until_free(&theirs, 1).await;
    assert!(theirs.acquire(Key::ALL).await.is_ok());
}

#[tokio::test]
async fn repeated_claims_grant_no_extra_slots() {
    let server = RedisServer::start().unwrap();
    let limiter = builder(&server, Quota::in_flight(4))
        .in_flight_ttl(millis(300))
        .build()
        .unwrap()
        .limiter();
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
async fn hundred_processes_share_one_key_within_its_limit() {
    let server = RedisServer::start().unwrap();
    let upstream = Arc::new(Upstream::default());
    let build = || {
        builder(&server, Quota::in_flight(8))
            .max_wait(Duration::from_secs(60))
            .build()
            .unwrap()
    };
    let processes: Vec<_> = (0..100).map(|_| build().limiter()).collect();
    let (before, start) = (scripts_run(&server), Instant::now());
    let callers = processes
        .iter()
        .flat_map(|limiter| vec![limiter.clone(); 4])
        .map(|limiter| {
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
                let keys: Vec<String> =
                    redis::cmd("KEYS").arg("*:seats").query(&mut redis).unwrap();
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
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"))
        .unwrap_or_default();
    println!(
        "1200 calls of 5 ms in {:?}, {scripts} store calls; {line}",
        start.elapsed()
    );
    assert_eq!((upstream.most(), upstream.calls()), (8, 1200));
    until_free(&processes[0], 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_many_keys_stay_counted_after_lost_subscriptions() {
    let server = RedisServer::start().unwrap();
    let builder = RateLimitLayer::builder(Quota::in_flight(1)).store(patient::store(&server.url()));
    let limiter = builder
        .in_flight_ttl(millis(10_000))
        .max_wait(millis(60_000))
        .build()
        .unwrap()
        .limiter();
    let key = |number: u32| Key::new(number.to_le_bytes());
    let mut held = Vec::new();
    for chunk in 0..100 {
        held.extend(
            join_all((0..100).map(|number| limiter.acquire(key(100 * chunk + number)))).await,
        );
    }
    let waits: Vec<_> = (0..100)
        .map(|chunk| tokio::spawn(limiter.acquire(key(100 * chunk))))
        .collect();
    sleep(millis(1000)).await;
    let before = scripts_run(&server);
    for _ in 0..3 {
        // Notifications stop, and start again: each time every waiter polls.
        let () = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        sleep(millis(1500)).await;
    }
    println!(
        "{} store calls in 4.5 s for {} calls in flight",
        scripts_run(&server) - before,
        held.len()
    );
    drop(held.into_iter().collect::<Result<Vec<_>, _>>().unwrap());
    for waits in waits {
        drop(waits.await.unwrap().unwrap());
    }
}

/// The claims of the first calls of many keys do not all run at once: a late reply would break the
/// connection for all keys.
#[tokio::test]
async fn first_claims_of_many_keys_are_bounded() {
    const KEYS: u64 = 1000;
    let server = RedisServer::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let store = RedisStore::builder(&proxy.url()).store_timeout(Duration::from_secs(10));
    let limiter = RateLimitLayer::builder(Quota::in_flight(4))
        .store(Arc::new(store.build().unwrap()))
        .max_wait(Duration::from_secs(60))
        .build()
        .unwrap()
        .limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let before = scripts_run(&server);
    proxy.delay(millis(400));
    let calls = (0..KEYS).map(|key| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let permit = limiter.acquire(Key::new(key.to_be_bytes())).await;
            permit.map(drop)
        })
    });
    let calls: Vec<_> = calls.collect();
    while scripts_run(&server) - before < 10 {
        sleep(millis(5)).await;
    }
    sleep(millis(100)).await;
    // A stall of the machine may add some rounds of 100.
    let scripts = scripts_run(&server) - before;
    assert!(scripts <= KEYS / 2, "{scripts} claims at once");
    proxy.delay(Duration::ZERO);
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

/// A waiter that is not polled has the slot that another process waits for. It goes on.
#[tokio::test]
async fn slots_of_unpolled_waiters_go_to_another_process() {
    use futures::FutureExt;

    let server = RedisServer::start().unwrap();
    let [one, other] = [(); 2].map(|()| process(&server, Quota::in_flight(1)));
    let first = one.acquire(Key::ALL).await.unwrap();
    let mut idle = one.acquire(Key::ALL);
    assert!((&mut idle).now_or_never().is_none());
    sleep(millis(100)).await;
    let next = tokio::spawn(other.acquire(Key::ALL));
    sleep(millis(100)).await;
    drop(first);
    drop(next.await.unwrap().unwrap());
    drop(idle.await.unwrap());
}

/// Makes a call of `channel`, as one of `all`. A busy machine may take longer for the answer than a permit is valid: then
/// the call is made again.
async fn call(all: Limiter, channels: Limiter, channel: &'static str) {
    loop {
        let request = all.acquire(Key::ALL);
        match request.and(channels.acquire(Key::new(channel))).await {
            Ok(permit) => return drop(permit),
            Err(Limited::Store { .. }) => {}
            Err(limited) => panic!("{limited}"),
        }
    }
}

/// Requests of two processes wait for the rate of one channel. None of them keeps one of the four in-flight slots of all
/// channels.
#[tokio::test]
async fn waiters_of_a_rate_keep_no_in_flight_slot() {
    const BUSY: usize = 12;

    let server = RedisServer::start().unwrap();
    let processes = [(); 2].map(|()| {
        let all = process(&server, Quota::in_flight(4));
        (all, process(&server, Quota::every(millis(250))))
    });
    let made = Arc::new(AtomicUsize::new(0));
    let busy = (0..BUSY).map(|caller| {
        let (all, channels) = processes[caller % 2].clone();
        let made = made.clone();
        tokio::spawn(async move {
            call(all, channels, "busy").await;
            made.fetch_add(1, Ordering::Relaxed);
        })
    });
    let busy: Vec<_> = busy.collect();
    sleep(millis(300)).await;
    for (all, channels) in processes {
        call(all, channels, "quiet").await;
    }
    // If they kept slots, the quiet channel would have one when nearly all had left.
    let made = made.load(Ordering::Relaxed);
    assert!(made <= BUSY / 2, "{made} calls of the busy channel before");
    for busy in join_all(busy).await {
        busy.unwrap();
    }
}
