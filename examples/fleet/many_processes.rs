//! The parent of many processes: first each process counts alone, then they share a count in Redis.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Response;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};
use tollgate::error::BoxError;
use upstream::{Arrival, Log, Tally, Upstream};

use crate::args::Args;
use crate::callers::{Outcome, gather};
use crate::child::{GO, Line, Role, WARM_UP};
use crate::progress::{Progress, TICK};
use crate::report;
use crate::rules;
use crate::run::{Run, who};
use crate::shared_redis::{Redis, Spent};

/// Runs the fleet without a shared count and, if there is a Redis, with one.
pub(crate) async fn compare(args: &Args, redis: Option<&Redis>) -> Result<String, BoxError> {
    println!(
        "{} with {} tasks {}call a service that allows {}, for {:?} each time.\n",
        if args.processes == 1 {
            "1 process".into()
        } else {
            format!("{} processes", args.processes)
        },
        args.tasks,
        if args.processes == 1 { "" } else { "each " },
        args.limit,
        args.time
    );
    let mut runs = vec![run("each for itself", args, None).await?];
    if redis.is_some() {
        runs.push(run("shared in Redis", args, redis).await?);
    }
    Ok(report::many(args, &rules(args.limit), &runs))
}

/// Runs all processes once.
async fn run(name: &'static str, args: &Args, redis: Option<&Redis>) -> Result<Run, BoxError> {
    let warm_ups = (args.processes * args.tasks) as usize;
    let upstream = Upstream::start(rules(args.limit))
        .script(move |call| (call < warm_ups).then(|| Response::new("warm\n".into())));
    let mut children = Vec::new();
    for process in 0..args.processes {
        children.push(Process::start(
            &Role::new(process, upstream.url(), redis),
            args,
        )?);
    }
    for process in &mut children {
        timeout(PATIENCE, process.ready())
            .await
            .map_err(|_| process.late("to get ready"))??;
    }

    let before = spent(redis).await;
    let waiting = Arc::new(AtomicUsize::new(0));
    let mut processes = JoinSet::new();
    for process in &mut children {
        process.go().await?;
    }
    for mut process in children {
        let waiting = Arc::clone(&waiting);
        let time = args.time + PATIENCE;
        processes.spawn(async move {
            let outcome = timeout(time, process.follow(&waiting)).await;
            outcome.map_err(|_| process.late("to report what it saw"))?
        });
    }
    let seen = || {
        let Tally { accepted, refused } = upstream.tally();
        Tally {
            accepted: accepted - warm_ups as u64,
            refused,
        }
    };
    let mut progress = Progress::start(name, args.time);
    let mut tick = interval(TICK);
    let mut outcome = std::pin::pin!(gather(processes));
    let outcome = loop {
        tokio::select! {
            outcome = &mut outcome => break outcome?,
            _ = tick.tick() => progress.show(seen(), waiting.load(Ordering::Relaxed)),
        }
    };
    progress.finish(seen());
    let spent = spent(redis)
        .await
        .zip(before)
        .map(|(after, before)| after.since(before));

    let called = |arrival: &&Arrival| who(arrival).is_none_or(|(_, task)| task != WARM_UP);
    let log = Log::from(
        upstream
            .log()
            .iter()
            .filter(called)
            .cloned()
            .collect::<Vec<_>>(),
    );
    Ok(Run {
        spent,
        ..Run::new(name, outcome, log)
    })
}

/// Returns what Redis spent. Returns `None` without a Redis, or if it does not respond.
async fn spent(redis: Option<&Redis>) -> Option<Spent> {
    redis?.spent().await.ok()
}

/// A child process. It is killed when this is dropped, and ends by itself when its input ends.
struct Process {
    number: u32,
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(role: &Role, args: &Args) -> Result<Process, BoxError> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(role.words())
            .args(&args.passed_on)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let input = child.stdin.take().expect("its input is piped");
        let output = child.stdout.take().expect("its output is piped");
        Ok(Process {
            number: role.process,
            child,
            input,
            lines: BufReader::new(output).lines(),
        })
    }

    /// Waits until the child has opened its connections.
    async fn ready(&mut self) -> Result<(), BoxError> {
        match self.line().await? {
            Line::Ready => Ok(()),
            line => Err(format!(
                "process {} should be ready, but printed {line}",
                self.number
            )
            .into()),
        }
    }

    /// Sends the start signal.
    async fn go(&mut self) -> Result<(), BoxError> {
        Ok(self.input.write_all(format!("{GO}\n").as_bytes()).await?)
    }

    /// Reads the report until its end, and adds the number of waiting tasks to `waiting`.
    async fn follow(&mut self, waiting: &AtomicUsize) -> Result<Outcome, BoxError> {
        let mut outcome = Outcome::default();
        let mut before = 0;
        loop {
            match self.line().await? {
                Line::Ready | Line::Failed(_) => {}
                Line::Waiting(tasks) => {
                    waiting.fetch_add(tasks, Ordering::Relaxed);
                    waiting.fetch_sub(before, Ordering::Relaxed);
                    before = tasks;
                }
                Line::Took(took) => outcome.took.push(took),
                Line::RefusedLocally(calls) => outcome.refused_locally = calls,
                Line::StoreFailures(calls) => outcome.store_failures = calls,
                Line::StoreError(text) => outcome.store_error = Some(text),
                Line::Done => break,
            }
        }
        self.child.wait().await?;
        Ok(outcome)
    }

    /// Returns the next line of the child.
    ///
    /// # Errors
    ///
    /// If the child failed, ended, or printed something else.
    async fn line(&mut self) -> Result<Line, BoxError> {
        match self.lines.next_line().await? {
            Some(line) => match line.parse()? {
                Line::Failed(text) => Err(format!("process {}: {text}", self.number).into()),
                line => Ok(line),
            },
            None => {
                let status = self.child.wait().await?;
                Err(format!("process {} ended too early: {status}", self.number).into())
            }
        }
    }

    fn late(&self, what: &str) -> BoxError {
        format!(
            "process {} took longer than {PATIENCE:?} {what}",
            self.number
        )
        .into()
    }
}

/// How long a child may take to get ready, and to report after its run.
const PATIENCE: Duration = Duration::from_secs(20);
