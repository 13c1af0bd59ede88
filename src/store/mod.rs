//! Where permits are counted: the [`Store`] trait and the contract that every store keeps.
//!
//! A store keeps one state per [`Key`] and decides in one atomic step. It answers at once
//! ([`StoreReply::Ready`], as [`MemoryStore`] does) or when a server has answered ([`StoreReply::Pending`]).
//!
//! # The contract
//!
//! 1. **Never over.** A permit is usable once, from its slot to its deadline. However its holder uses it within that
//!    time, and however long the request then takes to the upstream, up to `transit_slack`, no limit of the quota is exceeded.
//! 2. **One step.** [`Store::lease`] takes back what is returned, then books the needs in order, then permits in advance; all
//!    limits of the quota or none. Concurrent calls count like calls one after the other.
//! 3. **A refusal leaves no trace.** A need without a slot up to `latest` is not booked; the answer states when its slot would be.
//! 4. **In order.** Needs are served in the order given. A later call gets no earlier slot while slots are scarce.
//! 5. **Nothing twice.** A returned permit is counted back once; a slot that lies ahead goes to the next call.
//! 6. **Nothing is kept for ever.** A permit that is neither used nor returned expires.
//! 7. **A limited key is never forgotten** before its limits would have forgotten what it used.
//! 8. **Every call is answered**, within a second, if only by an error.
//! 9. **Keys are independent**, and [`Store::peek`] consumes nothing.
//! 10. **A hold holds.** While a key is on hold, the store grants no permit that could be used before its end. A hold ends later
//!     or not at all, unless it is released; and every listener is notified.
//! 11. **Never over in flight.** Slots in use, over all holders with a live claim, never exceed the smallest limit that any of them
//!     states. Waiters are served in the order in which they came.
//! 12. **External usage.** Units that other clients use of a limit, as the upstream states ([`LeaseRequest::remaining`]), are not granted until
//!     its window ends.
//! 13. **Charges.** Charged units ([`LeaseRequest::charges`]) count from when they were used, whether or not there is room.
//! 14. **Registers.** A register changes in one step, and only if it has not changed since it was read; versions never repeat.
//!
//! With the feature `contract`, the module `contract` holds it as a suite that any store can run.
//!
//! A store never waits: it only states until when. The limiter waits.

mod asked;
#[cfg(feature = "contract")]
#[cfg_attr(docsrs, doc(cfg(feature = "contract")))]
pub mod contract;
mod delegate;
mod fallback;
mod hold;
mod in_flight;
mod lease;
mod memory;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
mod redis;
mod register;
mod session;
mod source;
mod usage;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub use crate::error::StoreError;
use crate::key::{Key, RequestRef};
pub use crate::limit::{Charge, LimitSpec, UnusedPermits, UpstreamRemaining};
pub(crate) use asked::OwnedLeaseRequest;
pub(crate) use fallback::{FallbackStore, Share};
pub use hold::HoldState;
pub use in_flight::{Claim, StoreEvent, StoreListener};
pub use lease::{ClientSession, Demand, Grant, Grants, Lease, LeaseRequest, Refusal};
pub use memory::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use redis::{RedisStore, RedisStoreBuilder};
pub use register::{Recipients, Register, RegisterRequest};
pub(crate) use session::StoreSession;
pub(crate) use source::Source;
pub use usage::{LimitUsage, Usage};

/// Returns for how long after an answer earlier permits may be used. After that the store has to confirm them first. A store that
/// lost its state grants nothing for a window and this span.
pub(crate) fn trust(longest_window: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(1500);
    const LONGEST: Duration = Duration::from_secs(15);
    (longest_window / 4).clamp(SHORTEST, LONGEST)
}

