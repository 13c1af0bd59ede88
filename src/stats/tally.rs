//! The counts of a gate.
//!
//! A permit at hand is counted in the state of its key ([`KeyCounts`](super::KeyCounts)), under the
//! lock that it needs anyway. All else is counted here, by relaxed atomics. When the state of a key is
//! forgotten, its counts are added to these.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::thread::LocalKey;
use std::time::{Duration, Instant};

use http::StatusCode;

use super::class_check::ClassCheck;
use super::drain::{DrainState, Drained, DrainedAs};
use super::event::{Event, Handler};
#[cfg(feature = "metrics")]
use super::exporter::ExportedWaits;
use super::histogram::WaitCounts;
use super::key_counts::{Counted, KeyCounts};
#[cfg(feature = "metrics")]
use super::labelled_keys::LabelledKeys;
use super::values::{Cause, Counts, GateState, Outcome, REASONS, Requests, Stats, index_of_reason};
use crate::clock;
use crate::error::Limited;
use crate::key::Key;
use crate::locks::lock;

thread_local! {
    /// Whether a handler of events runs on this thread.
    static IS_TELLING: Cell<bool> = const { Cell::new(false) };
}

/// What this thread does, which it notes in the flag until this is dropped.
pub(super) struct Doing(&'static LocalKey<Cell<bool>>);

impl Doing {
    /// Returns `None` if the thread does it already, or ends.
    pub(super) fn begin(flag: &'static LocalKey<Cell<bool>>) -> Option<Self> {
        let was_doing = flag.try_with(|is_doing| is_doing.replace(true));
        matches!(was_doing, Ok(false)).then_some(Doing(flag))
    }
}

impl Drop for Doing {
    fn drop(&mut self) {
        let _ = self.0.try_with(|is_doing| is_doing.set(false));
    }
}

/// The counts of a gate, its name, and the handler of its events.
#[derive(Default)]
pub(crate) struct Tally {
    name: Arc<str>,
    /// Whether it counts the bad answers of a [ban guard](crate::Guard): each is a request here.
    is_of_guard: bool,
    /// Whether another gate of the same name counts the same requests: then the registry leaves this one out.
    is_second: bool,
    handler: Option<Arc<Handler>>,
    /// The requests of keys without state, by outcome.
    requests: [AtomicU64; Outcome::ALL.len()],
    /// The units of keys without state.
    units: AtomicU64,
    /// The units of permits that were given back.
    given_back: AtomicU64,
    refusals: [AtomicU64; REASONS.len()],
    waits: WaitCounts,
    #[cfg(feature = "metrics")]
    exported_waits: ExportedWaits,
    #[cfg(feature = "metrics")]
    labelled: LabelledKeys,
    /// How often the upstream has refused, by status, sorted.
    upstream_refusals: Mutex<Vec<(StatusCode, u64)>>,
    holds: [AtomicU64; Cause::ALL.len()],
    classes: ClassCheck,
    sent_again: AtomicU64,
    /// How many requests of the layer in a row came right behind a permit by hand. `u32::MAX` once that was reported.
    pairs: AtomicU32,
    waiting: Mutex<BTreeMap<u64, OpenWait>>,
    drain: DrainState,
    /// The numbers of requests that wait.
    next: AtomicU64,
    shown: Mutex<Counted>,
    /// The refusals by this process.
    floods: Floods,
    /// The refusals by the upstream.
    upstream_floods: Floods,
}

/// A request that waits.
struct OpenWait {
    key: Key,
    since: Instant,
    /// Its task, which is woken when the gate is drained.
    waker: Option<Waker>,
}

/// How many requests of each key wait, whatever they wait for.
pub(crate) struct Waiting(HashMap<Key, usize>);

impl Waiting {
    pub(crate) fn of(&self, key: Key) -> usize {
        self.0.get(&key).copied().unwrap_or_default()
    }
}

/// The refusals of one key.
struct Flood {
    /// When a refusal was reported last.
    reported: Instant,
    /// How many were not reported since.
    unreported: u64,
}

/// The refusals of one kind, by the labels of their keys. At most one a second of each key is reported:
/// otherwise a flood of requests would become a flood of events.
#[derive(Default)]
struct Floods(Mutex<HashMap<Box<str>, Flood>>);

/// The shortest time between two reports of refusals of one key.
const REPORT_AGAIN: Duration = Duration::from_secs(1);

/// The most keys whose refusals are reported within [`REPORT_AGAIN`].
const MOST_FLOODS: usize = 256;

impl Flood {
    /// Returns whether the next refusal is reported.
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.reported) >= REPORT_AGAIN
    }
}

