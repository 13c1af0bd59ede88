//! Scenarios: a fleet, a server, and the headers of its responses.

mod check;
mod goal;
mod limited;

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::numbers::exponential;
pub use goal::Goal;
pub use limited::StoreModel;
use tollgate::__lab::Dice;
use tollgate::OnStoreError;
use tollgate::Quota;

/// One scenario, with the fields of a scenario file. Times are in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Scenario {
    /// The groups of processes that send requests.
    pub fleet: Vec<Group>,
    /// The server that they call.
    pub server: Server,
    /// The headers of the server's responses.
    #[serde(default)]
    pub headers: Headers,
    /// The longest duration of a run.
    pub duration: f64,
    /// Until then, no wait counts, and no accepted request counts as use. Default: 0.
    #[serde(default)]
    pub warm_up: f64,
    /// The goals of the recommended pace.
    #[serde(default)]
    pub goal: Option<Goal>,
    /// The limit and window that strategies know at the start.
    #[serde(default)]
    pub hint: Option<(u32, f64)>,
    /// How long a request takes.
    pub latency: Latency,
    /// The interval between requests with which every caller starts.
    #[serde(default)]
    pub start_interval: f64,
    /// A caller stops once a response says that no more than this is left. The run ends when all
    /// callers have stopped.
    #[serde(default)]
    pub stop_under: Option<f64>,
    /// Consumers outside of the fleet, whose requests are Poisson-distributed.
    #[serde(default)]
    pub background: Vec<Background>,
    /// Whether requests from outside of the fleet count as used. Default: yes.
    #[serde(default)]
    pub util_background: Option<bool>,
    /// The groups whose callers `stdev` and `jain` compare. Default: all.
    #[serde(default)]
    pub fair_groups: Option<Vec<usize>>,
    /// The quota for gates that need one, as text that [`Quota`] parses, such as `"100/60s"`.
    /// Default: `hint`, as a sliding window.
    #[serde(default, deserialize_with = "limited::quota")]
    pub quota: Option<Quota>,
    /// By how much the transit time to the server may vary, for gates with a quota. Default: as
    /// [`RateLimitBuilder::transit_slack`](tollgate::RateLimitBuilder::transit_slack), 0.01.
    #[serde(default)]
    pub transit_slack: Option<f64>,
    /// What becomes of a request when the store does not answer: `fail_closed`, `fail_open` or
    /// `fallback_share`. Default: `fail_closed`, and the caller tries again after one second.
    #[serde(default, deserialize_with = "limited::on_store_error")]
    pub on_store_error: OnStoreError,
    /// With `fallback_share`: the fraction of the quota for a process without recent grants.
    /// Default: none.
    #[serde(default)]
    pub fallback_share: Option<f64>,
    /// The store in which gates count together. Default: a store that answers within a millisecond
    /// and never fails.
    #[serde(default)]
    pub store: StoreModel,
}

/// Processes with the same settings.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Group {
    /// The number of processes. Each has one throttle.
    pub procs: usize,
    /// The number of callers of each process.
    pub tasks: usize,
    /// When they join.
    #[serde(default)]
    pub join: f64,
    /// When they leave. Each caller ends the call that it is making.
    #[serde(default)]
    pub leave: Option<f64>,
    /// How much later than the process before each process joins and leaves.
    #[serde(default)]
    pub stagger: f64,
    /// For how long they work and then rest, in turn.
    #[serde(default)]
    pub duty: Option<(f64, f64)>,
    /// The mean of an exponential pause between two calls.
    #[serde(default)]
    pub think: f64,
    /// How long their requests take, if it differs from the scenario's `latency`.
    #[serde(default)]
    pub latency: Option<Latency>,
    /// How many callers of the first process send *poison*: a request that the server always refuses, a path of its own for
    /// each of them, once a second. Default: none.
    #[serde(default)]
    pub poison: usize,
    /// Their strategy, if it differs from the strategy of the run.
    #[serde(default)]
    pub strategy: Option<String>,
}

