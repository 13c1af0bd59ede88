//! What is tried: a name, and how to make its pace.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::pace::{Aimd, Backoff, Fair, Gradual, Pace, Proportional, Remaining, Unpaced};

/// What a pace may be told at the start.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Brief {
    /// Limit and window, where they are known.
    pub hint: Option<(u32, Duration)>,
    /// The pace every caller starts with.
    pub start_interval: Duration,
}

/// A pace to be tried, under a name.
#[derive(Clone)]
pub struct Strategy {
    name: String,
    make: Make,
}

type Make = Arc<dyn Fn(&Brief) -> Box<dyn Pace> + Send + Sync>;

impl Strategy {
    /// A pace of one's own; `make` is called for each process.
    pub fn new<P: Pace + 'static>(
        name: impl Into<String>,
        make: impl Fn(&Brief) -> P + Send + Sync + 'static,
    ) -> Self {
        Strategy { name: name.into(), make: Arc::new(move |brief| Box::new(make(brief))) }
    }

    /// Those that come with tollgate: the recommended one first, then the published four.
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
        vec![
            Strategy::new("fair", |brief| told!(brief, Fair::new().start_with(brief.start_interval))),
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

    pub(super) fn pace(&self, brief: &Brief) -> Box<dyn Pace> {
        (self.make)(brief)
    }
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Strategy").field(&self.name).finish()
    }
}
