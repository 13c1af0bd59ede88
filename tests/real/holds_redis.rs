//! Holds that many processes share: separate stores stand for processes. With a real Redis.

#![cfg(feature = "redis")]

use crate::support::{self, patient};

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::future::join_all;
use redis_server::RedisServer;
use support::{Upstream, get, limited, ok};
use tokio::time::{Instant, sleep};
use tollgate::service::RateLimit;
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer, Reason, RequestRef};
use tower::{Layer, ServiceExt, service_fn};

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// A process: a limiter with its own store.
fn process(server: &RedisServer, quota: Quota, secret: Option<&str>) -> Limiter {
    let store = patient::builder(&server.url());
    let store = match secret {
        Some(secret) => store.secret(secret),
        None => store,
    };
    let builder = RateLimitLayer::builder(quota).store(Arc::new(store.build().unwrap()));
    builder
        .max_wait(Duration::from_secs(10))
        .build()
        .unwrap()
        .limiter()
}

/// Waits until the process knows of the hold, without a store call: a peek would ask the store.
async fn until_refused(limiter: &Limiter) {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let deadline = (Instant::now() + millis(1)).into_std();
        match limiter.acquire(Key::ALL).deadline(deadline).await {
            Err(Limited::Local {
                reason: Reason::Held,
                ..
            }) => return,
            _ => assert!(
                Instant::now() < give_up,
                "the process never learned of the hold"
            ),
        }
    }
}

#[tokio::test]
async fn processes_share_a_hold_with_or_without_secret() {
    let server = RedisServer::start().unwrap();
    for secret in [None, Some("only we know")] {
        let processes: Vec<_> = (0..4)
            .map(|_| process(&server, Quota::per_second(2000), secret))
            .collect();
        for limiter in &processes {
            for _ in 0..50 {
                drop(limiter.acquire(Key::ALL).await.unwrap());
            }
        }
        let start = Instant::now();
        processes[0].hold_for(Key::ALL, millis(1500)).await.unwrap();
        join_all(processes.iter().map(until_refused)).await;
        let again = join_all(processes.iter().map(|limiter| limiter.acquire(Key::ALL))).await;
        assert!(again.iter().all(Result::is_ok), "{again:?}");
        assert!(start.elapsed() >= millis(1500), "{:?}", start.elapsed());
        drop(again);

        // A release by another process ends the hold for all.
        processes[0]
            .hold_for(Key::ALL, Duration::from_secs(60))
            .await
            .unwrap();
        join_all(processes.iter().map(until_refused)).await;
        processes[3].release(Key::ALL).await.unwrap();
        for limiter in &processes {
            let give_up = Instant::now() + Duration::from_secs(10);
            while let Err(error) = limiter.acquire(Key::ALL).await {
                assert!(
                    Instant::now() < give_up,
                    "the process never learned of the release: {error:?}"
                );
                sleep(millis(1)).await;
            }
            assert_eq!(limiter.peek(Key::ALL).await.unwrap().held, None);
        }
        let () = server.command(&["FLUSHALL"]);
    }
}

