//! Sentences that explain the table. They follow the numbers, also if the numbers are not favourable.

use upstream::Rule;

use crate::TRANSIT_SLACK;
use crate::args::Args;
use crate::report::{percent, span};
use crate::run::MOST_CALLS;
use crate::seen::Run;

/// Returns the sentences on runs of one process.
pub(crate) fn one(args: &Args, rules: &[Rule], without: &Run, with: &Run) -> Vec<String> {
    let mut said = Vec::new();
    let unbounded = "Without tollgate the tasks stayed within the limit by themselves: give them more to do.";
    said.push(went_over("Without tollgate", rules, without).unwrap_or_else(|| unbounded.into()));
    if without.log.len() >= MOST_CALLS {
        said.push(format!("That run was stopped after {MOST_CALLS} calls."));
    }
    let kept = format!("the same tasks got {} answers ({} without)", with.answered(), without.answered());
    said.push(kept_or_not("With it", &kept, rules, with));
    let (unlucky, lucky) = without.answers_per_task(args);
    let (fewest, most) = with.answers_per_task(args);
    if lucky - unlucky > 2 * (most - fewest) {
        said.push(format!(
            "Without it the lucky are served ({unlucky} to {lucky} answers per task), with it all in turn ({fewest} to \
             {most}).",
        ));
    }
    said.extend(uneven(args, with));
    said
}

/// Returns the sentences on runs of many processes: each for itself and, if there was a Redis, with a shared count.
pub(crate) fn many(args: &Args, rules: &[Rule], runs: &[Run]) -> Vec<String> {
    let mut said = Vec::new();
    if let Some(own) = runs.first() {
        let kept = format!("the processes got {} answers", own.answered());
        let over = went_over("Each for itself", rules, own);
        said.push(over.unwrap_or_else(|| kept_or_not("Each for itself", &kept, rules, own)));
    }
    match runs.get(1) {
        Some(shared) if shared.log.is_empty() => {
            said.push("With a common count in Redis nothing was sent.".into());
        }
        Some(shared) => {
            let kept = format!("the same processes got {} answers", shared.answered());
            said.push(kept_or_not("With a common count in Redis", &kept, rules, shared));
            said.extend(uneven(args, shared));
        }
        None => said.push("With --redis they share a count.".into()),
    }
    said.extend(
        runs.iter().filter_map(|run| Some(format!("The store said: {}.", run.outcome.complaint.as_ref()?))),
    );
    said
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
    let broken = rules.iter().find_map(|rule| run.log.over(*rule, TRANSIT_SLACK));
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

fn uneven(args: &Args, run: &Run) -> Option<String> {
    (args.burst.is_none() && run.log.unevenness() > 2.0)
        .then(|| format!("What {} allows at once goes at once; --burst <n> spreads it.", args.limit))
}
