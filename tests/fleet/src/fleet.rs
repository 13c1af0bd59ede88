//! Workers as child processes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::events::Report;
use crate::options::Options;

/// How long a worker may take to start, and to end after its span.
const PATIENCE: Duration = Duration::from_secs(15);

/// Running workers. Dropping it kills them.
pub struct Fleet {
    workers: Vec<Worker>,
    span: Duration,
}

struct Worker {
    child: Child,
    lines: Receiver<String>,
}

impl Fleet {
    /// Starts `processes` workers of `program`, which wait for [`go`](Fleet::go).
    ///
    /// # Panics
    ///
    /// If a worker does not get ready.
    pub fn start(program: impl AsRef<Path>, processes: usize, options: &Options) -> Fleet {
        let start = |number: usize| {
            let mut options = Options {
                who: format!("{}{number}", options.who),
                ..options.clone()
            };
            let first = options.paths.len() * number / processes;
            options.paths.rotate_left(first);
            Worker::start(program.as_ref(), &options)
        };
        let mut workers: Vec<_> = (0..processes).map(start).collect();
        for worker in &mut workers {
            let ready = worker.lines.recv_timeout(PATIENCE);
            assert_eq!(
                ready.as_deref(),
                Ok("ready"),
                "a worker gets ready; its errors are above"
            );
        }
        Fleet {
            workers,
            span: options.span,
        }
    }

    /// Sends "go" to all workers.
    pub fn go(&mut self) {
        for worker in &mut self.workers {
            // The input of a killed worker is closed.
            let _ = worker
                .child
                .stdin
                .as_mut()
                .map(|stdin| stdin.write_all(b"go\n"));
        }
    }

    /// Kills a worker, as `kill -9` does.
    pub fn kill(&mut self, number: usize) {
        self.workers[number].kill();
    }

    /// Asks a worker to end (SIGTERM): it drains its layer first.
    pub fn terminate(&self, number: usize) {
        self.workers[number].signal("TERM");
    }

    /// Stops a worker (SIGSTOP).
    pub fn pause(&self, number: usize) {
        self.workers[number].signal("STOP");
    }

    /// Resumes a stopped worker (SIGCONT).
    pub fn resume(&self, number: usize) {
        self.workers[number].signal("CONT");
    }

    /// Ends all workers before their span is over, in order: they return their unused permits.
    pub fn stop(mut self) -> Vec<Report> {
        self.workers
            .iter_mut()
            .for_each(|worker| drop(worker.child.stdin.take()));
        self.finish()
    }

    /// Waits until all workers end, and returns their reports.
    ///
    /// # Panics
    ///
    /// If a worker does not end.
    pub fn finish(mut self) -> Vec<Report> {
        let latest = Instant::now() + self.span + PATIENCE;
        self.workers
            .iter_mut()
            .map(|worker| worker.report(latest))
            .collect()
    }
}

impl Worker {
    fn start(program: &Path, options: &Options) -> Worker {
        let mut command = Command::new(program);
        if !options.certificate.is_empty() {
            command.env("SSL_CERT_FILE", &options.certificate);
        }
        let mut child = command
            .args(options.to_words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let output = child.stdout.take().expect("its output is a pipe");
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The receiver is gone if the test has failed.
                let _ = sender.send(line);
            }
        });
        Worker { child, lines }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args([format!("-{signal}"), self.child.id().to_string()])
            .status();
        assert!(
            sent.is_ok_and(|status| status.success()),
            "a worker can be sent SIG{signal}"
        );
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn report(&mut self, latest: Instant) -> Report {
        let mut report = Report::default();
        loop {
            let line = match self
                .lines
                .recv_timeout(latest.saturating_duration_since(Instant::now()))
            {
                Ok(line) => line,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("a worker does not end"),
            };
            if line == "done" {
                report.ended = true;
            } else if let Some(warning) = line.strip_prefix("warned ") {
                report.warnings.push(warning.into());
            } else if let Some(at) = line.strip_prefix("quota set ") {
                report.quotas.push(at.parse().expect("a moment"));
            } else if let Some(at) = line.strip_prefix("drained ") {
                report.drained = at.parse().ok();
            } else {
                report.events.push(
                    line.parse()
                        .unwrap_or_else(|error| panic!("{line}: {error}")),
                );
            }
        }
        let _ = self.child.wait();
        report
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}
