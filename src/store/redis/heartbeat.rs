//! The claims of this process: said once when something changes, again every third of a life, and again when the store
//! was away; so the gates need not be asked, and their runtimes may be gone.
//!
//! A claim says how things are: of each holder only the last one counts, and one at a time is on its way.

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
use crate::rng::{dice, jittered};
use crate::store::in_flight::notify;
use crate::store::{Claim, Listener, Memory, News};

/// How often a holder may say its last claim again: its numbers leave so much room.
const AGAIN: u64 = 1 << 20;

/// Where nobody tells those who wait that they have been given seats, they ask after so long.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Between two tries where the store is away; jittered, and doubled up to the longest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What runs out has run out a little later.
const A_LITTLE: Duration = Duration::from_millis(2);

/// So many claims that are said again may be on their way at the same time, so that the last of many is answered in time.
const MOST_AGAIN: usize = 100;

const SMALLEST_SWEEP: usize = 64;

pub(super) struct Claims {
    backend: Backend,
    script: Arc<Script>,
    /// Which store this is, to others.
    instance: u64,
    store_timeout: Duration,
    /// By their number.
    holders: HashMap<u64, Holder>,
    timers: BTreeSet<(Instant, u64)>,
    /// What is remembered of keys that nobody claims any more, until when it is of use: by it a server is found out that
    /// forgot others.
    remembered: HashMap<Arc<str>, (Remembered, Instant)>,
    /// At so many, those of no more use are forgotten.
    sweep_at: usize,
    on_their_way: JoinSet<(u64, Result<Claimed, StoreError>)>,
    /// Whether this process is told what others do.
    told: bool,
    warned: bool,
    flushes: Vec<Flush>,
}

/// One who wants to know when the store has heard all that was said.
struct Flush {
    /// Those of whom it has not heard all, and their last claim at that time: of one that is always busy, the answer to
    /// a later one will do.
    left: HashMap<u64, u64>,
    heard: Result<(), StoreError>,
    answer: oneshot::Sender<Result<(), StoreError>>,
}

struct Holder {
    name: Arc<str>,
    claim: Claim,
    listener: Arc<dyn Listener>,
    /// How often the claim was said.
    said: u64,
    /// When the claim that is on its way was sent, and what it was.
    sent: Option<(Instant, Claim)>,
    memory: Option<Remembered>,
    /// Until when the last claim that was answered is good.
    good_until: Option<Instant>,
    lost: bool,
    failures: u32,
    /// The last claim that was answered.
    answered: u64,
    /// What arrived before the answer that came before it.
    early: Option<ToldSeats>,
    /// How much was told: what comes later is newer.
    version: u64,
    timer: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Remembered {
    incarnation: u64,
    changes: u64,
    seen: u64,
    sent: Instant,
    heard: Instant,
    /// By how much the wall clock was ahead then: a machine that slept since knows nothing of the time.
    wall_ahead: i64,
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

    /// A gate claims.
    pub(super) fn take(&mut self, name: String, claim: Claim, listener: Arc<dyn Listener>) {
        let id = claim.holder;
        let (name, remembered): (Arc<str>, _) = (name.into(), &mut self.remembered);
        let holder = self.holders.entry(id).or_insert_with(|| Holder {
            memory: remembered.remove(&name).map(|(memory, _)| memory),
            name,
            claim: Claim::NONE,
            listener,
            said: 0,
            sent: None,
            good_until: None,
            lost: false,
            failures: 0,
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

    /// When something is to be done.
    pub(super) fn due_at(&self) -> Option<Instant> {
        let &(at, _) = self.timers.first()?;
        // Where too many are on their way, their answers come first.
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

    /// Answers when a claim has been answered, and what.
    pub(super) async fn answer(&mut self) -> Option<(u64, Result<Claimed, StoreError>)> {
        self.on_their_way.join_next().await?.ok()
    }

    /// Says all claims again, as when a panic may have left some of them without a timer.
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
            Some(good_until) if !holder.lost && holder.claim.sits > 0 => at.min(good_until),
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
        let memory = holder.memory.filter(|memory| now.saturating_duration_since(memory.heard) < claim.life);
        let memory = memory.map_or_else(Memory::default, |memory| memory.tell(now));
        let call = codec::claim(&claim, number, instance, memory, dice());
        let (script, backend, name) = (self.script.clone(), self.backend.clone(), holder.name.clone());
        // A task of its own: a connection of the user's may panic, and that is an answer, too.
        // The number of the store follows the beginning of the channel's name.
        let call = vec![Argument::Is(call), Argument::Channel(String::new())];
        let asking = tokio::spawn(async move { script.run_by_memory(&backend, &name, call, now).await });
        self.on_their_way.spawn(async move {
            let answer = asking.await.unwrap_or(Err(StoreError::Lost));
            (id, answer.and_then(|answer| codec::read_claimed(&answer).map_err(StoreError::failed)))
        });
        self.set_timer(id, clock::after(now, claim.life / 3));
    }

    /// A claim has been answered.
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
                holder.failures += 1;
                holder.tell_if_lost(now);
                notify(holder.listener.clone(), claim.key, id, News::Failed(error.clone()));
                if holder.claim.is_over() {
                    for flush in self.flushes.iter_mut().filter(|flush| flush.left.contains_key(&id)) {
                        flush.heard = Err(error.clone());
                    }
                    if holder.good_until.is_none_or(|until| until <= now) {
                        // It is not counted any more.
                        return self.forget(id);
                    }
                }
                let pause = SHORTEST_PAUSE.saturating_mul(1 << holder.failures.min(10)).min(LONGEST_PAUSE);
                jittered(pause.min(claim.life / 6))
            }
        };
        if holder.claim.number > claim.number {
            self.send(id);
        } else if holder.claim.is_over() && holder.failures == 0 {
            self.forget(id);
        } else {
            self.set_timer(id, clock::after(now, next));
        }
    }

    fn forget(&mut self, id: u64) {
        let Some(Holder { name, claim, memory, timer, .. }) = self.holders.remove(&id) else { return };
        if let Some(timer) = timer {
            self.timers.remove(&(timer, id));
        }
        if let Some(memory) = memory {
            self.remembered.insert(name, (memory, clock::after(memory.heard, claim.life)));
        }
        if self.remembered.len() >= self.sweep_at {
            let now = clock::now();
            self.remembered.retain(|_, (_, until)| *until > now);
            self.sweep_at = (2 * self.remembered.len()).max(SMALLEST_SWEEP);
        }
    }

    /// Whether the store has heard all there is to say.
    pub(super) fn all_heard(&self) -> bool {
        self.holders.values().all(Holder::is_heard)
    }

    /// Answers when the store has heard all there is to say now.
    pub(super) fn flush(&mut self, answer: oneshot::Sender<Result<(), StoreError>>) {
        let left = self.holders.iter().filter(|(_, holder)| !holder.is_heard());
        let left = left.map(|(id, holder)| (*id, holder.claim.number)).collect();
        self.flushes.push(Flush { left, heard: Ok(()), answer });
    }

    /// There is nothing else to be done at the moment: all that was said before has been taken.
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

    /// The other side has told a holder something.
    pub(super) fn hear(&mut self, message: &[u8]) {
        if let Ok((id, told)) = codec::read_told(message)
            && let Some(holder) = self.holders.get_mut(&id)
        {
            match &mut holder.memory {
                Some(memory) if memory.incarnation == told.incarnation => {
                    if memory.changes < told.changes {
                        memory.changes = told.changes;
                        holder.tell(told);
                    }
                }
                _ => holder.early = Some(told),
            }
        }
    }

    /// From now on this process is told what others do, or is no longer. What it was not told meanwhile, it asks.
    pub(super) fn set_told(&mut self, told: bool) {
        self.told = told;
        let now = clock::now();
        let waiting = self.holders.iter().filter(|(_, holder)| holder.claim.wants > 0);
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.set_timer(id, now);
        }
    }
}

