//! The cost of reading a response: without any headers that matter, with some, and with a body.

use std::hint::black_box;
use std::time::Instant;

use http::{HeaderName, HeaderValue, Response};
use tollgate::Signal;

/// Headers of most responses.
const ORDINARY: [(&str, &str); 16] = [
    ("date", "Thu, 01 Jan 2026 00:02:00 GMT"),
    ("content-type", "application/json; charset=utf-8"),
    ("content-length", "5120"),
    ("connection", "keep-alive"),
    ("server", "nginx"),
    ("cache-control", "private, max-age=60, s-maxage=60"),
    ("vary", "Accept, Authorization, Cookie"),
    ("etag", "W/\"9a5d8c\""),
    ("strict-transport-security", "max-age=31536000"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "deny"),
    ("referrer-policy", "origin-when-cross-origin"),
    ("content-security-policy", "default-src 'none'"),
    ("access-control-allow-origin", "*"),
    ("x-request-id", "5f0c2a4b-0d3b-4f6e-9c1c-2f1f9f3f7f7a"),
    ("via", "1.1 varnish"),
];

const GITHUB: [(&str, &str); 5] = [
    ("x-ratelimit-limit", "5000"),
    ("x-ratelimit-remaining", "4987"),
    ("x-ratelimit-used", "13"),
    ("x-ratelimit-reset", "1767228000"),
    ("x-ratelimit-resource", "core"),
];

const STANDARD: [(&str, &str); 2] = [
    ("ratelimit-policy", "\"default\";q=100;w=10"),
    ("ratelimit", "\"default\";r=50;t=30"),
];

/// The body of a refusal that names its wait in words alone.
const BODY: &str = r#"{"error":{"message":"Rate limit reached for gpt-4o-mini in organization org-x on tokens per min (TPM): Limit 200000, Used 199821, Requested 2295. Please try again in 634ms. Visit https://platform.openai.com/account/rate-limits to learn more.","type":"tokens","param":null,"code":"rate_limit_exceeded"}}"#;

const ROUNDS: usize = 300;
/// The calls of a round, at most, and about how long they take.
const CALLS: u128 = 2_000;
const ROUND_NANOS: u128 = 2_000_000;

/// Measures, and prints the table.
pub(crate) fn report() {
    println!("# Reading a response\n\nNanoseconds; medians of {ROUNDS} rounds.\n");
    println!("| headers | ns | allocations |\n|---|---:|---:|");
    row("none", 200, &[]);
    row("4 ordinary ones", 200, &[&ORDINARY[..4]]);
    row("16 ordinary ones", 200, &[&ORDINARY]);
    row(
        "16 ordinary ones, and 5 of GitHub",
        200,
        &[&ORDINARY, &GITHUB],
    );
    row(
        "16 ordinary ones, and the 2 of the IETF",
        200,
        &[&ORDINARY, &STANDARD],
    );
    row(
        "16 ordinary ones, and `retry-after`: a refusal",
        429,
        &[&ORDINARY, &[("retry-after", "30")]],
    );
    let body = |response: &Response<()>| Signal::read_with_body(response, BODY.as_bytes());
    read_row(
        "16 ordinary ones, and a body of a refusal",
        429,
        &[&ORDINARY],
        body,
    );
    let long = "1,".repeat(30_000).leak();
    row(
        "60 kB in one header",
        200,
        &[&[("x-ratelimit-limit", long)]],
    );
    let long = "1,".repeat(2_000).leak();
    let name = |number: usize| &*format!("x-ratelimit-limit-{number}").leak();
    let many: Vec<_> = (0..15).map(|number| (name(number), &*long)).collect();
    row("60 kB in 15 headers", 200, &[&many]);
}

type Headers<'a> = &'a [&'a [(&'static str, &'static str)]];

fn row(name: &str, status: u16, headers: Headers<'_>) {
    read_row(name, status, headers, Signal::read);
}

fn read_row(name: &str, status: u16, headers: Headers<'_>, read: impl Fn(&Response<()>) -> Signal) {
    let mut response = Response::new(());
    *response.status_mut() = status.try_into().expect("a status");
    for (name, value) in headers.iter().copied().flatten() {
        response.headers_mut().append(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
    }
    let allocations = allocation_counter::measure(|| drop(black_box(read(black_box(&response)))));
    let start = Instant::now();
    (0..10).for_each(|_| drop(black_box(read(black_box(&response)))));
    let calls = (ROUND_NANOS * 10 / start.elapsed().as_nanos().max(1)).clamp(1, CALLS);
    let mut rounds: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..calls {
                drop(black_box(read(black_box(&response))));
            }
            start.elapsed().as_nanos() as f64 / calls as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    println!(
        "| {name} | {:.0} | {} |",
        rounds[ROUNDS / 2],
        allocations.count_total
    );
}
