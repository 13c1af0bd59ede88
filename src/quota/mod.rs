//! How much is allowed: a [`Quota`] is one or more [`Limit`]s on one key.

mod division;
mod limit;
mod parse;
mod slacks;
#[cfg(test)]
mod tests;
mod unit;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::iter;
use std::time::Duration;

use crate::config_error::ConfigError;
use crate::cost::{Cost, is_same};
pub(crate) use division::{ClassShare, Division, percent_of};
pub use limit::Limit;
pub(crate) use slacks::{LIFE, Slacks};

/// What is allowed: one or more [`Limit`]s on one key. A request takes units of all of them or of
/// none, and waits until all of them allow it.
///
/// ```
/// use std::time::Duration;
/// use tollgate::Quota;
///
/// Quota::per_second(50);                               // at most 50 in any second
/// Quota::per_second(50).burst(10);                     // and at most 10 back to back
/// Quota::every(Duration::from_secs(2));                // at least 2 s between two requests
/// Quota::bucket(40).refill(2, Duration::from_secs(1)); // a token bucket of the upstream
/// Quota::fixed(5000, Duration::from_secs(3600));       // a count for each full hour
/// Quota::sliding_counter(100, Duration::from_secs(60)); // an estimate, as Cloudflare makes it
/// Quota::in_flight(8);                                 // at most 8 at the same time
/// Quota::per_second(50).and(Quota::in_flight(8));      // and at most 50 in any second
/// Quota::per_minute(500).and(Quota::per_minute(200_000).of("tokens")); // requests and tokens
///
/// let from_config: Quota = "25/5s, 300/60s".parse()?;
/// # assert_eq!(from_config, Quota::new(25, Duration::from_secs(5)).and(Quota::per_minute(300)));
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
///
/// [`build`](crate::RateLimitBuilder::build) checks a quota. Its error names the limit, and what to
/// change. The page [`guide::choosing_a_quota`](crate::guide::choosing_a_quota) says which quota
/// fits which server.
///
/// **A long window is used up in its first seconds** under load: of 5000 per hour, all may leave in
/// five seconds, and then requests are refused for the rest of the hour. To spread the requests,
/// add [`burst`](Quota::burst).
///
/// # Text form
///
/// `parse` reads sliding windows as `count/window`, and calls in flight as `8 in flight`, separated
/// by commas: `100/60s`, `5/second`, `25/5s, 300/min, 8 in flight`. Times are in `ms`, `s`, `sec`,
/// `second`, `m`, `min`, `minute`, `h`, `hour`, `d`, `day`, and their plurals. What a limit
/// [counts](Quota::of) stands after its count: `500/min, 200000 tokens/min`. Bursts, buckets and
/// fixed windows have no text form that `parse` reads. In one process, `parse` reads at most 256
/// different names of units, and keeps them: all others are errors.
#[derive(Clone, Copy)]
pub struct Quota {
    /// The first `len` are the rate limits. The others are unused.
    limits: [Limit; Quota::MOST_LIMITS],
    /// What each limit counts. `None` for requests.
    units: [Option<&'static str>; Quota::MOST_LIMITS],
    len: usize,
    in_flight: Option<u32>,
    /// The error that a constructor found and `check` reports.
    misuse: Option<&'static str>,
}

impl Quota {
    /// The most rate limits that one quota may have. A burst is one of them.
    pub(crate) const MOST_LIMITS: usize = 8;

    /// The largest count, capacity or burst that a limit may have.
    pub(crate) const LARGEST_COUNT: u32 = 1_000_000_000;

    /// The shortest window that a limit may have: 1 ms.
    pub(crate) const SHORTEST_WINDOW: Duration = Duration::from_millis(1);

    /// The longest window that a limit may have: 366 days.
    pub(crate) const LONGEST_WINDOW: Duration = Duration::from_secs(366 * 86_400);

    const fn single(limit: Limit) -> Self {
        Quota {
            limits: [limit; Quota::MOST_LIMITS],
            units: [None; Quota::MOST_LIMITS],
            len: 1,
            in_flight: None,
            misuse: None,
        }
    }

    /// Allows at most `count` units in any interval of the length `window`: a sliding window.
    ///
    /// It is the safe choice if the upstream counts each request once: each window of the upstream
    /// is such an interval, whenever it starts. Some upstreams estimate instead: see
    /// [`sliding_counter`](Quota::sliding_counter).
    pub const fn new(count: u32, window: Duration) -> Self {
        Quota::single(Limit::Sliding { count, window })
    }

