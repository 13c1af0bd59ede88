//! Upstreams whose headers are incomplete or unexpected: few requests are refused while the limiter
//! learns that.

#[cfg(feature = "redis")]
use crate::support::{self, patient};

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http::{Request, Response, StatusCode};
use support::{Upstream, get, ms, now, pass};
use tokio::task::JoinSet;
use tollgate::{HeaderTrust, Quota, RateLimitLayer};
use tower::{BoxError, Layer, Service, ServiceExt};

/// The limit of the servers here: this many calls in a fixed window.
const COUNT: usize = 5;
const WINDOW: Duration = Duration::from_secs(10);

const WINDOWS: u32 = 30;

/// How long a request is in transit; its response takes as long.
const TRIP: Duration = Duration::from_millis(20);

/// How a server states the end of its window.
#[derive(Clone, Copy, Debug)]
enum Words {
    /// By its clock, which is behind by this much; its responses do not state the time.
    Behind(Duration),
    /// In whole seconds, rounded down.
    RoundedDown,
}

/// The calls in one window of a server.
#[derive(Clone, Debug, Default)]
struct Window {
    accepted: usize,
    refused: Vec<Instant>,
}

impl Window {
    /// Counts the refused requests that left when another refusal was known.
    fn rounds(&self) -> usize {
        let mut known = None;
        let mut left_knowing = |arrived: &&Instant| {
            let knew = known.is_none_or(|known| **arrived - TRIP > known);
            if knew {
                known = Some(**arrived + TRIP);
            }
            knew
        };
        self.refused.iter().filter(&mut left_knowing).count()
    }
}

/// A server with fixed windows.
#[derive(Clone, Debug)]
struct Server {
    words: Words,
    /// A moment, and the client's clock at that moment.
    clock: (Instant, SystemTime),
    windows: Arc<Mutex<Vec<(u64, Window)>>>,
}

impl Server {
    fn answer(&self) -> Response<String> {
        let behind = if let Words::Behind(behind) = self.words {
            behind
        } else {
            Duration::ZERO
        };
        let ours = self.clock.1 + (now() - self.clock.0);
        let theirs = ours.duration_since(UNIX_EPOCH).unwrap() - behind;
        let number = theirs.as_secs() / WINDOW.as_secs();
        let ends = WINDOW.as_secs() * (number + 1);
        let mut windows = self.windows.lock().unwrap();
        if windows.last().is_none_or(|(last, _)| *last < number) {
            windows.push((number, Window::default()));
        }
        let (_, window) = windows.last_mut().unwrap();
        let is_full = window.accepted == COUNT;
        if is_full {
            window.refused.push(now());
        } else {
            window.accepted += 1;
        }
        let response = Response::builder();
        let response = match self.words {
            Words::Behind(_) => response
                .header("X-RateLimit-Limit", COUNT)
                .header("X-RateLimit-Remaining", COUNT - window.accepted)
                .header("X-RateLimit-Reset", ends),
            Words::RoundedDown if is_full => response.header(
                "Retry-After",
                (Duration::from_secs(ends) - theirs).as_secs(),
            ),
            Words::RoundedDown => response,
        };
        let status = if is_full {
            StatusCode::TOO_MANY_REQUESTS
        } else {
            StatusCode::OK
        };
        response.status(status).body(String::new()).unwrap()
    }

    fn service(
        self,
    ) -> impl Service<
        Request<String>,
        Response = Response<String>,
        Error = BoxError,
        Future: Future + Send,
    > + Clone
    + Send
    + 'static {
        tower::service_fn(move |_: Request<String>| {
            let server = self.clone();
            async move {
                pass(TRIP).await;
                let answer = server.answer();
                pass(TRIP).await;
                Ok(answer)
            }
        })
    }
}

/// Returns the calls in each window of a server, from callers that send as fast as they may.
async fn windows(server: Server, quota: Quota, callers: usize) -> Vec<Window> {
    let limit = RateLimitLayer::builder(quota)
        .max_wait(2 * WINDOW)
        .build()
        .unwrap();
    let service = limit.layer(server.clone().service());
    let end = now() + WINDOWS * WINDOW;
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let service = service.clone();
        tasks.spawn(async move {
            while now() < end {
                if service.clone().oneshot(get("/")).await.is_err() {
                    pass(ms(100)).await;
                }
            }
        });
    }
    tasks.join_all().await;
    let windows = server.windows.lock().unwrap().clone();
    windows.into_iter().map(|(_, window)| window).collect()
}

