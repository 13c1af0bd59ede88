//! A table of routes: which limits a request takes a permit of, under which key, and what happens if
//! one of them refuses.

use crate::support;

use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{Method, Request, StatusCode};
use tollgate::limiter::QuotaSource;
use tollgate::store::MemoryStore;
use tollgate::{Cost, Key, Limited, Quota, RateLimitBuilder, RateLimitLayer, Routes, by_header};
use tower::{Layer, ServiceExt};

use support::{Upstream, count_of, get, limited, ms, ok, pass, used};

/// Ten per minute in all, and no waiting.
fn ten() -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_minute(10)).max_wait(ms(0))
}

fn table<const N: usize>(routes: [(&str, u32); N]) -> Routes {
    let routes = routes.map(|(pattern, count)| (pattern, Quota::per_minute(count)));
    Routes::new(routes).unwrap()
}

/// Sends a request such as `GET /users`. If it is refused, returns the name of the limit and the
/// pattern of the route.
async fn send(limit: &RateLimitLayer, request: &str) -> Result<(), String> {
    let (method, path) = request.split_once(' ').unwrap();
    let request = Request::builder()
        .method(method)
        .uri(format!("http://a{path}"));
    let request = request.body(String::new()).unwrap();
    match limit.layer(Upstream::new()).oneshot(request).await {
        Ok(_) => Ok(()),
        Err(error) => {
            let limited = Limited::find(&error).unwrap();
            let report = limited.report();
            let name = report.name().unwrap_or("first").to_owned();
            Err(report
                .route()
                .map_or(name.clone(), |route| format!("{name}: {route}")))
        }
    }
}

/// How many requests are sent until one is refused, and which limit refuses it.
async fn until_refused(limit: &RateLimitLayer, request: &str) -> (usize, String) {
    for sent in 0..100 {
        if let Err(name) = send(limit, request).await {
            return (sent, name);
        }
    }
    panic!("{request} is never refused");
}

