//! A fleet in virtual time: what happens when, in the order of time and then of planning.
//!
//! What is the same for all is here: callers, the server, strangers, and what is counted. What keeps a call from leaving is
//! its process: a [line](super::queue_process), or a [gate](super::gates).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::caller::{Caller, OnWay, OpenCall, Ticket};
use super::gates::{GateHandle, RunContext};
use super::headers::{HeaderModel, ServerResponse};
use super::metrics::{Metrics, Tally};
use super::queue_process::QueueProcess;
use super::scenario::Scenario;
use super::server::ServerState;
use super::strategy::{Brief, Make, Strategy};
use super::trace::Trace;
use super::{RunError, exponential, span};
use crate::rng::Dice;
use crate::signal::Signal;

/// What keeps the calls of a process from leaving.
pub(super) enum Process {
    Line(QueueProcess),
    Gate(GateHandle),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Call(usize),
    Again(usize),
    Judge(usize),
    Answer(usize),
    Look(usize),
    Stranger(usize),
    Change(usize),
}

/// A run of one scenario.
pub(super) struct Fleet<'a> {
    scenario: &'a Scenario,
    pub(super) origin: Instant,
    pub(super) now: Duration,
    pub(super) events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    planned: u64,
    pub(super) processes: Vec<Process>,
    pub(super) callers: Vec<Caller>,
    /// What gates share, where there are any.
    context: Option<RunContext>,
    server: ServerState,
    headers: HeaderModel,
    dice: Dice,
    waits: Vec<f64>,
    taken: f64,
    pub(super) clear: Option<f64>,
    pub(super) trace: Option<Trace>,
}

