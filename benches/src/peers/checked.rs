//! The smallest service around a limiter that allows or refuses: for limiters without a Tower layer
//! for clients.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower::{BoxError, Service};

/// A service that calls its inner service if the check allows it.
#[derive(Clone)]
pub(crate) struct Checked<C, S> {
    pub(crate) check: C,
    pub(crate) inner: S,
}

impl<C, S, R> Service<R> for Checked<C, S>
where
    C: Fn(&R) -> bool,
    S: Service<R>,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = CheckedFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: R) -> Self::Future {
        match (self.check)(&request) {
            true => CheckedFuture::Calling {
                call: self.inner.call(request),
            },
            false => CheckedFuture::Refused,
        }
    }
}

pin_project! {
    #[project = Projected]
    pub(crate) enum CheckedFuture<F> {
        Calling { #[pin] call: F },
        Refused,
    }
}

impl<F, T, E> Future for CheckedFuture<F>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BoxError>,
{
    type Output = Result<T, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            Projected::Calling { call } => Poll::Ready(ready!(call.poll(cx)).map_err(Into::into)),
            Projected::Refused => Poll::Ready(Err("refused".into())),
        }
    }
}
