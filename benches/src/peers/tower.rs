//! tower: `limit::RateLimit`, for one service that cannot be cloned.

use std::time::Duration;

use tower::limit::RateLimit;
use tower::limit::rate::Rate;

use super::PLENTY;
use crate::inner::Inner;
use crate::measure::Contender;

/// Builds a limiter with one limit for all calls of this one service.
pub(crate) fn constant() -> Contender {
    Contender::service("tower, `limit::RateLimit`", 1, || {
        RateLimit::new(Inner, Rate::new(PLENTY.into(), Duration::from_secs(1)))
    })
}
