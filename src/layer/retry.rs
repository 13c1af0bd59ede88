//! Retries that behave: what the upstream limited is tried again through the gate, which knows when.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{BoxError, Error, Limited};
use crate::signal::Signal;

/// Retries what the upstream limited (a 429, a 503 that says when to come back), within a budget.
///
/// It needs no sleep of its own: the refusal holds the key, so the next attempt, which goes through the gate like any
/// other, waits there until the upstream said. What we refuse ourselves is not tried again: it waited as long as it may, or
/// would have to wait for longer. Nor is what failed otherwise: that is another policy's.
///
/// It does not look at the method: a POST is sent again after a 429 or after a 503 with `Retry-After`. A server may have
/// begun to process what it answers with a 503, so give requests that must not be processed twice an idempotency key, or
/// a layer without retries.
///
/// It is a `tower::retry::Policy` (feature `retry`) for `http::Request` with a body that is `Clone`, and for
/// `reqwest::Request`; and a `reqwest_retry::RetryableStrategy` with its `RetryPolicy` (feature `reqwest-retry`).
///
/// A refusal by another host, to which a redirect led, holds nothing: its call is tried again at once.
///
/// Put it outside of the layer:
///
#[cfg_attr(feature = "retry", doc = "```")]
#[cfg_attr(not(feature = "retry"), doc = "```ignore")]
/// use http::{Request, Response};
/// use tollgate::{Quota, RateLimitLayer, RetryLimited};
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let mut service = ServiceBuilder::new()
///     .retry(RetryLimited::new())
///     .layer(RateLimitLayer::new(Quota::per_second(50))?)
///     .service(client);
/// # let request = Request::get("https://api.example.com/users").body(String::new())?;
/// # service.ready().await?.call(request).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RetryLimited {
    /// How many attempts are left to this call, the one under way included.
    attempts: u32,
    local_refusals: bool,
    budget: Arc<Budget>,
}

/// What the calls of all clones may retry together.
struct Budget {
    /// In hundredths of a retry.
    balance: AtomicU32,
    most: u32,
    /// What each call brings that was not limited.
    deposit: u32,
}

const ONE: u32 = 100;

impl RetryLimited {
    /// Three attempts in all, and a budget of 10 retries and one for every five calls that were not limited.
    pub fn new() -> Self {
        RetryLimited { attempts: 3, local_refusals: false, budget: Budget::new(10, 20) }
    }

    /// The most attempts of one call, the first included. Default: 3; with 1, nothing is retried.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// The budget that all clones share: `most` retries, used up one by one, of which every call that was not limited
    /// brings back `percent` hundredths. Default: 10 and 20.
    ///
    /// Where an upstream limits everything, only the first few are tried again, and the others are told at once.
    #[must_use]
    pub fn budget(mut self, most: u32, percent: u32) -> Self {
        self.budget = Budget::new(most, percent);
        self
    }

    /// Retries what was refused here, too. Default: no. Only sensible where `max_wait` is short and the deadline long: each
    /// attempt goes to the end of the line.
    #[must_use]
    pub fn local_refusals(mut self) -> Self {
        self.local_refusals = true;
        self
    }

    /// Whether a call that came to this is tried again; it takes what that costs from the budget.
    fn tries_again(&self, outcome: Result<Signal, &(dyn StdError + 'static)>) -> bool {
        let limited = match outcome {
            Ok(signal) => signal.limited().is_some(),
            Err(error) => match Limited::find(error) {
                Some(Limited::Upstream { .. }) => true,
                Some(Limited::Local { .. }) => self.local_refusals,
                _ => return false,
            },
        };
        if !limited {
            self.budget.deposit();
        }
        limited && self.budget.withdraw()
    }
}

impl Default for RetryLimited {
    fn default() -> Self {
        RetryLimited::new()
    }
}

impl fmt::Debug for RetryLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryLimited")
            .field("attempts", &self.attempts)
            .field("local_refusals", &self.local_refusals)
            .finish_non_exhaustive()
    }
}

