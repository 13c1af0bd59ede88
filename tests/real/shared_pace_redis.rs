//! One pace and one queue for many processes, with a real Redis: separate stores stand for
//! processes.

#![cfg(feature = "redis")]

use crate::support::patient;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use http::StatusCode;
use redis_server::RedisServer;
use tokio::time::{Instant, sleep, timeout};
use tollgate::pace::Fair;
use tollgate::signal::ObservedQuota;
use tollgate::{AdaptiveThrottleLayer, Key, Signal, Throttle};

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// A process: a throttle with its own store. The limit is 20 a second.
fn process(server: &RedisServer, secret: Option<&str>) -> Throttle {
    let store = patient::builder(&server.url());
    let store = match secret {
        Some(secret) => store.secret(secret),
        None => store,
    };
    let builder =
        AdaptiveThrottleLayer::builder().pace(|| Fair::new().limit(20, Duration::from_secs(1)));
    let builder = builder
        .store(Arc::new(store.build().unwrap()))
        .max_wait(Duration::from_secs(60));
    builder.build().unwrap().throttle()
}

fn left(remaining: u64) -> Signal {
    Signal::default().with_quota(ObservedQuota::new().with_remaining(remaining))
}

fn refusal() -> Signal {
    left(0).with_refusal(StatusCode::TOO_MANY_REQUESTS)
}

/// A bucket of 100 that is empty at first and gets 20 a second.
struct Bucket {
    tokens: f64,
    last: Instant,
    accepted: usize,
    refused: usize,
}

impl Bucket {
    fn judge(&mut self) -> Signal {
        let now = Instant::now();
        self.tokens = (self.tokens + (now - self.last).as_secs_f64() * 20.0).min(100.0);
        self.last = now;
        if self.tokens < 1.0 {
            self.refused += 1;
            return refusal();
        }
        self.tokens -= 1.0;
        self.accepted += 1;
        left(self.tokens as u64)
    }
}

