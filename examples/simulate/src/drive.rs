//! Runs a fleet to its end: event by event, or in a runtime with virtual time if any process has a
//! gate.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::task::Poll;
use std::thread;

use tokio::sync::mpsc;

use super::clock::{self, Timer};
use super::error::RunError;
use super::fleet::Fleet;
use super::gates::{GateEvent, RunContext, Ticket};
use super::metrics::Metrics;
use super::scenario::{Group, Scenario};
use super::store::SharedStore;
use super::strategy::{Make, Strategy};
use super::trace::Trace;
use tollgate::__lab;
use tollgate::__lab::Dice;

/// Runs `scenario`. Groups without a strategy of their own use `strategy`.
///
/// # Errors
///
/// [`RunError`] if a group names a strategy that does not come with tollgate, or a gate cannot be
/// built.
pub fn run(scenario: &Scenario, strategy: &Strategy, seed: u64) -> Result<Metrics, RunError> {
    Ok(run_with(scenario, strategy, seed, None)?.0)
}

/// Runs `scenario` as [`run`] does, and returns what happened when, too.
///
/// # Errors
///
/// As [`run`].
pub fn trace(
    scenario: &Scenario,
    strategy: &Strategy,
    seed: u64,
) -> Result<(Metrics, Trace), RunError> {
    let (metrics, trace) = run_with(scenario, strategy, seed, Some(Trace::default()))?;
    Ok((metrics, trace.unwrap_or_default()))
}

fn run_with(
    scenario: &Scenario,
    strategy: &Strategy,
    seed: u64,
    trace: Option<Trace>,
) -> Result<(Metrics, Option<Trace>), RunError> {
    let of_group = |group: &Group| match &group.strategy {
        Some(name) => Strategy::named(name).ok_or_else(|| RunError::UnknownStrategy(name.clone())),
        None => Ok(strategy.clone()),
    };
    let strategies = scenario
        .fleet
        .iter()
        .map(of_group)
        .collect::<Result<Vec<_>, _>>()?;
    if strategies
        .iter()
        .any(|strategy| matches!(strategy.make(), Make::Gate(_)))
    {
        return run_gates(scenario, &strategies, seed, trace);
    }
    let mut fleet = Fleet::new(scenario, &strategies, seed, None)?;
    fleet.trace = trace;
    let end = fleet.end();
    while fleet.clear.is_none() && fleet.schedule.next_at().is_some_and(|at| at <= end) {
        fleet.happen_next();
    }
    Ok((fleet.metrics(), fleet.trace.take()))
}

/// Runs a fleet in which some processes have gates. `strategies` has the strategy of each group.
///
/// The run has a thread of its own. Its virtual time and its random numbers end with the thread,
/// and it may be called from within a runtime.
fn run_gates(
    scenario: &Scenario,
    strategies: &[Strategy],
    seed: u64,
    trace: Option<Trace>,
) -> Result<(Metrics, Option<Trace>), RunError> {
    let run = || {
        // The fleet has random numbers of its own, so that gates do not change them.
        __lab::begin_dice(Dice::seeded(!seed));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime
            .expect("a paused runtime needs no system resource")
            .block_on(async {
                __lab::begin_clock(clock::now());
                let (sender, events) = mpsc::unbounded_channel();
                let context = RunContext {
                    events: sender,
                    store: Arc::new(SharedStore::new(&scenario.store)),
                };
                let mut fleet = Fleet::new(scenario, strategies, seed, Some(context))?;
                fleet.trace = trace;
                let metrics = drive(&mut fleet, events).await;
                Ok((metrics, fleet.trace.take()))
            })
    };
    thread::scope(|scope| {
        scope
            .spawn(run)
            .join()
            .unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Takes the events of the fleet and of its gates in the order of time. At the same moment those of
/// the fleet come first.
async fn drive(fleet: &mut Fleet<'_>, mut events: mpsc::UnboundedReceiver<GateEvent>) -> Metrics {
    let end = fleet.end();
    let mut timer = Timer::at(fleet.origin);
    while fleet.clear.is_none() {
        let now = clock::now().saturating_duration_since(fleet.origin);
        let next = fleet.schedule.next_at().map_or(end, |at| at.min(end));
        if next >= end && now >= end {
            break;
        }
        if next <= now {
            fleet.happen_next();
            continue;
        }
        timer.set(fleet.origin + next);
        let event = std::future::poll_fn(|cx| match timer.poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => events.poll_recv(cx),
        });
        if let Some(event) = event.await {
            fleet.now = clock::now().saturating_duration_since(fleet.origin);
            match event {
                GateEvent::Sent(caller, reply) => fleet.send(caller, Ticket::Reply(reply)),
                GateEvent::Ended(caller, ended) => fleet.left(caller, &ended),
            }
        }
    }
    fleet.now = fleet.now.min(end);
    fleet.metrics()
}
