//! Requests that take permits of several keys: all or none, within every limit, and no wait of one
//! key spends a permit of another. Under a paused clock, with an upstream that logs.

use crate::support::{self, channels};

use std::convert::Infallible;
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use channels::{Log, channel};
use http::{Request, Response};
use support::{Distant, count_of};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::limiter::Acquire;
use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{
    Deadline, Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer, Reason, Signal, by_host,
};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// An upstream that logs its requests.
fn upstream(
    log: &Log,
) -> impl Service<Request<String>, Response = Response<&'static str>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    let log = log.clone();
    service_fn(move |request: Request<String>| {
        log.add(request.uri().path());
        async { Ok::<_, Infallible>(Response::new("ok")) }
    })
}

fn bot(max_wait: Duration) -> RateLimitLayer {
    RateLimitLayer::builder(Quota::per_minute(30))
        .and_per("channel", Quota::per_second(1), |request| {
            channel(request.path()).map(Key::new)
        })
        .max_wait(max_wait)
        .build()
        .unwrap()
}

/// What became of requests: the waits of those that were sent, and the errors of the others.
#[derive(Default)]
struct Outcome {
    sent: Vec<Duration>,
    refused: Vec<BoxError>,
}

/// Sends a request to each channel, each at its time.
async fn send<S>(service: S, plan: impl IntoIterator<Item = (Duration, u32)>) -> Outcome
where
    S: Service<Request<String>, Error: Into<BoxError> + Send, Response: Send, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let mut tasks = JoinSet::new();
    for (at, channel) in plan {
        let mut service = service.clone();
        tasks.spawn(async move {
            sleep(at).await;
            let start = Instant::now();
            let uri = format!("http://bot.example/channels/{channel}/messages");
            let request = Request::get(uri).body(String::new()).unwrap();
            let ready = service.ready().await.map_err(Into::into)?;
            match ready.call(request).await {
                Ok(_) => Ok(start.elapsed()),
                Err(error) => Err(error.into()),
            }
        });
    }
    let mut outcome = Outcome::default();
    while let Some(done) = tasks.join_next().await {
        match done.unwrap() {
            Ok(waited) => outcome.sent.push(waited),
            Err(error) => outcome.refused.push(error),
        }
    }
    outcome
}

/// Asserts that the upstream saw no more than a bot may send.
fn assert_bot_within_limits(log: &Log) {
    assert!(log.most(MINUTE, None) <= 30, "{}", log.most(MINUTE, None));
    for channel in log.channels() {
        let most = log.most(SECOND, Some(&channel));
        assert!(most <= 1, "{most} in channel {channel}");
    }
}

