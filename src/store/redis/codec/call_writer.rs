//! The writer of packed calls.

use std::time::Duration;

use super::LONG;
use crate::limit::{micros_down, micros_up};
use crate::quota::Limit;
use crate::store::ClientSession;
use crate::store::redis::layout::{BUCKET, FIXED, FORMAT, NEVER, WINDOW};
use crate::tuning::LONGEST_ON_WAY;

/// Returns how many microseconds a call and its reply may take, after a round trip of `trip`.
pub(super) fn on_way(trip: Duration) -> u64 {
    micros_up(trip.saturating_mul(4).min(LONGEST_ON_WAY))
}

/// Writes a packed call, field by field. Numbers are little-endian.
pub(in crate::store::redis) struct CallWriter(pub(in crate::store::redis) Vec<u8>);

impl CallWriter {
    /// Begins a call with the fields that all calls of a process with a session share.
    pub(super) fn new(operation: u8, session: ClientSession, random: u64) -> Self {
        let mut call = CallWriter(Vec::with_capacity(128));
        call.byte(FORMAT);
        call.byte(operation);
        call.long(random % (NEVER - 1) + 1);
        call.long(session.incarnation);
        call.long(session.writes);
        call.long(session.seen);
        call.long(micros_down(session.since));
        call.long(on_way(session.trip));
        // The server's time and its age, which `set_server_time` sets.
        call.long(0);
        call.long(0);
        call
    }

    /// Writes a number of one byte.
    pub(in crate::store::redis) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Writes a number of two bytes, at most 65,535.
    pub(super) fn short(&mut self, value: usize) {
        self.0
            .extend(u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes());
    }

    /// Writes a number of four bytes.
    pub(super) fn int(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    /// Writes a number of seven bytes, at most [`NEVER`].
    pub(in crate::store::redis) fn long(&mut self, value: u64) {
        self.0.extend(&value.min(NEVER).to_le_bytes()[..LONG]);
    }

    /// Writes a limit of rate.
    pub(super) fn limit(&mut self, limit: Limit) {
        let (kind, capacity) = match limit {
            Limit::Sliding { .. } => (WINDOW, 0),
            Limit::Bucket { capacity, .. } => (BUCKET, capacity),
            Limit::Fixed { .. } => (FIXED, 0),
            Limit::InFlight { .. } => unreachable!("Quota::limits are of rate"),
        };
        self.byte(kind);
        self.int(limit.count());
        self.long(micros_up(limit.window()));
        self.int(capacity);
    }
}
