//! Tables of routes against servers with the limits of GitHub and Discord, in virtual time. The server
//! counts every request, and refuses those above a limit.

use crate::support;

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode};
use tokio::task::JoinSet;
use tollgate::{Cost, Key, Limited, Quota, RateLimitLayer, Routes};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};

use support::{ms, now, pass};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// One limit of a server.
struct Limit {
    name: &'static str,
    count: usize,
    window: Duration,
    /// Returns the key and the cost of a request, given as `GET /users`. `None` if the limit does not
    /// see it.
    sees: fn(&str) -> Option<(String, usize)>,
}

/// A server that counts exactly: a request above a limit is refused and counts nowhere.
#[derive(Clone)]
struct Server {
    limits: &'static [Limit],
    takes: Duration,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// When the units of each key were used, in the last window.
    used: HashMap<(&'static str, String), VecDeque<Instant>>,
    /// The units that were used in all, by limit.
    units: HashMap<&'static str, usize>,
    refused: Vec<(&'static str, String)>,
    in_flight: usize,
    most_in_flight: usize,
}

impl Server {
    fn new(limits: &'static [Limit], takes: Duration) -> Self {
        Server {
            limits,
            takes,
            state: Arc::default(),
        }
    }

    /// Returns whether the request is accepted.
    fn accepts(&self, request: &str) -> bool {
        let mut state = self.state.lock().unwrap();
        let now = now();
        let seen = |limit: &'static Limit| {
            (limit.sees)(request).map(|(key, cost)| (limit, (limit.name, key), cost))
        };
        let seen: Vec<_> = self.limits.iter().filter_map(seen).collect();
        for (limit, key, cost) in &seen {
            let used = state.used.entry(key.clone()).or_default();
            while used.front().is_some_and(|at| now - *at >= limit.window) {
                used.pop_front();
            }
            if used.len() + cost > limit.count {
                state.refused.push((limit.name, request.to_owned()));
                return false;
            }
        }
        for (limit, key, cost) in seen {
            let used = state.used.entry(key).or_default();
            used.extend((0..cost).map(|_| now));
            *state.units.entry(limit.name).or_default() += cost;
        }
        true
    }

    /// Asserts that no request was refused, and returns how many units of each limit were used.
    fn units(&self) -> HashMap<&'static str, usize> {
        let state = self.state.lock().unwrap();
        assert!(state.refused.is_empty(), "{:?}", state.refused);
        state.units.clone()
    }
}

impl Service<Request<()>> for Server {
    type Response = Response<()>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<()>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let name = format!("{} {}", request.method(), request.uri().path());
        let is_accepted = self.accepts(&name);
        let (state, takes) = (self.state.clone(), self.takes);
        {
            let mut state = state.lock().unwrap();
            state.in_flight += 1;
            state.most_in_flight = state.most_in_flight.max(state.in_flight);
        }
        Box::pin(async move {
            pass(takes).await;
            state.lock().unwrap().in_flight -= 1;
            let mut response = Response::new(());
            if !is_accepted {
                *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            }
            Ok(response)
        })
    }
}

fn request(name: &str) -> Request<()> {
    let (method, path) = name.split_once(' ').unwrap();
    let request = Request::builder().method(method);
    request.uri(format!("https://api{path}")).body(()).unwrap()
}

/// Sends the requests that `name` returns for 0, 1, 2 and so on, one after the other, for `time`. If
/// one is refused locally, goes on when the error says.
async fn send_for<S>(service: S, time: Duration, name: impl Fn(usize) -> String)
where
    S: Service<Request<()>, Error: Into<BoxError>> + Clone,
{
    let end = now() + time;
    let mut number = 0;
    while now() < end {
        match service.clone().oneshot(request(&name(number))).await {
            Ok(_) => number += 1,
            Err(error) => {
                let error = error.into();
                let retry_after = Limited::find(&*error).and_then(Limited::retry_after);
                pass(retry_after.unwrap().min(end - now() + ms(1))).await;
            }
        }
    }
}

