//! The future that [`Limiter::acquire`](crate::Limiter::acquire) returns.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use smallvec::SmallVec;

use super::around;
use super::at_once;
use super::cores::Cores;
use super::counting;
use super::engine::Core;
use super::explain;
use super::explanation::{Explanation, Verdict};
use super::part::{Entry, MOST_PARTS, NewPart, PartRef, earliest_deadline};
use super::quotas::QuotaId;
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

// New, Units, Joint => Waiting | Done
// Waiting, Invalid => Done
#[derive(Debug)]
enum Step {
    New(Arc<Core>, NewRequest),
    /// A request of one key, whose limits count several units, that has not entered.
    Units(Cores, Vec<NewPart>),
    /// A request of several keys that has not entered.
    Joint(Vec<NewPart>),
    /// A request that states a quota its key cannot have.
    Invalid(Vec<NewPart>, Arc<ConfigError>),
    Waiting(Box<Wait>),
    Done,
}

/// A request that has not entered.
#[derive(Clone, Copy, Debug)]
struct NewRequest {
    key: Key,
    cost: u32,
    deadline: Option<Instant>,
    quota: QuotaId,
}

impl NewRequest {
    fn entry(&self) -> Entry {
        Entry {
            deadline: self.deadline,
            quota: self.quota,
            ..Entry::new(self.key, self.cost)
        }
    }
}

impl Acquire {
    /// Makes the future of a request of `key` that takes one unit.
    #[inline]
    pub(super) fn new(cores: &Cores, key: Key) -> Self {
        if cores.count_units() {
            return Acquire::of_units(cores, key);
        }
        Acquire(Step::New(
            cores.first.clone(),
            NewRequest {
                key: cores.first.part_of(key),
                cost: 1,
                deadline: None,
                quota: QuotaId::NONE,
            },
        ))
    }

    fn of_units(cores: &Cores, key: Key) -> Self {
        let parts = cores.all().map(|core| NewPart {
            core: core.clone(),
            entry: Entry::new(core.key_of(key), Cost::default().under(core.unit())),
            named: key,
        });
        Acquire(Step::Units(cores.clone(), parts.collect()))
    }

