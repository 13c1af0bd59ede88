//! What a store does, and its replies: the [`Store`] trait and the contract that every store keeps.

use std::future::Future;
use std::panic::{self, AssertUnwindSafe};
use std::pin::Pin;
use std::sync::{Arc, Weak};

use super::event::notify;
use super::{
    Change, Claim, InForce, Lease, LeaseRequest, PeekRequest, Register, RegisterRequest,
    StoreError, StoreEvent, StoreListener, Usage,
};
use crate::blocking;
use crate::key::{Key, Label, RequestRef};
use crate::limit::{LimitSpec, UnusedPermits};

/// Counts permits.
///
/// A store keeps one state for each [`Key`] and decides in one atomic step. It replies at once
/// ([`StoreReply::Ready`], as [`MemoryStore`](super::MemoryStore) does) or when a server has replied
/// ([`StoreReply::Pending`]).
///
/// This trait and its types need the feature `unstable-store`, and are outside of semver: any
/// release may change them.
///
/// # The contract
///
/// 1. **Limits are kept.** A permit is usable once, from its slot to its deadline. No limit of the
///    quota is exceeded, whenever the holder uses the permit in that time. The request may take up
///    to `transit_slack` to reach the upstream.
/// 2. **One step.** [`Store::lease`] takes back returned permits, then books the demands in order,
///    then prefetches permits. It books in all limits of the quota or in none. Concurrent calls
///    count like calls one after the other.
/// 3. **A refusal leaves no trace.** A demand without a slot up to `latest` is not booked. The
///    reply states when its slot would be.
/// 4. **In order.** Demands are served in the order given. A later call gets no earlier slot while
///    slots are scarce.
/// 5. **Returned once.** A returned permit is counted back once. If its slot lies ahead, the next
///    call gets that slot.
/// 6. **Permits expire.** A permit that is neither used nor returned expires.
/// 7. **A limited key is kept** until its limits would have forgotten what it used.
/// 8. **Every call gets a reply** within a second, even if it is an error.
/// 9. **Keys are independent**, and [`Store::peek`] consumes nothing.
/// 10. **Holds are kept.** While a key is on hold, the store grants only permits whose slot is at
///     or after its end. The end of a hold moves only later, unless the hold is released. Every
///     listener is notified.
/// 11. **In-flight limits are kept.** In-flight slots in use, over all holders with a live claim,
///     never exceed the smallest limit that any of them states. Waiters are served in the order of
///     their arrival, but for those of classes below their share, who go first ([`Claim::share`]).
/// 12. **External usage.** The upstream may state that other clients used units of a limit
///     ([`LeaseRequest::remaining`]). The store reserves these units until the window of the limit
///     ends.
/// 13. **Charges.** Charged units ([`LeaseRequest::charges`]) count from when they were used, even
///     beyond the limit.
/// 14. **Registers.** A register changes in one step, and only if it has not changed since it was
///     read. Versions never repeat.
/// 15. **Later use.** The permits of a demand are of use from [`Demand::earliest`](super::Demand::earliest) on. A store that
///     ignores this may grant an earlier slot and states it, and the process gives such a permit
///     back. The other laws hold in either case.
/// 16. **Set quotas.** While a quota is set for a key ([`Change::Quota`]), it decides in place of
///     what callers state, from the call that sets it on. Used units stay used. Each change has a
///     version, which never goes back. A reply states the version unless the request does
///     ([`LimitSpec::quota_version`]), and every listener is notified. A quota that the upstream
///     states ([`ChangeKind::Learn`](super::ChangeKind)) is a set quota that gives way to those of operators.
///
/// `tests/contract` of the repository has a test suite that any store can run.
///
/// A store never waits. It states the slot of a permit, and the limiter waits for it.
///
/// No method may block, because a limiter calls some of them while it holds a lock.
///
/// # A store around another store
///
/// A decorator returns the store that it is around from [`inner`](Store::inner). A method that it does
/// not implement then calls that store.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreReply};
///
/// /// Counts the calls that book.
/// struct Counted {
///     store: MemoryStore,
///     calls: AtomicU64,
/// }
///
/// impl Store for Counted {
///     fn inner(&self) -> Option<&dyn Store> {
///         Some(&self.store)
///     }
///
///     fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
///         self.calls.fetch_add(1, Ordering::Relaxed);
///         self.store.lease(request)
///     }
/// }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Returns the store that this one is around. By default `None`.
    ///
    /// The default of each other method calls this store. What the docs say of a default is for a store
    /// that is around none.
    fn inner(&self) -> Option<&dyn Store> {
        None
    }

    /// Takes back unused permits, then books the demands of the request.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store booked nothing, or if the outcome is unknown. The caller counts
    /// permits of an unknown outcome as used, and does not repeat the call.
    ///
    /// # Cancel safety
    ///
    /// If the caller drops the reply, the outcome is unknown. Permits that were granted expire.
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease>;

    /// Takes back unused permits of `key`. Does not block and cannot fail: a permit that does not
    /// arrive expires. The default does nothing.
    ///
    /// They arrive before what this process asks for `key` later: a request that gives up the units of a whole limit
    /// may ask for them again at once.
    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        if let Some(inner) = self.inner() {
            inner.give_back(key, spec, unused);
        }
    }

    /// Takes in how many calls of a key a limiter has in flight, and how many more in-flight slots
    /// it wants. Does not block.
    ///
    /// The store notifies `listener` of the outcome and of later changes, from any thread. A store
    /// whose claims expire repeats the last claim every third of its [`ttl`](Claim::ttl), until a
    /// claim uses and wants no slot.
    ///
    /// The default is for a store that does not count calls in flight: it notifies of
    /// [`StoreError::Unsupported`].
    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        if let Some(inner) = self.inner() {
            return inner.claim(claim, listener);
        }
        let unsupported = StoreError::Unsupported("limits of calls in flight");
        let failed = StoreEvent::Failed(unsupported);
        notify(listener.clone(), claim.key, claim.holder, failed);
    }

    /// Changes the hold or the set quota of `key`, and notifies every listener. Returns what is in
    /// force then.
    ///
    /// A set quota is made of the limits of `spec`. Its version is larger than that of the store's
    /// state and that of `spec`.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the change. The default, for a store without
    /// holds and set quotas, always fails with [`StoreError::Unsupported`], and so does a quota without
    /// a limit of rate.
    ///
    /// # Cancel safety
    ///
    /// The change takes effect even if the caller drops the reply.
    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        match self.inner() {
            Some(inner) => inner.change(key, spec, change),
            None => StoreReply::unsupported("holds and set quotas"),
        }
    }

    /// Notifies `listener` of holds, set quotas and registers from now on, until the listener is
    /// dropped. The default does nothing: then a process learns of them from the replies of the store only.
    fn listen(&self, listener: Weak<dyn StoreListener>) {
        if let Some(inner) = self.inner() {
            inner.listen(listener);
        }
    }

    /// Reads or changes a register of a key. A change is made only if no other process has changed
    /// the register since it was read. Listeners are notified of a change by
    /// [`StoreEvent::Register`].
    ///
    /// The processes of a fleet use registers to share what an
    /// [`AdaptiveThrottleLayer`](crate::AdaptiveThrottleLayer) learns.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if it is unknown whether the register was changed. The default, for a store
    /// without registers, always fails with [`StoreError::Unsupported`].
    ///
    /// # Cancel safety
    ///
    /// If the caller drops the reply, the register may or may not have been changed.
    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        match self.inner() {
            Some(inner) => inner.compare_and_set(change),
            None => StoreReply::unsupported("registers"),
        }
    }

    /// Returns the address at which other processes notify the [listeners](Store::listen) of this
    /// store, for [`Recipients::One`](super::Recipients::One). At most 2^53. By default 0, which means that no process can
    /// notify this store alone.
    fn address(&self) -> u64 {
        self.inner().map_or(0, |inner| inner.address())
    }

    /// Returns the state of a key, and when one more request could leave. Consumes nothing.
    ///
    /// A store may ignore the fields of the [`PeekRequest`] besides the key and its limits. Then the
    /// waits that it states are those of a request that costs one unit.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the state could not be read. The default always fails with
    /// [`StoreError::Unsupported`].
    ///
    /// # Cancel safety
    ///
    /// The caller may drop the reply.
    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        match self.inner() {
            Some(inner) => inner.peek(request),
            None => StoreReply::unsupported("questions about the use of a key"),
        }
    }

    /// Returns the label of `key` in errors and events, for keys other than [`Key::ALL`] and hosts.
    /// By default eight hex digits, different in each process.
    ///
    /// A store with a secret makes the label with it, so that the label is the same in all
    /// processes. A reader must not be able to confirm a guessed name, so a label is never a digest
    /// without a secret.
    fn label(&self, key: Key) -> Label {
        match self.inner() {
            Some(inner) => inner.label(key),
            None => key.process_label(),
        }
    }

    /// Returns the executor of the limiter's tasks, on a thread of the store's own. The tasks are
    /// calls to the store, and the delays before them.
    ///
    /// By default `None`: then a call runs in the runtime of the caller that made it, for all
    /// waiters of the key. If that runtime stops, the call counts as lost after a second, and is
    /// made again.
    fn background(&self) -> Option<&dyn Background> {
        self.inner()?.background()
    }

    /// Completes when all permits that were given back before have arrived. By default at once.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if some of them may not have arrived.
    ///
    /// # Cancel safety
    ///
    /// The permits arrive even if the caller drops the reply.
    fn flush(&self) -> StoreReply<()> {
        match self.inner() {
            Some(inner) => inner.flush(),
            None => StoreReply::Ready(Ok(())),
        }
    }
}

