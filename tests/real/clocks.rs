//! Stepped clocks, servers that hang for a while, and stalled machines: none of them puts a window
//! over the limit, and refusals name the true wait.

#![cfg(feature = "redis")]

use crate::support::{counted, patient};

use std::future::Future;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use counted::largest_count;
use futures::future::{Either, join_all, select};
use redis_server::{Proxy, RedisServer, SteppingClock};
use tokio::time::{Instant, sleep, sleep_until};
use tollgate::store::{RedisStore, StoreError};
use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer, Reason, Signal};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn layer(quota: Quota, max_wait: Duration) -> tollgate::RateLimitBuilder {
    RateLimitLayer::builder(quota).max_wait(max_wait)
}

fn limiter(server: &RedisServer, quota: Quota, max_wait: Duration) -> Limiter {
    let store = RedisStore::new(&server.url()).unwrap();
    layer(quota, max_wait)
        .store(Arc::new(store))
        .build()
        .unwrap()
        .limiter()
}

/// The same with a store that waits for its server: the test judges what the store answers, not how
/// fast.
fn patient_limiter(server: &RedisServer, quota: Quota) -> Limiter {
    layer(quota, Duration::ZERO)
        .store(patient::store(&server.url()))
        .build()
        .unwrap()
        .limiter()
}

/// Sends a request with `permit`. Sends nothing if the permit has expired, because then the machine
/// stalled. Returns when the request left, at the latest.
fn send(permit: Permit) -> Option<Instant> {
    let now = Instant::now();
    permit.is_valid().then_some(now)
}

/// Acquires a permit from a reachable store: at the first try, unless the machine is busy.
async fn granted(limiter: &Limiter, key: Key) -> Permit {
    let give_up = Instant::now() + Duration::from_secs(20);
    loop {
        match limiter.acquire(key).await {
            Ok(permit) => return permit,
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        sleep(ms(20)).await;
    }
}

// ── calls that Redis executes late ───────────────────────────────────────────────────────────────

/// A process finds out that its calls are late now. A call that is later than any network should be is sent again
/// while the `store_timeout` lasts.
#[tokio::test]
async fn calls_that_are_late_again_and_again_succeed() {
    let server = RedisServer::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let limiter = layer(Quota::per_minute(100), ms(20_000))
        .store(patient::store(&proxy.url()))
        .build()
        .unwrap()
        .limiter();
    drop(granted(&limiter, Key::ALL).await);
    // Each acquires more than the permits at hand.
    let acquire = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire(Key::ALL).cost(40).await.map(drop) })
    };
    proxy.delay(ms(400));
    acquire().await.unwrap().unwrap();
    proxy.delay(ms(700));
    let late = acquire();
    sleep(ms(2300)).await;
    assert!(!late.is_finished());
    proxy.delay(Duration::ZERO);
    late.await.unwrap().unwrap();
}

/// One process has a permit; its next call reaches a stopped server. After `stopped`, the server
/// executes that call late, and a process that has never used the key calls. Returns when requests
/// left, and how many were of the new process.
async fn late_call(stopped: Duration, quota: Quota) -> (Vec<Instant>, usize) {
    let server = RedisServer::start().unwrap();
    let [old, new] = [(); 2].map(|()| limiter(&server, quota, Duration::ZERO));
    // The new process is connected, and knows nothing of the key.
    drop(granted(&new, Key::new("another")).await);
    let start = Instant::now();
    let mut sent = Vec::new();
    sent.extend(send(granted(&old, Key::ALL).await));
    sleep(ms(100)).await;
    server.pause();
    assert!(
        old.acquire(Key::ALL).await.is_err(),
        "the server is stopped"
    );
    sleep(stopped).await;
    server.resume();
    sleep(ms(30)).await;
    let before = sent.len();
    while let Ok(permit) = new.acquire(Key::ALL).await {
        sent.extend(send(permit));
    }
    let of_new = sent.len() - before;
    // The old process remembers the server's time for as long as its first permit counts, and calls
    // before that ends.
    sleep_until(start + ms(1900)).await;
    let _ = old.acquire(Key::ALL).await.map(Permit::give_back);
    while start.elapsed() < ms(5000) {
        if let Ok(permit) = old.acquire(Key::ALL).await {
            sent.extend(send(permit));
        }
        sleep(ms(5)).await;
    }
    (sent, of_new)
}

