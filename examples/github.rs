//! An API with the limits of GitHub: one for each access token, and others for its searches, for
//! GraphQL and for what it creates. Several processes share them through Redis.
//!
//!     cargo run --release --example github
//!
//! GitHub allows 5000 requests per hour. It counts 30 searches per minute and 5000 points of GraphQL per
//! hour apart from these. What creates content counts in both: in the 5000, and in 80 per minute.
//! Besides, at most 100 requests may be in flight. The example ends in seconds: its hour takes 6 s and
//! has 150 requests, its minute takes 2 s.
//!
//! One table of routes applies in place of the 5000 per hour, and another one besides. The limit of
//! requests in flight is a second layer, joined to the first. It is divided among the processes: counted in
//! Redis, it would be a call to Redis for each request.

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap};
use reqwest::{Method, Request};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Quota, RateLimitLayer, Routes, by_header};
use tower::ServiceBuilder;
use upstream::{KeyedRule, Rule};

use common::{Options, Places, Usage};

const HELP: &str = "\
Limits of each access token, of its searches, of GraphQL and of what it creates.

Usage: cargo run --release --example github -- [options]

  --redis <url>     where to count                              [spawn: a redis-server of its own]
  --api <url>       whom to call                                [spawn: a service of its own]
  --processes <n>   how many processes call                     [2]
  --tokens <n>      how many access tokens there are            [3]
  --tasks <n>       how many tasks call, by process and token   [8]
  --seconds <s>     for how long they call                      [9]
  --max-wait <s>    the longest a call may wait                 [8]
  --role <role>     be one of the processes: caller
  --help            this text
";

const CORE: Rule = Rule::new(150, Duration::from_secs(6));
const SEARCH: Rule = Rule::new(30, Duration::from_secs(2));
const GRAPHQL: Rule = Rule::new(100, Duration::from_secs(6));
const CONTENT: Rule = Rule::new(15, Duration::from_secs(2));
const IN_FLIGHT: u32 = 100;

/// What each task of a token calls, in turn.
const CALLS: [(Method, &str); 4] = [
    (Method::GET, "user/repos"),
    (Method::GET, "search/code"),
    (Method::POST, "graphql"),
    (Method::POST, "repos/us/ours/issues"),
];

#[tokio::main]
async fn main() -> ExitCode {
    common::main("github", HELP, async |mut options| {
        let role = options.role(&["caller"])?;
        let args = Args::read(options)?;
        match role {
            Some(_) => call_all(&args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Builds the limits of rates, and that of requests in flight.
fn limits(args: &Args) -> Result<(RateLimitLayer, RateLimitLayer), BoxError> {
    let store = RedisStore::builder(&args.places.redis)
        .prefix("github")
        .secret(b"a secret for show: take 32 random bytes")
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    let quota = |rule: Rule| Quota::new(rule.count, rule.window);
    let apart = Routes::new([
        ("GET /search/*", quota(SEARCH)),
        ("POST /graphql", quota(GRAPHQL)),
    ])?;
    let content = Routes::new([("POST /repos/*", quota(CONTENT))])?;
    let rates = RateLimitLayer::builder(quota(CORE))
        .name("core")
        .key(by_header(AUTHORIZATION))
        .routes(apart.instead())
        .routes(content.name("content"))
        .store(Arc::new(store))
        .max_wait(args.max_wait)
        .build()?;
    // Each process has its part, without Redis.
    let in_flight = RateLimitLayer::builder(Quota::in_flight(IN_FLIGHT / args.processes))
        .max_wait(args.max_wait)
        .build()?;
    Ok((rates, in_flight))
}

/// Runs one of the processes: a few tasks for each token.
async fn call_all(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let (rates, in_flight) = limits(args)?;
    let service = ServiceBuilder::new()
        .layer(in_flight.and(rates.clone()))
        .map_request(common::stamp)
        .service(common::client()?);
    let end = Instant::now() + args.time;
    let mut tasks = JoinSet::new();
    for number in 0..args.tokens * args.tasks {
        let (service, api) = (service.clone(), args.places.api.clone());
        let token = number % args.tokens;
        let (method, path) = CALLS[(number / args.tokens) as usize % CALLS.len()].clone();
        tasks.spawn(async move {
            while Instant::now() < end {
                let mut request = Request::new(method.clone(), format!("{api}{path}").parse()?);
                let token = format!("Bearer token-{token}").parse()?;
                request.headers_mut().insert(AUTHORIZATION, token);
                println!("{}", common::call(service.clone(), request).await?);
            }
            Ok::<_, BoxError>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    rates.limiter().shutdown().await?;
    Ok(())
}

/// Starts the Redis, the service and the processes, and prints what became of the calls.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    fn token(headers: &HeaderMap) -> Option<String> {
        Some(headers.get(AUTHORIZATION)?.to_str().ok()?.to_owned())
    }
    let limits = [
        KeyedRule {
            name: "core",
            rule: CORE,
            key: |path, headers| {
                let is_apart = path.starts_with("/search") || path == "/graphql";
                token(headers).filter(|_| !is_apart)
            },
            scope: "core",
        },
        KeyedRule {
            name: "search",
            rule: SEARCH,
            key: |path, headers| token(headers).filter(|_| path.starts_with("/search")),
            scope: "search",
        },
        KeyedRule {
            name: "graphql",
            rule: GRAPHQL,
            key: |path, headers| token(headers).filter(|_| path == "/graphql"),
            scope: "graphql",
        },
        KeyedRule {
            name: "content",
            rule: CONTENT,
            key: |path, headers| token(headers).filter(|_| path.starts_with("/repos/")),
            scope: "content",
        },
    ];
    println!(
        "{} processes call with {} tokens for {:?}.\n",
        args.processes, args.tokens, args.time
    );
    let words = args.words();
    common::call_from_processes(&mut args.places, &limits, args.processes, |_| words.clone())
        .await?;
    if let Some(service) = &args.places.upstream {
        let most = service.log().most_at_once();
        println!("At most {most} calls were in flight; {IN_FLIGHT} may be.");
    }
    Ok(())
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    places: Places,
    processes: u32,
    tokens: u32,
    tasks: u32,
    time: Duration,
    max_wait: Duration,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, Usage> {
        let args = Args {
            places: Places::given(&mut options)?,
            processes: options.number("--processes", 2, 1..=32)?,
            tokens: options.number("--tokens", 3, 1..=100)?,
            tasks: options.number("--tasks", 8, 1..=100)?,
            time: options.seconds("--seconds", 9.0)?,
            max_wait: options.seconds("--max-wait", 8.0)?,
        };
        options.finish()?;
        Ok(args)
    }

    /// Returns the options as words for the children, without the places.
    fn words(&self) -> Vec<String> {
        let words = [
            ["--role", "caller"],
            ["--processes", &self.processes.to_string()],
            ["--tokens", &self.tokens.to_string()],
            ["--tasks", &self.tasks.to_string()],
            ["--seconds", &self.time.as_secs_f64().to_string()],
            ["--max-wait", &self.max_wait.as_secs_f64().to_string()],
        ];
        words
            .as_flattened()
            .iter()
            .map(|word| (*word).to_owned())
            .collect()
    }
}
