//! What one caller does with its request, and what the upstream sees of it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::{Either, poll_fn, select};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

use super::api::{Gates, Outcomes, Permit, Refused, Sent, Upstream};
use super::features::Feature;
use super::fleet::{HOUR, Process, World, lock, ms};
use super::known;
use super::plan::{Answer, Part, Patience, Request, Then, Via};
use super::upstream::{BadAnswer, HoldEvent, KeyOf, Unit, Use};

pub(crate) fn count_refusal(outcomes: &mut Outcomes, refused: &Refused) {
    match refused {
        Refused::Local(_) => outcomes.refused += 1,
        Refused::Store(_) => outcomes.store += 1,
        Refused::Inner => {}
    }
}

/// A future of a process: while the process stands still, it is not polled.
pub(crate) struct AsIt {
    inner: Pin<Box<dyn Future<Output = ()> + Send>>,
    process: Arc<Process>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl AsIt {
    pub(crate) fn runs(
        inner: impl Future<Output = ()> + Send + 'static,
        process: &Arc<Process>,
    ) -> Self {
        AsIt {
            inner: Box::pin(inner),
            process: process.clone(),
            timer: None,
        }
    }
}

impl Future for AsIt {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let until = *lock(&self.process.stalled_until);
        if Instant::now() < until {
            let timer = self.timer.insert(Box::pin(sleep_until(until)));
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        self.inner.as_mut().poll(cx)
    }
}

/// One request and its caller.
pub(crate) struct Caller {
    pub(crate) world: Arc<World>,
    pub(crate) process: Arc<Process>,
    pub(crate) gates: Arc<Gates>,
    pub(crate) number: usize,
    pub(crate) request: Request,
}

/// What a caller and the upstream know of a request through a layer.
#[derive(Default)]
struct Seen {
    polls: AtomicU64,
    is_sent: AtomicBool,
    has_ended: AtomicBool,
}

/// Counts a request as cancelled if it is dropped while it waits.
struct Watch {
    process: Arc<Process>,
    seen: Arc<Seen>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Seen {
            polls,
            is_sent,
            has_ended,
        } = &*self.seen;
        let is_over = is_sent.load(Ordering::Relaxed) || has_ended.load(Ordering::Relaxed);
        if polls.load(Ordering::Relaxed) > 0 && !is_over {
            lock(&self.process.outcomes).cancelled += 1;
        }
    }
}

/// A request is polled no more often than this at one moment.
const MOST_POLLS: u32 = 5_000;

impl Caller {
    pub(crate) async fn run(self) {
        let this = Arc::new(self);
        let begin = Instant::now();
        let seen = Arc::new(Seen::default());
        match this.request.via {
            Via::Acquire => {
                let acquire = this.gates.acquire(&this.request);
                let outcome = this.patient(acquire, seen).await;
                this.check_wait(begin);
                match outcome {
                    Some(Ok(permit)) => {
                        this.note("granted");
                        lock(&this.process.outcomes).granted += 1;
                        this.granted(permit).await;
                    }
                    Some(Err(refused)) => {
                        this.note(&format!("{refused:?}"));
                        count_refusal(&mut lock(&this.process.outcomes), &refused)
                    }
                    None => this.note("gave up"),
                }
            }
            Via::Layer | Via::Retry => {
                let upstream = this.clone().upstream(seen.clone(), begin);
                let call = this.gates.call(&this.request, upstream);
                match this.patient(call, seen.clone()).await {
                    Some(Ok(response)) => {
                        if let (Some(settled), Some((percent, after))) =
                            (response.settlement, this.request.actual)
                        {
                            sleep(ms(after)).await;
                            let (cost, tokens) = this.actual(percent);
                            settled.settle(cost, tokens);
                        }
                    }
                    Some(Err(refused)) if !seen.is_sent.load(Ordering::Relaxed) => {
                        this.note(&format!("{refused:?}"));
                        this.check_wait(begin);
                        count_refusal(&mut lock(&this.process.outcomes), &refused);
                    }
                    Some(Err(_)) => {}
                    None => this.note("gave up"),
                }
            }
        }
        *lock(&this.world.log).ends.entry(this.number).or_default() += 1;
    }

    fn note(&self, what: &str) {
        self.world
            .note(|| format!("{}.{} {what}", self.process.number, self.number));
    }

