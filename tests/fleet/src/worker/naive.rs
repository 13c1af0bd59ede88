//! A naive store, as many programs write it: in Redis, one counter for each second, without margins. The tests must
//! detect that it exceeds the limit.

use std::sync::Arc;
use std::time::Duration;

use tollgate::Key;
use tollgate::store::{Answer, Ask, Lease, Refusal, Segment, Store, StoreError, Terms, Unused, Usage};

pub(crate) struct Incr(pub(crate) redis::aio::MultiplexedConnection);

impl Store for Incr {
    fn lease(&self, ask: Ask<'_>) -> Answer<Lease> {
        let Some(&need) = ask.needs.first() else { return Answer::Now(Ok(Lease::default())) };
        let count = ask.terms.quota().limits().first().map_or(0, |limit| limit.count());
        let mut redis = self.0.clone();
        Answer::Later(Box::pin(async move {
            let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let name = format!("naive:{}", wall.as_secs());
            let mut both = redis::pipe();
            both.cmd("INCRBY").arg(&name).arg(need.count).cmd("EXPIRE").arg(&name).arg(2).ignore();
            let failed = |error: redis::RedisError| StoreError::Failed(Arc::new(error));
            let (used,): (u32,) = both.query_async(&mut redis).await.map_err(failed)?;
            let granted = need.count.min(count.saturating_sub(used - need.count));
            let mut lease = Lease::default();
            if granted > 0 {
                let life = Duration::from_millis(50);
                lease.segments.push(Segment::new(1, granted, Duration::ZERO, life));
            }
            if granted < need.count {
                let next = Duration::from_nanos(1_000_000_000 - u64::from(wall.subsec_nanos()));
                lease.refused = Some(Refusal::new(Some(next), None));
            }
            Ok(lease)
        }))
    }

    fn give_back(&self, _: Key, _: &Arc<Terms>, _: &[Unused]) {}

    fn peek(&self, _: Key, _: &Arc<Terms>) -> Answer<Usage> {
        Answer::Now(Ok(Usage::default()))
    }
}
