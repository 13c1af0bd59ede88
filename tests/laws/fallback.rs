//! The store is unreachable, and processes go on with their shares. Together they stay within the
//! limit during the outage and at both of its ends.
//!
//! Under a paused clock; each limiter is a process, and requests are counted as an upstream would
//! count them.

use crate::support::{count_of, counted};

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use counted::largest_count;
use proptest::prelude::*;
use tokio::time::{Instant, sleep, timeout};
use tollgate::quota::Limit;
use tollgate::store::{
    Charge, Grant, Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Store, StoreError,
    StoreReply, UnusedPermits, Usage,
};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitBuilder, RateLimitLayer};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A shared store, a millisecond from each process, that can be made unreachable.
#[derive(Default)]
struct Shared {
    store: MemoryStore,
    away: AtomicBool,
    /// Whether calls arrive though their answers do not.
    deaf: AtomicBool,
    calls: AtomicUsize,
    /// Whether the answers to calls that charge units are lost.
    lose_charges: AtomicBool,
    /// Units charged by calls that arrived.
    charged: AtomicUsize,
    /// The most charges in one call.
    most_charges: AtomicUsize,
}

impl Shared {
    fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Relaxed);
    }

    fn answer<T: Send + 'static>(&self, answer: impl FnOnce() -> StoreReply<T>) -> StoreReply<T> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let away = self.away.load(Ordering::Relaxed);
        let answer = (!away || self.deaf.load(Ordering::Relaxed)).then(|| match answer() {
            StoreReply::Ready(answer) => answer,
            _ => unreachable!("memory answers now"),
        });
        let gone = || {
            Err(StoreError::Away(Arc::new(std::io::Error::other(
                "no route",
            ))))
        };
        let answer = answer.filter(|_| !away).unwrap_or_else(gone);
        StoreReply::Pending(Box::pin(async move {
            sleep(ms(1)).await;
            answer
        }))
    }
}

impl Store for Shared {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let charged: u64 = request.charges.iter().map(|charge| charge.units).sum();
        self.most_charges
            .fetch_max(request.charges.len(), Ordering::Relaxed);
        let lost = charged > 0 && self.lose_charges.load(Ordering::Relaxed);
        let answer = self.answer(|| {
            self.charged.fetch_add(charged as usize, Ordering::Relaxed);
            self.store.lease(request)
        });
        if lost {
            StoreReply::Pending(Box::pin(async { Err(StoreError::Lost) }))
        } else {
            answer
        }
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.store.give_back(key, spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.answer(|| self.store.peek(request))
    }
}

fn builder(quota: Quota, store: &Arc<Shared>) -> RateLimitBuilder {
    let builder = RateLimitLayer::builder(quota)
        .store(store.clone())
        .max_wait(ms(3000));
    builder.on_store_error(OnStoreError::FallbackShare)
}

fn limiter(quota: Quota, store: &Arc<Shared>) -> Limiter {
    builder(quota, store).build().unwrap().limiter()
}

type Sent = Arc<Mutex<Vec<Instant>>>;

/// Calls repeatedly from `tasks` tasks for `span`, with a pause after each call; notes when they
/// went.
fn calls(limiter: &Limiter, tasks: usize, pause: Duration, span: Duration, sent: &Sent) {
    for _ in 0..tasks {
        let (limiter, sent) = (limiter.clone(), sent.clone());
        tokio::spawn(timeout(span, async move {
            loop {
                match limiter.acquire(Key::ALL).await {
                    Ok(_) => sent.lock().unwrap().push(Instant::now()),
                    Err(_) => sleep(pause.max(ms(100))).await,
                }
                sleep(pause).await;
            }
        }));
    }
}

fn within(sent: &Sent, from: Instant, to: Instant) -> usize {
    sent.lock()
        .unwrap()
        .iter()
        .filter(|at| (from..to).contains(at))
        .count()
}

