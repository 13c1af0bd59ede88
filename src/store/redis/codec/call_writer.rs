//! The writer of packed calls.

use std::time::Duration;

use super::LONG;
use crate::limit::{micros_down, micros_up};
use crate::quota::Limit;
use crate::store::ClientSession;
use crate::store::redis::layout::{BUCKET, CALL_VERSION, FIXED, NEVER, WINDOW};

/// How long a call and its answer may have been on their way, at most.
const LONGEST_ON_WAY: Duration = Duration::from_millis(250);

pub(in crate::store::redis) struct CallWriter(pub(in crate::store::redis) Vec<u8>);

impl CallWriter {
    /// What all calls begin with.
    pub(super) fn new(operation: u8, memory: ClientSession, dice: u64) -> Self {
        let mut call = CallWriter(Vec::with_capacity(128));
        call.byte(CALL_VERSION);
        call.byte(operation);
        call.long(dice % (NEVER - 1) + 1);
        call.long(memory.incarnation);
        call.long(memory.writes);
        call.long(memory.seen);
        call.long(micros_down(memory.since));
        call.long(micros_up(memory.trip.saturating_mul(4).min(LONGEST_ON_WAY)));
        // The server's time, if it was asked for: see [`ask_again`](super::ask_again).
        call.long(0);
        call.long(0);
        call
    }

    pub(in crate::store::redis) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn short(&mut self, value: usize) {
        self.0.extend(u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes());
    }

    pub(super) fn int(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(in crate::store::redis) fn long(&mut self, value: u64) {
        self.0.extend(&value.min(NEVER).to_le_bytes()[..LONG]);
    }

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
