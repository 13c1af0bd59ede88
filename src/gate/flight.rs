//! The calls of one key in flight from this process: who sits, and who waits for a seat.
//!
//! What it tells the store is how things are: a [`Claim`]. A seat whose call has ended goes to the next who waits here,
//! without a word to the store, unless others wait elsewhere: then it goes back, and the store gives it to whoever
//! came first.

#[cfg(test)]
mod laws;

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::line::next_number;
use super::queue::{Number, Wakers};
use crate::error::StoreError;
use crate::key::Key;
use crate::keyed::Idle;
use crate::store::{Claim, News};

pub(super) struct Flight {
    /// Who it is to the store.
    holder: u64,
    /// The number of its last claim.
    number: u64,
    /// Calls in flight.
    sits: u32,
    /// Seats that were given and that nobody sits on.
    free: u32,
    waiting: BTreeMap<Number, Waiting>,
    settled: BTreeMap<Number, Result<(), Unseated>>,
    /// How many of those who wait cannot: they want what is free now.
    impatient: usize,
    /// What was claimed last: seats, and how many wait.
    claimed: (u32, u32),
    /// What the store knows of that: seats taken, what it gave since included, and how many still wait.
    known: (u32, u32),
    /// Seats that were ever given.
    given: u64,
    version: u64,
    /// Whether the last claim is still to be answered: until then nothing else is claimed.
    asking: bool,
    /// Whether it failed. The store tries again.
    failed: bool,
    others_wait: bool,
    /// Seats with a smaller number are lost.
    lost_before: Number,
    /// Who is to be woken when its seat is lost.
    sitting: BTreeMap<Number, Waker>,
    /// Since when nobody sits and nobody waits.
    empty_since: Option<Instant>,
}

struct Waiting {
    /// For one who cannot wait, the claim whose answer ends its wait.
    until_answer: Option<u64>,
    waker: Option<Waker>,
}

/// Why one got no seat.
#[derive(Clone, Debug)]
pub(super) enum Unseated {
    Refused,
    Failed(StoreError),
}

/// How a wait for a seat ended.
pub(super) type Seated = Result<(), Unseated>;

impl Idle for Flight {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        self.empty_since
    }
}

impl Flight {
    pub(super) fn new() -> Self {
        Flight {
            holder: next_number(),
            number: 0,
            sits: 0,
            free: 0,
            waiting: BTreeMap::new(),
            settled: BTreeMap::new(),
            impatient: 0,
            claimed: (0, 0),
            known: (0, 0),
            given: 0,
            version: 0,
            asking: false,
            failed: false,
            others_wait: false,
            lost_before: 0,
            sitting: BTreeMap::new(),
            empty_since: None,
        }
    }

