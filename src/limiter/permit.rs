//! The right to send one request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::StatusCode;

use super::admission::Entry;
use super::engine::{Core, CoreId};
use super::hosts::host_hold;
use super::key_state::is_any_uncertain;
use super::reservation::Slot;
use super::responses::Answered;
use super::seat::Seat;
use crate::clock;
use crate::error::{Facts, Limited, Report, StoreError};
use crate::events;
use crate::key::Key;
use crate::signal::Signal;

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// It ends exactly once: [`answered`](Permit::answered), or [`give_back`](Permit::give_back), which is only for a
/// request that was surely not sent. Dropped, it counts as spent: nobody knows whether the request had left.
///
/// Where calls in flight are limited ([`Quota::in_flight`](crate::Quota::in_flight)), its call is in flight until it
/// ends: keep it until the response is there.
#[must_use = "a permit that is dropped counts as spent"]
pub struct Permit {
    core: Arc<Core>,
    key: Key,
    /// `None` for a request that costs nothing, or where rates are not limited.
    slot: Option<Slot>,
    /// Where calls in flight are limited.
    seat: Option<Seat>,
    /// How the request waited for it.
    wait: Option<Box<Wait>>,
}

/// The wait of a request that did not get its permit at once.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) label: Box<str>,
    pub(super) waited: Duration,
    pub(super) turns: u32,
    /// The key of its host, if it matters which host answers.
    pub(super) host: Option<Key>,
}

impl Permit {
    #[inline]
    pub(super) fn new(core: Arc<Core>, key: Key, slot: Option<Slot>, seat: Option<Seat>) -> Self {
        Permit { core, key, slot, seat, wait: None }
    }

    pub(super) fn after(self, wait: Wait) -> Self {
        Permit { wait: Some(Box::new(wait)), ..self }
    }

    /// The key it is for.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Until when the request must have left. `None` when it costs nothing, or rates are not limited.
    ///
    /// A permit that is used later may put the upstream over its limit: give it back and acquire anew.
    pub fn deadline(&self) -> Option<Instant> {
        self.slot.map(|slot| slot.until)
    }

    /// Whether its deadline still lies ahead.
    pub fn is_alive(&self) -> bool {
        self.slot.is_none_or(|slot| clock::now() < slot.until)
    }

    /// Ends when the store may have given this call's place in flight to others, because it could not be told for too long
    /// that the call is still there: then the call has to end. Never ends where calls in flight are not limited, where
    /// they are counted in memory, or with [`OnStoreError::FailOpen`](crate::OnStoreError::FailOpen).
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any time.
    pub async fn lost(&self) -> StoreError {
        poll_fn(|cx| match &self.seat {
            Some(seat) => seat.poll_lost(cx),
            None => Poll::Pending,
        })
        .await
    }

    /// How long the request waited for it.
    pub fn waited(&self) -> Duration {
        self.wait.as_ref().map_or(Duration::ZERO, |wait| wait.waited)
    }

    /// The request was sent and this came back. Answers the error that a refusal by the upstream makes, for callers
    /// that want one.
    #[inline]
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.sent().answered(signal).1
    }

    /// The request leaves now.
    pub(crate) fn sent(self) -> Sent {
        let Permit { core, key, slot, seat, wait } = self;
        let (cost, at) = slot.map_or_else(|| (0, clock::now()), |slot| (slot.cost, slot.at));
        let host = wait.as_ref().and_then(|wait| wait.host);
        let more = (seat.is_some() || wait.is_some()).then(|| Box::new(More { seat, wait }));
        Sent { core: core.id, cost, key, host, at, more }
    }

    pub(super) fn into_parts(self) -> (Option<Slot>, Option<Seat>) {
        (self.slot, self.seat)
    }

    /// The request was surely not sent: the next in line gets the slot, or the store.
    pub fn give_back(self) {
        if let Some(slot) = self.slot {
            self.core.give_back(self.key, slot);
        }
    }
}

/// A request on its way: its permit is spent, its answer is to come.
pub(crate) struct Sent {
    core: CoreId,
    cost: u32,
    key: Key,
    host: Option<Key>,
    /// When it left, or a little before.
    at: Instant,
    more: Option<Box<More>>,
}

/// What few requests have on their way. Boxed, so that the others stay small.
#[derive(Default)]
struct More {
    seat: Option<Seat>,
    wait: Option<Box<Wait>>,
}

impl Sent {
    /// One that got its permit at once.
    #[inline]
    pub(crate) fn at_once(core: CoreId, entry: &Entry, at: Instant, seat: Option<Seat>) -> Self {
        let &Entry { key, cost, host, .. } = entry;
        let more = seat.map(|seat| Box::new(More { seat: Some(seat), wait: None }));
        Sent { core, cost, key, host, at, more }
    }

    /// The same, and it keeps the name of its key.
    pub(crate) fn named(mut self, label: Box<str>) -> Self {
        let wait = Wait { label, waited: Duration::ZERO, turns: 0, host: None };
        self.more.get_or_insert_default().wait = Some(Box::new(wait));
        self
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// The key of the host it was sent to, if it matters which host answers.
    pub(crate) fn host(&self) -> Option<Key> {
        self.host
    }

    /// Whether it matters that its answer is none in which anything is said of limits.
    #[inline]
    pub(crate) fn is_listened_for(&self) -> bool {
        is_any_uncertain()
    }

    /// Its answer has come, and says nothing of limits.
    #[inline]
    pub(crate) fn into_seat(self) -> Option<Seat> {
        self.more?.seat
    }

    /// Its answer has come, with the error that a refusal by the upstream makes. Its call is in flight until its seat, if
    /// it has one, is dropped.
    pub(crate) fn answered(mut self, signal: &Signal) -> (Option<Seat>, Option<Limited>) {
        let Sent { key, host, cost, at, .. } = self;
        let hold = host_hold(key, host).unwrap_or(key);
        Answered { key, hold, cost, sent: at }.tell(self.core, signal);
        let limited = signal.limited().map(|status| self.upstream_limited(status, signal));
        (self.into_seat(), limited)
    }

    /// The error of a call that has to end, because its seat may have been given to others.
    #[inline]
    pub(crate) fn poll_lost(&self, cx: &Context<'_>) -> Poll<Limited> {
        let seat = self.more.as_ref().and_then(|more| more.seat.as_ref());
        seat.map_or(Poll::Pending, |seat| seat.poll_limited(cx))
    }

    #[cold]
    fn upstream_limited(&mut self, status: StatusCode, signal: &Signal) -> Limited {
        let Wait { label, waited, turns, .. } = match self.more.as_mut().and_then(|more| more.wait.take()) {
            Some(wait) => *wait,
            None => Wait { label: self.core.label(self.key), waited: Duration::ZERO, turns: 0, host: None },
        };
        let retry_after = signal.retry_after();
        events::upstream_limited(&label, status, retry_after);
        let at = clock::wall(clock::now());
        let report = Report::new(Facts { key: label, limit: None, retry_after, at, waited, turns });
        Limited::Upstream { status, report }
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit")
            .field("key", &self.key)
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}
