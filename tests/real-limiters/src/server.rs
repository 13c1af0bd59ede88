//! A server of the test bed, while it runs.

use std::fs::{File, read_to_string};
use std::io::{Error, Result};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis_server::free_port;

use crate::kind::{Limit, ServerKind};
use crate::log::Log;
use crate::programs::Place;

/// How long a server may take to accept connections.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running server. Dropping it kills the server.
#[derive(Debug)]
pub struct Server {
    child: Child,
    port: u16,
    log: PathBuf,
    /// Has the settings and the log, so it lives as long as the server.
    _directory: tempfile::TempDir,
}

impl Server {
    /// Starts a server. Its program has to be [installed](install).
    ///
    /// # Errors
    ///
    /// If the server does not start.
    pub fn start(kind: ServerKind, limit: Limit) -> Result<Server> {
        let (directory, port) = (tempfile::tempdir()?, free_port());
        let [log, errors] = ["log", "stderr"].map(|name| directory.path().join(name));
        let place = Place {
            directory: directory.path(),
            log: &log,
            packages: &packages(),
            port,
            limit,
        };
        let mut command = kind.command(place)?;
        let child = path_with_sbin(&mut command)
            .stdin(Stdio::null())
            .stderr(File::create(&errors)?)
            .spawn()
            .map_err(|error| Error::new(error.kind(), format!("{kind} does not start: {error}")))?;
        let mut server = Server {
            child,
            port,
            log,
            _directory: directory,
        };
        let start = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if let Some(status) = server.child.try_wait()? {
                let errors = read_to_string(&errors)?;
                return Err(Error::other(format!(
                    "{kind} ended with {status}: {errors}"
                )));
            }
            if start.elapsed() > PATIENCE {
                return Err(Error::other(format!(
                    "{kind} did not accept a connection within {PATIENCE:?}"
                )));
            }
            sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// Stops the server, and returns its log.
    ///
    /// # Errors
    ///
    /// If the log cannot be read.
    pub fn stop(mut self) -> Result<Log> {
        self.kill();
        Log::read(&self.log)
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Installs what servers of these kinds need and what is missing: programs of the system, and packages of npm and PyPI
/// below the target directory.
///
/// # Errors
///
/// If a program or a package cannot be installed.
pub fn install(kinds: &[ServerKind]) -> Result<()> {
    let mut programs: Vec<_> = kinds.iter().map(|kind| kind.program()).collect();
    programs.sort_unstable();
    programs.dedup();
    let status = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/install"))
        .arg(packages())
        .args(programs)
        .status()?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::other(format!(
            "tests/real-limiters/install ended with {status}"
        ))),
    }
}

/// Returns the directory for packages of npm and PyPI.
fn packages() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")),
        PathBuf::from,
    );
    target.join("real-limiters")
}

/// Lets the command find the programs of administrators, too.
fn path_with_sbin(command: &mut Command) -> &mut Command {
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin"))
}
