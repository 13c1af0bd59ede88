//! What clients outside this fleet use of a limit, as the upstream's responses show it.
//!
//! An upstream states how much of a limit is left, and when the count starts anew. Units that are
//! gone and were not granted here were used by other clients. That is a lower bound, since some of
//! the granted units may still be on their way. If the upstream refuses units to a fleet that keeps
//! the limit, other clients have used these units as well. All these units are reserved for the
//! other clients until the upstream's window ends, and in the window after, less what was left over
//! in the end. If the log did not see all of the first window, nothing is reserved in the second:
//! the units may have been granted here, before a restart.
//!
//! No response reserves anything for long. Until [`ExternalUsage::confirmed_until`] all of it is
//! reserved. From then on, until another response shows use by other clients, the units they were
//! seen to use are free, and at most a quarter of the limit is kept of their expected use. A newer
//! response that states more is left lowers the use that an older one showed.
//!
//! A response also bounds the units that may be sent until the next one. If it states that less is
//! left than the log knows of, the difference ([`ExternalUsage::short`]) is reserved until the next
//! response, the reset, or `confirmed_until` of that response. This holds even if it is not yet
//! known whether other clients used the difference.
//!
//! If no other client uses the limit, nothing is reserved: the fleet has granted all units that the
//! upstream counts.
//!
//! Twin: `store/redis/lua/external.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::Micros;

/// Units reserved for clients outside the fleet, which this file calls *others*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExternalUsage {
    /// When the upstream's window ends, and a new count begins.
    ends: Micros,
    /// Units used by others in it, at least.
    seen: u32,
    /// Units expected of others in it.
    before: u32,
    /// Units that the upstream refused in it: granted here, and not counted there.
    refused: u32,
    /// The fewest units that were left in it, and the units granted to this fleet then.
    least: u32,
    ours: u32,
    /// Whether the log knows all that was granted in it.
    whole: bool,
    /// When the newest response was made, and until when it counts.
    said: Micros,
    said_until: Micros,
    /// Until when `seen` and `before` are reserved in full.
    confirmed_until: Micros,
    /// Units by which less was left than the log knew of, by the newest response; and until when
    /// they are reserved. Less than none if the log knew of more: permits that were not used yet.
    short: i64,
    short_until: Micros,
    /// Up to which stamp the log was counted for that.
    counted_until: Micros,
}

/// The size of a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) count: u32,
    pub(super) window: Micros,
}

/// What a response states of a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word {
    /// The moment of the ledger's time at which it is taken in.
    pub(super) now: Micros,
    /// The units that are left.
    pub(super) left: u32,
    /// When the response was made.
    pub(super) said: Micros,
    /// When the upstream starts its count anew.
    pub(super) resets: Option<Micros>,
    /// Whether that moment stays where it is: then the log has all of this fleet's units that the
    /// upstream counts.
    pub(super) steady: bool,
    /// Units refused since the last response, because nothing was left.
    pub(super) refused: u32,
    /// Until when it counts unless another one confirms it.
    pub(super) valid_until: Micros,
}

/// The units that this fleet was granted and may have used: at least and at most, counted up to a
/// stamp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ours {
    pub(super) least: u64,
    pub(super) most: u64,
    pub(super) until: Micros,
}

impl ExternalUsage {
    /// Makes the record of a window that ends at `ends`, of which no response is known. `whole`
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

    /// Begins a new count when the last one has ended. Returns whether anything is expected in it.
    pub(super) fn roll(&mut self, now: Micros, Size { count, window }: Size) -> bool {
        if now < self.ends {
            return true;
        }
        let ends = self.ends.saturating_add(window);
        // The units that other clients were seen to use, or the expected units, up to what they can
        // have used.
        let most = count.saturating_sub(self.least).saturating_sub(self.ours);
        let before = if self.whole && now < ends {
            self.seen.max(self.before.min(most))
        } else {
            0
        };
        let &mut ExternalUsage {
            said, said_until, ..
        } = self;
        // The units left in the end show what other clients may have used.
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
            // An eighth is for finding out that the others have stopped.
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

    /// Takes in that permits were given back unused. If they were counted as used when the newest
    /// response was read, others used these units.
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

    /// Returns the moment from which nothing is known of others, if no response arrives.
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
