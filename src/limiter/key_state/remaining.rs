//! What the upstream's `Remaining` headers say about the limits of a key, for the store.
//!
//! If the reset of an upstream stays at one moment, the upstream counts in windows, or from its oldest request. The store has the same
//! requests in its log, so what the upstream counts beyond them was used by other clients. If the reset moves along, the two counts
//! cannot be compared: then only refusals show that other clients use the limit.

use std::time::{Duration, Instant};

use super::KeyState;
use super::context::{Effect, KeyContext};
use crate::clock;
use crate::limit::LimitSpec;
use crate::limiter::queue::Gathering;
use crate::quota::Limit;
use crate::signal::{ObservedQuota, Signal};
use crate::store::UpstreamRemaining;

/// The headers about each limit.
#[derive(Default)]
pub(super) struct RemainingTracker {
    of: Vec<Word>,
    /// When the last headers are sent to the store.
    telling: Option<Instant>,
}

/// The headers about one limit.
#[derive(Default)]
struct Word {
    /// The reset as first stated, and when it was stated.
    anchor: Option<(Instant, Instant)>,
    /// Whether the reset stayed at that moment.
    stays: bool,
    /// The units left, the reset, and when they were stated.
    latest: Option<(u64, Instant, Instant)>,
    /// Units of refused requests that were not yet sent to the store.
    refused: u32,
    /// When the units left were last sent to the store.
    told: Option<Instant>,
    /// Whether fewer units are left than could still leave, and the store does not know it. They are sent with the next call.
    is_less: bool,
    /// Whether the other processes are notified as well.
    urgent: bool,
    /// When they were last notified, and of how many units.
    told_others: Option<(Instant, u64)>,
    /// Whether unnamed quotas turned out to mean another limit.
    is_other: bool,
    /// Whether the store drops what followed from earlier responses, which meant another limit.
    forget: bool,
}

/// Two resets that differ by less are the same: many servers state whole seconds, and round in different ways.
const SAME: Duration = Duration::from_millis(1500);

/// A response that took no longer bounds what may leave, although it is not known whether the reset stays at one moment.
const FRESH: Duration = Duration::from_millis(250);

/// The longest that units are reserved unless a response confirms it; `max_hold` if that is less.
const LONGEST_VALID: Duration = Duration::from_secs(60);

/// After this span it is known whether the reset stays at one moment.
const LONG: Duration = Duration::from_secs(3);

/// The last second may be rounding.
const LAST: Duration = Duration::from_secs(1);

/// How many times a window the units left are sent to the store, at least once a second. Refusals are sent at once.
const TOLD_PER_WINDOW: u32 = 32;
const LONGEST_REST: Duration = Duration::from_secs(1);

impl Word {
    /// Takes in the headers of a response to a request that was sent at `sent`. They are of a moment between then and now, and taken for
    /// the earlier one: the reset comes sooner then, and more was refilled since.
    fn on_event(&mut self, limit: Limit, quota: &ObservedQuota, refused: u32, sent: Instant) {
        let Some(left) = left_of(limit, quota) else { return };
        let is_unnamed = names_no_limit(quota);
        if is_unnamed && self.is_other {
            return;
        }
        if left == 0 {
            self.refused = self.refused.saturating_add(refused);
        }
        let reset_after = quota.reset_after().unwrap_or_default();
        let resets = clock::after(sent, reset_after);
        self.latest = Some((left, resets, sent));
        let Some((anchor, since)) = self.anchor else {
            self.anchor = Some((resets, sent));
            return;
        };
        let apart = |one: Instant, other: Instant| one.max(other) - one.min(other);
        if apart(resets, anchor) <= SAME {
            // A reset that is further away than the window is of another limit.
            let is_near = reset_after <= limit.window().saturating_add(LAST);
            self.stays |= is_near && sent.saturating_duration_since(since) >= LONG;
            return;
        }
        // It is the next window, if it follows the last.
        let over = clock::after(sent, LAST) >= anchor;
        let follows = over && resets > anchor && apart(resets, clock::after(anchor, limit.window())) <= SAME;
        if over && resets > anchor && is_unnamed {
            // The quota of a minute is not that of an hour.
            let period = apart(resets, anchor).saturating_add(SAME);
            self.is_other = limit.window() > 2 * period;
        }
        if self.is_other || (self.stays && over && !follows) {
            (self.forget, self.latest) = (true, None);
        }
        self.stays &= follows;
        self.anchor = Some((resets, sent));
    }

