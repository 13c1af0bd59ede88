//! Refusals by the limiter, the upstream and the store, and what a caller can rely on.

use crate::support;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::FutureExt;
use http::StatusCode;
use tollgate::{
    Cost, Deadline, Error, Key, Limited, Quota, RateLimitLayer, Reason, RequestRef, by_header,
    by_host,
};
use tower::{Layer, Service, ServiceExt};

use support::{
    Distant, Failing, SECOND, Upstream, far_future, get, limited, ms, now, ok, pass, peek, settle,
    soon, used, waiting, who_said_no,
};

/// The error of `request` under `limit`, which is refused.
async fn refusal(limit: &RateLimitLayer, request: http::Request<String>) -> Limited {
    let result = soon(limit.layer(Upstream::new()).oneshot(request)).await;
    match result {
        Err(Error::Limited(limited)) => limited,
        other => panic!("it was to be refused: {other:?}"),
    }
}

fn local(limited: &Limited) -> Reason {
    match limited {
        Limited::Local { reason, .. } => reason.clone(),
        other => panic!("this process should refuse it: {other}"),
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_wait_is_exact_to_the_millisecond() {
    for quota in [
        Quota::per_second(1),
        Quota::per_minute(3),
        Quota::per_second(100).burst(10),
        Quota::every(ms(3000)),
        Quota::bucket(4).refill(1, ms(700)),
        Quota::fixed(2, ms(10_000)),
        Quota::per_second(2).and(Quota::new(3, ms(7000))),
    ] {
        for cost in [1, 2]
            .into_iter()
            .filter(|&cost| cost <= quota.largest_cost())
        {
            let limit = RateLimitLayer::builder(quota)
                .max_wait(ms(0))
                .build()
                .unwrap();
            let service = limit.layer(Upstream::new());
            let call = || {
                let mut request = get("/");
                request.extensions_mut().insert(Cost::new(cost));
                service.clone().oneshot(request)
            };
            for round in 0..20 {
                let Err(error) = call().await else { continue };
                let Error::Limited(limited) = error else {
                    panic!("{error}")
                };
                assert!(matches!(local(&limited), Reason::MaxWait(_)));
                let wait = limited.retry_after().unwrap();
                let due = tokio::time::Instant::now() + wait;
                tokio::time::advance(wait.saturating_sub(ms(1))).await;
                // If a margin is left, the request waits for that.
                if call().await.is_ok() {
                    assert!(
                        tokio::time::Instant::now() >= due,
                        "{quota}, cost {cost}, round {round}"
                    );
                    continue;
                }
                tokio::time::advance(wait.min(ms(1))).await;
                assert!(
                    call().await.is_ok(),
                    "{quota}, cost {cost}, round {round}: after {wait:?}"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn retry_at_is_the_same_whenever_requests_are_refused() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(0))
        .build()
        .unwrap();
    limit
        .layer(Upstream::new())
        .oneshot(get("/"))
        .await
        .unwrap();
    let mut moments = Vec::new();
    for _ in 0..4 {
        moments.push(refusal(&limit, get("/")).await.report().retry_at().unwrap());
        pass(ms(250)).await;
    }
    let first = moments[0];
    for moment in moments {
        let apart = moment
            .duration_since(first)
            .or(first.duration_since(moment))
            .unwrap();
        assert!(apart <= Duration::from_micros(2), "{apart:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_names_its_limit_key_and_wait() {
    let (second, minute) = (Quota::per_second(2), Quota::per_minute(3));
    let limit = RateLimitLayer::builder(second.and(minute))
        .key(by_host)
        .max_wait(ms(0))
        .build()
        .unwrap();
    let service = limit.layer(Upstream::new());
    for (expected, wait) in [(second, 1020), (minute, 60_000 - 1020)] {
        while service
            .clone()
            .oneshot(get("http://api.example.com/"))
            .await
            .is_ok()
        {}
        let refused = refusal(&limit, get("http://api.example.com/")).await;
        assert_eq!(refused.report().key(), "api.example.com");
        assert_eq!(refused.report().limit(), Some(expected.limits()[0]));
        let told = refused.retry_after().unwrap();
        assert!(
            told >= ms(wait) && told <= ms(wait + 40),
            "{expected}: {told:?}"
        );
        assert_eq!(
            (refused.report().waited(), refused.report().turns()),
            (ms(0), 0)
        );
        pass(told).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_at_once_allocates_only_its_report() {
    let builder = || RateLimitLayer::builder(Quota::per_day(1)).max_wait(ms(0));
    let by_host = builder().key(by_host);
    let by_token = builder().key(|_: &RequestRef<'_>| Some(Key::new("token")));
    for builder in [builder(), by_host, by_token] {
        let mut service = builder.build().unwrap().layer(Upstream::new());
        let request = || get("http://inference.eu-west-1.api.example.com/");
        service.call(request()).await.unwrap();
        service.call(request()).await.unwrap_err();
        let request = request();
        let spent = allocation_counter::measure(|| {
            drop(service.call(request).now_or_never().unwrap().unwrap_err());
        });
        assert_eq!(spent.count_total, 1, "{spent:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn full_queue_refuses_requests_until_a_waiter_leaves() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_queue(2)
        .build()
        .unwrap();
    let service = limit.layer(Upstream::new());
    let call = || tokio::spawn(service.clone().oneshot(get("/")));
    let calls = [call(), call(), call()];
    settle().await;
    assert_eq!(waiting(&limit).await, 2);
    assert_eq!(
        local(&refusal(&limit, get("/")).await),
        Reason::QueueFull(2)
    );
    let [first, second, third] = calls;
    second.abort();
    let fourth = call();
    for call in [first, third, fourth] {
        soon(call).await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn slot_beyond_max_wait_is_refused_without_cost() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(2500))
        .build()
        .unwrap();
    let service = limit.layer(Upstream::new());
    let calls: Vec<_> = (0..3)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    settle().await;
    for _ in 0..50 {
        let refused = refusal(&limit, get("/")).await;
        assert_eq!(local(&refused), Reason::MaxWait(ms(2500)));
        assert_eq!(
            refused.retry_after(),
            Some(ms(3 * SECOND)),
            "fifty refusals later it is the same"
        );
    }
    assert_eq!(used(&limit).await, 3);
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn max_keys_bounds_the_keys_limited_at_once() {
    let limit = RateLimitLayer::builder(Quota::per_minute(1))
        .key(by_host)
        .max_keys(2)
        .build()
        .unwrap();
    let service = limit.layer(Upstream::new());
    for uri in ["http://a/", "http://b/"] {
        service.clone().oneshot(get(uri)).await.unwrap();
    }
    let refused = refusal(&limit, get("http://c/")).await;
    assert!(refused.to_string().contains("max_keys"), "{refused}");
    pass(ms(61_000)).await;
    service.oneshot(get("http://c/")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn upstream_429_is_a_response_and_costs_a_permit() {
    let upstream = Upstream::answering([limited("1"), limited("1")]);
    let limit = RateLimitLayer::new(Quota::per_second(1)).unwrap();
    let service = limit.layer(upstream.clone());
    for status in [429, 429, 200] {
        let response = soon(service.clone().oneshot(get("/"))).await.unwrap();
        assert_eq!(response.status(), status);
    }
    assert_eq!(
        upstream.arrivals(),
        [0, SECOND, 2 * SECOND],
        "a fast no is no faster than a yes"
    );
}

#[tokio::test(start_paused = true)]
async fn upstream_429_as_opt_in_error_carries_retry_after() {
    let upstream = Upstream::answering([limited("7"), limited("8"), limited("soon"), ok()]);
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .key(by_host)
        .error_on_upstream_limit();
    let service = limit
        .max_hold(ms(0))
        .build()
        .unwrap()
        .layer(upstream.clone());
    for (retry_after, waited) in [(Some(7), 0), (Some(8), SECOND), (None, SECOND)] {
        let error = soon(service.clone().oneshot(get("http://api.example.com/x")))
            .await
            .unwrap_err();
        let Error::Limited(Limited::Upstream { status, report, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(report.key(), "api.example.com", "whether it waited or not");
        assert_eq!(report.retry_after(), retry_after.map(Duration::from_secs));
        assert_eq!(report.waited(), ms(waited));
    }
    assert_eq!(
        soon(service.oneshot(get("http://api.example.com/x")))
            .await
            .unwrap()
            .status(),
        200
    );
}

#[tokio::test(start_paused = true)]
async fn upstream_error_names_no_header_holding_the_key() {
    let limit =
        RateLimitLayer::builder(Quota::per_second(5)).key(by_header(http::header::AUTHORIZATION));
    let service = limit
        .error_on_upstream_limit()
        .build()
        .unwrap()
        .layer(Upstream::answering([limited("1")]));
    let mut request = get("http://api.example.com/");
    request
        .headers_mut()
        .insert("authorization", "s3cr3t-token".parse().unwrap());
    let error = service.oneshot(request).await.unwrap_err();
    assert_eq!(
        Limited::find(&error).unwrap().report().key(),
        Key::new("s3cr3t-token").to_string()
    );
    assert_eq!(who_said_no(&error), "upstream");
}

#[tokio::test(start_paused = true)]
async fn other_responses_become_errors_only_with_limit_evidence() {
    let statuses = [200, 304, 404, 500].map(|status| (status, true));
    let bare = [400, 403, 503].map(|status| (status, false));
    for (status, hint, is_error) in statuses
        .into_iter()
        .chain(bare)
        .map(|(status, hint)| (status, hint, false))
        .chain([400, 403, 503].map(|status| (status, true, true)))
    {
        let mut answer = ok().unwrap();
        *answer.status_mut() = StatusCode::from_u16(status).unwrap();
        if hint {
            answer
                .headers_mut()
                .insert("retry-after", "3600".parse().unwrap());
        }
        let limit = RateLimitLayer::builder(Quota::per_second(1))
            .error_on_upstream_limit()
            .build()
            .unwrap();
        match limit
            .layer(Upstream::answering([Ok(answer)]))
            .oneshot(get("/"))
            .await
        {
            Ok(answer) => assert_eq!((answer.status().as_u16(), is_error), (status, false)),
            Err(error) => assert_eq!(
                (who_said_no(&error), is_error),
                ("upstream", true),
                "{status}"
            ),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unreachable_store_is_named_and_nothing_is_sent() {
    for later in [false, true] {
        let limit = RateLimitLayer::builder(Quota::per_second(1))
            .store(Arc::new(Failing::away(later)))
            .build()
            .unwrap();
        let upstream = Upstream::new();
        let error = soon(limit.layer(upstream.clone()).oneshot(get("/")))
            .await
            .unwrap_err();
        assert_eq!((who_said_no(&error), upstream.count()), ("store", 0));
        let mut chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| {
            error.source()
        });
        assert!(
            chain.any(|error| error.is::<std::io::Error>()),
            "its own error is in the chain"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn zero_max_wait_still_awaits_the_store_s_answer() {
    let builder = || RateLimitLayer::builder(Quota::per_second(1)).max_wait(ms(0));
    let limit = builder()
        .store(Arc::new(Distant::new(ms(2))))
        .build()
        .unwrap();
    let service = limit.layer(Upstream::new());
    soon(service.clone().oneshot(get("/"))).await.unwrap();
    let Err(Error::Limited(refused)) = soon(service.oneshot(get("/"))).await else {
        panic!("one a second")
    };
    assert!(matches!(local(&refused), Reason::MaxWait(_)));
    assert!(refused.retry_after().unwrap() >= ms(1000), "{refused}");

    let away = builder()
        .store(Arc::new(Failing::away(true)))
        .build()
        .unwrap();
    let error = soon(away.layer(Upstream::new()).oneshot(get("/")))
        .await
        .unwrap_err();
    assert_eq!(who_said_no(&error), "store");
}

#[tokio::test(start_paused = true)]
async fn request_and_upstream_input_never_panics_nor_hangs() {
    let huge = "9".repeat(4000);
    let headers = [
        "",
        " ",
        "-1",
        "+5",
        "1.5",
        "1e400",
        "NaN",
        "inf",
        "\u{b2}",
        "0x10",
        "1771404540",
        "18446744073709551616",
        "Thu, 01 Jan 1970 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "1, 2",
        "\u{fffd}",
        &huge,
    ];
    for header in headers {
        let limit = RateLimitLayer::builder(Quota::per_second(1))
            .error_on_upstream_limit()
            .build()
            .unwrap();
        let error = limit
            .layer(Upstream::answering([limited(header)]))
            .oneshot(get("/"))
            .await
            .unwrap_err();
        let refused = Limited::find(&error).unwrap();
        assert!(
            refused.retry_after().unwrap_or_default() <= Duration::from_secs(366 * 86_400),
            "{header}"
        );
        assert!(
            refused.report().retry_at() >= refused.retry_after().map(|_| SystemTime::UNIX_EPOCH)
        );
        assert!(!format!("{error} {error:?}").is_empty());
    }
    let epoch = now();
    for cost in [0, 1, 2, u32::MAX] {
        for deadline in [
            None,
            Some(support::long_ago()),
            Some(epoch),
            Some(far_future()),
        ] {
            for key in [
                Key::ALL,
                Key::new(""),
                Key::new(vec![0xff; 100_000]),
                Key::new(&huge).and(""),
            ] {
                let limit = RateLimitLayer::builder(Quota::per_second(1))
                    .max_wait(ms(86_400_000))
                    .build()
                    .unwrap();
                for _ in 0..3 {
                    let mut request = get("/");
                    request.extensions_mut().insert(Cost::new(cost));
                    request.extensions_mut().insert(key);
                    if let Some(deadline) = deadline {
                        request.extensions_mut().insert(Deadline::at(deadline));
                    }
                    let _ = soon(limit.layer(Upstream::new()).oneshot(request)).await;
                }
                assert_eq!(peek(&limit, key).await.waiting, 0);
            }
        }
    }
}

#[test]
fn absurd_settings_are_errors_that_name_the_setting() {
    let builder = || RateLimitLayer::builder(Quota::per_second(1));
    for (built, setting) in [
        (builder().max_wait(Duration::MAX).build(), "max_wait"),
        (
            builder().transit_slack(Duration::MAX).build(),
            "transit_slack",
        ),
        (builder().max_keys(0).build(), "max_keys"),
        (RateLimitLayer::new(Quota::per_second(0)), "count"),
        (RateLimitLayer::new(Quota::every(Duration::MAX)), "window"),
        (
            RateLimitLayer::builder(Quota::fixed(1, ms(1000)))
                .boundary_guard(Duration::MAX)
                .build(),
            "boundary_guard",
        ),
    ] {
        let error = built.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(setting), "{error}");
    }
    assert!(
        builder()
            .max_queue(usize::MAX)
            .max_keys(usize::MAX)
            .max_wait(ms(86_400_000))
            .build()
            .is_ok()
    );
}

#[test]
fn layer_outlives_its_runtime_and_works_in_another() {
    let limit = RateLimitLayer::new(Quota::per_second(1)).unwrap();
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build();
        runtime.unwrap().block_on(async {
            let upstream = Upstream::new();
            let service = limit.layer(upstream.clone());
            let calls: Vec<_> = (0..3)
                .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
                .collect();
            soon(async {
                while upstream.count() < 2 {
                    pass(ms(10)).await;
                }
            })
            .await;
            assert_eq!(waiting(&limit).await, 1);
            upstream.was_never_over(1, ms(1000));
            drop(calls); // the third still waits when its runtime ends
        });
    }
}
