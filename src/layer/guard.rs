//! Builds the [ban guard](crate::Guard) of a layer.

use std::sync::Arc;
use std::time::Duration;

use super::settings::Common;
use crate::config_error::ConfigError;
use crate::guard::BanGuard;
use crate::limit::LimitSpec;
use crate::limiter::{CountedLate, HeaderTrust, Limiter, OnStoreError, Quotas, Settings};
use crate::quota::Slacks;
use crate::stats::Tally;
use crate::store::{MemoryStore, Store};

pub(super) fn build(
    common: &Common,
    store: &Arc<dyn Store>,
) -> Result<Option<Arc<BanGuard>>, ConfigError> {
    let Some(guard) = common.guard.clone() else {
        return Ok(None);
    };
    let (quota, max_keys) = (guard.quota, common.max_keys);
    let late = CountedLate::default();
    let quotas = Arc::new(Quotas::new(quota, None, Slacks::DEFAULT, late));
    let spec = Arc::new(quotas.limits(quota, 0)?);
    let name = format!("{} guard", common.name());
    let counting_in =
        move |store, tally| limiter(spec.clone(), quotas.clone(), tally, store, max_keys);
    let all = counting_in(store.clone(), Tally::of_guard(&name));
    let alone = Box::new(move || {
        let tally = Tally::of_guard(&name).second();
        counting_in(Arc::new(MemoryStore::new(max_keys)), tally)
    });
    Ok(Some(BanGuard::new(guard, all, alone, max_keys)))
}

/// Makes a limiter of bad answers. No answer waits for its permit.
fn limiter(
    spec: Arc<LimitSpec>,
    quotas: Arc<Quotas>,
    tally: Tally,
    store: Arc<dyn Store>,
    max_keys: usize,
) -> Limiter {
    let settings = Settings {
        part: None,
        spec,
        quotas,
        is_further_unit: false,
        name: None,
        tally,
        store: store.clone(),
        shared_store: store,
        fallback: None,
        max_wait: Duration::ZERO,
        least_wait: Duration::ZERO,
        max_queue: usize::MAX,
        max_keys,
        in_flight_ttl: Duration::from_secs(10),
        max_hold: Duration::ZERO,
        learn: HeaderTrust::Ignore,
        on_scope: None,
        guard: None,
        reports_guard: false,
        on_store_error: OnStoreError::FailClosed,
        settles: false,
        needs_cost: false,
        waits_above_limit: false,
        counted_within: Duration::ZERO,
    };
    Limiter::new(settings, [])
}
