//! The servers of scenarios: how they count requests, and which they accept.

use std::collections::VecDeque;

use super::scenario::{Change, Server};
use super::weighted::WeightedWindows;

/// The server's decision about a request, and what is left after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verdict {
    pub(super) ok: bool,
    pub(super) remaining: f64,
    pub(super) limit: f64,
    /// The length of the window, in seconds.
    pub(super) window: f64,
    /// Seconds until the next window begins, or the bucket is full.
    pub(super) reset: f64,
    /// Seconds until the server would accept a request.
    pub(super) wait: f64,
}

impl Verdict {
    /// Returns the verdict of a window that has used this much and ends in `reset`.
    fn of_window(ok: bool, limit: f64, window: f64, used: f64, reset: f64) -> Self {
        Verdict {
            ok,
            remaining: (limit - used).max(0.0),
            limit,
            window,
            reset,
            wait: reset,
        }
    }
}

/// The counters of a server. Times are in seconds since the start of the run.
#[derive(Debug)]
pub(super) enum ServerState {
    Bucket {
        cap: f64,
        refill: f64,
        tokens: f64,
        last: Option<f64>,
    },
    Fixed {
        limit: f64,
        window: f64,
        phase: f64,
        used: f64,
        number: f64,
    },
    Sliding {
        limit: f64,
        window: f64,
        accepted: VecDeque<f64>,
    },
    First {
        limit: f64,
        window: f64,
        used: f64,
        /// When the window ends. The next one begins with the first request after that.
        end: f64,
    },
    Weighted(WeightedWindows),
    Dual {
        short: Box<ServerState>,
        long: Box<ServerState>,
    },
}

impl ServerState {
    pub(super) fn new(server: &Server) -> Self {
        match *server {
            Server::Bucket {
                cap, refill, start, ..
            } => ServerState::Bucket {
                cap,
                refill,
                tokens: start,
                last: None,
            },
            Server::Fixed {
                limit,
                window,
                phase,
                used,
                ..
            } => ServerState::Fixed {
                limit,
                window,
                phase,
                used,
                number: (phase / window).floor(),
            },
            Server::Sliding { limit, window, .. } => ServerState::Sliding {
                limit,
                window,
                accepted: VecDeque::new(),
            },
            Server::First { limit, window } => ServerState::First {
                limit,
                window,
                used: 0.0,
                end: f64::NEG_INFINITY,
            },
            Server::Weighted {
                limit,
                window,
                counts_refused,
            } => ServerState::Weighted(WeightedWindows::new(limit, window, counts_refused)),
            Server::Dual {
                ref short,
                ref long,
            } => ServerState::Dual {
                short: Box::new(ServerState::new(short)),
                long: Box::new(ServerState::new(long)),
            },
        }
    }

    /// Judges a request that arrives at `now`.
    pub(super) fn judge(&mut self, now: f64) -> Verdict {
        self.advance(now);
        let ok = self.is_free();
        match ok {
            true => self.take(now),
            false => self.refuse(),
        }
        self.verdict(ok, now)
    }

    /// Refuses a request that arrives at `now`, for another reason than the limit.
    pub(super) fn poisoned(&mut self, now: f64) -> Verdict {
        self.advance(now);
        Verdict {
            wait: 1.0,
            ..self.verdict(false, now)
        }
    }

    /// Changes the limits of the server.
    pub(super) fn change(&mut self, change: &Change, now: f64) {
        self.advance(now);
        match self {
            ServerState::Bucket {
                cap,
                refill,
                tokens,
                ..
            } => {
                *cap = change.cap.unwrap_or(*cap);
                *refill = change.refill.unwrap_or(*refill);
                *tokens = change.tokens.unwrap_or(*tokens);
            }
            ServerState::Fixed {
                limit,
                window,
                used,
                ..
            } => {
                *limit = change.limit.unwrap_or(*limit);
                *window = change.window.unwrap_or(*window);
                *used = change.used.unwrap_or(*used);
            }
            ServerState::Sliding { limit, window, .. } => {
                *limit = change.limit.unwrap_or(*limit);
                *window = change.window.unwrap_or(*window);
            }
            ServerState::First { .. } | ServerState::Weighted(_) | ServerState::Dual { .. } => {}
        }
    }

