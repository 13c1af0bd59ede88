//! Calls through an adaptive throttle: each caller retries its call until it succeeds, and then
//! makes the next one at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail};
use fleet::{Event, Options, Outcome};
use reqwest::header::HeaderValue;
use reqwest::{Client, Method, Request, Url};
use tokio::time::{Instant, timeout_at};
use tollgate::pace::Fair;
use tollgate::quota::Limit;
use tollgate::service::RetryingThrottleLayer;
use tollgate::store::RedisStore;
use tollgate::{AdaptiveThrottleLayer, Quota};
use tollgate_simulate::pace::Remaining;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use upstream::WHO_HEADER;

/// Builds the layer that `options` describe, with the pace they name. `fair-shared` shares its pace
/// through the store; `fair-untold` does not know the quota.
pub(crate) async fn layer(options: &Options) -> anyhow::Result<RetryingThrottleLayer> {
    let quota: Quota = options.quota.parse()?;
    let &[Limit::Sliding { count, window, .. }] = quota.limits() else {
        bail!("a pace is told one limit")
    };
    let builder = AdaptiveThrottleLayer::builder().max_wait(options.max_wait);
    let builder = match options.pace.as_str() {
        "fair-untold" => builder.pace(Fair::new),
        "fair" => builder.pace(move || Fair::new().limit(count, window)),
        "fair-shared" => {
            let store = RedisStore::builder(&options.store)
                .store_timeout(options.store_timeout)
                .build()?;
            store.connect().await.context("the store")?;
            builder
                .pace(move || Fair::new().limit(count, window))
                .store(Arc::new(store))
        }
        "blog-remaining" => builder.pace(move || Remaining::new().limit(count, window)),
        other => bail!("no pace is called {other}"),
    };
    Ok(builder.build()?.retrying())
}

/// Calls until `end`. In its event, a call leaves the gate after the sum of its waits at the gate;
/// the time of its requests does not count. A call that is still open at `end` is recorded as
/// refused.
pub(crate) async fn work(
    options: &Options,
    layer: RetryingThrottleLayer,
    end: Instant,
) -> anyhow::Result<Vec<Event>> {
    let client = Client::builder()
        .no_proxy()
        .retry(reqwest::retry::never())
        .build()?;
    let url: Url = options.url.parse()?;
    let mut callers = Vec::new();
    for number in 0..options.tasks {
        let who = format!("{}.{number}", options.who).parse()?;
        callers.push(tokio::spawn(calls(
            layer.clone(),
            client.clone(),
            url.clone(),
            who,
            end,
        )));
    }
    let mut events = Vec::new();
    for caller in callers {
        events.extend(caller.await?);
    }
    Ok(events)
}

async fn calls(
    layer: RetryingThrottleLayer,
    client: Client,
    url: Url,
    who: HeaderValue,
    end: Instant,
) -> Vec<Event> {
    // The time that the requests of the current call took, in nanoseconds.
    let trips = Arc::new(AtomicU64::new(0));
    let sender = service_fn({
        let trips = Arc::clone(&trips);
        move |mut request: Request| {
            let (client, trips) = (client.clone(), Arc::clone(&trips));
            request.headers_mut().insert(WHO_HEADER, who.clone());
            async move {
                let sent = fleet::now();
                let response = client.execute(request).await;
                trips.fetch_add(fleet::now() - sent, Ordering::Relaxed);
                response
            }
        }
    });
    let mut service = layer.layer(sender);
    let mut events = Vec::new();
    loop {
        trips.store(0, Ordering::Relaxed);
        let asked = fleet::now();
        let call = async {
            let request = Request::new(Method::GET, url.clone());
            let response = service
                .ready()
                .await?
                .call(request)
                .await?
                .error_for_status()?;
            let after = fleet::now();
            response.bytes().await?;
            Ok::<_, BoxError>(after)
        };
        let answer = timeout_at(end, call).await;
        let left = |back: u64| {
            back.saturating_sub(trips.load(Ordering::Relaxed))
                .max(asked)
        };
        let (ended, outcome, text) = match &answer {
            Ok(Ok(back)) => (left(*back), Outcome::Granted, String::new()),
            Ok(Err(error)) => (left(fleet::now()), Outcome::Broken, error.to_string()),
            Err(_) => (
                left(fleet::now()),
                Outcome::Refused,
                "the span is over".into(),
            ),
        };
        events.push(Event {
            asked,
            ended,
            outcome,
            text,
        });
        if !matches!(answer, Ok(Ok(_))) {
            return events;
        }
    }
}
