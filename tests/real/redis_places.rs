//! Deployments of Redis: a cluster, Sentinels, TLS, credentials that change. Real servers, real
//! failovers.

#![cfg(feature = "redis-sentinel")]

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis_server::{RedisCluster, RedisServer, Watched};
use tokio::time::{Instant, sleep, timeout};
use tollgate::store::{RedisStore, RedisStoreBuilder};
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer, Reason};

/// A limiter with a `max_wait` of a second: enough for a machine that stalls past a permit's
/// validity, and too short for the limits of these tests.
fn limiter(builder: RedisStoreBuilder, quota: Quota) -> Limiter {
    let store = Arc::new(builder.build().unwrap());
    RateLimitLayer::builder(quota)
        .store(store)
        .max_wait(Duration::from_secs(1))
        .build()
        .unwrap()
        .limiter()
}

const FEW: u32 = 5;

/// The `store_timeout` of tests that judge what is answered, not how soon.
const PATIENT: Duration = Duration::from_secs(5);

/// The longest wait for a failover.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two processes share counts, over keys on any server, and notify each other.
async fn share(store: impl Fn() -> RedisStoreBuilder) {
    let store = || store().store_timeout(PATIENT);
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
    let [one, other] = [(); 2].map(|()| limiter(store(), Quota::in_flight(1)));
    until_told(&one, &other, Key::new("held")).await;
}

