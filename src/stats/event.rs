//! What happens to a gate.

use std::fmt;
use std::time::Duration;

use http::StatusCode;

use super::drain::Drained;
use super::values::Cause;
use crate::error::{Limited, StoreError};
use crate::quota::{Limit, Quota};

/// A closure that is called with each event.
pub(crate) type Handler = dyn Fn(&Event<'_>) + Send + Sync;

/// What happens to a limiter or throttle, for
/// [`on_event`](crate::RateLimitBuilder::on_event). A key appears by its
/// [label](crate::Key#what-logs-show-of-a-key).
///
/// Its `Display` is one line for a log.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A key is on hold for `left`.
    #[non_exhaustive]
    Held {
        /// The label of the key.
        key: &'a str,
        /// How long the key stays on hold.
        left: Duration,
        /// Why the key is on hold.
        cause: Cause,
    },
    /// The hold of a key was ended by a call of `release` in this process.
    #[non_exhaustive]
    Released {
        /// The label of the key.
        key: &'a str,
    },
    /// A request was refused, or failed because the store did. At most one such event a second is
    /// reported for each key.
    #[non_exhaustive]
    Refused {
        /// The error of the request.
        limited: &'a Limited,
        /// How many refusals of this key were not reported since the last one that was.
        unreported: u64,
    },
    /// The upstream refused a request. At most one such event a second is reported for each key.
    #[non_exhaustive]
    UpstreamLimited {
        /// The label of the key.
        key: &'a str,
        /// The status of the response.
        status: StatusCode,
        /// The time that the response names.
        retry_after: Option<Duration>,
        /// How many such refusals of this key were not reported since the last one that was.
        unreported: u64,
    },
    /// The store failed, and a request left uncounted.
    #[non_exhaustive]
    Uncounted {
        /// The label of the key.
        key: &'a str,
        /// The error of the store.
        error: &'a StoreError,
    },
    /// The store of a shared pace cannot be reached. This process goes on at its part of the pace.
    #[non_exhaustive]
    Alone {
        /// The label of the key.
        key: &'a str,
        /// The error of the store.
        error: &'a StoreError,
    },
    /// The store of a shared pace answers again.
    #[non_exhaustive]
    Together {
        /// The label of the key.
        key: &'a str,
    },
    /// Another process limits the key by another quota.
    #[non_exhaustive]
    ForeignLimit {
        /// The label of the key.
        key: &'a str,
        /// A limit that this process does not have.
        limit: Limit,
    },
    /// A quota was [set](crate::Limiter::set_quota) for a key, in this process or in another one. It
    /// applies from now on.
    #[non_exhaustive]
    QuotaSet {
        /// The label of the key.
        key: &'a str,
        /// The quota.
        quota: &'a Quota,
    },
    /// The quota that was set for a key was [unset](crate::Limiter::unset_quota), in this process or in
    /// another one.
    #[non_exhaustive]
    QuotaUnset {
        /// The label of the key.
        key: &'a str,
    },
    /// A [ban guard](crate::Guard) stops requests, because too many answers were bad.
    #[non_exhaustive]
    GuardTripped {
        /// The label of the key whose request had the last bad answer.
        key: &'a str,
        /// How many bad answers are allowed.
        quota: &'a Quota,
        /// How long the stop lasts.
        stop: Duration,
        /// How often in a row the guard has tripped: 1 for the first stop.
        trip: u32,
    },
    /// A class of requests has no [share](crate::RateLimitBuilder::share), so they count among all others.
    /// The name may be mistyped. Reported once for each of the first 16 such classes.
    #[non_exhaustive]
    UnknownClass {
        /// The class. At most 64 bytes of it are shown, and control characters are `?`.
        class: &'a str,
    },
    /// Classes have [shares](crate::RateLimitBuilder::share), and none of the first 100 requests of the layer
    /// has had a class. Reported once, only without a [class function](crate::RateLimitBuilder::class).
    NoClass,
    /// One request was sent many times, by retries outside of the layer that [count](crate::service::Attempts) their
    /// attempts. Layers of retries multiply. Reported at 5 attempts of a request, 10, 20 and so on.
    #[non_exhaustive]
    SentAgain {
        /// The label of the key.
        key: &'a str,
        /// How often the request was sent.
        attempts: u32,
    },
    /// Each request takes two permits: one that the program acquires by hand, and one in a layer of the same limiter.
    /// Leave out the one by hand, or send the request without the layer. Reported once, after 20 such requests in a row
    /// that found no permit at hand.
    #[non_exhaustive]
    CountedTwice {
        /// The label of the key.
        key: &'a str,
    },
    /// The units of a cost are not those of the limits: a missing one counts as 0, and an unknown one is ignored. The name
    /// may be mistyped. Reported once.
    #[non_exhaustive]
    UnitsDiffer {
        /// A unit that is limited, and that the cost does not state.
        missing: Option<&'a str>,
        /// A unit that the cost states, and that is not limited.
        unknown: Option<&'a str>,
    },
    /// The limiter or throttle was drained.
    #[non_exhaustive]
    Drained {
        /// What became of the requests that waited.
        drained: &'a Drained,
    },
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Held { key, left, cause } => {
                write!(f, "key {key} on hold for {left:?} ({})", cause.name())
            }
            Event::Released { key } => write!(f, "hold of key {key} ended"),
            Event::Refused {
                limited,
                unreported: 0,
            } => limited.fmt(f),
            Event::Refused {
                limited,
                unreported,
            } => write!(f, "{limited}; {unreported} more since the last report"),
            Event::UpstreamLimited {
                key,
                status,
                retry_after,
                unreported,
            } => {
                write!(f, "request of key {key} refused by the upstream: {status}")?;
                if let Some(wait) = retry_after {
                    write!(f, ", try again in {wait:?}")?;
                }
                match unreported {
                    0 => Ok(()),
                    _ => write!(f, "; {unreported} more since the last report"),
                }
            }
            Event::Uncounted { key, error } => {
                write!(f, "request of key {key} sent uncounted: {error}")
            }
            Event::Alone { key, error } => {
                write!(f, "pace of key {key} not shared: {error}")
            }
            Event::Together { key } => write!(f, "pace of key {key} shared again"),
            Event::QuotaSet { key, quota } => write!(f, "quota of key {key} set to {quota}"),
            Event::QuotaUnset { key } => write!(f, "set quota of key {key} ended"),
            Event::GuardTripped {
                key,
                quota,
                stop,
                trip,
            } => write!(
                f,
                "requests of key {key} stopped for {stop:?} (stop {trip}): more bad answers than {quota}"
            ),
            Event::UnknownClass { class } => write!(
                f,
                "class {class:?} has no share, so its requests count among all others"
            ),
            Event::NoClass => f.write_str(
                "classes have shares, but no request has a class: set class(..) on the builder, or put a Class \
                 into the extensions",
            ),
            Event::SentAgain { key, attempts } => {
                write!(f, "{attempts} attempts for 1 request of key {key}")
            }
            Event::CountedTwice { key } => write!(
                f,
                "each request of key {key} takes two permits: one by hand, and one in the layer"
            ),
            Event::UnitsDiffer { missing, unknown } => {
                f.write_str("the units of a cost are not those of the limits:")?;
                if let Some(unit) = missing {
                    write!(f, " {unit} is missing, and counts as 0;")?;
                }
                if let Some(unit) = unknown {
                    write!(f, " {unit} is unknown, and is ignored;")?;
                }
                f.write_str(" state each unit by the name that the quota has")
            }
            Event::Drained { drained } => write!(f, "drained: {drained}"),
            Event::ForeignLimit { key, limit } => {
                write!(f, "another process limits key {key} by {limit}")
            }
        }
    }
}