/// A random time: uniform between the first two numbers, plus an exponential time whose mean is the
/// third. The server judges a request half-way.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(expecting = "three spans: the shortest, the longest, and the mean of what is added")]
pub struct Latency(pub f64, pub f64, pub f64);

impl Latency {
    /// Draws a time, in seconds.
    pub(super) fn drawn(self, dice: &mut Dice) -> f64 {
        let Latency(low, high, tail) = self;
        let least = dice.between(low, high);
        if tail > 0.0 {
            least + exponential(dice, tail)
        } else {
            least
        }
    }
}

/// The server and its limit.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum Server {
    /// A token bucket of `cap`, refilled by `refill` tokens per second, with `start` tokens in it.
    Bucket {
        /// The size of the bucket.
        cap: f64,
        /// Tokens per second.
        refill: f64,
        /// Tokens at the start.
        start: f64,
        /// The times of changes, and the new `cap`, `refill` or `tokens`.
        #[serde(default)]
        changes: Vec<(f64, Change)>,
    },
    /// `limit` requests in each window. At the start the first window is `phase` old, and `used`
    /// requests of it are used.
    Fixed {
        /// Requests in a window.
        limit: f64,
        /// Its length.
        window: f64,
        /// The age of the first window at the start.
        #[serde(default)]
        phase: f64,
        /// The used requests of the first window at the start.
        #[serde(default)]
        used: f64,
        /// The times of changes, and the new `limit`, `window` or `used`.
        #[serde(default)]
        changes: Vec<(f64, Change)>,
    },
    /// `limit` requests in any interval of the length `window`.
    Sliding {
        /// Requests in a window.
        limit: f64,
        /// Its length.
        window: f64,
        /// The times of changes, and the new `limit` or `window`.
        #[serde(default)]
        changes: Vec<(f64, Change)>,
    },
    /// `limit` requests in each window. A window begins with the first request after the window
    /// before. Express, slowapi and many counters in Redis count like this.
    First {
        /// Requests in a window.
        limit: f64,
        /// Its length.
        window: f64,
    },
    /// `limit` requests in any interval of the length `window`, by an estimate from two windows:
    /// `previous x (1 - f) + current`, where `f` is the part of the current window that is over.
    /// HAProxy and Cloudflare count like this.
    Weighted {
        /// Requests in a window.
        limit: f64,
        /// Its length.
        window: f64,
        /// Whether refused requests count, as they do in HAProxy. Default: no.
        #[serde(default)]
        counts_refused: bool,
    },
    /// Two limits at once. A request that one of them refuses does not count for the other. The
    /// headers describe `long`.
    Dual {
        /// The limit that the headers do not describe.
        short: Box<Server>,
        /// The limit that the headers describe.
        long: Box<Server>,
    },
}

/// New values of a server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Change {
    /// The size of a bucket.
    #[serde(default)]
    pub cap: Option<f64>,
    /// Tokens per second.
    #[serde(default)]
    pub refill: Option<f64>,
    /// The tokens in the bucket.
    #[serde(default)]
    pub tokens: Option<f64>,
    /// Requests in a window.
    #[serde(default)]
    pub limit: Option<f64>,
    /// The length of a window.
    #[serde(default)]
    pub window: Option<f64>,
    /// The used requests of the current window.
    #[serde(default)]
    pub used: Option<f64>,
}

