//! The hold of a key: until when no request may leave, after a refusal by the upstream or by an
//! operator.
//!
//! [`KeyHold`] has what the key knows of its hold and what it learned from refusals. It also has
//! the tasks that are woken when the hold changes. What a change of the hold means for permits
//! and for waiters of slots is decided by [`KeyState`](super::KeyState).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::fleet_probe::{FleetCall, FleetProbe, PROBE_TAKES, ProbedHold};
use super::hold::{Hold, HoldSource};
use super::probation::{LONGEST_PROBATION, Passage};
use super::upstream_refusals::{HoldSpan, SAME_END, UpstreamRefusals};
use crate::clock;
use crate::error::Reason;
use crate::key::Key;
use crate::limiter::queue::Number;
use crate::limiter::reservation::ProbeNumber;
use crate::limiter::session::TimeBounds;
use crate::signal::Signal;
use crate::stats::Cause;
use crate::store::{HoldState, Register};
use crate::suspicion::Suspicion;
use crate::tuning::ANSWER;
use crate::uncertain::UNCERTAIN_UNTIL;
use crate::wakers::Wakers;

/// The hold of a key. `details` is `None` if the key was never on hold.
#[derive(Default)]
pub(in crate::limiter) struct KeyHold {
    details: Option<Box<HoldDetails>>,
}

/// The hold of a key, and what depends on it.
struct HoldDetails {
    hold: Hold,
    /// Why the key is on hold, if this process knows.
    origin: Option<HoldOrigin>,
    /// What was learned from the refusals of the upstream.
    refusals: UpstreamRefusals,
    /// Which process probes, and a wait that the upstream has stated beyond `max_hold`.
    fleet: FleetProbe,
    /// The reason of refusals here, if a refusal of the upstream has stated that a long quota is used up.
    used_up: Option<Reason>,
    /// Begins with a refusal: whether the refusals are about kinds of requests.
    suspicion: Option<Box<Suspicion>>,
    /// When this process last sent a refusal to the store.
    sent_at: Option<Instant>,
    /// When a probe was accepted last, of this process or another one.
    accepted_at: Option<(Instant, AcceptedBy)>,
    /// Whether the store has lost the hold, so that it has to be sent again.
    resends: bool,
    /// The requests that watch the hold, with the tasks that are woken when it changes. Those that wait for its end have
    /// timers of their own. `None` for a task that was woken and has not polled since.
    waiting: BTreeMap<Number, Option<Waker>>,
    /// How many requests of several keys count as waiting for this one. They all watch the hold.
    joint: u32,
}

/// Whose request was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AcceptedBy {
    ThisProcess,
    Another,
}

/// A caller may stop until the end of a ban that lasts for longer, or if a quota for at least so long is used up.
const LONG: Duration = Duration::from_secs(3600);

/// That a quota is used up is not told to callers if the upstream states a shorter wait.
const LONG_WAIT: Duration = Duration::from_secs(60);

/// A hold that follows from a refusal of the upstream.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct NewHold {
    pub(in crate::limiter) held: HoldState,
    /// Whether it is sent to the store.
    pub(in crate::limiter) is_sent: bool,
}

/// Why a key is on hold.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct HoldOrigin {
    pub(in crate::limiter) cause: Cause,
    /// When this process put the key on hold, or learned that another process did.
    pub(in crate::limiter) since: Instant,
}

/// A hold that arrives from the store within this time is the one that this process has sent.
const JUST_SENT: Duration = Duration::from_millis(100);

/// The shortest time between two refusals that this process sends to the store, unless the hold is
/// longer by a tenth.
const SEND_AGAIN: Duration = Duration::from_secs(1);

/// For how long after a probe has left all responses are read. If its own takes longer, another one has left.
const LONGEST_RESPONSE: Duration = Duration::from_secs(600);

