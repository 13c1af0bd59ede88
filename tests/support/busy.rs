//! A service that is not ready for a while.

use std::task::{Context, Poll};

use tokio::time::Instant;
use tower::Service;

/// A service around another one. It is not ready from one moment to another.
#[derive(Clone)]
pub(crate) struct Busy<S> {
    pub(crate) inner: S,
    pub(crate) from: Instant,
    pub(crate) until: Instant,
}

impl<S: Service<R>, R> Service<R> for Busy<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if !(self.from..self.until).contains(&Instant::now()) {
            return self.inner.poll_ready(cx);
        }
        let (waker, until) = (cx.waker().clone(), self.until);
        tokio::spawn(async move {
            tokio::time::sleep_until(until).await;
            waker.wake();
        });
        Poll::Pending
    }

    fn call(&mut self, request: R) -> S::Future {
        self.inner.call(request)
    }
}