    /// Sets what the request costs: a number of requests, or a [`Cost`] with other units. Default: one
    /// request. A request that costs nothing passes at once, even if its key is on hold. Set it
    /// before [`and`](Self::and): each key has a cost of its own.
    ///
    /// Has no effect once the future was polled.
    pub fn cost(mut self, cost: impl Into<Cost>) -> Self {
        let cost = cost.into();
        match &mut self.0 {
            Step::New(_, request) => request.cost = cost.under(None),
            Step::Units(cores, parts) => {
                // By hand, nothing is refused: the program may charge the unit in another call.
                let _ = cores.check_units(&cost.into(), |unit| !cores.count(unit));
                for NewPart { core, entry, .. } in parts {
                    entry.cost = cost.under(core.unit());
                }
            }
            Step::Joint(_) | Step::Invalid(..) | Step::Waiting(_) | Step::Done => {}
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
        match &mut self.0 {
            Step::New(core, request) => set_class(core, &mut request.key, class),
            Step::Units(_, parts) => {
                for NewPart { core, entry, .. } in parts {
                    set_class(core, &mut entry.key, class);
                }
            }
            Step::Joint(_) | Step::Invalid(..) | Step::Waiting(_) | Step::Done => {}
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
        let first = match &self.0 {
            Step::New(core, _) => core,
            Step::Units(cores, _) => &cores.first,
            Step::Joint(_) | Step::Invalid(..) | Step::Waiting(_) | Step::Done => return self,
        };
        match first.settings.quotas.id(&quota) {
            Ok(id) => match &mut self.0 {
                Step::New(_, request) => request.quota = id,
                Step::Units(_, parts) => {
                    for part in parts {
                        part.entry.quota = id;
                    }
                }
                _ => {}
            },
            Err(error) => {
                let (parts, _) = self.into_parts();
                return Acquire(Step::Invalid(parts, Arc::new(error)));
            }
        }
        self
    }

    /// Sets the moment by which the request must leave. Default: none.
    /// [`max_wait`](crate::RateLimitBuilder::max_wait) limits the wait as well.
    ///
    /// Has no effect once the future was polled.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        match &mut self.0 {
            Step::New(_, request) => request.deadline = Some(deadline),
            Step::Units(_, parts) | Step::Joint(parts) | Step::Invalid(parts, _) => {
                for part in parts {
                    part.entry.deadline = Some(deadline);
                }
            }
            Step::Waiting(_) | Step::Done => {}
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
        let (mut parts, invalid) = self.into_parts();
        let (others, also_invalid) = other.into_parts();
        parts.extend(others);
        assert!(
            parts.len() <= MOST_PARTS,
            "a request has at most {MOST_PARTS} keys"
        );
        Acquire(match invalid.or(also_invalid) {
            Some(error) => Step::Invalid(parts, error),
            None => Step::Joint(parts),
        })
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
        let (parts, invalid) = self.into_parts();
        let mut explanation = explain::explain(parts).await?;
        if let Some(error) = invalid {
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
        // A permit at hand needs no timers, so it does not start the runtime of blocking code.
        if matches!(self.0, Step::New(..))
            && let Poll::Ready(result) = self.enter_one()
        {
            return result;
        }
        match blocking::block_on(&mut self) {
            Ok(result) => result,
            Err(why) => Err(self.refuse(Reason::CannotBlock(why))),
        }
    }

    /// Enters a request of one key. Ready if it got its permit at once or was refused. If it is
    /// pending, it waits, and is to be polled.
    #[inline(always)]
    fn enter_one(&mut self) -> Poll<Result<Permit, Limited>> {
        if !matches!(self.0, Step::New(..)) {
            return Poll::Pending;
        }
        let Step::New(core, request) = mem::replace(&mut self.0, Step::Done) else {
            return Poll::Pending;
        };
        let (key, entry) = (request.key, request.entry());
        let now = clock::now_by_counter();
        let is_inside = around::is_any();
        // The common case has a return of its own, so that the permit is not copied.
        if !is_inside && let Some(slot) = at_once::take_one_unlocked(&core, &entry, now) {
            return Poll::Ready(Ok(Permit::new(Taken::at_hand(core, &entry, Some(slot)))));
        }
        if !is_inside
            && let Some(slot) = at_once::take_at_once(&core, &entry, CountedAs::Request, now)
        {
            return Poll::Ready(Ok(Permit::new(Taken::at_hand(core, &entry, slot))));
        }
        let part = PartRef::new(&core, entry);
        self.entered(wait::slow(&[part], entry.deadline, None, &|| {
            core.label(key, None)
        }))
    }

    /// Goes on with what a request got that has entered.
    fn entered(&mut self, admission: Admission<Taken, Box<Wait>>) -> Poll<Result<Permit, Limited>> {
        match admission {
            Admission::Go(taken) => {
                taken.is_by_hand();
                Poll::Ready(Ok(Permit::new(taken)))
            }
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
            step => refuse(&Acquire(step).into_parts().0[0], reason),
        }
    }

    /// Returns the keys of the request, and why their quota is invalid, if it is.
    fn into_parts(self) -> (Vec<NewPart>, Option<Arc<ConfigError>>) {
        match self.0 {
            Step::New(core, request) => {
                let (named, entry) = (core.whole(request.key), request.entry());
                (vec![NewPart { core, entry, named }], None)
            }
            Step::Units(_, parts) | Step::Joint(parts) => (parts, None),
            Step::Invalid(parts, error) => (parts, Some(error)),
            Step::Waiting(_) | Step::Done => {
                panic!("an Acquire future was polled before `and` or `explain`")
            }
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

/// Enters a request of several keys.
fn enter_joint(parts: &[NewPart]) -> Admission<Taken, Box<Wait>> {
    let deadline = earliest_deadline(parts);
    let first = &parts[0];
    let parts: SmallVec<[PartRef<'_>; 4]> = parts.iter().map(NewPart::as_part).collect();
    match at_once::take_all_at_once(&parts, deadline) {
        Some(taken) => Admission::Go(taken),
        None => wait::slow(&parts, deadline, None, &|| {
            first.core.label(first.entry.key, None)
        }),
    }
}

/// Refuses a request that has not entered, and counts it under its first key.
#[cold]
fn refuse(first: &NewPart, reason: Reason) -> Limited {
    let NewPart { core, entry, .. } = first;
    let now = clock::now();
    let refused = core.refused_request(entry.key);
    let limited = refused.refuse(reason, Refusal::NEVER, now);
    core.refused(Some(entry.key), &limited);
    limited
}

impl Future for Acquire {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                Step::New(..) => {
                    if let Poll::Ready(result) = self.enter_one() {
                        return Poll::Ready(result);
                    }
                }
                Step::Units(_, parts) | Step::Joint(parts) => {
                    let admission = enter_joint(parts);
                    self.0 = Step::Done;
                    if let Poll::Ready(result) = self.entered(admission) {
                        return Poll::Ready(result);
                    }
                }
                Step::Invalid(parts, error) => {
                    let limited = refuse(&parts[0], Reason::InvalidQuota(error.clone()));
                    self.0 = Step::Done;
                    return Poll::Ready(Err(limited));
                }
                Step::Waiting(wait) => {
                    let left = ready!(wait.poll_left(cx));
                    self.0 = Step::Done;
                    return Poll::Ready(left.map(|taken| {
                        taken.is_by_hand();
                        Permit::new(taken)
                    }));
                }
                Step::Done => panic!("an Acquire future was polled after it was ready"),
            }
        }
    }
}