impl HoldDetails {
    /// Makes a hold that is over.
    fn new(now: Instant) -> Box<Self> {
        Box::new(HoldDetails {
            hold: Hold::new(now),
            origin: None,
            refusals: UpstreamRefusals::default(),
            fleet: FleetProbe::default(),
            used_up: None,
            suspicion: None,
            sent_at: None,
            accepted_at: None,
            resends: false,
            waiting: BTreeMap::new(),
            joint: 0,
        })
    }

    /// Returns whether there is a ban, and the next request may leave as a probe only.
    fn is_ban_on_probation(&self, now: Instant) -> bool {
        self.hold.left(now).is_none() && self.fleet.left(now).is_some()
    }

    /// Returns which requests may leave, if the key is not on hold.
    fn passage(&self, max_hold: Duration, now: Instant) -> Passage {
        match self.hold.passage(max_hold, now) {
            passage if !self.is_for_fleet(passage, now) => passage,
            _ => self.fleet.passage(self.hold.end(), now),
        }
    }

    /// Returns whether the next request is the first one of the fleet. `passage` is what its own requests would do.
    fn is_for_fleet(&self, passage: Passage, now: Instant) -> bool {
        let is_first = passage == Passage::Probe && self.hold.probation.due().is_some();
        is_first || self.is_ban_on_probation(now)
    }

    fn probed_hold(&self, key: Key) -> ProbedHold {
        ProbedHold {
            key,
            end: self.hold.end(),
            releases: self.hold.releases(),
        }
    }

    /// Forgets a ban, and that a quota is used up: the upstream accepts requests again, or an operator says so.
    fn forget_stated_wait(&mut self) {
        self.fleet.forget();
        self.used_up = None;
    }

    /// Returns whether a release may follow from an accepted request: the hold is over and its probe out, or it ends soon.
    fn is_nearly_over(&self, now: Instant) -> bool {
        match self.hold.left(now) {
            Some(left) => left < SEND_AGAIN,
            None => self.hold.is_cut(),
        }
    }

    /// Takes in a release of a hold that `was_nearly_over`. An operator ends the suspicion. That a request was accepted is a
    /// release, too, which arrives when the hold is over or nearly so.
    fn released(&mut self, source: HoldSource, was_nearly_over: bool, now: Instant) {
        let lately = self.accepted_at;
        let lately = lately.filter(|(at, _)| clock::after(*at, SEND_AGAIN) > now);
        let may_be_accepted = was_nearly_over || lately.is_some();
        if source == HoldSource::Seen || !may_be_accepted {
            self.suspicion = None;
        } else if lately.is_none_or(|(_, by)| by == AcceptedBy::Another)
            && let Some(suspicion) = &mut self.suspicion
        {
            suspicion.accepted_elsewhere();
            self.accepted_at = Some((now, AcceptedBy::Another));
        }
    }

    /// Begins a suspicion, or goes on with it. Until it ends, all responses are read.
    fn suspect(&mut self, now: Instant) -> &mut Suspicion {
        self.suspicion
            .take_if(|suspicion| suspicion.ends_at() <= now);
        self.suspicion
            .get_or_insert_with(|| Box::new(Suspicion::new(now)))
    }

    /// Returns until when the hold, or what was learned from it, matters.
    fn matters_until(&self) -> Instant {
        let probation = match self.hold.is_cut() {
            true => LONGEST_PROBATION,
            false => Duration::ZERO,
        };
        clock::after(self.hold.end(), self.refusals.matters_for().max(probation))
    }

    /// Forgets earlier refusals, as an accepted request does, if they did not matter any more when the request was sent that
    /// is refused now. The responses of those that were accepted meanwhile may not have been read. So a refusal months later
    /// counts as the first one.
    fn expire(&mut self, sent: Instant, now: Instant) {
        if self.matters_until() <= sent && self.fleet.left(now).is_none() {
            self.refusals.expire();
            self.forget_stated_wait();
        }
    }
}

