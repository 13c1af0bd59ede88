//! A fleet that shares one limit over Redis: real processes, in a closed loop, with nothing behind
//! the gate. It measures what each way to share a limit costs the server and the callers.
//!
//! There is no network and no upstream. `tests/fleet` checks how the limit holds at a server.

mod chart;
mod child;
mod clock;
mod figures;
pub(crate) mod growth;
mod task;
mod turn;

use std::time::Duration;

use redis_server::RedisServer;

use crate::contenders::{Contender, Failure, Limit};
use crate::machine::machine;
use figures::{Figures, digits};
use task::{Demand, Record, Task};
use turn::{Span, turn};

pub(crate) use child::run as child;
pub(crate) use task::{CHILD, Task as ChildTask};

/// The options of the command line.
#[derive(Debug)]
pub(crate) struct Options {
    /// The number of turns of each contender.
    pub(crate) rounds: usize,
    /// The file of the chart.
    pub(crate) chart: Option<String>,
    /// The only group to run, by its first letter: `a`, `b` or `c`.
    pub(crate) only: Option<String>,
}

impl Options {
    /// Reads `--rounds N`, `--chart FILE` and `--only GROUP`.
    pub(crate) fn from_words(words: &[String]) -> Result<Options, Failure> {
        let mut options = Options {
            rounds: 3,
            chart: None,
            only: None,
        };
        for pair in words.chunks(2) {
            match pair {
                [name, value] if name == "--rounds" => {
                    options.rounds = value.parse::<usize>()?.max(1)
                }
                [name, value] if name == "--chart" => options.chart = Some(value.clone()),
                [name, value] if name == "--only" => options.only = Some(value.clone()),
                _ => {
                    return Err(
                        format!("{pair:?}: --rounds N, --chart FILE or --only GROUP").into(),
                    );
                }
            }
        }
        Ok(options)
    }
}

/// Measures, prints the tables, writes the chart.
///
/// # Errors
///
/// If there is no server, or a child fails.
pub(crate) fn report(options: &Options) -> Result<(), Failure> {
    let server = RedisServer::start()?;
    let rounds = options.rounds;
    let asked = |group: &str| options.only.as_deref().is_none_or(|only| only == group);
    println!("# A fleet behind one limit\n");
    println!("{}\n", machine(" -- fleet"));
    let idle = idle(&server)?;
    println!(
        "Real processes over a real Redis; everybody has a turn in each of {rounds} rounds, and figures are medians. \
         The server's CPU time is all of it, also what it takes to do nothing: {:.0} us a second. The most in any second \
         is the largest in all rounds, by when the callers were let through; the margin of tollgate, 20 ms, leaves \
         98.0 % of a limit per second.\n",
        idle * 1e6
    );

    if asked("a") {
        println!("## 4 processes of 64 callers, always asking, behind 1000 a second\n");
        let contenders = Contender::ALL.map(|contender| task(&server, contender, 1000, 64));
        let measured = rounds_of(&server, &contenders, 4, Span::short(), rounds)?;
        table(&contenders, &measured, idle);
        if let Some(file) = &options.chart {
            std::fs::write(file, chart::svg(&contenders, &measured))?;
        }
    }
    if asked("b") {
        println!("## The same at 10,000, 100,000 and 1,000,000 a second\n");
        let contenders: Vec<Task> = [10_000, 100_000, 1_000_000]
            .into_iter()
            .flat_map(|count| [(Contender::Tollgate, count), (Contender::Gcra, count)])
            .map(|(contender, count)| task(&server, contender, count, 64))
            .collect();
        table(
            &contenders,
            &rounds_of(&server, &contenders, 4, Span::short(), rounds)?,
            idle,
        );
    }
    if asked("c") {
        // The callers that wait are few and slow, so their figures vary little.
        let rounds = rounds.div_ceil(3);
        println!("## Waiting: 10 processes of 10 callers, always asking, behind 20 a second\n");
        println!("A fair wait is 5 s. Rounds here and below: {rounds}.\n");
        let some = [
            Contender::Tollgate,
            Contender::Gcra,
            Contender::Windows,
            Contender::Spacing,
        ];
        let contenders = some.map(|contender| task(&server, contender, 20, 10));
        table(
            &contenders,
            &rounds_of(&server, &contenders, 10, Span::long(), rounds)?,
            idle,
        );

        println!("## Waiting: 10 processes of one caller, always asking, behind one a second\n");
        println!("A fair wait is 10 s.\n");
        let contenders = some.map(|contender| task(&server, contender, 1, 1));
        table(
            &contenders,
            &rounds_of(&server, &contenders, 10, Span::long(), rounds)?,
            idle,
        );
    }
    Ok(())
}

