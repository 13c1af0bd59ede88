//! Properties of a paced queue that processes share over a network that delays and loses messages.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::pace_state::PaceState;
use super::paced_queue::{Flight, PacedQueue};
use super::sync_state::CasRequest;
use crate::clock;
use crate::error::StoreError;
use crate::pacing::{Dice, Pace, StateCodec, Traffic};
use crate::signal::Signal;
use crate::store::{Recipients, Register};
use crate::wait_queue::Number;

const INTERVAL: Duration = Duration::from_millis(1000);
const REQUEST: Duration = Duration::from_millis(100);
/// Long enough for every request to leave.
const END: Duration = Duration::from_secs(300);

/// One request per second for all processes.
#[derive(Debug)]
struct EachSecond;

impl Pace for EachSecond {
    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        Some(traffic.last_sent? + INTERVAL)
    }

    fn share(&mut self, _: &mut StateCodec<'_>) -> bool {
        true
    }
}

/// The faults of the network.
#[derive(Clone, Copy, Debug)]
struct Network {
    /// The longest one-way trip, in ms.
    trip: u64,
    /// The probability that a call or its answer is lost, and that a notification is.
    lost: f64,
    lost_news: f64,
}

/// What a process does, and when, in ms.
#[derive(Clone, Copy, Debug)]
enum Step {
    Join(usize, u64),
    /// The first waiter of the process gives up.
    Leave(usize, u64),
    Die(usize, u64),
}

fn steps(leaves: u32, deaths: u32) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..5_usize, 0..20_000_u64).prop_map(|(process, at)| Step::Join(process, at)),
        leaves => (0..5_usize, 0..20_000_u64).prop_map(|(process, at)| Step::Leave(process, at)),
        deaths => (0..4_usize, 0..20_000_u64).prop_map(|(process, at)| Step::Die(process, at)),
    ];
    prop::collection::vec(step, 1..40)
}

struct Process {
    queue: PacedQueue,
    waiting: Vec<(Number, Instant)>,
    flying: Vec<(Instant, Flight)>,
    /// The compare-and-set under way.
    call: Option<Call>,
    is_dead: bool,
}

struct Call {
    /// When the call reaches the store, and when the answer arrives.
    done_at: Instant,
    answer_at: Instant,
    exchange: CasRequest,
    answer: Option<Register>,
    is_lost: bool,
}

struct World {
    start: Instant,
    now: Instant,
    dice: Dice,
    network: Network,
    processes: Vec<Process>,
    register: Option<(u64, Vec<u8>, Instant)>,
    events: Vec<(Instant, usize, Register)>,
    /// When each request left, and when it had arrived.
    left: Vec<(Instant, Instant)>,
    exchanges: usize,
}

impl World {
    fn new(seed: u64, network: Network) -> Self {
        let start = clock::now() + Duration::from_secs(3600);
        let processes = (1..=5).map(|id| {
            let mut queue = PacedQueue::new(Box::new(EachSecond), Dice::seeded(id), END, start);
            queue.share(id, id, start);
            Process {
                queue,
                waiting: Vec::new(),
                flying: Vec::new(),
                call: None,
                is_dead: false,
            }
        });
        World {
            start,
            now: start,
            dice: Dice::seeded(seed),
            network,
            processes: processes.collect(),
            register: None,
            events: Vec::new(),
            left: Vec::new(),
            exchanges: 0,
        }
    }

    fn trip(&mut self) -> Duration {
        Duration::from_micros((self.network.trip as f64 * 1000.0 * self.dice.roll()) as u64)
    }

    fn step(&mut self, step: Step) {
        let (Step::Join(index, _) | Step::Leave(index, _) | Step::Die(index, _)) = step;
        let (now, process) = (self.now, &mut self.processes[index]);
        match step {
            _ if process.is_dead => {}
            Step::Join(..) => process.waiting.push((process.queue.arrived(now), now)),
            Step::Leave(..) if !process.waiting.is_empty() => {
                let (number, _) = process.waiting.remove(0);
                assert!(process.queue.leave(number));
            }
            Step::Leave(..) => {}
            Step::Die(..) => process.is_dead = true,
        }
        self.look_after(index);
    }

