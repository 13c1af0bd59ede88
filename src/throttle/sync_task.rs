//! Tells the others of a fleet what happens at a station, and hears what they did.
//!
//! One task for each station, for as long as there is anything to tell or to wait for: it changes the register, one change
//! after the other, and sleeps until the next is due.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::{Core, Throttle};
use super::peer_view::{CasRequest, StoreChange};
use super::waiters::{NextSync, Waiters};
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
pub(super) struct SharedPace {
    pub(super) store: Arc<dyn Store>,
    /// Who this gate is to the others.
    pub(super) id: u64,
    /// Which register of a key: paces that learn other things have others.
    pub(super) kind: u64,
}

impl SharedPace {
    fn exchange(&self, key: Key, exchange: CasRequest) -> Answer<Register> {
        let CasRequest { seen, value, tell } = exchange;
        self.store.compare_and_set(Change { key, kind: self.kind, seen, value, life: LIFE, tell })
    }
}

pub(super) struct SyncTask {
    throttle: Throttle,
    shared: SharedPace,
    key: Key,
    /// Which of those who told of this station; another may have taken its place.
    number: u64,
    /// The exchange under way, and when it began.
    exchange: Option<(Asking, Instant)>,
    timer: Option<Timer>,
    done: bool,
}

type Asking = Pin<Box<dyn Future<Output = Result<Register, StoreError>> + Send>>;

impl SyncTask {
    /// Starts one, where there is a runtime.
    pub(super) fn start(throttle: &Throttle, shared: &SharedPace, key: Key, number: u64) {
        let (throttle, shared) = (throttle.clone(), shared.clone());
        let sync_task = SyncTask { throttle, shared, key, number, exchange: None, timer: None, done: false };
        // Without one it is dropped, and the next who comes tries again.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            drop(runtime.spawn(sync_task));
        }
    }

    fn cas_answered(&self, answer: Result<Register, StoreError>, asked: Instant) {
        let now = clock::now();
        let cas_answered = self
            .throttle
            .at(self.key, |waiters, wakers| waiters.cas_answered(self.number, answer, asked, now, wakers));
        match cas_answered.flatten() {
            Some(StoreChange::Away(error)) => {
                events::pace_alone(&self.throttle.label(self.key, None), &error)
            }
            Some(StoreChange::Back) => events::pace_shared(&self.throttle.label(self.key, None)),
            None => {}
        }
    }
}

impl Future for SyncTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some((exchange, asked)) = &mut self.exchange {
                let Poll::Ready(answer) = exchange.as_mut().poll(cx) else { return Poll::Pending };
                let asked = *asked;
                self.exchange = None;
                self.cas_answered(answer, asked);
            }
            let now = clock::now();
            let told = self.throttle.0.keys.find(self.key, |waiters| waiters.tell(self.number, now, cx));
            match told {
                Some(NextSync::Now(exchange)) => match self.shared.exchange(self.key, exchange) {
                    Answer::Now(answer) => self.cas_answered(answer, now),
                    Answer::Later(answer) => self.exchange = Some((answer, now)),
                },
                Some(NextSync::At(at)) => {
                    let timer = self.timer.get_or_insert_with(|| Timer::at(at));
                    timer.set(at);
                    if timer.poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
                Some(NextSync::Nothing) | None => {
                    self.done = true;
                    return Poll::Ready(());
                }
            }
        }
    }
}

impl Drop for SyncTask {
    fn drop(&mut self) {
        if !self.done {
            let (now, asked) = (clock::now(), self.exchange.as_ref().map(|(_, asked)| *asked));
            let mut wakers = Wakers::default();
            let lost = |waiters: &mut Waiters| waiters.sync_task_lost(self.number, asked, now, &mut wakers);
            self.throttle.0.keys.find(self.key, lost);
            // The runtime may be about to end: another is not for this one to start.
            wakers.wake();
        }
    }
}

impl Listener for Core {
    fn hear(self: Arc<Self>, key: Key, _: u64, news: News) {
        let Some(kind) = self.shared.as_ref().map(|shared| shared.kind) else { return };
        let (throttle, now) = (Throttle(self), clock::now());
        match news {
            News::Register(register) if register.kind == kind => {
                throttle.at(key, |waiters, wakers| waiters.register_changed(register, now, wakers));
            }
            // Where the store is away, those who wait find out.
            News::Missed | News::Reconnected | News::Deaf => {
                let mut keys = Vec::new();
                throttle.0.keys.for_each(|key, waiters| {
                    if waiters.events_missed(now) {
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