#[tokio::test]
async fn late_calls_put_no_window_over_the_limit() {
    let (quota, window) = (
        Quota::new(10, Duration::from_secs(2)),
        Duration::from_secs(2),
    );
    let rounds = [600, 1100, 1500, 2600].map(|stopped| async move {
        // On a busy machine the new process may not be reconnected yet, or its permits may expire:
        // repeat the round.
        for _ in 0..5 {
            let (sent, of_new) = late_call(ms(stopped), quota).await;
            let most = largest_count(&sent, window);
            assert!(
                most <= 10,
                "stopped for {stopped} ms: {most} of 10 in {window:?}: {sent:?}"
            );
            if of_new > 0 {
                return;
            }
        }
        panic!("stopped for {stopped} ms: the new process never gets a permit");
    });
    join_all(rounds).await;
}

// ── a wall clock that is stepped ─────────────────────────────────────────────────────────────────

/// Runs `run` in a separate process, in which no other test runs and whose wall clock [`step_to`]
/// sets. `test` is the name of the calling test; `run` gets the URL of a server with the machine's
/// clock, if `starts_redis`.
fn with_own_clock<F: Future<Output = ()>>(
    test: &str,
    starts_redis: bool,
    run: impl FnOnce(String) -> F,
) {
    const CHILD: &str = "TOLLGATE_TEST_OWN_CLOCK";
    if let Ok(redis) = std::env::var(CHILD) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        return runtime.block_on(run(redis));
    }
    let server = starts_redis.then(|| RedisServer::start().unwrap());
    let url = server.as_ref().map_or_else(String::new, RedisServer::url);
    let clock = SteppingClock::new().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(CHILD, url);
    clock.give_to(&mut child, &[]);
    let output = child.output().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&text)
    );
}

/// Sets the wall clock of this process to `seconds` ahead of its value at the start.
fn step_to(seconds: f64) {
    let before = SystemTime::now();
    SteppingClock::set_own_ahead(seconds).unwrap();
    println!("the clock steps from {before:?} to {:?}", SystemTime::now());
}

/// How far apart two readings of one moment may be: a thread may stall for this long between two
/// clocks.
const APART: Duration = Duration::from_secs(5);

fn distance(one: SystemTime, other: SystemTime) -> Duration {
    one.duration_since(other)
        .unwrap_or_else(|before| before.duration())
}

const HOUR: f64 = 3600.0;

#[test]
fn retry_at_follows_the_wall_clock() {
    with_own_clock("retry_at_follows_the_wall_clock", false, async |_| {
        let limiter = layer(Quota::per_minute(1), Duration::ZERO)
            .build()
            .unwrap()
            .limiter();
        drop(limiter.acquire(Key::ALL).await.unwrap());
        for ahead in [0.0, HOUR, -2.0 * HOUR, 40.0 * 24.0 * HOUR, 0.0] {
            step_to(ahead);
            let refused = limiter.acquire(Key::ALL).await.unwrap_err();
            let now = SystemTime::now();
            let report = refused.report();
            let (wait, at) = (report.retry_after().unwrap(), report.retry_at().unwrap());
            assert!(
                distance(at, now + wait) < APART,
                "{ahead} s: {wait:?} from {now:?} is not {at:?}"
            );
            assert!(
                distance(report.since(), now) < APART,
                "{ahead} s: refused at {now:?}: {report:?}"
            );
        }
    });
}