    /// Allows at most `count` units in any second.
    pub const fn per_second(count: u32) -> Self {
        Quota::new(count, Duration::from_secs(1))
    }

    /// Allows at most `count` units in any minute.
    #[doc(alias = "requests per minute")]
    #[doc(alias = "rpm")]
    pub const fn per_minute(count: u32) -> Self {
        Quota::new(count, Duration::from_secs(60))
    }

    /// Allows at most `count` units in any hour.
    pub const fn per_hour(count: u32) -> Self {
        Quota::new(count, Duration::from_secs(3600))
    }

    /// Allows at most `count` units in any 24 hours.
    pub const fn per_day(count: u32) -> Self {
        Quota::new(count, Duration::from_secs(86_400))
    }

    /// Leaves at least `spacing` between two requests.
    ///
    /// The [margin](crate::guide::choosing_a_quota#the-margin) of a permit, 20 to 60 ms by default,
    /// is added to each `spacing`. So a `spacing` that is short against the margin loses much of
    /// its rate. If the loss would be more than 10 %, permits are valid for a shorter time, down to
    /// 2 ms. If the loss is still more than 10 %, `build` fails. Its error names the burst that
    /// would work, and the value of [`max_rate_loss`](crate::RateLimitBuilder::max_rate_loss) that
    /// would accept a loss of up to 50 %.
    pub const fn every(spacing: Duration) -> Self {
        Quota::single(Limit::Bucket {
            capacity: 1,
            count: 1,
            window: spacing,
        })
    }

    /// Makes a token bucket of `capacity` units, as servers that run GCRA have it. Call
    /// [`refill`](Bucket::refill) next.
    ///
    /// A full bucket does not grant its last units at once, because the upstream may see the first
    /// request late. It keeps back at least one unit, and as many as are refilled within the
    /// [margin](crate::guide::choosing_a_quota#the-margin) of a permit, 20 to 60 ms by default. It
    /// grants them one by one within about that time. A bucket of one unit grants it at once.
    pub const fn bucket(capacity: u32) -> Bucket {
        Bucket { capacity }
    }

    /// Stays within a sliding window counter of the upstream: a server that keeps one counter for
    /// each window, and estimates the use of the last `window` from two of them.
    ///
    /// ```text
    /// estimate = units of the last window x the share of it that is younger than a window
    ///          + units of this window
    /// ```
    ///
    /// Cloudflare, HAProxy, Kong, Upstash and others count like this. Such an estimate may exceed
    /// the true use, because it takes the units of the last window as evenly spread. So a server
    /// refuses requests of a client that keeps [`Quota::new`]. HAProxy refuses 19 % of them, for
    /// 100 per 2 s under load.
    ///
    /// This quota is a [bucket](Quota::bucket) with a small capacity, refilled with the rest of
    /// `count` in each window. It keeps each such estimate at or below `count`, wherever the
    /// windows begin. It uses 98 % of 100 per 2 s, 96 % of 50 per second, 92 % of 25 per second and
    /// 80 % of 10 per second. A longer window uses more: 99.6 % of 600 per minute. It grants no
    /// burst.
    ///
    /// A request may cost as much as the capacity, which is 1 or 2 for up to 50 units a second. For
    /// requests that cost more, make the bucket yourself. For example, `bucket(10).refill(90, window)`
    /// stays within a counter of 100.
    pub const fn sliding_counter(count: u32, window: Duration) -> Self {
        Quota::single(Limit::sliding_counter(count, window))
    }

    /// Allows at most `count` units in each window. The windows are aligned to the Unix epoch, as
    /// those of servers with one counter for each full second, minute or hour.
    ///
    /// No request is sent for [`boundary_guard`](crate::RateLimitBuilder::boundary_guard) before
    /// and after a boundary. If the windows of the upstream may be aligned in another way, use
    /// [`Quota::new`]: it is safe for every alignment.
    pub const fn fixed(count: u32, window: Duration) -> Self {
        Quota::single(Limit::Fixed { count, window })
    }

