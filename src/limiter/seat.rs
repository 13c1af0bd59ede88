//! A seat in flight: held from the permit to the end of the call, whatever that is.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::{Gate, Limiter, Reached, report, told};
use super::in_flight::{Flight, Seated, Unseated};
use super::key_state::next_number;
use super::queue::Number;
use super::reservation::Patience;
use super::settings::{OnStoreError, Settings};
use crate::clock;
use crate::error::{Limited, Reason};
use crate::key::Key;
use crate::key_map::{Full, Keyed};
use crate::quota::Limit;
use crate::store::{Listener, News, Refusal, StoreError};
use crate::wakers::Wakers;

/// A call in flight. Dropping it ends the call.
#[derive(Debug)]
pub(crate) struct Seat(Box<Taken>);

/// Boxed, so that calls that need no seat stay small.
#[derive(Debug)]
struct Taken {
    limiter: Limiter,
    key: Key,
    number: Number,
}

/// The calls in flight of all keys.
pub(super) struct Flights {
    keyed: Keyed<Flight>,
    /// How many there may be at the same time, for each key.
    most: u32,
    life: Duration,
}

/// What came of coming for a seat.
pub(super) enum Sitting {
    /// With a seat, or without where there is no need for one.
    Sits(Option<Seat>),
    Waits(Number),
    Ended(Reached),
}

impl Flights {
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        let most = settings.terms.quota().most_in_flight()?;
        Some(Flights { keyed: Keyed::new(settings.max_keys), most, life: settings.in_flight_life })
    }
}

impl Limiter {
    /// One comes for a seat.
    pub(super) fn sit(&self, flights: &Flights, key: Key, patience: Patience, now: Instant) -> Sitting {
        let Settings { max_waiting, max_keys, .. } = self.0.settings;
        let number = next_number();
        let enter = |flight: &mut Flight| {
            if flight.waiting() >= max_waiting {
                return Err(Reason::LineFull(max_waiting));
            }
            flight.enter(number, patience.latest <= now, now);
            Ok(flight.claim(key, flights.most, flights.life))
        };
        let claim = match flights.keyed.enter(key, now, || Flight::new(now), |_, _| (), enter) {
            Ok(Ok(claim)) => claim,
            Ok(Err(reason)) => return Sitting::Ended(Reached::Refused(reason, self.no_seat())),
            Err(Full) => {
                return Sitting::Ended(Reached::Refused(Reason::TooManyKeys(max_keys), Refusal::NEVER));
            }
        };
        if let Some(claim) = claim {
            self.0.settings.store.claim(claim, &self.listener());
        }
        let seated = flights.keyed.find(key, |flight| flight.collect(number, now)).flatten();
        seated.map_or(Sitting::Waits(number), |seated| self.seated(key, patience, seated))
    }

    /// What the end of a wait for a seat comes to.
    pub(super) fn seated(&self, key: Key, patience: Patience, seated: Seated) -> Sitting {
        match seated {
            Ok(number) => Sitting::Sits(Some(Seat(Box::new(Taken { limiter: self.clone(), key, number })))),
            Err(Unseated::Failed(source)) if self.passes(&source) => Sitting::Sits(None),
            Err(Unseated::Failed(source)) => Sitting::Ended(Reached::Failed(source)),
            Err(Unseated::Refused) => {
                let reason = patience.reason(self.max_wait());
                Sitting::Ended(Reached::Refused(reason, self.no_seat()))
            }
        }
    }

    /// Nobody knows when a call ends.
    pub(super) fn no_seat(&self) -> Refusal {
        let limit = self.0.flights.as_ref().map(|flights| Limit::InFlight { count: flights.most });
        Refusal { wait: None, limit }
    }

    /// How one fares that waits for a seat.
    pub(super) fn poll_seat(&self, key: Key, number: Number, now: Instant, cx: &Context<'_>) -> Poll<Seated> {
        let polled = self.0.clone().at_flight(key, |flight, _| flight.poll(number, now, cx));
        polled.unwrap_or(Poll::Ready(Err(Unseated::Refused)))
    }

