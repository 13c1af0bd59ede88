//! Many waiters at once: bursts that leave in the windows they need, and crowds that enter and leave in any order, cancelled
//! at any poll. Nothing of them stays behind. Under a paused clock.
//!
//! The tests poll the requests themselves, as a runtime does: those that were woken, one after the other. So each poll can
//! take its time, and a request can be dropped before or after any of its polls.

use super::everything::dice::{Dice, of_history, only_history};
use super::everything::known;
use crate::support::over;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::FutureExt;
use over::over;
use tokio::sync::Notify;
use tokio::time::{Instant, advance, sleep, timeout};
use tollgate::limiter::Acquire;
use tollgate::quota::Limit;
use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer, Reason, Sent};

const MICRO: Duration = Duration::from_micros(1);
const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// How long a call takes, at most.
const LONGEST_CALL: Duration = Duration::from_millis(60);
const LONG: Duration = Duration::from_secs(80_000);

fn limiter(quota: Quota, max_wait: Duration) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(max_wait);
    let layer = builder.max_queue(1_000_000).build();
    layer.unwrap().limiter()
}

/// The waiters that were woken, in order.
#[derive(Default)]
struct Woken {
    queue: Mutex<VecDeque<usize>>,
    notify: Notify,
}

impl Woken {
    fn pop(&self) -> Option<usize> {
        self.queue.lock().unwrap().pop_front()
    }

    /// Waits until a waiter is woken.
    async fn next(&self) -> usize {
        loop {
            if let Some(number) = self.pop() {
                return number;
            }
            self.notify.notified().await;
        }
    }
}

/// What wakes a waiter.
struct Bell {
    number: usize,
    woken: Arc<Woken>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.woken.queue.lock().unwrap().push_back(self.number);
        self.woken.notify.notify_one();
    }
}

/// A request that waits, or will.
struct Waiter {
    request: Pin<Box<Acquire>>,
    waker: Waker,
    polls: usize,
}

/// Requests that the test polls itself. The number of a request is its place in the order of entry.
#[derive(Default)]
struct Crowd {
    waiters: Vec<Option<Waiter>>,
    woken: Arc<Woken>,
}

impl Crowd {
    /// Adds a request, which is not polled yet. Returns its number.
    fn add(&mut self, request: Acquire) -> usize {
        let number = self.waiters.len();
        let bell = Bell {
            number,
            woken: self.woken.clone(),
        };
        self.waiters.push(Some(Waiter {
            request: Box::pin(request),
            waker: Waker::from(Arc::new(bell)),
            polls: 0,
        }));
        number
    }

    /// Polls the request, unless it has ended. Returns how it ended.
    fn poll(&mut self, number: usize) -> Option<Result<Permit, Limited>> {
        let waiter = self.waiters[number].as_mut()?;
        waiter.polls += 1;
        let cx = &mut Context::from_waker(&waiter.waker);
        match waiter.request.as_mut().poll(cx) {
            Poll::Ready(ended) => {
                self.waiters[number] = None;
                Some(ended)
            }
            Poll::Pending => None,
        }
    }
}

/// How a burst left: who, when, and with what cost, in the order of time.
type Departures = Vec<(usize, Instant)>;

/// Sends all requests of a burst, on one core: each poll takes `work` of the virtual time. First each is polled once, then
/// those that are woken. `between` runs when all have entered.
async fn burst(
    requests: impl Iterator<Item = Acquire>,
    work: Duration,
    between: impl AsyncFnOnce(),
) -> Departures {
    let mut crowd = Crowd::default();
    let mut left = Departures::new();
    let mut poll = async |crowd: &mut Crowd, number| {
        let ended = crowd.poll(number);
        // A permit that a request gets in a poll is valid in it.
        let sent = ended.map(|permit| permit.unwrap().begin().unwrap());
        left.extend(sent.map(|_| (number, Instant::now())));
        advance(work).await;
        left.len()
    };
    for request in requests {
        let number = crowd.add(request);
        poll(&mut crowd, number).await;
    }
    between().await;
    let all = crowd.waiters.len();
    let start = Instant::now();
    loop {
        let woken = timeout(20 * SECOND, crowd.woken.next()).await;
        let count = poll(&mut crowd, woken.expect("a waiter is never woken")).await;
        if count == all {
            return left;
        }
        // A burst that collapses may take hours.
        assert!(start.elapsed() < 20 * SECOND, "{count} of {all} have left");
    }
}

