//! The table of means: a row for each scenario and strategy, with the best value of each scenario
//! marked.

use std::fmt::Write;

use super::words::escaped;
use crate::metrics::Metrics;
use crate::strategy::Strategy;
use crate::sweep::Runs;

/// A column of the table.
struct Column {
    head: &'static str,
    /// Returns the value of these means; `None` leaves the cell empty.
    value: fn(&Metrics) -> Option<f64>,
    /// The digits after the decimal point.
    digits: usize,
    best: Best,
}

/// Which value of a column is the best.
#[derive(Clone, Copy)]
enum Best {
    Lowest,
    Highest,
}

/// Returns the column with this head.
const fn column(
    head: &'static str,
    value: fn(&Metrics) -> Option<f64>,
    digits: usize,
    best: Best,
) -> Column {
    Column {
        head,
        value,
        digits,
        best,
    }
}

/// All columns, from left to right.
const COLUMNS: [Column; 9] = [
    column("refused, %", |mean| Some(mean.retry_pct), 2, Best::Lowest),
    column(
        "longest sleep, s",
        |mean| Some(mean.max_sleep),
        1,
        Best::Lowest,
    ),
    column(
        "longest wait, s",
        |mean| Some(mean.max_wait),
        1,
        Best::Lowest,
    ),
    column("p99 wait, s", |mean| Some(mean.p99_wait), 1, Best::Lowest),
    column("stdev, requests", |mean| Some(mean.stdev), 1, Best::Lowest),
    column("Jain index", |mean| Some(mean.jain), 3, Best::Highest),
    column("used, %", |mean| Some(mean.util_pct), 1, Best::Highest),
    column("cleared, s", |mean| mean.clear, 1, Best::Lowest),
    column(
        "store calls / request",
        |mean| mean.store_calls,
        2,
        Best::Lowest,
    ),
];

impl Column {
    /// Returns the table cell of a strategy with these means, among the means of all strategies.
    fn cell(&self, mean: &Metrics, all: &[Metrics]) -> String {
        let digits = self.digits;
        let Some(value) = (self.value)(mean) else {
            return "<td></td>".into();
        };
        let rank = |value: f64| {
            // Values that look the same have the same rank.
            let shown = format!("{value:.digits$}").parse().unwrap_or(value);
            match self.best {
                Best::Lowest => shown,
                Best::Highest => -shown,
            }
        };
        let ranks = || all.iter().filter_map(self.value).map(rank);
        let best = ranks().fold(f64::INFINITY, f64::min);
        // If all strategies have the same rank, none is the best.
        let is_best = rank(value) <= best && ranks().any(|rank| rank > best);
        let class = if is_best { " class=\"best\"" } else { "" };
        format!("<td{class}>{value:.digits$}</td>")
    }
}

/// Returns the table of means as HTML. A column without any value is left out.
pub(super) fn table(strategies: &[Strategy], runs: &[Runs]) -> String {
    let all: Vec<Metrics> = runs.iter().map(Runs::mean).collect();
    let columns = COLUMNS
        .iter()
        .filter(|column| all.iter().any(|mean| (column.value)(mean).is_some()));
    let heads: String = columns
        .clone()
        .map(|column| format!("<th>{}</th>", column.head))
        .collect();
    let mut table = format!(
        "<table><thead><tr><th>scenario</th><th>strategy</th>{heads}</tr></thead><tbody>\n"
    );
    for group in runs.chunks(strategies.len().max(1)) {
        let means: Vec<Metrics> = group.iter().map(Runs::mean).collect();
        for (row, runs) in group.iter().enumerate() {
            let name = escaped(&runs.scenario);
            let name = if row == 0 {
                format!("<a href=\"#{name}\">{name}</a>")
            } else {
                String::new()
            };
            let class = if row == 0 { " class=\"first\"" } else { "" };
            let _ = write!(
                table,
                "<tr{class}><td>{name}</td><td>{}</td>",
                escaped(&runs.strategy)
            );
            for column in columns.clone() {
                table += &column.cell(&means[row], &means);
            }
            table += "</tr>\n";
        }
    }
    table + "</tbody></table>\n"
}