fn task(server: &RedisServer, contender: Contender, count: u32, callers: u64) -> Task {
    Task {
        contender,
        url: server.url(),
        limit: Limit {
            count,
            window: Duration::from_secs(1),
        },
        demand: Demand::Loop(callers),
        record: if count < 1_000_000 {
            Record::Each
        } else {
            Record::Count
        },
        keys: 1,
        number: 0,
    }
}

impl Span {
    /// Returns six windows of tollgate at a limit per second.
    fn short() -> Span {
        Span {
            warm_up: Duration::from_millis(2500),
            measured: Duration::from_millis(6120),
        }
    }

    /// Returns the span for callers that wait for seconds.
    fn long() -> Span {
        Span {
            warm_up: Duration::from_secs(11),
            measured: Duration::from_secs(20),
        }
    }
}

/// Runs all contenders in turn, `rounds` times, and returns the medians.
fn rounds_of(
    server: &RedisServer,
    tasks: &[Task],
    processes: u64,
    span: Span,
    rounds: usize,
) -> Result<Vec<Figures>, Failure> {
    let mut turns = vec![Vec::new(); tasks.len()];
    for round in 0..rounds {
        for first in 0..tasks.len() {
            // Each contender is the first of a round once.
            let index = (round + first) % tasks.len();
            let figures = turn(server, &tasks[index], processes, span)?;
            eprintln!(
                "{} {}: {figures:?}",
                tasks[index].contender.word(),
                tasks[index].limit.count
            );
            turns[index].push(figures);
        }
    }
    Ok(turns.iter().map(|turns| Figures::median(turns)).collect())
}

/// Returns the fraction of a core that an idle server uses.
fn idle(server: &RedisServer) -> Result<f64, Failure> {
    let span = Span {
        warm_up: Duration::from_millis(200),
        measured: Duration::from_secs(2),
    };
    let turns: Result<Vec<_>, _> = (0..3)
        .map(|_| turn(server, &task(server, Contender::Nothing, 1, 1), 0, span))
        .collect();
    Ok(Figures::median(&turns?).core)
}

/// Prints a row for each contender.
fn table(tasks: &[Task], measured: &[Figures], idle: f64) {
    let limits = tasks
        .iter()
        .any(|task| task.limit.count != tasks[0].limit.count);
    let (title, rule) = if limits {
        ("| limit per second ", "|--:")
    } else {
        ("", "")
    };
    println!(
        "{title}| limiter | store calls a grant | Redis, us of CPU a grant | to tollgate | the same above idle | \
         of a Redis core | callers, us of CPU a grant | of the limit used | most in any second | wait p50, p99 | \
         bytes in Redis | errors |"
    );
    println!("{rule}|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut tollgate = f64::NAN;
    for (task, figures) in tasks.iter().zip(measured) {
        if task.contender == Contender::Tollgate {
            tollgate = figures.redis;
        }
        let limit = if limits {
            format!("| {} ", task.limit.count)
        } else {
            String::new()
        };
        let used = 100.0 * figures.rate / f64::from(task.limit.count);
        let largest = figures
            .largest
            .map_or("not seen".into(), |largest| largest.to_string());
        let wait = figures.wait.map_or("not seen".into(), |[half, most]| {
            format!("{half:.0}, {most:.0} ms")
        });
        println!(
            "{limit}| {} | {} | {} | {} | {} | {:.1} % | {} | {used:.1} % | {largest} | {wait} | {:.0} | {} |",
            task.contender.name(),
            digits(figures.calls),
            digits(figures.redis),
            digits(figures.redis / tollgate),
            digits(figures.redis_above(idle)),
            100.0 * figures.core,
            digits(figures.client),
            figures.bytes,
            figures.errors,
        );
    }
    println!();
    disturbed(measured);
}

/// Prints a note if other programs kept the machine busy.
fn disturbed(measured: &[Figures]) {
    let most = measured
        .iter()
        .map(|figures| figures.others)
        .fold(0.0, f64::max);
    if most > turn::DISTURBED {
        println!(
            "Something else took up to {:.0} % of the machine meanwhile: run it again.\n",
            100.0 * most
        );
    }
}
