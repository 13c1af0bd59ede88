//! What a gate has counted, as plain values.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::histogram::Histogram;
use super::key_counts::Counted;
use crate::error::Reason;
use crate::quota::Limit;

/// What one limiter or throttle of this process has done, and its state now.
///
/// [`Limiter::stats`](crate::Limiter::stats), [`Throttle::stats`](crate::Throttle::stats) and
/// [`all`](super::all) return it. Counts begin at zero when the layer is built, and never fall, also
/// when the state of a key is forgotten.
#[derive(Clone, Debug)]
pub struct Stats {
    // What each field is, its getter and `values` say.
    pub(crate) name: Arc<str>,
    pub(crate) draining: bool,
    pub(crate) counted: Counted,
    pub(crate) refusals: Counts<Reason>,
    pub(crate) unit: &'static str,
    pub(crate) waits: Histogram,
    pub(crate) upstream_refusals: Counts<StatusCode>,
    pub(crate) holds: Counts<Cause>,
    pub(crate) sent_again: u64,
    pub(crate) unknown_classes: u64,
    pub(crate) waiting: usize,
    /// How long the request waits that has waited longest. `None` if no request waits.
    pub(crate) oldest_wait: Option<Duration>,
    pub(crate) gate: GateState,
}

/// The state of a gate now, of which its tally knows nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct GateState {
    pub(crate) at_hand: u64,
    /// The calls in flight. `None` for a limiter without a limit of them.
    pub(crate) in_flight: Option<InFlightStats>,
    pub(crate) keys: usize,
    pub(crate) keys_held: usize,
    pub(crate) keys_alone: usize,
    pub(crate) keys_with_set_quota: usize,
    pub(crate) max_keys: usize,
    /// The longest time for which a key stays on hold. `None` if no key is on hold.
    pub(crate) longest_hold: Option<Duration>,
    /// The configured limits of each key. Empty for a throttle.
    pub(crate) limits: Vec<Limit>,
    /// What the [ban guard](crate::Guard) has seen. `None` without one.
    pub(crate) guard: Option<GuardStats>,
    /// The pace of a throttle that has one key. `None` for others.
    pub(crate) pace: Option<PaceStats>,
}

impl Stats {
    /// Returns the name that [`RateLimitBuilder::name`](crate::RateLimitBuilder::name) or
    /// [`AdaptiveThrottleBuilder::name`](crate::AdaptiveThrottleBuilder::name) gave, else `default`.
    ///
    /// A limit of [`and_per`](crate::RateLimitBuilder::and_per) has the name of its layer and its own:
    /// `github search`. Limits that count another [unit](crate::Quota::of) than requests have stats of
    /// their own, and the unit at the end of their name: `github tokens`. What counts the bad answers of
    /// a [ban guard](crate::Guard) has `guard` there: each of them is a request here.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns every request once, by its outcome. A request of several limits counts at the first of
    /// them.
    pub fn requests(&self) -> Requests {
        self.counted.requests
    }

    /// Returns the requests that this process refused, by the reason. Their sum is
    /// [`Requests::refused`].
    ///
    /// The value of a reason, such as that of `max_wait`, does not matter.
    pub fn refusals(&self) -> &Counts<Reason> {
        &self.refusals
    }

    /// Returns the refusals by the upstream, by their status.
    pub fn upstream_refusals(&self) -> &Counts<StatusCode> {
        &self.upstream_refusals
    }

    /// Returns how often a key was put on hold, by the cause.
    pub fn holds(&self) -> &Counts<Cause> {
        &self.holds
    }

    /// Returns how many of the requests that were sent had been sent before, by retries outside of the layer that
    /// [count](crate::service::Attempts) their attempts. Each attempt is one of the [requests](Self::requests), too.
    pub fn sent_again(&self) -> u64 {
        self.sent_again
    }

    /// Returns the cost of all requests that got a permit, without those that were given back, in
    /// [`unit`](Self::unit)s. An attempt of a throttle costs one unit.
    ///
    /// A [settlement](crate::Settlement) changes nothing here: these are the costs of the permits.
    pub fn units(&self) -> u64 {
        self.counted.units
    }

