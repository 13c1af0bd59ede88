//! A caller, and the call that it is making.

use std::time::Duration;

use super::gates::Ticket;
use super::headers::ServerResponse;

/// A caller, which makes one call after the other. Times are in seconds.
#[derive(Debug)]
pub(super) struct Caller {
    /// The index of its process.
    pub(super) process: usize,
    /// The index of its group.
    pub(super) group: usize,
    /// Requests sent.
    pub(super) sent: u64,
    /// Requests that the server refused.
    pub(super) refused: u64,
    /// Requests that the server accepted.
    pub(super) passed: u64,
    /// The longest time before one request.
    pub(super) max_sleep: f64,
    /// When the caller joins.
    pub(super) join: f64,
    /// When the caller leaves.
    pub(super) leave: f64,
    /// The call that it is making.
    pub(super) call: Option<OpenCall>,
    /// Whether the caller has stopped.
    pub(super) done: bool,
}

impl Caller {
    /// Creates a caller that has not called yet.
    pub(super) fn new(process: usize, group: usize, join: f64, leave: f64) -> Self {
        Caller {
            process,
            group,
            sent: 0,
            refused: 0,
            passed: 0,
            max_sleep: 0.0,
            join,
            leave,
            call: None,
            done: false,
        }
    }
}

/// A call that has not ended. Times are in seconds.
#[derive(Debug)]
pub(super) struct OpenCall {
    /// When the call began.
    pub(super) since: f64,
    /// Since when the call waits, or its request is in flight.
    pub(super) last: f64,
    /// The time that its requests took.
    pub(super) trips: f64,
    /// The request in flight.
    pub(super) on_way: Option<OnWay>,
    /// Whether the server accepted its last request; `None` before the first answer.
    pub(super) passed: Option<bool>,
    /// What the last answer said is left.
    pub(super) shown: Option<f64>,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct OnWay {
    pub(super) ticket: Ticket,
    /// When its response arrives.
    pub(super) back_at: Duration,
    /// Its response, once the server has judged it.
    pub(super) response: Option<ServerResponse>,
}
