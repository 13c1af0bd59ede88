//! Rate limit layers around each other: no limit is exceeded, whatever stands between them, and
//! little of the outer limit is wasted. Under a paused clock, with an upstream that logs.

use crate::support::{busy, channels};

use std::sync::{Arc, Mutex};
use std::time::Duration;

use busy::Busy;
use channels::{Log, channel};
use http::{Request, Response};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::{AdaptiveThrottleLayer, Key, Limited, Quota, RateLimitLayer, Signal};
use tower::util::BoxCloneService;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn per_channel() -> RateLimitLayer {
    RateLimitLayer::builder(Quota::per_second(1))
        .key(|request| channel(request.path()).map(Key::new))
        .max_wait(10 * SECOND)
        .build()
        .unwrap()
}

fn all() -> RateLimitLayer {
    RateLimitLayer::builder(Quota::per_minute(30))
        .max_wait(10 * SECOND)
        .build()
        .unwrap()
}

type Upstream = BoxCloneService<Request<String>, Response<&'static str>, BoxError>;

fn upstream(log: &Log) -> Upstream {
    let log = log.clone();
    BoxCloneService::new(service_fn(move |request: Request<String>| {
        log.add(request.uri().path());
        async { Ok::<_, BoxError>(Response::new("ok")) }
    }))
}

/// When which channel gets a message: bursts on one channel, then on others, then on a third while
/// the minute ends.
fn plan() -> impl Iterator<Item = (Duration, u32)> {
    let first = (0..10).map(|_| (0, 1));
    let second = (0..20).map(|number| (100, 100 + number));
    let third = (0..9).map(|number| (51_500 + number * 1000, 2));
    let fourth = (0..20).map(|number| (60_000, 200 + number));
    let all = first.chain(second).chain(third).chain(fourth);
    all.map(|(at, channel)| (Duration::from_millis(at), channel))
}

/// Sends the plan through `service`. Returns how many requests were sent.
async fn send<S>(service: S) -> usize
where
    S: Service<Request<String>, Error: Into<BoxError> + Send, Response: Send, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let mut tasks = JoinSet::new();
    for (at, channel) in plan() {
        let mut service = service.clone();
        tasks.spawn(async move {
            sleep(at).await;
            let uri = format!("http://bot.example/channels/{channel}/messages");
            let request = Request::get(uri).body(String::new()).unwrap();
            let ready = service.ready().await.map_err(Into::into)?;
            ready.call(request).await.map(|_| ()).map_err(Into::into)
        });
    }
    let mut sent = 0;
    while let Some(done) = tasks.join_next().await {
        match done.unwrap() {
            Ok(()) => sent += 1,
            Err(error) => assert!(
                Limited::find(&*error).is_some() || error.to_string() == "reset",
                "{error}"
            ),
        }
    }
    sent
}

fn assert_within_limits(log: &Log, name: &str) {
    let most = log.most(SECOND, Some("2")).max(log.most(SECOND, Some("1")));
    assert!(most <= 1, "{name}: {most} in a second of one channel");
    let most = log.most(MINUTE, None);
    assert!(most <= 30, "{name}: {most} in a minute");
}

#[tokio::test(start_paused = true)]
async fn layers_around_each_other_keep_both_limits() {
    let log = Log::default();
    let service = ServiceBuilder::new()
        .layer(per_channel())
        .layer(all())
        .service(upstream(&log));
    let sent = send(service).await;
    assert_within_limits(&log, "channel outside");
    assert!(sent >= 50, "channel outside: {sent}");

    let log = Log::default();
    let service = ServiceBuilder::new()
        .layer(all())
        .layer(per_channel())
        .service(upstream(&log));
    let sent = send(service).await;
    assert_within_limits(&log, "all outside");
    assert!(sent >= 53, "all outside: {sent}");
}

/// Returns how many of `jobs`, which always ask for a minute, were sent through a cap of 15 per second
/// around a common layer of 20 per second, and of requests of the web, four per second, through the
/// common layer alone.
async fn sent_through_a_cap(jobs: usize) -> (usize, usize, Log) {
    let layer = |per_second, max_wait| {
        let builder = RateLimitLayer::builder(Quota::per_second(per_second));
        builder.max_wait(max_wait).build().unwrap()
    };
    let (log, common) = (Log::default(), layer(20, 15 * SECOND));
    let web = common.layer(upstream(&log));
    let batch = layer(15, MINUTE).layer(common.layer(upstream(&log)));
    let batch = BoxCloneService::new(batch);
    let end = tokio::time::Instant::now() + MINUTE;
    let mut tasks = JoinSet::new();
    for _ in 0..jobs {
        let batch = batch.clone();
        tasks.spawn(async move {
            let mut sent = 0;
            while tokio::time::Instant::now() < end {
                let request = Request::get("/jobs").body(String::new()).unwrap();
                match batch.clone().oneshot(request).await {
                    Ok(_) => sent += usize::from(tokio::time::Instant::now() < end),
                    Err(_) => sleep(SECOND).await,
                }
            }
            sent
        });
    }
    let mut web_sent = 0;
    for _ in 0..4 * 60 {
        sleep(SECOND / 4).await;
        let request = Request::get("/web").body(String::new()).unwrap();
        web_sent += usize::from(web.clone().oneshot(request).await.is_ok());
    }
    let mut sent = 0;
    while let Some(done) = tasks.join_next().await {
        sent += done.unwrap();
    }
    (sent, web_sent, log)
}