#[tokio::test(start_paused = true)]
async fn shares_keep_fleet_within_limit_until_store_is_back() {
    let (quota, store, sent) = (
        Quota::per_second(40),
        Arc::<Shared>::default(),
        Sent::default(),
    );
    let start = Instant::now();
    let fleet: Vec<_> = (0..4).map(|_| limiter(quota, &store)).collect();
    fleet
        .iter()
        .for_each(|limiter| calls(limiter, 8, ms(0), ms(22_000), &sent));
    for (at, away) in [(5000, true), (12_000, false)] {
        sleep(start + ms(at) - Instant::now()).await;
        store.set_away(away);
    }
    sleep(start + ms(22_000) - Instant::now()).await;
    let second = |from: u64| within(&sent, start + ms(from), start + ms(from + 1000));
    let seconds: Vec<_> = (0..22).map(|number| second(number * 1000)).collect();
    let sent = sent.lock().unwrap().clone();
    let lost = start + ms(5000)..start + ms(6500);
    let found = start + ms(12_000)..start + ms(13_500);
    let away_from_both: Vec<_> = sent
        .iter()
        .filter(|at| !lost.contains(at) && !found.contains(at))
        .copied()
        .collect();
    let [all, others] = [&sent, &away_from_both].map(|sent| largest_count(sent, ms(1000)));
    println!("{all} at most in a second, {others} away from the switches; {seconds:?}");
    assert!(
        all <= 80 && others <= 44,
        "{all} in a second, {others} away from the switches: {seconds:?}"
    );
    let alone: usize = seconds[6..12].iter().sum();
    assert!(alone >= 6 * 34, "most of the limit is used: {seconds:?}");
    let back: usize = seconds[13..].iter().sum();
    assert!(back >= 9 * 37, "all of it is back: {seconds:?}");
}

#[tokio::test(start_paused = true)]
async fn what_was_granted_before_counts_in_the_share() {
    let (quota, store) = (Quota::new(10, ms(10_000)), Arc::<Shared>::default());
    let limiter = builder(quota, &store)
        .max_wait(ms(0))
        .build()
        .unwrap()
        .limiter();
    for _ in 0..16 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
        sleep(ms(2500)).await;
    }
    store.set_away(true);
    // The process had three or four of each ten seconds, and has as much now; the last three
    // seconds are not over yet.
    let mut more = 0;
    let refused = loop {
        match limiter.acquire(Key::ALL).await {
            Ok(_) => more += 1,
            Err(refused) => break refused,
        }
    };
    assert!(
        matches!(refused, Limited::Local { .. }) && more <= 1,
        "{more} more, then {refused:?}"
    );
    let again = refused.retry_after().unwrap();
    assert!(again > ms(0) && again < ms(5000), "{again:?}");
    let peek = limiter.peek(Key::ALL).await.unwrap();
    let share = peek.limits[0].limit.count();
    assert!(peek.degraded && (3..=4).contains(&share), "{peek:?}");
    assert_eq!(
        (peek.limits[0].used, peek.free),
        (u64::from(share), 0),
        "{peek:?}"
    );
    sleep(again + ms(100)).await;
    drop(limiter.acquire(Key::ALL).await.unwrap());
    assert!(
        limiter.acquire(Key::ALL).await.is_err(),
        "units become free one by one, as they were used"
    );
}

#[tokio::test(start_paused = true)]
async fn process_without_history_gets_its_configured_share_only() {
    let store = Arc::<Shared>::default();
    store.set_away(true);
    let quota = Quota::per_second(40);
    let none = limiter(quota, &store);
    assert!(matches!(
        none.acquire(Key::ALL).await,
        Err(Limited::Store { .. })
    ));
    assert!(none.peek(Key::ALL).await.is_err());
    let eighth = builder(quota, &store)
        .max_wait(ms(0))
        .fallback_share(0.125)
        .build()
        .unwrap()
        .limiter();
    for _ in 0..5 {
        drop(eighth.acquire(Key::ALL).await.unwrap());
    }
    let refused = eighth.acquire(Key::ALL).await.unwrap_err();
    assert!(matches!(refused, Limited::Local { .. }), "{refused:?}");
    assert_eq!(
        eighth.peek(Key::ALL).await.unwrap().limits[0].limit.count(),
        5
    );
    let costly = eighth.acquire(Key::ALL).cost(6).await.unwrap_err();
    assert!(costly.to_string().contains("allows 5 at once"), "{costly}");
    // A share below one unit is one unit in a longer time.
    let slow = builder(Quota::per_second(2), &store)
        .max_wait(ms(0))
        .fallback_share(0.1)
        .build()
        .unwrap();
    drop(slow.limiter().acquire(Key::ALL).await.unwrap());
    let again = slow
        .limiter()
        .acquire(Key::ALL)
        .await
        .unwrap_err()
        .retry_after()
        .unwrap();
    assert!(again > ms(4900) && again < ms(5100), "{again:?}");
}

