//! Two limits at once: 25 per 5 s and 300 per minute. A call that one limit refuses counts in
//! neither.
//!
//!     cargo run --release --example two_windows
//!     cargo run --release --example two_windows -- --limits "10/1s, 30/60s"
//!
//! Two processes try far more often than the limits allow, and never wait. A third only looks, with
//! `peek`: calls that the short window refused do not count in the long one, and the other way
//! round.

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Request;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tollgate::error::BoxError;
use tollgate::limiter::KeyStatus;
use tollgate::store::RedisStore;
use tollgate::{Key, Limited, Quota, RateLimitLayer};
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::{Rule, Upstream, WHO_HEADER};

use common::{Children, Line, Options, Places, TRANSIT_SLACK, Usage};

const HELP: &str = "\
Two limits at once. What one of them refuses counts in neither.

Usage: cargo run --release --example two_windows -- [options]

  --redis <url>       where to count                    [spawn: a redis-server of its own]
  --api <url>         whom to call                      [spawn: a service of its own]
  --limits <limits>   what the service allows           [\"25/5s, 300/60s\"]
  --seconds <s>       how long the processes call       [11]
  --role worker       be one of the two processes
  --help              this text
";

#[tokio::main]
async fn main() -> ExitCode {
    common::main("two_windows", HELP, async |mut options| {
        let role = options.role(&["worker"])?;
        let args = Args::read(options)?;
        match role {
            Some(_) => work(&args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Builds all limits of the service as one quota: a call takes from all of them, or from none.
async fn limit(redis: &str, limits: &str) -> Result<RateLimitLayer, BoxError> {
    let store = RedisStore::builder(redis)
        .prefix("two-windows")
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    // Without `max_wait`, a request waits for its store for a second: not enough to connect, too.
    store.connect().await?;
    let quota: Quota = limits.parse()?;
    let limit = RateLimitLayer::builder(quota)
        .store(Arc::new(store))
        .max_wait(Duration::ZERO);
    Ok(limit.build()?)
}

/// Runs a process that tries every 25 ms, whatever the last refusal said.
async fn work(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let limit = limit(&args.places.redis, &args.limits).await?;
    let mut service = ServiceBuilder::new()
        .layer(limit.clone())
        .map_request(common::stamp)
        .service(common::client()?);

    let mut tick = interval(Duration::from_millis(25));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = Instant::now() + args.time;
    while Instant::now() < end {
        tick.tick().await;
        let mut request = Request::new(reqwest::Method::GET, args.places.api.parse()?);
        request
            .headers_mut()
            .insert(WHO_HEADER, std::process::id().into());
        match service.ready().await?.call(request).await {
            Ok(response) => {
                println!("answered {}", response.status().as_u16());
                response.bytes().await?; // so that the connection can be used again
            }
            Err(error) => match Limited::find(&error) {
                Some(Limited::Local { report, .. }) => {
                    let by = report
                        .limit()
                        .map_or("none of them".to_owned(), |limit| limit.to_string());
                    println!(
                        "refused by {by}, come back in {:?}",
                        report.retry_after().unwrap_or_default()
                    );
                }
                _ => return Err(error.into()),
            },
        }
    }
    limit.limiter().shutdown().await?; // what is left at hand here goes to the others
    Ok(())
}

/// Starts the Redis, the service and the two processes, prints the counts, and compares them with
/// what the service saw.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    let quota: Quota = args
        .limits
        .parse()
        .map_err(|error| Usage::new(format!("--limits: {error}")))?;
    let rules: Vec<Rule> = quota
        .limits()
        .iter()
        .map(|limit| Rule::new(limit.count(), limit.window()))
        .collect();
    args.places.start(|| Upstream::start(rules.clone())).await?;
    println!("Two processes try 80 calls a second where {quota} are allowed.\n");

    let mut children = Children::of_this_program()?;
    for worker in ["worker 1", "worker 2"] {
        children.start(
            worker,
            [args.words(), vec!["--role".to_owned(), "worker".to_owned()]].concat(),
        )?;
    }
    let limiter = limit(&args.places.redis, &args.limits).await?.limiter();
    let start = Instant::now();
    let mut tick = interval(Duration::from_secs(1));
    let mut said = Vec::new();
    loop {
        tokio::select! {
            line = children.line() => match line {
                Some(Line { text, .. }) => said.push(text),
                None => break,
            },
            _ = tick.tick() => {
                let (elapsed, peek) = (start.elapsed().as_secs_f64(), limiter.peek(Key::ALL).await?);
                println!("{elapsed:4.1} s   {}   {} refused", show(&peek), count(&said, "refused"));
            }
        }
    }
    children.end().await?;
    println!("  end    {}\n", show(&limiter.peek(Key::ALL).await?));

    let mut rows = vec![[
        "answered".to_owned(),
        count(&said, "answered 200").to_string(),
    ]];
    for limit in quota.limits() {
        let refused = count(&said, &format!("refused by {limit},"));
        rows.push([format!("refused by {limit}"), refused.to_string()]);
    }
    println!("{}", common::table(["calls of both processes", ""], &rows));
    if let Some(upstream) = &args.places.upstream {
        let log = upstream.log();
        println!("The service saw {} calls.", log.len());
        if let Some(broken) = common::not_kept(&log, &rules, TRANSIT_SLACK) {
            return Err(format!("the limit was not kept: {broken}").into());
        }
    }
    Ok(())
}

fn show(peek: &KeyStatus) -> String {
    let limits = peek.limits.iter().map(|usage| {
        format!(
            "{}: {:3} used, {:3} free",
            usage.limit, usage.used, usage.free
        )
    });
    limits.collect::<Vec<_>>().join("   ")
}

fn count(said: &[String], what: &str) -> usize {
    said.iter().filter(|text| text.starts_with(what)).count()
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    places: Places,
    limits: String,
    time: Duration,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, Usage> {
        let args = Args {
            places: Places::given(&mut options)?,
            limits: options.text("--limits", "25/5s, 300/60s"),
            time: options.seconds("--seconds", 11.0)?,
        };
        options.finish()?;
        Ok(args)
    }

    /// Returns the options as words for the children.
    fn words(&self) -> Vec<String> {
        let own = [
            "--limits",
            &self.limits,
            "--seconds",
            &self.time.as_secs_f64().to_string(),
        ]
        .map(str::to_owned);
        [self.places.words(), own.to_vec()].concat()
    }
}
