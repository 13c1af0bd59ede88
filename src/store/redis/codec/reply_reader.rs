//! The reader of packed replies and messages.

use std::time::Duration;

use super::LONG;
use crate::quota::Limit;
use crate::store::redis::layout::{BUCKET, CALL_VERSION, FIXED, WINDOW};

/// An answer that does not follow the format in `src/guide/redis_format.md`.
#[derive(Clone, Copy, Debug)]
pub(in crate::store::redis) struct Garbled;

impl std::fmt::Display for Garbled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "its answer cannot be read; does a proxy change what the script answers?")
    }
}

impl std::error::Error for Garbled {}

pub(in crate::store::redis) struct ReplyReader<'a>(pub(in crate::store::redis) &'a [u8]);

impl ReplyReader<'_> {
    pub(super) fn number(&mut self, bytes: usize) -> Result<u64, Garbled> {
        let (number, rest) = self.0.split_at_checked(bytes).ok_or(Garbled)?;
        self.0 = rest;
        let mut le = [0; 8];
        le[..bytes].copy_from_slice(number);
        Ok(u64::from_le_bytes(le))
    }

    pub(in crate::store::redis) fn byte(&mut self) -> Result<u8, Garbled> {
        self.number(1).map(|byte| byte as u8)
    }

    pub(super) fn int(&mut self) -> Result<u32, Garbled> {
        self.number(4).map(|int| int as u32)
    }

    pub(in crate::store::redis) fn long(&mut self) -> Result<u64, Garbled> {
        self.number(LONG)
    }

    pub(in crate::store::redis) fn span(&mut self) -> Result<Duration, Garbled> {
        self.long().map(Duration::from_micros)
    }

    pub(super) fn limit(&mut self) -> Result<Option<Limit>, Garbled> {
        let (kind, count, window, capacity) = (self.byte()?, self.int()?, self.span()?, self.int()?);
        match kind {
            0 => Ok(None),
            WINDOW => Ok(Some(Limit::Sliding { count, window })),
            BUCKET => Ok(Some(Limit::Bucket { capacity, count, window })),
            FIXED => Ok(Some(Limit::Fixed { count, window })),
            _ => Err(Garbled),
        }
    }

    pub(super) fn version(&mut self) -> Result<(), Garbled> {
        self.begins_with(CALL_VERSION)
    }

    pub(in crate::store::redis) fn begins_with(&mut self, byte: u8) -> Result<(), Garbled> {
        if self.byte()? == byte { Ok(()) } else { Err(Garbled) }
    }
}