/// The store returns and fails again: a process keeps the share that it had before.
#[tokio::test(start_paused = true)]
async fn shares_stay_when_store_returns_only_briefly() {
    let (quota, store, sent) = (
        Quota::per_second(40),
        Arc::<Shared>::default(),
        Sent::default(),
    );
    let fleet: Vec<_> = (0..2).map(|_| limiter(quota, &store)).collect();
    fleet
        .iter()
        .for_each(|limiter| calls(limiter, 8, ms(0), ms(30_000), &sent));
    sleep(ms(6000)).await;
    for (away, span) in [
        (true, 5000),
        (false, 3200),
        (true, 5000),
        (false, 1000),
        (true, 5000),
    ] {
        store.set_away(away);
        sleep(ms(span)).await;
    }
    let now = Instant::now();
    let last = within(&sent, now - ms(4000), now);
    let largest = largest_count(&sent.lock().unwrap(), ms(1000));
    assert!(
        last >= 4 * 30,
        "{last} in the last four seconds, alone again"
    );
    assert!(largest <= 80, "{largest} in a second");
}

#[tokio::test(start_paused = true)]
async fn units_used_without_store_are_charged_without_requests() {
    let store = Arc::<Shared>::default();
    let quota = Quota::per_minute(20);
    let limiter = builder(quota, &store)
        .max_wait(ms(0))
        .fallback_share(0.5)
        .build()
        .unwrap()
        .limiter();
    store.set_away(true);
    for _ in 0..10 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
    }
    sleep(ms(3000)).await;
    store.set_away(false);
    sleep(ms(2100)).await;
    let peek = limiter.peek(Key::ALL).await.unwrap();
    assert_eq!(
        (peek.degraded, peek.limits[0].used),
        (false, 10),
        "{peek:?}"
    );
    let other = self::limiter(quota, &store);
    let mut granted = 0;
    while timeout(ms(100), other.acquire(Key::ALL))
        .await
        .is_ok_and(|permit| permit.is_ok())
    {
        granted += 1;
    }
    assert_eq!(granted, 10, "the other has what is left");
}

/// The task that charges the store runs in the runtime of a caller, if the store has none. When that runtime has
/// ended, the next request of another one starts the task anew.
#[test]
fn charges_go_on_in_another_runtime() {
    let runtime = || {
        let paused = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        paused.unwrap()
    };
    let store = Arc::<Shared>::default();
    let builder = builder(Quota::per_minute(20), &store).max_wait(ms(0));
    let limiter = builder.fallback_share(0.5).build().unwrap().limiter();
    store.set_away(true);
    let use_up = async |count: usize| {
        for _ in 0..count {
            drop(limiter.acquire(Key::ALL).await.unwrap());
        }
    };
    runtime().block_on(use_up(5));
    runtime().block_on(async {
        use_up(5).await;
        store.set_away(false);
        sleep(ms(2100)).await;
    });
    assert_eq!(store.charged.load(Ordering::Relaxed), 10);
}

/// The store is charged for many idle keys at once. One after the other, the last of these took four seconds, in which
/// the store granted to other processes what this one had used.
#[tokio::test(start_paused = true)]
async fn many_idle_keys_are_charged_soon() {
    let store = Arc::<Shared>::default();
    let limiter = builder(Quota::per_minute(20), &store)
        .fallback_share(0.5)
        .build()
        .unwrap()
        .limiter();
    store.set_away(true);
    for number in 0..2000 {
        drop(
            limiter
                .acquire(Key::new(format!("tenant {number}")))
                .await
                .unwrap(),
        );
    }
    store.set_away(false);
    sleep(ms(1800)).await;
    assert_eq!(store.charged.load(Ordering::Relaxed), 2000);
}

