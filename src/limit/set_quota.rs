//! The set quota of a key: a quota that applies in place of what callers state. An operator has set it,
//! or it was *learned*: the upstream has stated it.
//!
//! Each change of it has a number, the *quota version*. An odd version is of a set quota, an even one
//! of its end. Of the odd ones, each second is of a learned quota. A caller states the version of its
//! limits, 0 if it knows of none. The ledger keeps the largest version that it has seen:
//!
//! | the caller's version | what decides |
//! |---|---|
//! | the ledger's | the set quota. If it has ended, what callers state, with the limits of this call |
//! | smaller | the same, and the reply states the ledger's version |
//! | smaller and odd, and the ledger's is even | nothing: the limits of the call are those of a set quota that has ended |
//! | larger | the same as above, after the ledger has taken over the version. It is new, or was lost |
//!
//! While a set quota applies, the other limits of the key are *paused*: they count, refuse nothing,
//! and are forgotten when no caller has stated them for two windows and a second. When it ends, its
//! limits count as if callers stated them at that moment, and those of callers apply at once. More may
//! have been used than a paused bucket has, so it is empty at most then. So is a bucket that begins to apply
//! with a set quota, whatever was booked ahead.
//!
//! What an operator sets goes before what is learned. So a quota is not learned while one of an
//! operator applies. An operator's quota ends when it was not used for its life, and a learned one when
//! it was not learned again for its life: the upstream may have ceased to state it.
//!
//! A change that ends a learned quota, and no other one, states the version of the learned quota. It ends
//! that one, and learned ones after it. If an operator has set a quota since, that one stays.
//!
//! A limit that begins to apply may not know all earlier permits. If such a permit came back unused, and
//! its units were taken out of that limit, they would be units of others. So after limits have changed, an
//! earlier permit is taken back only while it is valid, and only if the new limits began with a log of
//! all permits. Otherwise its units stay until they leave by themselves.
//!
//! Twin: `store/redis/lua/set_quota.lua`
//! After a change: `cargo test --all-features --lib differential`

use std::time::Duration;

use super::{LimitSpec, Micros, UnusedPermits, micros_up};
use crate::quota::Quota;

/// How much longer than its life the end of a set quota is remembered: a minute. A process may hear of
/// the set quota as late as that after the store's last reply about it.
const END_MARGIN: Micros = 60_000_000;

/// How the set quota of a key changes, for [`Change::Quota`](crate::store::Change::Quota). `life` is that of
/// the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeKind {
    /// An operator sets the quota, in place of what callers state. It applies until it was not used for
    /// `life`.
    Set,
    /// The upstream has stated the quota. It applies for `life`, and longer if it is learned again.
    ///
    /// Changes nothing while a quota applies that an operator has set. If the same quota was learned
    /// before, it keeps its version, and no listener is notified.
    Learn,
    /// The quota ends. From now on the limits of the call apply, and those of other callers, besides those of
    /// the set quota for about two of their windows.
    ///
    /// If the call states the version of a [learned](crate::store::SetQuota::is_learned) quota, it ends only
    /// learned quotas. It changes nothing, and the reply states the quota that applies, if that is newer and
    /// not learned.
    ///
    /// The end is remembered for `life`, or for the life of the set quota if that is longer. A process
    /// that has missed the end, and still states the set quota after that, sets it anew.
    End,
}

/// A quota that an operator set for a key, or that the upstream stated, or the end of one.
///
/// It applies to all processes, in place of the quotas that they have for the key. Units that were
/// used stay used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetQuota {
    /// The quota version: the number of the last change. It is odd if the quota applies, and even if
    /// it has ended. Of two versions of one key, the larger one is newer.
    pub version: u32,
    /// The quota. `None` if it has ended. Its limits count what the key counts, and name no unit.
    pub quota: Option<Quota>,
    /// How long the quota applies if it is not used, or not learned again. If it has ended, how long that
    /// is remembered.
    pub left: Duration,
    /// For how long after its last use the quota applies. If it is [learned](Self::is_learned), for how
    /// long after it was learned last.
    pub life: Duration,
}

impl SetQuota {
    /// Makes a quota that applies for `left`, and for `life` after each use. Without a quota, the end
    /// of one.
    ///
    /// # Panics
    ///
    /// If the version is odd and there is no quota, or even and there is one.
    pub fn new(version: u32, quota: Option<Quota>, left: Duration, life: Duration) -> Self {
        assert_eq!(
            is_set(version),
            quota.is_some(),
            "an odd version is of a quota, and an even one of its end"
        );
        SetQuota {
            version,
            quota,
            left,
            life,
        }
    }

