//! The errors of a call.
//!
//! An [`Error`] is either the error of the inner service, or a [`Limited`]: this process, the
//! upstream or the store stopped the request. [`StoreError`] says why a store granted nothing. If a
//! setting is wrong, building the layer fails with a [`ConfigError`].

mod report;
mod store;

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::blocking::CannotBlock;
use crate::config_error::ConfigError;
use crate::cost::Cost;
pub use report::LimitedInfo;
pub(crate) use report::{ErrorFacts, LimitName};
pub use store::StoreError;

/// An error of any type.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a call through a layer failed: it was limited, or the inner service failed.
///
/// If other layers or clients wrap this error, [`Limited::find`] finds the reason in it. If a
/// service has several tollgate layers, the outer layer passes on the error of the inner layer
/// unchanged. The page [`guide::refusals`](crate::guide::refusals) says what to do with each error.
///
/// ```
/// use tollgate::{Error, Limited};
///
/// fn describe(error: &Error) -> String {
///     match error {
///         Error::Limited(Limited::Local { reason, .. }) => format!("not sent: {reason}"),
///         Error::Limited(Limited::Upstream { status, .. }) => format!("refused: {status}"),
///         Error::Limited(Limited::Store { source, .. }) => format!("not sent: {source}"),
///         Error::Inner(inner) => format!("the call failed: {inner}"),
///         _ => "an error of a newer tollgate".into(),
///     }
/// }
/// ```
#[non_exhaustive]
#[derive(Debug)]
pub enum Error {
    /// This process, the upstream or the store stopped the request.
    Limited(Limited),
    /// The inner service failed.
    Inner(BoxError),
}

impl Error {
    /// Converts an error of the inner service; an [`Error`] stays what it is.
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
    /// Returns the [`Limited`] value itself, so that callers find it through wrappers that expose
    /// only their source.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::Limited(limited) => Some(limited),
            Error::Inner(inner) => inner.source(),
        }
    }
}

/// Who stopped a request, and why.
#[non_exhaustive]
#[derive(Clone, Debug)]
#[doc(alias = "429")]
#[doc(alias = "rate limited")]
pub enum Limited {
    /// This process refused the request. It was not sent.
    #[non_exhaustive]
    Local {
        /// Why this process refused it.
        reason: Reason,
        /// The key, how long the request waited, and when to retry.
        report: LimitedInfo,
    },
    /// The upstream refused the request because of a limit. It was sent.
    ///
    /// By default such a response is passed on as a response. It becomes this error with
    /// [`error_on_upstream_limit`](crate::RateLimitBuilder::error_on_upstream_limit). With
    /// [`retrying`](crate::AdaptiveThrottleLayer::retrying), it becomes this error if the request
    /// could not be sent again in time.
    #[non_exhaustive]
    Upstream {
        /// The status of the response.
        status: http::StatusCode,
        /// The key, how long the request waited, and when to retry.
        report: LimitedInfo,
    },
    /// The store failed, so the request could not be counted. It was not sent, but for one case: with
    /// [`StoreError::InFlightSlotLost`], the call was in flight, and was cancelled.
    #[non_exhaustive]
    Store {
        /// The error of the store.
        source: StoreError,
        /// The key, and how long the request waited.
        report: LimitedInfo,
    },
}

impl Limited {
    /// Finds a [`Limited`] in `error` or in its chain of sources, through wrappers of any kind.
    /// Returns `None` if no limit and no store stopped the request.
    ///
    /// The `source` of an [`Error`] is the `Limited`, so that wrappers such as `io::Error` show it.
    /// Such a wrapper shows the source of the wrapped error, but not the wrapped error itself. So
    /// wrap an [`Error`], not a `Limited`: `io::Error::other(tollgate::Error::from(limited))`.
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
            next = match error.downcast_ref::<Error>() {
                Some(Error::Limited(limited)) => return Some(limited),
                // Its source is that of the inner error, which may be a `Limited` itself.
                Some(Error::Inner(inner)) => Some(&**inner),
                None => error.source(),
            };
        }
        None
    }

    /// Returns the key, how long the request waited, and when to retry.
    pub fn report(&self) -> &LimitedInfo {
        match self {
            Limited::Local { report, .. }
            | Limited::Upstream { report, .. }
            | Limited::Store { report, .. } => report,
        }
    }

    /// Returns why this process refused the request; `None` if the upstream or the store did.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Limited::Local { reason, .. } => Some(reason.clone()),
            Limited::Upstream { .. } | Limited::Store { .. } => None,
        }
    }

    /// Returns whether the upstream may have seen the request.
    pub(crate) fn was_sent(&self) -> bool {
        match self {
            Limited::Local { .. } => false,
            Limited::Upstream { .. } => true,
            Limited::Store { source, .. } => matches!(source, StoreError::InFlightSlotLost),
        }
    }

    /// Returns how long to wait before the next attempt, counted from the refusal. `None` if that
    /// is not known, or if no wait helps. See [`LimitedInfo::retry_after`].
    #[doc(alias = "retry-after")]
    pub fn retry_after(&self) -> Option<Duration> {
        self.report().retry_after()
    }
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report();
        match self {
            Limited::Local { reason, .. } => {
                write!(f, "refused locally ({}): ", report.subject())?;
                match reason {
                    Reason::MaxWait(most) if !most.is_zero() && report.waited() >= *most => {
                        write!(f, "no permit within max_wait ({most:?})")?
                    }
                    reason => write!(f, "{reason}")?,
                }
                if let Some(limit) = report.shown_limit() {
                    write!(f, "; the limit is {limit}")?;
                }
            }
            Limited::Upstream { status, .. } => write!(
                f,
                "refused by the upstream ({}): {status}",
                report.subject()
            )?,
            Limited::Store { source, .. } => {
                let outcome = match self.was_sent() {
                    true => "cancelled",
                    false => "not sent",
                };
                write!(f, "{outcome} ({}): {source}", report.subject())?
            }
        }
        if let Some(retry_after) = report.retry_after() {
            write!(f, "; try again in {:?}", whole_millis(retry_after))?;
        }
        // A store that answers at once takes a part of a millisecond, which is no wait.
        let waited =
            Duration::from_millis(report.waited().as_millis().try_into().unwrap_or(u64::MAX));
        if !waited.is_zero() {
            write!(f, "; waited {waited:?}")?;
        }
        Ok(())
    }
}