impl KeyHold {
    fn details(&mut self, now: Instant) -> &mut HoldDetails {
        self.details.get_or_insert_with(|| HoldDetails::new(now))
    }

    fn hold(&self) -> Option<&Hold> {
        self.details.as_ref().map(|details| &details.hold)
    }

    /// Returns the suspicion, if a request was refused: then the kinds of requests are told apart.
    pub(in crate::limiter) fn suspicion(&self) -> Option<&Suspicion> {
        self.details.as_ref()?.suspicion.as_deref()
    }

    pub(in crate::limiter) fn suspicion_mut(&mut self) -> Option<&mut Suspicion> {
        self.details.as_mut()?.suspicion.as_deref_mut()
    }

    /// Ends the suspicion, because an operator says that requests are accepted.
    pub(in crate::limiter) fn forget_suspicion(&mut self) {
        if let Some(details) = &mut self.details {
            details.suspicion = None;
        }
    }

    /// Takes in for how long the machine has slept. Returns whether the key is on hold, and for a shorter time than this
    /// process thought.
    pub(super) fn wake(&mut self, now: Instant) -> bool {
        let Some(details) = &mut self.details else {
            return false;
        };
        let is_held = details.hold.left(now).is_some();
        if !is_held && details.fleet.left(now).is_none() {
            return false;
        }
        let slept = details.hold.wake(now);
        // A ban lasts for longer than a hold.
        details.fleet.wake(slept);
        is_held && !slept.is_zero()
    }

    pub(super) fn hold_mut(&mut self) -> Option<&mut Hold> {
        self.details.as_mut().map(|details| &mut details.hold)
    }

    /// Returns for how long the key is on hold.
    pub(in crate::limiter) fn left(&self, now: Instant) -> Option<Duration> {
        self.hold()?.left(now)
    }

    /// Notes why the key is on hold for `left`, unless another hold lasts longer.
    pub(in crate::limiter) fn note_cause(&mut self, cause: Cause, left: Duration, now: Instant) {
        let in_force = self.left(now).unwrap_or_default();
        if in_force <= left.saturating_add(SAME_END) {
            self.details(now).origin = Some(HoldOrigin { cause, since: now });
        }
    }

    /// Returns why the key is on hold, if this process knows.
    pub(in crate::limiter) fn origin(&self) -> Option<HoldOrigin> {
        self.details.as_ref()?.origin
    }

    /// Returns whether this process has sent a hold of the key in the 100 ms before `now`.
    pub(in crate::limiter) fn was_sent_at(&self, now: Instant) -> bool {
        let sent_at = self.details.as_ref().and_then(|details| details.sent_at);
        sent_at.is_some_and(|sent| now.saturating_duration_since(sent) < JUST_SENT)
    }

    /// Returns how often holds of the key were released.
    pub(in crate::limiter) fn releases(&self) -> u32 {
        self.hold().map_or(0, Hold::releases)
    }

    /// Returns until when the hold, or what was learned from it, matters.
    pub(super) fn matters_until(&self) -> Option<Instant> {
        self.details.as_ref().map(|details| details.matters_until())
    }

    /// Returns until when it is of use to know which requests are refused, and for how long. If room is needed, that is
    /// forgotten.
    pub(super) fn useful_until(&self) -> Option<Instant> {
        let details = self.details.as_ref()?;
        let suspected = details
            .suspicion
            .as_ref()
            .map(|suspicion| suspicion.ends_at());
        suspected.max(details.fleet.matters_until(details.hold.end()))
    }

    /// Takes in a hold or a release that this process saw or that another process published.
    /// Returns whether the hold changed.
    pub(super) fn adopt(&mut self, held: HoldState, source: HoldSource, now: Instant) -> bool {
        let details = self.details(now);
        let was_nearly_over = details.is_nearly_over(now);
        let is_changed = details.hold.adopt(held, source, now);
        if is_changed && held.remaining.is_zero() {
            details.forget_stated_wait();
            details.released(source, was_nearly_over, now);
        } else if is_changed && source == HoldSource::Published {
            // It may follow from a refusal. Of its own refusals this process knows the kinds.
            details.suspect(now);
        }
        let end = details.hold.end();
        if let Some(suspicion) = &mut details.suspicion {
            suspicion.lasts_beyond(end);
        }
        is_changed
    }

