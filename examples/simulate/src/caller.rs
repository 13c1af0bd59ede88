//! A caller, and the call that it is making.

use std::time::Duration;

use http::Response;

use super::gates::Ticket;
use super::headers::ServerResponse;
use super::scenario::Group;

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
    /// Whether the server refuses all its requests.
    pub(super) is_poison: bool,
    /// Whether the caller has stopped.
    pub(super) done: bool,
}

impl Caller {
    /// Creates the callers of process `number` of a group. `group_index` and `process` are their
    /// indices in the fleet.
    pub(super) fn all_of(
        group_index: usize,
        group: &Group,
        number: usize,
        process: usize,
    ) -> impl Iterator<Item = Caller> + use<> {
        let later = group.stagger * number as f64;
        let join = group.join + later;
        let leave = group.leave.map_or(f64::INFINITY, |leave| leave + later);
        let poison = if number == 0 { group.poison } else { 0 };
        (0..group.tasks).map(move |task| Caller {
            is_poison: task < poison,
            ..Caller::new(process, group_index, join, leave)
        })
    }

    /// Creates a caller that has not called yet.
    fn new(process: usize, group: usize, join: f64, leave: f64) -> Self {
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
            is_poison: false,
            done: false,
        }
    }

    /// Returns how many seconds the caller rests from `now` on; `None` if it may call. `duty` is
    /// how long it calls and how long it rests, in turn.
    pub(super) fn rest(&self, now: f64, duty: Option<(f64, f64)>) -> Option<f64> {
        let (on, off) = duty?;
        let into = (now - self.join).rem_euclid(on + off);
        (into >= on).then_some(on + off - into)
    }

    /// Takes the response to the request in flight, and returns it with its receiver.
    pub(super) fn answered(&mut self, now: f64) -> (Ticket, Response<()>) {
        let call = self.call.as_mut().expect("its request was in flight");
        let OnWay {
            ticket, response, ..
        } = call.on_way.take().expect("its request was in flight");
        let ServerResponse {
            response,
            remaining,
        } = response.expect("the server has judged it");
        call.trips += now - call.last;
        call.last = now;
        call.shown = remaining;
        let passed = response.status().is_success();
        call.passed = Some(passed);
        match passed {
            true => self.passed += 1,
            false => self.refused += 1,
        }
        (ticket, response)
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

impl OpenCall {
    /// Creates a call that begins now.
    pub(super) fn new(now: f64) -> Self {
        OpenCall {
            since: now,
            last: now,
            trips: 0.0,
            on_way: None,
            passed: None,
            shown: None,
        }
    }

    /// Returns how long the call has waited up to `now`, without the time of its requests. A
    /// request in flight ends the wait when it leaves.
    pub(super) fn wait(&self, now: f64) -> f64 {
        let end = if self.on_way.is_some() {
            self.last
        } else {
            now
        };
        end - self.since - self.trips
    }
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct OnWay {
    /// The receiver of the response.
    pub(super) ticket: Ticket,
    /// When its response arrives.
    pub(super) back_at: Duration,
    /// Its response, once the server has judged it.
    pub(super) response: Option<ServerResponse>,
}