    /// Returns whether the last response bounds what may leave: it states a reset, and is not old.
    fn bounds(&self, limit: Limit, now: Instant) -> Option<u64> {
        let (units, resets, said) = self.latest?;
        let is_fresh = self.stays || now.saturating_duration_since(said) <= FRESH;
        let lasts = matches!(limit, Limit::Bucket { .. }) || resets > clock::after(now, LAST);
        (is_fresh && lasts).then_some(units)
    }

    /// Returns how long nothing has to be sent to the store.
    fn rests(&self, limit: Limit, now: Instant) -> Duration {
        let told = self.told.filter(|_| self.refused == 0);
        let rest = (limit.window() / TOLD_PER_WINDOW).min(LONGEST_REST);
        let due = told.map_or(now, |told| clock::after(told, rest));
        due.saturating_duration_since(now)
    }

    /// Notes that less is left than could still leave. Returns whether the other processes are notified at once: once a second, and
    /// whenever half of what they know of is left.
    fn is_urgent(&mut self, units: u64, now: Instant) -> bool {
        self.is_less = true;
        let rests = |(told, of): (Instant, u64)| now < clock::after(told, LONGEST_REST) && units > of / 2;
        self.urgent |= self.told_others.is_none_or(|told| !rests(told));
        if self.urgent {
            self.told_others = Some((now, units));
        }
        self.urgent
    }

    /// Returns what is sent to the store now.
    fn tell(&mut self, limit: Limit, max_hold: Duration, now: Instant) -> Option<UpstreamRemaining> {
        if std::mem::take(&mut self.forget) {
            return Some(UpstreamRemaining { forget: true, ..UpstreamRemaining::new(limit, 0) });
        }
        let is_due = std::mem::take(&mut self.is_less) || self.rests(limit, now).is_zero();
        let (units, resets, said) = self.latest.filter(|_| is_due)?;
        (self.latest, self.told) = (None, Some(now));
        let urgent = std::mem::take(&mut self.urgent);
        let reset_in = resets.saturating_duration_since(now);
        let reset_in = (reset_in > LAST).then_some(reset_in);
        let ago = now.saturating_duration_since(said);
        let refused = std::mem::take(&mut self.refused);
        let valid_for = max_hold.min(LONGEST_VALID);
        Some(UpstreamRemaining {
            reset_in,
            steady: self.stays,
            ago,
            refused,
            valid_for,
            urgent,
            ..UpstreamRemaining::new(limit, units)
        })
    }
}

/// Returns whether a response may state what is left of a limit, or the limit.
pub(in crate::limiter) fn is_of_use(signal: &Signal) -> bool {
    let stated = |quota: &ObservedQuota| quota.limit().is_some() && quota.window().is_some();
    signal.quotas().iter().any(|quota| quota.remaining().is_some() || stated(quota))
}

/// Returns what is left of a limit: all but what is used of the stated quota. If that is smaller, for some of the requests or for all,
/// the rest of the limit is not used.
fn left_of(limit: Limit, quota: &ObservedQuota) -> Option<u64> {
    let more = quota.limit().map_or(0, |stated| u64::from(limit.count()).saturating_sub(stated));
    let more = if let Limit::Bucket { .. } = limit { 0 } else { more };
    quota.remaining().map(|left| left.saturating_add(more))
}

/// Returns whether a quota states neither name nor size nor window.
fn names_no_limit(quota: &ObservedQuota) -> bool {
    quota.name().is_none() && quota.limit().is_none() && quota.window().is_none()
}

