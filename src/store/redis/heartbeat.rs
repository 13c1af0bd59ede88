//! The claims of this process: sent when something changes, every third of a life, and again after Redis could not be reached. This
//! needs no limiter, so their runtimes may have ended.
//!
//! A claim is the whole state: of each holder only the last one counts, and one at a time is on its way.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::backend::Backend;
use super::codec::{self, Claimed, ToldSeats};
use super::script::{Argument, Script};
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::rng::{Backoff, dice, jittered};
use crate::store::in_flight::notify;
use crate::store::{Claim, StoreEvent, StoreListener, StoreSession};

/// How often a holder may repeat its last claim: the distance of two claim numbers on the wire.
const AGAIN: u64 = 1 << 20;

/// How often waiters poll if they cannot be notified of their seats.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// The longest pause between two attempts while Redis cannot be reached.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Added to the time until something expires in Redis, so that it has expired when asked.
const A_LITTLE: Duration = Duration::from_millis(2);

/// The most repeated claims on their way at the same time, so that the last of many is answered in time.
const MOST_AGAIN: usize = 100;

const SMALLEST_SWEEP: usize = 64;

pub(super) struct Claims {
    backend: Backend,
    script: Arc<Script>,
    /// The number of this store among all of the fleet.
    instance: u64,
    store_timeout: Duration,
    /// The holders, by number.
    holders: HashMap<u64, Holder>,
    timers: BTreeSet<(Instant, u64)>,
    /// The sessions of keys that no holder claims any more, and until when they are of use. They show whether a server has lost the
    /// state of other processes.
    remembered: HashMap<Arc<str>, (StoreSession, Instant)>,
    /// At this many, sessions of no more use are dropped.
    sweep_at: usize,
    on_their_way: JoinSet<(u64, Result<Claimed, StoreError>)>,
    /// Whether this process is notified of changes by others.
    told: bool,
    warned: bool,
    flushes: Vec<Flush>,
}

/// A caller that waits until the store has confirmed all claims.
struct Flush {
    /// The holders whose claims are not confirmed, and their last claim at that time. For a holder that is always busy, the answer to a
    /// later claim is enough.
    left: HashMap<u64, u64>,
    heard: Result<(), StoreError>,
    answer: oneshot::Sender<Result<(), StoreError>>,
}

struct Holder {
    name: Arc<str>,
    claim: Claim,
    listener: Arc<dyn StoreListener>,
    /// How often the claim was sent.
    said: u64,
    /// When the claim on its way was sent, and the claim.
    sent: Option<(Instant, Claim)>,
    session: Option<StoreSession>,
    /// Until when the last claim that was answered is valid.
    good_until: Option<Instant>,
    lost: bool,
    /// Since the last answer there were failures, with these pauses between them.
    backoff: Option<Backoff>,
    /// The last claim that was answered.
    answered: u64,
    /// A message that arrived before the answer that was sent before it.
    early: Option<ToldSeats>,
    /// How many news were sent to the listener.
    version: u64,
    timer: Option<Instant>,
}

impl Claims {
    pub(super) fn new(backend: Backend, instance: u64, store_timeout: Duration) -> Self {
        Claims {
            backend,
            script: Arc::new(Script::new(super::script::IN_FLIGHT)),
            instance,
            store_timeout,
            holders: HashMap::new(),
            timers: BTreeSet::new(),
            remembered: HashMap::new(),
            sweep_at: SMALLEST_SWEEP,
            on_their_way: JoinSet::new(),
            told: false,
            warned: false,
            flushes: Vec::new(),
        }
    }

    pub(super) fn script(&self) -> Arc<Script> {
        self.script.clone()
    }

    /// Takes in a claim of a limiter.
    pub(super) fn take(&mut self, name: String, claim: Claim, listener: Arc<dyn StoreListener>) {
        let id = claim.holder;
        let (name, remembered): (Arc<str>, _) = (name.into(), &mut self.remembered);
        let holder = self.holders.entry(id).or_insert_with(|| Holder {
            session: remembered.remove(&name).map(|(session, _)| session),
            name,
            claim: Claim::NONE,
            listener,
            said: 0,
            sent: None,
            good_until: None,
            lost: false,
            backoff: None,
            answered: 0,
            early: None,
            version: 0,
            timer: None,
        });
        if claim.number <= holder.claim.number {
            return;
        }
        (holder.claim, holder.said) = (claim, 0);
        if holder.sent.is_none() {
            self.send(id);
        }
    }

    /// Returns when something is due.
    pub(super) fn due_at(&self) -> Option<Instant> {
        let &(at, _) = self.timers.first()?;
        // If too many are on their way, their answers come first.
        (self.on_their_way.len() < MOST_AGAIN).then_some(at)
    }

