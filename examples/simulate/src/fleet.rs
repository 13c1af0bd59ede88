//! A fleet in virtual time: its events, in the order of their time and then of their planning.
//!
//! This file has what all runs have in common: callers, the server, consumers outside of the fleet,
//! and what is counted. The [process](super::process) of a caller decides when its requests leave.

use std::time::{Duration, Instant};

use http::Response;

use super::brief::Brief;
use super::caller::{Caller, OnWay, OpenCall};
use super::clock;
use super::error::RunError;
use super::gates::{Reply, RunContext, Ticket};
use super::headers::HeaderModel;
use super::metrics::{Metrics, Tally};
use super::numbers::{exponential, span};
use super::process::Process;
use super::queue_process::QueueProcess;
use super::scenario::Scenario;
use super::schedule::{Event, Schedule};
use super::server::ServerState;
use super::strategy::Strategy;
use super::trace::Trace;
use tollgate::__lab::Dice;
use tollgate::__lab::read_signal;
use tollgate::Limited;

/// The pause before the next try after a gate's error that does not say when to retry.
const PAUSE: Duration = Duration::from_secs(1);

/// One run of a scenario.
pub(super) struct Fleet<'a> {
    scenario: &'a Scenario,
    /// The beginning of the run.
    pub(super) origin: Instant,
    /// The time since the beginning.
    pub(super) now: Duration,
    pub(super) schedule: Schedule,
    processes: Vec<Process>,
    callers: Vec<Caller>,
    /// What gates share, if there are any.
    context: Option<RunContext>,
    server: ServerState,
    headers: HeaderModel,
    dice: Dice,
    /// The waits of all calls that have ended, in seconds.
    waits: Vec<f64>,
    /// The requests that the server has accepted.
    taken: f64,
    /// When the last caller stopped, in seconds.
    pub(super) clear: Option<f64>,
    pub(super) trace: Option<Trace>,
}

impl<'a> Fleet<'a> {
    /// Creates the fleet of `scenario`. `strategies` has the strategy of each group. Gates need a
    /// `context`.
    pub(super) fn new(
        scenario: &'a Scenario,
        strategies: &[Strategy],
        seed: u64,
        context: Option<RunContext>,
    ) -> Result<Self, RunError> {
        let origin = clock::now();
        let brief = Brief::new(scenario);
        let mut dice = Dice::seeded(seed);
        let mut processes = Vec::new();
        let mut callers = Vec::new();
        for (index, (group, strategy)) in scenario.fleet.iter().zip(strategies).enumerate() {
            for number in 0..group.procs {
                let own = Dice::seeded((dice.roll() * (1_u64 << 53) as f64) as u64);
                callers.extend(Caller::all_of(index, group, number, processes.len()));
                processes.push(Process::new(
                    strategy,
                    &brief,
                    own,
                    origin,
                    context.as_ref(),
                )?);
            }
        }
        let mut fleet = Fleet {
            scenario,
            origin,
            now: Duration::ZERO,
            schedule: Schedule::default(),
            processes,
            callers,
            context,
            server: ServerState::new(&scenario.server),
            headers: HeaderModel::new(&scenario.headers),
            dice,
            waits: Vec::new(),
            taken: 0.0,
            clear: None,
            trace: None,
        };
        fleet.plan_first();
        Ok(fleet)
    }

    /// Plans the first event of the server, of each caller and of each consumer outside of the
    /// fleet.
    fn plan_first(&mut self) {
        let scenario = self.scenario;
        for (index, (at, _)) in scenario.server.changes().iter().enumerate() {
            self.plan(span(*at), Event::Change(index));
        }
        for caller in 0..self.callers.len() {
            self.plan(span(self.callers[caller].join), Event::Call(caller));
        }
        for (index, strangers) in scenario.background.iter().enumerate() {
            self.plan_stranger(index, strangers.from);
        }
    }

    /// Returns when the run ends at the latest.
    pub(super) fn end(&self) -> Duration {
        span(self.scenario.duration)
    }

    /// Lets the next event happen.
    pub(super) fn happen_next(&mut self) {
        let Some((at, event)) = self.schedule.take_next() else {
            return;
        };
        self.now = at;
        match event {
            Event::Call(caller) => self.call(caller),
            Event::Again(caller) => self.enter(caller),
            Event::Judge(caller) => self.judge(caller),
            Event::Answer(caller) => self.answer(caller),
            Event::Look(process) => {
                let moment = self.moment();
                if self.queue(process).is_to_look(moment) {
                    self.pump(process);
                }
            }
            Event::Stranger(index) => self.stranger(index),
            Event::Change(index) => {
                let (at, change) = &self.scenario.server.changes()[index];
                self.server.change(change, *at);
            }
        }
    }

