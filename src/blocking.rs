#![doc = include_str!("guide/blocking.md")]

// The calling thread polls the future itself, in the context of a runtime of this module. So a permit is taken by the
// thread that uses it, and threads and tasks wait in one queue. One thread named `tollgate` drives the
// timers of all threads that wait. It starts when a thread waits for the first time in this process,
// and a thread that waits takes no memory besides its place in the queue.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::thread;

use tokio::runtime::{Builder, Handle};

use crate::locks::lock;

/// Why a thread may not wait for a future.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CannotBlock {
    /// The calling thread runs tasks of a Tokio runtime. If it waited, these tasks would stop, and
    /// the thread might wait for one of them for ever.
    InRuntime,
    /// The operating system could not start the thread that drives the timers. The value says why.
    NoThread(io::ErrorKind),
}

impl fmt::Display for CannotBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CannotBlock::InRuntime => write!(
                f,
                "this thread runs tasks of a Tokio runtime and must not block; use `.await`, or call it inside \
                 `tokio::task::spawn_blocking`"
            ),
            CannotBlock::NoThread(error) => write!(
                f,
                "the thread `tollgate`, which drives timers, could not be started: {error}; raise the limit of \
                 threads or open files"
            ),
        }
    }
}

impl std::error::Error for CannotBlock {}

/// Runs `future` in the calling thread until it is ready, for threads without a Tokio runtime.
///
/// It is for the asynchronous functions of this crate, such as
/// [`Limiter::drain`](crate::Limiter::drain), [`Limiter::set_quota`](crate::Limiter::set_quota) and
/// [`Throttle::acquire`](crate::Throttle::acquire). For [`Limiter::acquire`](crate::Limiter::acquire),
/// call [`blocking`](crate::limiter::Acquire::blocking). Timers and spawned tasks of the future run in
/// the thread `tollgate`, so the future may also use Tokio itself.
///
/// ```
/// use tollgate::{AdaptiveThrottleLayer, Key, Quota, RateLimitLayer, blocking};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let throttle = AdaptiveThrottleLayer::new().throttle();
///     let permit = blocking::block_on(throttle.acquire(Key::ALL))??;
///     drop(permit);
///
///     let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
///     blocking::block_on(limiter.shutdown())??;
///     Ok(())
/// }
/// ```
///
/// # Errors
///
/// [`CannotBlock::InRuntime`] if the calling thread runs tasks of a Tokio runtime. The future was not
/// polled then. A thread of `tokio::task::spawn_blocking` may block, and so may a thread inside of
/// `tokio::task::block_in_place`. A task inside of `tokio::task::unconstrained` is not recognised: Tokio
/// panics there.
///
/// [`CannotBlock::NoThread`] if the thread `tollgate` could not be started.
pub fn block_on<F: Future>(future: F) -> Result<F::Output, CannotBlock> {
    check()?;
    let runtime = runtime().map_err(|error| CannotBlock::NoThread(error.kind()))?;
    Ok(runtime.block_on(future))
}

/// Whether this process has blocking code. Set by the first thread that may block.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Checks that the calling thread may block.
///
/// # Errors
///
/// [`CannotBlock::InRuntime`] if it runs tasks of a Tokio runtime.
pub(crate) fn check() -> Result<(), CannotBlock> {
    if runs_tasks() {
        return Err(CannotBlock::InRuntime);
    }
    IS_USED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Returns whether the calling thread runs a task of a Tokio runtime, or the future of its `block_on`.
///
/// A handle alone does not tell: threads of `spawn_blocking` have one, too. But Tokio gives each poll
/// of a task a budget, and code that may block has none. So a task runs if the budget ends. The task
/// then yields at its next `.await`.
fn runs_tasks() -> bool {
    /// More than any budget: Tokio keeps it in a `u8`.
    const MOST_BUDGET: usize = 256;

    if Handle::try_current().is_err() {
        return false;
    }
    let mut cx = Context::from_waker(Waker::noop());
    let mut is_used_up = || {
        let unit = pin!(tokio::task::consume_budget());
        unit.poll(&mut cx).is_pending()
    };
    (0..MOST_BUDGET).any(|_| is_used_up())
}

/// Returns the runtime in which a task of the calling thread runs: its own, or that of blocking code
/// if this process has blocking code. `None` if there is neither.
pub(crate) fn runtime_for_tasks() -> Option<Handle> {
    match Handle::try_current() {
        Ok(own) => Some(own),
        Err(_) if IS_USED.load(Ordering::Relaxed) => runtime().ok(),
        Err(_) => None,
    }
}

/// Returns the runtime of blocking code. The first call starts it, in a thread of its own.
fn runtime() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);

    let mut runtime = lock(&RUNTIME);
    if let Some(handle) = &*runtime {
        return Ok(handle.clone());
    }
    let handle = start()?;
    *runtime = Some(handle.clone());
    Ok(handle)
}

/// Starts a runtime that runs until the process ends.
fn start() -> io::Result<Handle> {
    // A store without a background of its own may need sockets.
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new()
        .name("tollgate".into())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(handle)
}
