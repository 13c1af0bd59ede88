//! Properties of whole responses, beyond the recorded ones.

use std::time::{Duration, SystemTime};

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{ObservedQuota, Signal, read};

/// The first moment of 2026.
const NOW: Duration = Duration::from_secs(1_767_225_600);

fn signal(status: u16, headers: &HeaderMap) -> Signal {
    let status = StatusCode::from_u16(status).unwrap();
    read::signal(
        Some(status),
        Some(headers),
        None,
        SystemTime::UNIX_EPOCH + NOW,
    )
}

fn of(status: u16, lines: &[(&'static str, &[u8])]) -> Signal {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value).unwrap(),
        );
    }
    signal(status, &headers)
}

/// Bugs of other limiters that must not occur here.
#[test]
fn odd_hints_never_panic_and_never_wait_for_ever() {
    let days = |days: u64| Some(Duration::from_secs(days * 86_400));
    for (value, expected) in [
        ("120", Some(Duration::from_secs(120))),
        ("0", Some(Duration::ZERO)),
        // A moment, not 56 years.
        ("1771404540", Some(Duration::from_secs(1_771_404_540) - NOW)),
        ("999999999", days(366)),
        ("99999999999999999999999999", days(366)),
        ("²", None),
        ("", None),
        ("   ", None),
        ("-1", Some(Duration::ZERO)),
        ("soon", None),
        (
            "Thu, 01 Jan 2026 00:02:00 GMT",
            Some(Duration::from_secs(120)),
        ),
        ("Fri, 31 Dec 1999 23:59:59 GMT", Some(Duration::ZERO)),
        ("Fri, 31 Dec 9999 23:59:59 GMT", days(366)),
    ] {
        let signal = of(429, &[("retry-after", value.as_bytes())]);
        assert_eq!(
            (signal.refusal().is_some(), signal.retry_after()),
            (true, expected),
            "{value:?}"
        );
    }
}

#[test]
fn reset_in_the_past_is_no_wait() {
    let signal = of(
        429,
        &[
            ("x-ratelimit-remaining", b"0"),
            ("x-ratelimit-reset", b"1700000000"),
        ],
    );
    assert_eq!(signal.retry_after(), Some(Duration::ZERO));
}

/// Its limit and its window are of a part of a value, and what is left is not.
#[test]
fn quota_of_two_groups_is_stated_once() {
    let signal = of(
        200,
        &[
            ("x-ratelimit-limit", b"10:60"),
            ("x-ratelimit-remaining-minute", b"9"),
        ],
    );
    let quota = ObservedQuota::new().with_limit(10).with_remaining(9);
    let quota = quota.with_window(Duration::from_secs(60));
    assert_eq!(signal.quotas(), [quota]);
}

/// Two groups of a family are one quota, whatever other headers come before them.
#[test]
fn order_of_headers_does_not_matter() {
    let quota = ObservedQuota::new().with_limit(100).with_remaining(50);
    let of_another_family: [(_, &[u8]); 3] = [
        ("x-other-requests-used", b"7"),
        ("x-vendor-limit-requests", b"100"),
        ("x-vendor-remaining", b"50"),
    ];
    let when_to_retry: [(_, &[u8]); 3] = [
        ("x-vendor-retry-after-tokens", b"7"),
        ("x-vendor-limit-requests", b"100"),
        ("x-vendor-remaining", b"50"),
    ];
    for mut lines in [of_another_family, when_to_retry] {
        for _ in 0..lines.len() {
            lines.rotate_left(1);
            let signal = of(200, &lines);
            let expected = quota.clone().with_name("requests");
            assert_eq!(signal.quotas(), [expected], "{lines:?}");
        }
    }
}

#[test]
fn header_with_invalid_text_is_present_but_unread() {
    let signal = of(
        403,
        &[
            ("x-ratelimit-scope", b"\xff"),
            ("x-ratelimit-remaining", b"\xff\xfe"),
        ],
    );
    assert!(signal.refusal().is_some());
    assert_eq!(signal.quotas(), []);
}

#[test]
fn system_clock_before_1970_is_accepted() {
    let mut headers = HeaderMap::new();
    headers.insert(
        RETRY_AFTER,
        HeaderValue::from_static("Thu, 01 Jan 1970 00:00:10 GMT"),
    );
    let now = SystemTime::UNIX_EPOCH - Duration::from_secs(50);
    let signal = read::signal(
        Some(StatusCode::TOO_MANY_REQUESTS),
        Some(&headers),
        None,
        now,
    );
    assert_eq!(signal.retry_after(), Some(Duration::from_secs(60)));
}

#[test]
fn signal_holds_a_bounded_number_of_quotas() {
    let mut headers = HeaderMap::new();
    for number in 0..100 {
        let name = format!("x-ratelimit-remaining-{number}");
        headers.insert(
            HeaderName::from_bytes(name.as_bytes()).unwrap(),
            HeaderValue::from_static("1"),
        );
    }
    assert!((8..=Signal::MOST_QUOTAS).contains(&signal(200, &headers).quotas().len()));
}
