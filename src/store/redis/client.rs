//! The client: it sends the calls of a store to Redis. Each call is a task on the store's own thread, so it
//! goes on when its caller, or the caller's runtime, ends.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::backend::{Backend, TO_ALL};
use super::codec::Garbled;
use super::failure::RedisFailure;
use super::joint;
use super::returns::{GATHERING, ReturnedPermits};
use super::script::{Argument, Script};
use super::stats::CallKind;
use super::worker::{self, Running, WorkerOrder};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::locks::lock;
use crate::store::event::StoreListeners;
use crate::store::{JointCall, KeyCall};

/// What a store has, and each of its calls until it ends. When the last of them is dropped, the worker
/// ends, and with it the thread and the connections.
pub(super) struct Client {
    pub(super) backend: Backend,
    /// The number of this store, unique in the fleet.
    pub(super) instance: u64,
    pub(super) secret: Option<Key>,
    /// The listeners for holds and registers. The store adds to them.
    pub(super) listeners: Arc<StoreListeners>,
    /// Whether a script may decide about several keys. Not in a cluster, where each key may be on
    /// another server.
    pub(super) decides_jointly: AtomicBool,
    /// The scripts, by the kind of calls that they are for.
    scripts: [Arc<Script>; CallKind::ALL.len()],
    returns: Mutex<ReturnedPermits>,
    running: OnceLock<Running>,
    /// Locked by the call that starts the thread.
    starting: Mutex<()>,
}

pub(super) type ReplyFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

impl Client {
    /// Makes a client of the servers of `backend`. Starts nothing.
    pub(super) fn new(
        backend: Backend,
        instance: u64,
        secret: Option<Key>,
        decides_jointly: bool,
    ) -> Self {
        Client {
            backend,
            instance,
            secret,
            listeners: Arc::default(),
            decides_jointly: AtomicBool::new(decides_jointly),
            scripts: CallKind::ALL.map(|kind| Arc::new(Script::new(kind))),
            returns: Mutex::default(),
            running: OnceLock::new(),
            starting: Mutex::default(),
        }
    }

    /// Returns the thread, and starts it for the first call of the store, which is of this kind.
    ///
    /// # Errors
    ///
    /// [`StoreError::Away`] if the thread cannot be started. The next call tries again.
    fn running(&self, kind: CallKind) -> Result<&Running, StoreError> {
        if let Some(running) = self.running.get() {
            return Ok(running);
        }
        let _starting = lock(&self.starting);
        // Another caller may have started it meanwhile.
        if let Some(running) = self.running.get() {
            return Ok(running);
        }
        let running = worker::start(self).map_err(|error| {
            self.backend.links.tally.late(kind);
            StoreError::away(format!("its thread cannot be started: {error}"))
        })?;
        Ok(self.running.get_or_init(|| running))
    }

    /// Returns the runtime of the thread.
    ///
    /// # Errors
    ///
    /// Fails as [`running`](Client::running) does.
    pub(super) fn runtime(&self) -> Result<&Handle, StoreError> {
        Ok(&self.running(CallKind::Permits)?.runtime)
    }

    /// Runs a call of this kind to its end, even if its caller does not wait for it.
    fn spawn<T: Send + 'static>(
        &self,
        kind: CallKind,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> ReplyFuture<T> {
        let running = self.running(kind);
        let task = running.map(|running| running.runtime.spawn(call));
        // A task that panics, as a connection of the user may, has no reply.
        Box::pin(async move { task?.await.unwrap_or(Err(StoreError::Lost)) })
    }

    /// Gives the worker an order, which fails as a call of this kind.
    ///
    /// # Errors
    ///
    /// Fails as [`running`](Client::running) does.
    pub(super) fn order(&self, kind: CallKind, order: WorkerOrder) -> Result<(), StoreError> {
        let running = self.running(kind)?;
        running.orders.send(order).map_err(|_| StoreError::Lost)
    }

    pub(super) fn script(&self, kind: CallKind) -> &Arc<Script> {
        &self.scripts[kind as usize]
    }

    /// Returns why a call of this kind about `key` would fail now, if that is known without a call.
    fn down(&self, kind: CallKind, key: &str) -> Option<StoreError> {
        if let Err(error) = self.running(kind) {
            return Some(error);
        }
        let away = self.backend.down(key)?;
        self.backend.links.tally.late(kind);
        Some(away)
    }

