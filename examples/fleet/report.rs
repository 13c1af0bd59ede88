//! The report: the charts, the table, and sentences that explain the table, whether or not its
//! numbers are favourable.

use std::time::Duration;

use upstream::Rule;

use crate::args::Args;
use crate::callers::MAX_CALLS;
use crate::chart::Scale;
use crate::run::Run;
use crate::shared_redis::Spent;
use crate::{MARGIN, TRANSIT_SLACK};

/// Returns the report on one process: without tollgate, and with it.
pub(crate) fn one(args: &Args, rules: &[Rule], runs: &[Run; 2]) -> String {
    let [without, with] = runs;
    report(
        args,
        rules,
        runs,
        sentences_on_one(args, rules, without, with),
    )
}

/// Returns the report on many processes: each for itself and, if there was a Redis, with a shared
/// count.
pub(crate) fn many(args: &Args, rules: &[Rule], runs: &[Run]) -> String {
    report(args, rules, runs, sentences_on_many(args, rules, runs))
}

fn report(args: &Args, rules: &[Rule], runs: &[Run], sentences: Vec<String>) -> String {
    let scale = Scale::new(rules, args.time, runs.iter().map(|run| &run.log));
    let mut parts = vec![scale.legend()];
    parts.extend(
        runs.iter()
            .map(|run| format!("{}\n{}", run.name, scale.chart(&run.log))),
    );
    parts.push(table(args, rules, runs).to_string());
    parts.push(
        sentences
            .iter()
            .map(|sentence| format!("{sentence}\n"))
            .collect(),
    );
    parts.join("\n")
}

fn table<'a>(args: &Args, rules: &[Rule], runs: &'a [Run]) -> Table<'a> {
    let mut table = Table {
        runs,
        rows: Vec::new(),
    };
    table.row("calls that reached the service", |run| {
        run.log.len().to_string()
    });
    table.row("  answered 200", |run| run.answered().to_string());
    table.row("  refused 429", |run| run.refused().to_string());
    table.row("  refused, of all", |run| percent(run.refused_of_all()));
    for rule in rules {
        let name = format!("most calls in any {:?} (limit {})", rule.window, rule.count);
        table.row(&name, |run| run.log.largest_count(rule.window).to_string());
    }
    table.row("limit used", |run| {
        or_dash(run.used(rules, Duration::ZERO).map(percent))
    });
    table.row_if(&format!("  of what a margin of {MARGIN:?} leaves"), |run| {
        run.margin
            .and_then(|margin| run.used(rules, margin))
            .map(percent)
    });
    table.row("a task waits for its 200: median", |run| {
        or_dash(run.took(50).map(span))
    });
    table.row("  99 of 100 wait at most", |run| {
        or_dash(run.took(99).map(span))
    });
    table.row("answers per task: fewest, most", |run| {
        pair(run.answers_per_task(args))
    });
    if args.processes > 1 {
        table.row("answers per process: fewest, most", |run| {
            pair(run.answers_per_process(args))
        });
    }
    table.row("unevenness (metronome 0, chance 1)", |run| {
        format!("{:.1}", run.log.unevenness())
    });
    table.row("jitter of the way to the service", |run| {
        span(run.log.jitter())
    });
    table.row_if("calls of Redis, per call sent", |run| {
        per_call(run, |spent| spent.calls as f64).map(|calls| format!("{calls:.2}"))
    });
    table.row_if("processor time of Redis, per call sent", |run| {
        per_call(run, |spent| spent.cpu.as_secs_f64() * 1e6).map(|micros| format!("{micros:.0} µs"))
    });
    table.row_if("refused by tollgate, never sent (max_wait)", |run| {
        above_0(run.outcome.refused_locally)
    });
    table.row_if("never sent, as the store was away", |run| {
        above_0(run.outcome.store_failures)
    });
    table
}

/// Returns the sentences on runs of one process.
fn sentences_on_one(args: &Args, rules: &[Rule], without: &Run, with: &Run) -> Vec<String> {
    let mut sentences = Vec::new();
    let unbounded =
        "Without tollgate the tasks stayed within the limit by themselves: give them more to do.";
    sentences
        .push(went_over("Without tollgate", rules, without).unwrap_or_else(|| unbounded.into()));
    if without.log.len() >= MAX_CALLS {
        sentences.push(format!("That run was stopped after {MAX_CALLS} calls."));
    }
    let kept = format!(
        "the same tasks got {} answers ({} without)",
        with.answered(),
        without.answered()
    );
    sentences.push(kept_or_not("With it", &kept, rules, with));
    let (unlucky, lucky) = without.answers_per_task(args);
    let (fewest, most) = with.answers_per_task(args);
    if lucky - unlucky > 2 * (most - fewest) {
        sentences.push(format!(
            "Without it the lucky are served ({unlucky} to {lucky} answers per task), with it all in turn ({fewest} to \
             {most}).",
        ));
    }
    sentences.extend(uneven(args, with));
    sentences
}

