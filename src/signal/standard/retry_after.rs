//! Explicit hints when to retry: `Retry-After` and its relatives.

use crate::signal::combine::Entries;
use crate::signal::generic::family::Role;
use crate::signal::generic::group::each_time;
use crate::signal::generic::lines::Lines;
use crate::signal::parse::time::Base;

/// Headers in milliseconds, the best level.
pub(in crate::signal) const MILLIS: [&str; 3] =
    ["retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after"];

/// The standard header (RFC 9110, section 10.2.3), the second level.
pub(in crate::signal) const STANDARD: &str = "retry-after";

/// The third level, besides the headers of the generic families.
pub(in crate::signal) const OTHER: &str = "x-retry-after";

/// Returns the stated wait in milliseconds: the longest value of the best of three levels.
pub(in crate::signal) fn read<'a>(
    lines: &Lines<'a>,
    entries: &Entries<'a>,
    base: &Base,
) -> Option<u64> {
    let millis = lines
        .iter()
        .filter(|line| MILLIS.contains(&line.name))
        .map(|line| line.value);
    let others = entries
        .iter()
        .filter(|entry| entry.header.role == Role::RetryAfter)
        .map(|entry| entry.value);
    longest(millis, |text| base.read_millis(text))
        .or_else(|| longest(lines.all(STANDARD), |text| base.read(text)))
        .or_else(|| longest(lines.all(OTHER).chain(others), |text| base.read(text)))
}

fn longest<'a>(
    lines: impl Iterator<Item = &'a str>,
    read: impl Fn(&str) -> Option<u64>,
) -> Option<u64> {
    let mut longest = None;
    lines.for_each(|line| each_time(line, &read, |time| longest = longest.max(Some(time))));
    longest
}
