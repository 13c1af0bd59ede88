//! How the costs of tollgate grow with more processes and more keys.

use std::time::Duration;

use redis_server::RedisServer;

use super::figures::{Figures, digits};
use super::task::{Demand, Record, Task};
use super::turn::{Span, turn};
use super::{Options, idle};
use crate::contenders::{Contender, Failure, Limit};
use crate::machine::machine;

const PROCESSES: [u64; 4] = [1, 4, 16, 64];

/// Grants a second over all keys if demand exceeds the limit; calls a second if the demand is
/// lower.
const ALLOWED: u64 = 1000;
const ASKED: u64 = 2000;

/// Measures, and prints the tables.
///
/// # Errors
///
/// If there is no server, or a child fails.
pub(crate) fn report(options: &Options) -> Result<(), Failure> {
    let server = RedisServer::start()?;
    let asked = |group: &str| options.only.as_deref().is_none_or(|only| only == group);
    println!("# tollgate with more processes and more keys\n");
    println!("{}\n", machine(" -- growth"));
    println!(
        "Medians of {} rounds. The server's CPU time is all of it, what it takes to do nothing included: {:.0} us a second. \
         \"others\" is what something else took of the machine meanwhile.\n",
        options.rounds,
        idle(&server)? * 1e6
    );
    if asked("a") {
        println!("## More asked for than is allowed\n");
        println!(
            "All keys together allow {ALLOWED} a second, so that cells compare: one key all of it, a thousand keys one a \
             second each. 256 callers in all at one key, two at each of a thousand, spread over the processes, each \
             calls again at once; those at a thousand begin one after the other, over a second. 98.0 % \
             of the limit is what the margin leaves.\n"
        );
        println!(
            "| keys | processes | store calls a grant | Redis, us of CPU a grant | callers, us of CPU a grant | of the \
             limit used | most in any second, all keys | wait p50, p99 | errors | others |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
        );
        for keys in [1, 1000] {
            let callers = (2 * keys).max(256);
            cells(
                &server,
                options,
                |processes| short_of(&server, keys, callers / processes),
                |processes, figures| {
                    let [half, most] = figures.wait.unwrap_or_default();
                    println!(
                        "| {keys} | {processes} | {} | {} | {} | {:.1} % | {} | {half:.0}, {most:.0} ms | {} | {:.0} % |",
                        digits(figures.calls),
                        digits(figures.redis),
                        digits(figures.client),
                        100.0 * figures.rate / ALLOWED as f64,
                        figures.largest.unwrap_or_default(),
                        figures.errors,
                        100.0 * figures.others,
                    );
                },
            )?;
        }
        println!();
    }
    if asked("b") {
        println!("## Less asked for than is allowed\n");
        println!(
            "{ASKED} calls a second in all, paced, each of a random key; a key allows twice its share of them in a \
             minute, at least 60. \"nothing\" is the same calls without a limiter: what the callers cost by themselves.\n"
        );
        println!(
            "| keys | processes | store calls a grant | Redis, us of CPU a grant | callers, us of CPU a grant | granted of \
             the asked | wait p50, p99 | client, bytes a key it called | Redis, bytes a key | others |\
             \n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
        );
        cells(
            &server,
            options,
            |processes| paced(&server, Contender::Nothing, 1, processes),
            |processes, figures| {
                let (client, others) = (digits(figures.client), 100.0 * figures.others);
                println!("| nothing | {processes} | | | {client} | | | | | {others:.0} % |");
            },
        )?;
        for keys in [1, 1000, 100_000] {
            let task = |processes| paced(&server, Contender::Tollgate, keys, processes);
            cells(&server, options, task, |processes, figures| {
                let [half, most] = figures.wait.unwrap_or_default();
                let bytes = |bytes: f64| {
                    if keys > 1 {
                        format!("{bytes:.0}")
                    } else {
                        String::new()
                    }
                };
                println!(
                    "| {keys} | {processes} | {} | {} | {} | {:.1} % | {half:.3}, {most:.1} ms | {} | {} | {:.0} % |",
                    digits(figures.calls),
                    digits(figures.redis),
                    digits(figures.client),
                    100.0 * figures.rate / ASKED as f64,
                    bytes(figures.memory_of_a_key),
                    bytes(figures.bytes_of_a_key),
                    100.0 * figures.others,
                );
            })?;
        }
        println!();
    }
    Ok(())
}

/// Prints a row for each number of processes.
fn cells(
    server: &RedisServer,
    options: &Options,
    task: impl Fn(u64) -> Task,
    row: impl Fn(u64, &Figures),
) -> Result<(), Failure> {
    let span = Span {
        warm_up: Duration::from_millis(4100),
        measured: Duration::from_millis(6120),
    };
    let mut turns = vec![Vec::new(); PROCESSES.len()];
    for _ in 0..options.rounds {
        for (processes, turns) in PROCESSES.into_iter().zip(&mut turns) {
            turns.push(turn(server, &task(processes), processes, span)?);
        }
    }
    for (processes, turns) in PROCESSES.into_iter().zip(&turns) {
        row(processes, &Figures::median(turns));
    }
    Ok(())
}

fn short_of(server: &RedisServer, keys: u64, callers: u64) -> Task {
    let count = u32::try_from(ALLOWED / keys).unwrap_or(u32::MAX);
    let limit = Limit {
        count,
        window: Duration::from_secs(1),
    };
    task(
        server,
        Contender::Tollgate,
        limit,
        keys,
        Demand::Loop(callers),
    )
}

fn paced(server: &RedisServer, contender: Contender, keys: u64, processes: u64) -> Task {
    let count = (2 * 60 * ASKED / keys).max(60);
    let limit = Limit {
        count: u32::try_from(count).unwrap_or(u32::MAX),
        window: Duration::from_secs(60),
    };
    task(
        server,
        contender,
        limit,
        keys,
        Demand::Every(1_000_000 * processes / ASKED),
    )
}

fn task(
    server: &RedisServer,
    contender: Contender,
    limit: Limit,
    keys: u64,
    demand: Demand,
) -> Task {
    Task {
        contender,
        url: server.url(),
        limit,
        demand,
        record: Record::Each,
        keys,
        number: 0,
    }
}
