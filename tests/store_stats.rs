//! What a store in Redis counts, against what Redis has executed, and its metrics.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::PrometheusBuilder;
use redis_server::RedisServer;
use tollgate::store::{RedisStore, StoreCalls, StoreStats};
use tollgate::{AdaptiveThrottleLayer, Key, Limiter, Quota, RateLimitLayer};

/// The longest wait for what should come within a second.
const PATIENCE: Duration = Duration::from_secs(60);

fn store(redis: &RedisServer, prefix: &str) -> Arc<RedisStore> {
    let builder = RedisStore::builder(&redis.url()).prefix(prefix);
    Arc::new(
        builder
            .store_timeout(Duration::from_secs(5))
            .build()
            .unwrap(),
    )
}

fn limiter(store: &Arc<RedisStore>) -> Limiter {
    let quota = Quota::per_second(1000).and(Quota::in_flight(5));
    let builder = RateLimitLayer::builder(quota).store(store.clone());
    builder.build().unwrap().limiter()
}

/// Returns how often Redis has executed scripts that it knew or was sent.
fn executed(redis: &RedisServer) -> u64 {
    let stats: String = redis.command(&["INFO", "commandstats"]);
    let calls = stats.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let field = |name| {
            let (_, rest) = rest.split_once(name)?;
            rest.split(',').next()?.trim().parse::<u64>().ok()
        };
        let calls: u64 = rest.split(',').next()?.parse().ok()?;
        // Redis rejects a script that it does not know.
        let failed = field("rejected_calls=")? + field("failed_calls=")?;
        ["eval", "evalsha"]
            .contains(&name)
            .then_some(calls - failed)
    });
    calls.sum()
}

fn result(calls: &StoreCalls, name: &str) -> u64 {
    calls
        .by_result()
        .find(|(result, _)| *result == name)
        .unwrap()
        .1
}

fn ok(calls: &StoreCalls) -> u64 {
    result(calls, "ok")
}

/// Returns the calls of a kind.
fn calls<'a>(stats: &'a StoreStats, kind: &str) -> &'a StoreCalls {
    stats.by_call().find(|(call, _)| *call == kind).unwrap().1
}

fn replied(stats: &StoreStats) -> u64 {
    stats.by_call().map(|(_, calls)| ok(calls)).sum()
}

/// Waits until `check` holds for the stats of `store`.
async fn until(store: &RedisStore, check: impl Fn(&StoreStats) -> bool) -> StoreStats {
    let start = Instant::now();
    loop {
        let stats = store.stats();
        if check(&stats) {
            return stats;
        }
        assert!(start.elapsed() < PATIENCE, "{stats:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_equal_what_redis_executed() {
    let redis = RedisServer::start().unwrap();
    let store = store(&redis, "exact");
    let first = store.stats();
    assert_eq!(
        (replied(&first), first.is_up(), first.connects()),
        (0, None, 0)
    );

    let limiter = limiter(&store);
    let throttle = AdaptiveThrottleLayer::builder().store(store.clone());
    let throttle = throttle.build().unwrap().throttle();
    for key in 0..20 {
        drop(limiter.acquire(Key::new(key.to_string())).await.unwrap());
        drop(throttle.acquire(Key::ALL).await.unwrap());
    }
    let other = limiter.clone();
    limiter
        .hold_for(Key::new("held"), Duration::from_secs(1))
        .await
        .unwrap();
    other.release(Key::new("held")).await.unwrap();
    limiter.shutdown().await.unwrap();
    let stats = until(&store, |stats| replied(stats) == executed(&redis)).await;
    assert_eq!((stats.is_up(), stats.connects()), (Some(true), 1));
    assert!(
        ok(calls(&stats, "permits")) >= 22
            && ok(calls(&stats, "in_flight")) >= 20
            && ok(calls(&stats, "register")) >= 1,
        "{stats:#?}"
    );
    for (call, calls) in stats.by_call() {
        assert_eq!(calls.latency().count(), ok(calls), "{call}");
        assert_eq!(
            (result(calls, "away"), result(calls, "failed")),
            (0, 0),
            "{call}"
        );
    }
    assert!(calls(&stats, "permits").latency().quantile(0.5) < Some(Duration::from_secs(5)));
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_are_counted_and_published() {
    let page = PrometheusBuilder::new().install_recorder().unwrap();
    let line = |name: &str, labels: &str| {
        tollgate::metrics::publish();
        let start = format!("tollgate_store_{name}{{store=\"counted\"{labels}}} ");
        let page = page.render();
        let line = page.lines().find_map(|line| line.strip_prefix(&start));
        line.map(|value| value.parse::<f64>().unwrap())
    };
    let mut redis = RedisServer::start().unwrap();
    let first = store(&redis, "counted");
    let limiter = limiter(&first);
    assert_eq!(line("up", ""), None);
    drop(limiter.acquire(Key::ALL).await.unwrap());
    assert_eq!(line("up", ""), Some(1.0));

    until(&first, |stats| stats.is_subscribed() == Some(true)).await;
    assert_eq!(line("deaf", ""), None);

    redis.kill();
    until(&first, |stats| stats.is_subscribed() == Some(false)).await;
    assert_eq!(line("deaf", ""), Some(1.0));
    // A call finds that the connection is broken; without calls, a PING does so within 30 s.
    let held = limiter.hold_for(Key::ALL, Duration::from_secs(1)).await;
    held.unwrap_err();
    until(&first, |stats| stats.is_up() == Some(false)).await;
    assert_eq!(line("up", ""), Some(0.0));
    assert!(result(calls(&first.stats(), "permits"), "away") > 0);
    redis.restart().unwrap();
    until(&first, |stats| stats.is_up() == Some(true)).await;
    until(&first, |stats| stats.is_subscribed() == Some(true)).await;
    assert_eq!(line("deaf", ""), Some(0.0));
    limiter.shutdown().await.unwrap();

    // The counts of a dropped store stay, and another store of the prefix adds to them.
    let stats = first.stats();
    let away = result(calls(&stats, "permits"), "away") as f64;
    drop((limiter, first));
    let second = store(&redis, "counted");
    second.connect().await.unwrap();
    let start = Instant::now();
    while line("connects_total", "") != Some(stats.connects() as f64 + 1.0) {
        assert!(
            start.elapsed() < PATIENCE,
            "{:?}",
            line("connects_total", "")
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let labels = ",call=\"permits\",result=\"away\"";
    assert_eq!(line("calls_total", labels), Some(away));
    assert_eq!(line("up", ""), Some(1.0));
}
