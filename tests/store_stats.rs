//! What a store in Redis counts, against what Redis has executed, and its metrics.

use std::net::TcpListener;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use redis_server::{Proxy, RedisServer};
use tollgate::store::{RedisStore, StoreCalls, StoreStats};
use tollgate::{AdaptiveThrottleLayer, Key, Limiter, Quota, RateLimitLayer};

/// The longest wait for what should come within a second.
const PATIENCE: Duration = Duration::from_secs(60);

/// The page of the exporter of this process.
static PAGE: LazyLock<PrometheusHandle> =
    LazyLock::new(|| PrometheusBuilder::new().install_recorder().unwrap());

/// Returns a metric of the store with this prefix, if the page has it. `name` follows `tollgate_store_`.
fn line(prefix: &str, name: &str, labels: &str) -> Option<f64> {
    LazyLock::force(&PAGE);
    tollgate::metrics::publish();
    let start = format!("tollgate_store_{name}{{store=\"{prefix}\"{labels}}} ");
    let page = PAGE.render();
    let line = page.lines().find_map(|line| line.strip_prefix(&start));
    line.map(|value| value.parse::<f64>().unwrap())
}

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
    let line = |name: &str, labels: &str| line("counted", name, labels);
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

/// How a call to a store fails.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Connections are refused, so the call fails at once.
    Refused,
    /// The connection breaks while the call is under way.
    Broken,
    /// Nothing is answered on an open connection until the call times out.
    Silent,
}

/// Each call that gets no reply counts as `away` once, and the store is not up until the next reply.
#[tokio::test(flavor = "multi_thread")]
async fn each_way_to_get_no_reply_counts_as_away() {
    let redis = RedisServer::start().unwrap();
    for way in [Way::Refused, Way::Broken, Way::Silent] {
        let prefix = format!("{way:?}");
        let proxy = Proxy::start(redis.port()).unwrap();
        let builder = RedisStore::builder(&proxy.url()).prefix(&prefix);
        let builder = builder.store_timeout(Duration::from_secs(2));
        let store = Arc::new(builder.build().unwrap());
        let limiter = RateLimitLayer::builder(Quota::per_second(1000)).store(store.clone());
        let limiter = limiter.build().unwrap().limiter();
        let hold = || limiter.hold_for(Key::new("held"), Duration::from_millis(1));
        hold().await.unwrap();
        assert_eq!(line(&prefix, "up", ""), Some(1.0), "{way:?}");
        for _ in 0..3 {
            let away = || result(calls(&store.stats(), "permits"), "away");
            let (start, before) = (Instant::now(), away());
            let call = match way {
                Way::Refused => {
                    proxy.refuse(true);
                    hold().await
                }
                Way::Broken => {
                    proxy.swallow(true);
                    let breaks = async {
                        tokio::time::sleep(Duration::from_millis(300)).await;
                        proxy.refuse(true);
                    };
                    let (call, ()) = tokio::join!(hold(), breaks);
                    call
                }
                Way::Silent => {
                    proxy.swallow(true);
                    hold().await
                }
            };
            let took = start.elapsed();
            assert!(call.is_err(), "{way:?}");
            let stats = until(&store, |stats| stats.is_up() == Some(false)).await;
            assert_eq!(line(&prefix, "up", ""), Some(0.0), "{way:?}");
            assert_eq!(away(), before + 1, "{way:?}: {took:?}");
            let labels = ",call=\"permits\",result=\"away\"";
            let published = line(&prefix, "calls_total", labels);
            assert_eq!(published, Some((before + 1) as f64), "{way:?}");
            assert_eq!(result(calls(&stats, "permits"), "failed"), 0, "{way:?}");
            proxy.swallow(false);
            proxy.refuse(false);
            // The first calls may still find the broken connection.
            while hold().await.is_err() {
                assert!(start.elapsed() < PATIENCE, "{way:?}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(line(&prefix, "up", ""), Some(1.0), "{way:?}");
        }
    }
}

/// What accepts connections and never replies is no store that is up.
#[tokio::test(flavor = "multi_thread")]
async fn servers_that_never_reply_are_not_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let builder = RedisStore::builder(&url).prefix("mute");
    let store = builder.store_timeout(Duration::from_millis(300)).build();
    let store = Arc::new(store.unwrap());
    let limiter = RateLimitLayer::builder(Quota::per_second(1000)).store(store.clone());
    let limiter = limiter.build().unwrap().limiter();
    for failed in 1..=3 {
        let hold = limiter.hold_for(Key::ALL, Duration::from_millis(1));
        assert!(hold.await.is_err());
        // The call may time out a moment before the attempt to connect that it waits for.
        let stats = until(&store, |stats| stats.is_up() == Some(false)).await;
        assert_eq!(result(calls(&stats, "permits"), "away"), failed);
        assert_eq!(line("mute", "up", ""), Some(0.0), "{stats:?}");
    }
}

/// An error that Redis replies is no outage, but the store is of no use until the next reply in time.
#[tokio::test(flavor = "multi_thread")]
async fn replies_that_are_errors_count_as_failed() {
    let redis = RedisServer::start().unwrap();
    let store = store(&redis, "errors");
    let limiter = RateLimitLayer::builder(Quota::per_second(1000)).store(store.clone());
    let limiter = limiter.build().unwrap().limiter();
    let hold = || limiter.hold_for(Key::ALL, Duration::from_millis(1));
    hold().await.unwrap();
    let _: String = redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
    for failed in 1..=3 {
        assert!(hold().await.is_err());
        let stats = store.stats();
        let counts = ["away", "failed"].map(|name| result(calls(&stats, "permits"), name));
        assert_eq!(counts, [0, failed]);
    }
    let _: String = redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
    hold().await.unwrap();
    assert_eq!(line("errors", "up", ""), Some(1.0));
}
