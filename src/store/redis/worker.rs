//! The thread on which a store talks to Redis. It outlives all callers and their runtimes.
//!
//! A call is a job with a channel for its reply, so a caller that is dropped affects no other job.
//! Permits that are given back need no reply. They are gathered for a moment, so that many of them
//! make one call.

use std::collections::HashMap;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::backend::{Backend, TO_ALL};
use super::codec::{self, MOST_RETURNS};
use super::endpoint::Connecting;
use super::heartbeat::Claims;
use super::link::Connections;
use super::pubsub::{self, Incoming};
use super::registers;
use super::script::{Argument, RATES, REGISTER, Script};
use super::sealed_key;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::rng::{Backoff, dice};
use crate::store::in_flight::{StoreListeners, notify};
use crate::store::{Claim, StoreEvent, StoreListener, Task};

/// How long permits that are given back are gathered before they are sent.
const GATHERING: Duration = Duration::from_millis(2);

pub(super) type Jobs = mpsc::UnboundedSender<Job>;

/// A job of the thread.
pub(super) enum Job {
    /// Runs a script once, if its caller still waits.
    Call {
        /// Which script is run.
        about: About,
        key: String,
        call: Vec<Argument>,
        /// When the call was packed.
        packed: Instant,
        reply: oneshot::Sender<Result<Vec<u8>, StoreError>>,
    },
    /// Gives back permits, together with others of the same key.
    GiveBack {
        key: String,
        spec: Arc<LimitSpec>,
        unused: Vec<UnusedPermits>,
    },
    /// Puts a key on hold or releases it, and notifies all processes, even if the caller does not
    /// wait.
    Hold {
        name: String,
        call: Vec<u8>,
        /// The sealed key, for the other processes.
        token: Vec<u8>,
        reply: oneshot::Sender<Result<Vec<u8>, StoreError>>,
    },
    /// Takes in the claim of a holder, which is repeated from then on.
    Claim {
        name: String,
        claim: Claim,
        listener: Arc<dyn StoreListener>,
    },
    /// Runs a task for as long as the thread lives.
    Run(Task),
    /// Completes when all permits that were given back before have arrived.
    Flush(oneshot::Sender<Result<(), StoreError>>),
    /// Completes when Redis replies to a `PING`.
    Ping(oneshot::Sender<Result<(), StoreError>>),
    /// Panics, for tests.
    #[cfg(test)]
    Panic,
}

/// The subject of a script.
#[derive(Clone, Copy, Debug)]
pub(super) enum About {
    /// Permits under limits of rate.
    Rates,
    /// In-flight slots.
    InFlight,
    /// Registers.
    Registers,
}

/// The handle of the thread.
pub(super) struct Thread {
    pub(super) jobs: Jobs,
    /// The connections. The store reads from them whether a call would fail now.
    pub(super) backend: Backend,
}

/// The settings of the thread.
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
}

