//! Two classes of requests behind one limit: the web sends 10 requests per second that can wait for
//! one second, and 300 jobs ask all the time. First all wait in one line, then each class has a share.
//!
//! Run it with `cargo run --release --example classes`. It takes 20 s and needs no server.
#![allow(
    clippy::disallowed_methods,
    reason = "a user of tollgate has its own clock"
)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{interval, sleep};
use tollgate::{ConfigError, Key, Limiter, Quota, RateLimitLayer};

const JOBS: usize = 300;
const SECONDS: usize = 10;
const PATIENCE_OF_WEB: Duration = Duration::from_secs(1);

/// What the requests of one class have seen in one second.
#[derive(Clone, Default)]
struct Second {
    waits: Vec<Duration>,
    refused: usize,
}

impl Second {
    /// Returns the longest wait of a request that was sent, as text.
    fn longest(&self) -> String {
        let longest = self.waits.iter().max();
        longest.map_or("none sent".into(), |wait| {
            format!("{} ms", wait.as_millis())
        })
    }
}

type Seen = Arc<Mutex<Second>>;

/// Asks for one permit, and notes how that ended. Returns for how long to wait before the next request.
async fn ask(limiter: &Limiter, class: &str, patience: Duration, seen: &Seen) -> Duration {
    let begin = Instant::now();
    let request = limiter.acquire(Key::ALL).class(class);
    let result = request.deadline(begin + patience).await;
    let mut seen = seen.lock().unwrap();
    match result {
        Ok(permit) => {
            seen.waits.push(begin.elapsed());
            drop(permit); // counts as sent
            Duration::ZERO
        }
        Err(limited) => {
            seen.refused += 1;
            limited.retry_after().unwrap_or(Duration::from_millis(100))
        }
    }
}

/// Runs both classes, and prints a line for each second. Returns what the web has seen in all.
async fn run(limiter: Limiter) -> (Second, usize) {
    let (web, jobs) = (Seen::default(), Seen::default());
    let mut tasks = JoinSet::new();
    for _ in 0..JOBS {
        let (limiter, seen) = (limiter.clone(), jobs.clone());
        tasks.spawn(async move {
            loop {
                let patience = Duration::from_secs(15);
                sleep(ask(&limiter, "jobs", patience, &seen).await).await;
            }
        });
    }
    let (requests, seen) = (limiter.clone(), web.clone());
    tasks.spawn(async move {
        let mut ticks = interval(Duration::from_millis(100));
        let mut open = JoinSet::new();
        loop {
            ticks.tick().await;
            let (limiter, seen) = (requests.clone(), seen.clone());
            open.spawn(async move { ask(&limiter, "web", PATIENCE_OF_WEB, &seen).await });
        }
    });

    let (mut all, mut sent) = (Second::default(), 0);
    for second in 1..=SECONDS {
        sleep(Duration::from_secs(1)).await;
        let of_web = std::mem::take(&mut *web.lock().unwrap());
        let of_jobs = std::mem::take(&mut *jobs.lock().unwrap()).waits.len();
        let longest = of_web.waits.iter().max().map_or(0, Duration::as_millis);
        let bar = "#".repeat(usize::try_from(longest / 20).unwrap_or(0));
        println!(
            "{second:>4} s  web {:>3} sent {:>3} refused  jobs {of_jobs:>3} sent  longest wait of web {:>9} {bar}",
            of_web.waits.len(),
            of_web.refused,
            of_web.longest(),
        );
        sent += of_web.waits.len() + of_jobs;
        all.waits.extend(of_web.waits);
        all.refused += of_web.refused;
    }
    (all, sent)
}

#[tokio::main]
async fn main() -> Result<(), ConfigError> {
    let quota = Quota::per_second(50);
    println!(
        "50 requests per second; {JOBS} jobs that always ask; web: 10 per second, each waits at most 1 s\n"
    );

    println!("first come, first served:");
    let in_one_line = RateLimitLayer::new(quota)?;
    let (before, sent_before) = run(in_one_line.limiter()).await;

    println!("\n.share(\"web\", 50):");
    let with_shares = RateLimitLayer::builder(quota).share("web", 50).build()?;
    let (after, sent_after) = run(with_shares.limiter()).await;

    println!("\n                          web refused   longest wait of web   sent in all");
    for (name, web, sent) in [
        ("first come, first served", before, sent_before),
        ("shares", after, sent_after),
    ] {
        let longest = web.longest();
        println!("{name:<25} {:>11} {longest:>21} {sent:>13}", web.refused);
    }
    Ok(())
}
