//! Histories as values: what a fleet is made of, and what happens to it. All times are in milliseconds.

use std::fmt::Write;

use super::features::Features;

/// A history.
#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(crate) features: Features,
    /// The seed of the dice that are rolled while the history runs: by tollgate and by the store.
    pub(crate) dice: u64,
    pub(crate) limiters: Vec<LimiterPlan>,
    pub(crate) store: StorePlan,
    pub(crate) on_store_error: OnAway,
    /// The shares of the processes, by the number of their release.
    pub(crate) releases: Vec<Shares>,
    /// The releases of the processes that exist from the start.
    pub(crate) processes: Vec<usize>,
    /// What happens, each after a pause.
    pub(crate) steps: Vec<(u64, Step)>,
}

/// The shares of classes, in per cent.
pub(crate) type Shares = Vec<(&'static str, u8)>;

/// A limiter, of which each process has one over the same store.
#[derive(Clone, Debug)]
pub(crate) struct LimiterPlan {
    /// The limits of requests. All of them have windows of another kind or length.
    pub(crate) rates: Vec<Rate>,
    /// The limit of tokens.
    pub(crate) tokens: Option<Rate>,
    pub(crate) in_flight: Option<u32>,
    pub(crate) keys: u8,
    pub(crate) max_wait: u64,
    pub(crate) max_hold: u64,
    pub(crate) max_queue: usize,
    pub(crate) max_keys: usize,
    pub(crate) settles: bool,
    /// How late the upstream counts. Zero: when a request arrives.
    pub(crate) counted_within: u64,
    pub(crate) is_divided: bool,
    pub(crate) lends: u8,
    /// How many bad answers are allowed, and in which window.
    pub(crate) guard: Option<(u32, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    Sliding {
        count: u32,
        window: u64,
    },
    Bucket {
        capacity: u32,
        count: u32,
        window: u64,
    },
    Fixed {
        count: u32,
        window: u64,
    },
}

impl Rate {
    pub(crate) fn window(self) -> u64 {
        match self {
            Rate::Sliding { window, .. }
            | Rate::Bucket { window, .. }
            | Rate::Fixed { window, .. } => window,
        }
    }

    /// Returns after which time what was used is forgotten.
    fn memory(self) -> u64 {
        match self {
            Rate::Bucket {
                capacity,
                count,
                window,
            } => window.max(window * u64::from(capacity.div_ceil(count))),
            other => other.window(),
        }
    }

    /// Returns the most units that fit at once.
    pub(crate) fn most(self) -> u32 {
        match self {
            Rate::Sliding { count, .. } | Rate::Fixed { count, .. } => count,
            Rate::Bucket { capacity, .. } => capacity,
        }
    }

    /// Returns a limit of the same kind and window with `percent` of the units, and at least one.
    pub(crate) fn scaled(self, percent: u32) -> Rate {
        let scale = |units: u32| (units * percent / 100).max(1);
        match self {
            Rate::Sliding { count, window } => Rate::Sliding {
                count: scale(count),
                window,
            },
            Rate::Fixed { count, window } => Rate::Fixed {
                count: scale(count),
                window,
            },
            Rate::Bucket {
                capacity,
                count,
                window,
            } => Rate::Bucket {
                capacity: scale(capacity),
                count: scale(count),
                window,
            },
        }
    }
}

impl LimiterPlan {
    /// Returns after which time all limits have forgotten what was used.
    pub(crate) fn longest_window(&self) -> u64 {
        let windows = self
            .rates
            .iter()
            .chain(&self.tokens)
            .map(|rate| rate.memory());
        windows.max().unwrap_or(0)
    }

    /// Returns the most requests that fit at once under the limits of requests.
    pub(crate) fn most(&self) -> u32 {
        self.rates.iter().map(|rate| rate.most()).min().unwrap_or(1)
    }

    /// Returns the same limiter with `percent` of each limit.
    pub(crate) fn scaled(&self, percent: u32) -> LimiterPlan {
        LimiterPlan {
            rates: self.rates.iter().map(|rate| rate.scaled(percent)).collect(),
            tokens: self.tokens.map(|rate| rate.scaled(percent)),
            in_flight: self.in_flight.map(|most| (most * percent / 100).max(1)),
            ..self.clone()
        }
    }
}

/// How the store behaves.
#[derive(Clone, Debug)]
pub(crate) struct StorePlan {
    /// The shortest and the longest round trip. `None`: all processes share a store in memory.
    pub(crate) trip: Option<(u64, u64)>,
    /// How many calls of a hundred are lost on their way there, and their answers on the way back.
    pub(crate) lost: (u64, u64),
    /// Whether replies state a session, as those of a store that may lose its state.
    pub(crate) has_sessions: bool,
    /// Whether the store runs the tasks of a process, or the runtime of the process does.
    pub(crate) has_background: bool,
}

/// What a process does while the store is unreachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnAway {
    FailClosed,
    FailOpen,
    /// The share of a process without grants, in per cent.
    Share(u32),
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Request(Request),
    /// A request that cannot wait is explained, and then enters.
    Explain(Request),
    Hold {
        process: usize,
        limiter: usize,
        key: u8,
        span: u64,
    },
    Release {
        process: usize,
        limiter: usize,
        key: u8,
    },
    /// Sets the quota of a key to so many per cent of what it is.
    SetQuota {
        process: usize,
        limiter: usize,
        key: u8,
        percent: u32,
    },
    UnsetQuota {
        process: usize,
        limiter: usize,
        key: u8,
    },
    Drain {
        process: usize,
        within: u64,
    },
    /// A process of this release starts.
    Start {
        release: usize,
    },
    /// The futures and limiters of a process are dropped.
    Stop {
        process: usize,
    },
    /// The process is killed: nothing that it does from then on reaches the store.
    Kill {
        process: usize,
    },
    /// The runtime of a process ends, with its callers and tasks, and a new one goes on.
    EndRuntime {
        process: usize,
    },
    /// Nothing of a process runs for a while.
    Stall {
        process: usize,
        span: u64,
    },
    /// The store is unreachable for a while.
    Away {
        span: u64,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) process: usize,
    pub(crate) parts: Vec<Part>,
    pub(crate) class: Option<&'static str>,
    pub(crate) deadline: Option<u64>,
    pub(crate) via: Via,
    pub(crate) patience: Patience,
    /// How long the request takes to the upstream, besides what each takes: up to the transit slack.
    pub(crate) transit: u64,
    /// How long the call takes.
    pub(crate) takes: u64,
    pub(crate) then: Then,
    /// The true cost, as a part of the estimate in per cent, and how long after the request was sent it is
    /// stated. `None`: never.
    pub(crate) actual: Option<(u32, u64)>,
}

/// What a request counts under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part {
    pub(crate) limiter: usize,
    pub(crate) key: u8,
    pub(crate) cost: u32,
    pub(crate) tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    Acquire,
    Layer,
    /// A layer inside of a retry policy.
    Retry,
}