#[tokio::test]
async fn processes_sharing_a_pace_survive_redis_with_few_refusals() {
    let mut server = RedisServer::start().unwrap();
    let processes: Vec<_> = (0..30)
        .map(|_| process(&server, Some("only we know")))
        .collect();
    let bucket = Arc::new(Mutex::new(Bucket {
        tokens: 0.0,
        last: Instant::now(),
        accepted: 0,
        refused: 0,
    }));
    let end = Instant::now() + Duration::from_secs(21);
    let calls: Vec<_> = processes
        .iter()
        .map(|_| Arc::new(AtomicUsize::new(0)))
        .collect();
    let calling = processes.iter().zip(&calls).map(|(throttle, calls)| {
        let (throttle, bucket, calls) = (throttle.clone(), bucket.clone(), calls.clone());
        tokio::spawn(async move {
            while Instant::now() < end {
                let permit = throttle.acquire(Key::ALL).await.unwrap();
                sleep(millis(10)).await;
                let signal = bucket.lock().unwrap().judge();
                permit.answered(&signal);
                calls.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let calling: Vec<_> = calling.collect();
    let is_rare = |refused: usize, of: usize| refused <= 2 + of / 20;
    let count = || {
        let bucket = bucket.lock().unwrap();
        (bucket.accepted, bucket.refused)
    };
    // A process that starts at a nearly empty bucket assumes that others use it, and learns the
    // number.
    sleep(Duration::from_secs(6)).await;
    let (before, refused) = count();
    assert!(is_rare(refused, before), "{refused} refused of {before}");
    sleep(Duration::from_secs(6)).await;
    let (accepted, refused) = count();
    assert!(
        is_rare(refused, accepted),
        "{refused} refused of {accepted}"
    );
    assert!(accepted >= before + 60, "{accepted} of 120 after {before}");
    let calls: Vec<_> = calls
        .iter()
        .map(|calls| calls.load(Ordering::Relaxed))
        .collect();
    assert!(
        calls.iter().max().unwrap() - calls.iter().min().unwrap() <= 3,
        "{calls:?}"
    );

    // Each process goes on by itself.
    server.kill();
    sleep(Duration::from_secs(6)).await;
    let without = bucket.lock().unwrap().accepted - accepted;
    assert!(without >= 60, "{without} of 120 without Redis");
    server.restart().unwrap();
    join_all(calling)
        .await
        .into_iter()
        .for_each(|calling| calling.unwrap());
    let after = bucket.lock().unwrap().refused - refused;
    println!(
        "{accepted} of 240 passed in 12 s and {refused} were refused; {without} of 120 in 6 s without Redis, and {after} \
         refused then and when it was back"
    );
    assert!(
        after <= 30,
        "{after} refused without Redis, and when it was back"
    );
    for throttle in &processes {
        assert_eq!(
            (throttle.waiting(Key::ALL), throttle.in_flight(Key::ALL)),
            (0, 0)
        );
    }
}

#[tokio::test]
async fn hold_signal_to_one_process_holds_the_others() {
    let server = RedisServer::start().unwrap();
    let processes: Vec<_> = (0..3).map(|_| process(&server, None)).collect();
    // All have asked, and know that the bucket holds plenty.
    for throttle in processes.iter().cycle().take(9) {
        throttle
            .acquire(Key::ALL)
            .await
            .unwrap()
            .answered(&left(1000));
    }
    sleep(millis(300)).await;
    let start = Instant::now();
    let permit = processes[0].acquire(Key::ALL).await.unwrap();
    permit.answered(&refusal().with_retry_after(millis(1500)));
    sleep(millis(200)).await;
    let permits = join_all(processes.iter().map(|throttle| throttle.acquire(Key::ALL))).await;
    assert!(permits.iter().all(Result::is_ok), "{permits:?}");
    assert!(start.elapsed() >= millis(1500), "{:?}", start.elapsed());
}

#[tokio::test]
async fn release_ends_a_hold_that_is_kept_in_redis() {
    let server = RedisServer::start().unwrap();
    process(&server, None)
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&refusal().with_retry_after(millis(3_600_000)));
    // What that process has written: the next processes are new.
    while server.command::<Vec<String>>(&["KEYS", "*"]).is_empty() {
        sleep(millis(10)).await;
    }
    sleep(millis(300)).await;
    let held = process(&server, None);
    assert!(
        held.acquire(Key::ALL).await.is_err(),
        "for longer than it can wait"
    );
    process(&server, None).release(Key::ALL).await.unwrap();
    process(&server, None)
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&left(1000));
    // The notification takes a trip.
    let told = async {
        while held.acquire(Key::ALL).await.is_err() {
            sleep(millis(5)).await;
        }
    };
    timeout(Duration::from_secs(10), told)
        .await
        .expect("released in all processes");
}

#[tokio::test]
async fn redis_sees_no_key_and_keeps_nothing_for_ever() {
    let server = RedisServer::start().unwrap();
    let throttle = process(&server, None);
    throttle
        .acquire(Key::new("s3cr3t token"))
        .await
        .unwrap()
        .answered(&left(5));
    sleep(millis(400)).await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let names: Vec<String> = redis::cmd("KEYS")
        .arg("*")
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(
        names.len() == 1 && names[0].contains(":register:") && !names[0].contains("s3cr3t"),
        "{names:?}"
    );
    let left: i64 = redis::cmd("PTTL")
        .arg(&names[0])
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!((1..=3_600_000).contains(&left), "{left}");
}

#[tokio::test]
async fn unreadable_register_is_made_anew() {
    let server = RedisServer::start().unwrap();
    process(&server, None)
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&left(5));
    sleep(millis(400)).await;
    let names: Vec<String> = server.command(&["KEYS", "*"]);
    for garbage in [
        "\x01",
        "\x01aaaaaaa",
        "\x01aaaaaaabbbbbbbccccccccccc",
        "\x01\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f",
    ] {
        let () = server.command(&["SET", &names[0], garbage]);
        let late = process(&server, None);
        let permit = tokio::time::timeout(Duration::from_secs(20), late.acquire(Key::ALL)).await;
        permit.expect("it leaves").unwrap().answered(&left(5));
    }
}
