//! Histories that an adversary has found: hostile servers, rollouts, handlers. Under a paused clock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use tokio::time::{Instant, sleep};
use tollgate::stats::Event;
use tollgate::store::{MemoryStore, Store};
use tollgate::{
    Guard, HeaderTrust, Key, Limiter, Quota, RateLimitBuilder, RateLimitLayer, RequestRef, Signal,
    by_host,
};
use tower::{Layer, ServiceExt};

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

fn secs(span: u64) -> Duration {
    Duration::from_secs(span)
}

/// A response with `headers`.
fn response(status: u16, headers: &[(&'static str, &'static str)]) -> http::Response<()> {
    let mut response = http::Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    response.body(()).unwrap()
}

/// Takes a permit of `key`, whose request is answered with `headers`.
async fn answered(limiter: &Limiter, key: Key, headers: &[(&'static str, &'static str)]) {
    let sent = limiter.acquire(key).await.unwrap().begin().unwrap();
    sent.answered(&Signal::read(&response(200, headers)));
}

/// A release without shares runs beside one with a share. Some requests of the latter have two keys.
#[tokio::test(start_paused = true)]
async fn shares_are_rolled_out_beside_several_limits() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let builder = |quota| RateLimitLayer::builder(quota).store(store.clone());
    let key = Key::new("api");
    let old = builder(Quota::per_second(50)).build().unwrap().limiter();
    for _ in 0..30 {
        let old = old.clone();
        tokio::spawn(async move {
            loop {
                let _ = old.acquire(key).await;
            }
        });
    }
    sleep(millis(500)).await;
    let new = builder(Quota::per_second(50)).share("web", 50);
    let new = new.build().unwrap().limiter();
    let channels = builder(Quota::per_second(10)).build().unwrap().limiter();
    let mut requests = Vec::new();
    for request in 0..200 {
        let mut acquire = new.acquire(key);
        if request % 4 >= 2 {
            acquire = acquire.class("web");
        }
        if request % 2 == 1 {
            acquire = acquire.and(channels.acquire(Key::new("7")));
        }
        requests.push(tokio::spawn(acquire));
        sleep(millis(20)).await;
    }
    let mut sent = 0;
    for request in requests {
        sent += u32::from(request.await.unwrap().is_ok());
    }
    assert!(sent >= 190, "{sent} of 200 sent");
}

/// Sends 2 requests a second to other hosts for four minutes, and one each ten seconds to a host that
/// answers with `status` and `headers`. Returns how many of the former were refused.
async fn refused_beside(
    builder: RateLimitBuilder,
    status: u16,
    headers: &'static [(&'static str, &'static str)],
) -> u32 {
    refused_beside_of(&builder.build().unwrap(), status, headers, 0).await
}

/// The same for a layer. The first request to the host that answers so is the one number `first`.
async fn refused_beside_of(
    layer: &RateLimitLayer,
    status: u16,
    headers: &'static [(&'static str, &'static str)],
    first: u32,
) -> u32 {
    let service = layer.layer(tower::service_fn(
        move |request: http::Request<()>| async move {
            let is_odd = request.uri().host() == Some("odd.example");
            Ok::<_, tower::BoxError>(match is_odd {
                true => response(status, headers),
                false => response(200, &[]),
            })
        },
    ));
    let get = |host: String| {
        http::Request::get(format!("http://{host}/"))
            .body(())
            .unwrap()
    };
    let start = Instant::now();
    let mut refused = 0;
    for request in 0..480 {
        if request % 20 == first {
            let _ = service.clone().oneshot(get("odd.example".to_owned())).await;
        }
        let host = format!("c{}.example", request % 50);
        refused += u32::from(service.clone().oneshot(get(host)).await.is_err());
        tokio::time::sleep_until(start + millis(500) * (request + 1)).await;
    }
    refused
}

