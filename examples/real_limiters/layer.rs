//! The layers that are compared.

use std::sync::Arc;
use std::time::Duration;

use real_limiters::{Limit, ServerKind};
use reqwest::{Request, Response};
use tollgate::error::BoxError;
use tollgate::pace::Fair;
use tollgate::store::RedisStore;
use tollgate::{AdaptiveThrottleLayer, ConfigError, Quota, RateLimitLayer};
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceExt};

/// A layer, by its name in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerName {
    /// No layer. A refused request is sent again after [`PAUSE`].
    None,
    /// `RateLimitLayer` with the quota that [`quota`] has for the server.
    Limit,
    /// `RateLimitLayer` with `Quota::new`, which is not the right quota for this server.
    LimitWindow,
    /// `Limit`, counted in a store for all processes.
    LimitShared,
    /// `AdaptiveThrottleLayer` as it is by default.
    Fair,
    /// `AdaptiveThrottleLayer` with `Fair::sole_client`.
    FairSole,
    /// `AdaptiveThrottleLayer` with `Fair::limit`.
    FairLimit,
    /// `Fair` with a store, in which all processes share one pace.
    FairShared,
}

/// After which time a caller without a layer sends a refused request again.
const PAUSE: Duration = Duration::from_millis(100);

/// Callers wait for as long as a run takes: how long that is, is what is measured.
const MAX_WAIT: Duration = Duration::from_secs(3600);

pub(crate) type Gated = BoxCloneSyncService<Request, Response, BoxError>;

impl LayerName {
    const ALL: [LayerName; 8] = [
        LayerName::None,
        LayerName::Limit,
        LayerName::LimitWindow,
        LayerName::LimitShared,
        LayerName::Fair,
        LayerName::FairSole,
        LayerName::FairLimit,
        LayerName::FairShared,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            LayerName::None => "none",
            LayerName::Limit => "limit",
            LayerName::LimitWindow => "limit-window",
            LayerName::LimitShared => "limit-shared",
            LayerName::Fair => "fair",
            LayerName::FairSole => "fair-sole",
            LayerName::FairLimit => "fair-limit",
            LayerName::FairShared => "fair-shared",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        LayerName::ALL
            .into_iter()
            .find(|layer| layer.name() == name)
    }

    /// Returns the layers that are compared if the command line names none.
    pub(crate) fn usual(kind: ServerKind, processes: u32) -> Vec<Self> {
        let mut layers = vec![LayerName::None];
        layers.push(match processes {
            1 => LayerName::Limit,
            _ => LayerName::LimitShared,
        });
        if kind == ServerKind::Haproxy && processes == 1 {
            layers.push(LayerName::LimitWindow);
        }
        layers.push(LayerName::Fair);
        layers.push(match processes {
            1 => LayerName::FairSole,
            _ => LayerName::FairShared,
        });
        layers.push(LayerName::FairLimit);
        layers
    }

    /// Returns whether the processes need a Redis.
    pub(crate) fn needs_store(self) -> bool {
        matches!(self, LayerName::LimitShared | LayerName::FairShared)
    }

    /// Returns the pause of a caller after a refusal. A layer waits by itself.
    pub(crate) fn pause(self) -> Duration {
        match self {
            LayerName::None => PAUSE,
            _ => Duration::ZERO,
        }
    }

    /// Puts the layer around `client`. A layer with a store uses the Redis at `redis`.
    pub(crate) async fn around(
        self,
        client: reqwest::Client,
        kind: ServerKind,
        limit: Limit,
        redis: &str,
    ) -> Result<Gated, BoxError> {
        let Limit { count, window } = limit;
        let fair = || AdaptiveThrottleLayer::builder().max_wait(MAX_WAIT);
        Ok(match self {
            LayerName::None => gated(client),
            LayerName::Limit => gated(known(kind, quota(kind, limit), None)?.layer(client)),
            LayerName::LimitWindow => {
                gated(known(kind, Quota::new(count, window), None)?.layer(client))
            }
            LayerName::LimitShared => {
                gated(known(kind, quota(kind, limit), Some(store(redis).await?))?.layer(client))
            }
            LayerName::Fair => gated(fair().build()?.retrying().layer(client)),
            LayerName::FairSole => {
                let fair = fair().pace(|| Fair::new().sole_client());
                gated(fair.build()?.retrying().layer(client))
            }
            LayerName::FairLimit => {
                let fair = fair().pace(move || Fair::new().limit(count, window));
                gated(fair.build()?.retrying().layer(client))
            }
            LayerName::FairShared => {
                let fair = fair().store(store(redis).await?);
                gated(fair.build()?.retrying().layer(client))
            }
        })
    }
}

fn gated<S>(service: S) -> Gated
where
    S: Service<Request, Response = Response, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    BoxCloneSyncService::new(service.map_err(Into::into))
}

fn known(
    kind: ServerKind,
    quota: Quota,
    store: Option<Arc<RedisStore>>,
) -> Result<RateLimitLayer, ConfigError> {
    let mut builder = RateLimitLayer::builder(quota).max_wait(MAX_WAIT);
    if kind == ServerKind::NginxStrict {
        // At intervals of 20 ms, a default slack of 10 ms costs a third of the rate.
        builder = builder
            .transit_slack(Duration::from_millis(1))
            .max_rate_loss(14);
    }
    if let Some(store) = store {
        builder = builder.store(store);
    }
    builder.build()
}

async fn store(redis: &str) -> Result<Arc<RedisStore>, BoxError> {
    // Many processes start at once.
    let store = RedisStore::builder(redis)
        .store_timeout(Duration::from_secs(2))
        .build()?;
    store.connect().await?;
    Ok(Arc::new(store))
}

/// Returns the quota that describes what the server allows.
fn quota(kind: ServerKind, Limit { count, window }: Limit) -> Quota {
    match kind {
        ServerKind::NginxBurst => Quota::bucket(ServerKind::BURST + 1).refill(count, window),
        ServerKind::NginxStrict => Quota::every(window / count),
        ServerKind::Haproxy => Quota::sliding_counter(count, window),
        ServerKind::Express(_) | ServerKind::Slowapi(_) => Quota::new(count, window),
    }
}
