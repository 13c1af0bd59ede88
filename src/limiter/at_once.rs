//! The fast path: a request takes permits that are at hand, of its key or of all its keys.
//!
//! The layers call [`send_one_unlocked`], [`send_at_once`] and [`send_all_at_once`],
//! [`Acquire`](super::acquire::Acquire) calls [`take_one_unlocked`], [`take_at_once`] and [`take_all_at_once`].
//! A request that gets none takes the slow path, [`wait::slow`](super::wait::slow).

use std::time::Instant;

use super::admitted::Admitted;
use super::around;
use super::engine::Core;
use super::part::{self, Entry, PartRef, PerPart};
use super::quotas::QuotaId;
use super::reservation::{CountedAs, Reservation};
use super::sent::{Sent, SentPart};
use super::taken::{OfKey, Taken};
use crate::clock::{self, Moment};
use crate::key::Key;
use crate::stats::{Engine, Outcome};

/// Takes a permit at hand for a request that the caller sends at once. Returns the time, or `None` if
/// the request has to take the slow path.
///
/// A request that costs nothing needs no permit. No [`Permit`](super::Permit) is made: the caller
/// makes a [`Sent`](super::Sent) instead.
#[inline]
pub(super) fn send_at_once(core: &Core, entry: &Entry) -> Option<Moment> {
    let now = clock::now_by_counter();
    if entry.cost == 0 {
        return pass_for_nothing(core, CountedAs::Request).then_some(now);
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

/// Takes a permit that is at hand, and counts the request, without a visit of the state of the key. Returns `None` for
/// all requests but those under [`Key::ALL`] that cost 1 and have no quota of their own.
#[inline(always)]
pub(super) fn take_one_unlocked(core: &Core, entry: &Entry, now: Moment) -> Option<Reservation> {
    let is_plain = entry.cost == 1 && entry.key == Key::ALL && entry.quota == QuotaId::NONE;
    if is_plain && is_open(core, entry, now) {
        core.states.take_one_unlocked(now)
    } else {
        None
    }
}

/// Takes a permit of a key that is at hand, and counts what `counting` states. Returns `Some(None)` for a request that
/// costs nothing, and `None` if the request has to take the slow path.
#[inline]
pub(super) fn take_at_once(
    core: &Core,
    entry: &Entry,
    counting: CountedAs,
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
fn pass_for_nothing(core: &Core, counting: CountedAs) -> bool {
    let passes = !core.settings.tally.is_draining();
    if passes && counting == CountedAs::Request {
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
    let known = core.states.find(hold, |state| {
        let is_clear = state.hold.is_clear(max_hold, now.instant());
        if let Some(first) = first {
            first.set_clear(is_clear);
        }
        is_clear
    });
    known.unwrap_or(false)
}

/// Takes the permits at hand of a request, of each of its keys, and counts the request. Returns `None` if it has to take
/// the slow path.
pub(super) fn take_all_at_once(parts: &[PartRef<'_>], deadline: Option<Instant>) -> Option<Taken> {
    let now = clock::now_by_counter();
    let mut slots = PerPart::new();
    if !take_slots(parts, deadline, now, &mut slots) {
        return None;
    }
    let all = parts.iter().zip(slots);
    let mut all = all.map(|(part, slot)| OfKey::at_hand(part.core.clone(), &part.entry, slot));
    let first = all.next()?;
    Some(Taken::of_all(first, all.collect(), Vec::new()))
}

/// The same for a request that the caller sends at once. No permit is made.
pub(crate) fn send_all_at_once(parts: &[PartRef<'_>], deadline: Option<Instant>) -> Option<Sent> {
    let now = clock::now_by_counter();
    let mut slots = PerPart::new();
    if !take_slots(parts, deadline, now, &mut slots) {
        return None;
    }
    let all = parts.iter().zip(&slots);
    let mut all = all.map(|(PartRef { core, entry }, slot)| SentPart {
        admitted: Admitted::new(core.id, entry, now),
        slot: slot.filter(|_| core.settings.settles),
    });
    let first = all.next()?;
    Some(Sent::of_all(first, all))
}

/// Takes permits that are at hand, of all parts or of none, and adds them to `slots`. Returns whether
/// it took them: not if a part has none, if requests with these parts wait, or if a layer may be around.
///
/// The units of all parts are counted, and the request under its first key. That key is the last that is asked, so
/// that no request is counted that does not leave.
// The list is not returned: its 300 bytes would be copied.
fn take_slots(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    now: Moment,
    slots: &mut PerPart<Option<Reservation>>,
) -> bool {
    // A request that counts twice under one key is refused.
    if around::is_any()
        || parts[0].core.joint.is_any_waiting(parts)
        || part::repeated(parts).is_some()
    {
        return false;
    }
    let take = |part: &PartRef<'_>, counting| {
        let entry = Entry {
            deadline,
            ..part.entry
        };
        take_at_once(part.core, &entry, counting, now)
    };
    slots.push(None);
    for part in &parts[1..] {
        match take(part, CountedAs::Units) {
            Some(slot) => slots.push(slot),
            None => {
                give_up(parts, std::mem::take(slots));
                return false;
            }
        }
    }
    match take(&parts[0], CountedAs::Request) {
        Some(slot) => slots[0] = slot,
        None => {
            give_up(parts, std::mem::take(slots));
            return false;
        }
    }
    true
}

/// Gives back permits that [`take_slots`] took.
fn give_up(parts: &[PartRef<'_>], slots: PerPart<Option<Reservation>>) {
    for (PartRef { core, entry }, slot) in parts.iter().zip(slots) {
        if let Some(slot) = slot {
            core.give_back_units(entry.key, slot.cost.into());
            core.give_back(entry.key, slot);
        }
    }
}
