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
    Fields(status)
        .filter_map(|field| field.bytes(3))
        .filter_map(of_detail)
        .max()
}

fn of_detail(any: &[u8]) -> Option<Duration> {
    let type_url = Fields(any).filter_map(|field| field.bytes(1)).last()?;
    let name = type_url.rsplit(|byte| *byte == b'/').next()?;
    if name != RETRY_INFO {
        return None;
    }
    let retry_info = Fields(any).filter_map(|field| field.bytes(2)).last()?;
    let delay = Fields(retry_info)
        .filter_map(|field| field.bytes(1))
        .last()?;
    let number = |number| {
        Fields(delay)
            .filter_map(|field| field.varint(number))
            .last()
    };
    // Negative numbers are sent as 64 bits, too: they are above `i64::MAX`.
    let part = |value: Option<u64>| i64::try_from(value.unwrap_or(0)).ok();
    let seconds = u64::try_from(part(number(1))?).ok()?;
    let nanos = u32::try_from(part(number(2))?).ok()?;
    (nanos < 1_000_000_000).then(|| Duration::new(seconds, nanos))
}

/// A field of a message.
struct Field<'a> {
    number: u64,
    value: Value<'a>,
}

enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// 32 or 64 bits.
    Fixed,
}

impl<'a> Field<'a> {
    fn bytes(&self, number: u64) -> Option<&'a [u8]> {
        match self.value {
            Value::Bytes(bytes) if self.number == number => Some(bytes),
            _ => None,
        }
    }

    fn varint(&self, number: u64) -> Option<u64> {
        match self.value {
            Value::Varint(value) if self.number == number => Some(value),
            _ => None,
        }
    }
}

/// The fields of a message, up to the first malformed one.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
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

impl<'a> Iterator for Fields<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Field<'a>> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return None,
        };
        Some(Field {
            number: tag >> 3,
            value,
        })
    }
}
