//! The throttle: learns at which pace requests for a key may leave, and queues them.

// Four words of this folder:
//
// - A *turn* is the right of one request to leave next. Requests take turns in the order of their
//   arrival, over all processes that share the pace.
// - The *register* of a key is a value in a store. Through it, processes share the pace of the key
//   and take turns.
// - A *compare-and-set* is a call to the store that writes the register. If another process has
//   written the register meanwhile, the call only reads it.
// - The *sync task* of a key sends its compare-and-sets.
//
// A file imports only from files that stand above it in this table:
//
// | file | what it has |
// |---|---|
// | `pace_state` | the pace of one key, its last request and its hold: what processes share |
// | `peers` | the processes that share the pace, as the register lists them |
// | `sync_state` | whether a compare-and-set is under way, whether the store answers, and how long this process rests because others were faster |
// | `peer_view` | what this process knows of the register |
// | `event_log` | what happened at this process and is not in the register yet |
// | `local_queue` | the requests of this process for one key |
// | `sharing` | how a process takes turns with others |
// | `kinds` | the kinds of requests that the upstream refuses alone |
// | `paced_queue` | the queue of one key, without timers, tasks or a clock; the simulator runs it in virtual time |
// | `sync` | the supervision of the sync task of a key |
// | `waiters` | a paced queue with wakers and timers; only the first waiter's timer follows the next slot |
// | `engine` | the waiters of all keys, and the listener of store events |
// | `counting` | what is counted of requests, and the stats of a throttle |
// | `guarding` | what a ban guard does to a throttle |
// | `explain` | why a request would wait now |
// | `sync_task` | the task that writes the register of one key |
// | `permit` | the right to send one request, and the wait for it |
//
// The throttle does not decide how fast requests leave: the pace (`crate::pacing`) does.

mod counting;
mod engine;
mod event_log;
mod explain;
mod guarding;
mod kinds;
mod local_queue;
mod pace_state;
#[cfg_attr(not(feature = "__lab"), allow(unreachable_pub))]
pub(crate) mod paced_queue;
#[cfg(test)]
mod peer_properties;
mod peer_view;
mod peers;
mod permit;
#[cfg(test)]
mod properties;
mod sharing;
mod sync;
mod sync_state;
mod sync_task;
mod waiters;

use std::fmt;
use std::future::{Future, poll_fn};
use std::iter;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use self::engine::ThrottleCore;
use self::event_log::LogMark;
use self::pace_state::LONGEST_HOLD;
use self::permit::PacedRequest;
use self::sync_task::SyncTask;
use self::waiters::{Arrival, Waiters};
use crate::admission::Admission;
use crate::clock::{self, Timer};
use crate::config_error::ConfigError;
use crate::error::{Limited, Reason, StoreError};
use crate::events;
use crate::guarded::Guarded;
use crate::join::join_all;
use crate::key::{Key, Label, RequestRef};
use crate::key_map::Full;
use crate::limiter::refusal_of_throttle;
use crate::refused::RefusedRequest;
use crate::stats::{Cause, Drained, Engine, KeyStats, Stats, drain_gate};
use crate::store::Refusal;
use crate::wait_queue::WaitBound;
use crate::wakers::Wakers;

pub(crate) use engine::ThrottleSettings;
pub use permit::ThrottlePermit;
pub(crate) use permit::{PaceEntry, PaceWait, Turn};

/// The throttle behind an [`AdaptiveThrottleLayer`](crate::AdaptiveThrottleLayer), for requests
/// that are not HTTP. Clones share what they learn.
///
/// [`AdaptiveThrottleLayer::throttle`](crate::AdaptiveThrottleLayer::throttle) returns it. There is
/// no other constructor: the settings are those of the layer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tollgate::Limited> {
/// use std::time::Duration;
/// use tollgate::{AdaptiveThrottleLayer, Key, Signal};
///
/// let throttle = AdaptiveThrottleLayer::new().throttle();
/// let permit = throttle.acquire(Key::new("search")).await?;
/// // ... send the request ...
/// permit.answered(&Signal::default().with_refusal(http::StatusCode::TOO_MANY_REQUESTS));
///
/// // The next request waits longer than it would have without the refusal.
/// let start = tokio::time::Instant::now();
/// let permit = throttle.acquire(Key::new("search")).await?;
/// assert!(start.elapsed() > Duration::from_millis(500));
/// # permit.give_back();
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Throttle {
    core: Arc<ThrottleCore>,
}

