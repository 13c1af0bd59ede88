//! Everything that can go wrong: while building ([`ConfigError`]), in a store ([`StoreError`]), and with a call
//! ([`Error`], with [`Limited`] in it when somebody said no).

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::quota::{Limit, Quota};

/// An error of any type.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a call did not succeed: it was limited, or the service inside failed.
///
/// Layers may be stacked: the error of an inner tollgate layer arrives as it is, never wrapped in another. Through
/// other people's layers and clients, [`Limited::find`] finds the reason.
///
/// ```
/// use tollgate::{Error, Limited};
///
/// fn describe(error: &Error) -> String {
///     match error {
///         Error::Limited(Limited::Local { report, .. }) => format!("we held it back; {:?}", report.retry_after()),
///         Error::Limited(Limited::Upstream { report, .. }) => format!("they said no; {:?}", report.retry_after()),
///         Error::Limited(Limited::Store { source, .. }) => format!("the store is away: {source}"),
///         Error::Inner(inner) => format!("the call failed: {inner}"),
///         _ => "something newer than this program".into(),
///     }
/// }
/// ```
#[non_exhaustive]
#[derive(Debug)]
pub enum Error {
    /// Somebody said no: this process, the upstream, or the store.
    Limited(Limited),
    /// The service inside failed.
    Inner(BoxError),
}

impl Error {
    /// The error of the service inside: as it is when it already is one of ours.
    pub(crate) fn inner(error: impl Into<BoxError>) -> Self {
        match error.into().downcast::<Error>() {
            Ok(ours) => *ours,
            Err(other) => Error::Inner(other),
        }
    }
}

impl From<Limited> for Error {
    fn from(limited: Limited) -> Self {
        Error::Limited(limited)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Limited(limited) => limited.fmt(f),
            Error::Inner(inner) => inner.fmt(f),
        }
    }
}

impl StdError for Error {
    /// The [`Limited`] value itself, so that it is found through wrappers that show only their source.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::Limited(limited) => Some(limited),
            Error::Inner(inner) => inner.source(),
        }
    }
}

/// Somebody said no.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Limited {
    /// Refused here: the request was not sent.
    #[non_exhaustive]
    Local {
        /// Why.
        reason: Reason,
        /// Whose limit, how long it waited, when to come back.
        report: Report,
    },
    /// Refused there: the request was sent, and the upstream answered that it is too much.
    ///
    /// Only with `error_on_upstream_limit`; by default such a response passes as a response.
    #[non_exhaustive]
    Upstream {
        /// The status of the response.
        status: http::StatusCode,
        /// Whose limit, how long it waited, when to come back.
        report: Report,
    },
    /// The store could not be asked: the request was not sent.
    #[non_exhaustive]
    Store {
        /// What the store said.
        source: StoreError,
        /// Whose limit, how long it waited.
        report: Report,
    },
}

impl Limited {
    /// Finds a [`Limited`] in `error` or in what lies beneath it, through wrappers of any kind.
    ///
    /// Some wrappers show their source and not what they hold, `io::Error` for one. Wrap an [`Error`] in those, whose
    /// source is the `Limited`: `io::Error::other(tollgate::Error::from(limited))`.
    ///
    /// ```
    /// use tollgate::Limited;
    ///
    /// fn retry_after(error: &(dyn std::error::Error + 'static)) -> Option<std::time::Duration> {
    ///     Limited::find(error)?.retry_after()
    /// }
    /// ```
    pub fn find<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Limited> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(limited) = error.downcast_ref::<Limited>() {
                return Some(limited);
            }
            if let Some(Error::Limited(limited)) = error.downcast_ref::<Error>() {
                return Some(limited);
            }
            next = error.source();
        }
        None
    }

    /// Whose limit it is, how long the request waited, when to come back.
    pub fn report(&self) -> &Report {
        match self {
            Limited::Local { report, .. }
            | Limited::Upstream { report, .. }
            | Limited::Store { report, .. } => report,
        }
    }

    /// Why it was refused here; `None` where it was not us who refused.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Limited::Local { reason, .. } => Some(*reason),
            Limited::Upstream { .. } | Limited::Store { .. } => None,
        }
    }

    /// How long to wait before the next try, where that is known. See [`Report::retry_after`].
    pub fn retry_after(&self) -> Option<Duration> {
        self.report().retry_after()
    }

    /// The label of the key: never its text, unless that is a host.
    pub fn key(&self) -> &str {
        self.report().key()
    }

    /// How long the request waited before it was limited.
    pub fn waited(&self) -> Duration {
        self.report().waited()
    }
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report();
        match self {
            Limited::Local { reason, .. } => {
                write!(f, "refused here ({}): {reason}", report.key())?;
                if let Some(limit) = report.limit() {
                    write!(f, "; the limit is {limit}")?;
                }
            }
            Limited::Upstream { status, .. } => {
                write!(f, "refused by the upstream ({}): {status}", report.key())?
            }
            Limited::Store { source, .. } => write!(f, "not sent ({}): {source}", report.key())?,
        }
        if let Some(retry_after) = report.retry_after() {
            write!(f, "; try again in {:?}", whole_millis(retry_after))?;
        }
        if !report.waited().is_zero() {
            write!(f, "; waited {:?}", whole_millis(report.waited()))?;
        }
        Ok(())
    }
}

