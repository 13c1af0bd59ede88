//! The lines that a child process prints for its parent.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The start signal of the parent, on a line of its own.
pub(crate) const GO: &str = "go";

/// One line of a child.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// The child has opened its connections.
    Ready,
    /// How many tasks of the child wait.
    Waiting(usize),
    /// How long one answer took.
    Took(Duration),
    /// How often tollgate refused a call.
    HeldBack(u64),
    /// How often the store did not respond.
    StoreAway(u64),
    /// The error of the store.
    Complaint(String),
    /// The report is complete.
    Done,
    /// The child failed.
    Failed(String),
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Ready => write!(f, "ready"),
            Line::Waiting(tasks) => write!(f, "waiting {tasks}"),
            Line::Took(time) => write!(f, "took {}", time.as_nanos()),
            Line::HeldBack(calls) => write!(f, "held-back {calls}"),
            Line::StoreAway(calls) => write!(f, "store-away {calls}"),
            Line::Complaint(text) => write!(f, "complaint {}", in_one_line(text)),
            Line::Done => write!(f, "done"),
            Line::Failed(text) => write!(f, "failed {}", in_one_line(text)),
        }
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(line: &str) -> Result<Line, String> {
        let (word, value) = line.split_once(' ').unwrap_or((line, ""));
        let number = || value.parse::<u64>().map_err(|_| format!("a line that makes no sense: {line:?}"));
        Ok(match word {
            "ready" => Line::Ready,
            "waiting" => Line::Waiting(usize::try_from(number()?).unwrap_or(usize::MAX)),
            "took" => Line::Took(Duration::from_nanos(number()?)),
            "held-back" => Line::HeldBack(number()?),
            "store-away" => Line::StoreAway(number()?),
            "complaint" => Line::Complaint(value.into()),
            "done" => Line::Done,
            "failed" => Line::Failed(value.into()),
            _ => return Err(format!("a line that makes no sense: {line:?}")),
        })
    }
}

fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
