//! A local cluster of Redis servers.

use std::io::Error;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::FromRedisValue;

use crate::RedisServer;

/// Three primaries, each with a replica. Dropping it kills them.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

/// A server that owns slots.
struct Primary {
    number: usize,
    id: String,
    /// The first and the last of each range.
    slots: Vec<(u16, u16)>,
}

/// The longest time in which a cluster must agree.
const PATIENCE: Duration = Duration::from_secs(30);

impl RedisCluster {
    /// Starts a cluster whose servers mark each other as failed after a second.
    ///
    /// # Errors
    ///
    /// If `redis-server` or `redis-cli` is missing, or the cluster does not come up.
    pub fn start() -> Result<Self, Error> {
        let options = [
            "--save",
            "",
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1000",
        ];
        let nodes = (0..6)
            .map(|_| RedisServer::with_options(&options))
            .collect::<Result<Vec<_>, _>>()?;
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]);
        create.args(
            nodes
                .iter()
                .map(|node| format!("127.0.0.1:{}", node.port())),
        );
        create.args(["--cluster-replicas", "1", "--cluster-yes"]);
        let created = create.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        if !created.success() {
            return Err(Error::other("redis-cli could not create the cluster"));
        }
        let cluster = RedisCluster { nodes };
        cluster.wait_for("every server is content", |cluster| {
            let content = |node: &RedisServer| {
                let info: String = node.command(&["CLUSTER", "INFO"]);
                let role: String = node.command(&["INFO", "replication"]);
                info.contains("cluster_state:ok")
                    && (role.contains("role:master") || role.contains("master_link_status:up"))
            };
            cluster.nodes.iter().all(content)
        });
        Ok(cluster)
    }

    /// Returns the URLs of all its servers.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// Returns one of its servers.
    pub fn node(&mut self, number: usize) -> &mut RedisServer {
        &mut self.nodes[number]
    }

    /// Sets an option of all its servers.
    ///
    /// # Panics
    ///
    /// If a server is unreachable or rejects the option.
    pub fn configure(&self, name: &str, value: &str) {
        for node in &self.nodes {
            let () = node.command(&["CONFIG", "SET", name, value]);
        }
    }

    /// Returns how many keys a server has.
    ///
    /// # Panics
    ///
    /// If the server is unreachable.
    pub fn key_count(&self, number: usize) -> u64 {
        self.nodes[number].command(&["DBSIZE"])
    }

    /// Returns the slot of a key.
    pub fn slot(&self, key: &str) -> u16 {
        self.ask(&["CLUSTER", "KEYSLOT", key])
    }

    /// Returns the running primaries, as one of them reports them.
    fn primaries(&self) -> Vec<Primary> {
        let text: String = self.ask(&["CLUSTER", "NODES"]);
        let primary = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            let (id, address, flags) = (words.next()?, words.next()?, words.next()?);
            let port = address
                .split(['@', ','])
                .next()?
                .rsplit_once(':')?
                .1
                .parse::<u16>()
                .ok()?;
            let number = self.nodes.iter().position(|node| node.port() == port)?;
            let alive = flags.contains("master") && !flags.contains("fail");
            let range = |range: &str| match range.split_once('-') {
                Some((first, last)) => Some((first.parse().ok()?, last.parse().ok()?)),
                None => range.parse().ok().map(|slot| (slot, slot)),
            };
            let slots = words.skip(5).filter_map(range).collect::<Vec<_>>();
            alive.then(|| Primary {
                number,
                id: id.to_owned(),
                slots,
            })
        };
        text.lines().filter_map(primary).collect()
    }

    /// Returns the number of the server that owns `slot`, if a running server does.
    pub fn primary_of(&self, slot: u16) -> Option<usize> {
        let has = |slots: &[(u16, u16)]| {
            slots
                .iter()
                .any(|(first, last)| (*first..=*last).contains(&slot))
        };
        self.primaries()
            .into_iter()
            .find(|primary| has(&primary.slots))
            .map(|primary| primary.number)
    }

    /// Moves `slot` to another primary while the cluster works, key by key as `redis-cli` does. For
    /// `pause`, both servers know of the migration and keys stay in place. Returns the number of
    /// the new server.
    ///
    /// # Panics
    ///
    /// If no server owns the slot, or a server rejects a command.
    pub fn move_slot(&self, slot: u16, pause: Duration) -> usize {
        let from = self
            .primary_of(slot)
            .expect("a running server owns the slot");
        let primaries = self.primaries();
        let id = |number: usize| {
            let found = primaries.iter().find(|primary| primary.number == number);
            found
                .map(|primary| primary.id.clone())
                .expect("a primary has an id")
        };
        let to = primaries
            .iter()
            .map(|primary| primary.number)
            .find(|number| *number != from);
        let to = to.expect("another primary");
        let (from_id, to_id, slot) = (id(from), id(to), slot.to_string());
        let (source, target) = (&self.nodes[from], &self.nodes[to]);
        let () = target.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
        let () = source.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        sleep(pause);
        let port = target.port().to_string();
        loop {
            let keys: Vec<String> = source.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            for key in &keys {
                let () = source.command(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
            }
            if keys.is_empty() {
                break;
            }
        }
        sleep(pause);
        // The other primaries would learn of it later, and may be asked for the owner of the slot.
        let others = primaries.iter().map(|primary| primary.number);
        let others = others.filter(|number| ![from, to].contains(number));
        for server in [to, from].into_iter().chain(others) {
            let () = self.nodes[server].command(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
        }
        to
    }

    /// Waits until `ready`.
    ///
    /// # Panics
    ///
    /// If that takes longer than half a minute.
    pub fn wait_for(&self, what: &str, ready: impl Fn(&RedisCluster) -> bool) {
        let start = Instant::now();
        while !ready(self) {
            assert!(start.elapsed() < PATIENCE, "not yet: {what}");
            sleep(Duration::from_millis(20));
        }
    }

    /// Asks the first running server.
    fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(word);
        });
        let answer = |node: &RedisServer| command.query(&mut node.connect().ok()?).ok();
        self.nodes
            .iter()
            .find_map(answer)
            .expect("a server lives and answers")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_moves_and_a_replica_takes_over() {
        let mut cluster = RedisCluster::start().unwrap();
        let slot = cluster.slot("{a}");
        let from = cluster.primary_of(slot).unwrap();
        let to = cluster.move_slot(slot, Duration::ZERO);
        assert_ne!(from, to);
        cluster.wait_for("all know who has it", |cluster| {
            cluster.primary_of(slot) == Some(to)
        });
        cluster.node(to).kill();
        cluster.wait_for("another has it", |cluster| {
            cluster.primary_of(slot).is_some_and(|now| now != to)
        });
    }
}
