//! What the law uses of tollgate. No other file of it names a type of tollgate.
//!
//! The first half is the store: processes share a store in memory, at once or over a network that
//! delays and loses. The second half is what one process has.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request as HttpRequest, Response, StatusCode};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tollgate::limiter::{Acquire, Verdict};
use tollgate::stats::{Event, Stats};
use tollgate::store::{
    Background, Change, Claim, InForce, Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest,
    RedisStore, Store, StoreError, StoreEvent, StoreListener, StoreReply, Task, UnusedPermits,
    Usage,
};
use tollgate::{
    __lab, Class, Cost, Deadline, Guard, Key, Limited, Limiter, OnStoreError, Quota,
    RateLimitLayer, Reason, RequestRef, RetryLimited, Settlement, Signal,
};
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};

use super::dice::Dice;
use super::plan::{Answer, LimiterPlan, OnAway, Part, Rate, Request, Shares, StorePlan, Via};

fn ms(span: u64) -> Duration {
    Duration::from_millis(span)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `history` in virtual time. The dice of tollgate roll by `seed`, and the wall clock begins at a
/// fixed moment, so that the same history is the same run.
///
/// # Errors
///
/// The message, if the history panics.
pub(crate) fn in_virtual_time<T>(seed: u64, history: impl Future<Output = T>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can be made");
    runtime.block_on(async {
        __lab::begin_clock(Instant::now().into_std());
        __lab::begin_dice(tollgate::__lab::Dice::seeded(seed));
        let outcome = AssertUnwindSafe(history).catch_unwind().await;
        outcome.map_err(|panic| message(&*panic))
    })
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!(
        "panic: {}",
        text.unwrap_or_else(|| "of another type".into())
    )
}

/// What all processes share: a store in memory and the way to it, or a Redis.
pub(crate) struct Net {
    /// The URL of the Redis. Then the clock is the real one.
    redis: Option<String>,
    memory: Arc<MemoryStore>,
    plan: StorePlan,
    dice: Mutex<Dice>,
    away_until: Mutex<Option<Instant>>,
    listeners: Mutex<Vec<Arc<dyn StoreListener>>>,
    /// How often each call was made.
    calls: Mutex<BTreeMap<&'static str, u32>>,
    /// From when until when a call of any process had no answer.
    pub(crate) troubles: Mutex<Vec<(Instant, Instant)>>,
}

/// How long a call waits for an answer that does not come.
const TIMEOUT: u64 = 250;

/// For how long the store keeps the calls in flight of a process that was killed.
const CLAIM_LIFE: u64 = 2_000;

/// What becomes of a call.
struct Trip {
    /// When the store takes it in, unless it is lost on the way.
    there: Option<Instant>,
    back: Instant,
    is_answered: bool,
}

impl Net {
    pub(crate) fn new(plan: &StorePlan, seed: u64, redis: Option<String>) -> Arc<Self> {
        Arc::new(Net {
            redis,
            memory: Arc::default(),
            plan: plan.clone(),
            dice: Mutex::new(Dice::seeded(seed)),
            away_until: Mutex::default(),
            listeners: Mutex::default(),
            calls: Mutex::default(),
            troubles: Mutex::default(),
        })
    }

    /// Returns whether the clock is the real one, so that nothing is known of when things happen.
    pub(crate) fn is_real(&self) -> bool {
        self.redis.is_some()
    }

    /// Makes the store unreachable for a while.
    pub(crate) fn go_away(&self, span: u64) {
        let until = Instant::now() + ms(span);
        *lock(&self.away_until) = Some(until);
        lock(&self.troubles).push((Instant::now(), until));
    }

    /// Makes the store reachable, fast and safe, for what is asserted at the end of a history.
    pub(crate) fn come_back(&self) {
        *lock(&self.away_until) = None;
    }

    fn count(&self, call: &'static str) {
        *lock(&self.calls).entry(call).or_default() += 1;
    }

    /// Returns how often each call was made.
    pub(crate) fn calls(&self) -> String {
        format!("{:?}", lock(&self.calls))
    }

    fn away_until(&self, at: Instant) -> Option<Instant> {
        lock(&self.away_until).filter(|until| *until > at)
    }

    fn half_trip(&self) -> Duration {
        let (low, high) = self.plan.trip.expect("only a late store has trips");
        Duration::from_micros(lock(&self.dice).between(low * 500, high * 500))
    }

    fn trip(&self) -> Trip {
        let now = Instant::now();
        let (there, back) = (now + self.half_trip(), self.half_trip());
        let is_away = self.away_until(there).is_some();
        let (on_the_way, answers) = self.plan.lost;
        let mut dice = lock(&self.dice);
        let is_lost = dice.chance(on_the_way) || (is_away && dice.chance(50));
        let is_answered = !is_away && !is_lost && !dice.chance(answers);
        drop(dice);
        let back = if is_answered {
            there + back
        } else {
            now + ms(TIMEOUT)
        };
        if !is_answered {
            lock(&self.troubles).push((now, back));
        }
        Trip {
            there: (!is_lost).then_some(there),
            back,
            is_answered,
        }
    }
}

fn away() -> StoreError {
    StoreError::Away(Arc::new(std::io::Error::from(std::io::ErrorKind::TimedOut)))
}

fn ready<T>(reply: StoreReply<T>) -> Result<T, StoreError> {
    match reply {
        StoreReply::Ready(reply) => reply,
        _ => unreachable!("memory replies at once"),
    }
}

/// The last claim of each holder, and when the last of all arrives.
type Claims = (BTreeMap<u64, (Claim, Arc<dyn StoreListener>)>, Instant);

/// Permits that go back, with their key.
type Returns = Vec<(Key, Arc<LimitSpec>, Vec<UnusedPermits>)>;

/// The way of one process to the store.
pub(crate) struct Link {
    net: Arc<Net>,
    is_cut: AtomicBool,
    /// The tasks that the store runs for the process.
    tasks: Mutex<Vec<AbortHandle>>,
    /// The tasks of a process that was killed.
    unrun: Mutex<Vec<Task>>,
    /// The permits that are on their way back. They arrive before the next lease.
    returns: Arc<Mutex<Returns>>,
    claims: Arc<Mutex<Claims>>,
}

impl Link {
    pub(crate) fn new(net: &Arc<Net>) -> Arc<Self> {
        Arc::new(Link {
            net: net.clone(),
            is_cut: AtomicBool::new(false),
            tasks: Mutex::default(),
            unrun: Mutex::default(),
            returns: Arc::default(),
            claims: Arc::new(Mutex::new((BTreeMap::new(), Instant::now()))),
        })
    }

    /// Returns the store as the process sees it.
    fn store(self: &Arc<Self>) -> Arc<dyn Store> {
        if let Some(url) = &self.net.redis {
            let store = RedisStore::builder(url).store_timeout(ms(10_000)).build();
            return Arc::new(store.expect("the URL is valid"));
        }
        match self.net.plan.trip {
            None => self.net.memory.clone(),
            Some(_) => self.clone(),
        }
    }

    /// Ends the tasks that the store runs for the process.
    pub(crate) fn end_tasks(&self) {
        lock(&self.tasks).drain(..).for_each(|task| task.abort());
    }

    /// Cuts the way: the process was killed. The store keeps its calls in flight for a while.
    pub(crate) fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        self.end_tasks();
        let (claims, memory) = (
            std::mem::take(&mut lock(&self.claims).0),
            self.net.memory.clone(),
        );
        drop(tokio::spawn(async move {
            sleep(ms(CLAIM_LIFE)).await;
            for (mut claim, listener) in claims.into_values() {
                (claim.number, claim.in_use, claim.wanted) = (u64::MAX, 0, 0);
                memory.claim(claim, &listener);
            }
        }));
    }

    /// Drops what keeps the limiters of the process when its history is over: its tasks and its claims have them, and
    /// they have this link. The stats of all limiters would take longer from history to history.
    pub(crate) fn end(&self) {
        self.end_tasks();
        // Dropped without the lock, because a task that is dropped may begin another one.
        let unrun = std::mem::take(&mut *lock(&self.unrun));
        drop(unrun);
        let claims = std::mem::take(&mut lock(&self.claims).0);
        for (mut claim, listener) in claims.into_values() {
            (claim.number, claim.in_use, claim.wanted) = (u64::MAX, 0, 0);
            self.net.memory.claim(claim, &listener);
        }
    }

    fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }

    /// Does `act` at the store half a trip later, also if the reply is dropped.
    fn go<T: Send + 'static>(
        &self,
        call: &'static str,
        act: impl FnOnce(&MemoryStore) -> StoreReply<T> + Send + 'static,
    ) -> StoreReply<T> {
        if self.is_cut() {
            return StoreReply::Pending(Box::pin(std::future::pending()));
        }
        self.net.count(call);
        self.travel(self.net.trip(), act)
    }

    /// Does `act` at the store when a call of this trip arrives.
    fn travel<T: Send + 'static>(
        &self,
        trip: Trip,
        act: impl FnOnce(&MemoryStore) -> StoreReply<T> + Send + 'static,
    ) -> StoreReply<T> {
        let memory = self.net.memory.clone();
        let call = tokio::spawn(async move {
            let mut reply = Err(away());
            if let Some(there) = trip.there {
                sleep_until(there).await;
                reply = ready(act(&memory));
            }
            sleep_until(trip.back).await;
            if trip.is_answered { reply } else { Err(away()) }
        });
        StoreReply::Pending(Box::pin(async move {
            call.await.unwrap_or(Err(StoreError::Lost))
        }))
    }
}

