//! Runs the cases, some at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use real_limiters::{Call, Figures, Server, install, jain};
use redis_server::RedisServer;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};
use tollgate::error::BoxError;

use crate::caller;
use crate::case::{Case, cases};
use crate::common::{Children, Options};
use crate::table::{summary, table};

/// The result of a case: its figures, and Jain's index over the processes.
pub(crate) type Row = (Case, Figures, f64);

/// Runs the cases that the options describe, and prints the table.
pub(crate) async fn run_all(mut options: Options) -> Result<(), BoxError> {
    let cases = cases(&mut options)?;
    let at_once = options.number("--at-once", 4, 1..=100)?;
    options.finish()?;
    let kinds: Vec<_> = cases.iter().map(|case| case.kind).collect();
    spawn_blocking(move || install(&kinds)).await??;

    let (room, count) = (Arc::new(Semaphore::new(at_once as usize)), cases.len());
    let mut runs = JoinSet::new();
    for (number, case) in cases.into_iter().enumerate() {
        let room = Arc::clone(&room);
        runs.spawn(async move {
            let _permit = room.acquire_owned().await?;
            Ok::<_, BoxError>((number, run(case).await?))
        });
    }
    let mut rows = BTreeMap::new();
    while let Some(done) = runs.join_next().await {
        let (number, row) = done??;
        eprintln!(
            "[{}/{count}] {}: {}",
            rows.len() + 1,
            row.0.text(),
            summary(&row.1)
        );
        rows.insert(number, row);
    }
    print!("{}", table(&rows.into_values().collect::<Vec<_>>()));
    Ok(())
}

async fn run(case: Case) -> Result<Row, BoxError> {
    let redis = match case.layer.needs_store() {
        true => Some(spawn_blocking(RedisServer::start).await??),
        false => None,
    };
    let redis_url = redis.as_ref().map(RedisServer::url).unwrap_or_default();
    let server = spawn_blocking(move || Server::start(case.kind, case.limit)).await??;
    let mut children = Children::of_this_program()?;
    for process in 0..case.processes {
        let words = caller::words(&case, process, &server.url(), &redis_url);
        children.start(process.to_string(), words)?;
    }
    let (mut calls, mut accepted) = (Vec::new(), BTreeMap::new());
    while let Some(line) = children.line().await {
        let call: Call = caller::read(&line.text)?;
        *accepted.entry(line.who).or_insert(0) += usize::from(call.accepted);
        calls.push(call);
    }
    children.end().await?;
    let log = spawn_blocking(move || server.stop()).await??;
    let figures = Figures::new(case.kind, case.limit, case.span, &log, &calls);
    Ok((
        case,
        figures,
        jain(&accepted.into_values().collect::<Vec<_>>()),
    ))
}
