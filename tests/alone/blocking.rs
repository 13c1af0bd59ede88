//! Threads without a runtime that wait for permits, alone and beside tasks, under the real clock.

use crate::support::{counted, patient, remote};

#[cfg(feature = "redis")]
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use counted::largest_count;
use tokio::runtime::{Builder, Handle, Runtime};
use tollgate::blocking::{CannotBlock, block_on};
use tollgate::store::StoreError;
use tollgate::{
    AdaptiveThrottleLayer, Key, Limited, Limiter, Permit, Quota, RateLimitLayer, Reason, Signal,
};

const IN_RUNTIME: Reason = Reason::CannotBlock(CannotBlock::InRuntime);

fn limiter(quota: Quota, max_wait: Duration) -> Limiter {
    let layer = RateLimitLayer::builder(quota).max_wait(max_wait);
    layer.build().unwrap().limiter()
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Waits until `count` requests wait in `limiter`.
fn until_waiting(limiter: &Limiter, count: usize) {
    while limiter.stats().waiting() < count {
        thread::sleep(Duration::from_millis(1));
    }
}

/// When requests left. Clones are the same log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<tokio::time::Instant>>>);

impl Log {
    /// Sends a request now. Returns `false`, and gives the permit back, if the permit has expired:
    /// the thread may have been stopped since it got it.
    fn send(&self, permit: Permit) -> bool {
        let mut sent = self.0.lock().unwrap();
        let now = Instant::now();
        if permit.deadline().is_some_and(|by| by <= now) {
            permit.give_back();
            return false;
        }
        sent.push(now.into());
        true
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn most(&self, window: Duration) -> usize {
        largest_count(&self.0.lock().unwrap(), window)
    }
}

/// Waits for a permit and sends a request, until it has left in time. A call to the store takes too long
/// if the machine stalls.
fn send(limiter: &Limiter, log: &Log) {
    loop {
        match limiter.acquire(Key::ALL).blocking() {
            Ok(permit) => {
                if log.send(permit) {
                    return;
                }
            }
            Err(Limited::Store {
                source: StoreError::TooSlow { .. },
                ..
            }) => {}
            Err(limited) => panic!("{limited}"),
        }
    }
}

#[test]
fn threads_and_tasks_leave_in_order_of_arrival() {
    const EACH: usize = 64;
    let limiter = limiter(Quota::in_flight(1), Duration::from_secs(60));
    let runtime = runtime();
    let first = limiter.acquire(Key::ALL).blocking().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut threads = Vec::new();
    for number in 0..2 * EACH {
        let (waiting, order) = (limiter.clone(), order.clone());
        if number % 2 == 0 {
            threads.push(thread::spawn(move || {
                let permit = waiting.acquire(Key::ALL).blocking().unwrap();
                order.lock().unwrap().push(number);
                drop(permit);
            }));
        } else {
            runtime.spawn(async move {
                let permit = waiting.acquire(Key::ALL).await.unwrap();
                order.lock().unwrap().push(number);
                drop(permit);
            });
        }
        until_waiting(&limiter, number + 1);
    }
    drop(first);
    for thread in threads {
        thread.join().unwrap();
    }
    // The last one is a task.
    drop(limiter.acquire(Key::ALL).blocking().unwrap());
    let order = order.lock().unwrap();
    assert!(order.iter().copied().eq(0..2 * EACH), "{order:?}");
}

#[test]
fn threads_and_tasks_never_exceed_the_limit() {
    const EACH: usize = 64;
    const LIMIT: u32 = 50;
    let limiter = limiter(Quota::per_second(LIMIT), Duration::from_secs(60));
    let (runtime, log) = (runtime(), Log::default());
    for _ in 0..EACH {
        let (limiter, log) = (limiter.clone(), log.clone());
        runtime.spawn(async move { while !log.send(limiter.acquire(Key::ALL).await.unwrap()) {} });
    }
    thread::scope(|scope| {
        for _ in 0..EACH {
            scope.spawn(|| send(&limiter, &log));
        }
    });
    while log.len() < 2 * EACH {
        thread::sleep(Duration::from_millis(1));
    }
    let most = log.most(Duration::from_secs(1));
    assert!(most <= LIMIT as usize, "{most} in a second");
}

/// The stacks are small: a thread that waits needs little of it.
fn small(name: usize) -> thread::Builder {
    thread::Builder::new()
        .name(format!("small-{name}"))
        .stack_size(128 * 1024)
}

#[test]
fn two_thousand_threads_are_served() {
    const THREADS: usize = 2000;
    const LIMIT: u32 = 1000;
    let limiter = limiter(Quota::per_second(LIMIT), Duration::from_secs(600));
    let log = Log::default();
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let (limiter, log) = (limiter.clone(), log.clone());
            let thread = small(number).spawn(move || send(&limiter, &log));
            thread.unwrap()
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(log.len(), THREADS);
    let most = log.most(Duration::from_secs(1));
    assert!(most <= LIMIT as usize, "{most} in a second");
}

#[test]
fn threads_beyond_the_queue_are_refused() {
    const THREADS: usize = 300;
    const ROOM: usize = 200;
    let layer = RateLimitLayer::builder(Quota::in_flight(1))
        .max_wait(Duration::from_secs(600))
        .max_queue(ROOM);
    let limiter = layer.build().unwrap().limiter();
    let first = limiter.acquire(Key::ALL).blocking().unwrap();
    let (refused, refusals) = mpsc::channel();
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let (limiter, refused) = (limiter.clone(), refused.clone());
            let thread = small(number).spawn(move || {
                if let Err(limited) = limiter.acquire(Key::ALL).blocking() {
                    refused.send(limited.reason()).unwrap();
                }
            });
            thread.unwrap()
        })
        .collect();
    for _ in 0..THREADS - ROOM {
        assert_eq!(refusals.recv().unwrap(), Some(Reason::QueueFull(ROOM)));
    }
    drop(first);
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(refusals.try_recv().is_err());
}

