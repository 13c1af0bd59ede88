//! governor: it has no Tower layer for clients, so it is measured in the smallest service that asks
//! it before each call. It refuses and never waits.

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};
use http::Request;

use super::PLENTY;
use super::checked::Checked;
use crate::inner::Inner;
use crate::measure::Contender;

/// Builds a limiter with one limit for all calls.
pub(crate) fn constant() -> Contender {
    let limiter = direct();
    Contender::service("governor, `check`", 1, move || {
        let limiter = limiter.clone();
        Checked {
            check: move |_: &Request<()>| limiter.check().is_ok(),
            inner: Inner,
        }
    })
}

/// Builds a limiter with one limit for each host: keys are strings, as in its documentation.
pub(crate) fn hosts(hosts: usize) -> Contender {
    let limiter: Arc<DefaultKeyedRateLimiter<String>> = Arc::new(RateLimiter::keyed(plenty()));
    Contender::service("governor, `check_key(&String)`", hosts, move || {
        let limiter = limiter.clone();
        let check = move |request: &Request<()>| {
            request
                .uri()
                .host()
                .is_some_and(|host| limiter.check_key(&host.to_owned()).is_ok())
        };
        Checked {
            check,
            inner: Inner,
        }
    })
}

/// Builds a limiter with one limit for each host: keys are hashes of the host, which saves the
/// allocation.
pub(crate) fn hashed_hosts(hosts: usize) -> Contender {
    let limiter: Arc<DefaultKeyedRateLimiter<u64>> = Arc::new(RateLimiter::keyed(plenty()));
    let seed = RandomState::new();
    Contender::service("governor, `check_key(&hash)`", hosts, move || {
        let (limiter, seed) = (limiter.clone(), seed.clone());
        let check = move |request: &Request<()>| {
            request
                .uri()
                .host()
                .is_some_and(|host| limiter.check_key(&seed.hash_one(host)).is_ok())
        };
        Checked {
            check,
            inner: Inner,
        }
    })
}

/// Builds a contender that calls `check` alone.
pub(crate) fn raw() -> Contender {
    let limiter = direct();
    Contender::raw("governor `check`", move || {
        let limiter = limiter.clone();
        move || assert!(black_box(limiter.check()).is_ok())
    })
}

/// Builds a contender that calls `check` alone, of a limit that is used up.
pub(crate) fn refused() -> Contender {
    let day = Quota::with_period(Duration::from_secs(86_400)).expect("it is not zero");
    let limiter = Arc::new(RateLimiter::direct(day));
    _ = limiter.check();
    Contender::raw("governor `check`, refused", move || {
        let limiter = limiter.clone();
        move || assert!(black_box(limiter.check()).is_err())
    })
}

/// Builds a contender that calls `check_key` alone.
pub(crate) fn raw_keyed() -> Contender {
    let limiter: Arc<DefaultKeyedRateLimiter<u64>> = Arc::new(RateLimiter::keyed(plenty()));
    Contender::raw("governor `check_key(&u64)`, one key", move || {
        let limiter = limiter.clone();
        move || assert!(black_box(limiter.check_key(black_box(&17))).is_ok())
    })
}

fn direct() -> Arc<DefaultDirectRateLimiter> {
    Arc::new(RateLimiter::direct(plenty()))
}

fn plenty() -> Quota {
    Quota::per_second(NonZeroU32::new(PLENTY).expect("it is not zero"))
}