/// A request that has waited for the outer permit keeps it if the inner store has a permit now, although
/// none is at hand. Else each request would wait in the outer queue again.
#[tokio::test(start_paused = true)]
async fn a_cap_around_a_common_layer_is_used_up() {
    let (jobs, web, log) = sent_through_a_cap(300).await;
    assert!(log.most(SECOND, None) <= 20);
    assert!(jobs >= 15 * 60 * 95 / 100, "{jobs}");
    assert_eq!(web, 4 * 60);
}

#[tokio::test(start_paused = true)]
async fn boxes_and_timeouts_between_layers_change_nothing() {
    let log = Log::default();
    let inner = per_channel().layer(upstream(&log));
    let inner = BoxCloneService::new(inner);
    let inner = tower::timeout::Timeout::new(inner, MINUTE);
    // A service that calls the inner one only when its own future is polled.
    let lazy = service_fn(move |request: Request<String>| {
        let inner = inner.clone();
        async move {
            tokio::task::yield_now().await;
            inner.oneshot(request).await
        }
    });
    let sent = send(all().layer(lazy)).await;
    assert_within_limits(&log, "lazy");
    assert!(sent >= 53, "lazy: {sent}");
}

#[tokio::test(start_paused = true)]
async fn each_attempt_of_a_retry_between_layers_counts() {
    let log = Log::default();
    let refused_once = {
        let (log, failed) = (log.clone(), Arc::new(Mutex::new(0)));
        service_fn(move |request: Request<String>| {
            log.add(request.uri().path());
            let mut failed = failed.lock().unwrap();
            *failed += 1;
            let is_failure = *failed % 2 == 1;
            async move {
                if is_failure {
                    Err::<Response<&str>, BoxError>("reset".into())
                } else {
                    Ok(Response::new("ok"))
                }
            }
        })
    };
    let inner = BoxCloneService::new(per_channel().layer(refused_once).map_err(BoxError::from));
    let retry = service_fn(move |request: Request<String>| {
        let inner = inner.clone();
        async move {
            let again = request.clone();
            match inner.clone().oneshot(request).await {
                Ok(response) => Ok::<_, BoxError>(response),
                Err(_) => inner.oneshot(again).await,
            }
        }
    });
    let limiter = all();
    send(limiter.clone().layer(retry)).await;
    assert_within_limits(&log, "retry");
    assert!(log.len() > 30, "attempts were repeated");
}

/// The inner layer refuses a request, and its retry is sent a little later. Meanwhile the outer permit has gone to
/// another request.
#[tokio::test(start_paused = true)]
async fn retry_after_a_refusal_inside_acquires_another_outer_permit() {
    let layer = |quota| {
        let builder = RateLimitLayer::builder(quota).max_wait(Duration::ZERO);
        builder.build().unwrap()
    };
    let outer = layer(Quota::per_hour(2));
    let inner = layer(Quota::new(1, Duration::from_millis(30)));
    let log = Log::default();
    let inner = inner.layer(upstream(&log));
    let retry = {
        let outer = outer.limiter();
        service_fn(move |request: Request<String>| {
            let (inner, outer) = (inner.clone(), outer.clone());
            async move {
                let again = request.clone();
                match inner.clone().oneshot(request).await {
                    Ok(response) => Ok::<_, BoxError>(response),
                    Err(_) => {
                        // In a task of its own, it is not inside of the layer.
                        let other = tokio::spawn(async move { outer.acquire(Key::ALL).await });
                        drop(other.await?);
                        sleep(Duration::from_millis(40)).await;
                        Ok(inner.oneshot(again).await?)
                    }
                }
            }
        })
    };
    let service = outer.layer(retry);
    let request = || Request::get("/").body(String::new()).unwrap();
    service.clone().oneshot(request()).await.unwrap();
    service.oneshot(request()).await.unwrap_err();
    // The other one is the permit by hand.
    assert_eq!(log.len(), 1);
    let status = outer.limiter().peek(Key::ALL).await.unwrap();
    assert_eq!(status.limits[0].used, 2);
}