#[tokio::test(start_paused = true)]
async fn fallback_keeps_holds_set_without_the_store() {
    let store = Arc::<Shared>::default();
    let limiter = builder(Quota::per_second(40), &store)
        .fallback_share(0.5)
        .build()
        .unwrap()
        .limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    store.set_away(true);
    let _ = limiter.hold_for(Key::ALL, ms(2000)).await;
    let start = Instant::now();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    assert!(start.elapsed() >= ms(1900), "{:?}", start.elapsed());
    // A wait for a hold makes a bounded number of store calls.
    assert!(
        store.calls.load(Ordering::Relaxed) < 100,
        "{:?} calls",
        store.calls
    );
}

#[test]
fn invalid_shares_are_errors_that_name_the_remedy() {
    let build = |builder: RateLimitBuilder| {
        builder
            .build()
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    let quota = Quota::per_second(40);
    let shares = |share| {
        RateLimitLayer::builder(quota)
            .on_store_error(OnStoreError::FallbackShare)
            .fallback_share(share)
    };
    for share in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY, 1e-12] {
        let error = build(shares(share)).unwrap_err();
        assert!(
            error.contains("fallback_share") && error.contains("above 0"),
            "{share}: {error}"
        );
    }
    assert_eq!(build(shares(1.0)), Ok(()));
    let closed = build(RateLimitLayer::builder(quota).fallback_share(0.5)).unwrap_err();
    assert!(closed.contains("FallbackShare"), "{closed}");
    let slots =
        || RateLimitLayer::builder(Quota::in_flight(3)).on_store_error(OnStoreError::FallbackShare);
    let refused = build(slots()).unwrap_err();
    assert!(refused.starts_with("on_store_error is "), "{refused}");
    // One of the limits has shares.
    let beside = slots().and_per("rate", quota, |_| Some(Key::ALL));
    assert_eq!(build(beside), Ok(()));
}

#[derive(Clone, Debug)]
struct History {
    quota: Quota,
    /// Of each process: its tasks, the pause after each call, when it begins.
    processes: Vec<(usize, u64, u64)>,
    /// How long the store is reachable, unreachable, reachable ...
    turns: Vec<u64>,
    deaf: bool,
}

fn histories() -> impl Strategy<Value = History> {
    let quota = prop_oneof![
        (4..60_u32, 300..1000_u64).prop_map(|(count, window)| Quota::new(count, ms(window))),
        (10..40_u32, 40..90_u32)
            .prop_map(|(few, many)| Quota::new(few, ms(500)).and(Quota::new(many, ms(2000)))),
    ];
    let process = (1..6_usize, 0..400_u64, 0..500_u64);
    let processes = proptest::collection::vec(process, 1..5);
    (
        quota,
        processes,
        proptest::collection::vec(9000..16_000_u64, 2..5),
        any::<bool>(),
    )
        .prop_map(|(quota, processes, turns, deaf)| History {
            quota,
            processes,
            turns,
            deaf,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..histories::config(25) })]

    /// Whether shares are what processes were granted in recent windows, and all lose and find the
    /// store together.
    #[test]
    fn shares_exceed_limit_only_in_the_switch_window(history in histories()) {
        let runtime = crate::support::paused_runtime();
        let (start, sent) = runtime.block_on(async {
            let (store, sent, start) = (Arc::<Shared>::default(), Sent::default(), Instant::now());
            store.deaf.store(history.deaf, Ordering::Relaxed);
            let span = ms(history.turns.iter().sum());
            for &(tasks, pause, begins) in &history.processes {
                let (limiter, sent) = (limiter(history.quota, &store), sent.clone());
                tokio::spawn(async move {
                    sleep(ms(begins)).await;
                    calls(&limiter, tasks, ms(pause), span, &sent);
                });
            }
            for (number, turn) in history.turns.iter().enumerate() {
                store.set_away(number % 2 == 1);
                sleep(ms(*turn)).await;
            }
            let sent = sent.lock().unwrap().clone();
            (start, sent)
        });
        prop_assert!(!sent.is_empty());
        let (mut moment, mut lost, mut found) = (start, Vec::new(), Vec::new());
        for turns in history.turns.chunks(2) {
            moment += ms(turns[0]);
            lost.push(moment);
            moment += turns.get(1).map_or(Duration::ZERO, |turn| ms(*turn));
            found.push(moment);
        }
        for limit in history.quota.limits() {
            let (window, count) = (limit.window(), limit.count() as usize);
            // With a short window, a share may be less than one unit.
            let meet = if history.quota.limits().len() > 1 { history.processes.len() } else { 0 };
            let near = |moments: &[Instant], span: u64, at: &Instant| {
                moments.iter().any(|moment| (*moment..*moment + ms(span) + window).contains(at))
            };
            // Waiters have slots up to three seconds ahead, and notice as late.
            let away_from_losing: Vec<_> = sent.iter().filter(|at| !near(&lost, 3100, at)).copied().collect();
            let away_from_both: Vec<_> =
                away_from_losing.iter().filter(|at| !near(&found, 4000, at)).copied().collect();
            // The shares of processes that have not charged theirs yet, and one unit of each process.
            let uncharged = count + history.processes.len();
            for (what, sent, most) in [
                ("where the store is lost", &sent, 2 * count),
                ("where it is found", &away_from_losing, count + uncharged),
                ("else", &away_from_both, count),
            ] {
                let largest = largest_count(sent, window);
                prop_assert!(largest <= most + meet, "{largest} of {limit} {what}");
            }
        }
    }
}