/// Returns the most of `left` in any window.
fn most(left: &Departures, window: Duration) -> usize {
    let mut from = 0;
    let counts = left.iter().enumerate().map(|(to, (_, at))| {
        while *at - left[from].1 >= window {
            from += 1;
        }
        to + 1 - from
    });
    counts.max().unwrap_or(0)
}

/// Asserts that `requests` that may leave in so many windows have taken no longer than that: with the margin of each window.
#[track_caller]
fn assert_windows(took: Duration, windows: f64) {
    println!("{took:?} for {windows} windows");
    let most = windows * 1.03 + 0.1;
    assert!(took.as_secs_f64() < most, "{took:?} for {windows} windows");
}

/// Returns by how many places a request was overtaken, at most.
fn overtaken(left: &Departures) -> usize {
    let places = left.iter().enumerate();
    let behind = places.map(|(place, (number, _))| place.saturating_sub(*number));
    behind.max().unwrap_or(0)
}

/// How many requests leave in a window, and how long each keeps the core: all of them together for two tenths of a second,
/// which is longer than a permit is valid. A test that has many more cases has larger bursts.
fn crowded(most: u32) -> (u32, Duration) {
    let rate = histories::cases(most / 5).min(most);
    (rate, 200 * MS / rate)
}

/// A window's requests take longer to leave than a permit is valid: they leave nevertheless in the windows that they need.
/// Otherwise permits expire before their requests are polled, and the burst collapses to what leaves in that time.
#[tokio::test(start_paused = true)]
async fn a_burst_leaves_in_the_windows_it_needs() {
    let (rate, work) = crowded(20_000);
    let limiter = limiter(Quota::per_second(rate), LONG);
    let start = Instant::now();
    let requests = (0..3 * rate).map(|_| limiter.acquire(Key::ALL));
    let left = burst(requests, work, async || ()).await;
    assert_windows(start.elapsed(), 3.0);
    assert_eq!(most(&left, SECOND), rate as usize);
    // Those that were handed permits just before these expired are overtaken by the ones behind them, until their next ones.
    let overtaken = overtaken(&left);
    assert!(overtaken < rate as usize / 50, "by {overtaken}");
}

/// Waiters of a hold that is released leave in order, in the windows that they need.
#[tokio::test(start_paused = true)]
async fn a_herd_leaves_after_a_release() {
    let (rate, work) = crowded(50_000);
    let limiter = limiter(Quota::per_second(rate), LONG);
    limiter.hold_for(Key::ALL, 40 * SECOND).await.unwrap();
    let mut start = Instant::now();
    let requests = (0..2 * rate).map(|_| limiter.acquire(Key::ALL));
    let left = burst(requests, work, async || {
        assert_eq!(limiter.stats().waiting(), 2 * rate as usize);
        sleep(SECOND).await;
        limiter.release(Key::ALL).await.unwrap();
        start = Instant::now();
    });
    let left = left.await;
    assert_windows(start.elapsed(), 2.0);
    assert_eq!(most(&left, SECOND), rate as usize);
    // A request whose permit expires before it is polled is overtaken by those that get theirs until its next one.
    let overtaken = overtaken(&left);
    assert!(overtaken < rate as usize / 50, "by {overtaken}");
}

/// Waiters whose costs all differ, as the tokens of LLM requests do, leave in order and use the whole limit.
#[tokio::test(start_paused = true)]
async fn waiters_of_different_costs_leave_in_order() {
    let count = histories::cases(4000).min(20_000);
    let in_window = count * 1000;
    let limiter = limiter(Quota::per_second(in_window), LONG);
    let start = Instant::now();
    // Each cost once, not in the order of size.
    let cost = |number: u32| 1000 + number * 7919 % count;
    let requests = (0..count).map(|number| limiter.acquire(Key::ALL).cost(cost(number)));
    let left = burst(requests, MICRO, async || ()).await;
    let took = start.elapsed();
    let units: u64 = (0..count).map(|number| u64::from(cost(number))).sum();
    let windows = (units as f64 / f64::from(in_window)).ceil();
    assert_windows(took, windows);
    assert_eq!(overtaken(&left), 0);
    let uses: Vec<_> = left
        .iter()
        .map(|(number, at)| (*at, cost(*number as u32)))
        .collect();
    assert_eq!(over(&Quota::per_second(in_window), &uses), None);
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Stays,
    /// Dropped after so many polls.
    AfterPolls(usize),
    /// Dropped when it is to be polled after so many polls: with what woke it.
    BeforePoll(usize),
}