/// One host's responses stop the requests to that host only, if a limit of the layer is keyed by host.
#[tokio::test(start_paused = true)]
async fn response_of_a_host_reaches_limits_of_that_host_only() {
    const WAIT: (&str, &str) = ("retry-after", "3600");
    let answers: [(u16, &[_]); 6] = [
        (429, &[WAIT]),
        (429, &[WAIT, ("x-ratelimit-scope", "global")]),
        (
            429,
            &[
                WAIT,
                ("ratelimit-policy", "\"x\";q=6000;w=60"),
                ("ratelimit", "\"x\";r=0;t=3600"),
            ],
        ),
        (
            200,
            &[
                ("x-ratelimit-limit", "6000"),
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-reset", "3600"),
            ],
        ),
        (
            200,
            &[
                ("x-ratelimit-limit", "77777"),
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-reset", "3600"),
            ],
        ),
        (
            200,
            &[
                ("x-ratelimit-limit", "6000"),
                ("x-ratelimit-remaining", "50"),
                ("x-ratelimit-reset", "3600"),
            ],
        ),
    ];
    for (status, headers) in answers {
        for trust in [HeaderTrust::Usage, HeaderTrust::Ignore] {
            let layer = RateLimitLayer::builder(Quota::per_minute(6000))
                .name("global")
                .key(|_| Key::new("all webhooks"))
                .max_wait(millis(500))
                .trust_headers(trust)
                .and_per("host", Quota::per_minute(600), by_host);
            let refused = refused_beside(layer, status, headers).await;
            assert_eq!(refused, 0, "{status} {headers:?} {trust:?}");
        }
    }
}

/// The order of the limits does not matter, nor whether the first one has a key function.
#[tokio::test(start_paused = true)]
async fn order_of_limits_does_not_matter_to_hosts() {
    let headers = &[("retry-after", "3600"), ("x-ratelimit-scope", "global")];
    let by_host_first = RateLimitLayer::builder(Quota::per_minute(600))
        .key(by_host)
        .max_wait(millis(500))
        .and_per("global", Quota::per_minute(6000), |_| Key::new("all"));
    assert_eq!(refused_beside(by_host_first, 429, headers).await, 0);
    let without_key = RateLimitLayer::builder(Quota::per_minute(6000))
        .name("global")
        .max_wait(millis(500))
        .and_per("host", Quota::per_minute(600), by_host);
    assert_eq!(refused_beside(without_key, 429, headers).await, 0);
}

