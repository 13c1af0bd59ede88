//! The worker of a store: a task that repeats the claims of calls in flight, and passes on the messages of
//! other processes. The store's thread runs it, and the calls, in a runtime of its own. The thread starts with the
//! first call. It ends when the store and its calls have ended and all claims are settled.

use std::future::Future;
use std::sync::Arc;
use std::{io, thread};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;

use super::client::Client;
use super::codec;
use super::heartbeat::Claims;
use super::link::Connections;
use super::pubsub::{self, Incoming};
use super::registers;
use super::sealed_key;
use super::stats::{CallKind, StoreTally};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::locks::lock;
use crate::rng::Backoff;
use crate::store::event::StoreListeners;
use crate::store::{Claim, StoreEvent, StoreListener};

/// What the store tells its worker.
pub(super) enum WorkerOrder {
    /// Takes in the claim of a holder, which is repeated from then on.
    Claim {
        name: String,
        claim: Claim,
        listener: Arc<dyn StoreListener>,
    },
    /// Completes when the claims before it are confirmed.
    Flush(oneshot::Sender<Result<(), StoreError>>),
    /// Panics, for tests.
    #[cfg(test)]
    Panic,
}

pub(super) struct Running {
    pub(super) runtime: Handle,
    pub(super) orders: mpsc::UnboundedSender<WorkerOrder>,
}

/// Starts the thread of a store.
///
/// # Errors
///
/// Fails if the operating system has no thread or no file for it.
pub(super) fn start(client: &Client) -> io::Result<Running> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (orders, incoming_orders) = mpsc::unbounded_channel();
    let (to_worker, subscription) = mpsc::unbounded_channel();
    let (teller, events) = Teller::with_room_for(MOST_UNTOLD);
    let missed = teller.missed.clone();
    let (backend, listeners) = (client.backend.clone(), client.listeners.clone());
    let instance = client.instance;
    let worker = Worker {
        orders: incoming_orders,
        claims: Claims::new(
            backend.clone(),
            client.script(CallKind::InFlight).clone(),
            instance,
        ),
        connections: backend.links.connections(),
        subscription,
        tally: backend.links.tally.clone(),
        teller,
        secret: client.secret,
    };
    let work = async move {
        // They end with the worker.
        let mut others = JoinSet::new();
        others.spawn(tell_listeners(listeners, events, missed));
        if let Some(find_server) = backend.find_server() {
            let backend = backend.clone();
            others.spawn(again_after_panics(move || {
                let to_worker = to_worker.clone();
                pubsub::listen(find_server.clone(), instance, backend.clone(), to_worker)
            }));
        }
        others.spawn(again_after_panics(move || backend.clone().keep()));
        // After a panic the worker keeps its state, because only the worker repeats the claims.
        let worker = Arc::new(Mutex::new(worker));
        again_after_panics(move || {
            let worker = worker.clone();
            async move { worker.lock().await.run().await }
        })
        .await;
    };
    let running = Running {
        runtime: runtime.handle().clone(),
        orders,
    };
    let runtime = Droppable(Some(runtime));
    thread::Builder::new()
        .name("tollgate-redis".into())
        .spawn(move || {
            if let Droppable(Some(runtime)) = &runtime {
                runtime.block_on(work);
            }
        })?;
    Ok(running)
}

/// A runtime whose drop waits for nothing. A host name may still be resolved in it. If the thread cannot be started, a
/// task of another runtime drops it, which must not wait.
struct Droppable(Option<Runtime>);

impl Drop for Droppable {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// The most events that are passed to the listeners at once. One by one, a busy thread passes on fewer than arrive.
const TOLD_AT_ONCE: usize = 64;

/// The most events that wait to be told. Hundreds of processes that hold thousands of keys at once stay below this.
const MOST_UNTOLD: usize = 65_536;

/// Passes events to the task that tells the listeners. If too many wait, further ones are dropped, and the listeners read
/// again what they may have missed, as after a loss of the subscription.
struct Teller {
    events: mpsc::Sender<(Key, StoreEvent)>,
    missed: MissedEvents,
}

/// What the listeners are told in place of the events that were dropped.
type MissedEvents = Arc<std::sync::Mutex<Option<StoreEvent>>>;

impl Teller {
    fn with_room_for(most: usize) -> (Self, mpsc::Receiver<(Key, StoreEvent)>) {
        let (events, told) = mpsc::channel(most);
        let missed = MissedEvents::default();
        (Teller { events, missed }, told)
    }

