//! Units: limits that count tokens or points, and requests that cost several units.

use crate::support::{self, patient, remote};

#[cfg(feature = "redis")]
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tollgate::limiter::Verdict;
use tollgate::store::{MemoryStore, Store};
use tollgate::{
    Cost, Estimates, HeaderTrust, Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer,
    Reason, Settlement,
};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

use remote::Remote;
use support::count_of;

const DAY: Duration = Duration::from_secs(86_400);
const MINUTE: Duration = Duration::from_secs(60);

fn both() -> Quota {
    Quota::per_minute(10).and(Quota::per_minute(1000).of("tokens"))
}

fn limiter(quota: Quota) -> Limiter {
    limiter_over(quota, Arc::new(MemoryStore::default()))
}

fn limiter_over(quota: Quota, store: Arc<dyn Store>) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(DAY).store(store);
    builder.settle_by_hand().build().unwrap().limiter()
}

/// Returns what is used of each unit, without what is prefetched.
async fn used_of(limiter: &Limiter, key: Key) -> BTreeMap<&'static str, u64> {
    limiter.shutdown().await.unwrap();
    let status = limiter.peek(key).await.unwrap();
    let limits = status.limits.iter();
    limits.map(|usage| (usage.unit, usage.used)).collect()
}

#[tokio::test(start_paused = true)]
async fn each_limit_counts_its_unit() {
    let limiter = limiter(both());
    let key = Key::new("one");
    drop(
        limiter
            .acquire(key)
            .cost(Cost::of("tokens", 300))
            .await
            .unwrap(),
    );
    drop(limiter.acquire(key).cost(2).await.unwrap());
    let free = Cost::new(0).and("tokens", 50);
    drop(limiter.acquire(key).cost(free).await.unwrap());
    let expected = BTreeMap::from([("requests", 3), ("tokens", 350)]);
    assert_eq!(used_of(&limiter, key).await, expected);
    assert_eq!(limiter.peek(key).await.unwrap().free, 7);
}

/// A plain limiter of the same key and store counts apart from the tokens.
#[tokio::test(start_paused = true)]
async fn units_of_one_key_are_counted_apart() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let requests = limiter_over(Quota::per_minute(10), store.clone());
    let tokens = limiter_over(Quota::per_minute(1000).of("tokens"), store.clone());
    let both = limiter_over(both(), store);
    drop(requests.acquire(Key::ALL).cost(4).await.unwrap());
    drop(
        tokens
            .acquire(Key::ALL)
            .cost(Cost::of("tokens", 600))
            .await
            .unwrap(),
    );
    let expected = BTreeMap::from([("requests", 4), ("tokens", 600)]);
    assert_eq!(used_of(&both, Key::ALL).await, expected);
}

