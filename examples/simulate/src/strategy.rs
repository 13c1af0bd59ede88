//! Strategies: a pace or a gate, under a name.

use std::fmt;
use std::sync::Arc;

use super::brief::Brief;
use super::gates::{Gate, GateFuture, Wire};
use super::known_gates::{layered, limit, limiter, retrying, throttle};
use super::pace::{Aimd, Backoff, Gradual, Proportional, Remaining};
use tollgate::__lab::Pace;
use tollgate::ConfigError;
use tollgate::Limited;
use tollgate::pace::{Fair, NoPacing};
use tollgate::store::Store;

/// A pace or a gate that a scenario is run with, under a name.
#[derive(Clone)]
pub struct Strategy {
    name: String,
    make: Make,
}

/// Makes the pace or the gate of a process.
#[derive(Clone)]
pub(super) enum Make {
    /// A pace, run on its queue without tasks, which is fast.
    Pace(Arc<MakePace>),
    /// A gate, run with its tasks and timers in a runtime with virtual time.
    Gate(Arc<MakeGate>),
}

type MakePace = dyn Fn(&Brief) -> Box<dyn Pace> + Send + Sync;
type MakeGate = dyn Fn(&Brief, Arc<dyn Store>) -> Result<Gate, ConfigError> + Send + Sync;

impl Strategy {
    /// Creates a strategy from a pace. `make` is called once for each process.
    pub fn new<P: Pace + 'static>(
        name: impl Into<String>,
        make: impl Fn(&Brief) -> P + Send + Sync + 'static,
    ) -> Self {
        Strategy {
            name: name.into(),
            make: Make::Pace(Arc::new(move |brief| Box::new(make(brief)))),
        }
    }

    /// Creates a strategy from an asynchronous gate. `make` is called once for each process, with
    /// the store that all processes share and that behaves as the scenario says.
    ///
    /// The function that `make` returns is called for each call, and sends the call's requests
    /// through the [`Wire`]. If the server refused the request, the caller calls again at once. If
    /// the gate returned an error, the caller calls again after the error's `retry_after`, or after
    /// one second.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate_simulate::{Scenarios, Strategy, Wire, run};
    /// use tollgate::{Key, Quota, RateLimitLayer, Signal};
    ///
    /// let all_at_once = Strategy::gate("half", |_, store| {
    ///     let layer = RateLimitLayer::builder(Quota::new(50, Duration::from_secs(60))).store(store);
    ///     let limiter = layer.max_wait(Duration::from_secs(3600)).build()?.limiter();
    ///     Ok(move |mut wire: Wire| {
    ///         let limiter = limiter.clone();
    ///         async move {
    ///             let sent = limiter.acquire(Key::ALL).await?.begin()?;
    ///             sent.answered(&Signal::read(&wire.send().await));
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
        Strategy {
            name: name.into(),
            make: Make::Gate(Arc::new(make)),
        }
    }

    /// Returns the known strategies: the paces, with the recommended one first,
    /// and the gates.
    pub fn all() -> Vec<Strategy> {
        /// Configures the limit of `$pace`, if the brief has one.
        macro_rules! with_limit {
            ($brief:ident, $pace:expr) => {
                match $brief.hint {
                    Some((limit, window)) => $pace.limit(limit, window),
                    None => $pace,
                }
            };
        }
        let fair = |brief: &Brief| with_limit!(brief, Fair::new().start_with(brief.start_interval));
        vec![
            Strategy::new("fair", fair),
            Strategy::new("fair-sole", move |brief| fair(brief).sole_client()),
            Strategy::new("blog-remaining", |brief| {
                with_limit!(brief, Remaining::new().start_with(brief.start_interval))
            }),
            Strategy::new("blog-proportional", |brief| {
                with_limit!(brief, Proportional::new().start_with(brief.start_interval))
            }),
            Strategy::new("blog-gradual", |brief| {
                with_limit!(brief, Gradual::new().start_with(brief.start_interval))
            }),
            Strategy::new("blog-backoff", |brief| with_limit!(brief, Backoff::new())),
            Strategy::new("blog-backoff-2", |brief| {
                with_limit!(brief, Backoff::new().multiplier(2.0))
            }),
            Strategy::new("aimd", |brief| with_limit!(brief, Aimd::new())),
            Strategy::new("none", |_| NoPacing),
            Strategy::gate("limit", limiter),
            Strategy::gate("limit-layer", |brief, store| {
                Ok(layered(limit(brief, store)?.build()?))
            }),
            Strategy::gate("fair-layer", move |&brief, _| {
                Ok(layered(throttle(move || fair(&brief)).build()?.retrying()))
            }),
            Strategy::gate("fair-gate", move |&brief, _| {
                retrying(throttle(move || fair(&brief)))
            }),
            Strategy::gate("fair-shared", move |&brief, store| {
                retrying(throttle(move || fair(&brief)).store(store))
            }),
        ]
    }

    /// Returns the strategy of [`all`](Self::all) with this name.
    pub fn named(name: &str) -> Option<Strategy> {
        Strategy::all()
            .into_iter()
            .find(|strategy| strategy.name == name)
    }

    /// Returns the name of the strategy.
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