/// Headers name a moment by the wall clock, and the response has no `Date` header to compare it
/// with.
#[test]
fn moments_in_headers_follow_the_wall_clock() {
    with_own_clock(
        "moments_in_headers_follow_the_wall_clock",
        false,
        async |_| {
            for ahead in [0.0, HOUR, -2.0 * HOUR, 40.0 * 24.0 * HOUR, 0.0] {
                step_to(ahead);
                let moment = SystemTime::now() + Duration::from_secs(60);
                let seconds = moment
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .unwrap()
                    .as_secs();
                let refusal = || http::Response::builder().status(429);
                let by_date = refusal().header("Retry-After", httpdate::fmt_http_date(moment));
                let by_number = refusal()
                    .header("X-RateLimit-Remaining", 0)
                    .header("X-RateLimit-Reset", seconds);
                for response in [by_date, by_number] {
                    let signal = Signal::read(&response.body(()).unwrap());
                    let wait = signal.retry_after().unwrap();
                    let (least, most) = (
                        Duration::from_secs(60) - APART,
                        Duration::from_secs(60) + APART,
                    );
                    assert!((least..=most).contains(&wait), "{ahead} s: {wait:?}");
                    let limiter = layer(Quota::per_minute(100), Duration::ZERO)
                        .build()
                        .unwrap()
                        .limiter();
                    let permit = limiter.acquire(Key::ALL).await.unwrap();
                    permit.begin().unwrap().answered(&signal);
                    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
                    assert_eq!(refused.reason(), Some(Reason::Held), "{refused}");
                    let at = refused.report().retry_at().unwrap();
                    assert!(
                        distance(at, moment) < APART,
                        "{ahead} s: {at:?} instead of {moment:?}"
                    );
                }
            }
        },
    );
}

/// The upstream counts by its current wall clock, which was stepped.
#[test]
fn fixed_windows_follow_the_wall_clock() {
    const LIMIT: usize = 3;
    with_own_clock("fixed_windows_follow_the_wall_clock", false, async |_| {
        let quota = Quota::fixed(LIMIT as u32, Duration::from_secs(1));
        let limiter = layer(quota, Duration::ZERO).build().unwrap().limiter();
        drop(limiter.acquire(Key::ALL).await);
        for ahead in [0.35, -HOUR - 0.4, 24.0 * HOUR + 0.75] {
            step_to(ahead);
            // The limiter notices a step within a second; then one window may have less.
            let (start, mut windows) = (Instant::now(), std::collections::BTreeMap::new());
            while start.elapsed() < ms(5500) {
                // Every other window stays empty: otherwise misplaced windows would be full where
                // two of the upstream's meet.
                let second = SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .unwrap()
                    .as_secs();
                let granted = if second.is_multiple_of(2) {
                    limiter.acquire(Key::ALL).await.ok()
                } else {
                    None
                };
                let Some(permit) = granted else {
                    sleep(ms(5)).await;
                    continue;
                };
                let now = SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .unwrap();
                if start.elapsed() > ms(1500) && send(permit).is_some() {
                    *windows.entry(now.as_secs()).or_insert(0) += 1;
                }
            }
            let most = windows.values().copied().max().unwrap_or(0);
            let sum: usize = windows.values().sum();
            assert!(most <= LIMIT, "{ahead} s: {windows:?}");
            assert!(
                sum >= LIMIT,
                "{ahead} s: two seconds later, two windows are whole: {windows:?}"
            );
        }
    });
}

/// A clock that is stepped forward looks as if the machine had slept.
#[test]
fn steps_of_the_wall_clock_exceed_no_limit() {
    const LIMIT: usize = 5;
    let test = "steps_of_the_wall_clock_exceed_no_limit";
    with_own_clock(test, true, async |url| {
        let store = patient::builder(&url).build().unwrap();
        let quota = Quota::new(LIMIT as u32, Duration::from_secs(1));
        let limiter = layer(quota, Duration::ZERO)
            .store(Arc::new(store))
            .build()
            .unwrap()
            .limiter();
        let mut sent = Vec::new();
        for ahead in [0.0, HOUR, -HOUR, 0.4, -0.4, 24.0 * HOUR] {
            step_to(ahead);
            let start = Instant::now();
            while start.elapsed() < ms(1300) {
                match limiter.acquire(Key::ALL).await {
                    Ok(permit) => sent.extend(send(permit)),
                    Err(Limited::Local { .. }) => sleep(ms(5)).await,
                    Err(other) => panic!("{ahead} s: {other}"),
                }
            }
        }
        let most = largest_count(&sent, Duration::from_secs(1));
        assert!(most <= LIMIT, "{most} in a second: {sent:?}");
        assert!(
            sent.len() >= 3 * LIMIT,
            "in seven seconds only {}",
            sent.len()
        );
    });
}

