//! A bot with the limits of Discord: 50 calls per second in all, a limit for each channel, and one
//! for each route. Several processes share them through Redis.
//!
//!     cargo run --release --example discord
//!
//! The service refuses with 429, `Retry-After` and `X-RateLimit-Scope`, which says which limit was
//! exceeded: `global` is that of all calls, `shared` the channel, `user` the route. The limits of the
//! layer have these names, so such a refusal holds the key that it is about. While the limits are
//! kept, no call is refused.
//!
//! Calls come at a fixed rate, most of them to a few channels. While a call waits for its channel, it
//! takes nothing from the 50 per second.
//!
//! Measured with `--processes 4 --seconds 20`, on two cores that other programs kept busy (a load
//! of 5). `--channels 34` are 102 routes, and `--channels 60` are 180 routes. "Sent" counts per
//! cent of what the limits allow. Waits are those of routes and channels with little use.
//!
//! | options | sent | refused | wait, p50 | p99 | Redis calls for each call sent |
//! |---|--:|--:|--:|--:|--:|
//! | `--rate 60 --channels 34` | 96.3 | 0 | 0.002 s | 0.298 s | 1.3 |
//! | `--rate 100 --channels 60` | 97.7 | 0 | 1.9 s | 2.0 s | 2.8 |
//!
//! In the second row twice as many calls come as are allowed, so each wait is about `--max-wait`,
//! and many Redis calls are for calls that are not sent.

mod common;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Method, Request};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Key, Quota, RateLimitLayer, Routes};
use tower::ServiceBuilder;
use upstream::{KeyedRule, Rule};

use common::{LIGHT, Options, Places, Usage};

const HELP: &str = "\
50 calls per second in all, 8 per 5 s for each channel, 5 per 5 s for each route.

Usage: cargo run --release --example discord -- [options]

  --redis <url>     where to count                              [spawn: a redis-server of its own]
  --api <url>       whom to call                                [spawn: a service of its own]
  --processes <n>   how many processes call                     [2]
  --rate <n>        how many calls come per second, in all      [60]
  --channels <n>    how many channels there are, of 3 routes    [60]
  --seconds <s>     for how long calls come                     [8]
  --max-wait <s>    the longest a call may wait                 [2]
  --role <role>     be one of the processes: caller
  --number <n>      which of them                               [0]
  --help            this text
";

const GLOBAL: Rule = Rule::per_second(50);
const CHANNEL: Rule = Rule::new(8, Duration::from_secs(5));
const ROUTE: Rule = Rule::new(5, Duration::from_secs(5));

/// The routes of each channel: the method, and the end of the path.
const ROUTES: [(Method, &str); 3] = [
    (Method::POST, "messages"),
    (Method::GET, "pins"),
    (Method::POST, "typing"),
];

