//! Tells the others of a fleet what happens at a station, and hears what they did.
//!
//! One task for each station, for as long as there is anything to tell or to wait for: it changes the register, one change
//! after the other, and sleeps until the next is due.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::{Inner, Throttle};
use super::peers::{Away, Exchange};
use super::waiters::{Station, Told};
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::store::{Answer, Change, Listener, News, Register, Store};
use crate::wakers::Wakers;

/// What a fleet shares is kept for so long after the last change.
const LIFE: Duration = Duration::from_secs(3600);

/// The register of a line in the store.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) store: Arc<dyn Store>,
    /// Who this gate is to the others.
    pub(super) id: u64,
    /// Which register of a key: paces that learn other things have others.
    pub(super) kind: u64,
}

impl Shared {
    fn exchange(&self, key: Key, exchange: Exchange) -> Answer<Register> {
        let Exchange { seen, value, tell } = exchange;
        self.store.compare_and_set(Change { key, kind: self.kind, seen, value, life: LIFE, tell })
    }
}

pub(super) struct Teller {
    throttle: Throttle,
    shared: Shared,
    key: Key,
    /// Which of those who told of this station; another may have taken its place.
    number: u64,
    /// The exchange under way, and when it began.
    exchange: Option<(Asking, Instant)>,
    timer: Option<Timer>,
    done: bool,
}

type Asking = Pin<Box<dyn Future<Output = Result<Register, StoreError>> + Send>>;

impl Teller {
    /// Starts one, where there is a runtime.
    pub(super) fn start(throttle: &Throttle, shared: &Shared, key: Key, number: u64) {
        let (throttle, shared) = (throttle.clone(), shared.clone());
        let teller = Teller { throttle, shared, key, number, exchange: None, timer: None, done: false };
        // Without one it is dropped, and the next who comes tries again.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            drop(runtime.spawn(teller));
        }
    }

    fn exchanged(&self, answer: Result<Register, StoreError>, asked: Instant) {
        let now = clock::now();
        let exchanged = self
            .throttle
            .at(self.key, |station, wakers| station.exchanged(self.number, answer, asked, now, wakers));
        match exchanged.flatten() {
            Some(Away::Since(error)) => events::pace_alone(&self.throttle.label(self.key, None), &error),
            Some(Away::Over) => events::pace_shared(&self.throttle.label(self.key, None)),
            None => {}
        }
    }
}

impl Future for Teller {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some((exchange, asked)) = &mut self.exchange {
                let Poll::Ready(answer) = exchange.as_mut().poll(cx) else { return Poll::Pending };
                let asked = *asked;
                self.exchange = None;
                self.exchanged(answer, asked);
            }
            let now = clock::now();
            let told = self.throttle.0.stations.find(self.key, |station| station.tell(self.number, now, cx));
            match told {
                Some(Told::Now(exchange)) => match self.shared.exchange(self.key, exchange) {
                    Answer::Now(answer) => self.exchanged(answer, now),
                    Answer::Later(answer) => self.exchange = Some((answer, now)),
                },
                Some(Told::At(at)) => {
                    let timer = self.timer.get_or_insert_with(|| Timer::at(at));
                    timer.set(at);
                    if timer.poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
                Some(Told::Nothing) | None => {
                    self.done = true;
                    return Poll::Ready(());
                }
            }
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        if !self.done {
            let (now, asked) = (clock::now(), self.exchange.as_ref().map(|(_, asked)| *asked));
            let mut wakers = Wakers::default();
            let lost = |station: &mut Station| station.teller_lost(self.number, asked, now, &mut wakers);
            self.throttle.0.stations.find(self.key, lost);
            // The runtime may be about to end: another is not for this one to start.
            wakers.wake();
        }
    }
}

impl Listener for Inner {
    fn hear(self: Arc<Self>, key: Key, _: u64, news: News) {
        let Some(kind) = self.shared.as_ref().map(|shared| shared.kind) else { return };
        let (throttle, now) = (Throttle(self), clock::now());
        match news {
            News::Register(register) if register.kind == kind => {
                throttle.at(key, |station, wakers| station.hear(register, now, wakers));
            }
            // Where the store is away, those who wait find out.
            News::Missed | News::Reconnected | News::Deaf => {
                let mut keys = Vec::new();
                throttle.0.stations.for_each(|key, station| {
                    if station.missed(now) {
                        keys.push(key);
                    }
                });
                for key in keys {
                    throttle.at(key, |_, _| ());
                }
            }
            _ => {}
        }
    }
}
