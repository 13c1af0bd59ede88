//! What is simulated: a fleet, a server, what its headers say.

mod check;
mod limited;

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::numbers::exponential;
use crate::limiter::OnStoreError;
use crate::quota::Quota;
use crate::rng::Dice;
pub use limited::StoreModel;

/// One scenario, in the fields of a file of them. Times are in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Scenario {
    /// Who calls.
    pub fleet: Vec<Group>,
    /// Who is called.
    pub server: Server,
    /// What answers say.
    #[serde(default)]
    pub headers: Headers,
    /// How long it lasts, at most.
    pub duration: f64,
    /// Limit and window that the strategies are told.
    #[serde(default)]
    pub hint: Option<(u32, f64)>,
    /// How long a request takes.
    pub latency: Latency,
    /// The pace every caller starts with.
    #[serde(default)]
    pub start_interval: f64,
    /// A caller stops once its answer shows so little left, or less; the run ends when all have.
    #[serde(default)]
    pub stop_under: Option<f64>,
    /// Poisson consumers outside of the fleet.
    #[serde(default)]
    pub background: Vec<Background>,
    /// Whether what strangers take counts as used. Default: yes.
    #[serde(default)]
    pub util_background: Option<bool>,
    /// The groups whose callers are compared by `stdev` and `jain`. Default: all.
    #[serde(default)]
    pub fair_groups: Option<Vec<usize>>,
    /// What gates are told that know their quota, as text that [`Quota`] reads, such as `"100/60s"`. Default: `hint`, as a
    /// sliding window.
    #[serde(default, deserialize_with = "limited::quota")]
    pub quota: Option<Quota>,
    /// By how much the way to the server may vary, for gates that know their quota. Default: as
    /// [`RateLimitBuilder::transit_slack`](crate::RateLimitBuilder::transit_slack), 0.01.
    #[serde(default)]
    pub transit_slack: Option<f64>,
    /// What becomes of a request when the store cannot be asked: `fail_closed`, `fail_open` or `fallback_share`. Default:
    /// `fail_closed`. The caller tries again after a second.
    #[serde(default, deserialize_with = "limited::on_store_error")]
    pub on_store_error: OnStoreError,
    /// With `fallback_share`: the share of a process that was granted nothing lately. Default: none.
    #[serde(default)]
    pub fallback_share: Option<f64>,
    /// Where the processes count together, if their gates do. Default: a store that answers at once and never fails.
    #[serde(default)]
    pub store: StoreModel,
}

/// Processes that are alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Group {
    /// How many processes; each has one throttle.
    pub procs: usize,
    /// How many callers each has.
    pub tasks: usize,
    /// When they join.
    #[serde(default)]
    pub join: f64,
    /// When they leave: each ends the call it is in.
    #[serde(default)]
    pub leave: Option<f64>,
    /// By how much each process joins, and leaves, later than the one before.
    #[serde(default)]
    pub stagger: f64,
    /// How long they work, and how long they rest, in turn.
    #[serde(default)]
    pub duty: Option<(f64, f64)>,
    /// The mean of an exponential pause between two calls.
    #[serde(default)]
    pub think: f64,
    /// How long their requests take, where it differs.
    #[serde(default)]
    pub latency: Option<Latency>,
    /// Their strategy, where it differs from the one that is tried.
    #[serde(default)]
    pub strategy: Option<String>,
}

/// Uniform from the first to the second, plus an exponential of the third as its mean. The server judges a request
/// half-way.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(expecting = "three spans: the shortest, the longest, and the mean of what is added")]
pub struct Latency(pub f64, pub f64, pub f64);

impl Latency {
    pub(super) fn drawn(self, dice: &mut Dice) -> f64 {
        let Latency(low, high, tail) = self;
        let least = dice.between(low, high);
        if tail > 0.0 { least + exponential(dice, tail) } else { least }
    }
}

