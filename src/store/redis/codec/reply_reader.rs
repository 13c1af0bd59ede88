//! The reader of packed replies and messages.

use std::time::Duration;

use super::LONG;
use crate::limit::is_set;
use crate::quota::{Limit, Quota};
use crate::store::redis::layout::{BUCKET, FIXED, FORMAT, WINDOW, WITH_QUOTA};
use crate::store::{HoldState, SetQuota};

/// A reply that does not follow the format in `lua/layout.lua`.
#[derive(Clone, Copy, Debug)]
pub(in crate::store::redis) struct Garbled;

impl std::fmt::Display for Garbled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "its reply cannot be read; does a proxy change the replies of scripts?"
        )
    }
}

impl std::error::Error for Garbled {}

/// Reads a packed reply or message, field by field. The bytes that are left follow the last field
/// that was read.
pub(in crate::store::redis) struct ReplyReader<'a>(pub(in crate::store::redis) &'a [u8]);

impl<'a> ReplyReader<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Garbled> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Garbled)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Reads a number of `bytes` bytes, at most eight.
    pub(super) fn number(&mut self, bytes: usize) -> Result<u64, Garbled> {
        let number = self.bytes(bytes)?;
        let mut le = [0; 8];
        le[..bytes].copy_from_slice(number);
        Ok(u64::from_le_bytes(le))
    }

    /// Reads a number of one byte.
    pub(in crate::store::redis) fn byte(&mut self) -> Result<u8, Garbled> {
        self.number(1).map(|byte| byte as u8)
    }

    /// Reads a number of four bytes.
    pub(super) fn int(&mut self) -> Result<u32, Garbled> {
        self.number(4).map(|int| int as u32)
    }

    /// Reads a number of seven bytes.
    pub(in crate::store::redis) fn long(&mut self) -> Result<u64, Garbled> {
        self.number(LONG)
    }

    /// Reads a span in microseconds.
    pub(in crate::store::redis) fn span(&mut self) -> Result<Duration, Garbled> {
        self.long().map(Duration::from_micros)
    }

    /// Reads a limit of rate, or `None` if the script states none.
    pub(super) fn limit(&mut self) -> Result<Option<Limit>, Garbled> {
        let kind = self.byte()?;
        let count = self.int()?;
        let window = self.span()?;
        let capacity = self.int()?;
        let is_possible = count > 0 && !window.is_zero() && window <= Quota::LONGEST_WINDOW;
        match kind {
            0 => Ok(None),
            _ if !is_possible || (kind == BUCKET && capacity == 0) => Err(Garbled),
            WINDOW => Ok(Some(Limit::Sliding { count, window })),
            BUCKET => Ok(Some(Limit::Bucket {
                capacity,
                count,
                window,
            })),
            FIXED => Ok(Some(Limit::Fixed { count, window })),
            _ => Err(Garbled),
        }
    }

    /// Reads a hold, which is followed by whether it was cut.
    pub(super) fn hold(&mut self) -> Result<HoldState, Garbled> {
        Ok(HoldState {
            remaining: self.span()?,
            releases: self.int()?,
            cut: self.byte()? != 0,
        })
    }

    /// Reads the set quota that follows a reply with these flags, if one does.
    pub(super) fn set_quota_by(&mut self, flags: u8) -> Result<Option<Box<SetQuota>>, Garbled> {
        match flags & WITH_QUOTA {
            0 => Ok(None),
            _ => Ok(Some(Box::new(self.set_quota()?))),
        }
    }

    /// Reads a set quota, or the end of one.
    pub(super) fn set_quota(&mut self) -> Result<SetQuota, Garbled> {
        let version = self.int()?;
        let (left, life) = (self.span()?, self.span()?);
        let in_flight = Some(self.int()?).filter(|most| *most > 0);
        let count = self.byte()?;
        let limits: Vec<Limit> = (0..count)
            .map(|_| self.limit()?.ok_or(Garbled))
            .collect::<Result<_, _>>()?;
        let quota = Quota::of_limits(limits, in_flight);
        if quota.is_some() != is_set(version) {
            return Err(Garbled);
        }
        Ok(SetQuota::new(version, quota, left, life))
    }

    /// Reads the format, which has to be [`FORMAT`].
    pub(super) fn format(&mut self) -> Result<(), Garbled> {
        self.begins_with(FORMAT)
    }

    /// Reads one byte, which has to be `byte`.
    pub(in crate::store::redis) fn begins_with(&mut self, byte: u8) -> Result<(), Garbled> {
        if self.byte()? == byte {
            Ok(())
        } else {
            Err(Garbled)
        }
    }
}
