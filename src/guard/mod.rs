//! The ban guard: stops a key before the upstream bans the program for too many bad answers.
//!
//! [`Guard`] has the settings. `ban_guard` counts bad answers and stops keys, through the seam of
//! `guarded.rs`.

mod ban_guard;
mod counted_keys;
mod stops;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

pub(crate) use self::ban_guard::BanGuard;
use crate::config_error::ConfigError;
use crate::key::Key;
use crate::quota::Quota;
use crate::signal::Signal;

type Counts = dyn Fn(StatusCode, &Signal) -> bool + Send + Sync;
type KeyOf = dyn Fn(Key) -> Key + Send + Sync;

/// Stops requests before the server bans the program for too many bad answers.
///
/// Some servers ban a client whose requests fail too often: Discord an address after 10,000 answers
/// with 401, 403 or 429 in 10 minutes, GitHub an integration that goes on although it is limited. A
/// guard counts such answers, over all processes that share the store. If there are more than its quota
/// allows, it puts the key on hold, in all processes.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Guard, Key, Quota, RateLimitLayer};
///
/// // 90 % of what Discord allows, for the answers that it counts.
/// let guard = Guard::new(Quota::new(9_000, Duration::from_secs(600)))
///     .counts(|status, signal| {
///         matches!(status.as_u16(), 401 | 403 | 429) && signal.scope() != Some("shared")
///     })
///     .key(|_| Key::new("our address")); // Discord counts by address, not by route
/// let limit = RateLimitLayer::builder(Quota::per_second(50))
///     .key(|request| Key::new(request.path()))
///     .guard(guard)
///     .build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
///
/// # What happens
///
/// - Each bad answer takes a permit of the quota. If there is none left, the guard **trips**: the key is
///   on hold for `first`, 60 s by default. The next trip within `longest` of the end of a stop holds it
///   for twice as long, up to `longest`, an hour by default.
/// - A request that cannot wait for the end of the stop is refused
///   ([`Reason::Held`](crate::Reason::Held)), with the time to retry.
///   [`Limiter::release`](crate::Limiter::release) of the key ends the stop.
/// - After a stop, a process of a [`RateLimitLayer`](crate::RateLimitLayer) first sends one request for
///   each key. If its answer is bad and the quota is still used up, the guard trips again.
/// - A wait that the server states in a refusal is obeyed up to `longest`, even if that is longer than
///   [`max_hold`](crate::RateLimitBuilder::max_hold).
///
/// In any window of the quota, the bad answers are at most those that the quota allows, and for each
/// trip in it the requests in flight then. With a remote store, these include the requests that leave in
/// the round trip to the store. So set the quota to 90 % of what the server allows.
///
/// The page [operate](crate::guide::operate#ban-guard) has more.
#[derive(Clone)]
#[must_use = "a guard does nothing until a builder gets it"]
pub struct Guard {
    pub(crate) quota: Quota,
    counts: Arc<Counts>,
    key: Arc<KeyOf>,
    first: Duration,
    longest: Duration,
}

const DEFAULT_FIRST: Duration = Duration::from_secs(60);
const DEFAULT_LONGEST: Duration = Duration::from_secs(3600);
const SHORTEST: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

impl Guard {
    /// Creates a guard that allows `bad` answers, for each key.
    pub fn new(bad: Quota) -> Self {
        Guard {
            quota: bad,
            counts: Arc::new(|status: StatusCode, signal: &Signal| {
                matches!(status.as_u16(), 401 | 403 | 429) || signal.refusal().is_some()
            }),
            key: Arc::new(|key| key),
            first: DEFAULT_FIRST,
            longest: DEFAULT_LONGEST,
        }
    }

    /// Sets which answers count. The function is called for responses with a status of 400 or above, and
    /// for other [refusals](Signal::refusal). Default: 401, 403, 429, and other refusals.
    ///
    /// A response without a status ([`ResponseInfo`](crate::signal::ResponseInfo)), and one that
    /// [`Sent::answered`](crate::Sent::answered) takes in, counts only if it is a refusal.
    pub fn counts(
        mut self,
        counts: impl Fn(StatusCode, &Signal) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.counts = Arc::new(counts);
        self
    }

    /// Sets under which key the bad answers to the requests of a key count. If many keys count under
    /// one, such as all routes under one address, a trip stops all of them, and also keys that are first
    /// used during the stop. Default: each key counts for itself.
    ///
    /// The function takes the key that a refusal holds: the key of the request, or
    /// [`Key::host_hold`] of its host if a [`RateLimitLayer`](crate::RateLimitLayer) has no key
    /// function. It is called often during a trip, so it should be quick.
    pub fn key(mut self, key: impl Fn(Key) -> Key + Send + Sync + 'static) -> Self {
        self.key = Arc::new(key);
        self
    }

    /// Sets how long the first stop is, and the longest. Default: 60 s and an hour. `first` is at least
    /// a second, `longest` at least `first` and at most a day.
    pub fn stop(mut self, first: Duration, longest: Duration) -> Self {
        self.first = first;
        self.longest = longest;
        self
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let quota = &self.quota;
        let is_of_calls = quota.most_in_flight().is_some();
        ConfigError::unless(
            !quota.limits().is_empty() && !is_of_calls && quota.by_unit().len() == 1,
            "guard",
            quota,
            "a rate of bad answers, such as Quota::new(9_000, ten_minutes)",
        )?;
        let has_unit = quota.unit().is_some();
        ConfigError::unless(!has_unit, "guard", quota, "a quota without a unit")?;
        let (first, longest) = (self.first, self.longest);
        ConfigError::unless(
            first >= SHORTEST && (first..=DAY).contains(&longest),
            "guard",
            format_args!("stop({first:?}, {longest:?})"),
            "a first stop of at least a second, and a longest one from that to a day",
        )
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("quota", &self.quota)
            .field("first", &self.first)
            .field("longest", &self.longest)
            .finish_non_exhaustive()
    }
}
