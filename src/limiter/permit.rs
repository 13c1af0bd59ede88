//! The right to send one request, as users have it.

use std::time::{Duration, Instant};

use super::sent::Sent;
use super::taken::Taken;
use crate::error::Limited;
#[cfg(doc)]
use crate::error::Reason;

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it. A permit ends exactly once:
///
/// - [`begin`](Permit::begin) states that the request is sent now, and returns what takes in its response.
/// - [`give_back`](Permit::give_back) is for a request that was certainly not sent.
/// - If the permit is dropped, it counts as used, because the request may have left.
///
/// [`Acquire::send`](crate::limiter::Acquire::send) does all of this for a request.
#[must_use = "a permit that is dropped counts as used"]
pub struct Permit(Taken);

impl Permit {
    /// Makes the permit of a request that got this.
    #[inline]
    pub(super) fn new(taken: Taken) -> Self {
        Permit(taken.may_have_left())
    }

    /// Returns the moment by which the request must have left, 10 to 50 ms after its slot. That of a permit that was at
    /// hand, or of a slow store, may be up to a twentieth of the shortest window after it. `None` if the request costs
    /// nothing, or if rates are not limited.
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

    /// Returns how long the request waited for this permit.
    pub fn waited(&self) -> Duration {
        self.0.waited()
    }

    /// States that the request is sent now.
    ///
    /// Call it just before the request is sent: a permit is valid until its [`deadline`](Permit::deadline), and the
    /// upstream may see more requests than its limit allows if they leave later. A hold that began since does not stop it.
    ///
    /// # Errors
    ///
    /// [`Reason::Expired`] if the [`deadline`](Permit::deadline) has passed. The permit was given back then: acquire
    /// another one.
    pub fn begin(self) -> Result<Sent, Limited> {
        self.0.begin()
    }

    /// Makes the call of a request that got the permit just now.
    pub(super) fn into_sent(self) -> Sent {
        self.0.sent()
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
