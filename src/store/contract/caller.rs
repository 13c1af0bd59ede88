//! The requests of the suite.

use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::key::Key;
use crate::quota::Quota;
use crate::store::{
    ClientSession, Demand, Grant, HoldState, Lease, LeaseRequest, LimitSpec, PeekRequest, Store,
    UnusedPermits, Usage,
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
            spec: Arc::new(LimitSpec::new(quota, SLACK, Duration::from_millis(20))),
        }
    }

    pub(super) async fn lease(
        &self,
        demands: &[Demand],
        prefetch: u32,
        latest: Duration,
        returns: &[UnusedPermits],
    ) -> Lease {
        self.ask(LeaseRequest {
            prefetch,
            latest,
            returns,
            ..self.asks_for(demands)
        })
        .await
    }

    /// Makes a request for `demands` now, and for nothing else.
    pub(super) fn asks_for<'a>(&'a self, demands: &'a [Demand]) -> LeaseRequest<'a> {
        LeaseRequest {
            key: self.key,
            spec: &self.spec,
            demands,
            prefetch: 0,
            latest: Duration::ZERO,
            validity: LIFE,
            prefetch_validity: LIFE,
            returns: &[],
            charges: &[],
            session: ClientSession::default(),
            hold: HoldState::default(),
            remaining: None,
            borrows: false,
            joint: None,
        }
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
        let request = PeekRequest {
            cost,
            ahead: ahead.to_vec(),
            ..PeekRequest::new(self.key, &self.spec)
        };
        self.store
            .peek(request)
            .arrives()
            .await
            .expect("the store answers")
    }
}

/// Two stores in one process are asked about different keys, should they share their state.
fn store_address(store: &Arc<dyn Store>) -> [u8; 8] {
    (Arc::as_ptr(store).cast::<()>().addr() as u64).to_le_bytes()
}

/// A key that no other run of the suite has.
pub(super) fn key(store: &Arc<dyn Store>, law: &str) -> Key {
    Key::new(law)
        .and(clock::micros(clock::now()).to_le_bytes())
        .and(store_address(store))
}

pub(super) async fn pass(span: Duration) {
    clock::sleep_until(clock::after(clock::now(), span)).await;
}

pub(super) fn granted(lease: &Lease) -> u32 {
    lease.grants.iter().map(|grant| grant.count).sum()
}

pub(super) fn unused(lease: &Lease, grant: &Grant, count: u32) -> UnusedPermits {
    let &Grant {
        cost, slot, stamp, ..
    } = grant;
    UnusedPermits {
        slot,
        stamp,
        units: u64::from(cost) * u64::from(count),
        incarnation: lease.incarnation,
    }
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
