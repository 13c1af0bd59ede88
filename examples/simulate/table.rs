//! The table that is printed at the end.

use tollgate_simulate::Runs;

const HEAD: [&str; 13] = [
    "scenario",
    "strategy",
    "refused %",
    "max sleep s",
    "max wait s",
    "p99 wait s",
    "stdev",
    "Jain",
    "even Jain",
    "used %",
    "cleared s",
    "share",
    "store calls",
];

/// Returns one row for each scenario and strategy: means, and deviations of the first columns if
/// there are several seeds.
pub(crate) fn table(all: &[Runs]) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    for runs in all {
        let (mean, deviation) = (runs.mean(), runs.deviation());
        let with = |mean: f64, deviation: f64, digits: usize| {
            if runs.runs.len() > 1 {
                format!("{mean:.digits$} ± {deviation:.digits$}")
            } else {
                format!("{mean:.digits$}")
            }
        };
        let some = |value: Option<f64>, digits: usize| {
            value.map_or("–".into(), |value| format!("{value:.digits$}"))
        };
        rows.push([
            runs.scenario.clone(),
            runs.strategy.clone(),
            with(mean.retry_pct, deviation.retry_pct, 2),
            with(mean.max_sleep, deviation.max_sleep, 1),
            with(mean.max_wait, deviation.max_wait, 1),
            format!("{:.1}", mean.p99_wait),
            format!("{:.1}", mean.stdev),
            format!("{:.3}", mean.jain),
            format!("{:.3}", mean.even_jain),
            format!("{:.1}", mean.util_pct),
            some(mean.clear, 1),
            some(mean.share, 2),
            some(mean.store_calls, 2),
        ]);
    }
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; 13] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            text += &if column < 2 {
                format!("{cell:width$}   ")
            } else {
                format!("{cell:>width$}   ")
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}