#[tokio::test(start_paused = true)]
async fn further_limits_by_host_count_hosts_only() {
    // The layer reads the host itself for `by_host`, and a closure reads it for the second limit.
    let layer = RateLimitLayer::builder(Quota::per_minute(30))
        .and_per("host", Quota::per_minute(2), by_host)
        .and_per("by closure", Quota::per_minute(2), |request| {
            by_host(request)
        })
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let service = layer.clone().layer(upstream(&Log::default()));
    let sent = async |uri: &str, key: &str| {
        let mut request = Request::get(uri).body(String::new()).unwrap();
        // The key of the first limit alone.
        request.extensions_mut().insert(Key::new(key));
        service.clone().oneshot(request).await.is_ok()
    };
    assert!(sent("http://one.example/", "a").await && sent("http://ONE.example/", "b").await);
    assert!(!sent("http://one.example/", "c").await);
    assert!(sent("http://two.example/", "c").await);
    // A request without a host counts in the first limit only.
    for _ in 0..3 {
        assert!(sent("/", "d").await);
    }
    for name in ["host", "by closure"] {
        let limiter = layer.limiter_of(name).unwrap();
        for (host, free) in [("one.example", 0), ("two.example", 1)] {
            let key = Key::host(host).and(name);
            assert_eq!(limiter.peek(key).await.unwrap().free, free, "{name} {host}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn joint_limits_grant_all_that_both_allow() {
    let log = Log::default();
    let service = bot(15 * SECOND).layer(upstream(&log));
    let plan = (0..59).map(|number| (Duration::ZERO, number % 5));
    let Outcome { sent, refused } = send(service, plan).await;
    assert_bot_within_limits(&log);
    // Five channels of one per second: thirty of the minute leave within six seconds.
    assert_eq!((sent.len(), refused.len()), (30, 29));
    let longest = sent.into_iter().max().unwrap();
    assert!(longest <= Duration::from_millis(5500), "{longest:?}");
    for error in refused {
        let limited = Limited::find(&*error).unwrap();
        assert_eq!(limited.reason(), Some(Reason::MaxWait(15 * SECOND)));
        assert!(limited.retry_after().unwrap() > 50 * SECOND, "{limited}");
        assert_eq!(
            limited.report().name(),
            None,
            "the limit of the minute refuses"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn waits_for_one_key_take_nothing_from_the_other() {
    let log = Log::default();
    let layer = RateLimitLayer::builder(Quota::per_second(10))
        .and_per("channel", Quota::new(1, 10 * SECOND), |request| {
            channel(request.path()).map(Key::new)
        })
        .max_wait(30 * SECOND)
        .build()
        .unwrap();
    let service = layer.layer(upstream(&log));
    // Three requests of one channel wait up to 20 s. Others come every 100 ms.
    let slow = (0..3).map(|_| (Duration::ZERO, 0));
    let light = (1..150).map(|number| (number * Duration::from_millis(110), number + 1000));
    let Outcome { sent, refused } = send(service, slow.chain(light)).await;
    assert!(refused.is_empty(), "{refused:?}");
    assert!(log.most(SECOND, None) <= 10);
    let waited = sent
        .iter()
        .filter(|wait| **wait > Duration::from_millis(300))
        .count();
    assert_eq!(
        waited, 2,
        "only the second and third request of the slow channel wait"
    );
}

#[tokio::test(start_paused = true)]
async fn requests_leave_in_the_order_of_their_arrival() {
    let layer = bot(MINUTE * 5);
    let log = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    let limiter = layer.limiter();
    let channels = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(MINUTE * 5)
        .build()
        .unwrap()
        .limiter();
    for number in 0..40 {
        let (log, limiter, channels) = (log.clone(), limiter.clone(), channels.clone());
        tasks.spawn(async move {
            sleep(Duration::from_millis(number)).await;
            let both = channels
                .acquire(Key::new("17"))
                .and(limiter.acquire(Key::ALL));
            if number % 7 == 3 {
                // This request gives up.
                assert!(tokio::time::timeout(2 * SECOND, both).await.is_err());
            } else {
                drop(both.await.unwrap());
                log.lock().unwrap().push(number);
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let order = log.lock().unwrap().clone();
    assert!(order.is_sorted(), "{order:?}");
    assert_eq!(order.len(), 34);
}

/// The first request costs more than is left. When it is dropped, the one behind it leaves at once.
#[tokio::test(start_paused = true)]
async fn a_dropped_dear_request_that_settles_lets_the_next_leave() {
    let limiter = || {
        let builder = RateLimitLayer::builder(Quota::new(10, MINUTE)).max_wait(5 * MINUTE);
        builder.settle_by_hand().build().unwrap().limiter()
    };
    let (one, other) = (limiter(), limiter());
    let both = |cost| {
        let acquire = |limiter: &Limiter| limiter.acquire(Key::ALL).cost(cost);
        acquire(&one).and(acquire(&other))
    };
    let used = both(8).await.unwrap();
    let mut dear = Box::pin(both(5));
    assert!(futures::poll!(&mut dear).is_pending());
    let next = tokio::spawn(both(1));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!next.is_finished(), "it is behind the dear one");
    let start = Instant::now();
    drop(dear);
    next.await.unwrap().unwrap().give_back();
    assert!(
        start.elapsed() < Duration::from_millis(50),
        "{:?}",
        start.elapsed()
    );
    used.give_back();
}

/// Sends joint requests of costs from 1 to 13 to two limits, and returns the order in which they left.
async fn order_of_mixed_costs(settles: bool) -> Vec<u32> {
    let limiter = |quota| {
        let builder = RateLimitLayer::builder(quota).max_wait(5 * MINUTE);
        let builder = if settles {
            builder.settle_by_hand()
        } else {
            builder
        };
        builder.build().unwrap().limiter()
    };
    let (all, channels) = (
        limiter(Quota::per_second(20)),
        limiter(Quota::per_second(30)),
    );
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for number in 0..60 {
        let (order, all, channels) = (order.clone(), all.clone(), channels.clone());
        tasks.spawn(async move {
            sleep(Duration::from_millis(number.into())).await;
            let cost = [1, 13, 2, 7, 1][number as usize % 5];
            let channel = channels.acquire(Key::new("17")).cost(cost);
            drop(
                channel
                    .and(all.acquire(Key::ALL).cost(14 - cost))
                    .await
                    .unwrap(),
            );
            order.lock().unwrap().push(number);
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    Arc::into_inner(order).unwrap().into_inner().unwrap()
}

#[tokio::test(start_paused = true)]
async fn small_requests_do_not_overtake_large_ones() {
    for settles in [false, true] {
        let order = order_of_mixed_costs(settles).await;
        assert!(order.is_sorted(), "{settles}: {order:?}");
        assert_eq!(order.len(), 60);
    }
}

#[tokio::test(start_paused = true)]
async fn refused_requests_leave_no_trace() {
    let all = RateLimitLayer::new(Quota::per_minute(30))
        .unwrap()
        .limiter();
    let channels = RateLimitLayer::builder(Quota::per_minute(1))
        .max_wait(SECOND)
        .build()
        .unwrap()
        .limiter();
    let both = || all.acquire(Key::ALL).and(channels.acquire(Key::new("17")));
    let permit = both().await.unwrap();
    drop(permit);
    for _ in 0..50 {
        let refused = both().await.unwrap_err();
        assert_eq!(refused.reason(), Some(Reason::MaxWait(SECOND)));
    }
    assert_eq!(all.peek(Key::ALL).await.unwrap().free, 29);
    let permit = all
        .acquire(Key::ALL)
        .and(channels.acquire(Key::new("18")))
        .await
        .unwrap();
    permit.give_back();
    assert_eq!(all.peek(Key::ALL).await.unwrap().free, 29);
    assert_eq!(channels.peek(Key::new("18")).await.unwrap().free, 1);
}

#[tokio::test(start_paused = true)]
async fn hold_of_one_key_moves_the_whole_request() {
    let layer = bot(15 * SECOND);
    let log = Log::default();
    let service = layer.layer(upstream(&log));
    let start = Instant::now();
    let held = tokio::spawn(send(
        service.clone(),
        [(Duration::ZERO, 1), (Duration::ZERO, 1)],
    ));
    sleep(Duration::from_millis(100)).await;
    layer
        .limiter()
        .hold_for(Key::ALL, 5 * SECOND)
        .await
        .unwrap();
    let Outcome { sent, refused } = held.await.unwrap();
    assert!(refused.is_empty(), "{refused:?}");
    assert_eq!(sent.len(), 2);
    assert!(start.elapsed() >= 5 * SECOND, "{:?}", start.elapsed());
    layer.limiter().hold_for(Key::ALL, MINUTE).await.unwrap();
    let outcome = send(service, [(Duration::ZERO, 2)]).await;
    let refused = Limited::find(&*outcome.refused[0]).unwrap();
    assert_eq!(refused.reason(), Some(Reason::Held));
    assert_bot_within_limits(&log);
}

#[tokio::test(start_paused = true)]
async fn requests_outside_of_a_limit_do_not_see_it() {
    let log = Log::default();
    let service = bot(Duration::ZERO).layer(upstream(&log));
    for _ in 0..5 {
        let request = Request::get("http://bot.example/me")
            .body(String::new())
            .unwrap();
        service.clone().oneshot(request).await.unwrap();
    }
    assert_eq!(log.len(), 5);
}

#[tokio::test]
async fn one_key_cannot_be_counted_twice() {
    let limiter = RateLimitLayer::new(Quota::per_minute(30))
        .unwrap()
        .limiter();
    let twice = limiter.acquire(Key::ALL).and(limiter.acquire(Key::ALL));
    assert_eq!(twice.await.unwrap_err().reason(), Some(Reason::SameKey));
    assert_eq!(limiter.peek(Key::ALL).await.unwrap().free, 30);
}

/// The first key had the name of the one that refused its first request.
#[tokio::test(start_paused = true)]
async fn no_key_is_named_after_the_key_that_refuses() {
    let limiter = |quota| {
        let builder = RateLimitLayer::builder(quota).max_wait(Duration::ZERO);
        builder.build().unwrap().limiter()
    };
    let (user, channel) = (
        limiter(Quota::per_minute(30)),
        limiter(Quota::per_minute(1)),
    );
    let both = |name| {
        user.acquire(Key::new(name))
            .and(channel.acquire(Key::new("17")))
    };
    drop(both("one").await.unwrap().begin());
    let refused = both("other").await.unwrap_err();
    let keys = user.busiest(2);
    let names: Vec<_> = keys.iter().map(|key| key.name()).collect();
    assert!(!names.contains(&refused.report().key()), "{names:?}");
}

#[tokio::test(start_paused = true)]
async fn errors_name_the_limit_that_refuses() {
    let service = bot(Duration::ZERO).layer(upstream(&Log::default()));
    let plan = [(Duration::ZERO, 1), (SECOND / 2, 1)];
    let Outcome { refused, .. } = send(service, plan).await;
    let limited = Limited::find(&*refused[0]).unwrap();
    assert_eq!(limited.report().name(), Some("channel"));
    let text = limited.to_string();
    assert!(text.starts_with("refused locally (channel "), "{text}");
}

/// Returns a limiter of `quota` whose requests wait for up to five minutes.
fn patient(quota: Quota) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(5 * MINUTE);
    builder.build().unwrap().limiter()
}

#[tokio::test(start_paused = true)]
async fn waiters_move_up_when_one_gives_up() {
    let (all, channels) = (
        patient(Quota::per_minute(30)),
        patient(Quota::new(1, 10 * SECOND)),
    );
    let both = || channels.acquire(Key::new("17")).and(all.acquire(Key::ALL));
    drop(both().await.unwrap());
    let start = Instant::now();
    let impatient = tokio::spawn(timeout(SECOND, both()));
    tokio::task::yield_now().await;
    let second = tokio::spawn(both());
    tokio::task::yield_now().await;
    let third = tokio::spawn(both());
    assert!(impatient.await.unwrap().is_err());
    drop(second.await.unwrap().unwrap());
    assert!(start.elapsed() < 11 * SECOND, "{:?}", start.elapsed());
    drop(third.await.unwrap().unwrap());
    assert!(start.elapsed() < 21 * SECOND, "{:?}", start.elapsed());
    sleep(MINUTE - start.elapsed()).await;
    assert_eq!(all.peek(Key::ALL).await.unwrap().limits[0].used, 3);
}

/// A slot that is due is settled on the first request, also by the task of another one.
#[tokio::test(start_paused = true)]
async fn a_slot_of_a_request_that_ends_before_it_looks_goes_to_the_next() {
    let limiter = patient(Quota::new(1, 10 * SECOND));
    let both = |name: &str| {
        let all = limiter.acquire(Key::new(format!("all {name}")));
        limiter.acquire(Key::new(name)).and(all).into_future()
    };
    drop(both("one").await.unwrap());
    let waits = both("one").await.unwrap().waited();

    drop(both("other").await.unwrap());
    let mut first = Box::pin(both("other"));
    let mut second = Box::pin(both("other"));
    assert!(futures::poll!(&mut first).is_pending());
    assert!(futures::poll!(&mut second).is_pending());
    sleep(waits).await;
    assert!(futures::poll!(&mut second).is_pending());
    drop(first);
    assert!(futures::poll!(&mut second).is_ready());
}

#[tokio::test(start_paused = true)]
async fn joint_requests_fit_into_a_store_that_replies_late() {
    for trip in [1, 4, 10] {
        for keys in 2..=8 {
            let builder = RateLimitLayer::builder(Quota::per_second(10))
                .store(Arc::new(Distant::new(Duration::from_millis(trip))));
            let limiter = builder.build().unwrap().limiter();
            let start = Instant::now();
            for _ in 0..5 {
                let mut all = (0..keys).map(|key: u8| limiter.acquire(Key::new([key])));
                let first = all.next().unwrap();
                let permit = all.fold(first, Acquire::and).await;
                let permit =
                    permit.unwrap_or_else(|limited| panic!("{keys} keys, {trip} ms: {limited}"));
                assert!(permit.is_valid());
            }
            let took = start.elapsed();
            let most = Duration::from_millis(trip) * 5 * 6 * u32::from(keys) + SECOND / 10;
            assert!(took <= most, "{keys} keys, trips of {trip} ms: {took:?}");
            sleep(2 * SECOND).await;
            for key in 0..keys {
                let peek = limiter.peek(Key::new([key])).await.unwrap();
                assert_eq!(peek.limits[0].used, 0, "{keys} keys, {trip} ms");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn requests_with_more_keys_than_max_keys_are_refused() {
    let builder = RateLimitLayer::builder(Quota::per_minute(30)).max_keys(1);
    let limiter = builder.build().unwrap().limiter();
    let both = limiter
        .acquire(Key::new("1"))
        .and(limiter.acquire(Key::new("2")));
    let refused = both.await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::TooManyKeys(1)));
    assert_eq!(limiter.peek(Key::new("1")).await.unwrap().limits[0].used, 0);
}

/// Sends a request that the upstream refuses, then requests to channels 1 and 2. Returns the names
/// of the limits that refuse them.
async fn refused_after(headers: &[(&str, &str)]) -> [Option<Option<String>>; 2] {
    let mut response = Response::builder().status(429).header("retry-after", "20");
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    let response = response.body("").unwrap();
    let upstream = service_fn(move |_: Request<String>| {
        let response = response.clone();
        async { Ok::<_, Infallible>(response) }
    });
    let layer = bot(SECOND);
    let service = layer.layer(upstream);
    send(service.clone(), [(Duration::ZERO, 1)]).await;
    let mut names = [None, None];
    for (name, channel) in names.iter_mut().zip([1, 2]) {
        let Outcome { refused, .. } = send(service.clone(), [(2 * SECOND, channel)]).await;
        *name = refused.first().map(|error| {
            let limited = Limited::find(&**error).unwrap();
            assert_eq!(limited.reason(), Some(Reason::Held));
            limited.report().name().map(str::to_owned)
        });
    }
    names
}

#[tokio::test(start_paused = true)]
async fn refusals_hold_the_key_that_they_are_about() {
    let channel = || Some(Some("channel".to_owned()));
    // Without a reason, the last limit.
    assert_eq!(refused_after(&[]).await, [channel(), None]);
    // The limit that the scope names.
    let scope = [("x-ratelimit-scope", "channel")];
    assert_eq!(refused_after(&scope).await, [channel(), None]);
    // The limit that is stated as used up: all requests.
    let used_up = [
        ("ratelimit-policy", "\"all\";q=30;w=60"),
        ("ratelimit", "\"all\";r=0;t=20"),
    ];
    assert_eq!(refused_after(&used_up).await, [Some(None), Some(None)]);
}

#[test]
fn names_of_limits_are_checked() {
    let key = |request: &tollgate::RequestRef<'_>| channel(request.path()).map(Key::new);
    let quota = Quota::per_second(1);
    let twice = RateLimitLayer::builder(Quota::per_minute(30))
        .and_per("channel", quota, key)
        .and_per("channel", quota, key)
        .build();
    assert!(twice.unwrap_err().to_string().contains("channel"));
    let empty = RateLimitLayer::builder(Quota::per_minute(30)).and_per("", quota, key);
    assert!(empty.build().is_err());
}

#[tokio::test(start_paused = true)]
async fn each_of_two_joined_layers_keeps_its_cost_and_wait() {
    let dear = RateLimitLayer::builder(Quota::per_minute(10))
        .key(|_| Key::new("dear"))
        .cost(|_| 3)
        .max_wait(SECOND)
        .and_per("channel", Quota::per_minute(7), |request| {
            channel(request.path()).map(Key::new)
        })
        .build()
        .unwrap();
    let all = RateLimitLayer::builder(Quota::per_minute(30))
        .name("all")
        .build()
        .unwrap();
    let both = all.and(dear);
    let Outcome { sent, refused } = send(
        both.layer(upstream(&Log::default())),
        [(Duration::ZERO, 1); 3],
    )
    .await;
    assert_eq!((sent.len(), refused.len()), (2, 1));
    let limited = Limited::find(&*refused[0]).unwrap();
    assert_eq!(limited.reason(), Some(Reason::MaxWait(SECOND)));
    assert_eq!(limited.report().name(), Some("channel"));
    let used = async |name, key: Key| {
        let limiter = both.limiter_of(name).unwrap();
        limiter.peek(key).await.unwrap().limits[0].used
    };
    assert_eq!(used("channel", Key::new("1").and("channel")).await, 6);
    assert_eq!(used("all", Key::ALL).await, 2);
    assert!(both.limiter_of("nothing").is_none());
}

#[tokio::test(start_paused = true)]
async fn one_key_is_found_twice_in_stores_with_a_fallback() {
    let store = Arc::new(MemoryStore::default());
    let limiter = || {
        RateLimitLayer::builder(Quota::per_minute(30))
            .store(store.clone())
            .on_store_error(OnStoreError::FallbackShare)
            .build()
            .unwrap()
            .limiter()
    };
    let twice = limiter().acquire(Key::ALL).and(limiter().acquire(Key::ALL));
    assert_eq!(twice.await.unwrap_err().reason(), Some(Reason::SameKey));
}

#[tokio::test(start_paused = true)]
async fn scopes_and_quotas_are_matched_by_the_names_of_limits() {
    let hit = async |headers: &'static [(&str, &str)]| {
        let upstream = service_fn(move |_: Request<String>| {
            let mut response = Response::builder().status(429).header("retry-after", "20");
            for (name, value) in headers {
                response = response.header(*name, *value);
            }
            let response = response.body("").unwrap();
            async { Ok::<_, Infallible>(response) }
        });
        let layer = RateLimitLayer::builder(Quota::new(5, 5 * SECOND))
            .key(|_| Key::new("first"))
            .name("global")
            .and_per("channel", Quota::new(8, 5 * SECOND), |request| {
                channel(request.path()).map(Key::new)
            })
            .and_per("route", Quota::new(6, 5 * SECOND), |_| Key::new("route"))
            .max_wait(SECOND)
            .build()
            .unwrap();
        send(layer.layer(upstream), [(Duration::ZERO, 1)]).await;
        let mut held = Vec::new();
        for (name, key) in [
            ("global", Key::new("first")),
            ("channel", Key::new("1").and("channel")),
            ("route", Key::new("route").and("route")),
        ] {
            let limiter = layer.limiter_of(name).unwrap();
            if limiter.peek(key).await.unwrap().held.is_some() {
                held.push(name);
            }
        }
        held
    };
    assert_eq!(hit(&[]).await, ["route"]);
    assert_eq!(hit(&[("x-ratelimit-scope", "global")]).await, ["global"]);
    let named = &[
        ("ratelimit-policy", "\"channel\";q=8;w=5"),
        ("ratelimit", "\"channel\";r=0;t=5"),
    ];
    assert_eq!(hit(named).await, ["channel"]);
    let unnamed = &[
        ("ratelimit-policy", "\"default\";q=8;w=5"),
        ("ratelimit", "\"default\";r=0;t=5"),
    ];
    assert_eq!(hit(unnamed).await, ["channel"]);
}

#[tokio::test(start_paused = true)]
async fn permits_at_hand_do_not_outlive_a_deadline() {
    let layer = RateLimitLayer::builder(Quota::per_second(1000))
        .key(|_| Key::new("bot"))
        .and_per("channel", Quota::per_second(1000), |request| {
            channel(request.path()).map(Key::new)
        })
        .build()
        .unwrap();
    let log = Log::default();
    let service = layer.layer(upstream(&log));
    // Used fast, both keys have permits at hand most of the time.
    for sent in 1..=20 {
        send(service.clone(), [(Duration::ZERO, 1)]).await;
        let mut request = Request::get("http://bot.example/channels/1/m")
            .body(String::new())
            .unwrap();
        let past = Instant::now().into_std() - Duration::from_millis(1);
        request.extensions_mut().insert(Deadline::at(past));
        let error: BoxError = service.clone().oneshot(request).await.unwrap_err().into();
        let limited = Limited::find(&*error).unwrap();
        assert_eq!(limited.reason(), Some(Reason::Deadline));
        assert_eq!(log.len(), sent);
    }
}

#[tokio::test(start_paused = true)]
async fn joint_requests_with_a_deadline_of_now_leave() {
    let limiter = patient(Quota::per_minute(1));
    let both = || {
        let both = limiter
            .acquire(Key::new("1"))
            .and(limiter.acquire(Key::new("2")));
        both.deadline(Instant::now().into_std())
    };
    drop(both().await.unwrap());
    let late = both().await.unwrap_err();
    assert_eq!(late.reason(), Some(Reason::Deadline));
}

/// A task that always runs late finds each slot expired, until slots are valid for longer.
#[tokio::test(start_paused = true)]
async fn joint_requests_of_late_tasks_are_sent() {
    let store = Distant::new(Duration::from_millis(4));
    let builder = RateLimitLayer::builder(Quota::per_second(10)).store(Arc::new(store));
    let limiter = builder.build().unwrap().limiter();
    let both = limiter
        .acquire(Key::new("1"))
        .and(limiter.acquire(Key::new("2")));
    let mut both = pin!(both.into_future());
    for _ in 0..10 {
        if let Poll::Ready(permit) = futures::poll!(&mut both) {
            assert!(permit.unwrap().is_valid());
            return;
        }
        sleep(Duration::from_millis(30)).await;
    }
    panic!("no permit was valid for long enough");
}

/// A store that has lost its state: it decides nothing until a moment.
struct Recovering {
    store: MemoryStore,
    until: Instant,
}

impl Store for Recovering {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return self.store.lease(request);
        }
        let mut lease = Lease::default();
        lease.recovering = Some(left);
        StoreReply::Ready(Ok(lease))
    }
}

#[tokio::test(start_paused = true)]
async fn requests_for_a_recovering_key_take_nothing_from_others() {
    let start = Instant::now();
    let store = Recovering {
        store: MemoryStore::default(),
        until: start + 5 * SECOND,
    };
    let builder = RateLimitLayer::builder(Quota::per_second(1)).store(Arc::new(store));
    let channels = builder.build().unwrap().limiter();
    let all = patient(Quota::per_second(1));
    let both = all.acquire(Key::ALL).and(channels.acquire(Key::new("17")));
    let both = tokio::spawn(both);
    tokio::task::yield_now().await;
    drop(all.acquire(Key::ALL).await.unwrap());
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(both.await.unwrap().unwrap());
    assert!(start.elapsed() < 6 * SECOND, "{:?}", start.elapsed());
}

/// A hold that was cut ends with one request, the probe. It has several keys.
#[tokio::test(start_paused = true)]
async fn joint_probes_fetch_no_permits_for_others() {
    let builder = RateLimitLayer::builder(Quota::per_second(100_000)).max_hold(5 * SECOND);
    let limiter = builder.build().unwrap().limiter();
    let (held, other) = (Key::new("held"), Key::new("other"));
    let both = || limiter.acquire(held).and(limiter.acquire(other));
    for _ in 0..1000 {
        drop(both().await.unwrap());
    }
    assert!(count_of(&limiter.stats(), "permits_at_hand") > 0);
    let refusal = Response::builder()
        .status(429)
        .header("retry-after", "7000");
    let signal = Signal::read(&refusal.body(()).unwrap());
    let _ = limiter
        .acquire(held)
        .await
        .unwrap()
        .begin()
        .unwrap()
        .answered(&signal);
    sleep(6 * SECOND).await;
    let probe = both().await.unwrap().begin().unwrap();
    let mut next = pin!(limiter.acquire(held).into_future());
    assert!(futures::poll!(&mut next).is_pending());
    let accepted = Signal::read(&Response::new(()));
    let _ = probe.answered(&accepted);
    drop(next.await.unwrap());
}

/// A store that replies later about one key than about the others.
#[derive(Default)]
struct Uneven {
    memory: MemoryStore,
    late: Option<Key>,
}

impl Store for Uneven {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.memory)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let trip = match Some(request.key) == self.late {
            true => SECOND,
            false => Duration::from_millis(5),
        };
        let StoreReply::Ready(reply) = self.memory.lease(request) else {
            unreachable!("memory replies at once")
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(trip).await;
            reply
        }))
    }
}

/// The runtime ends when one of two keys has its slot and the other has no answer.
#[test]
fn lost_search_gives_slots_back_that_have_arrived() {
    let (early, late) = (Key::new("early"), Key::new("late"));
    let store = Uneven {
        late: Some(late),
        ..Uneven::default()
    };
    let builder = RateLimitLayer::builder(Quota::per_minute(10)).store(Arc::new(store));
    let limiter = builder.build().unwrap().limiter();
    support::paused_runtime().block_on(async {
        let both = limiter.acquire(late).and(limiter.acquire(early));
        let mut both = pin!(both.into_future());
        assert!(futures::poll!(&mut both).is_pending());
        sleep(SECOND / 2).await;
        let peek = limiter.peek(early).await.unwrap();
        assert_eq!(peek.limits[0].used, 1);
    });
    let peek = support::paused_runtime().block_on(limiter.peek(early).into_future());
    assert_eq!(peek.unwrap().limits[0].used, 0);
}

#[tokio::test(start_paused = true)]
async fn joint_requests_at_hand_allocate_nothing() -> Result<(), BoxError> {
    let limit = RateLimitLayer::builder(Quota::per_day(1_000_000_000))
        .and_per("a", Quota::per_day(1_000_000_000), |_| Key::new("x"))
        .and_per("b", Quota::per_day(1_000_000_000), |_| Key::new("x"))
        .and_per("c", Quota::per_day(1_000_000_000), |_| Key::new("x"))
        .build()?;
    let mut service = limit.layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(()))
    }));
    // The first requests prefetch enough permits.
    for _ in 0..1000 {
        service.ready().await?.call(Request::new(())).await?;
    }
    let request = Request::new(());
    let future = service.ready().await?;
    let mut answered = None;
    let spent = allocation_counter::measure(|| {
        let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
        answered = Some(pin!(future.call(request)).poll(cx).is_ready());
    });
    assert_eq!(answered, Some(true));
    assert_eq!(spent.count_total, 0);
    Ok(())
}

/// The quota that is set while a request waits for its first in-flight slot makes the second limit the narrower one.
#[tokio::test(start_paused = true)]
async fn a_set_quota_leaves_no_in_flight_slot_behind() {
    let quota = |calls| Quota::per_minute(1000).and(Quota::in_flight(calls));
    let limiter = |calls| {
        let limit = RateLimitLayer::builder(quota(calls)).max_wait(Duration::from_secs(60));
        limit.build().unwrap().limiter()
    };
    let (narrow, wide) = (limiter(1), limiter(3));
    let key = Key::new("tenant");
    let first = narrow.acquire(key).await.unwrap();
    let mut both = Box::pin(narrow.acquire(key).and(wide.acquire(key)));
    assert!(futures::FutureExt::now_or_never(&mut both).is_none());
    narrow.set_quota(key, quota(10)).await.unwrap();
    let start = tokio::time::Instant::now();
    let both = both.await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1));
    drop((first, both));
    assert_eq!(narrow.peek(key).await.unwrap().free, 10);
}

