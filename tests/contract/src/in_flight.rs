//! The law of in-flight limits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::caller::{Caller, LONG, pass};
use tollgate::Key;
use tollgate::Quota;
use tollgate::store::{Claim, Store, StoreError, StoreEvent, StoreListener};

/// Records the events of each holder.
#[derive(Default)]
struct Recorder(Mutex<Vec<(u64, StoreEvent)>>);

impl StoreListener for Recorder {
    fn on_event(self: Arc<Self>, _: Key, holder: u64, event: StoreEvent) {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((holder, event));
    }
}

/// A holder that sends claims.
struct Holder {
    store: Arc<dyn Store>,
    key: Key,
    id: u64,
    number: u64,
    most: u32,
    class: u32,
    share: u8,
    granted: u64,
    recorder: Arc<Recorder>,
}

impl Holder {
    fn new(caller: &Caller, most: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1 << 40);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Holder {
            store: caller.store.clone(),
            key: caller.key,
            id,
            number: 0,
            most,
            class: 0,
            share: 0,
            granted: 0,
            recorder: Arc::default(),
        }
    }

    fn send(&self, number: u64, in_use: u32, wanted: u32) {
        let &Holder {
            key,
            id: holder,
            most,
            class,
            share,
            granted,
            ..
        } = self;
        let mut claim = Claim::new(key, holder, number);
        (claim.limit, claim.class, claim.share) = (most, class, share);
        (claim.in_use, claim.wanted, claim.granted_seen) = (in_use, wanted, granted);
        claim.ttl = LONG;
        let listener: Arc<dyn StoreListener> = self.recorder.clone();
        self.store.claim(claim, &listener);
    }

    /// Sends a claim. Returns how many slots the holder was granted; `None` if the store does not
    /// count calls in flight.
    async fn claim(&mut self, in_use: u32, wanted: u32) -> Option<u64> {
        self.number += 1;
        self.send(self.number, in_use, wanted);
        self.granted_when(|_| true).await.ok()
    }

    /// Waits until an event about the last claim meets `enough`. Returns how many slots the holder
    /// was granted.
    async fn granted_when(
        &mut self,
        enough: impl Fn((u64, bool)) -> bool,
    ) -> Result<u64, StoreError> {
        for _ in 0..2000 {
            let events: Vec<_> = self
                .recorder
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            let newest = events
                .iter()
                .filter(|(holder, _)| *holder == self.id)
                .max_by_key(|(_, event)| match event {
                    StoreEvent::InFlight { version, .. } => *version,
                    _ => 0,
                });
            match newest {
                Some((
                    _,
                    StoreEvent::InFlight {
                        number,
                        granted,
                        others_wait,
                        ..
                    },
                )) if *number == self.number && enough((*granted, *others_wait)) => {
                    let more = granted - self.granted;
                    self.granted = *granted;
                    return Ok(more);
                }
                Some((_, StoreEvent::Failed(error @ StoreError::Unsupported(_)))) => {
                    return Err(error.clone());
                }
                _ => pass(Duration::from_millis(1)).await,
            }
        }
        panic!(
            "no such event within two seconds; holder {} received {:?}",
            self.id, self.recorder.0
        );
    }
}

/// A free slot goes to the first waiter whose class is below its share, else to the first of all.
pub(super) async fn serves_classes_below_their_share_first(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "in flight by class", Quota::in_flight(4));
    let of_class = |class| Holder {
        class,
        share: 50,
        ..Holder::new(&caller, 4)
    };
    let (mut web, mut jobs, mut other_jobs) = (of_class(1), of_class(2), of_class(2));
    let Some(granted) = jobs.claim(0, 9).await else {
        return;
    };
    assert_eq!(granted, 4, "a class has all slots while it is alone");
    assert_eq!(other_jobs.claim(0, 1).await, Some(0));
    assert_eq!(web.claim(0, 3).await, Some(0));
    for number in 1..=2 {
        assert_eq!(jobs.claim(4 - number, 5).await, Some(0));
        let granted = web.granted_when(|(granted, _)| granted >= u64::from(number));
        assert_eq!(granted.await.ok(), Some(1), "the class below its share");
    }
    // Both classes have their share now, and the web uses one slot less.
    assert_eq!(
        web.claim(1, 1).await,
        Some(1),
        "it is below its share again"
    );
    assert_eq!(jobs.claim(1, 5).await, Some(1), "jobs, too");
    assert_eq!(jobs.claim(2, 0).await, Some(0));
    assert_eq!(jobs.claim(0, 0).await, Some(0));
    assert_eq!(
        other_jobs
            .granted_when(|(granted, _)| granted > 0)
            .await
            .ok(),
        Some(1)
    );
    for holder in [&mut web, &mut other_jobs] {
        assert_eq!(holder.claim(0, 0).await, Some(0));
    }
    assert_eq!(caller.peek().await.free, 4, "all holders have left");
}

/// Slots in use never exceed the smallest limit asserted. Waiters get slots in the order of their
/// arrival, even if claims arrive late or twice.
pub(super) async fn counts_calls_in_flight(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "in flight", Quota::in_flight(3));
    let (mut one, mut two, mut three) = (
        Holder::new(&caller, 3),
        Holder::new(&caller, 3),
        Holder::new(&caller, 2),
    );
    let Some(granted) = one.claim(0, 2).await else {
        return;
    };
    assert_eq!(granted, 2, "free slots are granted at once");
    assert_eq!(two.claim(0, 2).await, Some(1), "no slot beyond the limit");
    assert!(
        one.granted_when(|(_, others_wait)| others_wait)
            .await
            .is_ok(),
        "a holder with slots is notified that others wait"
    );
    // An older claim that arrives late is ignored; a repeated claim changes nothing.
    one.send(one.number - 1, 0, 0);
    one.send(one.number, 0, 2);
    assert_eq!(two.claim(1, 1).await, Some(0), "no slot has become free");
    assert_eq!(one.claim(1, 1).await, Some(0), "a new waiter is last");
    assert_eq!(
        two.granted_when(|(granted, _)| granted > 1).await.ok(),
        Some(1),
        "the first waiter gets the free slot"
    );
    assert_eq!(two.claim(1, 0).await, Some(0));
    assert_eq!(
        one.granted_when(|(granted, _)| granted > 2).await.ok(),
        Some(1),
        "the next waiter gets the next free slot"
    );
    // Two slots are taken, and the new holder asserts a limit of two.
    assert_eq!(two.claim(0, 0).await, Some(0));
    assert_eq!(three.claim(0, 1).await, Some(0), "the smallest limit holds");
    assert_eq!(one.claim(1, 0).await, Some(0));
    assert_eq!(
        three.granted_when(|(granted, _)| granted > 0).await.ok(),
        Some(1)
    );
    let usage = caller.peek().await;
    assert_eq!(
        (usage.limits[0].used, usage.free),
        (2, 0),
        "two of two slots are taken: {usage:?}"
    );
    for holder in [&mut one, &mut three] {
        assert_eq!(holder.claim(0, 0).await, Some(0));
    }
    assert_eq!(caller.peek().await.free, 3, "all holders have left");
}
