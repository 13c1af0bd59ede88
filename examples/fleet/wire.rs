//! What a process of the fleet tells its parent, in lines.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What the parent says, in a line of its own: call now.
pub(crate) const GO: &str = "go";

/// One line of a child.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// It is connected to all it needs.
    Ready,
    /// How many of its tasks wait.
    Waiting(usize),
    /// What one answer took.
    Took(Duration),
    /// How often tollgate said no.
    HeldBack(u64),
    /// How often the store could not be asked.
    StoreAway(u64),
    /// What the store said then.
    Complaint(String),
    /// It has told all.
    Done,
    /// It could not go on.
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