    /// Takes in the hold that the store replied to a call sent at `sent`. The store's time lay
    /// within `bounds`.
    ///
    /// Returns whether the store decided before a release that this process knows of.
    pub(super) fn answered(&mut self, held: HoldState, sent: Instant, bounds: TimeBounds) -> bool {
        if self.details.is_none() && held.is_none() {
            return false;
        }
        let details = self.details(sent);
        let (releases, is_known) = (details.hold.releases(), details.hold.knows_releases());
        let was_nearly_over = details.is_nearly_over(sent);
        let precedes_release = details.hold.answered(held, sent, bounds);
        if details.hold.releases() > releases {
            details.forget_stated_wait();
            // The first answer may state releases from before the hold.
            if is_known {
                details.released(HoldSource::Published, was_nearly_over, bounds.latest);
            }
        }
        precedes_release
    }

    /// Returns the hold for a call to the store. Its `remaining` is zero if the store knows of the
    /// hold. `is_new` states that the store does not.
    pub(super) fn for_store(&self, is_new: bool, now: Instant) -> HoldState {
        let hold = self.hold().map(|hold| hold.for_store(is_new, now));
        hold.unwrap_or_default()
    }

    /// Notes that the store has lost its state, and the hold with it.
    pub(super) fn store_lost_state(&mut self, now: Instant) {
        if let Some(details) = &mut self.details {
            details.hold.store_lost_state(now);
            details.resends = true;
        }
    }

    /// Returns whether the store has lost the hold, so that it has to be sent again. Returns true
    /// once.
    pub(super) fn take_resend(&mut self) -> bool {
        self.details
            .as_mut()
            .is_some_and(|details| std::mem::take(&mut details.resends))
    }

    /// Returns whether the key is on hold and a release may have been missed.
    pub(super) fn is_doubted(&self, now: Instant) -> bool {
        self.hold().is_some_and(|hold| hold.is_doubted(now))
    }

    /// Returns whether a request that is held has to ask the store for a release that may have been
    /// missed. Returns true once each second, because one request asks for all.
    pub(in crate::limiter) fn take_inquiry(&mut self, now: Instant) -> bool {
        self.hold_mut().is_some_and(|hold| hold.take_inquiry(now))
    }

    /// Returns the kinds of requests that the upstream refuses alone, as this process knows.
    pub(in crate::limiter) fn kinds(&self) -> Vec<Key> {
        self.suspicion()
            .into_iter()
            .flat_map(Suspicion::kinds)
            .collect()
    }

    /// Takes in the refusal of a request of `kind`, if that is known. Returns whether the refusal holds this kind of requests,
    /// and not the key.
    pub(in crate::limiter) fn is_about_kind(&mut self, kind: Option<Key>, now: Instant) -> bool {
        let details = self.details(now);
        let is_held = details.hold.left(now).is_some();
        details.suspect(now).refused(kind, is_held, now)
    }

