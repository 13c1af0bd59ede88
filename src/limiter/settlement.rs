//! Settlement: the true cost of a request, which may be known only after its response.
//!
//! A permit takes the units that the request is estimated to cost. When the true cost is known, the
//! difference is refunded or charged:
//!
//! - If the request cost less, the rest of the units leaves the limits, at the stamp of the permit.
//! - If it cost more, the units above the estimate are charged. They count from now on, even beyond
//!   the limit, so the next requests wait until they have left the window.
//!
//! If the upstream counts late, units of a permit count for longer, until a settlement states that the
//! upstream has counted. The true cost then replaces the units of the permit, as of that moment: see
//! [`counted_within`](crate::RateLimitBuilder::counted_within).
//!
//! So a window of the upstream exceeds the limit at most by what the requests in it were
//! underestimated by, before that was known. `guarantees.md` has the proof.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::engine::CoreId;
use super::reservation::Reservation;
use crate::cost::Cost;
use crate::key::Key;
use crate::limit::UnusedPermits;
use crate::locks::lock;

/// The units that a request counts with, until its true cost is known.
///
/// A layer with [`settle_by_hand`](crate::RateLimitBuilder::settle_by_hand) puts one into the
/// extensions of each response. Clones settle the same request. If a settlement is dropped, the
/// request goes on to count with its estimate.
///
/// ```
/// use http::{Request, Response};
/// use tollgate::{Key, Quota, RateLimitLayer, Settlement};
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("used 300 tokens")) });
/// let limit = RateLimitLayer::builder(Quota::per_minute(80_000))
///     .cost(|_| 4000) // the most that a response may cost
///     .settle_by_hand()
///     .build()?;
/// let limiter = limit.limiter();
/// let mut service = ServiceBuilder::new().layer(limit).service(client);
///
/// let request = Request::get("http://example.com/").body(String::new())?;
/// let mut response = service.ready().await?.call(request).await?;
/// let settlement = response.extensions_mut().remove::<Settlement>();
/// // ... read the body, which states the true cost ...
/// if let Some(settlement) = settlement {
///     settlement.settle(300);
/// }
/// assert_eq!(limiter.peek(Key::ALL).await?.limits[0].used, 300);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Settlement(Arc<[Mutex<Unsettled>]>);

/// What a request counts with under one of its keys.
#[derive(Debug)]
pub(super) struct Unsettled {
    core: CoreId,
    key: Key,
    /// What its limits count.
    unit: &'static str,
    /// The permit. `None` if the request took no units.
    permit: Option<UnusedPermits>,
    /// Units that were charged besides the permit.
    charged: u64,
    is_settled: bool,
}

impl Settlement {
    /// Makes the settlement of a request with these units under each of its keys.
    pub(super) fn new(parts: impl Iterator<Item = Unsettled>) -> Self {
        Settlement(parts.map(Mutex::new).collect())
    }

    /// States what the request cost: a number of requests, or a [`Cost`] with other units. What the
    /// cost does not state goes on to count with its estimate.
    ///
    /// It may be called again, and the last call counts. Units that an earlier call has charged stay
    /// charged.
    ///
    /// A request that cost less than its permit gives the rest back to the store, for all processes.
    /// A request that cost more counts from now on with all of its units, even beyond the limit. A
    /// charge above the limit counts as the limit, so the next request waits for a window at most.
    /// With a remote store, the units arrive with the next call, or within about 100 ms. A charge is
    /// sent again until the store has confirmed it.
    ///
    /// Does not block. Does nothing if the layer and its limiters were dropped.
    pub fn settle(&self, actual: impl Into<Cost>) {
        let actual = actual.into();
        for part in self.0.iter() {
            let mut part = lock(part);
            if let Some(units) = actual.stated(part.unit) {
                part.settle(u64::from(units));
            }
        }
    }

    /// Returns whether the cost of the request was stated, of any unit.
    pub(crate) fn is_settled(&self) -> bool {
        self.0.iter().any(|part| lock(part).is_settled)
    }
}

impl Unsettled {
    pub(super) fn new(core: CoreId, key: Key, slot: Option<&Reservation>) -> Self {
        let lender = slot.and_then(|slot| core.find()?.part_at(slot.lender?, key));
        let (core, key) = lender.map_or((core, key), |(core, key)| (core.id, key));
        Unsettled {
            core,
            key,
            unit: core.find().map_or(Cost::REQUESTS, |core| core.unit_name()),
            permit: slot.map(Reservation::unused),
            charged: 0,
            is_settled: false,
        }
    }

    fn settle(&mut self, actual: u64) {
        self.is_settled = true;
        let Some(core) = self.core.find() else { return };
        // All classes have their estimates in common, and the permit may have been lent.
        for (part, _) in core.all_parts(self.key) {
            part.whole_limit.settled();
        }
        if core.settings.counted_within > Duration::ZERO
            && let Some(permit) = self.permit.take()
        {
            self.charged = actual;
            core.charge(self.key, actual, Some(permit));
            return;
        }
        let of_permit = self.permit.map_or(0, |permit| permit.units);
        let counted = of_permit + self.charged;
        if actual > counted {
            self.charged += actual - counted;
            core.charge(self.key, actual - counted, None);
        } else if let Some(permit) = &mut self.permit {
            let units = (counted - actual).min(of_permit);
            permit.units -= units;
            if units > 0 {
                let unused = UnusedPermits { units, ..*permit };
                core.refund(self.key, unused);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;
    use crate::{Quota, RateLimitLayer};

    #[tokio::test(start_paused = true)]
    async fn settlements_wake_the_requests_of_all_classes() {
        let builder = RateLimitLayer::builder(Quota::per_minute(10)).share("web", 50);
        let limiter = builder.settle_by_hand().build().unwrap().limiter();
        let (web, _) = limiter.0.first.part_of_class(Key::ALL, "web").unwrap();
        let cx = Context::from_waker(Waker::noop());
        let is_woken = || web.whole_limit.watch(1, &cx);
        assert!(is_woken() && !is_woken());
        let mut of_the_others = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
        of_the_others.settle(2);
        assert!(is_woken());
    }
}
