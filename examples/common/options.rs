//! The command line: `--name value` or `--name=value`.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// An error in the command line.
#[derive(Debug)]
pub(crate) struct Usage(String);

impl Usage {
    pub(crate) fn new(complaint: impl Into<String>) -> Self {
        Usage(complaint.into())
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The options of the command line. Each option is taken out once; an option that is left at the
/// end is unknown.
#[derive(Debug)]
pub(crate) struct Options(Vec<(String, String)>);

impl Options {
    /// Reads the arguments. Returns `None` if help was requested.
    pub(crate) fn read(mut words: impl Iterator<Item = String>) -> Result<Option<Self>, Usage> {
        let mut options = Vec::new();
        while let Some(word) = words.next() {
            if word == "--help" || word == "-h" {
                return Ok(None);
            }
            if !word.starts_with("--") {
                return Err(Usage(format!("there is no option {word:?}")));
            }
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word, words.next()),
            };
            let value =
                value.ok_or_else(|| Usage(format!("{name} needs a value, or does not exist")))?;
            options.push((name, value));
        }
        Ok(Some(Options(options)))
    }

    /// Returns the value of `name`; if it is given twice, the last one.
    pub(crate) fn find(&mut self, name: &str) -> Option<String> {
        let mut found = None;
        self.0.retain_mut(|(given, value)| {
            let other = given != name;
            if !other {
                found = Some(std::mem::take(value));
            }
            other
        });
        found
    }

    /// Returns the text of `name`.
    pub(crate) fn text(&mut self, name: &str, default: &str) -> String {
        self.find(name).unwrap_or_else(|| default.to_owned())
    }

    /// Returns the number of `name`.
    pub(crate) fn number(
        &mut self,
        name: &str,
        default: u32,
        range: RangeInclusive<u32>,
    ) -> Result<u32, Usage> {
        let Some(text) = self.find(name) else {
            return Ok(default);
        };
        let (least, most) = (range.start(), range.end());
        match text.parse() {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => Err(Usage(format!(
                "{name} takes a whole number from {least} to {most}, not {text:?}"
            ))),
        }
    }

    /// Returns the seconds of `name`, such as `15` or `0.5`.
    pub(crate) fn seconds(&mut self, name: &str, default: f64) -> Result<Duration, Usage> {
        let text = self.text(name, &default.to_string());
        let seconds = text
            .parse()
            .ok()
            .filter(|seconds| (0.0..=3600.0).contains(seconds));
        seconds.map(Duration::from_secs_f64).ok_or_else(|| {
            Usage(format!(
                "{name} takes seconds, from 0 to 3600, not {text:?}"
            ))
        })
    }

    /// Returns the role of a child process; `None` for the program that the user starts.
    pub(crate) fn role(&mut self, roles: &[&'static str]) -> Result<Option<&'static str>, Usage> {
        let Some(text) = self.find("--role") else {
            return Ok(None);
        };
        match roles.iter().find(|role| **role == text) {
            Some(role) => Ok(Some(role)),
            None => Err(Usage(format!(
                "--role is one of {}, not {text:?}",
                roles.join(", ")
            ))),
        }
    }

    /// Checks that all options are taken: an option that is left is unknown.
    pub(crate) fn finish(self) -> Result<(), Usage> {
        match self.0.first() {
            Some((name, _)) => Err(Usage(format!("there is no option {name:?}"))),
            None => Ok(()),
        }
    }
}
