//! The future that [`Limiter::acquire`](crate::Limiter::acquire) returns.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;
use std::{iter, mem};

use smallvec::SmallVec;

use super::around;
use super::at_once;
use super::cores::Cores;
use super::counting;
use super::engine::Core;
use super::explain;
use super::explanation::{Explanation, Verdict};
use super::part::{Entry, MOST_PARTS, NewPart, PartRef, earliest_deadline};
use super::reservation::CountedAs;
use super::taken::{Permit, Taken};
use super::wait::{self, Wait};
use crate::admission::Admission;
use crate::blocking;
use crate::clock;
use crate::config_error::ConfigError;
use crate::cost::Cost;
use crate::error::{BoxError, Error, Limited, Reason, StoreError};
use crate::key::Key;
use crate::quota::Quota;
use crate::signal::{ResponseInfo, Signal};
use crate::stats::Engine;
use crate::store::Refusal;

/// The future of a [`Permit`], with setters for the cost and the deadline of the request.
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it, and describes its errors and cancel
/// safety.
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Acquire(Step);

// New => Waiting | Done
// Waiting => Done
#[derive(Debug)]
enum Step {
    New(NewRequest),
    Waiting(Box<Wait>),
    Done,
}

/// A request that has not entered.
#[derive(Debug)]
struct NewRequest {
    first: NewPart,
    rare: Option<Box<RareRequest>>,
}

/// What only few new requests have. It is in a box, because a new request is moved on the fast path.
#[derive(Debug, Default)]
struct RareRequest {
    /// The other keys. A limiter that counts several units has one for each.
    others: Vec<NewPart>,
    /// The cores of the limiter, if it counts other units than requests.
    units: Option<Cores>,
    /// Whether the request has the keys of several futures, which have set their cost, class and quota.
    is_joined: bool,
    /// Why a key cannot have the quota that the request states for it.
    invalid: Option<Arc<ConfigError>>,
}

impl NewRequest {
    fn parts(&self) -> impl Iterator<Item = &NewPart> {
        let others = self.rare.iter().flat_map(|rare| &rare.others);
        iter::once(&self.first).chain(others)
    }

    fn parts_mut(&mut self) -> impl Iterator<Item = &mut NewPart> {
        let others = self.rare.iter_mut().flat_map(|rare| &mut rare.others);
        iter::once(&mut self.first).chain(others)
    }

    /// Enters. A plain request has found no permit at hand.
    #[cold]
    fn enter(&self) -> Admission<Taken, Box<Wait>> {
        let deadline = earliest_deadline(self.parts());
        let parts: SmallVec<[PartRef<'_>; 4]> = self.parts().map(NewPart::as_part).collect();
        if let Some(rare) = &self.rare {
            if let Some(error) = &rare.invalid {
                return Admission::No(self.refuse(Reason::InvalidQuota(error.clone())));
            }
            if let Some(taken) = at_once::take_all_at_once(&parts, deadline) {
                return Admission::Go(taken);
            }
        }
        let NewPart { core, entry, .. } = &self.first;
        wait::slow(&parts, deadline, None, &|| core.label(entry.key, None))
    }

    /// Refuses the request, and counts it under its first key.
    #[cold]
    fn refuse(&self, reason: Reason) -> Limited {
        let NewPart { core, entry, .. } = &self.first;
        let now = clock::now();
        let refused = core.refused_request(entry.key);
        let limited = refused.refuse(reason, Refusal::NEVER, now);
        core.refused(Some(entry.key), &limited);
        limited
    }
}

impl Acquire {
    /// Makes the future of a request of `key` that takes one unit.
    #[inline]
    pub(super) fn new(cores: &Cores, key: Key) -> Self {
        if cores.count_units() {
            return Acquire::of_units(cores, key);
        }
        let core = cores.first.clone();
        let entry = Entry::new(core.part_of(key), 1);
        Acquire(Step::New(NewRequest {
            first: NewPart {
                core,
                entry,
                named: key,
            },
            rare: None,
        }))
    }

    fn of_units(cores: &Cores, key: Key) -> Self {
        let part = |core: &Arc<Core>| NewPart {
            core: core.clone(),
            entry: Entry::new(core.key_of(key), Cost::default().under(core.unit())),
            named: key,
        };
        let rare = RareRequest {
            others: cores.all().skip(1).map(part).collect(),
            units: Some(cores.clone()),
            ..RareRequest::default()
        };
        Acquire(Step::New(NewRequest {
            first: part(&cores.first),
            rare: Some(Box::new(rare)),
        }))
    }

