//! Holds without a key function: all requests share one count, and each host has its own hold.
//! Under a paused clock.

use crate::support::{self, busy};

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use busy::Busy;
use futures::FutureExt;
use futures::future::join_all;
use http::StatusCode;
use support::{Upstream, get, limited, ms, ok, peek, settle, soon};
use tokio::time::{Instant, sleep};
use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{
    Cost, HeaderTrust, Key, Limited, Quota, RateLimitBuilder, RateLimitLayer, Reason, RequestRef,
    Signal,
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};

const SECOND: Duration = Duration::from_secs(1);
const ONE: &str = "http://one.test/";
const TWO: &str = "http://two.test/";

fn builder(quota: Quota) -> RateLimitBuilder {
    RateLimitLayer::builder(quota).max_wait(60 * SECOND)
}

/// Returns a layer that counts `count` requests an hour, and layers of which one counts tokens only
/// and one counts requests and tokens.
fn layers_of_units(count: u32) -> [RateLimitLayer; 3] {
    let requests = Quota::per_hour(count);
    let tokens = requests.of("tokens");
    [requests, tokens, requests.and(tokens)].map(|quota| {
        let cost = |_: &RequestRef<'_>| Cost::new(1).and("tokens", 1);
        builder(quota).cost(cost).build().unwrap()
    })
}

async fn held(layer: &RateLimitLayer, host: &str) -> Option<Duration> {
    peek(layer, Key::host_hold(host)).await.held
}

