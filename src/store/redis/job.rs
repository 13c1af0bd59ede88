//! The jobs of a store's thread. A job may have a channel for its reply.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{mpsc, oneshot};

use super::script::Argument;
use super::stats::CallKind;
use crate::error::StoreError;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::store::in_flight::notify;
use crate::store::{Claim, KeyCall, StoreEvent, StoreListener, Task};

/// The sender of jobs.
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
    /// Decides about the permits of several keys in one step, if a caller still waits.
    Joint(Vec<KeyCall>),
    /// Gives back permits, together with others of the same key.
    GiveBack {
        key: String,
        spec: Arc<LimitSpec>,
        unused: Vec<UnusedPermits>,
    },
    /// Changes the hold or the set quota of a key, and notifies all processes, even if the caller does
    /// not wait.
    Announce {
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

impl About {
    /// Returns the kind of calls as which these are counted.
    pub(super) fn kind(self) -> CallKind {
        match self {
            About::Rates => CallKind::Permits,
            About::InFlight => CallKind::InFlight,
            About::Registers => CallKind::Register,
        }
    }
}

impl From<KeyCall> for Job {
    /// Makes the job that runs a call about permits alone.
    fn from(call: KeyCall) -> Self {
        let KeyCall {
            key,
            call,
            packed,
            reply,
        } = call;
        Job::Call {
            about: About::Rates,
            key,
            call: vec![Argument::Is(call)],
            packed,
            reply,
        }
    }
}

impl Job {
    /// Returns the kind of calls as which the job counts if it cannot be run.
    pub(super) fn kind(&self) -> CallKind {
        match self {
            Job::Call { about, .. } => about.kind(),
            Job::Claim { .. } => CallKind::InFlight,
            _ => CallKind::Permits,
        }
    }

    /// Completes the job with an error.
    pub(super) fn refuse(self, error: StoreError) {
        match self {
            Job::Call { reply, .. } | Job::Announce { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Job::Joint(calls) => {
                for KeyCall { reply, .. } in calls {
                    let _ = reply.send(Err(error.clone()));
                }
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
