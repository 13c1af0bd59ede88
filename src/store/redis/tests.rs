//! Tests of the worker after a panic, of flushes, and of the labels of keys.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use redis_server::RedisServer;
use tokio::sync::watch;
use tokio::time::timeout;

use super::connection::{Connection, ServerRequest};
use super::endpoint::Connecting;
use super::stats::CallKind;
use super::worker::WorkerOrder;
use super::{RedisStore, RedisStoreBuilder};
use crate::clock;
use crate::key::Key;
use crate::layer::RateLimitLayer;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::quota::Quota;
use crate::store::{ClientSession, Demand, HoldState, Lease, LeaseRequest, PeekRequest, Store};
use crate::{Limited, OnStoreError};

/// A claim is valid for its time to live only. If the worker forgot the claim, another process
/// would be granted its slot.
#[tokio::test]
async fn a_panic_of_the_worker_forgets_no_claims() {
    const LIFE: Duration = Duration::from_secs(1);
    let server = RedisServer::start().unwrap();
    // The machine may stall for longer than the default timeout.
    let patient = || RedisStore::builder(&server.url()).store_timeout(Duration::from_secs(5));
    let store = || Arc::new(patient().build().unwrap());
    let limiter = |store: Arc<RedisStore>| {
        let layer = RateLimitLayer::builder(Quota::in_flight(1))
            .store(store)
            .max_wait(Duration::ZERO);
        layer.in_flight_ttl(LIFE).build().unwrap().limiter()
    };
    let (panics, other) = (store(), store());
    let call = limiter(panics.clone()).acquire(Key::ALL).await.unwrap();
    panics
        .client
        .order(CallKind::InFlight, WorkerOrder::Panic)
        .unwrap();
    panics.connect().await.unwrap();
    clock::sleep(LIFE * 2).await;
    let other = limiter(other);
    assert!(
        other.acquire(Key::ALL).await.is_err(),
        "the first call is still in flight"
    );
    drop(call);
    panics.connect().await.unwrap();
    clock::sleep(Duration::from_millis(100)).await;
    assert!(
        other.acquire(Key::ALL).await.is_ok(),
        "the first call has ended"
    );
}

/// What was called before the drop still reaches Redis: a peek, and permits that come back.
#[tokio::test]
async fn dropped_stores_end_their_calls_and_their_thread() {
    let server = RedisServer::start().unwrap();
    let store = || {
        let patient = RedisStore::builder(&server.url()).store_timeout(Duration::from_secs(5));
        patient.build().unwrap()
    };
    let (dropped, other) = (store(), store());
    let granted = lease(&dropped, ClientSession::default(), HoldState::default()).await;
    let slack = Duration::from_millis(10);
    let spec = Arc::new(LimitSpec::new(Quota::per_second(50), slack, slack));
    let peek = dropped.peek(PeekRequest::new(Key::ALL, &spec));
    dropped.give_back(Key::ALL, &spec, &granted.unused());
    let tally = Arc::downgrade(&dropped.client.backend.links.tally);
    drop(dropped);
    assert!(peek.arrives().await.is_ok());
    // An exporter of metrics keeps the counts for longer.
    let last = usize::from(cfg!(feature = "metrics"));
    let start = clock::now();
    while tally.strong_count() > last {
        assert!(clock::now() < start + Duration::from_secs(30));
        clock::sleep(Duration::from_millis(5)).await;
    }
    let usage = other
        .peek(PeekRequest::new(Key::ALL, &spec))
        .arrives()
        .await;
    assert_eq!(usage.unwrap().free, 50);
}