    /// Returns what the limits count: [`Cost::REQUESTS`](crate::Cost::REQUESTS), or the name given to
    /// [`Quota::of`](crate::Quota::of).
    pub fn unit(&self) -> &str {
        self.unit
    }

    /// Returns how long the requests waited that got a permit after a wait. Requests that got a permit
    /// at once are not in it.
    pub fn waits(&self) -> &Histogram {
        &self.waits
    }

    /// Returns how many requests wait now.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the configured limits of each key. Empty for a throttle.
    pub fn limits(&self) -> &[Limit] {
        &self.gate.limits
    }

    /// Returns the state now and the other counts as numbers. Each has the name of its
    /// [metric](crate::guide::operate#metrics) without `tollgate_` and `_total`.
    ///
    /// | name | value |
    /// |---|---|
    /// | `oldest_wait_seconds` | how long the request waits that has waited longest; 0 if none waits |
    /// | `permits_at_hand` | units that were prefetched and are at hand, of all keys |
    /// | `in_flight`, `in_flight_waiting` | calls in flight, and requests that wait for an in-flight slot, of all keys; missing for a limiter without a limit of them |
    /// | `keys`, `keys_limit` | keys with state in this process, and the most there may be: `max_keys` |
    /// | `keys_held` | keys on hold |
    /// | `hold_seconds` | the longest time for which a key stays on hold; 0 if none does |
    /// | `keys_alone` | keys that go on without the store, which is unreachable: a limiter with its [fallback share](crate::OnStoreError::FallbackShare), a throttle with its part of the shared pace (only keys whose requests wait, or are in flight) |
    /// | `keys_with_set_quota` | keys with a quota that an operator has [set](crate::Limiter::set_quota) |
    /// | `unknown_classes` | classes without a [share](crate::RateLimitBuilder::share) that requests had, at most 16: [`Event::UnknownClass`](crate::stats::Event::UnknownClass) names each |
    /// | `draining` | 1 after a call of [`drain`](crate::Limiter::drain) |
    /// | `pace_per_second` | requests that may leave in a second, of all processes that share the pace; 0 if the pace delays none. Only of a throttle with one key |
    /// | `pace_processes` | processes that share the pace and have requests. Only of a throttle with one key |
    /// | `bad_answers`, `guard_trips` | bad answers to requests of this process, and how often its [ban guard](crate::Guard) has tripped; missing without a guard. A stop by another process is a hold with the cause [`Guard`](Cause::Guard), and no trip |
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let gate = &self.gate;
        let oldest_wait = self.oldest_wait.unwrap_or_default();
        let longest_hold = gate.longest_hold.unwrap_or_default();
        let always = [
            ("oldest_wait_seconds", oldest_wait.as_secs_f64()),
            ("permits_at_hand", gate.at_hand as f64),
            ("keys", gate.keys as f64),
            ("keys_limit", gate.max_keys as f64),
            ("keys_held", gate.keys_held as f64),
            ("hold_seconds", longest_hold.as_secs_f64()),
            ("keys_alone", gate.keys_alone as f64),
            ("keys_with_set_quota", gate.keys_with_set_quota as f64),
            ("unknown_classes", self.unknown_classes as f64),
            ("draining", f64::from(u8::from(self.draining))),
        ];
        let in_flight = gate.in_flight.map(|calls| {
            [
                ("in_flight", calls.in_use as f64),
                ("in_flight_waiting", calls.waiting as f64),
            ]
        });
        let pace = gate.pace.map(|pace| {
            [
                ("pace_per_second", pace.per_second.unwrap_or_default()),
                ("pace_processes", pace.processes.into()),
            ]
        });
        let guard = gate.guard.map(|guard| {
            [
                ("bad_answers", guard.bad as f64),
                ("guard_trips", guard.trips as f64),
            ]
        });
        let some = [in_flight, pace, guard].into_iter().flatten().flatten();
        always.into_iter().chain(some)
    }
}

