//! A naive store, as many programs write it: in Redis, one counter for each second, without
//! margins. The tests must detect that it exceeds the limit.

use std::sync::Arc;
use std::time::Duration;

use tollgate::Key;
use tollgate::store::{
    Grant, Lease, LeaseRequest, LimitSpec, PeekRequest, Refusal, Store, StoreError, StoreReply,
    UnusedPermits, Usage,
};

pub(crate) struct Incr(pub(crate) redis::aio::MultiplexedConnection);

impl Store for Incr {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let Some(&demand) = request.demands.first() else {
            return StoreReply::Ready(Ok(Lease::default()));
        };
        let count = request
            .spec
            .quota()
            .limits()
            .first()
            .map_or(0, |limit| limit.count());
        let mut redis = self.0.clone();
        StoreReply::Pending(Box::pin(async move {
            let wall = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap_or_default();
            let name = format!("naive:{}", wall.as_secs());
            let mut both = redis::pipe();
            both.cmd("INCRBY")
                .arg(&name)
                .arg(demand.count)
                .cmd("EXPIRE")
                .arg(&name)
                .arg(2)
                .ignore();
            let failed = |error: redis::RedisError| StoreError::Failed(Arc::new(error));
            let (used,): (u32,) = both.query_async(&mut redis).await.map_err(failed)?;
            let granted = demand.count.min(count.saturating_sub(used - demand.count));
            let mut lease = Lease::default();
            if granted > 0 {
                let life = Duration::from_millis(50);
                lease
                    .grants
                    .push(Grant::new(1, granted, Duration::ZERO, life));
            }
            if granted < demand.count {
                let next = Duration::from_nanos(1_000_000_000 - u64::from(wall.subsec_nanos()));
                lease.refused = Some(Refusal::new(Some(next), None));
            }
            Ok(lease)
        }))
    }

    fn give_back(&self, _: Key, _: &Arc<LimitSpec>, _: &[UnusedPermits]) {}

    fn peek(&self, _: PeekRequest) -> StoreReply<Usage> {
        StoreReply::Ready(Ok(Usage::default()))
    }
}
