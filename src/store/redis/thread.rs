//! The thread on which a store talks to Redis. It outlives all callers and their runtimes.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::backend::Backend;
use super::codec::Garbled;
use super::endpoint::Connecting;
use super::failure::RedisFailure;
use super::job::{About, Job, Jobs};
use super::pubsub;
use super::script::Argument;
use super::stats::{CallKind, StoreTally};
use super::worker::{Worker, tell_listeners};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::locks::{read, write};
use crate::rng::Backoff;
use crate::store::in_flight::StoreListeners;
use crate::store::{JointCall, KeyCall};

/// The thread of a store. It starts when the first job is sent, and again when a job is sent and it
/// has ended.
pub(super) struct Thread {
    pub(super) setup: Setup,
    /// The thread that was started last. It may have ended.
    running: RwLock<Option<Running>>,
}

/// The reply to a job.
pub(super) type ReplyFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A thread that was started.
struct Running {
    jobs: Jobs,
    /// The connections. The store reads from them whether a call would fail now.
    backend: Backend,
}

/// What a thread is started with.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) connecting: Connecting,
    pub(super) store_timeout: Duration,
    /// The prefix of channel names.
    pub(super) channels: String,
    /// The number of this store, unique in the fleet.
    pub(super) instance: u64,
    pub(super) secret: Option<Key>,
    /// The listeners for holds and registers. The store adds to them.
    pub(super) listeners: Arc<StoreListeners>,
    /// Whether a script may decide about several keys. Not in a cluster, where each key may be on
    /// another server.
    pub(super) decides_jointly: Arc<AtomicBool>,
    /// The counts of the store.
    pub(super) tally: Arc<StoreTally>,
}

impl Thread {
    /// Makes the handle of a thread. Starts nothing.
    pub(super) fn new(setup: Setup) -> Self {
        Thread {
            setup,
            running: RwLock::new(None),
        }
    }

    /// Sends a job to the thread. Starts the thread if there is none.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the thread cannot be started.
    pub(super) fn send(&self, mut job: Job) -> Result<(), StoreError> {
        if let Some(running) = &*read(&self.running) {
            match running.jobs.send(job) {
                Ok(()) => return Ok(()),
                // The thread has ended, and did not take the job.
                Err(unsent) => job = unsent.0,
            }
        }
        let mut current = write(&self.running);
        // Another caller may have started it meanwhile.
        let running = match current.take() {
            Some(running) if !running.jobs.is_closed() => running,
            _ => start(self.setup.clone()).inspect_err(|_| self.setup.tally.late(job.kind()))?,
        };
        current
            .insert(running)
            .jobs
            .send(job)
            .map_err(|_| StoreError::Lost)
    }

    /// Returns whether the store has its connections. `None` if it has not tried to connect.
    pub(super) fn is_up(&self) -> Option<bool> {
        let current = read(&self.running);
        current.as_ref()?.backend.is_up()
    }

    /// Returns why a call about `key` would fail now, if that is known without a call.
    fn down(&self, key: &str) -> Option<StoreError> {
        let current = read(&self.running);
        current
            .as_ref()
            .and_then(|running| running.backend.down(key))
    }

    /// Sends a job that has a reply.
    pub(super) fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Job,
    ) -> ReplyFuture<T> {
        let (reply, replied) = oneshot::channel();
        let sent = self.send(job(reply));
        Box::pin(async move {
            sent?;
            replied.await.unwrap_or(Err(StoreError::Lost))
        })
    }

    /// Runs a script, and reads its reply.
    pub(super) fn call<T: Send + 'static>(
        &self,
        about: About,
        key: String,
        call: Vec<Argument>,
        read: impl FnOnce(&[u8]) -> Result<T, Garbled> + Send + 'static,
    ) -> ReplyFuture<T> {
        let kind = about.kind();
        if let Some(away) = self.down(&key) {
            self.setup.tally.late(kind);
            return Box::pin(std::future::ready(Err(away)));
        }
        let packed = clock::now();
        let reply = self.submit(|reply| Job::Call {
            about,
            key,
            call,
            packed,
            reply,
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
        if let Some(away) = self.down(&key) {
            self.setup.tally.late(CallKind::Permits);
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
        let put = if self.setup.decides_jointly.load(Ordering::Relaxed) {
            let thread = self.clone();
            joint.put(self.setup.instance, call, move |calls| {
                // If the thread cannot be started, the calls are lost.
                let _ = thread.send(Job::Joint(calls));
            })
        } else {
            Err(call)
        };
        let sent = put.or_else(|alone| self.send(alone.into()));
        let reply = async move {
            sent?;
            replied.await.unwrap_or(Err(StoreError::Lost))
        };
        self.read(CallKind::Permits, packed, reply, read)
    }

    /// Reads the reply to a call that was packed at `packed`.
    fn read<T: Send + 'static>(
        &self,
        kind: CallKind,
        packed: Instant,
        reply: impl Future<Output = Result<Vec<u8>, StoreError>> + Send + 'static,
        read: impl FnOnce(&[u8]) -> Result<T, Garbled> + Send + 'static,
    ) -> ReplyFuture<T> {
        let store_timeout = self.setup.store_timeout;
        let tally = self.setup.tally.clone();
        Box::pin(async move {
            let reply = reply.await.inspect_err(|error| {
                // The thread has failed. A run counts all other errors.
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
}

/// Starts the thread. It ends when the last sender of jobs is dropped and all jobs are done.
fn start(setup: Setup) -> Result<Running, StoreError> {
    let (jobs, incoming) = mpsc::unbounded_channel();
    let backend = Backend::new(
        setup.connecting.clone(),
        setup.store_timeout,
        &setup.channels,
        setup.tally.clone(),
    );
    let running = Running {
        jobs,
        backend: backend.clone(),
    };
    std::thread::Builder::new()
        .name("tollgate-redis".into())
        .spawn(move || run(setup, backend, incoming))
        .map_err(|error| StoreError::away(format!("its thread cannot be started: {error}")))?;
    Ok(running)
}

/// Runs the thread.
fn run(setup: Setup, backend: Backend, mut incoming: mpsc::UnboundedReceiver<Job>) {
    // The runtime is made here and not in `start`. If the thread could not be started, `start`
    // would drop the runtime in an asynchronous caller, which is not allowed.
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            // The next job starts another thread.
            incoming.close();
            while let Ok(job) = incoming.try_recv() {
                job.refuse(StoreError::away(format!(
                    "its thread has no runtime: {error}"
                )));
            }
            return;
        }
    };
    let instance = setup.instance;
    let (to_worker, subscription) = mpsc::unbounded_channel();
    let (to_tell, events) = mpsc::unbounded_channel();
    // A panic of a listener does not end it.
    runtime.spawn(tell_listeners(setup.listeners.clone(), events));
    let mut worker = Worker::new(setup, backend.clone(), subscription, to_tell);
    if let Some(find_server) = backend.find_server() {
        let backend = backend.clone();
        runtime.spawn(again_after_panics(move || {
            pubsub::listen(
                find_server.clone(),
                instance,
                backend.clone(),
                to_worker.clone(),
            )
        }));
    }
    runtime.spawn(again_after_panics(move || backend.clone().keep()));
    let mut backoff = Backoff::new();
    // After a panic the worker keeps its state, because only the worker repeats the claims of calls
    // in flight.
    while catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(worker.run(&mut incoming))
    }))
    .is_err()
    {
        runtime.block_on(clock::sleep(backoff.pause()));
        worker.repeat_claims();
    }
    // A host name may still be resolved in a blocking task, for which the thread does not wait.
    runtime.shutdown_background();
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
