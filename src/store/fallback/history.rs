//! What a process keeps of a key: what the store granted it lately and, while it is alone, the ledger of its share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{LOOK, OFTEN, OTHERS, Share};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::key_map::Idle;
use crate::limit::{Charge, Ledger, Micros, Terms, Unused, micros_up};
use crate::rng::jittered;
use crate::store::lease::{STANDALONE, Standalone};
use crate::store::memory::book;
use crate::store::{Ask, Asked, Lease, Memory, Need, Refusal, Segment};

/// In so many parts each window is cut.
const PARTS: u64 = 20;

/// Within so long all find out that the store is away, if they call: so far back a share is the least that there was.
const FINDING_OUT: Micros = 2_000_000;

/// The fewest and the most windows to look back.
const WINDOWS: std::ops::RangeInclusive<u64> = 2..=8;

/// The most parts that are kept: some lie ahead.
const MOST_PARTS: usize = 400;

#[derive(Default)]
pub(super) struct Kept {
    /// What the store granted, by its slots in the store's time, in order.
    granted: VecDeque<Part>,
    /// A moment of the store's time, and the one of ours at which it was heard of.
    heard: (Micros, Micros),
    /// For how long use counts, with what a permit may be late: the length of a window. Windows are aligned in the
    /// store's time, so that they are the same for all.
    window: Micros,
    /// The first window all of which was seen.
    first: u64,
    alone: Option<Box<Alone>>,
    /// The share it had when it was alone last.
    last: Option<Share>,
}

/// Units with slots in one part of the time.
#[derive(Clone, Copy)]
struct Part {
    number: u64,
    /// The last of their slots.
    last: Micros,
    units: u64,
}

/// A process on its own.
pub(super) struct Alone {
    pub(super) terms: Arc<Terms>,
    ledger: Ledger,
    /// What it granted itself and the store does not know of, by its slots, in order.
    owed: VecDeque<Unused>,
    /// For how long that matters.
    memory: Micros,
    /// Since when the store answers again.
    back: Option<Micros>,
    /// When it was last asked for, and what the line remembered of the store then.
    asked: (Micros, Memory),
    /// When the store was last charged, or that was tried.
    tried: Micros,
    /// What the store is charged under.
    all: Arc<Terms>,
}

/// How one stands to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Alone,
    Back,
    Together,
}

impl Idle for Kept {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        let alone = self.alone.as_ref().map_or(0, |alone| {
            alone.ledger.fresh_from().max(alone.owed.back().map_or(0, |owed| owed.slot + alone.memory))
        });
        let last = self.granted.back().map_or(0, |part| self.ours(part.last) + self.window);
        Some(alone.max(last))
    }
}

impl Kept {
    pub(super) fn alone(&mut self) -> Option<&mut Alone> {
        self.alone.as_deref_mut()
    }

    /// Together with the store again.
    pub(super) fn join(&mut self) {
        self.alone = None;
        // What was granted meanwhile says nothing of its share.
        self.first = self.theirs(clock::micros(clock::now())) / (self.width() * PARTS) + 1;
    }

    /// The line asks, and remembers `memory` of the store. Returns whether the store is back, if the process is alone.
    pub(super) fn asks(&mut self, memory: Memory, now: Micros) -> Option<bool> {
        let alone = self.alone()?;
        (alone.asked, alone.tried) = ((now, memory), now);
        Some(alone.back.is_some())
    }

    /// If the process is alone and the line has not asked lately: a call in its place, and whether the store is back.
    pub(super) fn quiet(&mut self, key: Key, now: Micros) -> Option<(Asked, bool)> {
        let alone = self.alone()?;
        let (at, memory) = alone.asked;
        let passed = |since: Micros| Duration::from_micros(now.saturating_sub(since));
        let memory = Memory { since: memory.since.saturating_add(passed(at)), ..memory };
        // One that is back tells the others at once what it uses.
        let often = if alone.back.is_some() { OFTEN } else { jittered(LOOK) };
        (passed(alone.tried) >= often).then(|| {
            alone.tried = now;
            (Asked::without_needs(key, &alone.all, memory), alone.back.is_some())
        })
    }

    fn width(&self) -> Micros {
        (self.window / PARTS).max(1)
    }

    /// How many windows to look back.
    fn windows(&self) -> u64 {
        (FINDING_OUT.div_ceil(self.window.max(1)) + 1).clamp(*WINDOWS.start(), *WINDOWS.end())
    }

    /// A moment of the store's time on our clock.
    fn ours(&self, moment: Micros) -> Micros {
        let (theirs, ours) = self.heard;
        ours.saturating_add(moment).saturating_sub(theirs)
    }

    /// A moment of ours in the store's time.
    fn theirs(&self, moment: Micros) -> Micros {
        let (theirs, ours) = self.heard;
        theirs.saturating_add(moment).saturating_sub(ours)
    }

