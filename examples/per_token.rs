//! 5000 calls per hour for each access token, shared by several processes; the tokens stay out of
//! Redis.
//!
//!     cargo run --release --example per_token
//!
//! The key of a request is its `Authorization` header. Redis receives only a hash of it, made with
//! a secret that all processes of this program know. So a reader of the Redis can neither read a
//! token nor test a guess. `peek` returns how many calls remain, and uses none.

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Request;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Key, Limited, Quota, RateLimitLayer, by_header};
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::{Log, Rule, Upstream, WHO_HEADER};

use common::{Children, Line, Options, Places, TRANSIT_SLACK, Usage, span};

const HELP: &str = "\
5000 calls per hour for each access token, shared by several processes.

Usage: cargo run --release --example per_token -- [options]

  --redis <url>       where to count                          [spawn: a redis-server of its own]
  --api <url>         whom to call                            [spawn: a service of its own]
  --per-hour <n>      how many calls a token has per hour     [5000]
  --calls <n>         how many each process makes with each   [400]
  --role <role>       be one of the processes: caller (makes the calls), teller (tells what remains)
  --help              this text

The environment, where nobody reads it as one reads a command line:

  TOKENS              access tokens, separated by commas      [three for show]
  TOLLGATE_SECRET     with what they are hashed               [one for show]
";

#[tokio::main]
async fn main() -> ExitCode {
    common::main("per_token", HELP, async |mut options| {
        let role = options.role(&["caller", "teller"])?;
        let args = Args::read(options)?;
        match role {
            Some("caller") => call(&args).await,
            Some(_) => tell(&args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Builds the limit of each token: the header that identifies a token to the service is the key.
async fn limit(args: &Args) -> Result<RateLimitLayer, BoxError> {
    let store = RedisStore::builder(&args.places.redis)
        .prefix("per-token")
        .secret(args.secret.as_bytes())
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    store.connect().await?; // the first call has little time for it
    let quota = Quota::new(args.per_hour, Duration::from_secs(3600));
    let limit = RateLimitLayer::builder(quota)
        .key(by_header(AUTHORIZATION))
        .store(Arc::new(store));
    Ok(limit.max_wait(Duration::from_secs(1)).build()?)
}

/// Returns the header of a token; its value is the key.
fn authorization(token: &str) -> Result<HeaderValue, BoxError> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))?;
    value.set_sensitive(true); // `Debug` of the request does not show it
    Ok(value)
}

/// Makes the calls of all tokens in turn. A token whose hourly limit is used up is left out from
/// then on; the others continue.
async fn call(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let limit = limit(args).await?;
    let mut service = ServiceBuilder::new()
        .layer(limit.clone())
        .map_request(common::stamp)
        .service(common::client()?);

    let mut answered = vec![0; args.tokens.len()];
    let mut refused: Vec<Option<String>> = vec![None; args.tokens.len()];
    for _ in 0..args.calls {
        for (number, token) in args.tokens.iter().enumerate() {
            if refused[number].is_some() {
                continue;
            }
            let mut request = Request::new(reqwest::Method::GET, args.places.api.parse()?);
            request
                .headers_mut()
                .insert(AUTHORIZATION, authorization(token)?);
            request
                .headers_mut()
                .insert(WHO_HEADER, (number + 1).into());
            match service.ready().await?.call(request).await {
                Ok(response) => {
                    response.error_for_status()?.bytes().await?;
                    answered[number] += 1;
                }
                Err(error) => match Limited::find(&error) {
                    Some(limited @ Limited::Local { .. }) => {
                        refused[number] = Some(limited.to_string())
                    }
                    _ => return Err(error.into()),
                },
            }
        }
    }
    for (number, (answered, refused)) in answered.iter().zip(refused).enumerate() {
        let refused = refused.map_or(String::new(), |refused| format!(", then {refused}"));
        println!("token {}: {answered} answered{refused}", number + 1);
    }
    limit.limiter().shutdown().await?; // what is left at hand here goes to the others
    Ok(())
}

/// Prints how many calls remain for each token, and uses none.
async fn tell(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let limiter = limit(args).await?.limiter();
    for (number, token) in args.tokens.iter().enumerate() {
        let peek = limiter.peek(Key::new(authorization(token)?)).await?;
        let used: u64 = peek.limits.iter().map(|usage| usage.used).sum();
        let next = if peek.free > 0 {
            String::new()
        } else {
            format!(", the next in {}", span(peek.next_slot))
        };
        println!(
            "token {}: {} of {} remain, {used} used{next}",
            number + 1,
            peek.free,
            args.per_hour
        );
    }
    Ok(())
}

/// Starts the Redis, the service and two processes that call. Before and after them, a third
/// process only looks.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    let rule = Rule::new(args.per_hour, Duration::from_secs(3600));
    args.places.start(Upstream::open).await?; // a service that counts for each token; the check is below
    println!(
        "Two processes, {} tokens, {} calls per hour for each.",
        args.tokens.len(),
        args.per_hour
    );
    run(&args, "teller", &["before"]).await?;
    run(&args, "caller", &["process 1", "process 2"]).await?;
    run(&args, "teller", &["after"]).await?;
    run(&args, "teller", &["asked again"]).await?;

    let Some(upstream) = &args.places.upstream else {
        return Ok(());
    };
    let log = upstream.log();
    println!();
    for (who, tally) in log.by_who() {
        println!("The service saw {} calls with token {who}.", tally.all());
        let calls = log
            .iter()
            .filter(|arrival| arrival.who.as_deref() == Some(who))
            .cloned();
        if let Some(broken) = common::not_kept(
            &Log::from(calls.collect::<Vec<_>>()),
            &[rule],
            TRANSIT_SLACK,
        ) {
            return Err(format!("the limit of token {who} was not kept: {broken}").into());
        }
    }
    Ok(())
}

/// Runs a child for each of `names`, and waits for all of them.
async fn run(args: &Args, role: &str, names: &[&str]) -> Result<(), BoxError> {
    let mut children = Children::of_this_program()?;
    children.environment("TOKENS", &args.tokens.join(","));
    children.environment("TOLLGATE_SECRET", &args.secret);
    for name in names {
        children.start(
            *name,
            [args.words(), vec!["--role".to_owned(), role.to_owned()]].concat(),
        )?;
    }
    println!();
    while let Some(Line { who, text }) = children.line().await {
        println!("{who:11} {text}");
    }
    Ok(children.end().await?)
}

/// The options of the command line.
struct Args {
    places: Places,
    per_hour: u32,
    calls: u32,
    tokens: Vec<String>,
    secret: String,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, Usage> {
        let variable =
            |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
        let args = Args {
            places: Places::given(&mut options)?,
            per_hour: options.number("--per-hour", 5000, 1..=1_000_000)?,
            calls: options.number("--calls", 400, 1..=1_000_000)?,
            tokens: variable("TOKENS", "token-of-ann,token-of-bob,token-of-eve")
                .split(',')
                .map(str::to_owned)
                .collect(),
            secret: variable("TOLLGATE_SECRET", "a secret for show: take 32 random bytes"),
        };
        options.finish()?;
        Ok(args)
    }

    /// Returns the options as words for the children, without the secrets.
    fn words(&self) -> Vec<String> {
        let own = [
            "--per-hour",
            &self.per_hour.to_string(),
            "--calls",
            &self.calls.to_string(),
        ];
        [self.places.words(), own.map(str::to_owned).to_vec()].concat()
    }
}