// ── Redis hangs when a slot comes ────────────────────────────────────────────────────────────────

/// The error of a waiter whose slot comes while Redis hangs. Returns `None` if the machine stalled
/// until the slot came before Redis was stopped.
async fn slot_while_redis_hangs(max_wait: Duration, deadline: Option<Duration>) -> Option<Limited> {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&server, Quota::new(5, Duration::from_secs(2)), max_wait);
    for _ in 0..5 {
        drop(limiter.acquire(Key::ALL).await.ok()?);
    }
    let start = Instant::now();
    let mut waiter = limiter.acquire(Key::ALL);
    if let Some(deadline) = deadline {
        waiter = waiter.deadline((start + deadline).into_std());
    }
    let waiter = tokio::spawn(waiter);
    sleep(ms(300)).await;
    server.pause();
    if start.elapsed() > ms(1500) {
        return None;
    }
    let told = waiter.await.unwrap().map(drop).unwrap_err();
    // Refusals during the hang name a wait above zero.
    for _ in 0..20 {
        let refused = limiter
            .acquire(Key::ALL)
            .deadline(Instant::now().into_std())
            .await
            .unwrap_err();
        assert!(refused.retry_after() != Some(Duration::ZERO), "{refused}");
    }
    Some(told)
}

/// The same, in as many rounds as the machine needs.
async fn told_while_redis_hangs(max_wait: u64, deadline: Option<u64>) -> Limited {
    for _ in 0..5 {
        if let Some(told) = slot_while_redis_hangs(ms(max_wait), deadline.map(ms)).await {
            assert!(told.retry_after() != Some(Duration::ZERO), "{told}");
            assert!(!told.to_string().contains("try again in 0"), "{told}");
            return told;
        }
    }
    panic!("the machine stands still");
}

#[tokio::test]
async fn waiters_get_an_error_when_redis_hangs() {
    // One request's `max_wait` ends before the store's timeout, the other's does not.
    let told = join_all([2100, 4000].map(|max_wait| told_while_redis_hangs(max_wait, None))).await;
    for told in &told {
        assert!(matches!(told, Limited::Store { .. }), "{told:?}");
        assert_eq!(told.retry_after(), None, "{told}");
    }
    let Limited::Store { source, .. } = &told[0] else {
        unreachable!()
    };
    assert!(
        matches!(source, StoreError::NoAnswer { .. } | StoreError::Away(_)),
        "{source:?}"
    );
}

/// A store's timeout may be longer than a request waits.
#[tokio::test]
async fn zero_max_wait_names_a_silent_store() {
    let server = RedisServer::start().unwrap();
    let limiter = patient_limiter(&server, Quota::per_second(20));
    drop(granted(&limiter, Key::ALL).await);
    server.pause();
    let told = limiter.acquire(Key::ALL).await.map(drop).unwrap_err();
    assert!(
        matches!(
            &told,
            Limited::Store {
                source: StoreError::NoAnswer { .. },
                ..
            }
        ),
        "{told}: {told:?}"
    );
}

/// A deadline applies whatever the store does.
#[tokio::test]
async fn deadlines_while_redis_hangs_name_a_wait_or_none() {
    let told = told_while_redis_hangs(60_000, Some(2060)).await;
    match &told {
        Limited::Local { reason, .. } => assert_eq!(*reason, Reason::Deadline, "{told}"),
        Limited::Store { .. } => {}
        other => panic!("{other}"),
    }
}