    /// One stops waiting for a seat.
    pub(super) fn leave_seats(&self, key: Key, number: Number) {
        let now = clock::now();
        self.0.clone().at_flight(key, |flight, wakers| flight.leave(number, now, wakers));
    }

    /// How many wait for a seat.
    pub(super) fn waiting_for_seats(&self, key: Key) -> usize {
        let flights = self.0.flights.as_ref();
        flights.and_then(|flights| flights.keyed.find(key, |flight| flight.waiting())).unwrap_or(0)
    }

    fn listener(&self) -> Arc<dyn Listener> {
        self.0.clone()
    }
}

impl Gate {
    /// Does something to the calls of a key in flight, and tells the store what came of it.
    fn at_flight<R>(self: Arc<Self>, key: Key, act: impl FnOnce(&mut Flight, &mut Wakers) -> R) -> Option<R> {
        let flights = self.flights.as_ref()?;
        let mut wakers = Wakers::default();
        let (done, claim) = flights.keyed.find(key, |flight| {
            let done = act(flight, &mut wakers);
            (done, flight.claim(key, flights.most, flights.life))
        })?;
        wakers.wake();
        if let Some(claim) = claim {
            let store = self.settings.store.clone();
            let listener: Arc<dyn Listener> = self;
            store.claim(claim, &listener);
        }
        Some(done)
    }
}

impl Listener for Gate {
    fn hear(self: Arc<Self>, key: Key, holder: u64, news: News) {
        let now = clock::now();
        match news {
            News::Held(held) => return Limiter(self).hold_heard(key, held),
            News::Less { writes } => return Limiter(self).less_heard(key, writes),
            News::Missed => return Limiter(self).news_missed(false, now),
            News::Reconnected => return Limiter(self).news_missed(true, now),
            _ => {}
        }
        self.at_flight(key, |flight, wakers| {
            if flight.holder() == holder {
                flight.hear(news, now, wakers);
            }
        });
    }
}

impl Seat {
    /// Whether the store may have given the seat to others, where its word counts.
    pub(super) fn is_lost(&self, now: Instant) -> bool {
        let Taken { limiter, key, number } = &*self.0;
        let Gate { flights, settings, .. } = &*limiter.0;
        let flights = flights.as_ref().filter(|_| settings.on_store_error != OnStoreError::FailOpen);
        let lost = |flights: &Flights| flights.keyed.find(*key, |flight| flight.is_lost(*number, now));
        flights.and_then(lost).unwrap_or(false)
    }

    /// Answers when the store may have given the seat to others: then the call has to end. Never where the store's word
    /// is not waited for.
    pub(crate) fn poll_lost(&self, cx: &Context<'_>) -> Poll<StoreError> {
        let Taken { limiter, key, number } = &*self.0;
        let Gate { flights, settings, .. } = &*limiter.0;
        let Some(flights) = flights.as_ref().filter(|_| settings.on_store_error != OnStoreError::FailOpen)
        else {
            return Poll::Pending;
        };
        let lost = flights.keyed.find(*key, |flight| flight.poll_lost(*number, cx));
        lost.unwrap_or(Poll::Pending).map(|()| StoreError::SeatLost)
    }

    /// The same, as an error.
    pub(crate) fn poll_limited(&self, cx: &Context<'_>) -> Poll<Limited> {
        self.poll_lost(cx).map(|source| {
            let now = clock::now();
            let report = report(self.0.limiter.label(self.0.key, None), Refusal::NEVER, now, now, 0);
            told(Limited::Store { source, report })
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let now = clock::now();
        let Taken { limiter, key, number } = &*self.0;
        limiter.0.clone().at_flight(*key, |flight, wakers| flight.end(*number, now, wakers));
    }
}