    /// Lets a process do everything that is due now.
    fn look_after(&mut self, index: usize) {
        let now = self.now;
        let process = &mut self.processes[index];
        if process.is_dead {
            return;
        }
        while let Some(flight) = process.queue.depart(now) {
            let (number, since) = process.waiting.remove(0);
            assert_eq!(number, flight.number, "first come, first served");
            process.flying.push((now + REQUEST, flight));
            self.left.push((now, since));
        }
        if process.call.is_none()
            && let Some(exchange) = process.queue.next_cas(now)
        {
            self.exchanges += 1;
            let (there, back) = (self.trip(), self.trip());
            let is_lost = self.dice.roll() < self.network.lost;
            // The request or the answer is lost.
            let is_lost_there = is_lost && self.dice.roll() < 0.5;
            let timeout = Duration::from_millis(250);
            let done_at = if is_lost_there {
                now + END * 2
            } else {
                now + there
            };
            let answer_at = if is_lost {
                now + timeout
            } else {
                now + there + back
            };
            let call = Call {
                done_at,
                answer_at,
                exchange,
                answer: None,
                is_lost,
            };
            self.processes[index].call = Some(call);
        }
    }

    /// Lets the store serve the call of a process.
    fn serve(&mut self, index: usize) {
        let now = self.now;
        let Some(call) = &mut self.processes[index].call else {
            return;
        };
        let (version, value, age) = match &self.register {
            Some((version, value, at)) => (*version, value.clone(), now - *at),
            None => (0, Vec::new(), Duration::ZERO),
        };
        let mut register = Register {
            version,
            value,
            age,
            ..Register::default()
        };
        if let Some(value) = call.exchange.value.take()
            && call.exchange.seen == version
        {
            self.register = Some((version + 1, value.clone(), now));
            register = Register {
                version: version + 1,
                changed: true,
                ..Register::default()
            };
            let told: Vec<usize> = match call.exchange.tell {
                Recipients::None => Vec::new(),
                Recipients::One(id) => vec![id as usize - 1],
                Recipients::All => (0..5).collect(),
            };
            call.answer = Some(register);
            for to in told {
                if self.dice.roll() >= self.network.lost_news {
                    let register = Register {
                        version: version + 1,
                        value: value.clone(),
                        ..Register::default()
                    };
                    let at = now + self.trip();
                    self.events.push((at, to, register));
                }
            }
        } else {
            call.answer = Some(register);
        }
    }

    /// Returns the moment of the next event.
    fn next(&self) -> Option<Instant> {
        let alive = self.processes.iter().filter(|process| !process.is_dead);
        let own = alive.flat_map(
            |Process {
                 queue,
                 flying,
                 call,
                 ..
             }| {
                let call = call.as_ref();
                let exchange = queue.next_cas_at().filter(|_| call.is_none());
                let (done, answer) = (
                    call.filter(|call| call.answer.is_none())
                        .map(|call| call.done_at),
                    call.map(|call| call.answer_at),
                );
                [
                    queue.look_at(),
                    exchange,
                    done,
                    answer,
                    flying.first().map(|(at, _)| *at),
                ]
            },
        );
        own.flatten()
            .chain(self.events.iter().map(|(at, ..)| *at))
            .min()
    }

    fn run(&mut self, until: Instant) {
        let mut rounds = 0;
        while let Some(at) = self.next().filter(|at| *at <= until) {
            rounds += 1;
            assert!(rounds < 200_000, "it turns in circles");
            self.now = self.now.max(at);
            let now = self.now;
            for index in 0..self.processes.len() {
                if self.processes[index].is_dead {
                    continue;
                }
                if self.processes[index]
                    .call
                    .as_ref()
                    .is_some_and(|call| call.answer.is_none() && call.done_at <= now)
                {
                    self.serve(index);
                }
                let process = &mut self.processes[index];
                if let Some(call) = process.call.take_if(|call| call.answer_at <= now) {
                    let answer = call
                        .answer
                        .filter(|_| !call.is_lost)
                        .ok_or(StoreError::Lost);
                    process.queue.cas_answered(answer, now);
                }
                while process.flying.first().is_some_and(|(at, _)| *at <= now) {
                    let (_, flight) = process.flying.remove(0);
                    assert!(
                        process
                            .queue
                            .answered(flight, &Signal::default(), now)
                            .is_none()
                    );
                }
                self.look_after(index);
            }
            let heard: Vec<_> = self.events.extract_if(.., |(at, ..)| *at <= now).collect();
            for (_, to, register) in heard {
                if !self.processes[to].is_dead {
                    self.processes[to].queue.register_changed(register, now);
                    self.look_after(to);
                }
            }
        }
        self.now = self.now.max(until);
    }

