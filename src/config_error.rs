//! The errors of settings.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::quota::{Limit, Quota};

/// Why a layer, quota or store cannot be built, and what to change.
///
/// Its `Display` is one line that names the setting, its value, what is allowed, and the remedy.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError(pub(crate) Problem);

impl ConfigError {
    /// A `setting` has a `value` that is not `allowed`.
    pub(crate) fn out_of_range(
        setting: &'static str,
        value: impl Into<String>,
        allowed: &'static str,
    ) -> Self {
        ConfigError(Problem::OutOfRange {
            setting,
            value: value.into(),
            allowed,
        })
    }

    /// Returns the error of a `setting` with a `value` that is not `allowed`, unless `is_allowed`.
    pub(crate) fn unless(
        is_allowed: bool,
        setting: &'static str,
        value: impl fmt::Display,
        allowed: &'static str,
    ) -> Result<(), Self> {
        if is_allowed {
            return Ok(());
        }
        Err(ConfigError::out_of_range(
            setting,
            value.to_string(),
            allowed,
        ))
    }
}

/// What is wrong with a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// A count, capacity or burst of zero allows nothing.
    ZeroCount {
        /// The limit.
        limit: Limit,
    },
    /// A count above 1,000,000,000.
    CountTooLarge {
        /// The limit.
        limit: Limit,
    },
    /// A window shorter than 1 ms or longer than 366 days.
    WindowOutOfRange {
        /// The limit.
        limit: Limit,
    },
    /// A bucket that takes longer to fill than 366 days.
    RefillTooSlow {
        /// The limit.
        limit: Limit,
        /// How long the empty bucket takes to fill.
        full_after: Duration,
    },
    /// The burst or spacing is so fine that the
    /// [margin](crate::guide::choosing_a_quota#the-margin) of each permit costs more of the rate
    /// than [`max_rate_loss`](crate::RateLimitBuilder::max_rate_loss) allows, 10 % by default.
    ///
    /// Lower `transit_slack`, allow a burst, or accept the loss.
    TooFine {
        /// The limit.
        limit: Limit,
        /// How much of the rate is lost with permits that are valid for 2 ms, in per cent.
        lost_percent: u32,
        /// The transit slack, which is a part of the margin.
        transit_slack: Duration,
        /// The smallest burst that loses nothing.
        smallest_burst: u32,
    },
    /// [`boundary_guard`](crate::RateLimitBuilder::boundary_guard) on both sides of each boundary
    /// leaves less than half of a fixed window.
    WindowTooShortForGuard {
        /// The limit.
        limit: Limit,
        /// How long the guard is, on each side.
        boundary_guard: Duration,
    },
    /// A [share](crate::RateLimitBuilder::share) of a limit is less than one unit.
    ///
    /// Use larger shares, a longer window, or a burst.
    Undividable {
        /// The limit.
        limit: Limit,
        /// The class whose share is too small.
        class: &'static str,
    },
    /// More than eight limits on one key. With [shares](crate::RateLimitBuilder::share)
    /// one limit less.
    TooManyLimits,
    /// `burst` was called on a bucket or on `every`, whose burst is the capacity.
    BurstOfBucket,
    /// `burst` was called on a limit of calls in flight, which has no rate.
    BurstOfInFlight,
    /// [`Quota::of`] was called on a limit of calls in flight, which counts calls.
    UnitOfInFlight,
    /// The name of a [unit](Quota::of) is empty, too long, or has other characters than letters,
    /// digits, `_`, `-` and `.`.
    UnitName {
        /// The name.
        unit: String,
    },
    /// The process has read too many names of units from texts.
    TooManyUnits {
        /// The name of the next one.
        unit: String,
    },
    /// The text is not a quota.
    Unparsable {
        /// The text.
        text: String,
    },
    /// The pattern of a route cannot be used.
    Route {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The URL of Redis is invalid, or needs a feature that is off. The error never contains the
    /// URL, because a URL may contain a password.
    #[cfg(feature = "redis")]
    RedisUrl {
        /// What is wrong with the URL.
        reason: String,
    },
    /// The URL is `rediss://`, and rustls has no provider of cryptography. The process has
    /// installed none, and the crate features of rustls name none or several.
    #[cfg(feature = "redis-tls-rustls")]
    NoTlsProvider,
    /// A store is set to share the pace, and this pace cannot be shared.
    PaceNotShared,
    /// A setting is outside of its range.
    OutOfRange {
        /// The name of the setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
        allowed: &'static str,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::ZeroCount { limit } => {
                write!(
                    f,
                    "quota {limit}: a count of 0 allows nothing; the least is 1"
                )
            }
            Problem::CountTooLarge { limit } => {
                write!(
                    f,
                    "quota {limit}: the largest count is {}",
                    Quota::LARGEST_COUNT
                )
            }
            Problem::WindowOutOfRange { limit } => {
                write!(
                    f,
                    "quota {limit}: a window lasts from {:?} to 366 days",
                    Quota::SHORTEST_WINDOW
                )
            }
            Problem::RefillTooSlow { limit, full_after } => {
                let days = full_after.as_secs() / 86_400;
                write!(
                    f,
                    "quota {limit}: an empty bucket takes {days} days to fill; the longest is 366 days"
                )
            }
            Problem::TooFine {
                limit,
                lost_percent,
                transit_slack,
                smallest_burst,
            } => write!(
                f,
                "quota {limit}: spacing this fine loses {lost_percent} % of the rate, because each permit is valid for \
                 2 ms and transit_slack is {transit_slack:?}: lower transit_slack; or accept the loss with \
                 .max_rate_loss({lost_percent}); or allow a burst of {smallest_burst}, which loses nothing: \
                 .burst({smallest_burst}) after a window, else Quota::bucket({smallest_burst}).refill({}, {:?})",
                limit.count(),
                limit.window(),
            ),
            Problem::WindowTooShortForGuard {
                limit,
                boundary_guard,
            } => write!(
                f,
                "quota {limit}: a boundary_guard of {boundary_guard:?} on both sides leaves less than half of the \
                 window; lower boundary_guard, or use a sliding window, which needs none"
            ),
            Problem::Undividable { limit, class } => write!(
                f,
                "quota {limit}: the share of {class:?} is less than one unit: give the class a larger share, or write the \
                 quota with a longer window or a burst, such as Quota::bucket(10).refill(1, d) instead of \
                 Quota::every(d); all classes without a share have the rest together"
            ),
            Problem::TooManyLimits => {
                write!(
                    f,
                    "a quota holds at most {} limits, bursts included",
                    Quota::MOST_LIMITS
                )
            }
            Problem::BurstOfBucket => write!(
                f,
                "burst() is for windows; the burst of every() or bucket() is its capacity: for every(d) write \
                 Quota::bucket(burst).refill(1, d)"
            ),
            Problem::BurstOfInFlight => write!(
                f,
                "burst() is for rates, and calls in flight have none: write in_flight(n).and(per_second(50).burst(10))"
            ),
            Problem::UnitOfInFlight => write!(
                f,
                "of() is for rates, and calls in flight are calls: write in_flight(n).and(per_minute(200_000).of(\"tokens\"))"
            ),
            Problem::UnitName { unit } => write!(
                f,
                "unit {unit:?}: a unit is a letter, and then letters, digits, _, - and ., at most 32, such as tokens"
            ),
            Problem::TooManyUnits { unit } => write!(
                f,
                "unit {unit:?}: this process has read 256 other names of units from texts, and keeps no more; \
                 name a unit after what it counts, such as tokens, not after a customer"
            ),
            Problem::Unparsable { text } => write!(
                f,
                "{text:?} is not a quota; write count/window, such as 100/60s, 5/second or 25/5s, 300/60s, a unit after \
                 its count, such as 200000 tokens/min, or 8 in flight"
            ),
            Problem::Route { pattern, problem } => write!(f, "route {pattern:?}: {problem}"),
            #[cfg(feature = "redis")]
            Problem::RedisUrl { reason } => write!(
                f,
                "the URL of Redis: {reason}; write redis://[user:password@]host[:port]/[database], such as \
                 redis://127.0.0.1:6379/, and rediss:// for TLS"
            ),
            #[cfg(feature = "redis-tls-rustls")]
            Problem::NoTlsProvider => write!(
                f,
                "rediss:// needs a TLS provider, and this process has none or a choice of two: write \
                 rustls::crypto::ring::default_provider().install_default() at the start of main, or aws_lc_rs instead \
                 of ring, and add rustls with that feature to Cargo.toml"
            ),
            Problem::PaceNotShared => write!(
                f,
                "this pace cannot be shared through a store: leave the store out, take pace::Fair, or \
                 implement Pace::share"
            ),
            Problem::OutOfRange {
                setting,
                value,
                allowed,
            } => {
                write!(f, "{setting} is {value}, but must be {allowed}")
            }
        }
    }
}

impl StdError for ConfigError {}
