//! A fleet in virtual time: what happens when, in the order of time and then of planning.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::headers::{Said, Voice};
use super::lines::Shared;
use super::metrics::{Metrics, Tally};
use super::scenario::{Latency, Scenario};
use super::server::Desk;
use super::strategy::{Brief, Strategy};
use super::trace::Trace;
use crate::gate::throttle::Flight;
use crate::jitter::Dice;
use crate::signal::Signal;

/// One who calls, again and again.
#[derive(Debug)]
pub(super) struct Caller {
    process: usize,
    pub(super) group: usize,
    pub(super) sent: u64,
    pub(super) refused: u64,
    pub(super) passed: u64,
    pub(super) max_sleep: f64,
    /// When it joins and leaves.
    join: f64,
    leave: f64,
    /// The call it is in.
    call: Option<Open>,
    done: bool,
}

/// A call that has not ended.
#[derive(Debug)]
struct Open {
    since: f64,
    /// Since when it is held back, or on its way.
    last: f64,
    /// What its requests took.
    trips: f64,
    on_way: Option<OnWay>,
}

#[derive(Debug)]
struct OnWay {
    flight: Flight,
    back_at: Duration,
    said: Option<(Signal, Option<f64>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Call(usize),
    Judge(usize),
    Answer(usize),
    Look(usize),
    Stranger(usize),
    Change(usize),
}

/// A run of one scenario.
pub(super) struct Fleet<'a> {
    scenario: &'a Scenario,
    origin: Instant,
    now: Duration,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    planned: u64,
    processes: Vec<Shared>,
    callers: Vec<Caller>,
    desk: Desk,
    voice: Voice,
    dice: Dice,
    waits: Vec<f64>,
    taken: f64,
    clear: Option<f64>,
    pub(super) trace: Option<Trace>,
}

impl<'a> Fleet<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        strategy: &Strategy,
        others: &dyn Fn(&str) -> Strategy,
        seed: u64,
    ) -> Self {
        let origin = crate::clock::now();
        let brief = Brief {
            hint: scenario.hint.map(|(limit, window)| (limit, span(window))),
            start_interval: span(scenario.start_interval),
        };
        let mut dice = Dice::seeded(seed);
        let (mut processes, mut callers) = (Vec::new(), Vec::new());
        for (index, group) in scenario.fleet.iter().enumerate() {
            let other = group.strategy.as_deref().map(others);
            let strategy = other.as_ref().unwrap_or(strategy);
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
                processes.push(Shared::new(strategy.pace(&brief), own, origin));
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
            desk: Desk::new(&scenario.server),
            voice: Voice::new(&scenario.headers),
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
        fleet
    }

    /// Lets everything happen.
    pub(super) fn run(&mut self) -> Metrics {
        let end = span(self.scenario.duration);
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at > end || self.clear.is_some() {
                break;
            }
            self.now = at;
            match event {
                Event::Call(caller) => self.call(caller),
                Event::Judge(caller) => self.judge(caller),
                Event::Answer(caller) => self.answer(caller),
                Event::Look(process) => {
                    if self.processes[process].is_to_look(self.origin + at) {
                        self.pump(process);
                    }
                }
                Event::Stranger(index) => self.stranger(index),
                Event::Change(index) => {
                    let (at, change) = &self.scenario.server.changes()[index];
                    self.desk.change(change, *at);
                }
            }
        }
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
        }
        .metrics()
    }

    /// Those who are held back at the end count, too; one who sleeps by itself for as long as it meant to.
    fn count_the_held(&mut self, over: f64) {
        for process in &self.processes {
            for (caller, asleep_until) in process.held() {
                let Caller { call, max_sleep, .. } = &mut self.callers[caller];
                let Some(Open { last, on_way: None, .. }) = call else { continue };
                let until =
                    asleep_until.map(|until| until.saturating_duration_since(self.origin).as_secs_f64());
                *max_sleep = max_sleep.max(until.unwrap_or(over).max(over) - *last);
            }
        }
    }

    fn plan(&mut self, at: Duration, event: Event) {
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
        caller.call = Some(Open { since: now, last: now, trips: 0.0, on_way: None });
        let process = caller.process;
        let moment = self.moment();
        self.processes[process].join(index, moment);
        self.pump(process);
    }

    /// Lets all leave who may, and plans the next look.
    fn pump(&mut self, index: usize) {
        let moment = self.moment();
        while let Some((caller, flight)) = self.processes[index].depart(moment) {
            self.send(caller, flight);
        }
        if let Some(at) = self.processes[index].next_look() {
            self.plan(at.saturating_duration_since(self.origin), Event::Look(index));
        }
    }

    fn send(&mut self, index: usize, flight: Flight) {
        let now = self.now.as_secs_f64();
        let caller = &mut self.callers[index];
        let Latency(low, high, tail) =
            self.scenario.fleet[caller.group].latency.unwrap_or(self.scenario.latency);
        let mut trip = self.dice.between(low, high);
        if tail > 0.0 {
            trip += exponential(&mut self.dice, tail);
        }
        let call = caller.call.as_mut().expect("only a call is sent");
        let held = now - call.last;
        caller.max_sleep = caller.max_sleep.max(held);
        caller.sent += 1;
        call.last = now;
        let back_at = self.now + span(trip);
        call.on_way = Some(OnWay { flight, back_at, said: None });
        if let Some(trace) = &mut self.trace {
            trace.held(now, index, held);
        }
        self.plan(self.now + span(trip / 2.0), Event::Judge(index));
    }

    fn judge(&mut self, index: usize) {
        let now = self.now.as_secs_f64();
        let verdict = self.desk.judge(now);
        self.taken += f64::from(u8::from(verdict.ok));
        let Said { response, remaining } = self.voice.say(&verdict, now, &mut self.dice);
        if let Some(trace) = &mut self.trace {
            trace.judged(now, index, &verdict);
        }
        let call = self.callers[index].call.as_mut().expect("it is on its way");
        let on_way = call.on_way.as_mut().expect("it is on its way");
        on_way.said = Some((Signal::read(&response), remaining));
        let back_at = on_way.back_at;
        self.plan(back_at, Event::Answer(index));
    }

    fn answer(&mut self, index: usize) {
        let (now, moment) = (self.now.as_secs_f64(), self.moment());
        let caller = &mut self.callers[index];
        let call = caller.call.as_mut().expect("it was on its way");
        let OnWay { flight, said, .. } = call.on_way.take().expect("it was on its way");
        let (signal, remaining) = said.expect("it was judged");
        call.trips += now - call.last;
        call.last = now;
        let process = caller.process;
        let line = &mut self.processes[process];
        match line.answered(flight, &signal, moment) {
            Some(refused) => {
                caller.refused += 1;
                line.back(refused, moment);
            }
            None => {
                caller.passed += 1;
                self.waits.push(now - call.since - call.trips);
                caller.call = None;
                let stops =
                    self.scenario.stop_under.zip(remaining).is_some_and(|(under, left)| left <= under);
                self.next(index, stops);
            }
        }
        self.pump(process);
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
        let verdict = self.desk.judge(now);
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

fn exponential(dice: &mut Dice, mean: f64) -> f64 {
    -mean * (1.0 - dice.roll()).ln()
}

fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