#[test]
fn threads_keep_deadline_and_max_wait() {
    let used_up = |max_wait| {
        let limiter = limiter(Quota::per_minute(1), max_wait);
        drop(limiter.acquire(Key::ALL).blocking().unwrap());
        limiter
    };
    let limiter = used_up(Duration::from_secs(15));
    let limited = limiter.acquire(Key::ALL).blocking().unwrap_err();
    let max_wait = Reason::MaxWait(Duration::from_secs(15));
    assert_eq!(limited.reason(), Some(max_wait), "{limited}");
    assert!(limited.retry_after() > Some(Duration::from_secs(30)));

    let limiter = used_up(Duration::from_secs(600));
    let soon = || Instant::now() + Duration::from_secs(5);
    let limited = limiter
        .acquire(Key::ALL)
        .deadline(soon())
        .blocking()
        .unwrap_err();
    assert_eq!(limited.reason(), Some(Reason::Deadline), "{limited}");

    // Calls in flight end at no known time, so the thread waits until its deadline.
    let limiter = self::limiter(Quota::in_flight(1), Duration::from_secs(600));
    let _first = limiter.acquire(Key::ALL).blocking().unwrap();
    let by = Instant::now() + Duration::from_millis(50);
    let waiting = limiter.acquire(Key::ALL).deadline(by);
    let limited = waiting.blocking().unwrap_err();
    assert_eq!(limited.reason(), Some(Reason::Deadline), "{limited}");
    assert!(Instant::now() >= by);
    assert_eq!(limiter.stats().waiting(), 0);
}

#[test]
fn holds_refuse_and_delay_threads() {
    let limiter = limiter(Quota::per_second(50), Duration::from_secs(20));
    let permit = limiter.acquire(Key::ALL).blocking().unwrap();
    let refused = http::Response::builder()
        .status(429)
        .header("retry-after", "1")
        .body(())
        .unwrap();
    let held_at = Instant::now();
    let sent = permit.begin().unwrap();
    assert!(sent.answered(&Signal::read(&refused)).is_some());
    drop(limiter.acquire(Key::ALL).blocking().unwrap());
    assert!(held_at.elapsed() >= Duration::from_millis(900));

    let held = limiter.hold_for(Key::ALL, Duration::from_secs(60));
    block_on(held).unwrap().unwrap();
    let limited = limiter.acquire(Key::ALL).blocking().unwrap_err();
    assert_eq!(limited.reason(), Some(Reason::Held), "{limited}");
}

