//! Where permits are counted: the [`Store`] trait and the contract that every store keeps.
//!
//! A store keeps one state per [`Key`] and decides in one atomic step. It answers at once
//! ([`Answer::Now`], as [`MemoryStore`] does) or when a server has answered ([`Answer::Later`]).
//!
//! # The contract
//!
//! 1. **Never over.** A permit is usable once, from its slot to its deadline. However its holder uses it within that
//!    time, and however long it then takes to the upstream up to `transit_slack`, no limit of the quota is exceeded.
//! 2. **One step.** [`Store::lease`] takes back what is returned, then books what is needed in order, then what may be
//!    fetched ahead; all limits of the quota or none. Two calls at once are as one after the other.
//! 3. **A refusal leaves no trace.** What cannot have a slot up to `latest` is not booked; the answer says when it could.
//! 4. **In order.** Needs are served in the order given; who asks later gets no earlier slot while slots are scarce.
//! 5. **Nothing twice.** What is given back is counted back once; a slot that lies ahead goes to the next who asks.
//! 6. **Nothing is kept for ever.** What is neither used nor returned runs out by itself.
//! 7. **A limited key is never forgotten** before its limits would have forgotten what it used.
//! 8. **An answer comes.** One that comes later comes within a second, if only to say that the store is away.
//! 9. **Keys are independent**, and [`Store::peek`] consumes nothing.
//! 10. **A hold holds.** While a key is held nothing is granted that could be used before its end; it only ever ends
//!     later, unless it is released; and all who listen are told.
//! 11. **Never over in flight.** What holders sit on, each within the life of its last claim, is never more than the
//!     smallest number that one of them asserts; those who wait are served in the order in which they came.
//! 12. **Others.** What others use of a limit, by the word of the upstream ([`Ask::left`]), is not granted until its window
//!     ends.
//! 13. **Charges.** What is charged ([`Ask::charges`]) counts from when it was used, whether or not there is room.
//! 14. **Registers.** A register changes in one step, and only where it is as it was seen; no version comes again.
//!
//! With the feature `contract`, the module `contract` holds it as a suite that any store can run.
//!
//! What this does not do: wait. Waiting is the gate's; a store only tells until when.

mod asked;
#[cfg(feature = "contract")]
#[cfg_attr(docsrs, doc(cfg(feature = "contract")))]
pub mod contract;
mod fallback;
mod hold;
mod in_flight;
mod memory;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
mod redis;
mod register;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::SmallVec;

pub use crate::error::StoreError;
use crate::key::{Key, RequestInfo};
pub use crate::limit::{Charge, Left, Terms, Unused};
use crate::quota::Limit;
pub(crate) use asked::Asked;
use fallback::Own;
pub(crate) use fallback::{ALONE, Share, ShareStore};
pub use hold::Held;
pub use in_flight::{Claim, Listener, News};
pub use memory::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use redis::{RedisStore, RedisStoreBuilder};
pub use register::{Change, Register, Tell};

/// For how long after an answer permits may be used that were granted before: after that, the store is asked first
/// whether it still knows of them. One that lost its state grants nothing for a window and so long.
pub(crate) fn trust(longest_window: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(1500);
    const LONGEST: Duration = Duration::from_secs(15);
    (longest_window / 4).clamp(SHORTEST, LONGEST)
}