impl Floods {
    /// Returns whether a refusal of the key with this label is reported now. If so, returns how many were
    /// not reported since the last one that was.
    fn report(&self, label: &str) -> Option<u64> {
        let now = clock::now();
        let mut floods = lock(&self.0);
        let is_known = floods.contains_key(label);
        if !is_known && floods.len() >= MOST_FLOODS {
            floods.retain(|_, flood| !flood.is_over(now));
        }
        // Beyond `MOST_FLOODS` keys, the refusals of further keys share a report.
        let has_room = is_known || floods.len() < MOST_FLOODS;
        let label = if has_room { label } else { "" };
        let Some(flood) = floods.get_mut(label) else {
            let flood = Flood {
                reported: now,
                unreported: 0,
            };
            floods.insert(label.into(), flood);
            return Some(0);
        };
        if !flood.is_over(now) {
            flood.unreported += 1;
            return None;
        }
        flood.reported = now;
        Some(std::mem::take(&mut flood.unreported))
    }
}

/// Returns since when the oldest of these requests waits. A refused request that waits again has a later number, but goes on
/// with its wait.
fn oldest<'a>(waiting: impl Iterator<Item = &'a OpenWait>) -> Option<Instant> {
    waiting.map(|open| open.since).min()
}

/// Returns whether a name may be that of a gate.
pub(crate) fn is_series_name(name: &str) -> bool {
    let mut letters = name.bytes();
    (1..=64).contains(&name.len())
        && letters.all(|byte| byte.is_ascii_alphanumeric() || b"_.-/: ".contains(&byte))
}

fn read<const N: usize>(counts: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|index| counts[index].load(Ordering::Relaxed))
}

impl Tally {
    /// The name of a gate without one.
    pub(crate) const DEFAULT_NAME: &str = "default";

    pub(crate) fn new(name: &str, handler: Option<Arc<Handler>>) -> Self {
        Tally {
            name: name.into(),
            handler,
            ..Tally::default()
        }
    }

    /// Makes the counts of the bad answers that a guard counts.
    pub(crate) fn of_guard(name: &str) -> Self {
        Tally {
            is_of_guard: true,
            ..Tally::new(name, None)
        }
    }

    /// Makes this the counts of requests that another gate of this name counts, too.
    pub(crate) fn second(self) -> Self {
        Tally {
            is_second: true,
            ..self
        }
    }

    pub(super) fn is_second(&self) -> bool {
        self.is_second
    }

    /// Sets how many keys have metrics of their own.
    #[cfg(feature = "metrics")]
    pub(crate) fn label_keys(&self, most: usize) {
        self.labelled.set_most(most);
    }

    #[cfg(feature = "metrics")]
    pub(super) fn labelled(&self) -> &LabelledKeys {
        &self.labelled
    }

