//! The report: the charts, the table, and the sentences that explain it.

use std::time::Duration;

use upstream::Rule;

use crate::MARGIN;
use crate::args::Args;
use crate::chart::Scale;
use crate::seen::Run;
use crate::sentences;
use crate::shared::Spent;

/// Returns the report on one process: without tollgate, and with it.
pub(crate) fn one(args: &Args, rules: &[Rule], runs: &[Run; 2]) -> String {
    let [without, with] = runs;
    report(args, rules, runs, sentences::one(args, rules, without, with))
}

/// Returns the report on many processes: each for itself and, if there was a Redis, with a shared count.
pub(crate) fn many(args: &Args, rules: &[Rule], runs: &[Run]) -> String {
    report(args, rules, runs, sentences::many(args, rules, runs))
}

fn report(args: &Args, rules: &[Rule], runs: &[Run], said: Vec<String>) -> String {
    let scale = Scale::new(rules, args.time, runs.iter().map(|run| &run.log));
    let mut parts = vec![scale.legend()];
    parts.extend(runs.iter().map(|run| format!("{}\n{}", run.name, scale.chart(&run.log))));
    parts.push(table(args, rules, runs).to_string());
    parts.push(said.iter().map(|sentence| format!("{sentence}\n")).collect());
    parts.join("\n")
}

fn table<'a>(args: &Args, rules: &[Rule], runs: &'a [Run]) -> Table<'a> {
    let mut table = Table { runs, rows: Vec::new() };
    table.row("calls that reached the service", |run| run.log.len().to_string());
    table.row("  answered 200", |run| run.answered().to_string());
    table.row("  refused 429", |run| run.refused().to_string());
    table.row("  refused, of all", |run| percent(run.refused_of_all()));
    for rule in rules {
        let name = format!("most calls in any {:?} (limit {})", rule.window, rule.count);
        table.row(&name, |run| run.log.largest_count(rule.window).to_string());
    }
    table.row("limit used", |run| or_dash(run.used(rules, Duration::ZERO).map(percent)));
    table.row_if(&format!("  of what a margin of {MARGIN:?} leaves"), |run| {
        run.margin.and_then(|margin| run.used(rules, margin)).map(percent)
    });
    table.row("a task waits for its 200: median", |run| or_dash(run.took(50).map(span)));
    table.row("  99 of 100 wait at most", |run| or_dash(run.took(99).map(span)));
    table.row("answers per task: fewest, most", |run| pair(run.answers_per_task(args)));
    if args.processes > 1 {
        table.row("answers per process: fewest, most", |run| pair(run.answers_per_process(args)));
    }
    table.row("unevenness (metronome 0, chance 1)", |run| format!("{:.1}", run.log.unevenness()));
    table.row("jitter of the way to the service", |run| span(run.log.jitter()));
    table.row_if("calls of Redis, per call sent", |run| {
        per_call(run, |spent| spent.calls as f64).map(|calls| format!("{calls:.2}"))
    });
    table.row_if("processor time of Redis, per call sent", |run| {
        per_call(run, |spent| spent.cpu.as_secs_f64() * 1e6).map(|micros| format!("{micros:.0} µs"))
    });
    table.row_if("refused by tollgate, never sent (max_wait)", |run| above_0(run.outcome.held_back));
    table.row_if("never sent, as the store was away", |run| above_0(run.outcome.store_away));
    table
}

/// A table with a column for each run.
struct Table<'a> {
    runs: &'a [Run],
    rows: Vec<(String, Vec<String>)>,
}

impl Table<'_> {
    fn row(&mut self, name: &str, of: impl Fn(&Run) -> String) {
        self.rows.push((name.to_owned(), self.runs.iter().map(of).collect()));
    }

    /// Adds a row if it has a value for at least one of the runs.
    fn row_if(&mut self, name: &str, of: impl Fn(&Run) -> Option<String>) {
        if self.runs.iter().any(|run| of(run).is_some()) {
            self.row(name, |run| or_dash(of(run)));
        }
    }
}

impl std::fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = self.rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let line = "─".repeat(width + self.runs.len() * COLUMN);
        let mut row = |name: &str, cells: &[String]| {
            let cells: String = cells.iter().map(|cell| format!("{cell:>COLUMN$}")).collect();
            writeln!(f, "{name:width$}{cells}")
        };
        row("", &self.runs.iter().map(|run| run.name.to_owned()).collect::<Vec<_>>())?;
        row(&line, &[])?;
        self.rows.iter().try_for_each(|(name, cells)| row(name, cells))?;
        row(&line, &[])
    }
}

/// Returns what Redis spent, per call that reached the service.
fn per_call(run: &Run, of: impl Fn(&Spent) -> f64) -> Option<f64> {
    let calls = run.log.len();
    run.spent.as_ref().filter(|_| calls > 0).map(|spent| of(spent) / calls as f64)
}

fn pair((fewest, most): (u64, u64)) -> String {
    format!("{fewest}, {most}")
}

fn above_0(count: u64) -> Option<String> {
    (count > 0).then(|| count.to_string())
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

pub(crate) fn span(span: Duration) -> String {
    if span < Duration::from_millis(100) {
        format!("{:.1} ms", span.as_secs_f64() * 1e3)
    } else {
        format!("{:.2} s", span.as_secs_f64())
    }
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}

/// The width of a column of numbers.
const COLUMN: usize = 18;
