//! throttle-net: its Tower layer, which has one limit for all calls, and its limiters alone.

use std::hint::black_box;
use std::sync::Arc;

use throttle_net::tower::ThrottleLayer;
use throttle_net::{PerKey, Throttle};
use tower::Layer;

use super::PLENTY;
use crate::inner::Inner;
use crate::measure::Contender;

/// Builds a limiter with one limit for all calls.
pub(crate) fn constant() -> Contender {
    let limit = ThrottleLayer::new(Throttle::per_second(PLENTY));
    Contender::service("throttle-net, `ThrottleLayer`", 1, move || {
        limit.layer(Inner)
    })
}

/// Builds a contender that calls `try_acquire` alone.
pub(crate) fn raw() -> Contender {
    let limiter = Arc::new(Throttle::per_second(PLENTY));
    Contender::raw("throttle-net `try_acquire`", move || {
        let limiter = limiter.clone();
        move || assert!(black_box(limiter.try_acquire()))
    })
}

/// Builds a contender that calls `try_acquire` of a key, alone.
pub(crate) fn raw_keyed() -> Contender {
    let limiter = Arc::new(PerKey::<u64>::per_second(PLENTY));
    Contender::raw(
        "throttle-net `PerKey::try_acquire(&u64)`, one key",
        move || {
            let limiter = limiter.clone();
            move || assert!(black_box(limiter.try_acquire(black_box(&17))))
        },
    )
}