    /// Sets what the request costs: a number of requests, or a [`Cost`] with other units. Default: one
    /// request. A request that costs nothing passes at once, even if its key is on hold. Set it
    /// before [`and`](Self::and): each key has a cost of its own.
    ///
    /// Has no effect once the future was polled.
    pub fn cost(mut self, cost: impl Into<Cost>) -> Self {
        let cost = cost.into();
        if let Some(request) = self.of_one_key() {
            if let Some(cores) = request.rare.as_ref().and_then(|rare| rare.units.as_ref()) {
                // By hand, nothing is refused: the program may charge the unit in another call.
                let _ = cores.check_units(&cost.into(), |unit| !cores.count(unit));
            }
            for NewPart { core, entry, .. } in request.parts_mut() {
                entry.cost = cost.under(core.unit());
            }
        }
        self
    }

    /// Sets the class of the request, for a quota that is divided by
    /// [`share`](crate::RateLimitBuilder::share). Default: none. A request whose class has no share counts
    /// among the others, and [`Event::UnknownClass`](crate::stats::Event::UnknownClass) names the class as it
    /// is, once. Set it before [`and`](Self::and): each key has a class of its own.
    ///
    /// Has no effect once the future was polled.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::builder(Quota::per_second(50)).share("web", 50).build()?.limiter();
    /// let permit = limiter.acquire(Key::ALL).class("web").await?;
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    pub fn class(mut self, class: &str) -> Self {
        if let Some(request) = self.of_one_key() {
            for NewPart { core, entry, .. } in request.parts_mut() {
                set_class(core, &mut entry.key, class);
            }
        }
        self
    }

    /// Sets the quota of the key, in place of the one of the limiter. Default: the quota that the key
    /// has. [`RateLimitBuilder::quota`](crate::RateLimitBuilder::quota) has the rules. Set it before
    /// [`and`](Self::and): each key has a quota of its own.
    ///
    /// If the key cannot have this quota, the request is refused with
    /// [`Reason::InvalidQuota`](crate::Reason::InvalidQuota).
    ///
    /// Has no effect once the future was polled.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tenants = RateLimitLayer::new(Quota::per_minute(60))?.limiter();
    /// let gold = Quota::per_minute(600);
    /// let permit = tenants.acquire(Key::new("tenant 17")).quota(gold).await?;
    /// # drop(permit);
    /// # assert_eq!(tenants.peek(Key::new("tenant 17")).await?.free, 599);
    /// # Ok(())
    /// # }
    /// ```
    pub fn quota(mut self, quota: Quota) -> Self {
        if let Some(request) = self.of_one_key() {
            match request.first.core.settings.quotas.id(&quota) {
                Ok(id) => request.parts_mut().for_each(|part| part.entry.quota = id),
                Err(error) => request.rare.get_or_insert_default().invalid = Some(Arc::new(error)),
            }
        }
        self
    }