impl Throttle {
    pub(crate) fn new(settings: ThrottleSettings) -> Result<Self, ConfigError> {
        Ok(Throttle {
            core: ThrottleCore::new(settings, SyncTask::start)?,
        })
    }

    /// Waits until a request of `key` may leave, for at most
    /// [`max_wait`](crate::AdaptiveThrottleBuilder::max_wait). Requests leave in the order of their
    /// arrival.
    ///
    /// The first request of a key that is not in use leaves alone. The others wait for its
    /// response, for at most a second.
    ///
    /// # Errors
    ///
    /// [`Limited::Local`] if the request cannot leave in time, if the queue is full, or if
    /// `max_keys` keys are in use. Its [`Reason`] states which.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. The request gives up its place in the queue. If its
    /// turn had come, the next request has it.
    ///
    /// # Panics
    ///
    /// If the request has to wait and the future is polled outside of a Tokio runtime with timers.
    pub async fn acquire(&self, key: Key) -> Result<ThrottlePermit, Limited> {
        match self.begin(PaceEntry::new(key), || self.label(key, None)) {
            Admission::Go(permit) => Ok(permit),
            Admission::Wait(wait) => wait.permit().await,
            Admission::No(limited) => Err(limited),
        }
    }

    /// Returns how many requests of `key` wait in this process.
    pub fn waiting(&self, key: Key) -> usize {
        self.core
            .find(key, |waiters| waiters.queue.waiting())
            .unwrap_or(0)
    }

    /// Returns how many requests of `key` this process has in flight.
    pub fn in_flight(&self, key: Key) -> usize {
        self.core
            .find(key, |waiters| waiters.queue.in_flight())
            .unwrap_or(0)
    }

    /// Explains what would happen to a request of `key` that arrives now: whether it would leave at
    /// once, wait or be refused, and why. Shows the pace of the key, its hold and its queue. Calls no
    /// store and changes nothing.
    ///
    /// If processes share the pace, a request that would leave at once may have to wait for an answer
    /// of the store first.
    ///
    /// ```
    /// use tollgate::{AdaptiveThrottleLayer, Key};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = AdaptiveThrottleLayer::builder().name("search").build()?.throttle();
    /// let permit = throttle.acquire(Key::ALL).await?;
    /// // The first request of a key leaves alone. The others wait for its response.
    /// println!("{}", throttle.explain(Key::ALL));
    /// # assert!(throttle.explain(Key::ALL).to_string().ends_with("in flight  1 here"));
    /// # permit.give_back();
    /// # Ok(())
    /// # }
    /// ```
    pub fn explain(&self, key: Key) -> crate::limiter::Explanation {
        explain::explain(&self.core, key)
    }

    /// Returns what this throttle has done in this process, and its state now. Calls no store, and
    /// visits the state of each key.
    pub fn stats(&self) -> Stats {
        self.core.stats()
    }

    /// Returns the stats of up to `most` keys: those with the most requests that wait, then those with
    /// the most attempts since their state was made. At most 1000 are returned.
    pub fn busiest(&self, most: usize) -> Vec<KeyStats> {
        self.core.busiest_stats(most.min(1000))
    }

    /// Names `key` in [`KeyStats`], for requests that come without a layer. At most 64 bytes of `name`
    /// are kept, and control characters become `?`. The name is forgotten with the state of the key,
    /// when the key is idle and its place is needed.
    pub fn name_key(&self, key: Key, name: &str) {
        // If there is no room for one more key, its requests are refused.
        let _ = self.core.open(key, clock::now(), |waiters, _| {
            waiters.counts.set_name(name);
        });
    }

    /// Returns whether `key` has no name that the user has given.
    pub(crate) fn is_unnamed(&self, key: Key) -> bool {
        self.core.is_unnamed(key)
    }

