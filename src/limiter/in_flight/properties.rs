//! Properties of the in-flight limit under a bad network.
//!
//! Three processes claim slots from the store's rule, with or without shares of the limit. Claims are lost, late, repeated and overtake
//! each other, and answers are lost. The slots in use never exceed the limit. Once the network is
//! good again, all slots are in use or free.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::KeyCalls;
use super::claims::ClaimTerms;
use crate::clock;
use crate::key::Key;
use crate::limit::{HolderUpdate, InFlightSlots, Micros};
use crate::limiter::queue::next_number;
use crate::store::{Claim, StoreEvent};
use crate::wait_queue::Number;
use crate::wakers::Wakers;

const TTL: Micros = 10_000_000;

#[derive(Clone, Debug)]
enum Step {
    Enter(usize),
    /// A request enters that cannot wait.
    EnterImpatient(usize),
    End(usize, usize),
    Leave(usize, usize),
    /// One of the claims on their way arrives. It stays on its way if the flag is set, and arrives
    /// again.
    ClaimArrives(usize, bool),
    ClaimLost(usize),
    EventArrives(usize),
    EventLost(usize),
    /// The store client repeats the last claim.
    Repeat(usize),
    Dies(usize),
    TimePasses(Micros),
}

fn step(processes: usize) -> impl Strategy<Value = Step> {
    let process = 0..processes;
    prop_oneof![
        6 => process.clone().prop_map(Step::Enter),
        1 => process.clone().prop_map(Step::EnterImpatient),
        4 => (process.clone(), 0usize..9).prop_map(|(process, which)| Step::End(process, which)),
        1 => (process.clone(), 0usize..9).prop_map(|(process, which)| Step::Leave(process, which)),
        8 => (0usize..9, prop::bool::weighted(0.1)).prop_map(|(which, again)| Step::ClaimArrives(which, again)),
        1 => (0usize..9).prop_map(Step::ClaimLost),
        8 => process.clone().prop_map(Step::EventArrives),
        1 => process.clone().prop_map(Step::EventLost),
        1 => process.clone().prop_map(Step::Repeat),
        1 => process.prop_map(Step::Dies),
        1 => (0..TTL / 4).prop_map(Step::TimePasses),
    ]
}

struct Process {
    calls: KeyCalls,
    /// The requests that wait for a slot.
    waiting: Vec<Number>,
    /// The slots that its calls use.
    in_use: Vec<Number>,
    /// Its last claim.
    last: Option<Claim>,
    /// Events of the store on their way to this process.
    events: VecDeque<HolderUpdate>,
    /// When its last claim arrived.
    claimed_at: Micros,
    /// How often the last claim was repeated.
    again: u64,
}

struct World {
    limit: u32,
    /// The share of each process, which is a class of its own.
    shares: [u8; 3],
    now: Micros,
    slots: InFlightSlots,
    processes: Vec<Process>,
    /// Claims on their way to the store.
    claims: Vec<Claim>,
}

fn process() -> Process {
    Process {
        calls: KeyCalls::new(None, World::instant()),
        waiting: Vec::new(),
        in_use: Vec::new(),
        last: None,
        events: VecDeque::new(),
        claimed_at: 0,
        again: 0,
    }
}

impl World {
    fn instant() -> Instant {
        crate::clock::now()
    }

    fn act(&mut self, index: usize, act: impl FnOnce(&mut KeyCalls, &mut Wakers)) {
        let process = &mut self.processes[index];
        act(&mut process.calls, &mut Wakers::default());
        let terms = ClaimTerms {
            limit: self.limit,
            class: index as u32,
            share: self.shares[index],
            ttl: Duration::from_micros(TTL),
        };
        if let Some(claim) = process.calls.claim(Key::ALL, terms) {
            let claim = Claim {
                number: claim.number << 20,
                ..claim
            };
            process.last = Some(claim);
            process.again = 0;
            self.claims.push(claim);
        }
        let Process {
            calls,
            waiting,
            in_use,
            ..
        } = process;
        waiting.retain(|&number| match calls.collect(number, clock::now()) {
            Some(Ok(slot)) => {
                in_use.push(slot);
                false
            }
            Some(_) => false,
            None => true,
        });
    }

    fn arrive(&mut self, claim: Claim) {
        if let Some(process) = self
            .processes
            .iter_mut()
            .find(|process| process.calls.holder() == claim.holder)
        {
            process.claimed_at = self.now;
        }
        if self.slots.is_empty() {
            // A store forgets a key without holders, and starts with an empty state.
            self.slots = InFlightSlots::default();
        }
        let processes = &mut self.processes;
        self.slots.claim(self.now, claim, |update| {
            if let Some(process) = processes
                .iter_mut()
                .find(|process| process.calls.holder() == update.id)
            {
                process.events.push_back(update);
            }
        });
    }