/// Random requests of one or two keys.
struct Plan {
    quotas: [Quota; 2],
    max_wait: Duration,
    requests: usize,
    /// The most that enter at one moment.
    together: u64,
    largest_cost: u32,
    /// Whether all must be free at once even while known faults stand.
    is_exact: bool,
}

impl Plan {
    fn of(dice: &mut Dice) -> Plan {
        let quota = |dice: &mut Dice| {
            let count = dice.count(20, 200);
            let window = dice.pick(&[200, 1000, 3000]);
            let limit = Quota::new(count, Duration::from_millis(window));
            match dice.below(6) {
                0 => limit.and(Quota::in_flight(dice.count(2, 20))),
                1 => Quota::in_flight(dice.count(2, 20)),
                2 => limit.and(Quota::new(count * 3, Duration::from_millis(window * 4))),
                3 => Quota::per_second(count).burst(dice.count(10, 20)),
                _ => limit,
            }
        };
        Plan {
            quotas: [quota(dice), quota(dice)],
            max_wait: dice.pick(&[LONG, LONG, 3 * SECOND]),
            requests: dice.below(600) as usize + 1,
            together: dice.pick(&[1, 20, 600]),
            largest_cost: dice.pick(&[1, 5, 10]),
            is_exact: false,
        }
    }
}

/// A request of a plan.
struct Entered {
    /// What it costs of each key. Zero: it does not have that key.
    costs: [u32; 2],
    at: Instant,
    fate: Fate,
}

