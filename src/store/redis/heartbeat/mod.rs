//! The heartbeat of calls in flight: the claims of this process. A claim is sent when something
//! changes, every third of its time to live, and again after Redis was unreachable. No limiter is
//! needed for that, so the runtimes of limiters may have ended.
//!
//! A claim is the whole state of a holder. Only the last claim of each holder counts. A holder has
//! at most one claim without a reply at a time.

mod flush;
mod holder;
mod sessions;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::backend::Backend;
use super::codec::{self, ClaimReply};
use super::script::{Argument, Script};
use crate::clock::{self, SleepMark};
use crate::error::StoreError;
use crate::events;
use crate::rng::{Backoff, dice};
use crate::store::{Claim, StoreEvent, StoreListener};
use flush::Flush;
use holder::Holder;
use sessions::LastSessions;

/// The longest pause between two attempts while Redis cannot be reached.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The most claims without a reply while others are repeated. With more, the last of them would get
/// its reply too late.
const MOST_PENDING: usize = 100;

/// How often expired claims are looked for while the most are pending, as Redis may hang.
const LOOKS_FOR_EXPIRED: Duration = Duration::from_millis(50);

/// The claims of all holders of this process, with their timers.
pub(super) struct Claims {
    backend: Backend,
    script: Arc<Script>,
    /// The number of this store, unique in the fleet.
    instance: u64,
    /// The holders, by their number.
    holders: HashMap<u64, Holder>,
    /// When each holder is due next, in order. A holder's own copy is [`Holder::timer`].
    timers: BTreeSet<(Instant, u64)>,
    /// What this process knows of the keys that it has claimed lately.
    last_sessions: LastSessions,
    /// The claims without a reply yet, by the number of the holder.
    pending: JoinSet<(u64, Result<ClaimReply, StoreError>)>,
    /// Whether this process receives messages about the claims of other processes.
    is_subscribed: bool,
    /// Whether it was reported that the server forbids messages.
    is_warned: bool,
    /// The flushes that are not complete.
    flushes: Vec<Flush>,
    /// When expired claims are looked for next while too many are pending.
    looks_at: Instant,
    /// Claims expire in Redis while the machine sleeps.
    sleep: SleepMark,
}

impl Claims {
    pub(super) fn new(backend: Backend, script: Arc<Script>, instance: u64) -> Self {
        Claims {
            backend,
            script,
            instance,
            holders: HashMap::new(),
            timers: BTreeSet::new(),
            last_sessions: LastSessions::new(),
            pending: JoinSet::new(),
            is_subscribed: false,
            is_warned: false,
            flushes: Vec::new(),
            looks_at: clock::now(),
            sleep: SleepMark::new(),
        }
    }

    /// Takes in a claim of a limiter. Sends it if the last claim of the holder has its reply, and once not too
    /// many others are pending: thousands of keys may have their first calls at once.
    pub(super) fn claim(&mut self, name: String, claim: Claim, listener: Arc<dyn StoreListener>) {
        self.wake(clock::now());
        let id = claim.holder;
        let name: Arc<str> = name.into();
        let last_sessions = &self.last_sessions;
        let holder = self.holders.entry(id).or_insert_with(|| {
            let session = last_sessions.get(&name);
            Holder::new(name, listener, session)
        });
        if claim.number <= holder.claim.number {
            return;
        }
        holder.claim = claim;
        holder.first_number = None;
        if holder.pending.is_some() {
            return;
        }
        if self.pending.len() < MOST_PENDING {
            self.send(id);
        } else {
            self.set_timer(id, clock::now());
        }
    }

    /// Returns when the next holder is due. If too many claims are pending, their replies come first.
    pub(super) fn due_at(&self) -> Option<Instant> {
        let &(at, _) = self.timers.first()?;
        Some(match self.pending.len() < MOST_PENDING {
            true => at,
            false => at.max(self.looks_at),
        })
    }

    /// Sends the claims of the holders that are due.
    pub(super) fn send_due(&mut self) {
        let now = clock::now();
        self.wake(now);
        while let Some(&(at, id)) = self.timers.first()
            && at <= now
            && self.pending.len() < MOST_PENDING
        {
            self.timers.pop_first();
            let Some(holder) = self.holders.get_mut(&id) else {
                continue;
            };
            holder.timer = None;
            holder.notify_if_expired(now);
            if holder.pending.is_none() {
                self.send(id);
            } else {
                self.set_timer(id, self.backend.links.deadline_of(now));
            }
        }
        if now < self.looks_at {
            return;
        }
        // While too many claims are pending, thousands of others may be due: each look visits all of them.
        self.looks_at = clock::after(now, LOOKS_FOR_EXPIRED);
        for (_, id) in self.timers.range(..=(now, u64::MAX)) {
            if let Some(holder) = self.holders.get_mut(id) {
                holder.notify_if_expired(now);
            }
        }
    }

    /// Looks whether the machine has slept.
    fn wake(&mut self, now: Instant) {
        let slept = self.sleep.look_now();
        if slept.is_zero() {
            return;
        }
        for holder in self.holders.values_mut() {
            holder.wake(slept, now);
        }
        // Claims may expire before their timers fire.
        let all: Vec<_> = self.holders.keys().copied().collect();
        all.into_iter().for_each(|id| self.set_timer(id, now));
    }

    /// Waits for the next reply to a claim. The future may be dropped at any time.
    pub(super) async fn next_reply(&mut self) -> Option<(u64, Result<ClaimReply, StoreError>)> {
        self.pending.join_next().await?.ok()
    }

