//! The calls of one key in flight from this process: who sits, and who waits for a seat.
//!
//! What it tells the store is how things are: a [`Claim`]. A seat whose call has ended goes to the next who waits here,
//! without a word to the store, unless others wait elsewhere: then it goes back, and the store gives it to whoever
//! came first.

mod flights;
#[cfg(test)]
mod properties;

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::key_state::next_number;
use super::queue::Number;
use super::reservation::Settled;
use crate::key::Key;
use crate::key_map::Idle;
use crate::store::{Claim, News, Refusal};
use crate::wakers::Wakers;

pub(super) use flights::Flights;

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
    settled: BTreeMap<Number, Settled<Number>>,
    /// How many of those who wait cannot: they want what is free now.
    impatient: usize,
    /// The claim by whose answer the last of them is told.
    impatient_until: u64,
    /// Whether one gave up since the last claim who would have waited.
    gave_up: bool,
    /// What was claimed last: seats, and how many wait.
    claimed: (u32, u32),
    /// What the store knows of that: seats taken, what it gave since included, and how many still wait.
    known: (u32, u32),
    /// Seats that were ever given.
    given: u64,
    /// Of the last news about the last claim.
    version: u64,
    /// Whether the last claim is still to be answered: until then nothing else is claimed.
    asking: bool,
    /// Whether it failed. The store tries again.
    failed: bool,
    others_wait: bool,
    /// Until when the store keeps the seats for this process. A process that stood still for longer uses none.
    good_until: Option<Instant>,
    /// Seats with a smaller number are lost.
    lost_before: Number,
    /// Who is to be woken when its seat is lost.
    sitting: BTreeMap<Number, Waker>,
    /// When somebody last came, left or was told something.
    used_at: Instant,
}

struct Waiting {
    /// For one who cannot wait, the claim whose answer ends its wait.
    until_answer: Option<u64>,
    waker: Option<Waker>,
}

impl Idle for Flight {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        let empty = self.sits == 0 && self.waiting.is_empty() && self.settled.is_empty();
        // Those who left may be given seats still, and somebody has to return them.
        (empty && self.known == (0, 0)).then_some(self.used_at)
    }
}

impl Flight {
    pub(super) fn new(now: Instant) -> Self {
        Flight {
            holder: next_number(),
            number: 0,
            sits: 0,
            free: 0,
            waiting: BTreeMap::new(),
            settled: BTreeMap::new(),
            impatient: 0,
            impatient_until: 0,
            gave_up: false,
            claimed: (0, 0),
            known: (0, 0),
            given: 0,
            version: 0,
            asking: false,
            failed: false,
            others_wait: false,
            good_until: None,
            lost_before: 0,
            sitting: BTreeMap::new(),
            used_at: now,
        }
    }

