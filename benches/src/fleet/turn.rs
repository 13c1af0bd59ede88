//! A turn of one contender: the server is emptied, the children call, and the costs are read.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use redis_server::RedisServer;

use super::clock;
use super::figures::{Figures, Grant, Seen};
use super::task::Task;
use crate::contenders::Failure;
use crate::machine::machine_time;

/// How long a turn is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// The time before anything is measured.
    pub(crate) warm_up: Duration,
    pub(crate) measured: Duration,
}

/// Runs `processes` processes that work at `task`. If other programs keep the machine busy, the
/// turn is repeated, at most twice; the quietest turn counts.
///
/// # Errors
///
/// If a process does not start or does not report.
pub(crate) fn turn(
    server: &RedisServer,
    task: &Task,
    processes: u64,
    span: Span,
) -> Result<Figures, Failure> {
    let mut quietest = turn_once(server, task, processes, span)?;
    for _ in 0..REPEATS {
        if quietest.others <= DISTURBED {
            break;
        }
        let figures = turn_once(server, task, processes, span)?;
        if figures.others < quietest.others {
            quietest = figures;
        }
    }
    Ok(quietest)
}

/// The fraction of all cores beyond which other programs disturb a turn, and how often a disturbed
/// turn is repeated.
pub(crate) const DISTURBED: f64 = 0.1;
const REPEATS: usize = 2;

fn turn_once(
    server: &RedisServer,
    task: &Task,
    processes: u64,
    span: Span,
) -> Result<Figures, Failure> {
    let mut redis = server.connect()?;
    redis::cmd("FLUSHALL").arg("SYNC").exec(&mut redis)?;
    let start = |number| {
        Worker::start(&Task {
            number,
            ..task.clone()
        })
    };
    let mut workers: Vec<Worker> = (0..processes).map(start).collect::<Result<_, _>>()?;
    for worker in &mut workers {
        worker.ready()?;
    }

    let from = clock::now() + nanos(span.warm_up);
    let until = from + nanos(span.measured);
    for worker in &mut workers {
        writeln!(worker.ear()?, "{from} {until}")?;
    }
    thread::sleep(Duration::from_nanos(
        (from - nanos(span.warm_up) / 4).saturating_sub(clock::now()),
    ));
    let [bytes, bytes_of_a_key] = bytes(&mut redis)?;
    thread::sleep(Duration::from_nanos(from.saturating_sub(clock::now())));
    let (before, [busy, all]) = (Reading::take(&mut redis)?, machine_time());
    thread::sleep(Duration::from_nanos(until.saturating_sub(clock::now())));
    let (after, [busy_after, all_after]) = (Reading::take(&mut redis)?, machine_time());

    let calls = after.calls(task) - before.calls(task);
    let redis = after.cpu.saturating_sub(before.cpu);
    let mut seen = Seen {
        from,
        until,
        calls,
        redis,
        bytes,
        bytes_of_a_key,
        ..Seen::default()
    };
    for worker in &mut workers {
        worker.report(&mut seen)?;
    }
    let others = (busy_after - busy).saturating_sub(seen.redis + seen.client);
    seen.others = others.as_secs_f64() / (all_after - all).as_secs_f64();
    Ok(seen.figures(task))
}

/// Returns the memory of all keys if they are few, and the mean of some keys if they are many. It
/// is the largest of several samples, because some keys exist for a millisecond only.
fn bytes(redis: &mut redis::Connection) -> redis::RedisResult<[f64; 2]> {
    let mut most = [0.0_f64; 2];
    for _ in 0..20 {
        let (_, names): (u64, Vec<String>) = redis::cmd("SCAN").arg(0).query(redis)?;
        let (mut sum, mut keys) = (0.0, 0.0);
        for name in names {
            let bytes: Option<f64> = redis::cmd("MEMORY")
                .arg("USAGE")
                .arg(name)
                .arg("SAMPLES")
                .arg(0)
                .query(redis)?;
            if let Some(bytes) = bytes {
                (sum, keys) = (sum + bytes, keys + 1.0);
            }
        }
        if keys > 0.0 {
            most = [most[0].max(sum), most[1].max(sum / keys)];
        }
    }
    Ok(most)
}

/// The statistics of the server.
struct Reading {
    commands: Vec<(String, u64)>,
    cpu: Duration,
}

impl Reading {
    fn take(redis: &mut redis::Connection) -> Result<Reading, Failure> {
        let mut info = redis::cmd("INFO");
        info.arg("commandstats").arg("cpu");
        let text: String = info.query(redis)?;
        let seconds = |name: &str| -> Option<f64> {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?
                .parse()
                .ok()
        };
        let cpu = seconds("used_cpu_user").zip(seconds("used_cpu_sys"));
        let (user, system) = cpu.ok_or("the server does not tell its CPU time")?;
        let command = |line: &str| -> Option<(String, u64)> {
            let (name, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let calls = figures
                .strip_prefix("calls=")?
                .split(',')
                .next()?
                .parse()
                .ok()?;
            Some((name.into(), calls))
        };
        Ok(Reading {
            commands: text.lines().filter_map(command).collect(),
            cpu: Duration::try_from_secs_f64(user + system)?,
        })
    }

    /// Returns the calls that the server received.
    fn calls(&self, task: &Task) -> u64 {
        let counts = task.contender.calls();
        self.commands
            .iter()
            .filter(|(name, _)| counts.contains(&name.as_str()))
            .map(|(_, calls)| calls)
            .sum()
    }
}

/// A child process. It is killed when it is dropped.
struct Worker {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Worker {
    fn start(task: &Task) -> Result<Worker, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(task.to_words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("its output is a pipe")?;
        Ok(Worker {
            child,
            output: BufReader::new(output),
        })
    }

    fn ready(&mut self) -> Result<(), Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.trim() == "ready" {
            Ok(())
        } else {
            Err("a child did not get ready; its error is above".into())
        }
    }

    fn ear(&mut self) -> Result<&mut impl Write, Failure> {
        Ok(self.child.stdin.as_mut().ok_or("its input is a pipe")?)
    }

    /// Adds the report of the child.
    fn report(&mut self, seen: &mut Seen) -> Result<(), Failure> {
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        let mut lines = text.lines().map(numbers);
        let &[grants, cpu, memory, keys, errors] =
            lines.next().flatten().unwrap_or_default().as_slice()
        else {
            return Err("a child did not report".into());
        };
        seen.grants += grants;
        seen.client += Duration::from_nanos(cpu);
        seen.memory += memory;
        seen.keys += keys;
        seen.errors += errors;
        for line in lines {
            let &[at, waited, count] = line.unwrap_or_default().as_slice() else {
                return Err("a child's report is garbled".into());
            };
            seen.each.push(Grant { at, waited, count });
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The child has ended by itself, unless there was an error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn numbers(line: &str) -> Option<Vec<u64>> {
    line.split(' ').map(|word| word.parse().ok()).collect()
}

fn nanos(span: Duration) -> u64 {
    span.as_nanos() as u64
}
