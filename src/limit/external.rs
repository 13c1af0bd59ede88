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

use super::{Micros, UpstreamRemaining, micros_up};
use crate::quota::Limit;

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

/// The greatest age of a response whose reset counts: 250 ms, or a twentieth of the window if that
/// is longer. Since an older response, units may have left the log. A steady response has no such
/// limit.
const OLDEST_RESPONSE: Micros = 250_000;

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
    fn new(ends: Micros, log_is_complete: bool) -> Self {
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
    fn begin(&mut self, ends: Micros, log_is_complete: bool) {
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
    pub(super) fn roll(&mut self, now: Micros, limit: Limit) -> bool {
        if now < self.ends {
            return true;
        }
        let ends = self.ends.saturating_add(micros_up(limit.window()));
        // Other clients can have used only what was neither left nor granted here.
        let most = limit
            .count()
            .saturating_sub(self.fewest_left)
            .saturating_sub(self.granted_then);
        let expected = if self.log_is_complete && now < ends {
            self.seen.max(self.expected.min(most))
        } else {
            0
        };
        // The units that were left at the end show what other clients may have used.
        let shown_until = if self.fewest_left < u32::MAX {
            self.valid_until
        } else {
            0
        };
        *self = ExternalUsage {
            expected,
            stated_at: self.stated_at,
            valid_until: self.valid_until,
            confirmed_until: self.confirmed_until.max(shown_until),
            ..ExternalUsage::new(ends, true)
        };
        expected > 0
    }

    /// Takes in a response about a limit, in a ledger that was made at `made_at`. `external` is what
    /// other clients are known to use of that limit. Returns whether more is reserved now than
    /// before.
    pub(super) fn see(
        external: &mut Option<Box<Self>>,
        left: &UpstreamRemaining,
        ours: Ours,
        now: Micros,
        made_at: Micros,
    ) -> bool {
        let (count, window) = (left.limit.count(), micros_up(left.limit.window()));
        let (ago, refused) = (micros_up(left.ago), left.refused);
        let units_left = u32::try_from(left.units).unwrap_or(u32::MAX);
        let gone = count.saturating_sub(units_left);
        let is_recent = left.steady || ago <= OLDEST_RESPONSE.max(window / 20);
        let reset_in = left.reset_in.filter(|_| is_recent);
        let resets_at = reset_in.map(|reset_in| now.saturating_add(micros_up(reset_in)));
        let is_used_by_others = resets_at.is_some() && u64::from(gone) > ours.most;
        if external.is_none() && !is_used_by_others && refused == 0 && !left.urgent {
            return false;
        }

        // The window that the response is about.
        let steady_reset = resets_at.filter(|_| left.steady);
        let ends = steady_reset.unwrap_or(now.saturating_add(window));
        // If it is not known when the upstream's count began, the log has to know the window that
        // ends now. A tenth of the window may be missing.
        let known_from = steady_reset.unwrap_or(now);
        let log_is_complete = made_at.saturating_add(window - window / 10) <= known_from;
        let external =
            external.get_or_insert_with(|| Box::new(ExternalUsage::new(ends, log_is_complete)));
        let is_steady = steady_reset.is_some();
        if is_steady || refused > 0 {
            external.begin(ends, log_is_complete);
        }
        let (reserved, _) = external.reserved_from(now, left.limit);

        // What other clients have used of it.
        external.refused = external.refused.saturating_add(refused);
        if external.refused > 0 {
            // An eighth of the limit stays available, to find out that the other clients have
            // stopped.
            let by_refusals = external.expected.saturating_add(external.refused);
            external.seen = external.seen.max(by_refusals.min(count - count / 8));
        }
        let stated_at = now.saturating_sub(ago);
        let valid_until = now.saturating_add(micros_up(left.valid_for));
        let is_newest = stated_at >= external.stated_at;
        if is_newest {
            (external.stated_at, external.valid_until) = (stated_at, valid_until);
        }
        let counted = ours.most.saturating_sub(u64::from(external.refused));
        let of_others = gone.saturating_sub(u32::try_from(counted).unwrap_or(u32::MAX));
        // A response made before this window states nothing about it.
        if stated_at.saturating_add(window) >= external.ends {
            let granted = u32::try_from(ours.least).unwrap_or(u32::MAX);
            (external.fewest_left, external.granted_then) =
                (external.fewest_left, external.granted_then).min((units_left, granted));
            if is_steady {
                let most = if is_newest { gone } else { u32::MAX };
                external.seen = external.seen.min(most).max(of_others);
            }
        }
        if refused > 0 || (is_steady && of_others > 0) {
            external.confirmed_until = external.confirmed_until.max(valid_until);
        }

        // How much less is left than the log knows of.
        if is_newest {
            let most = i64::try_from(ours.most).unwrap_or(i64::MAX);
            (
                external.shortfall,
                external.shortfall_until,
                external.counted_until,
            ) = match resets_at {
                Some(resets_at) if resets_at > now => (
                    i64::from(gone) - most,
                    resets_at.min(valid_until),
                    ours.until,
                ),
                _ => (0, 0, 0),
            };
        }
        external.reserved_from(now, left.limit).0 > reserved
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
    pub(super) fn reserved_from(&self, at: Micros, limit: Limit) -> (u32, Micros) {
        let is_confirmed = at < self.confirmed_until;
        let (seen, most_expected) = if is_confirmed {
            (self.seen, u32::MAX)
        } else {
            (0, limit.count() / 4)
        };
        let known = if at < self.ends {
            seen.max(self.expected.min(most_expected))
        } else if self.log_is_complete {
            self.seen.max(self.expected).min(most_expected)
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
    pub(super) fn forgotten_from(&self, limit: Limit) -> Micros {
        let is_stated = self.fewest_left < u32::MAX || self.seen > 0;
        let (after, _) = self.reserved_from(self.ends, limit);
        let ends = if is_stated && after > 0 {
            self.ends.saturating_add(micros_up(limit.window()))
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
