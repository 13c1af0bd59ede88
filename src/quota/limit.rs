//! One limit of a quota, and its checks.

use std::fmt;
use std::time::Duration;

use super::{LIFE, Quota, Slacks};
use crate::config_error::ConfigError;
use crate::tuning::LONGEST_LIFE;

/// One limit of a [`Quota`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// At most `count` units in any interval of the length `window`, wherever it starts.
    #[non_exhaustive]
    Sliding {
        /// The number of units.
        count: u32,
        /// The length of the interval.
        window: Duration,
    },
    /// At most `capacity` units back to back. `count` units are refilled in each `window`, evenly.
    #[non_exhaustive]
    Bucket {
        /// The number of units that may be sent back to back.
        capacity: u32,
        /// The number of units that are refilled every `window`.
        count: u32,
        /// The time in which `count` units are refilled.
        window: Duration,
    },
    /// At most `count` units in each window. The windows are aligned to the Unix epoch.
    #[non_exhaustive]
    Fixed {
        /// The number of units.
        count: u32,
        /// The length of the window.
        window: Duration,
    },
    /// At most `count` calls at the same time.
    #[non_exhaustive]
    InFlight {
        /// The number of calls.
        count: u32,
    },
}

impl Limit {
    /// Makes a limit of `count` units in any interval of the length `window`.
    #[cfg(feature = "unstable-store")]
    #[cfg_attr(docsrs, doc(cfg(feature = "unstable-store")))]
    pub const fn sliding(count: u32, window: Duration) -> Self {
        Limit::Sliding { count, window }
    }

    /// Makes a limit of `capacity` units back to back, of which `count` are refilled in each
    /// `window`.
    #[cfg(feature = "unstable-store")]
    #[cfg_attr(docsrs, doc(cfg(feature = "unstable-store")))]
    pub const fn bucket(capacity: u32, count: u32, window: Duration) -> Self {
        Limit::Bucket {
            capacity,
            count,
            window,
        }
    }

    /// Makes the limit of [`Quota::sliding_counter`]: a bucket whose capacity and refill add up to
    /// `count` in each `window`.
    ///
    /// A bucket of b that gains r in a window W passes at most b + r t / W in any time t. Of two
    /// windows, let the second be a share f old. Together they have at most b + r (1 + f) units, and
    /// the second has at most b + r f. The estimate, (1 - f) x the first + the second, is largest if
    /// the second has as many as it can: (1 - f) r + b + r f = r + b.
    ///
    /// A large capacity leaves less to refill. A small one loses the margin of a permit at each
    /// slot: see `check_spacing`. The capacity with the shortest time between slots is chosen.
    pub(super) const fn sliding_counter(count: u32, window: Duration) -> Self {
        if count < 2 {
            // With a count of 1, the estimate allows the next request two windows later.
            return Limit::Bucket {
                capacity: count,
                count,
                window: window.saturating_mul(2),
            };
        }
        let nanos = window.as_nanos();
        let between = nanos / count as u128;
        let life = between / LIVES_BETWEEN_SLOTS as u128;
        let life = clamp(life, LIFE.as_nanos(), LONGEST_LIFE.as_nanos());
        let margin = life + Slacks::TRANSIT.as_nanos();
        // From here on, slots are no further apart than the refill allows.
        let enough = margin * count as u128 / (nanos + 1) + 2;
        let (mut best, mut shortest) = (1, u128::MAX);
        let mut capacity = 1;
        while capacity < count as u128 && capacity <= enough {
            let spacing = nanos / (count as u128 - capacity);
            let spacing = max(
                spacing,
                (margin + 2 * spacing).saturating_sub(capacity * spacing),
            );
            if spacing < shortest {
                (best, shortest) = (capacity, spacing);
            }
            // The best one is near the last one, if it is not the first.
            capacity = max(capacity + 1, enough.saturating_sub(2));
        }
        let capacity = best as u32;
        Limit::Bucket {
            capacity,
            count: count - capacity,
            window,
        }
    }

