//! Gates as they are, in a runtime whose time is virtual: a task for each call, and one that is the rest of the world.
//!
//! The world is the fleet's, with the moments it is told; a gate has Tokio's timers, which end on whole milliseconds. So
//! a moment of the world is seen by gates up to a millisecond later, as in any program.

pub(super) mod known;

use std::cmp::Reverse;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use http::Response;
use tokio::sync::{mpsc, oneshot};

use super::caller::Ticket;
use super::fleet::{Event, Fleet, Process};
use super::store::SharedStore;
use super::{Metrics, RunError, Scenario, Strategy, Trace};
use crate::clock::{self, Timer};
use crate::error::Limited;
use crate::rng::{self, Dice};

/// What a call does at a gate, with its way to the server.
pub(super) type Gate = Box<dyn Fn(Wire) -> GateFuture>;

pub(super) type GateFuture = Pin<Box<dyn Future<Output = Result<(), Limited>> + Send>>;

/// The way of one call to the server of the scenario.
#[derive(Debug)]
pub struct Wire {
    caller: usize,
    events: mpsc::UnboundedSender<GateEvent>,
}

impl Wire {
    /// Sends the request of this call, and answers what the server says when it is back.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the request stays on its way. The call is over then, whatever its gate still does: it may not send again
    /// before the answer is there.
    ///
    /// # Panics
    ///
    /// The laboratory does, where a call sends again while its request is on its way.
    pub async fn send(&mut self) -> Response<()> {
        let (reply, answer) = oneshot::channel();
        let _ = self.events.send(GateEvent::Sent(self.caller, reply));
        match answer.await {
            Ok(response) => response,
            // The run is over, and with it every call.
            Err(_) => std::future::pending().await,
        }
    }
}

/// What the world hears of calls.
#[derive(Debug)]
pub(super) enum GateEvent {
    /// A caller sends its request.
    Sent(usize, Reply),
    /// A call has left its gate.
    Ended(usize, Result<(), Limited>),
}

/// To whom the server's answer goes.
pub(super) type Reply = oneshot::Sender<Response<()>>;

/// The gate of a process, and where its calls are heard of.
pub(super) struct GateHandle {
    gate: Gate,
    events: mpsc::UnboundedSender<GateEvent>,
}

impl GateHandle {
    fn call(&self, caller: usize) {
        let events = self.events.clone();
        let passage = (self.gate)(Wire { caller, events: events.clone() });
        drop(tokio::spawn(async move {
            let ended = passage.await;
            let _ = events.send(GateEvent::Ended(caller, ended));
        }));
    }
}

/// What the gates of a run share.
pub(super) struct RunContext {
    events: mpsc::UnboundedSender<GateEvent>,
    pub(super) store: Arc<SharedStore>,
}

impl RunContext {
    pub(super) fn gate(&self, gate: Gate) -> GateHandle {
        GateHandle { gate, events: self.events.clone() }
    }
}

/// Runs a fleet of which some processes have gates. `cast` has the strategy of each group.
///
/// The run has a thread of its own, so what that is told of time and dice ends with it, and it may be called from a
/// runtime.
pub(super) fn run(
    scenario: &Scenario,
    strategies: &[Strategy],
    seed: u64,
    trace: Option<Trace>,
) -> Result<(Metrics, Option<Trace>), RunError> {
    let run = || {
        // Not those of the fleet, which rolls its own.
        rng::laboratory::begin(Dice::seeded(!seed));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("it needs nothing of the system").block_on(async {
            clock::laboratory::begin(clock::now());
            let (events, heard) = mpsc::unbounded_channel();
            let context = RunContext { events, store: Arc::new(SharedStore::new(&scenario.store)) };
            let mut fleet = Fleet::new(scenario, strategies, seed, Some(context))?;
            fleet.trace = trace;
            let metrics = fleet.play(heard).await;
            Ok((metrics, fleet.trace.take()))
        })
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| resume_unwind(panic)))
}

impl Fleet<'_> {
    /// Lets everything happen, and the gates do their part.
    async fn play(&mut self, mut heard: mpsc::UnboundedReceiver<GateEvent>) -> Metrics {
        let end = self.end();
        let mut timer = Timer::at(self.origin);
        while self.clear.is_none() {
            let now = clock::now().saturating_duration_since(self.origin);
            let next = self.events.peek().map_or(end, |Reverse((at, ..))| (*at).min(end));
            if next >= end && now >= end {
                break;
            }
            if next <= now {
                self.happen_next();
                continue;
            }
            timer.set(self.origin + next);
            // What is due in the world comes before what gates have done since.
            let event = std::future::poll_fn(|cx| match timer.poll(cx) {
                Poll::Ready(()) => Poll::Ready(None),
                Poll::Pending => heard.poll_recv(cx),
            });
            if let Some(event) = event.await {
                self.now = clock::now().saturating_duration_since(self.origin);
                match event {
                    GateEvent::Sent(caller, reply) => self.send(caller, Ticket::Reply(reply)),
                    GateEvent::Ended(caller, ended) => self.left(caller, &ended),
                }
            }
        }
        self.now = self.now.min(end);
        self.metrics()
    }

    /// A call comes to the gate of its process, for the first time or again.
    pub(super) fn enter(&mut self, index: usize) {
        let caller = &mut self.callers[index];
        caller.call.as_mut().expect("it has called").passed = None;
        let Process::Gate(gate) = &self.processes[caller.process] else { unreachable!("it has a gate") };
        gate.call(index);
    }

    /// The answer of one is there.
    pub(super) fn reply(&mut self, index: usize, reply: Reply, response: Response<()>) {
        if reply.send(response).is_err() {
            // Its gate did not wait for it.
            self.left(index, &Ok(()));
        }
    }

    /// A call has left its gate.
    fn left(&mut self, index: usize, ended: &Result<(), Limited>) {
        const PAUSE: Duration = Duration::from_secs(1);
        let call = self.callers[index].call.as_ref().expect("it has called");
        if call.on_way.is_some() {
            // It is over when the answer is there.
            return;
        }
        let pause = match (call.passed, ended) {
            (Some(true), _) => return self.succeeded(index),
            (Some(false), _) => Duration::ZERO,
            (None, Err(limited)) => limited.retry_after().filter(|wait| !wait.is_zero()).unwrap_or(PAUSE),
            (None, Ok(())) => PAUSE,
        };
        self.plan(self.now + pause, Event::Again(index));
    }
}