/// Rounded up: who comes back when the message says is not too early.
fn whole_millis(span: Duration) -> Duration {
    Duration::from_millis(u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
}

impl StdError for Limited {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Limited::Store { source, .. } => Some(source),
            Limited::Local { .. } | Limited::Upstream { .. } => None,
        }
    }
}

/// Why a request was refused here.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its slot lies further away than `max_wait`.
    MaxWait(Duration),
    /// Its slot lies beyond its own deadline.
    Deadline,
    /// As many as `max_waiting` wait for its key already.
    LineFull(usize),
    /// As many as `max_keys` keys are in use at once.
    TooManyKeys(usize),
    /// It costs more than the quota can ever allow at once.
    CostAboveLimit {
        /// What it costs.
        cost: u32,
        /// The most a request may cost.
        largest: u32,
    },
    /// The key function found no key: `by_host` without a host, `by_header` without the header.
    NoKey,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::MaxWait(Duration::ZERO) => write!(f, "it would have to wait, and max_wait is 0"),
            Reason::MaxWait(max_wait) => write!(f, "its slot is further away than max_wait, {max_wait:?}"),
            Reason::Deadline => write!(f, "its slot lies beyond its deadline"),
            Reason::LineFull(most) => write!(f, "{most} wait already, the most that max_waiting allows"),
            Reason::TooManyKeys(most) => {
                write!(f, "{most} keys are in use: raise max_keys or use fewer keys")
            }
            Reason::CostAboveLimit { cost, largest } => {
                write!(
                    f,
                    "it costs {cost}, but the quota allows {largest} at once: split it or raise the limit or burst"
                )
            }
            Reason::NoKey => {
                write!(
                    f,
                    "the key function found no key: by_host needs an absolute URL or a Host header, by_header its \
                     header, a closure has to return one"
                )
            }
        }
    }
}

/// Whose limit it was, how long the request waited, when to come back.
#[derive(Clone)]
pub struct Report(Box<Facts>);

/// What a [`Report`] tells; boxed, so that errors stay small.
#[derive(Clone)]
pub(crate) struct Facts {
    pub(crate) key: Box<str>,
    pub(crate) limit: Option<Limit>,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) at: SystemTime,
    pub(crate) waited: Duration,
    pub(crate) turns: u32,
}

impl Report {
    pub(crate) fn new(facts: Facts) -> Self {
        Report(Box::new(facts))
    }

    /// The label of the key: the host for `by_host`, `all` without a key function, else eight hex digits.
    pub fn key(&self) -> &str {
        &self.0.key
    }

    /// The limit that refused, where it was one of ours.
    pub fn limit(&self) -> Option<Limit> {
        self.0.limit
    }

    /// How long after the refusal a slot would have been free, or how long the upstream asked to wait.
    ///
    /// `None` where that is not known, or where no wait helps.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The same as a moment: when to run the job again.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.0.at.checked_add(self.0.retry_after?)
    }

    /// Since when the request was waiting.
    pub fn since(&self) -> SystemTime {
        self.0.at.checked_sub(self.0.waited).unwrap_or(self.0.at)
    }

    /// How long it waited.
    pub fn waited(&self) -> Duration {
        self.0.waited
    }

    /// How often it waited: 0 when it was refused at once, more than 1 when it missed its slot.
    pub fn turns(&self) -> u32 {
        self.0.turns
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { key, limit, retry_after, at, waited, turns } = &*self.0;
        f.debug_struct("Report")
            .field("key", key)
            .field("limit", limit)
            .field("retry_after", retry_after)
            .field("at", at)
            .field("waited", waited)
            .field("turns", turns)
            .finish()
    }
}

/// What a store could not do.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum StoreError {
    /// It holds as many keys as it may, and all of them are in use.
    Full {
        /// The most keys it may hold.
        max_keys: usize,
    },
    /// It could not be reached, or it failed.
    Away(Arc<dyn StdError + Send + Sync>),
    /// It answers so slowly that what it grants has run out when it arrives.
    TooSlow {
        /// How long the call took.
        took: Duration,
        /// The longest that a permit of this quota may live.
        longest: Duration,
    },
    /// It was asked, and the answer was lost: what it may have granted counts as spent.
    Lost,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Full { max_keys } => {
                write!(
                    f,
                    "the store holds {max_keys} keys and all are in use: raise max_keys or use fewer keys"
                )
            }
            StoreError::Away(source) => write!(f, "the store is away: {source}"),
            StoreError::TooSlow { took, longest } => write!(
                f,
                "the store took {took:.1?} to answer, but a permit of this quota lives for {longest:?} at most: \
                 bring the store nearer, or use a longer window"
            ),
            StoreError::Lost => write!(f, "the answer of the store was lost"),
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            StoreError::Away(source) => Some(source.as_ref()),
            StoreError::Full { .. } | StoreError::TooSlow { .. } | StoreError::Lost => None,
        }
    }
}