#[tokio::test]
async fn later_process_learns_of_hold_with_first_request() {
    let server = RedisServer::start().unwrap();
    let quota = Quota::per_second(50);
    process(&server, quota, None)
        .hold_for(Key::ALL, Duration::from_secs(60))
        .await
        .unwrap();
    let late = process(&server, quota, None);
    let refused = late.acquire(Key::ALL).await.unwrap_err();
    assert!(
        matches!(
            refused,
            Limited::Local {
                reason: Reason::Held,
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(late.peek(Key::ALL).await.unwrap().held > Some(Duration::from_secs(50)));
}

#[tokio::test]
async fn in_flight_limit_learns_a_hold_after_one_call() {
    let server = RedisServer::start().unwrap();
    let quota = Quota::in_flight(5);
    process(&server, quota, None)
        .hold_for(Key::ALL, Duration::from_secs(60))
        .await
        .unwrap();
    let late = process(&server, quota, None);
    let _ = late.acquire(Key::ALL).await;
    until_refused(&late).await;
}

#[tokio::test]
async fn restarted_redis_receives_known_holds_before_any_call() {
    let mut server = RedisServer::start().unwrap();
    let quota = Quota::per_second(50);
    let (ours, theirs) = (process(&server, quota, None), process(&server, quota, None));
    for limiter in [&ours, &theirs] {
        drop(limiter.acquire(Key::ALL).await.unwrap());
    }
    ours.hold_for(Key::ALL, Duration::from_secs(60))
        .await
        .unwrap();
    until_refused(&theirs).await;
    drop(ours);
    server.restart().unwrap();
    // This process only peeks.
    let late = process(&server, quota, None);
    let give_up = Instant::now() + Duration::from_secs(10);
    while late
        .peek(Key::ALL)
        .await
        .ok()
        .and_then(|peek| peek.held)
        .is_none()
    {
        assert!(
            Instant::now() < give_up,
            "no process reports the hold to Redis"
        );
        sleep(millis(10)).await;
    }
    let refused = late.acquire(Key::ALL).await.unwrap_err();
    assert!(
        matches!(
            refused,
            Limited::Local {
                reason: Reason::Held,
                ..
            }
        ),
        "{refused:?}"
    );
}

/// A subscription that breaks before its first message is made anew at once.
#[tokio::test]
async fn subscription_that_breaks_at_once_is_made_anew() {
    let server = RedisServer::start().unwrap();
    let acl = |rights: &[&str]| {
        let () = server.command(&[&["ACL", "SETUSER", "app"], rights].concat());
    };
    // Without the right to publish, a process receives no first message.
    acl(&["on", ">secret", "~*", "&*", "+@all", "-publish"]);
    let url = server.url().replace("redis://", "redis://app:secret@");
    let limiter = RateLimitLayer::builder(Quota::per_second(50))
        .store(patient::store(&url))
        .build()
        .unwrap()
        .limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let until_subscribed = async || {
        let give_up = Instant::now() + Duration::from_secs(10);
        while server
            .command::<Vec<String>>(&["PUBSUB", "CHANNELS", "*"])
            .is_empty()
        {
            assert!(Instant::now() < give_up, "the process does not subscribe");
            sleep(millis(10)).await;
        }
    };
    until_subscribed().await;
    let killed: u32 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    assert_eq!(killed, 1);
    until_subscribed().await;
}

#[tokio::test]
async fn forgotten_hold_is_sent_again_with_next_request() {
    let server = RedisServer::start().unwrap();
    let quota = Quota::per_second(50);
    let (ours, theirs) = (process(&server, quota, None), process(&server, quota, None));
    ours.hold_for(Key::ALL, Duration::from_secs(30))
        .await
        .unwrap();
    let () = server.command(&["FLUSHALL"]);
    // A request that may wait for the end asks for a slot after it.
    let patient = RateLimitLayer::builder(quota).max_wait(Duration::from_secs(60));
    drop(patient);
    let waits = tokio::spawn(async move {
        let deadline = (Instant::now() + Duration::from_secs(9)).into_std();
        ours.acquire(Key::ALL).deadline(deadline).await.map(drop)
    });
    let refused = waits.await.unwrap().unwrap_err();
    assert!(
        matches!(
            refused,
            Limited::Local {
                reason: Reason::Held,
                ..
            }
        ),
        "{refused:?}"
    );
    drop(theirs);
}

/// Calls `url` until the process holds its host.
async fn until_host_is_held(service: &RateLimit<Upstream>, url: &str) {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        match service.clone().oneshot(get(url)).await {
            Err(error) => {
                let reason = Limited::find(&error).and_then(Limited::reason);
                return assert_eq!(reason, Some(Reason::Held), "{error}");
            }
            Ok(_) => assert!(
                Instant::now() < give_up,
                "the process never learned of the hold"
            ),
        }
    }
}

#[tokio::test]
async fn host_hold_is_shared_without_a_key_function() {
    let server = RedisServer::start().unwrap();
    let upstream = Upstream::answering([ok(), limited("60")]);
    let process = || {
        let store = patient::store(&server.url());
        let builder = RateLimitLayer::builder(Quota::per_second(500)).store(store);
        builder.max_wait(Duration::from_secs(10)).build().unwrap()
    };
    let (ours, theirs) = (process(), process());
    let [our_service, their_service] = [&ours, &theirs].map(|layer| layer.layer(upstream.clone()));
    let (one, two) = ("http://one.test/", "http://two.test/");
    their_service.clone().oneshot(get(two)).await.unwrap();
    our_service.clone().oneshot(get(one)).await.unwrap();
    let late = process();
    let late_service = late.layer(upstream.clone());
    for service in [&our_service, &their_service, &late_service] {
        until_host_is_held(service, one).await;
        service.clone().oneshot(get(two)).await.unwrap();
    }
    // A release by one process ends the hold for all.
    theirs
        .limiter()
        .release(Key::host_hold("one.test"))
        .await
        .unwrap();
    for service in [&our_service, &their_service, &late_service] {
        let give_up = Instant::now() + Duration::from_secs(10);
        while service.clone().oneshot(get(one)).await.is_err() {
            assert!(
                Instant::now() < give_up,
                "the process never learned of the release"
            );
            sleep(millis(1)).await;
        }
    }
}

/// How many messages the server was asked to publish.
fn published(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_publish:"));
    line.and_then(|line| line.split("calls=").nth(1)?.split(',').next()?.parse().ok())
        .unwrap_or(0)
}

/// All requests have left by then, also on a busy machine. Then the first is refused.
const ALL_HAVE_LEFT: Duration = Duration::from_millis(2500);

type Refusal = Pin<Box<dyn Future<Output = Result<http::Response<()>, Infallible>> + Send>>;

/// An upstream that refuses requests in turn, one `every` interval, with the `Retry-After` of their
/// turn.
fn refusing(
    every: Duration,
    retry_after: fn(u32) -> u64,
) -> impl Fn(http::Request<String>) -> Refusal + Clone {
    let turns = Arc::new(AtomicU32::new(0));
    move |_| {
        let turn = turns.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            sleep(ALL_HAVE_LEFT + every * turn).await;
            let refusal = http::Response::builder()
                .status(429)
                .header("Retry-After", retry_after(turn));
            Ok(refusal.body(()).unwrap())
        })
    }
}

