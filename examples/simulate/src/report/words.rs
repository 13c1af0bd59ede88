//! The words of a report: descriptions of scenarios, counts, and escaped text.

use std::fmt::Write;

use crate::scenario::{Scenario, Server, StoreModel};

/// Returns a one-line description of a scenario.
pub(super) fn sentence(scenario: &Scenario) -> String {
    let callers: usize = scenario
        .fleet
        .iter()
        .map(|group| group.procs * group.tasks)
        .sum();
    let processes: usize = scenario.fleet.iter().map(|group| group.procs).sum();
    let server = match &scenario.server {
        Server::Bucket {
            cap, refill, start, ..
        } => {
            let refill = (refill * 1e3).round() / 1e3;
            format!("a bucket of {cap}, {start} at the start, refilled by {refill} per second")
        }
        Server::Fixed { limit, window, .. } => format!("{limit} in each window of {window} s"),
        Server::Sliding { limit, window, .. } => format!("{limit} in any {window} s"),
        Server::First { limit, window } => {
            format!("{limit} in {window} s from the first request on")
        }
        Server::Weighted { limit, window, .. } => {
            format!("{limit} in {window} s, by an estimate from two windows")
        }
        Server::Dual { .. } => "two limits at once".into(),
    };
    let lie = scenario.headers.lie.map_or(String::new(), |lie| {
        format!(", and headers that are {lie:?}")
    });
    let strangers: f64 = scenario
        .background
        .iter()
        .map(|strangers| strangers.rate)
        .sum();
    let beside = if strangers > 0.0 {
        format!(", strangers at {strangers} per second")
    } else {
        String::new()
    };
    let store = store_faults(&scenario.store);
    let callers = counted(callers, "caller");
    let many = if processes == 1 {
        "one process".into()
    } else {
        format!("{processes} processes")
    };
    format!("{callers} in {many}, {server}{beside}{lie}{store}")
}

/// Returns a description of the store's faults.
fn store_faults(store: &StoreModel) -> String {
    let mut text = String::new();
    for (from, to) in &store.away {
        let _ = write!(text, ", the store away from {from} to {to} s");
    }
    if let (false, Some(every)) = (store.away.is_empty(), store.away_every) {
        let _ = write!(text, " of each {every} s");
    }
    if store.lose > 0.0 {
        let _ = write!(
            text,
            ", {} % of its answers lost",
            (store.lose * 1e4).round() / 1e2
        );
    }
    text
}

/// Returns a count with its noun, such as `2 seeds`.
pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns `text` with the characters escaped that HTML and SVG reserve.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