/// Asserts that `limited` says what to do instead.
fn assert_cannot_block(limited: &Limited) {
    assert_eq!(limited.reason(), Some(IN_RUNTIME), "{limited}");
    let text = limited.to_string();
    assert!(text.contains("`.await`"), "{text}");
    assert!(text.contains("spawn_blocking"), "{text}");
}

#[test]
fn tasks_of_a_runtime_are_refused() {
    let limiter = limiter(Quota::per_minute(10), Duration::from_secs(20));
    let current = Builder::new_current_thread().enable_all().build().unwrap();
    let several = runtime();
    for runtime in [&current, &several] {
        let blocked = runtime.block_on(async { limiter.acquire(Key::ALL).blocking() });
        assert_cannot_block(&blocked.unwrap_err());
        let task = limiter.clone();
        let task = runtime.spawn(async move { task.acquire(Key::ALL).blocking() });
        assert_cannot_block(&runtime.block_on(task).unwrap().unwrap_err());
        let joint = limiter
            .acquire(Key::ALL)
            .and(limiter.acquire(Key::new("k")));
        let blocked = runtime.block_on(async { joint.blocking() });
        assert_cannot_block(&blocked.unwrap_err());
        let blocked = runtime.block_on(async { block_on(limiter.shutdown()) });
        assert!(matches!(blocked, Err(CannotBlock::InRuntime)));
        let local = tokio::task::LocalSet::new();
        let blocked = local.block_on(runtime, async { limiter.acquire(Key::ALL).blocking() });
        assert_cannot_block(&blocked.unwrap_err());
    }
    let stats = limiter.stats();
    assert_eq!(stats.refusals().of(IN_RUNTIME), 8);
    let status = block_on(limiter.peek(Key::ALL)).unwrap().unwrap();
    assert_eq!(status.free, 10, "a refused request takes no permit");
}

#[test]
fn a_request_that_waits_is_refused_in_a_runtime() {
    let limiter = limiter(Quota::in_flight(1), Duration::from_secs(20));
    let _first = limiter.acquire(Key::ALL).blocking().unwrap();
    runtime().block_on(async {
        let mut waiting = limiter.acquire(Key::ALL);
        assert!(futures::poll!(&mut waiting).is_pending());
        assert_cannot_block(&waiting.blocking().unwrap_err());
    });
    let stats = limiter.stats();
    assert_eq!((stats.waiting(), stats.refusals().total()), (0, 1));
}

/// A thread that blocks is woken by a task of the runtime that it belongs to.
fn waits_for_a_task(limiter: &Limiter, runtime: &Handle) -> Result<Permit, Limited> {
    let first = limiter.acquire(Key::ALL).blocking().unwrap();
    let (task, seen) = (limiter.clone(), limiter.clone());
    runtime.spawn(async move {
        while seen.stats().waiting() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop((first, task));
    });
    limiter.acquire(Key::ALL).blocking()
}

#[test]
fn blocking_threads_of_a_runtime_may_wait() {
    let limiter = limiter(Quota::in_flight(1), Duration::from_secs(60));
    let current = Builder::new_current_thread().enable_all().build().unwrap();
    let several = runtime();
    for runtime in [&current, &several] {
        let (blocking, handle) = (limiter.clone(), runtime.handle().clone());
        let task =
            runtime.spawn_blocking(move || drop(waits_for_a_task(&blocking, &handle).unwrap()));
        runtime.block_on(task).unwrap();
    }
    let (blocking, handle) = (limiter.clone(), several.handle().clone());
    several
        .block_on(several.spawn(async move {
            tokio::task::block_in_place(|| drop(waits_for_a_task(&blocking, &handle).unwrap()));
        }))
        .unwrap();
    let _context = several.enter();
    drop(waits_for_a_task(&limiter, several.handle()).unwrap());
}

