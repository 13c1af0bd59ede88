//! Retries of requests that the upstream refused, within a budget.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Limited, Reason};
use crate::signal::Signal;

/// Retries requests that the upstream [refused](Signal::refusal), within a budget. For use with
/// [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The policy does not sleep. The refusal puts the key on hold. The next attempt passes the layer
/// like any other request, so it waits there until the hold ends. A request that the layer itself
/// refused is not retried: it has waited for the longest allowed time, or would have to wait for
/// longer. Other failures are not retried. Use another policy for them.
///
/// The policy does not check the HTTP method: it also sends a POST again. A server may have begun
/// to process a request that it refuses with a 503. If a request must not be processed twice, give
/// it an idempotency key, or use a layer without retries.
///
/// With the feature `retry`, it is a `tower::retry::Policy` for each request that is
/// [`CloneRequest`](crate::service::CloneRequest): `http::Request` with a body that is `Clone`, and
/// `reqwest::Request`. With the feature `reqwest-retry`, it is a
/// `reqwest_retry::RetryableStrategy` and its `RetryPolicy`.
///
/// After a redirect, a refusal by another host holds nothing, so the request is retried at once.
///
/// Put the policy outside of the layer:
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
    /// Attempts that this call has left, including the one in flight.
    attempts: u32,
    /// Whether requests that the layer refused are retried, too.
    local_refusals: bool,
    budget: Arc<Budget>,
}

/// The retries that the calls of all clones may make together.
struct Budget {
    /// Retries left, in hundredths.
    balance: AtomicU32,
    /// The highest balance, in hundredths.
    most: u32,
    /// What a response that is no refusal adds, in hundredths.
    deposit: u32,
}

/// One retry, in hundredths.
const ONE: u32 = 100;

impl RetryLimited {
    /// Creates a policy of three attempts for each call, and a budget of 10 retries for all calls.
    /// For every five responses that are no refusals, the budget gains one retry.
    pub fn new() -> Self {
        RetryLimited {
            attempts: 3,
            local_refusals: false,
            budget: Budget::new(10, 20),
        }
    }

    /// Sets the most attempts of one call, including the first. Default: 3. With 1, nothing is
    /// retried.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the budget of retries that all clones share. It starts with `most` retries, its largest
    /// value, and each retry takes one. Each response that is no refusal adds `percent` hundredths of
    /// a retry. Default: 10 and 20.
    ///
    /// The budget bounds the load on an upstream that refuses all requests: with the defaults, only
    /// ten of them are retried.
    #[must_use]
    pub fn budget(mut self, most: u32, percent: u32) -> Self {
        self.budget = Budget::new(most, percent);
        self
    }

    /// Retries requests that the layer refused, too. Default: no.
    ///
    /// Use it only if [`max_wait`](crate::RateLimitBuilder::max_wait) is short and the total
    /// timeout long: each attempt joins the end of the queue, and has a `max_wait` of its own.
    #[must_use]
    pub fn local_refusals(mut self) -> Self {
        self.local_refusals = true;
        self
    }