/// Lets all permits arrive that are on their way back.
fn arrive(returns: &Mutex<Returns>, memory: &MemoryStore) {
    for (key, spec, unused) in lock(returns).drain(..) {
        memory.give_back(key, &spec, &unused);
    }
}

impl Store for Link {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.net.memory)
    }

    /// The store decides when the call is made, because a request cannot be kept: only the reply is late.
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        if self.is_cut() {
            return StoreReply::Pending(Box::pin(std::future::pending()));
        }
        self.net.count("lease");
        let trip = self.net.trip();
        let windows = request
            .spec
            .quota()
            .limits()
            .iter()
            .map(tollgate::quota::Limit::window);
        let longest = windows.max().unwrap_or_default();
        let mut reply = Err(away());
        if trip.there.is_some() {
            arrive(&self.returns, &self.net.memory);
            reply = ready(self.net.memory.lease(request));
        }
        if self.net.plan.has_sessions
            && let Ok(lease) = &mut reply
        {
            (lease.incarnation, lease.writes) = (7, 1);
            lease.session_ttl = longest + ms(1000);
        }
        StoreReply::Pending(Box::pin(async move {
            sleep_until(trip.back).await;
            if trip.is_answered { reply } else { Err(away()) }
        }))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        if self.is_cut() {
            return;
        }
        self.net.count("give_back");
        let (trip, returns) = (self.net.trip(), self.returns.clone());
        if trip.there.is_some() {
            lock(&returns).push((key, spec.clone(), unused.to_vec()));
        }
        drop(self.travel(trip, move |memory| {
            arrive(&returns, memory);
            StoreReply::Ready(Ok(()))
        }));
    }

    /// Repeats the claim until the store has it, as a store does whose claims expire.
    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        if self.is_cut() {
            return;
        }
        self.net.count("claim");
        let mut claims = lock(&self.claims);
        // They arrive in their order.
        let there = (Instant::now() + self.net.half_trip()).max(claims.1);
        claims.0.insert(claim.holder, (claim, listener.clone()));
        claims.1 = there;
        drop(claims);
        let (net, listener, claims) = (self.net.clone(), listener.clone(), self.claims.clone());
        let kept = listener.clone();
        let late = LateListener::of(&net, move || Some(kept.clone()));
        drop(tokio::spawn(async move {
            sleep_until(there).await;
            // A claim that is followed by another one is not repeated.
            let is_last = || {
                let last = lock(&claims)
                    .0
                    .get(&claim.holder)
                    .map(|(last, _)| last.number);
                last == Some(claim.number)
            };
            while is_last() {
                let trip = net.trip();
                if trip.there.is_some() {
                    net.memory.claim(claim, &late);
                }
                if trip.is_answered {
                    return;
                }
                sleep_until(trip.back).await;
                listener
                    .clone()
                    .on_event(claim.key, claim.holder, StoreEvent::Failed(away()));
            }
        }));
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        let spec = spec.clone();
        self.go("change", move |memory| memory.change(key, &spec, change))
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        let late = LateListener::of(&self.net, move || listener.upgrade());
        self.net.memory.listen(Arc::downgrade(&late));
        // The memory store keeps only a weak reference.
        lock(&self.net.listeners).push(late);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.go("peek", move |memory| memory.peek(request))
    }

    fn background(&self) -> Option<&dyn Background> {
        self.net.plan.has_background.then_some(self)
    }

    fn flush(&self) -> StoreReply<()> {
        self.go("flush", Store::flush)
    }
}