    /// Makes a limit of `count` units in each window that is aligned to the Unix epoch.
    #[cfg(feature = "unstable-store")]
    #[cfg_attr(docsrs, doc(cfg(feature = "unstable-store")))]
    pub const fn fixed(count: u32, window: Duration) -> Self {
        Limit::Fixed { count, window }
    }

    /// Makes a limit of `count` calls at the same time.
    #[cfg(feature = "unstable-store")]
    #[cfg_attr(docsrs, doc(cfg(feature = "unstable-store")))]
    pub const fn in_flight(count: u32) -> Self {
        Limit::InFlight { count }
    }

    /// Returns the most units that one request can cost under this limit.
    pub(crate) fn largest_cost(&self) -> u32 {
        match *self {
            Limit::Sliding { count, .. } | Limit::Fixed { count, .. } => count,
            Limit::Bucket { capacity, .. } => capacity,
            Limit::InFlight { .. } => u32::MAX,
        }
    }

    /// Returns how many units the limit allows in its [`window`](Limit::window) in the long run, or
    /// how many calls at the same time.
    pub fn count(&self) -> u32 {
        match *self {
            Limit::Sliding { count, .. }
            | Limit::Fixed { count, .. }
            | Limit::Bucket { count, .. }
            | Limit::InFlight { count } => count,
        }
    }

    /// Returns the length of the window. Zero for calls in flight, which have none.
    pub fn window(&self) -> Duration {
        match *self {
            Limit::Sliding { window, .. }
            | Limit::Fixed { window, .. }
            | Limit::Bucket { window, .. } => window,
            Limit::InFlight { .. } => Duration::ZERO,
        }
    }

    /// Returns the same limit for so many units: its count, or the capacity of a bucket. Calls in flight stay as they are.
    pub(super) fn with_units(self, units: u32) -> Limit {
        match self {
            Limit::Sliding { window, .. } => Limit::Sliding {
                count: units,
                window,
            },
            Limit::Fixed { window, .. } => Limit::Fixed {
                count: units,
                window,
            },
            Limit::Bucket { count, window, .. } => Limit::Bucket {
                capacity: units,
                count,
                window,
            },
            Limit::InFlight { .. } => self,
        }
    }

    /// Returns the limit of which this one and `other` are parts. `None` for calls in flight, which have no
    /// parts, and for limits of two kinds.
    pub(crate) fn plus(self, other: Limit) -> Option<Limit> {
        let units = self.largest_cost().saturating_add(other.largest_cost());
        match (self, other) {
            (Limit::Sliding { .. }, Limit::Sliding { .. })
            | (Limit::Fixed { .. }, Limit::Fixed { .. }) => Some(self.with_units(units)),
            (
                Limit::Bucket { count, window, .. },
                Limit::Bucket {
                    count: more,
                    window: other,
                    ..
                },
            ) => {
                let of_both =
                    u128::from(count) * other.as_nanos() + u128::from(more) * window.as_nanos();
                let refill = of_both / other.as_nanos().max(1);
                Some(Limit::Bucket {
                    capacity: units,
                    count: u32::try_from(refill).unwrap_or(u32::MAX),
                    window,
                })
            }
            _ => None,
        }
    }

    /// Returns `part` of `of` parts of the limit. A result below one unit becomes one unit in a
    /// longer time.
    pub(super) fn part(self, part: u64, of: u64) -> Limit {
        let most = self.largest_cost();
        let units = u128::from(most) * u128::from(part) / u128::from(of);
        let units = u32::try_from(units).unwrap_or(most).min(most);
        match self {
            Limit::Sliding { .. } | Limit::Fixed { .. } if units > 0 => self.with_units(units),
            Limit::Sliding { count, window } | Limit::Fixed { count, window } => {
                // Each unit gets the time until its turn in the whole limit.
                let of_one = span(window.as_nanos() / u128::from(count.max(1)));
                Limit::Sliding {
                    count: 1,
                    window: lengthened(of_one, part, of).max(window),
                }
            }
            Limit::Bucket { count, window, .. } => Limit::Bucket {
                capacity: units.max(1),
                count,
                window: lengthened(window, part, of),
            },
            limit @ Limit::InFlight { .. } => limit,
        }
    }

