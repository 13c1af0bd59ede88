//! The gates that come with tollgate.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tokio::sync::Mutex;
use tower::util::BoxCloneService;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::brief::Brief;
use super::clock;
use super::gates::{GateFuture, Wire};
use tollgate::__lab::Pace;
use tollgate::__lab::{answered_or_back, read_signal};
use tollgate::ConfigError;
use tollgate::Error;
use tollgate::Key;
use tollgate::OnStoreError;
use tollgate::Signal;
use tollgate::store::Store;
use tollgate::{AdaptiveThrottleBuilder, AdaptiveThrottleLayer, RateLimitBuilder, RateLimitLayer};

/// Returns the builder of a limiter with the quota of `brief`.
pub(super) fn limit(brief: &Brief, store: Arc<dyn Store>) -> Result<RateLimitBuilder, ConfigError> {
    // A scenario without a quota and without a hint has this error, which shows how to write one.
    let quota = brief.quota.map_or_else(|| "none".parse(), Ok)?;
    let mut layer = RateLimitLayer::builder(quota)
        .store(store)
        .on_store_error(brief.on_store_error)
        .max_wait(LONGEST);
    if let Some(slack) = brief.transit_slack {
        layer = layer.transit_slack(slack);
    }
    if let (OnStoreError::FallbackShare, Some(share)) = (brief.on_store_error, brief.fallback_share)
    {
        layer = layer.fallback_share(share);
    }
    Ok(layer)
}

/// Builds the gate of such a limiter.
pub(super) fn limiter(
    brief: &Brief,
    store: Arc<dyn Store>,
) -> Result<impl Fn(Wire) -> GateFuture + use<>, ConfigError> {
    let layer = limit(brief, store)?.max_hold(LONGEST).build()?;
    let limiter = layer.limiter();
    Ok(move |mut wire: Wire| {
        let limiter = limiter.clone();
        Box::pin(async move {
            let sent = limiter.acquire(Key::ALL).await?.begin()?;
            sent.answered(&Signal::read(&wire.send().await));
            Ok(())
        }) as GateFuture
    })
}

/// Returns the builder of a throttle that waits, and is held, for longer than in most programs.
pub(super) fn throttle<P: Pace + 'static>(
    pace: impl Fn() -> P + Send + Sync + 'static,
) -> AdaptiveThrottleBuilder {
    AdaptiveThrottleLayer::builder()
        .pace(pace)
        .max_wait(LONGEST)
        .max_hold(LONGEST)
}

/// Builds the gate of a throttle. A refused call goes back to its old place in the queue.
pub(super) fn retrying(
    layer: AdaptiveThrottleBuilder,
) -> Result<impl Fn(Wire) -> GateFuture, ConfigError> {
    let throttle = layer.build()?.throttle();
    Ok(move |mut wire: Wire| {
        let throttle = throttle.clone();
        Box::pin(async move {
            let mut permit = throttle.acquire(Key::ALL).await?;
            loop {
                let response = wire.send().await;
                let arrived = clock::now();
                let signal = read_signal(&response, arrived);
                permit = match answered_or_back(permit, &signal, arrived) {
                    None => return Ok(()),
                    Some(back) => back.await?,
                };
            }
        }) as GateFuture
    })
}

/// Builds the gate of a layer of Tower, which tells kinds of requests apart.
pub(super) fn layered<L>(layer: L) -> impl Fn(Wire) -> GateFuture
where
    L: Layer<Client>,
    L::Service: Service<Request<()>, Error = Error, Future: Send> + Send + 'static,
{
    move |wire: Wire| {
        let request = Request::get(wire.path()).body(());
        let request = request.expect("a path is a URI");
        let wire = Arc::new(Mutex::new(wire));
        let client = Client::new(service_fn(move |_| {
            let wire = wire.clone();
            async move { Ok(wire.lock().await.send().await) }
        }));
        let call = layer.layer(client).oneshot(request);
        Box::pin(async move {
            match call.await {
                Err(Error::Limited(limited)) => Err(limited),
                _ => Ok(()),
            }
        })
    }
}

/// The client inside of a layer.
type Client = BoxCloneService<Request<()>, Response<()>, Infallible>;

/// The longest wait, and the longest hold that a server can ask for.
const LONGEST: Duration = Duration::from_secs(86_400);