impl Background for Link {
    fn spawn(&self, task: Task) {
        if self.is_cut() {
            // Nothing runs any more in a process that was killed.
            return lock(&self.unrun).push(task);
        }
        lock(&self.tasks).push(tokio::spawn(task).abort_handle());
    }
}

/// A listener that is notified half a trip later, or when the store is reachable again.
struct LateListener<F> {
    net: Weak<Net>,
    listener: F,
}

impl<F: Fn() -> Option<Arc<dyn StoreListener>> + Send + Sync + 'static> LateListener<F> {
    fn of(net: &Arc<Net>, listener: F) -> Arc<dyn StoreListener> {
        Arc::new(LateListener {
            net: Arc::downgrade(net),
            listener,
        })
    }
}

impl<F: Fn() -> Option<Arc<dyn StoreListener>> + Send + Sync + 'static> StoreListener
    for LateListener<F>
{
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent) {
        let Some(net) = self.net.upgrade() else {
            return;
        };
        drop(tokio::spawn(async move {
            let at = Instant::now() + net.half_trip();
            let missed = net.away_until(at);
            sleep_until(missed.unwrap_or(at)).await;
            let event = match event {
                StoreEvent::Hold(_)
                | StoreEvent::SetQuota(_)
                | StoreEvent::RemainingFell { .. }
                    if missed.is_some() =>
                {
                    StoreEvent::EventsMissed
                }
                event => event,
            };
            if let Some(listener) = (self.listener)() {
                listener.on_event(key, holder, event);
            }
        }));
    }
}

