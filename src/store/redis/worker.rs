//! The work of a store's thread. It runs the jobs of callers, repeats the claims of calls in
//! flight, and passes on the messages of other processes.
//!
//! A call is a job with a channel for its reply, so a caller that is dropped affects no other job.
//! Permits that are given back need no reply. They are gathered for a moment, so that many of them
//! make one call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::backend::{Backend, TO_ALL};
use super::codec::{self, MOST_RETURNS};
use super::heartbeat::Claims;
use super::job::{About, Job};
use super::joint;
use super::link::Connections;
use super::pubsub::Incoming;
use super::registers;
use super::script::{Argument, INLINED_JOINT, INLINED_RATES, INLINED_REGISTER, Script};
use super::sealed_key;
use super::stats::CallKind;
use super::stats::StoreTally;
use super::thread::Setup;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::rng::dice;
use crate::store::StoreEvent;
use crate::store::in_flight::StoreListeners;

/// How long permits that are given back are gathered before they are sent.
const GATHERING: Duration = Duration::from_millis(2);

/// Permits that were given back, by key and by the incarnation that granted them.
type Returns = HashMap<(String, u64), (Arc<LimitSpec>, Vec<UnusedPermits>)>;

type Releases = JoinSet<Result<(), StoreError>>;

/// Tells the listeners what arrives, one event after the other.
pub(super) async fn tell_listeners(
    listeners: Arc<StoreListeners>,
    mut events: mpsc::UnboundedReceiver<(Key, StoreEvent)>,
) {
    while let Some((key, event)) = events.recv().await {
        listeners.notify_all(key, &event);
        // The replies that have arrived meanwhile come first.
        tokio::task::yield_now().await;
    }
}

/// The worker of a thread. It keeps its state after a panic.
pub(super) struct Worker {
    backend: Backend,
    connections: Connections,
    script: Arc<Script>,
    registers: Arc<Script>,
    /// The script about joint requests.
    joint: Arc<Script>,
    /// Whether a script may decide about several keys.
    decides_jointly: Arc<AtomicBool>,
    returns: Returns,
    /// When permits that were given back are sent.
    release_at: Option<Instant>,
    /// Why some of them did not arrive. The next flush returns it.
    lost: Option<StoreError>,
    claims: Claims,
    /// What arrives on the subscription.
    subscription: mpsc::UnboundedReceiver<Incoming>,
    tally: Arc<StoreTally>,
    /// What the listeners for holds and registers have to be told. They are told in a task of their own,
    /// which the next reply of the server does not wait for.
    to_tell: mpsc::UnboundedSender<(Key, StoreEvent)>,
    secret: Option<Key>,
    /// The tasks of limiters. Dropped with the thread.
    tasks: JoinSet<()>,
}

impl Worker {
    /// Makes a worker that sends to `backend` and receives from `subscription`.
    pub(super) fn new(
        setup: Setup,
        backend: Backend,
        subscription: mpsc::UnboundedReceiver<Incoming>,
        to_tell: mpsc::UnboundedSender<(Key, StoreEvent)>,
    ) -> Self {
        Worker {
            claims: Claims::new(backend.clone(), setup.instance, setup.store_timeout),
            connections: backend.connections(),
            backend,
            script: Arc::new(Script::new(&INLINED_RATES, CallKind::Permits)),
            registers: Arc::new(Script::new(&INLINED_REGISTER, CallKind::Register)),
            joint: Arc::new(Script::new(&INLINED_JOINT, CallKind::Joint)),
            decides_jointly: setup.decides_jointly,
            returns: Returns::new(),
            release_at: None,
            lost: None,
            subscription,
            tally: setup.tally,
            to_tell,
            secret: setup.secret,
            tasks: JoinSet::new(),
        }
    }

    /// Repeats all claims, because their replies may have been lost in a panic.
    pub(super) fn repeat_claims(&mut self) {
        self.claims.repeat_all();
    }

