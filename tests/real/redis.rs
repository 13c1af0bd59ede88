//! The store in Redis, against a real server: what it keeps there, and what processes share.

#![cfg(feature = "redis")]

use crate::support::patient;

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::store::RedisStore;
use tollgate::{ConfigError, Key, Limited, Limiter, Quota, RateLimitLayer, Reason};

fn store(server: &RedisServer) -> Arc<RedisStore> {
    patient::store(&server.url())
}

fn limiter(store: &Arc<RedisStore>, quota: Quota, max_wait: Duration) -> Limiter {
    let layer = RateLimitLayer::builder(quota)
        .store(store.clone())
        .max_wait(max_wait);
    layer.build().unwrap().limiter()
}

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// How many of `tries` get a permit.
async fn granted(limiter: &Limiter, key: Key, tries: usize) -> usize {
    let mut granted = 0;
    for _ in 0..tries {
        match limiter.acquire(key).await {
            Ok(_) => granted += 1,
            Err(limited) => println!("{limited}"),
        }
    }
    granted
}

#[tokio::test]
async fn redis_keeps_the_contract() {
    let server = RedisServer::start().unwrap();
    store_contract::check(store(&server)).await;
}

/// With several threads. The one-command-at-a-time protocol of an older Redis is not involved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_keeps_the_contract_under_threads() {
    let server = RedisServer::start().unwrap();
    store_contract::check(store(&server)).await;
}

#[tokio::test]
async fn stores_of_many_processes_share_one_limit() {
    let server = RedisServer::start().unwrap();
    let stores: Vec<_> = (0..3).map(|_| store(&server)).collect();
    let limiters = stores
        .iter()
        .map(|store| limiter(store, Quota::per_minute(10), Duration::ZERO));
    let mut all = 0;
    for limiter in limiters.cycle().take(30).collect::<Vec<_>>() {
        all += granted(&limiter, Key::ALL, 1).await;
    }
    assert_eq!(all, 10);
}

/// Waiters of one process leave no wait behind for another.
#[tokio::test]
async fn slots_of_dropped_waiters_are_free_for_other_processes() {
    let server = RedisServer::start().unwrap();
    let quota = Quota::new(1, millis(2000));
    let patient = |store| limiter(store, quota, Duration::from_secs(120));
    let (one, other) = (patient(&store(&server)), patient(&store(&server)));
    for waiting in [2, 6, 40] {
        let key = Key::new([waiting]);
        drop(one.acquire(key).await.unwrap());
        let waiters: Vec<_> = (0..waiting)
            .map(|_| tokio::spawn(one.acquire(key)))
            .collect();
        let booked = u64::from(waiting) + 1;
        while other.peek(key).await.unwrap().limits[0].used < booked {
            sleep(millis(5)).await;
        }
        waiters.iter().for_each(|waiter| waiter.abort());
        sleep(millis(2500)).await;
        let start = Instant::now();
        drop(other.acquire(key).await.unwrap());
        // The next slot of the queue is 1.5 s away.
        let waited = start.elapsed();
        assert!(waited < millis(1000), "{waiting} waiters: {waited:?}");
    }
}

/// A request that costs much waits for the next minute, and others wait behind it. When it is dropped, they leave.
#[tokio::test]
async fn dropped_dear_waiter_lets_the_others_leave() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(
        &store(&server),
        Quota::per_minute(10),
        Duration::from_secs(600),
    );
    let key = Key::new("key");
    drop(limiter.acquire(key).cost(5).await.unwrap());
    let dear = tokio::spawn(limiter.acquire(key).cost(10));
    settle(&limiter, key, 15).await;
    let others: Vec<_> = (0..5).map(|_| tokio::spawn(limiter.acquire(key))).collect();
    settle(&limiter, key, 20).await;
    dear.abort();
    let start = Instant::now();
    for other in others {
        drop(other.await.unwrap().unwrap());
    }
    let waited = start.elapsed();
    assert!(waited < Duration::from_secs(30), "{waited:?}");
}