impl<'a> Fleet<'a> {
    /// `cast` has the strategy of each group. Gates need `grounds`.
    pub(super) fn new(
        scenario: &'a Scenario,
        strategies: &[Strategy],
        seed: u64,
        context: Option<RunContext>,
    ) -> Result<Self, RunError> {
        let origin = crate::clock::now();
        let brief = Brief::new(scenario);
        let mut dice = Dice::seeded(seed);
        let (mut processes, mut callers) = (Vec::new(), Vec::new());
        for (index, (group, strategy)) in scenario.fleet.iter().zip(strategies).enumerate() {
            for number in 0..group.procs {
                let own = Dice::seeded((dice.roll() * (1_u64 << 53) as f64) as u64);
                let later = group.stagger * number as f64;
                for _ in 0..group.tasks {
                    callers.push(Caller {
                        process: processes.len(),
                        group: index,
                        sent: 0,
                        refused: 0,
                        passed: 0,
                        max_sleep: 0.0,
                        join: group.join + later,
                        leave: group.leave.map_or(f64::INFINITY, |leave| leave + later),
                        call: None,
                        done: false,
                    });
                }
                processes.push(match strategy.make() {
                    Make::Pace(make) => Process::Line(QueueProcess::new(make(&brief), own, origin)),
                    Make::Gate(make) => {
                        let context = context.as_ref().expect("it is run with grounds");
                        let gate = make(&brief, context.store.link());
                        let gate = gate.map_err(|error| RunError::gate(strategy.name(), error))?;
                        Process::Gate(context.gate(gate))
                    }
                });
            }
        }
        let mut fleet = Fleet {
            scenario,
            origin,
            now: Duration::ZERO,
            events: BinaryHeap::new(),
            planned: 0,
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
        for (index, (at, _)) in scenario.server.changes().iter().enumerate() {
            fleet.plan(span(*at), Event::Change(index));
        }
        for caller in 0..fleet.callers.len() {
            fleet.plan(span(fleet.callers[caller].join), Event::Call(caller));
        }
        for (index, strangers) in scenario.background.iter().enumerate() {
            fleet.plan_stranger(index, strangers.from);
        }
        Ok(fleet)
    }

    /// Lets everything happen, in a fleet without gates.
    pub(super) fn run(&mut self) -> Metrics {
        let end = self.end();
        while self.clear.is_none() && self.events.peek().is_some_and(|Reverse((at, ..))| *at <= end) {
            self.happen_next();
        }
        self.metrics()
    }

    /// When it ends at the latest.
    pub(super) fn end(&self) -> Duration {
        span(self.scenario.duration)
    }

    /// Lets the next event happen.
    pub(super) fn happen_next(&mut self) {
        let Some(Reverse((at, _, event))) = self.events.pop() else { return };
        self.now = at;
        match event {
            Event::Call(caller) => self.call(caller),
            Event::Again(caller) => self.enter(caller),
            Event::Judge(caller) => self.judge(caller),
            Event::Answer(caller) => self.answer(caller),
            Event::Look(process) => {
                let moment = self.moment();
                if self.line(process).is_to_look(moment) {
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

    /// What came of it.
    pub(super) fn metrics(&mut self) -> Metrics {
        let over = if self.clear.is_some() { self.now.as_secs_f64() } else { self.scenario.duration };
        let open = self.callers.iter().filter_map(|caller| caller.call.as_ref());
        let open = open.map(|call| match call.on_way {
            Some(_) => call.last - call.since - call.trips,
            None => over - call.since - call.trips,
        });
        let longest_open = open.fold(0.0, f64::max);
        self.count_the_held(over);
        let foreign: Vec<bool> = self.scenario.fleet.iter().map(|group| group.strategy.is_some()).collect();
        Tally {
            callers: &self.callers,
            waits: std::mem::take(&mut self.waits),
            longest_open,
            taken: self.taken,
            supply: self.scenario.server.supply(over),
            clear: self.clear,
            fair_groups: self.scenario.fair_groups.as_deref(),
            foreign: &foreign,
            store_calls: self.context.as_ref().map_or(0, |context| context.store.calls()),
        }
        .metrics()
    }

    /// Those who are held back at the end count, too; one who sleeps by itself for as long as it meant to.
    fn count_the_held(&mut self, over: f64) {
        for caller in &mut self.callers {
            let Some(OpenCall { last, on_way: None, .. }) = caller.call else { continue };
            caller.max_sleep = caller.max_sleep.max(over - last);
        }
        let lines = self.processes.iter().filter_map(|process| match process {
            Process::Line(line) => Some(line),
            Process::Gate(_) => None,
        });
        for (index, until) in lines.flat_map(QueueProcess::asleep) {
            let caller = &mut self.callers[index];
            let Some(OpenCall { last, .. }) = caller.call else { continue };
            let until = until.saturating_duration_since(self.origin).as_secs_f64();
            caller.max_sleep = caller.max_sleep.max(until - last);
        }
    }

    pub(super) fn plan(&mut self, at: Duration, event: Event) {
        self.planned += 1;
        self.events.push(Reverse((at, self.planned, event)));
    }

    fn moment(&self) -> Instant {
        self.origin + self.now
    }

    /// One begins a call, if it is not its time to rest or to leave.
    fn call(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let caller = &mut self.callers[index];
        if now >= caller.leave {
            caller.done = true;
            return;
        }
        if let Some((on, off)) = self.scenario.fleet[caller.group].duty {
            let into = (now - caller.join).rem_euclid(on + off);
            if into >= on {
                let wake = self.now + span(on + off - into);
                return self.plan(wake, Event::Call(index));
            }
        }
        caller.call =
            Some(OpenCall { since: now, last: now, trips: 0.0, on_way: None, passed: None, shown: None });
        let process = caller.process;
        let moment = self.moment();
        match &mut self.processes[process] {
            Process::Line(line) => {
                line.join(index, moment);
                self.pump(process);
            }
            Process::Gate(_) => self.enter(index),
        }
    }

    fn line(&mut self, process: usize) -> &mut QueueProcess {
        match &mut self.processes[process] {
            Process::Line(line) => line,
            Process::Gate(_) => unreachable!("a gate looks for itself"),
        }
    }

    /// Lets all leave who may, and plans the next look.
    fn pump(&mut self, index: usize) {
        let moment = self.moment();
        while let Some((caller, flight)) = self.line(index).depart(moment) {
            self.send(caller, Ticket::Flight(flight));
        }
        if let Some(at) = self.line(index).next_look() {
            self.plan(at.saturating_duration_since(self.origin), Event::Look(index));
        }
    }

    pub(super) fn send(&mut self, index: usize, ticket: Ticket) {
        let now = self.now.as_secs_f64();
        let caller = &mut self.callers[index];
        let latency = self.scenario.fleet[caller.group].latency.unwrap_or(self.scenario.latency);
        let trip = latency.drawn(&mut self.dice);
        let call = caller.call.as_mut().expect("only a call is sent");
        let held = now - call.last;
        caller.max_sleep = caller.max_sleep.max(held);
        caller.sent += 1;
        call.last = now;
        let back_at = self.now + span(trip);
        let before = call.on_way.replace(OnWay { ticket, back_at, said: None });
        assert!(before.is_none(), "a call has one request on its way at a time");
        if let Some(trace) = &mut self.trace {
            trace.held(now, index, held);
        }
        self.plan(self.now + span(trip / 2.0), Event::Judge(index));
    }

    fn judge(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let verdict = self.server.judge(now);
        self.taken += f64::from(u8::from(verdict.ok));
        let said = self.headers.say(&verdict, now, &mut self.dice);
        if let Some(trace) = &mut self.trace {
            trace.judged(now, index, &verdict);
        }
        let call = self.callers[index].call.as_mut().expect("it is on its way");
        let on_way = call.on_way.as_mut().expect("it is on its way");
        on_way.said = Some(said);
        let back_at = on_way.back_at;
        self.plan(back_at, Event::Answer(index));
    }

    fn answer(&mut self, index: usize) {
        let (now, moment) = (self.now.as_secs_f64(), self.moment());
        let caller = &mut self.callers[index];
        let call = caller.call.as_mut().expect("it was on its way");
        let OnWay { ticket, said, .. } = call.on_way.take().expect("it was on its way");
        let ServerResponse { response, remaining } = said.expect("it was judged");
        call.trips += now - call.last;
        call.last = now;
        call.shown = remaining;
        let passed = response.status().is_success();
        call.passed = Some(passed);
        *if passed { &mut caller.passed } else { &mut caller.refused } += 1;
        let process = caller.process;
        match ticket {
            Ticket::Flight(flight) => {
                match self.line(process).answered(flight, &Signal::read(&response), moment) {
                    Some(refused) => self.line(process).back(refused, moment),
                    None => self.succeeded(index),
                }
                self.pump(process);
            }
            Ticket::Reply(reply) => self.reply(index, reply, response),
        }
    }

    /// The call of one has ended, as it was to.
    pub(super) fn succeeded(&mut self, index: usize) {
        let call = self.callers[index].call.take().expect("it has called");
        self.waits.push(call.last - call.since - call.trips);
        let stops = self.scenario.stop_under.zip(call.shown).is_some_and(|(under, left)| left <= under);
        self.next(index, stops);
    }

    /// A call has ended: its caller stops, or thinks, or calls again.
    fn next(&mut self, index: usize, stops: bool) {
        if stops {
            self.callers[index].done = true;
            if self.callers.iter().all(|caller| caller.done) {
                self.clear = Some(self.now.as_secs_f64());
            }
            return;
        }
        let think = self.scenario.fleet[self.callers[index].group].think;
        let pause = if think > 0.0 { exponential(&mut self.dice, think) } else { 0.0 };
        self.plan(self.now + span(pause), Event::Call(index));
    }

    fn stranger(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let verdict = self.server.judge(now);
        if verdict.ok && self.scenario.util_background != Some(false) {
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
