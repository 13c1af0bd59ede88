//! One who calls, and the call it is in.

use std::time::Duration;

use super::gates::Reply;
use super::headers::ServerResponse;
use crate::throttle::Flight;

/// One who calls, again and again.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) process: usize,
    pub(super) group: usize,
    pub(super) sent: u64,
    pub(super) refused: u64,
    pub(super) passed: u64,
    pub(super) max_sleep: f64,
    /// When it joins and leaves.
    pub(super) join: f64,
    pub(super) leave: f64,
    /// The call it is in.
    pub(super) call: Option<OpenCall>,
    pub(super) done: bool,
}

/// A call that has not ended.
#[derive(Debug)]
pub(super) struct OpenCall {
    pub(super) since: f64,
    /// Since when it is held back, or on its way.
    pub(super) last: f64,
    /// What its requests took.
    pub(super) trips: f64,
    pub(super) on_way: Option<OnWay>,
    /// Whether the server has accepted its last request, if it has answered.
    pub(super) passed: Option<bool>,
    /// What the last answer showed to be left.
    pub(super) shown: Option<f64>,
}

#[derive(Debug)]
pub(super) struct OnWay {
    pub(super) ticket: Ticket,
    pub(super) back_at: Duration,
    pub(super) said: Option<ServerResponse>,
}

/// To what an answer goes.
#[derive(Debug)]
pub(super) enum Ticket {
    /// The line of its process.
    Flight(Flight),
    /// The call itself, at its gate.
    Reply(Reply),
}
