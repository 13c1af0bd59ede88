//! Why a request would wait now: the pace of its key, its hold, and the requests before it.

use std::fmt;
use std::time::{Duration, Instant};

use super::engine::ThrottleCore;
use super::paced_queue::PaceOutlook;
#[cfg(doc)]
use super::waiters::Waiters;
use crate::clock;
use crate::error::Reason;
use crate::key::Key;
use crate::limiter::{Because, Explanation, Held, Shown, Verdict, refusal_of_throttle};
use crate::stats::{Cause, Engine};

/// What this process knows of a key.
#[derive(Default)]
struct KnownKey {
    outlook: PaceOutlook,
    held: Option<Held>,
    /// How many of its requests wait in this process, and how many are in flight.
    waiting: usize,
    in_flight: usize,
    name: Option<Box<str>>,
}

impl KnownKey {
    /// A key that is not in use. Its guard has `stopped` it for this time.
    fn new(stopped: Option<Duration>, now: Instant) -> Self {
        KnownKey {
            outlook: PaceOutlook {
                slot: stopped.map(|left| clock::after(now, left)),
                ..PaceOutlook::default()
            },
            held: stopped.map(|left| Held {
                left,
                cause: Some(Cause::Guard),
                age: None,
            }),
            ..KnownKey::default()
        }
    }
}

/// The text of an [`Explanation`] by a throttle.
struct PaceText<'a> {
    core: &'a ThrottleCore,
    key: Key,
    known: &'a KnownKey,
    verdict: &'a Verdict,
    now: Instant,
}

pub(super) fn explain(core: &ThrottleCore, key: Key) -> Explanation {
    let now = clock::now();
    let in_use = core.find(key, |waiters| KnownKey {
        outlook: waiters.queue.outlook(now),
        held: waiters.held(now),
        waiting: waiters.queue.waiting(),
        in_flight: waiters.queue.in_flight(),
        name: waiters.counts.name().map(Box::from),
    });
    let has_room = in_use.is_some() || core.keys.has_room(key, now);
    let known = in_use.unwrap_or_else(|| KnownKey::new(core.stopped_for(key, now), now));
    let verdict = verdict(core, &known, has_room, now);
    let shown = PaceText {
        core,
        key,
        known: &known,
        verdict: &verdict,
        now,
    };
    let text = shown.to_string();
    Explanation::new(verdict, text)
}

fn left(moment: Option<Instant>, now: Instant) -> Duration {
    moment.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
}

fn refused(reason: Reason, retry_after: Option<Duration>, because: Option<Because>) -> Verdict {
    Verdict::Refused {
        reason,
        retry_after,
        because,
    }
}

/// Decides as `Throttle::begin` and [`Waiters::arrived`] do. A request that would be refused when its wait is over is
/// refused here.
fn verdict(core: &ThrottleCore, known: &KnownKey, has_room: bool, now: Instant) -> Verdict {
    let settings = &core.settings;
    if let Some(reason) = refusal_of_throttle() {
        return refused(reason, None, None);
    }
    if core.tally().is_draining() {
        return refused(Reason::Draining, None, None);
    }
    if !has_room {
        return refused(Reason::TooManyKeys(settings.max_keys), None, None);
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
        let PaceText {
            core,
            key,
            known,
            verdict,
            now,
        } = *self;
        let KnownKey {
            outlook,
            held,
            waiting,
            in_flight,
            name,
        } = known;
        let throttle = core.tally().name();
        match name {
            Some(name) => write!(f, "{throttle}, key {name}: a request ")?,
            None => write!(f, "{throttle}, key {}: a request ", core.label(key, None))?,
        }
        verdict.write(f, |f, because| because.write(f, held.as_ref(), None))?;
        match outlook.interval {
            Duration::ZERO => f.write_str("\n  pace       no delay between requests")?,
            interval => write!(f, "\n  pace       one request every {}", Shown(interval))?,
        }
        match left(outlook.slot, now) {
            Duration::ZERO => f.write_str("; the next now")?,
            slot => write!(f, "; the next in {}", Shown(slot))?,
        }
        f.write_str("\n  hold       ")?;
        Held::write(held.as_ref(), f)?;
        write!(f, "\n  waiting    {waiting} here")?;
        let (_, since) = core.tally().waiting_of(key);
        if let Some(since) = since {
            let oldest = now.saturating_duration_since(since);
            write!(f, ", the first for {}", Shown(oldest))?;
        }
        write!(f, "\n  in flight  {in_flight} here")?;
        if !core.is_shared() {
            return Ok(());
        }
        if outlook.is_alone {
            return f.write_str(
                "\n  fleet      store unreachable; this process uses its part of the pace",
            );
        }
        write!(
            f,
            "\n  fleet      {} processes, {} requests wait, {} in flight",
            outlook.processes.max(1),
            outlook.waiting,
            outlook.in_flight
        )
    }
}
