//! Tasks that run at once, as far as they can without waiting.
//!
//! What a store in memory answers at once is to be done when the caller goes on. So the first poll of a
//! task happens where it starts. A task may start others, and the end of a task may do so when it is
//! dropped. If each of them were polled inside of the other, the stack would grow with every task, and
//! two tasks that start each other would end the process. So only the outermost start of a thread
//! polls: the tasks that start meanwhile wait in a list, and are polled one after the other.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::store::{Store, Task, spawn};

/// The most tasks that one start polls. Further ones are spawned, so that tasks that start each other
/// without end leave the thread to others.
const MOST_POLLED: usize = 64;

/// A task and the store in whose background it goes on.
type Started = (Arc<dyn Store>, Task);

thread_local! {
    /// The tasks that were started while a task of this thread is polled. `None` if none is.
    static STARTED: RefCell<Option<VecDeque<Started>>> = const { RefCell::new(None) };
}

/// Ends the outermost start, also if a task panics. The tasks that are left are spawned.
struct Outermost;

impl Drop for Outermost {
    fn drop(&mut self) {
        let left = STARTED.try_with(|started| started.borrow_mut().take());
        for (store, task) in left.ok().flatten().into_iter().flatten() {
            spawn(&*store, task);
        }
    }
}

/// Starts a task: polls it once, and leaves the rest of it to the background of `store`. If it starts
/// while another task of this thread is polled, it is polled after that.
pub(super) fn start(store: &Arc<dyn Store>, task: impl Future<Output = ()> + Send + 'static) {
    let mut next: Option<Started> = Some((store.clone(), Box::pin(task)));
    let is_outermost = STARTED.try_with(|started| match &mut *started.borrow_mut() {
        Some(started) => {
            started.extend(next.take());
            false
        }
        none => {
            *none = Some(VecDeque::new());
            true
        }
    });
    let most = match is_outermost {
        Ok(true) => MOST_POLLED,
        Ok(false) => return,
        // A thread that ends polls nothing.
        Err(_) => 0,
    };
    let _outermost = Outermost;
    for _ in 0..most {
        let Some((store, mut task)) = next else {
            return;
        };
        let first = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if first.is_pending() {
            spawn(&*store, task);
        }
        next = take_next();
    }
    if let Some((store, task)) = next {
        spawn(&*store, task);
    }
}

/// Returns the first of the tasks that wait to be polled.
fn take_next() -> Option<Started> {
    let next = STARTED.try_with(|started| started.borrow_mut().as_mut()?.pop_front());
    next.ok().flatten()
}
