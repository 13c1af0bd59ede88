//! The time of a run: Tokio's clock, which a run with gates pauses.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

/// Returns the time.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Waits until `instant`.
pub(crate) async fn sleep_until(instant: Instant) {
    tokio::time::sleep_until(instant.into()).await;
}

/// A timer that can be set anew.
pub(crate) struct Timer(Pin<Box<tokio::time::Sleep>>);

impl Timer {
    pub(crate) fn at(instant: Instant) -> Self {
        Timer(Box::pin(tokio::time::sleep_until(instant.into())))
    }

    pub(crate) fn set(&mut self, instant: Instant) {
        self.0.as_mut().reset(instant.into());
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}
