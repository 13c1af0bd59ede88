//! One call a second, shared by three processes: a web server, background jobs and a cron process.
//!
//!     cargo run --release --example one_a_second
//!
//! The three processes do not know each other; they share the limit through Redis. A call that
//! cannot be sent within `--max-wait` is refused at once, with the time at which it could be.
//! `limit` below is the same in all processes; `call` uses it.

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Request, Response};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Limited, Quota, RateLimitLayer};
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::{Rule, Upstream, WHO_HEADER};

use common::{Children, Line, Options, Places, TRANSIT_SLACK, clock, span};

const HELP: &str = "\
One call a second, shared by a web server, background jobs and a cron process.

Usage: cargo run --release --example one_a_second -- [options]

  --redis <url>       where to count                    [spawn: a redis-server of its own]
  --api <url>         whom to call                      [spawn: a service of its own]
  --max-wait <s>      the longest a call may wait       [15]
  --calls <n>         how many calls each process makes [9]
  --role <role>       be one of the processes: web, jobs, cron
  --help              this text
";

const ROLES: [&str; 3] = ["web", "jobs", "cron"];

#[tokio::main]
async fn main() -> ExitCode {
    common::main("one_a_second", HELP, async |mut options| {
        let role = options.role(&ROLES)?;
        let args = Args::read(options)?;
        match role {
            Some(role) => be(role, &args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Builds the limit: the same in every process that calls this API.
fn limit(redis: &str, max_wait: Duration) -> Result<RateLimitLayer, BoxError> {
    let store = RedisStore::builder(redis)
        .prefix("one-a-second")
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .store(Arc::new(store))
        .max_wait(max_wait);
    Ok(limit.error_on_upstream_limit().build()?)
}

/// Runs one of the three processes.
async fn be(role: &'static str, args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let limit = limit(&args.places.redis, args.max_wait)?;
    let service = ServiceBuilder::new()
        .layer(limit.clone())
        .map_request(common::stamp)
        .service(common::client()?);

    let mut calls = JoinSet::new();
    if role == "cron" {
        sleep(Duration::from_secs(1)).await; // its minute comes while the others are at work
    }
    for number in 1..=args.calls {
        let mut request = Request::new(reqwest::Method::GET, args.places.api.parse()?);
        request.headers_mut().insert(WHO_HEADER, role.parse()?);
        calls.spawn(call(service.clone(), request, number));
        if role == "web" {
            sleep(Duration::from_millis(700)).await; // until the next visitor
        }
    }
    while let Some(said) = calls.join_next().await {
        said??;
    }
    limit.limiter().shutdown().await?; // what is left at hand here goes to the others
    Ok(())
}

/// Makes one call, and prints its outcome.
async fn call<S>(mut service: S, request: Request, number: u32) -> Result<(), BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    let start = Instant::now();
    let said = match service
        .ready()
        .await
        .map_err(Into::into)?
        .call(request)
        .await
        .map_err(Into::into)
    {
        Ok(response) => {
            let said = format!(
                "answered {} after {}",
                response.status(),
                span(start.elapsed())
            );
            response.bytes().await?; // so that the connection can be used again
            said
        }
        Err(error) => match Limited::find(error.as_ref()) {
            Some(limited) => tell(limited),
            None => return Err(error),
        },
    };
    println!("call {number}: {said}");
    Ok(())
}

/// Describes a refusal: which party refused the call and why, when it arrived, how long and how
/// often it waited, and when to retry.
fn tell(limited: &Limited) -> String {
    let report = limited.report();
    let since = clock(report.since());
    let waited = format!(
        "waited since {since}, for {}, turns: {}",
        span(report.waited()),
        report.turns()
    );
    let back = match (report.retry_after(), report.retry_at()) {
        (Some(wait), Some(at)) => format!("come back in {}, at {}", span(wait), clock(at)),
        _ => "nobody knows when it could be".to_owned(),
    };
    match limited {
        Limited::Local { reason, .. } => format!("refused: {reason}; {waited}; {back}"),
        other => format!("failed: {other}; {waited}"),
    }
}

/// Starts the Redis, the service and the three processes, and prints what the service saw.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    let rule = Rule::per_second(1);
    args.places.start(|| Upstream::start(rule)).await?;
    println!(
        "{} calls of three processes to a service that allows one a second.\n",
        3 * args.calls
    );

    let mut children = Children::of_this_program()?;
    for role in ROLES {
        children.start(
            role,
            [args.words(), vec!["--role".to_owned(), role.to_owned()]].concat(),
        )?;
    }
    let start = Instant::now();
    let mut said = Vec::new();
    while let Some(Line { who, text }) = children.line().await {
        println!("{:7} {who:4} {text}", span(start.elapsed()));
        said.push((who, text));
    }
    children.end().await?;

    let rows = ROLES.map(|role| {
        let count = |what: &str| {
            said.iter()
                .filter(|(who, text)| who == role && text.contains(what))
                .count()
                .to_string()
        };
        [
            role.to_owned(),
            count(": answered"),
            count(": refused"),
            count(": failed"),
        ]
    });
    println!(
        "\n{}",
        common::table(["process", "answered", "refused", "failed"], &rows)
    );
    if let Some(upstream) = &args.places.upstream {
        let log = upstream.log();
        println!(
            "The service saw {} calls, at most {} in any second.",
            log.len(),
            log.largest_count(rule.window)
        );
        if let Some(broken) = common::not_kept(&log, &[rule], TRANSIT_SLACK) {
            return Err(format!("the limit was not kept: {broken}").into());
        }
    }
    Ok(())
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    places: Places,
    max_wait: Duration,
    calls: u32,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, common::Usage> {
        let args = Args {
            places: Places::given(&mut options)?,
            max_wait: options.seconds("--max-wait", 15.0)?,
            calls: options.number("--calls", 9, 1..=1000)?,
        };
        options.finish()?;
        Ok(args)
    }

    /// Returns the options as words for the children.
    fn words(&self) -> Vec<String> {
        let own = [
            "--max-wait".to_owned(),
            self.max_wait.as_secs_f64().to_string(),
        ];
        [
            self.places.words(),
            own.to_vec(),
            vec!["--calls".to_owned(), self.calls.to_string()],
        ]
        .concat()
    }
}
