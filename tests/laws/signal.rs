//! Reading any response is safe: responses composed of known names and odd values.
//!
//! More of them:
//! `TOLLGATE_CASES=1000 cargo test --release --all-features --test laws signal::whatever`.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::Signal;

const YEAR: Duration = Duration::from_secs(366 * 86_400);

/// Parts of names: whole names, and the parts of generic ones.
const NAMES: &[&str] = &[
    "retry-after",
    "retry-after-ms",
    "x-ms-retry-after-ms",
    "x-amz-retry-after",
    "x-retry-after",
    "ratelimit",
    "ratelimit-policy",
    "ratelimit-dailylimit",
    "date",
    "age",
    "x-amzn-errortype",
    "x-amzn-ratelimit-limit",
    "x-quota-client-limit",
    "auth0-quota-organization-limit",
    "x-ms-ratelimit-remaining-resource",
    "x-mbx-used-weight",
    "x-mbx-used-weight-1m",
    "x-mbx-order-count-10s",
    "x-sapi-used-ip-weight-1d",
    "x-bapi-limit",
    "x-bapi-limit-status",
    "x-bapi-limit-reset-timestamp",
    "x-limit-per-second",
    "x-remaining-this-second",
    "x-app-usage",
    "x-ad-account-usage",
    "x-fb-ads-insights-throttle",
    "x-business-use-case-usage",
    "x-app-rate-limit",
    "x-app-rate-limit-count",
    "sforce-limit-info",
    "x-sentry-rate-limits",
    "x-shopify-shop-api-call-limit",
    "x-toggl-quota-remaining",
    "x-toggl-quota-resets-in",
    "x-daylimit-remaining",
    "zendesk-ratelimit-tickets",
    "x-readratelimit-limit",
    "x-readratelimit-usage",
    "x-ratelimit-name",
    "x-ratelimit-resource",
    "x-ratelimit-scope",
    "x-ratelimit-global",
    "x-rate-limit-type",
    "ratelimit-reason",
    "content-type",
    "gw-ratelimit-reset",
    "x-ratelimit-group",
    "x-ratelimit-state",
    "x-ratelimit",
    "beta-ratelimit",
    "beta-ratelimit-policy",
    "x-rate-limit-ip-state",
    "x-quota-remaining",
    "x-vendor-shop-api-call-limit",
    "x-current-token-count",
    "x-next-replenishment-time",
    "remaining-req",
    "retry-after-short",
];
const FRONTS: &[&str] = &[
    "",
    "x-",
    "vendor-",
    "x-vendor-",
    "gw-",
    "anthropic-",
    "--",
    "x-x-x-x-",
];
const MIDDLES: &[&str] = &[
    "ratelimit",
    "rate-limit",
    "ratelimitbysize",
    "ratelimits",
    "limit",
    "quota",
    "",
];
const WORDS: &[&str] = &[
    "limit",
    "max",
    "remaining",
    "left",
    "used",
    "observed",
    "usage",
    "reset",
    "resets",
    "next",
    "after",
    "in",
    "time",
    "date",
    "resettime",
    "period",
    "window",
    "interval",
    "ms",
    "milliseconds",
    "utilization",
    "retry",
    "tokens",
    "requests",
    "minute",
    "5h",
    "day",
    "userlimit",
    "dailyremaining",
    "dailylimitremaining",
    "remain",
    "available",
    "quota",
    "percent",
    "seconds",
    "sec",
    "state",
    "count",
    "towait",
    "group",
    "rps",
    "perday",
    "time",
    "",
];
const VALUES: &[&str] = &[
    "0",
    "1",
    "60",
    "-1",
    "7.66",
    ".5",
    "1e3",
    "1767225660",
    "1767225660500",
    "99999999999999999999999999999999999999999",
    "9007199254740993",
    "0.00000000000000000000000000000001",
    "6m0s",
    "2m59.56s",
    "1d 2h",
    "99999999999999999999999d",
    "Thu, 01 Jan 2026 00:02:00 GMT",
    "Thursday, 01-Jan-26 00:02:00 GMT",
    "Thu Jan  1 00:02:00 2026",
    "2026-01-01T00:05:00.123456789012345678901234567890+23:59",
    "0000-01-01T00:00:00Z",
    "9999-12-31T23:59:60Z",
    "Thu Jan 01 2026 01:02:00 GMT+0100 (CET)",
    "100;w=60",
    "\"default\";q=100;w=10",
    "\"default\";r=0;t=30;pk=:YQ==:",
    "limit=100, remaining=0, reset=5",
    "(\"a\" b);q=1",
    "\"a\\\"b\";r=1",
    "32/40",
    "20:1,100:120",
    "name=1/2",
    "b=per_hour;q=10;r=9;t=774",
    "total=100; remaining=99; resets=41",
    "60:transaction:key",
    "Microsoft.Compute/PutVM3Min;239",
    "{\"call_count\":28.5}",
    "{\"1\":[{\"type\":\"a\",\"call_count\":100}]}",
    "{\"acc_id_util_pct\":9.67,\"reset_time_duration\":1e400}",
    "{\"retry_after\":\"9s\",\"code\":\"slowdown\"}",
    "600/15m",
    "10/second, 100/minute",
    "300/3000/12000",
    "5:10:60,15:60:0",
    "1,200.00",
    "10,000",
    "42%",
    "limit=100&remaining=57&reset=30",
    "user-hour-lim:3600;user-hour-rem:3588;",
    "group=default; min=573; sec=9",
    "{\"name\":\"a\",\"period\":300,\"limit\":1000,\"remaining\":0,\"until\":\"2020-10-10T00:24:00Z\"}",
    "[{\"name\":\"a\",\"limit\":1},{\"minute\":{\"limit\":60}}]",
    "\"fixed window\";\"default\";q=2500;w=300",
    "{\"error\":{\"message\":\"Limit 5, used 5.\\n Try again in 634ms\",\"code\":\"OVER_QUERY_LIMIT\"}}",
    "{\"error\":{\"metadata\":{\"headers\":{\"X-RateLimit-Limit\":\"50\",\"Retry-After\":3}}}}",
    "{\"violations\":[{\"quotaId\":\"RequestsPerDay\",\"quotaValue\":\"5\",\"resetsAt\":1e400}]}",
    "{\"success\":false,\"errors\":[{\"message\":\"Max rate limit '100' exceeded\"}]}",
    "wait 99999999999999999999 days and 7 hours until 2026-01-01T00:00:00Z",
    "quota replenished in 99.23:59:59. Retry after 5",
    "THROTTLED",
    "true",
    "ThrottlingException:http://",
    "²",
    "\"",
    "µs",
    "1µs",
    "\u{feff}5",
];
const GLUE: &[&str] = &[
    ",", ", ", ";", ";w=", "=", ":", "/", " ", "\"", "\\", "(", "[", "{", "}", "-", ".", "\t",
];