    /// Tells the listeners of an event about `key`, after the events before.
    fn tell(&self, key: Key, event: StoreEvent) {
        // The task that tells them ends after the worker, so the channel is open.
        if let Err(TrySendError::Full((_, event))) = self.events.try_send((key, event)) {
            let mut missed = lock(&self.missed);
            match event {
                StoreEvent::Reconnected => *missed = Some(event),
                _ => _ = missed.get_or_insert(StoreEvent::EventsMissed),
            }
        }
    }
}

/// Tells the listeners what arrives, one event after the other.
async fn tell_listeners(
    listeners: Arc<StoreListeners>,
    mut events: mpsc::Receiver<(Key, StoreEvent)>,
    missed: MissedEvents,
) {
    let mut some = Vec::new();
    while events.recv_many(&mut some, TOLD_AT_ONCE).await > 0 {
        for (key, event) in some.drain(..) {
            listeners.notify_all(key, &event);
        }
        // What was dropped came after all that had found room.
        if events.is_empty() {
            let missed = lock(&missed).take();
            missed
                .iter()
                .for_each(|event| listeners.notify_all(Key::ALL, event));
        }
        // The replies that have arrived meanwhile come first.
        tokio::task::yield_now().await;
    }
}

/// Runs `task`, and runs it again after a panic.
pub(super) async fn again_after_panics<F>(task: impl Fn() -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let (mut running, mut backoff) = (JoinSet::new(), Backoff::new());
    loop {
        running.spawn(task());
        match running.join_next().await {
            Some(Err(error)) if error.is_panic() => clock::sleep(backoff.pause()).await,
            _ => return,
        }
    }
}

struct Worker {
    orders: mpsc::UnboundedReceiver<WorkerOrder>,
    claims: Claims,
    connections: Connections,
    /// What arrives on the subscription.
    subscription: mpsc::UnboundedReceiver<Incoming>,
    tally: Arc<StoreTally>,
    /// What the listeners for holds and registers have to be told. They are told in a task of their own,
    /// which the next reply of the server does not wait for.
    teller: Teller,
    secret: Option<Key>,
}

impl Worker {
    /// Runs until the last sender of orders is dropped and all claims are settled.
    async fn run(&mut self) {
        // After a panic, their replies may have been lost.
        self.claims.repeat_all();
        // Whether there is a sender of orders.
        let mut open = true;
        while open || !self.claims.are_all_settled() {
            if self.orders.is_empty() {
                self.claims.complete_flushes();
            }
            let due_at = self.claims.due_at();
            tokio::select! {
                order = self.orders.recv(), if open => match order {
                    Some(order) => self.take(order),
                    None => open = false,
                },
                () = clock::sleep_until(due_at.unwrap_or_else(clock::now)), if due_at.is_some() => {
                    self.claims.send_due();
                }
                Some((id, reply)) = self.claims.next_reply() => self.claims.on_reply(id, reply),
                Some(incoming) = self.subscription.recv() => self.on_incoming(incoming),
                // The new connection may lead to another server, or to one that lost its state.
                () = self.connections.next() => self.teller.tell(Key::ALL, StoreEvent::Reconnected),
            }
        }
        // A flush may have waited for the claim that was settled last.
        self.claims.complete_flushes();
    }

    fn take(&mut self, order: WorkerOrder) {
        match order {
            WorkerOrder::Claim {
                name,
                claim,
                listener,
            } => self.claims.claim(name, claim, listener),
            WorkerOrder::Flush(done) => self.claims.flush(done),
            #[cfg(test)]
            WorkerOrder::Panic => panic!("a test asked for it"),
        }
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Subscribed => {
                self.claims.set_subscribed(true);
                self.tally.subscribed(true);
                self.teller.tell(Key::ALL, StoreEvent::EventsMissed);
            }
            Incoming::Disconnected => {
                self.claims.set_subscribed(false);
                self.tally.subscribed(false);
                self.teller.tell(Key::ALL, StoreEvent::Disconnected);
            }
            Incoming::Message(message) if !self.on_register_message(&message) => {
                self.claims.on_message(&message)
            }
            Incoming::MessageToAll(message) if !self.on_register_message(&message) => {
                if let Ok((event, token)) = codec::read_event(&message)
                    && let Some(key) = sealed_key::read(token, self.secret)
                {
                    self.teller.tell(key, event);
                }
            }
            Incoming::Message(_) | Incoming::MessageToAll(_) => {}
        }
    }

    /// Notifies the listeners if `message` is about a register. Returns whether it is.
    fn on_register_message(&self, message: &[u8]) -> bool {
        let event = registers::read_event(message, self.secret);
        event
            .map(|(key, event)| self.teller.tell(key, event))
            .is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::store::HoldState;

    /// Notes what it is told.
    #[derive(Default)]
    struct Notes(std::sync::Mutex<Vec<String>>);

    impl StoreListener for Notes {
        fn on_event(self: Arc<Self>, key: Key, _: u64, event: StoreEvent) {
            let about = if key == Key::ALL { "all" } else { "one" };
            lock(&self.0).push(match event {
                StoreEvent::Hold(_) => format!("{about}: hold"),
                other => format!("{about}: {other:?}"),
            });
        }
    }

    /// Tells a listener of these events, three of which find room. Returns what it is told.
    async fn told(events: Vec<StoreEvent>) -> Vec<String> {
        let (notes, listeners) = (Arc::new(Notes::default()), StoreListeners::default());
        let listener: Arc<dyn StoreListener> = notes.clone();
        listeners.add(Arc::downgrade(&listener) as Weak<_>);
        let (teller, untold) = Teller::with_room_for(3);
        let missed = teller.missed.clone();
        for event in events {
            teller.tell(Key::new("one"), event);
        }
        drop(teller);
        tell_listeners(Arc::new(listeners), untold, missed).await;
        std::mem::take(&mut *lock(&notes.0))
    }

    #[tokio::test]
    async fn listeners_read_again_what_found_no_room() {
        let hold = || StoreEvent::Hold(HoldState::default());
        assert_eq!(told(vec![hold(), hold()]).await, ["one: hold"; 2]);
        let expected = |last: &str| ["one: hold", "one: hold", "one: hold", last].join(", ");
        let many = told((0..100).map(|_| hold()).collect()).await;
        assert_eq!(many.join(", "), expected("all: EventsMissed"));
        // A new connection may lead to a server that has lost its state.
        let mut events: Vec<_> = (0..10).map(|_| hold()).collect();
        events.extend([StoreEvent::Reconnected, hold()]);
        assert_eq!(told(events).await.join(", "), expected("all: Reconnected"));
    }
}
