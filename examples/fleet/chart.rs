//! Bar charts of calls over time, as text.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use upstream::{Log, Rule, Tally};

/// The scale that the charts of all runs share.
pub(crate) struct Scale {
    /// How long one column lasts.
    step: Duration,
    columns: usize,
    /// The most calls that a column may hold.
    limit: f64,
    /// How many calls one row stands for.
    unit: f64,
    colours: bool,
}

impl Scale {
    /// Builds a scale that fits all of `logs`, each `time` long.
    pub(crate) fn new<'a>(
        rules: &[Rule],
        time: Duration,
        logs: impl Iterator<Item = &'a Log>,
    ) -> Scale {
        let step = HALF_A_SECOND
            * u32::try_from(time.div_duration_f64(HALF_A_SECOND * 30).ceil() as u64).unwrap_or(1);
        let columns = time.as_nanos().div_ceil(step.as_nanos()) as usize;
        let in_a_step = |rule: &Rule| rule.count as f64 * step.div_duration_f64(rule.window).ceil();
        let limit = rules.iter().map(in_a_step).fold(f64::INFINITY, f64::min);
        let highest = logs
            .flat_map(|log| log.per(step))
            .map(Tally::all)
            .max()
            .unwrap_or(0);
        // The limit lies between two rows, if it is not lower than one.
        let rows_to_the_limit = (limit * MOST_ROWS / highest.max(1) as f64)
            .floor()
            .clamp(1.0, 3.0);
        let unit = (limit / rows_to_the_limit).max(highest as f64 / MOST_ROWS);
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Scale {
            step,
            columns,
            limit,
            unit,
            colours,
        }
    }

    /// Explains the glyphs.
    pub(crate) fn legend(&self) -> String {
        let [answered, refused, limit] = [("█", GREEN), ("▒", RED), ("┄", YELLOW)]
            .map(|(glyph, colour)| self.paint(glyph, colour));
        format!(
            "calls per {:?}:  {answered} answered 200  {refused} refused 429  {limit} limit {:.0}",
            self.step, self.limit
        )
    }

    /// Draws the bars of `log`.
    pub(crate) fn chart(&self, log: &Log) -> String {
        let mut bars = log.per(self.step);
        bars.resize(self.columns, Tally::default());
        let highest = bars.iter().map(|bar| bar.all()).max().unwrap_or(0);
        // 0 draws no line, if the limit is lower than a row.
        let limit_row = (self.limit / self.unit + 1e-9) as usize;
        let rows = ((highest as f64 / self.unit).ceil() as usize).max(limit_row);
        let width = 2 * self.columns;
        let mut chart = String::new();
        for row in (0..rows).rev() {
            if row + 1 == limit_row {
                let line = self.paint(&"┄".repeat(width), YELLOW);
                let _ = writeln!(chart, "{:>12} ┤{line}", format!("limit {:.0}", self.limit));
            }
            let label = if row + 1 == rows && rows > limit_row {
                highest.to_string()
            } else {
                String::new()
            };
            let cells: String = bars.iter().map(|bar| self.cell(*bar, row)).collect();
            let _ = writeln!(chart, "{label:>12} │{}", cells.trim_end());
        }
        let end = format!("{:?}", self.step * self.columns as u32);
        let _ = writeln!(chart, "{:>12} └{}", "", "─".repeat(width));
        let _ = writeln!(chart, "{:>12}  0s{end:>width$}", "", width = width - 2);
        chart
    }

    /// Draws the cell of a bar in a row, counted from the bottom.
    fn cell(&self, bar: Tally, row: usize) -> String {
        let part = |calls: u64| (calls as f64 / self.unit - row as f64).clamp(0.0, 1.0);
        let (answered, all) = (part(bar.accepted), part(bar.all()));
        if all == 0.0 {
            "  ".into()
        } else if answered * 2.0 >= all {
            let eighths = ((all * 8.0).round() as usize).max(1);
            self.paint(&BLOCKS[eighths - 1].repeat(2), GREEN)
        } else {
            self.paint("▒▒", RED)
        }
    }

    fn paint(&self, text: &str, colour: &str) -> String {
        if self.colours {
            format!("\x1b[{colour}m{text}\x1b[0m")
        } else {
            text.into()
        }
    }
}

const HALF_A_SECOND: Duration = Duration::from_millis(500);
const MOST_ROWS: f64 = 10.0;
const BLOCKS: [&str; 8] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
const GREEN: &str = "32";
const RED: &str = "31";
const YELLOW: &str = "33";
