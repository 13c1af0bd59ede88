//! The requests of the suite.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tollgate::__lab::limit_spec;
use tollgate::Key;
use tollgate::Quota;
use tollgate::store::{
    Demand, Grant, Lease, LeaseRequest, LimitSpec, PeekRequest, Store, UnusedPermits, Usage,
};

pub(super) const LIFE: Duration = Duration::from_millis(10);
pub(super) const SLACK: Duration = Duration::from_millis(10);
pub(super) const MARGIN: u64 = 20_000;
pub(super) const LONG: Duration = Duration::from_secs(3600);

/// One key and its quota.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) store: Arc<dyn Store>,
    pub(super) key: Key,
    pub(super) spec: Arc<LimitSpec>,
}

impl Caller {
    pub(super) fn new(store: &Arc<dyn Store>, law: &str, quota: Quota) -> Self {
        Caller {
            store: store.clone(),
            key: key(store, law),
            spec: spec(quota, 0),
        }
    }

    /// Returns the caller with another quota, of the quota version `version`.
    pub(super) fn informed(&self, quota: Quota, version: u32) -> Self {
        Caller {
            spec: spec(quota, version),
            ..self.clone()
        }
    }

    pub(super) async fn lease(
        &self,
        demands: &[Demand],
        prefetch: u32,
        latest: Duration,
        returns: &[UnusedPermits],
    ) -> Lease {
        let mut request = self.asks_for(demands);
        (request.prefetch, request.latest, request.returns) = (prefetch, latest, returns);
        self.ask(request).await
    }

    /// Makes a request for `demands` now, and for nothing else.
    pub(super) fn asks_for<'a>(&'a self, demands: &'a [Demand]) -> LeaseRequest<'a> {
        let mut request = LeaseRequest::new(self.key, &self.spec, demands);
        (request.validity, request.prefetch_validity) = (LIFE, LIFE);
        request
    }

    pub(super) async fn ask(&self, request: LeaseRequest<'_>) -> Lease {
        self.store
            .lease(request)
            .arrives()
            .await
            .expect("the store answers")
    }

    /// Books `count` permits of `cost`.
    pub(super) async fn book(&self, cost: u32, count: u32, latest: Duration) -> Lease {
        self.lease(&[Demand::new(cost, count)], 0, latest, &[])
            .await
    }

    pub(super) async fn peek(&self) -> Usage {
        self.ask_about(1, &[]).await
    }

    /// Asks when a request of `cost` could leave, if other requests get the permits `ahead` first.
    pub(super) async fn ask_about(&self, cost: u32, ahead: &[Demand]) -> Usage {
        let mut request = PeekRequest::new(self.key, &self.spec);
        (request.cost, request.ahead) = (cost, ahead.to_vec());
        self.store
            .peek(request)
            .arrives()
            .await
            .expect("the store answers")
    }
}

/// The limits of a caller that knows of the set quota of version `version`, 0 for none.
fn spec(quota: Quota, version: u32) -> Arc<LimitSpec> {
    let life = if version > 0 { LONG } else { Duration::ZERO };
    Arc::new(limit_spec(
        quota,
        SLACK,
        Duration::from_millis(20),
        version,
        life,
    ))
}

/// Two stores in one process are asked about different keys, should they share their state.
fn store_address(store: &Arc<dyn Store>) -> [u8; 8] {
    (Arc::as_ptr(store).cast::<()>().addr() as u64).to_le_bytes()
}

/// A key that no other run of the suite has.
pub(super) fn key(store: &Arc<dyn Store>, law: &str) -> Key {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = now.unwrap_or_default().as_nanos();
    Key::new(law)
        .and(nanos.to_le_bytes())
        .and(store_address(store))
}

pub(super) async fn pass(span: Duration) {
    tokio::time::sleep(span).await;
}

pub(super) fn granted(lease: &Lease) -> u32 {
    lease.grants.iter().map(|grant| grant.count).sum()
}

pub(super) fn unused(lease: &Lease, grant: &Grant, count: u32) -> UnusedPermits {
    let units = u64::from(grant.cost) * u64::from(count);
    UnusedPermits::new(grant.slot, grant.stamp, units, lease.incarnation)
}

/// When each permit of a suite is used, in microseconds of the store's time, and its units.
#[derive(Default)]
pub(super) struct Arrivals(Vec<(u64, u64)>);

impl Arrivals {
    /// Uses the permits of the lease of a round, each at the first or last moment.
    pub(super) fn add(&mut self, lease: &Lease, round: u32) {
        for (index, grant) in lease.grants.iter().enumerate() {
            let late = (round as usize + index) % 2 == 1;
            let at = if late { grant.stamp - 1 } else { grant.slot };
            self.0
                .extend((0..grant.count).map(|_| (at, u64::from(grant.cost))));
        }
    }

    /// Asserts that no window of `window` microseconds has more than `count` units. Returns how many
    /// permits were used.
    pub(super) fn assert_never_over(mut self, count: u64, window: u64) -> usize {
        self.0.sort_unstable();
        for (index, &(from, _)) in self.0.iter().enumerate() {
            let inside = self.0[index..]
                .iter()
                .take_while(|&&(at, _)| at - from < window);
            let units: u64 = inside.map(|&(_, units)| units).sum();
            assert!(
                units <= count,
                "{units} units in a window that allows {count}"
            );
        }
        self.0.len()
    }
}

/// One per permit.
pub(super) fn slots(lease: &Lease) -> Vec<u64> {
    lease
        .grants
        .iter()
        .flat_map(|grant| std::iter::repeat_n(grant.slot, grant.count as usize))
        .collect()
}
