//! Which threads blocking code starts, and what memory those take that wait. A file of its own, because
//! its process has no other tests.

#![cfg(target_os = "linux")]

use std::fs;
use std::thread;
use std::time::Duration;

use tollgate::{Key, Quota, RateLimitLayer};

/// Returns how many threads of this process have the name `tollgate`.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
    tasks
        .filter_map(|task| name(task.unwrap()).ok())
        .filter(|name| name.trim() == "tollgate")
        .count()
}

/// Returns the memory of this process, in KiB.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    value.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn one_thread_starts_with_the_first_wait() {
    const WAITERS: usize = 2000;
    /// KiB for each: the pages of its stack that are in use, and its place in the queue.
    const MEMORY: usize = 48;
    let layer = RateLimitLayer::builder(Quota::in_flight(2))
        .max_wait(Duration::from_secs(600))
        .max_queue(WAITERS);
    let limiter = layer.build().unwrap().limiter();
    let permits = [(); 2].map(|()| limiter.acquire(Key::ALL).blocking().unwrap());
    let free = RateLimitLayer::new(Quota::per_second(50))
        .unwrap()
        .limiter();
    for _ in 0..20 {
        drop(free.acquire(Key::ALL).blocking().unwrap());
    }
    assert_eq!(threads(), 0, "permits at hand need no thread");

    let before = resident();
    let waiters: Vec<_> = (0..WAITERS)
        .map(|_| {
            let limiter = limiter.clone();
            let small = thread::Builder::new().stack_size(128 * 1024);
            let wait = move || drop(limiter.acquire(Key::ALL).blocking().unwrap());
            small.spawn(wait).unwrap()
        })
        .collect();
    while limiter.stats().waiting() < WAITERS {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(threads(), 1);
    let each = (resident() - before) / WAITERS;
    println!("{each} KiB for each thread that waits");
    assert!(each <= MEMORY, "{each} KiB for each thread that waits");
    drop(permits);
    for waiter in waiters {
        waiter.join().unwrap();
    }
}