    /// Sets the moment by which the request must leave. Default: none.
    /// [`max_wait`](crate::RateLimitBuilder::max_wait) limits the wait as well.
    ///
    /// Has no effect once the future was polled.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        if let Step::New(request) = &mut self.0 {
            for part in request.parts_mut() {
                part.entry.deadline = Some(deadline);
            }
        }
        self
    }

    /// Adds a key: the future acquires one permit of all keys together, or of none.
    ///
    /// The keys may be of one limiter or of several, also with different stores. The permit is
    /// granted at a moment at which all limits allow the request. The request waits for at most the
    /// shortest [`max_wait`](crate::RateLimitBuilder::max_wait) of the limiters, and until the
    /// earliest deadline. While it waits for one key, it takes nothing from the others.
    ///
    /// A request has at most eight keys, and a limiter whose quota [counts](crate::Quota::of) several
    /// units has one for each. Futures that were polled before cannot be added.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let channels = RateLimitLayer::new(Quota::per_second(1))?.limiter();
    /// let all = RateLimitLayer::new(Quota::per_minute(30))?.limiter();
    ///
    /// let channel = channels.acquire(Key::new("general"));
    /// let permit = channel.and(all.acquire(Key::ALL)).await?;
    /// // ... send the message ...
    /// drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the request has more than eight keys, or if one of the two futures was polled.
    pub fn and(self, other: Acquire) -> Acquire {
        let (mut request, other) = (self.into_new(), other.into_new());
        let other_rare = other.rare.unwrap_or_default();
        let rare = request.rare.get_or_insert_default();
        rare.others.push(other.first);
        rare.others.extend(other_rare.others);
        assert!(
            rare.others.len() < MOST_PARTS,
            "a request has at most {MOST_PARTS} keys"
        );
        rare.is_joined = true;
        rare.invalid = rare.invalid.take().or(other_rare.invalid);
        Acquire(Step::New(request))
    }

    /// Explains what would happen to the request if it entered now: whether it would leave at once,
    /// wait or be refused, and why. Takes no permit and changes nothing.
    ///
    /// [`Limiter::explain`](crate::Limiter::explain) does the same for one key and a cost of 1, and
    /// describes errors and bounds.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let channels = RateLimitLayer::new(Quota::per_second(1))?.limiter();
    /// let all = RateLimitLayer::new(Quota::per_minute(30))?.limiter();
    ///
    /// let message = || channels.acquire(Key::new("general")).and(all.acquire(Key::ALL).cost(5));
    /// drop(message().await?);
    /// let explanation = message().explain().await?;
    /// println!("{explanation}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the request would fail with it.
    ///
    /// # Panics
    ///
    /// If the future was polled.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn explain(self) -> Result<Explanation, StoreError> {
        let NewRequest { first, rare } = self.into_new();
        let rare = rare.unwrap_or_default();
        let parts = iter::once(first).chain(rare.others).collect();
        let mut explanation = explain::explain(parts).await?;
        if let Some(error) = rare.invalid {
            explanation.verdict = Verdict::Refused {
                reason: Reason::InvalidQuota(error),
                retry_after: None,
                because: None,
            };
        }
        Ok(explanation)
    }

    /// Acquires the permit, sends the request with `call`, and takes in its response. A refusal by the upstream is
    /// no error: it is returned, and its key is on hold.
    ///
    /// If calls in flight are limited, the call is in flight until the future of `call` ends. For a response that
    /// tollgate cannot read, acquire the permit and [`begin`](crate::Permit::begin).
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # async fn fetch() -> Result<http::Response<()>, std::io::Error> { Ok(http::Response::new(())) }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::per_second(10))?.limiter();
    /// let response = limiter.acquire(Key::ALL).send(|| fetch()).await?;
    /// assert!(response.status().is_success());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Limited`] if the request has no permit, or if its call had to end because its in-flight slot was
    /// lost: see [`Sent::revoked`](crate::Sent::revoked). [`Error::Inner`] if the call failed.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. A request that waits gives up its place; one whose call has begun
    /// counts as sent.
    pub async fn send<T, E, F>(self, call: impl FnOnce() -> F) -> Result<T, Error>
    where
        T: ResponseInfo,
        E: Into<BoxError>,
        F: Future<Output = Result<T, E>>,
    {
        // It leaves in the poll in which it got the permit.
        let sent = self.await?.into_sent();
        let mut call = pin!({
            let _inner = sent.begin_inner();
            call()
        });
        let response = poll_fn(|cx| match sent.poll_lost(cx) {
            Poll::Ready(limited) => Poll::Ready(Err(limited.into())),
            Poll::Pending => {
                let _inner = sent.begin_inner();
                call.as_mut().poll(cx).map_err(Error::inner)
            }
        });
        let response = response.await?;
        sent.end(&Signal::read(&response), response.status());
        Ok(response)
    }

    /// Waits for the permit in the calling thread, for code without a Tokio runtime: plain threads,
    /// `ureq`, `reqwest::blocking`.
    ///
    /// Threads and tasks wait in one queue, in the order in which they arrived. A thread waits as long
    /// as a task would, has the same errors, and takes no permit if it is refused. If a permit is at
    /// hand, the thread takes it at once. The module [`blocking`](crate::blocking) says how it works, and has recipes.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer, Signal};
    ///
    /// # fn send() -> http::Response<String> { http::Response::new("hello".into()) }
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
    ///     let sent = limiter.acquire(Key::ALL).blocking()?.begin()?;
    ///     let response = send();
    ///     sent.answered(&Signal::read(&response));
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Limiter::acquire`](crate::Limiter::acquire), and [`Reason::CannotBlock`] if the
    /// calling thread runs tasks of a Tokio runtime. Then call `.await` instead, or block inside of
    /// `tokio::task::spawn_blocking`. [`block_on`](crate::blocking::block_on) lists where a thread may
    /// block.
    ///
    /// # Panics
    ///
    /// If the future was polled until it was ready.
    pub fn blocking(mut self) -> Result<Permit, Limited> {
        if let Err(why) = blocking::check() {
            return Err(self.refuse(Reason::CannotBlock(why)));
        }
        // A permit at hand needs no timers, so it does not start the runtime of blocking code. A request of several keys
        // sets a timer when it enters.
        if matches!(&self.0, Step::New(request) if request.rare.is_none())
            && let Poll::Ready(result) = self.enter()
        {
            return result;
        }
        match blocking::block_on(&mut self) {
            Ok(result) => result,
            Err(why) => Err(self.refuse(Reason::CannotBlock(why))),
        }
    }

    /// Enters, if the request has not. Ready if it got its permit at once or was refused. If it is pending, it waits, and
    /// is to be polled.
    #[inline(always)]
    fn enter(&mut self) -> Poll<Result<Permit, Limited>> {
        if !matches!(self.0, Step::New(..)) {
            return Poll::Pending;
        }
        let Step::New(request) = mem::replace(&mut self.0, Step::Done) else {
            return Poll::Pending;
        };
        if request.rare.is_none() {
            let NewPart { core, entry, .. } = &request.first;
            let now = clock::now_by_counter();
            let is_inside = around::is_any();
            // The common case has a return of its own, so that the permit is not copied.
            if !is_inside && let Some(slot) = at_once::take_one_unlocked(core, entry, now) {
                let NewPart { core, entry, .. } = request.first;
                return Poll::Ready(Ok(Permit::new(Taken::at_hand(core, &entry, Some(slot)))));
            }
            if !is_inside
                && let Some(slot) = at_once::take_at_once(core, entry, CountedAs::Request, now)
            {
                let NewPart { core, entry, .. } = request.first;
                return Poll::Ready(Ok(Permit::new(Taken::at_hand(core, &entry, slot))));
            }
        }
        match request.enter() {
            Admission::Go(taken) => Poll::Ready(Ok(by_hand(taken))),
            Admission::No(limited) => Poll::Ready(Err(limited)),
            Admission::Wait(wait) => {
                self.0 = Step::Waiting(wait);
                Poll::Pending
            }
        }
    }

    /// Refuses the request, and counts it under its first key.
    #[cold]
    fn refuse(self, reason: Reason) -> Limited {
        match self.0 {
            Step::Waiting(mut wait) => wait.refuse(reason),
            step => Acquire(step).into_new().refuse(reason),
        }
    }

    /// Returns the request, if its cost, class and quota can be set.
    fn of_one_key(&mut self) -> Option<&mut NewRequest> {
        let Step::New(request) = &mut self.0 else {
            return None;
        };
        let is_joined = request.rare.as_ref().is_some_and(|rare| rare.is_joined);
        (!is_joined).then_some(request)
    }

    /// Returns the request, which has not entered.
    fn into_new(self) -> NewRequest {
        match self.0 {
            Step::New(request) => request,
            _ => panic!("an Acquire future was polled before `and` or `explain`"),
        }
    }
}

/// Gives a request that has not entered the part of its key that a class has.
fn set_class(core: &mut Arc<Core>, key: &mut Key, class: &str) {
    if let Some((part, part_key)) = core.part_of_class(*key, class) {
        (*core, *key) = (part, part_key);
    }
    if core.class() != Some(class) && !core.settings.is_further_unit {
        counting::unknown_class(core, class);
    }
}

/// Makes the permit of a request by hand that had to ask the store.
fn by_hand(taken: Taken) -> Permit {
    taken.is_by_hand();
    Permit::new(taken)
}

impl Future for Acquire {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(result) = self.enter() {
            return Poll::Ready(result);
        }
        let Step::Waiting(wait) = &mut self.0 else {
            panic!("an Acquire future was polled after it was ready");
        };
        let left = ready!(wait.poll_left(cx));
        self.0 = Step::Done;
        Poll::Ready(left.map(by_hand))
    }
}