    /// Puts `key` on hold for `span`, at most a day: no process that shares the pace sends a
    /// request of this key.
    ///
    /// A refusal by the upstream does the same. A later hold can extend this one, but not shorten
    /// it. [`release`](Throttle::release) ends it.
    /// [`max_hold`](crate::AdaptiveThrottleBuilder::max_hold) limits only holds that responses
    /// cause.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{AdaptiveThrottleLayer, Key};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = AdaptiveThrottleLayer::new().throttle();
    /// throttle.hold_for(Key::ALL, Duration::from_secs(60)).await?;
    /// assert!(throttle.acquire(Key::ALL).await.is_err());
    ///
    /// throttle.release(Key::ALL).await?;
    /// assert!(throttle.acquire(Key::ALL).await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the hold. It applies in this process.
    /// [`StoreError::Full`] if `max_keys` keys are in use and `key` is not one of them. Then the
    /// hold applies nowhere.
    ///
    /// # Cancel safety
    ///
    /// Once the future was polled, the hold applies in this process, and the other processes are
    /// notified of it.
    ///
    /// # Panics
    ///
    /// If the pace is shared through a store, outside of a Tokio runtime with timers.
    pub async fn hold_for(&self, key: Key, span: Duration) -> Result<(), StoreError> {
        let now = clock::now();
        let span = span.min(LONGEST_HOLD);
        let until = clock::after(now, span);
        let change = self.change(key, now, |waiters, wakers| {
            waiters.hold_until(until, Cause::Operator, now, wakers)
        })?;
        self.core.report_hold(key, span, Cause::Operator);
        self.written(key, change).await
    }

    /// Ends the hold of `key` in all processes that share the pace, whether the upstream or an
    /// operator set it. The pace keeps what it has learned.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the hold may not have ended in other processes. They are notified when the
    /// store is reachable again. [`StoreError::Full`] if `max_keys` keys are in use and `key` is
    /// not one of them.
    ///
    /// # Cancel safety
    ///
    /// Once the future was polled, the hold has ended in this process, and the other processes are
    /// notified of it.
    ///
    /// # Panics
    ///
    /// If the pace is shared through a store, outside of a Tokio runtime with timers.
    pub async fn release(&self, key: Key) -> Result<(), StoreError> {
        let now = clock::now();
        // The call ends the stop in this process, whether its future is polled or not.
        let guard = self.core.settings.guard.as_ref();
        let stop = guard.map(|guard| guard.clone().release(key));
        // Without a store, a key that is not in use is on hold nowhere.
        let may_be_held = self.core.is_shared() || self.core.find(key, |_| ()).is_some();
        let change = match may_be_held {
            true => self.change(key, now, |waiters, wakers| waiters.release(now, wakers)),
            false => Ok(None),
        };
        let change = change.inspect(|_| {
            events::released(self.core.tally(), &self.label(key, None));
        });
        // Both are begun with the first poll: the caller may drop the future after it.
        let written: Pin<Box<dyn Future<Output = _> + Send + '_>> =
            Box::pin(async move { self.written(key, change?).await });
        let all = iter::once(written).chain(stop);
        join_all(all).await.into_iter().collect()
    }

    /// Ends the use of this throttle, for the shutdown of a process: lets the requests leave that wait and
    /// whose turns come `within` this time, and refuses all others.
    ///
    /// From the first poll on, a request that enters is refused with [`Reason::Draining`], and a refused
    /// request is not sent again. A request that waits keeps its place, until `within` is over. With
    /// `Duration::ZERO`, all are refused at once. Requests in flight are waited for, also `within` this
    /// time. This is for good, and for the layer and all clones: see
    /// [`Limiter::drain`](crate::Limiter::drain).
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store may not have received what was sent to it.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. The throttle stays drained.
    ///
    /// # Panics
    ///
    /// If requests wait and the future is polled outside of a Tokio runtime with timers.
    pub async fn drain(&self, within: Duration) -> Result<Drained, StoreError> {
        drain_gate(self.core.clone(), within).await
    }

    /// Changes the waiters of `key`. Returns a mark behind the change, if processes share the pace.
    fn change(
        &self,
        key: Key,
        now: Instant,
        change: impl FnOnce(&mut Waiters, &mut Wakers),
    ) -> Result<Option<LogMark>, StoreError> {
        let changed = self.core.open(key, now, |waiters, wakers| {
            change(waiters, wakers);
            waiters.queue.mark()
        });
        changed.map_err(|Full| StoreError::Full {
            max_keys: self.core.settings.max_keys,
        })
    }

