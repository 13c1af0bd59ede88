//! Why a request would wait now: situations, each with its exact text.

use crate::support;

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use http::Response;
use support::{Failing, Upstream, get, ms, now, pass, settle};
use tokio::task::JoinHandle;
use tollgate::limiter::{Because, Explanation, QuotaSource, Verdict};
use tollgate::quota::Limit;
use tollgate::store::{Lease, LeaseRequest, MemoryStore, PeekRequest, Store, StoreReply, Usage};
use tollgate::{
    Cost, HeaderTrust, Key, Limiter, OnStoreError, Quota, RateLimitBuilder, RateLimitLayer, Reason,
    RequestRef,
};
use tower::{Layer, ServiceExt};

fn builder(quota: Quota) -> RateLimitBuilder {
    RateLimitLayer::builder(quota)
        .charged_by_hand()
        .name("github")
}

fn limiter(quota: Quota) -> Limiter {
    builder(quota).build().unwrap().limiter()
}

/// Takes `count` permits, which are used at once.
async fn use_up(limiter: &Limiter, count: usize) {
    for _ in 0..count {
        let permit = limiter.acquire(Key::ALL).now_or_never();
        drop(permit.expect("it does not wait").expect("it is free"));
    }
}

/// Lets `count` requests enter that wait.
async fn enter(limiter: &Limiter, count: usize) -> Vec<JoinHandle<()>> {
    let enter = |_| {
        let request = limiter.acquire(Key::ALL);
        tokio::spawn(async move { drop(request.await) })
    };
    let waiting = (0..count).map(enter).collect();
    settle().await;
    waiting
}

/// Returns the text. No line of it ends with a space.
fn shown(explanation: &Explanation) -> String {
    let text = explanation.to_string();
    assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
    text
}

/// Sends a request whose response has `status` and `headers`.
async fn respond(layer: &RateLimitLayer, status: u16, headers: &[(&str, &str)]) {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    let upstream = Upstream::answering([Ok(response.body(String::new()).unwrap())]);
    let _ = layer.layer(upstream).oneshot(get("/")).await;
    settle().await;
}

/// Checks the text about a request of `Key::ALL`.
async fn is_told(limiter: &Limiter, expected: &str) {
    is_text(&shown(&limiter.explain(Key::ALL).await.unwrap()), expected);
}

/// Checks a text, whose lines are indented in this file.
fn is_text(text: &str, expected: &str) {
    let mut lines = expected
        .trim()
        .lines()
        .map(|line| line.strip_prefix("        ").unwrap_or(line));
    assert!(text.lines().eq(lines.by_ref()), "the text is\n{text}\n");
}

/// A store that has lost its state.
struct Recovers(MemoryStore);

impl Store for Recovers {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.0)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.0.lease(request)
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        let StoreReply::Ready(Ok(mut usage)) = self.0.peek(request) else {
            unreachable!("memory answers at once")
        };
        usage.recovering = ms(2500);
        StoreReply::Ready(Ok(usage))
    }
}