/// Returns whether a quota means this limit. A quota of tokens says nothing about a limit of requests: a quota of another unit is
/// meant only if it is as large.
fn is_of(quota: &ObservedQuota, limit: Limit, spec: &LimitSpec) -> bool {
    let is_as_large = quota.limit() == Some(u64::from(limit.largest_cost()));
    if quota.unit() == "percent" || (quota.unit() != "requests" && !is_as_large) {
        return false;
    }
    match (limit, quota.window(), quota.limit()) {
        (Limit::Bucket { .. }, ..) => is_as_large,
        (_, Some(window), _) => window == limit.window(),
        (_, None, Some(_)) => is_as_large,
        (_, None, None) => names_no_limit(quota) && spec.quota().limits().len() == 1,
    }
}

impl KeyState {
    /// Takes in the response to a request that was sent at `sent`, which refused `refused` units. Returns whether less is left than
    /// could leave before the next call, here or in another process.
    pub(in crate::limiter) fn upstream_said(
        &mut self,
        spec: &LimitSpec,
        signal: &Signal,
        refused: u32,
        sent: Instant,
        now: Instant,
    ) -> bool {
        let at_hand = u64::from(self.prefetched.units(now));
        let mut is_less = false;
        for (index, limit) in spec.quota().limits().iter().enumerate() {
            let said = signal.quotas().iter().filter(|quota| is_of(quota, *limit, spec));
            // Of several, the most used one.
            let said = said.filter(|quota| quota.remaining().is_some());
            let Some(quota) = said.min_by_key(|quota| left_of(*limit, quota)) else { continue };
            let words = self.remaining.get_or_insert_default();
            if words.of.len() <= index {
                words.of.resize_with(index + 1, Word::default);
            }
            let word = &mut words.of[index];
            word.on_event(*limit, quota, refused, sent);
            if let Some(left) =
                word.bounds(*limit, now).filter(|left| *left < at_hand.saturating_add(self.free))
            {
                is_less |= word.is_urgent(left, now) || left < at_hand;
            }
        }
        is_less
    }

    /// Less is left than this process could send: gives up permits at hand and booked slots, and asks for them anew.
    pub(in crate::limiter) fn tighten(&mut self, ctx: &mut KeyContext<'_>) {
        let unused = self.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.extend(unused);
        queue.give_up_slots();
        // A call under way may bring more than is left: this is done again when it is answered.
        self.tightens = queue.is_calling(ctx.now);
        if self.tightens {
            return;
        }
        let is_waiting = queue.waiting() > 0;
        if is_waiting {
            queue.gathering = Gathering::Done;
        }
        // What another process stated, the store knows.
        let tells = self.remaining.as_ref().is_some_and(|words| words.of.iter().any(|word| word.is_less));
        if tells && !is_waiting {
            self.inquire(ctx);
        } else {
            self.step(ctx, None);
        }
        self.close(ctx);
    }

    /// Takes in that another process stated to the store that less is left. `writes` is the number of that state.
    pub(in crate::limiter) fn less_heard(&mut self, ctx: &mut KeyContext<'_>, writes: u64) {
        let is_news = self.session.as_ref().is_some_and(|session| session.writes() < writes);
        if is_news {
            self.tighten(ctx);
        }
    }

    /// Tells the store of the headers, even if no request waits: of refusals at once, and of others soon if other clients use the limit,
    /// too.
    pub(in crate::limiter) fn pass_on(&mut self, ctx: &mut KeyContext<'_>) {
        let Some(words) = &mut self.remaining else { return };
        let limits = ctx.spec.quota().limits().iter();
        let event = limits.zip(&words.of).filter(|(_, word)| word.latest.is_some());
        let event = event.filter(|(_, word)| self.shared || word.refused > 0);
        let rest = event.map(|(limit, word)| word.rests(*limit, ctx.now)).min();
        let Some(rest) = rest else { return };
        if rest.is_zero() {
            return self.inquire(ctx);
        }
        // A task that is late was lost with its runtime.
        let nobody = words.telling.is_none_or(|at| clock::after(at, LAST) < ctx.now);
        if nobody {
            words.telling = Some(clock::after(ctx.now, rest));
            ctx.work.effects.push(Effect::PassOn(rest));
        }
    }