    /// Sends all claims again, because a panic may have left some of them without a timer.
    pub(super) fn repeat_all(&mut self) {
        self.pending = JoinSet::new();
        self.timers.clear();
        let now = clock::now();
        for (id, holder) in &mut self.holders {
            holder.pending = None;
            holder.timer = Some(now);
            self.timers.insert((now, *id));
        }
    }

    /// Sets the timer of a holder to `at`, or to when its last claim expires if that is earlier.
    fn set_timer(&mut self, id: u64, at: Instant) {
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        let at = holder.expires_at().map_or(at, |expires| at.min(expires));
        if let Some(timer) = holder.timer.replace(at) {
            self.timers.remove(&(timer, id));
        }
        self.timers.insert((at, id));
    }

    /// Sends the claim of a holder.
    fn send(&mut self, id: u64) {
        let now = clock::now();
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        holder.notify_if_expired(now);
        let claim = holder.claim;
        let number = holder.next_number();
        holder.pending = Some((now, claim));
        let packed = codec::claim(
            &claim,
            number,
            self.instance,
            holder.client_session(now),
            dice(),
        );
        // The number of a store follows the beginning of its channel's name.
        let call = vec![Argument::Is(packed), Argument::Channel(String::new())];
        let (script, backend, name) = (
            self.script.clone(),
            self.backend.clone(),
            [holder.name.clone()],
        );
        // If it panics, the claim has failed.
        let running =
            tokio::spawn(async move { script.run_by_memory(&backend, &name, call, now).await });
        self.pending.spawn(async move {
            let reply = running.await.unwrap_or(Err(StoreError::Lost));
            (
                id,
                reply.and_then(|reply| codec::read_claim_reply(&reply).map_err(StoreError::failed)),
            )
        });
        self.set_timer(id, clock::after(now, claim.ttl / 3));
    }

    /// Takes in the reply to a claim, and sends the holder's next claim if there is one.
    ///
    /// A holder that leaves is forgotten once the store does not count it any more: the store has confirmed that
    /// claim, or the last claim that it confirmed has expired. An earlier claim that failed may still arrive, and
    /// would take slots for its whole life. So the holder stays until that is impossible, and then leaves again.
    pub(super) fn on_reply(&mut self, id: u64, reply: Result<ClaimReply, StoreError>) {
        let now = clock::now();
        self.wake(now);
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        let Some((sent, claim)) = holder.pending.take() else {
            return;
        };
        let pause = match reply {
            Ok(reply) => {
                self.backend.links.tally.in_time();
                if reply.publish_failed && !self.is_warned {
                    self.is_warned = true;
                    events::store_cannot_tell();
                }
                let pause = holder.on_reply(sent, claim, &reply, now, self.is_subscribed);
                self.last_sessions.keep(holder);
                pause
            }
            Err(error) => {
                holder.on_error(&claim, now);
                holder.notify(StoreEvent::Failed(error.clone()));
                if holder.claim.is_over() {
                    self.flushes
                        .iter_mut()
                        .for_each(|flush| flush.on_error(id, &error));
                    let has_expired = holder.valid_until.is_none_or(|until| until <= now);
                    if has_expired && holder.late_until(now).is_none() {
                        // The store does not count it any more.
                        return self.forget(id);
                    }
                }
                let longest = LONGEST_PAUSE.min(claim.ttl / 6);
                holder
                    .backoff
                    .get_or_insert_with(|| Backoff::up_to(longest))
                    .pause()
            }
        };
        if holder.claim.number > claim.number {
            self.send(id);
        } else if holder.claim.is_over() && holder.backoff.is_none() {
            match holder.late_until(now) {
                None => self.forget(id),
                Some(until) => self.set_timer(id, until),
            }
        } else {
            self.set_timer(id, clock::after(now, pause));
        }
    }

    /// Removes a holder.
    fn forget(&mut self, id: u64) {
        let Some(holder) = self.holders.remove(&id) else {
            return;
        };
        if let Some(timer) = holder.timer {
            self.timers.remove(&(timer, id));
        }
    }

    /// Returns whether no claim is pending, and no holder is about to leave.
    pub(super) fn are_all_settled(&self) -> bool {
        self.holders.values().all(Holder::is_settled)
    }

    /// Completes `done` when the store has confirmed all present claims.
    pub(super) fn flush(&mut self, done: oneshot::Sender<Result<(), StoreError>>) {
        self.flushes.push(Flush::new(&self.holders, done));
    }

    /// Completes the flushes that are done. Must be called only when no job is left in the queue.
    pub(super) fn complete_flushes(&mut self) {
        let holders = &self.holders;
        for flush in self.flushes.extract_if(.., |flush| flush.update(holders)) {
            flush.complete();
        }
    }

    /// Takes in a message to a holder.
    pub(super) fn on_message(&mut self, message: &[u8]) {
        let Ok((id, state)) = codec::read_holder_message(message) else {
            return;
        };
        if let Some(holder) = self.holders.get_mut(&id) {
            holder.on_message(state);
            self.last_sessions.keep(holder);
        }
    }

    /// Notes whether this process receives messages from now on. The claims of holders with waiters
    /// are repeated at once, to learn of what was missed.
    pub(super) fn set_subscribed(&mut self, is_subscribed: bool) {
        self.is_subscribed = is_subscribed;
        let now = clock::now();
        let waiting = self
            .holders
            .iter()
            .filter(|(_, holder)| holder.claim.wanted > 0);
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.set_timer(id, now);
        }
    }
}