/// After the store returns, a window of minutes or hours is not lost: charges carry their age.
#[tokio::test(start_paused = true)]
async fn long_windows_are_usable_after_store_returns() {
    let minute = ms(60_000);
    for (quota, window, pause) in [
        (Quota::per_minute(60), minute, ms(0)),
        (Quota::per_minute(60).burst(5), minute, ms(0)),
        (Quota::per_hour(120), 60 * minute, ms(15_000)),
        (Quota::per_hour(120).burst(4), 60 * minute, ms(15_000)),
        (Quota::fixed(60, minute), minute, ms(0)),
    ] {
        let (store, sent) = (Arc::<Shared>::default(), Sent::default());
        let start = Instant::now();
        let fleet: Vec<_> = (0..2).map(|_| limiter(quota, &store)).collect();
        fleet
            .iter()
            .for_each(|limiter| calls(limiter, 2, pause, 5 * window, &sent));
        for (at, away) in [(3, true), (4, false)] {
            sleep(start + at * window - Instant::now()).await;
            store.set_away(away);
        }
        sleep(start + 5 * window - Instant::now()).await;
        let windows: Vec<_> = (0..5)
            .map(|number| {
                within(
                    &sent,
                    start + number * window,
                    start + (number + 1) * window,
                )
            })
            .collect();
        println!(
            "{quota}: calls in each window, the store is unreachable in window 3: {windows:?}"
        );
        // Some seconds after the return go to detection and to shares.
        let (before, after) = (windows[2], windows[4]);
        assert!(after * 100 >= before * 95, "{quota}: {windows:?}");
    }
}

/// A process whose share is used up learns from a request that the store is back, and the store decides about this
/// request.
#[tokio::test(start_paused = true)]
async fn used_up_share_refuses_only_until_the_store_is_back() {
    let (quota, store) = (Quota::per_hour(120), Arc::<Shared>::default());
    let builder = builder(quota, &store).fallback_share(0.1);
    let limiter = builder.build().unwrap().limiter();
    store.set_away(true);
    for _ in 0..12 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
    }
    sleep(ms(1_000_000)).await;
    let alone = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(alone.retry_after().unwrap() > ms(1_000_000), "{alone:?}");

    store.set_away(false);
    drop(limiter.acquire(Key::ALL).await.unwrap());
}

