//! How late threads wake on this machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const NAP: Duration = Duration::from_millis(1);

/// Watches how late threads wake: one thread per core that sleeps a millisecond at a time.
pub struct Stalls {
    done: Arc<AtomicBool>,
    watchers: Vec<JoinHandle<Duration>>,
}

impl Stalls {
    /// Starts the threads.
    pub fn watch() -> Stalls {
        let done = Arc::new(AtomicBool::new(false));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let watch = |done: Arc<AtomicBool>| {
            move || {
                let mut worst = Duration::ZERO;
                while !done.load(Ordering::Relaxed) {
                    let asleep = Instant::now();
                    thread::sleep(NAP);
                    worst = worst.max(asleep.elapsed().saturating_sub(NAP));
                }
                worst
            }
        };
        let watchers = (0..cores)
            .map(|_| thread::spawn(watch(done.clone())))
            .collect();
        Stalls { done, watchers }
    }

    /// Returns the longest delay of a wake-up since [`watch`](Stalls::watch).
    pub fn worst(mut self) -> Duration {
        self.done.store(true, Ordering::Relaxed);
        self.watchers
            .drain(..)
            .filter_map(|watcher| watcher.join().ok())
            .max()
            .unwrap_or_default()
    }
}

impl Drop for Stalls {
    /// Ends the threads of a look that failed before its end.
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}