#[tokio::test]
async fn prefixes_and_secrets_keep_limits_apart() {
    let server = RedisServer::start().unwrap();
    let of = |builder: tollgate::store::RedisStoreBuilder| {
        limiter(
            &Arc::new(builder.build().unwrap()),
            Quota::per_minute(5),
            Duration::ZERO,
        )
    };
    let url = server.url();
    let one = of(patient::builder(&url));
    let prefixed = of(patient::builder(&url).prefix("other"));
    let sealed = of(patient::builder(&url).secret("s3cr3t"));
    let sealed_too = of(patient::builder(&url).secret("s3cr3t"));
    for limiter in [&one, &prefixed, &sealed] {
        assert_eq!(granted(limiter, Key::new("k"), 9).await, 5);
    }
    assert_eq!(
        granted(&sealed_too, Key::new("k"), 9).await,
        0,
        "the same secret is the same key"
    );
    let keys: Vec<String> = server.command(&["KEYS", "*"]);
    assert_eq!(keys.len(), 3, "{keys:?}");
    assert!(
        keys.iter()
            .all(|key| key.ends_with('}') && key.contains(":{")),
        "{keys:?}"
    );
}

/// Whether `limiter` was notified that its key is held, or of a release. It makes no store call:
/// only calls in flight are limited.
async fn is_held(limiter: &Limiter) -> bool {
    match limiter.acquire(Key::ALL).await {
        Ok(_) => false,
        Err(Limited::Local {
            reason: Reason::Held,
            ..
        }) => true,
        Err(other) => panic!("{other}"),
    }
}

/// Waits until all of `limiters` are notified of a hold or release.
async fn until_held(limiters: &[&Limiter], held: bool) {
    let start = Instant::now();
    for limiter in limiters {
        while is_held(limiter).await != held {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "the limiters are not notified"
            );
            sleep(millis(10)).await;
        }
    }
}

/// Redis channels are not separated by database, so the names of channels contain the database.
#[tokio::test]
async fn databases_keep_holds_apart() {
    let server = RedisServer::start().unwrap();
    let url = |database: u8| format!("{}{database}", server.url());
    let over = |store: RedisStore| limiter(&Arc::new(store), Quota::in_flight(100), Duration::ZERO);
    let of = |database| over(patient::builder(&url(database)).build().unwrap());
    let own = |database| {
        let client = redis::Client::open(url(database)).unwrap();
        let connect = move || {
            let client = client.clone();
            async move { client.get_multiplexed_async_connection().await }
        };
        over(
            RedisStore::with_factory(connect)
                .store_timeout(patient::TIMEOUT)
                .build()
                .unwrap(),
        )
    };
    let ([production, staging], [own_production, own_staging]) = ([0, 1].map(of), [0, 1].map(own));
    // Until all are subscribed.
    for (holds, is_told) in [(&staging, &own_staging), (&production, &own_production)] {
        is_told
            .hold_for(Key::ALL, Duration::from_secs(60))
            .await
            .unwrap();
        let start = Instant::now();
        while !is_held(holds).await {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "the limiter is not notified"
            );
            is_told.release(Key::ALL).await.unwrap();
            sleep(millis(50)).await;
            is_told
                .hold_for(Key::ALL, Duration::from_secs(60))
                .await
                .unwrap();
        }
        is_told.release(Key::ALL).await.unwrap();
        until_held(&[holds], false).await;
    }
    for (holds, also, others) in [
        (&own_staging, &staging, &production),
        (&staging, &staging, &production),
        (&own_production, &production, &staging),
    ] {
        holds
            .hold_for(Key::ALL, Duration::from_secs(60))
            .await
            .unwrap();
        until_held(&[holds, also], true).await;
        sleep(millis(50)).await;
        assert!(!is_held(others).await, "another database holds the key");
        holds.release(Key::ALL).await.unwrap();
        until_held(&[holds, also], false).await;
    }
}

