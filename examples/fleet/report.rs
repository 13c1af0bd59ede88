//! What came of it: the charts, the table, and what one sees there.

use std::time::Duration;

use upstream::{Log, Rule};

use crate::args::Args;
use crate::chart::Scale;
use crate::run::{MOST_CALLS, Outcome};
use crate::{MARGIN, TRANSIT_SLACK};

/// A run that is over.
pub(crate) struct Run {
    outcome: Outcome,
    log: Log,
}

impl Run {
    /// What the tasks saw, and what the service saw.
    pub(crate) fn new(outcome: Outcome, log: Log) -> Run {
        Run { outcome, log }
    }

    fn answered(&self) -> usize {
        self.log.iter().filter(|arrival| arrival.accepted).count()
    }

    fn refused(&self) -> usize {
        self.log.len() - self.answered()
    }

    fn refused_of_all(&self) -> f64 {
        self.refused() as f64 / self.log.len().max(1) as f64
    }

    /// Which share of the tightest rule was used, if each were longer by `margin`.
    fn used(&self, rules: &[Rule], margin: Duration) -> Option<f64> {
        let longer = |rule: &Rule| Rule::new(rule.count, rule.window + margin);
        rules.iter().filter_map(|rule| self.log.used(longer(rule))).max_by(f64::total_cmp)
    }

    /// What `percent` of the answers took at most.
    fn took(&self, percent: usize) -> Option<Duration> {
        let took = &self.outcome.took;
        took.get((took.len() * percent).div_ceil(100).checked_sub(1)?).copied()
    }

    /// The fewest and the most answers that a task got.
    fn answers_per_task(&self, tasks: u32) -> (u64, u64) {
        let callers = self.log.by_who();
        let answers = || callers.values().map(|tally| tally.accepted);
        let fewest = if callers.len() < tasks as usize { 0 } else { answers().min().unwrap_or(0) };
        (fewest, answers().max().unwrap_or(0))
    }

    /// The rule that most calls were above, and how many calls came in its window.
    fn furthest_over(&self, rules: &[Rule]) -> Option<(Rule, usize)> {
        let counts = rules.iter().map(|rule| (*rule, self.log.largest_count(rule.window)));
        counts
            .filter(|(rule, count)| *count > rule.count as usize)
            .max_by_key(|(rule, count)| count - rule.count as usize)
    }
}

/// The whole report.
pub(crate) fn compare(args: &Args, rules: &[Rule], without: &Run, with: &Run) -> String {
    let scale = Scale::new(rules, args.time, [&without.log, &with.log]);
    [
        scale.legend(),
        format!("without tollgate\n{}", scale.chart(&without.log)),
        format!("with tollgate\n{}", scale.chart(&with.log)),
        table(args, rules, without, with),
        sentences(args, rules, without, with),
    ]
    .join("\n")
}

fn table(args: &Args, rules: &[Rule], without: &Run, with: &Run) -> String {
    type Of<'a> = &'a dyn Fn(&Run) -> String;
    let both = |name: &str, of: Of<'_>| [name.to_owned(), of(without), of(with)];

    let mut rows = vec![
        both("calls that reached the service", &|run| run.log.len().to_string()),
        both("  answered 200", &|run| run.answered().to_string()),
        both("  refused 429", &|run| run.refused().to_string()),
        both("  refused, of all", &|run| percent(run.refused_of_all())),
    ];
    rows.extend(rules.iter().map(|rule| {
        let name = format!("most calls in any {:?} (limit {})", rule.window, rule.count);
        both(&name, &|run| run.log.largest_count(rule.window).to_string())
    }));
    rows.extend([
        both("limit used", &|run| or_dash(run.used(rules, Duration::ZERO).map(percent))),
        [
            format!("  of what a margin of {MARGIN:?} leaves"),
            "-".into(),
            or_dash(with.used(rules, MARGIN).map(percent)),
        ],
        both("a task waits for its 200: median", &|run| or_dash(run.took(50).map(span))),
        both("  99 of 100 wait at most", &|run| or_dash(run.took(99).map(span))),
        both("answers per task: fewest, most", &|run| {
            let (fewest, most) = run.answers_per_task(args.tasks);
            format!("{fewest}, {most}")
        }),
        both("unevenness (metronome 0, chance 1)", &|run| format!("{:.1}", run.log.unevenness())),
        both("jitter of the way to the service", &|run| span(run.log.jitter())),
    ]);
    if with.outcome.held_back > 0 {
        rows.push(both("refused by tollgate, never sent (max_wait)", &|run| {
            run.outcome.held_back.to_string()
        }));
    }

    let name = rows.iter().map(|[name, ..]| name.len()).max().unwrap_or(0);
    let line = "─".repeat(name + 2 * COLUMN);
    let row =
        |[what, without, with]: &[String; 3]| format!("{what:name$}{without:>COLUMN$}{with:>COLUMN$}\n");
    let head = row(&["".into(), "without tollgate".into(), "with tollgate".into()]);
    format!("{head}{line}\n{}{line}\n", rows.iter().map(row).collect::<String>())
}

/// What one sees. It follows the numbers, also when they are not what we would like.
fn sentences(args: &Args, rules: &[Rule], without: &Run, with: &Run) -> String {
    let mut said = Vec::new();
    said.push(match without.furthest_over(rules) {
        Some((Rule { count, window, .. }, most)) => format!(
            "Without tollgate, {} of all calls were refused, and up to {most} came within {window:?}, where {count} are \
             allowed.",
            percent(without.refused_of_all()),
        ),
        None => "Without tollgate the tasks stayed within the limit by themselves: give them more to do.".into(),
    });
    if without.log.len() >= MOST_CALLS as usize {
        said.push(format!("That run was stopped after {MOST_CALLS} calls."));
    }
    let broken = rules.iter().find_map(|rule| with.log.over(*rule, TRANSIT_SLACK));
    said.push(match (with.refused(), broken) {
        (0, None) => format!(
            "With it, the same tasks got {} answers ({} without), and not one call was too many.",
            with.answered(),
            without.answered(),
        ),
        (refused, None) => format!(
            "With it, {refused} of {} calls were still refused: the way to the service took up to {} longer for one call \
             than for another, and transit_slack covers {TRANSIT_SLACK:?}.",
            with.log.len(),
            span(with.log.jitter()),
        ),
        (_, Some(broken)) => format!(
            "With it, the limit was broken: {broken}. If this machine did not pause, that is a bug of tollgate.",
        ),
    });
    let (unlucky, lucky) = without.answers_per_task(args.tasks);
    let (fewest, most) = with.answers_per_task(args.tasks);
    if lucky - unlucky > 2 * (most - fewest) {
        said.push(format!(
            "Without it the lucky are served ({unlucky} to {lucky} answers per task), with it all in turn ({fewest} to \
             {most}).",
        ));
    }
    if args.burst.is_none() && with.log.unevenness() > 2.0 {
        said.push(format!("What {} allows at once goes at once; --burst <n> spreads it.", args.limit));
    }
    said.iter().map(|sentence| format!("{sentence}\n")).collect()
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

/// How wide a column of numbers is.
const COLUMN: usize = 18;
