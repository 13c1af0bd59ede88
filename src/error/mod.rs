//! Everything that can go wrong: while building ([`ConfigError`]), in a store ([`StoreError`]), and with a call
//! ([`Error`], with [`Limited`] in it when somebody said no).

mod report;
mod store;

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

pub(crate) use report::Facts;
pub use report::Report;
pub use store::StoreError;

/// An error of any type.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a call did not succeed: it was limited, or the service inside failed.
///
/// If a service has several tollgate layers, the error of an inner one arrives as it is, never wrapped in another. Two
/// [`RateLimitLayer`](crate::RateLimitLayer)s around each other do not keep the outer limit:
/// [take both permits by hand](crate::Limiter#two-limits-with-different-keys). Through other people's layers and clients,
/// [`Limited::find`] finds the reason.
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
    /// Only with `error_on_upstream_limit`, and if a request that was to be sent again
    /// ([`retrying`](crate::AdaptiveThrottleLayer::retrying)) got no turn in time. By default such a response passes as a
    /// response.
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
                write!(f, "refused here ({}): ", report.key())?;
                match *reason {
                    Reason::MaxWait(most) if !most.is_zero() && report.waited() >= most => {
                        write!(f, "it has waited for all of max_wait, {most:?}")?
                    }
                    reason => write!(f, "{reason}")?,
                }
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
    /// Its key is held: the upstream refused a call lately, or an operator said so, and the hold ends later than it can wait.
    Held,
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
            Reason::Held => write!(f, "its key is held: the upstream has said that it is too much"),
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::quota::Limit;

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
