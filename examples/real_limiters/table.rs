//! The table that is printed at the end, in Markdown.

use std::time::Duration;

use real_limiters::Figures;

use crate::bench::Row;

/// Describes the figures of a run in one line.
pub(crate) fn summary(figures: &Figures) -> String {
    format!(
        "{:.2} % refused, {:.1} % used",
        figures.refused, figures.used
    )
}

/// Returns a row for each run. The columns "later" and the waits are of the time after the warm-up. Jain's index is over
/// processes.
pub(crate) fn table(rows: &[Row]) -> String {
    let several = rows.iter().any(|(case, ..)| case.processes > 1);
    let (head, line) = match several {
        true => (" Jain |", "--:|"),
        false => ("", ""),
    };
    let mut text = format!(
        "| server | limit | layer | refused % | later | used % | later | wait p50 s | p99 s | longest s |{head}\n\
         |---|---|---|--:|--:|--:|--:|--:|--:|--:|{line}\n"
    );
    let seconds = |span: Duration| format!("{:.2}", span.as_secs_f64());
    for (case, figures, jain) in rows {
        text += &format!(
            "| {} | {}/{} s | {} | {:.2} | {:.2} | {:.1} | {:.1} | {} | {} | {} |",
            case.kind,
            case.limit.count,
            case.limit.window.as_secs(),
            case.layer.name(),
            figures.refused,
            figures.refused_later,
            figures.used,
            figures.used_later,
            seconds(figures.p50),
            seconds(figures.p99),
            seconds(figures.longest),
        );
        if several {
            text += &format!(" {jain:.3} |");
        }
        text.push('\n');
    }
    text
}
