//! What a gate has counted, as plain values.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::histogram::Histogram;
use crate::error::Reason;
use crate::quota::Limit;

/// What one limiter or throttle of this process has done, and its state now.
///
/// [`Limiter::stats`](crate::Limiter::stats), [`Throttle::stats`](crate::Throttle::stats) and
/// [`all`](super::all) return it. Counts begin at zero when the layer is built, and never fall, also
/// when the state of a key is forgotten.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Stats {
    /// The name that [`RateLimitBuilder::name`](crate::RateLimitBuilder::name) or
    /// [`AdaptiveThrottleBuilder::name`](crate::AdaptiveThrottleBuilder::name) gave, else `default`. A
    /// limit of [`and_per`](crate::RateLimitBuilder::and_per) has the name of its layer and its own:
    /// `github search`. Limits that count another [unit](crate::Quota::of) than requests have stats of
    /// their own, and the unit at the end of their name: `github tokens`.
    pub name: Arc<str>,
    /// Whether this is a limiter or a throttle.
    pub kind: Kind,
    /// Whether [`drain`](crate::Limiter::drain) was called.
    pub draining: bool,
    /// Every request once, by its outcome. A request of several limits counts at the first of them.
    pub requests: Requests,
    /// The requests that this process refused, by the reason. Their sum is `requests.refused`.
    pub refusals: Refusals,
    /// What the limits count: [`Cost::REQUESTS`](crate::Cost::REQUESTS), or the name given to
    /// [`Quota::of`](crate::Quota::of).
    pub unit: &'static str,
    /// The cost of all requests that got a permit, without those that were given back. An attempt of a
    /// throttle costs one unit.
    ///
    /// A [settlement](crate::Settlement) changes nothing here: these are the costs of the permits.
    pub units: u64,
    /// How long the requests waited that got a permit after a wait. Requests that got a permit at once
    /// are not in it.
    pub waits: Histogram,
    /// The refusals by the upstream, by their status.
    pub upstream_refusals: Statuses,
    /// How often a key was put on hold, by the cause.
    pub holds: Holds,
    /// How many classes requests had that have no [share](crate::RateLimitBuilder::share), at most 16. A
    /// mistyped class is one: [`Event::UnknownClass`](crate::stats::Event::UnknownClass) names it.
    pub unknown_classes: u64,
    /// How many requests wait now.
    pub waiting: usize,
    /// How long the request waits that has waited longest. `None` if no request waits.
    pub oldest_wait: Option<Duration>,
    /// The units that were prefetched and are at hand now, of all keys.
    pub at_hand: u64,
    /// The calls in flight. `None` for a limiter without a limit of them.
    pub in_flight: Option<InFlightStats>,
    /// How many keys have state in this process.
    pub keys: usize,
    /// How many of these keys are on hold.
    pub keys_held: usize,
    /// How many of these keys go on without the store, which is unreachable: a limiter with its
    /// [fallback share](crate::OnStoreError::FallbackShare), a throttle with its part of the shared pace.
    pub keys_alone: usize,
    /// How many of these keys have a quota that an operator has [set](crate::Limiter::set_quota).
    pub keys_with_set_quota: usize,
    /// The most keys that may have state: the setting `max_keys`.
    pub max_keys: usize,
    /// The longest time for which a key stays on hold. `None` if no key is on hold.
    pub longest_hold: Option<Duration>,
    /// The configured limits of each key. Empty for a throttle.
    pub limits: Vec<Limit>,
    /// What the [ban guard](crate::Guard) has seen. `None` without one.
    pub guard: Option<GuardStats>,
    /// The pace of a throttle that has one key. `None` for others: [`Throttle::explain`] has the pace of
    /// each key.
    ///
    /// [`Throttle::explain`]: crate::Throttle::explain
    pub pace: Option<PaceStats>,
}

/// The pace of a throttle.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaceStats {
    /// How many requests may leave in a second, over all processes that share the pace. `None` if the
    /// pace delays no request.
    pub per_second: Option<f64>,
    /// How many processes share the pace and have requests, this one included.
    pub processes: u32,
}

