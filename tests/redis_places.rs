//! Where Redis may be: in a cluster, behind Sentinels, behind TLS or credentials that change. Real servers, real failovers.

#![cfg(all(feature = "redis-cluster", feature = "redis-sentinel"))]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis_server::{RedisCluster, RedisServer, Watched};
use tokio::time::{Instant, sleep, timeout};
use tollgate::store::{RedisStore, RedisStoreBuilder};
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer, Reason};

/// One that waits where the machine stands still for as long as a permit lives, and for no limit of these tests.
fn limiter(builder: RedisStoreBuilder, quota: Quota) -> Limiter {
    let store = Arc::new(builder.build().unwrap());
    RateLimitLayer::builder(quota).store(store).max_wait(Duration::from_secs(1)).build().unwrap().limiter()
}

const FEW: u32 = 5;

/// No more than that is waited for a failover.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two processes count the same, over keys wherever they are, and hear of each other.
async fn share(store: impl Fn() -> RedisStoreBuilder) {
    let [one, other] = [(); 2].map(|()| limiter(store(), Quota::per_hour(FEW)));
    for number in 0..30 {
        let key = Key::new(format!("key {number}"));
        let mut granted = 0;
        for _ in 0..FEW {
            for limiter in [&one, &other] {
                granted += u32::from(limiter.acquire(key).await.is_ok());
            }
        }
        assert_eq!(granted, FEW, "{number}");
        assert_eq!(one.peek(key).await.unwrap().limits[0].used, u64::from(FEW));
    }
    // Where only calls in flight are limited, a hold is told and not asked for.
    let [one, other] = [(); 2].map(|()| limiter(store(), Quota::in_flight(1)));
    let (key, start) = (Key::new("held"), Instant::now());
    loop {
        one.hold_for(key, Duration::from_secs(60)).await.unwrap();
        match other.acquire(key).await {
            Err(Limited::Local { reason: Reason::Held, .. }) => break,
            _ => assert!(start.elapsed() < Duration::from_secs(10), "the other is not told"),
        }
        one.release(key).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
}

/// Calls, each of a key of its own, until `over`. Answers the keys, which of the calls were granted, and the longest time
/// in which none was.
async fn calls(limiter: &Limiter, over: &AtomicBool) -> (Vec<Key>, usize, Duration) {
    let (mut keys, mut granted) = (Vec::new(), 0);
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        let key = Key::new(format!("call {}", keys.len()));
        keys.push(key);
        if limiter.acquire(key).await.is_ok() {
            granted += 1;
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        sleep(Duration::from_millis(2)).await;
    }
    (keys, granted, longest.max(last.elapsed()))
}

/// No call was done twice, whatever became of it.
async fn assert_none_twice(
    what: &str,
    limiter: &Limiter,
    (keys, granted, longest): (Vec<Key>, usize, Duration),
) {
    let mut done = [0; 3];
    for key in &keys {
        let start = Instant::now();
        let used = loop {
            match limiter.peek(*key).await {
                Ok(peek) => break peek.limits[0].used,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            sleep(Duration::from_millis(20)).await;
        };
        done[(used as usize).min(2)] += 1;
    }
    let [lost, once, twice] = done;
    println!(
        "{what}: {} calls, {granted} granted; the store has {once}, has lost or never had {lost}, and did {twice} twice; \
         nothing was granted for {longest:.1?} at most",
        keys.len()
    );
    assert_eq!(twice, 0);
    assert!(granted > 100, "{granted} granted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_counts_tells_moves_and_fails_over_and_does_nothing_twice() {
    let mut cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap()).await.unwrap();
    let urls = cluster.urls();
    share(|| RedisStore::cluster(&urls)).await;

    let limiter = limiter(RedisStore::cluster(&urls), Quota::per_hour(FEW));
    let over = Arc::new(AtomicBool::new(false));
    let calling = {
        let (limiter, over) = (limiter.clone(), over.clone());
        tokio::spawn(async move { calls(&limiter, &over).await })
    };
    let disturb = move || {
        let slot = cluster.slot("tollgate:{0}");
        std::thread::sleep(Duration::from_millis(500));
        for number in 0..20 {
            cluster.move_slot((slot + number) % 16384, Duration::from_millis(5));
        }
        let primary = cluster.primary_of(slot).unwrap();
        cluster.node(primary).kill();
        cluster
            .wait_for("another has it", |cluster| cluster.primary_of(slot).is_some_and(|now| now != primary));
        std::thread::sleep(Duration::from_secs(3));
        over.store(true, Ordering::Relaxed);
        // The connections are kept until all has been asked.
        cluster
    };
    let cluster = tokio::task::spawn_blocking(disturb).await.unwrap();
    let called = calling.await.unwrap();
    assert!(called.2 < PATIENCE, "{:?}", called.2);
    assert_none_twice("a cluster, 20 slots moved and a primary killed", &limiter, called).await;
    drop(cluster);
}

/// A key that is being moved is asked for where it goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_moves_is_counted_on_the_way() {
    let cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap()).await.unwrap();
    let urls = cluster.urls();
    let limiter = limiter(RedisStore::cluster(&urls), Quota::per_hour(1000));
    let key = Key::new("the one that moves");
    drop(limiter.acquire(key).await.unwrap());
    let name: String = (urls.iter())
        .find_map(|url| {
            let mut redis = redis::Client::open(url.as_str()).ok()?.get_connection().ok()?;
            redis::cmd("KEYS").arg("tollgate:*").query::<Vec<String>>(&mut redis).ok()?.pop()
        })
        .unwrap();
    let slot = cluster.slot(&name);
    let moving = tokio::task::spawn_blocking(move || {
        for _ in 0..3 {
            cluster.move_slot(slot, Duration::from_millis(300));
        }
        cluster
    });
    let (mut granted, mut failed) = (1, 0);
    while !moving.is_finished() {
        match limiter.acquire(key).await {
            Ok(_) => granted += 1,
            Err(error) => {
                println!("{error}");
                failed += 1;
            }
        }
        sleep(Duration::from_millis(10)).await;
    }
    let used = limiter.peek(key).await.unwrap().limits[0].used;
    println!("moved three times: {granted} granted, {failed} failed, {used} counted");
    assert!(granted > 50 && failed <= granted / 10, "{granted} granted, {failed} failed");
    assert!(used >= granted, "{granted} granted, {used} counted: what is at hand is counted too");
    drop(moving.await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_sentinels_replace_needs_no_restart_and_nothing_is_done_twice() {
    let mut watched = tokio::task::spawn_blocking(|| Watched::start().unwrap()).await.unwrap();
    let (urls, master) = (watched.urls(), format!("redis://{}/", Watched::NAME));
    share(|| RedisStore::sentinel(&urls, &master)).await;
    let limiter = limiter(RedisStore::sentinel(&urls, &master), Quota::per_hour(FEW));
    let over = Arc::new(AtomicBool::new(false));
    let calling = {
        let (limiter, over) = (limiter.clone(), over.clone());
        tokio::spawn(async move { calls(&limiter, &over).await })
    };
    sleep(Duration::from_millis(1000)).await;
    watched.servers()[0].kill();
    let (start, late) = (Instant::now(), Key::new("late"));
    while limiter.acquire(late).await.is_err() {
        assert!(start.elapsed() < PATIENCE, "it never came back");
        sleep(Duration::from_millis(10)).await;
    }
    println!("Sentinels: calls are granted {:.1?} after the master was killed", start.elapsed());
    sleep(Duration::from_millis(500)).await;
    over.store(true, Ordering::Relaxed);
    assert_none_twice("Sentinels, the master killed", &limiter, calling.await.unwrap()).await;
}

#[tokio::test]
async fn credentials_that_change_are_taken_up_by_the_factory() {
    let server = RedisServer::start().unwrap();
    let user = |password: &str| {
        let password = format!(">{password}");
        let rules = ["ACL", "SETUSER", "tollgate", "on", "resetpass", &password, "resetkeys", "~tollgate:*"];
        let rules = [
            &rules[..],
            &["resetchannels", "&tollgate:*", "-@all", "+evalsha", "+eval", "+ping", "+time"],
            &["+get", "+getrange", "+setrange", "+set", "+pexpire", "+publish", "+subscribe"],
        ];
        let () = server.command(&rules.concat());
    };
    user("one");
    let password = Arc::new(Mutex::new("one"));
    let (port, known) = (server.port(), password.clone());
    let factory = move || {
        let url = format!("redis://tollgate:{}@127.0.0.1:{port}/", known.lock().unwrap());
        async move { redis::Client::open(url)?.get_multiplexed_async_connection().await }
    };
    let limiter = limiter(RedisStore::with_factory(factory), Quota::per_hour(FEW));
    let key = Key::new("key");
    drop(limiter.acquire(key).await.unwrap());
    for (new, known_at_once) in [("two", true), ("three", false)] {
        user(new);
        if known_at_once {
            *password.lock().unwrap() = new;
        }
        let _: i64 = server.command(&["CLIENT", "KILL", "USER", "tollgate"]);
        let (start, mut errors) = (Instant::now(), 0);
        while limiter.peek(key).await.is_err() {
            errors += 1;
            assert!(start.elapsed() < Duration::from_secs(10), "it never came back");
            if start.elapsed() > Duration::from_millis(400) {
                *password.lock().unwrap() = new;
            }
            sleep(Duration::from_millis(5)).await;
        }
        println!("the password is {new}: {errors} calls failed, back after {:.1?}", start.elapsed());
    }
    assert_eq!(limiter.peek(key).await.unwrap().limits[0].used, 1);
}

#[test]
fn places_that_make_no_sense_are_errors_that_show_no_password() {
    let none: [&str; 0] = [];
    let builders = [
        RedisStore::cluster(none),
        RedisStore::cluster(["redis://:geheim@"]),
        RedisStore::cluster(["redis://:geheim@a:1/", "http://:geheim@b/"]),
        RedisStore::sentinel(none, "redis://mymaster/"),
        RedisStore::sentinel(["redis://:geheim@a:1/"], "mymaster"),
        RedisStore::sentinel(["redis://:geheim@a:1/"], "redis://:geheim@/"),
    ];
    for (number, builder) in builders.into_iter().enumerate() {
        let error = builder.build().map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("URL of Redis") && !error.contains("geheim"), "{number}: {error}");
    }
}

/// rustls panics where the process has no provider of what encrypts.
#[cfg(feature = "redis-tls-rustls")]
#[tokio::test]
async fn a_server_without_tls_is_away_for_one_who_wants_it() {
    let server = RedisServer::start().unwrap();
    let url = server.url().replace("redis://", "rediss://");
    let store = RedisStore::new(&url).unwrap();
    let error = timeout(PATIENCE, store.connect()).await.unwrap().unwrap_err();
    assert!(error.to_string().starts_with("the store is away"), "{error}");
    assert!(!error.to_string().contains("panic"), "{error}");
}