/// The clock runs: the answers of stores come later than the moment at which a request was polled.
#[tokio::test]
async fn answers_without_a_hold_stop_no_request() {
    let per = |count, window| RateLimitLayer::new(Quota::new(count, window)).unwrap();
    let (all, few) = (
        per(1, Duration::from_millis(30)).limiter(),
        per(8, 60 * MINUTE).limiter(),
    );
    let acquire = || all.acquire(Key::ALL).and(few.acquire(Key::ALL));
    for _ in 0..2 {
        // The second one waits, and watches the holds of its keys.
        drop(acquire().await.unwrap());
    }
    for _ in 0..5 {
        sleep(Duration::from_millis(100)).await;
        drop(acquire().await.unwrap());
    }
    // They need not wait. On a busy machine one may come too late for its slots.
    let passed = all.stats().requests().passed;
    assert!(passed > 1, "{passed}");
    let refused = loop {
        if let Err(refused) = acquire().await {
            break refused;
        }
    };
    let is_by_limit = matches!(
        refused,
        Limited::Local {
            reason: Reason::MaxWait(_),
            ..
        }
    );
    assert!(is_by_limit, "{refused}");
}

/// Polls requests once, in order. Returns those that wait, and why the others were refused.
fn begin(requests: impl IntoIterator<Item = Acquire>) -> (Vec<Waiting>, Vec<Option<Reason>>) {
    let mut refused = Vec::new();
    let mut waiting: Vec<Waiting> = Vec::new();
    for request in requests {
        let mut request: Waiting = Box::pin(request.into_future());
        match request
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Pending => waiting.push(request),
            Poll::Ready(Ok(_)) => {}
            Poll::Ready(Err(limited)) => refused.push(limited.reason()),
        }
    }
    (waiting, refused)
}