/// A charge whose answer is lost counts as made: it is not repeated.
#[tokio::test(start_paused = true)]
async fn charges_whose_answers_are_lost_are_not_repeated() {
    for quota in [
        Quota::per_minute(600),
        Quota::per_minute(600).burst(20),
        Quota::per_second(10),
    ] {
        let (store, sent) = (Arc::<Shared>::default(), Sent::default());
        let limiter = limiter(quota, &store);
        let start = Instant::now();
        calls(&limiter, 4, ms(0), ms(320_000), &sent);
        sleep(ms(200_000)).await;
        store.set_away(true);
        sleep(ms(90_000)).await;
        store.lose_charges.store(true, Ordering::Relaxed);
        store.set_away(false);
        sleep(ms(5000)).await;
        store.lose_charges.store(false, Ordering::Relaxed);
        sleep(ms(25_000)).await;
        let alone = within(&sent, start + ms(200_000), start + ms(320_000));
        let charged = store.charged.load(Ordering::Relaxed);
        println!(
            "{quota}: {alone} calls while the store was unreachable or lost answers, {charged} units charged"
        );
        // Units older than the window are not charged.
        let back = start + ms(290_000);
        let used = within(&sent, back - quota.limits()[0].window(), back);
        assert!(
            used > 0 && charged >= used * 9 / 10,
            "{quota}: {charged} units charged for {used} calls in the last window"
        );
        assert!(
            charged <= alone,
            "{quota}: {charged} units charged for {alone} calls"
        );
        let sent = sent.lock().unwrap();
        let after: Vec<_> = sent
            .iter()
            .copied()
            .filter(|at| *at >= start + ms(240_000))
            .collect();
        let most = largest_count(&after, ms(60_000));
        assert!(most <= 600, "{quota}: {most} in a minute");
    }
}

/// However much was used without the store: a call has few charges, and each unit of the last
/// window is charged once.
#[tokio::test(start_paused = true)]
async fn charges_after_an_outage_are_few_and_made_once() {
    let hour = ms(3_600_000);
    for (quota, window, pause) in [
        (Quota::per_minute(600), ms(60_000), ms(0)),
        (Quota::per_minute(600).burst(20), ms(60_000), ms(0)),
        (Quota::per_hour(5000), hour, ms(4500)),
        (Quota::per_hour(5000).burst(100), hour, ms(4500)),
    ] {
        let (store, sent) = (Arc::<Shared>::default(), Sent::default());
        let limiter = builder(quota, &store)
            .fallback_share(1.0)
            .build()
            .unwrap()
            .limiter();
        let start = Instant::now();
        store.set_away(true);
        calls(&limiter, 4, pause, 3 * window, &sent);
        sleep(window * 3 / 2).await;
        let back = Instant::now();
        store.set_away(false);
        // The process shares the limit again, and charges nothing more.
        sleep(ms(15_000)).await;
        let [charged, most] =
            [&store.charged, &store.most_charges].map(|counter| counter.load(Ordering::Relaxed));
        let (last_window, alone) = (
            within(&sent, back - window, back),
            within(&sent, start, back + ms(15_000)),
        );
        println!(
            "{quota}: {alone} used alone, {last_window} in the last window, {charged} charged, {most} at once"
        );
        assert!(
            most > 0 && most <= Charge::MOST,
            "{quota}: {most} charges in a call"
        );
        // Units are charged in parts; the first part may have begun before the window.
        let part = last_window / 20 + 10;
        assert!(
            charged >= last_window - part && charged <= last_window + part,
            "{quota}: {charged}"
        );
        sleep(ms(1000)).await;
        assert_eq!(
            store.charged.load(Ordering::Relaxed),
            charged,
            "{quota}: it charges on"
        );
        let usage = limiter.peek(Key::ALL).await.unwrap().limits[0];
        if matches!(usage.limit, Limit::Sliding { .. }) {
            let (now, used) = (Instant::now(), usage.used as usize);
            let really = within(&sent, now - window, now);
            // Both the charges and the log of a long window are kept in parts, and some permits are
            // prefetched.
            let most = really + really * 3 / 20 + 50;
            assert!(
                used >= really && used <= most,
                "{quota}: {used} instead of {really}"
            );
        }
    }
}

/// Returns a limiter whose store was away, and replies again. It has used one alone, and one of the store.
async fn just_back(store: &Arc<Shared>) -> Limiter {
    let builder = builder(Quota::per_minute(10), store).fallback_share(0.5);
    let limiter = builder.build().unwrap().limiter();
    store.set_away(true);
    drop(limiter.acquire(Key::ALL).await.unwrap());
    store.set_away(false);
    drop(limiter.acquire(Key::ALL).await.unwrap());
    limiter
}

