//! A sliding window: a log of stamps.
//!
//! Twin: `store/redis/lua/window.lua`; the common case is repeated in `short.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::Micros;
use super::advance::AdvanceBooking;
use super::algorithm::PermitTime;
use super::long_log::LongLog;
use super::window_sweep::WindowSweep;

/// Allows at most `limit` units whose stamps are younger than `span`.
///
/// It keeps a log of units, in *chunks* of about a hundredth of the limit. A chunk has the latest
/// stamp of its units. This only makes stamps later. So the limit is never exceeded, and at most a
/// chunk less than the limit is used.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// The units that are allowed in any span of the length `span`.
    limit: u32,
    /// The length of the window.
    span: Micros,
    /// The used units.
    log: Log,
}

/// The used units of a window.
#[derive(Clone, Debug)]
enum Log {
    /// One chunk, or none if `count` is 0. Most keys never have a second chunk.
    Short { stamp: Micros, count: u32 },
    /// Any number of chunks.
    Long(Box<LongLog>),
}

/// Units that count from the same stamp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// The latest stamp of the units.
    pub(super) stamp: Micros,
    /// How many units there are.
    pub(super) count: u64,
}

impl Log {
    const EMPTY: Log = Log::Short { stamp: 0, count: 0 };

    fn chunks(&self) -> impl Iterator<Item = Chunk> + Clone {
        let (short, long) = match self {
            Log::Short { count: 0, .. } => (None, None),
            &Log::Short { stamp, count } => {
                let count = u64::from(count);
                (Some(Chunk { stamp, count }), None)
            }
            Log::Long(log) => (None, Some(log.chunks())),
        };
        short.into_iter().chain(long.into_iter().flatten())
    }
}

impl Window {
    /// Makes a window with an empty log.
    pub(super) fn new(limit: u32, span: Micros) -> Self {
        Window {
            limit,
            span,
            log: Log::EMPTY,
        }
    }

    /// Returns all chunks, the oldest first.
    pub(super) fn chunks(&self) -> impl Iterator<Item = Chunk> + Clone {
        self.log.chunks()
    }

    fn limit(&self) -> u64 {
        u64::from(self.limit)
    }

    /// Returns when units with this stamp leave the window.
    fn end(&self, stamp: Micros) -> Micros {
        stamp.saturating_add(self.span)
    }

    /// Removes the chunks that are older than the window.
    pub(super) fn advance(&mut self, now: Micros) {
        let is_empty = match &mut self.log {
            &mut Log::Short { stamp, .. } => self.end(stamp) <= now,
            Log::Long(log) => {
                log.advance(self.span, now);
                log.is_empty()
            }
        };
        if is_empty {
            self.log = Log::EMPTY;
        }
    }

    /// Returns the first moment, not before `from`, at which at most `limit - reserved - cost`
    /// units have stamps younger than the window. If there are advance bookings, this holds in each
    /// window that touches the time in which the permit may be used.
    pub(super) fn first_slot(
        &mut self,
        from: Micros,
        cost: u64,
        open: PermitTime,
        reserved: u64,
        advance: &[AdvanceBooking],
    ) -> Micros {
        let slot = self.first_slot_of_log(from, cost, reserved);
        if !self.is_in_reach(slot, open, advance) {
            return slot;
        }
        let others = self.limit().saturating_sub(cost + reserved);
        let sweep = self.sweep(slot, advance);
        sweep.first_end(others, open.length()).max(slot)
    }

    /// Returns whether an advance booking may count in a window that a permit with this slot
    /// touches.
    fn is_in_reach(&self, slot: Micros, open: PermitTime, advance: &[AdvanceBooking]) -> bool {
        let end = self.end(slot).saturating_add(open.length());
        advance.first().is_some_and(|first| first.slot < end)
    }