/// Two limiters of one store shut down at the same time. Each is told what has become of its permits.
#[tokio::test]
async fn flushes_at_once_wait_for_the_same_permits() {
    for arrives in [true, false] {
        let (open, is_open) = watch::channel(false);
        let factory = Arc::new(move || {
            let is_open = is_open.clone();
            let send = Arc::new(move |request: ServerRequest| {
                let mut is_open = is_open.clone();
                Box::pin(async move {
                    if !request.is_call {
                        return Ok(Value::Okay);
                    }
                    let _ = is_open.wait_for(|is_open| *is_open).await;
                    match arrives {
                        true => Ok(Value::BulkString(Vec::new())),
                        false => Err(std::io::Error::from(ErrorKind::ConnectionReset).into()),
                    }
                }) as _
            });
            Box::pin(std::future::ready(Ok(Connection { send, database: 0 }))) as _
        });
        let server = Connecting::Server {
            factory,
            find_server: None,
        };
        let patient = RedisStoreBuilder::of(Ok(server)).store_timeout(Duration::from_secs(30));
        let store = patient.build().unwrap();
        let slack = Duration::from_millis(10);
        let spec = Arc::new(LimitSpec::new(Quota::per_second(50), slack, slack));
        store.give_back(Key::ALL, &spec, &[UnusedPermits::new(1, 2, 1, 3)]);
        let (first, second) = (store.flush().arrives(), store.flush().arrives());
        let mut second = std::pin::pin!(second);
        assert!(timeout(slack * 5, &mut second).await.is_err());
        open.send_replace(true);
        assert_eq!(first.await.is_ok(), arrives);
        assert_eq!(second.await.is_ok(), arrives);
        assert!(store.flush().arrives().await.is_ok(), "it was reported");
    }
}

#[tokio::test]
async fn labels_need_the_secret_and_stay_the_same() {
    let store = || {
        RedisStore::builder("redis://127.0.0.1:1/")
            .secret("only we know")
            .build()
            .unwrap()
    };
    let (key, name) = (
        Key::new("ada@example.com"),
        store().name(Key::new("ada@example.com")),
    );
    let label = store().label(key);
    assert_eq!(label.len(), 8);
    assert!(
        name.contains(&format!("{{{label}")),
        "{name} begins with {label}"
    );
    assert!(!key.hex().contains(&*label), "a digest without the secret");
    let open = RedisStore::new("redis://127.0.0.1:1/").unwrap();
    assert!(
        !key.hex().contains(&*open.label(key)),
        "without a secret of the store, that of the process"
    );

    let refused = async |on_error| {
        let layer = RateLimitLayer::builder(Quota::per_hour(1))
            .store(Arc::new(store()))
            .max_wait(Duration::ZERO);
        let limiter = layer.on_store_error(on_error).build().unwrap().limiter();
        let first: Result<_, Limited> = limiter.acquire(key).await;
        match first {
            Err(limited) => limited,
            Ok(_) => limiter.acquire(key).await.err().unwrap(),
        }
    };
    assert_eq!(
        refused(OnStoreError::FailClosed).await.report().key(),
        &*label
    );
    assert_eq!(
        refused(OnStoreError::FallbackShare).await.report().key(),
        &*label
    );
}

/// Sends a call of a process that knows this session and hold of the key.
async fn lease(store: &RedisStore, session: ClientSession, hold: HoldState) -> Lease {
    let slack = Duration::from_millis(10);
    let request = LeaseRequest {
        key: Key::ALL,
        spec: &Arc::new(LimitSpec::new(Quota::per_second(50), slack, slack)),
        demands: &[Demand::new(1, 1)],
        prefetch: 0,
        latest: Duration::ZERO,
        validity: slack,
        prefetch_validity: slack,
        returns: &[],
        charges: &[],
        session,
        hold,
        remaining: None,
        borrows: false,
        joint: None,
    };
    store.lease(request).arrives().await.unwrap()
}

/// A process remembers a release for longer than Redis does. The release does not end a hold that another process has
/// begun since, but it does end one of the state that the process knows.
#[tokio::test]
async fn a_release_ends_no_hold_of_a_later_state() {
    let server = RedisServer::start().unwrap();
    let patient = RedisStore::builder(&server.url()).store_timeout(Duration::from_secs(5));
    let store = patient.build().unwrap();
    let hold = HoldState {
        remaining: Duration::from_secs(60),
        releases: 0,
        cut: false,
    };
    let released = HoldState {
        releases: 1,
        ..HoldState::default()
    };
    let first = lease(&store, ClientSession::default(), hold).await;
    assert!(first.refused.is_some());
    for incarnation in [0, first.incarnation ^ 1] {
        let session = ClientSession {
            incarnation,
            ..ClientSession::default()
        };
        let other = lease(&store, session, released).await;
        assert!(other.hold.remaining > Duration::from_secs(50), "{other:?}");
        assert_eq!(other.hold.releases, 1, "it is taken over");
    }
    let session = ClientSession {
        incarnation: first.incarnation,
        ..ClientSession::default()
    };
    let again = HoldState {
        releases: 2,
        ..released
    };
    let known = lease(&store, session, again).await;
    assert!(known.hold.remaining.is_zero(), "{known:?}");
}