#[test]
fn permits_of_threads_pass_to_waiting_threads() {
    let limiter = limiter(Quota::per_hour(1), Duration::from_secs(7200));
    let first = limiter.acquire(Key::ALL).blocking().unwrap();
    let waiting = limiter.clone();
    let waiter = thread::spawn(move || waiting.acquire(Key::ALL).blocking().map(drop));
    until_waiting(&limiter, 1);
    // In a thread that has no runtime.
    thread::spawn(move || first.give_back()).join().unwrap();
    waiter.join().unwrap().unwrap();
}

#[test]
fn threads_go_on_if_a_runtime_ends() {
    let limiter = limiter(Quota::in_flight(1), Duration::from_secs(600));
    for is_paced in [false, true] {
        let limiter = if is_paced {
            let limiter = self::limiter(Quota::per_second(1), Duration::from_secs(600));
            drop(limiter.acquire(Key::ALL).blocking().unwrap());
            limiter
        } else {
            limiter.clone()
        };
        let first = (!is_paced).then(|| limiter.acquire(Key::ALL).blocking().unwrap());
        let runtime = runtime();
        let mut threads = Vec::new();
        // Tasks wait in front of the threads and between them.
        for number in 0..4 {
            let waiting = limiter.clone();
            if number % 2 == 0 {
                runtime.spawn(async move {
                    let permit = waiting.acquire(Key::ALL).await;
                    std::future::pending::<()>().await;
                    drop(permit);
                });
            } else {
                threads.push(thread::spawn(move || {
                    drop(waiting.acquire(Key::ALL).blocking().unwrap());
                }));
            }
            until_waiting(&limiter, number + 1);
        }
        drop(runtime);
        drop(first);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(limiter.stats().waiting(), 0);
    }
}

/// A store without a thread of its own: its calls run in the runtime of the task that made them. If
/// that runtime ends, the call is lost, and so are the requests that it was for. No thread waits for
/// ever, and the next request gets its permit.
#[test]
fn calls_of_a_runtime_that_ended_keep_no_thread() {
    // The calls may take up to a twentieth of the window: longer than the machine stalls.
    let layer = RateLimitLayer::builder(Quota::per_minute(3000))
        .store(Arc::new(remote::Remote::default()))
        .max_wait(Duration::from_secs(600));
    let limiter = layer.build().unwrap().limiter();
    for _ in 0..20 {
        let runtime = runtime();
        for _ in 0..10 {
            let waiting = limiter.clone();
            runtime.spawn(async move { waiting.acquire(Key::ALL).await.map(drop) });
        }
        let waiters = [(); 5].map(|()| {
            let waiting = limiter.clone();
            thread::spawn(move || waiting.acquire(Key::ALL).blocking().map(drop))
        });
        // Returns when its tasks were dropped, and with them their calls.
        drop(runtime);
        for waiter in waiters {
            match waiter.join().unwrap() {
                Ok(()) => {}
                Err(Limited::Store {
                    source: StoreError::Lost,
                    ..
                }) => {}
                Err(limited) => panic!("{limited}"),
            }
        }
        drop(limiter.acquire(Key::ALL).blocking().unwrap());
    }
}

#[test]
fn tasks_go_on_if_threads_are_refused() {
    let limiter = limiter(Quota::in_flight(1), Duration::from_secs(600));
    let first = limiter.acquire(Key::ALL).blocking().unwrap();
    let waiting = limiter.clone();
    let thread = thread::spawn(move || {
        let by = Instant::now() + Duration::from_millis(20);
        waiting.acquire(Key::ALL).deadline(by).blocking().map(drop)
    });
    until_waiting(&limiter, 1);
    let (runtime, waiting) = (runtime(), limiter.clone());
    let task = runtime.spawn(async move { waiting.acquire(Key::ALL).await.map(drop) });
    until_waiting(&limiter, 1);
    thread.join().unwrap().unwrap_err();
    drop(first);
    runtime.block_on(task).unwrap().unwrap();
}

