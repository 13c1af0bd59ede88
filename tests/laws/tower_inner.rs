//! The inner service is polled only for a request that has its permit, and no waiter occupies it.
//! In every case no permit is lost and none is used after it expired.

use crate::support;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio::sync::Notify;
use tollgate::store::{MemoryStore, Store};
use tollgate::{Deadline, Error, Key, Limited, Quota, RateLimitLayer, Reason, by_host};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};

use support::{Distant, SECOND, Upstream, get, ms, other_error, pass, settle, soon, used, waiting};

fn one_a_second() -> RateLimitLayer {
    RateLimitLayer::new(Quota::per_second(1)).unwrap()
}

fn one_a_second_by_host() -> RateLimitLayer {
    RateLimitLayer::builder(Quota::per_second(1))
        .key(by_host)
        .build()
        .unwrap()
}

/// An upstream behind a door: not ready while it is closed. Clones share the door, which admits
/// waiting requests in order of arrival.
struct Door {
    upstream: Upstream,
    state: Arc<Mutex<State>>,
    moved: Arc<Notify>,
    opening: Option<Opening>,
    asked: Arc<AtomicUsize>,
}

type Opening = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

#[derive(Clone, Copy)]
enum State {
    Open,
    Closed,
    Broken,
}

impl Door {
    fn open(upstream: Upstream) -> Self {
        let state = Arc::new(Mutex::new(State::Open));
        Door {
            upstream,
            state,
            moved: Arc::default(),
            opening: None,
            asked: Arc::default(),
        }
    }

    fn becomes(&self, state: State) {
        *self.state.lock().unwrap() = state;
        self.moved.notify_waiters();
    }
}

impl Clone for Door {
    fn clone(&self) -> Self {
        Door {
            upstream: self.upstream.clone(),
            state: self.state.clone(),
            moved: self.moved.clone(),
            opening: None,
            asked: self.asked.clone(),
        }
    }
}