#[tokio::main]
async fn main() -> ExitCode {
    common::main("discord", HELP, async |mut options| {
        let role = options.role(&["caller"])?;
        let args = Args::read(options)?;
        match role {
            Some(_) => call_all(&args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Builds all limits. The first one sees every call. Each channel has a count of its own, and so has
/// each route of each channel.
fn limit(args: &Args) -> Result<RateLimitLayer, BoxError> {
    let store = RedisStore::builder(&args.places.redis)
        .prefix("discord")
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    let quota = |rule: Rule| Quota::new(rule.count, rule.window);
    let channels = Routes::new([("/channels/{channel}/*", quota(CHANNEL))])?;
    let routes = Routes::new([
        ("POST /channels/{channel}/messages", quota(ROUTE)),
        ("GET /channels/{channel}/pins", quota(ROUTE)),
        ("POST /channels/{channel}/typing", quota(ROUTE)),
    ])?;
    let limit = RateLimitLayer::builder(quota(GLOBAL))
        .name("global")
        .key(|_| Key::new("our bot"))
        .routes(channels.name("shared"))
        .routes(routes.name("user"))
        .store(Arc::new(store))
        .max_wait(args.max_wait);
    Ok(limit.build()?)
}

/// Returns the channel of a path such as `/channels/17/messages`: all but its end.
fn channel_of(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(channel, _)| channel)
}

/// Runs one of the processes: makes calls at its part of the rate, whether or not earlier ones wait.
async fn call_all(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let limit = limit(args)?;
    let service = ServiceBuilder::new()
        .layer(limit.clone())
        .map_request(common::stamp)
        .service(common::client()?);

    let rate = f64::from(args.rate) / f64::from(args.processes);
    let mut tick = interval(Duration::from_secs(1).div_f64(rate));
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut calls = JoinSet::new();
    let load = Load::of(args);
    for number in (args.number..args.calls()).step_by(args.processes as usize) {
        tick.tick().await;
        let route = args.route(number);
        let mark = if load.is_light(&route) { LIGHT } else { "" };
        let url = format!("{}{route}", args.places.api);
        let (_, end) = route.rsplit_once('/').unwrap_or_default();
        let method = ROUTES.iter().find(|(_, other)| *other == end);
        let method = method.map_or(Method::GET, |(method, _)| method.clone());
        let call = common::call(service.clone(), Request::new(method, url.parse()?));
        calls.spawn(async move { Ok::<_, BoxError>(format!("{mark}{}", call.await?)) });
    }
    while let Some(outcome) = calls.join_next().await {
        println!("{}", outcome??);
    }
    limit.limiter().shutdown().await?;
    Ok(())
}

/// How often each route and each channel is called, and for how long.
struct Load {
    routes: BTreeMap<String, u32>,
    channels: BTreeMap<String, u32>,
    time: Duration,
    max_wait: Duration,
}

impl Load {
    fn of(args: &Args) -> Self {
        let mut load = Load {
            routes: BTreeMap::new(),
            channels: BTreeMap::new(),
            time: args.time,
            max_wait: args.max_wait,
        };
        for number in 0..args.calls() {
            let route = args.route(number);
            let channel = channel_of(&route).to_owned();
            *load.channels.entry(channel).or_default() += 1;
            *load.routes.entry(route).or_default() += 1;
        }
        load
    }

    /// Returns whether at most three quarters of the limits of a route and its channel are used. Its
    /// calls then mostly wait for the limit of all calls.
    fn is_light(&self, route: &str) -> bool {
        let is_light = |calls: Option<&u32>, rule| {
            calls.is_none_or(|calls| 4 * calls <= 3 * allowed(rule, self.time))
        };
        is_light(self.routes.get(route), ROUTE)
            && is_light(self.channels.get(channel_of(route)), CHANNEL)
    }

    /// Returns how many of the calls the limits allow at most.
    fn possible(&self) -> u32 {
        let span = self.time + self.max_wait;
        let mut channels: BTreeMap<&str, u32> = BTreeMap::new();
        for (route, calls) in &self.routes {
            *channels.entry(channel_of(route)).or_default() += (*calls).min(allowed(ROUTE, span));
        }
        let all: u32 = channels
            .values()
            .map(|calls| (*calls).min(allowed(CHANNEL, span)))
            .sum();
        all.min(allowed(GLOBAL, span))
    }
}

/// Returns how many calls a limit allows within `span`.
fn allowed(rule: Rule, span: Duration) -> u32 {
    let windows = span.as_secs_f64() / rule.window.as_secs_f64();
    rule.count * windows.ceil() as u32
}

/// Starts the Redis, the service and the processes, and prints what became of the calls.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    let limits = [
        KeyedRule {
            name: "all calls",
            rule: GLOBAL,
            key: |_, _| Some("our bot".to_owned()),
            scope: "global",
        },
        KeyedRule {
            name: "channel",
            rule: CHANNEL,
            key: |path, _| Some(channel_of(path).to_owned()),
            scope: "shared",
        },
        KeyedRule {
            name: "route",
            rule: ROUTE,
            key: |path, _| Some(path.to_owned()),
            scope: "user",
        },
    ];
    println!(
        "{} processes make {} calls a second for {:?}.\n",
        args.processes, args.rate, args.time
    );
    let words = args.words();
    let words = |number: u32| [&words[..], &["--number".to_owned(), number.to_string()]].concat();
    let outcomes =
        common::call_from_processes(&mut args.places, &limits, args.processes, words).await?;
    let possible = Load::of(&args).possible();
    let share = 100.0 * outcomes.sent() as f64 / possible as f64;
    println!("{share:.1} % of the {possible} calls that the limits allow were sent.");
    Ok(())
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    places: Places,
    processes: u32,
    rate: u32,
    channels: u32,
    time: Duration,
    max_wait: Duration,
    number: u32,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, Usage> {
        let args = Args {
            places: Places::given(&mut options)?,
            processes: options.number("--processes", 2, 1..=32)?,
            rate: options.number("--rate", 60, 1..=1000)?,
            channels: options.number("--channels", 60, 1..=10_000)?,
            time: options.seconds("--seconds", 8.0)?,
            max_wait: options.seconds("--max-wait", 2.0)?,
            number: options.number("--number", 0, 0..=31)?,
        };
        options.finish()?;
        Ok(args)
    }

    /// Returns how many calls come in all.
    fn calls(&self) -> u32 {
        (f64::from(self.rate) * self.time.as_secs_f64()) as u32
    }

    /// Returns the route of call `number`. Some channels are called far more often than others.
    fn route(&self, number: u32) -> String {
        // Two sequences that fill the interval from 0 to 1 evenly.
        let evenly = |step: f64| (f64::from(number) * step).fract();
        let (at, end) = (evenly(0.754_877_666), evenly(0.569_840_291));
        let channel = (f64::from(self.channels) * at * at) as u32;
        let (_, end) = &ROUTES[(end * ROUTES.len() as f64) as usize];
        format!("channels/{channel}/{end}")
    }

    /// Returns the options as words for the children, without the places.
    fn words(&self) -> Vec<String> {
        let words = [
            ["--role", "caller"],
            ["--processes", &self.processes.to_string()],
            ["--rate", &self.rate.to_string()],
            ["--channels", &self.channels.to_string()],
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