/// Every state has a time to live that outlasts its booked slots, and stays small however long the
/// queue is.
#[tokio::test]
async fn a_state_is_small_and_runs_out_by_itself() {
    let server = RedisServer::start().unwrap();
    let store = store(&server);
    let quotas = [
        Quota::per_second(7),
        Quota::per_second(1000),
        Quota::per_hour(5000),
        Quota::per_second(1_000_000),
        Quota::per_second(50).burst(10),
        Quota::bucket(40).refill(20, Duration::from_secs(1)),
        Quota::fixed(50, Duration::from_secs(1)),
        Quota::new(25, Duration::from_secs(5)).and(Quota::per_minute(300)),
    ];
    for (number, quota) in quotas.into_iter().enumerate() {
        let limiter = limiter(&store, quota, Duration::from_secs(3600));
        let key = Key::new(number.to_le_bytes());
        let mut line: Vec<_> = (0..1500).map(|_| Box::pin(limiter.acquire(key))).collect();
        for one in &mut line {
            let _ = futures::poll!(one);
        }
        settle(&limiter, key, 1500).await;
        // A third of the waiters gives up, spread over the queue.
        for index in (0..line.len()).rev().step_by(3) {
            drop(line.swap_remove(index));
        }
        limiter.shutdown().await.unwrap();
        let peek = limiter.peek(key).await.unwrap();
        let names: Vec<String> = server.command(&["KEYS", "*"]);
        for name in names {
            let bytes: usize = server.command(&["MEMORY", "USAGE", &name]);
            let most = 4096 * quota.limits().len();
            assert!(bytes <= most, "{quota}: {bytes} bytes");
            let ttl: i64 = server.command(&["PTTL", &name]);
            let next = i64::try_from(peek.next_slot.as_millis()).unwrap();
            assert!(
                ttl > next,
                "{quota}: lives for {ttl} ms, but slots are booked for {next} ms"
            );
        }
        drop(line);
        let () = server.command(&["FLUSHALL"]);
    }
}

/// How many scripts the server has run.
fn scripts_run(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"));
    line.and_then(|line| line.split("calls=").nth(1)?.split(',').next()?.parse().ok())
        .unwrap_or(0)
}

/// The cost of one slot.
#[derive(Clone, Copy, Debug)]
struct SlotTaken {
    calls: u64,
    /// How long after the slot was free.
    late: Duration,
    /// The longest time from one try to the next.
    pause: Duration,
}

/// Tries repeatedly without waiting. Returns the cost of each of `count` slots after the first.
async fn hammer(
    server: &RedisServer,
    limiter: &Limiter,
    window: Duration,
    count: usize,
) -> Vec<SlotTaken> {
    let (mut taken, mut last) = (Vec::new(), None);
    let (mut tried, mut pause, mut calls) = (Instant::now(), Duration::ZERO, scripts_run(server));
    while taken.len() < count {
        let granted = limiter.acquire(Key::ALL).await.is_ok();
        let now = Instant::now();
        (tried, pause) = (now, pause.max(now - tried));
        if granted {
            let before = std::mem::replace(&mut calls, scripts_run(server));
            // A permit counts from the end of its validity, and `transit_slack` later.
            let free = last.map(|last: Instant| last + window + millis(30));
            taken.extend(free.map(|free| SlotTaken {
                calls: calls - before,
                late: now.saturating_duration_since(free),
                pause,
            }));
            (last, tried, pause) = (Some(now), Instant::now(), Duration::ZERO);
        }
        sleep(millis(1)).await;
    }
    taken
}

#[tokio::test]
async fn zero_max_wait_takes_each_slot_with_five_calls() {
    let server = RedisServer::start().unwrap();
    let window = millis(400);
    let limiter = limiter(&store(&server), Quota::new(1, window), Duration::ZERO);
    for round in 0.. {
        let slots = hammer(&server, &limiter, window, 11).await;
        println!("{slots:?}");
        // If the machine stalled, a permit may have expired before its use, and was requested
        // again.
        let steady = slots.iter().filter(|slot| slot.pause < millis(8));
        steady.for_each(|slot| assert!(slot.calls <= 5, "{slot:?} of {slots:?}"));
        let median = |of: fn(&SlotTaken) -> u128| {
            let mut values: Vec<u128> = slots.iter().map(of).collect();
            values.sort();
            values[values.len() / 2]
        };
        let (late, calls) = (
            median(|slot| slot.late.as_millis()),
            median(|slot| slot.calls.into()),
        );
        if late <= 50 && calls <= 5 {
            break;
        }
        assert!(
            round < 4,
            "medians: {calls} calls, {late} ms late; {slots:?}"
        );
    }
}

