//! What is tried: a name, and how to make its pace or its gate.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::gates::known::{limiter, retrying, throttle};
use super::gates::{Gate, GateFuture};
use super::scenario::Scenario;
use super::{Wire, span};
use crate::config_error::ConfigError;
use crate::error::Limited;
use crate::limiter::OnStoreError;
use crate::pace::{Aimd, Backoff, Fair, Gradual, Pace, Proportional, Remaining, Unpaced};
use crate::quota::Quota;
use crate::store::Store;

/// What a pace or a gate may be told at the start.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Brief {
    /// Limit and window, where they are known.
    pub hint: Option<(u32, Duration)>,
    /// The pace every caller starts with.
    pub start_interval: Duration,
    /// What the server allows, for a gate that is to know it.
    pub quota: Option<Quota>,
    /// By how much the way to the server may vary, where that was said.
    pub transit_slack: Option<Duration>,
    /// What becomes of a request when the store cannot be asked.
    pub on_store_error: OnStoreError,
    /// The share of a process that was granted nothing lately, where that was said.
    pub fallback_share: Option<f64>,
}

impl Brief {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let hint = scenario.hint.map(|(limit, window)| (limit, span(window)));
        Brief {
            hint,
            start_interval: span(scenario.start_interval),
            quota: scenario.quota.or(hint.map(|(limit, window)| Quota::new(limit, window))),
            transit_slack: scenario.transit_slack.map(span),
            on_store_error: scenario.on_store_error,
            fallback_share: scenario.fallback_share,
        }
    }
}

/// A pace or a gate to be tried, under a name.
#[derive(Clone)]
pub struct Strategy {
    name: String,
    make: Make,
}

/// What the processes of a run are made with.
#[derive(Clone)]
pub(super) enum Make {
    /// Its pure line is run: that is quick.
    Pace(Arc<MakePace>),
    /// It is run as it is, in a runtime whose time is virtual.
    Gate(Arc<MakeGate>),
}

type MakePace = dyn Fn(&Brief) -> Box<dyn Pace> + Send + Sync;
type MakeGate = dyn Fn(&Brief, Arc<dyn Store>) -> Result<Gate, ConfigError> + Send + Sync;

impl Strategy {
    /// A pace of one's own; `make` is called for each process.
    pub fn new<P: Pace + 'static>(
        name: impl Into<String>,
        make: impl Fn(&Brief) -> P + Send + Sync + 'static,
    ) -> Self {
        Strategy { name: name.into(), make: Make::Pace(Arc::new(move |brief| Box::new(make(brief)))) }
    }

    /// An asynchronous gate of one's own; `make` is called for each process, with the store that all share, as far away as
    /// the scenario says.
    ///
    /// What it makes is called for each call, and sends what it lets pass by the [`Wire`]. Where the server refused, and
    /// where it answers an error, the same caller comes again: at once, or when the error says, or after a second.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::sim::{Scenarios, Strategy, Wire, run};
    /// use tollgate::{Key, Quota, RateLimitLayer, Signal};
    ///
    /// let all_at_once = Strategy::gate("half", |_, store| {
    ///     let layer = RateLimitLayer::builder(Quota::new(50, Duration::from_secs(60))).store(store);
    ///     let limiter = layer.max_wait(Duration::from_secs(3600)).build()?.limiter();
    ///     Ok(move |mut wire: Wire| {
    ///         let limiter = limiter.clone();
    ///         async move {
    ///             let permit = limiter.acquire(Key::ALL).await?;
    ///             permit.answered(&Signal::read(&wire.send().await));
    ///             Ok(())
    ///         }
    ///     })
    /// });
    /// let scenarios = Scenarios::read(r#"{
    ///     "two processes": {
    ///         "fleet": [{"procs": 2, "tasks": 3}],
    ///         "server": {"kind": "sliding", "limit": 100, "window": 60},
    ///         "store": {"trip": [0.001, 0.002, 0]},
    ///         "latency": [0.1, 0.1, 0],
    ///         "duration": 600
    ///     }
    /// }"#)?;
    /// let metrics = run(&scenarios.0[0].1, &all_at_once, 1)?;
    /// assert!(metrics.retry_pct == 0.0 && (48.0..=56.0).contains(&metrics.util_pct));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gate<G, F>(
        name: impl Into<String>,
        make: impl Fn(&Brief, Arc<dyn Store>) -> Result<G, ConfigError> + Send + Sync + 'static,
    ) -> Self
    where
        G: Fn(Wire) -> F + 'static,
        F: Future<Output = Result<(), Limited>> + Send + 'static,
    {
        let make = move |brief: &Brief, store| {
            let gate = make(brief, store)?;
            Ok(Box::new(move |wire: Wire| Box::pin(gate(wire)) as GateFuture) as Gate)
        };
        Strategy { name: name.into(), make: Make::Gate(Arc::new(make)) }
    }

    /// Those that come with tollgate: paces, the recommended one first, then the published four; and gates.
    pub fn all() -> Vec<Strategy> {
        /// Tells `pace` the limit, where it is known.
        macro_rules! told {
            ($brief:ident, $pace:expr) => {
                match $brief.hint {
                    Some((limit, window)) => $pace.limit(limit, window),
                    None => $pace,
                }
            };
        }
        let fair = |brief: &Brief| told!(brief, Fair::new().start_with(brief.start_interval));
        vec![
            Strategy::new("fair", fair),
            Strategy::new("blog-remaining", |brief| {
                told!(brief, Remaining::new().start_with(brief.start_interval))
            }),
            Strategy::new("blog-proportional", |brief| {
                told!(brief, Proportional::new().start_with(brief.start_interval))
            }),
            Strategy::new("blog-gradual", |brief| {
                told!(brief, Gradual::new().start_with(brief.start_interval))
            }),
            Strategy::new("blog-backoff", |brief| told!(brief, Backoff::new())),
            Strategy::new("blog-backoff-2", |brief| told!(brief, Backoff::new().multiplier(2.0))),
            Strategy::new("aimd", |brief| told!(brief, Aimd::new())),
            Strategy::new("none", |_| Unpaced),
            Strategy::gate("limit", limiter),
            Strategy::gate("fair-gate", move |&brief, _| retrying(throttle(move || fair(&brief)))),
            Strategy::gate("fair-shared", move |&brief, store| {
                retrying(throttle(move || fair(&brief)).store(store))
            }),
        ]
    }

    /// One of [`all`](Self::all), by its name.
    pub fn named(name: &str) -> Option<Strategy> {
        Strategy::all().into_iter().find(|strategy| strategy.name == name)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn make(&self) -> &Make {
        &self.make
    }
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Strategy").field(&self.name).finish()
    }
}
