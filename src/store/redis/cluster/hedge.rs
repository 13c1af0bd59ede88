//! The same command to several servers, each a little after the one before.

use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::slots::Address;
use crate::rng::dice;

/// At most this many servers are sent a command at a time.
const MOST_TRIED: usize = 8;

/// How long one server is waited for before the command is sent to the next server as well. This is
/// for commands that any server can execute.
const STAGGER: Duration = Duration::from_millis(50);

/// Returns the servers that are sent a command, each once: those with a connection, seeds as half of [`MOST_TRIED`], the known
/// servers, and the other seeds. All seeds may be gone, and so may all known servers.
pub(super) fn in_turn<'a>(
    connected: Vec<&'a Address>,
    seeds: &'a [Address],
    known: impl IntoIterator<Item = &'a Address>,
) -> impl Iterator<Item = &'a Address> {
    let [connected, mut seeds, known] = [connected, seeds.iter().collect(), Vec::from_iter(known)]
        .map(|mut servers| {
            servers.sort_by_cached_key(|_| dice());
            servers
        });
    let other_seeds = seeds.split_off(seeds.len().min(MOST_TRIED / 2));
    let mut asked = HashSet::new();
    let servers = [connected, seeds, known, other_seeds].into_iter().flatten();
    servers
        .filter(move |server| asked.insert(*server))
        .take(MOST_TRIED)
}

/// Runs `tries` until one succeeds. The next one begins when one has failed, or has taken longer
/// than [`STAGGER`]. If all fail, returns the error of the last one. If there are no tries, returns
/// `none`.
pub(super) async fn first<T, E, F>(tries: impl IntoIterator<Item = F>, none: E) -> Result<T, E>
where
    T: Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    let (mut tries, mut running, mut error) = (tries.into_iter().peekable(), JoinSet::new(), none);
    loop {
        if let Some(next) = tries.next() {
            running.spawn(next);
        }
        let ended = match tries.peek() {
            Some(_) => timeout(STAGGER, running.join_next())
                .await
                .unwrap_or_default(),
            None => running.join_next().await,
        };
        match ended {
            Some(Ok(Ok(value))) => return Ok(value),
            Some(Ok(Err(failed))) => error = failed,
            Some(Err(_)) => {}
            None if tries.peek().is_some() => {}
            None => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(host: &str, count: u16) -> Vec<Address> {
        let of = |port| Address {
            host: host.into(),
            port,
        };
        (0..count).map(of).collect()
    }

    /// All seeds may be gone, and so may all known servers.
    #[test]
    fn neither_seeds_nor_known_servers_crowd_out_the_other() {
        for (connected, seeds, known, expected) in [
            (0, 20, 20, "sssskkkk"),
            (0, 20, 2, "sssskkss"),
            (0, 2, 20, "sskkkkkk"),
            (2, 20, 20, "ccsssskk"),
            (20, 20, 20, "cccccccc"),
            (0, 3, 0, "sss"),
            (0, 0, 0, ""),
        ] {
            let (connected, seeds) = (servers("c", connected), servers("s", seeds));
            let known = servers("k", known);
            let asked: Vec<_> = in_turn(connected.iter().collect(), &seeds, &known).collect();
            let hosts: String = asked.iter().map(|server| &*server.host).collect();
            assert_eq!(hosts, expected);
        }
    }

    #[test]
    fn each_server_is_asked_once() {
        let servers = servers("s", 5);
        let asked = in_turn(servers[..2].iter().collect(), &servers[1..4], &servers);
        let asked: Vec<_> = asked.collect();
        assert_eq!(asked.len(), 5);
        assert_eq!(asked.iter().collect::<HashSet<_>>().len(), 5);
    }
}
