//! leaky-bucket: it has no Tower layer, so it is measured in the smallest service that waits for it
//! before each call.

use std::hint::black_box;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use leaky_bucket::{AcquireOwned, RateLimiter};
use pin_project_lite::pin_project;
use tower::Service;

use super::PLENTY;
use crate::inner::Inner;
use crate::measure::Contender;

/// Builds a limiter with one limit for all calls.
pub(crate) fn constant() -> Contender {
    let limiter = plenty();
    Contender::service("leaky-bucket, `acquire_owned`", 1, move || Paced {
        limiter: limiter.clone(),
        inner: Inner,
    })
}

/// Builds a contender that calls `try_acquire` alone.
pub(crate) fn raw() -> Contender {
    let limiter = plenty();
    Contender::raw("leaky-bucket `try_acquire`", move || {
        let limiter = limiter.clone();
        move || assert!(black_box(limiter.try_acquire(1)))
    })
}

fn plenty() -> Arc<RateLimiter> {
    let plenty = PLENTY as usize;
    let mut builder = RateLimiter::builder();
    builder
        .initial(plenty)
        .max(plenty)
        .refill(plenty)
        .interval(Duration::from_secs(1));
    Arc::new(builder.build())
}

/// A service that calls its inner service once the bucket allows it.
#[derive(Clone)]
struct Paced<S> {
    limiter: Arc<RateLimiter>,
    inner: S,
}

impl<S, R> Service<R> for Paced<S>
where
    S: Service<R> + Clone,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = PacedFuture<S, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let acquire = self.limiter.clone().acquire_owned(1);
        PacedFuture::Waiting {
            acquire,
            inner: self.inner.clone(),
            request: Some(request),
        }
    }
}

pin_project! {
    // Waiting => Calling => done
    #[project = Projected]
    enum PacedFuture<S, R>
    where
        S: Service<R>,
    {
        Waiting { #[pin] acquire: AcquireOwned, inner: S, request: Option<R> },
        Calling { #[pin] call: S::Future },
    }
}

impl<S, R> Future for PacedFuture<S, R>
where
    S: Service<R>,
{
    type Output = Result<S::Response, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let call = match self.as_mut().project() {
                Projected::Waiting {
                    acquire,
                    inner,
                    request,
                } => {
                    ready!(acquire.poll(cx));
                    inner.call(request.take().expect("it is sent once"))
                }
                Projected::Calling { call } => return call.poll(cx),
            };
            self.set(PacedFuture::Calling { call });
        }
    }
}