    /// Returns for how long use counts: the window, or the time in which a bucket fills if that is longer.
    pub(super) fn memory(&self) -> Duration {
        match *self {
            Limit::Bucket {
                capacity,
                count,
                window,
            } if count > 0 => window.max(window.saturating_mul(capacity) / count),
            _ => self.window(),
        }
    }

    /// Returns the time between two slots of a limit that loses the margin, if they are spread evenly. Zero for others.
    pub(super) fn between_slots(&self) -> Duration {
        match *self {
            Limit::Sliding { count, window }
            | Limit::Bucket {
                capacity: 1,
                count,
                window,
            } => window / count,
            Limit::Bucket { .. } | Limit::Fixed { .. } | Limit::InFlight { .. } => Duration::ZERO,
        }
    }

    /// Checks this limit. Returns how long a permit lives under it.
    pub(super) fn check(&self, slacks: Slacks) -> Result<Duration, ConfigError> {
        let limit = *self;
        if self.count() == 0 || self.largest_cost() == 0 {
            return Err(misuse(limit, "a count of 0 allows nothing; the least is 1"));
        }
        let largest = match *self {
            Limit::Bucket {
                capacity, count, ..
            } => capacity.max(count),
            _ => self.count(),
        };
        if largest > Quota::LARGEST_COUNT {
            let most = Quota::LARGEST_COUNT;
            return Err(misuse(limit, format_args!("the largest count is {most}")));
        }
        if let Limit::InFlight { .. } = limit {
            return Ok(LIFE);
        }
        if !(Quota::SHORTEST_WINDOW..=Quota::LONGEST_WINDOW).contains(&self.window()) {
            let shortest = Quota::SHORTEST_WINDOW;
            return Err(misuse(
                limit,
                format_args!("a window lasts from {shortest:?} to 366 days"),
            ));
        }
        let life = (self.window() / self.count() / LIVES_BETWEEN_SLOTS).clamp(LIFE, LONGEST_LIFE);
        match *self {
            Limit::Sliding { .. } | Limit::InFlight { .. } => Ok(life),
            Limit::Bucket { .. } => {
                // A longer window was refused above, so this is the time to fill it.
                let full_after = self.memory();
                if full_after > Quota::LONGEST_WINDOW {
                    let days = full_after.as_secs() / 86_400;
                    return Err(misuse(
                        limit,
                        format_args!(
                            "an empty bucket takes {days} days to fill; the longest is 366 days"
                        ),
                    ));
                }
                check_spacing(limit, life, slacks)
            }
            Limit::Fixed { window, .. } => {
                let Slacks {
                    transit, boundary, ..
                } = slacks;
                let lost = boundary.saturating_mul(2);
                let margin = life.saturating_add(transit);
                if lost > window / 2 {
                    return Err(misuse(
                        limit,
                        format_args!(
                            "a boundary_guard of {boundary:?} on both sides leaves less than half of the window; lower \
                             boundary_guard, or use a sliding window, which needs none"
                        ),
                    ));
                }
                if lost.saturating_add(margin.saturating_mul(2)) > window {
                    return Err(misuse(
                        limit,
                        format_args!(
                            "the window is too short for a boundary_guard of {boundary:?} and the margin of a permit, \
                             {margin:?}, on both sides; lower boundary_guard and transit_slack, or use a sliding window"
                        ),
                    ));
                }
                Ok(life)
            }
        }
    }
}

/// Returns a window of which `part` of `of` are `window`, at most the longest one.
fn lengthened(window: Duration, part: u64, of: u64) -> Duration {
    let nanos = (window.as_nanos() * u128::from(of)).div_ceil(u128::from(part));
    span(nanos).clamp(window, Quota::LONGEST_WINDOW)
}

