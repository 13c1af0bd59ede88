//! The ban guard of a fleet: separate stores stand for processes. With a real Redis.

#![cfg(feature = "redis")]

use crate::support::patient;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::join_all;
use http::{Request, Response};
use redis_server::RedisServer;
use tollgate::stats::Event;
use tollgate::{Guard, Key, Limited, Quota, RateLimitLayer, Reason};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};

const PROCESSES: usize = 4;
const CALLERS: usize = 8;
const BUDGET: usize = 200;
const FIRST_STOP: Duration = Duration::from_secs(3);

/// What the server saw.
#[derive(Default)]
struct Log {
    /// When each request arrived. All are answered with 401.
    arrived: Mutex<Vec<Instant>>,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    /// When a guard tripped, and for how long.
    trips: Mutex<Vec<(Instant, Duration)>>,
    is_over: AtomicBool,
}

impl Log {
    async fn answer(&self) -> Response<String> {
        self.arrived.lock().unwrap().push(Instant::now());
        let in_flight = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_in_flight.fetch_max(in_flight, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(5)).await;
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        Response::builder().status(401).body(String::new()).unwrap()
    }
}

/// Runs the callers of a process until the test is over.
async fn process(server: &RedisServer, log: &Arc<Log>) {
    let guard = Guard::new(Quota::per_minute(BUDGET as u32))
        .key(|_| Key::new("our address"))
        .stop(FIRST_STOP, Duration::from_secs(60));
    let events = log.clone();
    let store = patient::builder(&server.url()).build().unwrap();
    let layer = RateLimitLayer::builder(Quota::per_second(400))
        .key(|request| Key::new(request.path()))
        .store(Arc::new(store))
        .max_wait(Duration::from_millis(50))
        .guard(guard)
        .on_event(move |event| {
            if let Event::GuardTripped { stop, .. } = event {
                events.trips.lock().unwrap().push((Instant::now(), *stop));
            }
        })
        .build()
        .unwrap();
    let callers = (0..CALLERS).map(|caller| {
        let server = log.clone();
        let inner = service_fn(move |_: Request<String>| {
            let server = server.clone();
            async move { Ok::<_, BoxError>(server.answer().await) }
        });
        let mut service = layer.layer(inner);
        let log = log.clone();
        async move {
            while !log.is_over.load(Ordering::SeqCst) {
                // Some paths are shared, and each process has some of its own.
                let path = format!("http://a/{}", caller % 3);
                let request = Request::get(path).body(String::new()).unwrap();
                let answer = service.ready().await.unwrap().call(request).await;
                if let Err(error) = answer {
                    let limited = Limited::find(&error).unwrap();
                    let reasons = [
                        Some(Reason::Held),
                        // The first refusal of a path may be later than three good answers of others.
                        Some(Reason::HeldKind),
                        Some(Reason::MaxWait(Duration::from_millis(50))),
                    ];
                    assert!(reasons.contains(&limited.reason()), "{limited}");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }
    });
    join_all(callers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleet_stops_when_its_bad_answers_are_too_many() {
    let server = RedisServer::start().unwrap();
    let log = Arc::new(Log::default());
    let over = log.clone();
    let end = async move {
        let give_up = Instant::now() + Duration::from_secs(30);
        let is_second = |trip: &(Instant, Duration)| trip.1 > FIRST_STOP;
        while !over.trips.lock().unwrap().iter().any(is_second) && Instant::now() < give_up {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // Calls of other processes may still arrive.
        tokio::time::sleep(Duration::from_millis(500)).await;
        over.is_over.store(true, Ordering::SeqCst);
    };
    let processes = join_all((0..PROCESSES).map(|_| process(&server, &log)));
    tokio::join!(processes, end);

    let arrived = log.arrived.lock().unwrap().clone();
    let trips = log.trips.lock().unwrap().clone();
    let most_in_flight = log.most_in_flight.load(Ordering::SeqCst);
    let (first_trip, first_stop) = *trips.iter().min().expect("the guard trips");
    assert_eq!(first_stop, FIRST_STOP);
    let before_next = |at: &&Instant| **at < first_trip + FIRST_STOP - Duration::from_millis(100);
    let last = arrived.iter().filter(before_next).max().unwrap();
    let late = last.saturating_duration_since(first_trip);
    let in_first = arrived.iter().filter(before_next).count();
    let stops: Vec<_> = trips
        .iter()
        .map(|(at, stop)| (*at - first_trip, *stop))
        .collect();
    println!(
        "{in_first} bad answers until the first stop, {} in all, {most_in_flight} in flight at most; \
         from the trip to the last call {late:?}; trips {stops:?}",
        arrived.len(),
    );
    // The whole test is shorter than the window of the budget. Besides the budget there are calls in
    // flight, and calls of a round trip to Redis, which is longer on a busy machine. Processes that count
    // for themselves would send four times the budget.
    assert!(in_first > BUDGET / 2, "{in_first}");
    assert!(in_first <= BUDGET * 2, "{in_first}");
    let longest = trips.iter().map(|(_, stop)| *stop).max().unwrap();
    // After a stop, each process sends a request for each path.
    let after_stops = arrived.len() - in_first;
    assert!(after_stops <= 3 * PROCESSES * CALLERS, "{after_stops}");
    assert_eq!(longest, FIRST_STOP * 2, "{stops:?}");
    assert!(late < Duration::from_secs(2), "{late:?}");
}
