//! What other clients use of a limit, as the upstream's responses show it. Other clients are those
//! outside this fleet.
//!
//! An upstream states how much of a limit is left, and when its count starts anew. Units that are
//! gone and were not granted here were used by other clients. Their number is a lower bound,
//! because some of the granted units may still be on their way. If the upstream refuses units to a
//! fleet that keeps the limit, other clients have used these units as well.
//!
//! The store reserves all these units for the other clients until the upstream's window ends. In
//! the next window it expects the same use again, unless the units that were left show that they
//! used less. If the log did not see all of the first window, nothing is reserved in the next one.
//! The units may then have been granted here, before a restart.
//!
//! No response reserves units for long. Until [`ExternalUsage::confirmed_until`] all of them are
//! reserved. After that, the units that other clients were seen to use are free. Of the units that
//! they are expected to use, at most a quarter of the limit stays reserved. This lasts until
//! another response shows use by other clients. If a newer response states that more is left, it
//! lowers the use that an older one showed.
//!
//! A response also bounds the units that may be sent until the next one. If it states that less is
//! left than the log knows of, the difference ([`ExternalUsage::shortfall`]) is reserved. The
//! reservation ends with the next response, with the reset, or when the response no longer counts.
//! The difference is reserved even if it is not yet known whether other clients used it.
//!
//! If no other client uses the limit, nothing is reserved, because the fleet was granted all units
//! that the upstream counts.
//!
//! Twin: `store/redis/lua/external.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::Micros;

/// What other clients use of a limit. The units reserved for them follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExternalUsage {
    /// When the upstream's window ends, and a new count begins.
    ends: Micros,
    /// The units that other clients used in this window, at least.
    seen: u32,
    /// The units that other clients are expected to use in this window, because they used as many
    /// in the window before.
    expected: u32,
    /// The units that the upstream refused in this window. They were granted here, and the upstream
    /// does not count them.
    refused: u32,
    /// The fewest units that were left in this window. `u32::MAX` if no response stated them.
    fewest_left: u32,
    /// The units that this fleet was granted in this window when `fewest_left` was stated.
    granted_then: u32,
    /// Whether the log has all units that were granted here in this window.
    log_is_complete: bool,
    /// When the upstream made its newest response.
    stated_at: Micros,
    /// Until when the newest response counts.
    valid_until: Micros,
    /// Until when `seen` and `expected` are reserved in full.
    confirmed_until: Micros,
    /// The units that were gone by the newest response, minus the units that the log had then.
    /// Negative if the log had more, because some permits were not used yet.
    shortfall: i64,
    /// Until when `shortfall` is reserved.
    shortfall_until: Micros,
    /// The last stamp whose units the log counted for `shortfall`.
    counted_until: Micros,
}

/// The size of a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// The units that are allowed in each window.
    pub(super) count: u32,
    /// The length of the window, in microseconds.
    pub(super) window: Micros,
}

/// What a response states about a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Statement {
    /// The ledger's time at which the statement is taken in.
    pub(super) now: Micros,
    /// The units that are left.
    pub(super) left: u32,
    /// When the upstream made the response.
    pub(super) stated_at: Micros,
    /// When the upstream starts its count anew.
    pub(super) resets_at: Option<Micros>,
    /// Whether that moment is the same in each response. If so, the log has all units of this fleet
    /// that the upstream counts.
    pub(super) steady: bool,
    /// The units that the upstream refused since the last response, because nothing was left.
    pub(super) refused: u32,
    /// Until when the response counts, unless another one confirms it.
    pub(super) valid_until: Micros,
}

/// The units that this fleet was granted, and that the upstream may have counted. Chunks of a log
/// share a stamp, so their number is known only within bounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ours {
    /// There are at least this many units.
    pub(super) least: u64,
    /// There are at most this many units.
    pub(super) most: u64,
    /// The last stamp whose units are counted. Permits with later stamps were certainly not used
    /// yet.
    pub(super) until: Micros,
}

impl ExternalUsage {
    /// Makes the usage of a window that ends at `ends`, of which no response is known.
    /// `log_is_complete` states whether the log has all units that were granted here in it.
    pub(super) fn new(ends: Micros, log_is_complete: bool) -> Self {
        ExternalUsage {
            ends,
            seen: 0,
            expected: 0,
            refused: 0,
            fewest_left: u32::MAX,
            granted_then: 0,
            log_is_complete,
            stated_at: 0,
            valid_until: 0,
            confirmed_until: 0,
            shortfall: 0,
            shortfall_until: 0,
            counted_until: 0,
        }
    }

    /// Sets the end of the window, if no use by other clients is known yet. `log_is_complete`
    /// states whether the log has all units that were granted here in it.
    pub(super) fn begin(&mut self, ends: Micros, log_is_complete: bool) {
        if (self.seen, self.expected, self.refused) == (0, 0, 0) {
            self.ends = ends;
            self.log_is_complete = log_is_complete;
            self.fewest_left = u32::MAX;
            self.granted_then = 0;
            self.confirmed_until = 0;
        }
    }

