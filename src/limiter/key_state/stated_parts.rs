//! When the limits of the parts were stated, if the quota is divided among classes.
//!
//! The parts of a quota are keys of their own, so what a process states of one part says nothing about
//! the others. If releases with different shares run side by side, a class could have its new and larger
//! share while another class still has its old one. So a process states its limits of all parts before it
//! uses one of them, and again while it goes on. Each part then has the smallest limit that one of these
//! processes states.
//!
//! **No window has more than the quota**, if all processes have the same classes. Take the permit of each part that is
//! used last in the window. Let P be the process that booked the earliest of these permits. From then until a window
//! after its use, the limits of P apply to all parts. The others of these permits were booked in that time. So no part has more units in the window than P states, and these limits add up to the quota of P.
//!
//! A process without shares uses the part of all other requests, the rest, up to the whole quota. The proof
//! holds from when the rest has its smaller limit, and what was booked before is through. A process that
//! begins to state the parts waits for that.
//!
//! If the store does not answer for a part, the process uses its own part all the same, and states that part
//! again after a second. For that time the proof does not hold.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::KeyState;
use super::context::{Effect, KeyContext};
use crate::clock;
use crate::limit::{LimitSpec, STATED_AHEAD};
use crate::limiter::session::TimeBounds;
use crate::quota::Limit;
use crate::store::Usage;
use crate::tuning::ANSWER;

/// The number of the part that the key is, whichever it is.
pub(in crate::limiter) const OWN_PART: u8 = u8::MAX;

/// What a process has stated of the parts of a quota.
#[derive(Clone, Default)]
pub(in crate::limiter) struct StatedParts {
    parts: Vec<PartStatement>,
    /// Whether there was a round of statements.
    has_begun: bool,
    /// If a round of statements is under way: when it counts as lost, or goes on if it waits for callers that do not
    /// divide the quota.
    next_at: Option<Instant>,
    /// Whether callers that do not divide the quota were looked for since the limits began to apply.
    is_searched: bool,
    /// Until when such callers may use more than the part of the rest.
    undivided_until: Option<Instant>,
}

/// What a request of several keys has to do before it uses a part.
pub(in crate::limiter) enum JoinedRound {
    /// Nothing: the limits of all parts are stated.
    IsStated,
    /// It has to run a round of statements. No other one runs meanwhile.
    Begins,
    /// It has to wait for the end of the round that is under way, which waits for `until`.
    IsUnderWay { until: Option<Instant> },
}

/// When the limits of one part were stated last.
#[derive(Clone, Copy)]
struct PartStatement {
    part: u8,
    /// Until when permits may be used without another statement.
    fresh_until: Instant,
    /// Until when the limits certainly apply.
    applies_until: Instant,
}

impl StatedParts {
    /// Returns whether permits may be used at `at` without a new statement about any part.
    fn are_fresh(&self, at: Instant) -> bool {
        let is_divided = self.undivided_until.is_none_or(|until| until <= at);
        let mut parts = self.parts.iter();
        self.has_begun && is_divided && parts.all(|stated| stated.fresh_until > at)
    }

    /// Returns whether permits may be used at `at` without a new statement about this part.
    pub(in crate::limiter) fn is_fresh(&self, part: u8, at: Instant) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|stated| stated.part == part && stated.fresh_until > at)
    }

    /// Returns whether callers that do not divide the quota have to be looked for at `at`. They may have
    /// come while the limits of no part applied.
    pub(in crate::limiter) fn needs_search(&self, at: Instant) -> bool {
        let apply = self.parts.iter().any(|stated| stated.applies_until > at);
        !apply || !self.is_searched
    }

    /// Begins a round, or goes on with it, unless it is under way or goes on later. Returns whether it did.
    fn begin(&mut self, now: Instant) -> bool {
        let may = self.next_at.is_none_or(|at| at <= now);
        if may {
            self.next_at = Some(clock::after(now, ANSWER));
        }
        may
    }

    fn note(&mut self, new: PartStatement) {
        match self.parts.iter_mut().find(|known| known.part == new.part) {
            Some(known) => {
                known.fresh_until = known.fresh_until.max(new.fresh_until);
                known.applies_until = known.applies_until.max(new.applies_until);
            }
            None => self.parts.push(new),
        }
    }
}