    /// Takes in a refusal of a request that was sent at `sent`. Returns the hold that follows, if
    /// it is longer than the present one.
    pub(in crate::limiter) fn refused_upstream(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        sent: Instant,
        now: Instant,
    ) -> Option<NewHold> {
        let details = self.details(now);
        details.expire(sent, now);
        let before = details.hold.left(now);
        let is_probe = before.is_none() && sent >= details.hold.end();
        let longest = match retry_after {
            Some(stated) if stated > max_hold => {
                details.fleet.banned(stated, is_probe, now);
                details.fleet.span(max_hold, now)
            }
            Some(_) if is_probe => {
                details.fleet.forget();
                max_hold
            }
            _ => max_hold,
        };
        let probes = details.fleet.sent();
        let new = details
            .refusals
            .refused(retry_after, longest, before, probes, sent, now);
        let end = new.map_or(details.hold.end(), |new| clock::after(now, new.left));
        let matters_until = clock::after(end, details.refusals.matters_for());
        UNCERTAIN_UNTIL.note(matters_until, now);
        let HoldSpan { left, cut } = new?;
        let before = before.unwrap_or_default();
        let is_recent = details
            .sent_at
            .is_some_and(|sent_at| clock::after(sent_at, SEND_AGAIN) > now);
        let is_sent = !is_recent || left > before.saturating_add(before / 10);
        if is_sent {
            details.sent_at = Some(now);
        }
        let held = HoldState {
            remaining: left,
            releases: details.hold.releases(),
            cut,
        };
        Some(NewHold { held, is_sent })
    }

    /// Takes in that the upstream accepted a request sent at `sent`, which may be the `probe`. Returns whether
    /// that ends a probation. Then other requests may leave, and the store has to be notified.
    pub(in crate::limiter) fn accepted_upstream(
        &mut self,
        probe: Option<ProbeNumber>,
        sent: Instant,
        now: Instant,
    ) -> bool {
        let Some(details) = self
            .details
            .as_mut()
            .filter(|details| details.hold.left(now).is_none())
        else {
            return false;
        };
        let is_after = sent >= details.hold.end();
        let ends_ban = is_after && details.is_ban_on_probation(now);
        let is_released = details.hold.accepted(probe, sent) || ends_ban;
        details.refusals.accepted(sent);
        if is_after || is_released {
            details.forget_stated_wait();
        }
        if is_released {
            details.accepted_at = Some((now, AcceptedBy::ThisProcess));
        }
        details
            .suspicion
            .take_if(|suspicion| suspicion.ends_at() <= now);
        is_released
    }

    /// Takes in that the upstream accepted a request of another class, sent at `sent`. During a hold that says nothing.
    pub(in crate::limiter) fn accepts_others(&mut self, sent: Instant, now: Instant) {
        if self.left(now).is_none()
            && let Some(details) = &mut self.details
        {
            details.refusals.accepted(sent);
        }
    }

    /// Returns which requests may leave. During a hold this may be a probe: no request leaves all the same, because the
    /// permits from before its end were withdrawn.
    pub(super) fn passage(&self, max_hold: Duration, now: Instant) -> Passage {
        let details = self.details.as_ref();
        details.map_or(Passage::Open, |details| details.passage(max_hold, now))
    }

    /// Returns for how long the upstream has stated beyond `max_hold`.
    fn banned_for(&self, now: Instant) -> Option<Duration> {
        self.details.as_ref()?.fleet.left(now)
    }

    /// Returns for how long the key is on hold, as callers are told: until the end that the upstream stated.
    pub(in crate::limiter) fn stated_left(&self, now: Instant) -> Option<Duration> {
        self.left(now).max(self.banned_for(now))
    }

    /// Notes which quota a refusal states to be used up.
    pub(in crate::limiter) fn note_used_up(
        &mut self,
        signal: &Signal,
        retry_after: Option<Duration>,
        now: Instant,
    ) {
        if retry_after.is_some_and(|wait| wait < LONG_WAIT) {
            return;
        }
        let quotas = signal.quotas().iter();
        let used_up = quotas.filter(|quota| quota.is_used_up());
        let long = used_up.filter(|quota| quota.window() >= Some(LONG));
        let longest = long.max_by_key(|quota| quota.window());
        self.details(now).used_up = longest.map(|quota| Reason::UsedUp {
            quota: quota.name().map(Arc::from),
            window: quota.window(),
        });
    }