/// Runs tasks on a thread that no caller depends on.
pub trait Background: Send + Sync {
    /// Runs a task in a Tokio runtime with timers, to its end. Does not block.
    ///
    /// A task that cannot be run is dropped, and so is a task that is still running when the store
    /// is dropped. The call of such a task ends as [`StoreError::Lost`].
    fn spawn(&self, task: Task);
}

/// Runs a task in the background of a store, else in the current runtime, else in that of
/// [blocking code](crate::blocking). If there is none of them, the task is dropped.
// A box, because each type of task adds some 2,000 lines of LLVM to a program.
pub(crate) fn spawn(store: &dyn Store, task: Task) {
    if let Some(background) = store.background() {
        background.spawn(task);
    } else if let Some(runtime) = blocking::runtime_for_tasks() {
        drop(runtime.spawn(task));
    }
}

/// Makes a task that calls `lost` if it is dropped, with its runtime, before its end: also before its first poll.
pub(crate) fn unless_lost(
    task: impl Future<Output = ()> + Send + 'static,
    lost: impl FnOnce() + Send + 'static,
) -> impl Future<Output = ()> + Send + 'static {
    let unless_lost = UnlessLost(Some(lost));
    async move {
        task.await;
        unless_lost.end();
    }
}

struct UnlessLost<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> UnlessLost<F> {
    fn end(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for UnlessLost<F> {
    fn drop(&mut self) {
        if let Some(lost) = self.0.take() {
            // The task may be dropped because it panicked. A second panic would end the process.
            let _ = panic::catch_unwind(AssertUnwindSafe(lost));
        }
    }
}

/// Returns the label of `key` in errors and events. The key came with `request`, if that is known.
pub(crate) fn label(store: &dyn Store, key: Key, request: Option<&RequestRef<'_>>) -> Label {
    key.plain_label(request).unwrap_or_else(|| store.label(key))
}

/// A task for [`Background::spawn`]. It may be dropped at any `.await`, and then its call ends as
/// [`StoreError::Lost`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The reply of a store, which arrives at once or later.
#[non_exhaustive]
pub enum StoreReply<T> {
    /// The store has replied.
    Ready(Result<T, StoreError>),
    /// The store replies later: the output of this future is its reply. If the future is dropped,
    /// the outcome is unknown.
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> StoreReply<T> {
    /// Returns the reply of a store that lacks the capability `what`.
    fn unsupported(what: &'static str) -> Self {
        StoreReply::Ready(Err(StoreError::Unsupported(what)))
    }

    /// Returns what `then` makes of the reply when it arrives.
    pub(crate) fn then(
        self,
        then: impl FnOnce(Result<T, StoreError>) -> Self + Send + 'static,
    ) -> Self
    where
        T: Send + 'static,
    {
        match self {
            StoreReply::Ready(reply) => then(reply),
            StoreReply::Pending(reply) => {
                StoreReply::Pending(Box::pin(async move { then(reply.await).arrives().await }))
            }
        }
    }

    /// Waits for the reply.
    ///
    /// # Errors
    ///
    /// That of the store.
    pub async fn arrives(self) -> Result<T, StoreError> {
        match self {
            StoreReply::Ready(reply) => reply,
            StoreReply::Pending(reply) => reply.await,
        }
    }
}
