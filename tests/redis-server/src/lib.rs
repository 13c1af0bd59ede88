//! A Redis server of one's own on loopback, for tollgate's tests and examples: started, stopped, paused, killed and
//! restarted at will.
//!
//! Needs `redis-server` in the `PATH` (Debian: `apt-get install redis-server`).

#![allow(clippy::disallowed_methods, reason = "it is no part of tollgate: its clock is the machine's")]

use std::io::{Error, ErrorKind};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue};
use tempfile::TempDir;

/// A running server. Dropping it kills it and removes its data.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    options: Vec<String>,
    directory: TempDir,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts one on a free port; it keeps nothing on disk.
    ///
    /// # Errors
    ///
    /// When `redis-server` is not there, or does not answer within ten seconds.
    pub fn start() -> Result<Self, Error> {
        RedisServer::with_options(&["--save", ""])
    }

    /// The same with options of its own, as on the command line of `redis-server`.
    ///
    /// # Errors
    ///
    /// When `redis-server` is not there, or does not answer within ten seconds.
    pub fn with_options(options: &[&str]) -> Result<Self, Error> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server = RedisServer { port, options, directory: TempDir::new()?, child: None };
        server.restart()?;
        Ok(server)
    }

    /// `redis://127.0.0.1:port/`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The id of its process.
    ///
    /// # Panics
    ///
    /// When it was killed.
    pub fn id(&self) -> u32 {
        self.child.as_ref().expect("the server runs").id()
    }

    /// Kills it as `kill -9` does. Its port refuses connections then.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it again on the same port, killing it first; what it had in memory is gone unless its options say so.
    ///
    /// # Errors
    ///
    /// When it does not answer within ten seconds.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.kill();
        let mut command = Command::new("redis-server");
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"]);
        command.arg("--dir").arg(self.directory.path());
        command.args(&self.options).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(
                ErrorKind::NotFound,
                "redis-server is missing: install it (Debian: apt-get install redis-server)",
            ),
            _ => error,
        })?;
        self.child = Some(child);
        let start = Instant::now();
        while let Err(error) = self.connect().and_then(|mut redis| redis::cmd("PING").exec(&mut redis)) {
            if start.elapsed() > Duration::from_secs(10) {
                return Err(Error::other(error));
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Stops it where it stands (SIGSTOP): it accepts connections and answers nothing.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Lets it go on (SIGCONT).
    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([format!("-{signal}"), self.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the server can be sent SIG{signal}");
    }

    /// A connection that blocks.
    ///
    /// # Errors
    ///
    /// When the server is away.
    pub fn connect(&self) -> Result<Connection, redis::RedisError> {
        redis::Client::open(self.url())?.get_connection_with_timeout(Duration::from_secs(2))
    }

    /// Runs one command, as on the command line of `redis-cli`.
    ///
    /// # Panics
    ///
    /// When the server is away or answers an error.
    pub fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(word);
        });
        let mut redis = self.connect().expect("the server is there");
        command.query(&mut redis).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_starts_answers_and_forgets_when_it_is_restarted() {
        let mut server = RedisServer::start().unwrap();
        let () = server.command(&["SET", "a", "1"]);
        assert_eq!(server.command::<Option<String>>(&["GET", "a"]).as_deref(), Some("1"));
        server.restart().unwrap();
        assert_eq!(server.command::<Option<String>>(&["GET", "a"]), None);
    }
}