    /// Returns why a request is refused during the hold.
    pub(in crate::limiter) fn reason(&self, now: Instant) -> Reason {
        let used_up = self.details.as_ref();
        if let Some(reason) = used_up.and_then(|details| details.used_up.clone()) {
            return reason;
        }
        match self.banned_for(now) > Some(LONG) {
            true => Reason::UsedUp {
                quota: None,
                window: None,
            },
            false => Reason::Held,
        }
    }

    /// Returns the call that shares a ban, or asks whether this process may send the probe, if one is due. Requests may wait
    /// for a probe.
    pub(super) fn fleet_call(
        &mut self,
        key: Key,
        is_awaited: bool,
        max_hold: Duration,
        now: Instant,
    ) -> Option<FleetCall> {
        let details = self.details.as_mut()?;
        let takes = if !is_awaited || details.hold.left(now).is_some() {
            None
        } else if details.is_ban_on_probation(now) {
            Some(PROBE_TAKES)
        } else {
            let is_open = details.hold.passage(max_hold, now) == Passage::Open;
            details.hold.probation.due().filter(|_| !is_open)
        };
        let hold = details.probed_hold(key);
        details.fleet.call(hold, takes, now)
    }

    /// Takes in that the store has made the change of such a call, or has failed. See [`FleetProbe::changed`].
    pub(super) fn fleet_changed(
        &mut self,
        version: Option<u64>,
        probe: Option<u8>,
        is_shared: bool,
        now: Instant,
    ) {
        let details = self.details(now);
        details.fleet.changed(version, probe, is_shared, now);
    }

    /// Takes in what another process has written. Returns whether the hold changed.
    pub(super) fn learn_fleet(&mut self, key: Key, register: &Register, now: Instant) -> bool {
        let details = self.details(now);
        let hold = details.probed_hold(key);
        details.fleet.learn(register, hold, now);
        // A process that had not used the key has missed the hold of a ban.
        let is_held = details.hold.left(now).is_some();
        let is_missed = !is_held && details.fleet.left(now).is_some();
        let Some(remaining) = FleetProbe::held(register).filter(|_| is_missed) else {
            return false;
        };
        let held = HoldState {
            cut: true,
            ..HoldState::new(remaining, hold.releases)
        };
        self.adopt(held, HoldSource::Published, now)
    }

    /// Returns whether all requests may leave: the key is neither on hold nor on probation.
    pub(in crate::limiter) fn is_clear(&self, max_hold: Duration, now: Instant) -> bool {
        self.left(now).is_none() && self.passage(max_hold, now) == Passage::Open
    }

    /// Returns for how long no request may leave, because of a hold or a probe. Unlike
    /// [`pass`](KeyHold::pass), makes no request the probe.
    pub(in crate::limiter) fn blocked_for(
        &self,
        max_hold: Duration,
        now: Instant,
    ) -> Option<Duration> {
        match self.would_block_for(max_hold, now) {
            None if self.passage(max_hold, now) == Passage::Asking => Some(ANSWER),
            blocked => blocked,
        }
    }

    /// The same for a request that does not enter. If it did, the store would be asked for the right to probe.
    pub(super) fn would_block_for(&self, max_hold: Duration, now: Instant) -> Option<Duration> {
        self.left(now)
            .or_else(|| match self.passage(max_hold, now) {
                Passage::Open | Passage::Probe | Passage::Asking => None,
                Passage::Probing(left) => Some(left),
            })
    }

    /// Lets a request leave. If the key is on probation, the request becomes the probe with the number that
    /// this returns.
    ///
    /// # Errors
    ///
    /// For how long no request may leave, because of a hold or a probe.
    pub(in crate::limiter) fn pass(
        &mut self,
        max_hold: Duration,
        now: Instant,
    ) -> Result<Option<ProbeNumber>, Duration> {
        if let Some(left) = self.blocked_for(max_hold, now) {
            return Err(left);
        }
        let is_probe = self.passage(max_hold, now) == Passage::Probe;
        let probe = is_probe.then(ProbeNumber::next);
        if let Some(number) = probe {
            self.probe_leaves(number, now);
        }
        Ok(probe)
    }