/// `GET /search/code` has 10 per minute, other searches 30, GraphQL 5000 points an hour, and all else
/// 5000 requests an hour. Besides, 80 contents per minute and 500 per hour are created.
const GITHUB: &[Limit] = &[
    Limit {
        name: "core",
        count: 5000,
        window: HOUR,
        sees: |request| {
            let is_other = request.contains(" /search/") || request.contains(" /graphql");
            (!is_other).then(|| (String::new(), 1))
        },
    },
    Limit {
        name: "search",
        count: 30,
        window: MINUTE,
        sees: |request| {
            let path = request.strip_prefix("GET /search/")?;
            (path != "code").then(|| (String::new(), 1))
        },
    },
    Limit {
        name: "code_search",
        count: 10,
        window: MINUTE,
        sees: |request| (request == "GET /search/code").then(|| (String::new(), 1)),
    },
    Limit {
        name: "graphql",
        count: 5000,
        window: HOUR,
        sees: |request| {
            request
                .contains("/graphql")
                .then(|| (String::new(), POINTS))
        },
    },
    Limit {
        name: "contents in a minute",
        count: 80,
        window: MINUTE,
        sees: created,
    },
    Limit {
        name: "contents in an hour",
        count: 500,
        window: HOUR,
        sees: created,
    },
];

/// What a GraphQL query costs.
const POINTS: usize = 3;

fn created(request: &str) -> Option<(String, usize)> {
    let is_created = request.starts_with("POST /repos/");
    is_created.then(|| (String::new(), 1))
}

fn github() -> RateLimitLayer {
    // The server counts these apart from all else.
    let resources = Routes::new([
        ("GET /search/*", Quota::per_minute(30)),
        ("GET /search/code", Quota::per_minute(10)),
        ("POST /graphql", Quota::per_hour(5000)),
    ]);
    // And these besides.
    let contents = Quota::per_minute(80).and(Quota::per_hour(500));
    let contents = Routes::new([("POST /repos/*", contents)]);
    RateLimitLayer::builder(Quota::per_hour(5000))
        .name("core")
        .key(|_| Key::new("our token"))
        .cost(|request| match request.path() {
            "/graphql" => Cost::new(POINTS as u32),
            _ => Cost::new(1),
        })
        .routes(resources.unwrap().instead())
        .routes(contents.unwrap().name("contents"))
        .build()
        .unwrap()
}

/// Calls a server with the limits of GitHub for two hours, with these requests. Returns the share of
/// each limit that was used, and how many requests were in flight at most.
async fn call_github(names: &[fn(usize) -> String]) -> (HashMap<&'static str, f64>, usize) {
    const TIME: Duration = HOUR.saturating_mul(2);
    let server = Server::new(GITHUB, ms(300));
    // At most 100 requests at the same time. No request that waits for its rate keeps one of these slots.
    let in_flight = RateLimitLayer::new(Quota::in_flight(100)).unwrap();
    let service = ServiceBuilder::new()
        .layer(in_flight.and(github()))
        .service(server.clone());
    let mut tasks = JoinSet::new();
    for name in names.iter().copied().cycle().take(160) {
        tasks.spawn(send_for(service.clone(), TIME, name));
    }
    tasks.join_all().await;
    let units = server.units();
    let share = |limit: &Limit| {
        let windows = TIME.as_secs() / limit.window.as_secs();
        let used = units.get(limit.name).copied().unwrap_or_default();
        (
            limit.name,
            used as f64 / (limit.count as f64 * windows as f64),
        )
    };
    let most = server.state.lock().unwrap().most_in_flight;
    (GITHUB.iter().map(share).collect(), most)
}

#[tokio::test(start_paused = true)]
async fn the_resources_of_github_are_used_and_none_is_exceeded() {
    let (shares, most_in_flight) = call_github(&[
        |number| format!("GET /repos/us/{number}"),
        |number| ["GET /search/issues", "GET /search/users"][number % 2].to_owned(),
        |_| "GET /search/code".to_owned(),
        |_| "POST /graphql".to_owned(),
    ])
    .await;
    for name in ["core", "search", "code_search", "graphql"] {
        assert!(shares[name] >= 0.95, "{name}: {}", shares[name]);
    }
    assert_eq!(most_in_flight, 100);
}