fn some(words: &'static [&'static str]) -> impl Strategy<Value = String> {
    proptest::sample::select(words).prop_map(str::to_owned)
}

fn name() -> impl Strategy<Value = String> {
    let glued = (
        some(FRONTS),
        some(MIDDLES),
        proptest::collection::vec(some(WORDS), 0..4),
    );
    prop_oneof![
        3 => some(NAMES),
        5 => glued.prop_map(|(front, middle, words)| {
            words.into_iter().fold(front + &middle, |name, word| name + "-" + &word)
        }),
        1 => "[a-z0-9-]{1,40}",
    ]
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    let piece =
        prop_oneof![6 => some(VALUES), 4 => some(GLUE), 1 => "[0-9]{1,30}", 1 => "[ -~]{0,12}"];
    let glued =
        proptest::collection::vec(piece, 1..6).prop_map(|pieces| pieces.concat().into_bytes());
    let long = (glued.clone(), 1usize..4000)
        .prop_map(|(piece, times)| piece.repeat(times.min(20_000 / piece.len().max(1) + 1)));
    let junk = proptest::collection::vec(any::<u8>(), 0..40);
    prop_oneof![5 => some(VALUES).prop_map(String::into_bytes), 5 => glued, 1 => long, 1 => junk]
}

#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) status: u16,
    pub(super) lines: Vec<(String, Vec<u8>)>,
    pub(super) body: Vec<u8>,
}

pub(super) fn sent() -> impl Strategy<Value = Sent> {
    let status = prop_oneof![
        4 => proptest::sample::select(&[200u16, 400, 402, 403, 409, 418, 420, 429, 503, 529, 301][..]),
        1 => 100u16..=999,
    ];
    let lines = proptest::collection::vec((name(), value()), 0..12);
    (status, lines, value()).prop_map(|(status, lines, body)| Sent {
        status,
        lines,
        body,
    })
}

/// The response, with names as given or in capital letters; bytes that HTTP forbids are left out.
fn response(sent: &Sent, capitals: bool) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::from_u16(sent.status).unwrap();
    for (name, value) in &sent.lines {
        let name = if capitals {
            name.to_uppercase()
        } else {
            name.clone()
        };
        if let (Ok(name), Ok(value)) = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_bytes(value),
        ) {
            response.headers_mut().append(name, value);
        }
    }
    response
}

/// Reads the response, and measures the memory that takes at any one time.
fn read(sent: &Sent, capitals: bool) -> (Signal, u64) {
    let response = response(sent, capitals);
    let mut signal = Signal::default();
    let spent = allocation_counter::measure(|| {
        if !sent.body.is_empty() {
            signal = Signal::read_with_body(&response, &sent.body);
            return;
        }
        signal = Signal::read(&response);
    });
    (signal, spent.bytes_max)
}

/// The most memory that reading may take. JSON takes a byte for each container that is open, and a
/// copy of a text with escapes; a structured field takes a copy of its lines; 16 quotas take 4 kB with
/// their names.
fn most_memory(sent: &Sent) -> u64 {
    let lines = sent
        .lines
        .iter()
        .map(|(name, value)| name.len() + value.len());
    let all: usize = lines.chain([sent.body.len()]).sum();
    4096 + 4 * all as u64
}