/// Both limits have key functions of the caller, and no name tells that one is keyed by host. All webhooks
/// share the first key, and each customer has the other one.
#[tokio::test(start_paused = true)]
async fn response_of_one_of_several_hosts_reaches_its_own_keys_only() {
    const SCOPE: (&str, &str) = ("x-ratelimit-scope", "global");
    const USED_UP: &[(&str, &str)] = &[
        ("x-ratelimit-limit", "6000"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "3600"),
    ];
    let answers: [(u16, &[_]); 3] = [
        (429, &[("retry-after", "3600"), SCOPE]),
        (200, USED_UP),
        (200, &[("ratelimit-policy", "\"x\";q=1;w=60")]),
    ];
    for (status, headers) in answers {
        for is_customer_first in [false, true] {
            let customer = |request: &RequestRef<'_>| {
                let host = request.host()?;
                Some(Key::new(format!("customer with {host}")))
            };
            let builder = |quota| {
                RateLimitLayer::builder(quota)
                    .max_wait(millis(500))
                    .trust_headers(HeaderTrust::Stricter)
            };
            let layer = if is_customer_first {
                let all = |_: &RequestRef<'_>| Key::new("all webhooks");
                builder(Quota::per_minute(600)).key(customer).and_per(
                    "global",
                    Quota::per_minute(6000),
                    all,
                )
            } else {
                builder(Quota::per_minute(6000))
                    .name("global")
                    .key(|_| Key::new("all webhooks"))
                    .and_per("customer", Quota::per_minute(600), customer)
            };
            let layer = layer.build().unwrap();
            // A request to another host was seen before.
            let refused = refused_beside_of(&layer, status, headers, 1).await;
            assert_eq!(refused, 0, "{status} {headers:?} {is_customer_first}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn guard_beside_and_per_counts_the_narrowest_key() {
    let layer = RateLimitLayer::builder(Quota::per_minute(6000))
        .name("global")
        .key(|_| Key::new("all webhooks"))
        .max_wait(millis(500))
        .guard(Guard::new(Quota::per_minute(5)))
        .and_per("host", Quota::per_minute(600), by_host);
    assert_eq!(refused_beside(layer, 403, &[]).await, 0);
}

/// A bot has one server: `global` holds the limit of the account.
#[tokio::test(start_paused = true)]
async fn scope_of_the_only_host_holds_the_limit_that_it_names() {
    let layer = RateLimitLayer::builder(Quota::per_second(50))
        .name("global")
        .key(|_| Key::new("account"))
        .max_wait(Duration::ZERO)
        .and_per("channel", Quota::per_second(5), |request| {
            Key::new(request.path())
        })
        .build()
        .unwrap();
    let service = layer.layer(tower::service_fn(|request: http::Request<()>| async move {
        let is_refused = request.uri().path() == "/1";
        let headers = &[("retry-after", "30"), ("x-ratelimit-scope", "global")];
        Ok::<_, tower::BoxError>(match is_refused {
            true => response(429, headers),
            false => response(200, &[]),
        })
    }));
    let get = |path: &str| {
        let uri = format!("http://discord.example{path}");
        service
            .clone()
            .oneshot(http::Request::get(uri).body(()).unwrap())
    };
    get("/2").await.unwrap();
    let _ = get("/1").await;
    let refused = get("/2").await.expect_err("the account is on hold");
    assert!(refused.to_string().contains("hold"), "{refused}");
}

/// `Ignore`: "Nothing but refusals takes effect."
#[tokio::test(start_paused = true)]
async fn ignored_headers_of_a_200_hold_no_key() {
    let used_up = &[
        ("x-ratelimit-limit", "100"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "3600"),
    ];
    for (trust, is_held) in [(HeaderTrust::Ignore, false), (HeaderTrust::Usage, true)] {
        let limiter = RateLimitLayer::builder(Quota::per_minute(6000))
            .trust_headers(trust)
            .max_wait(Duration::ZERO)
            .build()
            .unwrap()
            .limiter();
        answered(&limiter, Key::ALL, used_up).await;
        let held = limiter.peek(Key::ALL).await.unwrap().held;
        assert_eq!(held.is_some(), is_held, "{trust:?}");
    }
}

fn learning(store: &Arc<dyn Store>, trust: HeaderTrust) -> Limiter {
    RateLimitLayer::builder(Quota::per_minute(60))
        .trust_headers(trust)
        .max_wait(Duration::ZERO)
        .store(store.clone())
        .build()
        .unwrap()
        .limiter()
}

/// Returns how long after now the limiter allows three requests within a minute, within `most`.
async fn free_after(limiter: &Limiter, most: Duration) -> Option<Duration> {
    let start = Instant::now();
    let mut passed = Vec::new();
    while start.elapsed() < most {
        if limiter.acquire(Key::ALL).await.is_ok() {
            passed.push(start.elapsed());
            if let [.., first, _, last] = passed[..]
                && last - first < secs(60)
            {
                return Some(first);
            }
        }
        sleep(secs(10)).await;
    }
    None
}

/// A stated limit ends two hours after the last response that has stated it, whatever its window.
#[tokio::test(start_paused = true)]
async fn learned_limits_end_within_two_hours() {
    for policy in [
        "\"a\";q=1;w=60",
        "\"a\";q=1;w=600",
        "\"a\";q=1;w=3600",
        "\"a\";q=1;w=86400",
        "\"a\";q=1;w=31622400",
    ] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let limiter = learning(&store, HeaderTrust::Stricter);
        answered(&limiter, Key::ALL, &[("ratelimit-policy", policy)]).await;
        let free = free_after(&limiter, secs(20_000)).await;
        assert!(
            free.is_some_and(|after| after <= secs(7300)),
            "{policy}: {free:?}"
        );
    }
}

/// A response that states nothing does not renew a limit that has expired.
#[tokio::test(start_paused = true)]
async fn expired_limits_are_not_learned_again() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let limiter = learning(&store, HeaderTrust::Stricter);
    // While a key may be on probation, all responses are read.
    let other = limiter.acquire(Key::new("other")).await.unwrap();
    other
        .begin()
        .unwrap()
        .answered(&Signal::read(&response(429, &[("retry-after", "0")])));
    answered(&limiter, Key::ALL, &[("ratelimit-policy", "\"a\";q=1;w=1")]).await;
    assert!(limiter.acquire(Key::ALL).await.is_err());
    sleep(secs(3700)).await;
    for _ in 0..3 {
        answered(&limiter, Key::ALL, &[]).await;
    }
}

