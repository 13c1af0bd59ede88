//! Gates and a store with a bad network between them: claims are lost, late, repeated and overtake each other, news is
//! lost. What gates sit on is never over, and when the network is good again nothing is lost.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::Flight;
use crate::clock;
use crate::key::Key;
use crate::limit::{Claimed, Micros, Seats, Told};
use crate::limiter::key_state::next_number;
use crate::limiter::queue::Number;
use crate::limiter::reservation::Settled;
use crate::store::{Claim, News};
use crate::wakers::Wakers;

const LIFE: Micros = 10_000_000;

#[derive(Clone, Debug)]
enum Step {
    Enter(usize),
    /// One who cannot wait.
    Try(usize),
    End(usize, usize),
    Leave(usize, usize),
    /// A claim arrives: any of those on their way; perhaps it arrives again later.
    Arrives(usize, bool),
    ClaimLost(usize),
    Heard(usize),
    NewsLost(usize),
    /// The last claim is said again.
    Repeat(usize),
    Dies(usize),
    Passes(Micros),
}

fn step(gates: usize) -> impl Strategy<Value = Step> {
    let gate = 0..gates;
    prop_oneof![
        6 => gate.clone().prop_map(Step::Enter),
        1 => gate.clone().prop_map(Step::Try),
        4 => (gate.clone(), 0usize..9).prop_map(|(gate, which)| Step::End(gate, which)),
        1 => (gate.clone(), 0usize..9).prop_map(|(gate, which)| Step::Leave(gate, which)),
        8 => (0usize..9, prop::bool::weighted(0.1)).prop_map(|(which, again)| Step::Arrives(which, again)),
        1 => (0usize..9).prop_map(Step::ClaimLost),
        8 => gate.clone().prop_map(Step::Heard),
        1 => gate.clone().prop_map(Step::NewsLost),
        1 => gate.clone().prop_map(Step::Repeat),
        1 => gate.prop_map(Step::Dies),
        1 => (0..LIFE / 4).prop_map(Step::Passes),
    ]
}

struct Gate {
    flight: Flight,
    waiting: Vec<Number>,
    sitting: Vec<Number>,
    last: Option<Claim>,
    news: VecDeque<Told>,
    /// When it last claimed.
    claimed_at: Micros,
    /// How often the last claim was said again.
    again: u64,
}

struct World {
    most: u32,
    now: Micros,
    seats: Seats,
    gates: Vec<Gate>,
    claims: Vec<Claim>,
}

fn gate() -> Gate {
    Gate {
        flight: Flight::new(World::instant()),
        waiting: Vec::new(),
        sitting: Vec::new(),
        last: None,
        news: VecDeque::new(),
        claimed_at: 0,
        again: 0,
    }
}

impl World {
    fn instant() -> Instant {
        crate::clock::now()
    }

    fn act(&mut self, index: usize, act: impl FnOnce(&mut Flight, &mut Wakers)) {
        let gate = &mut self.gates[index];
        act(&mut gate.flight, &mut Wakers::default());
        let life = Duration::from_micros(LIFE);
        if let Some(claim) = gate.flight.claim(Key::ALL, self.most, life) {
            let claim = Claim { number: claim.number << 20, ..claim };
            (gate.last, gate.again) = (Some(claim), 0);
            self.claims.push(claim);
        }
        let Gate { flight, waiting, sitting, .. } = gate;
        waiting.retain(|&number| match flight.collect(number, clock::now()) {
            Some(Settled::Granted(seat)) => {
                sitting.push(seat);
                false
            }
            Some(_) => false,
            None => true,
        });
    }

    fn arrive(&mut self, claim: Claim) {
        let Claim { holder: id, number, most, sits, wants, heard, .. } = claim;
        let claimed = Claimed { id, number, most, sits, wants, heard, life: LIFE };
        if let Some(gate) = self.gates.iter_mut().find(|gate| gate.flight.holder() == id) {
            gate.claimed_at = self.now;
        }
        if self.seats.is_empty() {
            // A store forgets what nobody uses, and begins anew.
            self.seats = Seats::default();
        }
        let gates = &mut self.gates;
        self.seats.claim(self.now, claimed, |told| {
            if let Some(gate) = gates.iter_mut().find(|gate| gate.flight.holder() == told.id) {
                gate.news.push_back(told);
            }
        });
    }