/// Until the waiters have their slots.
async fn settle(limiter: &Limiter, key: Key, waiting: usize) {
    let start = Instant::now();
    loop {
        let peek = limiter.peek(key).await.unwrap();
        let used: u64 = peek
            .limits
            .iter()
            .map(|limit| limit.used)
            .max()
            .unwrap_or(0);
        let booked = usize::try_from(used).unwrap_or(usize::MAX) >= waiting.min(50);
        if booked || start.elapsed() > Duration::from_secs(5) {
            return;
        }
        sleep(millis(5)).await;
    }
}

/// All keys of a process share one connection, and notifications arrive on another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_keys_need_no_more_connections_than_one() {
    let server = RedisServer::start().unwrap();
    // On a busy machine a waiter may miss its slot, and waits for the next.
    let limiter = limiter(
        &store(&server),
        Quota::per_minute(2),
        Duration::from_secs(5),
    );
    // Only the connection of the command that counts them.
    until_connected(&server, 1).await;
    let calls = (0..1000u32).map(|number| limiter.acquire(Key::new(number.to_le_bytes())));
    let granted = futures::future::join_all(calls).await;
    let failed: Vec<_> = granted
        .iter()
        .filter_map(|granted| granted.as_ref().err())
        .map(ToString::to_string)
        .collect();
    assert!(
        failed.is_empty(),
        "{} failed: {:?}",
        failed.len(),
        failed.first()
    );
    // One for a thousand keys, and one to listen.
    until_connected(&server, 3).await;
}

/// Waits until a server has this many connections. Some of them may still be opened or closed.
async fn until_connected(server: &RedisServer, wanted: u32) {
    let start = Instant::now();
    let wanted = format!("connected_clients:{wanted}\r\n");
    loop {
        let clients: String = server.command(&["INFO", "clients"]);
        if clients.contains(&wanted) {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{clients}");
        sleep(millis(20)).await;
    }
}

/// Redis forgets every key in each case: each has a time to live from its first moment on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_ten_thousand_keys_none_stays_for_ever() {
    const KEYS: u32 = 10_000;
    let server = RedisServer::start().unwrap();
    let builder = patient::builder(&server.url());
    let limiter = limiter(
        &Arc::new(builder.build().unwrap()),
        Quota::new(2, millis(500)),
        Duration::ZERO,
    );
    // A script, so that no key expires between the reading of its name and of its time to live.
    let without_end = || -> (u32, u32, u32) {
        let look = "local count, endless, bytes = 0, 0, 0 \
            for _, key in ipairs(redis.call('KEYS', '*')) do \
              count = count + 1 bytes = bytes + redis.call('MEMORY', 'USAGE', key) \
              if redis.call('PTTL', key) < 0 then endless = endless + 1 end end \
            return {count, endless, bytes}";
        server.command(&["EVAL", look, "0"])
    };
    let (mut most, mut bytes) = (0, 0);
    for part in 0..KEYS / 500 {
        // One permit is used, one is given back, and one is above the limit.
        let calls = (500 * part..500 * (part + 1)).map(async |number| {
            let key = Key::new(number.to_le_bytes());
            drop(limiter.acquire(key).await);
            if let Ok(permit) = limiter.acquire(key).await {
                permit.give_back();
            }
            let _ = limiter.acquire(key).cost(2).await;
        });
        futures::future::join_all(calls).await;
        let (count, endless, all) = without_end();
        assert_eq!(endless, 0, "of {count} keys");
        if count > most {
            (most, bytes) = (count, all / count);
        }
    }
    println!("at most {most} keys at once, {bytes} bytes each");
    assert!(most >= 500, "{most} keys at once");
    let start = Instant::now();
    // Redis looks for expired keys from time to time, and on access.
    while without_end().0 > 0 || server.command::<u64>(&["DBSIZE"]) > 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "they run out");
        sleep(millis(50)).await;
    }
}