/// What a [ban guard](crate::Guard) has seen in this process.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuardStats {
    /// The bad answers to requests of this process.
    pub bad: u64,
    /// How often the guard of this process has tripped. A stop by another process is a hold with the
    /// cause [`Guard`](Cause::Guard), and no trip.
    pub trips: u64,
}

/// What kind of gate a [`Stats`] is about.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A [`Limiter`](crate::Limiter), which keeps a known quota.
    Limiter,
    /// A [`Throttle`](crate::Throttle), which finds a pace.
    Throttle,
    /// What counts the bad answers of a [ban guard](crate::Guard): each is a request here. Its name is
    /// that of the guarded layer and `guard`.
    Guard,
}

/// Every request once, by its outcome.
///
/// A request counts when its outcome is known, so requests that wait are in none of these. A call of
/// [`acquire`](crate::Limiter::acquire) is a request once it is polled.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Got a permit at once.
    pub passed: u64,
    /// Got a permit after a wait.
    pub waited: u64,
    /// Left without a permit, because the store failed and the limiter fails open.
    pub uncounted: u64,
    /// Refused by this process ([`Limited::Local`](crate::Limited::Local)).
    pub refused: u64,
    /// Refused because the store failed ([`Limited::Store`](crate::Limited::Store)).
    pub store: u64,
    /// Dropped by its caller while it waited, or after its permit and before it was sent.
    pub cancelled: u64,
}

impl Requests {
    /// Returns the sum of all outcomes: how many requests have ended.
    pub fn total(&self) -> u64 {
        self.by_outcome().map(|(_, count)| count).sum()
    }

    /// Returns the counts with the names of their outcomes.
    pub fn by_outcome(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let &Requests {
            passed,
            waited,
            uncounted,
            refused,
            store,
            cancelled,
        } = self;
        [
            ("passed", passed),
            ("waited", waited),
            ("uncounted", uncounted),
            ("refused", refused),
            ("store", store),
            ("cancelled", cancelled),
        ]
        .into_iter()
    }

    pub(super) fn of(&mut self, outcome: Outcome) -> &mut u64 {
        match outcome {
            Outcome::Passed => &mut self.passed,
            Outcome::Waited => &mut self.waited,
            Outcome::Uncounted => &mut self.uncounted,
            Outcome::Refused => &mut self.refused,
            Outcome::Store => &mut self.store,
            Outcome::Cancelled => &mut self.cancelled,
        }
    }

    /// Adds or replaces each count by `merge` of it and that of `other`.
    pub(crate) fn merge(&mut self, other: &Requests, merge: impl Fn(u64, u64) -> u64) {
        for outcome in Outcome::ALL {
            let theirs = *{ *other }.of(outcome);
            let ours = self.of(outcome);
            *ours = merge(*ours, theirs);
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Waited,
    Uncounted,
    Refused,
    Store,
    Cancelled,
}

impl Outcome {
    pub(super) const ALL: [Outcome; 6] = [
        Outcome::Passed,
        Outcome::Waited,
        Outcome::Uncounted,
        Outcome::Refused,
        Outcome::Store,
        Outcome::Cancelled,
    ];
}

/// The requests that this process refused, by the [`Reason`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals(pub(super) [u64; Refusals::COUNT]);

impl Refusals {
    pub(super) const COUNT: usize = 11;

    /// The names of all reasons.
    pub(super) const REASONS: [&str; Refusals::COUNT] = [
        "max_wait",
        "deadline",
        "queue_full",
        "too_many_keys",
        "cost_above_limit",
        "held",
        "no_key",
        "same_key",
        "draining",
        "invalid_quota",
        "cannot_block",
    ];

    /// Returns the number of `reason` in [`REASONS`](Self::REASONS).
    pub(super) fn index(reason: Reason) -> usize {
        match reason {
            Reason::MaxWait(_) => 0,
            Reason::Deadline => 1,
            Reason::QueueFull(_) => 2,
            Reason::TooManyKeys(_) => 3,
            Reason::CostAboveLimit { .. } => 4,
            Reason::Held => 5,
            Reason::NoKey => 6,
            Reason::SameKey => 7,
            Reason::Draining => 8,
            Reason::InvalidQuota(_) => 9,
            Reason::CannotBlock(_) => 10,
        }
    }

    /// Returns the name of `reason`, as in [`by_reason`](Self::by_reason).
    #[cfg(feature = "grpc")]
    pub(crate) fn name_of(reason: Reason) -> &'static str {
        Refusals::REASONS[Refusals::index(reason)]
    }

    /// Returns the refusals for `reason`. Its value, such as that of `max_wait`, does not matter.
    pub fn of(&self, reason: Reason) -> u64 {
        self.0[Refusals::index(reason)]
    }

    /// Returns all refusals.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the counts with the names of their reasons, such as `max_wait`.
    pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Refusals::REASONS.into_iter().zip(self.0)
    }
}