    fn hear(&mut self, index: usize) {
        if let Some(told) = self.gates[index].news.pop_front() {
            let Told { number, given, others_wait, version, .. } = told;
            let news = News::seats(number >> 20, given, others_wait, version);
            self.act(index, |flight, wakers| flight.hear(news, World::instant(), wakers));
        }
    }

    fn repeat(&mut self, index: usize) {
        let gate = &mut self.gates[index];
        if let Some(last) = gate.last {
            gate.again += 1;
            self.claims.push(Claim { number: last.number + gate.again, ..last });
        }
    }

    fn step(&mut self, step: &Step) {
        let now = World::instant();
        match *step {
            Step::Enter(index) => {
                let number = next_number();
                self.gates[index].waiting.push(number);
                self.act(index, |flight, _| flight.enter(number, false, clock::now()));
            }
            Step::Try(index) => {
                let number = next_number();
                self.gates[index].waiting.push(number);
                self.act(index, |flight, _| flight.enter(number, true, clock::now()));
            }
            Step::End(index, which) => {
                let sitting = &mut self.gates[index].sitting;
                if !sitting.is_empty() {
                    let number = sitting.swap_remove(which % sitting.len());
                    self.act(index, |flight, wakers| flight.end(number, now, wakers));
                }
            }
            Step::Leave(index, which) => {
                let waiting = &mut self.gates[index].waiting;
                if !waiting.is_empty() {
                    let number = waiting.swap_remove(which % waiting.len());
                    self.act(index, |flight, wakers| flight.leave(number, now, wakers));
                }
            }
            Step::Arrives(which, again) => {
                if !self.claims.is_empty() {
                    let which = which % self.claims.len();
                    let claim = if again { self.claims[which] } else { self.claims.remove(which) };
                    self.arrive(claim);
                }
            }
            Step::ClaimLost(which) => {
                if !self.claims.is_empty() {
                    self.claims.remove(which % self.claims.len());
                }
            }
            Step::Heard(index) => self.hear(index),
            Step::NewsLost(index) => _ = self.gates[index].news.pop_front(),
            Step::Repeat(index) => self.repeat(index),
            Step::Dies(index) => {
                // Its claims are on their way still.
                self.gates[index] = gate();
            }
            Step::Passes(span) => {
                self.now += span;
                // Those who live are never silent for a third of a life.
                for index in 0..self.gates.len() {
                    if self.gates[index].claimed_at + LIFE / 3 < self.now {
                        self.repeat(index);
                        if let Some(claim) = self.gates[index].last {
                            let again = self.gates[index].again;
                            self.arrive(Claim { number: claim.number + again, ..claim });
                        }
                    }
                }
            }
        }
        let sitting: usize = self.gates.iter().map(|gate| gate.sitting.len()).sum();
        assert!(sitting <= self.most as usize, "{sitting} sit, and {} may", self.most);
    }

    /// Everything arrives, and everybody has his turn.
    fn settle(&mut self) {
        self.claims.clear();
        for _ in 0..4 {
            for index in 0..self.gates.len() {
                self.repeat(index);
            }
            for claim in std::mem::take(&mut self.claims) {
                self.arrive(claim);
            }
            for index in 0..self.gates.len() {
                while !self.gates[index].news.is_empty() {
                    self.hear(index);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn never_over_and_nothing_lost(
        most in 1u32..6,
        steps in prop::collection::vec(step(3), 0..120),
    ) {
        let gates = (0..3).map(|_| gate()).collect();
        let mut world = World { most, now: 0, seats: Seats::default(), gates, claims: Vec::new() };
        for step in &steps {
            world.step(step);
        }
        // Those who died are silent for a life.
        for _ in 0..8 {
            world.settle();
            world.step(&Step::Passes(LIFE / 4));
        }
        world.settle();
        let sitting: usize = world.gates.iter().map(|gate| gate.sitting.len()).sum();
        let waiting: usize = world.gates.iter().map(|gate| gate.waiting.len()).sum();
        prop_assert_eq!(sitting, (sitting + waiting).min(most as usize));
        // And when all have had their turn, nothing is taken.
        while world.gates.iter().any(|gate| !gate.sitting.is_empty()) {
            for index in 0..3 {
                world.step(&Step::End(index, 0));
            }
            world.settle();
        }
        world.seats.forget(world.now);
        prop_assert_eq!(world.seats.usage(most), (0, most));
    }
}