/// Counts permits. The module's documentation has the contract.
pub trait Store: Send + Sync + 'static {
    /// Takes back what was not used, then books what is needed.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when nothing could be booked. An unknown outcome counts as spent: the caller does not repeat it.
    fn lease(&self, ask: Ask<'_>) -> Answer<Lease>;

    /// Takes back permits of `key` early that were surely not used. Does not block and cannot fail: what is lost on
    /// the way runs out by itself.
    fn give_back(&self, key: Key, terms: &Arc<Terms>, unused: &[Unused]);

    /// Says how many calls of a key a gate has in flight, and how many more it wants. Does not block: the answer, and
    /// whatever changes later because of others, is told to `listener`, from any thread.
    ///
    /// A store whose claims run out repeats the last one every third of its life, until it claims nothing.
    ///
    /// By default as for a store that knows nothing of calls in flight: it fails, with [`StoreError::Unsupported`].
    fn claim(&self, claim: Claim, listener: &Arc<dyn Listener>) {
        let unsupported = StoreError::Unsupported("limits of calls in flight");
        listener.clone().hear(claim.key, claim.holder, News::Failed(unsupported));
    }

    /// Holds `key`, and tells all who listen; with it came what is `left` of a limit. Answers what holds: a hold only ever
    /// ends later, unless it is released. Done whether or not the answer is waited for.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when others may not know of it; by default always, as for a store that knows nothing of holds.
    fn hold(&self, _key: Key, _terms: &Arc<Terms>, _held: Held, _left: Option<Left>) -> Answer<Held> {
        Answer::Now(Err(StoreError::Unsupported("holds")))
    }

    /// Ends the hold of `key`, and tells all who listen. Done whether or not the answer is waited for.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when others may not know of it; by default always.
    fn release(&self, _key: Key, _terms: &Arc<Terms>) -> Answer<Held> {
        Answer::Now(Err(StoreError::Unsupported("holds")))
    }

    /// From now on `listener` is told of holds and registers, for as long as it lives. By default nobody is: then they are
    /// known from what the store answers only.
    fn listen(&self, _listener: Weak<dyn Listener>) {}

    /// Changes a register of a key, if nobody else has changed it since it was seen, and tells of it; or reads it.
    ///
    /// By it the processes of a fleet share what an [`AdaptiveThrottleLayer`](crate::AdaptiveThrottleLayer) learns. Whoever
    /// is told hears [`News::Register`].
    ///
    /// # Errors
    ///
    /// [`StoreError`] when it may or may not have been changed; by default always, as for a store without registers.
    fn compare_and_set(&self, _change: Change) -> Answer<Register> {
        Answer::Now(Err(StoreError::Unsupported("registers")))
    }

    /// Where others reach those who [listen](Store::listen) here: for [`Tell::One`]. At most 2^53. By default 0: nobody is
    /// told alone.
    fn address(&self) -> u64 {
        0
    }

    /// Tells the state of `key`, and consumes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the state could not be read.
    fn peek(&self, key: Key, terms: &Arc<Terms>) -> Answer<Usage>;

    /// Returns what errors and events call `key`, unless it is [`Key::ALL`] or a host. By default eight hex digits, different
    /// in each process.
    ///
    /// A store that knows a secret makes the label with it, so that it is the same in all processes. It must not let a
    /// reader confirm a guessed name: no digest without a secret.
    fn label(&self, key: Key) -> Box<str> {
        key.to_string().into()
    }

    /// Returns what runs the tasks of gates on a thread of the store's own: calls to the store, and the pauses before them.
    ///
    /// By default `None`: then a call runs in the runtime of the caller that made it, for all requests of the key that wait. If
    /// that runtime is not driven, the call counts as lost after a second, and another one is made.
    fn background(&self) -> Option<&dyn Background> {
        None
    }

    /// Answers when all that was given back before has arrived. By default at once.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when it may not have arrived.
    fn flush(&self) -> Answer<()> {
        Answer::Now(Ok(()))
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
pub(crate) fn label(store: &dyn Store, key: Key, request: Option<&RequestInfo<'_>>) -> Box<str> {
    key.plain_label(request).unwrap_or_else(|| store.label(key))
}

/// A task for [`Background::spawn`]. It may be dropped at any `.await`: then its call ends as [`StoreError::Lost`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What a store answers: at once, or when a server has answered.
#[non_exhaustive]
pub enum Answer<T> {
    /// At once.
    Now(Result<T, StoreError>),
    /// By this future. Dropping it leaves the outcome unknown.
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> Answer<T> {
    /// What is answered, when it is.
    pub(crate) async fn arrives(self) -> Result<T, StoreError> {
        match self {
            Answer::Now(answer) => answer,
            Answer::Later(answer) => answer.await,
        }
    }
}

/// What a process asks of a store for one key.
#[derive(Debug)]
#[non_exhaustive]
pub struct Ask<'a> {
    /// Whose state.
    pub key: Key,
    /// What is allowed.
    pub terms: &'a Arc<Terms>,
    /// Those who wait, in order.
    pub needs: &'a [Need],
    /// Up to how many units besides, if they are free now: at most a quarter of what is.
    pub prefetch: u32,
    /// The latest slot of use to those who wait, from now.
    pub latest: Duration,
    /// How long after its slot a permit must be usable; half as long will do for a slot that was returned.
    pub life: Duration,
    /// The same, for what is fetched ahead.
    pub prefetch_life: Duration,
    /// Permits that were surely not used.
    pub returns: &'a [Unused],
    /// Units that were used without a permit. At most [`Charge::MOST`] in a call, oldest first.
    pub charges: &'a [Charge],
    /// What the process remembers of earlier answers.
    pub memory: Memory,
    /// The hold it knows of and the store may not.
    pub held: Held,
    /// What the upstream has said lately is left of a limit.
    pub left: Option<Left>,
}

/// Some who wait for permits of the same cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Need {
    /// The units each takes; at least 1.
    pub cost: u32,
    /// How many they are.
    pub count: u32,
}

impl Need {
    /// Makes a need of `count` permits of `cost` units each.
    pub const fn new(cost: u32, count: u32) -> Self {
        Need { cost, count }
    }
}

/// What a process remembers of the state of a key, by which a store that lost it can tell.
///
/// A store that loses nothing answers with incarnation 0, and is told nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Which life of the state it was; 0 for none. Drawn anew when the state is made.
    pub incarnation: u64,
    /// How often the state had been written, in the store's last answer.
    pub writes: u64,
    /// The store's time in that answer.
    pub seen: u64,
    /// How long ago it arrived.
    pub since: Duration,
    /// The longest that a call and its answer were on their way lately.
    pub trip: Duration,
    /// Units that this process was granted within the longest window; never fewer.
    pub granted: u64,
}

