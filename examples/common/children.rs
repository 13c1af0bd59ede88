//! Child processes: starts them, reads their output, and waits for their end.

use std::ffi::OsStr;
use std::io::Error;
use std::path::PathBuf;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A line that a child printed.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// The name of the child.
    pub(crate) who: String,
    /// The text of the line.
    pub(crate) text: String,
}

/// The child processes of one program. Dropping this kills those still running.
#[derive(Debug)]
pub(crate) struct Children {
    program: PathBuf,
    environment: Vec<(String, String)>,
    running: Vec<(String, Child)>,
    /// How many children may still print.
    open: usize,
    /// The lines of all children; `None` when a child has closed its output.
    lines: (
        UnboundedSender<Option<Line>>,
        UnboundedReceiver<Option<Line>>,
    ),
}

impl Children {
    /// Prepares children of `program`; starts none yet.
    pub(crate) fn of(program: PathBuf) -> Self {
        let lines = unbounded_channel();
        Children {
            program,
            environment: Vec::new(),
            running: Vec::new(),
            open: 0,
            lines,
        }
    }

    /// Prepares children of this program; starts none yet.
    pub(crate) fn of_this_program() -> Result<Self, Error> {
        Ok(Children::of(std::env::current_exe()?))
    }

    /// Sets an environment variable for all children started from now on. Pass secrets this way:
    /// every user of the machine can read the command line of a process.
    pub(crate) fn environment(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Starts a child with the name `who`.
    pub(crate) fn start(
        &mut self,
        who: impl Into<String>,
        words: impl IntoIterator<Item: AsRef<OsStr>>,
    ) -> Result<(), Error> {
        let who = who.into();
        let mut child = Command::new(&self.program)
            .args(words)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                Error::new(error.kind(), format!("{}: {error}", self.program.display()))
            })?;
        let output = child.stdout.take().expect("its output is piped");
        let (sender, name) = (self.lines.0.clone(), who.clone());
        tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(text)) = lines.next_line().await {
                let _ = sender.send(Some(Line {
                    who: name.clone(),
                    text,
                })); // nobody may listen any more
            }
            let _ = sender.send(None);
        });
        self.open += 1;
        self.running.push((who, child));
        Ok(())
    }

    /// Waits for the next line of any child; `None` when all have closed their output.
    pub(crate) async fn line(&mut self) -> Option<Line> {
        while self.open > 0 {
            match self.lines.1.recv().await? {
                Some(line) => return Some(line),
                None => self.open -= 1,
            }
        }
        None
    }

    /// Closes the input of all children. Children that read their input then end.
    pub(crate) fn close(&mut self) {
        for (_, child) in &mut self.running {
            drop(child.stdin.take());
        }
    }

    /// Closes the input of all children, and waits for their end.
    ///
    /// # Errors
    ///
    /// If a child failed.
    pub(crate) async fn end(&mut self) -> Result<(), Error> {
        self.close();
        for (who, mut child) in self.running.drain(..) {
            let status = child.wait().await?;
            if !status.success() {
                return Err(Error::other(format!("{who} ended with {status}")));
            }
        }
        Ok(())
    }
}