/// The limiters of one process.
pub(crate) struct Gates {
    plans: Vec<LimiterPlan>,
    layers: Vec<RateLimitLayer>,
    limiters: Vec<Limiter>,
    name: String,
    fails_open: bool,
    /// How many requests had left uncounted at the last look.
    uncounted: AtomicU64,
    /// When a guard of this process tripped.
    pub(crate) trips: Arc<Mutex<Vec<Instant>>>,
}

/// The right to send one request.
pub(crate) struct Permit(tollgate::Permit);

/// A request that was sent and has no response yet.
pub(crate) struct Sent(tollgate::Sent);

/// Why a request has no permit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// This process refused it: the name of the reason.
    Local(&'static str),
    Store(String),
    /// The call failed, not the limiter.
    Inner,
}

/// What the requests of a process have become, as its stats count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcomes {
    pub(crate) granted: u64,
    pub(crate) refused: u64,
    pub(crate) store: u64,
    pub(crate) cancelled: u64,
}

/// What a process shows of a key, or of itself, when nothing happens any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rest {
    pub(crate) used: u64,
    pub(crate) waiting: usize,
    pub(crate) text: String,
}

/// Answers one attempt of a request: the upstream.
pub(crate) type Upstream = Arc<dyn Fn() -> BoxFuture<'static, Answer> + Send + Sync>;

/// A response that arrived, and the settlement that came with it.
pub(crate) struct Response_ {
    pub(crate) settlement: Option<Settled>,
}

pub(crate) struct Settled(Settlement);

impl Settled {
    pub(crate) fn settle(&self, cost: u32, tokens: u32) {
        self.0.settle(Cost::new(cost).and("tokens", tokens));
    }
}

