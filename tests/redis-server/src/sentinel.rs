//! A master, a replica, and three Sentinels that watch them.

use std::fs;
use std::io::Error;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{RedisServer, free_port};

/// A master named [`NAME`](Watched::NAME), its replica and their Sentinels. Dropping it kills them.
#[derive(Debug)]
pub struct Watched {
    servers: [RedisServer; 2],
    sentinels: Vec<(u16, Child)>,
    _directory: TempDir,
}

impl Watched {
    /// The master's name in the Sentinels.
    pub const NAME: &'static str = "mymaster";

    /// Starts them. The Sentinels mark a master as failed after a second without an answer.
    ///
    /// # Errors
    ///
    /// If `redis-server` is missing, or they do not find each other within ten seconds.
    pub fn start() -> Result<Self, Error> {
        let servers = [RedisServer::start()?, RedisServer::start()?];
        let master = servers[0].port().to_string();
        let () = servers[1].command(&["REPLICAOF", "127.0.0.1", &master]);
        let directory = TempDir::new()?;
        let mut watched = Watched {
            servers,
            sentinels: Vec::new(),
            _directory: directory,
        };
        for number in 0..3 {
            let port = free_port();
            let config = watched
                ._directory
                .path()
                .join(format!("sentinel-{number}.conf"));
            let name = Watched::NAME;
            let settings = format!(
                "port {port}\nbind 127.0.0.1\nsentinel monitor {name} 127.0.0.1 {master} 2\nsentinel \
                 down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 3000\n"
            );
            fs::write(&config, settings)?;
            let mut command = Command::new("redis-server");
            command
                .arg(&config)
                .arg("--sentinel")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            watched.sentinels.push((port, command.spawn()?));
        }
        let start = Instant::now();
        while !watched.sentinels.iter().all(|(port, _)| knows_all(*port)) {
            if start.elapsed() > Duration::from_secs(10) {
                return Err(Error::other("the Sentinels do not find each other"));
            }
            sleep(Duration::from_millis(50));
        }
        Ok(watched)
    }

    /// Returns the URLs of the Sentinels.
    pub fn urls(&self) -> Vec<String> {
        self.sentinels
            .iter()
            .map(|(port, _)| format!("redis://127.0.0.1:{port}/"))
            .collect()
    }

    /// Returns the servers: the first is the initial master.
    pub fn servers(&mut self) -> &mut [RedisServer; 2] {
        &mut self.servers
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        for (_, sentinel) in &mut self.sentinels {
            let _ = sentinel.kill();
            let _ = sentinel.wait();
        }
    }
}

/// Returns whether a Sentinel knows the replica and the two other Sentinels.
fn knows_all(port: u16) -> bool {
    let asked = || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).ok()?;
        let mut sentinel = client
            .get_connection_with_timeout(Duration::from_secs(1))
            .ok()?;
        redis::cmd("INFO")
            .arg("sentinel")
            .query::<String>(&mut sentinel)
            .ok()
    };
    asked().is_some_and(|info| info.contains("status=ok") && info.contains("slaves=1,sentinels=3"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_replica_takes_over() {
        let mut watched = Watched::start().unwrap();
        watched.servers()[0].kill();
        let start = Instant::now();
        // A failover ends the connections of clients, so a question may have no answer.
        let is_master = |server: &RedisServer| {
            let role = server.connect().and_then(|mut redis| {
                let info: String = redis::cmd("INFO").arg("replication").query(&mut redis)?;
                Ok(info)
            });
            role.is_ok_and(|info| info.contains("role:master"))
        };
        while !is_master(&watched.servers()[1]) {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "it is still a replica"
            );
            sleep(Duration::from_millis(50));
        }
    }
}