/// The limits of a quota as a whole: each limit of its first part, and the largest cost of all parts
/// together.
pub(in crate::limiter) struct WholeLimits(Vec<(Limit, u64)>);

impl WholeLimits {
    /// Adds up the limits of all parts.
    pub(in crate::limiter) fn new(parts: &[Arc<LimitSpec>]) -> Self {
        let first = parts.first().map(|spec| spec.quota().limits());
        let limits = first.unwrap_or_default().iter().enumerate();
        let limits = limits.map(|(index, limit)| {
            let of_parts = parts
                .iter()
                .filter_map(|spec| spec.quota().limits().get(index));
            let sum = of_parts.map(|limit| u64::from(limit.largest_cost())).sum();
            (*limit, sum)
        });
        WholeLimits(limits.collect())
    }

    /// Returns for how long callers that do not divide the quota may use more than this part of it, whose
    /// limits were just stated for the first time. `None` if there are no such callers.
    pub(in crate::limiter) fn undivided_for(&self, part: &Usage) -> Option<Duration> {
        // Slots that came back may be earlier, so `next_slot` does not tell when the last one is through.
        let booked = part.limits.iter().map(|usage| usage.wait).max()?;
        let undivided = part
            .limits
            .iter()
            .filter(|usage| self.is_undivided(usage.limit));
        let waits = undivided.map(|usage| match usage.limit {
            // The other parts begin with full buckets, so the whole bucket must be full, too.
            Limit::Bucket { count, window, .. } => {
                let units = u32::try_from(usage.used).unwrap_or(u32::MAX);
                let refill = window.saturating_mul(units) / count.max(1);
                booked.saturating_add(refill)
            }
            // After what is booked already, the part has no more units than its limit.
            _ => booked,
        });
        waits.max()
    }

    /// Returns whether callers that state `limit` do not divide the quota: it is not smaller than the
    /// whole.
    fn is_undivided(&self, limit: Limit) -> bool {
        self.0.iter().any(|(part, sum)| {
            let is_alike = match (limit, part) {
                (Limit::Bucket { .. }, Limit::Bucket { .. }) => true,
                (Limit::Sliding { window, .. }, Limit::Sliding { window: other, .. })
                | (Limit::Fixed { window, .. }, Limit::Fixed { window: other, .. }) => {
                    window == *other
                }
                _ => false,
            };
            is_alike && u64::from(limit.largest_cost()) >= *sum
        })
    }
}

/// Returns for how long after a statement about a part permits of other parts may be used. A used permit
/// counts for a window, and the limits still apply then.
pub(in crate::limiter) fn fresh_for(spec: &LimitSpec) -> Duration {
    const MARGIN: Duration = Duration::from_millis(200);
    let window = spec.quota().shortest_window();
    let counts = window + spec.transit_slack() + MARGIN;
    applies_for(spec).saturating_sub(counts).max(window / 2)
}

/// Returns for how long after a statement the limits of a part certainly apply: two windows and a second,
/// and longer because it is a part.
fn applies_for(spec: &LimitSpec) -> Duration {
    let longer = Duration::from_micros(STATED_AHEAD);
    spec.quota().shortest_window() * 2 + Duration::from_secs(1) + longer
}

impl KeyState {
    /// Returns whether the key may be used: the limits of the other parts are stated, if there are any.
    pub(in crate::limiter) fn are_parts_stated(&self, ctx: &KeyContext<'_>, now: Instant) -> bool {
        ctx.spec.lending().is_none()
            || self.store.is_standalone
            || (self.limits.stated_parts()).is_some_and(|stated| stated.are_fresh(now))
    }

    /// Returns for how long callers that do not divide the quota may use more than their part, if a request
    /// cannot wait until then.
    pub(in crate::limiter) fn undivided_beyond(
        &self,
        ctx: &KeyContext<'_>,
        latest: Instant,
    ) -> Option<Duration> {
        let until = self.limits.stated_parts()?.undivided_until?;
        let is_too_late = until > latest && !self.are_parts_stated(ctx, ctx.now);
        is_too_late.then(|| until.saturating_duration_since(ctx.now))
    }

    /// Begins a round of statements for a request of several keys, unless one is under way.
    pub(in crate::limiter) fn join_round(&mut self, ctx: &mut KeyContext<'_>) -> JoinedRound {
        if self.are_parts_stated(ctx, ctx.now) {
            return JoinedRound::IsStated;
        }
        let stated = self.limits.stated_parts_mut();
        if stated.begin(ctx.now) {
            return JoinedRound::Begins;
        }
        let until = stated.undivided_until;
        JoinedRound::IsUnderWay { until }
    }