/// Counts permits. The module's documentation has the contract.
pub trait Store: Send + Sync + 'static {
    /// Takes back permits that were not used, then books what is needed.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if nothing could be booked. An unknown outcome counts as spent: the caller does not repeat it.
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease>;

    /// Takes back permits of `key` early that were not used. Does not block and cannot fail: a permit that is lost on the way
    /// expires.
    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]);

    /// States how many calls of a key a limiter has in flight, and how many more it wants. Does not block: the store notifies
    /// `listener` of the answer and of later changes, from any thread.
    ///
    /// A store whose claims expire repeats the last one every third of its life, until it claims nothing.
    ///
    /// The default is for a store without calls in flight: it fails with [`StoreError::Unsupported`].
    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        let unsupported = StoreError::Unsupported("limits of calls in flight");
        listener.clone().on_event(claim.key, claim.holder, StoreEvent::Failed(unsupported));
    }

    /// Puts `key` on hold and notifies every listener; the same response stated what is `left` of a limit. Returns the hold in
    /// force: a hold ends later or not at all, unless it is released. Takes effect whether or not the answer is awaited.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the hold; by default always, for a store without holds.
    fn hold(
        &self,
        _key: Key,
        _terms: &Arc<LimitSpec>,
        _held: HoldState,
        _left: Option<UpstreamRemaining>,
    ) -> StoreReply<HoldState> {
        StoreReply::Ready(Err(StoreError::Unsupported("holds")))
    }

    /// Ends the hold of `key` and notifies every listener. Takes effect whether or not the answer is awaited.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the release; by default always.
    fn release(&self, _key: Key, _terms: &Arc<LimitSpec>) -> StoreReply<HoldState> {
        StoreReply::Ready(Err(StoreError::Unsupported("holds")))
    }

    /// Notifies `listener` of holds and registers from now on, for as long as it lives. The default does nothing: then processes
    /// learn of them from the store's answers only.
    fn listen(&self, _listener: Weak<dyn StoreListener>) {}

    /// Changes a register of a key, if no other process has changed it since it was read, and notifies listeners by
    /// [`StoreEvent::Register`]; or reads it.
    ///
    /// The processes of a fleet share what an [`AdaptiveThrottleLayer`](crate::AdaptiveThrottleLayer) learns by registers.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the register may or may not have been changed; by default always, for a store without registers.
    fn compare_and_set(&self, _change: RegisterRequest) -> StoreReply<Register> {
        StoreReply::Ready(Err(StoreError::Unsupported("registers")))
    }

    /// Returns the address at which other processes notify the [listeners](Store::listen) of this one, for [`Recipients::One`]. At most
    /// 2^53. By default 0: listeners cannot be notified alone.
    fn address(&self) -> u64 {
        0
    }

    /// Returns the state of `key`, and consumes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the state could not be read.
    fn peek(&self, key: Key, spec: &Arc<LimitSpec>) -> StoreReply<Usage>;

    /// Returns what errors and events call `key`, unless it is [`Key::ALL`] or a host. By default eight hex digits, different
    /// in each process.
    ///
    /// A store that knows a secret makes the label with it, so that it is the same in all processes. It must not let a
    /// reader confirm a guessed name: no digest without a secret.
    fn label(&self, key: Key) -> Box<str> {
        key.to_string().into()
    }

    /// Returns what runs the limiter's tasks on a thread of the store's own: calls to the store, and the delays before them.
    ///
    /// By default `None`: then a call runs in the runtime of the caller that made it, for all waiters of the key. If that runtime is
    /// not driven, the call counts as lost after a second, and is made again.
    fn background(&self) -> Option<&dyn Background> {
        None
    }

    /// Completes when all permits that were given back before have arrived. By default at once.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if they may not have arrived.
    fn flush(&self) -> StoreReply<()> {
        StoreReply::Ready(Ok(()))
    }
}

/// Runs tasks on a thread that no caller depends on.
pub trait Background: Send + Sync {
    /// Runs a task in a Tokio runtime with timers, to its end. Does not block.
    ///
    /// A task that cannot be run, or is still running when the store is dropped, is dropped: its call ends as
    /// [`StoreError::Lost`].
    fn spawn(&self, task: Task);
}

/// Runs a task in the background of a store, or else in the current runtime; without either it is dropped.
pub(crate) fn spawn(store: &dyn Store, task: impl Future<Output = ()> + Send + 'static) {
    if let Some(background) = store.background() {
        background.spawn(Box::pin(task));
    } else if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        drop(runtime.spawn(task));
    }
}

/// Returns what errors and events call `key`, which came with `request`.
pub(crate) fn label(store: &dyn Store, key: Key, request: Option<&RequestRef<'_>>) -> Box<str> {
    key.plain_label(request).unwrap_or_else(|| store.label(key))
}

/// A task for [`Background::spawn`]. It may be dropped at any `.await`: then its call ends as [`StoreError::Lost`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The reply of a store: at once, or when a server has replied.
#[non_exhaustive]
pub enum StoreReply<T> {
    /// At once.
    Ready(Result<T, StoreError>),
    /// The output of this future. Dropping it leaves the outcome unknown.
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> StoreReply<T> {
    /// Waits for the reply.
    pub(crate) async fn arrives(self) -> Result<T, StoreError> {
        match self {
            StoreReply::Ready(answer) => answer,
            StoreReply::Pending(answer) => answer.await,
        }
    }
}