/// When a caller gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    Endless,
    Time(u64),
    Polls(u32),
    /// The caller polls so often, then not for this time. Then it waits, or drops the future.
    Idle {
        polls: u32,
        rest: u64,
        waits: bool,
    },
}

/// What becomes of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Given back after this time.
    GiveBack(u64),
    /// Used after this time if it is still valid, else given back.
    Use { after: u64, answer: Answer },
}

/// What the upstream answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Ok,
    /// 403, which a guard counts.
    Bad,
    /// 429, with the wait in seconds if one is stated.
    Refused(Option<u64>),
    /// The call fails, or its permit is dropped.
    Nothing,
}

impl History {
    /// Returns the readable list of the history.
    pub(crate) fn list(&self) -> String {
        let features: Vec<_> = self.features.all().collect();
        let mut list = format!(
            "features {features:?}\nstore {:?}, {:?}\n",
            self.store, self.on_store_error
        );
        for (number, limiter) in self.limiters.iter().enumerate() {
            let _ = writeln!(list, "limiter {number}: {limiter:?}");
        }
        let _ = writeln!(
            list,
            "releases {:?}, processes {:?}",
            self.releases, self.processes
        );
        let mut at = 0;
        for (number, (pause, step)) in self.steps.iter().enumerate() {
            at += pause;
            let _ = writeln!(list, "{number:>4} at {at:>6} ms: {step:?}");
        }
        list
    }
}