    /// The store has granted a lease.
    pub(super) fn note(&mut self, lease: &Lease, terms: &Terms, now: Instant) {
        let window = micros_up(terms.quota().longest_memory() + terms.life() + terms.transit_slack());
        if self.window != window {
            self.granted.clear();
            self.window = window;
            self.first = lease.now / (self.width() * PARTS) + 1;
        }
        self.heard = (lease.now, clock::micros(now));
        let oldest = (lease.now / self.width()).saturating_sub(PARTS * (self.windows() + 1));
        while self.granted.front().is_some_and(|part| part.number < oldest) {
            self.granted.pop_front();
        }
        for &Segment { cost, count, slot, .. } in lease.segments.iter().chain(&lease.prefetched) {
            self.add(slot, u64::from(cost) * u64::from(count));
        }
    }

    fn add(&mut self, slot: Micros, units: u64) {
        let number = slot / self.width();
        let after = self.granted.partition_point(|part| part.number < number);
        let kept = self.granted.len();
        match self.granted.get_mut(after) {
            Some(part) if part.number == number => {
                part.units = part.units.saturating_add(units);
                part.last = part.last.max(slot);
            }
            _ if kept < MOST_PARTS => {
                self.granted.insert(after, Part { number, last: slot, units });
            }
            _ => {
                if let Some(part) = self.granted.back_mut() {
                    part.units = part.units.saturating_add(units);
                    part.last = part.last.max(slot);
                }
            }
        }
    }

    /// A permit comes back that was not used.
    pub(super) fn take_back(&mut self, unused: Unused, now: Micros) {
        if unused.incarnation == STANDALONE {
            if let Some(alone) = self.alone() {
                alone.take_back(unused, now);
            }
            return;
        }
        let number = unused.slot / self.width();
        if let Ok(index) = self.granted.binary_search_by_key(&number, |part| part.number) {
            let part = &mut self.granted[index];
            part.units = part.units.saturating_sub(unused.units);
        }
    }

    /// The store did not answer. From now on the process is alone, if it has a share: what it was granted of the last
    /// window before it asked, else `configured`.
    pub(super) fn part(
        &mut self,
        asked: &Asked,
        now: Instant,
        configured: Option<Share>,
    ) -> Option<&mut Alone> {
        let Asked { terms, life, memory: remembered, at, .. } = asked;
        let (longest, all) = terms.quota().longest();
        let (asked, now) = (clock::micros(*at), clock::micros(now));
        let moment = self.theirs(asked);
        let share = match (self.least_granted(moment), self.last) {
            (None, Some(last)) => last,
            (units, _) => match units.unwrap_or_else(|| self.granted_lately(moment)) {
                0 => configured?,
                units => Share { part: units.min(all), of: all },
            },
        };
        self.last = Some(share);
        let scaled = |quota: crate::Quota| {
            let quota = quota.part(share.part, share.of);
            Terms::new(quota, terms.transit_slack(), terms.boundary_slack()).with_life(terms.life())
        };
        // What was granted before fits the limit that remembers longest; the others begin with what that one has seen.
        let (longest, own) = (scaled(longest), scaled(*terms.quota()));
        let recently = self.theirs(now).saturating_sub(self.window) / self.width();
        let recently = self.granted.iter().filter(|part| part.number >= recently);
        let counted =
            recently.map(|part| (self.ours(part.last), part.units)).take_while(|(at, _)| *at <= now);
        let mut ledger = Ledger::new(&longest, now);
        for (at, units) in counted {
            let age = now.saturating_sub(at.saturating_add(micros_up(*life)));
            ledger.charge(Charge::new(Duration::from_micros(age), units));
        }
        ledger.advance(&own, now);
        let memory = micros_up(terms.quota().longest_memory());
        let alone = Alone {
            terms: Arc::new(own),
            ledger,
            owed: VecDeque::new(),
            memory,
            back: None,
            asked: (now, *remembered),
            tried: now,
            all: terms.clone(),
        };
        Some(self.alone.insert(Box::new(alone)))
    }

    /// The least units of the windows before a moment of the store's time, if there are any.
    fn least_granted(&self, moment: Micros) -> Option<u64> {
        let now = moment / (self.width() * PARTS);
        let before = self.first.max(now.saturating_sub(self.windows()))..now;
        before.map(|window| self.granted_in(window)).min()
    }

    /// The units of the window that is not over then.
    fn granted_lately(&self, moment: Micros) -> u64 {
        self.granted_in(moment / (self.width() * PARTS))
    }

    fn granted_in(&self, window: u64) -> u64 {
        self.granted.iter().filter(|part| part.number / PARTS == window).map(|part| part.units).sum()
    }
}

