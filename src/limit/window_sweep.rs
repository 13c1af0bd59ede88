//! How many units count in a window that moves, with advance bookings.
//!
//! With advance bookings, the units that count in the window `(x, x + span]` both grow and shrink
//! as `x` grows. Units of the log count until `x` reaches their stamp. Units of an advance booking
//! also count only from when the window reaches their slot. The sweep goes from each such moment to
//! the next one.
//!
//! Twin: `sweep` in `store/redis/lua/advance.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::iter::Peekable;

use smallvec::SmallVec;

use super::Micros;
use super::advance::AdvanceBooking;
use super::window::Chunk;

/// A window that moves.
pub(super) struct WindowSweep<'a, L: Iterator<Item = Chunk>> {
    /// The length of the window.
    span: Micros,
    /// The beginning of the window. The moment itself is not part of the window.
    at: Micros,
    /// The units that count in the window.
    units: u64,
    /// The chunks of the log that have not left yet, the oldest first.
    log: Peekable<L>,
    /// The advance bookings that the window has not reached yet.
    ahead: &'a [AdvanceBooking],
    /// The stamps and units of the advance bookings that have not left yet, the latest stamp first.
    leaving: SmallVec<[(Micros, u64); 8]>,
}

impl<'a, L: Iterator<Item = Chunk>> WindowSweep<'a, L> {
    /// Makes a window that begins at `begin`, beside a log of `used` units.
    pub(super) fn new(
        begin: Micros,
        span: Micros,
        used: u64,
        log: L,
        advance: &'a [AdvanceBooking],
    ) -> Self {
        let bookings = advance.iter();
        let mut leaving: SmallVec<[(Micros, u64); 8]> = bookings
            .map(|booking| (booking.stamp, booking.units))
            .collect();
        leaving.sort_unstable_by(|one, other| other.cmp(one));
        let mut sweep = WindowSweep {
            span,
            at: begin,
            units: used,
            log: log.peekable(),
            ahead: advance,
            leaving,
        };
        sweep.move_to(begin);
        sweep
    }

    /// Returns when the units of the window change next.
    fn next_change(&mut self) -> Option<Micros> {
        let leaves_log = self.log.peek().map(|chunk| chunk.stamp);
        let leaves = self.leaving.last().map(|&(stamp, _)| stamp);
        let enters = self
            .ahead
            .first()
            .map(|booking| booking.slot.saturating_sub(self.span));
        [leaves_log, leaves, enters].into_iter().flatten().min()
    }

    /// Moves the beginning of the window to `at`.
    fn move_to(&mut self, at: Micros) {
        self.at = at;
        while let Some((first, rest)) = self.ahead.split_first()
            && first.slot.saturating_sub(self.span) <= at
        {
            self.units += first.units;
            self.ahead = rest;
        }
        while let Some(&(stamp, units)) = self.leaving.last()
            && stamp <= at
        {
            self.units -= units;
            self.leaving.pop();
        }
        while let Some(&Chunk { stamp, count }) = self.log.peek()
            && stamp <= at
        {
            self.units -= count;
            self.log.next();
        }
    }

    /// Returns the end of the first window from which on at most `most` units count in each window,
    /// until the beginning has moved by `span` and `length`.
    ///
    /// So a permit with this slot, whose stamp is `length` later, may have the units that `most`
    /// leaves.
    pub(super) fn first_end(mut self, most: u64, length: Micros) -> Micros {
        let mut clear_from = (self.units <= most).then_some(self.at);
        while let Some(change) = self.next_change() {
            if let Some(begin) = clear_from
                && change >= begin.saturating_add(self.span).saturating_add(length)
            {
                break;
            }
            self.move_to(change);
            clear_from = (self.units <= most).then_some(clear_from.unwrap_or(change));
        }
        // After the last change no unit counts.
        clear_from.unwrap_or(self.at).saturating_add(self.span)
    }

    /// Returns the most units that count in a window, until the beginning has moved by `span` and
    /// `length`.
    pub(super) fn most_units(mut self, length: Micros) -> u64 {
        let end = self.at.saturating_add(self.span).saturating_add(length);
        let mut most = self.units;
        while let Some(change) = self.next_change()
            && change < end
        {
            self.move_to(change);
            most = most.max(self.units);
        }
        most
    }
}