    /// Returns the metrics of the run.
    pub(super) fn metrics(&mut self) -> Metrics {
        let over = if self.clear.is_some() {
            self.now.as_secs_f64()
        } else {
            self.scenario.duration
        };
        let open = self
            .callers
            .iter()
            .filter(|caller| !caller.is_poison)
            .filter_map(|caller| caller.call.as_ref());
        let longest_open = open.map(|call| call.wait(over)).fold(0.0, f64::max);
        self.count_waiting(over);
        let foreign: Vec<bool> = self
            .scenario
            .fleet
            .iter()
            .map(|group| group.strategy.is_some())
            .collect();
        Tally {
            callers: &self.callers,
            waits: std::mem::take(&mut self.waits),
            longest_open,
            taken: self.taken,
            supply: self.supply(over),
            over,
            clear: self.clear,
            fair_groups: self.scenario.fair_groups.as_deref(),
            foreign: &foreign,
            store_calls: self
                .context
                .as_ref()
                .map_or(0, |context| context.store.calls()),
        }
        .metrics()
    }

    /// Counts the sleeps of the callers that wait when the run is over. A caller that sleeps by
    /// itself counts with its whole sleep.
    fn count_waiting(&mut self, over: f64) {
        for caller in &mut self.callers {
            let Some(OpenCall {
                last, on_way: None, ..
            }) = caller.call
            else {
                continue;
            };
            caller.max_sleep = caller.max_sleep.max(over - last);
        }
        let queues = self.processes.iter().filter_map(|process| match process {
            Process::Queue(queue) => Some(queue),
            Process::Gate(_) => None,
        });
        for (index, until) in queues.flat_map(QueueProcess::asleep) {
            let caller = &mut self.callers[index];
            let Some(OpenCall { last, .. }) = caller.call else {
                continue;
            };
            let until = until.saturating_duration_since(self.origin).as_secs_f64();
            caller.max_sleep = caller.max_sleep.max(until - last);
        }
    }

    /// Returns how many requests the server can accept after the warm-up.
    fn supply(&self, over: f64) -> f64 {
        let supply = |until| self.scenario.server.supply(until);
        match self.scenario.warm_up > 0.0 {
            true => supply(over) - supply(self.scenario.warm_up),
            false => supply(over),
        }
    }

    /// Returns whether waits and accepted requests count by now.
    fn is_warm(&self) -> bool {
        self.now.as_secs_f64() >= self.scenario.warm_up
    }

    fn plan(&mut self, at: Duration, event: Event) {
        self.schedule.plan(at, event);
    }

    fn moment(&self) -> Instant {
        self.origin + self.now
    }

    /// Begins the next call of a caller, unless the caller rests or leaves.
    fn call(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let caller = &mut self.callers[index];
        if now >= caller.leave {
            caller.done = true;
            return;
        }
        if let Some(rest) = caller.rest(now, self.scenario.fleet[caller.group].duty) {
            return self.plan(self.now + span(rest), Event::Call(index));
        }
        caller.call = Some(OpenCall::new(now));
        let process = caller.process;
        let moment = self.moment();
        match &mut self.processes[process] {
            Process::Queue(queue) => {
                queue.arrived(index, moment);
                self.pump(process);
            }
            Process::Gate(_) => self.enter(index),
        }
    }

    fn queue(&mut self, process: usize) -> &mut QueueProcess {
        self.processes[process].queue()
    }

    /// Sends every request of a process that may leave, and plans when to look again.
    fn pump(&mut self, index: usize) {
        let moment = self.moment();
        while let Some((caller, flight)) = self.queue(index).depart(moment) {
            self.send(caller, Ticket::Flight(flight));
        }
        if let Some(at) = self.queue(index).next_look() {
            self.plan(
                at.saturating_duration_since(self.origin),
                Event::Look(index),
            );
        }
    }

    /// Starts the call of a caller at its gate, for the first time or again.
    fn enter(&mut self, index: usize) {
        let caller = &mut self.callers[index];
        caller
            .call
            .as_mut()
            .expect("the caller is in a call")
            .passed = None;
        let path = match caller.is_poison {
            true => format!("/poison-{index}"),
            false => format!("/users/{index}"),
        };
        self.processes[caller.process].gate().call(index, path);
    }