/// A response states what is left, of a limit that it does not name. When the learned limit has expired, that is not
/// about the configured one.
#[tokio::test(start_paused = true)]
async fn what_was_left_of_an_expired_limit_is_forgotten() {
    let limiter = RateLimitLayer::builder(Quota::bucket(30).refill(1, secs(1)))
        .trust_headers(HeaderTrust::Replace)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap()
        .limiter();
    answered(&limiter, Key::ALL, &[("x-app-rate-limit", "3:1")]).await;
    answered(&limiter, Key::ALL, &[("x-ratelimit-remaining", "0")]).await;
    sleep(secs(3700)).await;
    for request in 0..25 {
        let permit = limiter.acquire(Key::ALL).await;
        assert!(permit.is_ok(), "{request}: {permit:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn release_ends_learned_limits() {
    for trust in [HeaderTrust::Stricter, HeaderTrust::Replace] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let limiter = learning(&store, trust);
        answered(
            &limiter,
            Key::ALL,
            &[("ratelimit-policy", "\"a\";q=1;w=60")],
        )
        .await;
        assert!(limiter.acquire(Key::ALL).await.is_err(), "{trust:?}");
        limiter.release(Key::ALL).await.unwrap();
        let free = free_after(&limiter, secs(60)).await;
        assert_eq!(free, Some(Duration::ZERO), "{trust:?}");
    }
}

/// What a process has learned from headers does not limit one that ignores them. It has its refusals in common
/// with the others.
#[tokio::test(start_paused = true)]
async fn learned_limits_do_not_reach_a_process_that_ignores_headers() {
    for trust in [HeaderTrust::Stricter, HeaderTrust::Replace] {
        for is_there_before in [true, false] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
            let learns = learning(&store, trust);
            let make = || learning(&store, HeaderTrust::Ignore);
            let before = is_there_before.then(make);
            if let Some(before) = &before {
                drop(before.acquire(Key::ALL).await.unwrap());
            }
            let states = &[("ratelimit-policy", "\"a\";q=2;w=60")];
            answered(&learns, Key::ALL, states).await;
            let ignores = before.unwrap_or_else(make);
            for request in 0..10 {
                let permit = ignores.acquire(Key::ALL).await;
                assert!(
                    permit.is_ok(),
                    "{trust:?} {is_there_before} {request}: {permit:?}"
                );
                sleep(millis(100)).await;
            }
            let permit = learns.acquire(Key::ALL).await.unwrap();
            permit
                .begin()
                .unwrap()
                .answered(&Signal::read(&response(429, &[("retry-after", "30")])));
            assert!(ignores.acquire(Key::ALL).await.is_err(), "{trust:?}");
            sleep(secs(31)).await;
            assert!(ignores.acquire(Key::ALL).await.is_ok(), "{trust:?}");
        }
    }
}