impl Budget {
    fn new(most: u32, percent: u32) -> Arc<Self> {
        let most = most.saturating_mul(ONE);
        Arc::new(Budget { balance: AtomicU32::new(most), most, deposit: percent })
    }

    fn deposit(&self) {
        let add = |balance: u32| Some(balance.saturating_add(self.deposit).min(self.most));
        let _ = self.balance.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    fn withdraw(&self) -> bool {
        let take = |balance: u32| balance.checked_sub(ONE);
        self.balance.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// Errors in which a [`Limited`] can be found: ours, and boxed ones.
pub trait AsError {
    /// It as an error.
    fn as_error(&self) -> &(dyn StdError + 'static);
}

impl AsError for Error {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self
    }
}

impl AsError for BoxError {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        &**self
    }
}

impl AsError for Infallible {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self
    }
}

#[cfg(feature = "retry")]
mod of_tower {
    use std::future::{Ready, ready};

    use tower::retry::Policy;

    use super::{AsError, RetryLimited, Signal};
    use crate::signal::AsResponseInfo;

    impl RetryLimited {
        fn retry_now<S: AsResponseInfo, E: AsError>(&mut self, result: &Result<S, E>) -> Option<Ready<()>> {
            self.attempts = self.attempts.checked_sub(1)?;
            let outcome = result.as_ref().map(Signal::read).map_err(AsError::as_error);
            (self.attempts > 0 && self.tries_again(outcome)).then(|| ready(()))
        }
    }

    impl<B: Clone, S: AsResponseInfo, E: AsError> Policy<http::Request<B>, S, E> for RetryLimited {
        type Future = Ready<()>;

        fn retry(&mut self, _: &mut http::Request<B>, result: &mut Result<S, E>) -> Option<Ready<()>> {
            self.retry_now(result)
        }

        fn clone_request(&mut self, request: &http::Request<B>) -> Option<http::Request<B>> {
            Some(request.clone())
        }
    }

    #[cfg(feature = "reqwest")]
    impl<S: AsResponseInfo, E: AsError> Policy<reqwest::Request, S, E> for RetryLimited {
        type Future = Ready<()>;

        fn retry(&mut self, _: &mut reqwest::Request, result: &mut Result<S, E>) -> Option<Ready<()>> {
            self.retry_now(result)
        }

        fn clone_request(&mut self, request: &reqwest::Request) -> Option<reqwest::Request> {
            request.try_clone()
        }
    }
}

#[cfg(feature = "reqwest-retry")]
mod of_reqwest_retry {
    use std::time::SystemTime;

    use reqwest_middleware::Error as MiddlewareError;
    use reqwest_retry::{RetryDecision, RetryPolicy, Retryable, RetryableStrategy};

    use super::{RetryLimited, Signal};

    impl RetryableStrategy for RetryLimited {
        fn handle(&self, result: &Result<reqwest::Response, MiddlewareError>) -> Option<Retryable> {
            let outcome = result.as_ref().map(Signal::read).map_err(|error| error as _);
            self.tries_again(outcome).then_some(Retryable::Transient)
        }
    }

    impl RetryPolicy for RetryLimited {
        /// At once: the gate knows when.
        fn should_retry(&self, started: SystemTime, past: u32) -> RetryDecision {
            match self.attempts.saturating_sub(1) > past {
                true => RetryDecision::Retry { execute_after: started },
                false => RetryDecision::DoNotRetry,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_spent_once_and_comes_back_by_what_was_not_limited() {
        let retry = RetryLimited::new().budget(2, 50);
        let limited = || {
            let mut response = http::Response::new(());
            *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
            Ok(Signal::read(&response))
        };
        let other = retry.clone();
        assert!(retry.tries_again(limited()) && other.tries_again(limited()));
        assert!(!retry.tries_again(limited()), "two were all");
        for _ in 0..2 {
            assert!(!retry.tries_again(Ok(Signal::read(&http::Response::new(())))));
        }
        assert!(other.tries_again(limited()) && !retry.tries_again(limited()), "two calls brought one back");
    }
}
