//! Requests that are sent by hand: a permit that begins in time or too late, and `Acquire::send`. Under a paused clock.

use std::future::pending;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::FutureExt;
use http::Response;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tollgate::{Error, Key, Limited, Limiter, Quota, RateLimitLayer, Reason, Signal};

const SECOND: Duration = Duration::from_secs(1);

fn ms(span: u64) -> Duration {
    Duration::from_millis(span)
}

fn key() -> Key {
    Key::new("key")
}

fn limiter(quota: Quota, max_wait: Duration) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(max_wait);
    builder.build().unwrap().limiter()
}

async fn used(limiter: &Limiter) -> u64 {
    limiter.peek(key()).await.unwrap().limits[0].used
}

/// A call that is answered with `status`.
async fn call(status: u16) -> Result<Response<&'static str>, std::io::Error> {
    let response = Response::builder()
        .status(status)
        .header("retry-after", "7");
    Ok(response.body("hello").unwrap())
}

fn refusal() -> Signal {
    Signal::read(&Response::builder().status(429).body(()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_permit_begins_until_its_deadline() {
    let limiter = limiter(Quota::per_hour(1), Duration::ZERO);
    let permit = limiter.acquire(key()).await.unwrap();
    let left = permit.deadline().unwrap() - Instant::now().into_std();
    assert!((ms(10)..=ms(50)).contains(&left), "{left:?}");
    sleep(left - ms(1)).await;
    assert!(permit.is_valid());
    let sent = permit.begin().unwrap();
    assert_eq!(format!("{sent:?}").split(' ').next(), Some("Sent"));
    sleep(SECOND).await;
    assert!(sent.answered(&Signal::default()).is_none());
    assert_eq!(used(&limiter).await, 1);
    let requests = limiter.stats().requests();
    assert_eq!((requests.passed, requests.total()), (1, 1), "{requests:?}");
}

/// The permit goes back, so that the next request can have it. The refusal is an error of the caller, whose request has
/// been counted when it got its permit.
#[tokio::test(start_paused = true)]
async fn an_expired_permit_is_refused_and_given_back() {
    let limiter = limiter(Quota::per_hour(1), Duration::ZERO);
    let permit = limiter.acquire(key()).await.unwrap();
    assert_eq!(used(&limiter).await, 1);
    sleep(ms(51)).await;
    assert!(!permit.is_valid());
    let expired = permit.begin().unwrap_err();
    assert!(matches!(expired, Limited::Local { .. }), "{expired:?}");
    assert!(matches!(expired.reason(), Some(Reason::Expired)));
    assert_eq!(used(&limiter).await, 0);
    let requests = limiter.stats().requests();
    assert_eq!((requests.passed, requests.total()), (1, 1), "{requests:?}");
    assert_eq!(limiter.stats().units(), 0, "they went back");

    let sent = limiter.acquire(key()).await.unwrap().begin().unwrap();
    drop(sent);
    assert_eq!(used(&limiter).await, 1);
    let refused = limiter.acquire(key()).await.unwrap_err();
    assert_eq!(expired.report().key(), refused.report().key());
    let requests = limiter.stats().requests();
    let counts = (requests.passed, requests.refused, requests.total());
    assert_eq!(counts, (2, 1, 3), "{requests:?}");
    assert_eq!(limiter.stats().units(), 1);
}

/// The slot of the call goes to the first waiter.
#[tokio::test(start_paused = true)]
async fn an_expired_permit_gives_its_call_to_the_first_waiter() {
    for rate in [1, 100] {
        let quota = Quota::per_hour(rate).and(Quota::in_flight(1));
        let limiter = limiter(quota, 2 * 3600 * SECOND);
        let permit = limiter.acquire(key()).await.unwrap();
        let mut waits = Box::pin(limiter.acquire(key()));
        assert!((&mut waits).now_or_never().is_none());
        sleep(ms(51)).await;
        assert!(permit.begin().is_err());
        let next = waits.now_or_never().expect("at once").unwrap();
        drop(next.begin().unwrap());
    }
}

/// All keys of a joint request get their units back.
#[tokio::test(start_paused = true)]
async fn an_expired_joint_permit_is_given_back_under_each_key() {
    let [one, other] = [(); 2].map(|()| limiter(Quota::per_hour(1), Duration::ZERO));
    let permit = one.acquire(key()).and(other.acquire(key())).await.unwrap();
    sleep(ms(51)).await;
    assert!(permit.begin().is_err());
    for limiter in [&one, &other] {
        assert_eq!(used(limiter).await, 0);
        assert!(limiter.acquire(key()).await.is_ok());
    }
}

/// The probe of a key begins too late. The next request is the probe.
#[tokio::test(start_paused = true)]
async fn an_expired_probe_leaves_the_next_one() {
    let builder = RateLimitLayer::builder(Quota::per_second(50)).max_hold(SECOND);
    let limiter = builder.build().unwrap().limiter();
    let refused = refusal().with_retry_after(3600 * SECOND);
    let sent = limiter.acquire(key()).await.unwrap().begin().unwrap();
    assert!(sent.answered(&refused).is_some());
    sleep(ms(1100)).await;
    let probe = limiter.acquire(key()).now_or_never();
    let probe = probe.expect("it is the probe").unwrap();
    let mut next = Box::pin(limiter.acquire(key()));
    assert!((&mut next).now_or_never().is_none());
    sleep(ms(51)).await;
    assert!(probe.begin().is_err());
    let next = timeout(ms(100), next).await.expect("it is the next probe");
    next.unwrap().begin().unwrap().answered(&Signal::default());
    for _ in 0..10 {
        drop(limiter.acquire(key()).now_or_never().unwrap().unwrap());
    }
}

/// What costs nothing has no deadline.
#[tokio::test(start_paused = true)]
async fn a_permit_of_no_cost_begins_at_any_time() {
    let limiter = limiter(Quota::per_hour(1), Duration::ZERO);
    let permit = limiter.acquire(key()).cost(0).await.unwrap();
    sleep(3600 * SECOND).await;
    assert!(permit.begin().is_ok());
}

#[tokio::test(start_paused = true)]
async fn send_returns_the_response() {
    let limiter = limiter(Quota::per_hour(2), Duration::ZERO);
    let request = limiter.acquire(key());
    let response = request.send(|| call(200)).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), *response.body()),
        (200, "hello")
    );
    assert_eq!(used(&limiter).await, 1);
    assert!(limiter.peek(key()).await.unwrap().held.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_429_through_send_holds_the_key() {
    let limiter = limiter(Quota::per_hour(100), Duration::ZERO);
    let response = limiter.acquire(key()).send(|| call(429)).await.unwrap();
    assert_eq!(response.status(), 429);
    let held = limiter.peek(key()).await.unwrap().held;
    assert!(
        held.is_some_and(|held| held > 6 * SECOND && held <= 8 * SECOND),
        "{held:?}"
    );
    // The call does not begin.
    let calls = AtomicU32::new(0);
    let refused = limiter.acquire(key()).send(|| {
        calls.fetch_add(1, Ordering::Relaxed);
        call(200)
    });
    let Err(Error::Limited(refused)) = refused.await else {
        panic!("the key is on hold");
    };
    assert_eq!(refused.reason(), Some(Reason::Held), "{refused}");
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_call_is_an_inner_error_and_counts() {
    let limiter = limiter(Quota::per_hour(1), Duration::ZERO);
    let broken = || async { Err::<Response<()>, _>(std::io::Error::other("broken pipe")) };
    let failed = limiter.acquire(key()).send(broken).await.unwrap_err();
    assert!(matches!(failed, Error::Inner(_)), "{failed:?}");
    assert_eq!(failed.to_string(), "broken pipe");
    assert_eq!(used(&limiter).await, 1);
    let requests = limiter.stats().requests();
    assert_eq!((requests.passed, requests.total()), (1, 1), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn send_that_waits_and_is_dropped_gives_up_its_place() {
    let limiter = limiter(Quota::per_second(1), 10 * SECOND);
    let start = Instant::now();
    drop(limiter.acquire(key()).await.unwrap());
    let mut first = Box::pin(limiter.acquire(key()).send(|| call(200)));
    assert!((&mut first).now_or_never().is_none());
    let mut second = Box::pin(limiter.acquire(key()).send(|| call(200)));
    assert!((&mut second).now_or_never().is_none());
    drop(first);
    second.await.unwrap();
    assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
    let requests = limiter.stats().requests();
    let counts = (requests.passed, requests.waited, requests.cancelled);
    assert_eq!(counts, (1, 1, 1), "{requests:?}");
}

/// A call that has begun counts, also if its future is dropped.
#[tokio::test(start_paused = true)]
async fn send_that_is_dropped_during_its_call_counts_as_sent() {
    let limiter = limiter(Quota::per_hour(1).and(Quota::in_flight(1)), Duration::ZERO);
    let call = || pending::<Result<Response<()>, std::io::Error>>();
    let ended = timeout(SECOND, limiter.acquire(key()).send(call)).await;
    assert!(ended.is_err());
    let refused = limiter.acquire(key()).await.unwrap_err();
    assert_ne!(refused.report().unit(), "calls", "{refused}");
    let requests = limiter.stats().requests();
    let counts = (
        requests.passed,
        requests.waited,
        requests.cancelled,
        requests.refused,
    );
    assert_eq!(counts.0 + counts.1, 1, "{requests:?}");
    assert_eq!((counts.2, counts.3), (0, 1), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn send_keeps_its_in_flight_slot_until_the_call_has_ended() {
    let limiter = limiter(Quota::in_flight(1), 60 * SECOND);
    for status in [200, 500, 0] {
        let (answer, answered) = oneshot::channel();
        let mut one = Box::pin(limiter.acquire(key()).send(|| async {
            match answered.await.unwrap() {
                0 => Err(std::io::Error::other("broken pipe")),
                status => call(status).await,
            }
        }));
        assert!((&mut one).now_or_never().is_none());
        let mut next = Box::pin(limiter.acquire(key()).send(|| call(200)));
        assert!((&mut next).now_or_never().is_none());
        assert!(timeout(10 * SECOND, &mut next).await.is_err());
        answer.send(status).unwrap();
        assert!((&mut next).now_or_never().is_none(), "it has not ended");
        assert_eq!(one.await.is_ok(), status > 0);
        let soon = timeout(ms(10), next).await.expect("the slot is free");
        soon.unwrap();
    }
}

/// A request by hand keeps its slot until it is answered or dropped, however late.
#[tokio::test(start_paused = true)]
async fn a_begun_call_keeps_its_in_flight_slot() {
    let limiter = limiter(Quota::in_flight(1), 60 * SECOND);
    for is_answered in [true, false] {
        let sent = limiter.acquire(key()).await.unwrap().begin().unwrap();
        let mut next = Box::pin(limiter.acquire(key()));
        assert!(timeout(10 * SECOND, &mut next).await.is_err());
        match is_answered {
            true => drop(sent.answered(&Signal::default())),
            false => drop(sent),
        }
        let next = timeout(ms(10), next).await.expect("the slot is free");
        next.unwrap().give_back();
    }
}