#[tokio::test]
async fn scripts_that_were_flushed_are_sent_again() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&store(&server), Quota::per_minute(10), Duration::ZERO);
    assert_eq!(granted(&limiter, Key::ALL, 4).await, 4);
    let () = server.command(&["SCRIPT", "FLUSH"]);
    assert_eq!(
        granted(&limiter, Key::ALL, 20).await,
        6,
        "and what was granted before is known"
    );
}

/// The commands that the documentation names are all that a user of Redis needs.
#[tokio::test]
async fn a_user_with_few_rights_is_enough() {
    let server = RedisServer::start().unwrap();
    let () = server.command(&[
        "ACL",
        "SETUSER",
        "limits",
        "on",
        ">s3cr3t",
        "resetkeys",
        "~tollgate:*",
        "resetchannels",
        "&tollgate:*",
        "-@all",
        "+eval",
        "+evalsha",
        "+ping",
        "+time",
        "+getrange",
        "+setrange",
        "+get",
        "+set",
        "+pexpire",
        "+publish",
        "+subscribe",
    ]);
    let url = format!("redis://limits:s3cr3t@127.0.0.1:{}/", server.port());
    let store = patient::store(&url);
    // Permits of this quota are valid for 100 ms: a busy Redis may take 30 ms to answer.
    let quota = Quota::new(5, millis(1500));
    let limiter = limiter(&store, quota, Duration::from_secs(5));
    assert_eq!(granted(&limiter, Key::ALL, 7).await, 7);
    limiter.peek(Key::ALL).await.unwrap();
    limiter.shutdown().await.unwrap();

    // Calls in flight: one process waits for another, and is notified.
    let quota = Quota::in_flight(1);
    let other = patient::store(&url);
    let wait = Duration::from_secs(5);
    let (ours, theirs) = (
        self::limiter(&store, quota, wait),
        self::limiter(&other, quota, wait),
    );
    let held = ours.acquire(Key::ALL).await.unwrap();
    let waits = tokio::spawn(async move { theirs.acquire(Key::ALL).await.map(drop) });
    tokio::time::sleep(millis(200)).await;
    drop(held);
    waits.await.unwrap().unwrap();
    let denied: Vec<std::collections::HashMap<String, redis::Value>> =
        server.command(&["ACL", "LOG"]);
    let info = redis::Value::BulkString(b"info".to_vec());
    assert!(
        denied.iter().all(|entry| entry["object"] == info),
        "INFO is nice to have: {denied:?}"
    );
}

/// No number of free units may look like a status.
#[tokio::test]
async fn peek_is_read_with_each_number_of_free_units() {
    let server = RedisServer::start().unwrap();
    let store = store(&server);
    let limiter = limiter(
        &store,
        Quota::per_hour(8).and(Quota::in_flight(8)),
        Duration::ZERO,
    );
    let mut held = Vec::new();
    for used in 0..=8 {
        let peek = limiter.peek(Key::ALL).await.unwrap();
        assert_eq!(peek.free, 8 - used);
        if used < 8 {
            held.push(limiter.acquire(Key::ALL).await.unwrap());
        }
    }
}

#[tokio::test]
async fn invalid_store_settings_are_errors_without_secrets() {
    let wrong = [
        RedisStore::builder("redis://user:s3cr3t@"),
        RedisStore::builder("http://s3cr3t"),
        RedisStore::builder("redis://127.0.0.1/").prefix(""),
        RedisStore::builder("redis://127.0.0.1/").prefix("a{b"),
        RedisStore::builder("redis://127.0.0.1/").store_timeout(Duration::ZERO),
    ];
    let names = [
        "URL of Redis",
        "URL of Redis",
        "prefix",
        "prefix",
        "store_timeout",
    ];
    for (builder, name) in wrong.into_iter().zip(names) {
        let error: ConfigError = builder.build().map(|_| ()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        assert!(
            !format!("{error} {error:?}").contains("s3cr3t"),
            "{error:?}"
        );
    }
}