/// The permits of both layers expire before the service inside is ready, and are acquired anew: what expired goes
/// back.
#[tokio::test(start_paused = true)]
async fn permits_that_expire_inside_go_back_to_both_layers() {
    let layer = |quota| {
        let builder = RateLimitLayer::builder(quota).max_wait(10 * SECOND);
        builder.build().unwrap()
    };
    let (outer, inner) = (layer(Quota::per_hour(10)), layer(Quota::per_hour(10)));
    let start = tokio::time::Instant::now();
    let log = Log::default();
    let mut service = outer.layer(inner.layer(Busy {
        inner: upstream(&log),
        from: start + Duration::from_millis(50),
        until: start + SECOND,
    }));
    let limiter = inner.limiter();
    limiter.hold_for(Key::ALL, SECOND / 10).await.unwrap();
    let request = Request::get("/").body(String::new()).unwrap();
    service.ready().await.unwrap().call(request).await.unwrap();
    assert!(start.elapsed() >= SECOND);
    for layer in [outer, inner] {
        let status = layer.limiter().peek(Key::ALL).await.unwrap();
        assert_eq!(status.limits[0].used, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn three_layers_use_one_unit_of_each_for_a_request() {
    let [outer, middle, inner] = [(); 3].map(|()| {
        RateLimitLayer::builder(Quota::per_minute(10))
            .max_wait(Duration::ZERO)
            .build()
            .unwrap()
    });
    let log = Log::default();
    let service = ServiceBuilder::new()
        .layer(outer.clone())
        .layer(middle.clone())
        .layer(inner.clone())
        .service(upstream(&log));
    let request = || {
        Request::get("http://h/channels/1/m")
            .body(String::new())
            .unwrap()
    };
    while service.clone().oneshot(request()).await.is_ok() {}
    let sent = log.len();
    assert_eq!(sent, 10);
    for layer in [outer, middle, inner] {
        let status = layer.limiter().peek(Key::ALL).await.unwrap();
        assert_eq!(status.limits[0].used, 10);
    }
}

/// The first request of a throttle is sent alone. The others wait for its response, and the permits
/// that they have from the layer around expire.
#[tokio::test(start_paused = true)]
async fn a_throttle_inside_waits_with_a_valid_permit() {
    let limit = RateLimitLayer::new(Quota::per_second(10)).unwrap();
    let log = Log::default();
    let slow = {
        let log = log.clone();
        service_fn(move |request: Request<String>| {
            log.add(request.uri().path());
            async {
                sleep(Duration::from_millis(900)).await;
                Ok::<_, BoxError>(Response::new("ok"))
            }
        })
    };
    let service = ServiceBuilder::new()
        .layer(limit)
        .layer(AdaptiveThrottleLayer::new())
        .service(slow);
    let calls = (0..40).map(|_| {
        let request = Request::get("http://h/").body(String::new()).unwrap();
        service.clone().oneshot(request)
    });
    let done = JoinSet::from_iter(calls).join_all().await;
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    let most = log.most(SECOND, None);
    assert!(most <= 10, "{most} in a second");
}

/// A throttle between two rate limit layers takes nothing of either.
#[tokio::test(start_paused = true)]
async fn a_throttle_between_two_layers_uses_one_unit_of_each() {
    let [outer, inner] = [(); 2].map(|()| RateLimitLayer::new(Quota::per_minute(10)).unwrap());
    let log = Log::default();
    let service = ServiceBuilder::new()
        .layer(outer.clone())
        .layer(AdaptiveThrottleLayer::new())
        .layer(inner.clone())
        .service(upstream(&log));
    for _ in 0..10 {
        let request = Request::get("http://h/").body(String::new()).unwrap();
        service.clone().oneshot(request).await.unwrap();
    }
    assert_eq!(log.len(), 10);
    for layer in [outer, inner] {
        let status = layer.limiter().peek(Key::ALL).await.unwrap();
        assert_eq!(status.limits[0].used, 10);
    }
}

/// A service that acquires permits by hand, inside of a layer.
#[tokio::test(start_paused = true)]
async fn a_permit_by_hand_inside_a_layer_waits_with_a_valid_permit() {
    let log = Log::default();
    let channels = per_channel().limiter();
    let service = {
        let log = log.clone();
        service_fn(move |request: Request<String>| {
            let (log, channels) = (log.clone(), channels.clone());
            async move {
                let path = request.uri().path();
                let channel = Key::new(channel(path).unwrap());
                let permit = channels.acquire(channel).await?;
                log.add(path);
                drop(permit);
                Ok::<_, BoxError>(Response::new("ok"))
            }
        })
    };
    let sent = send(all().layer(service)).await;
    assert_within_limits(&log, "by hand");
    assert!(sent >= 53, "by hand: {sent}");
}

#[cfg(feature = "reqwest-middleware")]
mod middleware {
    use http::Extensions;
    use reqwest_middleware::{ClientBuilder, Middleware, Next};

    use super::*;

    /// Logs a request and responds.
    struct Responds(Log);

    #[async_trait::async_trait]
    impl Middleware for Responds {
        async fn handle(
            &self,
            request: reqwest::Request,
            _extensions: &mut Extensions,
            _next: Next<'_>,
        ) -> reqwest_middleware::Result<reqwest::Response> {
            self.0.add(request.url().path());
            Ok(http::Response::new("ok").into())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn middlewares_around_each_other_keep_both_limits() {
        for (name, layers) in [
            ("channel outside", [per_channel(), all()]),
            ("all outside", [all(), per_channel()]),
        ] {
            let log = Log::default();
            let builder = ClientBuilder::new(reqwest::Client::new());
            let [outer, inner] = layers;
            let client = builder
                .with(outer)
                .with(inner)
                .with(Responds(log.clone()))
                .build();
            let mut tasks = JoinSet::new();
            for (at, channel) in plan() {
                let client = client.clone();
                tasks.spawn(async move {
                    sleep(at).await;
                    let url = format!("http://bot.example/channels/{channel}/messages");
                    client.get(url).send().await.is_ok()
                });
            }
            let done = tasks.join_all().await;
            assert_within_limits(&log, name);
            let sent = done.into_iter().filter(|is_sent| *is_sent).count();
            assert!(sent >= 50, "{name}: {sent}");
        }
    }
}

/// Sixty stacks of two to four layers, in random order and with random limits.
#[tokio::test(start_paused = true)]
async fn random_stacks_exceed_no_limit() {
    let mut seed = 7_u64;
    let mut random = |most: u64| {
        // A linear congruential generator (Knuth).
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % most
    };
    for round in 0..60 {
        let log = Log::default();
        let mut service = BoxCloneService::new(upstream(&log));
        let mut limits = Vec::new();
        for _ in 0..2 + random(3) {
            let count = 1 + u32::try_from(random(8)).unwrap();
            let window = Duration::from_millis(200 + random(3000));
            let has_channels = random(2) == 0;
            let mut builder = RateLimitLayer::builder(Quota::new(count, window));
            if has_channels {
                builder = builder.key(|request| channel(request.path()).map(Key::new));
            }
            let layer = builder
                .max_wait(Duration::from_millis(random(9000)))
                .build()
                .unwrap();
            limits.push((count as usize, window, has_channels));
            service = BoxCloneService::new(layer.layer(service).map_err(BoxError::from));
        }
        let mut tasks = JoinSet::new();
        for _ in 0..40 {
            let (at, channel) = (Duration::from_millis(random(8000)), random(3));
            let service = service.clone();
            tasks.spawn(async move {
                sleep(at).await;
                let uri = format!("http://bot.example/channels/{channel}/messages");
                let request = Request::get(uri).body(String::new()).unwrap();
                let _ = service.oneshot(request).await;
            });
        }
        tasks.join_all().await;
        assert!(log.len() > 0, "round {round}");
        for (count, window, has_channels) in limits {
            let keys: &[Option<&str>] = if has_channels {
                &[Some("0"), Some("1"), Some("2")]
            } else {
                &[None]
            };
            for key in keys {
                let most = log.most(window, *key);
                assert!(
                    most <= count,
                    "round {round}: {most} of {count} in {window:?}"
                );
            }
        }
    }
}

/// The outer permit is that of the probe after a cut hold. A layer inside has no permit at hand: the request waits for
/// that one only, not for itself.
#[tokio::test(start_paused = true)]
async fn a_probe_does_not_wait_for_itself_inside() {
    let log = Log::default();
    let outer = RateLimitLayer::builder(Quota::per_second(10))
        .key(|_| Key::new("all"))
        .max_hold(SECOND)
        .max_wait(MINUTE)
        .build()
        .unwrap();
    let inner = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(MINUTE)
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .layer(outer.clone())
        .layer(inner.clone())
        .service(upstream(&log));
    let send = || {
        let request = Request::get("http://bot.example/").body(String::new());
        service.clone().oneshot(request.unwrap())
    };
    send().await.unwrap();
    let refused = Response::builder()
        .status(429)
        .header("retry-after", "3600");
    let signal = Signal::read(&refused.body("").unwrap());
    let permit = outer.limiter().acquire(Key::new("all")).await.unwrap();
    permit.begin().unwrap().answered(&signal);
    sleep(2 * SECOND).await;
    drop(inner.limiter().acquire(Key::ALL).await.unwrap());
    let start = tokio::time::Instant::now();
    send().await.unwrap();
    assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
}