    /// Allows at most `count` calls at the same time, over all processes that share the store.
    ///
    /// A call is in flight from its permit to the head of its response, or until its future,
    /// [`Permit`](crate::Permit) or [`Sent`](crate::Sent) is dropped. With
    /// [`in_flight_until_body_end`](crate::RateLimitLayer::in_flight_until_body_end) it is in
    /// flight until the end of the body. Each call counts as one, whatever its cost. A call of cost
    /// 0 does not count.
    ///
    /// If the quota also limits rates, a request first waits for its in-flight slot, then for its
    /// slot under the rates.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::in_flight(2))?.limiter();
    /// let (one, two) = (limiter.acquire(Key::ALL).await?, limiter.acquire(Key::ALL).await?);
    /// assert_eq!(limiter.peek(Key::ALL).await?.free, 0);
    ///
    /// drop(one); // its call has ended
    /// assert_eq!(limiter.peek(Key::ALL).await?.free, 1);
    /// # drop(two);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "concurrency limit")]
    #[doc(alias = "semaphore")]
    pub const fn in_flight(count: u32) -> Self {
        let mut quota = Quota::single(Limit::InFlight { count });
        (quota.len, quota.in_flight) = (0, Some(count));
        quota
    }

    /// Adds a limit to the last one: at most `burst` units leave back to back, the others evenly
    /// spaced.
    ///
    /// Like a [`bucket`](Quota::bucket), it grants a little less than `burst` at once.
    ///
    /// Use it for large counts. If a thousand requests are sent at once, some of them are delayed
    /// on their way by more than `transit_slack`. `per_second(1000).burst(50)` sends the same
    /// number, one every millisecond.
    ///
    /// It applies to the last limit only. In `a.and(b).burst(10)` that is the last limit of `b`.
    #[must_use]
    pub const fn burst(mut self, burst: u32) -> Self {
        // Where there is no limit of rate, the first is the filler: in flight.
        let last = self.len.saturating_sub(1);
        match self.limits[last] {
            Limit::Sliding { count, window } | Limit::Fixed { count, window } => {
                let limit = Limit::Bucket {
                    capacity: burst,
                    count,
                    window,
                };
                self.push(limit, self.units[last]);
            }
            Limit::Bucket { .. } => {
                self.misuse = Some(
                    "burst() is for windows; the burst of every() or bucket() is its capacity: for every(d) write \
                     Quota::bucket(burst).refill(1, d)",
                );
            }
            Limit::InFlight { .. } => {
                self.misuse = Some(
                    "burst() is for rates, and calls in flight have none: write \
                     in_flight(n).and(per_second(50).burst(10))",
                );
            }
        }
        self
    }

    /// Counts units of another kind than requests, such as tokens or points. It applies to all limits
    /// of this quota that count requests so far.
    ///
    /// ```
    /// use tollgate::{Cost, Quota, RateLimitLayer};
    ///
    /// // At most 500 requests and 200 000 tokens in any minute.
    /// let quota = Quota::per_minute(500).and(Quota::per_minute(200_000).of("tokens"));
    /// assert_eq!(quota, "500/min, 200000 tokens/min".parse()?);
    ///
    /// let limit = RateLimitLayer::builder(quota)
    ///     .cost(|request| Cost::of("tokens", if request.path() == "/long" { 4000 } else { 500 }))
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    ///
    /// A request takes units of all limits or of none. How many it takes of each kind is its
    /// [`Cost`]. A limit does not see a request that costs nothing of its unit.
    ///
    /// The name of a unit is a letter, and then letters, digits, `_`, `-` and `.`, up to 32 in all.
    /// [`build`](crate::RateLimitBuilder::build) checks this.
    #[must_use]
    #[doc(alias = "tokens per minute")]
    #[doc(alias = "tpm")]
    pub const fn of(mut self, unit: &'static str) -> Self {
        if self.len == 0 {
            self.misuse = Some(
                "of() is for rates, and calls in flight are calls: write in_flight(n).and(per_minute(200_000).of(\"tokens\"))",
            );
        }
        let mut index = 0;
        while index < self.len {
            if self.units[index].is_none() && !is_same(unit, Cost::REQUESTS) {
                self.units[index] = Some(unit);
            }
            index += 1;
        }
        self
    }

    /// Returns a quota of the limits of both: a request leaves when all of them allow it, and takes
    /// units of all of them or of none.
    ///
    /// A quota has one limit of calls in flight. If both quotas have one, the smaller applies.
    #[must_use]
    pub const fn and(mut self, other: Quota) -> Self {
        let mut index = 0;
        while index < other.len {
            self.push(other.limits[index], other.units[index]);
            index += 1;
        }
        self.in_flight = match (self.in_flight, other.in_flight) {
            (Some(ours), Some(theirs)) if theirs > ours => Some(ours),
            (ours, None) => ours,
            (_, theirs) => theirs,
        };
        if self.misuse.is_none() {
            self.misuse = other.misuse;
        }
        self
    }