    /// Waits until the register of `key` has everything that happened before `mark`, so that all processes can know of it.
    async fn written(&self, key: Key, mark: Option<LogMark>) -> Result<(), StoreError> {
        let Some(mark) = mark else { return Ok(()) };
        let mut timer = Timer::at(clock::now());
        poll_fn(|cx| {
            let now = clock::now();
            let polled = self.core.at(key, |waiters, _| {
                waiters.sync.poll_written(&waiters.queue, mark, now, cx)
            });
            let at = match polled {
                Some(ControlFlow::Break(written)) => return Poll::Ready(written),
                Some(ControlFlow::Continue(at)) => at,
                // The key was evicted to make room for others.
                None => return Poll::Ready(Err(StoreError::Lost)),
            };
            timer.set(at);
            timer.wake(cx);
            Poll::Pending
        })
        .await
    }

    /// Returns the name of `key` in errors and events. `request` is the request that has the key.
    pub(crate) fn label(&self, key: Key, request: Option<&RequestRef<'_>>) -> Label {
        self.core.label(key, request)
    }

    /// Returns what a guard stops.
    pub(crate) fn guarded(&self) -> Weak<dyn Guarded> {
        let core: Weak<ThrottleCore> = Arc::downgrade(&self.core);
        core
    }

    /// Admits a request that arrives now, or queues or refuses it.
    pub(crate) fn begin(
        &self,
        entry: PaceEntry,
        label: impl FnOnce() -> Label,
    ) -> Admission<ThrottlePermit, Box<PaceWait>> {
        let PaceEntry {
            key,
            kind,
            deadline,
            ..
        } = entry;
        let now = clock::now();
        let settings = &self.core.settings;
        let bound = WaitBound::new(deadline, now, settings.max_wait, Duration::ZERO);
        let max_queue = settings.max_queue;
        if let Some(reason) = refusal_of_throttle() {
            return self.refuse(Some(key), reason, label(), Refusal::NEVER, now);
        }
        if self.core.tally().is_draining() {
            return self.refuse(Some(key), Reason::Draining, label(), Refusal::NEVER, now);
        }
        if bound.latest < now {
            return self.refuse(Some(key), Reason::Deadline, label(), Refusal::NEVER, now);
        }
        let arrival = self.core.open(key, now, |waiters, wakers| {
            let arrival = waiters.arrived(kind, bound, max_queue, now, wakers);
            if let Arrival::Leaves(_) = arrival {
                waiters.counts.pass(1);
            }
            (arrival, waiters.queue.waiting())
        });
        let request = PacedRequest::new(self.core.clone(), entry, bound);
        let (reason, refusal) = match arrival {
            Ok((Arrival::Leaves(flight), _)) => return Admission::Go(request.leaves(flight)),
            Ok((Arrival::Waits(number), queued)) => {
                return Admission::Wait(request.waits(number, label(), queued, now));
            }
            Ok((Arrival::TooLate(late), _)) => late.refused(bound, now),
            Ok((Arrival::Full, _)) => (Reason::QueueFull(max_queue), Refusal::NEVER),
            Err(Full) => (Reason::TooManyKeys(settings.max_keys), Refusal::NEVER),
        };
        self.refuse(Some(key), reason, label(), refusal, now)
    }

    /// Refuses a request that arrives now, and counts it. The `label` of a request without a key is `none`.
    pub(crate) fn refuse(
        &self,
        key: Option<Key>,
        reason: Reason,
        label: Label,
        refusal: Refusal,
        now: Instant,
    ) -> Admission<ThrottlePermit, Box<PaceWait>> {
        let limited =
            RefusedRequest::of_pace(label, Duration::ZERO, 0).refuse(reason, refusal, now);
        self.core.refused(key, &limited);
        Admission::No(limited)
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ThrottleSettings {
            max_wait,
            max_queue,
            max_keys,
            max_hold,
            ..
        } = &self.core.settings;
        f.debug_struct("Throttle")
            .field("max_wait", max_wait)
            .field("max_queue", max_queue)
            .field("max_keys", max_keys)
            .field("max_hold", max_hold)
            .finish_non_exhaustive()
    }
}
