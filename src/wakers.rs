//! The tasks to wake once a lock is released.

use std::task::{Context, Waker};

use smallvec::SmallVec;

/// Wakers that are collected under a lock and woken after it.
#[derive(Default)]
pub(crate) struct Wakers(SmallVec<[Waker; 4]>);

impl Wakers {
    pub(crate) fn add(&mut self, wakers: impl IntoIterator<Item = Waker>) {
        self.0.extend(wakers);
    }

    /// Wakes all of them. So does a drop: if the task that collected them panics, the others go on.
    pub(crate) fn wake(self) {
        drop(self);
    }
}

impl Drop for Wakers {
    fn drop(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }
}

/// Adds the task of `cx` to `wakers`, unless it is one of them.
pub(crate) fn add_task(wakers: &mut Vec<Waker>, cx: &Context<'_>) {
    if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
        wakers.push(cx.waker().clone());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A timer panics outside of a runtime.
    #[test]
    fn a_task_that_panics_wakes_the_others() {
        let woken = Arc::new(Woken::default());
        let collected = catch_unwind(AssertUnwindSafe(|| {
            let mut wakers = Wakers::default();
            wakers.add([Waker::from(woken.clone())]);
            panic!("no timers here");
        }));
        assert!(collected.is_err() && woken.0.load(Ordering::Relaxed));
    }
}