    const fn push(&mut self, limit: Limit, unit: Option<&'static str>) {
        if self.len == Quota::MOST_LIMITS {
            self.misuse = Some("a quota holds at most 8 limits, bursts included");
        } else {
            (self.limits[self.len], self.units[self.len]) = (limit, unit);
            self.len += 1;
        }
    }

    /// Returns the rate limits, in the order in which they were given.
    pub fn limits(&self) -> &[Limit] {
        &self.limits[..self.len]
    }

    /// Returns the units that the limits count, each once: [`Cost::REQUESTS`], or the names given to
    /// [`of`](Quota::of). Calls in flight have none.
    pub fn units(&self) -> impl Iterator<Item = &'static str> {
        let all = &self.units[..self.len];
        all.iter()
            .enumerate()
            .filter(|(index, unit)| !all[..*index].contains(unit))
            .map(|(_, unit)| unit.unwrap_or(Cost::REQUESTS))
    }

    /// Returns the quota of the limits that count `unit`, without calls in flight. `None` if there is
    /// no such limit.
    pub(crate) fn of_unit(&self, unit: &str) -> Option<Quota> {
        let rates = self.limits().iter().zip(self.units);
        let own = rates.filter(|(_, other)| other.unwrap_or(Cost::REQUESTS) == unit);
        own.map(|(limit, unit)| Quota {
            units: [unit; Quota::MOST_LIMITS],
            ..Quota::single(*limit)
        })
        .reduce(Quota::and)
    }

    /// Returns the quota of these rate limits, and of `in_flight` calls. `None` if they are no rate
    /// limits, or too many.
    pub(crate) fn of_limits(
        limits: impl IntoIterator<Item = Limit>,
        in_flight: Option<u32>,
    ) -> Option<Quota> {
        let rates = limits.into_iter().map(Quota::single);
        let rates = rates.reduce(Quota::and)?;
        let quota = Quota { in_flight, ..rates };
        (quota.misuse.is_none()).then_some(quota)
    }

    /// Returns one quota for each unit. The first one has the calls in flight. Requests come first, and
    /// then the other units as they were given.
    pub(crate) fn by_unit(&self) -> Vec<Quota> {
        let others = self.units().filter(|unit| *unit != Cost::REQUESTS);
        let units = iter::once(Cost::REQUESTS).chain(others);
        let mut quotas: Vec<Quota> = units.filter_map(|unit| self.of_unit(unit)).collect();
        let Some(most) = self.in_flight else {
            return quotas;
        };
        let in_flight = Quota::in_flight(most);
        match quotas.first_mut() {
            Some(first) if first.unit().is_none() => *first = first.and(in_flight),
            _ => quotas.insert(0, in_flight),
        }
        quotas
    }

