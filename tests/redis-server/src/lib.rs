//! A local Redis server on loopback, for tollgate's tests and examples, which can be started,
//! stopped, paused, killed and restarted.
//!
//! Needs `redis-server` in the `PATH` (Debian: `apt-get install redis-server`), and libfaketime for
//! a server whose clock is stepped (Debian: `apt-get install faketime`).

#![allow(
    clippy::disallowed_methods,
    reason = "it is no part of tollgate: its clock is the machine's"
)]

mod clock;
mod cluster;
mod proxy;
mod sentinel;

use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue};
use tempfile::TempDir;

pub use clock::SteppingClock;
pub use cluster::RedisCluster;
pub use proxy::Proxy;
pub use sentinel::Watched;

/// A running server. Dropping it kills it and removes its data.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    options: Vec<String>,
    directory: TempDir,
    child: Option<Child>,
    clock: Option<Clock>,
}

/// The wall clock of a server.
#[derive(Debug)]
struct Clock {
    clock: SteppingClock,
    /// How many seconds it is ahead.
    ahead: i64,
}

impl RedisServer {
    /// Starts a server on a free port; it keeps nothing on disk.
    ///
    /// # Errors
    ///
    /// If `redis-server` is missing, or does not answer within ten seconds.
    pub fn start() -> Result<Self, Error> {
        RedisServer::with_options(&["--save", ""])
    }

    /// Starts a server with extra options, as on the command line of `redis-server`.
    ///
    /// # Errors
    ///
    /// If `redis-server` is missing, or does not answer within ten seconds.
    pub fn with_options(options: &[&str]) -> Result<Self, Error> {
        RedisServer::with(options, None)
    }

    /// Starts a server that keeps nothing on disk and whose wall clock can be
    /// [stepped](RedisServer::step_clock).
    ///
    /// # Errors
    ///
    /// If `redis-server` or libfaketime is missing, or the server does not answer within ten
    /// seconds.
    pub fn with_stepping_clock() -> Result<Self, Error> {
        RedisServer::with(
            &["--save", ""],
            Some(Clock {
                clock: SteppingClock::new()?,
                ahead: 0,
            }),
        )
    }

