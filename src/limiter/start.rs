//! The entrance: a request gets its permit at once, or a future that waits for it, or an error.
//!
//! The fast path only takes a permit at hand. It is [`send_one_unlocked`] and [`send_at_once`] for the layers, and
//! [`take_one_unlocked`] and [`take_at_once`] for [`Acquire`](super::acquire::Acquire). A request that it does not admit
//! takes the slow path, [`slow`].

use std::sync::Arc;

use super::admission::{self, Admission, WaitFor};
use super::around;
use super::counting;
use super::engine::Core;
use super::entry::Entry;
use super::key_state::KeyState;
use super::limited::RefusedRequest;
use super::own_quota;
use super::quotas::QuotaId;
use super::reservation::{Counting, Reservation, WaitBound};
use super::taken::Taken;
use super::waiter::Waiter;
use crate::clock::{self, Moment};
use crate::error::{Limited, Reason};
use crate::events;
use crate::key::{Key, Label};
use crate::stats::{Gate, Outcome};
use crate::store::Refusal;

/// What a request gets when it enters.
pub(crate) enum Started {
    /// The request may leave.
    Granted(Taken),
    Waiting(Box<Waiter>),
    Limited(Limited),
}

/// Takes a permit at hand for a request that the caller sends at once. Returns the time, or `None` if
/// the request has to take the slow path.
///
/// A request that costs nothing needs no permit. No [`Permit`](super::Permit) is made: the caller
/// makes a [`Sent`](super::Sent) instead.
#[inline]
pub(super) fn send_at_once(core: &Core, entry: &Entry) -> Option<Moment> {
    let now = clock::now_by_counter();
    if entry.cost == 0 {
        return pass_for_nothing(core, Counting::Request).then_some(now);
    }
    let is_sent =
        is_open(core, entry, now) && core.states.spend(entry.key, entry.cost, entry.quota, now);
    is_sent.then_some(now)
}

/// The same for a request under [`Key::ALL`] that costs 1 and has no quota of its own, without a visit of the state of
/// the key.
#[inline]
pub(super) fn send_one_unlocked(core: &Core, entry: &Entry) -> Option<Moment> {
    let now = clock::now_by_counter();
    (is_open(core, entry, now) && core.states.spend_one_unlocked(now)).then_some(now)
}

/// Takes a permit that is at hand, and counts the request. Returns `Some(None)` for a request that costs
/// nothing, and `None` if the request has to take the slow path.
pub(super) fn take_at_once(core: &Core, entry: &Entry, now: Moment) -> Option<Option<Reservation>> {
    take_counting(core, entry, Counting::Request, now)
}

/// The same without a visit of the state of the key. Returns `None` for all requests but those under [`Key::ALL`]
/// that cost 1 and have no quota of their own.
#[inline(always)]
pub(super) fn take_one_unlocked(core: &Core, entry: &Entry, now: Moment) -> Option<Reservation> {
    let is_plain = entry.cost == 1 && entry.key == Key::ALL && entry.quota == QuotaId::NONE;
    if is_plain && is_open(core, entry, now) {
        core.states.take_one_unlocked(now)
    } else {
        None
    }
}

/// Does what [`take_at_once`] does, for one key of a joint request: `counting` is what is counted.
#[inline]
pub(super) fn take_counting(
    core: &Core,
    entry: &Entry,
    counting: Counting,
    now: Moment,
) -> Option<Option<Reservation>> {
    if entry.cost == 0 {
        return pass_for_nothing(core, counting).then_some(None);
    }
    if !is_open(core, entry, now) {
        return None;
    }
    let &Entry {
        key, cost, quota, ..
    } = entry;
    core.states.take(key, cost, quota, counting, now).map(Some)
}

/// Lets a request that costs nothing pass, and counts it. Returns whether it passes: not while the limiter
/// drains.
fn pass_for_nothing(core: &Core, counting: Counting) -> bool {
    let passes = !core.settings.tally.is_draining();
    if passes && counting == Counting::Request {
        core.settings.tally.count(Outcome::Passed);
    }
    passes
}

