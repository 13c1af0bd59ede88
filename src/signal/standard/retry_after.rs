//! Explicit hints when to retry: `Retry-After` and its relatives.

use crate::signal::combine::Entries;
use crate::signal::generic::family::Role;
use crate::signal::generic::group::times;
use crate::signal::generic::lines::Lines;
use crate::signal::parse::time::{self, Base};

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
    longest(millis, |text| base.read_in(1, text))
        .or_else(|| longest(lines.all(STANDARD), |text| base.read(text)))
        .or_else(|| longest(lines.all(OTHER), |text| base.read(text)).max(by_kind(entries, base)))
}

/// Returns the longest wait of the headers that are known by their words. Such a 0 is no hint:
/// servers send it with each response that they accept.
fn by_kind(entries: &Entries<'_>, base: &Base) -> Option<u64> {
    let state = entries.iter().find(|entry| entry.is_throttled());
    let waits = entries.iter().filter_map(|entry| match entry.header.role {
        Role::RetryAfter => {
            times(entry.value, |text| base.read_with(entry.header.unit, text)).max()
        }
        // A server that states no more than the window of the limit that it enforces.
        Role::Window if state.is_some_and(|state| state.same_group(entry)) => {
            time::window(entry.header.unit.unwrap_or(1000), entry.value)
        }
        _ => None,
    });
    waits.max().filter(|wait| *wait > 0)
}

fn longest<'a>(
    lines: impl Iterator<Item = &'a str>,
    read: impl Fn(&str) -> Option<u64>,
) -> Option<u64> {
    lines.flat_map(|line| times(line, &read)).max()
}
