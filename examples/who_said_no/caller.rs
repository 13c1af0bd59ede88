//! The process that calls: its stack of layers, and how it handles a refusal.

use std::error::Error as StdError;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Request, Response};
use tokio::io::AsyncReadExt;
use tokio::time::{interval, sleep};
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Error, Limited, Quota, RateLimitLayer};
use tower::retry::Policy;
use tower::timeout::error::Elapsed;
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::WHO_HEADER;

use crate::common::{Places, client, stamp};

/// The limit of the service, in calls per second.
pub(crate) const RATE: u32 = 10;

/// Calls until the standard input ends.
pub(crate) async fn call(places: &Places) -> Result<(), BoxError> {
    places.must_be_given()?;
    let store = RedisStore::builder(&places.redis)
        .prefix("who-said-no")
        .build()?;
    let limit = RateLimitLayer::builder(Quota::per_second(RATE))
        .store(Arc::new(store))
        .max_wait(Duration::from_millis(300))
        .error_on_upstream_limit()
        .build()?;

    // From the outside in: each attempt needs a permit, and the time in our queue does not count
    // toward its timeout.
    let service = ServiceBuilder::new()
        .timeout(Duration::from_secs(10)) // in all
        .retry(Tries(1))
        .layer(limit)
        .map_request(stamp)
        .timeout(Duration::from_secs(2)) // for each attempt
        .service(client()?);

    // More calls at once than the limit allows, and then a pause in which retries find a permit.
    let mut tick = interval(Duration::from_millis(1300));
    let (mut input, mut nothing) = (tokio::io::stdin(), [0]);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            _ = input.read(&mut nothing) => return Ok(()),
        }
        for _ in 0..RATE + 2 {
            let mut request = Request::new(reqwest::Method::GET, places.api.parse()?);
            request.headers_mut().insert(WHO_HEADER, "caller".parse()?);
            tokio::spawn(call_once(service.clone(), request));
        }
    }
}

/// Makes one call, and prints its outcome.
async fn call_once<S>(service: S, request: Request)
where
    S: Service<Request, Response = Response, Error = BoxError>,
{
    match service.oneshot(request).await {
        Ok(response) => println!("answered: {}", response.status()),
        Err(error) => println!("{}", who_said_no(&*error)),
    }
}

/// Returns which party refused the call. One function finds it through the timeout and retry
/// layers.
fn who_said_no(error: &(dyn StdError + 'static)) -> String {
    match Limited::find(error) {
        Some(limited @ Limited::Local { .. }) => format!("local: {limited}"),
        Some(limited @ Limited::Upstream { .. }) => format!("upstream: {limited}"),
        Some(limited @ Limited::Store { .. }) => format!("store: {limited}"),
        Some(other) => format!("other: {other}"),
        None if error.is::<Elapsed>() => {
            format!("timeout: the time of all attempts is over; {error}")
        }
        None => format!("inner: not about a limit; {error}"),
    }
}

/// How many more attempts a call may make. A call that the service refused is retried after the
/// stated time, if that is soon. A call that the limiter refused is not: it has waited as long as
/// it may. A call that failed for the store is not retried either.
#[derive(Clone)]
struct Tries(u32);

impl Policy<Request, Response, Error> for Tries {
    type Future = Pin<Box<dyn Future<Output = ()> + Send>>;

    fn retry(
        &mut self,
        _: &mut Request,
        result: &mut Result<Response, Error>,
    ) -> Option<Self::Future> {
        let wait = match result {
            Ok(response) if !response.status().is_server_error() => return None,
            Err(Error::Limited(Limited::Upstream { report, .. })) => report
                .retry_after()
                .filter(|wait| *wait <= Duration::from_secs(2))?,
            Err(Error::Limited(_)) => return None,
            Ok(_) | Err(_) => Duration::from_millis(100), // it failed there, or on the way
        };
        self.0 = self.0.checked_sub(1)?;
        Some(Box::pin(sleep(wait)))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        request.try_clone()
    }
}
