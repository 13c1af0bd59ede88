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
//! left than the log knows of, the difference ([`ExternalUsage::short`]) is reserved. The
//! reservation ends with the next response, with the reset, or when the response no longer counts.
//! The difference is reserved even if it is not yet known whether other clients used it.
//!
//! If no other client uses the limit, nothing is reserved, because the fleet was granted all units
//! that the upstream counts.
//!
//! Twin: `store/redis/lua/external.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::Micros;

/// The units of a limit that are reserved for other clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExternalUsage {
    /// When the upstream's window ends, and a new count begins.
    ends: Micros,
    /// The units that other clients used in this window, at least.
    seen: u32,
    /// The units that other clients are expected to use in this window.
    before: u32,
    /// The units that the upstream refused in this window. They were granted here, and the upstream
    /// does not count them.
    refused: u32,
    /// The fewest units that were left in this window, and the units granted to this fleet by then.
    least: u32,
    ours: u32,
    /// Whether the log knows all units that were granted here in this window.
    whole: bool,
    /// When the upstream made its newest response, and until when that response counts.
    said: Micros,
    said_until: Micros,
    /// Until when `seen` and `before` are reserved in full.
    confirmed_until: Micros,
    /// By how many units less was left than the log knew of, by the newest response; and until when
    /// these units are reserved. Negative if more was left, because permits were not used yet.
    short: i64,
    short_until: Micros,
    /// The stamp up to which the log was counted for `short`.
    counted_until: Micros,
}

/// The size of a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) count: u32,
    pub(super) window: Micros,
}

/// The statement of a response about a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word {
    /// The ledger's time at which the statement is taken in.
    pub(super) now: Micros,
    /// The units that are left.
    pub(super) left: u32,
    /// When the upstream made the response.
    pub(super) said: Micros,
    /// When the upstream starts its count anew.
    pub(super) resets: Option<Micros>,
    /// Whether that moment is the same in each response. If so, the log has all units of this fleet
    /// that the upstream counts.
    pub(super) steady: bool,
    /// The units that the upstream refused since the last response, because nothing was left.
    pub(super) refused: u32,
    /// Until when the response counts, unless another one confirms it.
    pub(super) valid_until: Micros,
}

/// The units that this fleet was granted and may have used, at least and at most, up to a stamp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ours {
    pub(super) least: u64,
    pub(super) most: u64,
    pub(super) until: Micros,
}

impl ExternalUsage {
    /// Makes the usage of a window that ends at `ends`, of which no response is known. `whole`
    /// states whether the log knows all of the window.
    pub(super) fn new(ends: Micros, whole: bool) -> Self {
        ExternalUsage {
            ends,
            seen: 0,
            before: 0,
            refused: 0,
            least: u32::MAX,
            ours: 0,
            whole,
            said: 0,
            said_until: 0,
            confirmed_until: 0,
            short: 0,
            short_until: 0,
            counted_until: 0,
        }
    }

    /// Sets the end of the window, if no use by other clients is known yet. `whole` states whether
    /// the log knows all of it.
    pub(super) fn begin(&mut self, ends: Micros, whole: bool) {
        if (self.seen, self.before, self.refused) == (0, 0, 0) {
            let &mut ExternalUsage {
                said,
                said_until,
                short,
                short_until,
                counted_until,
                ..
            } = self;
            *self = ExternalUsage {
                said,
                said_until,
                short,
                short_until,
                counted_until,
                ..ExternalUsage::new(ends, whole)
            };
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
        let most = count.saturating_sub(self.least).saturating_sub(self.ours);
        let before = if self.whole && now < ends {
            self.seen.max(self.before.min(most))
        } else {
            0
        };
        let &mut ExternalUsage {
            said, said_until, ..
        } = self;
        // The units that were left at the end show what other clients may have used.
        let shown_until = if self.least < u32::MAX { said_until } else { 0 };
        let confirmed_until = self.confirmed_until.max(shown_until);
        *self = ExternalUsage {
            before,
            said,
            said_until,
            confirmed_until,
            ..ExternalUsage::new(ends, true)
        };
        before > 0
    }

    /// Takes in a response. Returns whether more is reserved now than before.
    pub(super) fn see(&mut self, size: Size, word: Word, ours: Ours) -> bool {
        let Size { count, window } = size;
        let Word {
            now,
            left,
            said,
            resets,
            steady,
            refused,
            valid_until,
        } = word;
        let (reserved, _) = self.reserved_from(now, size);
        self.refused = self.refused.saturating_add(refused);
        if self.refused > 0 {
            // An eighth of the limit stays available, to find out that the other clients have
            // stopped.
            let by_refusals = self
                .before
                .saturating_add(self.refused)
                .min(count - count / 8);
            self.seen = self.seen.max(by_refusals);
        }
        let is_newest = said >= self.said;
        if is_newest {
            (self.said, self.said_until) = (said, valid_until);
        }
        let gone = count.saturating_sub(left);
        let beyond =
            |ours: u64| u32::try_from(u64::from(gone).saturating_sub(ours)).unwrap_or(u32::MAX);
        let of_others = beyond(ours.most.saturating_sub(u64::from(self.refused)));
        // A response made before this window states nothing about it.
        if said.saturating_add(window) >= self.ends {
            let granted = u32::try_from(ours.least).unwrap_or(u32::MAX);
            (self.least, self.ours) = (self.least, self.ours).min((left, granted));
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
            (self.short, self.short_until, self.counted_until) = match resets {
                Some(resets) if resets > now => {
                    (i64::from(gone) - most, resets.min(valid_until), ours.until)
                }
                _ => (0, 0, 0),
            };
        }
        self.reserved_from(now, size).0 > reserved
    }

    /// Takes in that permits were given back unused. If their stamp is not later than
    /// `counted_until`, the newest response was compared with them as used. Then other clients used
    /// these units.
    pub(super) fn returned(&mut self, now: Micros, stamp: Micros, units: u64) {
        if now < self.short_until && stamp <= self.counted_until {
            self.short = self
                .short
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
            kept(self.before).max(if is_confirmed { self.seen } else { 0 })
        } else if self.whole {
            kept(self.seen.max(self.before))
        } else {
            0
        };
        let short = if at < self.short_until { self.short } else { 0 };
        let changes = [self.short_until, self.confirmed_until, self.ends];
        let until = changes
            .into_iter()
            .filter(|moment| *moment > at)
            .min()
            .unwrap_or(Micros::MAX);
        (
            known.max(u32::try_from(short.max(0)).unwrap_or(u32::MAX)),
            until,
        )
    }

    /// Returns the moment from which nothing is reserved for other clients, if no response arrives.
    pub(super) fn forgotten_from(&self, size: Size) -> Micros {
        let said = self.least < u32::MAX || self.seen > 0;
        let (after, _) = self.reserved_from(self.ends, size);
        let ends = if said && after > 0 {
            self.ends.saturating_add(size.window)
        } else {
            self.ends
        };
        ends.max(if self.short > 0 { self.short_until } else { 0 })
    }
}
