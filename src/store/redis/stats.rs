//! What a store has done: the calls to Redis, their results, and how long they took.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::error::StoreError;
use crate::locks::lock;
use crate::stats::{Histogram, WaitCounts};

/// What a [`RedisStore`](crate::store::RedisStore) has done, and whether it reaches Redis now.
///
/// [`RedisStore::stats`](crate::store::RedisStore::stats) returns it. Counts begin at zero when the
/// store is built, and never fall.
#[derive(Clone, Debug)]
pub struct StoreStats {
    /// The prefix of the store.
    #[cfg_attr(
        not(feature = "metrics"),
        allow(dead_code, reason = "exporters of metrics read it")
    )]
    pub(crate) prefix: Arc<str>,
    /// The calls of each kind, in the order of [`CallKind::ALL`].
    calls: [StoreCalls; CallKind::ALL.len()],
    up: Option<bool>,
    subscribed: Option<bool>,
    connects: u64,
}

impl StoreStats {
    /// Returns whether the store has its connections, and its last call had a reply of use in time. `None`
    /// until it has tried to connect. An error that Redis replies with is a reply.
    ///
    /// In a cluster, `false` if a connection to one of the servers in use is broken. A store without
    /// calls notices a broken connection within 30 s.
    pub fn is_up(&self) -> Option<bool> {
        self.up
    }

    /// Returns whether the store receives what other processes tell it, such as holds. Without that, it
    /// learns of them when it next asks. `None` until it has subscribed, and over a connection of your
    /// own.
    pub fn is_subscribed(&self) -> Option<bool> {
        self.subscribed
    }

    /// Returns how many connections were made, without those for notifications.
    pub fn connects(&self) -> u64 {
        self.connects
    }

    /// Returns the calls with the names of their kinds: `permits` (under limits of rate, and about
    /// holds), `joint` (about permits of several keys together), `in_flight` (about calls in flight) and
    /// `register` (about shared paces).
    pub fn by_call(&self) -> impl Iterator<Item = (&'static str, &StoreCalls)> {
        CallKind::NAMES.into_iter().zip(&self.calls)
    }
}

/// The calls of one kind, by their result.
#[derive(Clone, Debug)]
pub struct StoreCalls {
    ok: u64,
    away: u64,
    failed: u64,
    latency: Histogram,
}

impl StoreCalls {
    /// Returns how long the calls took, whatever their result. Its buckets end at 0.1, 0.25, 0.5, 1, 2.5,
    /// 5, 10, 25, 50, 100, 250 and 500 ms, and at 1, 2.5, 5, 10 and 60 s.
    pub fn latency(&self) -> &Histogram {
        &self.latency
    }

    /// Returns the counts with the names of the results: `ok` (Redis replied), `away` (Redis could not be
    /// reached, or its reply was not read in time, as this process was busy or stopped) and `failed` (Redis replied with an error, or with
    /// what could not be used).
    ///
    /// Each call that fails counts as `away` or `failed`. If it fails after Redis has replied, it also counts
    /// as `ok`.
    pub fn by_result(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let &StoreCalls {
            ok, away, failed, ..
        } = self;
        [("ok", ok), ("away", away), ("failed", failed)].into_iter()
    }
}

/// The upper bounds of the buckets of latencies, in microseconds.
pub(crate) const BOUNDS: [u64; 17] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000, 60_000_000,
];

/// The upper bounds of the buckets of latencies, in seconds.
#[cfg(feature = "metrics")]
pub(crate) const CALL_SECONDS: [f64; 17] = crate::stats::seconds(&BOUNDS);

/// The subject of a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallKind {
    Permits,
    Joint,
    InFlight,
    Register,
}

impl CallKind {
    pub(super) const ALL: [CallKind; 4] = [
        CallKind::Permits,
        CallKind::Joint,
        CallKind::InFlight,
        CallKind::Register,
    ];
    const NAMES: [&str; CallKind::ALL.len()] = ["permits", "joint", "in_flight", "register"];
}

pub(super) struct StoreTally {
    prefix: Arc<str>,
    calls: [CallCounts; CallKind::ALL.len()],
    connects: AtomicU64,
    /// Whether the last call had no reply of use in time, although there is a connection.
    is_failing: AtomicBool,
    /// See [`StoreStats::is_subscribed`].
    subscribed: Mutex<Option<bool>>,
}

/// The counts of one kind of calls.
struct CallCounts {
    ok: AtomicU64,
    away: AtomicU64,
    failed: AtomicU64,
    latency: WaitCounts,
    #[cfg(feature = "metrics")]
    exported: crate::stats::ExportedWaits,
}

