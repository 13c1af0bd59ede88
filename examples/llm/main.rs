//! LLM APIs: a fleet with prompts of very different length, and limits on tokens.
//!
//!     cargo run --release --example llm
//!
//! Two servers on loopback count tokens as the large providers do. Both allow 300 requests per
//! window. One also limits tokens: it reserves `max_tokens` when a request arrives, and corrects that
//! at the end. The other one limits input tokens, and output tokens as it produces them. A window
//! takes 10 s instead of a minute, so that the example ends in a minute and a half.
//!
//! Four processes for each server send prompts as fast as they may, first with a limit on requests
//! alone, then with limits on tokens, too, by the layer for language models. It settles them when the stream has ended.

#[path = "../common/mod.rs"]
mod common;

mod api;
mod caller;
mod limits;
mod report;
mod server;
mod window;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use redis_server::RedisServer;
use tollgate::error::BoxError;

use api::Api;
use common::{Children, Line, Options, Usage};
use limits::Way;
use report::Run;
use server::Server;

const HELP: &str = "\
LLM APIs: a fleet with prompts of very different length, and limits on tokens.

Usage: cargo run --release --example llm -- [options]

  --seconds <s>       how long each way runs                    [40]
  --processes <n>     how many processes call each server       [4]
  --tasks <n>         how many prompts a process sends at once  [16]
  --role caller       be one of the processes; with --redis, --api, --url, --way and --first
  --help              this text
";

/// What stands for a minute.
const WINDOW: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> ExitCode {
    common::main("llm", HELP, async |mut options| {
        let role = options.role(&["caller"])?;
        let args = Args::read(&mut options)?;
        match role {
            Some(_) => call(&args, options).await,
            None => {
                options.finish()?;
                compare(&args).await
            }
        }
    })
    .await
}

/// Is one of the processes.
async fn call(args: &Args, mut options: Options) -> Result<(), BoxError> {
    let (redis, url) = (options.text("--redis", ""), options.text("--url", ""));
    let (api, way) = (options.text("--api", ""), options.text("--way", ""));
    let first = options.number("--first", 0, 0..=1_000_000)?;
    options.finish()?;
    let api = Api::ALL.into_iter().find(|one| one.name() == api);
    let way = Way::ALL.into_iter().find(|one| one.name() == way);
    let (Some(api), Some(way)) = (api, way) else {
        return Err(Usage::new("a caller needs --api and --way").into());
    };
    let client = limits::client(api, way, &redis).await?;
    caller::call_all(&client, &url, first, args.tasks, args.time).await
}

/// Runs the fleets, one way after the other, and prints the table.
async fn compare(args: &Args) -> Result<(), BoxError> {
    let redis = RedisServer::start()?;
    println!(
        "For each server {} processes with {} prompts at once, for {:?} in each way. A window takes {WINDOW:?}.\n",
        args.processes, args.tasks, args.time
    );
    let mut runs = Vec::new();
    for way in Way::ALL {
        eprintln!("{} ...", way.title());
        runs.extend(run(args, way, &redis.url()).await?);
    }
    report::print(&runs, args.time);
    Ok(())
}

/// Runs both servers and their fleets at the same time.
async fn run(args: &Args, way: Way, redis: &str) -> Result<Vec<Run>, BoxError> {
    let mut runs = Vec::new();
    for api in Api::ALL {
        let server = Server::start(api).await?;
        runs.push(Run::new(way, server));
    }
    let mut children = Children::of_this_program()?;
    for run in &runs {
        for number in 0..args.processes {
            let first = (number * args.tasks).to_string();
            let api = run.server.api.name();
            let own = [
                ["--role", "caller"],
                ["--redis", redis],
                ["--api", api],
                ["--url", &run.server.url],
                ["--way", way.name()],
                ["--first", &first],
            ];
            let words = own.concat().into_iter().map(str::to_owned);
            children.start(api, words.chain(args.words()))?;
        }
    }
    let start = Instant::now();
    while let Some(Line { who, text }) = children.line().await {
        let of = runs.iter_mut().find(|run| run.server.api.name() == who);
        if let Some(run) = of {
            run.answered(&text);
        }
    }
    children.end().await?;
    for run in &mut runs {
        run.finish(start, start + args.time);
    }
    Ok(runs)
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    time: Duration,
    processes: u32,
    tasks: u32,
}

impl Args {
    fn read(options: &mut Options) -> Result<Self, Usage> {
        Ok(Args {
            time: options.seconds("--seconds", 40.0)?,
            processes: options.number("--processes", 4, 1..=32)?,
            tasks: options.number("--tasks", 16, 1..=1000)?,
        })
    }

    /// Returns the options as words for the children.
    fn words(&self) -> Vec<String> {
        let (time, tasks) = (self.time.as_secs_f64().to_string(), self.tasks.to_string());
        ["--seconds", &time, "--tasks", &tasks]
            .map(str::to_owned)
            .to_vec()
    }
}