    pub(super) fn probe_leaves(&mut self, number: ProbeNumber, now: Instant) {
        if let Some(details) = &mut self.details {
            details.hold.probation.probe_leaves(number, now);
            details.fleet.probe_leaves(number, now);
            UNCERTAIN_UNTIL.note(clock::after(now, LONGEST_RESPONSE), now);
        }
    }

    /// Notes that a probe was not sent. Returns whether another one may leave now.
    pub(super) fn probe_comes_back(&mut self, number: ProbeNumber, now: Instant) -> bool {
        self.details.as_mut().is_some_and(|details| {
            let is_back = details.hold.probation.probe_comes_back(number);
            details.fleet.probe_comes_back(number, now) || is_back
        })
    }

    /// Returns how many tasks are woken when the hold changes.
    pub(in crate::limiter) fn waiting(&self) -> usize {
        self.details
            .as_ref()
            .map_or(0, |details| details.waiting.len())
    }

    /// Returns how many requests of several keys count as waiting for this one.
    pub(super) fn joint(&self) -> u32 {
        self.details.as_ref().map_or(0, |details| details.joint)
    }

    /// Counts one more.
    pub(in crate::limiter) fn enter_joint(&mut self, now: Instant) {
        self.details(now).joint += 1;
    }

    /// Counts one less.
    pub(in crate::limiter) fn leave_joint(&mut self) {
        if let Some(details) = &mut self.details {
            details.joint = details.joint.saturating_sub(1);
        }
    }

    /// Returns for how long no request may leave, for a waiter that also waits for other things and
    /// becomes the probe only when it leaves. The task is woken when the hold changes.
    pub(in crate::limiter) fn watch(
        &mut self,
        number: Number,
        max_hold: Duration,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let waker = Some(cx.waker().clone());
        self.details(now).waiting.insert(number, waker);
        self.blocked_for(max_hold, now)
    }

    /// Removes a task that waits for the end of the hold.
    pub(in crate::limiter) fn unwatch(&mut self, number: Number) {
        if let Some(details) = &mut self.details {
            details.waiting.remove(&number);
        }
    }

    /// Wakes the tasks that watch the hold. Their requests count as waiting until they leave.
    pub(super) fn wake_all(&mut self, wakers: &mut Wakers) {
        if let Some(details) = &mut self.details {
            wakers.add(details.waiting.values_mut().filter_map(Option::take));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ban_ends_while_the_machine_sleeps() {
        let (mut hold, now) = (KeyHold::default(), clock::now());
        let [hour, day] = [1, 24].map(|hours| Duration::from_secs(hours * 3600));
        let refused = hold.refused_upstream(Some(day), hour * 2, now, now);
        hold.adopt(refused.unwrap().held, HoldSource::Seen, now);
        assert_eq!(hold.banned_for(now), Some(day));
        clock::pretended::sleep(hour);
        assert!(hold.wake(now));
        assert_eq!(
            (hold.left(now), hold.banned_for(now)),
            (Some(hour), Some(day - hour))
        );
        // And again behind the hold.
        let later = clock::after(now, hour);
        clock::pretended::sleep(hour);
        assert!(!hold.wake(later));
        assert_eq!(hold.banned_for(later), Some(day - hour * 3));
    }

    /// It was accepted meanwhile, but nothing of the process was uncertain, so its responses were not read.
    #[test]
    fn refusals_months_apart_are_first_ones() {
        let (mut hold, mut now) = (KeyHold::default(), clock::now());
        let max_hold = Duration::from_secs(60);
        for _ in 0..3 {
            let held = hold
                .refused_upstream(None, max_hold, now, now)
                .unwrap()
                .held;
            assert!(held.remaining < Duration::from_millis(1500), "{held:?}");
            hold.adopt(held, HoldSource::Seen, now);
            now += Duration::from_secs(3600);
        }
    }
}
