//! The law of calls in flight.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Desk, LONG, pass};
use crate::key::Key;
use crate::quota::Quota;
use crate::store::{Claim, Store, StoreError, StoreEvent, StoreListener};

/// The messages to each holder.
#[derive(Default)]
struct Ear(Mutex<Vec<(u64, StoreEvent)>>);

impl StoreListener for Ear {
    fn on_event(self: Arc<Self>, _: Key, holder: u64, event: StoreEvent) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.push((holder, event));
    }
}

/// A holder that sends claims.
struct Holder {
    store: Arc<dyn Store>,
    key: Key,
    id: u64,
    number: u64,
    most: u32,
    given: u64,
    ear: Arc<Ear>,
}

impl Holder {
    fn new(desk: &Desk, most: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1 << 40);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Holder {
            store: desk.store.clone(),
            key: desk.key,
            id,
            number: 0,
            most,
            given: 0,
            ear: Arc::default(),
        }
    }

    fn send(&self, number: u64, sits: u32, wants: u32) {
        let &Holder { key, id: holder, most, given: heard, .. } = self;
        let claim = Claim {
            key,
            holder,
            number,
            limit: most,
            in_use: sits,
            wanted: wants,
            granted_seen: heard,
            ttl: LONG,
        };
        let listener: Arc<dyn StoreListener> = self.ear.clone();
        self.store.claim(claim, &listener);
    }

    /// Sends a claim. Returns how many seats the holder was given; `None` if the store does not
    /// count calls in flight.
    async fn claim(&mut self, sits: u32, wants: u32) -> Option<u64> {
        self.number += 1;
        self.send(self.number, sits, wants);
        self.told(|_| true).await.ok()
    }

    /// Waits until the news of the last claim meets `enough`. Returns how many seats the holder was
    /// given.
    async fn told(&mut self, enough: impl Fn((u64, bool)) -> bool) -> Result<u64, StoreError> {
        for _ in 0..2000 {
            let told: Vec<_> = self.ear.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let newest =
                told.iter().filter(|(holder, _)| *holder == self.id).max_by_key(|(_, event)| match event {
                    StoreEvent::InFlight { version, .. } => *version,
                    _ => 0,
                });
            match newest {
                Some((_, StoreEvent::InFlight { number, granted: given, others_wait, .. }))
                    if *number == self.number && enough((*given, *others_wait)) =>
                {
                    let more = given - self.given;
                    self.given = *given;
                    return Ok(more);
                }
                Some((_, StoreEvent::Failed(error @ StoreError::Unsupported(_)))) => {
                    return Err(error.clone());
                }
                _ => pass(Duration::from_millis(1)).await,
            }
        }
        panic!("no such news within two seconds; holder {} received {:?}", self.id, self.ear.0);
    }
}

/// Seats in use never exceed the smallest limit asserted, and waiters get seats in the order of
/// their arrival, even if claims arrive late or twice.
pub(super) async fn counts_calls_in_flight(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "in flight", Quota::in_flight(3));
    let (mut one, mut two, mut three) = (Holder::new(&desk, 3), Holder::new(&desk, 3), Holder::new(&desk, 2));
    let Some(given) = one.claim(0, 2).await else { return };
    assert_eq!(given, 2, "free seats are given at once");
    assert_eq!(two.claim(0, 2).await, Some(1), "no seat beyond the limit");
    assert!(
        one.told(|(_, others_wait)| others_wait).await.is_ok(),
        "a holder with seats is notified that others wait"
    );
    // An older claim that arrives late is ignored; a repeated claim changes nothing.
    one.send(one.number - 1, 0, 0);
    one.send(one.number, 0, 2);
    assert_eq!(two.claim(1, 1).await, Some(0), "no seat has become free");
    assert_eq!(one.claim(1, 1).await, Some(0), "a new waiter is last");
    assert_eq!(two.told(|(given, _)| given > 1).await.ok(), Some(1), "the first waiter gets the free seat");
    assert_eq!(two.claim(1, 0).await, Some(0));
    assert_eq!(
        one.told(|(given, _)| given > 2).await.ok(),
        Some(1),
        "the next waiter gets the next free seat"
    );
    // Two seats are taken, and the new holder asserts a limit of two.
    assert_eq!(two.claim(0, 0).await, Some(0));
    assert_eq!(three.claim(0, 1).await, Some(0), "the smallest limit holds");
    assert_eq!(one.claim(1, 0).await, Some(0));
    assert_eq!(three.told(|(given, _)| given > 0).await.ok(), Some(1));
    let usage = desk.peek().await;
    assert_eq!((usage.limits[0].used, usage.free), (2, 0), "two of two seats are taken: {usage:?}");
    for holder in [&mut one, &mut three] {
        assert_eq!(holder.claim(0, 0).await, Some(0));
    }
    assert_eq!(desk.peek().await.free, 3, "all holders have left");
}