    /// Returns the window that ends at `end`, with all its units.
    fn sweep<'a>(
        &'a self,
        end: Micros,
        advance: &'a [AdvanceBooking],
    ) -> WindowSweep<'a, impl Iterator<Item = Chunk> + 'a> {
        let begin = end.saturating_sub(self.span);
        WindowSweep::new(begin, self.span, self.used(), self.chunks(), advance)
    }

    /// Returns the first moment, not before `from`, that the log allows.
    fn first_slot_of_log(&mut self, from: Micros, cost: u64, reserved: u64) -> Micros {
        let others = self.limit().saturating_sub(cost + reserved);
        let leaving = self.used().saturating_sub(others);
        let last_to_leave = match &mut self.log {
            &mut Log::Short { stamp, .. } => (leaving > 0).then_some(stamp),
            Log::Long(log) => (leaving > 0).then(|| log.seek(leaving)),
        };
        last_to_leave.map_or(from, |stamp| from.max(self.end(stamp)))
    }

    /// Returns how many units may be used at `slot`, which is not before the first slot of one
    /// unit.
    pub(super) fn room(&self, slot: Micros, open: PermitTime, advance: &[AdvanceBooking]) -> u64 {
        if self.is_in_reach(slot, open, advance) {
            let used = self.sweep(slot, advance).most_units(open.length());
            return self.limit().saturating_sub(used);
        }
        let used = match &self.log {
            &Log::Short { stamp, .. } if self.end(stamp) <= slot => 0,
            &Log::Short { count, .. } => u64::from(count),
            Log::Long(log) => log.used_at(self.span, slot),
        };
        self.limit().saturating_sub(used)
    }

    /// Returns the units in the log.
    pub(super) fn used(&self) -> u64 {
        match &self.log {
            &Log::Short { count, .. } => u64::from(count),
            Log::Long(log) => log.total(),
        }
    }

    /// Returns the units whose stamps are no later than `stamp`, at least and at most. The first
    /// later chunk may have such units as well.
    pub(super) fn used_until(&self, stamp: Micros) -> (u64, u64) {
        let mut later = self.chunks().skip_while(|chunk| chunk.stamp <= stamp);
        let first_later = later.next().map_or(0, |chunk| chunk.count);
        let most = self.used() - later.map(|chunk| chunk.count).sum::<u64>();
        (most - first_later, most)
    }

    /// Adds units with this stamp to the log.
    pub(super) fn insert(&mut self, stamp: Micros, units: u64) {
        let (limit, span) = (self.limit(), self.span);
        match &mut self.log {
            Log::Short { .. } => {
                self.log = self.joined(stamp, units).unwrap_or_else(|| {
                    let mut log = LongLog::default();
                    for chunk in self.chunks() {
                        log.insert(limit, span, chunk.stamp, chunk.count);
                    }
                    log.insert(limit, span, stamp, units);
                    Log::Long(Box::new(log))
                });
            }
            Log::Long(log) => log.insert(limit, span, stamp, units),
        }
    }

    /// Returns the short log with these units. `None` if they need a second chunk.
    fn joined(&self, stamp: Micros, units: u64) -> Option<Log> {
        let Log::Short {
            stamp: newest,
            count,
        } = self.log
        else {
            return None;
        };
        let joins = count == 0 || newest == stamp || u64::from(count) < chunk_size(self.limit());
        let count = u32::try_from(u64::from(count) + units).ok()?;
        let stamp = newest.max(stamp);
        joins.then_some(Log::Short { stamp, count })
    }

    /// Counts units that were used without a permit.
    pub(super) fn charge(&mut self, now: Micros, stamp: Micros, units: u64) {
        if self.end(stamp) > now {
            self.insert(stamp, units);
        }
    }

    /// Takes back `units` that were inserted under `stamp` and were not used.
    ///
    /// They are in chunks with that stamp or a later one, and are removed from the first of these
    /// chunks. So each used unit keeps a unit of its own in the log, with a stamp that is not
    /// earlier.
    pub(super) fn subtract(&mut self, now: Micros, stamp: Micros, units: u64) {
        if self.end(stamp) <= now {
            return;
        }
        let limit = self.limit();
        match &mut self.log {
            Log::Short {
                stamp: newest,
                count,
            } if stamp <= *newest => {
                *count = count.saturating_sub(u32::try_from(units).unwrap_or(u32::MAX));
                if *count == 0 {
                    self.log = Log::EMPTY;
                }
            }
            Log::Short { .. } => {}
            Log::Long(log) => log.subtract(limit, self.span, stamp, units),
        }
    }

    /// Returns the newest stamp of the log.
    pub(super) fn newest(&self) -> Option<Micros> {
        match &self.log {
            Log::Short { count: 0, .. } => None,
            &Log::Short { stamp, .. } => Some(stamp),
            Log::Long(log) => log.newest(),
        }
    }

    /// Returns the first moment at which no unit counts any more.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        let booked = advance.iter().map(|booking| booking.stamp).max();
        let newest = self.newest().max(booked);
        newest.map_or(0, |stamp| self.end(stamp))
    }

    #[cfg(test)]
    pub(super) fn chunk_count(&self) -> usize {
        self.chunks().count()
    }
}

/// Returns the size of a chunk in units. A chunk with fewer units takes more.
pub(super) fn chunk_size(limit: u64) -> u64 {
    limit.div_ceil(100)
}
