//! The task of a child, on its command line.

use std::time::Duration;

use crate::contenders::{Contender, Limit};

/// The part of one process in a turn.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) contender: Contender,
    /// The URL of the Redis server.
    pub(crate) url: String,
    pub(crate) limit: Limit,
    pub(crate) demand: Demand,
    pub(crate) record: Record,
    /// How many keys there are, each with the limit. Only tollgate is run with more than one key.
    pub(crate) keys: u64,
    /// The number of this process.
    pub(crate) number: u64,
}

/// When calls are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// This number of callers in this process, each in a closed loop on one key.
    Loop(u64),
    /// A call of a random key, every given number of microseconds, whether or not earlier calls
    /// have ended.
    Every(u64),
}

/// What is recorded of the grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The moment and the wait of each grant.
    Each,
    /// The number of grants in every ten milliseconds, if there are too many to record each.
    Count,
}

/// The sub-command that makes a process a child.
pub(crate) const CHILD: &str = "child";

impl Task {
    /// Returns the task as words of a command line.
    pub(crate) fn to_words(&self) -> Vec<String> {
        let (demand, amount) = match self.demand {
            Demand::Loop(callers) => ("loop", callers),
            Demand::Every(micros) => ("every", micros),
        };
        let record = match self.record {
            Record::Each => "each",
            Record::Count => "count",
        };
        let numbers = [
            self.limit.count.into(),
            self.limit.window.as_micros() as u64,
            amount,
            self.keys,
            self.number,
        ];
        let words = [CHILD, self.contender.word(), &self.url, demand, record];
        words
            .into_iter()
            .map(String::from)
            .chain(numbers.map(|number| number.to_string()))
            .collect()
    }

    /// Parses the words of a command line, without the sub-command.
    pub(crate) fn from_words(words: &[String]) -> Option<Task> {
        let [contender, url, demand, record, numbers @ ..] = words else {
            return None;
        };
        let numbers: Vec<u64> = numbers
            .iter()
            .map(|word| word.parse().ok())
            .collect::<Option<_>>()?;
        let &[count, window, amount, keys, number] = numbers.as_slice() else {
            return None;
        };
        let demand = if demand == "loop" {
            Demand::Loop(amount)
        } else {
            Demand::Every(amount)
        };
        Some(Task {
            contender: Contender::of(contender)?,
            url: url.clone(),
            limit: Limit {
                count: count.try_into().ok()?,
                window: Duration::from_micros(window),
            },
            demand,
            record: if record == "each" {
                Record::Each
            } else {
                Record::Count
            },
            keys,
            number,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_parses_back_from_its_words() {
        let task = Task {
            contender: Contender::Windows,
            url: "redis://127.0.0.1:7000/".into(),
            limit: Limit {
                count: 25,
                window: Duration::from_secs(5),
            },
            demand: Demand::Every(17),
            record: Record::Count,
            keys: 3,
            number: 4,
        };
        let words = task.to_words();
        assert_eq!(words[0], CHILD);
        assert_eq!(
            format!("{:?}", Task::from_words(&words[1..]).unwrap()),
            format!("{task:?}")
        );
        assert!(Task::from_words(&words[2..]).is_none());
    }
}
