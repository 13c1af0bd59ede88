//! A sliding window: a log of stamps.
//!
//! Twin: `store/redis/lua/window.lua`; the common case is repeated in `short.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::Micros;

/// Allows at most `limit` units whose stamps are younger than `span`.
///
/// The log is sorted by stamp, and its size is bounded for every limit. Units share *chunks* of a
/// hundredth of the limit. A chunk has the latest stamp of its units.
///
/// - New slots depend only on the newest units, up to twice the limit. These are in *fine* chunks.
/// - Older chunks join and become *coarse*, with up to `limit` units each. They matter again only
///   if a long queue gives up.
/// - If there are more than [`MOST_COARSE`] coarse chunks, the oldest leave the log. `floor` has
///   the newest of their stamps.
///
/// All of this only makes stamps later. So the limit is never exceeded, and at most a chunk less
/// than the limit is used.
#[derive(Debug)]
pub(super) struct Window {
    /// The units that are allowed in any span of the length `span`.
    limit: u64,
    /// The length of the window.
    span: Micros,
    /// The log, sorted by stamp.
    chunks: VecDeque<Chunk>,
    /// The units in all chunks.
    total: u64,
    /// How many of the oldest chunks are coarse.
    coarse_count: usize,
    /// The units in the other chunks, which are *fine*.
    fine_units: u64,
    /// The newest stamp of the chunks that left the log early.
    floor: Option<Micros>,
    /// The running sum of the last search, from which the next search goes on. The chunks before
    /// `cursor.index` have `cursor.before` units.
    cursor: Cursor,
}

/// The most coarse chunks. Slots that are booked up to this many windows ahead stay in the log.
const MOST_COARSE: usize = 48;

/// The most fine chunks. Units of twice the limit fill 200. More are made only by permits that come
/// back, and by stamps out of order.
const MOST_FINE: usize = 204;

/// Units that count from the same stamp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// The latest stamp of the units.
    pub(super) stamp: Micros,
    /// How many units there are.
    pub(super) count: u64,
}

/// A chunk, and the units in the chunks before it.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    index: usize,
    before: u64,
}

impl Window {
    /// Makes an empty log.
    pub(super) fn new(limit: u32, span: Micros) -> Self {
        Window {
            limit: u64::from(limit),
            span,
            chunks: VecDeque::new(),
            total: 0,
            coarse_count: 0,
            fine_units: 0,
            floor: None,
            cursor: Cursor::default(),
        }
    }

    /// Returns all chunks, the oldest first.
    pub(super) fn chunks(&self) -> impl Iterator<Item = Chunk> {
        self.chunks.iter().copied()
    }

    /// Returns the size of a fine chunk in units. A chunk with fewer units takes more.
    fn chunk_size(&self) -> u64 {
        self.limit.div_ceil(100)
    }

    /// Removes the chunks that are older than the window.
    pub(super) fn advance(&mut self, now: Micros) {
        while let Some(oldest) = self.chunks.front()
            && oldest.stamp.saturating_add(self.span) <= now
        {
            self.pop_oldest();
        }
        self.floor = self
            .floor
            .filter(|floor| floor.saturating_add(self.span) > now);
    }

    /// Removes and returns the oldest chunk.
    fn pop_oldest(&mut self) -> Option<Chunk> {
        let oldest = self.chunks.pop_front()?;
        self.total -= oldest.count;
        if self.coarse_count > 0 {
            self.coarse_count -= 1;
        } else {
            self.fine_units -= oldest.count;
        }
        if self.cursor.index > 0 {
            self.cursor.index -= 1;
            self.cursor.before -= oldest.count;
        }
        Some(oldest)
    }

    /// Returns the first moment, not before `from`, at which at most `limit - reserved - cost`
    /// units have stamps younger than the window.
    pub(super) fn first_slot(&mut self, from: Micros, cost: u64, reserved: u64) -> Micros {
        let others = self.limit.saturating_sub(cost + reserved);
        let last_to_leave = match self.total.checked_sub(others) {
            Some(leaving @ 1..) => Some(self.seek(leaving)),
            _ => self.floor,
        };
        last_to_leave.map_or(from, |stamp| from.max(stamp.saturating_add(self.span)))
    }

    /// Returns the stamp of the unit at `rank`, counted from 1 at the oldest. Needs `rank <=
    /// total`.
    fn seek(&mut self, rank: u64) -> Micros {
        let Cursor {
            mut index,
            mut before,
        } = self.cursor;
        while before >= rank {
            index -= 1;
            before -= self.chunks[index].count;
        }
        while before + self.chunks[index].count < rank {
            before += self.chunks[index].count;
            index += 1;
        }
        self.cursor = Cursor { index, before };
        self.chunks[index].stamp
    }

    /// Returns how many units may be used at `slot`, which is not before the first slot of one
    /// unit.
    pub(super) fn room(&mut self, slot: Micros) -> u64 {
        let Cursor {
            mut index,
            mut before,
        } = self.cursor;
        let left = |chunk: &Chunk| chunk.stamp.saturating_add(self.span) <= slot;
        while index > 0 && !left(&self.chunks[index - 1]) {
            index -= 1;
            before -= self.chunks[index].count;
        }
        while let Some(chunk) = self.chunks.get(index)
            && left(chunk)
        {
            before += chunk.count;
            index += 1;
        }
        self.limit.saturating_sub(self.total - before)
    }

    /// Returns how many units may be used now. `advance` has removed the chunks that are older than
    /// the window.
    pub(super) fn free(&self, now: Micros) -> u64 {
        match self.floor {
            Some(floor) if floor.saturating_add(self.span) > now => 0,
            _ => self.limit.saturating_sub(self.total),
        }
    }