impl Holder {
    /// Takes in an answer. Answers after how long the claim is to be said again.
    fn heard(&mut self, sent: Instant, claim: Claim, answer: &Claimed, now: Instant, told: bool) -> Duration {
        // What others did since may have been told already.
        let good_until = clock::after(sent, claim.life);
        (self.good_until, self.lost) = (Some(good_until), false);
        notify(self.listener.clone(), claim.key, claim.holder, News::Good(good_until));
        let ToldSeats { incarnation, changes, .. } = answer.told;
        let newer = |told: &ToldSeats| told.incarnation == incarnation && told.changes > changes;
        let newest = self.early.take().filter(newer).unwrap_or(answer.told);
        let known =
            self.memory.filter(|memory| memory.incarnation == incarnation).map(|memory| memory.changes);
        let is_news = known.is_none_or(|known| known <= newest.changes);
        let changes = known.unwrap_or(0).max(newest.changes);
        (self.failures, self.answered) = (0, claim.number);
        let wall_ahead = clock::wall_ahead();
        self.memory =
            Some(Remembered { incarnation, changes, seen: answer.now, sent, heard: now, wall_ahead });
        if is_news {
            self.tell(newest);
        }
        let third = claim.life / 3;
        if self.claim.wants == 0 {
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
            // Said again, it says how things are: a server that forgot knows nothing of what it gave.
            let more = given.saturating_sub(claim.heard);
            let seats = u32::try_from(more).unwrap_or(u32::MAX);
            claim.heard += more;
            (claim.sits, claim.wants) = (claim.sits.saturating_add(seats), claim.wants.saturating_sub(seats));
        }
        let news = News::seats(number / AGAIN, given, others_wait, self.version);
        notify(self.listener.clone(), self.claim.key, self.claim.holder, news);
    }

    /// Whether the store has heard all that it has to say.
    fn is_heard(&self) -> bool {
        self.sent.is_none() && !self.claim.is_over()
    }

    fn tell_if_lost(&mut self, now: Instant) {
        if !self.lost && self.claim.sits > 0 && self.good_until.is_some_and(|until| until <= now) {
            self.lost = true;
            notify(self.listener.clone(), self.claim.key, self.claim.holder, News::Lost);
        }
    }
}

impl Remembered {
    fn tell(&self, now: Instant) -> Memory {
        if clock::has_slept(self.wall_ahead, now.saturating_duration_since(self.heard)) {
            return Memory::default();
        }
        Memory {
            incarnation: self.incarnation,
            writes: self.changes,
            seen: self.seen,
            since: now.saturating_duration_since(self.heard),
            trip: self.heard.saturating_duration_since(self.sent),
            granted: 0,
        }
    }
}