#[tokio::test(start_paused = true)]
async fn server_with_imprecise_resets_refuses_few() {
    let clock = (now(), SystemTime::now());
    for words in [Words::Behind(ms(300)), Words::RoundedDown] {
        for quota in [
            Quota::per_second(100),
            Quota::fixed(5, WINDOW),
            Quota::new(5, WINDOW),
        ] {
            for callers in [1, 8] {
                let server = Server {
                    words,
                    clock,
                    windows: Arc::default(),
                };
                let windows = windows(server, quota, callers).await;
                let rounds: Vec<_> = windows.iter().map(Window::rounds).collect();
                let used = windows.iter().map(|window| window.accepted).sum::<usize>();
                let what = format!(
                    "{words:?}, {quota}, {callers} callers: {rounds:?} refused, {used} used"
                );
                // One refusal in each window shows that it is full. At most three more teach the
                // limiter when windows begin.
                let early = rounds
                    .iter()
                    .map(|rounds| rounds.saturating_sub(1))
                    .sum::<usize>();
                assert!(early <= 3, "{what}");
                assert!(used >= WINDOWS as usize * COUNT * 97 / 100, "{what}");
            }
        }
    }
}

/// The ways to state what remains.
fn left(way: usize, quota: Quota, left: u32, reset: Duration) -> Response<String> {
    let (window, reset) = (quota.limits()[0].window().as_secs(), reset.as_secs());
    let count = quota.largest_cost();
    let headers = match way {
        0 => vec![
            ("RateLimit-Policy", format!(r#""q";q={count};w={window}"#)),
            ("RateLimit", format!(r#""q";r={left};t={reset}"#)),
        ],
        1 => vec![
            ("X-RateLimit-Limit", count.to_string()),
            ("X-RateLimit-Remaining", left.to_string()),
            ("X-RateLimit-Reset", reset.to_string()),
        ],
        _ => vec![
            ("X-RateLimit-Remaining", left.to_string()),
            ("X-RateLimit-Reset", reset.to_string()),
        ],
    };
    let response = headers
        .iter()
        .fold(Response::builder(), |response, (name, value)| {
            response.header(*name, value)
        });
    response.body(String::new()).unwrap()
}

/// After an idle time an upstream states that others have used nearly all: no request leaves that
/// it would refuse.
#[tokio::test(start_paused = true)]
async fn remaining_units_count_at_once() {
    let quotas = [
        Quota::new(10, Duration::from_secs(10)),
        Quota::per_minute(10),
        Quota::per_hour(10),
        Quota::fixed(10, Duration::from_secs(60)),
        Quota::fixed(10, Duration::from_secs(3600)),
        Quota::per_minute(10).and(Quota::per_day(1000)),
    ];
    for learn in [
        HeaderTrust::Usage,
        HeaderTrust::Stricter,
        HeaderTrust::Replace,
    ] {
        for quota in quotas {
            for way in 0..if quota.limits().len() > 1 { 2 } else { 3 } {
                for remaining in 0..5 {
                    let window = quota.limits()[0].window();
                    let limit = RateLimitLayer::builder(quota)
                        .trust_headers(learn)
                        .boundary_guard(Duration::ZERO)
                        // At the end of a fixed window, a request waits for the next one.
                        .max_wait(ms(100))
                        .build()
                        .unwrap();
                    let says = |units, reset| Ok(left(way, quota, units, reset));
                    let upstream =
                        Upstream::answering([says(9, window), says(remaining, window - ms(3000))]);
                    let service = limit.layer(upstream.clone());
                    service.clone().oneshot(get("/")).await.unwrap();
                    pass(3 * window).await;
                    service.clone().oneshot(get("/")).await.unwrap();
                    let before = upstream.count();
                    let calls = (0..5).map(|_| service.clone().oneshot(get("/")));
                    futures::future::join_all(calls).await;
                    let sent = upstream.count() - before;
                    let what = format!("{learn:?}, {quota}, way {way}, {remaining} left");
                    assert_eq!(sent, remaining as usize, "{what}");
                }
            }
        }
    }
}

/// The same with processes that share a limit: a signal to one process reaches the others a trip
/// later.
#[cfg(feature = "redis")]
mod shared {

    use redis_server::RedisServer;

    use super::*;

    fn process(server: &RedisServer, quota: Quota, max_wait: Duration) -> RateLimitLayer {
        let store = super::patient::store(&server.url());
        RateLimitLayer::builder(quota)
            .max_wait(max_wait)
            .store(store)
            .build()
            .unwrap()
    }

    /// A signal to one process reaches another a trip later, and makes it give up its prefetched
    /// permits.
    #[tokio::test]
    async fn signal_to_one_process_counts_for_all() {
        const LEFT: u32 = 2;
        let server = RedisServer::start().unwrap();
        let (rounds, mut soon) = (10, 0);
        for round in 0..rounds {
            let quota = Quota::per_minute(1000 + round);
            let says = left(0, quota, LEFT, Duration::from_secs(40));
            let hears =
                process(&server, quota, Duration::ZERO).layer(Upstream::answering([Ok(says)]));
            let upstream = Upstream::new();
            let other = process(&server, quota, Duration::ZERO).layer(upstream.clone());
            let calls = tokio::spawn(async move {
                loop {
                    let _ = other.clone().oneshot(get("/")).await;
                    pass(ms(1)).await;
                }
            });
            while upstream.count() < 20 {
                pass(ms(5)).await;
            }
            hears.clone().oneshot(get("/")).await.unwrap();
            pass(ms(20 + 5)).await;
            let a_trip_later = upstream.count();
            pass(ms(200)).await;
            let later = upstream.count();
            pass(ms(200)).await;
            let last = upstream.count();
            assert!(
                last <= later + LEFT as usize,
                "{} went when all knew that 2 are left",
                last - later
            );
            soon += usize::from(last <= a_trip_later + LEFT as usize);
            calls.abort();
            let () = server.command(&["FLUSHALL"]);
        }
        // The machine may be busy.
        assert!(soon >= 8, "in {soon} of {rounds} rounds a trip was enough");
    }

    /// It gives up later booked slots too: none of these requests leaves before the upstream's next
    /// window.
    #[tokio::test]
    async fn booked_slots_are_booked_anew() {
        let server = RedisServer::start().unwrap();
        // The first limit books them a second apart; by the second, no unit remains.
        let quota = Quota::per_second(2).and(Quota::per_minute(100));
        let reset = ms(4000);
        let says = Response::builder()
            .header("RateLimit-Policy", r#""minute";q=100;w=60"#)
            .header(
                "RateLimit",
                format!(r#""minute";r=0;t={}"#, reset.as_secs()),
            );
        let answers = Upstream::answering([Ok(says.body(String::new()).unwrap())]);
        let asked = answers.clone();
        let upstream = Upstream::new();
        let others = upstream.clone();
        // Answers when the other process has sent its first request.
        let slowly = tower::service_fn(move |request| {
            let (answer, others) = (answers.clone().oneshot(request), others.clone());
            async move {
                let answer = answer.await;
                while others.count() == 0 {
                    pass(ms(5)).await;
                }
                // Long enough for the others to book.
                pass(ms(200)).await;
                answer
            }
        });
        let hears = process(&server, quota, Duration::ZERO).layer(slowly);
        let other = process(&server, quota, ms(10_000));
        // It is connected by the time it books.
        other.limiter().peek(tollgate::Key::ALL).await.unwrap();
        let other = other.layer(upstream.clone());
        let sent = now();
        let first = tokio::spawn(hears.clone().oneshot(get("/")));
        while asked.count() == 0 {
            pass(ms(5)).await;
        }
        let waiters = (0..6).map(move |_| other.clone().oneshot(get("/")));
        let waiters = tokio::spawn(futures::future::join_all(waiters));
        first.await.unwrap().unwrap();
        assert_eq!(upstream.count(), 1, "one left before the signal arrived");
        pass(reset.saturating_sub(sent.elapsed() + ms(200))).await;
        assert_eq!(
            upstream.count(),
            1,
            "the others left before the upstream's next window"
        );
        assert!(waiters.await.unwrap().iter().all(Result::is_ok));
    }
}