/// Rounds up to whole milliseconds: a caller that retries when the message says is not too early.
pub(crate) fn whole_millis(span: Duration) -> Duration {
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

/// Why this process refused a request. The page [`guide::refusals`](crate::guide::refusals) has a
/// remedy for each reason.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The slot of the request is further away than
    /// [`max_wait`](crate::RateLimitBuilder::max_wait), which is the value. If a request waits for [the margin of its
    /// quota](crate::guide::choosing_a_quota#a-caller-at-exactly-the-rate), and `max_wait` is shorter, that is the value.
    MaxWait(Duration),
    /// The slot of the request is later than its [`Deadline`](crate::Deadline).
    Deadline,
    /// [`max_queue`](crate::RateLimitBuilder::max_queue) requests of the key wait in this process.
    /// The value is `max_queue`.
    QueueFull(usize),
    /// [`max_keys`](crate::RateLimitBuilder::max_keys) keys are in use in this process. The value
    /// is `max_keys`.
    TooManyKeys(usize),
    /// The request costs more than the quota ever allows at once.
    CostAboveLimit {
        /// The cost of the request, in units.
        cost: u32,
        /// The largest cost that the quota allows, in units.
        largest: u32,
        /// The unit: [`Cost::REQUESTS`](crate::Cost::REQUESTS), or the name given to
        /// [`Quota::of`](crate::Quota::of).
        unit: &'static str,
    },
    /// A limit counts a unit, and neither this request nor any of the first 100 has stated it, so the limit counts
    /// nothing. State the unit in [`cost`](crate::RateLimitBuilder::cost) or in a [`Cost`] in the extensions of requests,
    /// or call [`charged_by_hand`](crate::RateLimitBuilder::charged_by_hand).
    NotCharged {
        /// The name given to [`Quota::of`](crate::Quota::of).
        unit: &'static str,
    },
    /// The quota that the request states for its key is invalid. The value says what is wrong.
    InvalidQuota(Arc<ConfigError>),
    /// The key is on hold, and the hold ends later than the request can wait. A refusal by the
    /// upstream or an operator put the key on hold.
    Held,
    /// Requests of this [kind](crate::RateLimitBuilder::kind) are on hold, for longer than the request can wait: the upstream
    /// refused them, and accepted others of the key.
    HeldKind,
    /// A long quota of the upstream is used up, or the upstream has stated a wait of more than an hour: the key is on hold,
    /// and `retry_after` is the end that the upstream has stated. A caller may stop until then.
    UsedUp {
        /// The name of the quota, such as `daily`, if this process knows it.
        quota: Option<Arc<str>>,
        /// The window of the quota, an hour or more, if this process knows it.
        window: Option<Duration>,
    },
    /// The key function found no key: `by_host` without a host, `by_header` without the header.
    NoKey,
    /// Two limits of the request have the same key in the same store, so each would count what the
    /// other counts. Put limits of one key into one quota ([`Quota::and`](crate::Quota::and)).
    SameKey,
    /// The limiter or throttle is [drained](crate::Limiter::drain), because this process is about to
    /// end. No later attempt in this process succeeds.
    Draining,
    /// The permit had expired when [`Permit::begin`](crate::Permit::begin) was called: the request that it was for
    /// began too late. Acquire the permit when the request can leave.
    Expired,
    /// The request was made inside of a call of another [`RateLimitLayer`](crate::RateLimitLayer), whose permit could
    /// expire while this one waits. Join both layers with [`and`](crate::RateLimitLayer::and). See
    /// [two layers](crate::RateLimitLayer#two-layers).
    Inside,
    /// The request was made inside of a call of the same limiter, and would have to wait, maybe for the in-flight
    /// slot of the outer call. Make it before that call or after it, or raise the limit.
    Nested,
    /// [`Acquire::blocking`](crate::limiter::Acquire::blocking) was called where the thread may not
    /// block. The value says why.
    CannotBlock(CannotBlock),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::MaxWait(Duration::ZERO) => write!(f, "no permit is free, and max_wait is 0"),
            Reason::MaxWait(max_wait) => {
                write!(f, "its slot is further away than max_wait ({max_wait:?})")
            }
            Reason::Deadline => write!(f, "its slot lies beyond its deadline"),
            Reason::QueueFull(most) => {
                write!(f, "the queue of the key is full: max_queue is {most}")
            }
            Reason::TooManyKeys(most) => {
                write!(
                    f,
                    "no room for another key; raise max_keys ({most}) or use fewer keys"
                )
            }
            Reason::CostAboveLimit {
                cost,
                largest,
                unit,
            } => {
                let (space, unit) = match *unit {
                    Cost::REQUESTS => ("", ""),
                    unit => (" ", unit),
                };
                write!(
                    f,
                    "it costs {cost}{space}{unit}, and the quota allows at most {largest} at once; split it, or raise the \
                     limit or burst"
                )
            }
            Reason::NotCharged { unit } => write!(
                f,
                "the quota limits {unit}, and no request has stated any; state them in .cost(..), or call \
                 .charged_by_hand() if requests may go without"
            ),
            Reason::InvalidQuota(error) => write!(f, "the quota of its key is invalid: {error}"),
            Reason::Held => write!(
                f,
                "its key is on hold, after a refusal by the upstream or a call of hold_for"
            ),
            Reason::UsedUp { quota, window } => {
                f.write_str("a quota of the upstream is used up")?;
                match (quota, window) {
                    (Some(quota), _) => write!(f, ": {quota}"),
                    (None, Some(window)) => {
                        write!(f, ": the one for {}", crate::limiter::Shown(*window))
                    }
                    (None, None) => Ok(()),
                }
            }
            Reason::HeldKind => write!(
                f,
                "requests of its kind are on hold: the upstream refused them, and accepted others of the key"
            ),
            Reason::SameKey => write!(
                f,
                "two of its limits have the same key in one store; put limits of one key into one quota"
            ),
            Reason::Draining => write!(
                f,
                "the limiter was drained, because this process is about to end"
            ),
            Reason::Expired => write!(
                f,
                "its permit had expired when it began; acquire the permit when the request can leave"
            ),
            Reason::Inside => write!(
                f,
                "it is inside of a call of another RateLimitLayer, whose permit could expire meanwhile; join both layers \
                 with .and(..), or put the service that makes this request outside"
            ),
            Reason::Nested => write!(
                f,
                "it is inside of a call of the same limiter, whose in-flight slot it might wait for; make it before that \
                 call or after it"
            ),
            Reason::CannotBlock(why) => write!(f, "{why}"),
            Reason::NoKey => {
                write!(
                    f,
                    "the key function found no key: by_host needs an absolute URL or a Host header, by_header its \
                     header, a closure must return a key"
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
            report: LimitedInfo::new(ErrorFacts {
                key: "api.example.com".into(),
                limit_name: LimitName::default(),
                limit: Some(Limit::Sliding {
                    count: 50,
                    window: Duration::from_secs(1),
                }),
                retry_after: Some(Duration::from_millis(320)),
                at: SystemTime::UNIX_EPOCH + Duration::from_secs(100),
                waited: Duration::from_secs(15),
                turns: 1,
            }),
        }
    }

    #[test]
    fn a_refusal_names_key_reason_limit_and_retry_time() {
        let limited = limited();
        assert_eq!(
            limited.to_string(),
            "refused locally (api.example.com): its slot lies beyond its deadline; the limit is 50/1s; \
             try again in 320ms; waited 15s"
        );
        assert_eq!(
            limited.report().since(),
            SystemTime::UNIX_EPOCH + Duration::from_secs(85)
        );
        assert_eq!(
            limited.report().retry_at(),
            Some(SystemTime::UNIX_EPOCH + Duration::from_millis(100_320))
        );
    }

    #[test]
    fn a_part_of_a_millisecond_is_no_wait() {
        let waited = |micros| {
            let Limited::Local { report, .. } = limited() else {
                unreachable!("it is local")
            };
            let report = report.with_waited(Duration::from_micros(micros));
            let source = StoreError::Lost;
            Limited::Store { source, report }.to_string()
        };
        assert!(!waited(200).contains("waited"), "{}", waited(200));
        assert!(waited(1_900).ends_with("; waited 1ms"), "{}", waited(1_900));
    }

    #[test]
    fn stacked_layers_stay_flat() {
        let inner: BoxError = Box::new(Error::Limited(limited()));
        assert!(matches!(Error::inner(inner), Error::Limited(_)));
        assert!(matches!(Error::inner("broken pipe"), Error::Inner(_)));
    }

    #[test]
    fn limited_is_found_through_wrappers_without_their_value() {
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
