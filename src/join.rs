//! Polls several futures at the same time.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Runs all futures at the same time, and returns their results in the order in which they came.
pub(crate) async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut results = Vec::new();
    join_each(futures, |result| results.push(result)).await;
    results
}

/// Runs all futures at the same time, and gives each result to `take` when it comes. So if this future is
/// dropped, `take` has had all results that there are.
pub(crate) async fn join_each<F: Future>(
    futures: impl IntoIterator<Item = F>,
    mut take: impl FnMut(F::Output),
) {
    let mut running: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    poll_fn(|cx| {
        running.retain_mut(|future| match future.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                take(result);
                false
            }
        });
        if running.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}
