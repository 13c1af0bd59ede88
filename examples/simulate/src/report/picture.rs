//! The charts of a scenario: one column for each strategy, all on the same scales.

use std::fmt::Write;

use super::chart::{self, Axis, Chart};
use super::steps::{STEPS, Steps};
use super::words::{counted, escaped, sentence};
use crate::drive::trace;
use crate::error::RunError;
use crate::scenario::Scenario;
use crate::strategy::Strategy;
use crate::sweep::Runs;

/// Returns the charts of a scenario, as HTML.
pub(super) fn charts(
    scenario_name: &str,
    scenario: &Scenario,
    strategies: &[Strategy],
    runs: &[Runs],
    seed: u64,
) -> Result<String, RunError> {
    let mut html = String::new();
    for StrategyColumn {
        name,
        headline,
        charts,
    } in columns(scenario, strategies, runs, seed)?
    {
        let _ = write!(html, "<section><h2>{name}</h2><p>{headline}</p>");
        for (what, chart) in ["held", "left", "sent", "clients"].into_iter().zip(&charts) {
            let of = escaped(scenario_name);
            let _ = write!(
                html,
                "<figure data-name=\"{of} {name} {what}\">{}</figure>",
                chart.svg()
            );
        }
        html += "</section>\n";
    }
    Ok(html)
}

/// Draws one scenario as SVG, with one column for each strategy.
///
/// A column shows how long requests waited, what was left on the server, and the requests of each
/// client, in the run of `seed`. `runs` are those that [`sweep`](crate::sweep) returned for
/// this scenario.
///
/// # Errors
///
/// As [`run`](crate::run).
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
        escaped(&format!(
            "{name}: one run, and means of {}",
            counted(seeds, "seed")
        ))
    );
    for (index, column) in columns.iter().enumerate() {
        let StrategyColumn {
            name,
            headline,
            charts: [held, left, _, each],
        } = column;
        let x = MARGIN + wide * index as f64;
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

/// The column of a strategy. Its texts are escaped.
struct StrategyColumn {
    name: String,
    headline: String,
    /// The waits, what was left, the requests over time, and the requests of each caller.
    charts: [Chart; 4],
}

/// Runs each strategy once, and draws the runs on the same scales.
fn columns(
    scenario: &Scenario,
    strategies: &[Strategy],
    runs: &[Runs],
    seed: u64,
) -> Result<Vec<StrategyColumn>, RunError> {
    let callers = scenario
        .fleet
        .iter()
        .map(|group| group.procs * group.tasks)
        .sum();
    let traces = strategies
        .iter()
        .map(|strategy| trace(scenario, strategy, seed))
        .collect::<Result<Vec<_>, _>>()?;
    // If all callers stop in every run, the charts end when the last one has.
    let cleared = traces
        .iter()
        .map(|(metrics, _)| metrics.clear)
        .collect::<Option<Vec<f64>>>();
    let end = cleared.map_or(scenario.duration, |clear| {
        clear.into_iter().fold(1.0, f64::max)
    });
    let all: Vec<Steps> = traces
        .iter()
        .map(|(_, trace)| Steps::of(trace, end, callers))
        .collect();
    let scales = Scales::of(&all, end);
    let columns = strategies
        .iter()
        .zip(&all)
        .zip(runs)
        .map(|((strategy, steps), runs)| {
            let mean = runs.mean();
            let headline = format!(
                "{:.2} % refused, longest wait {:.1} s",
                mean.retry_pct, mean.max_wait
            );
            StrategyColumn {
                name: escaped(strategy.name()),
                headline,
                charts: scales.charts(steps),
            }
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
            each: axis(|steps| {
                highest(
                    steps
                        .callers
                        .iter()
                        .map(|(accepted, refused)| accepted + refused),
                )
            }),
        }
    }

    /// Draws one run: the waits, what was left, the requests over time, and the requests of each
    /// caller.
    fn charts(&self, steps: &Steps) -> [Chart; 4] {
        let waits = "Held back before a request, the longest of each moment";
        let sent = format!(
            "Requests sent in each {:.0} s, refused in red",
            steps.width.max(1.0)
        );
        let each = "Requests of each client, refused in red; dashed: an equal share";
        let none = vec![0.0; STEPS];
        let [accepted, refused] = [
            steps.stacked(&none, &steps.accepted),
            steps.stacked(&steps.accepted, &steps.refused),
        ];
        let clients = Axis::clients(steps.callers.len());
        [
            Chart::new(waits, "seconds", self.time.clone(), self.held.clone())
                .area(&steps.held, PALE)
                .line(&steps.held, BLUE),
            Chart::new(
                "Left on the server",
                "requests",
                self.time.clone(),
                self.left.clone(),
            )
            .line(&steps.left, BLUE),
            Chart::new(sent, "requests", self.time.clone(), self.sent.clone())
                .bars(&accepted, steps.width, GREY)
                .bars(&refused, steps.width, RED),
            Chart::new(each, "requests", clients, self.each.clone())
                .bars(&steps.of_callers(|_| 0.0, |counts| counts.0), 1.0, GREY)
                .bars(
                    &steps.of_callers(|counts| counts.0, |counts| counts.0 + counts.1),
                    1.0,
                    RED,
                )
                .level(steps.equal_share()),
        ]
    }
}

/// Returns the highest of several numbers, and 0 if there are none.
fn highest(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, f64::max)
}

const BLUE: &str = "#1f5fa8";
const PALE: &str = "#cfe0f3";
const GREY: &str = "#a9b4c0";
const RED: &str = "#c62f2f";

/// The style of the charts, for a page and for a single picture.
pub(super) const CHART_STYLE: &str = "text { font: 10px system-ui, sans-serif; fill: #3a4651 } .title { font-size: 11px; \
    font-weight: 600 } .unit { fill: #6a7681 } \
    .grid { stroke: #e6eaee } .axis { stroke: #6a7681 }";