    /// Starts a cluster of one server, which owns all slots.
    ///
    /// # Errors
    ///
    /// If `redis-server` is missing, or does not answer within ten seconds.
    pub fn start_cluster_of_one() -> Result<Self, Error> {
        let server = RedisServer::with_options(&["--save", "", "--cluster-enabled", "yes"])?;
        let () = server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        let start = Instant::now();
        while !server
            .command::<String>(&["CLUSTER", "INFO"])
            .contains("cluster_state:ok")
        {
            if start.elapsed() > Duration::from_secs(10) {
                return Err(Error::other("the cluster of one is not content"));
            }
            sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn with(options: &[&str], clock: Option<Clock>) -> Result<Self, Error> {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server = RedisServer {
            port: 0,
            options,
            directory: TempDir::new()?,
            child: None,
            clock,
        };
        for _ in 0..9 {
            server.port = free_port();
            match server.restart() {
                // Another process took the port first.
                Err(error) if error.kind() == ErrorKind::AddrInUse => {}
                ended => return ended.map(|()| server),
            }
        }
        server.port = free_port();
        server.restart().map(|()| server)
    }

    /// Returns its URL, `redis://127.0.0.1:port/`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Returns its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the id of its process.
    ///
    /// # Panics
    ///
    /// If it was killed.
    pub fn id(&self) -> u32 {
        self.child.as_ref().expect("the server runs").id()
    }

    /// Kills it as `kill -9` does. Then its port refuses connections.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it again on the same port, killing it first. Its data in memory is lost unless its
    /// options keep it.
    ///
    /// # Errors
    ///
    /// If it ends, or does not answer within ten seconds.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.kill();
        let mut command = Command::new("redis-server");
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"]);
        command.arg("--dir").arg(self.directory.path());
        command
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(clock) = &self.clock {
            // libfaketime and Redis's jemalloc depend on each other during start-up: the allocator
            // of libc is loaded before jemalloc.
            clock.clock.give_to(&mut command, &["libc.so.6"]);
        }
        let child = command.spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(
                ErrorKind::NotFound,
                "redis-server is missing: install it (Debian: apt-get install redis-server)",
            ),
            _ => error,
        })?;
        let child = self.child.insert(child);
        let id = format!("process_id:{}\r\n", child.id());
        let start = Instant::now();
        loop {
            if let Some(status) = self
                .child
                .as_mut()
                .map(Child::try_wait)
                .transpose()?
                .flatten()
            {
                let message = format!(
                    "redis-server ended ({status}): its port is taken, or its options are wrong"
                );
                return Err(Error::new(ErrorKind::AddrInUse, message));
            }
            match self.identity() {
                Ok(answer) if answer.contains(&id) => return Ok(()),
                answer if start.elapsed() > Duration::from_secs(10) => {
                    return Err(Error::other(answer.map_or_else(
                        |error| error.to_string(),
                        |_| format!("another server answers on port {}", self.port),
                    )));
                }
                _ => sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Returns what the server on this port reports of itself, once it has loaded its data.
    fn identity(&self) -> Result<String, redis::RedisError> {
        let mut redis = self.connect()?;
        redis::cmd("PING").exec(&mut redis)?;
        redis::cmd("INFO").arg("server").query(&mut redis)
    }

    /// Stops its process (SIGSTOP): it accepts connections and answers nothing.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Continues its process (SIGCONT).
    pub fn resume(&self) {
        self.signal("CONT");
    }

    /// Steps its wall clock by `seconds`, forwards or backwards, from one call to the next.
    ///
    /// # Errors
    ///
    /// If the file that steps it cannot be written.
    ///
    /// # Panics
    ///
    /// If it was not started [with such a clock](RedisServer::with_stepping_clock).
    pub fn step_clock(&mut self, seconds: i64) -> Result<(), Error> {
        let clock = self
            .clock
            .as_mut()
            .expect("a server with a clock that steps");
        clock.ahead += seconds;
        clock.clock.set_ahead(clock.ahead as f64)
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args([format!("-{signal}"), self.id().to_string()])
            .status();
        assert!(
            sent.is_ok_and(|status| status.success()),
            "the server can be sent SIG{signal}"
        );
    }

    /// Opens a blocking connection.
    ///
    /// # Errors
    ///
    /// If the server is unreachable.
    pub fn connect(&self) -> Result<Connection, redis::RedisError> {
        redis::Client::open(self.url())?.get_connection_with_timeout(Duration::from_secs(2))
    }

    /// Runs one command, as on the command line of `redis-cli`.
    ///
    /// # Panics
    ///
    /// If the server is unreachable or answers with an error.
    pub fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(word);
        });
        let mut redis = self.connect().expect("the server is there");
        command
            .query(&mut redis)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns a port without a listener, which has no listener 10000 above it either, where a
/// cluster's server listens too. The system assigns none of these to outgoing connections, so the
/// port stays free while its server is restarted.
pub fn free_port() -> u16 {
    loop {
        let port = 10_000 + (RandomState::new().hash_one(()) % 12_000) as u16;
        if [port, port + 10_000]
            .iter()
            .all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        {
            return port;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The server's time, as a script reads it.
    fn clock(server: &RedisServer) -> i64 {
        server.command(&["EVAL", "return tonumber(redis.call('TIME')[1])", "0"])
    }

    #[test]
    fn stepped_clock_applies_to_scripts_and_survives_restart() {
        let mut server = RedisServer::with_stepping_clock().unwrap();
        let start = clock(&server);
        for (step, ahead) in [(30, 30), (-60, -30), (30, 0)] {
            server.step_clock(step).unwrap();
            let since = clock(&server) - start;
            assert!(
                (ahead..ahead + 10).contains(&since),
                "{since} s instead of {ahead} s"
            );
        }
        server.step_clock(3600).unwrap();
        server.restart().unwrap();
        let since = clock(&server) - start;
        assert!(
            (3600..3620).contains(&since),
            "{since} s instead of an hour"
        );
    }

    #[test]
    fn server_starts_answers_and_forgets_on_restart() {
        let mut server = RedisServer::start().unwrap();
        let () = server.command(&["SET", "a", "1"]);
        assert_eq!(
            server.command::<Option<String>>(&["GET", "a"]).as_deref(),
            Some("1")
        );
        server.restart().unwrap();
        assert_eq!(server.command::<Option<String>>(&["GET", "a"]), None);
    }
}