#[tokio::test(start_paused = true)]
async fn free_limits_are_told_with_their_use() {
    let limiter = limiter(Quota::per_second(50).and(Quota::per_hour(5000)));
    use_up(&limiter, 4).await;
    is_told(
        &limiter,
        "
        github, key all: a request now would leave at once
          50/1s       5 used, 45 free
          5000/3600s  5 used, 4995 free
          hold        none
          waiting     0 here
          at hand     1
        ",
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_limit_that_allows_a_request_last_is_told() {
    let limiter = limiter(Quota::new(3, ms(1000)).and(Quota::per_minute(4)));
    use_up(&limiter, 3).await;
    pass(ms(400)).await;
    is_told(
        &limiter,
        "
        github, key all: a request now would wait 620ms, because 3/1s is used up
          3/1s     3 used, 0 free; free in 620ms
          4/60s    3 used, 1 free
          hold     none
          waiting  0 here
          at hand  0
        ",
    )
    .await;
    let waiting = enter(&limiter, 1).await;
    pass(ms(100)).await;
    is_told(&limiter, "
        github, key all: a request now would be refused: its slot is further away than max_wait (15s); 4/60s is used up; retry in 60s
          3/1s     4 used, 0 free; free in 520ms
          4/60s    4 used, 0 free; free in 60s
          hold     none
          waiting  1 here, the first for 100ms
          at hand  0
        ").await;
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn holds_are_told_with_their_cause() {
    let store = Arc::new(MemoryStore::default());
    let [layer, other] = [(); 2].map(|()| {
        let builder = builder(Quota::per_second(50)).max_wait(Duration::from_secs(60));
        builder.store(store.clone()).build().unwrap()
    });
    respond(&layer, 429, &[("retry-after", "10")]).await;
    pass(ms(2000)).await;
    is_told(
        &layer.limiter(),
        "
        github, key all: a request now would wait 8s, because the upstream has put its key on hold
          50/1s    0 used, 50 free
          hold     8s left, since 2s: the upstream refused a request of this process
          waiting  0 here
          at hand  0
        ",
    )
    .await;
    is_told(
        &other.limiter(),
        "
        github, key all: a request now would wait 8s, because its key is on hold
          50/1s    0 used, 50 free
          hold     8s left: known from the store
          waiting  0 here
          at hand  0
        ",
    )
    .await;
    other
        .limiter()
        .hold_for(Key::ALL, Duration::from_secs(90))
        .await
        .unwrap();
    is_told(&other.limiter(), "
        github, key all: a request now would be refused, because hold_for has put its key on hold; retry in 90s
          50/1s    0 used, 50 free
          hold     90s left, since 0ms: hold_for of this process
          waiting  0 here
          at hand  0
        ").await;
    is_told(
        &layer.limiter(),
        "
        github, key all: a request now would be refused, because its key is on hold; retry in 90s
          50/1s    0 used, 50 free
          hold     90s left, since 0ms: another process or limiter
          waiting  0 here
          at hand  0
        ",
    )
    .await;
}

/// A key may be mistyped, or lack the name of its limit.
#[tokio::test(start_paused = true)]
async fn a_key_without_requests_is_told() {
    let builder = builder(Quota::per_second(50));
    let of_channel = |_: &RequestRef<'_>| Some(Key::new("general"));
    let builder = builder.and_per("channel", Quota::per_second(5), of_channel);
    let layer = builder.build().unwrap();
    respond(&layer, 200, &[]).await;
    let channels = layer.limiter_of("channel").unwrap();
    let explain = async |key| channels.explain(key).await.unwrap();
    let other = explain(Key::new("general")).await;
    let text = other.to_string();
    assert!(
        text.ends_with("\n  known    no request of this key"),
        "{text}"
    );
    let own = explain(Key::new("general").and("channel"))
        .await
        .to_string();
    assert!(!own.contains("no request"), "{own}");
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_for_a_hold_are_told() {
    let limiter = limiter(Quota::per_second(2));
    limiter
        .hold_for(Key::ALL, Duration::from_secs(1))
        .await
        .unwrap();
    let waiting = enter(&limiter, 8).await;
    pass(ms(500)).await;
    is_told(
        &limiter,
        "
        github, key all: a request now would wait 4.58s, because 2/1s is used up
          2/1s     0 used, 2 free; free in 4.58s
          hold     500ms left, since 500ms: hold_for of this process
          waiting  8 here, the first for 500ms
          at hand  0
        ",
    )
    .await;
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn a_probe_is_told() {
    let layer = builder(Quota::per_second(50))
        .max_hold(Duration::from_secs(1))
        .build()
        .unwrap();
    respond(&layer, 429, &[("retry-after", "30")]).await;
    pass(ms(1000)).await;
    is_told(
        &layer.limiter(),
        "
        github, key all: a request now would leave at once
          50/1s    1 used, 49 free
          hold     none
          waiting  0 here
          at hand  0
        ",
    )
    .await;
    let probe = layer.limiter().acquire(Key::ALL).await.unwrap();
    is_told(&layer.limiter(), "
        github, key all: a request now would wait for an unknown time, because a probe tests whether the upstream accepts requests
          50/1s    2 used, 48 free
          hold     none
          waiting  0 here
          at hand  0
        ").await;
    drop(probe);
}

#[tokio::test(start_paused = true)]
async fn units_reserved_for_other_clients_are_told() {
    let layer = builder(Quota::per_minute(10)).build().unwrap();
    let left = [
        ("x-ratelimit-limit", "10"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "4"),
    ];
    respond(&layer, 200, &left).await;
    is_told(&layer.limiter(), "
        github, key all: a request now would wait 4s, because the rest of 10/60s is reserved for other clients
          10/60s   1 used, 0 free, 9 reserved for other clients; free in 4s
          hold     none
          waiting  0 here
          at hand  0
        ").await;
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_are_told() {
    let limiter = limiter(Quota::in_flight(2).and(Quota::per_second(50)));
    let calls = [
        limiter.acquire(Key::ALL).await.unwrap(),
        limiter.acquire(Key::ALL).await.unwrap(),
    ];
    let waiting = enter(&limiter, 1).await;
    is_told(&limiter, "
        github, key all: a request now would wait for an unknown time, because the limit of 2 in flight is used up
          50/1s        3 used, 47 free
          2 in flight  2 used, 0 free; free when a call ends
          hold         none
          waiting      1 here, the first for 0ms
          at hand      1
        ").await;
    let now_only = limiter
        .acquire(Key::ALL)
        .deadline(now())
        .explain()
        .await
        .unwrap();
    assert!(matches!(
        now_only.verdict,
        Verdict::Refused {
            reason: Reason::Deadline,
            retry_after: None,
            because: Some(Because::InFlight(Limit::InFlight { count: 2, .. })),
        }
    ));
    drop((calls, waiting));
}

#[tokio::test(start_paused = true)]
async fn refusals_before_the_store_are_told() {
    let limiter = builder(Quota::per_second(2))
        .max_queue(1)
        .build()
        .unwrap()
        .limiter();
    let explain = async |cost: u32| {
        shown(
            &limiter
                .acquire(Key::ALL)
                .cost(cost)
                .explain()
                .await
                .unwrap(),
        )
    };
    is_text(&explain(3).await, "
        github, key all: a request that costs 3 now would be refused: it costs 3, and the quota allows at most 2 at once; split it, or raise the limit or burst
          2/1s     0 used, 2 free; allows no such request
          hold     none
          waiting  0 here
          at hand  0
          known    no request of this key
        ");
    is_text(
        &explain(0).await,
        "
        github, key all: a request that costs 0 now would leave at once
          2/1s     0 used, 2 free
          hold     none
          waiting  0 here
          at hand  0
          known    no request of this key
        ",
    );
    use_up(&limiter, 2).await;
    let waiting = enter(&limiter, 1).await;
    is_text(&explain(1).await, "
        github, key all: a request now would be refused: the queue of the key is full: max_queue is 1
          2/1s     3 used, 0 free; free in 1.02s
          hold     none
          waiting  1 here, the first for 0ms
          at hand  0
        ");
    drop(waiting);
    let _ = limiter.drain(Duration::ZERO).await.unwrap();
    is_text(&explain(1).await, "
        github, key all: a request now would be refused: the limiter was drained, because this process is about to end
          2/1s     2 used, 0 free; free in 1.02s
          hold     none
          waiting  0 here
          at hand  0
        ");
}

#[tokio::test(start_paused = true)]
async fn each_unit_is_told() {
    let quota = Quota::per_minute(500).and(Quota::per_minute(80_000).of("tokens"));
    let limiter = limiter(quota);
    let request = || {
        limiter
            .acquire(Key::new("organisation"))
            .cost(Cost::of("tokens", 50_000))
    };
    limiter.name_key(Key::new("organisation"), "organisation");
    drop(request().await.unwrap());
    is_text(&shown(&request().explain().await.unwrap()), "
        github tokens, key organisation: a request that costs 50000 tokens now would be refused: its slot is further away than max_wait (15s); 80000 tokens/60s is used up; retry in 61s
          80000 tokens/60s  50000 used, 30000 free; free in 61s
          hold              none
          waiting           0 here
          at hand           0
        github, key organisation:
          500/60s  1 used, 499 free
          hold     none
          waiting  0 here
          at hand  0
        ");
}

#[tokio::test(start_paused = true)]
async fn each_key_of_a_request_is_told() {
    let all = limiter(Quota::per_minute(30));
    let channels = RateLimitLayer::builder(Quota::per_second(1))
        .name("channels")
        .build()
        .unwrap()
        .limiter();
    channels.name_key(Key::new("general"), "general");
    let message = || {
        all.acquire(Key::ALL)
            .and(channels.acquire(Key::new("general")))
    };
    drop(message().await.unwrap());
    let explanation = message().explain().await.unwrap();
    is_text(
        &shown(&explanation),
        "
        channels, key general: a request now would wait 1.03s, because 1/1s is used up
          1/1s     1 used, 0 free; free in 1.03s
          hold     none
          waiting  0 here
          at hand  0
        github, key all:
          30/60s   1 used, 29 free
          hold     none
          waiting  0 here
          at hand  0
        ",
    );
    let twice = all
        .acquire(Key::ALL)
        .and(all.acquire(Key::ALL))
        .explain()
        .await
        .unwrap();
    let refused = Verdict::Refused {
        reason: Reason::SameKey,
        retry_after: None,
        because: None,
    };
    assert_eq!(twice.verdict, refused);
}

#[tokio::test(start_paused = true)]
async fn stated_limits_are_told() {
    let layer = builder(Quota::per_minute(300))
        .trust_headers(HeaderTrust::Stricter)
        .build()
        .unwrap();
    respond(&layer, 200, &[("RateLimit-Policy", r#""core";q=30;w=10"#)]).await;
    is_told(
        &layer.limiter(),
        r#"
        github, key all: a request now would leave at once
          300/60s  1 used, 299 free
          30/10s   1 used, 29 free
          quota    learned from the upstream, ends in 100s
  hold     none
          waiting  0 here
          at hand  0
          learned  "core" states 30/10s
        "#,
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_told_or_the_error() {
    let with = |mode| {
        let failing = Arc::new(Failing::away(true));
        let builder = builder(Quota::per_second(50))
            .store(failing)
            .on_store_error(mode);
        builder.build().unwrap().limiter()
    };
    let error = with(OnStoreError::FailClosed)
        .explain(Key::ALL)
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the store cannot be reached: connection refused"
    );
    is_told(
        &with(OnStoreError::FailOpen),
        "
        github, key all: a request now would leave at once, uncounted
          hold     none
          waiting  0 here
          at hand  0
          store    the store cannot be reached: connection refused
        ",
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_recovers_is_told() {
    let store = Arc::new(Recovers(MemoryStore::default()));
    let limiter = builder(Quota::per_second(50))
        .store(store)
        .build()
        .unwrap()
        .limiter();
    is_told(
        &limiter,
        "
        github, key all: a request now would wait 2.5s, because the store has lost its state
          50/1s    0 used, 50 free
          hold     none
          waiting  0 here
          at hand  0
          store    lost its state, recovers in 2.5s
        ",
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_key_without_room_is_told() {
    let in_flight = Quota::per_second(50).and(Quota::in_flight(5));
    for quota in [Quota::per_second(50), in_flight] {
        // The store has room for more keys.
        let builder = builder(quota).store(Arc::new(MemoryStore::default()));
        let limiter = builder.max_keys(1).build().unwrap().limiter();
        let _kept = limiter.acquire(Key::new("one")).await.unwrap();
        let other = || limiter.acquire(Key::new("other"));
        let told = other().explain().await.unwrap().verdict;
        match other().await {
            Ok(_) => assert_eq!(told, Verdict::Goes),
            Err(limited) => {
                assert_eq!(limited.reason(), Some(Reason::TooManyKeys(1)));
                let reason = Reason::TooManyKeys(1);
                assert!(
                    matches!(&told, Verdict::Refused { reason: told, .. } if *told == reason),
                    "{told:?}"
                );
            }
        }
    }
}

/// Nothing is booked behind the first request, because units may come back.
#[tokio::test(start_paused = true)]
async fn joint_requests_that_wait_in_a_layer_that_settles_are_told() {
    let builder = builder(Quota::per_minute(10)).max_wait(ms(120_000));
    let limiter = builder.settle_by_hand().build().unwrap().limiter();
    let both = |cost| {
        let one = limiter.acquire(Key::new("one")).cost(cost);
        one.and(limiter.acquire(Key::new("other")).cost(cost))
    };
    drop(both(5).await.unwrap());
    let waiting = tokio::spawn(both(10).into_future());
    settle().await;
    let told = both(1).explain().await.unwrap().verdict;
    let because = Because::Queue { before: 1 };
    let wait = None;
    assert_eq!(told, Verdict::Waits { wait, because });
    assert!(both(1).now_or_never().is_none(), "it waits");
    drop(waiting.await.unwrap().unwrap());
}

/// A request of several keys looks for room at the one for which the most requests wait.
#[tokio::test(start_paused = true)]
async fn explain_looks_for_room_where_joint_requests_do() {
    let of = |max_queue| {
        let builder = builder(Quota::per_minute(1)).max_queue(max_queue);
        builder.max_wait(ms(600_000)).build().unwrap().limiter()
    };
    let (narrow, wide) = (of(1), of(2));
    let both = || narrow.acquire(Key::ALL).and(wide.acquire(Key::ALL));
    use_up(&narrow, 1).await;
    use_up(&wide, 1).await;
    let mut waiting = enter(&narrow, 1).await;
    let told = both().explain().await.unwrap().verdict;
    let is_full = |told: &Verdict, most| {
        let Verdict::Refused { reason, .. } = told else {
            return false;
        };
        *reason == Reason::QueueFull(most)
    };
    assert!(is_full(&told, 1), "{told:?}");
    let refused = both().await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::QueueFull(1)));

    waiting.extend(enter(&wide, 2).await);
    let told = both().explain().await.unwrap().verdict;
    assert!(is_full(&told, 2), "{told:?}");
    let refused = both().await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::QueueFull(2)));

    let wider = of(3);
    let both = || narrow.acquire(Key::ALL).and(wider.acquire(Key::ALL));
    use_up(&wider, 1).await;
    waiting.extend(enter(&wider, 2).await);
    let told = both().explain().await.unwrap().verdict;
    assert!(matches!(told, Verdict::Waits { .. }), "{told:?}");
    assert!(both().now_or_never().is_none(), "it waits");
    waiting.iter().for_each(JoinHandle::abort);
}

/// A process that ignores headers ends what others have learned when it uses the key. So it waits for the
/// configured limits only, and learned ones neither delay it nor are told.
#[tokio::test(start_paused = true)]
async fn explain_leaves_out_limits_that_its_process_ignores() {
    for trust in [HeaderTrust::Stricter, HeaderTrust::Replace] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let make = |trust| {
            let builder = builder(Quota::per_minute(3)).trust_headers(trust);
            let builder = builder.store(store.clone()).max_wait(ms(600_000));
            builder.build().unwrap()
        };
        let (learns, ignores) = (make(trust), make(HeaderTrust::Ignore).limiter());
        let policy = ("ratelimit-policy", r#""a";q=1;w=120"#);
        respond(&learns, 200, &[policy]).await;
        is_told(
            &ignores,
            "
        github, key all: a request now would leave at once
          3/60s    1 used, 2 free
          hold     none
          waiting  0 here
          at hand  0
            ",
        )
        .await;
        let status = ignores.peek(Key::ALL).await.unwrap();
        assert_eq!(status.quota_source, QuotaSource::Builder, "{trust:?}");
        assert_eq!(status.free, 2, "{trust:?}");
        // The question has ended nothing.
        let learns = learns.limiter();
        let source = learns.peek(Key::ALL).await.unwrap().quota_source;
        assert!(matches!(source, QuotaSource::Upstream { .. }), "{source:?}");
        let verdict = learns.explain(Key::ALL).await.unwrap().verdict;
        assert!(matches!(verdict, Verdict::Waits { .. }), "{verdict:?}");
        assert!(ignores.acquire(Key::ALL).await.is_ok());
        assert!(ignores.acquire(Key::ALL).await.is_ok());
        let verdict = ignores.explain(Key::ALL).await.unwrap().verdict;
        let Verdict::Waits { wait, because } = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!(because, Because::Limit(Limit::sliding(3, ms(60_000))));
        assert!(wait <= Some(ms(60_100)), "{wait:?}");
    }
}

/// A release ends learned limits, also by a process that ignores them.
#[tokio::test(start_paused = true)]
async fn release_ends_learned_limits_that_its_process_ignores() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let make = |trust| {
        let builder = builder(Quota::per_minute(3)).trust_headers(trust);
        builder.store(store.clone()).build().unwrap()
    };
    let (learns, ignores) = (make(HeaderTrust::Stricter), make(HeaderTrust::Ignore));
    respond(&learns, 200, &[("ratelimit-policy", r#""a";q=1;w=120"#)]).await;
    ignores.limiter().release(Key::ALL).await.unwrap();
    let source = learns.limiter().peek(Key::ALL).await.unwrap().quota_source;
    assert_eq!(source, QuotaSource::Builder);
}

/// A hold that another process has caused counts for all, also for those that ignore headers.
#[tokio::test(start_paused = true)]
async fn explain_tells_holds_that_its_process_obeys() {
    let used_up = [
        ("x-ratelimit-limit", "3"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "30"),
    ];
    for (status, headers) in [(429, &[("retry-after", "30")][..]), (200, &used_up[..])] {
        for is_there_before in [false, true] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
            let make = |trust| {
                let builder = builder(Quota::per_minute(3)).trust_headers(trust);
                let builder = builder.store(store.clone()).max_wait(ms(0));
                builder.build().unwrap()
            };
            let ignores = make(HeaderTrust::Ignore).limiter();
            if is_there_before {
                drop(ignores.acquire(Key::ALL).await.unwrap());
            }
            respond(&make(HeaderTrust::Usage), status, headers).await;
            let told = ignores.explain(Key::ALL).await.unwrap().verdict;
            let is_told = !matches!(told, Verdict::Goes);
            let is_refused = ignores.acquire(Key::ALL).await.is_err();
            assert_eq!(is_told, is_refused, "{status} {is_there_before}: {told:?}");
        }
    }
}