/// The request that ends a learned limit needs no time for it if the store is in its process.
#[tokio::test(start_paused = true)]
async fn requests_that_end_learned_limits_leave_at_their_deadline() {
    for trust in [HeaderTrust::Stricter, HeaderTrust::Replace] {
        for is_of_two_keys in [false, true] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
            let states = &[("ratelimit-policy", "\"a\";q=2;w=60")];
            answered(&learning(&store, trust), Key::ALL, states).await;
            let builder = RateLimitLayer::builder(Quota::per_minute(60)).store(store);
            let ignores = builder.trust_headers(HeaderTrust::Ignore).build();
            let ignores = ignores.unwrap().limiter();
            for request in 0..3 {
                let deadline = Instant::now().into_std();
                let acquire = ignores.acquire(Key::ALL).deadline(deadline);
                let permit = match is_of_two_keys {
                    true => acquire.and(ignores.acquire(Key::new("b"))).await,
                    false => acquire.await,
                };
                assert!(
                    permit.is_ok(),
                    "{trust:?}, {is_of_two_keys}, {request}: {permit:?}"
                );
            }
        }
    }
}

/// The end of a learned limit forgets nothing that was sent under the configured one.
#[tokio::test(start_paused = true)]
async fn what_was_sent_counts_when_a_learned_limit_ends() {
    const QUOTA: Quota = Quota::per_minute(60);
    for way in ["ignores", "release", "unset", "hold"] {
        for trust in [HeaderTrust::Stricter, HeaderTrust::Replace] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
            let make = |trust| {
                let builder = RateLimitLayer::builder(QUOTA).store(store.clone());
                let builder = builder.max_wait(Duration::ZERO).trust_headers(trust);
                builder.build().unwrap().limiter()
            };
            let learns = make(trust);
            answered(
                &learns,
                Key::ALL,
                &[("ratelimit-policy", "\"a\";q=60;w=60")],
            )
            .await;
            answered(
                &learns,
                Key::ALL,
                &[("ratelimit-policy", "\"a\";q=55;w=60")],
            )
            .await;
            sleep(millis(100)).await;
            let mut sent = 2;
            while sent < 46 && learns.acquire(Key::ALL).await.is_ok() {
                sent += 1;
            }
            let other = make(HeaderTrust::Ignore);
            match way {
                "ignores" => sent += u32::from(other.acquire(Key::ALL).await.is_ok()),
                "release" => learns.release(Key::ALL).await.unwrap(),
                "unset" => learns.unset_quota(Key::ALL).await.unwrap(),
                _ => {
                    learns.release(Key::ALL).await.unwrap();
                    learns.hold_for(Key::ALL, millis(50)).await.unwrap();
                    sleep(millis(200)).await;
                }
            }
            while other.acquire(Key::ALL).await.is_ok() {
                sent += 1;
            }
            assert!((46..=60).contains(&sent), "{way} {trust:?}: {sent} of 60");
        }
    }
}

/// Without a key function, nothing is learned from several hosts, also beside other limits.
#[tokio::test(start_paused = true)]
async fn several_hosts_teach_the_key_of_all_requests_nothing() {
    for trust in [HeaderTrust::Usage, HeaderTrust::Stricter] {
        let by_path = |request: &RequestRef<'_>| Some(Key::new(request.path()));
        let limit = RateLimitLayer::builder(Quota::per_second(50))
            .and_per("path", Quota::per_second(50), by_path)
            .trust_headers(trust)
            .max_wait(millis(1500))
            .build()
            .unwrap();
        let service = limit.layer(tower::service_fn(|request: http::Request<()>| async move {
            let is_evil = request.uri().host() == Some("evil.test");
            let states = [
                ("ratelimit-policy", "\"a\";q=1;w=3600"),
                ("ratelimit", "\"a\";r=0;t=3000"),
            ];
            let states = if is_evil { &states[..] } else { &[] };
            Ok::<_, std::convert::Infallible>(response(200, states))
        }));
        let send = |host: &str, path: u32| {
            let request = http::Request::get(format!("http://{host}/{path}"));
            service.clone().oneshot(request.body(()).unwrap())
        };
        send("good.test", 0).await.unwrap();
        for path in 1..5 {
            send("evil.test", path).await.unwrap();
        }
        sleep(millis(1500)).await;
        for path in 10..20 {
            let sent = send("good.test", path).await;
            assert!(sent.is_ok(), "{trust:?}: {sent:?}");
        }
    }
}

