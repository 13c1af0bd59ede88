//! The command line.

use std::time::Duration;

use tollgate::Quota;

pub(crate) const HELP: &str = "\
A fleet of tasks calls a service with a limit: once without tollgate, once with it.
With --redis, a fleet of processes does: once each counts for itself, once they share a count in Redis.

Usage: cargo run -p tollgate-fleet --example fleet -- [options]

  --limit <limits>   what the service allows, as in \"50/s\" or \"25/5s, 300/60s\"   [50/s]
  --burst <n>        tollgate only: at most n calls back to back, then evenly spaced
                     (of the last limit)                                          [all at once]
  --tasks <n>        how many tasks call, each as soon as it has its answer       [40]
  --seconds <n>      how long each of the two runs lasts                          [6]
  --polite           a refused task waits as long as Retry-After says, instead of 100 ms

  --processes <n>    how many processes run, each with that many tasks            [1]
  --redis <where>    where they share their count: redis://host:6379/, or \"spawn\" to start a redis-server
                     for the time of the run                                      [nowhere]

  --help             this text

What Redis spent is read from its INFO. It includes idle time, and the commands of other clients.
";

/// The options of the command line.
#[derive(Clone, Debug)]
pub(crate) struct Args {
    /// The limit of the service.
    pub(crate) limit: Quota,
    /// `--burst`, checked when the layer is built.
    pub(crate) burst: Option<u32>,
    /// How many tasks of each process call.
    pub(crate) tasks: u32,
    /// How long one run lasts.
    pub(crate) time: Duration,
    /// Whether a refused task reads `Retry-After`.
    pub(crate) polite: bool,
    /// How many processes run.
    pub(crate) processes: u32,
    /// Where the processes share their count.
    pub(crate) redis: Option<Where>,
    /// The words that pass the same options to a child process.
    pub(crate) passed_on: Vec<String>,
}

/// Where the count is shared.
#[derive(Clone, Debug)]
pub(crate) enum Where {
    /// In a Redis that this program starts.
    Spawn,
    /// In the Redis at this URL.
    At(String),
}

impl Args {
    /// Returns the quota of the limiter.
    pub(crate) fn quota(&self) -> Quota {
        match self.burst {
            Some(burst) => self.limit.burst(burst),
            None => self.limit,
        }
    }

    /// Returns whether child processes call, rather than tasks of this process.
    pub(crate) fn has_children(&self) -> bool {
        self.processes > 1 || self.redis.is_some()
    }

    /// Reads the arguments. Returns `None` if help was requested.
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
        let mut args = Args {
            limit: Quota::per_second(50),
            burst: None,
            tasks: 40,
            time: Duration::from_secs(6),
            polite: false,
            processes: 1,
            redis: None,
            passed_on: Vec::new(),
        };
        while let Some(word) = words.next() {
            let (name, attached) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let mut given = None;
            let mut value = || -> Result<String, String> {
                let value = attached
                    .clone()
                    .or_else(|| words.next())
                    .ok_or(format!("{name} needs a value"))?;
                given = Some(value.clone());
                Ok(value)
            };
            match name {
                "--limit" => {
                    args.limit = value()?
                        .parse::<Quota>()
                        .map_err(|error| error.to_string())?
                }
                "--burst" => args.burst = Some(number(name, &value()?, 1, 1_000_000)?),
                "--tasks" => args.tasks = number(name, &value()?, 1, MOST_TASKS)?,
                "--seconds" => {
                    args.time = Duration::from_secs(number(name, &value()?, 1, 600)?.into())
                }
                "--polite" if attached.is_none() => args.polite = true,
                "--processes" => args.processes = number(name, &value()?, 1, 64)?,
                "--redis" => args.redis = Some(place(&value()?)?),
                "--help" | "-h" if attached.is_none() => return Ok(None),
                _ => return Err(format!("there is no option {word:?}")),
            }
            if !matches!(name, "--processes" | "--redis") {
                args.passed_on.push(name.to_owned());
                args.passed_on.extend(given);
            }
        }
        let tasks = args.processes * args.tasks;
        if tasks > MOST_TASKS {
            return Err(format!(
                "{} processes with {} tasks are {tasks} connections, and at most {MOST_TASKS} can be served here",
                args.processes, args.tasks,
            ));
        }
        Ok(Some(args))
    }
}

/// Parses a whole number from `least` to `most`.
fn number(name: &str, text: &str, least: u32, most: u32) -> Result<u32, String> {
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!(
            "{name} takes a whole number from {least} to {most}, not {text:?}"
        )),
    }
}

/// Parses the value of `--redis`. Errors do not repeat it, because a URL may hold a password.
fn place(text: &str) -> Result<Where, String> {
    match text {
        "spawn" => Ok(Where::Spawn),
        url if url.contains("://") => Ok(Where::At(url.to_owned())),
        _ => Err("--redis takes \"spawn\", or a URL such as redis://localhost:6379/".into()),
    }
}

/// The most tasks in all processes together: each task has a connection.
const MOST_TASKS: u32 = 2000;
