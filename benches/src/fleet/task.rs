//! What a child is to do, on its command line.

use std::time::Duration;

use crate::contenders::{Contender, Limit};

/// One process's part of a turn.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) contender: Contender,
    /// Of the Redis server.
    pub(crate) url: String,
    pub(crate) limit: Limit,
    pub(crate) demand: Demand,
    pub(crate) record: Record,
    /// How many keys there are, each with the limit. Only tollgate is asked for several.
    pub(crate) keys: u64,
    /// Which process it is.
    pub(crate) number: u64,
}

/// Who wants to call, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// So many callers in this process, each of which calls, and at once again; each keeps to one key.
    Loop(u64),
    /// A call of a random key every so many microseconds, whatever became of those before.
    Every(u64),
}

/// What is kept of the grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The moment and the wait of each.
    Each,
    /// How many there were, every ten milliseconds: where there are too many.
    Count,
}

/// The sub-command that makes a process a child.
pub(crate) const CHILD: &str = "child";

impl Task {
    /// As words of a command line.
    pub(crate) fn to_words(&self) -> Vec<String> {
        let (demand, amount) = match self.demand {
            Demand::Loop(callers) => ("loop", callers),
            Demand::Every(micros) => ("every", micros),
        };
        let record = match self.record {
            Record::Each => "each",
            Record::Count => "count",
        };
        let numbers =
            [self.limit.count.into(), self.limit.window.as_micros() as u64, amount, self.keys, self.number];
        let words = [CHILD, self.contender.word(), &self.url, demand, record];
        words.into_iter().map(String::from).chain(numbers.map(|number| number.to_string())).collect()
    }

    /// Reads them back, without the sub-command.
    pub(crate) fn from_words(words: &[String]) -> Option<Task> {
        let [contender, url, demand, record, numbers @ ..] = words else { return None };
        let numbers: Vec<u64> = numbers.iter().map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let &[count, window, amount, keys, number] = numbers.as_slice() else { return None };
        let demand = if demand == "loop" { Demand::Loop(amount) } else { Demand::Every(amount) };
        Some(Task {
            contender: Contender::of(contender)?,
            url: url.clone(),
            limit: Limit { count: count.try_into().ok()?, window: Duration::from_micros(window) },
            demand,
            record: if record == "each" { Record::Each } else { Record::Count },
            keys,
            number,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let task = Task {
            contender: Contender::Windows,
            url: "redis://127.0.0.1:7000/".into(),
            limit: Limit { count: 25, window: Duration::from_secs(5) },
            demand: Demand::Every(17),
            record: Record::Count,
            keys: 3,
            number: 4,
        };
        let words = task.to_words();
        assert_eq!(words[0], CHILD);
        assert_eq!(format!("{:?}", Task::from_words(&words[1..]).unwrap()), format!("{task:?}"));
        assert!(Task::from_words(&words[2..]).is_none());
    }
}