impl Job {
    /// Completes the job with an error.
    fn refuse(self, error: StoreError) {
        match self {
            Job::Call { reply, .. } | Job::Hold { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Job::Flush(reply) | Job::Ping(reply) => {
                let _ = reply.send(Err(error));
            }
            Job::Claim {
                claim, listener, ..
            } => {
                notify(listener, claim.key, claim.holder, StoreEvent::Failed(error));
            }
            // A permit that is not given back expires. A task that is dropped ends as lost.
            Job::GiveBack { .. } | Job::Run(_) => {}
            #[cfg(test)]
            Job::Panic => {}
        }
    }
}

/// Starts the thread. It ends when the last sender of jobs is dropped and all jobs are done.
pub(super) fn start(setup: Setup) -> Result<Thread, StoreError> {
    let (jobs, incoming) = mpsc::unbounded_channel();
    let backend = Backend::new(
        setup.connecting.clone(),
        setup.store_timeout,
        &setup.channels,
    );
    let thread = Thread {
        jobs,
        backend: backend.clone(),
    };
    std::thread::Builder::new()
        .name("tollgate-redis".into())
        .spawn(move || run(setup, backend, incoming))
        .map_err(|error| StoreError::away(format!("its thread cannot be started: {error}")))?;
    Ok(thread)
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
    let Setup {
        store_timeout,
        instance,
        secret,
        listeners,
        ..
    } = setup;
    let (to_worker, subscription) = mpsc::unbounded_channel();
    let connections = backend.connections();
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
    let kept = backend.clone();
    runtime.spawn(again_after_panics(move || kept.clone().keep()));
    let mut worker = Worker {
        claims: Claims::new(backend.clone(), instance, store_timeout),
        backend,
        connections,
        script: Arc::new(Script::new(RATES)),
        registers: Arc::new(Script::new(REGISTER)),
        returns: Returns::new(),
        release_at: None,
        lost: None,
        subscription,
        listeners,
        secret,
        tasks: JoinSet::new(),
    };
    let mut backoff = Backoff::new();
    // After a panic the worker keeps its state, because only the worker repeats the claims of calls
    // in flight.
    while catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(worker.run(&mut incoming))
    }))
    .is_err()
    {
        runtime.block_on(clock::sleep(backoff.pause()));
        worker.claims.repeat_all();
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

/// Permits that were given back, by key and by the incarnation that granted them.
type Returns = HashMap<(String, u64), (Arc<LimitSpec>, Vec<UnusedPermits>)>;

type Releases = JoinSet<Result<(), StoreError>>;

struct Worker {
    backend: Backend,
    connections: Connections,
    script: Arc<Script>,
    registers: Arc<Script>,
    returns: Returns,
    /// When permits that were given back are sent.
    release_at: Option<Instant>,
    /// Why some of them did not arrive. The next flush returns it.
    lost: Option<StoreError>,
    claims: Claims,
    /// What arrives on the subscription.
    subscription: mpsc::UnboundedReceiver<Incoming>,
    /// The listeners for holds and registers.
    listeners: Arc<StoreListeners>,
    secret: Option<Key>,
    /// The tasks of limiters. Dropped with the thread.
    tasks: JoinSet<()>,
}

impl Worker {
    /// Runs until the last sender of jobs is dropped and all claims are settled.
    async fn run(&mut self, jobs: &mut mpsc::UnboundedReceiver<Job>) {
        let (mut calls, mut releases) = (JoinSet::new(), Releases::new());
        // Whether there is a sender of jobs.
        let mut open = true;
        while open || !self.claims.are_all_settled() {
            if jobs.is_empty() {
                self.claims.complete_flushes();
            }
            let (release_at, claims_at) = (self.release_at, self.claims.due_at());
            tokio::select! {
                job = jobs.recv(), if open => match job {
                    Some(job) => self.take(job, &mut calls, &mut releases),
                    None => open = false,
                },
                () = clock::sleep_until(release_at.unwrap_or_else(clock::now)), if release_at.is_some() => {
                    self.release(&mut releases);
                }
                () = clock::sleep_until(claims_at.unwrap_or_else(clock::now)), if claims_at.is_some() => {
                    self.claims.send_due();
                }
                Some((id, reply)) = self.claims.next_reply() => self.claims.on_reply(id, reply),
                Some(incoming) = self.subscription.recv() => self.on_incoming(incoming),
                // The new connection may lead to another server, or to one that lost its state.
                () = self.connections.next() => self.listeners.notify_all(Key::ALL, &StoreEvent::Reconnected),
                Some(_) = calls.join_next() => {}
                Some(_) = self.tasks.join_next() => {}
                Some(released) = releases.join_next() => self.note(released.unwrap_or(Err(StoreError::Lost))),
            }
        }
        self.release(&mut releases);
        calls.join_all().await;
        releases.join_all().await;
    }

    /// Starts a job.
    fn take(&mut self, job: Job, calls: &mut JoinSet<()>, releases: &mut Releases) {
        match job {
            // The caller was dropped, so the call is not needed.
            Job::Call { reply, .. } if reply.is_closed() => {}
            Job::Call {
                about,
                key,
                call,
                packed,
                reply,
            } => {
                let script = match about {
                    About::Rates => self.script.clone(),
                    About::InFlight => self.claims.script(),
                    About::Registers => self.registers.clone(),
                };
                let backend = self.backend.clone();
                calls.spawn(async move {
                    let ran = match about {
                        About::Rates | About::InFlight => {
                            script.run_by_memory(&backend, &key, call, packed).await
                        }
                        About::Registers => script.run(&backend, &key, &call).await,
                    };
                    // The caller may have been dropped meanwhile. Then the granted permits expire.
                    let _ = reply.send(ran);
                });
            }
            Job::GiveBack { key, spec, unused } => {
                for unused in unused {
                    let of_key = self.returns.entry((key.clone(), unused.incarnation));
                    of_key
                        .or_insert_with(|| (spec.clone(), Vec::new()))
                        .1
                        .push(unused);
                }
                self.release_at
                    .get_or_insert_with(|| clock::after(clock::now(), GATHERING));
            }
            Job::Hold {
                name,
                call,
                token,
                reply,
            } => {
                let (script, backend) = (self.script.clone(), self.backend.clone());
                calls.spawn(async move {
                    let to_all = Argument::Channel(TO_ALL.into());
                    let call = vec![Argument::Is(call), to_all, Argument::Is(token)];
                    let held = script.run(&backend, &name, &call).await;
                    let _ = reply.send(held);
                });
            }
            Job::Claim {
                name,
                claim,
                listener,
            } => {
                self.claims.claim(name, claim, listener);
            }
            Job::Run(task) => drop(self.tasks.spawn(task)),
            Job::Flush(reply) => {
                self.release(releases);
                let (releases, lost) = (std::mem::take(releases), self.lost.take());
                let (all_left, left) = oneshot::channel();
                self.claims.flush(all_left);
                calls.spawn(async move {
                    let flushed: Result<(), StoreError> =
                        releases.join_all().await.into_iter().collect();
                    let left = left.await.unwrap_or(Err(StoreError::Lost));
                    let _ = reply.send(lost.map_or(flushed.and(left), Err));
                });
            }
            #[cfg(test)]
            Job::Panic => panic!("a test asked for it"),
            Job::Ping(reply) => {
                let backend = self.backend.clone();
                calls.spawn(async move {
                    let pong = backend
                        .send_any(redis::cmd("PING"), backend.deadline())
                        .await;
                    let _ = reply.send(pong.map(|_| ()).map_err(|failure| failure.to_error()));
                });
            }
        }
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Subscribed => {
                self.claims.set_subscribed(true);
                self.listeners
                    .notify_all(Key::ALL, &StoreEvent::EventsMissed);
            }
            Incoming::Disconnected => {
                self.claims.set_subscribed(false);
                self.listeners
                    .notify_all(Key::ALL, &StoreEvent::Disconnected);
            }
            Incoming::Message(message) if !self.on_register_message(&message) => {
                self.claims.on_message(&message)
            }
            Incoming::MessageToAll(message) if !self.on_register_message(&message) => {
                if let Ok((event, token)) = codec::read_event(&message)
                    && let Some(key) = sealed_key::read(token, self.secret)
                {
                    self.listeners.notify_all(key, &event);
                }
            }
            Incoming::Message(_) | Incoming::MessageToAll(_) => {}
        }
    }

    /// Notifies the listeners if `message` is about a register. Returns whether it is.
    fn on_register_message(&self, message: &[u8]) -> bool {
        let event = registers::read_event(message, self.secret);
        event
            .map(|(key, event)| self.listeners.notify_all(key, &event))
            .is_some()
    }

    /// Keeps the first error of permits that were given back, for the next flush.
    fn note(&mut self, released: Result<(), StoreError>) {
        self.lost = self.lost.take().or(released.err());
    }

    /// Sends the permits that were given back. If they do not arrive, they expire.
    fn release(&mut self, releases: &mut Releases) {
        self.release_at = None;
        for ((key, _), (spec, unused)) in self.returns.drain() {
            for unused in unused.chunks(MOST_RETURNS) {
                let call = codec::give_back(&spec, unused, dice());
                let (script, backend, key) =
                    (self.script.clone(), self.backend.clone(), key.clone());
                releases.spawn(async move {
                    script
                        .run(&backend, &key, &[Argument::Is(call)])
                        .await
                        .map(|_| ())
                });
            }
        }
    }
}