    /// Runs a script about `key`, and reads its reply with `read`.
    pub(super) fn call<T: Send + 'static>(
        self: &Arc<Self>,
        kind: CallKind,
        key: String,
        call: Vec<Argument>,
        read: impl FnOnce(&[u8]) -> Result<T, Garbled> + Send + 'static,
    ) -> ReplyFuture<T> {
        if let Some(away) = self.down(kind, &key) {
            return Box::pin(std::future::ready(Err(away)));
        }
        let packed = clock::now();
        self.send_returns_of(&key);
        let (client, keys) = (self.clone(), [key]);
        let reply = self.spawn(kind, async move {
            let (backend, script) = (&client.backend, client.script(kind));
            match kind {
                // The script about registers reads no clock.
                CallKind::Register => {
                    script
                        .run(backend, &keys, &call, backend.links.deadline())
                        .await
                }
                _ => script.run_by_memory(backend, &keys, call, packed).await,
            }
        });
        self.read(kind, packed, reply, read)
    }

    /// Puts a call about the permits of one key to the other calls of a joint request, and reads its
    /// reply. If it cannot be decided together with them, runs the script for it alone.
    pub(super) fn call_jointly<T: Send + 'static>(
        self: &Arc<Self>,
        joint: &JointCall,
        key: String,
        call: Vec<u8>,
        read: impl FnOnce(&[u8]) -> Result<T, Garbled> + Send + 'static,
    ) -> ReplyFuture<T> {
        const KIND: CallKind = CallKind::Permits;

        if let Some(away) = self.down(KIND, &key) {
            return Box::pin(std::future::ready(Err(away)));
        }
        let packed = clock::now();
        let (reply, replied) = oneshot::channel();
        let call = KeyCall {
            key,
            call,
            packed,
            reply,
        };
        let put = if self.decides_jointly.load(Ordering::Relaxed) {
            let client = self.clone();
            joint.put(self.instance, call, move |calls| client.send_jointly(calls))
        } else {
            Err(call)
        };
        if let Err(KeyCall { key, call, .. }) = put {
            return self.call(KIND, key, vec![Argument::Is(call)], read);
        }
        let reply = async move { replied.await.unwrap_or(Err(StoreError::Lost)) };
        self.read(KIND, packed, reply, read)
    }

    /// Sends the calls of a joint request as one. If that fails before they are sent, they are lost.
    fn send_jointly(self: &Arc<Self>, calls: Vec<KeyCall>) {
        calls
            .iter()
            .for_each(|call| self.send_returns_of(&call.key));
        let client = self.clone();
        let run = async move {
            joint::run(&client, calls).await;
            Ok(())
        };
        // Each call has a channel for its reply.
        drop(self.spawn(CallKind::Permits, run));
    }

    /// Reads the reply to a call that was packed at `packed`.
    fn read<T: Send + 'static>(
        &self,
        kind: CallKind,
        packed: Instant,
        reply: impl Future<Output = Result<Vec<u8>, StoreError>> + Send + 'static,
        read: impl FnOnce(&[u8]) -> Result<T, Garbled> + Send + 'static,
    ) -> ReplyFuture<T> {
        let (store_timeout, tally) = (
            self.backend.links.store_timeout,
            self.backend.links.tally.clone(),
        );
        Box::pin(async move {
            let reply = reply.await.inspect_err(|error| {
                // The task has panicked. A run counts all other errors.
                if matches!(error, StoreError::Lost) {
                    tally.late(kind);
                }
            })?;
            // The process or the call was stopped meanwhile. The script assumed that the call was
            // recent, so its decision may be wrong by the time that has passed.
            if clock::now().saturating_duration_since(packed) > store_timeout {
                tally.late(kind);
                return Err(RedisFailure::silent(store_timeout).to_error());
            }
            match read(&reply) {
                Ok(read) => {
                    tally.in_time();
                    Ok(read)
                }
                Err(garbled) => {
                    tally.of_no_use(kind);
                    Err(StoreError::failed(garbled))
                }
            }
        })
    }

    /// Changes the hold or the set quota of the key `name`, and notifies all processes. `token` is the
    /// sealed key, for them.
    pub(super) fn announce(
        self: &Arc<Self>,
        name: String,
        call: Vec<u8>,
        token: Vec<u8>,
    ) -> ReplyFuture<Vec<u8>> {
        let client = self.clone();
        self.spawn(CallKind::Permits, async move {
            let to_all = Argument::Channel(TO_ALL.into());
            let call = [Argument::Is(call), to_all, Argument::Is(token)];
            client.run_once(&[name], &call).await
        })
    }

    /// Runs the script about permits once. The `call` assumes no moment at which it is decided.
    pub(super) async fn run_once(
        &self,
        keys: &[String],
        call: &[Argument],
    ) -> Result<Vec<u8>, StoreError> {
        let (script, backend) = (self.script(CallKind::Permits), &self.backend);
        let reply = script
            .run(backend, keys, call, backend.links.deadline())
            .await?;
        backend.links.tally.in_time();
        Ok(reply)
    }

    /// Completes when Redis replies to a `PING`.
    pub(super) fn ping(self: &Arc<Self>) -> ReplyFuture<()> {
        let client = self.clone();
        self.spawn(CallKind::Permits, async move {
            let backend = &client.backend;
            let pong = backend.send_any(redis::cmd("PING"), backend.links.deadline());
            pong.await?;
            backend.links.tally.in_time();
            Ok(())
        })
    }

    /// Gives back permits, together with others of this moment. If the thread cannot be started, they are
    /// not sent, and expire.
    pub(super) fn give_back(
        self: &Arc<Self>,
        key: String,
        spec: &Arc<LimitSpec>,
        unused: &[UnusedPermits],
    ) {
        if self.runtime().is_err() {
            return;
        }
        let is_first = lock(&self.returns).gather(key, spec, unused);
        if is_first {
            let client = self.clone();
            let send = async move {
                clock::sleep_until(clock::after(clock::now(), GATHERING)).await;
                lock(&client.returns).send_all(&client);
                Ok(())
            };
            drop(self.spawn(CallKind::Permits, send));
        }
    }

    /// Sends the permits of `key` that were given back. A call for the key that is sent next arrives after them.
    fn send_returns_of(self: &Arc<Self>, key: &str) {
        lock(&self.returns).send_of(key, self);
    }

    /// Completes when all permits that were given back before have arrived, and all claims.
    pub(super) fn flush(self: &Arc<Self>) -> ReplyFuture<()> {
        let (done, claimed) = oneshot::channel();
        if let Err(error) = self.order(CallKind::Permits, WorkerOrder::Flush(done)) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let mut returns = lock(&self.returns);
        returns.send_all(self);
        let returned = returns.arrive();
        drop(returns);
        let client = self.clone();
        self.spawn(CallKind::Permits, async move {
            let returned = returned.await;
            let claimed = claimed.await.unwrap_or(Err(StoreError::Lost));
            drop(client);
            returned.and(claimed)
        })
    }
}
