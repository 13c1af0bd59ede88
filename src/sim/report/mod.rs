//! A report on runs: one file of HTML without external resources.

mod chart;

use std::fmt::Write;

use chart::{Axis, Chart};

use crate::sim::drive::trace;
use crate::sim::error::RunError;
use crate::sim::metrics::Metrics;
use crate::sim::scenario::{Scenario, Server, StoreModel};
use crate::sim::strategy::Strategy;
use crate::sim::sweep::Runs;
use crate::sim::trace::Trace;

/// Returns a report on `runs`, which [`sweep`](super::sweep) returned for `scenarios` and `strategies`.
///
/// The report has a table of means, and charts of the run of `seed` for each scenario. The charts of all strategies have
/// the same scales.
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
    let mut page =
        format!("{HEAD}</style>\n<style id=\"of-charts\">{CHART_STYLE}</style></head><body><main>\n");
    let seeds = runs.first().map_or(0, |runs| runs.runs.len());
    let _ = write!(
        page,
        "<h1>How clients share a limit</h1>\n<p>{}, {}, {} each. {}The best of a scenario is green. A sleep is the time before \
         one request, a wait that of a whole call. The charts show one run, of seed {seed}.</p>\n",
        counted(scenarios.len(), "scenario"),
        strategies.iter().map(Strategy::name).map(escaped).collect::<Vec<_>>().join(", "),
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
    let _ = write!(page, "</main>\n<script>\n{}</script></body></html>\n", include_str!("page.js"));
    Ok(page)
}

