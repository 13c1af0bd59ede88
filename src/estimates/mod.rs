//! Estimates of what a request costs, learned from requests of the same name.

mod costs;
#[cfg(test)]
mod properties;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::key::Key;
use crate::locks::lock;
use costs::Costs;
#[cfg(feature = "llm")]
pub(crate) use costs::TypicalCost;

/// Learns what requests usually cost, for each route or model, and estimates the next one.
///
/// Use it in the closure of [`cost`](crate::RateLimitBuilder::cost), for requests whose true cost is
/// stated by the response and [settled](crate::guide::true_costs). The estimate is a quantile of the
/// last 128 costs of a name: of `Estimates::new(0.95)`, 95 % of them were not
/// above it. A high quantile leaves more of the limit unused until requests are settled. A low one
/// exceeds the limit more often, by what the requests under way are underestimated by.
///
/// Clones share what they have learned. Nothing is shared between processes, and nothing is kept
/// when the process ends. Names are kept as hashes, so memory is bounded: about 600 bytes for each of
/// at most 256 names. `estimate` takes one lookup, `learn` about a
/// microsecond.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower::BoxError> {
/// use http::{Request, Response};
/// use tollgate::{Estimates, Quota, RateLimitLayer, Settlement};
/// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
///
/// /// The most that the server lets a response cost.
/// const MAX_TOKENS: u32 = 4000;
///
/// let estimates = Estimates::new(0.95);
/// let learned = estimates.clone();
/// let limit = RateLimitLayer::builder(Quota::per_minute(80_000))
///     .cost(move |request| learned.estimate(request.path()).unwrap_or(MAX_TOKENS))
///     .settle_by_hand()
///     .build()?;
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("700")) });
/// let client = ServiceBuilder::new().layer(limit).service(client);
///
/// let mut response = client.oneshot(Request::post("/v1/chat").body("hi".to_owned())?).await?;
/// let settlement = response.extensions_mut().remove::<Settlement>();
/// let tokens: u32 = response.body().parse()?; // the true cost
/// estimates.learn("/v1/chat", tokens);
/// if let Some(settlement) = settlement {
///     settlement.settle(tokens);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Estimates {
    quantile: f64,
    names: Arc<Mutex<Names>>,
}

#[derive(Default)]
struct Names {
    costs: HashMap<Key, Box<NamedCosts>>,
    /// How many costs were learned, of all names.
    learned: u64,
}

struct NamedCosts {
    costs: Costs,
    /// `learned` when the last of these costs was learned.
    last: u64,
}

impl Estimates {
    /// How many costs a quantile is taken of: the last ones of each name.
    pub(crate) const RECENT: usize = 128;

    /// How many costs of a name must be learned before its estimate is their quantile.
    pub(crate) const LEAST: usize = 20;

    /// The most names. If there are more, the name that learned nothing for longest is forgotten.
    pub(crate) const MOST_NAMES: usize = 256;

    /// Makes estimates that 95 % of the costs do not exceed, with `quantile` 0.95.
    ///
    /// A quantile below 0 counts as 0, the smallest recent cost. One above 1, or NaN, counts as 1, the
    /// largest.
    pub fn new(quantile: f64) -> Self {
        let quantile = match quantile.is_nan() {
            true => 1.0,
            false => quantile.clamp(0.0, 1.0),
        };
        Estimates {
            quantile,
            names: Arc::default(),
        }
    }

    /// Returns the estimate for `name`, such as a route or a model. `None` if no cost of this name is known:
    /// then use the most that a request may cost.
    ///
    /// If fewer than 20 costs are known, the estimate is above the largest of them: four times it if one is
    /// known, twice it for three, 1.15 times it for 19.
    pub fn estimate(&self, name: impl AsRef<[u8]>) -> Option<u32> {
        let names = self.lock();
        names.costs.get(&Key::new(name))?.costs.estimate()
    }

    #[cfg(feature = "llm")]
    pub(crate) fn typical(&self, name: impl AsRef<[u8]>) -> Option<TypicalCost> {
        let names = self.lock();
        names.costs.get(&Key::new(name))?.costs.typical()
    }

    /// Learns that a request of this name did cost `actual`.
    pub fn learn(&self, name: impl AsRef<[u8]>, actual: u32) {
        let key = Key::new(name);
        let mut names = self.lock();
        names.make_room_for(key);
        names.learned += 1;
        let last = names.learned;
        let named = names.costs.entry(key).or_insert_with(|| {
            let costs = Costs::new();
            Box::new(NamedCosts { costs, last })
        });
        named.last = last;
        named.costs.learn(actual, self.quantile);
    }

    fn lock(&self) -> MutexGuard<'_, Names> {
        lock(&self.names)
    }
}

impl Names {
    /// Forgets a name if `key` is new and there are as many as may be.
    fn make_room_for(&mut self, key: Key) {
        if self.costs.len() < Estimates::MOST_NAMES || self.costs.contains_key(&key) {
            return;
        }
        let oldest = self.costs.iter().min_by_key(|(_, named)| named.last);
        if let Some(oldest) = oldest.map(|(key, _)| *key) {
            self.costs.remove(&oldest);
        }
    }
}

impl fmt::Debug for Estimates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Estimates")
            .field("quantile", &self.quantile)
            .field("names", &self.lock().costs.len())
            .finish()
    }
}
