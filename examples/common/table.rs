//! What is told at the end.

use std::time::Duration;

use upstream::{Log, Rule};

/// Lines up `rows` under `head`: the first column to the left, the others to the right.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let widths: [usize; N] = std::array::from_fn(|column| {
        let cells = rows.iter().map(|row| row[column].as_str()).chain([head[column]]);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    });
    let line = |cells: [&str; N]| {
        let cells = cells.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:width$}"),
            _ => format!("   {cell:>width$}"),
        });
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    let rule = "─".repeat(widths.iter().sum::<usize>() + 3 * (N - 1)) + "\n";
    let rows = rows.iter().map(|row| line(std::array::from_fn(|column| row[column].as_str())));
    line(head) + &rule + &rows.collect::<String>() + &rule
}

/// Which of `rules` was not kept, by the log of the service: at most the count in any window, not only in those that
/// start on the second.
///
/// `slack` is the `transit_slack` of the layer: what the way to the service varied beyond it, nobody can answer for.
pub(crate) fn not_kept(log: &Log, rules: &[Rule], slack: Duration) -> Option<String> {
    rules.iter().find_map(|rule| log.over(*rule, slack))
}

/// By how much the way to the service may vary: the default of `transit_slack`.
pub(crate) const TRANSIT_SLACK: Duration = Duration::from_millis(10);