/// What is wrong with the settings, and what to change.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// A count, capacity or burst of zero would allow nothing.
    ZeroCount {
        /// The limit.
        limit: Limit,
    },
    /// A count above [`Quota::LARGEST_COUNT`].
    CountTooLarge {
        /// The limit.
        limit: Limit,
    },
    /// A window shorter than [`Quota::SHORTEST_WINDOW`] or longer than [`Quota::LONGEST_WINDOW`].
    WindowOutOfRange {
        /// The limit.
        limit: Limit,
    },
    /// A burst or spacing so fine that the margin of each permit would eat more than a tenth of the rate.
    TooFine {
        /// The limit.
        limit: Limit,
        /// How much of the rate would be lost.
        lost_percent: u32,
        /// The smallest burst that loses nothing.
        smallest_burst: u32,
    },
    /// The guards on both sides of the boundaries leave too little of a fixed window.
    WindowTooShortForSlack {
        /// The limit.
        limit: Limit,
        /// The guard.
        boundary_slack: Duration,
    },
    /// More than [`Quota::MOST_LIMITS`] limits on one key.
    TooManyLimits,
    /// `burst` was called on a bucket, which has its capacity, or on `every`, which has none.
    BurstOfBucket,
    /// A text that is no quota.
    Unparsable {
        /// The text.
        text: String,
    },
    /// A setting that must lie in a range does not.
    OutOfRange {
        /// Its name.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::ZeroCount { limit } => {
                write!(f, "quota {limit}: a count of 0 allows nothing; the least is 1")
            }
            ConfigError::CountTooLarge { limit } => {
                write!(f, "quota {limit}: the largest count is {}", Quota::LARGEST_COUNT)
            }
            ConfigError::WindowOutOfRange { limit } => {
                write!(f, "quota {limit}: a window lasts from {:?} to 366 days", Quota::SHORTEST_WINDOW)
            }
            ConfigError::TooFine { limit, lost_percent, smallest_burst } => write!(
                f,
                "quota {limit}: spacing this fine would lose {lost_percent} % of the rate to the margin of each \
                 permit; a burst of {smallest_burst} loses nothing: .burst({smallest_burst}) after a window, else \
                 Quota::bucket({smallest_burst}).refill({}, {:?})",
                limit.count(),
                limit.window(),
            ),
            ConfigError::WindowTooShortForSlack { limit, boundary_slack } => write!(
                f,
                "quota {limit}: a boundary_slack of {boundary_slack:?} on both sides leaves less than half of the \
                 window; lower boundary_slack, or use a sliding window, which needs none"
            ),
            ConfigError::TooManyLimits => {
                write!(f, "a quota holds at most {} limits, bursts included", Quota::MOST_LIMITS)
            }
            ConfigError::BurstOfBucket => write!(
                f,
                "burst() shapes a window; a spacing or a bucket has it as its capacity: for every(d) write \
                 Quota::bucket(burst).refill(1, d)"
            ),
            ConfigError::Unparsable { text } => write!(
                f,
                "{text:?} is no quota; write count/window, such as 100/60s, 5/second or 25/5s, 300/60s"
            ),
            ConfigError::OutOfRange { setting, value, allowed } => {
                write!(f, "{setting} is {value}, but must be {allowed}")
            }
        }
    }
}

impl StdError for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited() -> Limited {
        Limited::Local {
            reason: Reason::Deadline,
            report: Report::new(Facts {
                key: "api.example.com".into(),
                limit: Some(Limit::Sliding { count: 50, window: Duration::from_secs(1) }),
                retry_after: Some(Duration::from_millis(320)),
                at: SystemTime::UNIX_EPOCH + Duration::from_secs(100),
                waited: Duration::from_secs(15),
                turns: 1,
            }),
        }
    }

    #[test]
    fn a_refusal_says_who_why_since_when_and_when_to_come_back() {
        let limited = limited();
        assert_eq!(
            limited.to_string(),
            "refused here (api.example.com): its slot lies beyond its deadline; the limit is 50/1s; \
             try again in 320ms; waited 15s"
        );
        assert_eq!(limited.report().since(), SystemTime::UNIX_EPOCH + Duration::from_secs(85));
        assert_eq!(
            limited.report().retry_at(),
            Some(SystemTime::UNIX_EPOCH + Duration::from_millis(100_320))
        );
    }

    #[test]
    fn stacked_layers_stay_flat() {
        let inner: BoxError = Box::new(Error::Limited(limited()));
        assert!(matches!(Error::inner(inner), Error::Limited(_)));
        assert!(matches!(Error::inner("broken pipe"), Error::Inner(_)));
    }

    #[test]
    fn a_limited_is_found_through_wrappers_that_show_only_their_source() {
        let io = std::io::Error::other(Error::Limited(limited()));
        let twice = std::io::Error::other(io);
        assert!(matches!(Limited::find(&twice), Some(Limited::Local { .. })));
        assert!(Limited::find(&std::io::Error::other("no limit here")).is_none());
    }

    #[test]
    fn errors_are_small() {
        assert!(size_of::<Error>() <= 48, "{}", size_of::<Error>());
    }
}