    /// Polls the future as the caller does. Returns `None` if the caller gives up.
    async fn patient<T>(
        &self,
        mut future: Pin<Box<dyn Future<Output = T> + Send>>,
        seen: Arc<Seen>,
    ) -> Option<T> {
        let watch = Watch {
            process: self.process.clone(),
            seen: seen.clone(),
        };
        let (world, number) = (self.world.clone(), self.number);
        let mut at_once = (Instant::now(), 0_u32);
        // `None` if it is polled again and again while no time passes.
        let watched = poll_fn(move |cx| {
            let _ = &watch;
            seen.polls.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            at_once = if at_once.0 == now {
                (now, at_once.1 + 1)
            } else {
                (now, 0)
            };
            if at_once.1 > MOST_POLLS {
                world.wrong(&format!("request {number} wakes without end"));
                return Poll::Ready(None);
            }
            let polled = future.as_mut().poll(cx);
            if polled.is_ready() {
                seen.has_ended.store(true, Ordering::Relaxed);
            }
            polled.map(Some)
        });
        let mut watched = Box::pin(watched);
        let polls = |most: u32| {
            let mut left = most;
            poll_fn(move |cx| {
                if left == 0 {
                    return Poll::Ready(None);
                }
                left -= 1;
                watched.as_mut().poll(cx)
            })
        };
        let waits = self.world.history.limiters.iter().map(|plan| plan.max_wait);
        let longest = HOUR + ms(waits.max().unwrap_or(0));
        let gave_up = |feature| lock(&self.world.log).met(feature);
        match self.request.patience {
            Patience::Endless => match timeout(longest, polls(u32::MAX)).await {
                Ok(ended) => ended,
                Err(_) => {
                    self.world
                        .wrong(&format!("request {} never ends", self.number));
                    None
                }
            },
            Patience::Time(span) => {
                let ended = timeout(ms(span), polls(u32::MAX)).await.ok().flatten();
                if ended.is_none() {
                    gave_up(Feature::Cancel);
                }
                ended
            }
            Patience::Polls(most) => {
                let ended = timeout(longest, polls(most)).await.ok().flatten();
                if ended.is_none() {
                    gave_up(Feature::Cancel);
                }
                ended
            }
            Patience::Idle {
                polls: most,
                rest,
                waits,
            } => {
                let mut future = Box::pin(polls(u32::MAX));
                for _ in 0..most {
                    if let Some(ended) = future.as_mut().now_or_never() {
                        return ended;
                    }
                }
                gave_up(Feature::Idle);
                sleep(ms(rest)).await;
                if waits {
                    timeout(longest, future).await.ok().flatten()
                } else {
                    None
                }
            }
        }
    }

    /// A request waits for at most `max_wait`, and until its deadline.
    fn check_wait(&self, begin: Instant) {
        let features = self.world.history.features;
        let plans = self
            .request
            .parts
            .iter()
            .map(|part| &self.world.history.limiters[part.limiter]);
        let longest = plans
            .map(|plan| plan.max_wait)
            .chain(self.request.deadline)
            .min()
            .unwrap_or(0);
        // A request waits for an answer of the store for a second at least.
        let is_late = self.world.history.store.trip.is_some()
            || (self.request.parts.len() > 1
                && features.has(Feature::SetQuota)
                && known::WAITS_AFTER_SET_QUOTAS.stands());
        let is_behind = features.has(Feature::Refusals) && known::WAITS_BEHIND_PROBES.stands();
        let is_back = features.has(Feature::FallbackShare) && known::WAITS_AFTER_AN_OUTAGE.stands();
        let is_told = features.has(Feature::Deploys) && known::WAITS_WITHOUT_SHARES.stands();
        // A request of several keys or units waits for two answers: for its rates, and then for its in-flight slots.
        let waits_twice = self.request.parts.iter().any(|part| {
            let plan = &self.world.history.limiters[part.limiter];
            plan.in_flight.is_some() && (plan.tokens.is_some() || self.request.parts.len() > 1)
        });
        let slack = match is_late {
            _ if is_back => 25_000,
            _ if is_behind => 5_000,
            _ if is_told => 4_000,
            true if waits_twice => 2600,
            true => 1600,
            false => 100,
        };
        let is_awake = !self.world.net.is_real()
            && self.request.patience == Patience::Endless
            && self.request.via != Via::Retry
            && !features.has(Feature::Stalls);
        if is_awake && begin.elapsed() > ms(longest + slack) {
            let waited = begin.elapsed();
            self.world.wrong(&format!(
                "request {} waited for {waited:?}, not {longest} ms",
                self.number
            ));
        }
    }