#[tokio::test(start_paused = true)]
async fn host_429_holds_only_requests_to_that_host() {
    // Few enough that no permit is prefetched.
    for layer in layers_of_units(40) {
        let upstream = Upstream::answering([limited("9")]);
        let service = ServiceBuilder::new()
            .layer(layer.clone())
            .service(upstream.clone());
        let start = Instant::now();
        assert_eq!(
            service.clone().oneshot(get(ONE)).await.unwrap().status(),
            429
        );
        assert_eq!(
            (
                held(&layer, "one.test").await,
                held(&layer, "two.test").await
            ),
            (Some(9 * SECOND), None)
        );
        for _ in 0..3 {
            service.clone().oneshot(get(TWO)).await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        let waits = join_all(
            ["http://one.test/a", "http://ONE.test:8080/b"]
                .map(|url| service.clone().oneshot(get(url))),
        );
        assert!(waits.await.iter().all(Result::is_ok));
        assert_eq!(start.elapsed(), 9 * SECOND);
        assert_eq!(upstream.paths(), ["/", "/", "/", "/", "/a", "/b"]);
        let all = peek(&layer, Key::ALL).await;
        assert!(
            all.limits.iter().all(|limit| limit.used == 6),
            "the count is one for all: {all:?}"
        );
        assert_eq!(all.held, None);
    }
}

#[tokio::test(start_paused = true)]
async fn impatient_requests_to_held_host_are_refused_at_once() {
    let layer = builder(Quota::per_second(2))
        .max_wait(5 * SECOND)
        .build()
        .unwrap();
    let upstream = Upstream::taking(ms(100));
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(upstream.clone());
    for _ in 0..2 {
        service.clone().oneshot(get(TWO)).await.unwrap();
    }
    // These requests are in the queue when their host is held.
    let start = Instant::now();
    let mut in_line: Vec<_> = [ONE, TWO, ONE, TWO]
        .map(|url| Box::pin(service.clone().oneshot(get(url))))
        .into();
    assert!(
        in_line
            .iter_mut()
            .all(|call| call.as_mut().now_or_never().is_none())
    );
    layer
        .limiter()
        .hold_for(Key::host_hold("one.test"), 30 * SECOND)
        .await
        .unwrap();
    let ended = join_all(in_line).await;
    for index in [0, 2] {
        let error = ended[index].as_ref().unwrap_err();
        let limited = Limited::find(error).unwrap();
        assert_eq!(
            (limited.reason(), limited.retry_after()),
            (Some(Reason::Held), Some(30 * SECOND))
        );
    }
    assert!(ended[1].is_ok() && ended[3].is_ok());
    // The other requests have their slots: both in the next second.
    assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
    let error = service.clone().oneshot(get(ONE)).await.unwrap_err();
    assert_eq!(Limited::find(&error).unwrap().reason(), Some(Reason::Held));
    assert_eq!(upstream.count(), 4);
}

#[tokio::test(start_paused = true)]
async fn release_ends_the_hold_of_a_host() {
    for layer in layers_of_units(500) {
        let service = ServiceBuilder::new()
            .layer(layer.clone())
            .service(Upstream::answering([limited("50")]));
        service.clone().oneshot(get(ONE)).await.unwrap();
        let start = Instant::now();
        let waits = tokio::spawn(service.clone().oneshot(get(ONE)));
        sleep(SECOND).await;
        layer
            .limiter()
            .release(Key::host_hold("One.test."))
            .await
            .unwrap();
        assert_eq!(soon(waits).await.unwrap().unwrap().status(), StatusCode::OK);
        assert_eq!(start.elapsed(), SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_of_all_holds_all_hosts() {
    let layer = builder(Quota::per_second(50)).build().unwrap();
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(Upstream::new());
    let start = Instant::now();
    layer
        .limiter()
        .hold_for(Key::ALL, 3 * SECOND)
        .await
        .unwrap();
    assert!(
        join_all([ONE, TWO].map(|url| service.clone().oneshot(get(url))))
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert_eq!(start.elapsed(), 3 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn requests_to_held_host_occupy_no_in_flight_slot() {
    for quota in [
        Quota::in_flight(1),
        Quota::in_flight(1).and(Quota::per_second(50)),
    ] {
        let layer = builder(quota).build().unwrap();
        let upstream = Upstream::answering([limited("9")]);
        let service = ServiceBuilder::new()
            .layer(layer.clone())
            .service(upstream.clone());
        service.clone().oneshot(get(ONE)).await.unwrap();
        let start = Instant::now();
        let held: Vec<_> = (0..3)
            .map(|_| tokio::spawn(service.clone().oneshot(get(ONE))))
            .collect();
        settle().await;
        service.clone().oneshot(get(TWO)).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        for call in held {
            assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
        }
        assert_eq!(
            (start.elapsed(), peek(&layer, Key::ALL).await.free),
            (9 * SECOND, 1)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn requests_leave_a_hold_of_their_host_in_order() {
    let layer = builder(Quota::per_second(1)).build().unwrap();
    let upstream = Upstream::answering([limited("5")]);
    let service = ServiceBuilder::new().layer(layer).service(upstream.clone());
    service.clone().oneshot(get(ONE)).await.unwrap();
    let calls: Vec<_> = (0..6)
        .map(|index| tokio::spawn(service.clone().oneshot(get(&format!("{ONE}{index}")))))
        .collect();
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    assert_eq!(upstream.paths()[1..], ["/0", "/1", "/2", "/3", "/4", "/5"]);
    upstream.was_never_over(1, SECOND);
}

/// Requests to another host fill the queue while the host is on hold. A request that waited before them has its place.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_its_host_needs_no_room_later() {
    let layer = builder(Quota::new(1, 2 * SECOND))
        .max_queue(2)
        .build()
        .unwrap();
    let upstream = Upstream::answering([limited("1")]);
    let service = ServiceBuilder::new().layer(layer).service(upstream.clone());
    service.clone().oneshot(get(ONE)).await.unwrap();
    let mut calls = Vec::new();
    for uri in [ONE, TWO, TWO] {
        calls.push(tokio::spawn(service.clone().oneshot(get(uri))));
        sleep(ms(1)).await;
    }
    for call in calls {
        assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn truncated_host_hold_ends_with_one_probe() {
    let layer = builder(Quota::per_second(50))
        .max_hold(5 * SECOND)
        .build()
        .unwrap();
    let upstream = Upstream::answering([limited("13"), limited("12")]);
    let service = ServiceBuilder::new().layer(layer).service(upstream.clone());
    service.clone().oneshot(get(ONE)).await.unwrap();
    let calls: Vec<_> = (0..5)
        .map(|_| tokio::spawn(service.clone().oneshot(get(ONE))))
        .collect();
    let mut refused = 0;
    for call in calls {
        refused += usize::from(soon(call).await.unwrap().unwrap().status() == 429);
    }
    // The first probe was refused too: the other requests waited for the second one, after half of what was left.
    assert_eq!((refused, upstream.count()), (1, 6));
    let arrivals = upstream.arrivals();
    assert_eq!((arrivals[0], arrivals[1] / 1000), (0, 5), "{arrivals:?}");
    assert!(
        arrivals[2..].iter().all(|at| (11_000..11_100).contains(at)),
        "{arrivals:?}"
    );
}

/// The permit of the probe expires before the service inside is ready, so the probe was not sent: the request becomes
/// the probe again.
#[tokio::test(start_paused = true)]
async fn a_probe_with_an_expired_permit_probes_again() {
    let start = Instant::now();
    for joint in [false, true] {
        let start_of_round = Instant::now();
        let builder = builder(Quota::per_second(50)).max_hold(SECOND);
        let builder = if joint {
            builder.and_per("all", Quota::per_second(50), |_| Key::ALL)
        } else {
            builder
        };
        let upstream = Upstream::answering([limited("7000")]);
        let service = builder.build().unwrap().layer(Busy {
            inner: upstream.clone(),
            from: start_of_round + ms(600),
            until: start_of_round + ms(1300),
        });
        service.clone().oneshot(get(ONE)).await.unwrap();
        sleep(ms(500)).await;
        service.clone().oneshot(get(ONE)).await.unwrap();
        let waited = start_of_round.elapsed();
        assert!(waited < ms(1500), "joint: {joint}, {waited:?}");
    }
    assert!(start.elapsed() >= ms(2600));
}

#[tokio::test(start_paused = true)]
async fn layers_sharing_a_store_share_host_holds() {
    let store = Arc::new(MemoryStore::default());
    let layers = [0, 1].map(|_| {
        builder(Quota::per_second(50))
            .store(store.clone())
            .build()
            .unwrap()
    });
    let upstream = Upstream::answering([ok(), limited("9")]);
    let [ours, theirs] =
        layers.map(|layer| ServiceBuilder::new().layer(layer).service(upstream.clone()));
    theirs.clone().oneshot(get(TWO)).await.unwrap();
    ours.clone().oneshot(get(ONE)).await.unwrap();
    let start = Instant::now();
    theirs.clone().oneshot(get(TWO)).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    theirs.clone().oneshot(get(ONE)).await.unwrap();
    assert_eq!(start.elapsed(), 9 * SECOND);
    ours.clone().oneshot(get(ONE)).await.unwrap();
    assert_eq!(start.elapsed(), 9 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn later_layer_reads_host_holds_from_the_store() {
    let store = Arc::new(MemoryStore::default());
    let layer = || {
        builder(Quota::per_second(50))
            .store(store.clone())
            .build()
            .unwrap()
    };
    let upstream = Upstream::answering([limited("9")]);
    let service = |layer| ServiceBuilder::new().layer(layer).service(upstream.clone());
    let first = layer();
    service(first.clone()).oneshot(get(ONE)).await.unwrap();
    let start = Instant::now();
    service(layer()).oneshot(get(ONE)).await.unwrap();
    assert_eq!(start.elapsed(), 9 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn quotas_of_one_host_do_not_stop_the_others() {
    let layer = builder(Quota::per_minute(100)).build().unwrap();
    let mut refusal = limited("30").unwrap();
    for (name, value) in [("limit", 100), ("remaining", 0), ("reset", 30)] {
        let name = format!("x-ratelimit-{name}")
            .parse::<http::HeaderName>()
            .unwrap();
        refusal.headers_mut().insert(name, value.into());
    }
    let upstream = Upstream::answering([ok(), Ok(refusal)]);
    let service = ServiceBuilder::new().layer(layer).service(upstream.clone());
    let start = Instant::now();
    for url in [TWO, ONE, TWO, TWO] {
        service.clone().oneshot(get(url)).await.unwrap();
    }
    assert_eq!((start.elapsed(), upstream.count()), (Duration::ZERO, 4));
}

#[tokio::test(start_paused = true)]
async fn hosts_beyond_max_keys_are_neither_held_nor_refused() {
    let layer = builder(Quota::per_second(50)).max_keys(2).build().unwrap();
    let service = ServiceBuilder::new()
        .layer(layer)
        .service(Upstream::answering([limited("2")]));
    for url in [ONE, TWO, ONE, TWO, "http://three.test/"] {
        let answer = service.clone().oneshot(get(url)).await;
        assert!(answer.is_ok(), "{url}: {answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_key_for_all_hosts_holds_all_of_them() {
    let account = Key::new("our account");
    let layer = builder(Quota::per_second(50))
        .key(move |_| account)
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .layer(layer)
        .service(Upstream::answering([limited("9")]));
    service.clone().oneshot(get(ONE)).await.unwrap();
    let start = Instant::now();
    service.clone().oneshot(get(TWO)).await.unwrap();
    assert_eq!(start.elapsed(), 9 * SECOND);
}

/// A layer with a limit for all requests, and one for each path.
fn joint_builder(quota: Quota) -> RateLimitBuilder {
    builder(quota).and_per("path", quota, |request| Key::new(request.path()))
}

#[tokio::test(start_paused = true)]
async fn joint_requests_learn_of_holds_by_host_from_the_store() {
    let store = Arc::new(MemoryStore::default());
    let quota = Quota::per_hour(40);
    let first = builder(quota).store(store.clone()).build().unwrap();
    let service = first.layer(Upstream::answering([limited("9")]));
    assert_eq!(service.oneshot(get(ONE)).await.unwrap().status(), 429);
    // This layer begins after the hold.
    let second = joint_builder(quota).store(store).build().unwrap();
    let service = second.layer(Upstream::new());
    let start = Instant::now();
    service.clone().oneshot(get(TWO)).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    service.clone().oneshot(get(ONE)).await.unwrap();
    assert_eq!(start.elapsed(), 9 * SECOND);
}

/// A store that counts its calls.
#[derive(Default)]
struct Counting {
    store: MemoryStore,
    calls: AtomicUsize,
}

impl Store for Counting {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.lease(request)
    }
}

#[tokio::test(start_paused = true)]
async fn joint_requests_with_hosts_use_permits_at_hand() {
    let store = Arc::new(Counting::default());
    let layer = joint_builder(Quota::per_second(10_000))
        .store(store.clone())
        .build()
        .unwrap();
    let service = layer.layer(Upstream::new());
    for url in [ONE, TWO] {
        let before = store.calls.load(Ordering::Relaxed);
        for _ in 0..200 {
            service.clone().oneshot(get(url)).await.unwrap();
        }
        let calls = store.calls.load(Ordering::Relaxed) - before;
        assert!(calls < 100, "{calls} calls for 200 requests");
    }
}

/// A permit by hand has no host, so its refusal holds all of them. The probe of a layer ends that hold.
#[tokio::test(start_paused = true)]
async fn a_probe_to_a_host_ends_the_hold_of_all_hosts() {
    let layer = builder(Quota::per_second(50))
        .max_hold(SECOND)
        .build()
        .unwrap();
    let permit = layer.limiter().acquire(Key::ALL).await.unwrap();
    permit
        .begin()
        .unwrap()
        .answered(&Signal::read(&limited("7000").unwrap()));
    sleep(2 * SECOND).await;
    let service = ServiceBuilder::new().layer(layer).service(Upstream::new());
    let start = Instant::now();
    for _ in 0..5 {
        service.clone().oneshot(get(ONE)).await.unwrap();
    }
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
}

/// A response whose host is not known may be of any host. Once requests go to several, it reaches no key that
/// requests to some host have.
#[tokio::test(start_paused = true)]
async fn hostless_responses_reach_no_key_of_hosts() {
    type KeyOf = fn(&RequestRef<'_>) -> Option<Key>;
    let whole: [KeyOf; 2] = [|_| Some(Key::ALL), |_| Some(Key::new("fleet"))];
    for (index, key_of) in whole.into_iter().enumerate() {
        for (status, header) in [
            (429, ("x-ratelimit-scope", "account")),
            (200, ("ratelimit-policy", r#""account";q=1;w=3600"#)),
        ] {
            let layer = builder(Quota::per_second(50))
                .name("account")
                .key(key_of)
                .and_per("token", Quota::per_second(50), |request| {
                    request.header("authorization").map(Key::new)
                })
                .trust_headers(HeaderTrust::Stricter)
                .max_wait(ms(1500))
                .build()
                .unwrap();
            let answers = |request: http::Request<()>| async move {
                let response = http::Response::builder();
                let response = match request.uri().host() {
                    Some(_) => response,
                    None => response.status(status).header(header.0, header.1),
                };
                let response = response.header("retry-after", "30").body(());
                Ok::<_, std::convert::Infallible>(response.unwrap())
            };
            let service = layer.layer(tower::service_fn(answers));
            let send = |url: &str, token: &str| {
                let request = http::Request::get(url).header("authorization", token);
                service.clone().oneshot(request.body(()).unwrap())
            };
            for (url, token) in [(ONE, "a"), (TWO, "b"), ("/", "c")] {
                send(url, token).await.unwrap();
            }
            for (url, token) in [(ONE, "a"), (TWO, "b"), (ONE, "a"), (TWO, "b")] {
                let sent = send(url, token).await;
                assert!(sent.is_ok(), "{index} {status} {token}: {sent:?}");
            }
            // The key that only requests without a host have had is that of their server.
            if status == 429 {
                let refused = send("/", "c").await;
                assert!(refused.is_err(), "{index}: the server is obeyed");
            }
        }
    }
}

/// A Tower service enters a request when it is made. Its task may poll later.
#[tokio::test(start_paused = true)]
async fn requests_that_are_not_polled_fill_the_room_of_a_hold() {
    let layer = builder(Quota::per_second(50)).max_queue(3).build().unwrap();
    let (limiter, host) = (layer.limiter(), Key::host_hold("one.test"));
    limiter.hold_for(host, 5 * SECOND).await.unwrap();
    let mut service = layer.layer(Upstream::new());
    let mut calls: Vec<_> = (0..9).map(|_| service.call(get(ONE))).collect();
    let is_refused = |call: Option<Result<_, tollgate::Error>>| {
        let Some(Err(error)) = call else { return false };
        let reason = Limited::find(&error).and_then(Limited::reason);
        assert_eq!(reason, Some(Reason::QueueFull(3)));
        true
    };
    calls.retain_mut(|call| !is_refused(call.now_or_never()));
    assert_eq!(calls.len(), 3);
    // The tasks that a new end of the hold wakes do not poll at once.
    limiter.hold_for(host, 6 * SECOND).await.unwrap();
    assert!(is_refused(service.call(get(ONE)).now_or_never()));
    // If one is dropped, another one has room.
    calls.pop();
    calls.push(service.call(get(ONE)));
    assert!(join_all(calls).await.iter().all(Result::is_ok));
}
