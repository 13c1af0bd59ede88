//! A worker process: sends the calls of its campaigns, and defers refused calls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use reqwest::{Request, Response, Url};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Limited, Quota, RateLimitLayer};
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::WHO_HEADER;

use crate::common::{client, stamp};
use crate::queue::{Call, Next, Queue};
use crate::{Args, report};

pub(crate) async fn work(args: &Args) -> Result<(), BoxError> {
    args.places.must_be_given()?;
    let store = RedisStore::builder(&args.places.redis)
        .prefix("campaigns")
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    let limit = RateLimitLayer::builder(Quota::per_second(args.rate))
        .store(Arc::new(store))
        .max_wait(args.max_wait)
        .transit_slack(args.transit_slack)
        .error_on_upstream_limit() // a 429 is put off just as a refusal of ours
        .build()?;
    let service = ServiceBuilder::new()
        .layer(limit.clone())
        .map_request(stamp)
        .service(client()?);

    let url: Url = args.places.api.parse()?;
    let desk = Arc::new(Desk::new(Queue::new(
        args.campaigns_of(args.number),
        args.calls,
    )));
    let mut senders = JoinSet::new();
    for _ in 0..args.senders {
        senders.spawn(send_on(service.clone(), Arc::clone(&desk), url.clone()));
    }
    let mut tick = interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            ended = senders.join_next() => match ended {
                Some(ended) => ended??,
                None => break,
            },
            _ = tick.tick() => desk.report(),
        }
    }
    desk.report();
    limit.limiter().shutdown().await?; // what is left at hand here goes to the others
    Ok(())
}

/// Sends one call after the other, until none is left. A refused call was not sent, so it is sent
/// again at the time that the refusal states. A call that failed on the way may have arrived: that
/// ends the worker.
async fn send_on<S>(mut service: S, desk: Arc<Desk>, url: Url) -> Result<(), BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    loop {
        let next = desk.queue().next(SystemTime::now());
        let call = match next {
            Next::Send(call) => call,
            Next::Wait(wait) => {
                sleep(wait).await;
                continue;
            }
            Next::Nothing => return Ok(()),
        };
        let request = request(call, &url)?;
        match service
            .ready()
            .await
            .map_err(Into::into)?
            .call(request)
            .await
            .map_err(Into::into)
        {
            Ok(response) => {
                response.error_for_status()?.bytes().await?; // so that the connection can be used again
                desk.answered(call);
            }
            Err(error) => match Limited::find(error.as_ref()) {
                Some(limited) => desk.put_off(call, limited),
                None => return Err(error),
            },
        }
    }
}

/// Builds a call with its number, so that the log of the service shows lost and repeated calls.
fn request(call: Call, url: &Url) -> Result<Request, BoxError> {
    let mut request = Request::new(reqwest::Method::POST, url.clone());
    request.headers_mut().insert(
        WHO_HEADER,
        format!("{}/{}", call.campaign, call.number).parse()?,
    );
    Ok(request)
}

/// What the senders of a worker share.
struct Desk {
    queue: Mutex<Queue>,
    counts: Mutex<BTreeMap<u32, report::Counts>>,
}

impl Desk {
    fn new(queue: Queue) -> Self {
        Desk {
            queue: Mutex::new(queue),
            counts: Mutex::default(),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<u32, report::Counts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answered(&self, call: Call) {
        self.counts().entry(call.campaign).or_default().answered += 1;
    }

    fn put_off(&self, call: Call, limited: &Limited) {
        let due = limited
            .report()
            .retry_at()
            .unwrap_or_else(|| SystemTime::now() + NOBODY_KNOWS);
        self.queue().put_off(call, due);
        let mut counts = self.counts();
        let counts = counts.entry(call.campaign).or_default();
        match limited {
            Limited::Upstream { .. } => counts.refused_there += 1,
            Limited::Store { .. } => counts.not_counted += 1,
            _ => counts.put_off += 1,
        }
    }

    fn report(&self) {
        for (campaign, counts) in &*self.counts() {
            println!("{}", counts.line(*campaign));
        }
    }
}

/// When to retry a call that failed because the store was unreachable.
const NOBODY_KNOWS: Duration = Duration::from_millis(500);