/// Returns in how many scenarios the first strategy does better than each of the others.
fn summary(strategies: &[Strategy], runs: &[Runs]) -> String {
    let Some((first, others)) = strategies.split_first() else { return String::new() };
    let mut text = String::new();
    for (index, other) in others.iter().enumerate() {
        let wins = |of: fn(&Metrics) -> f64| {
            let pairs = runs.chunks(strategies.len());
            pairs.filter(|runs| of(&runs[0].mean()) < of(&runs[index + 1].mean())).count()
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

/// A column of the table.
struct Column {
    head: &'static str,
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

const fn column(head: &'static str, value: fn(&Metrics) -> Option<f64>, digits: usize, best: Best) -> Column {
    Column { head, value, digits, best }
}

const COLUMNS: [Column; 9] = [
    column("refused, %", |mean| Some(mean.retry_pct), 2, Best::Lowest),
    column("longest sleep, s", |mean| Some(mean.max_sleep), 1, Best::Lowest),
    column("longest wait, s", |mean| Some(mean.max_wait), 1, Best::Lowest),
    column("p99 wait, s", |mean| Some(mean.p99_wait), 1, Best::Lowest),
    column("stdev, requests", |mean| Some(mean.stdev), 1, Best::Lowest),
    column("Jain index", |mean| Some(mean.jain), 3, Best::Highest),
    column("used, %", |mean| Some(mean.util_pct), 1, Best::Highest),
    column("cleared, s", |mean| mean.clear, 1, Best::Lowest),
    column("store calls / request", |mean| mean.store_calls, 2, Best::Lowest),
];

impl Column {
    /// Returns the table cell of a strategy with these means, among the means of all strategies.
    fn cell(&self, mean: &Metrics, all: &[Metrics]) -> String {
        let digits = self.digits;
        let Some(value) = (self.value)(mean) else { return "<td></td>".into() };
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

/// Returns the table of means.
fn table(strategies: &[Strategy], runs: &[Runs]) -> String {
    // A column without any value is not shown.
    let all: Vec<Metrics> = runs.iter().map(Runs::mean).collect();
    let columns = COLUMNS.iter().filter(|column| all.iter().any(|mean| (column.value)(mean).is_some()));
    let heads: String = columns.clone().map(|column| format!("<th>{}</th>", column.head)).collect();
    let mut table =
        format!("<table><thead><tr><th>scenario</th><th>strategy</th>{heads}</tr></thead><tbody>\n");
    for group in runs.chunks(strategies.len().max(1)) {
        let means: Vec<Metrics> = group.iter().map(Runs::mean).collect();
        for (row, runs) in group.iter().enumerate() {
            let name = escaped(&runs.scenario);
            let name = if row == 0 { format!("<a href=\"#{name}\">{name}</a>") } else { String::new() };
            let class = if row == 0 { " class=\"first\"" } else { "" };
            let _ = write!(table, "<tr{class}><td>{name}</td><td>{}</td>", escaped(&runs.strategy));
            for column in columns.clone() {
                table += &column.cell(&means[row], &means);
            }
            table += "</tr>\n";
        }
    }
    table + "</tbody></table>\n"
}

/// Returns a one-line description of a scenario.
fn sentence(scenario: &Scenario) -> String {
    let callers: usize = scenario.fleet.iter().map(|group| group.procs * group.tasks).sum();
    let processes: usize = scenario.fleet.iter().map(|group| group.procs).sum();
    let server = match &scenario.server {
        Server::Bucket { cap, refill, start, .. } => {
            let refill = (refill * 1e3).round() / 1e3;
            format!("a bucket of {cap}, {start} at the start, refilled by {refill} per second")
        }
        Server::Fixed { limit, window, .. } => format!("{limit} in each window of {window} s"),
        Server::Sliding { limit, window, .. } => format!("{limit} in any {window} s"),
        Server::Dual { .. } => "two limits at once".into(),
    };
    let lie = scenario.headers.lie.map_or(String::new(), |lie| format!(", and headers that are {lie:?}"));
    let strangers: f64 = scenario.background.iter().map(|strangers| strangers.rate).sum();
    let beside =
        if strangers > 0.0 { format!(", strangers at {strangers} per second") } else { String::new() };
    let store = store_faults(&scenario.store);
    let callers = counted(callers, "caller");
    let many = if processes == 1 { "one process".into() } else { format!("{processes} processes") };
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
        let _ = write!(text, ", {} % of its answers lost", (store.lose * 1e4).round() / 1e2);
    }
    text
}

/// The steps of time of a chart.
const STEPS: usize = 200;

/// The events of one run, for each step of time.
struct Steps {
    /// The length of a step, in seconds.
    width: f64,
    /// The longest wait of the requests that left, at the middle of the step.
    held: Vec<(f64, f64)>,
    /// What was left on the server, at the middle of the step.
    left: Vec<(f64, f64)>,
    accepted: Vec<f64>,
    refused: Vec<f64>,
    /// The accepted and the refused requests of each caller.
    callers: Vec<(f64, f64)>,
}

impl Steps {
    fn of(trace: &Trace, end: f64, callers: usize) -> Self {
        let width = end / STEPS as f64;
        let step = |at: f64| ((at / width) as usize).min(STEPS - 1);
        let middle = |index: usize| (index as f64 + 0.5) * width;
        let mut longest = vec![None::<f64>; STEPS];
        for (at, _, held) in &trace.held {
            let longest = &mut longest[step(*at)];
            *longest = Some(longest.map_or(*held, |longest| longest.max(*held)));
        }
        let mut left = vec![None; STEPS];
        let (mut accepted, mut refused) = (vec![0.0; STEPS], vec![0.0; STEPS]);
        let mut each = vec![(0.0, 0.0); callers];
        for (at, caller, ok, remaining) in &trace.judged {
            left[step(*at)] = Some(*remaining);
            let (of_time, of_caller) = match ok {
                true => (&mut accepted, &mut each[*caller].0),
                false => (&mut refused, &mut each[*caller].1),
            };
            of_time[step(*at)] += 1.0;
            *of_caller += 1.0;
        }
        let known = |values: Vec<Option<f64>>| {
            let values = values.into_iter().enumerate();
            values.filter_map(|(index, value)| Some((middle(index), value?))).collect()
        };
        Steps { width, held: known(longest), left: known(left), accepted, refused, callers: each }
    }

    /// Returns a bar for each step of time, from `low` up by `high`.
    fn stacked(&self, low: &[f64], high: &[f64]) -> Vec<(f64, f64, f64)> {
        let both = low.iter().zip(high).enumerate();
        both.map(|(index, (low, high))| (index as f64 * self.width, *low, low + high)).collect()
    }

    /// Returns a bar for each caller.
    fn of_callers(&self, from: fn(&(f64, f64)) -> f64, to: fn(&(f64, f64)) -> f64) -> Vec<(f64, f64, f64)> {
        let callers = self.callers.iter().enumerate();
        callers.map(|(index, counts)| (index as f64, from(counts), to(counts))).collect()
    }

    /// Returns how many accepted requests each caller has if all have the same number.
    fn equal_share(&self) -> f64 {
        self.callers.iter().map(|(accepted, _)| accepted).sum::<f64>() / self.callers.len().max(1) as f64
    }
}

/// Returns the charts of a scenario, as HTML.
fn charts(
    scenario_name: &str,
    scenario: &Scenario,
    strategies: &[Strategy],
    runs: &[Runs],
    seed: u64,
) -> Result<String, RunError> {
    let mut html = String::new();
    for (name, headline, charts) in columns(scenario, strategies, runs, seed)? {
        let _ = write!(html, "<section><h2>{name}</h2><p>{headline}</p>");
        for (what, chart) in ["held", "left", "sent", "clients"].into_iter().zip(&charts) {
            let of = escaped(scenario_name);
            let _ = write!(html, "<figure data-name=\"{of} {name} {what}\">{}</figure>", chart.svg());
        }
        html += "</section>\n";
    }
    Ok(html)
}

/// Draws one scenario as SVG, with one column for each strategy.
///
/// A column shows how long requests waited, what was left on the server, and the requests of each client, in the run of
/// `seed`. `runs` are those that [`sweep`](super::sweep) returned for this scenario.
///
/// # Errors
///
/// As [`run`](super::run).
pub fn picture(
    name: &str,
    scenario: &Scenario,
    strategies: &[Strategy],
    runs: &[Runs],
    seed: u64,
) -> Result<String, RunError> {
    const MARGIN: f64 = 16.0;
    const HEAD: f64 = 48.0;
    const COLUMN_HEAD: f64 = 40.0;
    let columns = columns(scenario, strategies, runs, seed)?;
    let seeds = runs.first().map_or(0, |runs| runs.runs.len());
    let (wide, high) = (chart::WIDTH + MARGIN, chart::HEIGHT + MARGIN);
    let width = MARGIN + wide * columns.len() as f64;
    let height = HEAD + COLUMN_HEAD + 3.0 * high;
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"><title>{0}</title><style>{CHART_STYLE} .head {{ font: 600 15px system-ui, sans-serif }} .column {{ font: 600 13px system-ui, sans-serif }} .about {{ font: 11.5px system-ui, sans-serif }}</style><rect width="100%" height="100%" fill="#fff"/><text x="{MARGIN}" y="24" class="head">{0}</text><text x="{MARGIN}" y="41" class="about">{1}</text>"##,
        escaped(&sentence(scenario)),
        escaped(&format!("{name}: one run, and means of {}", counted(seeds, "seed")))
    );
    for (column, (name, headline, [held, left, _, each])) in columns.iter().enumerate() {
        let x = MARGIN + wide * column as f64;
        let _ = write!(
            svg,
            r#"<text x="{x}" y="{}" class="column">{name}</text><text x="{x}" y="{}" class="about">{headline}</text>"#,
            HEAD + 18.0,
            HEAD + 34.0
        );
        for (row, chart) in [held, left, each].into_iter().enumerate() {
            let y = HEAD + COLUMN_HEAD + MARGIN / 2.0 + high * row as f64;
            svg += &chart.svg_at(x, y);
        }
    }
    Ok(svg + "</svg>\n")
}

/// The column of a strategy: its name, its headline and its charts.
type StrategyColumn = (String, String, [Chart; 4]);

/// Runs each strategy once, and draws the runs on the same scales.
fn columns(
    scenario: &Scenario,
    strategies: &[Strategy],
    runs: &[Runs],
    seed: u64,
) -> Result<Vec<StrategyColumn>, RunError> {
    let callers = scenario.fleet.iter().map(|group| group.procs * group.tasks).sum();
    let traces = strategies.iter().map(|strategy| trace(scenario, strategy, seed));
    let traces = traces.collect::<Result<Vec<_>, _>>()?;
    // If all callers stop in every run, the charts end when the last one has.
    let cleared = traces.iter().map(|(metrics, _)| metrics.clear).collect::<Option<Vec<f64>>>();
    let end = cleared.map_or(scenario.duration, |clear| clear.into_iter().fold(1.0, f64::max));
    let all: Vec<Steps> = traces.iter().map(|(_, trace)| Steps::of(trace, end, callers)).collect();
    let scales = Scales::of(&all, end);
    let columns = strategies.iter().zip(&all).zip(runs).map(|((strategy, steps), runs)| {
        let mean = runs.mean();
        let headline = format!("{:.2} % refused, longest wait {:.1} s", mean.retry_pct, mean.max_wait);
        (escaped(strategy.name()), headline, scales.charts(steps))
    });
    Ok(columns.collect())
}

/// The axes that the charts of several runs have in common.
struct Scales {
    time: Axis,
    held: Axis,
    left: Axis,
    sent: Axis,
    each: Axis,
}

impl Scales {
    /// Returns axes that have room for every run.
    fn of(all: &[Steps], end: f64) -> Self {
        let axis = |of: fn(&Steps) -> f64| Axis::up_to(all.iter().map(of).fold(1.0, f64::max));
        Scales {
            time: Axis::time(end),
            held: axis(|steps| highest(steps.held.iter().map(|point| point.1))),
            left: axis(|steps| highest(steps.left.iter().map(|point| point.1))),
            sent: axis(|steps| {
                let both = steps.accepted.iter().zip(&steps.refused);
                highest(both.map(|(accepted, refused)| accepted + refused))
            }),
            each: axis(|steps| highest(steps.callers.iter().map(|(accepted, refused)| accepted + refused))),
        }
    }

    /// Draws one run: the waits, what was left, the requests over time, and the requests of each caller.
    fn charts(&self, steps: &Steps) -> [Chart; 4] {
        let waits = "Held back before a request, the longest of each moment";
        let sent = format!("Requests sent in each {:.0} s, refused in red", steps.width.max(1.0));
        let each = "Requests of each client, refused in red; dashed: an equal share";
        let none = vec![0.0; STEPS];
        let [accepted, refused] =
            [steps.stacked(&none, &steps.accepted), steps.stacked(&steps.accepted, &steps.refused)];
        let clients = Axis::clients(steps.callers.len());
        [
            Chart::new(waits, "seconds", self.time.clone(), self.held.clone())
                .area(&steps.held, PALE)
                .line(&steps.held, BLUE),
            Chart::new("Left on the server", "requests", self.time.clone(), self.left.clone())
                .line(&steps.left, BLUE),
            Chart::new(sent, "requests", self.time.clone(), self.sent.clone())
                .bars(&accepted, steps.width, GREY)
                .bars(&refused, steps.width, RED),
            Chart::new(each, "requests", clients, self.each.clone())
                .bars(&steps.of_callers(|_| 0.0, |counts| counts.0), 1.0, GREY)
                .bars(&steps.of_callers(|counts| counts.0, |counts| counts.0 + counts.1), 1.0, RED)
                .level(steps.equal_share()),
        ]
    }
}

/// Returns the highest of several numbers, and 0 if there are none.
fn highest(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, f64::max)
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const BLUE: &str = "#1f5fa8";
const PALE: &str = "#cfe0f3";
const GREY: &str = "#a9b4c0";
const RED: &str = "#c62f2f";

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

/// The style of the charts, for a page and for a single picture.
const CHART_STYLE: &str = "text { font: 10px system-ui, sans-serif; fill: #3a4651 } .title { font-size: 11px; \
    font-weight: 600 } .unit { fill: #6a7681 } \
    .grid { stroke: #e6eaee } .axis { stroke: #6a7681 }";