impl CallCounts {
    fn new() -> Self {
        CallCounts {
            ok: AtomicU64::new(0),
            away: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            latency: WaitCounts::new(&BOUNDS),
            #[cfg(feature = "metrics")]
            exported: Default::default(),
        }
    }

    fn read(&self) -> StoreCalls {
        let [ok, away, failed] =
            [&self.ok, &self.away, &self.failed].map(|count| count.load(Ordering::Relaxed));
        StoreCalls {
            ok,
            away,
            failed,
            latency: self.latency.read(),
        }
    }
}

impl StoreTally {
    pub(super) fn new(prefix: &str) -> Self {
        StoreTally {
            prefix: prefix.into(),
            calls: CallKind::ALL.map(|_| CallCounts::new()),
            connects: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
            subscribed: Mutex::default(),
        }
    }

    /// Counts a call that took `took`.
    pub(super) fn count<T>(&self, kind: CallKind, took: Duration, ran: &Result<T, StoreError>) {
        let counts = &self.calls[kind as usize];
        let count = match ran {
            Ok(_) => &counts.ok,
            Err(StoreError::Failed(_)) => &counts.failed,
            Err(_) => &counts.away,
        };
        count.fetch_add(1, Ordering::Relaxed);
        counts.latency.add(took);
        #[cfg(feature = "metrics")]
        counts.exported.add(took, |exporter| {
            (exporter.call_recorder)(&self.prefix, CallKind::NAMES[kind as usize])
        });
    }

    /// Counts a call without a reply of use: there is no connection, or the reply was read too late.
    pub(super) fn late(&self, kind: CallKind) {
        self.calls[kind as usize]
            .away
            .fetch_add(1, Ordering::Relaxed);
        self.is_failing.store(true, Ordering::Relaxed);
    }

    /// Counts a call that has failed although Redis replied: the reply does not say what was asked.
    pub(super) fn of_no_use(&self, kind: CallKind) {
        self.calls[kind as usize]
            .failed
            .fetch_add(1, Ordering::Relaxed);
        self.is_failing.store(true, Ordering::Relaxed);
    }

    /// Notes that a reply was read in time.
    pub(super) fn in_time(&self) {
        if self.is_failing.load(Ordering::Relaxed) {
            self.is_failing.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn connected(&self) {
        self.connects.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes whether the store receives what other processes tell it.
    pub(super) fn subscribed(&self, is_subscribed: bool) {
        let mut subscribed = lock(&self.subscribed);
        *subscribed = Some(is_subscribed);
    }

    /// Returns the stats of the store. `up` is whether it has its connections.
    pub(super) fn stats(&self, up: Option<bool>) -> StoreStats {
        StoreStats {
            prefix: self.prefix.clone(),
            calls: std::array::from_fn(|kind| self.calls[kind].read()),
            up: up.map(|up| up && !self.is_failing.load(Ordering::Relaxed)),
            subscribed: *lock(&self.subscribed),
            connects: self.connects.load(Ordering::Relaxed),
        }
    }
}

/// The stores of this process, for an exporter of metrics.
#[cfg(feature = "metrics")]
pub(crate) mod stores {
    use std::sync::{Arc, Mutex, Weak};

    use super::{StoreStats, StoreTally};
    use crate::locks::lock;
    use crate::store::redis::client::Client;

    /// A store. Its tally stays until an exporter has read the last counts.
    struct KnownStore {
        tally: Arc<StoreTally>,
        client: Weak<Client>,
    }

    impl KnownStore {
        /// Returns whether nothing counts in the tally any more.
        fn is_last(&self) -> bool {
            self.client.strong_count() == 0 && Arc::strong_count(&self.tally) == 1
        }
    }

    /// The stores, the oldest first.
    static STORES: Mutex<Vec<KnownStore>> = Mutex::new(Vec::new());

    /// Adds a store.
    pub(in crate::store::redis) fn register(client: &Arc<Client>) {
        let mut stores = lock(&STORES);
        if !crate::stats::is_exporting() {
            stores.retain(|store| !store.is_last());
        }
        stores.push(KnownStore {
            tally: client.backend.links.tally.clone(),
            client: Arc::downgrade(client),
        });
    }

    /// Returns the stats of all stores, and whether these are the last ones of a store that was
    /// dropped. They are returned once.
    pub(crate) fn take() -> Vec<(StoreStats, bool)> {
        let mut all = Vec::new();
        // The last handle of a client drops functions of the user, which may make stores: not under the lock.
        let mut clients = Vec::new();
        let mut stores = lock(&STORES);
        stores.retain(|store| {
            let is_last = store.is_last();
            let client = store.client.upgrade();
            let up = client.as_ref().and_then(|client| client.backend.is_up());
            all.push((store.tally.stats(up), is_last));
            clients.push(client);
            !is_last
        });
        drop(stores);
        drop(clients);
        all
    }
}
