//! The public face of the limiter.
//!
//! [`Limiter`] is the last row of the table in `limiter/mod.rs`: no other file of this folder
//! imports it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::acquire::Acquire;
use super::admission::Entry;
use super::engine::{Core, CoreId};
use super::holds;
use super::joint::PartRef;
use super::limited::RefusedRequest;
use super::listener;
use super::reservation::Reservation;
use super::settings::Settings;
use super::start::{self, Started};
use super::status::{self, KeyStatus};
use crate::clock;
use crate::error::{Limited, Reason, StoreError};
use crate::key::{HostKey, Key, Label, RequestInfo, RequestRef};
use crate::store::Refusal;

/// A rate limiter without HTTP: for job workers, gRPC, or anything else. Clones share one count.
///
/// [`RateLimitLayer::limiter`](crate::RateLimitLayer::limiter) returns it. There is no other
/// constructor: the settings are those of the layer.
///
/// ```
/// use tollgate::{Key, Quota, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
///
/// let permit = limiter.acquire(Key::new("customer 17")).await?;
/// // ... send the request ...
/// drop(permit); // counts as sent
///
/// assert_eq!(limiter.peek(Key::new("customer 17")).await?.limits[0].used, 1);
/// # Ok(())
/// # }
/// ```
///
/// # Two limits with different keys
///
/// A server may allow one message per second to each channel, and 30 per minute in all. To acquire
/// one permit of both limits, or of none, join the futures of two limiters with
/// [`Acquire::with`]:
///
/// ```
/// use tollgate::{Key, Quota, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let all = RateLimitLayer::new(Quota::per_minute(30))?.limiter();
/// let channels = RateLimitLayer::new(Quota::per_second(1))?.limiter();
///
/// # let start = tokio::time::Instant::now();
/// # for _ in 0..2 {
/// let permit = all.acquire(Key::ALL).with(channels.acquire(Key::new("general"))).await?;
/// // ... send the request ...
/// drop(permit);
/// # }
/// # assert!(start.elapsed() > std::time::Duration::from_secs(1));
/// # assert_eq!(all.peek(Key::ALL).await?.limits[0].used, 2);
/// # Ok(())
/// # }
/// ```
///
/// Do not acquire two permits one after the other. A permit is valid for 10 to 50 ms, so the first
/// one can expire during the wait for the second.
#[derive(Clone)]
pub struct Limiter(Arc<Core>);

impl Limiter {
    /// Acquires a permit for one request of `key`, at once or after a wait of at most
    /// [`max_wait`](crate::RateLimitBuilder::max_wait).
    ///
    /// [`Acquire`] has setters for the cost of the request (1 by default) and its deadline (none by
    /// default). The request enters the queue when the future is first polled.
    ///
    /// # Errors
    ///
    /// - [`Limited::Local`] if the slot, or the end of the key's hold, is later than `max_wait` or
    ///   the deadline allows. Also if the queue is full, if the cost is above the limit, or if
    ///   `max_keys` keys are in use. Its [`Reason`] states which.
    /// - [`Limited::Store`] if the store failed, unless
    ///   [`on_store_error`](crate::RateLimitBuilder::on_store_error) says otherwise.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. This frees the request's place in the queue, and its
    /// slot goes to the next waiter.
    ///
    /// # Panics
    ///
    /// If the request has to wait and the future is polled outside of a Tokio runtime with timers.
    pub fn acquire(&self, key: Key) -> Acquire {
        Acquire::new(self.0.clone(), key)
    }