fn is_sound(sent: &Sent) -> Result<(), TestCaseError> {
    let (signal, bytes) = read(sent, false);
    prop_assert!(
        bytes <= most_memory(sent),
        "{} bytes for {:?}",
        bytes,
        signal
    );
    prop_assert!(signal.retry_after() <= Some(YEAR));
    prop_assert!(signal.quotas().len() <= 16);
    for quota in signal.quotas() {
        prop_assert!(
            quota.window() <= Some(YEAR) && quota.window() != Some(Duration::ZERO),
            "{:?}",
            quota
        );
        prop_assert!(quota.reset_after() <= Some(YEAR), "{:?}", quota);
        let largest = [quota.limit(), quota.remaining(), quota.used()]
            .into_iter()
            .flatten()
            .max();
        prop_assert!(largest < Some(1 << 53), "{:?}", quota);
        prop_assert!(
            largest.is_some() || quota.reset_after().is_some(),
            "{:?}",
            quota
        );
    }
    prop_assert_eq!(&signal, &read(sent, true).0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn whatever_is_sent_is_read_within_bounds() {
    let config = Config {
        failure_persistence: None,
        ..histories::config(1000)
    };
    TestRunner::new(config)
        .run(&sent(), |sent| is_sound(&sent))
        .unwrap();
}

/// More than linear time would take minutes here: a square of 16 kB is 3 * 10^8 steps, for each of
/// 500 shapes.
#[test]
fn long_values_and_names_are_read_in_linear_time() {
    const LONG: usize = 16 * 1024;
    let pieces = [
        ",",
        ";",
        "=",
        "\"",
        "\\\"",
        " ",
        "-",
        ".",
        "0",
        "1,",
        "1s",
        "1s ",
        "a=1;",
        "100;w=60,",
        "a;r=1,",
        "\"a\";q=1,",
        "(a ",
        "1:1,",
        "#",
        "<Code>",
        "<Code>a",
        "[",
        "{\"a\":",
        "{\"a\":[",
        "\\u0000",
        "[1,",
        "{\"error\":{\"code\":",
        "limit=1&",
        "{\"limit\":1,",
        "try again in 1s ",
        "limit exceeded ",
        "\"headers\"",
    ];
    let names = [
        "retry-after",
        "ratelimit",
        "ratelimit-policy",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "x-quota-client-limit",
        "sforce-limit-info",
        "x-business-use-case-usage",
        "x-app-rate-limit",
        "x-sentry-rate-limits",
        "zendesk-ratelimit-a",
        "x-ms-ratelimit-remaining-resource",
        "x-amzn-errortype",
    ];
    for piece in pieces {
        let value = piece.repeat(LONG / piece.len());
        for name in names {
            let sent = Sent {
                status: 429,
                lines: vec![(name.to_owned(), value.clone().into_bytes())],
                body: Vec::new(),
            };
            let (_, bytes) = read(&sent, false);
            assert!(bytes <= most_memory(&sent), "{name}: {piece}");
        }
        for body in [
            value.clone(),
            format!("[\"{value}\"]"),
            format!("{{\"message\":\"{value}\"}}"),
        ] {
            let sent = Sent {
                status: 403,
                lines: Vec::new(),
                body: body.into_bytes(),
            };
            let (_, bytes) = read(&sent, false);
            assert!(bytes <= most_memory(&sent), "body: {piece}");
        }
    }
    for piece in ["-", "a-", "limit-", "rate-", "l", "reset-", "ratelimit-"] {
        let name = piece.repeat(20_000 / piece.len()) + "x-ratelimit-limit" + &"-a".repeat(2_000);
        let line = |end: usize| (format!("{name}{end}"), b"1".to_vec());
        read(
            &Sent {
                status: 200,
                lines: (0..64).map(line).collect(),
                body: Vec::new(),
            },
            false,
        );
    }
}

#[test]
fn a_response_without_such_headers_takes_no_memory() {
    let mut response = Response::new(());
    for (name, value) in [
        ("date", "Thu, 01 Jan 2026 00:02:00 GMT"),
        ("content-type", "application/json"),
        ("x-request-id", "5f0c2a"),
        ("age", "7"),
    ] {
        response
            .headers_mut()
            .append(name, HeaderValue::from_static(value));
    }
    for status in [200, 404, 429, 503] {
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        let spent =
            allocation_counter::measure(|| assert_eq!(Signal::read(&response).quotas(), []));
        assert_eq!(spent.count_total, 0);
    }
}

#[test]
fn a_quota_without_name_takes_no_memory() {
    let mut response = Response::new(());
    let headers: &mut HeaderMap = response.headers_mut();
    for (name, value) in [
        ("x-ratelimit-limit", "60"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "1767225660"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let spent = allocation_counter::measure(|| {
        assert_eq!(Signal::read(&response).quotas()[0].limit(), Some(60))
    });
    assert_eq!(spent.count_total, 0);
}
