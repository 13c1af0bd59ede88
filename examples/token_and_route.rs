//! An API like that of GitHub: a limit for each access token, and a stricter one for its searches.
//! Several processes share both through Redis.
//!
//!     cargo run --release --example token_and_route
//!
//! GitHub allows 5000 calls per hour, and 30 searches per minute. The example ends in seconds: its
//! hour has 150 calls and takes 6 s, its minute has 10 searches and takes 1 s. A search counts in
//! both limits, or in none. While searches wait, other calls of the same token go on.

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
use tollgate::{Key, Quota, RateLimitLayer, by_header};
use tower::ServiceBuilder;
use upstream::{KeyedRule, Rule};

use common::{Options, Places, Usage};

const HELP: &str = "\
A limit for each access token, and a stricter one for its searches.

Usage: cargo run --release --example token_and_route -- [options]

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

const TOKEN: Rule = Rule::new(150, Duration::from_secs(6));
const SEARCH: Rule = Rule::new(10, Duration::from_secs(1));

#[tokio::main]
async fn main() -> ExitCode {
    common::main("token_and_route", HELP, async |mut options| {
        let role = options.role(&["caller"])?;
        let args = Args::read(options)?;
        match role {
            Some(_) => call_all(&args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Builds both limits. Other calls than searches do not see the second one.
fn limit(args: &Args) -> Result<RateLimitLayer, BoxError> {
    let store = RedisStore::builder(&args.places.redis)
        .prefix("token-and-route")
        .secret(b"a secret for show: take 32 random bytes")
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    let quota = |rule: Rule| Quota::new(rule.count, rule.window);
    let limit = RateLimitLayer::builder(quota(TOKEN))
        .key(by_header(AUTHORIZATION))
        .and_per("search", quota(SEARCH), |request| {
            let is_search = request.path().starts_with("/search");
            request
                .header(AUTHORIZATION)
                .filter(|_| is_search)
                .map(Key::new)
        })
        .store(Arc::new(store))
        .max_wait(args.max_wait);
    Ok(limit.build()?)
}

/// Runs one of the processes: a few tasks for each token.
async fn call_all(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let limit = limit(args)?;
    let service = ServiceBuilder::new()
        .layer(limit.clone())
        .map_request(common::stamp)
        .service(common::client()?);
    let end = Instant::now() + args.time;
    let mut tasks = JoinSet::new();
    for number in 0..args.tokens * args.tasks {
        let (service, api) = (service.clone(), args.places.api.clone());
        let token = number % args.tokens;
        // Every other task of a token searches.
        let searches = (number / args.tokens).is_multiple_of(2);
        tasks.spawn(async move {
            while Instant::now() < end {
                let path = if searches {
                    "search/code"
                } else {
                    "user/repos"
                };
                let mut request = Request::new(Method::GET, format!("{api}{path}").parse()?);
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
    limit.limiter().shutdown().await?;
    Ok(())
}

/// Starts the Redis, the service and the processes, and prints what became of the calls.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    fn token(headers: &HeaderMap) -> Option<String> {
        Some(headers.get(AUTHORIZATION)?.to_str().ok()?.to_owned())
    }
    let limits = [
        KeyedRule {
            name: "token",
            rule: TOKEN,
            key: |_, headers| token(headers),
            scope: "token",
        },
        KeyedRule {
            name: "search",
            rule: SEARCH,
            key: |path, headers| token(headers).filter(|_| path.starts_with("/search")),
            scope: "search",
        },
    ];
    println!(
        "{} processes call with {} tokens for {:?}.\n",
        args.processes, args.tokens, args.time
    );
    let words = args.words();
    common::call_from_processes(&mut args.places, &limits, args.processes, |_| words.clone())
        .await?;
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