    /// Begins a new count if the last one has ended. Returns `false` if a new count began and other
    /// clients are expected to use nothing of it.
    pub(super) fn roll(&mut self, now: Micros, Size { count, window }: Size) -> bool {
        if now < self.ends {
            return true;
        }
        let ends = self.ends.saturating_add(window);
        // Other clients can have used only what was neither left nor granted here.
        let most = count
            .saturating_sub(self.fewest_left)
            .saturating_sub(self.granted_then);
        let expected = if self.log_is_complete && now < ends {
            self.seen.max(self.expected.min(most))
        } else {
            0
        };
        let &mut ExternalUsage {
            stated_at,
            valid_until,
            ..
        } = self;
        // The units that were left at the end show what other clients may have used.
        let shown_until = if self.fewest_left < u32::MAX {
            valid_until
        } else {
            0
        };
        let confirmed_until = self.confirmed_until.max(shown_until);
        *self = ExternalUsage {
            expected,
            stated_at,
            valid_until,
            confirmed_until,
            ..ExternalUsage::new(ends, true)
        };
        expected > 0
    }

    /// Takes in a response. Returns whether more is reserved now than before.
    pub(super) fn see(&mut self, size: Size, statement: Statement, ours: Ours) -> bool {
        let Size { count, window } = size;
        let Statement {
            now,
            left,
            stated_at,
            resets_at,
            steady,
            refused,
            valid_until,
        } = statement;
        let (reserved, _) = self.reserved_from(now, size);
        self.refused = self.refused.saturating_add(refused);
        if self.refused > 0 {
            // An eighth of the limit stays available, to find out that the other clients have
            // stopped.
            let by_refusals = self
                .expected
                .saturating_add(self.refused)
                .min(count - count / 8);
            self.seen = self.seen.max(by_refusals);
        }
        let is_newest = stated_at >= self.stated_at;
        if is_newest {
            (self.stated_at, self.valid_until) = (stated_at, valid_until);
        }
        let gone = count.saturating_sub(left);
        let beyond =
            |ours: u64| u32::try_from(u64::from(gone).saturating_sub(ours)).unwrap_or(u32::MAX);
        let of_others = beyond(ours.most.saturating_sub(u64::from(self.refused)));
        // A response made before this window states nothing about it.
        if stated_at.saturating_add(window) >= self.ends {
            let granted = u32::try_from(ours.least).unwrap_or(u32::MAX);
            (self.fewest_left, self.granted_then) =
                (self.fewest_left, self.granted_then).min((left, granted));
            if steady {
                let most = if is_newest { gone } else { u32::MAX };
                self.seen = self.seen.min(most).max(of_others);
            }
        }
        if refused > 0 || (steady && of_others > 0) {
            self.confirmed_until = self.confirmed_until.max(valid_until);
        }
        if is_newest {
            let most = i64::try_from(ours.most).unwrap_or(i64::MAX);
            (self.shortfall, self.shortfall_until, self.counted_until) = match resets_at {
                Some(resets_at) if resets_at > now => (
                    i64::from(gone) - most,
                    resets_at.min(valid_until),
                    ours.until,
                ),
                _ => (0, 0, 0),
            };
        }
        self.reserved_from(now, size).0 > reserved
    }

    /// Takes in that permits were given back unused. If their stamp is not later than
    /// `counted_until`, the newest response was compared with them as used. Then other clients used
    /// these units.
    pub(super) fn returned(&mut self, now: Micros, stamp: Micros, units: u64) {
        if now < self.shortfall_until && stamp <= self.counted_until {
            self.shortfall = self
                .shortfall
                .saturating_add(i64::try_from(units).unwrap_or(i64::MAX));
        }
    }

    /// Returns the units reserved at a moment, and when that number changes next if no response
    /// arrives.
    pub(super) fn reserved_from(&self, at: Micros, Size { count, .. }: Size) -> (u32, Micros) {
        let is_confirmed = at < self.confirmed_until;
        let kept = |expected: u32| {
            if is_confirmed {
                expected
            } else {
                expected.min(count / 4)
            }
        };
        let known = if at < self.ends {
            kept(self.expected).max(if is_confirmed { self.seen } else { 0 })
        } else if self.log_is_complete {
            kept(self.seen.max(self.expected))
        } else {
            0
        };
        let shortfall = if at < self.shortfall_until {
            self.shortfall
        } else {
            0
        };
        let changes = [self.shortfall_until, self.confirmed_until, self.ends];
        let until = changes
            .into_iter()
            .filter(|moment| *moment > at)
            .min()
            .unwrap_or(Micros::MAX);
        (
            known.max(u32::try_from(shortfall.max(0)).unwrap_or(u32::MAX)),
            until,
        )
    }

    /// Returns the moment from which nothing is reserved for other clients, if no response arrives.
    pub(super) fn forgotten_from(&self, size: Size) -> Micros {
        let is_stated = self.fewest_left < u32::MAX || self.seen > 0;
        let (after, _) = self.reserved_from(self.ends, size);
        let ends = if is_stated && after > 0 {
            self.ends.saturating_add(size.window)
        } else {
            self.ends
        };
        ends.max(if self.shortfall > 0 {
            self.shortfall_until
        } else {
            0
        })
    }
}