    /// Returns whether a call with this outcome is retried, and takes the retry from the budget.
    #[cfg(any(feature = "reqwest-retry", test))]
    fn tries_again(&self, outcome: Result<Signal, &(dyn StdError + 'static)>) -> bool {
        self.may_retry(outcome) && self.budget.withdraw()
    }

    /// Returns whether a call with this outcome may be retried. A response that is no refusal adds to the budget.
    fn may_retry(&self, outcome: Result<Signal, &(dyn StdError + 'static)>) -> bool {
        if is_refused(&outcome) {
            return true;
        }
        match outcome.map_err(Limited::find) {
            Ok(_) => {
                self.budget.deposit();
                false
            }
            // No later attempt in this process succeeds.
            Err(Some(Limited::Local {
                reason: Reason::Draining,
                ..
            })) => false,
            Err(Some(Limited::Local { .. })) => self.local_refusals,
            Err(_) => false,
        }
    }
}

/// Returns whether the upstream refused the call.
fn is_refused(outcome: &Result<Signal, &(dyn StdError + 'static)>) -> bool {
    match outcome {
        Ok(signal) => signal.refusal().is_some(),
        Err(error) => matches!(Limited::find(*error), Some(Limited::Upstream { .. })),
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
        Arc::new(Budget {
            balance: AtomicU32::new(most),
            most,
            deposit: percent,
        })
    }

    /// Adds what a response brings that is no refusal.
    fn deposit(&self) {
        self.add(self.deposit);
    }

    /// Puts back a retry that was taken and is not made.
    #[cfg(feature = "reqwest-retry")]
    fn put_back(&self) {
        self.add(ONE);
    }

    fn add(&self, value: u32) {
        let order = Ordering::Relaxed;
        let _ = self.balance.fetch_update(order, order, |balance| {
            Some(balance.saturating_add(value).min(self.most))
        });
    }

    /// Takes one retry. Returns `false` if less than one is left.
    fn withdraw(&self) -> bool {
        let order = Ordering::Relaxed;
        let taken = (self.balance).fetch_update(order, order, |balance| balance.checked_sub(ONE));
        taken.is_ok()
    }
}

#[cfg(feature = "retry")]
mod of_tower {
    use std::convert::Infallible;
    use std::future::{Ready, ready};

    use tower::retry::Policy;

    use super::{RetryLimited, Signal, StdError, is_refused};
    use crate::error::{BoxError, Error};
    use crate::layer::{Attempts, CloneRequest};
    use crate::signal::ResponseInfo;

    /// An error in which [`RetryLimited`] looks for a [`Limited`](crate::Limited):
    /// the error of a layer, or a boxed one.
    pub trait AsError {
        /// Returns the value as an error.
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

    /// Lets the next attempt of `request` go on with the count of this one, which was refused. A policy around this one finds it in the response:
    /// its copy of the request was made before. In an error it finds none, and counts its own attempts.
    fn count_attempts<S: ResponseInfo, E: AsError>(
        request: &mut impl CloneRequest,
        result: &mut Result<S, E>,
    ) {
        let Some(extensions) = request.extensions_mut() else {
            return;
        };
        let shown = result.as_mut().ok();
        let mut shown = shown.and_then(ResponseInfo::extensions_mut);
        let known = shown.as_ref().and_then(|all| all.get()).cloned();
        let attempts = Attempts::of_repeated(known.as_ref(), extensions);
        if let Some(extensions) = &mut shown {
            extensions.insert(attempts);
        }
    }

    impl<R: CloneRequest, S: ResponseInfo, E: AsError> Policy<R, S, E> for RetryLimited {
        type Future = Ready<()>;

        fn retry(&mut self, request: &mut R, result: &mut Result<S, E>) -> Option<Ready<()>> {
            self.attempts = self.attempts.checked_sub(1)?;
            let outcome = result.as_ref().map(Signal::read).map_err(AsError::as_error);
            let is_refused = is_refused(&outcome);
            // The last attempt adds to the budget, too.
            let again = self.may_retry(outcome) && self.attempts > 0 && self.budget.withdraw();
            if is_refused {
                count_attempts(request, result);
            }
            again.then(|| ready(()))
        }

        fn clone_request(&mut self, request: &R) -> Option<R> {
            request.clone_request()
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
            let outcome = result
                .as_ref()
                .map(Signal::read)
                .map_err(|error| error as _);
            self.tries_again(outcome).then_some(Retryable::Transient)
        }
    }

    impl RetryPolicy for RetryLimited {
        /// Retries at once, because the request waits in the layer. So the moment is in the past, also if the clock is set
        /// back meanwhile.
        fn should_retry(&self, _: SystemTime, past: u32) -> RetryDecision {
            match self.attempts.saturating_sub(1) > past {
                true => RetryDecision::Retry {
                    execute_after: SystemTime::UNIX_EPOCH,
                },
                false => {
                    // `handle` has taken a retry for the last attempt.
                    self.budget.put_back();
                    RetryDecision::DoNotRetry
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ErrorFacts, LimitName, LimitedInfo};

    fn refused(reason: Reason) -> Limited {
        Limited::Local {
            reason,
            report: LimitedInfo::new(ErrorFacts {
                key: "all".into(),
                limit_name: LimitName::default(),
                limit: None,
                retry_after: None,
                at: std::time::SystemTime::UNIX_EPOCH,
                waited: std::time::Duration::ZERO,
                turns: 0,
            }),
        }
    }

    #[test]
    fn refusals_of_a_drained_limiter_are_not_retried() {
        let retry = RetryLimited::new().local_refusals();
        assert!(retry.tries_again(Err(&refused(Reason::Held))));
        assert!(!retry.tries_again(Err(&refused(Reason::Draining))));
    }

    /// Otherwise each hold would bring new retries to a server that refuses everything.
    #[test]
    fn local_refusals_do_not_refill_the_budget() {
        let retry = RetryLimited::new().budget(1, 100);
        assert!(retry.budget.withdraw());
        for _ in 0..3 {
            assert!(!retry.tries_again(Err(&refused(Reason::Held))));
        }
        assert!(!retry.budget.withdraw());
    }

    /// The clock may be set back while the first attempt waits in the layer.
    #[cfg(feature = "reqwest-retry")]
    #[test]
    fn retry_does_not_wait_for_the_wall_clock() {
        use std::time::{Duration, SystemTime};

        use reqwest_retry::{RetryDecision, RetryPolicy};

        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let started = now + Duration::from_secs(3600);
        let decision = RetryLimited::new().should_retry(started, 0);
        let RetryDecision::Retry { execute_after } = decision else {
            panic!("{decision:?}");
        };
        assert!(execute_after <= now);
    }

    /// With two attempts, the second one is the last.
    #[cfg(feature = "retry")]
    #[test]
    fn the_last_attempt_refills_the_budget() {
        use tower::retry::Policy;

        let all = RetryLimited::new().attempts(2).budget(1, 100);
        let answers = |status: u16, policy: &mut RetryLimited| {
            let mut response = http::Response::new(());
            *response.status_mut() = http::StatusCode::from_u16(status).unwrap();
            let mut result: Result<_, Box<dyn StdError + Send + Sync>> = Ok(response);
            policy
                .retry(&mut http::Request::new(()), &mut result)
                .is_some()
        };
        for _ in 0..3 {
            let mut policy = all.clone();
            assert!(answers(429, &mut policy), "one retry is left");
            assert!(!answers(200, &mut policy));
        }
    }

    #[test]
    fn clones_share_a_budget_that_accepted_responses_refill() {
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
        assert!(
            other.tries_again(limited()) && !retry.tries_again(limited()),
            "two calls brought one back"
        );
    }
}