    pub(crate) fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// Counts a request of a key without state.
    pub(crate) fn count(&self, outcome: Outcome) {
        self.requests[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts units of a key without state.
    pub(crate) fn add_units(&self, units: u64) {
        self.units.fetch_add(units, Ordering::Relaxed);
    }

    /// Subtracts units of a permit that was given back, and that no state of a key counts.
    pub(crate) fn give_back(&self, units: u64) {
        self.given_back.fetch_add(units, Ordering::Relaxed);
    }

    /// Adds the counts of a key whose state is forgotten.
    pub(crate) fn absorb(&self, counts: &KeyCounts) {
        let Counted { requests, units } = counts.counted();
        for (index, (_, count)) in requests.by_outcome().enumerate() {
            self.requests[index].fetch_add(count, Ordering::Relaxed);
        }
        self.add_units(units);
    }

    /// Counts the reason of a refusal. Returns the outcome of the request.
    pub(crate) fn refusal(&self, limited: &Limited) -> Outcome {
        match limited.reason() {
            Some(reason) => {
                self.refusals[index_of_reason(&reason)].fetch_add(1, Ordering::Relaxed);
                Outcome::Refused
            }
            None => Outcome::Store,
        }
    }

    pub(crate) fn upstream_refused(&self, status: StatusCode) {
        let mut statuses = lock(&self.upstream_refusals);
        match statuses.binary_search_by_key(&status, |(status, _)| *status) {
            Ok(place) => statuses[place].1 += 1,
            Err(place) => statuses.insert(place, (status, 1)),
        }
    }

    pub(crate) fn held(&self, cause: Cause) {
        self.holds[cause as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn classes(&self) -> &ClassCheck {
        &self.classes
    }

    pub(crate) fn count_sent_again(&self) {
        self.sent_again.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of the layer that came right behind a permit by hand, if it `is_pair`. Returns `true` once, for the
    /// last of `most` in a row.
    pub(crate) fn count_pair(&self, is_pair: bool, most: u32) -> bool {
        const REPORTED: u32 = u32::MAX;
        let order = Ordering::Relaxed;
        let counted = self.pairs.fetch_update(order, order, |pairs| match pairs {
            REPORTED => None,
            _ if !is_pair => (pairs > 0).then_some(0),
            pairs if pairs + 1 >= most => Some(REPORTED),
            pairs => Some(pairs + 1),
        });
        is_pair && counted.is_ok_and(|before| before + 1 >= most)
    }

    pub(super) fn waited(&self, wait: Duration) {
        self.waits.add(wait);
        #[cfg(feature = "metrics")]
        self.exported_waits
            .add(wait, |exporter| (exporter.wait_recorder)(&self.name));
    }

    /// Notes that a request of `key` waits since `since`. Returns its number.
    pub(super) fn open(&self, key: Key, since: Instant) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.waiting).insert(
            number,
            OpenWait {
                key,
                since,
                waker: None,
            },
        );
        number
    }

    /// Notes the task of a request that waits.
    pub(super) fn register(&self, number: u64, waker: &Waker) {
        if let Some(open) = lock(&self.waiting).get_mut(&number) {
            match &mut open.waker {
                Some(other) => other.clone_from(waker),
                None => open.waker = Some(waker.clone()),
            }
        }
    }

    /// Notes that a request waits no longer. `drained` is how a drain counts it, if it does.
    pub(super) fn close(&self, number: u64, drained: Option<DrainedAs>) {
        let mut waiting = lock(&self.waiting);
        waiting.remove(&number);
        // Under the lock: a drain that ends now counts each request once.
        if let Some(drained) = drained {
            self.drain.count(drained);
        }
        let is_last = waiting.is_empty();
        drop(waiting);
        if is_last {
            self.drain.wake();
        }
    }

    pub(super) fn waiting(&self) -> usize {
        lock(&self.waiting).len()
    }

    /// Returns how many requests have left since the drain began, and how many were refused or still
    /// wait.
    pub(super) fn drained(&self) -> Drained {
        let waiting = lock(&self.waiting);
        let mut drained = self.drain.counts();
        drained.refused += waiting.len() as u64;
        drained
    }

    /// Returns how many requests of `key` wait, and since when the oldest of them does.
    pub(crate) fn waiting_of(&self, key: Key) -> (usize, Option<Instant>) {
        let waiting = lock(&self.waiting);
        let of_key = waiting.values().filter(|open| open.key == key);
        (of_key.clone().count(), oldest(of_key))
    }

    pub(super) fn waiting_by_key(&self) -> Waiting {
        let mut by_key = HashMap::new();
        for open in lock(&self.waiting).values() {
            *by_key.entry(open.key).or_default() += 1;
        }
        Waiting(by_key)
    }

    /// Wakes the tasks of all requests that wait.
    pub(super) fn wake_waiting(&self) {
        let mut waiting = lock(&self.waiting);
        let wakers = waiting.values_mut().filter_map(|open| open.waker.take());
        let wakers: Vec<Waker> = wakers.collect();
        drop(waiting);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(super) fn drain_state(&self) -> &DrainState {
        &self.drain
    }

    /// Returns whether the gate is drained, so that no request enters.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.drain.is_draining()
    }

    /// Returns until when requests that wait may leave, if the gate is drained.
    pub(crate) fn drained_by(&self) -> Option<Instant> {
        self.drain.by()
    }

    /// Notes that a call in flight has ended.
    #[inline]
    pub(crate) fn call_ended(&self) {
        self.drain.wake();
    }

    /// Calls the handler, if there is one. What a handler itself causes is not told to handlers: a handler that
    /// puts a key on hold for each event would never end.
    pub(crate) fn tell(&self, event: &Event<'_>) {
        if let Some(handler) = &self.handler
            && let Some(_telling) = Doing::begin(&IS_TELLING)
        {
            handler(event);
        }
    }

    /// Returns whether this counts bad answers for a guard. Then there are no events: the guard has its
    /// own.
    pub(crate) fn is_of_guard(&self) -> bool {
        self.is_of_guard
    }

    /// Returns whether the program takes in events.
    pub(crate) fn has_handler(&self) -> bool {
        self.handler.is_some()
    }

    /// Returns whether a refusal of the key with this label is reported now. If so, returns how many were
    /// not reported since the last one that was.
    pub(crate) fn report_refusal(&self, label: &str) -> Option<u64> {
        self.floods.report(label)
    }

    /// Does the same for a refusal by the upstream.
    pub(crate) fn report_upstream_refusal(&self, label: &str) -> Option<u64> {
        self.upstream_floods.report(label)
    }

    /// Returns the stats of the `gate`. `counted` are the [counts](Self::counted) of this tally and of all
    /// keys, in `unit`s.
    pub(crate) fn stats(
        &self,
        mut counted: Counted,
        unit: &'static str,
        gate: GateState,
        now: Instant,
    ) -> Stats {
        let given_back = self.given_back.load(Ordering::Relaxed);
        counted.units = counted.units.saturating_sub(given_back);
        let mut shown = lock(&self.shown);
        // A request may end while the counts are read. It is then missing, or its permit is not given
        // back yet. No count falls for that reason.
        shown.merge(&counted, u64::max);
        let counted = *shown;
        drop(shown);
        let waiting = lock(&self.waiting);
        let oldest = oldest(waiting.values());
        let count = waiting.len();
        drop(waiting);
        let statuses = lock(&self.upstream_refusals);
        let statuses = statuses
            .iter()
            .map(|(status, count)| (Cow::Owned(status.as_str().to_owned()), *count));
        let causes = Cause::ALL.map(|cause| Cow::Borrowed(cause.name()));
        Stats {
            name: self.name.clone(),
            draining: self.is_draining(),
            counted,
            refusals: Counts::new(
                REASONS
                    .map(Cow::Borrowed)
                    .into_iter()
                    .zip(read(&self.refusals)),
            ),
            unit,
            waits: self.waits.read(),
            upstream_refusals: Counts::new(statuses),
            holds: Counts::new(causes.into_iter().zip(read(&self.holds))),
            sent_again: self.sent_again.load(Ordering::Relaxed),
            unknown_classes: self.classes.unknown(),
            waiting: count,
            oldest_wait: oldest.map(|since| now.saturating_duration_since(since)),
            gate,
        }
    }

    /// Returns the counts of keys without state. Read them before the states of the keys: a key that is
    /// forgotten meanwhile is then missing, and not counted twice.
    pub(crate) fn counted(&self) -> Counted {
        let mut requests = Requests::default();
        for ((outcome, _), count) in Outcome::ALL.into_iter().zip(read(&self.requests)) {
            *requests.of(outcome) = count;
        }
        Counted {
            requests,
            units: self.units.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused request that waits again has waited before.
    #[test]
    fn oldest_wait_may_have_a_late_number() {
        let (tally, now) = (Tally::default(), clock::now());
        let seconds = Duration::from_secs;
        let at = |count| clock::after(now, seconds(count));
        for since in [13, 0, 7] {
            tally.open(Key::ALL, at(since));
        }
        assert_eq!(tally.waiting_of(Key::ALL), (3, Some(now)));
        let stats = tally.stats(Counted::default(), "requests", GateState::default(), at(14));
        assert_eq!(stats.oldest_wait, Some(seconds(14)));
    }
}
