//! The command line.

use std::time::Duration;

use tollgate::Quota;

pub(crate) const HELP: &str = "\
A fleet of tasks calls a service with a limit: once without tollgate, once with it.

Usage: cargo run --release --example fleet -- [options]

  --limit <limits>   what the service allows, as in \"50/s\" or \"25/5s, 300/60s\"   [50/s]
  --burst <n>        tollgate only: at most n calls back to back, then evenly spaced
                     (of the last limit)                                          [all at once]
  --tasks <n>        how many tasks call, each as soon as it has its answer       [40]
  --seconds <n>      how long each of the two runs lasts                          [10]
  --polite           without tollgate, a refused task waits as long as Retry-After
                     says, instead of 100 ms
  --help             this text
";

/// What was asked for.
#[derive(Clone, Debug)]
pub(crate) struct Args {
    /// What the service allows.
    pub(crate) limit: Quota,
    /// `--burst`, checked when the layer is built.
    pub(crate) burst: Option<u32>,
    /// How many tasks call.
    pub(crate) tasks: u32,
    /// How long one run lasts.
    pub(crate) time: Duration,
    /// Whether a refused task reads `Retry-After`.
    pub(crate) polite: bool,
}

impl Args {
    /// The quota that tollgate is to keep.
    pub(crate) fn quota(&self) -> Quota {
        match self.burst {
            Some(burst) => self.limit.burst(burst),
            None => self.limit,
        }
    }

    /// Reads the arguments; `None` when help was asked for.
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
        let mut args = Args {
            limit: Quota::per_second(50),
            burst: None,
            tasks: 40,
            time: Duration::from_secs(10),
            polite: false,
        };
        while let Some(word) = words.next() {
            let (name, attached) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let mut value =
                || attached.clone().or_else(|| words.next()).ok_or(format!("{name} needs a value"));
            match name {
                "--limit" => args.limit = value()?.parse::<Quota>().map_err(|error| error.to_string())?,
                "--burst" => args.burst = Some(number(name, &value()?, 1, 1_000_000)?),
                "--tasks" => args.tasks = number(name, &value()?, 1, 2000)?,
                "--seconds" => args.time = Duration::from_secs(number(name, &value()?, 1, 600)?.into()),
                "--polite" if attached.is_none() => args.polite = true,
                "--help" | "-h" if attached.is_none() => return Ok(None),
                _ => return Err(format!("there is no option {word:?}")),
            }
        }
        Ok(Some(args))
    }
}

fn number(name: &str, text: &str, least: u32, most: u32) -> Result<u32, String> {
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("{name} takes a whole number from {least} to {most}, not {text:?}")),
    }
}
