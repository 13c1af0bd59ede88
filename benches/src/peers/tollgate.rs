//! tollgate: its Tower layer, and its limiter without HTTP.

use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{Key, Quota, RateLimitBuilder, RateLimitLayer, RequestRef, by_host};
use tower::Layer;

use super::PLENTY;
use crate::inner::Inner;
use crate::measure::Contender;

/// tollgate, and the number of its store calls.
pub(crate) struct Tollgate {
    pub(crate) contender: Contender,
    pub(crate) store: Arc<Counted>,
}

/// Builds a limiter with one limit for all calls.
pub(crate) fn constant() -> Tollgate {
    layer("tollgate", 1, |builder| builder)
}

/// Builds a limiter with one limit for each host.
pub(crate) fn hosts(hosts: usize) -> Tollgate {
    layer("tollgate, `by_host`", hosts, |builder| builder.key(by_host))
}

/// Builds a limiter with one limit for each host, found by a closure.
pub(crate) fn closure() -> Tollgate {
    let key = |request: &RequestRef<'_>| request.host().map(Key::host);
    layer("tollgate, a closure that finds the host", 1, |builder| {
        builder.key(key)
    })
}

/// Builds a limiter whose requests have a deadline.
pub(crate) fn deadline() -> Tollgate {
    let far = Instant::now() + Duration::from_secs(86_400);
    layer("tollgate, `deadline`", 1, |builder| {
        builder.deadline(move |_| Some(far))
    })
}

/// Builds a limiter whose requests count in `keys` limits: one for all calls, the others by host.
pub(crate) fn several_keys(keys: usize) -> Tollgate {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let limit = Quota::per_day(PLENTY);
    layer(&format!("tollgate, {keys} keys"), 1, |builder| {
        let further = NAMES.iter().take(keys - 1);
        further.fold(builder, |builder, name| {
            builder.and_per(name, limit, by_host)
        })
    })
}

/// Builds the gate alone, with a limit that is used up.
pub(crate) fn refused() -> Tollgate {
    let store = Arc::new(Counted {
        store: MemoryStore::new(1),
        calls: AtomicU64::new(0),
    });
    let builder = RateLimitLayer::builder(Quota::per_day(1))
        .max_wait(Duration::ZERO)
        .store(store.clone());
    let limit = builder.build().expect("the settings make sense");
    let make = move || {
        let limiter = limit.limiter();
        move || {
            let cx = &mut Context::from_waker(Waker::noop());
            assert!(black_box(pin!(limiter.acquire(Key::ALL)).poll(cx)).is_ready());
        }
    };
    Tollgate {
        contender: Contender::raw("tollgate `acquire`, refused", make),
        store,
    }
}

/// Builds the gate alone.
pub(crate) fn raw() -> Tollgate {
    let (limit, store) = build(|builder| builder);
    let make = move || {
        let limiter = limit.limiter();
        move || {
            let cx = &mut Context::from_waker(Waker::noop());
            assert!(black_box(pin!(limiter.acquire(Key::ALL)).poll(cx)).is_ready());
        }
    };
    Tollgate {
        contender: Contender::raw("tollgate `acquire`, polled once", make),
        store,
    }
}

fn layer(
    name: &str,
    hosts: usize,
    with: impl Fn(RateLimitBuilder) -> RateLimitBuilder,
) -> Tollgate {
    let (limit, store) = build(with);
    Tollgate {
        contender: Contender::service(name, hosts, move || limit.layer(Inner)),
        store,
    }
}

fn build(with: impl Fn(RateLimitBuilder) -> RateLimitBuilder) -> (RateLimitLayer, Arc<Counted>) {
    const KEYS: usize = 2_000_000;
    let store = Arc::new(Counted {
        store: MemoryStore::new(KEYS),
        calls: AtomicU64::new(0),
    });
    // A day rather than a second: permits fetched ahead then live until each of many hosts has had
    // its turns.
    let builder = RateLimitLayer::builder(Quota::per_day(PLENTY))
        .max_keys(KEYS)
        .store(store.clone());
    (
        with(builder).build().expect("the settings make sense"),
        store,
    )
}

/// The memory store, with a count of the calls that book.
pub(crate) struct Counted {
    store: MemoryStore,
    calls: AtomicU64,
}

impl Counted {
    /// Returns the number of calls since the last time.
    pub(crate) fn take(&self) -> u64 {
        self.calls.swap(0, Ordering::Relaxed)
    }
}

impl Store for Counted {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, ask: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.lease(ask)
    }
}
