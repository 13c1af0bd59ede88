//! Bans: the server states waits beyond `max_hold`, and makes them longer for each early call. Under a paused clock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tollgate::store::MemoryStore;
use tollgate::{Error, Limited, Quota, RateLimitLayer};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);

/// A server that bans for 2810 s at the first call, and for 600 s more at each call before that.
#[derive(Default)]
struct Server {
    banned_until: Option<Instant>,
    early: Vec<Duration>,
    start: Option<Instant>,
    served: usize,
}

impl Server {
    fn call(&mut self) -> Response<()> {
        let now = Instant::now();
        let start = *self.start.get_or_insert(now);
        let until = match self.banned_until {
            None => now + 2810 * SECOND,
            Some(until) if until > now => {
                self.early.push(now - start);
                until + 600 * SECOND
            }
            Some(_) => {
                self.served += 1;
                return Response::new(());
            }
        };
        self.banned_until = Some(until);
        let wait = (until - now).as_secs_f64().ceil() as u64;
        let refused = Response::builder().status(429).header("retry-after", wait);
        refused.body(()).unwrap()
    }
}

fn service(
    layer: RateLimitLayer,
    server: &Arc<Mutex<Server>>,
) -> impl Service<Request<()>, Response = Response<()>, Error = Error, Future: Send>
+ Clone
+ Send
+ 'static {
    let server = server.clone();
    ServiceBuilder::new()
        .layer(layer)
        .service(service_fn(move |_: Request<()>| {
            let server = server.clone();
            async move {
                sleep(SECOND / 20).await;
                let answer = server.lock().unwrap().call();
                Ok::<_, Error>(answer)
            }
        }))
}

/// Returns the early calls, the refusals that named another time than the server had stated, and when the ban was over.
async fn run(processes: usize, max_wait: Duration) -> (Vec<Duration>, usize, Duration) {
    let server = Arc::new(Mutex::new(Server::default()));
    let store = Arc::new(MemoryStore::new(100));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for process in 0..processes {
        let layer = RateLimitLayer::builder(Quota::per_second(50))
            .store(store.clone())
            .max_wait(max_wait)
            .build()
            .unwrap();
        let (service, server) = (service(layer, &server), server.clone());
        tasks.push(tokio::spawn(async move {
            let mut wrong = 0;
            sleep(SECOND * process as u32 / 10).await;
            while start.elapsed() < 6000 * SECOND {
                let answer = service.clone().oneshot(Request::new(())).await;
                let now = Instant::now();
                let (stated, served) = {
                    let server = server.lock().unwrap();
                    (server.banned_until, server.served)
                };
                if let Err(error) = answer {
                    let Some(Limited::Local { reason, report, .. }) = Limited::find(&error) else {
                        panic!("{error}");
                    };
                    let told = report.retry_after().map(|wait| now + wait);
                    let differs = told
                        .zip(stated)
                        .map(|(told, stated)| told.max(stated) - told.min(stated));
                    let is_right = differs.is_some_and(|differs| differs < 2 * SECOND);
                    // The server rounds up to whole seconds.
                    if !is_right && served == 0 && stated > Some(now + SECOND) {
                        println!(
                            "{:?}: {reason:?} {:?}, stated {:?}",
                            now - start,
                            report.retry_after(),
                            stated.map(|stated| stated - now)
                        );
                        wrong += 1;
                    }
                }
                sleep(7 * SECOND).await;
            }
            wrong
        }));
    }
    let mut wrong = 0;
    for task in tasks {
        wrong += task.await.unwrap();
    }
    let server = server.lock().unwrap();
    (
        server.early.clone(),
        wrong,
        server.banned_until.unwrap() - start,
    )
}

#[tokio::test(start_paused = true)]
async fn bans_are_probed_twice_by_the_whole_fleet() {
    for processes in [1, 3, 20] {
        for max_wait in [Duration::ZERO, 15 * SECOND, 70 * SECOND] {
            let (early, wrong, over) = run(processes, max_wait).await;
            println!(
                "{processes} processes, max_wait {max_wait:?}: early calls at {early:?}, {wrong} told another time, over at {over:?}"
            );
            assert!(early.len() <= 2, "{early:?}");
            assert_eq!(wrong, 0);
        }
    }
}

/// A ban that is over leaves nothing behind for the next one, which is shorter.
#[tokio::test(start_paused = true)]
async fn a_ban_that_is_over_does_not_come_back() {
    let store = Arc::new(MemoryStore::new(100));
    let waits = Arc::new(Mutex::new(vec![None, Some(90), None, Some(3600)]));
    let layers = [0, 1].map(|_| {
        let layer = RateLimitLayer::builder(Quota::per_second(50));
        layer
            .store(store.clone())
            .max_wait(Duration::ZERO)
            .build()
            .unwrap()
    });
    let services = layers.map(|layer| {
        let waits = waits.clone();
        ServiceBuilder::new()
            .layer(layer)
            .service(service_fn(move |_: Request<()>| {
                let wait = waits.lock().unwrap().pop().flatten();
                let response = match wait {
                    Some(wait) => Response::builder().status(429).header("retry-after", wait),
                    None => Response::builder(),
                };
                async move { Ok::<_, Error>(response.body(()).unwrap()) }
            }))
    });
    let call = |process: usize| services[process].clone().oneshot(Request::new(()));
    let told = |error: Error| {
        Limited::find(&error)
            .and_then(Limited::retry_after)
            .unwrap()
    };
    assert_eq!(call(0).await.unwrap().status(), 429);
    assert!(told(call(1).await.unwrap_err()) > 3590 * SECOND);
    sleep(61 * SECOND).await;
    while call(1).await.is_err() {
        sleep(SECOND).await;
    }
    sleep(240 * SECOND).await;
    assert_eq!(call(0).await.unwrap().status(), 429);
    for process in [0, 1] {
        let wait = told(call(process).await.unwrap_err());
        assert!(
            (89 * SECOND..=90 * SECOND).contains(&wait),
            "{process}: {wait:?}"
        );
    }
    sleep(61 * SECOND).await;
    while call(0).await.is_err() {
        sleep(SECOND).await;
    }
}