fn by(name: &str, count: usize) -> (usize, String) {
    (count, name.to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_route_has_its_quota_besides_that_of_the_layer() {
    let routes = table([("GET /search/*", 3), ("/big", 100)]);
    let limit = ten().routes(routes).build().unwrap();
    assert_eq!(
        until_refused(&limit, "GET /search/a").await,
        by("route: GET /search/*", 3)
    );
    assert_eq!(
        until_refused(&limit, "GET /search/b").await,
        by("route: GET /search/*", 0)
    );
    assert_eq!(used(&limit).await, 3, "what a route refuses counts nowhere");
    assert_eq!(until_refused(&limit, "GET /big").await, by("first", 7));
    assert_eq!(
        until_refused(&limit, "POST /search/a").await,
        by("first", 0)
    );

    pass(ms(61_000)).await;
    assert_eq!(
        until_refused(&limit, "POST /search/a").await,
        by("first", 10)
    );
    let routes = limit.limiter_of("route").unwrap();
    let search = Key::ALL.and("GET /search/*").and("route");
    assert_eq!(routes.peek(search).await.unwrap().limits[0].used, 0);
    let keys = routes.busiest(9);
    let is_named = |pattern: &str| keys.iter().any(|key| key.name().ends_with(pattern));
    assert!(is_named(" GET /search/*") && is_named(" /big"), "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn peek_and_explain_know_the_route_of_a_key() {
    let routes = table([("GET /first", 1), ("GET /search/*", 3)]);
    let limit = ten().routes(routes.clone()).build().unwrap();
    send(&limit, "GET /search/a").await.unwrap();
    let limiter = limit.limiter_of("route").unwrap();
    let key = routes.key(&Method::GET, "/search/b", Key::ALL).unwrap();
    let key = key.and("route");
    let status = limiter.peek(key).await.unwrap();
    assert_eq!(status.quota_source, QuotaSource::Route);
    assert_eq!((status.free, status.limits[0].used), (2, 1));
    let explained = limiter.explain(key).await.unwrap();
    let explained = explained.to_string();
    assert!(explained.contains("that of its route"), "{explained}");
    assert!(explained.contains(" GET /search/*:"), "{explained}");
    assert!(
        explained.to_string().contains("that of its route"),
        "{explained}"
    );

    let set = limiter.set_quota(key, Quota::per_minute(9));
    set.await.unwrap();
    let status = limiter.peek(key).await.unwrap();
    assert!(matches!(status.quota_source, QuotaSource::Set { .. }));
    assert_eq!(
        until_refused(&limit, "GET /search/a").await,
        by("route: GET /search/*", 8)
    );
    assert_eq!(count_of(&limiter.stats(), "keys_with_set_quota"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_route_has_its_quota_in_place_of_that_of_the_layer() {
    let routes = table([("GET /search/*", 3), ("/big", 100)]).instead();
    let limit = ten().routes(routes.clone()).build().unwrap();
    assert_eq!(
        until_refused(&limit, "GET /search/a").await,
        by("first: GET /search/*", 3)
    );
    assert_eq!(used(&limit).await, 0);
    assert_eq!(until_refused(&limit, "GET /other").await, by("first", 10));
    assert_eq!(
        until_refused(&limit, "GET /search/a").await,
        by("first: GET /search/*", 0)
    );
    for _ in 0..100 {
        send(&limit, "GET /big").await.unwrap();
    }
    assert_eq!(
        until_refused(&limit, "PUT /big").await,
        by("first: /big", 0)
    );

    let search = routes.key(&Method::GET, "/search/a", Key::ALL).unwrap();
    let status = limit.limiter().peek(search).await.unwrap();
    assert_eq!((status.limits[0].used, status.free), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn tables_beside_and_instead_apply_together() {
    let limit = ten()
        .routes(table([("/search/*", 4), ("GET /search/code", 2)]).instead())
        .routes(table([("/search/code", 3), ("POST /*", 5)]).name("writes"))
        .build()
        .unwrap();
    assert_eq!(
        until_refused(&limit, "GET /search/code").await,
        by("first: GET /search/code", 2)
    );
    assert_eq!(
        until_refused(&limit, "PUT /search/code").await,
        by("writes: /search/code", 1)
    );
    assert_eq!(
        until_refused(&limit, "POST /search/a").await,
        by("first: /search/*", 3)
    );
    assert_eq!(
        until_refused(&limit, "POST /x").await,
        by("writes: POST /*", 2)
    );
    assert_eq!(used(&limit).await, 2);
}

#[tokio::test(start_paused = true)]
async fn each_value_and_each_key_of_the_layer_has_a_count() {
    let routes = table([("/channels/{channel}/messages/*", 2)]);
    let limit = ten()
        .key(by_header(AUTHORIZATION))
        .routes(routes.clone())
        .build()
        .unwrap();
    let send = async |token: &str, path: &str| {
        let request = Request::post(format!("http://a{path}"));
        let request = request.header(AUTHORIZATION, token).body(String::new());
        limit
            .layer(Upstream::new())
            .oneshot(request.unwrap())
            .await
            .is_ok()
    };
    for token in ["one", "two"] {
        for channel in ["a", "b", "%2F"] {
            let path = |message| format!("/channels/{channel}/messages/{message}");
            assert!(send(token, &path(1)).await && send(token, &path(2)).await);
            assert!(!send(token, &path(3)).await, "{token} {channel}");
        }
    }
    let key = routes
        .key(&Method::POST, "/channels/a/messages/7", Key::new("one"))
        .unwrap();
    let routes = limit.limiter_of("route").unwrap();
    assert_eq!(routes.peek(key.and("route")).await.unwrap().free, 0);
}

#[tokio::test(start_paused = true)]
async fn values_in_the_extensions_apply_to_routes_too() {
    for is_instead in [false, true] {
        let routes = table([("/a", 4)]);
        let routes = if is_instead { routes.instead() } else { routes };
        let limit = ten().routes(routes).build().unwrap();
        let send = async |key: &str, cost: u32| {
            let mut request = get("http://a/a");
            request.extensions_mut().insert(Key::new(key));
            request.extensions_mut().insert(Cost::new(cost));
            limit.layer(Upstream::new()).oneshot(request).await.is_ok()
        };
        assert!(send("one", 3).await);
        assert!(!send("one", 2).await);
        assert!(send("two", 4).await);
        assert!(!send("two", 1).await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_joined_layer_has_routes_of_its_own() {
    let by_token = || ten().key(by_header(AUTHORIZATION));
    let tokens = by_token().routes(table([("/a", 2)])).build().unwrap();
    for limit in [
        RateLimitLayer::builder(Quota::per_minute(100))
            .max_wait(ms(0))
            .build()
            .unwrap()
            .and(tokens.clone()),
        tokens.and(RateLimitLayer::new(Quota::per_minute(100)).unwrap()),
    ] {
        let send = async |token: &str| {
            let request = Request::get("http://a/a").header(AUTHORIZATION, token);
            let request = request.body(String::new()).unwrap();
            limit.layer(Upstream::new()).oneshot(request).await.is_ok()
        };
        let who = format!("{:p}", &limit);
        assert!(send(&who).await && send(&who).await && !send(&who).await);
        assert!(send("another").await, "each token has a count of its own");
        pass(ms(61_000)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_its_route_takes_nothing_else() {
    let limit = RateLimitLayer::builder(Quota::per_minute(10))
        .routes(table([("/slow", 1)]))
        .max_wait(ms(100_000))
        .build()
        .unwrap();
    send(&limit, "GET /slow").await.unwrap();
    let second = tokio::spawn({
        let limit = limit.clone();
        async move { send(&limit, "GET /slow").await }
    });
    pass(ms(1000)).await;
    for _ in 0..9 {
        let sent = send(&limit, "GET /other");
        tokio::time::timeout(ms(1), sent).await.unwrap().unwrap();
    }
    pass(ms(60_000)).await;
    second.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_refusal_holds_the_route_or_the_limit_that_it_names() {
    for (scope, is_instead, route_is_held, layer_is_held) in [
        (None, false, true, false),
        (Some("route"), false, true, false),
        (Some("global"), false, false, true),
        (None, true, true, false),
    ] {
        let routes = table([("/a", 5), ("/b", 5)]);
        let routes = if is_instead { routes.instead() } else { routes };
        let limit = ten()
            .name("global")
            .key(|_| Key::new("us"))
            .routes(routes)
            .build()
            .unwrap();
        let mut response = limited("20").unwrap();
        if let Some(scope) = scope {
            let headers = response.headers_mut();
            headers.insert("x-ratelimit-scope", scope.parse().unwrap());
        }
        let upstream = Upstream::answering([Ok(response), ok()]);
        let request = get("http://a/a");
        let response = limit.layer(upstream).oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);

        let is_held = async |request| send(&limit, request).await.is_err();
        let context = format!("{scope:?} {is_instead}");
        assert_eq!(
            is_held("GET /a").await,
            route_is_held || layer_is_held,
            "{context}"
        );
        assert_eq!(is_held("GET /b").await, layer_is_held, "{context}");
        assert_eq!(is_held("GET /c").await, layer_is_held, "{context}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_of_the_layer_spares_routes_in_its_place() {
    for is_instead in [false, true] {
        let routes = table([("/a", 5)]);
        let routes = if is_instead { routes.instead() } else { routes };
        let limit = ten().routes(routes.clone()).build().unwrap();
        let limiter = limit.limiter();
        limiter.hold_for(Key::ALL, ms(20_000)).await.unwrap();
        assert_eq!(send(&limit, "GET /a").await.is_ok(), is_instead);
        assert!(send(&limit, "GET /b").await.is_err());

        limiter.release(Key::ALL).await.unwrap();
        let route = routes.key(&Method::GET, "/a", Key::ALL).unwrap();
        limiter.hold_for(route, ms(20_000)).await.unwrap();
        assert_eq!(send(&limit, "GET /a").await.is_ok(), !is_instead);
        send(&limit, "GET /b").await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn errors_name_the_route_and_no_value() {
    for is_instead in [false, true] {
        let routes = table([("/a/{secret}", 1), ("/b/{secret}", 1)]);
        let routes = if is_instead { routes.instead() } else { routes };
        let limit = RateLimitLayer::builder(Quota::per_minute(10))
            .routes(routes)
            .max_wait(ms(70_000))
            .error_on_upstream_limit()
            .build()
            .unwrap();
        let error = async |answer| {
            let service = limit.layer(Upstream::answering([answer]));
            let error = service.oneshot(get("http://host/a/s3cret")).await;
            let error = error.unwrap_err();
            let limited = Limited::find(&error).unwrap();
            assert_eq!(limited.report().route(), Some("/a/{secret}"), "{error}");
            let name = if is_instead { None } else { Some("route") };
            assert_eq!(limited.report().name(), name);
            let text = format!("{error} {error:?}");
            assert!(!text.contains("s3cret"), "{text}");
            error.to_string()
        };
        let refused = error(limited("0")).await;
        assert!(refused.contains("429"), "{refused}");
        // The next one waits, and the one behind it would wait for too long.
        let waits = tokio::spawn({
            let limit = limit.clone();
            async move { send(&limit, "GET /a/s3cret").await }
        });
        pass(ms(1)).await;
        let refused = error(ok()).await;
        let subject = if is_instead { "(" } else { "(route " };
        let subject = format!("refused locally {subject}/a/{{secret}} ");
        assert!(refused.starts_with(&subject), "{refused}");
        pass(ms(61_000)).await;
        waits.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn layers_with_one_store_share_the_counts_of_routes() {
    let store = Arc::new(MemoryStore::default());
    let limit = || {
        let routes = table([("/a/{b}", 2)]);
        ten().routes(routes).store(store.clone()).build().unwrap()
    };
    let (one, other) = (limit(), limit());
    send(&one, "GET /a/1").await.unwrap();
    send(&other, "GET /a/1").await.unwrap();
    assert_eq!(
        send(&one, "GET /a/1").await,
        Err("route: /a/{b}".to_owned())
    );
    assert_eq!(
        send(&other, "GET /a/1").await,
        Err("route: /a/{b}".to_owned())
    );
    send(&other, "GET /a/2").await.unwrap();
}

#[test]
fn build_names_the_route_whose_quota_is_wrong() {
    let in_flight = Quota::per_minute(1).and(Quota::in_flight(1));
    for (quota, problem) in [
        (Quota::per_minute(0), "a count of 0 allows nothing"),
        (
            Quota::per_minute(1).of("tokens"),
            "a quota of the same kind",
        ),
        (in_flight, "a quota of the same kind"),
    ] {
        for is_instead in [false, true] {
            let mut routes = vec![("/fine", Quota::per_minute(1)), ("GET /bad", quota)];
            // The first route of a table says of which kind the others are.
            if quota == Quota::per_minute(0) {
                routes.reverse();
            }
            let routes = Routes::new(routes).unwrap();
            let routes = if is_instead { routes.instead() } else { routes };
            let error = ten().routes(routes).build().unwrap_err();
            let error = error.to_string();
            let found = error.strip_prefix("route \"GET /bad\": ");
            assert!(
                found.is_some_and(|found| found.contains(problem)),
                "{error}"
            );
        }
    }
}

#[test]
fn build_rejects_tables_that_do_not_fit_together() {
    let routes = || table([("/a", 1)]);
    for (builder, problem) in [
        (
            ten().routes(routes()).routes(routes()),
            "routes is \"route\"",
        ),
        (
            ten().name("route").routes(routes()),
            "a name that no other limit of the layer has",
        ),
        (
            ten().routes(routes().name("")),
            "routes is \"\", but must be 1 to 64 of the letters",
        ),
        (
            ten().routes(routes().instead()).routes(routes().instead()),
            "at most one of them",
        ),
    ] {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    let seven = names
        .into_iter()
        .fold(ten(), |builder, name| builder.routes(routes().name(name)));
    seven.build().unwrap();
    let none = Routes::new::<&str>([]).unwrap();
    ten()
        .routes(none.clone())
        .routes(none.instead())
        .build()
        .unwrap();
}