    /// Returns what the limits of a quota of one unit count. `None` for requests.
    pub(crate) fn unit(&self) -> Option<&'static str> {
        self.units[0]
    }

    /// Returns whether all rate limits are sliding windows.
    pub(crate) fn is_of_sliding_windows(&self) -> bool {
        self.limits()
            .iter()
            .all(|limit| matches!(limit, Limit::Sliding { .. }))
    }

    /// Returns how many calls may be in flight at the same time. `None` if that is not limited.
    pub fn most_in_flight(&self) -> Option<u32> {
        self.in_flight
    }

    /// Returns the largest cost that a request may have: the smallest count, capacity or burst. If the
    /// limits count several units, this is the smallest of all of them.
    pub fn largest_cost(&self) -> u32 {
        self.limits()
            .iter()
            .map(Limit::largest_cost)
            .min()
            .unwrap_or(u32::MAX)
    }

    /// Returns the shortest window of the rate limits. Without rate limits:
    /// [`SHORTEST_WINDOW`](Quota::SHORTEST_WINDOW).
    pub(crate) fn shortest_window(&self) -> Duration {
        self.limits()
            .iter()
            .map(Limit::window)
            .min()
            .unwrap_or(Quota::SHORTEST_WINDOW)
    }

    /// Returns whether one of the limits follows the wall clock.
    pub(crate) fn has_fixed_window(&self) -> bool {
        self.limits()
            .iter()
            .any(|limit| matches!(limit, Limit::Fixed { .. }))
    }

    /// Returns for how long use counts: the longest window, or the longest time in which a bucket
    /// fills.
    pub(crate) fn longest_memory(&self) -> Duration {
        self.limits()
            .iter()
            .map(Limit::memory)
            .max()
            .unwrap_or(Quota::SHORTEST_WINDOW)
    }

    /// Returns the fraction `part / of` of the rate limits, for one of several processes.
    ///
    /// A result below one unit becomes one unit in a longer time.
    pub(crate) fn part(&self, part: u64, of: u64) -> Quota {
        let mut quota = Quota {
            in_flight: None,
            ..*self
        };
        for limit in &mut quota.limits {
            *limit = limit.part(part.clamp(1, of.max(1)), of.max(1));
        }
        quota
    }

    /// Returns the limit under which use counts for longest, alone, and how many of its units may
    /// be used within [its memory](Quota::longest_memory).
    pub(crate) fn longest(&self) -> (Quota, u64) {
        let longest = self.limits().iter().copied().max_by_key(Limit::memory);
        let longest = longest.map_or(*self, Quota::single);
        let units = match longest.limits[0] {
            Limit::Bucket {
                capacity,
                count,
                window,
            } => {
                let full = longest.longest_memory().as_nanos() * u128::from(count);
                let refilled = u64::try_from(full / window.as_nanos().max(1)).unwrap_or(u64::MAX);
                refilled.saturating_add(u64::from(capacity))
            }
            // Two windows may lie within the length of one.
            Limit::Fixed { count, .. } => 2 * u64::from(count),
            limit => u64::from(limit.count()),
        };
        (longest, units)
    }

    /// Checks everything at once. Returns how long a permit lives: a fiftieth of the time between
    /// two slots, from 10 to 50 ms; less if a spacing would lose more than it may.
    pub(crate) fn check(&self, slacks: Slacks) -> Result<Duration, ConfigError> {
        if let Some(misuse) = self.misuse {
            return Err(ConfigError::new(misuse));
        }
        if let Some(unit) = self.units().find(|unit| !unit::is_name(unit)) {
            return Err(ConfigError::new(format!(
                "unit {unit:?}: a unit is a letter, and then letters, digits, _, - and ., at most 32, such as tokens"
            )));
        }
        if let Some(count) = self.in_flight {
            Limit::InFlight { count }.check(slacks)?;
        }
        let lives = self.limits().iter().map(|limit| limit.check(slacks));
        lives
            .reduce(|one, other| Ok(one?.min(other?)))
            .unwrap_or(Ok(LIFE))
    }

    /// Returns how long a request waits for its slot even if [`max_wait`](crate::RateLimitBuilder::max_wait) is
    /// shorter: the margin, for a caller that sends at exactly the rate. Its requests come when a window ends at the
    /// server, and the margin is all that is left of it here. Its timers are not exact: they have the shortest life of a permit
    /// besides.
    ///
    /// Zero if the slots of a limit are no further apart than that. Then a program that sends until it is refused
    /// would wait for one slot after the other, and would never be refused. Zero for buckets, which lose no
    /// margin, unless they are a [spacing](Quota::every), and for fixed windows.
    pub(crate) fn least_wait(&self, slacks: Slacks) -> Result<Duration, ConfigError> {
        let life = self.check(slacks)?;
        let least_wait = life.saturating_add(slacks.transit).saturating_add(LIFE);
        let between_slots = self.limits().iter().map(Limit::between_slots);
        let nearest = between_slots.min().unwrap_or_default();
        Ok(if nearest > least_wait {
            least_wait
        } else {
            Duration::ZERO
        })
    }
}

/// A token bucket without its refill. [`Quota::bucket`] makes it.
#[must_use = "a bucket is no quota until refill is called"]
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    capacity: u32,
}

impl Bucket {
    /// Refills `count` units in each `window`, evenly.
    pub const fn refill(self, count: u32, window: Duration) -> Quota {
        Quota::single(Limit::Bucket {
            capacity: self.capacity,
            count,
            window,
        })
    }
}

/// Two quotas are equal if they have the same limits of the same units, in the same order.
impl PartialEq for Quota {
    fn eq(&self, other: &Self) -> bool {
        self.limits() == other.limits()
            && self.units[..self.len] == other.units[..other.len]
            && (self.in_flight, self.misuse) == (other.in_flight, other.misuse)
    }
}

impl Eq for Quota {}

impl Hash for Quota {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let units = &self.units[..self.len];
        (self.limits(), units, self.in_flight, self.misuse).hash(state);
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.in_flight.map(|count| Limit::InFlight { count });
        let rates = self.limits().iter().copied().zip(self.units);
        let all = rates.chain(in_flight.map(|limit| (limit, None)));
        for (index, (limit, unit)) in all.enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{}", limit.counting(unit))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({self})")
    }
}
