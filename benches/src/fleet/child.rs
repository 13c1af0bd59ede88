//! A process that calls: a real one, started by the benchmark from its own program.
//!
//! It prints `ready`, and begins when it reads the measured span. After the span it prints what it
//! saw.

use std::io::{BufWriter, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::coop::consume_budget;
use tokio::time::{sleep, sleep_until};

use super::clock;
use super::task::{Demand, Record, Task};
use crate::contenders::counter::Counter;
use crate::contenders::gcra::Gcra;
use crate::contenders::log::Log;
use crate::contenders::none::Open;
use crate::contenders::spacing::Spacing;
use crate::contenders::tollgate::Tollgate;
use crate::contenders::windows::Windows;
use crate::contenders::{Contender, Failure, Gate};
use crate::machine::{cpu_time, resident};

/// Runs a child until its end.
pub(crate) fn run(task: &Task) -> Result<(), Failure> {
    let seen = Arc::new(Seen::new(task.record));
    let (ready, is_ready) = mpsc::channel();
    let (go, gone) = oneshot::channel();
    let calls = work(task.clone(), seen.clone(), Start { ready, go: gone });
    // The callers have their own thread, so that the measuring thread is never late.
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let ended = runtime
            .map_err(Failure::from)
            .and_then(|runtime| runtime.block_on(calls));
        if let Err(error) = ended {
            eprintln!("a child of the bench: {error}");
        }
    });
    is_ready.recv()?;
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let (from, until) = line.trim().split_once(' ').ok_or("no span to measure")?;
    let (from, until): (u64, u64) = (from.parse()?, until.parse()?);

    let before = resident();
    go.send(()).map_err(|()| "nobody is left to call")?;
    thread::sleep(Duration::from_nanos(from.saturating_sub(clock::now())));
    let (cpu, grants) = (cpu_time(), seen.grants());
    let samples = if task.record == Record::Count {
        sample(&seen, until)
    } else {
        Vec::new()
    };
    thread::sleep(Duration::from_nanos(until.saturating_sub(clock::now())));
    let (cpu, grants) = (cpu_time().saturating_sub(cpu), seen.grants() - grants);
    let memory = resident().saturating_sub(before);

    if let Some(error) = seen.error.get() {
        eprintln!(
            "{}, process {}: {error}",
            task.contender.word(),
            task.number
        );
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    let (errors, keys) = (
        seen.errors.load(Ordering::Relaxed),
        seen.keys.load(Ordering::Relaxed),
    );
    writeln!(out, "{grants} {} {memory} {keys} {errors}", cpu.as_nanos())?;
    let each = std::mem::take(&mut *seen.each.lock().unwrap_or_else(PoisonError::into_inner));
    for (at, waited) in each {
        writeln!(out, "{at} {waited} 1")?;
    }
    for (at, count) in samples {
        writeln!(out, "{at} 0 {count}")?;
    }
    out.flush()?;
    // Callers that still wait end with the process.
    std::process::exit(0)
}

/// What the callers of this process saw.
struct Seen {
    grants: AtomicU64,
    errors: AtomicU64,
    /// How many keys were called.
    keys: AtomicU64,
    /// The moment and the wait of each grant, in nanoseconds.
    each: Mutex<Vec<(u64, u64)>>,
    /// The text of the first error.
    error: OnceLock<String>,
    record: Record,
}

impl Seen {
    fn new(record: Record) -> Self {
        // Touched before memory is measured.
        let mut each = if record == Record::Each {
            vec![(1, 1); 1 << 17]
        } else {
            Vec::new()
        };
        each.clear();
        let zero = AtomicU64::default;
        Seen {
            grants: zero(),
            errors: zero(),
            keys: zero(),
            each: Mutex::new(each),
            error: OnceLock::new(),
            record,
        }
    }

    fn grants(&self) -> u64 {
        self.grants.load(Ordering::Relaxed)
    }

    /// Passes the gate once; returns whether that succeeded.
    async fn call(&self, gate: &impl Gate) -> bool {
        match self.record {
            Record::Each => {
                let asked = clock::now();
                let passed = gate.pass().await;
                let now = clock::now();
                if passed.is_ok() {
                    let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
                    each.push((now, now - asked));
                }
                self.count(passed)
            }
            Record::Count => self.count(gate.pass().await),
        }
    }

