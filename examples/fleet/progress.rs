//! The progress of a run, on one line: redrawn in a terminal; elsewhere a new line every two seconds.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use upstream::Tally;

/// The progress line of one run.
pub(crate) struct Progress {
    name: &'static str,
    start: Instant,
    bar: ProgressBar,
    /// What the service had seen at each tick of the last second.
    recent: VecDeque<(Duration, u64)>,
    next_line: Duration,
}

impl Progress {
    /// Starts the line of a run that starts now and lasts for `time`.
    pub(crate) fn start(name: &'static str, time: Duration) -> Self {
        let style = ProgressStyle::with_template("{prefix:16} {wide_bar:.cyan/dim} {msg}")
            .expect("the template is well formed")
            .progress_chars("━╸─");
        let length = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let bar = ProgressBar::new(length).with_style(style).with_prefix(name);
        Progress { name, start: Instant::now(), bar, recent: VecDeque::new(), next_line: LINE_EVERY }
    }

    /// Shows what the service has seen by now, and how many tasks wait.
    pub(crate) fn tell(&mut self, seen: Tally, waiting: usize) {
        let elapsed = self.start.elapsed();
        self.recent.push_back((elapsed, seen.all()));
        while self.recent.len() > 2 && self.recent[1].0 + Duration::from_secs(1) < elapsed {
            self.recent.pop_front();
        }
        let (since, before) = self.recent[0];
        let rate = (seen.all() - before) as f64 / (elapsed - since).as_secs_f64().max(0.1);
        self.show(elapsed, format!("{} {waiting:4} waiting {rate:5.0}/s", counts(elapsed, seen)));
    }

    /// Shows the final figures of the run.
    pub(crate) fn finish(&mut self, seen: Tally) {
        let elapsed = self.start.elapsed();
        self.next_line = elapsed;
        self.bar.set_length(1);
        self.show(elapsed, counts(elapsed, seen));
        self.bar.abandon();
    }

    fn show(&mut self, elapsed: Duration, line: String) {
        if !self.bar.is_hidden() {
            self.bar.set_position(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX));
            self.bar.set_message(line);
        } else if elapsed >= self.next_line {
            self.next_line = elapsed + LINE_EVERY;
            eprintln!("{:16} {line}", self.name);
        }
    }
}

fn counts(elapsed: Duration, seen: Tally) -> String {
    let Tally { accepted, refused } = seen;
    format!("{:4.1}s {:5} sent {accepted:5}x200 {refused:5}x429", elapsed.as_secs_f64(), seen.all())
}

/// How often the progress is drawn.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// How often a line is printed if it cannot be redrawn.
const LINE_EVERY: Duration = Duration::from_secs(2);
