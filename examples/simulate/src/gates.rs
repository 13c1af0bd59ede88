//! Gates as programs use them: each call of a gate is a task, which talks to the rest of the run
//! through events.
//!
//! The run keeps exact virtual time. A gate uses Tokio's timers, which end on whole milliseconds.
//! So a gate sees a moment of the run up to one millisecond late, as in any program.

use std::pin::Pin;
use std::sync::Arc;

use http::Response;
use tokio::sync::{mpsc, oneshot};

use super::store::SharedStore;
use tollgate::__lab::Flight;
use tollgate::Limited;

/// Makes one call through a gate. The call sends its requests through the [`Wire`].
pub(super) type Gate = Box<dyn Fn(Wire) -> GateFuture>;

pub(super) type GateFuture = Pin<Box<dyn Future<Output = Result<(), Limited>> + Send>>;

/// The connection of one call to the server of the scenario.
#[derive(Debug)]
pub struct Wire {
    caller: usize,
    path: String,
    events: mpsc::UnboundedSender<GateEvent>,
}

impl Wire {
    /// Returns the path of the request.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Sends the request of this call, and returns the server's response once it is back.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the request stays in flight and the call is over, whatever its
    /// gate does then. The call may not send again before the response is back.
    ///
    /// # Panics
    ///
    /// The run panics if a call sends again while its request is in flight.
    pub async fn send(&mut self) -> Response<()> {
        let (reply, answer) = oneshot::channel();
        let _ = self.events.send(GateEvent::Sent(self.caller, reply));
        match answer.await {
            Ok(response) => response,
            // The run is over, and every call with it.
            Err(_) => std::future::pending().await,
        }
    }
}

/// An event of a call at a gate.
#[derive(Debug)]
pub(super) enum GateEvent {
    /// A caller sends its request.
    Sent(usize, Reply),
    /// The call of a caller has left its gate.
    Ended(usize, Result<(), Limited>),
}

/// Takes the server's response to the call that waits for it.
pub(super) type Reply = oneshot::Sender<Response<()>>;

/// The receiver of the response to a request in flight.
#[derive(Debug)]
pub(super) enum Ticket {
    /// The queue of its process.
    Flight(Flight),
    /// The call at its gate.
    Reply(Reply),
}

/// The gate of a process.
pub(super) struct GateHandle {
    gate: Gate,
    events: mpsc::UnboundedSender<GateEvent>,
}

impl GateHandle {
    /// Starts a call of `caller`.
    pub(super) fn call(&self, caller: usize, path: String) {
        let events = self.events.clone();
        let call = (self.gate)(Wire {
            caller,
            path,
            events: events.clone(),
        });
        drop(tokio::spawn(async move {
            let ended = call.await;
            let _ = events.send(GateEvent::Ended(caller, ended));
        }));
    }
}

/// What the gates of a run share.
pub(super) struct RunContext {
    pub(super) events: mpsc::UnboundedSender<GateEvent>,
    pub(super) store: Arc<SharedStore>,
}

impl RunContext {
    pub(super) fn handle(&self, gate: Gate) -> GateHandle {
        GateHandle {
            gate,
            events: self.events.clone(),
        }
    }
}
