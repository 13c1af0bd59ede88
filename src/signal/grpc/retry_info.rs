//! Finds the wait of a `google.rpc.RetryInfo` in a `google.rpc.Status`, both in the binary format of
//! Protocol Buffers.
//!
//! ```text
//! Status    { 1: int32 code, 2: string message, 3: repeated Any details }
//! Any       { 1: string type_url, 2: bytes value }
//! RetryInfo { 1: Duration retry_delay }
//! Duration  { 1: int64 seconds, 2: int32 nanos }
//! ```
//!
//! Other fields are skipped. A message is read up to its first malformed field.

use std::time::Duration;

/// The end of the type URL, after its last slash.
const RETRY_INFO: &[u8] = b"google.rpc.RetryInfo";

/// Returns the wait in the details of `status`: the longest, if there are several. A negative wait is
/// none.
pub(super) fn wait(status: &[u8]) -> Option<Duration> {
    let details = WireFields(status).filter(|(number, _)| *number == 3);
    let details = details.filter_map(|(_, detail)| detail.bytes());
    details.filter_map(of_detail).max()
}

fn of_detail(any: &[u8]) -> Option<Duration> {
    let type_url = last(any, 1, WireValue::bytes)?;
    let name = type_url.rsplit(|byte| *byte == b'/').next()?;
    if name != RETRY_INFO {
        return None;
    }
    let delay = last(last(any, 2, WireValue::bytes)?, 1, WireValue::bytes)?;
    // Negative numbers are sent as 64 bits, too: they are above `i64::MAX`.
    let seconds = last(delay, 1, WireValue::varint).unwrap_or(0);
    let nanos = last(delay, 2, WireValue::varint).unwrap_or(0);
    let nanos = u32::try_from(nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000)?;
    (i64::try_from(seconds).is_ok()).then(|| Duration::new(seconds, nanos))
}

/// Returns the last value of a field that has the right type.
fn last<'a, T>(message: &'a [u8], number: u64, read: fn(WireValue<'a>) -> Option<T>) -> Option<T> {
    let values = WireFields(message).filter(|(known, _)| *known == number);
    values.filter_map(|(_, value)| read(value)).last()
}

/// The value of a field.
enum WireValue<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// 32 or 64 bits.
    Fixed,
}

impl<'a> WireValue<'a> {
    fn bytes(self) -> Option<&'a [u8]> {
        match self {
            WireValue::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    fn varint(self) -> Option<u64> {
        match self {
            WireValue::Varint(value) => Some(value),
            _ => None,
        }
    }
}

/// The fields of a message, up to the first malformed one: their numbers and values.
struct WireFields<'a>(&'a [u8]);

impl<'a> WireFields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = *self.take(1)?.first()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }
}

impl<'a> Iterator for WireFields<'a> {
    type Item = (u64, WireValue<'a>);

    fn next(&mut self) -> Option<(u64, WireValue<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => WireValue::Varint(self.varint()?),
            1 => self.take(8).map(|_| WireValue::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                WireValue::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| WireValue::Fixed)?,
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}
