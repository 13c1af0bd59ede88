//! ratelimit: it has no Tower layer and no keys, so it is measured in the smallest service that
//! asks it before each call. It refuses and never waits.

use std::hint::black_box;
use std::sync::Arc;

use http::Request;
use ratelimit::Ratelimiter;

use super::PLENTY;
use super::checked::Checked;
use crate::inner::Inner;
use crate::measure::Contender;

/// Builds a limiter with one limit for all calls.
pub(crate) fn constant() -> Contender {
    let limiter = plenty();
    Contender::service("ratelimit, `try_wait`", 1, move || {
        let limiter = limiter.clone();
        Checked {
            check: move |_: &Request<()>| limiter.try_wait().is_ok(),
            inner: Inner,
        }
    })
}

/// Builds a contender that calls `try_wait` alone.
pub(crate) fn raw() -> Contender {
    let limiter = plenty();
    Contender::raw("ratelimit `try_wait`", move || {
        let limiter = limiter.clone();
        move || assert!(black_box(limiter.try_wait()).is_ok())
    })
}

fn plenty() -> Arc<Ratelimiter> {
    let plenty = u64::from(PLENTY);
    let limiter = Ratelimiter::builder(plenty)
        .max_tokens(plenty)
        .initial_available(plenty)
        .build();
    Arc::new(limiter.expect("the settings make sense"))
}