/// A run of a plan.
struct Run<'a> {
    plan: &'a Plan,
    dice: Dice,
    limiters: [Limiter; 2],
    crowd: Crowd,
    entered: Vec<Entered>,
    /// The requests that have not ended, in no order.
    open: Vec<usize>,
    /// Permits that are used later.
    permits: Vec<(Instant, usize, Permit)>,
    /// Calls that end later.
    sent: Vec<(Instant, usize, Sent)>,
    /// How many calls of each key have not ended.
    in_flight: [i64; 2],
    /// What was used of each key.
    uses: [Vec<(Instant, u32)>; 2],
    refused: usize,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, dice: Dice) -> Self {
        Run {
            plan,
            dice,
            limiters: plan.quotas.map(|quota| limiter(quota, plan.max_wait)),
            crowd: Crowd::default(),
            entered: Vec::new(),
            open: Vec::new(),
            permits: Vec::new(),
            sent: Vec::new(),
            in_flight: [0; 2],
            uses: [Vec::new(), Vec::new()],
            refused: 0,
        }
    }

    fn enter(&mut self) {
        let dice = &mut self.dice;
        let [one, other] = [(); 2].map(|()| dice.count(1, self.plan.largest_cost));
        let costs = dice.pick(&[[one, 0], [0, other], [one, other]]);
        let fate = match dice.below(10) {
            0 | 1 => Fate::AfterPolls(dice.below(4) as usize),
            2 => Fate::BeforePoll(1 + dice.below(3) as usize),
            _ => Fate::Stays,
        };
        let keys = self
            .limiters
            .iter()
            .zip(costs)
            .filter(|(_, cost)| *cost > 0);
        let keys = keys.map(|(limiter, cost)| limiter.acquire(Key::ALL).cost(cost));
        let number = self
            .crowd
            .add(keys.reduce(Acquire::and).expect("it has a key"));
        let at = Instant::now();
        self.entered.push(Entered { costs, at, fate });
        self.open.push(number);
        self.poll(number);
    }

    /// Polls or drops the request, as its fate says.
    fn poll(&mut self, number: usize) {
        let polls = |crowd: &Crowd| crowd.waiters[number].as_ref().map(|waiter| waiter.polls);
        let Some(before) = polls(&self.crowd) else {
            return;
        };
        let fate = self.entered[number].fate;
        let is_dropped = matches!(fate, Fate::AfterPolls(0))
            || matches!(fate, Fate::BeforePoll(after) if after == before);
        if is_dropped {
            self.crowd.waiters[number] = None;
            return;
        }
        let ended = self.crowd.poll(number);
        let waited = self.entered[number].at.elapsed();
        match ended {
            None => {
                if matches!(fate, Fate::AfterPolls(after) if after == before + 1) {
                    self.crowd.waiters[number] = None;
                }
            }
            Some(Ok(permit)) => match self.dice.below(20) {
                0 => permit.give_back(),
                1..4 => {
                    let used = Duration::from_millis(self.dice.below(15));
                    self.permits.push((Instant::now() + used, number, permit));
                }
                _ => self.begin(number, permit),
            },
            Some(Err(error)) => {
                let max_wait = Reason::MaxWait(self.plan.max_wait);
                let Limited::Local { reason, .. } = &error else {
                    panic!("{number}: {error}");
                };
                // As long as for a first answer of the store.
                let is_due = waited <= self.plan.max_wait + SECOND;
                assert!(
                    *reason == max_wait && is_due && self.plan.max_wait < LONG,
                    "{number}, after {waited:?}: {error}"
                );
                self.refused += 1;
            }
        }
    }

    /// Uses the permit, if it has not expired.
    fn begin(&mut self, number: usize, permit: Permit) {
        if let Ok(sent) = permit.begin() {
            let now = Instant::now();
            for (uses, cost) in self.uses.iter_mut().zip(self.entered[number].costs) {
                if cost > 0 {
                    uses.push((now, cost));
                }
            }
            let ends = now + LONGEST_CALL.mul_f64(self.dice.below(100) as f64 / 100.0);
            self.sent.push((ends, number, sent));
            self.count_calls(number, 1);
            for (quota, in_flight) in self.plan.quotas.iter().zip(self.in_flight) {
                let most = quota.most_in_flight().map_or(i64::MAX, i64::from);
                assert!(in_flight <= most, "{in_flight} in flight under {quota}");
            }
        }
    }

    fn count_calls(&mut self, number: usize, change: i64) {
        let of_keys = self.in_flight.iter_mut().zip(self.entered[number].costs);
        for (in_flight, _) in of_keys.filter(|(_, cost)| *cost > 0) {
            *in_flight += change;
        }
    }

    /// Uses the permits and ends the calls that are due.
    fn work(&mut self) {
        let now = Instant::now();
        let has_ended = |(ends, ..): &mut (Instant, usize, Sent)| *ends <= now;
        let ended: Vec<_> = self.sent.extract_if(.., has_ended).collect();
        for (_, number, sent) in ended {
            self.count_calls(number, -1);
            drop(sent);
        }
        let is_due = |(due, ..): &mut (Instant, usize, Permit)| *due <= now;
        let due: Vec<_> = self.permits.extract_if(.., is_due).collect();
        for (_, number, permit) in due {
            self.begin(number, permit);
        }
    }

    /// Polls those that were woken, but for some of them, which are polled the next time.
    fn poll_woken(&mut self) {
        let mut late = Vec::new();
        while let Some(number) = self.crowd.woken.pop() {
            if self.dice.below(50) == 0 {
                late.push(number);
            } else {
                self.poll(number);
            }
        }
        self.crowd.woken.queue.lock().unwrap().extend(late);
    }

    fn drop_some(&mut self) {
        for _ in 0..self.dice.below(1 + self.plan.together / 10) {
            if !self.open.is_empty() {
                let index = self.dice.below(self.open.len() as u64) as usize;
                let number = self.open.swap_remove(index);
                self.crowd.waiters[number] = None;
            }
        }
    }

    async fn play(&mut self) {
        while self.entered.len() < self.plan.requests {
            match self.dice.below(8) {
                0 | 1 => {
                    let room = self.plan.requests - self.entered.len();
                    let together = 1 + self.dice.below(self.plan.together) as usize;
                    (0..together.min(room)).for_each(|_| self.enter());
                }
                2 => self.drop_some(),
                3 if !self.open.is_empty() => {
                    let index = self.dice.below(self.open.len() as u64) as usize;
                    self.poll(self.open[index]);
                }
                _ => {
                    // Some steps end before anything is due, and some after several slots.
                    let pass = self.dice.pick(&[0, 1, 5, 40]);
                    sleep(Duration::from_millis(pass)).await;
                }
            }
            self.work();
            self.poll_woken();
        }
        self.end().await;
    }

    /// Waits until all have left.
    async fn end(&mut self) {
        let is_open = |crowd: &Crowd, number: &usize| crowd.waiters[*number].is_some();
        let start = Instant::now();
        // What all of them need one after the other.
        let needs = self.plan.quotas.iter().enumerate().map(|(key, quota)| {
            let units = self
                .open
                .iter()
                .map(|number| self.entered[*number].costs[key]);
            let units = f64::from(units.sum::<u32>());
            let limits = quota.limits().iter().map(|limit| match limit {
                Limit::Sliding { count, window, .. } => {
                    let whole = count.saturating_sub(self.plan.largest_cost - 1).max(1);
                    window.mul_f64(units / f64::from(whole) + 2.0)
                }
                _ => Duration::ZERO,
            });
            let calls = quota.most_in_flight().map(|most| {
                let calls = self.open.len() as f64 / f64::from(most);
                LONGEST_CALL.mul_f64(calls + 1.0)
            });
            limits.chain(calls).max().unwrap_or_default()
        });
        let times = if known::SLOTS_OF_CROWDS.stands() {
            8
        } else {
            2
        };
        let patience = times * needs.sum::<Duration>() + 2 * SECOND;
        loop {
            self.work();
            self.poll_woken();
            self.open.retain(|number| is_open(&self.crowd, number));
            if self.open.is_empty() && self.permits.is_empty() && self.sent.is_empty() {
                break;
            }
            assert!(
                start.elapsed() < patience,
                "{} still wait after {:?}: {:?}",
                self.open.len(),
                start.elapsed(),
                self.limiters[0].stats()
            );
            sleep(2 * MS).await;
        }
    }

    /// After a window nothing is left of them.
    async fn leaves_nothing(&mut self) {
        let limits = self.plan.quotas.iter().flat_map(|quota| quota.limits());
        let windows = limits.map(|limit| match limit {
            Limit::Sliding { window, .. } => *window,
            _ => Duration::ZERO,
        });
        // With the margin, and what the log rounds up: a hundredth.
        sleep(windows.max().unwrap_or_default().mul_f64(1.02) + 200 * MS).await;
        for (limiter, quota) in self.limiters.iter().zip(self.plan.quotas) {
            assert_eq!(limiter.stats().waiting(), 0);
            if known::SLOTS_OF_CROWDS.stands() && !self.plan.is_exact {
                sleep(20 * SECOND).await;
            }
            let peek = limiter.peek(Key::ALL).await.unwrap();
            let used: Vec<_> = peek.limits.iter().map(|usage| usage.used).collect();
            assert!(
                peek.waiting == 0 && used.iter().all(|used| *used == 0),
                "{peek:?}"
            );
            // All calls in flight that it allows, and then all units.
            let calls = quota
                .most_in_flight()
                .unwrap_or(0)
                .min(quota.largest_cost());
            let calls = (0..calls).map(|_| limiter.acquire(Key::ALL).now_or_never());
            let calls: Vec<_> = calls.collect();
            for call in calls {
                let Some(Ok(permit)) = call else {
                    panic!("{quota}: {call:?}");
                };
                permit.give_back();
            }
            let whole = limiter.acquire(Key::ALL).cost(quota.largest_cost());
            let whole = whole.now_or_never();
            assert!(matches!(whole, Some(Ok(_))), "{quota}: {whole:?}");
        }
    }

    fn check(&self) {
        for (quota, uses) in self.plan.quotas.iter().zip(&self.uses) {
            assert_eq!(over(quota, uses), None, "{quota}");
        }
    }
}