    /// Returns the true cost.
    fn actual(&self, percent: u32) -> (u32, u32) {
        let part = &self.request.parts[0];
        (part.cost * percent / 100, part.tokens * percent / 100)
    }

    /// The upstream of a call through a layer.
    fn upstream(self: Arc<Self>, seen: Arc<Seen>, begin: Instant) -> Upstream {
        Arc::new(move || {
            let (this, seen) = (self.clone(), seen.clone());
            if *lock(&this.world.log)
                .arrivals
                .get(&this.number)
                .unwrap_or(&0)
                == 0
            {
                this.check_wait(begin);
            } else {
                lock(&this.world.log).met(Feature::Retry);
            }
            lock(&this.process.outcomes).granted += 1;
            seen.is_sent.store(true, Ordering::Relaxed);
            this.check_holds();
            let mut call = this.arrive(this.world.now(), this.gates.take_uncounted());
            async move {
                let request = &this.request;
                sleep(ms(request.transit + request.takes.max(1))).await;
                let is_first = lock(&this.world.log).arrivals[&this.number] == 1;
                let answer = match request.then {
                    // The upstream accepts what is sent again.
                    Then::Use { answer, .. } if is_first || request.via != Via::Retry => answer,
                    _ => Answer::Ok,
                };
                call.end();
                call.answer(answer);
                lock(&this.world.log).met(Feature::Layer);
                seen.is_sent.store(false, Ordering::Relaxed);
                if request.via != Via::Retry || !matches!(answer, Answer::Refused(_)) {
                    seen.is_sent.store(true, Ordering::Relaxed);
                }
                answer
            }
            .boxed()
        })
    }

    async fn granted(self: &Arc<Self>, permit: Permit) {
        let is_uncounted = self.gates.take_uncounted();
        let (world, request) = (&self.world, &self.request);
        if request.patience == Patience::Endless {
            let line = (self.process.number, request.parts.clone(), request.class);
            let now = world.now();
            lock(&world.log)
                .grants
                .entry(line)
                .or_default()
                .push((self.number, now));
        }
        self.check_holds();
        if !permit.is_valid() && !world.net.is_real() {
            world.wrong(&format!(
                "request {} has a permit that has expired",
                self.number
            ));
        }
        match request.then {
            Then::GiveBack(after) => {
                sleep(ms(after.max(1))).await;
                lock(&world.log).met(Feature::GiveBack);
                permit.give_back();
            }
            Then::Use { after, answer } => {
                if after > 0 {
                    sleep(ms(after)).await;
                }
                let at = self.world.now();
                if let Some(sent) = permit.begin() {
                    let call = self.arrive(at, is_uncounted);
                    self.send(sent, answer, call).await;
                }
            }
        }
    }

    /// Follows the call until it is answered.
    async fn send(self: &Arc<Self>, mut sent: Sent, answer: Answer, mut call: Call) {
        let request = &self.request;
        let begun = Instant::now();
        let ends = begun + ms(request.transit + request.takes.max(1));
        let mut stated = request
            .actual
            .map(|(percent, after)| (percent, begun + ms(after)));
        let settle = |(percent, at)| async move {
            sleep_until(at).await;
            self.actual(percent)
        };
        if let Some(early) = stated.take_if(|(_, at)| *at <= ends) {
            let (cost, tokens) = settle(early).await;
            call.settled();
            sent.settle(cost, tokens);
        }
        let is_revoked = {
            let revoked = std::pin::pin!(sent.revoked());
            let takes = std::pin::pin!(sleep_until(ends));
            matches!(select(takes, revoked).await, Either::Right(_))
        };
        if is_revoked {
            call.end();
            return;
        }
        if let Some(late) = stated {
            let (cost, tokens) = settle(late).await;
            call.settled();
            sent.settle(cost, tokens);
        }
        call.end();
        call.answer(answer);
        sent.answered(answer);
    }