/// The record of a process whose requests were refused in turn.
#[derive(Debug)]
struct Storm {
    refused: u32,
    took: Duration,
    published: u64,
}

/// Sends `count` requests for `keys` keys at once through a process of its own.
async fn storm(
    server: &RedisServer,
    (count, keys): (u32, u32),
    every: Duration,
    retry_after: fn(u32) -> u64,
) -> Storm {
    let store = patient::builder(&server.url()).build().unwrap();
    let builder = RateLimitLayer::builder(Quota::per_second(2000)).store(Arc::new(store));
    let by_path = |request: &RequestRef<'_>| Some(Key::new(request.path()));
    // Requests that have not left when the first is refused may stay unsent.
    let builder = builder
        .key(by_path)
        .max_wait(ALL_HAVE_LEFT)
        .max_hold(Duration::from_secs(3600));
    let service = builder
        .build()
        .unwrap()
        .layer(service_fn(refusing(every, retry_after)));
    let (before, start) = (published(server), Instant::now());
    let calls = (0..count).map(|number| {
        let url = format!("http://one.test/{}", number % keys);
        service.clone().oneshot(get(&url))
    });
    let refused = join_all(calls)
        .await
        .iter()
        .filter(|answer| answer.is_ok())
        .count() as u32;
    Storm {
        refused,
        took: start.elapsed().saturating_sub(ALL_HAVE_LEFT),
        published: published(server) - before,
    }
}

/// Each refusal would hold its key slightly longer than the one before.
#[tokio::test]
async fn storms_of_refusals_publish_once_a_second_and_key() {
    let server = RedisServer::start().unwrap();
    const KEYS: u32 = 2;
    for round in 0.. {
        let storm = storm(&server, (600, KEYS), millis(5), |_| 6).await;
        println!("{storm:?}");
        // After half a second without a refusal, the next one holds for longer by a tenth: then the
        // machine stalled, and the test repeats the round.
        let bounds = u64::from(KEYS)..=u64::from(KEYS) * (storm.took.as_secs() + 1);
        if storm.refused > 500 && bounds.contains(&storm.published) {
            break;
        }
        assert!(round < 4, "published {bounds:?}: {storm:?}");
        sleep(millis(6500)).await;
    }
}

/// A hold that is longer by a tenth or more is published at once.
#[tokio::test]
async fn refusals_that_hold_for_longer_are_published_at_once() {
    let server = RedisServer::start().unwrap();
    for round in 0.. {
        let _: () = server.command(&["FLUSHALL"]);
        let before = published(&server);
        if storm(&server, (8, 1), millis(20), |turn| 2 << turn)
            .await
            .refused
            < 8
        {
            assert!(round < 4, "the machine stands still");
            continue;
        }
        // The process does not wait until the store knows.
        let (other, give_up) = (
            process(&server, Quota::per_second(2000), None),
            Instant::now() + Duration::from_secs(10),
        );
        while other
            .peek(Key::new("/0"))
            .await
            .ok()
            .and_then(|peek| peek.held)
            < Some(Duration::from_secs(200))
        {
            assert!(
                Instant::now() < give_up,
                "the store does not know of the longest hold"
            );
            sleep(millis(10)).await;
        }
        let published = published(&server) - before;
        assert!(published >= 4, "{published} of 8 in less than a second");
        break;
    }
}
