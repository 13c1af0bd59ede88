//! The cost of reading a response: without any headers that matter, and with some.

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

const ROUNDS: usize = 300;
const CALLS: u32 = 2_000;

/// Measures, and prints the table.
pub(crate) fn report() {
    println!(
        "# Reading a response\n\nNanoseconds for `Signal::read`; medians of {ROUNDS} rounds.\n"
    );
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
}

fn row(name: &str, status: u16, headers: &[&[(&'static str, &'static str)]]) {
    let mut response = Response::new(());
    *response.status_mut() = status.try_into().expect("a status");
    for (name, value) in headers.iter().copied().flatten() {
        response.headers_mut().append(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
    }
    let allocations =
        allocation_counter::measure(|| drop(black_box(Signal::read(black_box(&response)))));
    let mut rounds: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..CALLS {
                drop(black_box(Signal::read(black_box(&response))));
            }
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    println!(
        "| {name} | {:.0} | {} |",
        rounds[ROUNDS / 2],
        allocations.count_total
    );
}