    /// No request leaves while its key is on hold.
    fn check_holds(&self) {
        let world = &self.world;
        let features = world.history.features;
        // A process without room for the state of a key learns of its hold from the store.
        if features.any(&[Feature::FewKeys, Feature::Stalls]) || world.net.is_real() {
            return;
        }
        let is_reliable = !features.any(&[Feature::Lossy, Feature::Outages]);
        let notice = world
            .history
            .store
            .trip
            .map_or(0, |(_, longest)| (longest + 20) * 1000);
        let now = world.now();
        // Two ends closer than 5 ms, or than a fiftieth of the hold, are one end, seen after different trips.
        let same = |event: &HoldEvent| {
            let span = event.until.unwrap_or(event.at) - event.at;
            (span / 50).max(5_000) + notice
        };
        let (holds, no_wait_stated) = {
            let log = lock(&world.log);
            (log.holds.clone(), log.unstated.clone())
        };
        let is_of_a_probe = |event: &HoldEvent| {
            let ended = |other: &HoldEvent| {
                // Its probe may be out for ten seconds.
                let until_now = event.at.saturating_sub(10_000_000)..=now;
                other.key == event.key && other.until.is_some_and(|end| until_now.contains(&end))
            };
            let longest = world.history.limiters[event.key.0].max_hold * 1000;
            // Its hold has ended, perhaps just before.
            let unstated = |&(key, at): &(KeyOf, u64)| {
                key == event.key && (at..=at + longest + 1_000_000).contains(&event.at)
            };
            known::ACCEPTED_PROBES.stands()
                && (holds.iter().any(ended) || no_wait_stated.iter().any(unstated))
        };
        let is_lost = |event: &HoldEvent| {
            let troubles = lock(&world.net.troubles);
            let during = |(from, to): &(Instant, Instant)| {
                (world.since_start(*from)..=world.since_start(*to)).contains(&event.at)
            };
            known::HOLDS_OF_AN_OUTAGE.stands() && troubles.iter().any(during)
        };
        // Each class is a key of its own in the store.
        let is_reliable = is_reliable
            && !(features.has(Feature::Deploys) && known::HOLDS_WITHOUT_SHARES.stands());
        let is_divided = features.has(Feature::Classes);
        // A process that is killed may not have told its hold.
        let is_dead: Vec<bool> = lock(&world.processes)
            .iter()
            .map(|process| process.gates().is_none())
            .collect();
        let mut log = lock(&world.log);
        let is_held = |part: &&Part| {
            let counts = [part.cost, part.tokens];
            let counts =
                &counts[..1 + usize::from(world.history.limiters[part.limiter].tokens.is_some())];
            counts.iter().any(|units| *units > 0)
        };
        let parts = self.request.parts.iter().filter(is_held);
        for key in parts.map(|part| (part.limiter, part.key)) {
            let events = || log.holds.iter().filter(move |event| event.key == key);
            let released = events()
                .filter(|event| event.until.is_none())
                .map(|event| event.at)
                .max();
            let held = events().find(|event| {
                let is_ours = event.process == self.process.number;
                let is_told = is_reliable && !event.is_private && !is_dead[event.process];
                // The classes of a key are told by the store, also in the process of the hold.
                let is_ours = is_ours && (!is_divided || event.at + notice < now);
                let is_noticed = is_ours || (is_told && event.at + notice < now);
                is_noticed
                    && !is_of_a_probe(event)
                    && !is_lost(event)
                    && event.until > Some(now + same(event))
                    // A release and a hold that cross arrive in either order.
                    && released.is_none_or(|at| at + notice < event.asked)
            });
            if let Some(held) = held.copied() {
                let number = self.number;
                log.wrong(
                    now,
                    &format!("request {number} left while its key is on hold: {held:?}"),
                );
                return;
            }
        }
    }

    /// The request leaves.
    fn arrive(self: &Arc<Self>, at: u64, is_uncounted: bool) -> Call {
        let (world, request) = (&self.world, &self.request);
        let at = at + request.transit * 1000;
        self.note("leaves");
        let mut log = lock(&world.log);
        *log.arrivals.entry(self.number).or_default() += 1;
        if is_uncounted {
            log.met(Feature::FailOpen);
        }
        let call = Call {
            caller: self.clone(),
            at,
            is_uncounted,
            end: None,
            settled: None,
            is_counted: false,
        };
        drop(log);
        call
    }
}

/// A call at the upstream. If it is dropped, it ends.
struct Call {
    caller: Arc<Caller>,
    at: u64,
    is_uncounted: bool,
    end: Option<u64>,
    settled: Option<u64>,
    is_counted: bool,
}

impl Call {
    fn end(&mut self) {
        self.end.get_or_insert(self.caller.world.now());
        self.count();
    }