    /// Does what is due.
    pub(super) fn due(&mut self) {
        let now = clock::now();
        while let Some(&(at, id)) = self.timers.first()
            && at <= now
            && self.on_their_way.len() < MOST_AGAIN
        {
            self.timers.pop_first();
            let Some(holder) = self.holders.get_mut(&id) else { continue };
            holder.timer = None;
            holder.tell_if_lost(now);
            if holder.sent.is_none() {
                self.send(id);
            } else {
                self.set_timer(id, clock::after(now, self.store_timeout));
            }
        }
    }

    /// Waits for the next answer to a claim.
    pub(super) async fn answer(&mut self) -> Option<(u64, Result<Claimed, StoreError>)> {
        self.on_their_way.join_next().await?.ok()
    }

    /// Sends all claims again, since a panic may have left some of them without a timer.
    pub(super) fn repeat_all(&mut self) {
        self.on_their_way = JoinSet::new();
        self.timers.clear();
        let now = clock::now();
        for (id, holder) in &mut self.holders {
            holder.sent = None;
            holder.timer = Some(now);
            self.timers.insert((now, *id));
        }
    }

    fn set_timer(&mut self, id: u64, at: Instant) {
        let Some(holder) = self.holders.get_mut(&id) else { return };
        let at = match holder.good_until {
            Some(good_until) if !holder.lost && holder.claim.in_use > 0 => at.min(good_until),
            _ => at,
        };
        if let Some(timer) = holder.timer.replace(at) {
            self.timers.remove(&(timer, id));
        }
        self.timers.insert((at, id));
    }

    fn send(&mut self, id: u64) {
        let (now, instance) = (clock::now(), self.instance);
        let Some(holder) = self.holders.get_mut(&id) else { return };
        holder.tell_if_lost(now);
        let claim = holder.claim;
        let number = claim.number.saturating_mul(AGAIN) + holder.said.min(AGAIN - 1);
        holder.said += 1;
        holder.sent = Some((now, claim));
        let is_of_use =
            |session: &StoreSession| now.saturating_duration_since(session.received()) < claim.ttl;
        let session = holder.session.filter(is_of_use).and_then(|session| session.client_session(now));
        let call = codec::claim(&claim, number, instance, session.unwrap_or_default(), dice());
        let (script, backend, name) = (self.script.clone(), self.backend.clone(), holder.name.clone());
        // A task of its own: a connection of the user's may panic, and that is an answer, too.
        // The number of the store follows the beginning of the channel's name.
        let call = vec![Argument::Is(call), Argument::Channel(String::new())];
        let asking = tokio::spawn(async move { script.run_by_memory(&backend, &name, call, now).await });
        self.on_their_way.spawn(async move {
            let answer = asking.await.unwrap_or(Err(StoreError::Lost));
            (id, answer.and_then(|answer| codec::read_claimed(&answer).map_err(StoreError::failed)))
        });
        self.set_timer(id, clock::after(now, claim.ttl / 3));
    }

    /// Takes in the answer to a claim.
    pub(super) fn answered(&mut self, id: u64, answer: Result<Claimed, StoreError>) {
        let (now, told) = (clock::now(), self.told);
        let Some(holder) = self.holders.get_mut(&id) else { return };
        let Some((sent, claim)) = holder.sent.take() else { return };
        let next = match answer {
            Ok(answer) => {
                if answer.mute && !std::mem::replace(&mut self.warned, true) {
                    events::store_cannot_tell();
                }
                holder.heard(sent, claim, &answer, now, told)
            }
            Err(error) => {
                holder.tell_if_lost(now);
                notify(holder.listener.clone(), claim.key, id, StoreEvent::Failed(error.clone()));
                if holder.claim.is_over() {
                    for flush in self.flushes.iter_mut().filter(|flush| flush.left.contains_key(&id)) {
                        flush.heard = Err(error.clone());
                    }
                    if holder.good_until.is_none_or(|until| until <= now) {
                        // It is not counted any more.
                        return self.forget(id);
                    }
                }
                let longest = LONGEST_PAUSE.min(claim.ttl / 6);
                holder.backoff.get_or_insert_with(|| Backoff::up_to(longest)).pause()
            }
        };
        if holder.claim.number > claim.number {
            self.send(id);
        } else if holder.claim.is_over() && holder.backoff.is_none() {
            self.forget(id);
        } else {
            self.set_timer(id, clock::after(now, next));
        }
    }

    fn forget(&mut self, id: u64) {
        let Some(Holder { name, claim, session, timer, .. }) = self.holders.remove(&id) else { return };
        if let Some(timer) = timer {
            self.timers.remove(&(timer, id));
        }
        if let Some(session) = session {
            self.remembered.insert(name, (session, clock::after(session.received(), claim.ttl)));
        }
        if self.remembered.len() >= self.sweep_at {
            let now = clock::now();
            self.remembered.retain(|_, (_, until)| *until > now);
            self.sweep_at = (2 * self.remembered.len()).max(SMALLEST_SWEEP);
        }
    }

