//! `Retry-After` in seconds.

use std::time::Duration;

use http::HeaderMap;
use http::header::RETRY_AFTER;

/// Longer waits are cut to this: 366 days.
const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// Reads `delay-seconds` (RFC 9110, section 10.2.3): digits and nothing else. Anything else is not there.
pub(super) fn read(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.as_bytes().trim_ascii();
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let seconds =
        value.iter().fold(0u64, |sum, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0')));
    Some(Duration::from_secs(seconds).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(value: &str) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, http::HeaderValue::from_bytes(value.as_bytes()).unwrap());
        read(&headers).map(|wait| wait.as_secs())
    }

    #[test]
    fn seconds_are_read_and_nothing_else_ever_panics_or_waits_for_ever() {
        for (value, expected) in [
            ("120", Some(120)),
            ("0", Some(0)),
            (" 7 ", Some(7)),
            ("99999999999999999999999999", Some(366 * 86_400)),
            ("1771404540", Some(366 * 86_400)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("²", None),
            ("soon", None),
            ("Thu, 01 Jan 2026 00:02:00 GMT", None),
        ] {
            assert_eq!(seconds(value), expected, "{value:?}");
        }
        assert_eq!(read(&HeaderMap::new()), None);
    }
}
