//! Counting polls, and counting in windows.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

/// A future that counts how often it is polled.
pub(crate) struct Counted<F> {
    inner: Pin<Box<F>>,
    polls: Arc<AtomicUsize>,
}

impl<F: Future> Counted<F> {
    pub(crate) fn new(inner: F) -> (Self, Arc<AtomicUsize>) {
        let polls = Arc::new(AtomicUsize::new(0));
        (
            Counted {
                inner: Box::pin(inner),
                polls: polls.clone(),
            },
            polls,
        )
    }
}

impl<F: Future> Future for Counted<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.inner.as_mut().poll(cx)
    }
}

/// Returns the largest count of `moments` in any half-open window.
pub(crate) fn largest_count(moments: &[Instant], window: Duration) -> usize {
    let mut moments = moments.to_vec();
    moments.sort();
    (0..moments.len())
        .map(|first| {
            moments[first..]
                .iter()
                .take_while(|at| **at - moments[first] < window)
                .count()
        })
        .max()
        .unwrap_or(0)
}