impl GateState {
    /// Adds a key that stays on hold for so long, if it is on hold.
    pub(crate) fn add_hold(&mut self, left: Option<Duration>) {
        self.keys_held += usize::from(left.is_some());
        self.longest_hold = self.longest_hold.max(left);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PaceStats {
    /// How many requests may leave in a second, over all processes that share the pace. `None` if the
    /// pace delays no request.
    pub(crate) per_second: Option<f64>,
    /// How many processes share the pace and have requests, this one included.
    pub(crate) processes: u32,
}

/// What a [ban guard](crate::Guard) has seen in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GuardStats {
    /// The bad answers to requests of this process.
    pub(crate) bad: u64,
    /// How often the guard of this process has tripped. A stop by another process is a hold with the
    /// cause [`Guard`](Cause::Guard), and no trip.
    pub(crate) trips: u64,
}

/// Every request once, by its outcome.
///
/// A request counts when its outcome is known, so requests that wait are in none of these. A call of
/// [`acquire`](crate::Limiter::acquire) is a request once it is polled.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Got a permit at once, or with the answer of the store.
    pub passed: u64,
    /// Got a permit after a wait: its slot was ahead, its key was on hold, or it stood in line. With a limit
    /// of [calls in flight](crate::Quota::in_flight), also if it only waited for the answer of the store.
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
    pub fn by_outcome(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let mut counts = *self;
        Outcome::ALL
            .into_iter()
            .map(move |(outcome, name)| (name, *counts.of(outcome)))
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
        for (outcome, _) in Outcome::ALL {
            let theirs = *{ *other }.of(outcome);
            let ours = self.of(outcome);
            *ours = merge(*ours, theirs);
        }
    }
}

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
    /// All outcomes with their names, in the order of their numbers.
    pub(super) const ALL: [(Outcome, &str); 6] = [
        (Outcome::Passed, "passed"),
        (Outcome::Waited, "waited"),
        (Outcome::Uncounted, "uncounted"),
        (Outcome::Refused, "refused"),
        (Outcome::Store, "store"),
        (Outcome::Cancelled, "cancelled"),
    ];
}

/// Counts by the reason, status or cause of what was counted.
///
/// Its `Debug` shows those that are not 0, by their names.
#[derive(Clone, PartialEq, Eq)]
pub struct Counts<K> {
    /// By their names.
    counts: Vec<(Cow<'static, str>, u64)>,
    by: PhantomData<fn(K)>,
}

impl<K> Counts<K> {
    pub(super) fn new(counts: impl IntoIterator<Item = (Cow<'static, str>, u64)>) -> Self {
        Counts {
            counts: counts.into_iter().collect(),
            by: PhantomData,
        }
    }

    /// Returns the sum of all counts.
    pub fn total(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// Returns the counts with their names: those of reasons, such as `max_wait`, those of causes, such
    /// as `used_up`, or the digits of a status that was seen. Reasons and causes without counts are 0.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.counts.iter().map(|(name, count)| (&**name, *count))
    }
}

#[expect(private_bounds, reason = "sealed: what there is to count by")]
impl<K: CountKey> Counts<K> {
    /// Returns how many were counted for `of`.
    pub fn of(&self, of: K) -> u64 {
        let name = of.name();
        let mut all = self.iter();
        all.find_map(|(other, count)| (other == name).then_some(count))
            .unwrap_or(0)
    }
}

impl<K> fmt::Debug for Counts<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.iter().filter(|(_, count)| *count > 0);
        f.debug_map().entries(seen).finish()
    }
}

/// What [`Counts`] count by.
trait CountKey {
    fn name(&self) -> &str;
}

impl CountKey for Reason {
    fn name(&self) -> &str {
        name_of_reason(self)
    }
}

impl CountKey for StatusCode {
    fn name(&self) -> &str {
        self.as_str()
    }
}

impl CountKey for Cause {
    fn name(&self) -> &str {
        Cause::name(*self)
    }
}