#[test]
fn a_drain_counts_each_waiting_thread_once() {
    // The thread may be about to end its wait while the drain counts.
    for _ in 0..100 {
        let limiter = limiter(Quota::in_flight(1), Duration::from_secs(600));
        let _first = limiter.acquire(Key::ALL).blocking().unwrap();
        let waiting = limiter.clone();
        let waiter = thread::spawn(move || waiting.acquire(Key::ALL).blocking().map(drop));
        until_waiting(&limiter, 1);
        let drained = block_on(limiter.drain(Duration::from_millis(2))).unwrap();
        assert_eq!(drained.unwrap().refused, 1);
        let limited = waiter.join().unwrap().unwrap_err();
        assert_eq!(limited.reason(), Some(Reason::Draining), "{limited}");
    }
}

#[test]
fn threads_take_permits_of_several_keys() {
    let all = limiter(Quota::per_second(20), Duration::from_secs(60));
    let one = limiter(Quota::per_second(10), Duration::from_secs(60));
    let log = Log::default();
    thread::scope(|scope| {
        for _ in 0..25 {
            let (one, all, log) = (&one, &all, &log);
            scope.spawn(move || {
                let both = || one.acquire(Key::ALL).and(all.acquire(Key::ALL));
                while !log.send(both().blocking().unwrap()) {}
            });
        }
    });
    let most = log.most(Duration::from_secs(1));
    assert!(most <= 10, "{most} in a second");
}

#[test]
fn threads_wait_for_a_throttle() {
    let throttle = AdaptiveThrottleLayer::new().throttle();
    let refused = http::Response::builder().status(429).body(()).unwrap();
    for round in 0..3 {
        let permit = block_on(throttle.acquire(Key::ALL)).unwrap().unwrap();
        if round == 0 {
            permit.answered(&Signal::read(&refused));
        } else {
            permit.answered(&Signal::default());
        }
    }
}

#[cfg(feature = "redis")]
#[test]
fn threads_share_a_limit_in_redis() {
    const EACH: usize = 40;
    const LIMIT: u32 = 40;
    let server = redis_server::RedisServer::start().unwrap();
    let log = Log::default();
    // Each store is one process, as Redis sees it.
    let limiters: Vec<Limiter> = (0..2)
        .map(|_| {
            let layer = RateLimitLayer::builder(Quota::per_second(LIMIT))
                .store(patient::store(&server.url()))
                .max_wait(Duration::from_secs(60));
            layer.build().unwrap().limiter()
        })
        .collect();
    thread::scope(|scope| {
        for limiter in &limiters {
            for _ in 0..EACH {
                scope.spawn(|| send(limiter, &log));
            }
        }
    });
    assert_eq!(log.len(), 2 * EACH);
    let most = log.most(Duration::from_secs(1));
    assert!(most <= LIMIT as usize, "{most} in a second");
    for limiter in &limiters {
        block_on(limiter.shutdown()).unwrap().unwrap();
    }
}

#[cfg(feature = "redis")]
#[test]
fn threads_wait_for_in_flight_slots_in_redis() {
    let server = redis_server::RedisServer::start().unwrap();
    let limiters: Vec<Limiter> = (0..2)
        .map(|_| {
            let layer = RateLimitLayer::builder(Quota::in_flight(1))
                .store(patient::store(&server.url()))
                .max_wait(Duration::from_secs(60));
            layer.build().unwrap().limiter()
        })
        .collect();
    let running = Mutex::new(());
    thread::scope(|scope| {
        for limiter in &limiters {
            for _ in 0..5 {
                scope.spawn(|| {
                    let permit = limiter.acquire(Key::ALL).blocking().unwrap();
                    let alone = running.try_lock().map(drop).is_ok();
                    drop(permit);
                    assert!(alone, "two calls are in flight");
                });
            }
        }
    });
}
