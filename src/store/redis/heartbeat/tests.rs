//! A holder that leaves after one of its claims has failed, and one whose claim expires while the machine sleeps.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::Value;

use super::Claims;
use crate::clock::{self, pretended};
use crate::key::Key;
use crate::locks::lock;
use crate::store::redis::backend::Backend;
use crate::store::redis::codec::CallWriter;
use crate::store::redis::connection::{Connection, ServerRequest};
use crate::store::redis::endpoint::Connecting;
use crate::store::redis::layout::{FORMAT, GRANTED};
use crate::store::redis::script::Script;
use crate::store::redis::stats::{CallKind, StoreTally};
use crate::store::{Claim, StoreEvent, StoreListener};

struct Unconcerned;

impl StoreListener for Unconcerned {
    fn on_event(self: Arc<Self>, _key: Key, _holder: u64, _event: StoreEvent) {}
}

/// Returns the reply of a server that takes in a claim.
fn reply() -> Value {
    let mut reply = CallWriter(vec![FORMAT, GRANTED]);
    for number in [7, 1, 1_000_000, 1, 0] {
        reply.long(number);
    }
    reply.byte(0);
    reply.long(0);
    reply.long(0);
    Value::BulkString(reply.0)
}

/// Returns a backend whose server does not reply to the first `silent` claims, and the moments at which it received
/// claims.
fn backend(silent: usize) -> (Backend, Arc<Mutex<Vec<Instant>>>) {
    let (claims, received) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::<Mutex<Vec<_>>>::default(),
    );
    let log = received.clone();
    let factory = Arc::new(move || {
        let (claims, log) = (claims.clone(), log.clone());
        let send = Arc::new(move |request: ServerRequest| {
            let is_claim = request.is_call;
            if is_claim {
                lock(&log).push(clock::now());
            }
            let is_lost = is_claim && claims.fetch_add(1, Ordering::Relaxed) < silent;
            Box::pin(async move {
                match (is_lost, is_claim) {
                    (true, _) => std::future::pending().await,
                    (false, true) => Ok(reply()),
                    (false, false) => Ok(Value::Okay),
                }
            }) as _
        });
        Box::pin(std::future::ready(Ok(Connection { send, database: 0 }))) as _
    });
    let server = Connecting::Server {
        factory,
        find_server: None,
    };
    let tally = Arc::new(StoreTally::new("test"));
    let timeout = Duration::from_millis(100);
    (Backend::new(server, timeout, "test:", tally), received)
}

/// Makes the claims of a process over such a backend, a claim, and these moments.
fn claims(silent: usize) -> (Claims, Claim, Arc<Mutex<Vec<Instant>>>) {
    let (backend, received) = backend(silent);
    tokio::spawn(backend.clone().keep());
    let script = Arc::new(Script::new(CallKind::InFlight));
    let claims = Claims::new(backend, script, 1);
    let mut claim = Claim::new(Key::ALL, 5, 1);
    (claim.limit, claim.in_use, claim.ttl) = (1, 1, Duration::from_secs(10));
    (claims, claim, received)
}

/// The first claim may arrive after the one that leaves. It would take a slot for its whole time to live.
#[tokio::test(start_paused = true)]
async fn holders_leave_again_after_a_failed_claim() {
    let (mut claims, mut claim, received) = claims(1);
    claims.claim("key".into(), claim, Arc::new(Unconcerned));
    (claim.number, claim.in_use) = (2, 0);
    claims.claim("key".into(), claim, Arc::new(Unconcerned));
    let start = clock::now();
    while !claims.holders.is_empty() {
        let due_at = claims.due_at();
        tokio::select! {
            () = clock::sleep_until(due_at.unwrap_or_else(clock::now)), if due_at.is_some() => claims.send_due(),
            Some((id, reply)) = claims.next_reply() => claims.on_reply(id, reply),
        }
    }
    assert!(clock::now() < start + Duration::from_secs(4));
    let received = lock(&received);
    let [_first, leaves, leaves_again] = received[..] else {
        panic!("{received:?}");
    };
    assert!(
        leaves_again >= leaves + Duration::from_secs(1),
        "{received:?}"
    );
}

struct CountsExpired(AtomicUsize);

impl StoreListener for CountsExpired {
    fn on_event(self: Arc<Self>, _key: Key, _holder: u64, event: StoreEvent) {
        if let StoreEvent::ClaimExpired = event {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Redis has given the slot to another process meanwhile, so the call has to end.
#[tokio::test(start_paused = true)]
async fn claims_expire_while_the_machine_sleeps() {
    let (mut claims, claim, _received) = claims(0);
    let listener = Arc::new(CountsExpired(AtomicUsize::new(0)));
    // A sleep before the claim does not count.
    pretended::sleep(Duration::from_secs(60));
    claims.claim("key".into(), claim, listener.clone());
    let (id, reply) = claims.next_reply().await.unwrap();
    claims.on_reply(id, reply);
    for (slept, expected) in [(5, 0), (6, 1), (3600, 1)] {
        pretended::sleep(Duration::from_secs(slept));
        claims.send_due();
        assert_eq!(listener.0.load(Ordering::Relaxed), expected, "{slept} s");
    }
}

/// Redis may lose its data while one limiter has all calls in flight. The first claim of another limiter of the process
/// has to show that.
#[tokio::test(start_paused = true)]
async fn new_holders_know_what_present_holders_know() {
    let (mut claims, mut claim, _received) = claims(0);
    claims.claim("key".into(), claim, Arc::new(Unconcerned));
    let (id, reply) = claims.next_reply().await.unwrap();
    claims.on_reply(id, reply);
    claim.holder = 6;
    claims.claim("key".into(), claim, Arc::new(Unconcerned));
    let [present, new] = [5, 6].map(|id| claims.holders[&id].client_session(clock::now()));
    assert!(present.incarnation != 0);
    assert_eq!(new, present);
}