    /// The true cost is stated now.
    fn settled(&mut self) {
        self.settled = Some(self.caller.world.now());
        self.count();
    }

    fn answer(&self, answer: Answer) {
        let Caller {
            world,
            request,
            process,
            ..
        } = &*self.caller;
        let (now, part) = (
            world.now(),
            request.parts.last().expect("a request has a key"),
        );
        let plan = &world.history.limiters[part.limiter];
        let is_bad = match answer {
            Answer::Refused(_) => true,
            Answer::Bad => request.via != Via::Acquire,
            Answer::Ok | Answer::Nothing => false,
        };
        let first = &request.parts[0];
        // Without a key function, a layer counts by the host. What costs nothing passes a stop.
        let guarded = &world.history.limiters[first.limiter];
        let is_bad = is_bad && first.cost > 0 && (guarded.keys > 0 || request.via != Via::Acquire);
        if is_bad && guarded.guard.is_some() {
            let mut log = lock(&world.log);
            log.met(Feature::Guard);
            log.bad
                .entry((first.limiter, first.key))
                .or_default()
                .push(BadAnswer {
                    sent: self.at - request.transit * 1000,
                    at: now,
                });
        }
        let key = (part.limiter, part.key);
        if let Answer::Ok = answer {
            let mut log = lock(&world.log);
            let of = |part: &Part| (part.limiter, part.key);
            for key in request.parts.iter().map(of) {
                log.accepted.entry(key).and_modify(|count| *count += 1);
            }
        }
        if let Answer::Refused(stated) = answer {
            let mut log = lock(&world.log);
            log.met(Feature::Refusals);
            let may_hold_a_kind = *log.accepted.entry(key).or_default() >= 3;
            drop(log);
            if stated.is_none_or(|seconds| seconds == 0) {
                lock(&world.log).unstated.push((key, now));
            }
            // Without a key function, a refusal through a layer holds the host only.
            let has_keys = plan.keys > 0 || request.via == Via::Acquire;
            if let Some(seconds) =
                stated.filter(|seconds| *seconds > 0 && has_keys && plan.max_hold > 0)
                && !may_hold_a_kind
            {
                let until = now + (seconds * 1000).min(plan.max_hold) * 1000;
                // Others are told once a second.
                let log = lock(&world.log);
                let is_recent = |of: KeyOf, at: u64| of == key && at + 1_200_000 > now;
                let is_hold =
                    |event: &HoldEvent| event.until.is_some() && is_recent(event.key, event.at);
                let recent = log.holds.iter().any(is_hold)
                    || log.unstated.iter().any(|(of, at)| is_recent(*of, *at));
                drop(log);
                // It takes effect when the answer has been taken in, in this moment.
                world.hold(key, process.number, now, Some(until), recent);
            }
        }
    }

    /// Adds the units to what the upstream has counted, once.
    fn count(&mut self) {
        let Caller { world, request, .. } = &*self.caller;
        if self.is_counted {
            return;
        }
        let now = world.now();
        let limiters = &world.history.limiters;
        let is_late = request
            .parts
            .iter()
            .any(|part| limiters[part.limiter].counted_within > 0);
        if is_late && request.actual.is_some() && self.settled.is_none() && self.end.is_none() {
            return;
        }
        self.is_counted = true;
        if self.is_uncounted {
            return;
        }
        let percent = request.actual.map_or(100, |(percent, _)| percent);
        let mut log = lock(&world.log);
        for part in &request.parts {
            for (unit, units) in [(Unit::Requests, part.cost), (Unit::Tokens, part.tokens)] {
                let actual = units * percent / 100;
                let at = if limiters[part.limiter].counted_within > 0 {
                    now
                } else {
                    self.at
                };
                let underestimated = actual.saturating_sub(units);
                let known_at = self.settled;
                let uses = log.uses.entry((part.limiter, part.key, unit)).or_default();
                uses.push(Use {
                    at,
                    units: actual,
                    underestimated,
                    known_at,
                });
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end();
        let Caller { world, request, .. } = &*self.caller;
        let end = self.end.unwrap_or(self.at);
        if !self.is_uncounted {
            let mut log = lock(&world.log);
            for part in request.parts.iter().filter(|part| part.cost > 0) {
                log.calls
                    .entry((part.limiter, part.key))
                    .or_default()
                    .push((self.at, end));
            }
        }
    }
}