impl Service<Request<String>> for Door {
    type Response = Response<String>;
    type Error = BoxError;
    type Future = <Upstream as Service<Request<String>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let (state, moved) = (self.state.clone(), self.moved.clone());
        let opening = self.opening.get_or_insert_with(|| {
            Box::pin(async move {
                loop {
                    let moved = moved.notified();
                    let state = *state.lock().unwrap();
                    match state {
                        State::Open => return Ok(()),
                        State::Broken => return Err("the door is broken".into()),
                        State::Closed => moved.await,
                    }
                }
            })
        });
        let polled = opening.as_mut().poll(cx);
        if polled.is_ready() {
            self.opening = None;
        }
        polled
    }

    fn call(&mut self, request: Request<String>) -> Self::Future {
        self.upstream.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn readiness_is_the_service_s_own_and_costs_nothing() {
    let limit = one_a_second();
    let door = Door::open(Upstream::new());
    door.becomes(State::Closed);
    let mut service = limit.layer(door.clone());
    assert!(futures::poll!(service.ready()).is_pending());
    door.becomes(State::Open);
    for _ in 0..10 {
        service.ready().await.unwrap();
        service.clone().ready().await.unwrap();
    }
    assert_eq!(used(&limit).await, 0);

    let mut also = limit.layer(service.get_ref().clone());
    also.ready().await.unwrap();
    drop(also);
    soon(service.oneshot(get("/"))).await.unwrap();
    assert_eq!(used(&limit).await, 1);
}

#[tokio::test(start_paused = true)]
async fn readiness_is_forwarded_even_when_the_line_is_long() {
    let limit = one_a_second();
    let mut service = limit.layer(Upstream::new());
    let line: Vec<_> = (0..5)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    settle().await;
    assert_eq!(waiting(&limit).await, 4);
    assert!(futures::poll!(service.ready()).is_ready());
    line.iter().for_each(|task| task.abort());
    settle().await;
    assert_eq!(waiting(&limit).await, 0);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_readiness_is_an_inner_error() {
    let door = Door::open(Upstream::new());
    door.becomes(State::Broken);
    let error = one_a_second()
        .layer(door)
        .ready()
        .await
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(error, Error::Inner(_)), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_holds_nothing_that_another_key_needs() {
    let upstream = Upstream::new();
    let mut service = ServiceBuilder::new()
        .layer(one_a_second_by_host())
        .concurrency_limit(1)
        .service(upstream.clone());
    soon(service.ready())
        .await
        .unwrap()
        .call(get("http://a/1"))
        .await
        .unwrap();
    let waits = tokio::spawn(soon(service.ready()).await.unwrap().call(get("http://a/2")));
    settle().await;
    soon(service.clone().oneshot(get("http://b/3")))
        .await
        .unwrap();
    soon(soon(service.ready()).await.unwrap().call(get("http://c/4")))
        .await
        .unwrap();
    soon(waits).await.unwrap().unwrap();
    assert_eq!(
        upstream.log(),
        [
            ("/1".into(), 0),
            ("/3".into(), 0),
            ("/4".into(), 0),
            ("/2".into(), SECOND)
        ]
    );
}

/// The only place inside is taken until the slot of `/2` has expired, and then given to it. It waits for its next slot
/// without it.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_missed_its_slot_holds_nothing_either() {
    let (upstream, limit) = (Upstream::taking(ms(2500)), one_a_second_by_host());
    let service = ServiceBuilder::new()
        .layer(limit.clone())
        .concurrency_limit(1)
        .service(upstream.clone());
    let send = |uri| tokio::spawn(service.clone().oneshot(get(uri)));
    let first = send("http://a/1");
    settle().await;
    let missed = send("http://a/2");
    pass(ms(2400)).await;
    let elsewhere = limit.layer(Upstream::new());
    soon(elsewhere.oneshot(get("http://a/3"))).await.unwrap();
    let other_host = send("http://b/4");
    for call in [first, missed, other_host] {
        soon(call).await.unwrap().unwrap();
    }
    assert_eq!(
        upstream.log(),
        [("/1".into(), 0), ("/4".into(), 2500), ("/2".into(), 5000),]
    );
}

/// The permit of a request without a rate does not expire. While the inner service gets ready, its key is put on hold, or its
/// deadline passes.
#[tokio::test(start_paused = true)]
async fn an_in_flight_slot_is_no_permit_for_later() {
    let (upstream, limit) = (
        Upstream::taking(ms(100)),
        RateLimitLayer::new(Quota::in_flight(1)).unwrap(),
    );
    let door = Door::open(upstream.clone());
    let mut service = limit.layer(door.clone());
    let first = tokio::spawn(service.ready().await.unwrap().call(get("/first")));
    settle().await;
    let held = tokio::spawn(service.ready().await.unwrap().call(get("/held")));
    door.becomes(State::Closed);
    soon(first).await.unwrap().unwrap();
    settle().await;
    limit.limiter().hold_for(Key::ALL, ms(5000)).await.unwrap();
    door.becomes(State::Open);
    pass(ms(3000)).await;
    assert_eq!(upstream.paths(), ["/first"]);
    soon(held).await.unwrap().unwrap();
    assert_eq!(upstream.log()[1], ("/held".into(), 5100));

    let busy = tokio::spawn(service.ready().await.unwrap().call(get("/busy")));
    settle().await;
    let mut request = get("/late");
    let deadline = tokio::time::Instant::now() + ms(500);
    let deadline = Deadline::at(deadline.into_std());
    request.extensions_mut().insert(deadline);
    let late = tokio::spawn(service.ready().await.unwrap().call(request));
    door.becomes(State::Closed);
    soon(busy).await.unwrap().unwrap();
    pass(ms(1000)).await;
    door.becomes(State::Open);
    let error = soon(late).await.unwrap().unwrap_err();
    let Error::Limited(Limited::Local { reason, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(reason, Reason::Deadline);
}

/// The permit of a slow store is valid for longer than the inner service takes. Its key is put on hold meanwhile, or its
/// deadline passes.
#[tokio::test(start_paused = true)]
async fn a_permit_that_lasts_obeys_holds_and_deadlines() {
    let limit = RateLimitLayer::builder(Quota::per_minute(100))
        .store(Arc::new(Distant::new(ms(900))))
        .max_wait(ms(600_000));
    let limit = limit.build().unwrap();
    let upstream = Upstream::new();
    let door = Door::open(upstream.clone());
    let mut service = limit.layer(door.clone());
    let held = tokio::spawn(service.ready().await.unwrap().call(get("/held")));
    settle().await;
    door.becomes(State::Closed);
    // The first permit has expired on its way. The second one is valid for 0.9 s more.
    pass(ms(1900)).await;
    limit.limiter().hold_for(Key::ALL, ms(500)).await.unwrap();
    pass(ms(100)).await;
    door.becomes(State::Open);
    pass(ms(100)).await;
    assert_eq!(upstream.paths(), Vec::<String>::new());
    soon(held).await.unwrap().unwrap();

    let mut request = get("/late");
    let deadline = tokio::time::Instant::now() + ms(1000);
    let deadline = Deadline::at(deadline.into_std());
    request.extensions_mut().insert(deadline);
    let late = tokio::spawn(service.ready().await.unwrap().call(request));
    settle().await;
    door.becomes(State::Closed);
    pass(ms(1200)).await;
    door.becomes(State::Open);
    let error = soon(late).await.unwrap().unwrap_err();
    let Error::Limited(Limited::Local { reason, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(reason, Reason::Deadline);
}

#[tokio::test(start_paused = true)]
async fn waiter_is_not_blocked_by_its_original_service_value() {
    let upstream = Upstream::new();
    let mut service = ServiceBuilder::new()
        .layer(one_a_second())
        .concurrency_limit(1)
        .service(upstream.clone());
    soon(service.ready())
        .await
        .unwrap()
        .call(get("/"))
        .await
        .unwrap();
    // `service` is not touched again: were it still ready, it would occupy the only place inside
    // for ever.
    soon(soon(service.ready()).await.unwrap().call(get("/")))
        .await
        .unwrap();
    assert_eq!(upstream.arrivals(), [0, SECOND]);
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_leaves_the_service_value_unready() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(0))
        .build()
        .unwrap();
    let mut service = ServiceBuilder::new()
        .layer(limit)
        .concurrency_limit(1)
        .service(Upstream::new());
    soon(service.ready())
        .await
        .unwrap()
        .call(get("/"))
        .await
        .unwrap();
    soon(service.ready())
        .await
        .unwrap()
        .call(get("/"))
        .await
        .unwrap_err();
    let other = service.clone();
    pass(ms(SECOND)).await;
    soon(other.oneshot(get("/"))).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn permit_expired_before_readiness_is_returned_and_replaced() {
    let (upstream, limit) = (Upstream::new(), one_a_second());
    let door = Door::open(upstream.clone());
    let mut service = limit.layer(door.clone());
    service
        .ready()
        .await
        .unwrap()
        .call(get("/1"))
        .await
        .unwrap();
    let late = service.ready().await.unwrap().call(get("/2"));
    door.becomes(State::Closed);
    let late = tokio::spawn(late);
    pass(ms(5000)).await; // its slot was at 1030, and has expired
    assert_eq!(upstream.count(), 1);
    door.becomes(State::Open);
    soon(late).await.unwrap().unwrap();
    assert_eq!(
        upstream.arrivals(),
        [0, 5000],
        "the slot of 1030 was given back: there is one at once"
    );
    soon(service.oneshot(get("/3"))).await.unwrap();
    upstream.was_never_over(1, ms(1000));
    assert!(
        upstream.arrivals()[2] < 6100,
        "nothing was lost: {:?}",
        upstream.arrivals()
    );
}

#[tokio::test(start_paused = true)]
async fn requests_with_missed_slots_keep_order_and_limit() {
    let upstream = Upstream::new();
    let limit = RateLimitLayer::builder(Quota::per_second(2))
        .max_wait(ms(60_000))
        .build()
        .unwrap();
    let door = Door::open(upstream.clone());
    let mut service = limit.layer(door.clone());
    let mut calls = Vec::new();
    for number in 0..8 {
        let call = service
            .ready()
            .await
            .unwrap()
            .call(get(&format!("/{number}")));
        calls.push(tokio::spawn(call));
        settle().await;
    }
    door.becomes(State::Closed);
    pass(ms(10_500)).await;
    door.becomes(State::Open);
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    let paths: Vec<_> = (0..8).map(|number| format!("/{number}")).collect();
    assert_eq!(upstream.paths(), paths);
    upstream.was_never_over(2, ms(1000));
    assert!(
        upstream.arrivals()[7] < 10_500 + 3 * SECOND,
        "nothing was lost: {:?}",
        upstream.arrivals()
    );
}

#[tokio::test(start_paused = true)]
async fn request_with_missed_slot_precedes_later_requests() {
    let (upstream, limit) = (Upstream::new(), one_a_second());
    let door = Door::open(upstream.clone());
    let mut blocked = limit.layer(door.clone());
    let free = limit.layer(upstream.clone());
    free.clone().oneshot(get("/1")).await.unwrap();
    let late = tokio::spawn(blocked.ready().await.unwrap().call(get("/late")));
    door.becomes(State::Closed);
    settle().await;
    let others: Vec<_> = (0..4)
        .map(|number| tokio::spawn(free.clone().oneshot(get(&format!("/{number}")))))
        .collect();
    pass(ms(3500)).await; // /0 and /1 have gone at 2060 and 3090
    door.becomes(State::Open);
    soon(late).await.unwrap().unwrap();
    for other in others {
        soon(other).await.unwrap().unwrap();
    }
    assert_eq!(upstream.paths(), ["/1", "/0", "/1", "/late", "/2", "/3"]);
    upstream.was_never_over(1, ms(1000));
}

#[tokio::test(start_paused = true)]
async fn request_with_missed_slot_still_obeys_max_wait() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(2000))
        .build()
        .unwrap();
    let door = Door::open(Upstream::new());
    let mut service = limit.layer(door.clone());
    service.ready().await.unwrap().call(get("/")).await.unwrap();
    let late = tokio::spawn(service.ready().await.unwrap().call(get("/")));
    door.becomes(State::Closed);
    pass(ms(3000)).await;
    door.becomes(State::Open);
    let error = soon(late).await.unwrap().unwrap_err();
    let Error::Limited(Limited::Local { reason, report, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(reason, Reason::MaxWait(ms(2000)));
    assert_eq!(report.waited(), ms(3000));
    assert!(report.turns() > 1);
    assert_eq!(used(&limit).await, 0, "it left no trace");
}

#[tokio::test(start_paused = true)]
async fn readiness_error_after_the_wait_returns_the_permit() {
    let (upstream, limit) = (Upstream::new(), one_a_second());
    let door = Door::open(upstream.clone());
    let mut breaks = limit.layer(door.clone());
    let works = limit.layer(upstream.clone());
    works.clone().oneshot(get("/1")).await.unwrap();
    let failing = tokio::spawn(breaks.ready().await.unwrap().call(get("/2")));
    door.becomes(State::Closed);
    settle().await;
    let behind = tokio::spawn(works.oneshot(get("/3")));
    pass(ms(1035)).await;
    door.becomes(State::Broken);
    let error = soon(failing).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Inner(_)), "{error}");
    soon(behind).await.unwrap().unwrap();
    assert_eq!(
        upstream.log(),
        [("/1".into(), 0), ("/3".into(), 1035)],
        "it went to the next waiter"
    );
}

#[tokio::test(start_paused = true)]
async fn call_counts_from_sending_not_from_its_answer() {
    let upstream = Upstream::taking(ms(60_000));
    let limit = RateLimitLayer::new(Quota::per_second(2)).unwrap();
    let service = limit.layer(upstream.clone());
    let calls: Vec<_> = (0..5)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    assert_eq!(upstream.arrivals(), [0, 0, 1020, 1020, 2040]);
}

#[tokio::test(start_paused = true)]
async fn failed_or_dropped_call_counts_as_sent() {
    let upstream = Upstream::answering([other_error()]);
    let limit = RateLimitLayer::new(Quota::per_second(2)).unwrap();
    let service = limit.layer(upstream.clone());
    service.clone().oneshot(get("/fails")).await.unwrap_err();
    let mut ready = service.clone();
    drop(ready.ready().await.unwrap().call(get("/dropped")));
    assert_eq!(used(&limit).await, 2);
    soon(service.oneshot(get("/third"))).await.unwrap();
    assert_eq!(upstream.arrivals(), [0, 0, 1020]);
}

#[tokio::test(start_paused = true)]
async fn request_dropped_after_any_poll_leaks_nothing() {
    for polls in 0..16 {
        drop_after(polls, MemoryStore::default()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn request_dropped_after_any_poll_leaks_nothing_remotely() {
    for polls in 0..16 {
        drop_after(polls, Distant::new(ms(3))).await;
    }
}

/// One request goes, the next is dropped after `polls` polls; only its sent call may delay the
/// third.
async fn drop_after(polls: u64, store: impl Store) {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .store(Arc::new(store))
        .build()
        .unwrap();
    let upstream = Upstream::taking(ms(400));
    let door = Door::open(upstream.clone());
    let (mut service, free) = (limit.layer(door.clone()), limit.layer(upstream.clone()));
    let first = tokio::spawn(free.clone().oneshot(get("/first")));
    pass(ms(5)).await;
    let mut dropped = Box::pin(service.ready().await.unwrap().call(get("/dropped")));
    door.becomes(State::Closed);
    for poll in 0..polls {
        if futures::poll!(dropped.as_mut()).is_ready() {
            break;
        }
        if poll == 6 {
            door.becomes(State::Open);
        }
        pass(ms(255)).await; // its slot is at the fifth
    }
    drop(dropped);
    assert_eq!(waiting(&limit).await, 0, "after {polls} polls");
    let due = (5 + polls * 255).max(upstream.arrivals().last().unwrap() + SECOND);
    soon(free.oneshot(get("/next"))).await.unwrap();
    soon(first).await.unwrap().unwrap();
    upstream.was_never_over(1, ms(1000));
    let next = *upstream.arrivals().last().unwrap();
    assert!(
        next <= due + 60,
        "after {polls} polls: {next} instead of {due}; {:?}",
        upstream.log()
    );
}

#[tokio::test(start_paused = true)]
async fn inner_service_is_polled_only_after_the_wait() {
    let limit = one_a_second();
    let door = Door::open(Upstream::new());
    let asked = door.asked.clone();
    let mut service = limit.layer(door.clone());
    service.ready().await.unwrap().call(get("/")).await.unwrap();
    let waits = tokio::spawn(service.ready().await.unwrap().call(get("/")));
    let before = asked.load(Ordering::SeqCst);
    pass(ms(1000)).await;
    assert_eq!(asked.load(Ordering::SeqCst), before);
    soon(waits).await.unwrap().unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), before + 1);
}

#[tokio::test(start_paused = true)]
async fn wrappers_that_drop_waiting_requests_free_their_places() {
    let (upstream, limit) = (Upstream::new(), one_a_second());
    let service = limit.layer(upstream.clone());
    let wrapped = ServiceBuilder::new()
        .buffer(4)
        .load_shed()
        .boxed_clone_sync()
        .service(service.clone());
    service.oneshot(get("/")).await.unwrap();
    let mut waits = Box::pin(wrapped.clone().oneshot(get("/")));
    for _ in 0..8 {
        assert!(futures::poll!(waits.as_mut()).is_pending());
        settle().await;
    }
    assert_eq!(waiting(&limit).await, 1);
    drop(waits);
    settle().await;
    assert_eq!(waiting(&limit).await, 0);
    soon(wrapped.oneshot(get("/next"))).await.unwrap();
    assert_eq!(upstream.arrivals(), [0, SECOND], "and its slot");
}
