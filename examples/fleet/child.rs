//! One process of many: it connects, waits for the start signal, calls, and reports what it saw.

use std::io::{BufRead, Write, stdin, stdout};
use std::process::ExitCode;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tollgate::RateLimitLayer;
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tower::ServiceBuilder;

use crate::args::Args;
use crate::run::{self, Crew, Outcome};
use crate::shared::Redis;
use crate::wire::{GO, Line};

/// The first argument of a child process. It is internal, so the help does not mention it.
pub(crate) const ROLE: &str = "child";

/// What a child needs beside the options of its parent.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) process: u32,
    pub(crate) upstream: String,
    /// The URL of the Redis and the prefix of its keys; without them, the child counts for itself.
    pub(crate) redis: Option<(String, String)>,
}

impl Role {
    pub(crate) fn new(process: u32, upstream: String, redis: Option<&Redis>) -> Role {
        Role { process, upstream, redis: redis.map(|redis| (redis.url.clone(), redis.prefix.clone())) }
    }

    /// Returns the arguments that precede the options.
    pub(crate) fn words(&self) -> [String; 5] {
        let (url, prefix) = self.redis.clone().unwrap_or_default();
        [ROLE.into(), self.process.to_string(), self.upstream.clone(), url, prefix]
    }

    /// Parses the arguments after [`ROLE`]; `None` if `words` did not make them.
    pub(crate) fn read(words: &mut impl Iterator<Item = String>) -> Option<Role> {
        let (process, upstream) = (words.next()?.parse().ok()?, words.next()?);
        let redis = Some((words.next()?, words.next()?)).filter(|(url, _)| !url.is_empty());
        Some(Role { process, upstream, redis })
    }
}

/// Runs a child until its end.
pub(crate) async fn live(role: &Role, args: &Args) -> ExitCode {
    match call(role, args).await {
        Ok(outcome) => {
            tell(outcome);
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(&Line::Failed(error.to_string()));
            ExitCode::FAILURE
        }
    }
}

async fn call(role: &Role, args: &Args) -> Result<Outcome, BoxError> {
    let word = listen();
    let mut limit = RateLimitLayer::builder(args.quota());
    if let Some((url, prefix)) = &role.redis {
        let store = RedisStore::builder(url).prefix(prefix.as_str()).build()?;
        store.connect().await?;
        limit = limit.store(Arc::new(store));
    }
    let limit = limit.build()?;
    let limiter = limit.limiter();
    let crew = Arc::new(Crew::new(args, role.process, &role.upstream)?);
    let client = run::client()?;
    warm_up(&client, &crew, args.tasks).await?;
    say(&Line::Ready);
    word.await?;

    let service = ServiceBuilder::new().layer(limit).map_request(crew.stamp()).service(client);
    let mut outcome = run::fleet(&crew, service, |waiting| say(&Line::Waiting(waiting))).await?;
    // Returns unused permits to the processes that continue. If that fails, the report is still sent.
    if let Err(error) = limiter.shutdown().await {
        outcome.complaint.get_or_insert(error.to_string());
    }
    Ok(outcome)
}

/// Opens the connections before the run. Opening a connection takes longer than a call, and much longer if many
/// processes do so on few cores.
async fn warm_up(client: &reqwest::Client, crew: &Crew, tasks: u32) -> Result<(), BoxError> {
    let mut calls = JoinSet::new();
    for _ in 0..tasks {
        let call = client.execute(crew.request(WARM_UP));
        calls.spawn(async { call.await?.error_for_status()?.bytes().await });
    }
    while let Some(called) = calls.join_next().await {
        called??;
    }
    Ok(())
}

/// Returns a channel that receives the start signal of the parent. A thread reads the input: if the parent ends, the
/// input ends, and the thread ends this process.
fn listen() -> oneshot::Receiver<()> {
    let (give, word) = oneshot::channel();
    std::thread::spawn(move || {
        let mut lines = stdin().lock().lines();
        if lines.next().is_some_and(|line| line.is_ok_and(|line| line == GO)) {
            let _ = give.send(());
            let _ = lines.next();
        }
        std::process::exit(1);
    });
    word
}

fn tell(outcome: Outcome) {
    outcome.took.into_iter().for_each(|took| say(&Line::Took(took)));
    say(&Line::HeldBack(outcome.held_back));
    say(&Line::StoreAway(outcome.store_away));
    outcome.complaint.into_iter().for_each(|text| say(&Line::Complaint(text)));
    say(&Line::Done);
}

/// If the parent has ended, the thread that reads the input ends this process.
fn say(line: &Line) {
    let _ = writeln!(stdout().lock(), "{line}");
}

/// The name of the task that opens the connections.
pub(crate) const WARM_UP: &str = "warm-up";
