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
//! limits count as if callers stated them at that moment, and those of callers apply at once.
//!
//! What an operator sets goes before what is learned. So a quota is not learned while one of an
//! operator applies. An operator's quota ends when it was not used for its life, and a learned one when
//! it was not learned again for its life: the upstream may have ceased to state it.
//!
//! A change that ends a learned quota, and no other one, states the version of the learned quota. It ends
//! that one, and learned ones after it. If an operator has set a quota since, that one stays.
//!
//! Twin: `store/redis/lua/set_quota.lua`
//! After a change: `cargo test --all-features --lib differential`

use super::{LimitSpec, Micros, micros_up};

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

/// The state of a set quota, or of its end.
#[derive(Clone, Debug)]
pub(super) struct SetQuotaState {
    /// The version: an odd one applies, an even one is that of an end.
    pub(super) version: u32,
    /// Until when the quota applies if it is not used, or its end is remembered.
    pub(super) until: Micros,
    /// For how long after its last use the quota applies.
    pub(super) life: Micros,
    /// How many calls the quota allows in flight. `None` if it does not limit them.
    pub(super) in_flight: Option<u32>,
}

impl SetQuotaState {
    /// Makes the state that a call with a new version leaves.
    pub(super) fn new(spec: &LimitSpec, before: Option<SetQuotaState>, now: Micros) -> Self {
        let version = spec.quota_version();
        let mut life = micros_up(spec.quota_life());
        let mut until = now + life;
        if !is_set(version) {
            life = life.max(before.map_or(0, |before| before.life));
            until = now + life + END_MARGIN;
        }
        SetQuotaState {
            version,
            until,
            life,
            in_flight: spec.quota().most_in_flight().filter(|_| is_set(version)),
        }
    }

    /// Returns whether the quota applies.
    pub(super) fn is_set(&self) -> bool {
        is_set(self.version)
    }

    /// Takes in that the quota has ended by itself.
    pub(super) fn end(&mut self) {
        self.version += 1;
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