fn run(plan: &Plan, dice: Dice) {
    crate::support::paused(async {
        let mut run = Run::new(plan, dice);
        run.play().await;
        run.leaves_nothing().await;
        run.check();
        let used = run.uses.each_ref().map(Vec::len);
        println!(
            "of {} {used:?} were sent, {} refused",
            plan.requests, run.refused
        );
    });
}

/// Small crowds behind any limits.
#[test]
fn waiters_dropped_at_any_poll_leave_nothing() {
    println!("{}", histories::again());
    let all = 0..u64::from(histories::cases(30));
    let only = only_history();
    for number in all.filter(|number| only.is_none_or(|only| only == *number)) {
        let mut dice = of_history(histories::seed(), number);
        let plan = Plan::of(&mut dice);
        println!(
            "history {number}: {:?}",
            plan.quotas.map(|quota| quota.to_string())
        );
        run(&plan, dice);
    }
}

/// A hundred thousand requests of two keys, or a tenth of that with the usual number of cases.
#[test]
fn a_large_crowd_dropped_at_any_poll_leave_nothing() {
    println!("{}", histories::again());
    let plan = Plan {
        quotas: [
            Quota::per_second(20_000),
            Quota::new(15_000, 500 * MS).and(Quota::in_flight(3000)),
        ],
        max_wait: LONG,
        requests: histories::cases(10_000).min(100_000) as usize,
        together: 30_000,
        largest_cost: 5,
        is_exact: true,
    };
    run(&plan, of_history(histories::seed(), u64::MAX));
}
