//! Which party refused a call: this process, the service, or the store? The example also shows
//! where tollgate stands between retry and timeouts.
//!
//!     cargo run --release --example who_said_no
//!
//! A process calls in a loop (`caller.rs`: the stack of layers, the retry policy, the distinction
//! of errors). The parent disturbs it: a neighbour calls the same service without a limiter, then
//! Redis is killed, then Redis is restarted.

#[path = "../common/mod.rs"]
mod common;

mod caller;

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tollgate::error::BoxError;
use upstream::{Rule, Upstream, WHO_HEADER};

use common::{Children, Line, Places};

const HELP: &str = "\
Who said no: this process, the service, or the store? With retry and timeouts around.

Usage: cargo run --release --example who_said_no -- [options]

  --redis <url>       where to count   [spawn: a redis-server of its own, which is killed and started again]
  --api <url>         whom to call     [spawn: a service of its own]
  --role caller       be the process that calls, until its standard input ends
  --help              this text
";

#[tokio::main]
async fn main() -> ExitCode {
    common::main("who_said_no", HELP, async |mut options| {
        let role = options.role(&["caller"])?;
        let places = Places::given(&mut options)?;
        options.finish()?;
        match role {
            Some(_) => caller::call(&places).await,
            None => start_all(places).await,
        }
    })
    .await
}

/// Starts the Redis, the service and the caller, and disturbs the caller.
async fn start_all(mut places: Places) -> Result<(), BoxError> {
    places
        .start(|| Upstream::start(Rule::per_second(caller::RATE)))
        .await?;
    let mut children = Children::of_this_program()?;
    children.start(
        "caller",
        [
            places.words(),
            ["--role", "caller"].map(str::to_owned).to_vec(),
        ]
        .concat(),
    )?;
    let mut listener = Listener {
        children,
        start: Instant::now(),
        heard: BTreeMap::new(),
    };

    println!("It makes twelve calls at once, again and again; its limit is ten a second:");
    listener.until("answered").await?;
    listener.until("local").await?;

    println!("\nA neighbour calls the same service without asking anybody:");
    let neighbour = tokio::spawn(neighbour(places.api.clone()));
    let heard = listener.until("upstream").await;
    neighbour.abort();
    heard?;

    match &mut places.server {
        Some(redis) => {
            println!("\nThe Redis is killed:");
            redis.kill();
            listener.until("store").await?;
            println!("\nIt is back:");
            redis.restart()?;
            listener.until("answered").await?;
        }
        None => println!("\nThe Redis is yours, so it is left alone."),
    }
    listener.children.end().await?;

    let rows: Vec<_> = listener
        .heard
        .into_iter()
        .map(|(outcome, count)| [outcome, count.to_string()])
        .collect();
    println!(
        "\n{}",
        common::table(["what came of a call", "times"], &rows)
    );
    Ok(())
}

/// A reader of what the caller prints.
struct Listener {
    children: Children,
    start: Instant,
    heard: BTreeMap<String, u64>,
}

impl Listener {
    /// Prints the output of the caller, each outcome once, until a call ends as `outcome`.
    async fn until(&mut self, outcome: &str) -> Result<(), BoxError> {
        let mut repeated = BTreeSet::new();
        let patience = Instant::now() + PATIENCE;
        loop {
            let line = timeout(patience - Instant::now(), self.children.line()).await;
            let Ok(line) = line else {
                return Err(format!("no call ended as {outcome:?} within {PATIENCE:?}").into());
            };
            let Line { text, .. } = line.ok_or("the caller ended")?;
            let word = text.split(':').next().unwrap_or_default();
            if repeated.insert(word.to_owned()) {
                println!("{}   {text}", common::span(self.start.elapsed()));
            }
            *self.heard.entry(word.to_owned()).or_default() += 1;
            if word == outcome {
                return Ok(());
            }
        }
    }
}

/// Calls without a limiter.
async fn neighbour(api: String) -> Result<(), reqwest::Error> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    loop {
        client
            .get(&api)
            .header(WHO_HEADER, "neighbour")
            .send()
            .await?
            .bytes()
            .await?;
        sleep(Duration::from_millis(5)).await; // it takes each place as soon as it is free
    }
}

/// How long to wait for an outcome that should appear within two seconds.
const PATIENCE: Duration = Duration::from_secs(30);