    /// Tells the store now, or asks it about a hold again.
    pub(in crate::limiter) fn pass_on_now(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(words) = &mut self.remaining {
            words.telling = None;
        }
        let is_doubted = self.doubts_hold(ctx.now);
        self.pass_on(ctx);
        if is_doubted && ctx.work.effects.is_empty() {
            self.confirm(ctx);
        }
        self.close(ctx);
    }

    /// Returns the units left that are sent to the store: of one limit with each call.
    pub(in crate::limiter) fn left(
        &mut self,
        spec: &LimitSpec,
        max_hold: Duration,
        now: Instant,
    ) -> Option<UpstreamRemaining> {
        let words = self.remaining.as_mut()?;
        let mut limits = spec.quota().limits().iter().zip(&mut words.of);
        limits.find_map(|(limit, word)| word.tell(*limit, max_hold, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit::Sliding { count: 100, window: Duration::from_secs(60) };

    /// Returns the units that are sent to the store after `answers`: for each, the second of its arrival, the units left, and the
    /// seconds until the reset.
    fn told(answers: &[(u64, u64, u64)]) -> Option<u64> {
        let (mut word, start) = (Word::default(), clock::now());
        let mut at = start;
        for &(second, left, reset) in answers {
            at = start + Duration::from_secs(second);
            let quota =
                ObservedQuota::new().with_remaining(left).with_reset_after(Duration::from_secs(reset));
            word.on_event(LIMIT, &quota, 0, at);
        }
        let left = word.tell(LIMIT, LONGEST_VALID, at);
        left.filter(|left| left.steady && left.reset_in.is_some()).map(|left| left.units)
    }

    #[test]
    fn only_where_the_reset_stays_where_it_is() {
        assert_eq!(told(&[(0, 90, 50)]), None, "nobody knows yet");
        assert_eq!(told(&[(0, 90, 50), (1, 80, 49)]), None, "it may be rounding");
        assert_eq!(told(&[(0, 90, 50), (4, 80, 46)]), Some(80));
        assert_eq!(told(&[(0, 90, 60), (4, 80, 60)]), None, "it moves along");
        assert_eq!(told(&[(0, 90, 50), (4, 80, 46), (51, 99, 59)]), Some(99), "the next window");
        assert_eq!(told(&[(0, 90, 50), (4, 80, 46), (10, 70, 59)]), None, "it did not stay");
        assert_eq!(told(&[(0, 90, 5), (4, 80, 1)]), None, "it may be over");
    }

    /// A server that states what is left of a minute, under a limit of an hour.
    #[test]
    fn unnamed_quotas_of_shorter_periods_are_other_limits() {
        let hour = Limit::Sliding { count: 5000, window: Duration::from_secs(3600) };
        let (mut word, start) = (Word::default(), clock::now());
        let mut told = Vec::new();
        for second in (0..200).step_by(5) {
            let at = start + Duration::from_secs(second);
            let reset = Duration::from_secs(60 - second % 60);
            word.on_event(hour, &ObservedQuota::new().with_remaining(37).with_reset_after(reset), 0, at);
            told.extend(word.tell(hour, LONGEST_VALID, at).map(|left| (second, left.forget)));
        }
        assert_eq!(told.last(), Some(&(60, true)), "{told:?}");
    }

    #[test]
    fn remaining_is_reported_rarely_and_refusals_at_once() {
        let (mut word, start) = (Word::default(), clock::now());
        let mut answered = |millis: u64, left: u64, refused: u32| {
            let at = start + Duration::from_millis(millis);
            let reset = Duration::from_millis(50_000 - millis);
            word.on_event(
                LIMIT,
                &ObservedQuota::new().with_remaining(left).with_reset_after(reset),
                refused,
                at,
            );
            word.tell(LIMIT, LONGEST_VALID, at).map(|left| left.refused)
        };
        assert_eq!(answered(0, 50, 0), Some(0));
        assert_eq!(answered(4000, 40, 0), Some(0));
        assert_eq!(answered(4100, 30, 0), None);
        assert_eq!(answered(4200, 30, 2), None, "another limit has refused that");
        assert_eq!(answered(4300, 0, 2), Some(2));
        assert_eq!(answered(7000, 0, 0), Some(0));
    }
}