fn quota(plan: &LimiterPlan) -> Quota {
    let one = |rate: &Rate| match *rate {
        Rate::Sliding { count, window } => Quota::new(count, ms(window)),
        Rate::Bucket {
            capacity,
            count,
            window,
        } => Quota::bucket(capacity).refill(count, ms(window)),
        Rate::Fixed { count, window } => Quota::fixed(count, ms(window)),
    };
    let rates = plan.rates.iter().map(one);
    let tokens = plan.tokens.iter().map(|rate| one(rate).of("tokens"));
    let in_flight = plan.in_flight.map(Quota::in_flight);
    let all = rates.chain(tokens).chain(in_flight).reduce(Quota::and);
    all.expect("a limiter has a limit")
}

fn key(plan: &LimiterPlan, limiter: usize, key: u8) -> Key {
    match plan.keys {
        0 => Key::ALL,
        _ => Key::new(format!("{limiter}-{key}")),
    }
}

fn refused(limited: &Limited) -> Refused {
    match limited.reason() {
        Some(Reason::MaxWait(_)) => Refused::Local("max_wait"),
        Some(Reason::Deadline) => Refused::Local("deadline"),
        Some(Reason::QueueFull(_)) => Refused::Local("queue_full"),
        Some(Reason::Held) => Refused::Local("held"),
        Some(Reason::Draining) => Refused::Local("draining"),
        Some(Reason::CostAboveLimit { .. }) => Refused::Local("cost_above_limit"),
        Some(Reason::TooManyKeys(_)) => Refused::Local("too_many_keys"),
        Some(_) => Refused::Local("another reason"),
        None => Refused::Store(limited.to_string()),
    }
}

impl Gates {
    /// Builds the limiters of a process. Returns `None` if the settings do not fit.
    pub(crate) fn build(
        plans: &[LimiterPlan],
        shares: &Shares,
        on_store_error: OnAway,
        link: &Arc<Link>,
    ) -> Result<Gates, String> {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        let name = format!("law {}", NAMES.fetch_add(1, Ordering::Relaxed));
        let trips: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let build = |(number, plan): (usize, &LimiterPlan)| {
            let full: &'static str = format!("{name}.{number}").leak();
            let mut builder = RateLimitLayer::builder(quota(plan))
                .charged_by_hand()
                .wait_above_limit(false)
                .name(full)
                .store(link.store())
                .max_wait(ms(plan.max_wait))
                .max_hold(ms(plan.max_hold))
                .max_queue(plan.max_queue)
                .max_keys(plan.max_keys)
                .in_flight_ttl(ms(if link.net.is_real() {
                    20_000
                } else {
                    CLAIM_LIFE
                }));
            if plan.keys > 0 {
                let header = format!("x-key-{number}");
                builder = builder
                    .key(move |request: &RequestRef<'_>| request.header(&*header).map(Key::new));
            }
            builder = match on_store_error {
                OnAway::FailClosed => builder,
                OnAway::FailOpen => builder.on_store_error(OnStoreError::FailOpen),
                OnAway::Share(percent) => {
                    let builder = builder.on_store_error(OnStoreError::FallbackShare);
                    builder.fallback_share(f64::from(percent) / 100.0)
                }
            };
            if plan.is_divided {
                for (class, percent) in shares {
                    builder = builder.share(class, *percent);
                }
                if let Some((class, _)) = shares.first() {
                    builder = builder.lends(class, plan.lends);
                }
            }
            if plan.settles {
                builder = builder.settle_by_hand();
            }
            if plan.counted_within > 0 {
                builder = builder.counted_within(ms(plan.counted_within));
            }
            if let Some((count, window)) = plan.guard {
                let guard = Guard::new(Quota::new(count, ms(window)));
                builder = builder.guard(guard.stop(ms(2000), ms(8000)));
            }
            let trips = trips.clone();
            let layer = builder.on_event(move |event: &Event<'_>| {
                if let Event::GuardTripped { .. } = event {
                    lock(&trips).push(Instant::now());
                }
            });
            layer.build().map_err(|error| error.to_string())
        };
        let layers: Vec<RateLimitLayer> = plans
            .iter()
            .enumerate()
            .map(build)
            .collect::<Result<_, _>>()?;
        let limiters = layers.iter().map(RateLimitLayer::limiter).collect();
        Ok(Gates {
            plans: plans.to_vec(),
            layers,
            limiters,
            name,
            fails_open: on_store_error == OnAway::FailOpen,
            uncounted: AtomicU64::new(0),
            trips,
        })
    }

