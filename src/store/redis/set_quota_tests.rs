//! Set quotas in a real server: messages, and how long they are kept.

use std::sync::{Arc, Weak};
use std::time::Duration;

use redis_server::RedisServer;
use tokio::sync::mpsc;

use super::RedisStore;
use crate::key::Key;
use crate::limit::{ChangeKind, LimitSpec};
use crate::quota::Quota;
use crate::store::{
    Change, ClientSession, Demand, FallbackStore, HoldState, InForce, Lease, LeaseRequest,
    SetQuota, Store, StoreError, StoreEvent, StoreListener, StoreReply,
};

const HOUR: Duration = Duration::from_secs(3600);
const SET: Change = Change::Quota {
    kind: ChangeKind::Set,
    life: HOUR,
};
const END: Change = Change::Quota {
    kind: ChangeKind::End,
    life: HOUR,
};

/// Returns the version after a change of a set quota.
async fn version_of(changed: StoreReply<InForce>) -> Result<u32, StoreError> {
    Ok(changed.arrives().await?.changed_quota()?.version)
}

/// Passes on the events of a store.
struct Listener(mpsc::UnboundedSender<(Key, StoreEvent)>);

impl StoreListener for Listener {
    fn on_event(self: Arc<Self>, key: Key, _holder: u64, event: StoreEvent) {
        let _ = self.0.send((key, event));
    }
}

/// A process that listens.
struct Process {
    store: RedisStore,
    events: mpsc::UnboundedReceiver<(Key, StoreEvent)>,
    _listener: Arc<dyn StoreListener>,
}

impl Process {
    /// Makes a process that receives all messages from now on.
    async fn new(server: &RedisServer, secret: Option<&str>) -> Self {
        // The machine may stall for longer than the default timeout.
        let builder = RedisStore::builder(&server.url()).store_timeout(Duration::from_secs(5));
        let builder = match secret {
            Some(secret) => builder.secret(secret),
            None => builder,
        };
        let store = builder.build().unwrap();
        let (sender, mut events) = mpsc::unbounded_channel();
        let listener: Arc<dyn StoreListener> = Arc::new(Listener(sender));
        let weak: Weak<dyn StoreListener> = Arc::downgrade(&listener);
        store.listen(weak);
        store.connect().await.unwrap();
        while !matches!(events.recv().await, Some((_, StoreEvent::EventsMissed))) {}
        Process {
            store,
            events,
            _listener: listener,
        }
    }

    /// Waits for a message about a set quota.
    async fn next_quota(&mut self) -> (Key, SetQuota) {
        loop {
            let event = tokio::time::timeout(Duration::from_secs(20), self.events.recv());
            match event.await.expect("a message arrives") {
                Some((key, StoreEvent::SetQuota(quota))) => return (key, *quota),
                Some(_) => {}
                None => unreachable!("the listener lives"),
            }
        }
    }

    async fn lease(&self, key: Key, spec: &Arc<LimitSpec>) -> Lease {
        let request = LeaseRequest {
            key,
            spec,
            demands: &[Demand::new(1, 1)],
            prefetch: 0,
            latest: Duration::ZERO,
            validity: Duration::from_millis(10),
            prefetch_validity: Duration::from_millis(10),
            returns: &[],
            charges: &[],
            session: ClientSession::default(),
            hold: HoldState::default(),
            remaining: None,
            borrows: false,
            joint: None,
        };
        self.store.lease(request).arrives().await.unwrap()
    }
}

fn spec(quota: Quota) -> Arc<LimitSpec> {
    let slack = Duration::from_millis(10);
    Arc::new(LimitSpec::new(quota, slack, slack))
}

#[tokio::test]
async fn set_quotas_are_told_to_all_processes() {
    let server = RedisServer::start().unwrap();
    for secret in [None, Some("only we know")] {
        let key = Key::new(secret.unwrap_or("open"));
        let operator = Process::new(&server, secret).await;
        let mut others = [
            Process::new(&server, secret).await,
            Process::new(&server, secret).await,
        ];
        let quota = Quota::per_minute(7).and(Quota::in_flight(3));
        let set = operator.store.change(key, &spec(quota), SET);
        let version = version_of(set).await.unwrap();
        for other in &mut others {
            let (of, told) = other.next_quota().await;
            assert_eq!((of, told.version, told.quota), (key, version, Some(quota)));
            assert_eq!((told.life, told.left), (HOUR, HOUR));
        }
        // The server loses all states. A process that knows the quota sets it anew, and tells all.
        let mut redis = server.connect().unwrap();
        redis::cmd("FLUSHALL").exec(&mut redis).unwrap();
        let knows = (*spec(quota)).clone().with_quota_version(version, HOUR);
        let knows = Arc::new(knows);
        assert_eq!(operator.lease(key, &knows).await.set_quota, None);
        for other in &mut others {
            let (of, told) = other.next_quota().await;
            assert_eq!((of, told.version, told.quota), (key, version, Some(quota)));
        }
        // This call changes nothing, so nothing is told of it.
        assert_eq!(operator.lease(key, &knows).await.set_quota, None);
        let own = spec(Quota::per_minute(5));
        let unset = operator.store.change(key, &own, END);
        let end = version_of(unset).await.unwrap();
        assert!(end > version, "{end} after {version}");
        for other in &mut others {
            let (of, told) = other.next_quota().await;
            assert_eq!((of, told.version, told.quota), (key, end, None));
        }
    }
}

#[tokio::test]
async fn idle_keys_keep_their_set_quota() {
    let server = RedisServer::start().unwrap();
    let process = Process::new(&server, None).await;
    let set = spec(Quota::per_second(7));
    let set = process.store.change(Key::ALL, &set, SET);
    set.arrives().await.unwrap();
    let mut redis = server.connect().unwrap();
    let name = process.store.name(Key::ALL);
    let ttl: u64 = redis::cmd("TTL").arg(&name).query(&mut redis).unwrap();
    assert!((3600..3700).contains(&ttl), "{ttl} s");
    let end = Change::Quota {
        kind: ChangeKind::End,
        life: Duration::ZERO,
    };
    let own = spec(Quota::per_second(5));
    let unset = process.store.change(Key::ALL, &own, end);
    unset.arrives().await.unwrap();
    // The end is remembered for as long as a process may know of the set quota.
    let ttl: u64 = redis::cmd("TTL").arg(&name).query(&mut redis).unwrap();
    assert!((3660..3760).contains(&ttl), "{ttl} s");
}

/// While the store cannot be reached, nothing is set, not even in the fallback share.
#[tokio::test]
async fn quotas_cannot_be_set_while_the_store_is_away() {
    let server = RedisServer::start().unwrap();
    let url = server.url();
    drop(server);
    let timeout = Duration::from_millis(100);
    let store = RedisStore::builder(&url).store_timeout(timeout);
    let store = FallbackStore::new(Arc::new(store.build().unwrap()), None, 10);
    let quota = spec(Quota::per_second(7));
    let set = store.change(Key::ALL, &quota, SET).arrives().await;
    let unset = store.change(Key::ALL, &quota, END).arrives().await;
    assert!(set.is_err() && unset.is_err(), "{set:?}, {unset:?}");
    let in_flight = spec(Quota::in_flight(7));
    let refused = store.change(Key::ALL, &in_flight, SET).arrives().await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("without a limit of rate"), "{error}");
}
