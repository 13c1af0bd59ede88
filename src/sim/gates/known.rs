//! The gates that come with tollgate.

use std::sync::Arc;
use std::time::Duration;

use super::{GateFuture, Wire};
use crate::config_error::ConfigError;
use crate::key::Key;
use crate::layer::{AdaptiveThrottleBuilder, AdaptiveThrottleLayer, RateLimitLayer};
use crate::limiter::OnStoreError;
use crate::pace::Pace;
use crate::signal::Signal;
use crate::sim::Brief;
use crate::store::Store;
use crate::throttle::Back;

/// The gate that knows its quota.
pub(in crate::sim) fn limiter(
    brief: &Brief,
    store: Arc<dyn Store>,
) -> Result<impl Fn(Wire) -> GateFuture + use<>, ConfigError> {
    let Some(quota) = brief.quota else {
        let allowed = "a quota such as \"100/60s\", or a hint, in the scenario";
        return Err(ConfigError::OutOfRange { setting: "quota", value: "none".into(), allowed });
    };
    let mut layer = RateLimitLayer::builder(quota)
        .store(store)
        .on_store_error(brief.on_store_error)
        .max_wait(LONGEST)
        .max_hold(LONGEST);
    if let Some(slack) = brief.transit_slack {
        layer = layer.transit_slack(slack);
    }
    if let (OnStoreError::FallbackShare, Some(share)) = (brief.on_store_error, brief.fallback_share) {
        layer = layer.fallback_share(share);
    }
    let limiter = layer.build()?.limiter();
    Ok(move |mut wire: Wire| {
        let limiter = limiter.clone();
        Box::pin(async move {
            let permit = limiter.acquire(Key::ALL).await?;
            permit.answered(&Signal::read(&wire.send().await));
            Ok(())
        }) as GateFuture
    })
}

/// The gate that learns its pace, with more patience than a program would have.
pub(in crate::sim) fn throttle<P: Pace + 'static>(
    pace: impl Fn() -> P + Send + Sync + 'static,
) -> AdaptiveThrottleBuilder {
    AdaptiveThrottleLayer::builder().pace(pace).max_wait(LONGEST).max_hold(LONGEST)
}

/// The gate of that layer; a refused call takes its old place in the line.
pub(in crate::sim) fn retrying(
    layer: AdaptiveThrottleBuilder,
) -> Result<impl Fn(Wire) -> GateFuture, ConfigError> {
    let throttle = layer.build()?.throttle();
    Ok(move |mut wire: Wire| {
        let throttle = throttle.clone();
        Box::pin(async move {
            let mut permit = throttle.acquire(Key::ALL).await?;
            loop {
                permit = match permit.answered_or_back(&Signal::read(&wire.send().await)) {
                    None => return Ok(()),
                    Some(Back::Ended(limited)) => return Err(limited),
                    Some(Back::Waits(wait)) => wait.await?,
                };
            }
        }) as GateFuture
    })
}

/// The longest that a layer waits, and is held by the word of a server.
const LONGEST: Duration = Duration::from_secs(86_400);