    fn key(&self, limiter: usize, number: u8) -> Key {
        key(&self.plans[limiter], limiter, number)
    }

    fn cost(&self, part: &Part) -> Cost {
        match self.plans[part.limiter].tokens {
            Some(_) => Cost::new(part.cost).and("tokens", part.tokens),
            None => Cost::new(part.cost),
        }
    }

    fn future(&self, request: &Request) -> Acquire {
        let one = |part: &Part| {
            let acquire = self.limiters[part.limiter].acquire(self.key(part.limiter, part.key));
            let acquire = acquire.cost(self.cost(part));
            match request.class {
                Some(class) => acquire.class(class),
                None => acquire,
            }
        };
        let all = request.parts.iter().map(one).reduce(Acquire::and);
        let all = all.expect("a request has a key");
        match request.deadline {
            Some(span) => all.deadline((Instant::now() + ms(span)).into_std()),
            None => all,
        }
    }

    pub(crate) fn acquire(&self, request: &Request) -> BoxFuture<'static, Result<Permit, Refused>> {
        let acquire = self.future(request);
        async move {
            acquire
                .await
                .map(Permit)
                .map_err(|limited| refused(&limited))
        }
        .boxed()
    }

    /// Sends a request through the layers of its limiters.
    pub(crate) fn call(
        &self,
        request: &Request,
        upstream: Upstream,
    ) -> BoxFuture<'static, Result<Response_, Refused>> {
        let layers = request
            .parts
            .iter()
            .map(|part| self.layers[part.limiter].clone());
        let layer = layers
            .reduce(RateLimitLayer::and)
            .expect("a request has a key");
        let inner = service_fn(move |_: HttpRequest<String>| {
            let answer = upstream();
            async move { respond(answer.await) }
        });
        let mut http = HttpRequest::get("http://upstream/");
        for part in &request.parts {
            http = http.header(
                format!("x-key-{}", part.limiter),
                format!("{}-{}", part.limiter, part.key),
            );
        }
        let mut http = http.body(String::new()).expect("the request is valid");
        http.extensions_mut().insert(self.cost(&request.parts[0]));
        if let Some(class) = request.class {
            http.extensions_mut().insert(Class::new(class));
        }
        if let Some(span) = request.deadline {
            http.extensions_mut()
                .insert(Deadline::at((Instant::now() + ms(span)).into_std()));
        }
        let service = ServiceBuilder::new().layer(layer).service(inner);
        let response = match request.via {
            Via::Retry => ServiceBuilder::new()
                .retry(RetryLimited::new())
                .service(service)
                .oneshot(http)
                .boxed(),
            _ => service.oneshot(http).boxed(),
        };
        async move {
            match response.await {
                Ok(mut response) => {
                    let settlement = response.extensions_mut().remove::<Settlement>();
                    Ok(Response_ {
                        settlement: settlement.map(Settled),
                    })
                }
                Err(error) => Err(Limited::find(&error).map_or(Refused::Inner, refused)),
            }
        }
        .boxed()
    }

    /// Returns whether a request that enters now and cannot wait would leave, and the explanation.
    pub(crate) async fn explain(&self, request: &Request) -> Result<(bool, String), String> {
        let explained = self
            .future(request)
            .explain()
            .await
            .map_err(|error| error.to_string())?;
        Ok((explained.verdict == Verdict::Goes, format!("{explained}")))
    }

    pub(crate) async fn hold(&self, limiter: usize, key: u8, span: u64) -> bool {
        self.limiters[limiter]
            .hold_for(self.key(limiter, key), ms(span))
            .await
            .is_ok()
    }

    pub(crate) async fn release(&self, limiter: usize, key: u8) -> bool {
        self.limiters[limiter]
            .release(self.key(limiter, key))
            .await
            .is_ok()
    }

    pub(crate) async fn set_quota(&self, limiter: usize, key: u8, percent: u32) -> bool {
        let quota = quota(&self.plans[limiter].scaled(percent));
        self.limiters[limiter]
            .set_quota(self.key(limiter, key), quota)
            .await
            .is_ok()
    }

    pub(crate) async fn unset_quota(&self, limiter: usize, key: u8) -> bool {
        self.limiters[limiter]
            .unset_quota(self.key(limiter, key))
            .await
            .is_ok()
    }

    pub(crate) async fn drain(&self, within: u64) {
        for limiter in &self.limiters {
            let _ = limiter.drain(ms(within)).await;
        }
    }

    pub(crate) async fn shutdown(&self) {
        for limiter in &self.limiters {
            let _ = limiter.shutdown().await;
        }
    }

    /// Takes whether a request has left uncounted since the last call.
    pub(crate) fn take_uncounted(&self) -> bool {
        if !self.fails_open {
            return false;
        }
        let total = self
            .stats()
            .iter()
            .map(|stats| stats.requests().uncounted)
            .sum();
        self.uncounted.swap(total, Ordering::Relaxed) < total
    }

    /// Returns the stats of all limits of this process.
    fn stats(&self) -> Vec<Stats> {
        let is_ours = |stats: &Stats| {
            let rest = stats.name().strip_prefix(&*self.name);
            rest.is_some_and(|rest| rest.starts_with('.')) && !stats.name().ends_with(" guard")
        };
        let mut all = tollgate::stats::all();
        all.retain(is_ours);
        all
    }

    /// Returns what is used of a key, in any limit, and how many requests wait.
    pub(crate) async fn at_rest(&self, limiter: usize, key: u8) -> Result<Rest, String> {
        let peek = self.limiters[limiter]
            .peek(self.key(limiter, key))
            .await
            .map_err(|error| error.to_string())?;
        let used = peek
            .limits
            .iter()
            .map(|usage| usage.used)
            .max()
            .unwrap_or(0);
        Ok(Rest {
            used,
            waiting: peek.waiting,
            text: format!("{peek:?}"),
        })
    }

    /// Returns how the requests of this process have ended, by its own stats.
    pub(crate) fn outcomes(&self) -> Outcomes {
        let stats = self.stats();
        let requests = stats.iter().map(|stats| stats.requests());
        requests.fold(Outcomes::default(), |sum, requests| Outcomes {
            granted: sum.granted + requests.passed + requests.waited + requests.uncounted,
            refused: sum.refused + requests.refused,
            store: sum.store + requests.store,
            cancelled: sum.cancelled + requests.cancelled,
        })
    }
}