/// Who is called.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum Server {
    /// A token bucket of `cap`, refilled by `refill` tokens per second, with `start` tokens in it.
    Bucket {
        /// Its size.
        cap: f64,
        /// Tokens per second.
        refill: f64,
        /// Tokens at the start.
        start: f64,
        /// What changes, when: `cap`, `refill` or `tokens`.
        #[serde(default)]
        changes: Vec<(f64, Change)>,
    },
    /// `limit` requests in each window; the first has lasted for `phase` already, and `used` of it are gone.
    Fixed {
        /// Requests in a window.
        limit: f64,
        /// Its length.
        window: f64,
        /// How old the first window is at the start.
        #[serde(default)]
        phase: f64,
        /// How many of the first are gone.
        #[serde(default)]
        used: f64,
        /// What changes, when: `limit`, `window` or `used`.
        #[serde(default)]
        changes: Vec<(f64, Change)>,
    },
    /// `limit` requests in any interval of the length `window`.
    Sliding {
        /// Requests in a window.
        limit: f64,
        /// Its length.
        window: f64,
        /// What changes, when: `limit` or `window`.
        #[serde(default)]
        changes: Vec<(f64, Change)>,
    },
    /// Two at once; a request that one refuses takes nothing of the other. The headers speak of `long`.
    Dual {
        /// The one that is not spoken of.
        short: Box<Server>,
        /// The one that is.
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
    /// What is in a bucket now.
    #[serde(default)]
    pub tokens: Option<f64>,
    /// Requests in a window.
    #[serde(default)]
    pub limit: Option<f64>,
    /// The length of a window.
    #[serde(default)]
    pub window: Option<f64>,
    /// What is gone of this window.
    #[serde(default)]
    pub used: Option<f64>,
}

/// What answers say.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Headers {
    /// What is left.
    #[serde(default)]
    pub remaining: bool,
    /// The limit.
    #[serde(default)]
    pub limit: bool,
    /// The window, beside the limit.
    #[serde(default)]
    pub window: bool,
    /// When a window begins anew, or a bucket is full, in whole seconds.
    #[serde(default)]
    pub reset: bool,
    /// On a refusal, when to come back, in whole seconds.
    #[serde(default)]
    pub retry_after: bool,
    /// What every refusal says instead.
    #[serde(default)]
    pub retry_after_lie: Option<u64>,
    /// In which way what is left is not what is left.
    #[serde(default)]
    pub lie: Option<Lie>,
    /// How old it is, for `stale` and `delayed`.
    #[serde(default)]
    pub stale_s: f64,
    /// By how much it is off, for `noisy`.
    #[serde(default)]
    pub sigma: f64,
    /// What it says, for `stuck_high`.
    #[serde(default)]
    pub value: f64,
    /// How often, for `missing_sometimes` and `garbage`.
    #[serde(default)]
    pub p: f64,
}

/// In which way what is left is not what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Lie {
    /// Always `value`.
    StuckHigh,
    /// Always 0.
    StuckZero,
    /// What was left when it was looked at last, every `stale_s`.
    Stale,
    /// What was left `stale_s` before.
    Delayed,
    /// Off by a normal error of `sigma`.
    Noisy,
    /// Missing with probability `p`.
    MissingSometimes,
    /// Missing in refusals.
    #[serde(rename = "only_on_200")]
    OnlyOn200,
    /// With probability `p` something that means nothing.
    Garbage,
}

/// Poisson consumers outside of the fleet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Background {
    /// Requests per second.
    pub rate: f64,
    /// From when on.
    #[serde(default)]
    pub from: f64,
    /// Until when.
    #[serde(default)]
    pub to: Option<f64>,
}

/// Scenarios by name, in the order of their file.
#[derive(Clone, Debug)]
pub struct Scenarios(pub Vec<(String, Scenario)>);

impl Scenarios {
    /// Reads a file of scenarios: a JSON object of name and scenario.
    ///
    /// # Errors
    ///
    /// What is wrong with it, with the name of the scenario, line and column.
    pub fn read(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The public set: the scenarios that the paces of tollgate are measured with.
    pub fn public() -> Self {
        Scenarios::read(include_str!("scenarios.json")).expect("the tests read it")
    }

    /// A second set: known limits, counted in a store that is near, or away, or loses answers; and hours of everything at
    /// once.
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
                    let at_fault = |error: &dyn fmt::Display| M::Error::custom(format!("{name}: {error}"));
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