#[tokio::test(start_paused = true)]
async fn requests_take_units_of_all_limits_or_of_none() {
    let limiter = limiter(both());
    drop(
        limiter
            .acquire(Key::ALL)
            .cost(Cost::of("tokens", 900))
            .await
            .unwrap(),
    );
    let start = Instant::now();
    let waits = tokio::spawn({
        let limiter = limiter.clone();
        async move {
            drop(
                limiter
                    .acquire(Key::ALL)
                    .cost(Cost::of("tokens", 200))
                    .await,
            )
        }
    });
    sleep(Duration::from_secs(30)).await;
    // Its request is booked for the moment at which it has its tokens.
    for _ in 0..8 {
        let without = Cost::new(1).and("tokens", 0);
        drop(limiter.acquire(Key::ALL).cost(without).await.unwrap());
    }
    assert_eq!(start.elapsed(), Duration::from_secs(30));
    waits.await.unwrap();
    assert!(start.elapsed() >= MINUTE, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn errors_name_the_unit() {
    let layer = RateLimitLayer::builder(both())
        .charged_by_hand()
        .max_wait(Duration::ZERO);
    let limiter = layer.build().unwrap().limiter();
    let prompt = |tokens| limiter.acquire(Key::ALL).cost(Cost::of("tokens", tokens));
    let large = prompt(1001).await.unwrap_err();
    let reason = Reason::CostAboveLimit {
        cost: 1001,
        largest: 1000,
        unit: "tokens",
    };
    assert_eq!(large.reason(), Some(reason));
    assert_eq!(
        large.to_string(),
        "refused locally (all): it costs 1001 tokens, and the quota allows at most 1000 at once; split it, or raise the \
         limit or burst"
    );
    drop(prompt(800).await.unwrap());
    let refused = prompt(300).await.unwrap_err();
    assert_eq!(refused.report().unit(), "tokens");
    assert_eq!(refused.report().key(), "all");
    let text = refused.to_string();
    assert!(text.contains("the limit is 1000 tokens/60s"), "{text}");
    for _ in 0..9 {
        drop(prompt(1).await.unwrap());
    }
    let refused = prompt(1).await.unwrap_err();
    assert_eq!(refused.report().unit(), "requests");
    assert!(!refused.to_string().contains("requests"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn each_unit_is_settled_with_its_true_cost() {
    let limiter = limiter(both());
    let acquire = |tokens| limiter.acquire(Key::ALL).cost(Cost::of("tokens", tokens));
    let mut sent = acquire(400).await.unwrap().begin().unwrap();
    sent.settle(Cost::of("tokens", 150));
    let of_both = |requests, tokens| BTreeMap::from([("requests", requests), ("tokens", tokens)]);
    assert_eq!(used_of(&limiter, Key::ALL).await, of_both(1, 150));
    sent.settle(3);
    assert_eq!(used_of(&limiter, Key::ALL).await, of_both(3, 150));
    sent.settle(Cost::new(0).and("tokens", 500));
    assert_eq!(used_of(&limiter, Key::ALL).await, of_both(2, 500));
}

/// A server that answers as `answer` says.
async fn send(
    layer: &RateLimitLayer,
    path: &str,
    answer: &[(&str, &str)],
    status: u16,
) -> Result<Response<()>, tollgate::Error> {
    let server = service_fn(|_: Request<()>| async {
        let mut response = Response::builder().status(StatusCode::from_u16(status).unwrap());
        for (name, value) in answer {
            response = response.header(*name, *value);
        }
        Ok::<_, Infallible>(response.body(()).unwrap())
    });
    let mut service = ServiceBuilder::new().layer(layer.clone()).service(server);
    let request = Request::get(format!("http://example.com{path}"))
        .body(())
        .unwrap();
    service.ready().await.unwrap().call(request).await
}

#[tokio::test(start_paused = true)]
async fn layers_count_and_settle_units() {
    let layer = RateLimitLayer::builder("10/min, 1000 tokens/min".parse::<Quota>().unwrap())
        .key(|request| Key::new(request.path()))
        .cost(|request| Cost::of("tokens", if request.path() == "/long" { 500 } else { 100 }))
        .settle(|response| Some(Cost::of("tokens", response.number("x-tokens")?)))
        .build()
        .unwrap();
    send(&layer, "/long", &[], 200).await.unwrap();
    send(&layer, "/short", &[("x-tokens", "130")], 200)
        .await
        .unwrap();
    let limiter = layer.limiter();
    let long = used_of(&limiter, Key::new("/long")).await;
    assert_eq!(long, BTreeMap::from([("requests", 1), ("tokens", 500)]));
    let short = used_of(&limiter, Key::new("/short")).await;
    assert_eq!(short, BTreeMap::from([("requests", 1), ("tokens", 130)]));
}

/// A model counts by model, and the organisation counts all: each requests and tokens.
#[tokio::test(start_paused = true)]
async fn several_keys_count_several_units() {
    let layer = RateLimitLayer::builder(both())
        .cost(|_| Cost::of("tokens", 100))
        .settle(|response| Some(Cost::of("tokens", response.number("x-tokens")?)))
        .and_per(
            "model",
            "5/min, 400 tokens/min".parse().unwrap(),
            |request| Key::new(request.path()),
        )
        .build()
        .unwrap();
    let answer = [("x-tokens", "80")];
    send(&layer, "/a", &answer, 200).await.unwrap();
    send(&layer, "/b", &answer, 200).await.unwrap();
    let all = used_of(&layer.limiter(), Key::ALL).await;
    assert_eq!(all, BTreeMap::from([("requests", 2), ("tokens", 160)]));
    let models = layer.limiter_of("model").unwrap();
    let one = used_of(&models, Key::new("/a").and("model")).await;
    assert_eq!(one, BTreeMap::from([("requests", 1), ("tokens", 80)]));
    // The tokens of the model are used up first.
    for _ in 0..3 {
        send(&layer, "/a", &answer, 200).await.unwrap();
    }
    let start = Instant::now();
    let refused = send(&layer, "/a", &answer, 200).await.unwrap_err();
    let report = Limited::find(&refused).unwrap().report();
    assert_eq!(report.name(), Some("model"));
    assert_eq!(report.unit(), "tokens");
    let wait = report.retry_after().unwrap();
    sleep(wait - Duration::from_secs(10)).await;
    send(&layer, "/a", &answer, 200).await.unwrap();
    assert!(start.elapsed() >= MINUTE, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn holds_stop_requests_of_any_unit() {
    let layer = RateLimitLayer::builder(both())
        .charged_by_hand()
        .max_wait(Duration::ZERO);
    let limiter = layer.build().unwrap().limiter();
    limiter.hold_for(Key::ALL, MINUTE).await.unwrap();
    assert!(limiter.peek(Key::ALL).await.unwrap().held.is_some());
    for cost in [Cost::new(1), Cost::new(0).and("tokens", 5)] {
        let refused = limiter.acquire(Key::ALL).cost(cost).await.unwrap_err();
        assert_eq!(refused.reason(), Some(Reason::Held));
    }
    limiter.release(Key::ALL).await.unwrap();
    assert!(limiter.peek(Key::ALL).await.unwrap().held.is_none());
    drop(
        limiter
            .acquire(Key::ALL)
            .cost(Cost::of("tokens", 5))
            .await
            .unwrap(),
    );
}

/// The task that books went on asking for slots from the end of the hold on.
#[tokio::test(start_paused = true)]
async fn requests_of_several_units_leave_when_a_hold_is_released() {
    for settles in [false, true] {
        let mut builder = RateLimitLayer::builder(both()).charged_by_hand();
        if settles {
            builder = builder.settle_by_hand();
        }
        let limiter = builder.max_wait(2 * MINUTE).build().unwrap().limiter();
        limiter.hold_for(Key::ALL, MINUTE).await.unwrap();
        let cost = || Cost::new(1).and("tokens", 5);
        let waits: Vec<_> = (0..3)
            .map(|_| tokio::spawn(limiter.acquire(Key::ALL).cost(cost()).into_future()))
            .collect();
        let start = Instant::now();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(limiter.peek(Key::ALL).await.unwrap().waiting, 3);
        assert_eq!(limiter.busiest(1)[0].waiting(), 3);
        limiter.release(Key::ALL).await.unwrap();
        for wait in waits {
            drop(wait.await.unwrap().unwrap());
        }
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "{settles}: {:?}",
            start.elapsed()
        );
    }
}

/// A refusal that states that the tokens are used up lets requests without tokens pass.
#[tokio::test(start_paused = true)]
async fn refusals_hold_the_unit_that_is_used_up() {
    let layer = RateLimitLayer::builder(both())
        .key(|_| Key::new("organisation"))
        .cost(|request| match request.path() {
            "/models" => Cost::new(1).and("tokens", 0),
            _ => Cost::of("tokens", 10),
        })
        .max_wait(Duration::from_secs(1))
        .build()
        .unwrap();
    let used_up = [
        ("x-ratelimit-limit-requests", "10"),
        ("x-ratelimit-remaining-requests", "9"),
        ("x-ratelimit-limit-tokens", "1000"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-tokens", "30s"),
        ("retry-after", "30"),
    ];
    send(&layer, "/chat", &used_up, 429).await.unwrap();
    let refused = send(&layer, "/chat", &[], 200).await.unwrap_err();
    let limited = Limited::find(&refused).unwrap();
    assert_eq!(limited.reason(), Some(Reason::Held));
    assert_eq!(limited.report().unit(), "tokens");
    send(&layer, "/models", &[], 200).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn refusals_without_a_reason_hold_each_unit() {
    let layer = RateLimitLayer::builder(both())
        .key(|_| Key::new("organisation"))
        .cost(|request| match request.path() {
            "/chat" => Cost::new(1).and("tokens", 10),
            _ => Cost::new(0).and("tokens", 10),
        })
        .max_wait(Duration::from_secs(1))
        .build()
        .unwrap();
    send(&layer, "/chat", &[("retry-after", "30")], 429)
        .await
        .unwrap();
    for path in ["/chat", "/tokens"] {
        let refused = send(&layer, path, &[], 200).await.unwrap_err();
        let limited = Limited::find(&refused).unwrap();
        assert_eq!(limited.reason(), Some(Reason::Held), "{path}");
    }
}

/// Another client of the same account uses tokens.
#[tokio::test(start_paused = true)]
async fn headers_are_about_their_unit() {
    let quota = Quota::per_minute(100)
        .and(Quota::per_minute(10_000).of("input_tokens"))
        .and(Quota::per_minute(2000).of("output_tokens"));
    let layer = RateLimitLayer::builder(quota)
        .key(|_| Key::new("organisation"))
        .cost(|_| Cost::of("input_tokens", 10).and("output_tokens", 10))
        .build()
        .unwrap();
    let soon = std::time::SystemTime::now() + Duration::from_secs(30);
    let soon = httpdate::fmt_http_date(soon);
    let answer = [
        ("anthropic-ratelimit-requests-limit", "100"),
        ("anthropic-ratelimit-requests-remaining", "99"),
        ("anthropic-ratelimit-input-tokens-limit", "10000"),
        ("anthropic-ratelimit-input-tokens-remaining", "7000"),
        ("anthropic-ratelimit-input-tokens-reset", &soon),
        ("anthropic-ratelimit-output-tokens-limit", "2000"),
        ("anthropic-ratelimit-output-tokens-remaining", "1000"),
        ("anthropic-ratelimit-output-tokens-reset", &soon),
    ];
    send(&layer, "/", &answer, 200).await.unwrap();
    // What the response states reaches the store with the next call.
    sleep(Duration::from_millis(100)).await;
    send(&layer, "/", &answer, 200).await.unwrap();
    let status = layer
        .limiter()
        .peek(Key::new("organisation"))
        .await
        .unwrap();
    let reserved = status
        .limits
        .iter()
        .map(|usage| (usage.unit, usage.reserved));
    let reserved: BTreeMap<_, _> = reserved.collect();
    assert_eq!(reserved["requests"], 0, "{status:?}");
    assert!(
        (2900..=3000).contains(&reserved["input_tokens"]),
        "{status:?}"
    );
    assert!(
        (900..=1000).contains(&reserved["output_tokens"]),
        "{status:?}"
    );
}

/// The upstream states a limit of tokens that is stricter than the configured one.
#[tokio::test(start_paused = true)]
async fn stated_limits_apply_to_their_unit() {
    let layer = RateLimitLayer::builder(both())
        .key(|_| Key::new("organisation"))
        .cost(|_| Cost::of("tokens", 300))
        .trust_headers(HeaderTrust::Stricter)
        .max_wait(Duration::from_secs(1))
        .build()
        .unwrap();
    let stated = [("ratelimit-policy", r#""tokens";q=500;w=60;qu="tokens""#)];
    send(&layer, "/", &stated, 200).await.unwrap();
    let status = layer
        .limiter()
        .peek(Key::new("organisation"))
        .await
        .unwrap();
    let learned: Vec<_> = status
        .learned
        .iter()
        .map(|stated| stated.limit.count())
        .collect();
    assert_eq!(learned, [500]);
    let refused = send(&layer, "/", &stated, 200).await.unwrap_err();
    let report = Limited::find(&refused).unwrap().report();
    assert_eq!(report.unit(), "tokens");
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_are_limited_beside_units() {
    let quota = Quota::in_flight(1).and(Quota::per_minute(1000).of("tokens"));
    let layer = RateLimitLayer::builder(quota)
        .charged_by_hand()
        .max_wait(Duration::ZERO);
    let limiter = layer.build().unwrap().limiter();
    let acquire = || limiter.acquire(Key::ALL).cost(Cost::of("tokens", 10));
    let first = acquire().await.unwrap();
    assert!(acquire().await.is_err());
    drop(first);
    drop(acquire().await.unwrap());
    assert_eq!(used_of(&limiter, Key::ALL).await["tokens"], 20);
}

#[test]
fn units_are_checked_when_a_layer_is_built() {
    let tokens = Quota::per_minute(1000);
    let build = |quota| RateLimitLayer::new(quota).map(drop);
    let is_refused = |quota, start: &str| {
        let error = build(quota).unwrap_err().to_string();
        assert!(error.starts_with(start), "{error}");
    };
    is_refused(tokens.of(""), "unit \"\": ");
    is_refused(tokens.of("input tokens"), "unit \"input tokens\": ");
    is_refused(Quota::in_flight(3).of("tokens"), "of() is for rates");
    assert_eq!(build(tokens.of("requests")), Ok(()));
    let three = ["a", "b", "c"].map(|unit| tokens.of(unit));
    let three = three.into_iter().fold(tokens, Quota::and);
    let layer = RateLimitLayer::builder(three)
        .charged_by_hand()
        .and_per("one", three, |_| Key::ALL)
        .and_per("two", tokens, |_| Key::ALL);
    let error = layer.build().unwrap_err().to_string();
    assert!(error.contains("at most eight limits"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn shutdown_gives_back_the_permits_of_all_units() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let (limiter, other) = (
        limiter_over(both(), store.clone()),
        limiter_over(both(), store),
    );
    for _ in 0..3 {
        drop(
            limiter
                .acquire(Key::ALL)
                .cost(Cost::of("tokens", 10))
                .await
                .unwrap(),
        );
    }
    limiter.shutdown().await.unwrap();
    let expected = BTreeMap::from([("requests", 3), ("tokens", 30)]);
    assert_eq!(used_of(&other, Key::ALL).await, expected);
}

/// While the store is away, a process uses its share of each unit.
#[tokio::test(start_paused = true)]
async fn shares_are_of_each_unit() {
    let store = Arc::new(Remote::default());
    let limiter =
        RateLimitLayer::builder(Quota::per_minute(100).and(Quota::per_minute(1000).of("tokens")))
            .charged_by_hand()
            .store(store.clone())
            .on_store_error(OnStoreError::FallbackShare)
            .fallback_share(0.5)
            .max_wait(Duration::from_secs(2))
            .build()
            .unwrap()
            .limiter();
    store.fails.store(true, Ordering::Relaxed);
    let prompt = || limiter.acquire(Key::ALL).cost(Cost::of("tokens", 100));
    for _ in 0..5 {
        drop(prompt().await.unwrap());
    }
    let refused = prompt().await.unwrap_err();
    assert_eq!(refused.report().unit(), "tokens");
    assert_eq!(count_of(&limiter.stats(), "keys_alone"), 1);
}

/// How the prompts of [`use_of_tokens`] are estimated.
#[derive(Clone, Copy, Debug)]
enum Estimate {
    /// Their true cost.
    Exact,
    /// The largest cost. The true cost is settled after the response.
    Largest,
}

/// What the upstream saw in [`use_of_tokens`].
struct Seen {
    /// The part of the tokens of all minutes but the first that was used, in per cent.
    percent: f64,
    /// The most requests and tokens in any minute.
    most: [u64; 2],
    /// The longest wait of a request.
    longest_wait: Duration,
}

/// Sends prompts of 100 to 10,000 tokens that take 1 to 10 s, by 60 callers in four processes, under
/// 500 requests and 200,000 tokens a minute.
async fn use_of_tokens(estimate: Estimate) -> Seen {
    const TOKENS: u32 = 200_000;
    const MINUTES: u32 = 20;
    let store: Arc<dyn Store> = Arc::new(Remote::default());
    let quota = Quota::per_minute(500).and(Quota::per_minute(TOKENS).of("tokens"));
    let processes: Vec<Limiter> = (0..4).map(|_| limiter_over(quota, store.clone())).collect();
    let log = Arc::new(Mutex::new(Vec::new()));
    let longest = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let callers = (0..60_u64).map(|caller| {
        let limiter = processes[caller as usize % 4].clone();
        let (log, longest) = (log.clone(), longest.clone());
        async move {
            // Numbers without a pattern: a linear congruential generator.
            let mut state = caller;
            let mut below = |most: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % most
            };
            while start.elapsed() < MINUTE * MINUTES {
                let actual = 100 + u32::try_from(below(9901)).unwrap();
                let took = Duration::from_millis(1000 + below(9000));
                let tokens = match estimate {
                    Estimate::Exact => actual,
                    Estimate::Largest => 10_000,
                };
                let asked = Instant::now();
                let acquire = limiter.acquire(Key::ALL).cost(Cost::of("tokens", tokens));
                let mut sent = acquire.await.unwrap().begin().unwrap();
                longest.fetch_max(asked.elapsed().as_millis() as u64, Ordering::Relaxed);
                log.lock()
                    .unwrap()
                    .push((Instant::now(), u64::from(actual)));
                sleep(took).await;
                sent.settle(Cost::of("tokens", actual));
            }
        }
    });
    join_all(callers).await;
    let log = log.lock().unwrap();
    let counted = log
        .iter()
        .filter(|(at, _)| (MINUTE..MINUTE * MINUTES).contains(&(*at - start)));
    let used: u64 = counted.map(|(_, units)| units).sum();
    let mut most = [0, 0];
    for (first, (from, _)) in log.iter().enumerate() {
        let inside = log[first..]
            .iter()
            .take_while(|(at, _)| *at - *from < MINUTE);
        let (count, units) =
            inside.fold((0, 0), |(count, sum), (_, units)| (count + 1, sum + units));
        most = [most[0].max(count), most[1].max(units)];
    }
    Seen {
        percent: used as f64 / f64::from(TOKENS * (MINUTES - 1)) * 100.0,
        most,
        longest_wait: Duration::from_millis(longest.load(Ordering::Relaxed)),
    }
}

#[tokio::test(start_paused = true)]
async fn processes_use_most_of_their_tokens() {
    for (estimate, goal) in [(Estimate::Exact, 95.0), (Estimate::Largest, 85.0)] {
        let Seen {
            percent,
            most,
            longest_wait,
        } = use_of_tokens(estimate).await;
        println!(
            "{estimate:?}: {percent:.1} % of the tokens used, at most {most:?} a minute, waits up to {longest_wait:?}"
        );
        assert!(percent >= goal, "{estimate:?}: {percent} %");
        assert!(
            most[0] <= 500 && most[1] <= 200_000,
            "{estimate:?}: {most:?}"
        );
    }
}

/// Two processes share their limits of requests and tokens through Redis: in bursts, with prompts of
/// different length.
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_share_units_through_redis() {
    let server = redis_server::RedisServer::start().unwrap();
    let window = Duration::from_secs(1);
    let quota = Quota::new(20, window).and(Quota::new(1000, window).of("tokens"));
    let processes = [(); 2].map(|()| limiter_over(quota, patient::store(&server.url())));
    let log = Mutex::new(Vec::new());
    let calls = (0..60_u32).map(|number| {
        let (limiter, log) = (&processes[number as usize % 2], &log);
        async move {
            let tokens = [10, 400, 30, 90, 150][number as usize % 5];
            let acquire = limiter.acquire(Key::ALL).cost(Cost::of("tokens", tokens));
            let permit = acquire.await.unwrap();
            log.lock().unwrap().push((Instant::now(), tokens));
            drop(permit);
        }
    });
    let start = Instant::now();
    join_all(calls).await;
    // 8160 tokens are nine windows of 1000, of which the first and the last take no time.
    let least = window * 8;
    let took = start.elapsed();
    assert!(took >= least && took < least * 2, "{took:?}");
    let mut log = log.into_inner().unwrap();
    log.sort();
    for (first, (from, _)) in log.iter().enumerate() {
        let inside = log[first..]
            .iter()
            .take_while(|(at, _)| *at - *from < window);
        let (requests, tokens) = inside.fold((0, 0), |(n, sum), (_, tokens)| (n + 1, sum + tokens));
        assert!(
            requests <= 20 && tokens <= 1000,
            "{requests} with {tokens} tokens"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn each_unit_has_stats_of_its_own() {
    let layer = RateLimitLayer::builder(both())
        .charged_by_hand()
        .name("units test");
    let limiter = layer.build().unwrap().limiter();
    for tokens in [30, 50] {
        drop(
            limiter
                .acquire(Key::ALL)
                .cost(Cost::of("tokens", tokens))
                .await
                .unwrap(),
        );
    }
    let stats = limiter.stats();
    assert_eq!(
        (stats.name(), stats.unit(), stats.units()),
        ("units test", "requests", 2)
    );
    assert_eq!(stats.requests().total(), 2);
    let all = tollgate::stats::all();
    let tokens = all
        .iter()
        .find(|stats| stats.name() == "units test tokens")
        .unwrap();
    assert_eq!((tokens.unit(), tokens.units()), ("tokens", 80));
    assert_eq!(tokens.requests().total(), 0);
}

/// A drain refuses the prompts whose tokens come too late.
#[tokio::test(start_paused = true)]
async fn drains_end_requests_of_any_unit() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let builder = RateLimitLayer::builder(both())
        .charged_by_hand()
        .max_wait(DAY)
        .store(store.clone());
    let limiter = builder.build().unwrap().limiter();
    let prompt = |tokens| limiter.acquire(Key::ALL).cost(Cost::of("tokens", tokens));
    drop(prompt(600).await.unwrap());
    sleep(Duration::from_secs(30)).await;
    let waiters = [400, 600, 10, 400].map(|tokens| tokio::spawn(prompt(tokens)));
    sleep(Duration::from_millis(1)).await;
    // The first one leaves at once. The tokens of the prompt before come back in 30 s, and are for the
    // second.
    let drained = limiter.drain(Duration::from_secs(40)).await.unwrap();
    assert_eq!((drained.left, drained.refused), (1, 2), "{drained}");
    let outcomes = join_all(waiters).await;
    let refused = outcomes
        .last()
        .unwrap()
        .as_ref()
        .unwrap()
        .as_ref()
        .unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::Draining));
}

/// A unit that nothing charges would be limited in name only.
#[test]
fn build_fails_if_nothing_charges_a_unit() {
    let tokens: Quota = "500/min, 30 tokens/hour".parse().unwrap();
    let layer = || RateLimitLayer::builder(tokens);
    let per_key =
        RateLimitLayer::builder(Quota::per_minute(500)).and_per("a", tokens, |_| Key::ALL);
    for builder in [layer(), per_key] {
        let error = builder.build().unwrap_err().to_string();
        assert!(
            error
                .starts_with("cost is not set, and the quota counts tokens, which nothing charges"),
            "{error}"
        );
    }
    for builder in [
        layer().cost(|_| Cost::of("tokens", 150)),
        layer().settle(|_| Some(Cost::of("tokens", 150))),
        layer().settle_by_hand(),
        layer().charged_by_hand(),
    ] {
        assert!(builder.build().is_ok());
    }
}

/// A mistyped unit is reported at once, and stops the requests soon.
#[tokio::test(start_paused = true)]
async fn requests_that_never_state_a_unit_are_refused() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = events.clone();
    let layer = RateLimitLayer::builder("500/min, 30 tokens/hour".parse().unwrap())
        .cost(|_| Cost::of("token", 150))
        .on_event(move |event| told.lock().unwrap().push(event.to_string()))
        .build()
        .unwrap();
    for _ in 0..100 {
        send(&layer, "/", &[], 200).await.unwrap();
    }
    assert_eq!(
        *events.lock().unwrap(),
        [
            "the units of a cost are not those of the limits: tokens is missing, and counts as 0; token is unknown, and is \
             ignored; state each unit by the name that the quota has"
        ]
    );
    let refused = send(&layer, "/", &[], 200).await.unwrap_err();
    let limited = Limited::find(&refused).unwrap();
    assert_eq!(
        limited.reason(),
        Some(Reason::NotCharged { unit: "tokens" })
    );
}

/// Ten callers, all at once, whose first estimate is ten times the limit, or just above it. The answers take a second.
#[tokio::test(start_paused = true)]
async fn estimates_above_the_limit_are_learned() {
    for (limit, fits) in [(100, 1), (1000, 17)] {
        let estimates = Estimates::new(0.95);
        let learned = estimates.clone();
        let layer = RateLimitLayer::builder(Quota::per_minute(limit).of("tokens"))
            .cost(move |_| Cost::of("tokens", learned.estimate("model").unwrap_or(1024)))
            .settle_by_hand()
            .max_wait(DAY)
            .build()
            .unwrap();
        let server = service_fn(|_: Request<()>| async {
            sleep(Duration::from_secs(1)).await;
            Ok::<_, Infallible>(Response::new(()))
        });
        let service = ServiceBuilder::new().layer(layer).service(server);
        let (answered, service, estimates) = (&AtomicU64::new(0), &service, &estimates);
        let callers = (0..10).map(|_| async move {
            loop {
                let request = Request::get("http://example.com/").body(()).unwrap();
                let mut response = service.clone().oneshot(request).await.unwrap();
                let settlement = response.extensions_mut().remove::<Settlement>();
                settlement.unwrap().settle(Cost::of("tokens", 58));
                estimates.learn("model", 58);
                answered.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ = tokio::time::timeout(5 * MINUTE, join_all::<_>(callers)).await;
        let (answered, most) = (answered.load(Ordering::Relaxed), 5 * fits);
        assert!(
            answered * 5 >= most * 4 && answered <= most + fits,
            "{answered} of {most} answers under {limit}"
        );
    }
}

/// The true cost above the limit is charged in full: the next request waits for a whole window.
#[tokio::test(start_paused = true)]
async fn costs_above_the_limit_wait_for_all_of_it_or_are_refused() {
    let limiter = limiter(both());
    let start = Instant::now();
    let prompt = |tokens| limiter.acquire(Key::ALL).cost(Cost::of("tokens", tokens));
    drop(prompt(10).await.unwrap());
    sleep(Duration::from_secs(20)).await;
    let explained = prompt(5000).explain().await.unwrap();
    assert!(
        matches!(explained.verdict, Verdict::Waits { .. }),
        "{explained}"
    );
    let mut sent = prompt(5000).await.unwrap().begin().unwrap();
    assert!(start.elapsed() >= MINUTE, "{:?}", start.elapsed());
    sent.settle(Cost::of("tokens", 5000));
    let start = Instant::now();
    drop(prompt(1).await.unwrap());
    assert!(start.elapsed() >= MINUTE, "{:?}", start.elapsed());

    let builder = RateLimitLayer::builder(both()).settle_by_hand();
    let strict = builder.wait_above_limit(false).build().unwrap().limiter();
    let refused = strict.acquire(Key::ALL).cost(Cost::of("tokens", 1001));
    assert!(matches!(
        refused.await.unwrap_err().reason(),
        Some(Reason::CostAboveLimit { .. })
    ));
}

/// They were refused, because their cost was above the limit. Requests that came later waited.
#[tokio::test(start_paused = true)]
async fn requests_wait_for_a_limit_that_is_lower_than_they_knew() {
    let store = Arc::new(MemoryStore::default());
    let process = || {
        let builder = RateLimitLayer::builder(Quota::per_minute(100)).settle_by_hand();
        let builder = builder.store(store.clone()).max_wait(10 * MINUTE);
        builder.build().unwrap().limiter()
    };
    let (one, other) = (process(), process());
    let acquire = |limiter: &Limiter, key| limiter.acquire(Key::new(key)).cost(80).into_future();
    one.set_quota(Key::new("set"), Quota::per_minute(50))
        .await
        .unwrap();
    drop(acquire(&other, "set").await.unwrap());

    drop(acquire(&one, "later").await.unwrap().begin().unwrap());
    let waits = tokio::spawn(acquire(&one, "later"));
    sleep(Duration::from_secs(1)).await;
    one.set_quota(Key::new("later"), Quota::per_minute(50))
        .await
        .unwrap();
    drop(waits.await.unwrap().unwrap());
}