    fn on_event(&mut self, index: usize) {
        if let Some(update) = self.processes[index].events.pop_front() {
            let HolderUpdate {
                number,
                granted,
                others_wait,
                version,
                ..
            } = update;
            let event = StoreEvent::in_flight(number >> 20, granted, others_wait, version);
            self.act(index, |calls, wakers| {
                calls.on_event(event, World::instant(), wakers)
            });
        }
    }

    fn repeat(&mut self, index: usize) {
        let process = &mut self.processes[index];
        if let Some(last) = process.last {
            process.again += 1;
            self.claims.push(Claim {
                number: last.number + process.again,
                ..last
            });
        }
    }

    fn step(&mut self, step: &Step) {
        let now = World::instant();
        match *step {
            Step::Enter(index) => {
                let number = next_number();
                self.processes[index].waiting.push(number);
                self.act(index, |calls, _| calls.enter(number, false, clock::now()));
            }
            Step::EnterImpatient(index) => {
                let number = next_number();
                self.processes[index].waiting.push(number);
                self.act(index, |calls, _| calls.enter(number, true, clock::now()));
            }
            Step::End(index, which) => {
                let in_use = &mut self.processes[index].in_use;
                if !in_use.is_empty() {
                    let number = in_use.swap_remove(which % in_use.len());
                    self.act(index, |calls, wakers| calls.end(number, now, wakers));
                }
            }
            Step::Leave(index, which) => {
                let waiting = &mut self.processes[index].waiting;
                if !waiting.is_empty() {
                    let number = waiting.swap_remove(which % waiting.len());
                    self.act(index, |calls, wakers| calls.leave(number, now, wakers));
                }
            }
            Step::ClaimArrives(which, again) => {
                if !self.claims.is_empty() {
                    let which = which % self.claims.len();
                    let claim = if again {
                        self.claims[which]
                    } else {
                        self.claims.remove(which)
                    };
                    self.arrive(claim);
                }
            }
            Step::ClaimLost(which) => {
                if !self.claims.is_empty() {
                    self.claims.remove(which % self.claims.len());
                }
            }
            Step::EventArrives(index) => self.on_event(index),
            Step::EventLost(index) => _ = self.processes[index].events.pop_front(),
            Step::Repeat(index) => self.repeat(index),
            Step::Dies(index) => {
                // Its claims are still on their way.
                self.processes[index] = process();
            }
            Step::TimePasses(span) => {
                self.now += span;
                // A live process repeats its claim every third of the time to live.
                for index in 0..self.processes.len() {
                    if self.processes[index].claimed_at + TTL / 3 < self.now {
                        self.repeat(index);
                        if let Some(claim) = self.processes[index].last {
                            let again = self.processes[index].again;
                            self.arrive(Claim {
                                number: claim.number + again,
                                ..claim
                            });
                        }
                    }
                }
            }
        }
        let in_use: usize = self
            .processes
            .iter()
            .map(|process| process.in_use.len())
            .sum();
        assert!(
            in_use <= self.limit as usize,
            "{in_use} slots in use, limit {}",
            self.limit
        );
    }

    /// Delivers all claims and answers, four times.
    fn settle(&mut self) {
        self.claims.clear();
        for _ in 0..4 {
            for index in 0..self.processes.len() {
                self.repeat(index);
            }
            for claim in std::mem::take(&mut self.claims) {
                self.arrive(claim);
            }
            for index in 0..self.processes.len() {
                while !self.processes[index].events.is_empty() {
                    self.on_event(index);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(histories::config(200))]

    #[test]
    fn limit_is_kept_and_no_slot_is_lost(
        limit in 1u32..6,
        shares in prop::sample::select(vec![[0, 0, 0], [50, 50, 0], [20, 60, 20], [1, 99, 0]]),
        steps in prop::collection::vec(step(3), 0..120),
    ) {
        let processes = (0..3).map(|_| process()).collect();
        let mut world = World { limit, shares, now: 0, slots: InFlightSlots::default(), processes, claims: Vec::new() };
        for step in &steps {
            world.step(step);
        }
        // The claims of crashed processes expire.
        for _ in 0..8 {
            world.settle();
            world.step(&Step::TimePasses(TTL / 4));
        }
        world.settle();
        let in_use: usize = world.processes.iter().map(|process| process.in_use.len()).sum();
        let waiting: usize = world.processes.iter().map(|process| process.waiting.len()).sum();
        prop_assert_eq!(in_use, (in_use + waiting).min(limit as usize));
        // When all calls have ended, no slot is in use.
        while world.processes.iter().any(|process| !process.in_use.is_empty()) {
            for index in 0..3 {
                world.step(&Step::End(index, 0));
            }
            world.settle();
        }
        world.slots.forget(world.now);
        prop_assert_eq!(world.slots.usage(limit), (0, limit));
    }
}