    fn play(seed: u64, network: Network, mut steps: Vec<Step>) -> World {
        let at = |step: &Step| match step {
            Step::Join(_, at) | Step::Leave(_, at) | Step::Die(_, at) => *at,
        };
        steps.sort_by_key(at);
        let mut world = World::new(seed, network);
        for step in steps {
            world.run(world.start + Duration::from_millis(at(&step)));
            world.step(step);
        }
        world.run(world.start + END);
        world
    }

    fn all_have_left(&self) -> Result<(), TestCaseError> {
        for process in self.processes.iter().filter(|process| !process.is_dead) {
            prop_assert!(
                process.waiting.is_empty(),
                "{} wait for ever",
                process.waiting.len()
            );
            prop_assert_eq!((process.queue.in_flight(), process.queue.waiting()), (0, 0));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn shared_queue_is_fifo_at_one_pace(seed in any::<u64>(), steps in steps(2, 0)) {
        let world = World::play(seed, Network { trip: 0, lost: 0.0, lost_news: 0.0 }, steps);
        world.all_have_left()?;
        for pair in world.left.windows(2) {
            prop_assert!(pair[1].0 - pair[0].0 >= INTERVAL, "one slot was taken twice");
            prop_assert!(pair[1].1 >= pair[0].1, "one was overtaken");
        }
    }

    #[test]
    fn slow_network_doubles_no_slot_and_nearly_keeps_order(
        seed in any::<u64>(),
        trip in 1..30_u64,
        // If a waiter gives up, its turn goes to the next one of its process, which may have
        // arrived later than others.
        steps in steps(0, 0),
    ) {
        let world = World::play(seed, Network { trip, lost: 0.0, lost_news: 0.0 }, steps);
        world.all_have_left()?;
        // A one-way trip is known to half a round trip, and each of five processes may know the
        // moments from another.
        let blur = Duration::from_millis(6 * trip);
        for pair in world.left.windows(2) {
            prop_assert!(pair[1].0 - pair[0].0 + blur >= INTERVAL, "one slot was taken twice");
            let late = Duration::from_millis(40 * trip);
            prop_assert!(pair[1].1 + late >= pair[0].1, "one was overtaken");
        }
        // A queue that polled the store would need more.
        prop_assert!(world.exchanges <= 20 + 12 * world.left.len() + 12 * 40, "{} exchanges", world.exchanges);
    }

    #[test]
    fn surviving_processes_send_every_request_despite_losses(
        seed in any::<u64>(),
        lost in 0.0..0.5_f64,
        lost_news in 0.0..=1.0_f64,
        steps in steps(2, 2),
    ) {
        let world = World::play(seed, Network { trip: 5, lost, lost_news }, steps);
        world.all_have_left()?;
    }
}

fn line_of(id: u64, now: Instant) -> PacedQueue {
    let mut queue = PacedQueue::new(Box::new(EachSecond), Dice::seeded(id), END, now);
    queue.share(id, id, now);
    queue
}

/// Runs the compare-and-sets that are due, without a network. Returns the requests that left. The register is a version, a
/// value, and when that was written.
fn exchange(
    queue: &mut PacedQueue,
    register: &mut (u64, Vec<u8>, Instant),
    now: Instant,
) -> Vec<Flight> {
    let mut left = Vec::new();
    for _ in 0..10 {
        let Some(CasRequest { seen, value, .. }) = queue.next_cas(now) else {
            return left;
        };
        let changed = value.is_some() && seen == register.0;
        if let Some(value) = value.filter(|_| changed) {
            *register = (register.0 + 1, value, now);
        }
        let value = if changed {
            Vec::new()
        } else {
            register.1.clone()
        };
        let answer = Register {
            version: register.0,
            changed,
            value,
            age: now - register.2,
            ..Register::default()
        };
        queue.cas_answered(Ok(answer), now);
        left.extend(std::iter::from_fn(|| queue.depart(now)));
    }
    panic!("it turns in circles");
}

#[test]
fn damaged_register_blocks_no_process_for_ever() {
    let now = clock::now() + Duration::from_secs(3600);
    let mut register = (0, Vec::new(), now);
    let (mut one, mut other) = (line_of(1, now), line_of(2, now));
    one.arrived(now);
    assert_eq!(
        exchange(&mut one, &mut register, now).len(),
        1,
        "it is the first of all"
    );
    one.arrived(now);
    exchange(&mut one, &mut register, now);
    for index in 0..register.1.len() / 8 {
        let mut spoilt = register.clone();
        spoilt.1[8 * index..][..8].copy_from_slice(&1e9_f64.to_le_bytes());
        let mut third = line_of(3, now);
        third.arrived(now);
        exchange(&mut third, &mut spoilt, now);
        let at = third.next_cas_at().unwrap_or(now);
        assert!(
            at <= now + Duration::from_secs(90_000),
            "number {index}: {:?}",
            at - now
        );
    }
    // A register that cannot be read counts as empty: what the process knows counts, once.
    other.arrived(now);
    exchange(&mut other, &mut register, now);
    other.hold_until(now + Duration::from_secs(5), now);
    let at = other.slot();
    let mut spoilt = register.clone();
    spoilt.0 += 1;
    spoilt.1.truncate(spoilt.1.len() - 8);
    exchange(&mut other, &mut spoilt, now);
    assert_eq!(other.slot(), at);
}

#[test]
fn dead_process_at_the_head_blocks_for_250_ms() {
    for hold in [Duration::ZERO, Duration::from_secs(60)] {
        let now = clock::now() + Duration::from_secs(3600);
        let mut register = (0, Vec::new(), now);
        let (mut one, mut other) = (line_of(1, now), line_of(2, now));
        one.arrived(now);
        assert_eq!(
            exchange(&mut one, &mut register, now).len(),
            1,
            "it is the first of all"
        );
        one.hold_until(now + hold, now);
        one.arrived(now);
        exchange(&mut one, &mut register, now);
        // The first process dies.
        other.arrived(now);
        assert!(exchange(&mut other, &mut register, now).is_empty());
        let slot = now + hold.max(INTERVAL);
        let turn = other.next_cas_at().expect("it waits for its turn");
        assert_eq!(turn, slot + Duration::from_millis(250), "held for {hold:?}");
        assert_eq!(exchange(&mut other, &mut register, turn).len(), 1);
    }
}

/// A pace that lets every request leave at once.
#[derive(Debug)]
struct Open;

impl Pace for Open {
    fn share(&mut self, _: &mut StateCodec<'_>) -> bool {
        true
    }
}

#[test]
fn dead_waiting_process_is_forgotten_when_no_request_waits() {
    let now = clock::now() + Duration::from_secs(3600);
    let mut register = (0, Vec::new(), now);
    let (mut one, mut other) = (line_of(1, now), line_of(2, now));
    for queue in [&mut one, &mut other] {
        queue.local.pace_state.pace = Box::new(Open);
    }
    let mut told = Vec::new();
    for step in 0..12_000_u32 {
        // The other process sends 100 requests per second.
        let now = now + Duration::from_millis(10) * step;
        other.arrived(now);
        let first = other.depart(now);
        let flights = first
            .into_iter()
            .chain(exchange(&mut other, &mut register, now));
        for flight in flights.collect::<Vec<_>>() {
            assert!(other.answered(flight, &Signal::default(), now).is_none());
        }
        if step == 100 {
            // The first process waits for the end of a short hold, and dies.
            exchange(&mut one, &mut register, now);
            one.hold_until(now + INTERVAL, now);
            one.arrived(now);
            exchange(&mut one, &mut register, now);
            let (version, value, _) = register.clone();
            other.register_changed(
                Register {
                    version,
                    value,
                    ..Register::default()
                },
                now,
            );
        }
        told.push(register.0);
    }
    let of_last_second = told[told.len() - 1] - told[told.len() - 101];
    assert!(
        of_last_second <= 11,
        "{of_last_second} exchanges in a second"
    );
}

/// A pace that writes more than it reads.
#[derive(Debug)]
struct Forgetful(bool);

impl Pace for Forgetful {
    fn share(&mut self, codec: &mut StateCodec<'_>) -> bool {
        if !std::mem::replace(&mut self.0, true) {
            codec.number(&mut 1.0);
        }
        codec.number(&mut 2.0);
        true
    }
}

#[test]
fn pace_that_reads_back_too_little_is_unshared() {
    let kind = |pace: Box<dyn Pace>| PaceState::new(pace, END, clock::now()).kind();
    assert!(kind(Box::new(EachSecond)).is_some());
    assert_eq!(kind(Box::new(Forgetful(false))), None);
}

fn is_held(queue: &PacedQueue, now: Instant) -> bool {
    queue.held_until().is_some_and(|until| until > now)
}

#[test]
fn released_hold_does_not_come_back() {
    let start = clock::now() + Duration::from_secs(3600);
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    let mut register = (0, Vec::new(), start);
    let (mut one, mut other) = (line_of(1, start), line_of(2, start));
    for queue in [&mut one, &mut other] {
        queue.arrived(start);
        exchange(queue, &mut register, start);
    }
    one.hold_until(at(3000), start);
    for queue in [&mut one, &mut other] {
        queue.arrived(at(1));
        exchange(queue, &mut register, at(1));
        assert!(is_held(queue, at(1)));
    }
    // The other process cannot reach the store while the first one releases the key.
    other.hold_until(at(3100), at(2));
    assert!(other.next_cas(at(2)).is_some());
    other.cas_answered(Err(StoreError::Lost), at(2));
    one.release(at(2));
    exchange(&mut one, &mut register, at(2));
    assert!(!is_held(&one, at(2)) && is_held(&other, at(2)));
    // The other process is back, and writes its events.
    for _ in 0..3 {
        exchange(&mut other, &mut register, at(60));
        exchange(&mut one, &mut register, at(60));
    }
    assert!(!is_held(&one, at(60)) && !is_held(&other, at(60)));
    // A later hold is in force.
    other.hold_until(at(3100), at(61));
    exchange(&mut other, &mut register, at(61));
    one.arrived(at(61));
    exchange(&mut one, &mut register, at(61));
    assert!(is_held(&one, at(61)) && is_held(&other, at(61)));
}

/// The random part by which a process waits longer in an outage is its own.
#[test]
fn failed_calls_move_no_hold() {
    let start = clock::now() + Duration::from_secs(3600);
    let mut register = (0, Vec::new(), start);
    let (mut one, mut other) = (line_of(1, start), line_of(2, start));
    for queue in [&mut one, &mut other] {
        queue.arrived(start);
        exchange(queue, &mut register, start);
    }
    let end = start + Duration::from_secs(60);
    one.hold_until(end, start);
    let is_end = |queue: &PacedQueue| {
        let until = queue.held_until().expect("a hold");
        until.max(end) - until.min(end) < Duration::from_millis(1)
    };
    let mut now = start + Duration::from_secs(1);
    for queue in [&mut one, &mut other] {
        queue.arrived(now);
        exchange(queue, &mut register, now);
    }
    for _ in 0..10 {
        now += Duration::from_secs(1);
        other.events_missed(now);
        assert!(other.next_cas(now).is_some());
        other.cas_answered(Err(StoreError::Lost), now);
        assert!(is_end(&other), "the hold of the process itself");
        assert!(other.slot() >= other.held_until(), "no request leaves");
        now += Duration::from_secs(1);
        exchange(&mut other, &mut register, now);
        assert!(is_end(&other), "the hold of the process that is back");
        one.events_missed(now);
        exchange(&mut one, &mut register, now);
        assert!(is_end(&one), "the hold of the fleet");
    }
    // A hold that begins in an outage is one of the fleet, however short.
    other.events_missed(now);
    assert!(other.next_cas(now).is_some());
    other.cas_answered(Err(StoreError::Lost), now);
    let end = end + Duration::from_millis(5);
    other.hold_until(end, now);
    now += Duration::from_secs(1);
    exchange(&mut other, &mut register, now);
    one.events_missed(now);
    exchange(&mut one, &mut register, now);
    assert!(one.held_until() >= Some(end - Duration::from_millis(1)));
}

/// The upstream always refuses the requests of one process. Those of the other process leave first.
#[test]
fn request_refused_again_is_behind_those_of_other_processes() {
    let now = clock::now() + Duration::from_secs(3600);
    let at = |millis: u64| now + Duration::from_millis(millis);
    let mut register = (0, Vec::new(), now);
    let (mut one, mut other) = (line_of(1, now), line_of(2, now));
    one.arrived(now);
    let flight = exchange(&mut one, &mut register, now)
        .pop()
        .expect("it is the first");
    other.arrived(at(10));
    exchange(&mut other, &mut register, at(10));
    let refused = Signal::default().with_refusal(Some(http::StatusCode::TOO_MANY_REQUESTS));
    let refused = one.answered(flight, &refused, at(100)).expect("a refusal");
    one.back_behind(refused, at(100));
    for queue in [&mut one, &mut other] {
        queue.events_missed(at(200));
        exchange(queue, &mut register, at(200));
    }
    assert_eq!(exchange(&mut one, &mut register, at(1001)).len(), 0);
    assert_eq!(exchange(&mut other, &mut register, at(1001)).len(), 1);
    assert_eq!(exchange(&mut one, &mut register, at(2002)).len(), 1);
}
