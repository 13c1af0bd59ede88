//! The log of a window that has many units.
//!
//! Twin: `store/redis/lua/window.lua`; the common case is repeated in `short.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::Micros;
use super::window::{Chunk, chunk_size};

/// Used units in chunks, sorted by stamp. Its size is bounded for every limit.
///
/// - New slots depend only on the newest units, up to twice the limit. These are in *fine* chunks.
/// - Older chunks become *coarse*. Beyond [`MOST_APART`] they join, with up to `limit` units each. They matter again only
///   if a long queue gives up.
/// - No unit joins a chunk whose stamp is more than a quarter of the window away. Else the last units of a
///   burst would count as long as the first of the next one. So few gaps need few chunks. Only a log of
///   one chunk joins over a gap: a key with little use needs no second one.
/// - If there are more than [`MOST_COARSE`] coarse chunks all the same, the two at `MOST_APART` join, over any gap and with
///   any number of units. If a part of such a queue gives up, the rest of the joined units keep the latest of their moments.
///
/// All of this only makes stamps later.
#[derive(Clone, Debug, Default)]
pub(super) struct LongLog {
    /// The chunks, sorted by stamp.
    chunks: VecDeque<Chunk>,
    /// The units in all chunks.
    total: u64,
    /// How many of the oldest chunks are coarse.
    coarse_count: usize,
    /// The units in the other chunks, which are *fine*.
    fine_units: u64,
    /// The running sum of the last search, from which the next search goes on. The chunks before
    /// `cursor.index` have `cursor.before` units.
    cursor: Cursor,
}

/// The most coarse chunks. Slots that are booked up to this many bursts ahead keep their moments, or windows without bursts.
/// They are fewer by [`MOST_APART`] if all bursts are made of many chunks.
const MOST_COARSE: usize = 48;

/// How many coarse chunks stay as they are: a queue that is booked a few bursts ahead can give up all of its slots without a
/// trace, and book anew.
const MOST_APART: usize = 16;

/// The most fine chunks. Units of twice the limit fill 200, or 204 if each window has three bursts.
/// More are made only by permits that come back, and by stamps out of order.
const MOST_FINE: usize = 204;

/// A chunk, and the units in the chunks before it.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    index: usize,
    before: u64,
}

impl LongLog {
    pub(super) fn chunks(&self) -> impl Iterator<Item = Chunk> + Clone {
        self.chunks.iter().copied()
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Returns whether the log is as a new one.
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(super) fn newest(&self) -> Option<Micros> {
        self.chunks.back().map(|chunk| chunk.stamp)
    }

    /// Removes the chunks that are older than the window.
    pub(super) fn advance(&mut self, span: Micros, now: Micros) {
        while let Some(oldest) = self.chunks.front()
            && oldest.stamp.saturating_add(span) <= now
        {
            self.pop_oldest();
        }
    }

    fn pop_oldest(&mut self) {
        let Some(oldest) = self.chunks.pop_front() else {
            return;
        };
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
    }

    /// Returns the stamp of the unit at `rank`, counted from 1 at the oldest. Needs `rank <=
    /// total`.
    pub(super) fn seek(&mut self, rank: u64) -> Micros {
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

    /// Returns how many units count at `slot`.
    pub(super) fn used_at(&self, span: Micros, slot: Micros) -> u64 {
        let Cursor {
            mut index,
            mut before,
        } = self.cursor;
        let left = |chunk: &Chunk| chunk.stamp.saturating_add(span) <= slot;
        // Mostly no chunk has left.
        if self.chunks.front().is_some_and(|oldest| !left(oldest)) {
            return self.total;
        }
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
        self.total - before
    }

    /// Adds units with this stamp. They join a chunk with the same stamp, or else a neighbour that
    /// is near and not full, or else they become a chunk.
    pub(super) fn insert(&mut self, limit: u64, span: Micros, stamp: Micros, units: u64) {
        let size = chunk_size(limit);
        let chunks = self.chunks.len();
        let mut index = chunks;
        while index > 0 && self.chunks[index - 1].stamp > stamp {
            index -= 1;
        }
        let joins = |chunk: Option<&Chunk>| {
            chunk.is_some_and(|chunk| {
                chunk.count < size && (chunks < 2 || is_near(span, stamp, chunk.stamp))
            })
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
        self.coarsen(limit, span);
    }

    /// Bounds the log: joins the chunks that are older than the newest units of twice the limit. If
    /// there are too many of them, two of them join.
    fn coarsen(&mut self, limit: u64, span: Micros) {
        while let Some(&Chunk { stamp, count }) = self.chunks.get(self.coarse_count)
            && (self.fine_units - count >= 2 * limit
                || self.chunks.len() - self.coarse_count > MOST_FINE)
        {
            self.fine_units -= count;
            let last = self
                .coarse_count
                .checked_sub(1)
                .filter(|last| *last + 1 >= MOST_APART);
            match last.map(|last| self.chunks[last]) {
                Some(last) if last.count + count <= limit && is_near(span, last.stamp, stamp) => {
                    self.join_before(self.coarse_count);
                }
                _ => self.coarse_count += 1,
            }
        }
        while self.coarse_count > MOST_COARSE {
            self.join_before(MOST_APART);
            self.coarse_count -= 1;
        }
    }

    /// Joins a chunk with the one before it.
    fn join_before(&mut self, index: usize) {
        if let Some(before) = self.chunks.remove(index - 1) {
            self.chunks[index - 1].count += before.count;
        }
        self.cursor = if self.cursor.index > index {
            Cursor {
                index: self.cursor.index - 1,
                ..self.cursor
            }
        } else {
            Cursor::default()
        };
    }

    /// Takes back `units` that were inserted under `stamp` and were not used.
    /// See [`Window::subtract`](super::window::Window::subtract).
    pub(super) fn subtract(&mut self, limit: u64, span: Micros, stamp: Micros, mut units: u64) {
        let mut index = self.chunks.partition_point(|chunk| chunk.stamp < stamp);
        // The chunks before the cursor stay as they are if all units are taken behind it.
        if index < self.cursor.index {
            self.cursor = Cursor::default();
        }
        while units > 0 && index < self.chunks.len() {
            let taken = units.min(self.chunks[index].count);
            units -= taken;
            self.total -= taken;
            if index >= self.coarse_count {
                self.fine_units -= taken;
            }
            self.chunks[index].count -= taken;
            self.join_next(limit, span, &mut index);
        }
    }

    /// Joins a chunk that has become small with the next. Without this, permits that come back
    /// would leave a log of many small chunks.
    fn join_next(&mut self, limit: u64, span: Micros, index: &mut usize) {
        let Chunk { stamp, count } = self.chunks[*index];
        let size = chunk_size(limit);
        let same_kind = *index + 1 != self.coarse_count;
        match self.chunks.get_mut(*index + 1) {
            Some(next)
                if count > 0
                    && same_kind
                    && count + next.count <= size
                    && is_near(span, stamp, next.stamp) =>
            {
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
}

/// Returns whether units with these stamps may share a chunk.
fn is_near(span: Micros, one: Micros, other: Micros) -> bool {
    one.abs_diff(other) <= span / 4
}