fn respond(answer: Answer) -> Result<Response<()>, BoxError> {
    let builder = Response::builder();
    let builder = match answer {
        Answer::Ok => builder.status(StatusCode::OK),
        Answer::Bad => builder.status(StatusCode::FORBIDDEN),
        Answer::Refused(None) => builder.status(StatusCode::TOO_MANY_REQUESTS),
        Answer::Refused(Some(seconds)) => builder
            .status(StatusCode::TOO_MANY_REQUESTS)
            .header("retry-after", seconds),
        Answer::Nothing => return Err("broken pipe".into()),
    };
    Ok(builder.body(())?)
}

impl Permit {
    pub(crate) fn is_valid(&self) -> bool {
        self.0.is_valid()
    }

    pub(crate) fn give_back(self) {
        self.0.give_back();
    }

    /// The request leaves now. Returns `None` if the permit has expired.
    pub(crate) fn begin(self) -> Option<Sent> {
        let is_valid = self.is_valid();
        let begun = self.0.begin();
        assert_eq!(begun.is_ok(), is_valid, "{begun:?}");
        begun.ok().map(Sent)
    }
}

impl Sent {
    pub(crate) fn settle(&mut self, cost: u32, tokens: u32) {
        self.0.settle(Cost::new(cost).and("tokens", tokens));
    }

    pub(crate) async fn revoked(&self) {
        self.0.revoked().await;
    }

    /// Ends the call with what the upstream answered. Without an answer it is dropped.
    pub(crate) fn answered(self, answer: Answer) {
        if let Ok(response) = respond(answer) {
            self.0.answered(&Signal::read(&response));
        }
    }
}
