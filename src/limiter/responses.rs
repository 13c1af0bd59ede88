//! What the limiter learns from the responses of the upstream: holds, limits, and how much of them
//! is left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::admitted::Admitted;
use super::engine::Core;
use super::holds::{self, Probe};
use super::key_state::{HeaderTrust, KeyContext, KeyState, NewHold, is_of_use};
use super::own_quota;
use super::reservation::ProbeNumber;
use super::settings::Settings;
use crate::clock;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::signal::{ObservedQuota, Signal};
use crate::stats::Cause;
use crate::store::{Change, HoldState};
use crate::uncertain::is_any_uncertain;

/// If a response takes no longer than this, the time until a reset counts from its arrival.
const QUICK: Duration = Duration::from_millis(250);

/// A used-up quota holds the key only if its reset is at least this far away.
///
/// Upstreams often state resets in whole seconds. If the reset is nearer, this error is large, and
/// the limits of the key are more exact.
const SHORTEST_RESET: Duration = Duration::from_secs(5);

/// A call that was answered.
#[derive(Clone, Copy)]
pub(super) struct AnsweredCall<'a> {
    pub(super) admitted: Admitted,
    /// Whether the response is a bad answer to the guard. Then it ends no probation.
    pub(super) is_bad: bool,
    /// The probes that the request was, of all its keys.
    pub(super) probes: &'a [Probe],
    /// The kind of the request, if a key of it was under suspicion when it left.
    pub(super) kind: Option<Key>,
}

