//! One contract, every store.

use std::sync::Arc;
use std::time::Duration;

use tollgate::Key;
use tollgate::quota::Limit;
use tollgate::store::{
    Change, ChangeKind, Claim, Demand, Grant, HoldState, InForce, Lease, LeaseRequest, LimitSpec,
    LimitUsage, MemoryStore, PeekRequest, Refusal, SetQuota, Store, StoreListener, StoreReply,
    UnusedPermits, Usage,
};

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_the_contract() {
    store_contract::check(Arc::new(MemoryStore::default())).await;
}

/// On the machine's clock, with several threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_store_keeps_the_contract_in_real_time() {
    store_contract::check(Arc::new(MemoryStore::default())).await;
}

/// The same store, answering asynchronously.
struct Later(Arc<MemoryStore>);

impl Store for Later {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.0)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        later(self.0.lease(request))
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        later(self.0.peek(request))
    }
}

fn later<T: Send + 'static>(answer: StoreReply<T>) -> StoreReply<T> {
    let StoreReply::Ready(answer) = answer else {
        return answer;
    };
    StoreReply::Pending(Box::pin(async move {
        tokio::time::sleep(Duration::from_micros(1)).await;
        answer
    }))
}

#[tokio::test(start_paused = true)]
async fn a_store_that_answers_later_keeps_the_contract() {
    store_contract::check(Arc::new(Later(Arc::new(MemoryStore::default())))).await;
}

/// The answers of a custom store are built by constructors, since the types may get more fields.
#[test]
fn stores_outside_the_crate_can_build_every_answer() {
    let (now, second) = (Duration::ZERO, Duration::from_secs(1));
    let mut grant = Grant::new(2, 3, now, second);
    (grant.slot, grant.stamp) = (7, 8);
    let mut lease = Lease::default();
    lease.grants.push(grant);
    lease.refused = Some(Refusal::new(
        Some(second),
        Some(Limit::bucket(5, 2, second)),
    ));
    lease.hold = HoldState::new(second, 1);
    assert_eq!((lease.grants[0].count, lease.hold.cut), (3, false));

    let mut usage = Usage::default();
    for limit in [
        Limit::sliding(9, second),
        Limit::fixed(9, second),
        Limit::in_flight(9),
    ] {
        usage.limits.push(LimitUsage::from(limit));
    }
    assert_eq!(
        usage
            .limits
            .iter()
            .map(|usage| usage.limit.count())
            .sum::<u32>(),
        27
    );
    lease.set_quota = Some(Box::new(SetQuota::new(2, None, second, second)));
    assert_eq!(Demand::new(1, 2), Demand::new(1, 2));
    assert_eq!(UnusedPermits::new(7, 8, 6, 1).units, 6);
}

/// The suite detects faults: stores that break a law fail it.
mod broken {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Broken {
        store: MemoryStore,
        fault: Fault,
        calls: AtomicUsize,
    }

    #[derive(Clone, Copy, Debug)]
    enum Fault {
        ForgetsKeys,
        GrantsTwice,
        IgnoresReturns,
        ReturnsTwice,
        RefusesAll,
        IgnoresLatest,
        Hoards,
        SeatsOneTooMany,
        TakesInWhatIsLate,
        PassesSeatsOver,
        HidesVersions,
        EndsNoSetQuota,
    }

    impl Store for Broken {
        fn inner(&self) -> Option<&dyn Store> {
            Some(&self.store)
        }

        fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
            let twice = [request.returns, request.returns].concat();
            let mut request = request;
            match self.fault {
                Fault::ForgetsKeys => {
                    request.key = Key::new(self.calls.fetch_add(1, Ordering::Relaxed).to_le_bytes())
                }
                Fault::IgnoresReturns => request.returns = &[],
                Fault::ReturnsTwice => request.returns = &twice,
                Fault::RefusesAll => request.demands = &[],
                Fault::IgnoresLatest => request.latest = Duration::from_secs(9999),
                _ => {}
            }
            let prefetch = request.prefetch;
            let StoreReply::Ready(Ok(mut lease)) = self.store.lease(request) else {
                unreachable!("memory answers now")
            };
            match self.fault {
                Fault::GrantsTwice => lease.grants.iter_mut().for_each(|grant| grant.count *= 2),
                Fault::Hoards => {
                    if let Some(grant) = &mut lease.prefetched {
                        grant.count = prefetch;
                    }
                }
                Fault::HidesVersions => lease.set_quota = None,
                _ => {}
            }
            StoreReply::Ready(Ok(lease))
        }

        fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
            let mut claim = claim;
            match self.fault {
                Fault::SeatsOneTooMany => claim.limit += 1,
                Fault::TakesInWhatIsLate => {
                    claim.number += self.calls.fetch_add(1, Ordering::Relaxed) as u64
                }
                Fault::PassesSeatsOver => claim.in_use += claim.wanted,
                _ => {}
            }
            self.store.claim(claim, listener);
        }

        fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
            const END: ChangeKind = ChangeKind::End;
            match (self.fault, change) {
                (Fault::EndsNoSetQuota, Change::Quota { kind: END, life }) => {
                    let end = SetQuota::new(1000, None, life, life);
                    StoreReply::Ready(Ok(InForce::new(HoldState::default(), Some(end))))
                }
                _ => self.store.change(key, spec, change),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_breaks_a_law_fails_the_suite() {
        for fault in [
            Fault::ForgetsKeys,
            Fault::GrantsTwice,
            Fault::IgnoresReturns,
            Fault::ReturnsTwice,
            Fault::RefusesAll,
            Fault::IgnoresLatest,
            Fault::Hoards,
            Fault::SeatsOneTooMany,
            Fault::TakesInWhatIsLate,
            Fault::PassesSeatsOver,
            Fault::HidesVersions,
            Fault::EndsNoSetQuota,
        ] {
            let store = Arc::new(Broken {
                store: MemoryStore::default(),
                fault,
                calls: AtomicUsize::new(0),
            });
            let checked = tokio::spawn(store_contract::check(store)).await;
            assert!(checked.is_err(), "{fault:?} was not noticed");
        }
    }
}