/// What a store grants.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Lease {
    /// Permits for the needs, in their order.
    pub segments: Segments,
    /// Units fetched ahead: a segment of cost 1.
    pub prefetched: Option<Segment>,
    /// Set when not all needs were granted.
    pub refused: Option<Refusal>,
    /// Set when nothing was decided about the needs: a store that lost its state learns for so long what was granted
    /// before. Ask again then.
    pub learning: Option<Duration>,
    /// Which life of the state it is; 0 for a store that loses nothing.
    pub incarnation: u64,
    /// How often the state was written, for [`Memory::writes`].
    pub writes: u64,
    /// The store's time, for [`Memory::seen`]: what waits count from.
    pub now: u64,
    /// For how long what is remembered of this answer is of use.
    pub remember: Duration,
    /// What holds the key.
    pub held: Held,
    /// A limit in force that the terms of this ask do not have: another process asserts it for the same key.
    pub foreign: Option<Limit>,
    /// Whether others use a limit of the key too, by the word of the upstream: then the store is to be told of each word.
    pub shared: bool,
    /// Units that could still go now, after this lease; 0 if it was refused.
    pub free: u64,
    /// Set when the process granted it itself, of its share.
    pub(crate) own: Option<Own>,
}

impl Lease {
    /// Whether it says anything of the state besides its segments.
    pub(crate) fn is_word_of_store(&self) -> bool {
        self.own.is_none_or(|own| own.answered)
    }

    /// All that it grants, as permits that were not used.
    pub(crate) fn unused(&self) -> SmallVec<[Unused; 4]> {
        let incarnation = self.granted_in();
        let segments = self.segments.iter().chain(&self.prefetched);
        let unused = segments.map(|&Segment { cost, count, slot, stamp, .. }| Unused {
            slot,
            stamp,
            units: u64::from(cost) * u64::from(count),
            incarnation,
        });
        unused.collect()
    }