/// The headers of the server's responses.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Headers {
    /// Whether they state what is left.
    #[serde(default)]
    pub remaining: bool,
    /// Whether they state the limit.
    #[serde(default)]
    pub limit: bool,
    /// Whether they state the window and the limit.
    #[serde(default)]
    pub window: bool,
    /// Whether they state when the next window begins or the bucket is full, in whole seconds.
    #[serde(default)]
    pub reset: bool,
    /// Whether a refusal states when to retry, in whole seconds.
    #[serde(default)]
    pub retry_after: bool,
    /// Whether the time to retry is rounded down, so that it may be 0.
    #[serde(default)]
    pub rounds_down: bool,
    /// Whether only refusals have headers.
    #[serde(default)]
    pub only_refusals: bool,
    /// The time to retry that every refusal states instead.
    #[serde(default)]
    pub retry_after_lie: Option<u64>,
    /// In which way the stated remaining count is wrong.
    #[serde(default)]
    pub lie: Option<Lie>,
    /// The age of the count, for `stale` and `delayed`.
    #[serde(default)]
    pub stale_s: f64,
    /// The standard deviation of the error, for `noisy`.
    #[serde(default)]
    pub sigma: f64,
    /// The count, for `stuck_high`.
    #[serde(default)]
    pub value: f64,
    /// The probability, for `missing_sometimes` and `garbage`.
    #[serde(default)]
    pub p: f64,
}

/// In which way the stated remaining count is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Lie {
    /// Always `value`.
    StuckHigh,
    /// Always 0.
    StuckZero,
    /// The count of the last update; there is one every `stale_s`.
    Stale,
    /// The count `stale_s` before.
    Delayed,
    /// With a normally distributed error of `sigma`.
    Noisy,
    /// Missing with probability `p`.
    MissingSometimes,
    /// Missing in refusals.
    #[serde(rename = "only_on_200")]
    OnlyOn200,
    /// A meaningless value with probability `p`.
    Garbage,
}

/// A consumer outside of the fleet, whose requests are Poisson-distributed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Background {
    /// Requests per second.
    pub rate: f64,
    /// When the consumer begins.
    #[serde(default)]
    pub from: f64,
    /// When the consumer ends.
    #[serde(default)]
    pub to: Option<f64>,
}

/// Scenarios by name, in the order of their file.
#[derive(Clone, Debug)]
pub struct Scenarios(pub Vec<(String, Scenario)>);

impl Scenarios {
    /// Parses a file of scenarios: a JSON object from names to scenarios.
    ///
    /// # Errors
    ///
    /// Returns the error with the name of the scenario, the line and the column.
    pub fn read(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Returns the public set: the scenarios with which the paces of tollgate are measured.
    pub fn public() -> Self {
        Scenarios::read(include_str!("scenarios.json")).expect("the tests read it")
    }

    /// Returns the real set: servers that count as nginx, HAProxy, express-rate-limit and slowapi do,
    /// with windows of seconds, each called by 1, 4 and 20 processes. The example `real_limiters`
    /// of the repository calls the servers themselves.
    pub fn real() -> Self {
        Scenarios::read(include_str!("real.json")).expect("the tests read it")
    }

    /// Returns the fast set: limits of tens and hundreds per second, with windows of one to ten seconds.
    pub fn fast() -> Self {
        Scenarios::read(include_str!("fast.json")).expect("the tests read it")
    }

    /// Returns the poison set: 20 processes, of which the first sends requests that the server always refuses; and a server that
    /// refuses all requests beyond a limit, and states nothing.
    pub fn poison() -> Self {
        Scenarios::read(include_str!("poison.json")).expect("the tests read it")
    }

    /// Returns the second set: known limits, counted in a store that is near, is unreachable, or
    /// loses answers; and hours with all of these faults.
    pub fn limited() -> Self {
        Scenarios::read(include_str!("limited.json")).expect("the tests read it")
    }
}

impl<'de> Deserialize<'de> for Scenarios {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Scenarios;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of name and scenario")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Scenarios, M::Error> {
                let mut scenarios = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    let at_fault =
                        |error: &dyn fmt::Display| M::Error::custom(format!("{name}: {error}"));
                    let scenario: Scenario = map.next_value().map_err(|error| at_fault(&error))?;
                    scenario.check().map_err(|error| at_fault(&error))?;
                    scenarios.push((name, scenario));
                }
                Ok(Scenarios(scenarios))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}