/// Returns the sentences on runs of many processes: each for itself and, if there was a Redis, with
/// a shared count.
fn sentences_on_many(args: &Args, rules: &[Rule], runs: &[Run]) -> Vec<String> {
    let mut sentences = Vec::new();
    if let Some(own) = runs.first() {
        let kept = format!("the processes got {} answers", own.answered());
        let over = went_over("Each for itself", rules, own);
        sentences.push(over.unwrap_or_else(|| kept_or_not("Each for itself", &kept, rules, own)));
    }
    match runs.get(1) {
        Some(shared) if shared.log.is_empty() => {
            sentences.push("With a common count in Redis nothing was sent.".into());
        }
        Some(shared) => {
            let kept = format!("the same processes got {} answers", shared.answered());
            sentences.push(kept_or_not(
                "With a common count in Redis",
                &kept,
                rules,
                shared,
            ));
            sentences.extend(uneven(args, shared));
        }
        None => sentences.push("With --redis they share a count.".into()),
    }
    sentences.extend(runs.iter().filter_map(|run| {
        Some(format!(
            "The store said: {}.",
            run.outcome.store_error.as_ref()?
        ))
    }));
    sentences
}

/// Describes the refusals of a run that exceeded the limit.
fn went_over(how: &str, rules: &[Rule], run: &Run) -> Option<String> {
    let (Rule { count, window, .. }, most) = run.furthest_over(rules)?;
    Some(format!(
        "{how}, {} of all calls were refused, and up to {most} came within {window:?}, where {count} are allowed.",
        percent(run.refused_of_all()),
    ))
}

/// Describes whether the limit was kept; the sentence includes `kept` if it was.
fn kept_or_not(how: &str, kept: &str, rules: &[Rule], run: &Run) -> String {
    let broken = rules
        .iter()
        .find_map(|rule| run.log.over(*rule, TRANSIT_SLACK));
    match (run.refused(), broken) {
        (0, None) => format!("{how}, {kept}, and not one call was too many."),
        (refused, None) => format!(
            "{how}, {refused} of {} calls were still refused: the way to the service took up to {} longer for one call \
             than for another, and transit_slack covers {TRANSIT_SLACK:?}.",
            run.log.len(),
            span(run.log.jitter()),
        ),
        (_, Some(broken)) => format!(
            "{how}, the limit was broken: {broken}. If this machine did not pause, that is a bug of tollgate."
        ),
    }
}

/// Suggests `--burst`, if the calls came in bursts.
fn uneven(args: &Args, run: &Run) -> Option<String> {
    (args.burst.is_none() && run.log.unevenness() > 2.0).then(|| {
        format!(
            "What {} allows at once goes at once; --burst <n> spreads it.",
            args.limit
        )
    })
}

/// A table with a column for each run.
struct Table<'a> {
    runs: &'a [Run],
    rows: Vec<(String, Vec<String>)>,
}

impl Table<'_> {
    /// Adds a row.
    fn row(&mut self, name: &str, of: impl Fn(&Run) -> String) {
        self.rows
            .push((name.to_owned(), self.runs.iter().map(of).collect()));
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
        let width = self
            .rows
            .iter()
            .map(|(name, _)| name.len())
            .max()
            .unwrap_or(0);
        let line = "─".repeat(width + self.runs.len() * COLUMN);
        let mut row = |name: &str, cells: &[String]| {
            let cells: String = cells
                .iter()
                .map(|cell| format!("{cell:>COLUMN$}"))
                .collect();
            writeln!(f, "{name:width$}{cells}")
        };
        row(
            "",
            &self
                .runs
                .iter()
                .map(|run| run.name.to_owned())
                .collect::<Vec<_>>(),
        )?;
        row(&line, &[])?;
        self.rows
            .iter()
            .try_for_each(|(name, cells)| row(name, cells))?;
        row(&line, &[])
    }
}

/// Returns what Redis spent, per call that reached the service.
fn per_call(run: &Run, of: impl Fn(&Spent) -> f64) -> Option<f64> {
    let calls = run.log.len();
    run.spent
        .as_ref()
        .filter(|_| calls > 0)
        .map(|spent| of(spent) / calls as f64)
}

fn pair((fewest, most): (u64, u64)) -> String {
    format!("{fewest}, {most}")
}

fn above_0(count: u64) -> Option<String> {
    (count > 0).then(|| count.to_string())
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn span(span: Duration) -> String {
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
