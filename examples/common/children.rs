//! Child processes: started, listened to, waited for.

use std::ffi::OsStr;
use std::io::Error;
use std::path::PathBuf;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// What a child printed.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// Which child.
    pub(crate) who: String,
    /// The line.
    pub(crate) text: String,
}

/// The child processes of one program. Dropping this kills those that still run.
#[derive(Debug)]
pub(crate) struct Children {
    program: PathBuf,
    environment: Vec<(String, String)>,
    running: Vec<(String, Child)>,
    /// How many may still print something.
    open: usize,
    /// What they print; `None` from one that will print no more.
    lines: (UnboundedSender<Option<Line>>, UnboundedReceiver<Option<Line>>),
}

impl Children {
    /// None yet of `program`.
    pub(crate) fn of(program: PathBuf) -> Self {
        let lines = unbounded_channel();
        Children { program, environment: Vec::new(), running: Vec::new(), open: 0, lines }
    }

    /// None yet of this program.
    pub(crate) fn of_this_program() -> Result<Self, Error> {
        Ok(Children::of(std::env::current_exe()?))
    }

    /// Sets a variable of all that are started from now on: the way for what is secret, because everybody on the
    /// machine can read the command line of a process.
    pub(crate) fn environment(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Starts one more, called `who`.
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
            .map_err(|error| Error::new(error.kind(), format!("{}: {error}", self.program.display())))?;
        let output = child.stdout.take().expect("its output is piped");
        let (sender, name) = (self.lines.0.clone(), who.clone());
        tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(text)) = lines.next_line().await {
                let _ = sender.send(Some(Line { who: name.clone(), text })); // nobody may listen any more
            }
            let _ = sender.send(None);
        });
        self.open += 1;
        self.running.push((who, child));
        Ok(())
    }

    /// The next line of any of them; `None` when none will print any more.
    pub(crate) async fn line(&mut self) -> Option<Line> {
        while self.open > 0 {
            match self.lines.1.recv().await? {
                Some(line) => return Some(line),
                None => self.open -= 1,
            }
        }
        None
    }

    /// Closes their input, by which those that wait for it know that it is time to end.
    pub(crate) fn close(&mut self) {
        for (_, child) in &mut self.running {
            drop(child.stdin.take());
        }
    }

    /// Closes their input and waits for all of them.
    ///
    /// # Errors
    ///
    /// When one of them failed.
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
