//! How often one request was sent.

use std::fmt;
use std::sync::{Arc, Mutex};

#[cfg(any(feature = "retry", feature = "reqwest-middleware"))]
use http::Extensions;
use smallvec::SmallVec;

use crate::limiter::CoreId;
use crate::locks::lock;

/// Counts how often one request passes a layer, in the extensions of the request. Clones share one count, so a request
/// that is cloned to be sent again has one, too. Layers around each other count the same attempts: the count is that of the layer
/// that has sent the request most often.
///
/// Layers of retries multiply: a policy of three attempts in a loop of three sends nine requests for one. A
/// [`RateLimitLayer`](crate::RateLimitLayer) counts each time that it sends a request with this, and reports an
/// [event](crate::stats::Event::SentAgain) at 5, 10, 20 and so on. [`RetryLimited`](crate::RetryLimited) puts it into
/// requests that it repeats, and so does a layer of reqwest-middleware when a response is a refusal. For a loop of your own,
/// put it into the request:
///
/// ```
/// use http::{Request, Response, StatusCode};
/// use tollgate::service::Attempts;
/// use tollgate::{Quota, RateLimitLayer};
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let limit = RateLimitLayer::new(Quota::per_second(50))?;
/// let mut service = ServiceBuilder::new().layer(limit.clone()).service(client);
///
/// let attempts = Attempts::new();
/// for _ in 0..3 {
///     let mut request = Request::get("https://api.example.com/users").body(String::new())?;
///     request.extensions_mut().insert(attempts.clone());
///     service.ready().await?.call(request).await?;
/// }
/// assert_eq!(attempts.count(), 3);
/// assert_eq!(limit.limiter().stats().sent_again(), 2);
/// # Ok(())
/// # }
/// ```
///
/// A client that repeats requests by itself, inside of the layer, sends more than any layer sees: see [hidden
/// attempts](crate#pitfalls).
#[derive(Clone, Default)]
pub struct Attempts(Arc<Mutex<AttemptCounts>>);

#[derive(Default)]
struct AttemptCounts {
    /// How often the request was sent before it had a count.
    before: u32,
    /// How often each limiter has sent it, those times included.
    sent: SmallVec<[(CoreId, u32); 1]>,
}

impl Attempts {
    /// Makes the count of a request that was not sent yet.
    pub fn new() -> Self {
        Attempts::default()
    }

    /// Returns how often the request was sent.
    pub fn count(&self) -> u32 {
        let counts = lock(&self.0);
        let most = counts.sent.iter().map(|(_, count)| *count).max();
        most.unwrap_or(counts.before)
    }

    /// Counts that this limiter sends the request. Returns how often it was sent, this time included.
    pub(super) fn is_sent(&self, by: CoreId) -> u32 {
        let mut counts = lock(&self.0);
        let AttemptCounts { before, sent } = &mut *counts;
        let index = sent.iter().position(|(limiter, _)| *limiter == by);
        let index = index.unwrap_or_else(|| {
            sent.push((by, *before));
            sent.len() - 1
        });
        let (_, count) = &mut sent[index];
        *count = count.saturating_add(1);
        *count
    }

    /// Returns the count in the extensions of a request that was sent and may be sent again. If there is none, it begins with
    /// that of `known`, or with the time that it was sent.
    #[cfg(any(feature = "retry", feature = "reqwest-middleware"))]
    pub(super) fn of_repeated(known: Option<&Attempts>, extensions: &mut Extensions) -> Attempts {
        let attempts = extensions.get_or_insert_with(|| match known {
            Some(known) => known.clone(),
            None => Attempts(Arc::new(Mutex::new(AttemptCounts {
                before: 1,
                ..AttemptCounts::default()
            }))),
        });
        attempts.clone()
    }
}

/// Returns whether it is reported that a request was sent so often: 5, 10, 20, and each time twice as often.
pub(super) fn is_reported(count: u32) -> bool {
    count.is_multiple_of(5) && (count / 5).is_power_of_two()
}

impl fmt::Debug for Attempts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Attempts").field(&self.count()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::is_reported;

    #[test]
    fn reports_become_rare() {
        let reported: Vec<u32> = (0..100).filter(|count| is_reported(*count)).collect();
        assert_eq!(reported, [5, 10, 20, 40, 80]);
    }
}