/// Returns a span of nanoseconds, cut to 584 years.
fn span(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// `Ord::max` of two numbers, for constants.
const fn max(a: u128, b: u128) -> u128 {
    if a > b { a } else { b }
}

/// `Ord::clamp`, for constants.
const fn clamp(value: u128, least: u128, most: u128) -> u128 {
    let value = max(value, least);
    if value < most { value } else { most }
}

/// A permit may live for a fiftieth of the time between two slots: if slots are far apart, the loss
/// of one costs much. Tried: a hundredth, so that a caller at exactly the rate loses less. Ten processes on a busy machine then
/// used 10 to 30 % of one per second instead of 70 to 80 %.
const LIVES_BETWEEN_SLOTS: u32 = 50;

/// The shortest life of a permit under a fine spacing: timers are about a millisecond late.
const SHORTEST_LIFE: Duration = Duration::from_millis(2);

/// Computes how long a permit may live under a fine spacing, or the smallest burst that loses
/// nothing.
///
/// A bucket of b with one unit each T leaves max(T, margin - (b - 2) T) between grants when it is
/// empty. The margin is the life of a permit and the transit slack. If T is below the margin, the
/// rate collapses. Permits then live shorter, until the loss is within the allowed one. If that is
/// not enough, the error names the smallest burst that loses nothing.
fn check_spacing(limit: Limit, life: Duration, slacks: Slacks) -> Result<Duration, ConfigError> {
    let Limit::Bucket {
        capacity,
        count,
        window,
    } = limit
    else {
        return Ok(life);
    };
    // All values are in nanoseconds times `count`, so T is `window`.
    let (capacity, count, period) = (u128::from(capacity), u128::from(count), window.as_nanos());
    let scaled = |margin: Duration| margin.as_nanos() * count;
    let most_spacing = period * 100 / u128::from(100 - slacks.rate_loss.min(99));
    let most_margin = (most_spacing + capacity * period).saturating_sub(2 * period);
    let most_life = span(most_margin.saturating_sub(scaled(slacks.transit)) / count);
    if most_life >= SHORTEST_LIFE {
        return Ok(life.min(most_life));
    }
    let margin = scaled(SHORTEST_LIFE.saturating_add(slacks.transit));
    let spacing = (margin + 2 * period)
        .saturating_sub(capacity * period)
        .max(period);
    let smallest_burst = scaled(LIFE.saturating_add(slacks.transit)).div_ceil(period) + 1;
    let smallest = u32::try_from(smallest_burst).unwrap_or(u32::MAX);
    let lost = 100 - period * 100 / spacing;
    let transit = slacks.transit;
    let (count, window) = (limit.count(), limit.window());
    let accept = match lost <= Slacks::LARGEST_RATE_LOSS.into() {
        true => format!("or accept the loss with .max_rate_loss({lost}); "),
        false => String::new(),
    };
    Err(misuse(
        limit,
        format_args!(
            "spacing this fine loses {lost} % of the rate, because each permit is valid for 2 ms and transit_slack is \
             {transit:?}: lower transit_slack; {accept}or allow a burst of {smallest}, which loses nothing: \
             .burst({smallest}) after a window, else Quota::bucket({smallest}).refill({count}, {window:?})"
        ),
    ))
}

fn misuse(limit: Limit, problem: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!("quota {limit}: {problem}"))
}

/// Writes a limit such as `50/1s`, `10 at once, then 50/1s`, `50 per full 1s`.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counting(None).fmt(f)
    }
}

impl Limit {
    /// Returns what shows the limit with its unit, such as `200000 tokens/60s`.
    pub(crate) fn counting(self, unit: Option<&'static str>) -> Counting {
        Counting(self, unit)
    }
}

/// A limit and what it counts. `None` for requests.
pub(crate) struct Counting(Limit, Option<&'static str>);

impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Counting(limit, unit) = self;
        let (space, unit) = unit.map_or(("", ""), |unit| (" ", unit));
        match limit {
            Limit::Sliding { count, window } => write!(f, "{count}{space}{unit}/{window:?}"),
            Limit::Bucket {
                capacity: 1,
                count: 1,
                window,
            } if unit.is_empty() => write!(f, "one every {window:?}"),
            Limit::Bucket {
                capacity,
                count,
                window,
            } => {
                write!(
                    f,
                    "{capacity}{space}{unit} at once, then {count}/{window:?}"
                )
            }
            Limit::Fixed { count, window } => {
                write!(f, "{count}{space}{unit} per full {window:?}")
            }
            Limit::InFlight { count } => write!(f, "{count} in flight"),
        }
    }
}