#[tokio::test(start_paused = true)]
async fn contents_created_at_github_count_in_both_limits() {
    let (shares, _) = call_github(&[|number| format!("POST /repos/us/{number}/issues")]).await;
    assert!(shares["contents in an hour"] >= 0.95, "{shares:?}");
    assert_eq!(shares["core"], shares["contents in an hour"] / 10.0);
}

/// 50 requests per second in all, each route of a channel 5 per 5 s, and webhooks apart from all.
const DISCORD: &[Limit] = &[
    Limit {
        name: "global",
        count: 50,
        window: Duration::from_secs(1),
        sees: |request| (!request.contains(" /webhooks/")).then(|| (String::new(), 1)),
    },
    Limit {
        name: "route",
        count: 5,
        window: Duration::from_secs(5),
        sees: |request| {
            let (_, path) = request.split_once(" /channels/")?;
            let (channel, rest) = path.split_once('/')?;
            let method = request.split_once(' ')?.0;
            let kind = if rest.contains("/reactions/") {
                "reactions"
            } else {
                "messages"
            };
            Some((format!("{method} {channel} {kind}"), 1))
        },
    },
    Limit {
        name: "webhook",
        count: 5,
        window: Duration::from_secs(2),
        sees: |request| {
            let (_, path) = request.split_once(" /webhooks/")?;
            Some((path.to_owned(), 1))
        },
    },
];

fn discord() -> RateLimitLayer {
    let route = Quota::new(5, Duration::from_secs(5));
    let routes = Routes::new([
        ("POST /channels/{channel}/messages", route),
        ("DELETE /channels/{channel}/messages/*", route),
        ("PUT /channels/{channel}/messages/*/reactions/*/@me", route),
    ]);
    let webhook = Quota::new(5, Duration::from_secs(2));
    let webhooks = Routes::new([("POST /webhooks/{id}/{token}", webhook)]);
    RateLimitLayer::builder(Quota::per_second(50))
        .name("global")
        .key(|_| Key::new("our bot"))
        .routes(routes.unwrap().name("user"))
        .routes(webhooks.unwrap().instead())
        .build()
        .unwrap()
}

/// Calls a server with the limits of Discord for a minute, with `channels` channels, and returns how many
/// units of each limit were used.
async fn call_discord(channels: usize) -> HashMap<&'static str, usize> {
    let server = Server::new(DISCORD, ms(20));
    let service = discord().layer(server.clone());
    let mut tasks = JoinSet::new();
    for channel in 0..channels {
        let start = |name: Box<dyn Fn(usize) -> String + Send>| {
            let service = service.clone();
            async move { send_for(service, MINUTE, name).await }
        };
        let path = move |method, rest| format!("{method} /channels/{channel}/messages{rest}");
        tasks.spawn(start(Box::new(move |_| path("POST", String::new()))));
        tasks.spawn(start(Box::new(move |number| {
            path("DELETE", format!("/{number}"))
        })));
        tasks.spawn(start(Box::new(move |number| {
            path("PUT", format!("/{number}/reactions/%F0%9F%91%8D/@me"))
        })));
        tasks.spawn(start(Box::new(move |_| {
            format!("POST /webhooks/{channel}/token")
        })));
    }
    tasks.join_all().await;
    server.units()
}

#[tokio::test(start_paused = true)]
async fn the_routes_of_discord_are_used_and_none_is_exceeded() {
    // Few channels: the routes are the scarce limit. Many: that of all calls is.
    for (channels, scarce) in [(4, "route"), (40, "global")] {
        let units = call_discord(channels).await;
        let all = if scarce == "route" {
            channels * 3 * 60
        } else {
            50 * 60
        };
        let share = units[scarce] as f64 / all as f64;
        assert!(share >= 0.95, "{channels} channels: {share}");
        let webhooks = units["webhook"] as f64 / (channels * 60 / 2 * 5) as f64;
        assert!(webhooks >= 0.95, "webhooks: {webhooks}");
    }
}