    /// Returns the units in the log.
    pub(super) fn used(&self) -> u64 {
        self.total
    }

    /// Returns the units whose stamps are no later than `stamp`, at least and at most. The first
    /// later chunk may have such units as well.
    pub(super) fn used_until(&self, stamp: Micros) -> (u64, u64) {
        let first_later = self.chunks.partition_point(|chunk| chunk.stamp <= stamp);
        let later = self
            .chunks
            .iter()
            .skip(first_later)
            .map(|chunk| chunk.count);
        let least = self.total - later.clone().sum::<u64>();
        (least, least + later.take(1).sum::<u64>())
    }

    /// Adds units of a stamp to the log. They join a chunk with the same stamp, or else a neighbour
    /// that is not full, or else they become a chunk.
    pub(super) fn insert(&mut self, stamp: Micros, units: u64) {
        let size = self.chunk_size();
        let chunks = self.chunks.len();
        let mut index = chunks;
        while index > 0 && self.chunks[index - 1].stamp > stamp {
            index -= 1;
        }
        let joins = |chunk: Option<&Chunk>| {
            chunk.is_some_and(|chunk| chunk.stamp == stamp || chunk.count < size)
        };
        if index > 0 && self.chunks[index - 1].stamp == stamp {
            self.chunks[index - 1].count += units;
            index -= 1;
        } else if joins(self.chunks.get(index)) {
            self.chunks[index].count += units;
        } else if index > 0 && joins(self.chunks.get(index - 1)) {
            index -= 1;
            self.chunks[index].count += units;
            self.chunks[index].stamp = stamp;
        } else {
            if chunks == 0 {
                // Many keys never have a second chunk. By itself, the log would begin with room for
                // four.
                self.chunks.reserve_exact(1);
            }
            self.chunks.insert(
                index,
                Chunk {
                    stamp,
                    count: units,
                },
            );
        }
        self.total += units;
        if index < self.coarse_count {
            self.coarse_count += self.chunks.len() - chunks;
        } else {
            self.fine_units += units;
        }
        if index < self.cursor.index {
            self.cursor = Cursor::default();
        }
        self.coarsen();
    }

    /// Counts units that were used without a permit. If they are more than the limit, as many as
    /// the limit count.
    pub(super) fn charge(&mut self, now: Micros, stamp: Micros, units: u64) {
        if stamp.saturating_add(self.span) > now {
            self.insert(stamp, units.min(self.limit));
        }
    }

    /// Bounds the log: joins the chunks that are older than the newest units of twice the limit. If
    /// there are too many of them, the oldest leave the log.
    fn coarsen(&mut self) {
        while let Some(&Chunk { count, .. }) = self.chunks.get(self.coarse_count)
            && (self.fine_units - count >= 2 * self.limit
                || self.chunks.len() - self.coarse_count > MOST_FINE)
        {
            self.fine_units -= count;
            match self
                .coarse_count
                .checked_sub(1)
                .map(|last| self.chunks[last].count)
            {
                Some(last) if last + count <= self.limit => {
                    self.chunks[self.coarse_count].count += last;
                    self.chunks.remove(self.coarse_count - 1);
                    self.cursor = match self.cursor {
                        Cursor { index, before } if index > self.coarse_count => Cursor {
                            index: index - 1,
                            before,
                        },
                        _ => Cursor::default(),
                    };
                }
                _ => self.coarse_count += 1,
            }
        }
        while self.coarse_count > MOST_COARSE {
            self.floor = self.floor.max(self.pop_oldest().map(|oldest| oldest.stamp));
        }
    }

    /// Takes back `units` that were inserted under `stamp` and were not used.
    ///
    /// They are in chunks with that stamp or a later one, and are removed from the first of these
    /// chunks. So each used unit keeps a unit of its own in the log, with a stamp that is not
    /// earlier.
    pub(super) fn subtract(&mut self, now: Micros, stamp: Micros, mut units: u64) {
        let gone = stamp.saturating_add(self.span) <= now
            || self.floor.is_some_and(|floor| stamp <= floor);
        if gone {
            return;
        }
        let mut index = self.chunks.partition_point(|chunk| chunk.stamp < stamp);
        self.cursor = Cursor::default();
        while units > 0 && index < self.chunks.len() {
            let taken = units.min(self.chunks[index].count);
            units -= taken;
            self.total -= taken;
            if index >= self.coarse_count {
                self.fine_units -= taken;
            }
            self.chunks[index].count -= taken;
            self.join_next(&mut index);
        }
    }

    /// Joins a chunk that has become small with the next, or removes an empty one. Without this,
    /// permits that come back would leave a log of many small chunks. `index` becomes the index of
    /// the next chunk.
    fn join_next(&mut self, index: &mut usize) {
        let count = self.chunks[*index].count;
        let size = self.chunk_size();
        let same_kind = *index + 1 != self.coarse_count;
        match self.chunks.get_mut(*index + 1) {
            Some(next) if count > 0 && same_kind && count + next.count <= size => {
                next.count += count
            }
            _ if count > 0 => {
                *index += 1;
                return;
            }
            _ => {}
        }
        self.chunks.remove(*index);
        if *index < self.coarse_count {
            self.coarse_count -= 1;
        }
    }

    /// Returns the first moment at which the log is empty.
    pub(super) fn fresh_from(&self) -> Micros {
        let newest = self.chunks.back().map(|chunk| chunk.stamp).max(self.floor);
        newest.map_or(0, |stamp| stamp.saturating_add(self.span))
    }

    #[cfg(test)]
    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }
}
