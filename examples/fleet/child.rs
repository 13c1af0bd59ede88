//! One process of many: it connects, waits for the start signal, calls, and reports what it saw.
//!
//! A child reads the start signal [`GO`] on its standard input, and writes one [`Line`] after the
//! other for its parent.

use std::fmt;
use std::io::{BufRead, Write, stdin, stdout};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tollgate::RateLimitLayer;
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tower::ServiceBuilder;

use crate::args::Args;
use crate::callers::{self, Callers, Outcome};
use crate::shared_redis::Redis;

/// The first argument of a child process. It is internal, so the help does not mention it.
pub(crate) const ROLE: &str = "child";

/// What a child needs in addition to the options of its parent.
#[derive(Debug)]
pub(crate) struct Role {
    /// The number of the process.
    pub(crate) process: u32,
    /// The URL of the service.
    upstream: String,
    /// The URL of the Redis and the prefix of its keys. Without them, the child counts alone.
    redis: Option<(String, String)>,
}

impl Role {
    /// Describes the child with the number `process`. Without `redis`, it counts alone.
    pub(crate) fn new(process: u32, upstream: String, redis: Option<&Redis>) -> Role {
        Role {
            process,
            upstream,
            redis: redis.map(|redis| (redis.url.clone(), redis.prefix.clone())),
        }
    }

    /// Returns the arguments that precede the options.
    pub(crate) fn words(&self) -> [String; 5] {
        let (url, prefix) = self.redis.clone().unwrap_or_default();
        [
            ROLE.into(),
            self.process.to_string(),
            self.upstream.clone(),
            url,
            prefix,
        ]
    }

    /// Parses the arguments after [`ROLE`]. Returns `None` if [`words`](Role::words) did not make
    /// them.
    pub(crate) fn read(words: &mut impl Iterator<Item = String>) -> Option<Role> {
        let (process, upstream) = (words.next()?.parse().ok()?, words.next()?);
        let redis = Some((words.next()?, words.next()?)).filter(|(url, _)| !url.is_empty());
        Some(Role {
            process,
            upstream,
            redis,
        })
    }
}

/// Runs a child until its end.
pub(crate) async fn run(role: &Role, args: &Args) -> ExitCode {
    match call(role, args).await {
        Ok(outcome) => {
            report(outcome);
            ExitCode::SUCCESS
        }
        Err(error) => {
            print(&Line::Failed(error.to_string()));
            ExitCode::FAILURE
        }
    }
}

async fn call(role: &Role, args: &Args) -> Result<Outcome, BoxError> {
    let go = listen();
    let mut limit = RateLimitLayer::builder(args.quota());
    if let Some((url, prefix)) = &role.redis {
        let store = RedisStore::builder(url).prefix(prefix.as_str()).build()?;
        store.connect().await?;
        limit = limit.store(Arc::new(store));
    }
    let limit = limit.build()?;
    let limiter = limit.limiter();
    let callers = Arc::new(Callers::new(args, role.process, &role.upstream)?);
    let client = callers::client()?;
    warm_up(&client, &callers, args.tasks).await?;
    print(&Line::Ready);
    go.await?;

    let service = ServiceBuilder::new()
        .layer(limit)
        .map_request(callers.stamp())
        .service(client);
    let mut outcome =
        callers::run(&callers, service, |waiting| print(&Line::Waiting(waiting))).await?;
    // Returns unused permits to the processes that continue. If that fails, the report is still
    // sent.
    if let Err(error) = limiter.shutdown().await {
        outcome.store_error.get_or_insert(error.to_string());
    }
    Ok(outcome)
}

/// Opens the connections before the run. Opening a connection takes longer than a call, and much
/// longer if many processes do so on few cores.
async fn warm_up(client: &reqwest::Client, callers: &Callers, tasks: u32) -> Result<(), BoxError> {
    let mut calls = JoinSet::new();
    for _ in 0..tasks {
        let call = client.execute(callers.request(WARM_UP));
        calls.spawn(async { call.await?.error_for_status()?.bytes().await });
    }
    while let Some(called) = calls.join_next().await {
        called??;
    }
    Ok(())
}

/// Returns a channel that receives the start signal of the parent. A thread reads the input. When
/// the parent ends, the input ends, and the thread ends this process.
fn listen() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut lines = stdin().lock().lines();
        if lines
            .next()
            .is_some_and(|line| line.is_ok_and(|line| line == GO))
        {
            let _ = sender.send(());
            let _ = lines.next();
        }
        std::process::exit(1);
    });
    receiver
}

/// Prints what the tasks saw.
fn report(outcome: Outcome) {
    for took in outcome.took {
        print(&Line::Took(took));
    }
    print(&Line::RefusedLocally(outcome.refused_locally));
    print(&Line::StoreFailures(outcome.store_failures));
    if let Some(error) = outcome.store_error {
        print(&Line::StoreError(error));
    }
    print(&Line::Done);
}

/// Prints a line for the parent. An error means that the parent has ended; then [`listen`] ends
/// this process.
fn print(line: &Line) {
    let _ = writeln!(stdout().lock(), "{line}");
}

/// The start signal of the parent, on a line of its own.
pub(crate) const GO: &str = "go";

/// One line that a child prints for its parent.
#[derive(Debug)]
pub(crate) enum Line {
    /// The child has opened its connections.
    Ready,
    /// How many of its tasks wait.
    Waiting(usize),
    /// How long a task waited for one answer.
    Took(Duration),
    /// How many calls tollgate refused.
    RefusedLocally(u64),
    /// How often the store did not respond.
    StoreFailures(u64),
    /// One error of the store.
    StoreError(String),
    /// The report is complete.
    Done,
    /// The child failed.
    Failed(String),
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Ready => write!(f, "ready"),
            Line::Waiting(tasks) => write!(f, "waiting {tasks}"),
            Line::Took(time) => write!(f, "took {}", time.as_nanos()),
            Line::RefusedLocally(calls) => write!(f, "refused-locally {calls}"),
            Line::StoreFailures(calls) => write!(f, "store-failures {calls}"),
            Line::StoreError(text) => write!(f, "store-error {}", in_one_line(text)),
            Line::Done => write!(f, "done"),
            Line::Failed(text) => write!(f, "failed {}", in_one_line(text)),
        }
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(line: &str) -> Result<Line, String> {
        let (word, value) = line.split_once(' ').unwrap_or((line, ""));
        let unknown = || format!("unknown line from a child process: {line:?}");
        let number = || value.parse::<u64>().map_err(|_| unknown());
        Ok(match word {
            "ready" => Line::Ready,
            "waiting" => Line::Waiting(usize::try_from(number()?).unwrap_or(usize::MAX)),
            "took" => Line::Took(Duration::from_nanos(number()?)),
            "refused-locally" => Line::RefusedLocally(number()?),
            "store-failures" => Line::StoreFailures(number()?),
            "store-error" => Line::StoreError(value.into()),
            "done" => Line::Done,
            "failed" => Line::Failed(value.into()),
            _ => return Err(unknown()),
        })
    }
}

fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The name of the task that opens the connections.
pub(crate) const WARM_UP: &str = "warm-up";
