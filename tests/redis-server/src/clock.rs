//! A wall clock that can be stepped, for one process: libfaketime in front of the system's clock.

use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Where libfaketime reads the offset of the clock.
const FILE: &str = "FAKETIME_TIMESTAMP_FILE";

/// The wall clock of processes that are started with it. Their monotonic clock is the machine's.
#[derive(Debug)]
pub struct SteppingClock {
    library: PathBuf,
    directory: TempDir,
}

impl SteppingClock {
    /// Makes a clock that runs as the machine's until it is stepped.
    ///
    /// # Errors
    ///
    /// If libfaketime is missing, or its file cannot be written.
    pub fn new() -> Result<Self, Error> {
        let clock = SteppingClock {
            library: libfaketime()?,
            directory: TempDir::new()?,
        };
        clock.set_ahead(0.0)?;
        Ok(clock)
    }

    /// Gives this clock to the process that `command` starts, and to every process that this one
    /// starts.
    ///
    /// `preloaded` are libraries to load after libfaketime.
    pub fn give_to(&self, command: &mut Command, preloaded: &[&str]) {
        let library = self.library.display().to_string();
        let libraries = [&[library.as_str()], preloaded].concat().join(":");
        command
            .env_remove("FAKETIME")
            .env("LD_PRELOAD", libraries)
            .env(FILE, self.file());
        // By default libfaketime reads the file every ten seconds, and steps the clock of timers
        // too.
        command
            .env("FAKETIME_NO_CACHE", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
    }

    /// Sets the clock to `seconds` ahead of the machine's.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn set_ahead(&self, seconds: f64) -> Result<(), Error> {
        write_ahead(&self.file(), seconds)
    }

    /// Sets the clock of the calling process, which must have been started with one, to `seconds`
    /// ahead of the machine's.
    ///
    /// # Errors
    ///
    /// If the process was not started with a clock, or the file cannot be written.
    pub fn set_own_ahead(seconds: f64) -> Result<(), Error> {
        let file = std::env::var_os(FILE)
            .ok_or_else(|| Error::other("this process has the machine's clock"))?;
        write_ahead(Path::new(&file), seconds)
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("clock")
    }
}

/// Moves the file into place, so that no process reads half of it.
fn write_ahead(file: &Path, seconds: f64) -> Result<(), Error> {
    let new = file.with_extension("new");
    fs::write(&new, format!("{seconds:+}\n"))?;
    fs::rename(new, file)
}

/// The path in Debian and other distributions.
fn libfaketime() -> Result<PathBuf, Error> {
    let by_architecture = fs::read_dir("/usr/lib")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    by_architecture
        .chain([
            "/usr/lib".into(),
            "/usr/lib64".into(),
            "/usr/local/lib".into(),
        ])
        .map(|directory| directory.join("faketime/libfaketime.so.1"))
        .find(|library| library.exists())
        .ok_or_else(|| {
            let message = "libfaketime is missing: install it (Debian: apt-get install faketime)";
            Error::new(ErrorKind::NotFound, message)
        })
}