impl AnsweredCall<'_> {
    /// Takes in what the response states, at the core of the call. Does nothing if it states nothing that
    /// matters, or if the limiter was dropped.
    #[inline]
    pub(super) fn observe(&self, signal: &Signal) {
        if signal.refusal().is_some() || is_of_use(signal) || is_any_uncertain() {
            self.observe_slow(signal);
        }
    }

    #[cold]
    fn observe_slow(&self, signal: &Signal) {
        if let Some(core) = self.admitted.core.find() {
            self.take_in(&core, signal);
        }
    }

    /// See [`Core::hold_key`].
    fn hold(&self, core: &Core) -> Key {
        core.hold_key(self.admitted.key, self.admitted.host)
    }

    fn take_in(&self, core: &Arc<Core>, signal: &Signal) {
        let Admitted { key, at, .. } = self.admitted;
        let sent = at.instant();
        let hold = self.hold(core);
        // Requests to a host obey the holds of the key of all hosts, too.
        let of_all = Some(key).filter(|key| *key != hold);
        let now = clock::now();
        let limited = signal.refusal().is_some();
        let is_accepted = !limited && !self.is_bad;
        let of_kind = self.kind.map(|kind| hold.of_kind(kind));
        if is_accepted {
            for held in std::iter::once(hold).chain(of_all).chain(of_kind) {
                self.accepted(core, held, now);
            }
            if core.is_divided() {
                // The refusals of one class hold the others, too, so what is accepted counts for them.
                for (core, of_class) in core.all_parts(key).filter(|(_, other)| *other != key) {
                    let hold = core.hold_key(of_class, self.admitted.host);
                    core.states
                        .find(hold, |state| state.hold.accepts_others(sent, now));
                }
            }
        }
        self.learn(core, signal, now);
        let retry_after = if limited {
            signal.retry_after()
        } else if core.settings.learn == HeaderTrust::Ignore {
            None
        } else {
            // The time until the reset was stated after the call was sent. If the response took
            // long, it is not known how long after.
            let slow = now.saturating_duration_since(sent).saturating_sub(QUICK);
            used_up_for(signal).map(|span| span.saturating_sub(slow))
        };
        if limited || retry_after.is_some() {
            // What the classes of a quota see is judged by the one whose request it was.
            let is_about_kind = limited && self.is_about_kind(core, signal, now);
            if is_about_kind {
                self.probe_again(core, hold, now);
            }
            for (core, key) in core.all_parts(key).rev() {
                let admitted = Admitted {
                    key,
                    ..self.admitted
                };
                let call = AnsweredCall { admitted, ..*self };
                call.hold_by_signal(&core, signal, retry_after, is_about_kind, now);
            }
        }
        core.with_state(key, now, KeyState::pass_on);
    }

    /// Takes in that the upstream has accepted the request, which obeys the holds of `held`.
    fn accepted(&self, core: &Arc<Core>, held: Key, now: Instant) {
        let accept = |state: &mut KeyState, ctx: &mut KeyContext<'_>| self.accept(core, state, ctx);
        if core.with_state(held, now, accept) != Some(true) {
            return;
        }
        // The probe was accepted, so the other requests may leave, in all processes, unless another one was refused
        // meanwhile. The answer of the store is not needed.
        let accepted = Change::Hold {
            hold: HoldState::default(),
            remaining: None,
        };
        let Settings { store, .. } = &core.settings;
        drop(store.change(held, &core.terms(held), accepted));
    }

    /// Takes in that the upstream has accepted the request, in the state of a key whose holds it obeys. Returns whether that
    /// releases the key.
    fn accept(&self, core: &Core, state: &mut KeyState, ctx: &mut KeyContext<'_>) -> bool {
        let sent = self.admitted.at.instant();
        if let Some(kind) = self.kind
            && let Some(suspicion) = state.hold.suspicion_mut()
        {
            suspicion.accepted(kind, sent);
        }
        let probe = self.probe_of(core, ctx.key);
        let is_released = state.hold.accepted_upstream(probe, sent, ctx.now);
        if is_released {
            state.hold_changed(ctx);
        }
        is_released
    }

    /// Returns the number of the probe of `key` that the request left as, if it did.
    fn probe_of(&self, core: &Core, key: Key) -> Option<ProbeNumber> {
        let mut probes = self.probes.iter();
        let probe = probes.find(|probe| probe.is_of(core.id, key));
        probe.map(Probe::number)
    }

    /// Takes in the limits that a response states and how much of them is left.
    fn learn(&self, core: &Arc<Core>, signal: &Signal, now: Instant) {
        let learn = core.settings.learn;
        let key = self.admitted.key;
        let by_host = self.hold(core) != key;
        // Each of several hosts under one key has quotas of its own, also the host of a response that is not known.
        // They are about the whole quota, and not about a part.
        if core.is_divided()
            || learn == HeaderTrust::Ignore
            || (core.hosts.are_of(key) && core.hosts.are_several())
        {
            return;
        }
        own_quota::learn(core, key, Some(signal), now);
        core.with_state(key, now, |state, ctx| {
            self.learn_remaining(signal, by_host, state, ctx);
        });
    }

    /// Lets another request probe `key`, if this one was its probe: its refusal says nothing about the key.
    fn probe_again(&self, core: &Arc<Core>, key: Key, now: Instant) {
        if let Some(number) = self.probe_of(core, key) {
            core.with_state(key, now, |state, ctx| state.probe_not_sent(ctx, number));
        }
    }

    /// Takes in how much a response states is left of the limits of the key.
    fn learn_remaining(
        &self,
        signal: &Signal,
        by_host: bool,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
    ) {
        let limited = signal.refusal().is_some();
        let Admitted { cost, at, .. } = self.admitted;
        let refused = if limited { cost } else { 0 };
        let is_less = state.upstream_stated(ctx.spec, signal, refused, at.instant(), ctx.now);
        // A refusal holds the key, and the store gets what is left with the hold.
        if !ctx.work.has_begun_call() && is_less && (!limited || by_host) {
            state.tighten(ctx);
        }
    }

    /// Returns the key of the scope that the response names, else that of [`hold`](Self::hold).
    fn scoped(&self, core: &Core, signal: &Signal) -> Option<Key> {
        match (signal.scope(), &core.settings.on_scope) {
            (Some(scope), Some(on_scope)) => {
                on_scope(core.whole(self.admitted.key), scope).map(|key| core.part_of(key))
            }
            _ => Some(self.hold(core)),
        }
    }

    /// Takes in a refusal. Returns whether it is about this kind of requests alone.
    fn is_about_kind(&self, core: &Arc<Core>, signal: &Signal, now: Instant) -> bool {
        let Some(key) = self.scoped(core, signal) else {
            return false;
        };
        let judged = core.with_new_state(key, now, |state, _| {
            state.hold.is_about_kind(self.kind, now)
        });
        judged.unwrap_or(false)
    }

    /// Returns the key that a refusal holds, and why: `whole`, or that of one kind of its requests. If there is no room for
    /// the state of the kind, the key.
    fn held_by(
        &self,
        core: &Arc<Core>,
        whole: Key,
        signal: &Signal,
        is_about_kind: bool,
        now: Instant,
    ) -> (Key, Cause) {
        if signal.refusal().is_none() {
            return (whole, Cause::UsedUp);
        }
        let of_kind = self.kind.filter(|_| is_about_kind);
        let of_kind = of_kind.map(|kind| whole.of_kind(kind));
        match of_kind.filter(|key| core.with_new_state(*key, now, |_, _| ()).is_ok()) {
            Some(key) => (key, Cause::Kind),
            None => (whole, Cause::Upstream),
        }
    }

    /// Sets a hold after the upstream has refused a call, or has stated that it will refuse the
    /// next. It holds the key of the scope that the response names, else that of [`hold`](Self::hold).
    fn hold_by_signal(
        &self,
        core: &Arc<Core>,
        signal: &Signal,
        retry_after: Option<Duration>,
        is_about_kind: bool,
        now: Instant,
    ) {
        let settings = &core.settings;
        let mut max_hold = settings.max_hold;
        if let Some(guard) = &settings.guard
            && !max_hold.is_zero()
            && signal.refusal().is_some()
            && retry_after.is_some_and(|wait| wait > max_hold)
        {
            // A client that goes on although the upstream named a long wait may be banned.
            max_hold = guard.longest().max(max_hold);
        }
        let scoped = self.scoped(core, signal);
        let Some(whole) = scoped.filter(|_| !max_hold.is_zero()) else {
            return;
        };
        let (key, cause) = self.held_by(core, whole, signal, is_about_kind, now);
        let entered = core.with_new_state(key, now, |state, ctx| {
            let sent = self.admitted.at.instant();
            let new = state
                .hold
                .refused_upstream(retry_after, max_hold, sent, now);
            state.share_probe(ctx, false);
            let new = new?;
            state.hold.note_used_up(signal, retry_after, now);
            let left = if new.is_sent {
                state.take_remaining(ctx, max_hold)
            } else {
                None
            };
            Some((new, left))
        });
        let Ok(Some((NewHold { held, is_sent }, left))) = entered else {
            return;
        };
        holds::report(core, key, whole, held.remaining, cause);
        if is_sent {
            // Another key may have other limits: the store keeps those it knows.
            let spec = if key == self.admitted.key {
                core.terms(key)
            } else {
                Arc::new(LimitSpec::none())
            };
            // The store has to know what is left before `holds::adopt_seen` lets the waiters call it
            // again. Its answer is not needed: the reply to the next call states the hold in force.
            let change = Change::Hold {
                hold: held,
                remaining: left,
            };
            drop(settings.store.change(key, &spec, change));
        }
        holds::adopt_seen(core, key, held, now);
        if cause == Cause::Kind {
            let end = clock::after(now, held.remaining);
            core.states.find(whole, |state| {
                if let Some(suspicion) = state.hold.suspicion_mut() {
                    suspicion.lasts_beyond(end);
                }
            });
        }
    }
}

/// Returns how long nothing is left of a quota, as the upstream states in a response that is no
/// refusal.
///
/// Counts only quotas of all calls, in any unit: other quotas may be about calls of other keys.
fn used_up_for(signal: &Signal) -> Option<Duration> {
    let quotas = signal.quotas().iter();
    let used_up = quotas.filter(|quota| quota.is_used_up() && quota.is_of_all_calls());
    let longest = used_up.filter_map(ObservedQuota::reset_after).max()?;
    (longest >= SHORTEST_RESET).then_some(longest)
}
