//! A process of the fleet, which decides when the requests of its callers leave.

use std::time::Instant;

use super::brief::Brief;
use super::error::RunError;
use super::gates::{GateHandle, RunContext};
use super::queue_process::QueueProcess;
use super::strategy::{Make, Strategy};
use tollgate::__lab::Dice;

/// The queue or the gate that the callers of a process share.
pub(super) enum Process {
    Queue(QueueProcess),
    Gate(GateHandle),
}

impl Process {
    /// Creates a process with a strategy. A gate needs a `context`.
    pub(super) fn new(
        strategy: &Strategy,
        brief: &Brief,
        dice: Dice,
        origin: Instant,
        context: Option<&RunContext>,
    ) -> Result<Self, RunError> {
        match strategy.make() {
            Make::Pace(make) => Ok(Process::Queue(QueueProcess::new(make(brief), dice, origin))),
            Make::Gate(make) => {
                let context = context.expect("a run with gates has a context");
                let gate = make(brief, context.store.link());
                let gate = gate.map_err(|error| RunError::gate(strategy.name(), error))?;
                Ok(Process::Gate(context.handle(gate)))
            }
        }
    }

    /// Returns the queue, for an event that only a queue has.
    pub(super) fn queue(&mut self) -> &mut QueueProcess {
        match self {
            Process::Queue(queue) => queue,
            Process::Gate(_) => unreachable!("a gate has timers of its own"),
        }
    }

    /// Returns the gate, for an event that only a gate has.
    pub(super) fn gate(&self) -> &GateHandle {
        match self {
            Process::Gate(gate) => gate,
            Process::Queue(_) => unreachable!("a queue keeps its refused requests"),
        }
    }
}
