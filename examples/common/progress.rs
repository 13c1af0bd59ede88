//! A line of progress on standard error: redrawn in a terminal; elsewhere a new line every two
//! seconds.

use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

/// The line of progress of a program.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    is_terminal: bool,
    /// The time since the start at which the line is next due.
    next: Duration,
}

impl ProgressLine {
    /// Prepares the line; prints nothing yet.
    pub(crate) fn new() -> Self {
        let is_terminal = stderr().is_terminal();
        ProgressLine {
            is_terminal,
            next: if is_terminal {
                Duration::ZERO
            } else {
                LINE_EVERY
            },
        }
    }

    /// Prints `text` if the line is due. In a terminal, a bar before the text shows how much of the
    /// work is done, from 0 to 1.
    pub(crate) fn show(&mut self, elapsed: Duration, done: f64, text: &str) {
        if elapsed >= self.next {
            self.next = elapsed
                + if self.is_terminal {
                    REDRAW_EVERY
                } else {
                    LINE_EVERY
                };
            self.print(done, text);
        }
    }

    /// Prints the last state of the line, and ends it.
    pub(crate) fn finish(self, done: f64, text: &str) {
        self.print(done, text);
        if self.is_terminal {
            eprintln!();
        }
    }

    fn print(&self, done: f64, text: &str) {
        if self.is_terminal {
            let full = (done.clamp(0.0, 1.0) * BAR as f64).round() as usize;
            let bar = "━".repeat(full) + &"─".repeat(BAR - full);
            let _ = write!(stderr(), "\r\x1b[K{bar} {text}"); // progress is not worth an error
        } else {
            eprintln!("{text}");
        }
    }
}

/// How often the line is redrawn in a terminal.
const REDRAW_EVERY: Duration = Duration::from_millis(100);

/// How often a line is printed if it cannot be redrawn.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// The width of the bar.
const BAR: usize = 24;
