//! Headers and trailers of gRPC, each with the expected signal.

use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD_NO_PAD as STANDARD_NO_PAD;
use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{decode, signal};
use crate::signal::Signal;

fn read(lines: &[(&'static str, &[u8])]) -> Signal {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_static(name);
        headers.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    signal(
        &headers,
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600),
    )
}

/// Returns the HTTP status of the refusal, and the wait in milliseconds.
fn said(signal: &Signal) -> (Option<u16>, Option<u128>) {
    (
        signal.refusal().map(|status| status.as_u16()),
        signal.retry_after().map(|wait| wait.as_millis()),
    )
}

#[test]
fn codes_and_pushbacks_are_read() {
    const NONE: (Option<u16>, Option<u128>) = (None, None);
    for (status, pushback, expected) in [
        (Some("8"), None, (Some(429), None)),
        (Some("8"), Some("1500"), (Some(429), Some(1500))),
        (Some("8"), Some("0"), (Some(429), Some(0))),
        (Some("8"), Some("007"), (Some(429), Some(7))),
        // "Do not retry" is no time.
        (Some("8"), Some("-1"), (Some(429), None)),
        (Some("8"), Some("soon"), (Some(429), None)),
        (Some("8"), Some(""), (Some(429), None)),
        (Some("8"), Some("1.5"), (Some(429), None)),
        (Some("8"), Some("+5"), (Some(429), None)),
        (
            Some("8"),
            Some("99999999999999999999999"),
            (Some(429), Some(366 * 86_400_000)),
        ),
        (Some("14"), None, NONE),
        (Some("14"), Some("250"), (Some(503), Some(250))),
        (Some("14"), Some("-1"), NONE),
        (Some("14"), Some("x"), NONE),
        (Some("0"), Some("250"), NONE),
        (Some("13"), Some("250"), NONE),
        (Some("4294967304"), Some("250"), NONE),
        (Some("-8"), Some("250"), NONE),
        (Some("eight"), Some("250"), NONE),
        (None, Some("250"), NONE),
        (None, None, NONE),
    ] {
        let mut lines: Vec<(&'static str, &[u8])> = Vec::new();
        lines.extend(status.map(|status| ("grpc-status", status.as_bytes())));
        lines.extend(pushback.map(|wait| ("grpc-retry-pushback-ms", wait.as_bytes())));
        let read = read(&lines);
        assert_eq!(said(&read), expected, "{status:?} {pushback:?}");
    }
    let twice = read(&[
        ("grpc-status", b"8"),
        ("grpc-retry-pushback-ms", b"5"),
        ("grpc-retry-pushback-ms", b"6"),
    ]);
    assert_eq!(said(&twice), (Some(429), None));
}

#[test]
fn retry_info_is_read() {
    // {code: 8, message: "slow down", details: [RetryInfo {3.5 s}]}
    let whole = "CAgSCXNsb3cgZG93bho2Cih0eXBlLmdvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuUmV0cnlJbmZvEgoK\
                 CAgDEIDKte4B";
    let status = |details: &[u8]| {
        said(&read(&[
            ("grpc-status", b"8"),
            ("grpc-status-details-bin", details),
        ]))
    };
    assert_eq!(status(whole.as_bytes()), (Some(429), Some(3500)));
    let unavailable = read(&[
        ("grpc-status", b"14"),
        ("grpc-status-details-bin", whole.as_bytes()),
    ]);
    assert_eq!(said(&unavailable), (Some(503), Some(3500)));
    // The pushback takes precedence, and one that says "do not retry" leaves the time of the details.
    for (pushback, expected) in [("20", 20), ("-1", 3500)] {
        let both = read(&[
            ("grpc-status", b"8"),
            ("grpc-retry-pushback-ms", pushback.as_bytes()),
            ("grpc-status-details-bin", whole.as_bytes()),
        ]);
        assert_eq!(said(&both), (Some(429), Some(expected)));
    }
    // Any part of it, and no base64 at all: never more than "no time".
    for end in 0..whole.len() - 1 {
        let (refusal, wait) = status(&whole.as_bytes()[..end]);
        assert_eq!(refusal, Some(429));
        assert!(wait.is_none_or(|wait| wait <= 3500), "{end}: {wait:?}");
    }
    for malformed in [
        "",
        "====",
        "%%%%",
        "CAg",
        "Gg==",
        "GgI=",
        "//////////////////8=",
    ] {
        assert_eq!(
            status(malformed.as_bytes()),
            (Some(429), None),
            "{malformed}"
        );
    }
}

/// Vectors of RFC 4648, section 10, and what is not base64.
#[test]
fn text_is_decoded_with_and_without_padding() {
    for (text, bytes) in [
        ("", Some("")),
        ("Zg==", Some("f")),
        ("Zg", Some("f")),
        ("Zm8=", Some("fo")),
        ("Zm8", Some("fo")),
        ("Zm9v", Some("foo")),
        ("Zm9vYg==", Some("foob")),
        ("Zm9vYmE=", Some("fooba")),
        ("Zm9vYmFy", Some("foobar")),
        (" Zm9v ,Zg==", Some("foo")),
        ("Z", None),
        ("Zm9vY", None),
        ("Zm=v", None),
        ("Zm 9v", None),
        ("Zm9v\n!", None),
    ] {
        let decoded = decode(text.as_bytes());
        assert_eq!(decoded.as_deref(), bytes.map(str::as_bytes), "{text:?}");
    }
    assert_eq!(
        decode(&[b'A'; 16 * 1024]).map(|bytes| bytes.len()),
        Some(12 * 1024)
    );
    assert_eq!(decode(&[b'A'; 16 * 1024 + 4]), None);
}

/// Encodes bytes as base64 without padding.
fn base64(bytes: &[u8]) -> String {
    STANDARD_NO_PAD.encode(bytes)
}

/// Encodes a field with a length.
fn bytes(number: u8, value: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2, u8::try_from(value.len()).unwrap()];
    field.extend(value);
    field
}

/// Encodes a field with a number.
fn varint(number: u8, mut value: u64) -> Vec<u8> {
    let mut field = vec![number << 3];
    while value >= 0x80 {
        field.push(value as u8 | 0x80);
        value >>= 7;
    }
    field.push(value as u8);
    field
}

fn duration(seconds: i64, nanos: i64) -> Vec<u8> {
    let mut duration = varint(1, seconds as u64);
    duration.extend(varint(2, nanos as u64));
    duration
}

fn detail(type_url: &str, delay: &[u8]) -> Vec<u8> {
    let mut any = bytes(1, type_url.as_bytes());
    any.extend(bytes(2, &bytes(1, delay)));
    bytes(3, &any)
}

const URL: &str = "type.googleapis.com/google.rpc.RetryInfo";

#[test]
fn delays_and_other_details_are_told_apart() {
    let wait = |status: &[u8]| super::retry_info::wait(status).map(|wait| wait.as_millis());
    let one = |seconds, nanos| wait(&detail(URL, &duration(seconds, nanos)));
    assert_eq!(one(3, 500_000_000), Some(3500));
    assert_eq!(one(0, 0), Some(0));
    assert_eq!(one(-1, 0), None);
    assert_eq!(one(1, -1), None);
    assert_eq!(one(1, 1_000_000_000), None);
    assert_eq!(
        wait(&detail(URL, &[])),
        Some(0),
        "an empty duration is zero"
    );
    assert_eq!(
        wait(&detail("google.rpc.RetryInfo", &duration(1, 0))),
        Some(1000)
    );
    assert_eq!(
        wait(&detail("x/google.rpc.ErrorInfo", &duration(1, 0))),
        None
    );
    assert_eq!(
        wait(&detail("x/my.google.rpc.RetryInfo", &duration(1, 0))),
        None
    );
    let mut several = varint(1, 8);
    several.extend(bytes(2, b"slow down"));
    several.extend([0x7d, 1, 2, 3, 4]); // 15: 32 bits
    several.extend([0x79, 1, 2, 3, 4, 5, 6, 7, 8]); // 15: 64 bits
    several.extend(detail("x/google.rpc.QuotaFailure", b"per minute"));
    several.extend(detail(URL, &duration(2, 0)));
    several.extend(detail(URL, &duration(1, 0)));
    assert_eq!(wait(&several), Some(2000));
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn any_headers_are_read(
        status in proptest::option::of("[0-9]{1,3}|[ -~]{0,12}"),
        pushback in proptest::option::of("-?[0-9]{0,25}|[ -~]{0,12}"),
        details in proptest::option::of("[A-Za-z0-9+/=,_-]{0,200}|[ -~]{0,40}"),
    ) {
        let mut lines: Vec<(&'static str, &[u8])> = Vec::new();
        lines.extend(status.as_ref().map(|value| ("grpc-status", value.as_bytes())));
        lines.extend(pushback.as_ref().map(|value| ("grpc-retry-pushback-ms", value.as_bytes())));
        lines.extend(details.as_ref().map(|value| ("grpc-status-details-bin", value.as_bytes())));
        let signal = read(&lines);
        let code = status.as_deref().and_then(|status| status.parse::<u32>().ok());
        match code {
            Some(8) => prop_assert_eq!(said(&signal).0, Some(429)),
            Some(14) => prop_assert_eq!(signal.refusal().is_some(), signal.retry_after().is_some()),
            _ => prop_assert_eq!(said(&signal), (None, None)),
        }
        prop_assert!(signal.retry_after() <= Some(Duration::from_secs(366 * 86_400)));
    }

    /// Bytes that are a message but for some of them.
    #[test]
    fn any_details_are_read(
        before in vec(any::<u8>(), 0..20),
        seconds in any::<i64>(),
        nanos in any::<i64>(),
        broken in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut details = before;
        details.extend(detail(URL, &duration(seconds, nanos)));
        for (index, byte) in broken {
            let index = index.index(details.len());
            details[index] = byte;
        }
        let text = base64(&details);
        let signal = read(&[("grpc-status", b"8"), ("grpc-status-details-bin", text.as_bytes())]);
        prop_assert_eq!(said(&signal).0, Some(429));
    }

    #[test]
    fn delays_are_read(seconds in 0..10_000_000_i64, nanos in 0..1_000_000_000_i64) {
        let text = base64(&detail(URL, &duration(seconds, nanos)));
        let signal = read(&[("grpc-status", b"14"), ("grpc-status-details-bin", text.as_bytes())]);
        let millis = seconds as u128 * 1000 + (nanos as u128).div_ceil(1_000_000);
        prop_assert_eq!(said(&signal), (Some(503), Some(millis)));
    }
}
