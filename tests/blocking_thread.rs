//! Which threads blocking code starts. A file of its own, because its process has no other tests.

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

#[test]
fn one_thread_starts_with_the_first_wait() {
    let layer = RateLimitLayer::builder(Quota::in_flight(2)).max_wait(Duration::from_secs(60));
    let limiter = layer.build().unwrap().limiter();
    let permits = [(); 2].map(|()| limiter.acquire(Key::ALL).blocking().unwrap());
    let free = RateLimitLayer::new(Quota::per_second(50))
        .unwrap()
        .limiter();
    for _ in 0..20 {
        drop(free.acquire(Key::ALL).blocking().unwrap());
    }
    assert_eq!(threads(), 0, "permits at hand need no thread");

    let waiters = [(); 50].map(|()| {
        let limiter = limiter.clone();
        thread::spawn(move || drop(limiter.acquire(Key::ALL).blocking().unwrap()))
    });
    while limiter.stats().waiting < 50 {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(threads(), 1);
    drop(permits);
    for waiter in waiters {
        waiter.join().unwrap();
    }
}
