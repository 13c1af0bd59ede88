//! What a server decided, by its own log.

use std::fs;
use std::io::{Error, Result};
use std::path::Path;

/// A request in the log of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When the server decided on it, in milliseconds since the Unix epoch.
    pub at: u64,
    /// Whether the server accepted it.
    pub accepted: bool,
}

/// The requests that a server decided on, in the order of their time.
#[derive(Clone, Debug, Default)]
pub struct Log(Vec<Arrival>);

impl Log {
    /// Reads lines of a status and a time. Lines that are something else are messages of the server, such as that it
    /// starts.
    pub(crate) fn read(file: &Path) -> Result<Log> {
        let text = fs::read_to_string(file)?;
        let arrivals = text.lines().filter_map(arrival);
        let arrivals: std::result::Result<Log, String> = arrivals.collect();
        arrivals.map_err(Error::other)
    }

    /// Returns the requests.
    pub fn arrivals(&self) -> &[Arrival] {
        &self.0
    }
}

impl FromIterator<Arrival> for Log {
    fn from_iter<I: IntoIterator<Item = Arrival>>(arrivals: I) -> Self {
        let mut arrivals: Vec<_> = arrivals.into_iter().collect();
        arrivals.sort_by_key(|arrival| arrival.at);
        Log(arrivals)
    }
}

/// Reads a line. Returns `None` if the line is not about a request, and an error if the server answered with another
/// status than 200 and 429.
fn arrival(line: &str) -> Option<std::result::Result<Arrival, String>> {
    let (status, time) = line.split_once(' ')?;
    // nginx writes seconds with three decimals, all others write milliseconds.
    let at = time.replace('.', "").parse().ok()?;
    let status: u16 = status.parse().ok()?;
    Some(match status {
        200 => Ok(Arrival { at, accepted: true }),
        429 => Ok(Arrival {
            at,
            accepted: false,
        }),
        _ => Err(format!("the server answered {status}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_servers_are_read() {
        let accepted = |at, accepted| Some(Ok(Arrival { at, accepted }));
        assert_eq!(
            arrival("200 1700000000.123"),
            accepted(1_700_000_000_123, true)
        );
        assert_eq!(
            arrival("429 1700000000123"),
            accepted(1_700_000_000_123, false)
        );
        assert_eq!(arrival("Proxy all started."), None);
        assert!(arrival("503 1700000000123").is_some_and(|read| read.is_err()));
    }
}
