//! The law of registers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::caller::{LONG, key, pass};
use tollgate::Key;
use tollgate::store::{
    Recipients, Register, RegisterRequest, Store, StoreError, StoreEvent, StoreListener,
};

/// The notifications that were received.
#[derive(Default)]
struct Ear(Mutex<Vec<(Key, Register)>>);

impl StoreListener for Ear {
    fn on_event(self: Arc<Self>, key: Key, _: u64, event: StoreEvent) {
        if let StoreEvent::Register(register) = event {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((key, register));
        }
    }
}

impl Ear {
    /// Waits up to two seconds for the notification of `version` of a register of `key`.
    async fn told(&self, key: Key, version: u64) -> Option<Register> {
        for _ in 0..2000 {
            let told = self
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            let of_key = told.into_iter().filter(|(other, _)| *other == key);
            if let Some((_, register)) = of_key
                .into_iter()
                .find(|(_, register)| register.version == version)
            {
                return Some(register);
            }
            pass(Duration::from_millis(1)).await;
        }
        None
    }
}

/// One register.
struct Client<'a> {
    store: &'a Arc<dyn Store>,
    key: Key,
    kind: u64,
}

impl Client<'_> {
    async fn set(&self, seen: u64, value: &[u8], tell: Recipients) -> Result<Register, StoreError> {
        let &Client { store, key, kind } = self;
        let mut change = RegisterRequest::new(key, kind);
        (change.version, change.value) = (seen, Some(value.to_vec()));
        (change.ttl, change.notify) = (LONG, tell);
        store.compare_and_set(change).arrives().await
    }

    async fn read(&self) -> Register {
        let &Client { store, key, kind } = self;
        store
            .compare_and_set(RegisterRequest::new(key, kind))
            .arrives()
            .await
            .expect("a register can be read")
    }
}

/// A change is made only if the register has not changed since the version that the caller saw, and
/// one of many concurrent changes wins. Versions never repeat. The listeners that the change names
/// are notified. A store without registers returns [`StoreError::Unsupported`].
pub(super) async fn changes_registers_in_one_step(store: &Arc<dyn Store>) {
    let client = Client {
        store,
        key: key(store, "registers"),
        kind: 1,
    };
    let first = match client.set(0, b"one", Recipients::None).await {
        Err(StoreError::Unsupported(_)) => return,
        first => first.expect("a register can be made"),
    };
    assert!(
        first.changed && first.version > 0,
        "there was none: {first:?}"
    );
    let read = client.read().await;
    assert_eq!(
        (read.version, &*read.value, read.changed),
        (first.version, &b"one"[..], false)
    );
    assert!(
        read.age < Duration::from_secs(5),
        "it was just changed: {read:?}"
    );

    let second = client
        .set(first.version, b"two", Recipients::None)
        .await
        .expect("it can be changed");
    assert!(
        second.changed && second.version > first.version,
        "versions grow: {second:?} after {first:?}"
    );
    let late = client
        .set(first.version, b"three", Recipients::None)
        .await
        .expect("it can be tried");
    assert!(!late.changed, "the register has changed since");
    assert_eq!(
        (late.version, &*late.value),
        (second.version, &b"two"[..]),
        "a late change returns the present register"
    );

    let other = Client { kind: 2, ..client };
    assert_eq!(
        (other.read().await.version, other.read().await.value.len()),
        (0, 0),
        "registers of two kinds are apart"
    );

    // Many at once.
    let mut won = BTreeSet::new();
    let tries = (0..20_u8).map(|value| {
        let mut change = RegisterRequest::new(other.key, other.kind);
        (change.value, change.ttl) = (Some(vec![value]), LONG);
        store.compare_and_set(change)
    });
    for answer in tries.collect::<Vec<_>>() {
        let register = answer.arrives().await.expect("it can be tried");
        if register.changed {
            won.insert(register.version);
        }
    }
    assert_eq!(won.len(), 1, "one of many concurrent changes wins");

    // Listeners are notified: at the address of the store, or all.
    let ear = Arc::new(Ear::default());
    let listener: Arc<dyn StoreListener> = ear.clone();
    store.listen(Arc::downgrade(&listener) as Weak<dyn StoreListener>);
    let mut version = second.version;
    let mut heard = false;
    // A store that has just begun to listen may miss the first messages.
    for _ in 0..20 {
        let register = client
            .set(version, b"four", Recipients::All)
            .await
            .expect("it can be changed");
        assert!(register.changed, "there is no concurrent change");
        version = register.version;
        if ear
            .told(client.key, version)
            .await
            .is_some_and(|told| told.value == b"four")
        {
            heard = true;
            break;
        }
    }
    assert!(heard, "listeners are notified of changes");
    let alone = client
        .set(version, b"five", Recipients::One(store.address()))
        .await
        .expect("it can be changed");
    let told = ear
        .told(client.key, alone.version)
        .await
        .expect("a listener at the address is notified");
    assert_eq!((&*told.value, told.kind), (&b"five"[..], client.kind));

    // A register is forgotten after its life.
    let short = Client { kind: 3, ..client };
    let mut change = RegisterRequest::new(short.key, short.kind);
    (change.value, change.ttl) = (Some(vec![1]), Duration::from_millis(50));
    store
        .compare_and_set(change)
        .arrives()
        .await
        .expect("a register can be made");
    pass(Duration::from_millis(150)).await;
    assert_eq!(short.read().await.version, 0, "its life is over");
}
