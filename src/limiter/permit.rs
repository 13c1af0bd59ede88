//! The right to send one request, as users have it.

use std::future::poll_fn;
use std::time::{Duration, Instant};

use super::taken::Taken;
use crate::cost::Cost;
use crate::error::{Limited, StoreError};
use crate::signal::Signal;

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it. A permit ends exactly once:
///
/// - [`answered`](Permit::answered) takes the response, so that a 429 puts the key on hold.
/// - [`give_back`](Permit::give_back) is for a request that was certainly not sent.
/// - If the permit is dropped, it counts as used, because the request may have left.
///
/// If calls in flight are limited ([`Quota::in_flight`](crate::Quota::in_flight)), the call is in
/// flight until its permit ends. Keep the permit until the response has arrived.
#[must_use = "a permit that is dropped counts as used"]
pub struct Permit(Taken);

impl Permit {
    /// Makes the permit of a request that got this.
    #[inline]
    pub(super) fn new(taken: Taken) -> Self {
        Permit(taken.may_have_left())
    }

    /// Returns the moment by which the request must have left, 10 to 50 ms after its slot. `None`
    /// if the request costs nothing, or if rates are not limited.
    ///
    /// If the permit is used later, the upstream may see more requests than its limit allows. Give
    /// the permit back and acquire another one.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.deadline()
    }

    /// Returns whether the request may still be sent: whether the deadline has not passed.
    pub fn is_valid(&self) -> bool {
        self.0.is_valid()
    }

    /// States what the request cost, if that is not the cost of the permit: a number of requests, or a
    /// [`Cost`] with other units.
    ///
    /// The request was sent then: a permit that is settled cannot be given back.
    /// [`Settlement::settle`] describes what happens to the difference. Build the layer with
    /// [`settle_by_hand`](crate::RateLimitBuilder::settle_by_hand): otherwise little of what comes
    /// back is used, because requests that wait have booked their slots already.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RateLimitLayer::builder(Quota::per_minute(80_000)).settle_by_hand().build()?;
    /// let limiter = layer.limiter();
    /// let mut permit = limiter.acquire(Key::ALL).cost(4000).await?;
    /// // ... send the request, and read from the response what it cost ...
    /// permit.settle(300);
    /// drop(permit);
    /// assert_eq!(limiter.peek(Key::ALL).await?.limits[0].used, 300);
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle(&mut self, actual: impl Into<Cost>) {
        self.0.settle(actual);
    }

    /// Waits until this call must be cancelled, and returns the reason.
    ///
    /// A call must be cancelled if this process has lost contact with the store for longer than
    /// [`in_flight_ttl`](crate::RateLimitBuilder::in_flight_ttl). The store may then have granted
    /// the call's in-flight slot to another process.
    ///
    /// The future is never ready if calls in flight are not limited, if they are counted in memory,
    /// or with [`OnStoreError::FailOpen`](crate::OnStoreError::FailOpen).
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn revoked(&self) -> StoreError {
        poll_fn(|cx| self.0.poll_lost(cx)).await
    }

    /// Returns how long the request waited for this permit.
    pub fn waited(&self) -> Duration {
        self.0.waited()
    }

    /// Ends the permit of a request that was sent, with what the response states about limits.
    ///
    /// A refusal puts the key on [hold](crate::RateLimitBuilder::max_hold). Returns
    /// [`Limited::Upstream`] if the response is a refusal, for callers that want an error; else
    /// `None`.
    #[inline]
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.0.sent().answered(signal, None).1
    }

    /// Ends the permit of a request that was certainly not sent. Its slot goes to the next waiter,
    /// or else back to the store.
    pub fn give_back(self) {
        self.0.give_back();
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit")
            .field("key", &self.0.key())
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}