/// Waits until another process knows of a hold. With only an in-flight limit, a hold is published
/// and not polled.
async fn until_told(one: &Limiter, other: &Limiter, key: Key) -> Duration {
    let start = Instant::now();
    loop {
        one.hold_for(key, Duration::from_secs(60)).await.unwrap();
        let held = other.acquire(key).await;
        one.release(key).await.unwrap();
        match held {
            Err(Limited::Local {
                reason: Reason::Held,
                ..
            }) => return start.elapsed(),
            _ => assert!(
                start.elapsed() < PATIENCE,
                "the other process is not notified"
            ),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Makes calls, each with its own key, until `over`. Returns the keys, which of the calls were
/// granted, and the longest time without a grant.
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

/// No call was made twice, whatever its outcome.
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
    // Several hundred, on an otherwise idle machine.
    assert!(granted > 20, "{granted} granted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_counts_notifies_migrates_and_fails_over_without_repeats() {
    let mut cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap())
        .await
        .unwrap();
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
        cluster.wait_for("another has it", |cluster| {
            cluster.primary_of(slot).is_some_and(|now| now != primary)
        });
        std::thread::sleep(Duration::from_secs(3));
        over.store(true, Ordering::Relaxed);
        // The connections are kept until all questions are answered.
        cluster
    };
    let cluster = tokio::task::spawn_blocking(disturb).await.unwrap();
    let called = calling.await.unwrap();
    assert!(called.2 < PATIENCE, "{:?}", called.2);
    assert_none_twice(
        "a cluster, 20 slots moved and a primary killed",
        &limiter,
        called,
    )
    .await;
    drop(cluster);
}

/// How calls fared during a change.
#[derive(Clone, Copy, Debug, Default)]
struct Fared {
    granted: u32,
    failed: u32,
    /// Calls that took as long as a `store_timeout`.
    slow: u32,
}

impl Fared {
    /// Acquires the `keys` in turn, one every 20 ms, until `over` ends.
    async fn of(limiter: &Limiter, keys: &[Key], over: impl Future<Output = ()>) -> Fared {
        let (mut fared, mut keys) = (Fared::default(), keys.iter().cycle());
        let mut over = std::pin::pin!(over);
        while futures::poll!(&mut over).is_pending() {
            let start = Instant::now();
            match limiter.acquire(*keys.next().unwrap()).await {
                Ok(_) => fared.granted += 1,
                Err(_) => fared.failed += 1,
            }
            fared.slow += u32::from(start.elapsed() > Duration::from_millis(200));
            sleep(Duration::from_millis(20)).await;
        }
        fared
    }
}

/// Acquires the `keys` in turn until one is granted. Returns how long that took.
async fn until_granted(limiter: &Limiter, keys: &[Key]) -> Duration {
    let start = Instant::now();
    for key in keys.iter().cycle() {
        if limiter.acquire(*key).await.is_ok() {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "the store never recovered");
        sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_primary_fails_its_own_keys_only() {
    const HANGS: usize = 2;
    let mut cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap())
        .await
        .unwrap();
    let urls = cluster.urls();
    // No replica replaces it.
    cluster.configure("cluster-node-timeout", "60000");
    let in_flight = || limiter(RedisStore::cluster(&urls), Quota::in_flight(1));
    // So small a limit is never prefetched: each permit is a call.
    let limiter = limiter(RedisStore::cluster(&urls), Quota::per_hour(49));
    let (mut its_own, mut others) = (Vec::new(), Vec::new());
    for number in 0..60 {
        let (key, before) = (Key::new(format!("key {number}")), cluster.key_count(HANGS));
        until_granted(&limiter, &[key]).await;
        if cluster.key_count(HANGS) > before {
            its_own.push(key)
        } else {
            others.push(key)
        }
    }

    let to_be_held = others.pop().unwrap();
    let listeners = [(); 4].map(|()| in_flight());
    for listener in &listeners {
        until_told(&listeners[0], listener, Key::new("held")).await;
    }

    cluster.node(HANGS).pause();
    let told = async {
        let (fresh, mut longest) = (in_flight(), Duration::ZERO);
        until_granted(&fresh, &[to_be_held]).await;
        for listener in &listeners {
            longest = longest.max(until_told(&fresh, listener, to_be_held).await);
        }
        longest
    };
    let (of_others, of_its_own, told) = tokio::join!(
        Fared::of(&limiter, &others, sleep(Duration::from_secs(8))),
        Fared::of(&limiter, &its_own, sleep(Duration::from_secs(8))),
        told
    );
    cluster.node(HANGS).resume();
    let resumed = until_granted(&limiter, &its_own).await;
    println!(
        "one of three primaries hangs for 8 s: keys of the others {of_others:?}, its own {of_its_own:?}; processes that listen \
         are told within {told:.1?}; back {resumed:.1?} after it went on"
    );
    assert!(of_others.granted > 50 && of_its_own.failed > 0);
    assert_eq!(of_its_own.granted, 0);
    // A stall of the machine refuses and slows others, too.
    if histories::is_calm() {
        assert!(of_others.failed * 20 < of_others.granted, "{of_others:?}");
        assert!(of_its_own.failed > 50, "{of_its_own:?}");
        assert!(of_its_own.slow * 20 < of_its_own.failed, "{of_its_own:?}");
    }

    // Its replica takes its place. Until then Redis by default refuses all keys of the cluster,
    // once the primary is marked as failed.
    cluster.configure("cluster-require-full-coverage", "no");
    cluster.configure("cluster-node-timeout", "1000");
    let slot = (0..16384)
        .find(|slot| cluster.primary_of(*slot) == Some(HANGS))
        .unwrap();
    cluster.node(HANGS).pause();
    let replaced = async {
        while cluster
            .primary_of(slot)
            .is_none_or(|primary| primary == HANGS)
        {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let of_others = Fared::of(&limiter, &others, replaced).await;
    let back = until_granted(&limiter, &its_own).await;
    println!(
        "it hangs and is replaced: keys of the others {of_others:?}; back {back:.1?} after that"
    );
    assert!(
        !histories::is_calm() || of_others.failed * 20 <= of_others.granted,
        "{of_others:?}"
    );
    cluster.node(HANGS).resume();
    let all = [others, its_own].concat();
    let of_all = Fared::of(&limiter, &all, sleep(Duration::from_secs(2))).await;
    println!("it goes on as a replica: all keys {of_all:?}");
    assert!(
        !histories::is_calm() || of_all.failed * 20 < of_all.granted,
        "{of_all:?}"
    );

    (0..urls.len()).for_each(|node| cluster.node(node).pause());
    let of_all = Fared::of(&limiter, &all, sleep(Duration::from_secs(4))).await;
    (0..urls.len()).for_each(|node| cluster.node(node).resume());
    let back = until_granted(&limiter, &all).await;
    println!("all hang: all keys {of_all:?}; back {back:.1?} after they went on");
    assert!(
        of_all.granted == 0 && (!histories::is_calm() || of_all.slow * 10 < of_all.failed),
        "{of_all:?}"
    );
}

/// A key that is being migrated is requested from its new server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_moves_is_counted_on_the_way() {
    let cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap())
        .await
        .unwrap();
    let urls = cluster.urls();
    let store = RedisStore::cluster(&urls).store_timeout(PATIENT);
    let limiter = limiter(store, Quota::per_hour(1000));
    let key = Key::new("the one that moves");
    drop(limiter.acquire(key).await.unwrap());
    let name: String = (urls.iter())
        .find_map(|url| {
            let mut redis = redis::Client::open(url.as_str())
                .ok()?
                .get_connection()
                .ok()?;
            redis::cmd("KEYS")
                .arg("tollgate:*")
                .query::<Vec<String>>(&mut redis)
                .ok()?
                .pop()
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
    assert!(
        !histories::is_calm() || granted > 50 && failed <= granted / 10,
        "{granted} granted, {failed} failed"
    );
    assert!(
        used >= granted,
        "{granted} granted, {used} counted: prefetched permits are counted too"
    );
    drop(moving.await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinel_failover_needs_no_restart_and_repeats_nothing() {
    let mut watched = tokio::task::spawn_blocking(|| Watched::start().unwrap())
        .await
        .unwrap();
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
        assert!(start.elapsed() < PATIENCE, "the store never recovered");
        sleep(Duration::from_millis(10)).await;
    }
    println!(
        "Sentinels: calls are granted {:.1?} after the master was killed",
        start.elapsed()
    );
    sleep(Duration::from_millis(500)).await;
    over.store(true, Ordering::Relaxed);
    assert_none_twice(
        "Sentinels, the master killed",
        &limiter,
        calling.await.unwrap(),
    )
    .await;
}

#[tokio::test]
async fn credentials_that_change_are_taken_up_by_the_factory() {
    let server = RedisServer::start().unwrap();
    let user = |password: &str| {
        let password = format!(">{password}");
        let rules = [
            "ACL",
            "SETUSER",
            "tollgate",
            "on",
            "resetpass",
            &password,
            "resetkeys",
            "~tollgate:*",
        ];
        let rules = [
            &rules[..],
            &[
                "resetchannels",
                "&tollgate:*",
                "-@all",
                "+evalsha",
                "+eval",
                "+ping",
                "+time",
            ],
            &[
                "+get",
                "+getrange",
                "+setrange",
                "+set",
                "+pexpire",
                "+publish",
                "+subscribe",
            ],
        ];
        let () = server.command(&rules.concat());
    };
    user("one");
    let password = Arc::new(Mutex::new("one"));
    let (port, known) = (server.port(), password.clone());
    let factory = move || {
        let url = format!(
            "redis://tollgate:{}@127.0.0.1:{port}/",
            known.lock().unwrap()
        );
        async move {
            redis::Client::open(url)?
                .get_multiplexed_async_connection()
                .await
        }
    };
    let limiter = limiter(RedisStore::with_factory(factory), Quota::per_hour(FEW));
    let key = Key::new("key");
    until_granted(&limiter, &[key]).await;
    for (new, known_at_once) in [("two", true), ("three", false)] {
        user(new);
        if known_at_once {
            *password.lock().unwrap() = new;
        }
        let _: i64 = server.command(&["CLIENT", "KILL", "USER", "tollgate"]);
        let (start, mut errors) = (Instant::now(), 0);
        while limiter.peek(key).await.is_err() {
            errors += 1;
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "the store never recovered"
            );
            if start.elapsed() > Duration::from_millis(400) {
                *password.lock().unwrap() = new;
            }
            sleep(Duration::from_millis(5)).await;
        }
        println!(
            "the password is {new}: {errors} calls failed, back after {:.1?}",
            start.elapsed()
        );
    }
    assert!(
        limiter.peek(key).await.unwrap().limits[0].used > 0,
        "the count is kept"
    );
}

/// The access rules that the guide names.
#[tokio::test]
async fn an_acl_for_a_cluster_suffices() {
    let server = RedisServer::start_cluster_of_one().unwrap();
    let rules = "ACL SETUSER tollgate on >password resetkeys ~tollgate:* resetchannels &tollgate:* -@all +evalsha +eval +ping \
                 +time +get +getrange +setrange +set +pexpire +publish +subscribe +cluster|slots +asking";
    let () = server.command(&rules.split_whitespace().collect::<Vec<_>>());
    let url = format!("redis://tollgate:password@127.0.0.1:{}/", server.port());
    let store = || RedisStore::cluster([&url]).store_timeout(PATIENT);
    let [one, other] = [(); 2].map(|()| limiter(store(), Quota::in_flight(1)));
    until_told(&one, &other, Key::ALL).await;
    let store = RedisStore::cluster([url.replace("password", "geheim")])
        .build()
        .unwrap();
    let error = store.connect().await.unwrap_err().to_string();
    assert!(
        error.contains(&format!("127.0.0.1:{}", server.port())) && !error.contains("geheim"),
        "{error}"
    );
}

#[test]
fn invalid_places_are_errors_without_passwords() {
    let none: [&str; 0] = [];
    let builders = [
        RedisStore::cluster(none),
        RedisStore::cluster(["redis://:geheim@"]),
        RedisStore::cluster(["redis://:geheim@a:1/", "http://:geheim@b/"]),
        RedisStore::cluster(["redis://:geheim@a:1/", "redis://:geheim2@b:1/"]),
        RedisStore::cluster(["redis://:geheim@a:1/", "redis://:geheim@b:1/1"]),
        RedisStore::cluster(["unix:///geheim"]),
        RedisStore::sentinel(none, "redis://mymaster/"),
        RedisStore::sentinel(["redis://:geheim@a:1/"], "mymaster"),
        RedisStore::sentinel(["redis://:geheim@a:1/"], "redis://:geheim@/"),
    ];
    for (number, builder) in builders.into_iter().enumerate() {
        let error = builder.build().map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains("URL of Redis") && !error.contains("geheim"),
            "{number}: {error}"
        );
    }
}

/// rustls panics if the process has no default crypto provider.
#[cfg(feature = "redis-tls-rustls")]
#[tokio::test]
async fn server_without_tls_is_unreachable_for_a_tls_store() {
    let server = RedisServer::start().unwrap();
    let url = server.url().replace("redis://", "rediss://");
    let store = RedisStore::new(&url).unwrap();
    let error = timeout(PATIENCE, store.connect())
        .await
        .unwrap()
        .unwrap_err();
    assert!(
        error.to_string().starts_with("the store cannot be reached"),
        "{error}"
    );
    assert!(!error.to_string().contains("panic"), "{error}");
}
