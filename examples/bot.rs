//! A chat bot: 30 messages per minute in all, and one per second to each channel.
//!
//!     cargo run --release --example bot
//!
//! Many messages are to be sent at once, to a few channels. Each waits until both limits allow it.
//! While it waits for its channel, it takes nothing from the 30 per minute. The clock runs faster,
//! so that the example ends in seconds: `--faster 1` is the real speed.

mod common;

use std::process::ExitCode;
use std::time::Duration;

use reqwest::{Method, Request};
use tokio::task::JoinSet;
use tollgate::error::BoxError;
use tollgate::{ConfigError, Key, Quota, RateLimitLayer};
use tower::ServiceBuilder;
use upstream::{KeyedRule, Rule, Upstream};

use common::{Options, Outcomes, Usage};

const HELP: &str = "\
A chat bot: 30 messages per minute in all, and one per second to each channel.

Usage: cargo run --release --example bot -- [options]

  --messages <n>   how many messages there are at once   [59]
  --channels <n>   to how many channels                  [5]
  --max-wait <s>   the longest a message may wait        [180]
  --faster <n>     how much faster the clock runs        [10]
  --help           this text
";

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> ExitCode {
    common::main("bot", HELP, async |options| {
        send_all(&Args::read(options)?).await
    })
    .await
}

/// Builds both limits.
fn limit(args: &Args) -> Result<RateLimitLayer, ConfigError> {
    RateLimitLayer::builder(Quota::new(30, MINUTE / args.faster))
        .and_per("channel", Quota::new(1, SECOND / args.faster), |request| {
            channel(request.path()).map(Key::new)
        })
        .max_wait(args.max_wait / args.faster)
        .build()
}

/// Returns the channel of a path such as `/channels/17/messages`.
fn channel(path: &str) -> Option<&str> {
    path.strip_prefix("/channels/")?.split('/').next()
}

/// Sends all messages, and prints what became of them.
async fn send_all(args: &Args) -> Result<(), BoxError> {
    let limits = [
        KeyedRule {
            name: "all",
            rule: Rule::new(30, MINUTE / args.faster),
            key: |_, _| Some("all".to_owned()),
            scope: "global",
        },
        KeyedRule {
            name: "channel",
            rule: Rule::new(1, SECOND / args.faster),
            key: |path, _| channel(path).map(str::to_owned),
            scope: "channel",
        },
    ];
    let server = Upstream::open().keyed(limits);
    let (messages, channels) = (args.messages, args.channels);
    println!("{messages} messages to {channels} channels, all at once.\n");

    let service = ServiceBuilder::new()
        .layer(limit(args)?)
        .map_request(common::stamp)
        .service(common::client()?);
    let mut calls = JoinSet::new();
    for number in 0..messages {
        let url = format!("{}channels/{}/messages", server.url(), number % channels);
        let message = Request::new(Method::POST, url.parse()?);
        calls.spawn(common::call(service.clone(), message));
    }
    let mut outcomes = Outcomes::default();
    while let Some(line) = calls.join_next().await {
        outcomes.add(&line??)?;
    }
    common::report(&outcomes, &server, &limits)
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    messages: u32,
    channels: u32,
    max_wait: Duration,
    faster: u32,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, Usage> {
        let args = Args {
            messages: options.number("--messages", 59, 1..=10_000)?,
            channels: options.number("--channels", 5, 1..=10_000)?,
            max_wait: options.seconds("--max-wait", 180.0)?,
            faster: options.number("--faster", 10, 1..=20)?,
        };
        options.finish()?;
        Ok(args)
    }
}