/// The refusals by the upstream, by their status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statuses(pub(super) Vec<(StatusCode, u64)>);

impl Statuses {
    /// Returns the refusals with `status`.
    pub fn of(&self, status: StatusCode) -> u64 {
        let found = self.0.iter().find(|(other, _)| *other == status);
        found.map_or(0, |(_, count)| *count)
    }

    /// Returns all refusals.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|(_, count)| count).sum()
    }

    /// Returns each status that was seen, with its count.
    pub fn by_status(&self) -> impl Iterator<Item = (StatusCode, u64)> {
        self.0.iter().copied()
    }
}

/// Why a key was put on hold.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The upstream refused a request.
    Upstream,
    /// The upstream stated in a response that nothing is left of a quota.
    UsedUp,
    /// `hold_for` or `hold_until` of this process.
    Operator,
    /// A [ban guard](crate::Guard), because too many answers were bad.
    Guard,
    /// Another process that shares the store, or another limiter of this process with the same store.
    Elsewhere,
}

impl Cause {
    pub(super) const ALL: [Cause; 5] = [
        Cause::Upstream,
        Cause::UsedUp,
        Cause::Operator,
        Cause::Guard,
        Cause::Elsewhere,
    ];

    /// Returns the name of the cause, such as `used_up`.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Upstream => "upstream",
            Cause::UsedUp => "used_up",
            Cause::Operator => "operator",
            Cause::Guard => "guard",
            Cause::Elsewhere => "elsewhere",
        }
    }
}

/// How often a key was put on hold, by the [`Cause`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holds(pub(super) [u64; Cause::ALL.len()]);

impl Holds {
    /// Returns the holds with `cause`.
    pub fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }

    /// Returns all holds.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the counts by cause.
    pub fn by_cause(&self) -> impl Iterator<Item = (Cause, u64)> {
        Cause::ALL.into_iter().zip(self.0)
    }
}

/// The calls in flight of this process.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlightStats {
    /// Calls in flight, of all keys.
    pub in_use: u64,
    /// Requests that wait for an in-flight slot, of all keys. They are part of
    /// [`Stats::waiting`].
    pub waiting: u64,
}

/// What one key of this process has done, since its state was made.
///
/// The state of a key is forgotten when it is idle and its place is needed. The counts of the key then
/// begin anew; those of [`Stats`] do not.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct KeyStats {
    /// The name that [`key_name`](crate::RateLimitBuilder::key_name) or
    /// [`name_key`](crate::Limiter::name_key) gave. Otherwise the host, if that is the key and a
    /// request of it has waited or was refused, else eight hex digits. If the key has the quota of a
    /// [route](crate::RateLimitBuilder::routes), the pattern of the route follows: `all GET /search/*`.
    pub name: Box<str>,
    /// The requests of the key by their outcome.
    pub requests: Requests,
    /// The cost of its requests that got a permit.
    pub units: u64,
    /// How many of its requests wait now.
    pub waiting: usize,
    /// The units that were prefetched and are at hand now.
    pub at_hand: u64,
    /// How long the key stays on hold. `None` if it is not on hold.
    pub held: Option<Duration>,
}
