//! An in-flight slot of a key, held from the permit to the end of the call.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::engine::Core;
use super::in_flight::{Acted, KeyCalls};
use super::reservation::NoSlot;
use super::settings::OnStoreError;
use crate::clock;
use crate::error::{Limited, Reason, StoreError};
use crate::events;
use crate::key::Key;
use crate::key_map::Full;
use crate::quota::Limit;
use crate::store::{Refusal, StoreEvent};
use crate::tuning::MISSED;
use crate::wait_queue::Number;
use crate::wakers::Wakers;

/// The in-flight slot of a call. Dropping it ends the call.
///
/// Boxed, so that a call stays small if calls in flight are not limited.
#[derive(Debug)]
pub(crate) struct InFlightSlot(Box<TakenSlot>);

#[derive(Debug)]
struct TakenSlot {
    core: Arc<Core>,
    key: Key,
    /// The number of the slot in the [`KeyCalls`] of the key.
    number: Number,
    /// The in-flight slots of the other keys of a joint request.
    others: Vec<InFlightSlot>,
}

impl TakenSlot {
    /// Runs `act` on the calls in flight of the key, and this slot of them. Does nothing with
    /// [`OnStoreError::FailOpen`]: then calls go on even if the store can no longer count them.
    fn guarded<R>(&self, act: impl FnOnce(&mut KeyCalls, Number) -> R) -> Option<R> {
        let core = &self.core;
        if core.settings.on_store_error == OnStoreError::FailOpen {
            return None;
        }
        let calls = core.in_flight.as_ref()?;
        calls.with(core.whole(self.key), |calls| act(calls, self.number))
    }
}

impl InFlightSlot {
    pub(super) fn new(core: Arc<Core>, key: Key, number: Number) -> Self {
        InFlightSlot(Box::new(TakenSlot {
            core,
            key,
            number,
            others: Vec::new(),
        }))
    }

    /// Adds the in-flight slot of another key of the same call.
    pub(super) fn and(mut self, other: InFlightSlot) -> Self {
        self.0.others.push(other);
        self
    }

    /// Returns whether the store may have granted the slot to another call. Always `false` with
    /// [`OnStoreError::FailOpen`]. The slots of a call are [joined](Self::and) when it leaves: before, each is asked.
    pub(super) fn is_lost(&self, now: Instant) -> bool {
        let is_lost = self.0.guarded(|calls, slot| calls.is_lost(slot, now));
        is_lost.unwrap_or(false)
    }

    /// Ready when the store may have granted the slot to another call: then this call has to end.
    /// Never ready with [`OnStoreError::FailOpen`].
    pub(crate) fn poll_lost(&self, cx: &Context<'_>) -> Poll<StoreError> {
        self.poll_lost_slot(cx)
            .map(|_| StoreError::InFlightSlotLost)
    }

    /// Ready with the first slot of the call that is lost.
    fn poll_lost_slot(&self, cx: &Context<'_>) -> Poll<&TakenSlot> {
        let lost = self.0.guarded(|calls, slot| calls.poll_lost(slot, cx));
        let lost = lost.unwrap_or(Poll::Pending).map(|()| &*self.0);
        let others = self.0.others.iter().map(|other| other.poll_lost_slot(cx));
        std::iter::once(lost)
            .chain(others)
            .find(Poll::is_ready)
            .unwrap_or(Poll::Pending)
    }

    /// The same as [`poll_lost`](InFlightSlot::poll_lost), with the error of the call.
    pub(crate) fn poll_limited(&self, cx: &Context<'_>) -> Poll<Limited> {
        self.poll_lost_slot(cx).map(|TakenSlot { core, key, .. }| {
            let now = clock::now();
            let call = core.refused_request(*key);
            let limited = call.fail(StoreError::InFlightSlotLost, now);
            events::limited(&core.settings.tally, &limited);
            limited
        })
    }
}

impl Drop for InFlightSlot {
    fn drop(&mut self) {
        let now = clock::now();
        let &TakenSlot {
            ref core,
            key,
            number,
            ..
        } = &*self.0;
        with_calls(core, core.whole(key), |calls, wakers| {
            calls.end(number, now, wakers);
        });
        core.settings.tally.call_ended();
    }
}

