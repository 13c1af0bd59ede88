//! The task that charges the store for keys without requests.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Inner;
use crate::clock;
use crate::events;
use crate::join::join_all;
use crate::store::{OwnedLeaseRequest, label, spawn};

/// How often the task looks for keys that have not called the store lately.
const CHARGE_INTERVAL: Duration = Duration::from_millis(100);

/// For how many keys the store is charged at the same time, while it replies. One after the other, some thousand keys
/// take seconds, in which the store grants to other processes what this one has used.
const MOST_AT_ONCE: usize = 64;

/// Starts the task that charges the store for idle keys, unless it runs. Other processes rely on it:
/// the store is charged soon after it replies again.
pub(super) fn keep_charging(inner: &Arc<Inner>) {
    if inner.is_charging.swap(true, Ordering::Relaxed) {
        return;
    }
    let task = ChargingTask(Arc::downgrade(inner));
    let keep_charging = async move {
        loop {
            clock::sleep_until(clock::after(clock::now(), CHARGE_INTERVAL)).await;
            let Some(inner) = task.0.upgrade() else {
                return;
            };
            if charge_idle_keys(&inner).await == 0 {
                drop(task);
                // A key that has lost the store since it was counted has started no task.
                if inner.keys_alone() > 0 {
                    keep_charging(&inner);
                }
                return;
            }
        }
    };
    spawn(&*inner.store, Box::pin(keep_charging));
}

/// Charges the store for keys without requests. Returns how many keys have a ledger of their own.
async fn charge_idle_keys(inner: &Inner) -> usize {
    let now = clock::now();
    let mut alone = 0;
    let mut idle = Vec::new();
    inner.histories.for_each(|key, history| {
        alone += usize::from(history.standalone().is_some());
        idle.extend(history.own_request(key, now));
    });
    // One key finds out whether the store replies.
    let (mut idle, mut at_once) = (idle.into_iter(), 1);
    loop {
        let next = idle.by_ref().take(at_once);
        let reached = join_all(next.map(|request| charge(inner, request))).await;
        if reached.is_empty() {
            return alone;
        }
        let are_reached = reached.into_iter().all(|is_reached| is_reached);
        at_once = if are_reached { MOST_AT_ONCE } else { 1 };
    }
}

/// Charges the store for a key. Returns whether the store has replied.
async fn charge(inner: &Inner, mut request: OwnedLeaseRequest) -> bool {
    if inner.probe(&mut request).await.is_err() {
        return false;
    }
    let charges = inner
        .histories
        .find(request.key, |history| history.take_charges(clock::now()));
    let Some(charges) = charges else {
        return true;
    };
    request.charges = charges;
    let Ok(lease) = inner.store.lease(request.as_request()).arrives().await else {
        return false;
    };
    let ended = inner.histories.find(request.key, |history| {
        history.record(&lease, &request.spec, request.sent, clock::now());
        history.end_if_charged()
    });
    if ended == Some(true) {
        events::together(&label(&*inner.store, request.key, None));
    }
    true
}

/// Held by the task that charges the store. When the task ends, another may start.
struct ChargingTask(Weak<Inner>);

impl Drop for ChargingTask {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.is_charging.store(false, Ordering::Relaxed);
        }
    }
}