    pub(super) fn holder(&self) -> u64 {
        self.holder
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the seats are surely this process's.
    fn is_good(&self, now: Instant) -> bool {
        self.good_until.is_none_or(|until| now < until)
    }

    /// A request comes. It waits, if only for the store's answer; an `impatient` one for no more than that.
    pub(super) fn enter(&mut self, number: Number, impatient: bool, now: Instant) {
        // Where some wait and all was answered, nothing is free.
        let waits = !self.waiting.is_empty() || self.known.1 > 0;
        if impatient && waits && self.free == 0 && !self.asking && !self.failed {
            self.settled.insert(number, Settled::Refused(Refusal::NEVER));
            return;
        }
        self.impatient += usize::from(impatient);
        let until_answer = impatient.then_some(self.number + 1);
        self.impatient_until = until_answer.unwrap_or(self.impatient_until);
        self.waiting.insert(number, Waiting { until_answer, waker: None });
        self.seat(now, &mut Wakers::default());
    }

    /// What the store is to be told, if anything.
    pub(super) fn claim(&mut self, key: Key, most: u32, life: Duration) -> Option<Claim> {
        let wants = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        let (taken, known_wants) = self.known;
        let changed = if self.failed {
            // It is said again anyway.
            self.claimed != (self.sits, wants)
        } else {
            // Who cannot wait is told by an answer, if only to what was claimed before.
            let to_be_told = self.impatient > 0 && self.impatient_until > self.number;
            // That fewer wait matters to others. Where nobody is here any more, others may come; but those who cannot wait
            // come again, and as long as one of them is wanted for, nothing is free.
            let nobody = self.gave_up && self.sits == 0 && wants == 0;
            let fewer = wants < known_wants && (self.others_wait || nobody);
            self.sits < taken || wants > known_wants || fewer || to_be_told
        };
        if !changed || self.asking {
            return None;
        }
        self.number += 1;
        // Who tells may have forgotten this gate, and count anew.
        self.version = 0;
        self.gave_up = false;
        self.asking = true;
        (self.claimed, self.known) = ((self.sits, wants), (self.sits, wants));
        // What is free goes back: it is not claimed.
        self.free = 0;
        let &mut Flight { holder, number, sits, given: heard, .. } = self;
        Some(Claim { key, holder, number, most, sits, wants, heard, life })
    }

    /// How the wait of `number` ended, if it did. If its seat may be another process's by now, it waits on, as the first.
    pub(super) fn collect(&mut self, number: Number, now: Instant) -> Option<Settled<Number>> {
        let seated = self.settled.remove(&number)?;
        if let Settled::Granted(seat) = seated
            && self.is_lost(seat, now)
        {
            self.sits -= 1;
            self.waiting.insert(number, Waiting { until_answer: None, waker: None });
            return None;
        }
        Some(seated)
    }

    /// Whether a seat may be another process's.
    pub(super) fn is_lost(&self, seat: Number, now: Instant) -> bool {
        seat < self.lost_before || !self.is_good(now)
    }

    /// The same; where it did not, the task is woken when it does.
    pub(super) fn poll(&mut self, number: Number, now: Instant, cx: &Context<'_>) -> Poll<Settled<Number>> {
        let seated = self.collect(number, now);
        if let Some(waiting) = self.waiting.get_mut(&number) {
            waiting.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(seated.unwrap_or(Settled::Refused(Refusal::NEVER)))
    }

    /// Answers when the seat is lost; until then the task is woken when it is.
    pub(super) fn poll_lost(&mut self, seat: Number, cx: &Context<'_>) -> Poll<()> {
        if seat < self.lost_before {
            return Poll::Ready(());
        }
        self.sitting.insert(seat, cx.waker().clone());
        Poll::Pending
    }

    /// One stops waiting.
    pub(super) fn leave(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        if let Some(waiting) = self.waiting.remove(&number) {
            let impatient = waiting.until_answer.is_some();
            self.impatient -= usize::from(impatient);
            self.gave_up |= !impatient;
            self.used_at = now;
        } else if let Some(Settled::Granted(seat)) = self.settled.remove(&number) {
            self.end(seat, now, wakers);
        }
    }

    /// A call has ended, and its seat is free.
    pub(super) fn end(&mut self, seat: Number, now: Instant, wakers: &mut Wakers) {
        self.sitting.remove(&seat);
        self.sits -= 1;
        if !self.is_lost(seat, now) && !self.others_wait {
            self.free += 1;
            self.seat(now, wakers);
        }
        self.used_at = now;
    }

    /// Those who came first sit down on what is free.
    fn seat(&mut self, now: Instant, wakers: &mut Wakers) {
        while self.free > 0
            && self.is_good(now)
            && let Some((number, waiting)) = self.waiting.pop_first()
        {
            self.free -= 1;
            self.sits += 1;
            self.impatient -= usize::from(waiting.until_answer.is_some());
            self.settled.insert(number, Settled::Granted(next_number()));
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
                self.seat(now, wakers);
                if self.impatient > 0 {
                    let answered =
                        |waiting: &Waiting| waiting.until_answer.is_some_and(|until| until <= number);
                    self.settle(answered, &Settled::Refused(Refusal::NEVER), wakers);
                }
            }
            News::Failed(error) => {
                (self.asking, self.failed) = (false, true);
                self.settle(|_| true, &Settled::Failed(error), wakers);
            }
            News::Held(_) | News::Less { .. } | News::Register(_) => {}
            News::Missed | News::Reconnected | News::Deaf => {}
            News::Good(until) => self.good_until = Some(until),
            News::Lost => {
                self.lost_before = next_number();
                std::mem::take(&mut self.sitting).into_values().for_each(|waker| wakers.add(Some(waker)));
            }
        }
        self.used_at = now;
    }

    /// Some of those who wait get no seat.
    fn settle(&mut self, which: impl Fn(&Waiting) -> bool, end: &Settled<Number>, wakers: &mut Wakers) {
        let Flight { waiting, settled, impatient, .. } = self;
        waiting.retain(|&number, waiting| {
            let stays = !which(waiting);
            if !stays {
                *impatient -= usize::from(waiting.until_answer.is_some());
                settled.insert(number, end.clone());
                wakers.add(waiting.waker.take());
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::clock;
    use crate::error::StoreError;

    const LIFE: Duration = Duration::from_secs(10);

    fn flight() -> Flight {
        Flight::new(clock::now())
    }

    fn claim(flight: &mut Flight) -> Option<(u32, u32)> {
        flight.claim(Key::ALL, 8, LIFE).map(|claim| (claim.sits, claim.wants))
    }

    fn hear(flight: &mut Flight, news: News) {
        flight.hear(news, clock::now(), &mut Wakers::default());
    }

    fn told(flight: &mut Flight, given: u64) {
        let number = flight.number;
        hear(flight, News::seats(number, given, false, 1));
    }

    fn come(flight: &mut Flight, impatient: bool) -> Number {
        let number = next_number();
        flight.enter(number, impatient, clock::now());
        number
    }

    fn granted(flight: &mut Flight, number: Number, now: Instant) -> Number {
        match flight.collect(number, now) {
            Some(Settled::Granted(seat)) => seat,
            settled => panic!("no seat: {settled:?}"),
        }
    }

    fn is_lost(flight: &mut Flight, seat: Number) -> bool {
        flight.poll_lost(seat, &Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_seat_that_is_given_later_is_not_lost_though_its_call_waited_before() {
        let mut flight = flight();
        let (first, second) = (come(&mut flight, false), come(&mut flight, false));
        assert_eq!(claim(&mut flight), Some((0, 2)));
        told(&mut flight, 1);
        let first = granted(&mut flight, first, clock::now());
        assert!(!is_lost(&mut flight, first));
        hear(&mut flight, News::Lost);
        told(&mut flight, 2);
        let second = granted(&mut flight, second, clock::now());
        assert!(is_lost(&mut flight, first));
        assert!(!is_lost(&mut flight, second));
    }

    #[test]
    fn a_lost_seat_goes_to_nobody_here_and_back_to_the_store() {
        let mut flight = flight();
        let first = come(&mut flight, false);
        assert_eq!(claim(&mut flight), Some((0, 1)));
        told(&mut flight, 1);
        let first = granted(&mut flight, first, clock::now());
        let second = come(&mut flight, false);
        assert_eq!(claim(&mut flight), Some((1, 1)));
        told(&mut flight, 1);
        hear(&mut flight, News::Lost);
        flight.end(first, clock::now(), &mut Wakers::default());
        assert!(flight.collect(second, clock::now()).is_none());
        assert_eq!(claim(&mut flight), Some((0, 1)));
    }

    #[test]
    fn news_that_is_older_is_passed_over() {
        let mut flight = flight();
        let (first, second) = (come(&mut flight, false), come(&mut flight, false));
        assert_eq!(claim(&mut flight), Some((0, 2)));
        hear(&mut flight, News::seats(1, 1, true, 2));
        hear(&mut flight, News::seats(1, 0, false, 1));
        let first = granted(&mut flight, first, clock::now());
        flight.end(first, clock::now(), &mut Wakers::default());
        assert!(flight.collect(second, clock::now()).is_none(), "others wait");
        assert_eq!(claim(&mut flight), Some((0, 1)));
    }

    #[test]
    fn one_who_cannot_wait_and_came_during_a_claim_is_told_by_the_next() {
        let mut flight = flight();
        let first = come(&mut flight, true);
        assert_eq!(claim(&mut flight), Some((0, 1)));
        let second = come(&mut flight, true);
        assert_eq!(claim(&mut flight), None, "one at a time");
        told(&mut flight, 0);
        assert!(matches!(flight.collect(first, clock::now()), Some(Settled::Refused(_))));
        assert_eq!(claim(&mut flight), Some((0, 1)));
        told(&mut flight, 0);
        assert!(matches!(flight.collect(second, clock::now()), Some(Settled::Refused(_))));
        let third = come(&mut flight, true);
        assert!(matches!(flight.collect(third, clock::now()), Some(Settled::Refused(_))), "nothing is free");
        assert_eq!(claim(&mut flight), None);
    }

    #[test]
    fn what_may_be_given_still_is_not_forgotten_and_goes_back() {
        let mut flight = flight();
        let number = come(&mut flight, true);
        assert_eq!(claim(&mut flight), Some((0, 1)));
        told(&mut flight, 0);
        assert!(matches!(flight.collect(number, clock::now()), Some(Settled::Refused(_))));
        assert_eq!((claim(&mut flight), flight.idle_from()), (None, None));
        told(&mut flight, 1);
        assert_eq!(claim(&mut flight), Some((0, 0)));
        assert!(flight.idle_from().is_some());
    }

    #[test]
    fn when_the_last_gives_up_the_store_hears_of_it() {
        let mut flight = flight();
        let (first, second) = (come(&mut flight, false), come(&mut flight, false));
        assert_eq!(claim(&mut flight), Some((0, 2)));
        told(&mut flight, 0);
        flight.leave(first, clock::now(), &mut Wakers::default());
        assert_eq!(claim(&mut flight), None);
        flight.leave(second, clock::now(), &mut Wakers::default());
        assert_eq!(claim(&mut flight), Some((0, 0)));
        assert!(flight.idle_from().is_some());
    }

    #[test]
    fn one_whose_wait_failed_is_forgotten_when_it_was_told() {
        let mut flight = flight();
        let number = come(&mut flight, false);
        assert_eq!(claim(&mut flight), Some((0, 1)));
        hear(&mut flight, News::Failed(StoreError::Lost));
        assert_eq!(claim(&mut flight), Some((0, 0)));
        hear(&mut flight, News::Failed(StoreError::Lost));
        assert_eq!((claim(&mut flight), flight.idle_from()), (None, None));
        assert!(matches!(flight.collect(number, clock::now()), Some(Settled::Failed(_))));
        assert!(flight.idle_from().is_some());
    }

    /// A process that stood still for longer than its claim is good passes no seat on, and uses none.
    #[test]
    fn seats_are_used_no_longer_than_their_claim_is_good() {
        let (mut flight, start) = (flight(), clock::now());
        let numbers: Vec<_> = (0..3).map(|_| come(&mut flight, false)).collect();
        assert_eq!(claim(&mut flight), Some((0, 3)));
        hear(&mut flight, News::Good(start + LIFE));
        told(&mut flight, 2);
        let first = granted(&mut flight, numbers[0], start);
        let late = start + LIFE;
        assert!(flight.collect(numbers[1], late).is_none(), "its seat may be another's");
        flight.end(first, late, &mut Wakers::default());
        assert!(flight.collect(numbers[2], late).is_none(), "and the first one's is not passed on");
        assert_eq!(claim(&mut flight), Some((0, 2)));
        hear(&mut flight, News::Good(late + LIFE));
        told(&mut flight, 3);
        assert!(flight.collect(numbers[1], late).is_some(), "it comes first");
        assert!(flight.collect(numbers[2], late).is_none());
    }
}