    /// Returns whether the store has confirmed all claims.
    pub(super) fn all_heard(&self) -> bool {
        self.holders.values().all(Holder::is_heard)
    }

    /// Completes `answer` when the store has confirmed all present claims.
    pub(super) fn flush(&mut self, answer: oneshot::Sender<Result<(), StoreError>>) {
        let left = self.holders.iter().filter(|(_, holder)| !holder.is_heard());
        let left = left.map(|(id, holder)| (*id, holder.claim.number)).collect();
        self.flushes.push(Flush { left, heard: Ok(()), answer });
    }

    /// All jobs that were sent before have been taken: answers the flushes that are done.
    pub(super) fn rest(&mut self) {
        let (flushes, holders) = (&mut self.flushes, &self.holders);
        for flush in &mut *flushes {
            flush.left.retain(|id, number| {
                holders.get(id).is_some_and(|holder| !holder.is_heard() && holder.answered <= *number)
            });
        }
        for flush in flushes.extract_if(.., |flush| flush.left.is_empty() || flush.heard.is_err()) {
            let _ = flush.answer.send(flush.heard);
        }
    }

    /// Takes in a message to a holder.
    pub(super) fn on_event(&mut self, message: &[u8]) {
        if let Ok((id, told)) = codec::read_told(message)
            && let Some(holder) = self.holders.get_mut(&id)
        {
            match &mut holder.session {
                Some(session) if session.incarnation() == told.incarnation => {
                    if session.writes() < told.changes {
                        session.set_writes(told.changes);
                        holder.tell(told);
                    }
                }
                _ => holder.early = Some(told),
            }
        }
    }

    /// From now on this process is notified of changes, or no longer. Waiters ask for what they missed meanwhile.
    pub(super) fn set_told(&mut self, told: bool) {
        self.told = told;
        let now = clock::now();
        let waiting = self.holders.iter().filter(|(_, holder)| holder.claim.wanted > 0);
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.set_timer(id, now);
        }
    }
}

impl Holder {
    /// Takes in an answer. Returns after how long the claim is repeated.
    fn heard(&mut self, sent: Instant, claim: Claim, answer: &Claimed, now: Instant, told: bool) -> Duration {
        // A later message may have arrived before.
        let good_until = clock::after(sent, claim.ttl);
        (self.good_until, self.lost) = (Some(good_until), false);
        notify(self.listener.clone(), claim.key, claim.holder, StoreEvent::ClaimValidUntil(good_until));
        let ToldSeats { incarnation, changes, .. } = answer.told;
        let newer = |told: &ToldSeats| told.incarnation == incarnation && told.changes > changes;
        let newest = self.early.take().filter(newer).unwrap_or(answer.told);
        let known = self.session.filter(|session| session.incarnation() == incarnation);
        let known = known.map(|session| session.writes());
        let is_news = known.is_none_or(|known| known <= newest.changes);
        let changes = known.unwrap_or(0).max(newest.changes);
        self.backoff = None;
        self.answered = claim.number;
        self.session = Some(StoreSession::new(incarnation, changes, answer.now, sent, now));
        if is_news {
            self.tell(newest);
        }
        let third = claim.ttl / 3;
        if self.claim.wanted == 0 {
            return third;
        }
        let first_end = answer.first_end.map(|span| span + A_LITTLE);
        let learnt = (!answer.learning.is_zero()).then(|| answer.learning + A_LITTLE);
        let ask = (!told || answer.mute).then(|| jittered(ASK_AGAIN));
        [first_end, learnt, ask].into_iter().flatten().fold(third, Duration::min)
    }

    fn tell(&mut self, told: ToldSeats) {
        self.version += 1;
        let ToldSeats { number, given, others_wait, .. } = told;
        let claim = &mut self.claim;
        if number / AGAIN == claim.number {
            // A repeated claim is the whole state, since a server that lost its state does not know what it granted.
            let more = given.saturating_sub(claim.granted_seen);
            let seats = u32::try_from(more).unwrap_or(u32::MAX);
            claim.granted_seen += more;
            (claim.in_use, claim.wanted) =
                (claim.in_use.saturating_add(seats), claim.wanted.saturating_sub(seats));
        }
        let event = StoreEvent::in_flight(number / AGAIN, given, others_wait, self.version);
        notify(self.listener.clone(), self.claim.key, self.claim.holder, event);
    }

    /// Returns whether the store has confirmed its last claim.
    fn is_heard(&self) -> bool {
        self.sent.is_none() && !self.claim.is_over()
    }

    fn tell_if_lost(&mut self, now: Instant) {
        if !self.lost && self.claim.in_use > 0 && self.good_until.is_some_and(|until| until <= now) {
            self.lost = true;
            notify(self.listener.clone(), self.claim.key, self.claim.holder, StoreEvent::ClaimExpired);
        }
    }
}