type Waiting = Pin<Box<dyn Future<Output = Result<tollgate::Permit, Limited>> + Send>>;

/// The requests of all channels wait for the account. One bound holds for all of them, and those that wait for a channel
/// do not count in it.
#[tokio::test(start_paused = true)]
async fn a_key_that_many_requests_share_has_one_bound() {
    let build = |quota| {
        let layer = RateLimitLayer::builder(quota).max_queue(3).max_wait(MINUTE);
        layer.build().unwrap().limiter()
    };
    let (account, channels) = (build(Quota::per_second(1)), build(Quota::per_second(5)));
    let to = |name: &str| {
        account
            .acquire(Key::ALL)
            .and(channels.acquire(Key::new(name)))
    };
    // The first leaves.
    let (waiting, refused) = begin(["a", "b", "c", "d", "e", "f"].map(to));
    let full = Some(Reason::QueueFull(3));
    assert_eq!((waiting.len(), refused), (3, vec![full.clone(); 2]));
    // A request of the account alone is one more that waits for it.
    let (_, refused) = begin([account.acquire(Key::ALL)]);
    assert_eq!(refused, vec![full.clone()]);
    // One that costs nothing of the account does not wait for it.
    let free = account.acquire(Key::ALL).cost(0);
    let (waits, refused) = begin([free.and(channels.acquire(Key::new("g")))]);
    assert_eq!((waits.len(), refused), (0, vec![]));
    drop(waiting);
    let (waiting, refused) = begin([account.acquire(Key::ALL), to("a")]);
    assert_eq!((waiting.len(), refused), (2, vec![]));

    let (account, channels) = (build(Quota::per_second(5)), build(Quota::per_second(1)));
    let to = |name: &str| {
        account
            .acquire(Key::ALL)
            .and(channels.acquire(Key::new(name)))
    };
    let (waiting, refused) = begin(["a", "a", "a", "a", "a"].map(to));
    assert_eq!(
        (waiting.len(), refused),
        (3, vec![full]),
        "they wait for their channel"
    );
    let (other, refused) = begin(["b", "c"].map(to));
    assert_eq!((other.len(), refused), (0, vec![]), "the account has room");
}