// ── a machine that stalls ────────────────────────────────────────────────────────────────────────

/// Polls `future` once, and then not for `span`.
async fn poll_and_stand_still<F: Future + Unpin>(
    future: F,
    span: Duration,
) -> Result<F::Output, F> {
    match select(future, std::future::ready(())).await {
        Either::Left((output, _)) => Ok(output),
        Either::Right(((), future)) => {
            // This runtime is blocked; the store has a thread of its own.
            std::thread::sleep(span);
            Err(future)
        }
    }
}

/// Longer than the validity of a permit of a one-second window, and than a call takes.
const STANDS_STILL: Duration = Duration::from_millis(300);

#[tokio::test]
async fn zero_max_wait_replaces_one_dead_permit() {
    let server = RedisServer::start().unwrap();
    let limiter = patient_limiter(&server, Quota::per_second(20));
    drop(granted(&limiter, Key::new("another")).await);
    for round in 0.. {
        assert!(round < 20, "the machine stands still");
        let key = Key::new(format!("{round}"));
        // The store's thread may answer before the first poll: repeat the round.
        let Err(waiting) = poll_and_stand_still(limiter.acquire(key), STANDS_STILL).await else {
            continue;
        };
        match waiting.await {
            Ok(permit) => {
                assert!(permit.waited() >= STANDS_STILL, "{:?}", permit.waited());
                break;
            }
            // The machine stalled again.
            Err(refused) if refused.report().turns() > 2 => {}
            Err(refused) => panic!("{refused}: {refused:?}"),
        }
    }
}

/// The request asks once more, and not for ever.
#[tokio::test]
async fn zero_max_wait_replaces_no_second_dead_permit() {
    let server = RedisServer::start().unwrap();
    // Its slots are no further apart than the margin, so a request waits for none.
    let limiter = patient_limiter(&server, Quota::per_second(40));
    drop(granted(&limiter, Key::new("another")).await);
    for round in 0.. {
        assert!(round < 20, "the machine stands still");
        let key = Key::new(format!("{round}"));
        // The store's thread may answer before a poll: repeat the round.
        let Err(once) = poll_and_stand_still(limiter.acquire(key), STANDS_STILL).await else {
            continue;
        };
        let Err(twice) = poll_and_stand_still(once, STANDS_STILL).await else {
            continue;
        };
        let refused = match twice.await {
            Err(refused) => refused,
            Ok(permit) => panic!("granted after {:?}", permit.waited()),
        };
        assert_eq!(
            refused.reason(),
            Some(Reason::MaxWait(Duration::ZERO)),
            "{refused}"
        );
        assert_eq!(refused.report().turns(), 3, "{refused}");
        let wait = refused.retry_after().expect("it may be retried");
        assert!(
            wait > Duration::ZERO && wait < Duration::from_secs(2),
            "{refused}"
        );
        break;
    }
}

/// The server hangs, so that its answer arrives after the permit in it has expired.
#[tokio::test]
async fn zero_max_wait_survives_a_late_answer() {
    let server = RedisServer::start().unwrap();
    for (number, quota) in [
        Quota::per_second(20),
        Quota::new(20, Duration::from_secs(10)),
    ]
    .into_iter()
    .enumerate()
    {
        let limiter = patient_limiter(&server, quota);
        let key = Key::new(format!("late {number}"));
        drop(granted(&limiter, key).await);
        for round in 0.. {
            assert!(round < 20, "the machine stands still");
            server.pause();
            let asks = tokio::spawn(limiter.acquire(key));
            sleep(ms(150)).await;
            server.resume();
            match asks.await.unwrap() {
                Ok(permit) => {
                    assert!(permit.waited() >= ms(100), "{quota}: {:?}", permit.waited());
                    break;
                }
                // The machine stalled as well.
                Err(refused) if refused.report().turns() > 2 => sleep(ms(500)).await,
                Err(refused) => panic!("{quota}: {refused}: {refused:?}"),
            }
        }
    }
}
