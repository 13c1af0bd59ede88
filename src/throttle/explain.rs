//! Why a request would wait now: the pace of its key, its hold, and the requests before it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::ThrottleCore;
use super::paced_queue::PaceOutlook;
use super::waiters::Waiters;
use crate::clock;
use crate::error::Reason;
use crate::key::Key;
use crate::limiter::{Because, Explanation, Held, Shown, Verdict};
use crate::stats::Gate;

/// The text of an [`Explanation`] by a throttle.
struct PaceText<'a> {
    verdict: &'a Verdict,
    /// The name of the throttle, as in [`Stats::name`](crate::stats::Stats::name).
    throttle: Arc<str>,
    /// The name of the key, as in [`KeyStats::name`](crate::stats::KeyStats::name).
    key: Box<str>,
    /// The time between two requests at the present pace. Zero if the pace lets several leave at once.
    interval: Duration,
    /// How long until the next request may leave. Zero if it may leave now.
    slot: Duration,
    /// The hold of the key. `None` if it is not on hold.
    hold: Option<Held>,
    /// How many requests of the key wait in this process.
    waiting: usize,
    /// How long the first of them has waited. `None` if no request waits.
    oldest_wait: Option<Duration>,
    /// How many requests of the key this process has in flight.
    in_flight: usize,
    /// The processes that share the pace. `None` if none do.
    fleet: Option<Fleet>,
}

/// The processes that share the pace of a key, as far as this one knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fleet {
    /// How many of them have requests that wait or are in flight, this one included.
    processes: u32,
    /// How many requests wait in all processes.
    waiting: usize,
    /// How many requests of all processes are in flight.
    in_flight: usize,
    /// Whether the store is unreachable, so that each process goes on with its part of the pace.
    alone: bool,
}

/// Explains what would happen to a request of `key`.
pub(super) fn explain(core: &ThrottleCore, key: Key) -> Explanation {
    let now = clock::now();
    let read = |waiters: &mut Waiters| KnownKey {
        outlook: waiters.queue.outlook(now),
        held: waiters.held(now),
        waiting: waiters.queue.waiting(),
        in_flight: waiters.queue.in_flight(),
        name: waiters.counts.name().map(Box::from),
    };
    let known = core.find(key, read).unwrap_or_default();
    let verdict = verdict(core, &known, now);
    let (_, since) = core.tally().waiting_of(key);
    let outlook = known.outlook;
    let told = PaceText {
        verdict: &verdict,
        throttle: core.tally().name(),
        key: known
            .name
            .unwrap_or_else(|| (*core.label(key, None)).into()),
        interval: outlook.interval,
        slot: left(outlook.slot, now),
        hold: known.held,
        waiting: known.waiting,
        oldest_wait: since.map(|since| now.saturating_duration_since(since)),
        in_flight: known.in_flight,
        fleet: core.is_shared().then(|| Fleet {
            processes: outlook.processes.max(1),
            waiting: outlook.waiting,
            in_flight: outlook.in_flight,
            alone: outlook.is_alone,
        }),
    };
    let text = told.to_string();
    Explanation::new(verdict, text)
}

/// What this process knows of a key.
#[derive(Default)]
struct KnownKey {
    outlook: PaceOutlook,
    held: Option<Held>,
    waiting: usize,
    in_flight: usize,
    name: Option<Box<str>>,
}

fn left(moment: Option<Instant>, now: Instant) -> Duration {
    moment.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
}

/// Decides as [`Waiters::arrived`] does. A request that would be refused when its wait is over is
/// refused here.
fn verdict(core: &ThrottleCore, known: &KnownKey, now: Instant) -> Verdict {
    let settings = &core.settings;
    let refused = |reason, retry_after, because| Verdict::Refused {
        reason,
        retry_after,
        because,
    };
    if core.tally().is_draining() {
        return refused(Reason::Draining, None, None);
    }
    let hold = known.held.map(|held| held.left);
    if let Some(left) = hold.filter(|left| *left > settings.max_wait) {
        return refused(Reason::Held, Some(left), Some(Because::Held));
    }
    let outlook = &known.outlook;
    let slot = left(outlook.slot, now);
    let before = outlook.waiting;
    if before == 0 && slot.is_zero() {
        return Verdict::Goes;
    }
    if known.waiting >= settings.max_queue {
        return refused(Reason::QueueFull(settings.max_queue), None, None);
    }
    let turns = u32::try_from(before).unwrap_or(u32::MAX);
    let wait = slot.saturating_add(outlook.interval.saturating_mul(turns));
    let because = if hold.is_some_and(|left| left >= wait / 2) {
        Because::Held
    } else if outlook.is_probing {
        Because::Probing
    } else if before > 0 {
        Because::Queue { before }
    } else {
        Because::Pace
    };
    if wait > settings.max_wait {
        return refused(
            Reason::MaxWait(settings.max_wait),
            Some(wait),
            Some(because),
        );
    }
    // The response to a probe may arrive at any time.
    let wait = Some(wait).filter(|_| because != Because::Probing);
    Verdict::Waits { wait, because }
}

impl fmt::Display for PaceText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &PaceText {
            verdict,
            ref throttle,
            ref key,
            interval,
            slot,
            hold,
            waiting,
            oldest_wait,
            in_flight,
            fleet,
        } = self;
        write!(f, "{throttle}, key {key}: a request ")?;
        verdict.write(f, |f, because| because.write(f, hold.as_ref(), None))?;
        match interval {
            Duration::ZERO => f.write_str("\n  pace       no delay between requests")?,
            interval => write!(f, "\n  pace       one request every {}", Shown(interval))?,
        }
        match slot {
            Duration::ZERO => f.write_str("; the next now")?,
            slot => write!(f, "; the next in {}", Shown(slot))?,
        }
        f.write_str("\n  hold       ")?;
        Held::write(hold.as_ref(), f)?;
        write!(f, "\n  waiting    {waiting} here")?;
        if let Some(oldest) = oldest_wait {
            write!(f, ", the first for {}", Shown(oldest))?;
        }
        write!(f, "\n  in flight  {in_flight} here")?;
        match fleet {
            None => Ok(()),
            Some(Fleet { alone: true, .. }) => f.write_str(
                "\n  fleet      store unreachable; this process uses its part of the pace",
            ),
            Some(Fleet {
                processes,
                waiting,
                in_flight,
                ..
            }) => write!(
                f,
                "\n  fleet      {processes} processes, {waiting} requests wait, {in_flight} in flight"
            ),
        }
    }
}
