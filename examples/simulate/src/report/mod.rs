//! A report on runs: one file of HTML without external resources.

mod chart;
mod picture;
mod steps;
mod table;
mod words;

use std::fmt::Write;

use picture::{CHART_STYLE, charts};
use table::table;
use words::{counted, escaped, sentence};

use super::error::RunError;
use super::metrics::Metrics;
use super::scenario::Scenario;
use super::strategy::Strategy;
use super::sweep::Runs;

pub use picture::picture;

/// Returns a report on `runs`, which [`sweep`](super::sweep) returned for `scenarios` and
/// `strategies`.
///
/// The report has a table of means, and charts of the run of `seed` for each scenario. The charts
/// of all strategies have the same scales.
///
/// # Errors
///
/// As [`run`](super::run).
pub fn report(
    scenarios: &[(String, Scenario)],
    strategies: &[Strategy],
    runs: &[Runs],
    seed: u64,
) -> Result<String, RunError> {
    let mut page = format!(
        "{HEAD}</style>\n<style id=\"of-charts\">{CHART_STYLE}</style></head><body><main>\n"
    );
    let seeds = runs.first().map_or(0, |runs| runs.runs.len());
    let _ = write!(
        page,
        "<h1>How clients share a limit</h1>\n<p>{}, {}, {} each. {}The best of a scenario is green. A sleep is the time before \
         one request, a wait that of a whole call. The charts show one run, of seed {seed}.</p>\n",
        counted(scenarios.len(), "scenario"),
        strategies
            .iter()
            .map(Strategy::name)
            .map(escaped)
            .collect::<Vec<_>>()
            .join(", "),
        counted(seeds, "seed"),
        summary(strategies, runs)
    );
    page += &table(strategies, runs);
    for (index, (name, scenario)) in scenarios.iter().enumerate() {
        let runs = &runs[index * strategies.len()..][..strategies.len()];
        let open = if index == 0 { " open" } else { "" };
        let _ = write!(
            page,
            "<details{open}><summary><b>{0}</b> {1}</summary>\n<div class=\"row\" id=\"{0}\">\n",
            escaped(name),
            escaped(&sentence(scenario))
        );
        page += &charts(name, scenario, strategies, runs, seed)?;
        page += "</div></details>\n";
    }
    let _ = write!(
        page,
        "</main>\n<script>\n{}</script></body></html>\n",
        include_str!("page.js")
    );
    Ok(page)
}

/// Returns in how many scenarios the first strategy does better than each of the others.
fn summary(strategies: &[Strategy], runs: &[Runs]) -> String {
    let Some((first, others)) = strategies.split_first() else {
        return String::new();
    };
    let mut text = String::new();
    for (index, other) in others.iter().enumerate() {
        let wins = |of: fn(&Metrics) -> f64| {
            let pairs = runs.chunks(strategies.len());
            pairs
                .filter(|runs| of(&runs[0].mean()) < of(&runs[index + 1].mean()))
                .count()
        };
        let _ = write!(
            text,
            "Against <b>{}</b>, <b>{}</b> is refused less often in {}, waits less at longest in {}, and is more even in \
             {} of them. ",
            escaped(other.name()),
            escaped(first.name()),
            wins(|mean| mean.retry_pct),
            wins(|mean| mean.max_wait),
            wins(|mean| -mean.jain)
        );
    }
    text
}

/// The head of the page, up to its style.
const HEAD: &str = r#"<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>How clients share a limit</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 0 }
main { max-width: 1480px; margin: 0 auto; padding: 24px }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 17px; margin: 0 }
section p { margin: 0 0 6px; color: #55606c }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 16px 0 28px }
th, td { padding: 3px 10px; text-align: right; white-space: nowrap } th { border-bottom: 2px solid #1c2733 }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left } tr.first td { border-top: 1px solid #d9dfe5 }
td.best { font-weight: 600; color: #17692f } a { color: inherit }
details { border-top: 1px solid #d9dfe5; padding: 10px 0 } summary { cursor: pointer }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 22px; padding: 12px 0;
  scroll-margin-top: 40px }
figure { position: relative; max-width: 640px; margin: 0 0 8px } figure svg { width: 100%; display: block }
figure button { position: absolute; bottom: 2px; right: 2px; font: 10px system-ui, sans-serif; color: #55606c;
  background: #fff; border: 1px solid #d9dfe5; border-radius: 3px; padding: 1px 5px; cursor: pointer }
@media print { figure button { display: none } }
"#;