/// The process that releases a key has never used it: what the key suffers stands in the store.
#[tokio::test(start_paused = true)]
async fn release_ends_what_another_process_has_caused() {
    let effects: [(u16, &[_]); 5] = [
        (429, &[("retry-after", "3600")]),
        (429, &[]),
        (200, &[("ratelimit-policy", "\"a\";q=1;w=60")]),
        (
            200,
            &[
                ("x-ratelimit-limit", "60"),
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-reset", "3600"),
            ],
        ),
        (403, &[]),
    ];
    for (status, headers) in effects {
        for is_released_by_another in [false, true] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
            let make = || {
                let layer = RateLimitLayer::builder(Quota::per_minute(60))
                    .trust_headers(HeaderTrust::Stricter)
                    .guard(Guard::new(Quota::per_minute(1)))
                    .max_wait(Duration::ZERO)
                    .store(store.clone());
                layer.build().unwrap()
            };
            let (layer, other) = (make(), make().limiter());
            let service = layer.layer(tower::service_fn(
                move |request: http::Request<()>| async move {
                    let is_bad = request.uri().path() == "/bad";
                    Ok::<_, tower::BoxError>(match is_bad {
                        true => response(status, headers),
                        false => response(200, &[]),
                    })
                },
            ));
            let get = |path: &str| {
                let uri = format!("http://a.example{path}");
                let request = http::Request::get(uri).body(()).unwrap();
                service.clone().oneshot(request)
            };
            let key = Key::ALL;
            let host = Key::host_hold("a.example");
            for _ in 0..3 {
                let _ = get("/bad").await;
                sleep(millis(10)).await;
            }
            get("/").await.expect_err("the key is stopped");
            let releases = if is_released_by_another {
                other
            } else {
                layer.limiter()
            };
            releases.release(key).await.unwrap();
            releases.release(host).await.unwrap();
            let mut sent = tokio::task::JoinSet::new();
            for _ in 0..5 {
                sent.spawn(get("/"));
            }
            for answer in sent.join_all().await {
                assert!(
                    answer.is_ok(),
                    "{status} {headers:?} {is_released_by_another}: {answer:?}"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn computed_quotas_never_run_out() {
    let limiter = RateLimitLayer::builder(Quota::per_minute(60))
        .build()
        .unwrap()
        .limiter();
    for number in 0..12_000_u32 {
        let key = Key::new(format!("tenant {}", number % 10));
        let quota = Quota::per_hour(100_000 + number);
        let permit = limiter.acquire(key).quota(quota).await;
        assert!(permit.is_ok(), "{number}: {permit:?}");
    }
}

/// More seconds than a number can hold are a long wait, not none.
#[test]
fn huge_retry_after_is_long() {
    for text in [
        "9".repeat(9),
        "9".repeat(20),
        "9".repeat(30),
        "9".repeat(60),
    ] {
        let response = http::Response::builder()
            .status(429)
            .header("retry-after", &text);
        let signal = Signal::read(&response.body(()).unwrap());
        let wait = signal.retry_after();
        assert!(wait >= Some(secs(86_400)), "{text}: {wait:?}");
    }
}

/// A name of a host in errors has no spaces, quotes or control characters, and is short.
#[tokio::test(start_paused = true)]
async fn hosts_in_errors_are_escaped_and_cut() {
    let layer = RateLimitLayer::builder(Quota::per_minute(1))
        .key(by_host)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let service = layer.layer(tower::service_fn(|_: http::Request<()>| async {
        Ok::<_, tower::BoxError>(response(200, &[]))
    }));
    let long = "x".repeat(8000);
    for host in ["a b \"c\" level=ERROR msg=fake", &long] {
        let get = || {
            let request = http::Request::get("/").header("host", host);
            service.clone().oneshot(request.body(()).unwrap())
        };
        let Ok(_) = get().await else { continue };
        let error = get().await.expect_err("one a minute").to_string();
        assert!(!error.contains("level=ERROR"), "{error}");
        assert!(!error.contains('"'), "{error}");
        assert!(error.len() < 500, "{} bytes", error.len());
    }
}

/// A key that is a host has one name in all events and errors, so that they can be matched. Another key has a digest.
#[tokio::test(start_paused = true)]
async fn host_has_one_name_in_events_and_errors() {
    let one = || RateLimitLayer::builder(Quota::per_minute(60)).max_wait(Duration::ZERO);
    let host = Key::host("a.example");
    let layers = [
        (one().key(by_host), host, true),
        (
            one()
                .key(|_| Key::new("secret"))
                .and_per("host", Quota::per_minute(60), by_host),
            host.and("host"),
            true,
        ),
        (one().key(|_| Key::new("secret")), Key::new("secret"), false),
    ];
    for (builder, key, is_host) in layers {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let names = seen.clone();
        let layer = builder.on_event(move |event| {
            let name = match event {
                Event::Held { key, .. } => format!("held {key}"),
                Event::UpstreamLimited { key, .. } => format!("upstream {key}"),
                Event::Refused { limited, .. } => format!("refused {}", limited.report().key()),
                Event::Released { key, .. } => format!("released {key}"),
                _ => return,
            };
            names.lock().unwrap().push(name);
        });
        let layer = layer.build().unwrap();
        let service = layer.layer(tower::service_fn(|_: http::Request<()>| async {
            Ok::<_, tower::BoxError>(response(429, &[("retry-after", "30")]))
        }));
        let get = || {
            let request = http::Request::get("http://a.example/").body(()).unwrap();
            service.clone().oneshot(request)
        };
        get().await.unwrap();
        get().await.expect_err("on hold");
        let limiter = layer.limiter_of("host").unwrap_or(layer.limiter());
        limiter.release(key).await.unwrap();
        let mut seen = seen.lock().unwrap().clone();
        seen.sort();
        let digest = key.to_string();
        let name = if is_host { "a.example" } else { &digest };
        let named =
            ["held", "refused", "released", "upstream"].map(|event| format!("{event} {name}"));
        assert_eq!(seen, named);
    }
}

/// A handler that puts a key on hold for each event that it gets.
#[tokio::test(start_paused = true)]
async fn event_handler_that_holds_does_not_call_itself() {
    let slot: Arc<Mutex<Option<Limiter>>> = Arc::default();
    let calls = Arc::new(Mutex::new(0_u32));
    let (handler, count) = (slot.clone(), calls.clone());
    let limiter = RateLimitLayer::builder(Quota::per_minute(60))
        .on_event(move |_| {
            *count.lock().unwrap() += 1;
            let limiter = handler.lock().unwrap().clone();
            if let Some(limiter) = limiter {
                let number = *count.lock().unwrap();
                let held = limiter.hold_for(Key::new(number.to_be_bytes()), secs(10));
                let _ = held.now_or_never();
            }
        })
        .build()
        .unwrap()
        .limiter();
    *slot.lock().unwrap() = Some(limiter.clone());
    limiter.hold_for(Key::new("a"), secs(10)).await.unwrap();
    let calls = *calls.lock().unwrap();
    assert!((1..=2).contains(&calls), "{calls}");
    *slot.lock().unwrap() = None;
}

/// A layer marks its thread while it calls its inner service, and a panic of that leaves the mark.
#[tokio::test(start_paused = true)]
async fn mark_of_a_panic_ends_with_the_next_request() {
    let layer = RateLimitLayer::new(Quota::per_second(1000)).unwrap();
    let _other = RateLimitLayer::new(Quota::per_second(1000)).unwrap();
    let service = layer.layer(tower::service_fn(|request: http::Request<bool>| {
        assert!(!*request.body(), "the inner service panics");
        async { Ok::<_, tower::BoxError>(response(200, &[])) }
    }));
    let call = |panics| {
        let request = http::Request::get("http://a/").body(panics).unwrap();
        std::panic::AssertUnwindSafe(service.clone().oneshot(request))
    };
    call(false).await.unwrap();
    assert!(call(false).now_or_never().is_some());
    call(true).catch_unwind().await.expect_err("it panics");
    call(false).await.unwrap();
    assert!(call(false).now_or_never().is_some(), "the mark is gone");
}