/// The search of a joint request replaces the slots that are too early.
#[tokio::test(start_paused = true)]
async fn joint_requests_after_an_outage_count_once() {
    let store = Arc::<Shared>::default();
    let all = just_back(&store).await;
    let channel = RateLimitLayer::builder(Quota::new(1, ms(300))).max_wait(ms(3000));
    let channel = channel.build().unwrap().limiter();
    let start = Instant::now();
    for _ in 0..3 {
        let both = all.acquire(Key::ALL).and(channel.acquire(Key::new("17")));
        drop(both.await.unwrap());
    }
    assert!(start.elapsed() < ms(1500), "{:?}", start.elapsed());
    assert_eq!(all.peek(Key::ALL).await.unwrap().limits[0].used, 5);
}

/// Many requests of several keys ask for the same key at the same time, and all their calls fail. Together they get the
/// share of the process.
#[tokio::test(start_paused = true)]
async fn calls_that_fail_together_share_one_share() {
    let store = Arc::<Shared>::default();
    store.set_away(true);
    let half = builder(Quota::per_hour(20), &store).fallback_share(0.5);
    let all = half.build().unwrap().limiter();
    let client = RateLimitLayer::builder(Quota::per_second(1)).max_wait(ms(3000));
    let client = client.build().unwrap().limiter();
    let requests = (0..40u8).map(|number| {
        let key = Key::new([number]);
        all.acquire(Key::ALL).and(client.acquire(key))
    });
    let permits = futures::future::join_all(requests).await;
    let granted = permits.iter().filter(|permit| permit.is_ok()).count();
    assert_eq!(granted, 10);
}

/// Keys that rest after an outage do not count as alone, although they make no further request.
#[tokio::test(start_paused = true)]
async fn keys_at_rest_are_not_alone_after_an_outage() {
    let store = Arc::<Shared>::default();
    let half = builder(Quota::per_minute(60), &store).fallback_share(0.5);
    let limiter = half.build().unwrap().limiter();
    let alone = || count_of(&limiter.stats(), "keys_alone");
    store.set_away(true);
    for number in 0..20_u8 {
        drop(limiter.acquire(Key::new([number])).await.unwrap());
    }
    assert_eq!(alone(), 20);
    sleep(ms(30_000)).await;
    assert_eq!(alone(), 20, "the store is away");
    store.set_away(false);
    sleep(ms(10_000)).await;
    assert_eq!(alone(), 0);
}

/// One call asks for a request above the share, and for one that the share allows later. The first is never allowed,
/// whatever the other waits for.
#[tokio::test(start_paused = true)]
async fn request_above_the_share_has_no_wait_of_another() {
    let store = Arc::<Shared>::default();
    store.set_away(true);
    let tenth = builder(Quota::per_minute(50), &store).fallback_share(0.1);
    let limiter = tenth.build().unwrap().limiter();
    let acquire = |cost| limiter.acquire(Key::ALL).cost(cost);
    let (all, above, late) = tokio::join!(acquire(5), acquire(10), acquire(1));
    drop(all.unwrap());
    assert_eq!(above.unwrap_err().retry_after(), None);
    assert!(late.unwrap_err().retry_after().unwrap() > ms(50_000));
}

/// A store that may lose its state, as Redis may. It grants everything, and counts the units that it knows of. It
/// keeps no state of a key that used nothing.
struct Forgetful {
    away: AtomicBool,
    start: Instant,
    session_ttl: Duration,
    state: Mutex<ForgetfulState>,
}

#[derive(Default)]
struct ForgetfulState {
    incarnation: u64,
    writes: u64,
    used: u64,
    /// How many calls showed that a state was lost.
    recoveries: u32,
}

impl Forgetful {
    fn new(session_ttl: Duration) -> Arc<Self> {
        Arc::new(Forgetful {
            away: AtomicBool::new(false),
            start: Instant::now(),
            session_ttl,
            state: Mutex::default(),
        })
    }

    fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Relaxed);
    }

    /// Loses the state.
    fn forget(&self) {
        self.state.lock().unwrap().used = 0;
    }

    fn used(&self) -> u64 {
        self.state.lock().unwrap().used
    }

    fn recoveries(&self) -> u32 {
        self.state.lock().unwrap().recoveries
    }

    fn answer(&self, request: &LeaseRequest<'_>) -> Lease {
        let mut state = self.state.lock().unwrap();
        if state.used == 0 {
            state.incarnation += 1;
        }
        let session = request.session;
        if session.incarnation != 0 && session.seen > 0 && session.incarnation != state.incarnation
        {
            state.recoveries += 1;
            state.used += session.granted;
        }
        state.writes += 1;
        state.used += request
            .charges
            .iter()
            .map(|charge| charge.units)
            .sum::<u64>();
        let mut lease = Lease::default();
        lease.incarnation = state.incarnation;
        lease.writes = state.writes;
        lease.now = 1_000_000 + u64::try_from(self.start.elapsed().as_micros()).unwrap();
        for demand in request.demands {
            state.used += u64::from(demand.cost) * u64::from(demand.count);
            let mut grant = Grant::new(demand.cost, demand.count, ms(0), request.validity);
            grant.slot = lease.now;
            lease.grants.push(grant);
        }
        if state.used > 0 {
            lease.session_ttl = self.session_ttl;
        }
        lease
    }
}

impl Store for Forgetful {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let no_route = || StoreError::Away(Arc::new(std::io::Error::other("no route")));
        let answer = match self.away.load(Ordering::Relaxed) {
            true => Err(no_route()),
            false => Ok(self.answer(&request)),
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(ms(1)).await;
            answer
        }))
    }
}

/// A process that has half of the quota without the store.
fn with_half_alone(quota: Quota, store: &Arc<Forgetful>) -> Limiter {
    let builder = RateLimitLayer::builder(quota).store(store.clone());
    let builder = builder.on_store_error(OnStoreError::FallbackShare);
    builder.fallback_share(0.5).build().unwrap().limiter()
}

/// Ten units are granted by the store, and five are used without it. Then the store is back without its state.
async fn back_without_state(key_rests: bool) -> u64 {
    let store = Forgetful::new(Duration::from_secs(3600));
    let limiter = with_half_alone(Quota::per_hour(1000), &store);
    for _ in 0..10 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
    }
    store.set_away(true);
    for _ in 0..5 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
    }
    store.forget();
    store.set_away(false);
    if key_rests {
        sleep(ms(3000)).await;
        assert_eq!(store.used(), 15, "charged without a request");
    }
    drop(limiter.acquire(Key::ALL).await.unwrap());
    sleep(ms(3000)).await;
    drop(limiter.acquire(Key::ALL).await.unwrap());
    store.used()
}

#[tokio::test(start_paused = true)]
async fn units_count_once_in_a_store_that_lost_its_state() {
    assert_eq!(back_without_state(false).await, 17, "a key in use");
    assert_eq!(back_without_state(true).await, 17, "a key at rest");
}

/// The store forgets a key when all its units have left their windows.
async fn back_after_key_expired(key_rests: bool) -> u32 {
    let store = Forgetful::new(ms(2000));
    let limiter = with_half_alone(Quota::per_second(50), &store);
    drop(limiter.acquire(Key::ALL).await.unwrap());
    store.set_away(true);
    drop(limiter.acquire(Key::ALL).await.unwrap());
    sleep(ms(10_000)).await;
    store.forget();
    store.set_away(false);
    if key_rests {
        sleep(ms(3000)).await;
    }
    drop(limiter.acquire(Key::ALL).await.unwrap());
    store.recoveries()
}

#[tokio::test(start_paused = true)]
async fn keys_that_expired_during_an_outage_are_not_lost() {
    assert_eq!(back_after_key_expired(false).await, 0, "a key in use");
    assert_eq!(back_after_key_expired(true).await, 0, "a key at rest");
}

/// The share is a part of the quota that the key has now, also if it changes while the store is away. As in the store, a
/// looser one applies after two windows.
#[tokio::test(start_paused = true)]
async fn shares_follow_the_plan_of_a_key() {
    let store = Arc::<Shared>::default();
    let half = builder(Quota::per_minute(600), &store).max_wait(ms(0));
    let limiter = half.fallback_share(0.5).build().unwrap().limiter();
    store.set_away(true);
    drop(limiter.acquire(Key::ALL).await.unwrap());
    for (plan, more) in [(Quota::per_minute(60), 29), (Quota::per_minute(100), 50)] {
        let mut granted = 0;
        while limiter.acquire(Key::ALL).quota(plan).await.is_ok() {
            granted += 1;
        }
        assert_eq!(granted, more, "of {plan}");
        sleep(ms(180_000)).await;
    }
}