impl Alone {
    /// Books what is needed. It is a plan, until it is granted.
    pub(super) fn book(&mut self, ask: &Ask<'_>, now: Instant) -> Result<Lease, StoreError> {
        let at = clock::micros(now);
        let moment = self.ledger.advance(&self.terms, at);
        let largest = self.terms.quota().largest_cost();
        let needs: Vec<Need> = ask.needs.iter().copied().filter(|need| need.cost <= largest).collect();
        if let (None, Some(need)) = (needs.first(), ask.needs.first()) {
            return Err(StoreError::AboveShare { cost: need.cost, share: largest });
        }
        let own = Ask { terms: &self.terms, needs: &needs, prefetch: 0, returns: &[], ..*ask };
        let mut lease = book(&mut self.ledger, moment, &own);
        if needs.len() < ask.needs.len() {
            lease.refused = lease.refused.or(Some(Refusal::NEVER));
        }
        Ok(lease)
    }

    /// Grants a plan. `word` is what the store has said meanwhile.
    pub(super) fn grant(&mut self, plan: Lease, now: Instant, word: Option<&Lease>) -> Lease {
        for &Segment { cost, count, slot, stamp, .. } in plan.segments.iter() {
            let after = self.owed.partition_point(|other| other.slot <= slot);
            let units = u64::from(cost) * u64::from(count);
            self.owed.insert(after, Unused { slot, stamp, units, incarnation: STANDALONE });
        }
        self.thin();
        let own = Some(Standalone { at: now, answered: word.is_some() });
        let Lease { segments, refused, .. } = plan;
        let word = word.cloned().unwrap_or_default();
        Lease { segments, refused, prefetched: None, learning: None, own, ..word }
    }

    /// The store was back, and is away again: what it was to grant the process grants itself.
    pub(super) fn gone_again(&mut self, plan: Lease, now: Instant) -> Lease {
        self.back = None;
        self.grant(plan, now, None)
    }

    pub(super) fn look<T>(&mut self, now: Instant, look: impl FnOnce(&mut Ledger, Micros) -> T) -> T {
        let now = self.ledger.advance(&self.terms, clock::micros(now));
        look(&mut self.ledger, now)
    }

    fn take_back(&mut self, unused: Unused, now: Micros) {
        self.ledger.advance(&self.terms, now);
        self.ledger.take_back(unused);
        let mut units = unused.units;
        for owed in self.owed.iter_mut().filter(|owed| owed.slot == unused.slot) {
            let back = units.min(owed.units);
            (owed.units, units) = (owed.units - back, units - back);
        }
        self.owed.retain(|owed| owed.units > 0);
    }

    /// The store answers again, and is asked from now on: permits that lie ahead are given up.
    pub(super) fn back(&mut self, now: Instant) -> Stage {
        let now = clock::micros(now);
        while let Some(ahead) = self.owed.back().copied().filter(|owed| owed.slot > now) {
            self.owed.pop_back();
            self.ledger.take_back(ahead);
        }
        let since = *self.back.get_or_insert(now);
        if now >= since + OTHERS { Stage::Together } else { Stage::Back }
    }

    /// The store was charged though the line did not ask; `answered` says whether it answered. Returns whether the process
    /// is with it again. If permits lie ahead it is not: the line gives them up when it asks.
    pub(super) fn charged(&mut self, answered: bool, now: Instant) -> bool {
        if !answered {
            self.back = None;
            return false;
        }
        let now = clock::micros(now);
        let since = *self.back.get_or_insert(now);
        now >= since + OTHERS && self.owed.is_empty()
    }

    /// Takes out what can be charged: permits that are used by now, in a few parts, the oldest first. They count as
    /// charged whatever comes of the call.
    pub(super) fn take_charges(&mut self, now: Instant) -> Vec<Charge> {
        let now = clock::micros(now);
        let slack = micros_up(self.all.transit_slack());
        let width = self.memory / Charge::MOST as u64 + 1;
        let mut charges: Vec<Charge> = Vec::new();
        let (mut part, mut later) = (None, VecDeque::new());
        for owed in std::mem::take(&mut self.owed) {
            let end = owed.stamp.saturating_sub(slack);
            let age = now.saturating_sub(end);
            if end > now {
                later.push_back(owed);
            } else if age < self.memory {
                let age_of_part = age / width;
                // A permit that lived longer than those after it goes with them: later is safe.
                match charges.last_mut().filter(|_| part.is_some_and(|part| age_of_part >= part)) {
                    Some(last) => {
                        last.units = last.units.saturating_add(owed.units);
                        last.age = last.age.min(Duration::from_micros(age));
                    }
                    None => {
                        charges.push(Charge::new(Duration::from_micros(age), owed.units));
                        part = Some(age_of_part);
                    }
                }
            }
        }
        self.owed = later;
        charges
    }

    /// Joins what lies close together: it counts as used at the end.
    fn thin(&mut self) {
        let near = (self.memory / PARTS).max(1);
        while self.owed.len() > MOST_PARTS {
            let before = self.owed.len();
            let mut joined: VecDeque<Unused> = VecDeque::new();
            for owed in self.owed.drain(..) {
                match joined.back_mut() {
                    Some(last) if owed.slot / near == last.slot / near => {
                        *last = Unused { units: last.units + owed.units, ..owed };
                    }
                    _ => joined.push_back(owed),
                }
            }
            self.owed = joined;
            if self.owed.len() == before {
                break;
            }
        }
    }
}
