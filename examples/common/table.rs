//! The table that is printed at the end, and the check of the limit.

use std::time::Duration;

use upstream::{Log, Rule};

/// Aligns `rows` under `head`: the first column to the left, the others to the right.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let widths: [usize; N] = std::array::from_fn(|column| {
        let cells = rows
            .iter()
            .map(|row| row[column].as_str())
            .chain([head[column]]);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    });
    let line = |cells: [&str; N]| {
        let cells =
            cells
                .iter()
                .zip(widths)
                .enumerate()
                .map(|(column, (cell, width))| match column {
                    0 => format!("{cell:width$}"),
                    _ => format!("   {cell:>width$}"),
                });
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    let rule = "─".repeat(widths.iter().sum::<usize>() + 3 * (N - 1)) + "\n";
    let rows = rows
        .iter()
        .map(|row| line(std::array::from_fn(|column| row[column].as_str())));
    line(head) + &rule + &rows.collect::<String>() + &rule
}

/// Returns which of `rules` was exceeded, by the log of the service: the count is a maximum in any
/// window, not only in windows that start on the second.
///
/// `slack` is the `transit_slack` of the layer. A transit time that varies by more than that can
/// exceed the limit.
pub(crate) fn not_kept(log: &Log, rules: &[Rule], slack: Duration) -> Option<String> {
    rules.iter().find_map(|rule| log.over(*rule, slack))
}

/// How much the transit time to the service may vary: the default of `transit_slack`.
pub(crate) const TRANSIT_SLACK: Duration = Duration::from_millis(10);