/// Returns whether a request needs nothing but a permit of its key. This is so if calls in flight
/// are not limited, its host is known not to be on hold, and its deadline has not passed.
#[inline]
fn is_open(core: &Core, entry: &Entry, now: Moment) -> bool {
    core.in_flight.is_none()
        && is_host_clear(core, entry.key, entry.host, now)
        && (entry.deadline).is_none_or(|deadline| Moment::of(deadline) >= now)
}

/// Returns whether `host` is known to be neither on hold nor on probation. Always true if requests
/// under `key` have no holds by host.
#[inline]
fn is_host_clear(core: &Core, key: Key, host: Option<Key>, now: Moment) -> bool {
    let Some(host) = host.filter(|_| core.hosts.are_of(key)) else {
        return true;
    };
    let first = core.hosts.notice(host);
    if first.is_some_and(|first| first.is_clear()) {
        return true;
    }
    let hold = core.hosts.hold_within_all(host);
    let max_hold = core.settings.max_hold;
    let look = |state: &mut KeyState| {
        let is_clear = state.hold.is_clear(max_hold, now.instant());
        if let Some(first) = first {
            first.set_clear(is_clear);
        }
        is_clear
    };
    core.states.find(hold, look).unwrap_or(false)
}

/// Enters a request for which no permit is at hand. `label` returns the name of its key.
#[cold]
pub(super) fn slow(core: &Arc<Core>, entry: &Entry, label: impl FnOnce() -> Label) -> Started {
    let now = clock::now();
    let settings = &core.settings;
    let bound = WaitBound::new(entry.deadline, now, settings.max_wait);
    let bound = bound.nested_if(around::is_nested(core), now);
    let limited = |limited: Limited| {
        core.refused(entry.key, &limited);
        Started::Limited(limited)
    };
    let refuse = |label, reason, refusal| {
        limited(
            RefusedRequest::new(label, core.limit_name(entry.key), now)
                .refuse(reason, refusal, now),
        )
    };
    if let Some(reason) = around::refusal(core) {
        return refuse(label(), reason, Refusal::NEVER);
    }
    if settings.tally.is_draining() {
        return refuse(label(), Reason::Draining, Refusal::NEVER);
    }
    own_quota::choose(core, entry.key, entry.quota, now);
    if let Some(reason) = admission::known_above_limit(core, entry.key, entry.cost) {
        return refuse(label(), reason, Refusal::NEVER);
    }
    if bound.latest < now {
        return refuse(label(), Reason::Deadline, Refusal::NEVER);
    }
    match admission::enter(core, entry, bound, now) {
        Admission::Granted(mut taken, uncounted) => {
            if let Err(left) = taken.pass_host(now) {
                // Another request has become the probe of the host meanwhile.
                drop(taken);
                let wait = WaitFor::HostHold(clock::after(now, left));
                let waiter = Waiter::new(core, entry, bound, now, label());
                return Started::Waiting(waiter.waits(wait, None, now));
            }
            if let Some(cause) = uncounted {
                events::passed(&settings.tally, &label(), &cause);
                core.count(entry.key, Outcome::Uncounted);
            } else {
                counting::passed(core, entry.key, taken.units());
            }
            Started::Granted(taken.counted())
        }
        Admission::Waits {
            wait,
            in_flight_slot,
        } => {
            let label = label();
            events::waiting(&label, wait.queued(core, entry.key));
            counting::note_label(core, entry.key, &label);
            Started::Waiting(Waiter::new(core, entry, bound, now, label).waits(
                wait,
                in_flight_slot,
                now,
            ))
        }
        Admission::Refused(reason, refusal) => refuse(label(), reason, refusal),
        Admission::Failed(source) => {
            limited(RefusedRequest::new(label(), core.limit_name(entry.key), now).fail(source, now))
        }
    }
}