    fn count(&self, passed: Result<(), Failure>) -> bool {
        let counter = match &passed {
            Ok(()) => &self.grants,
            Err(error) => {
                self.error.get_or_init(|| error.to_string());
                &self.errors
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
        passed.is_ok()
    }
}

async fn work(task: Task, seen: Arc<Seen>, start: Start) -> Result<(), Failure> {
    let (url, limit) = (&task.url, task.limit);
    match task.contender {
        Contender::Tollgate => serve(Tollgate::new(url, limit).await?, &task, seen, start).await,
        Contender::Gcra => serve(Gcra::new(url, limit).await?, &task, seen, start).await,
        Contender::Counter => serve(Counter::new(url, limit).await?, &task, seen, start).await,
        Contender::Windows => serve(Windows::new(url, limit).await?, &task, seen, start).await,
        Contender::Log => serve(Log::new(url, limit).await?, &task, seen, start).await,
        Contender::Spacing => serve(Spacing::new(url, limit).await?, &task, seen, start).await,
        Contender::Nothing => serve(Open, &task, seen, start).await,
    }
}

async fn serve(gate: impl Gate, task: &Task, seen: Arc<Seen>, start: Start) -> Result<(), Failure> {
    start.ready.send(())?;
    start.go.await?;
    match task.demand {
        Demand::Loop(callers) => in_loops(&gate, task, callers, &seen).await,
        Demand::Every(micros) => paced(&gate, task, micros, &seen).await,
    }
}

/// Runs callers in a closed loop.
async fn in_loops(
    gate: &impl Gate,
    task: &Task,
    callers: u64,
    seen: &Arc<Seen>,
) -> Result<(), Failure> {
    let mut starts = fastrand::Rng::with_seed(task.number);
    let caller = |number: u64| {
        // If there are several processes, each key gets its callers from several of them.
        let (gate, seen) = (
            gate.keyed((task.number * callers + number) % task.keys),
            seen.clone(),
        );
        // Callers start one after the other. Otherwise all keys could be due at the same moment for
        // ever.
        let late = if task.keys > 1 {
            starts.u64(..task.limit.window.as_micros() as u64)
        } else {
            0
        };
        tokio::spawn(async move {
            sleep(Duration::from_micros(late)).await;
            loop {
                if !seen.call(&gate).await {
                    sleep(Duration::from_millis(1)).await;
                }
                // A caller that has permits at hand yields to the others.
                consume_budget().await;
            }
        })
    };
    seen.keys.store(callers.min(task.keys), Ordering::Relaxed);
    let _callers: Vec<_> = (0..callers).map(caller).collect();
    // The callers run until the process ends.
    std::future::pending().await
}

/// Makes a call at each tick.
async fn paced(
    gate: &impl Gate,
    task: &Task,
    micros: u64,
    seen: &Arc<Seen>,
) -> Result<(), Failure> {
    let mut keys = fastrand::Rng::with_seed(task.number);
    let mut called = vec![false; task.keys as usize];
    // Processes start one after the other.
    let mut next = tokio::time::Instant::now() + Duration::from_micros(keys.u64(..micros));
    loop {
        sleep_until(next).await;
        next += Duration::from_micros(micros);
        let key = keys.u64(..task.keys);
        if !std::mem::replace(&mut called[key as usize], true) {
            seen.keys.fetch_add(1, Ordering::Relaxed);
        }
        let (gate, seen) = (gate.keyed(key), seen.clone());
        tokio::spawn(async move { seen.call(&gate).await });
    }
}

/// The signal to the callers that the measurement begins.
struct Start {
    ready: mpsc::Sender<()>,
    go: oneshot::Receiver<()>,
}

/// Returns the grants in each ten milliseconds from now on.
fn sample(seen: &Seen, until: u64) -> Vec<(u64, u64)> {
    let mut before = seen.grants();
    let mut samples = Vec::new();
    while clock::now() < until {
        thread::sleep(Duration::from_millis(10));
        let grants = seen.grants();
        samples.push((clock::now(), grants - before));
        before = grants;
    }
    samples
}
