//! The progress of a run: what the service has seen, and how many tasks wait.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use upstream::Tally;

use crate::progress_line::ProgressLine;

/// The progress of one run.
pub(crate) struct Progress {
    name: &'static str,
    start: Instant,
    /// How long the run lasts.
    time: Duration,
    line: ProgressLine,
    /// What the service had seen at each tick of the last second.
    recent: VecDeque<(Duration, u64)>,
}

impl Progress {
    /// Starts the line of a run that starts now and lasts for `time`.
    pub(crate) fn start(name: &'static str, time: Duration) -> Self {
        Progress {
            name,
            start: Instant::now(),
            time,
            line: ProgressLine::new(),
            recent: VecDeque::new(),
        }
    }

    /// Shows what the service has seen by now, and how many tasks wait.
    pub(crate) fn show(&mut self, seen: Tally, waiting: usize) {
        let elapsed = self.start.elapsed();
        self.recent.push_back((elapsed, seen.all()));
        while self.recent.len() > 2 && self.recent[1].0 + Duration::from_secs(1) < elapsed {
            self.recent.pop_front();
        }
        let (since, before) = self.recent[0];
        let rate = (seen.all() - before) as f64 / (elapsed - since).as_secs_f64().max(0.1);
        let text = format!(
            "{:16} {} {waiting:4} waiting {rate:5.0}/s",
            self.name,
            counts(elapsed, seen)
        );
        self.line
            .show(elapsed, elapsed.div_duration_f64(self.time), &text);
    }

    /// Shows the final figures of the run.
    pub(crate) fn finish(self, seen: Tally) {
        self.line.finish(
            1.0,
            &format!("{:16} {}", self.name, counts(self.start.elapsed(), seen)),
        );
    }
}

fn counts(elapsed: Duration, seen: Tally) -> String {
    let Tally { accepted, refused } = seen;
    format!(
        "{:4.1}s {:5} sent {accepted:5}x200 {refused:5}x429",
        elapsed.as_secs_f64(),
        seen.all()
    )
}

/// How often the progress is drawn.
pub(crate) const TICK: Duration = Duration::from_millis(100);