    pub(super) fn holder(&self) -> u64 {
        self.holder
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// One comes. It waits, if only for the store's answer; one who is `impatient` for no more than that.
    pub(super) fn enter(&mut self, number: Number, impatient: bool) {
        self.empty_since = None;
        // Where some wait and all was answered, nothing is free.
        let waits = !self.waiting.is_empty() || self.known.1 > 0;
        if impatient && waits && self.free == 0 && !self.asking && !self.failed {
            self.settled.insert(number, Err(Unseated::Refused));
            return;
        }
        self.impatient += usize::from(impatient);
        let until_answer = impatient.then_some(self.number + 1);
        self.waiting.insert(number, Waiting { until_answer, waker: None });
        self.seat(&mut Wakers::default());
    }

    /// What the store is to be told, if anything.
    pub(super) fn claim(&mut self, key: Key, most: u32, life: Duration) -> Option<Claim> {
        let wants = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        let (taken, known_wants) = self.known;
        // That fewer wait matters only to others.
        let changed = if self.failed {
            // It is said again anyway.
            self.claimed != (self.sits, wants)
        } else {
            self.sits < taken || wants > known_wants || (wants < known_wants && self.others_wait)
        };
        if !changed || self.asking {
            return None;
        }
        self.number += 1;
        self.asking = true;
        (self.claimed, self.known) = ((self.sits, wants), (self.sits, wants));
        // What is free goes back: it is not claimed.
        self.free = 0;
        let &mut Flight { holder, number, sits, given: heard, .. } = self;
        Some(Claim { key, holder, number, most, sits, wants, heard, life })
    }

    /// How the wait of `number` ended, if it did.
    pub(super) fn collect(&mut self, number: Number) -> Option<Seated> {
        self.settled.remove(&number)
    }

    /// The same; where it did not, the task is woken when it does.
    pub(super) fn poll(&mut self, number: Number, cx: &Context<'_>) -> Poll<Seated> {
        if let Some(waiting) = self.waiting.get_mut(&number) {
            waiting.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(self.collect(number).unwrap_or(Err(Unseated::Refused)))
    }

    /// Answers when the seat is lost; until then the task is woken when it is.
    pub(super) fn poll_lost(&mut self, number: Number, cx: &Context<'_>) -> Poll<()> {
        if number < self.lost_before {
            return Poll::Ready(());
        }
        self.sitting.insert(number, cx.waker().clone());
        Poll::Pending
    }

    /// One stops waiting.
    pub(super) fn leave(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        if let Some(waiting) = self.waiting.remove(&number) {
            self.impatient -= usize::from(waiting.until_answer.is_some());
            self.close(now);
        } else if let Some(Ok(())) = self.settled.remove(&number) {
            self.end(number, now, wakers);
        }
    }

    /// A call has ended, and its seat is free.
    pub(super) fn end(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        self.sitting.remove(&number);
        self.sits -= 1;
        if number >= self.lost_before && !self.others_wait {
            self.free += 1;
            self.seat(wakers);
        }
        self.close(now);
    }

    /// Those who came first sit down on what is free.
    fn seat(&mut self, wakers: &mut Wakers) {
        while self.free > 0
            && let Some((number, waiting)) = self.waiting.pop_first()
        {
            self.free -= 1;
            self.sits += 1;
            self.impatient -= usize::from(waiting.until_answer.is_some());
            self.settled.insert(number, Ok(()));
            wakers.add(waiting.waker);
        }
    }

    /// The store has told something.
    pub(super) fn hear(&mut self, news: News, now: Instant, wakers: &mut Wakers) {
        match news {
            News::Seats { number, version, .. } if number != self.number || version < self.version => {}
            News::Seats { number, given, others_wait, version } => {
                (self.version, self.others_wait) = (version, others_wait);
                (self.asking, self.failed) = (false, false);
                let more = given.saturating_sub(self.given);
                self.given += more;
                let more = u32::try_from(more).unwrap_or(u32::MAX);
                let (taken, wants) = self.known;
                self.known = (taken.saturating_add(more), wants.saturating_sub(more));
                self.free = self.free.saturating_add(more);
                self.seat(wakers);
                if self.impatient > 0 {
                    let answered =
                        |waiting: &Waiting| waiting.until_answer.is_some_and(|until| until <= number);
                    self.settle(answered, &Unseated::Refused, wakers);
                }
            }
            News::Failed(error) => {
                (self.asking, self.failed) = (false, true);
                self.settle(|_| true, &Unseated::Failed(error), wakers);
            }
            News::Held(_) | News::Missed => {}
            News::Lost => {
                self.lost_before = next_number();
                std::mem::take(&mut self.sitting).into_values().for_each(|waker| wakers.add(Some(waker)));
            }
        }
        self.close(now);
    }

    /// Some of those who wait get no seat.
    fn settle(&mut self, which: impl Fn(&Waiting) -> bool, why: &Unseated, wakers: &mut Wakers) {
        let Flight { waiting, settled, impatient, .. } = self;
        waiting.retain(|&number, waiting| {
            let stays = !which(waiting);
            if !stays {
                *impatient -= usize::from(waiting.until_answer.is_some());
                settled.insert(number, Err(why.clone()));
                wakers.add(waiting.waker.take());
            }
            stays
        });
    }

    fn close(&mut self, now: Instant) {
        let empty = self.sits == 0 && self.waiting.is_empty() && self.settled.is_empty();
        if empty {
            self.empty_since.get_or_insert(now);
        }
    }
}