    /// Leaves the limits of other parts to be stated, unless that is under way.
    pub(super) fn want_statements(&mut self, ctx: &mut KeyContext<'_>) {
        if self.limits.stated_parts_mut().begin(ctx.now) {
            ctx.work.effects.push(Effect::StateParts);
        }
    }

    /// Leaves the limits of other parts to be stated again, if that is due before `until` and requests
    /// wait. Until then, their slots stay booked.
    pub(super) fn want_statements_before(&mut self, ctx: &mut KeyContext<'_>, until: Instant) {
        if self.waiting() > 0 && !self.are_parts_stated(ctx, until) {
            self.want_statements(ctx);
        }
    }

    /// Returns what was stated of the other parts.
    pub(in crate::limiter) fn stated_parts(&self) -> StatedParts {
        self.limits.stated_parts().cloned().unwrap_or_default()
    }

    /// Notes that the limits of a part were stated at `sent`. If its store failed, the key is used all the
    /// same, and the part is stated again after a second.
    pub(in crate::limiter) fn note_stated(
        &mut self,
        spec: &LimitSpec,
        part: u8,
        sent: Instant,
        has_failed: bool,
    ) {
        let (fresh_until, applies_until) = if has_failed {
            (clock::after(clock::now(), ANSWER), sent)
        } else {
            let fresh_until = clock::after(sent, fresh_for(spec));
            (fresh_until, clock::after(sent, applies_for(spec)))
        };
        self.limits.stated_parts_mut().note(PartStatement {
            part,
            fresh_until,
            applies_until,
        });
    }

    /// Notes between which moments the store answered a statement about the own part. The first call for
    /// permits may be for many requests, so it has to ask for permits that are valid for long enough.
    pub(in crate::limiter) fn note_trip(&mut self, spec: &LimitSpec, bounds: TimeBounds) {
        self.store.answers_later |= bounds.latest > bounds.earliest;
        self.store.raise_life(spec, bounds, false);
    }

    /// Notes whether callers that do not divide the quota were looked for.
    pub(in crate::limiter) fn note_search(&mut self, is_done: bool) {
        self.limits.stated_parts_mut().is_searched = is_done;
    }

    /// Notes that a call at `sent` has stated the limits of the own part. If the store has lost its state,
    /// the other parts have to be stated again.
    pub(super) fn note_own_part(&mut self, spec: &LimitSpec, sent: Instant, has_lost_state: bool) {
        if has_lost_state {
            let stated = self.limits.stated_parts_mut();
            stated.has_begun = false;
            stated.parts.clear();
        }
        self.note_stated(spec, OWN_PART, sent, false);
    }

    /// Returns when a round of statements that is under way goes on, or begins again because it was lost with its
    /// runtime.
    pub(super) fn states_at(&self) -> Option<Instant> {
        self.limits.stated_parts()?.next_at
    }

    /// Takes in that all parts were stated. Callers that do not divide the quota may use all of it until
    /// `undivided_until`. If that is ahead, no request leaves before, the waiters that cannot wait for that long are
    /// refused, and the round goes on after `again` at the latest. Otherwise it ends, and the requests go on.
    pub(in crate::limiter) fn parts_stated(
        &mut self,
        ctx: &mut KeyContext<'_>,
        undivided_until: Option<Instant>,
        again: Duration,
    ) {
        let stated = self.limits.stated_parts_mut();
        let until = stated.undivided_until.max(undivided_until);
        stated.undivided_until = until;
        if let Some(until) = until.filter(|until| *until > ctx.now) {
            stated.next_at = Some(until.min(clock::after(ctx.now, again)));
            if let Some(queue) = &mut self.queue {
                let wait = until.saturating_duration_since(ctx.now);
                queue.pause(wait, ctx.now, &mut ctx.work.wakers);
            }
            return;
        }
        stated.next_at = None;
        stated.has_begun = true;
        // The other parts could not be stated, because their limiters are gone.
        stated.parts.retain(|stated| stated.fresh_until > ctx.now);
        if let Some(queue) = &mut self.queue {
            queue.end_pause();
        }
        self.step(ctx, None);
    }
}