    /// Runs until the last sender of jobs is dropped and all claims are settled.
    pub(super) async fn run(&mut self, jobs: &mut mpsc::UnboundedReceiver<Job>) {
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
                () = self.connections.next() => self.tell(Key::ALL, StoreEvent::Reconnected),
                Some(_) = calls.join_next() => {}
                Some(_) = self.tasks.join_next() => {}
                Some(released) = releases.join_next() => self.note(released.unwrap_or(Err(StoreError::Lost))),
            }
        }
        // A flush may have waited for the claim that was settled last.
        self.claims.complete_flushes();
        self.release(&mut releases);
        // A call that panics, as a connection of the user may, is no reason not to wait for the others.
        while calls.join_next().await.is_some() {}
        while releases.join_next().await.is_some() {}
    }

    /// Sends the permits that come back, if some are of `key`, before a call for that key.
    fn release_before(&mut self, key: &str, releases: &mut Releases) {
        if self.returns.keys().any(|(of_key, _)| **of_key == *key) {
            self.release(releases);
        }
    }

    /// Starts a job.
    fn take(&mut self, job: Job, calls: &mut JoinSet<()>, releases: &mut Releases) {
        match &job {
            Job::Call { key, .. } => self.release_before(key, releases),
            Job::Joint(gathered) => {
                for call in gathered {
                    self.release_before(&call.key, releases);
                }
            }
            _ => {}
        }
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
                let (backend, keys) = (self.backend.clone(), [key]);
                calls.spawn(async move {
                    let ran = match about {
                        About::Rates | About::InFlight => {
                            script.run_by_memory(&backend, &keys, call, packed).await
                        }
                        About::Registers => script.run(&backend, &keys, &call).await,
                    };
                    // The caller may have been dropped meanwhile. Then the granted permits expire.
                    let _ = reply.send(ran);
                });
            }
            Job::Joint(mut gathered) => {
                gathered.retain(|call| !call.reply.is_closed());
                if gathered.len() < 2 || !self.decides_jointly.load(Ordering::Relaxed) {
                    for alone in gathered {
                        self.take(alone.into(), calls, releases);
                    }
                    return;
                }
                let scripts = (self.joint.clone(), self.script.clone());
                let (backend, decides) = (self.backend.clone(), self.decides_jointly.clone());
                calls.spawn(joint::run(scripts, backend, decides, gathered));
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
            Job::Announce {
                name,
                call,
                token,
                reply,
            } => {
                let (script, backend) = (self.script.clone(), self.backend.clone());
                calls.spawn(async move {
                    let to_all = Argument::Channel(TO_ALL.into());
                    let call = vec![Argument::Is(call), to_all, Argument::Is(token)];
                    let ran = script.run(&backend, &[name], &call).await;
                    let _ = reply.send(ran);
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
                let (mut releases, mut lost) = (std::mem::take(releases), self.lost.take());
                let (all_left, left) = oneshot::channel();
                self.claims.flush(all_left);
                calls.spawn(async move {
                    while let Some(released) = releases.join_next().await {
                        let error = released.unwrap_or(Err(StoreError::Lost)).err();
                        lost = lost.or(error);
                    }
                    let left = left.await.unwrap_or(Err(StoreError::Lost));
                    let _ = reply.send(lost.map_or(left, Err));
                });
            }
            #[cfg(test)]
            Job::Panic => panic!("a test asked for it"),
            Job::Ping(reply) => {
                let (backend, tally) = (self.backend.clone(), self.tally.clone());
                calls.spawn(async move {
                    let pong = backend
                        .send_any(redis::cmd("PING"), backend.deadline())
                        .await;
                    if pong.is_ok() {
                        tally.in_time();
                    }
                    let _ = reply.send(pong.map(|_| ()).map_err(|failure| failure.to_error()));
                });
            }
        }
    }

    /// Tells the listeners of an event about `key`, after the events before.
    fn tell(&self, key: Key, event: StoreEvent) {
        // The task that tells them ends after the worker.
        let _ = self.to_tell.send((key, event));
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Subscribed => {
                self.claims.set_subscribed(true);
                self.tally.subscribed(true);
                self.tell(Key::ALL, StoreEvent::EventsMissed);
            }
            Incoming::Disconnected => {
                self.claims.set_subscribed(false);
                self.tally.subscribed(false);
                self.tell(Key::ALL, StoreEvent::Disconnected);
            }
            Incoming::Message(message) if !self.on_register_message(&message) => {
                self.claims.on_message(&message)
            }
            Incoming::MessageToAll(message) if !self.on_register_message(&message) => {
                if let Ok((event, token)) = codec::read_event(&message)
                    && let Some(key) = sealed_key::read(token, self.secret)
                {
                    self.tell(key, event);
                }
            }
            Incoming::Message(_) | Incoming::MessageToAll(_) => {}
        }
    }

    /// Notifies the listeners if `message` is about a register. Returns whether it is.
    fn on_register_message(&self, message: &[u8]) -> bool {
        let event = registers::read_event(message, self.secret);
        event.map(|(key, event)| self.tell(key, event)).is_some()
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
                let (script, backend, keys) =
                    (self.script.clone(), self.backend.clone(), [key.clone()]);
                releases.spawn(async move {
                    script
                        .run(&backend, &keys, &[Argument::Is(call)])
                        .await
                        .map(|_| ())
                });
            }
        }
    }
}
