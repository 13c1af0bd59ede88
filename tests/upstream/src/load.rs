//! Callers that keep an upstream busy.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

/// Runs `callers` tasks for `span`. Each makes one `call` after the other, and is cut off at the
/// end.
///
/// # Panics
///
/// Panics if a call panics.
pub async fn closed_loops<F>(
    callers: usize,
    span: Duration,
    call: impl FnMut() -> F + Clone + Send + 'static,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let end = Instant::now() + span;
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let mut call = call.clone();
            tokio::spawn(timeout_at(end, async move {
                loop {
                    call().await;
                }
            }))
        })
        .collect();
    for task in tasks {
        // The loop never ends by itself: only the time is over.
        let _: Result<(), _> = task.await.expect("no call panics");
    }
}