    /// Refills the bucket, or begins a new window, if that is due.
    fn advance(&mut self, now: f64) {
        match self {
            ServerState::Bucket {
                cap,
                refill,
                tokens,
                last,
            } => {
                let since = now - *last.get_or_insert(now);
                if tokens < cap {
                    *tokens = cap.min(*tokens + since * *refill);
                }
                *last = Some(now);
            }
            ServerState::Fixed {
                window,
                phase,
                used,
                number,
                ..
            } => {
                let current = ((now + *phase) / *window).floor();
                if current != *number {
                    (*number, *used) = (current, 0.0);
                }
            }
            ServerState::Sliding {
                window, accepted, ..
            } => {
                while accepted.front().is_some_and(|at| at + *window <= now) {
                    accepted.pop_front();
                }
            }
            ServerState::First {
                window, used, end, ..
            } => {
                if now >= *end {
                    (*used, *end) = (0.0, now + *window);
                }
            }
            ServerState::Weighted(windows) => windows.advance(now),
            ServerState::Dual { short, long } => {
                short.advance(now);
                long.advance(now);
            }
        }
    }

    fn is_free(&self) -> bool {
        match self {
            ServerState::Bucket { tokens, .. } => *tokens >= 1.0,
            ServerState::Fixed { limit, used, .. } | ServerState::First { limit, used, .. } => {
                *used + 1.0 <= *limit
            }
            ServerState::Sliding {
                limit, accepted, ..
            } => accepted.len() as f64 + 1.0 <= *limit,
            ServerState::Weighted(windows) => windows.is_free(),
            ServerState::Dual { short, long } => short.is_free() && long.is_free(),
        }
    }

    fn take(&mut self, now: f64) {
        match self {
            ServerState::Bucket { tokens, .. } => *tokens -= 1.0,
            ServerState::Fixed { used, .. } | ServerState::First { used, .. } => *used += 1.0,
            ServerState::Sliding { accepted, .. } => accepted.push_back(now),
            ServerState::Weighted(windows) => windows.take(),
            ServerState::Dual { short, long } => {
                short.take(now);
                long.take(now);
            }
        }
    }

    /// Counts a refused request, if the server counts those.
    fn refuse(&mut self) {
        match self {
            ServerState::Weighted(windows) => windows.refuse(),
            ServerState::Dual { short, long } => {
                short.refuse();
                long.refuse();
            }
            _ => {}
        }
    }

    fn verdict(&self, ok: bool, now: f64) -> Verdict {
        match self {
            ServerState::Bucket {
                cap,
                refill,
                tokens,
                ..
            } => Verdict {
                ok,
                remaining: tokens.floor().max(0.0),
                limit: *cap,
                window: cap / refill,
                reset: (cap - tokens) / refill,
                wait: (1.0 - tokens).max(0.0) / refill,
            },
            ServerState::Fixed {
                limit,
                window,
                phase,
                used,
                number,
            } => {
                let reset = (number + 1.0) * window - phase - now;
                Verdict::of_window(ok, *limit, *window, *used, reset)
            }
            ServerState::Sliding {
                limit,
                window,
                accepted,
            } => {
                let reset = accepted.front().map_or(0.0, |at| at + window - now);
                Verdict::of_window(ok, *limit, *window, accepted.len() as f64, reset)
            }
            ServerState::First {
                limit,
                window,
                used,
                end,
            } => Verdict::of_window(ok, *limit, *window, *used, end - now),
            ServerState::Weighted(windows) => windows.verdict(ok),
            ServerState::Dual { short, long } => {
                let wait = short.verdict(ok, now).wait.max(if long.is_free() {
                    0.0
                } else {
                    long.verdict(ok, now).wait
                });
                Verdict {
                    wait,
                    ..long.verdict(ok, now)
                }
            }
        }
    }
}

impl Server {
    /// Returns how many requests the server can accept in `duration` seconds: the tokens at the
    /// start and the later refill.
    pub(super) fn supply(&self, duration: f64) -> f64 {
        match self {
            Server::Bucket {
                refill,
                start,
                changes,
                ..
            } => {
                let (mut supply, mut rate, mut since) = (*start, *refill, 0.0);
                for (at, change) in changes {
                    let at = at.min(duration);
                    supply += rate * (at - since);
                    since = at;
                    rate = change.refill.unwrap_or(rate);
                }
                supply + rate * (duration - since)
            }
            // The last window counts in full.
            Server::Fixed {
                limit,
                window,
                phase,
                ..
            } => limit * (((duration + phase) / window).floor() + 1.0),
            Server::Sliding { limit, window, .. }
            | Server::First { limit, window }
            | Server::Weighted { limit, window, .. } => limit * duration / window,
            Server::Dual { long, .. } => long.supply(duration),
        }
    }

    /// Returns the changes of the server's limits and their times.
    pub(super) fn changes(&self) -> &[(f64, Change)] {
        match self {
            Server::Bucket { changes, .. }
            | Server::Fixed { changes, .. }
            | Server::Sliding { changes, .. } => changes,
            Server::First { .. } | Server::Weighted { .. } | Server::Dual { .. } => &[],
        }
    }
}