/// Makes [`REASONS`] and [`index_of_reason`] of one list.
macro_rules! reasons {
    ($($reason:pat => $name:ident,)*) => {
        /// The names of all reasons.
        pub(super) const REASONS: [&str; [$(stringify!($name)),*].len()] = [$(stringify!($name)),*];

        /// Returns the number of `reason` in [`REASONS`].
        pub(super) fn index_of_reason(reason: &Reason) -> usize {
            #[allow(non_camel_case_types, reason = "named as in metrics")]
            enum Index { $($name,)* }
            match reason {
                $($reason => Index::$name as usize,)*
            }
        }
    };
}

reasons! {
    Reason::MaxWait(_) => max_wait,
    Reason::Deadline => deadline,
    Reason::QueueFull(_) => queue_full,
    Reason::TooManyKeys(_) => too_many_keys,
    Reason::CostAboveLimit { .. } => cost_above_limit,
    Reason::Held => held,
    Reason::NoKey => no_key,
    Reason::SameKey => same_key,
    Reason::Draining => draining,
    Reason::InvalidQuota(_) => invalid_quota,
    Reason::CannotBlock(_) => cannot_block,
    Reason::Expired => expired,
    Reason::Inside => inside,
    Reason::Nested => nested,
    Reason::NotCharged { .. } => not_charged,
    Reason::HeldKind => held_kind,
    Reason::UsedUp { .. } => used_up,
}

/// Returns the name of `reason`, as in [`Counts::iter`].
pub(crate) fn name_of_reason(reason: &Reason) -> &'static str {
    REASONS[index_of_reason(reason)]
}

/// Why a key was put on hold.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The upstream refused a request.
    Upstream,
    /// The upstream stated in a response that nothing is left of a quota.
    UsedUp,
    /// The upstream refuses one [kind](crate::RateLimitBuilder::kind) of requests, and accepts others. Only this kind is on
    /// hold.
    Kind,
    /// `hold_for` of this process.
    Operator,
    /// A [ban guard](crate::Guard), because too many answers were bad.
    Guard,
    /// Another process that shares the store, or another limiter of this process with the same store.
    Elsewhere,
}

impl Cause {
    pub(super) const ALL: [Cause; 6] = [
        Cause::Upstream,
        Cause::UsedUp,
        Cause::Kind,
        Cause::Operator,
        Cause::Guard,
        Cause::Elsewhere,
    ];

    /// Returns the name of the cause, such as `used_up`.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Upstream => "upstream",
            Cause::UsedUp => "used_up",
            Cause::Kind => "kind",
            Cause::Operator => "operator",
            Cause::Guard => "guard",
            Cause::Elsewhere => "elsewhere",
        }
    }
}

/// The calls in flight of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFlightStats {
    /// Calls in flight, of all keys.
    pub(crate) in_use: u64,
    /// Requests that wait for an in-flight slot, of all keys. They are part of
    /// [`Stats::waiting`].
    pub(crate) waiting: u64,
}

/// What one key of this process has done, since its state was made.
///
/// The state of a key is forgotten when it is idle and its place is needed. The counts of the key then
/// begin anew; those of [`Stats`] do not.
#[derive(Clone, Debug)]
pub struct KeyStats {
    pub(crate) name: Box<str>,
    pub(crate) counted: Counted,
    pub(crate) waiting: usize,
    pub(crate) held: Option<Duration>,
}

impl KeyStats {
    /// Returns the name that [`key_name`](crate::RateLimitBuilder::key_name) or
    /// [`name_key`](crate::Limiter::name_key) gave. Otherwise the host, if that is the key and a
    /// request of it has waited or was refused, else eight hex digits.
    ///
    /// If the key has the quota of a [route](crate::RateLimitBuilder::routes), the pattern of the route
    /// follows: `all GET /search/*`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the requests of the key by their outcome.
    pub fn requests(&self) -> Requests {
        self.counted.requests
    }

    /// Returns the cost of its requests that got a permit.
    pub fn units(&self) -> u64 {
        self.counted.units
    }

    /// Returns how many of its requests wait now.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns how long the key stays on hold. `None` if it is not on hold.
    pub fn held(&self) -> Option<Duration> {
        self.held
    }
}