/// Asks for an in-flight slot of `key`, under `number`. Returns `None` if the request waits. An `impatient` request
/// cannot wait: it is refused if the answer of the store grants it no slot. So is any request if `max_queue` of them wait.
///
/// # Errors
///
/// [`Full`] if there is no room for one more key.
pub(super) fn enter(
    core: &Arc<Core>,
    key: Key,
    number: Number,
    impatient: bool,
    max_queue: Option<usize>,
    now: Instant,
) -> Result<Option<Result<Number, NoSlot>>, Full> {
    let Some(in_flight) = &core.in_flight else {
        return Ok(None);
    };
    // The calls of the key may have been evicted, unlike its state, which knows the limit.
    let limit = core.quota_of(key).quota().most_in_flight();
    let whole = core.whole(key);
    let entered = in_flight.with_new(whole, limit, now, |calls| {
        let is_full = max_queue.is_some_and(|most| calls.waiting() >= most);
        if !is_full {
            calls.enter(number, impatient, now);
        }
        is_full
    })?;
    if follow(core, whole, entered) {
        return Ok(Some(Err(queue_full(core, key))));
    }
    Ok(in_flight
        .with(whole, |calls| calls.collect(number, now))
        .flatten())
}

/// Polls the wait of `number` for an in-flight slot of `key`. It ends at `until` at the latest.
pub(super) fn poll(
    core: &Arc<Core>,
    key: Key,
    number: Number,
    until: Instant,
    now: Instant,
    cx: &mut Context<'_>,
) -> Poll<Result<Number, NoSlot>> {
    let polled = with_calls(core, core.whole(key), |calls, wakers| {
        calls.poll(number, until, now, cx, wakers)
    });
    match polled {
        Some(polled) => polled,
        // It was not polled for so long that its slot went to the next request, and the calls of the key were evicted.
        None if now < until => match enter(core, key, number, false, None, now) {
            Ok(Some(settled)) => Poll::Ready(settled),
            Ok(None) => poll(core, key, number, until, now, cx),
            Err(Full) => Poll::Ready(Err(NoSlot::Failed(core.full()))),
        },
        None => Poll::Ready(Err(NoSlot::NEVER)),
    }
}

/// Ends the wait of `number` for an in-flight slot of `key`.
pub(super) fn leave(core: &Arc<Core>, key: Key, number: Number) {
    let now = clock::now();
    with_calls(core, core.whole(key), |calls, wakers| {
        calls.leave(number, now, wakers);
    });
}

/// Takes in what the store states about the claims of `holder` for `key`.
pub(super) fn on_event(core: &Arc<Core>, key: Key, holder: u64, event: StoreEvent) {
    let now = clock::now();
    with_calls(core, key, |calls, wakers| {
        if calls.holder() == holder {
            calls.on_event(event, now, wakers);
        }
    });
}

/// Returns the refusal of a request that got no in-flight slot. It states no time to retry, because
/// it is unknown when a call will end.
pub(super) fn refusal(core: &Core, key: Key) -> Refusal {
    let limit = core.in_flight.as_ref().map(|calls| Limit::InFlight {
        count: calls.limit(core.whole(key)),
    });
    Refusal { wait: None, limit }
}

/// Refuses a request, because `max_queue` others wait for an in-flight slot of `key`.
pub(super) fn queue_full(core: &Core, key: Key) -> NoSlot {
    let reason = Reason::QueueFull(core.settings.max_queue);
    NoSlot::Refused(reason, refusal(core, key))
}

/// Runs `act` on the calls in flight of `key`, which is that of the whole quota, wakes tasks, and sends the claim that follows.
fn with_calls<R>(
    core: &Arc<Core>,
    key: Key,
    act: impl FnOnce(&mut KeyCalls, &mut Wakers) -> R,
) -> Option<R> {
    let mut wakers = Wakers::default();
    let acted = core
        .in_flight
        .as_ref()?
        .act(key, |calls| act(calls, &mut wakers))?;
    wakers.wake();
    Some(follow(core, key, acted))
}

/// Does what follows from a change to the calls in flight of `key`: sends the claim, and begins to look for slots whose
/// requests are not polled.
fn follow<R>(core: &Arc<Core>, key: Key, acted: Acted<R>) -> R {
    core.claim(acted.claim);
    if acted.begins_to_look {
        look_later(core, key);
    }
    acted.done
}

/// Starts a task that looks once for slots whose requests are not polled. If such slots are left then, another one begins.
fn look_later(core: &Arc<Core>, key: Key) {
    let core_of_task = Arc::downgrade(core);
    core.spawn(async move {
        clock::sleep(MISSED).await;
        if let Some(core) = core_of_task.upgrade() {
            let now = clock::now();
            with_calls(&core, key, |calls, wakers| calls.look(now, wakers));
        }
    });
}