    /// Which life of a state granted its segments.
    pub(crate) fn granted_in(&self) -> u64 {
        if self.own.is_some() { ALONE } else { self.incarnation }
    }
}

/// The segments of a lease, in order. Two fit without allocation.
#[derive(Clone, Debug, Default)]
pub struct Segments(SmallVec<[Segment; 2]>);

impl Segments {
    /// Adds one at the end.
    pub fn push(&mut self, segment: Segment) {
        self.0.push(segment);
    }
}

impl std::ops::Deref for Segments {
    type Target = [Segment];

    fn deref(&self) -> &[Segment] {
        &self.0
    }
}

impl std::ops::DerefMut for Segments {
    fn deref_mut(&mut self) -> &mut [Segment] {
        &mut self.0
    }
}

/// Permits of the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Segment {
    /// The units each permit takes.
    pub cost: u32,
    /// How many permits.
    pub count: u32,
    /// Until their slot, from the moment the answer arrives.
    pub wait: Duration,
    /// From their slot to their deadline, less what the call took.
    pub life: Duration,
    /// The slot in the store's time, for [`Unused`].
    pub slot: u64,
    /// The stamp in the store's time, for [`Unused`].
    pub stamp: u64,
}

impl Segment {
    /// Makes a segment of `count` permits of `cost` units each: their slot comes after `wait`, and they are usable for `life`
    /// from then.
    ///
    /// Its slot and stamp are 0. A store that takes permits back sets both: it is told them in [`Unused`].
    pub const fn new(cost: u32, count: u32, wait: Duration, life: Duration) -> Self {
        Segment { cost, count, wait, life, slot: 0, stamp: 0 }
    }
}

/// No slot up to the latest one asked for; nothing was booked for this need and those after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// Until the first slot there would have been; `None` when there will be none.
    pub wait: Option<Duration>,
    /// The limit that would have been the last to allow it.
    pub limit: Option<Limit>,
}

impl Refusal {
    /// Makes a refusal because of `limit`: the first slot would come after `wait`, or never if that is `None`.
    pub const fn new(wait: Option<Duration>, limit: Option<Limit>) -> Self {
        Refusal { wait, limit }
    }

    /// One that no wait would end.
    pub(crate) const NEVER: Refusal = Refusal { wait: None, limit: None };
}

/// The state of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Each limit, with the units used of it.
    pub limits: Vec<LimitUsage>,
    /// How many units could go now.
    pub free: u64,
    /// Until one unit could go.
    pub next_slot: Duration,
    /// What holds the key.
    pub held: Held,
    /// Whether the store is away, and this is the share with which the process goes on: see
    /// [`FallbackShare`](crate::OnStoreError::FallbackShare).
    pub alone: bool,
}

impl Usage {
    /// Besides, `taken` calls are in flight, and `free` more could be, of `most`.
    pub(crate) fn in_flight(mut self, most: u32, taken: u32, free: u32) -> Self {
        let (limit, used, free) = (Limit::InFlight { count: most }, u64::from(taken), u64::from(free));
        self.limits.push(LimitUsage { limit, used, free, reserved: 0 });
        self.free = self.free.min(free);
        self
    }
}

/// How much of a limit is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitUsage {
    /// The limit.
    pub limit: Limit,
    /// The units that count against it now, those booked ahead included.
    pub used: u64,
    /// The units it would allow now.
    pub free: u64,
    /// The units that are left to others, who use the same limit by the word of the upstream.
    pub reserved: u64,
}

impl LimitUsage {
    /// Makes the usage of `limit`, of which `used` units count and `free` more could go now. None are reserved.
    pub const fn new(limit: Limit, used: u64, free: u64) -> Self {
        LimitUsage { limit, used, free, reserved: 0 }
    }
}