    /// Reads the state of `key`: its limits, what is used and free of them, its hold, and how many
    /// requests wait. Takes no permit and changes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store could not be asked.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn peek(&self, key: Key) -> Result<KeyStatus, StoreError> {
        status::read(&self.0, key).await
    }

    /// Puts `key` on hold for `span`, at most 366 days: no process that shares the store sends a
    /// request of this key.
    ///
    /// The limiter does the same when the upstream responds with 429. A later hold can extend this
    /// one, but not shorten it. [`release`](Limiter::release) ends it. Requests that cannot wait
    /// until the end of the hold are refused at once, with [`Reason::Held`].
    /// [`max_hold`](crate::RateLimitBuilder::max_hold) limits only holds that responses cause.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
    /// limiter.hold_for(Key::ALL, Duration::from_secs(60)).await?;
    /// let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    /// assert!(refused.retry_after() > Some(Duration::from_secs(59)));
    ///
    /// limiter.release(Key::ALL).await?;
    /// assert!(limiter.acquire(Key::ALL).await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the hold. It applies in this process.
    ///
    /// # Cancel safety
    ///
    /// The hold applies in this process once the future was polled.
    pub async fn hold_for(&self, key: Key, span: Duration) -> Result<(), StoreError> {
        holds::hold_for(&self.0, key, span).await
    }

    /// Puts `key` on hold until a moment, as [`hold_for`](Limiter::hold_for) does. Does nothing if
    /// `until` has passed.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the hold. It applies in this process.
    ///
    /// # Cancel safety
    ///
    /// The hold applies in this process once the future was polled.
    pub async fn hold_until(&self, key: Key, until: Instant) -> Result<(), StoreError> {
        match until.checked_duration_since(clock::now()) {
            Some(span) if !span.is_zero() => holds::hold_for(&self.0, key, span).await,
            _ => Ok(()),
        }
    }

    /// Ends the hold of `key`, and drops what is [reserved for other
    /// clients](crate::guide::learning), for all processes that share the store.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the hold may not have ended. In this process it has not.
    ///
    /// # Cancel safety
    ///
    /// The hold ends in this process when the future is ready. If the future is dropped before, the
    /// other processes may have ended the hold.
    pub async fn release(&self, key: Key) -> Result<(), StoreError> {
        holds::release(&self.0, key).await
    }

    /// Gives back the permits that this process has
    /// [prefetched](crate::guide::many_processes#what-a-lease-is), and waits until the store has
    /// received all permits that were given back.
    ///
    /// Call it at the end of a program if other processes share its store. Without it, the other
    /// processes cannot use these permits until the permits expire, at most a window later. The
    /// limiter can be used again afterwards.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store may not have received all of them.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. The store still receives the permits that were sent
    /// to it.
    pub async fn shutdown(&self) -> Result<(), StoreError> {
        self.0.shutdown().await
    }
}

/// What the layers use.
impl Limiter {
    pub(crate) fn new(settings: Settings) -> Self {
        Limiter(Core::new(settings, listener::on_event))
    }

    /// Returns the key of the host of a request, if the host matters: see [`Entry::host`]. `key` is
    /// the key of the request.
    #[inline]
    pub(crate) fn host_of(
        &self,
        key: Key,
        host: &mut HostKey<'_, impl RequestInfo>,
    ) -> Option<Key> {
        if key == Key::ALL {
            host.get_by(|name| self.0.hosts.key_of(name))
        } else {
            host.get_if_redirected()
        }
    }

    /// Takes a permit at hand for a request that the caller sends at once. Returns the time in both
    /// cases: `Ok` if there was a permit, `Err` if not. [`start_slow`](Limiter::start_slow) takes
    /// that time.
    #[inline]
    pub(crate) fn send_at_once(&self, entry: &Entry) -> Result<Instant, Instant> {
        start::send_at_once(&self.0, entry)
    }

    /// Takes a permit that is at hand. Returns `None` for a request that costs nothing.
    ///
    /// # Errors
    ///
    /// `now`, if the request has to take the slow path.
    pub(crate) fn take_at_once(
        &self,
        entry: &Entry,
        now: Instant,
    ) -> Result<Option<Reservation>, Instant> {
        start::take_at_once(&self.0, entry, now)
    }

    /// Returns whether the true cost of a request may be stated after its response.
    pub(crate) fn settles(&self) -> bool {
        self.0.settings.settles
    }

    /// Enters a request for which no permit is at hand. `label` returns the name of its key.
    #[cold]
    pub(crate) fn start_slow(
        &self,
        entry: &Entry,
        now: Instant,
        label: impl FnOnce() -> Label,
    ) -> Started {
        start::slow(&self.0, entry, now, label)
    }

    /// Returns the name of `key`, which came with `request`, for errors and events.
    pub(crate) fn label(&self, key: Key, request: Option<&RequestRef<'_>>) -> Label {
        self.0.label(key, request)
    }

    /// Returns the part of a joint request that this limiter counts.
    pub(crate) fn part(&self, entry: Entry) -> PartRef<'_> {
        PartRef::new(&self.0, entry)
    }

    /// Returns the name of the limit, if it has one.
    pub(crate) fn name(&self) -> Option<&'static str> {
        self.0.settings.name
    }

    #[inline]
    pub(crate) fn id(&self) -> CoreId {
        self.0.id
    }

    /// Returns whether the layer of this limiter is known to be around another one.
    #[inline]
    pub(crate) fn has_inner(&self) -> bool {
        self.0.has_inner()
    }

    /// Returns the error of a request in which the key function found no key.
    #[cold]
    pub(crate) fn no_key(&self) -> Limited {
        let now = clock::now();
        let name = self.0.settings.name;
        RefusedRequest::new("none".into(), name, now).refuse(Reason::NoKey, Refusal::NEVER, now)
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