    /// Sends the request of a caller.
    pub(super) fn send(&mut self, index: usize, ticket: Ticket) {
        let now = self.now.as_secs_f64();
        let caller = &mut self.callers[index];
        let latency = self.scenario.fleet[caller.group]
            .latency
            .unwrap_or(self.scenario.latency);
        let trip = latency.drawn(&mut self.dice);
        let call = caller.call.as_mut().expect("only a call is sent");
        let held = now - call.last;
        call.last = now;
        let back_at = self.now + span(trip);
        let before = call.on_way.replace(OnWay {
            ticket,
            back_at,
            response: None,
        });
        assert!(
            before.is_none(),
            "a call has one request in flight at a time"
        );
        caller.max_sleep = caller.max_sleep.max(held);
        caller.sent += 1;
        if let Some(trace) = &mut self.trace {
            trace.held(now, index, held);
        }
        self.plan(self.now + span(trip / 2.0), Event::Judge(index));
    }

    /// Lets the server judge the request of a caller.
    fn judge(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let verdict = match self.callers[index].is_poison {
            true => self.server.poisoned(now),
            false => self.server.judge(now),
        };
        self.taken += f64::from(u8::from(verdict.ok && self.is_warm()));
        let response = self.headers.respond(&verdict, now, &mut self.dice);
        if let Some(trace) = &mut self.trace {
            trace.judged(now, index, &verdict);
        }
        let call = self.callers[index]
            .call
            .as_mut()
            .expect("its request is in flight");
        let on_way = call.on_way.as_mut().expect("its request is in flight");
        on_way.response = Some(response);
        let back_at = on_way.back_at;
        self.plan(back_at, Event::Answer(index));
    }

    /// Takes the response to the request of a caller.
    fn answer(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let moment = self.moment();
        let (ticket, response) = self.callers[index].answered(now);
        let process = self.callers[index].process;
        match ticket {
            Ticket::Flight(flight) => {
                match self
                    .queue(process)
                    .answered(flight, &read_signal(&response, moment), moment)
                {
                    Some(refused) => self.queue(process).back(refused, moment),
                    None => self.succeeded(index),
                }
                self.pump(process);
            }
            Ticket::Reply(reply) => self.reply(index, reply, response),
        }
    }

    /// Hands the response to the gate of a caller.
    fn reply(&mut self, index: usize, reply: Reply, response: Response<()>) {
        if reply.send(response).is_err() {
            // The gate has dropped the call, so the call ends here.
            self.left(index, &Ok(()));
        }
    }

    /// Ends the call of a caller at its gate. If the call has not succeeded, the caller tries it
    /// again.
    pub(super) fn left(&mut self, index: usize, ended: &Result<(), Limited>) {
        let call = self.callers[index]
            .call
            .as_ref()
            .expect("the caller is in a call");
        if call.on_way.is_some() {
            // The call ends when the response arrives.
            return;
        }
        let pause = match (call.passed, ended) {
            (Some(false), _) if self.callers[index].is_poison => PAUSE,
            (Some(true), _) => return self.succeeded(index),
            (Some(false), _) => Duration::ZERO,
            (None, Err(limited)) => limited
                .retry_after()
                .filter(|wait| !wait.is_zero())
                .unwrap_or(PAUSE),
            (None, Ok(())) => PAUSE,
        };
        self.plan(self.now + pause, Event::Again(index));
    }

    /// Ends the call of a caller with success. The caller stops, or plans its next call.
    fn succeeded(&mut self, index: usize) {
        let call = self.callers[index]
            .call
            .take()
            .expect("the caller is in a call");
        if self.is_warm() {
            self.waits.push(call.wait(call.last));
        }
        let stops = self
            .scenario
            .stop_under
            .zip(call.shown)
            .is_some_and(|(under, left)| left <= under);
        if stops {
            self.callers[index].done = true;
            if self.callers.iter().all(|caller| caller.done) {
                self.clear = Some(self.now.as_secs_f64());
            }
            return;
        }
        let think = self.scenario.fleet[self.callers[index].group].think;
        let pause = if think > 0.0 {
            exponential(&mut self.dice, think)
        } else {
            0.0
        };
        self.plan(self.now + span(pause), Event::Call(index));
    }

    /// Lets the server judge a request from outside of the fleet.
    fn stranger(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let verdict = self.server.judge(now);
        if verdict.ok && self.is_warm() && self.scenario.util_background != Some(false) {
            self.taken += 1.0;
        }
        self.plan_stranger(index, now);
    }

    fn plan_stranger(&mut self, index: usize, from: f64) {
        let strangers = &self.scenario.background[index];
        let at = from + exponential(&mut self.dice, 1.0 / strangers.rate);
        if strangers.to.is_none_or(|to| at < to) {
            self.plan(span(at), Event::Stranger(index));
        }
    }
}