    /// Returns whether the upstream has stated the quota, and no operator has set it.
    pub fn is_learned(&self) -> bool {
        is_learned(self.version)
    }
}

/// The state of a set quota, or of its end.
#[derive(Clone, Debug)]
pub(super) struct SetQuotaState {
    /// The version. Odd if the quota applies, even if it has ended.
    pub(super) version: u32,
    /// Until when the quota applies if it is not used, or its end is remembered.
    pub(super) until: Micros,
    /// For how long after its last use the quota applies.
    pub(super) life: Micros,
    /// How many calls the quota allows in flight. `None` if it does not limit them.
    pub(super) in_flight: Option<u32>,
    /// No permit that was granted before the limits changed last has a later slot.
    booked_until: Micros,
    /// No permit that was granted before a limit began without a log of all permits has a later slot.
    lost_until: Micros,
}

impl SetQuotaState {
    /// Makes the state that a call with a new version leaves. The slots of all permits in the logs are
    /// at or before `booked_until`.
    pub(super) fn new(
        spec: &LimitSpec,
        before: Option<SetQuotaState>,
        now: Micros,
        booked_until: Micros,
    ) -> Self {
        let version = spec.quota_version();
        let life = micros_up(spec.quota_life());
        let (life_before, booked_before, lost_until) = before.map_or((0, 0, 0), |before| {
            (before.life, before.booked_until, before.lost_until)
        });
        let (life, margin) = if is_set(version) {
            (life, 0)
        } else {
            (life.max(life_before), END_MARGIN)
        };
        SetQuotaState {
            version,
            until: now + life + margin,
            life,
            in_flight: spec.quota().most_in_flight().filter(|_| is_set(version)),
            booked_until: booked_before.max(booked_until).max(now),
            lost_until,
        }
    }

    /// Returns whether the quota applies.
    pub(super) fn is_set(&self) -> bool {
        is_set(self.version)
    }

    /// Takes in that the quota has ended by itself.
    pub(super) fn end(&mut self, booked_until: Micros) {
        self.version += 1;
        self.booked_until = self.booked_until.max(booked_until).max(self.until);
        self.until += END_MARGIN;
        self.in_flight = None;
    }

    /// Returns whether the quota was learned, and applies.
    pub(super) fn is_learned(&self) -> bool {
        is_learned(self.version)
    }

    /// Notes a use. A quota of an operator applies for its whole life again if half of it has passed.
    pub(super) fn renew(&mut self, now: Micros) {
        let is_of_operator = self.is_set() && !self.is_learned();
        if is_of_operator && 2 * self.until.saturating_sub(now) < self.life {
            self.until = now + self.life;
        }
    }

    /// Takes in that the same quota was learned again.
    pub(super) fn learn_again(&mut self, life: Micros, now: Micros) {
        (self.until, self.life) = (now + life, life);
    }

    /// Returns whether a permit with this slot may be from before the limits changed last. If it comes
    /// back, its slot is not kept for the next caller: other limits allowed it.
    pub(super) fn may_be_earlier(&self, slot: Micros) -> bool {
        slot <= self.booked_until
    }

    /// Takes in that a limit begins to apply. The slots of all permits in the logs are at or before
    /// `booked_until`. `knows_all` states whether the limit begins with a log of all permits.
    pub(super) fn begin(&mut self, booked_until: Micros, knows_all: bool) {
        self.booked_until = self.booked_until.max(booked_until);
        if !knows_all {
            self.lost_until = self.booked_until;
        }
    }

    /// Returns whether a limit may not count permits that come back at `now`. A log that is shorter
    /// than that of the new limit has forgotten only permits that are not valid any more.
    pub(super) fn may_miss(&self, unused: UnusedPermits, now: Micros) -> bool {
        self.may_be_earlier(unused.slot) && (unused.stamp <= now || unused.slot <= self.lost_until)
    }
}

/// Returns whether a version is of a quota that is set, and not of its end.
pub(crate) fn is_set(version: u32) -> bool {
    version % 2 == 1
}

/// Returns whether a version is of a learned quota.
pub(crate) fn is_learned(version: u32) -> bool {
    version % 4 == 3
}

/// Returns the next version above `newest` after a change.
pub(super) fn next_version(newest: u32, kind: ChangeKind) -> u32 {
    let next = newest + 1;
    let further = match kind {
        ChangeKind::Set => (5 - next % 4) % 4,
        ChangeKind::Learn => 3 - next % 4,
        ChangeKind::End => next % 2,
    };
    next + further
}
