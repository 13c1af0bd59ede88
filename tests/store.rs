//! One contract, every store.

#![cfg(feature = "contract")]

use std::sync::Arc;
use std::time::Duration;

use tollgate::store::{
    Answer, Ask, Claim, Held, Lease, LimitUsage, Listener, MemoryStore, Need, Refusal, Segment, Store, Terms,
    Unused, Usage, contract,
};
use tollgate::{Key, Limit};

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_the_contract() {
    contract::check(Arc::new(MemoryStore::default())).await;
}

/// On the machine's clock, with several threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_store_keeps_the_contract_in_real_time() {
    contract::check(Arc::new(MemoryStore::default())).await;
}

/// The same store, answering asynchronously.
struct Later(Arc<MemoryStore>);

impl Store for Later {
    fn lease(&self, ask: Ask<'_>) -> Answer<Lease> {
        later(self.0.lease(ask))
    }

    fn give_back(&self, key: Key, terms: &Arc<Terms>, unused: &[Unused]) {
        self.0.give_back(key, terms, unused);
    }

    fn claim(&self, claim: Claim, listener: &Arc<dyn Listener>) {
        self.0.claim(claim, listener);
    }

    fn peek(&self, key: Key, terms: &Arc<Terms>) -> Answer<Usage> {
        later(self.0.peek(key, terms))
    }
}

fn later<T: Send + 'static>(answer: Answer<T>) -> Answer<T> {
    let Answer::Now(answer) = answer else { return answer };
    Answer::Later(Box::pin(async move {
        tokio::time::sleep(Duration::from_micros(1)).await;
        answer
    }))
}

#[tokio::test(start_paused = true)]
async fn a_store_that_answers_later_keeps_the_contract() {
    contract::check(Arc::new(Later(Arc::new(MemoryStore::default())))).await;
}

/// The answers of a custom store are built by constructors, since the types may get more fields.
#[test]
fn stores_outside_the_crate_can_build_every_answer() {
    let (now, second) = (Duration::ZERO, Duration::from_secs(1));
    let mut segment = Segment::new(2, 3, now, second);
    (segment.slot, segment.stamp) = (7, 8);
    let mut lease = Lease::default();
    lease.segments.push(segment);
    lease.refused = Some(Refusal::new(Some(second), Some(Limit::bucket(5, 2, second))));
    lease.held = Held::new(second, 1);
    assert_eq!((lease.segments[0].count, lease.held.cut), (3, false));

    let mut usage = Usage::default();
    for limit in [Limit::sliding(9, second), Limit::fixed(9, second), Limit::in_flight(9)] {
        usage.limits.push(LimitUsage::new(limit, 4, 5));
    }
    assert_eq!(usage.limits.iter().map(|usage| usage.limit.count()).sum::<u32>(), 27);
    assert_eq!(Need::new(1, 2), Need::new(1, 2));
    assert_eq!(Unused::new(7, 8, 6, 1).units, 6);
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
    }

    impl Store for Broken {
        fn lease(&self, ask: Ask<'_>) -> Answer<Lease> {
            let twice = [ask.returns, ask.returns].concat();
            let mut ask = ask;
            match self.fault {
                Fault::ForgetsKeys => {
                    ask.key = Key::new(self.calls.fetch_add(1, Ordering::Relaxed).to_le_bytes())
                }
                Fault::IgnoresReturns => ask.returns = &[],
                Fault::ReturnsTwice => ask.returns = &twice,
                Fault::RefusesAll => ask.needs = &[],
                Fault::IgnoresLatest => ask.latest = Duration::from_secs(9999),
                _ => {}
            }
            let prefetch = ask.prefetch;
            let Answer::Now(Ok(mut lease)) = self.store.lease(ask) else {
                unreachable!("memory answers now")
            };
            match self.fault {
                Fault::GrantsTwice => lease.segments.iter_mut().for_each(|segment| segment.count *= 2),
                Fault::Hoards => {
                    if let Some(segment) = &mut lease.prefetched {
                        segment.count = prefetch;
                    }
                }
                _ => {}
            }
            Answer::Now(Ok(lease))
        }

        fn give_back(&self, key: Key, terms: &Arc<Terms>, unused: &[Unused]) {
            self.store.give_back(key, terms, unused);
        }

        fn claim(&self, claim: Claim, listener: &Arc<dyn Listener>) {
            let mut claim = claim;
            match self.fault {
                Fault::SeatsOneTooMany => claim.most += 1,
                Fault::TakesInWhatIsLate => claim.number += self.calls.fetch_add(1, Ordering::Relaxed) as u64,
                Fault::PassesSeatsOver => claim.sits += claim.wants,
                _ => {}
            }
            self.store.claim(claim, listener);
        }

        fn peek(&self, key: Key, terms: &Arc<Terms>) -> Answer<Usage> {
            self.store.peek(key, terms)
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
        ] {
            let store = Arc::new(Broken { store: MemoryStore::default(), fault, calls: AtomicUsize::new(0) });
            let checked = tokio::spawn(contract::check(store)).await;
            assert!(checked.is_err(), "{fault:?} was not noticed");
        }
    }
}
