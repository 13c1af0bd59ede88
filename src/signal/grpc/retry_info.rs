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
    let details = WireFields(status).filter(|field| field.tag == bytes(3));
    details.filter_map(|detail| of_detail(detail.bytes)).max()
}

fn of_detail(any: &[u8]) -> Option<Duration> {
    let type_url = last(any, bytes(1))?.bytes;
    let name = type_url.rsplit(|byte| *byte == b'/').next()?;
    if name != RETRY_INFO {
        return None;
    }
    let delay = last(last(any, bytes(2))?.bytes, bytes(1))?.bytes;
    // Negative numbers are sent as 64 bits, too: they are above `i64::MAX`.
    let [seconds, nanos] =
        [1, 2].map(|number| last(delay, varint(number)).map_or(0, |field| field.varint));
    let nanos = u32::try_from(nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000)?;
    (i64::try_from(seconds).is_ok()).then(|| Duration::new(seconds, nanos))
}

/// Returns the tag of the field with this number, if its value is bytes.
fn bytes(number: u64) -> u64 {
    number << 3 | 2
}

/// Returns the tag of the field with this number, if its value is a varint.
fn varint(number: u64) -> u64 {
    number << 3
}

/// Returns the last field with this tag.
fn last(message: &[u8], tag: u64) -> Option<WireField<'_>> {
    WireFields(message).filter(|field| field.tag == tag).last()
}

/// A field of a message.
#[derive(Default)]
struct WireField<'a> {
    /// The number of the field and the type of its value.
    tag: u64,
    /// The value of a varint. 0 for other types.
    varint: u64,
    /// The value of a field with a length. Empty for other types.
    bytes: &'a [u8],
}

/// The fields of a message, up to the first malformed one.
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
    type Item = WireField<'a>;

    fn next(&mut self) -> Option<WireField<'a>> {
        let tag = self.varint()?;
        let mut field = WireField {
            tag,
            ..WireField::default()
        };
        match tag & 7 {
            0 => field.varint = self.varint()?,
            1 => _ = self.take(8)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                field.bytes = self.take(length)?;
            }
            5 => _ = self.take(4)?,
            _ => return None,
        }
        Some(field)
    }
}
