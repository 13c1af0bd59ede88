//! Layers around each other: the permits that a request already has when it reaches an inner layer.
//!
//! A permit is valid for 10 to 50 ms. If a layer is around another one, the request gets the outer
//! permit first and may then wait for the inner one, so the outer permit would expire. Therefore a
//! layer makes its permits known to the layers inside it, for as long as it calls or polls its inner
//! service. That is synchronous, so a list in a thread-local variable has exactly the permits of the
//! layers around.
//!
//! An inner layer that has a permit at hand, while all outer permits are valid and unused, sends the
//! request. Otherwise it makes a joint request (`joint`) of its own keys and those of all layers
//! around, and brings the outer permits along. If the stores of its own keys grant a slot before these
//! expire, they are used. Else the outer layers have new permits. A permit is also used up by an attempt: if a
//! retry between two layers sends the request again, the outer permit is acquired anew.
//!
//! Few layers are around another one, and the others should pay nothing. So a layer only marks the
//! thread at first ([`Watch`]). If an inner layer finds the mark, the outer layer notes that, and
//! makes its permits known from then on ([`InnerCall`]). The inner layer lets its first request wait
//! until it is polled again.
//!
//! An adaptive throttle inside has no permit of a limiter. It waits for its turn, and then renews the
//! outer permits ([`Renewal`](super::joint::Renewal)). Gates inside of it see its call as that of a
//! layer around them.
//!
//! A layer cannot see the layers around it if the request reaches it in another task, as behind
//! `tower::buffer`.

use std::cell::Cell;
use std::time::Instant;

use smallvec::SmallVec;

use super::engine::{self, CoreId};
use super::probe::Probe;
use super::reservation::{ProbeNumber, Reservation};
use crate::key::Key;
use crate::rng::dice;

/// The permit of a layer around.
#[derive(Clone, Copy, Debug)]
pub(super) struct OuterPermit {
    pub(super) core: CoreId,
    pub(super) key: Key,
    pub(super) cost: u32,
    /// The key of its host, if the host matters.
    pub(super) host: Option<Key>,
    /// When the permit expires. `None` if the request costs nothing, or if rates are not limited.
    pub(super) until: Option<Instant>,
    /// The slot, for permits that can be given back.
    pub(super) slot: Option<Reservation>,
    /// The probes that the call of the layer is: of its key and of its host. If an inner call takes the slot, it
    /// takes them back; if it renews the permit, they are new ones, for the call of the layer.
    pub(super) probes: [Option<(Key, ProbeNumber)>; 2],
    pub(super) use_of: UseOf,
}

/// Which call has a permit, and which call of an inner layer has used it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UseOf {
    /// The call of the layer that has the permit. `None` for the outermost layer.
    pub(super) call: Option<CallId>,
    /// The call of the next layer inside that has used the permit.
    pub(super) by: Option<CallId>,
}

/// Identifies a call of a layer inside another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId(u64);

/// What a layer sees of the layers around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sight {
    /// No layer is around.
    Nothing,
    /// The permits of the layers around are known.
    Permits,
    /// A layer is around whose permits are not known.
    Mark,
    /// The same, and an inner layer has found the mark.
    FoundMark,
}

/// The most permits of layers around. A layer further inside does not see those beyond.
const MOST: u8 = 16;

/// The permits of the layers around, the outermost first. It has no destructor, so that it is quick
/// to reach.
struct Around {
    sight: Cell<Sight>,
    count: Cell<u8>,
    permits: [Cell<Option<OuterPermit>>; MOST as usize],
}

impl Around {
    /// Returns the permits that are known.
    fn known(&self) -> &[Cell<Option<OuterPermit>>] {
        &self.permits[..usize::from(self.count.get())]
    }
}

thread_local! {
    static AROUND: Around = const {
        Around {
            sight: Cell::new(Sight::Nothing),
            count: Cell::new(0),
            permits: [const { Cell::new(None) }; MOST as usize],
        }
    };
}

/// Returns whether the caller runs inside of a layer.
#[inline]
pub(crate) fn is_any() -> bool {
    engine::are_several() && AROUND.with(|around| around.sight.get() != Sight::Nothing)
}

/// Returns whether the caller runs inside of layers whose permits are known.
pub(super) fn are_known() -> bool {
    AROUND.with(|around| around.sight.get() == Sight::Permits)
}

/// Returns whether the permits of the layer around are not known yet. That layer is notified, and
/// makes them known from then on.
pub(super) fn find_mark() -> bool {
    AROUND.with(|around| {
        let is_marked = matches!(around.sight.get(), Sight::Mark | Sight::FoundMark);
        if is_marked {
            around.sight.set(Sight::FoundMark);
        }
        is_marked
    })
}

/// Removes a mark that no layer around has left: its inner service has panicked.
#[cold]
pub(super) fn remove_stale_mark() {
    AROUND.with(|around| {
        if matches!(around.sight.get(), Sight::Mark | Sight::FoundMark) {
            around.sight.set(Sight::Nothing);
        }
    });
}

/// The mark of a layer on its thread, while it calls its inner service on the fast path.
///
/// A layer that finds the mark finds another one when it is polled first, so this one has nothing to
/// return. If the inner service panics, the mark stays. A layer that finds such a mark loses no more
/// than the time until it is polled again, and then removes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(Sight);

impl Mark {
    /// Marks the thread.
    #[inline]
    pub(crate) fn set() -> Self {
        AROUND.with(|around| Mark(around.sight.replace(Sight::Mark)))
    }

    /// Removes the mark.
    #[inline]
    pub(crate) fn remove(self) {
        AROUND.with(|around| around.sight.set(self.0));
    }
}

impl OuterPermit {
    /// Makes the place of a call that has no permit itself, among the permits of the layers around.
    pub(super) fn place_of(use_of: UseOf) -> Self {
        OuterPermit {
            core: CoreId::NONE,
            key: Key::ALL,
            cost: 0,
            host: None,
            until: None,
            slot: None,
            probes: [None; 2],
            use_of,
        }
    }

    /// Returns the first two of these probes.
    pub(super) fn first_probes<'a>(
        probes: impl IntoIterator<Item = &'a Probe>,
    ) -> [Option<(Key, ProbeNumber)>; 2] {
        let mut probes = probes.into_iter();
        [(); 2].map(|()| probes.next().map(|probe| (probe.key(), probe.number())))
    }

    /// Returns the probes.
    pub(super) fn probes(&self) -> impl Iterator<Item = Probe> {
        let probes = self.probes.into_iter().flatten();
        probes.map(|(key, number)| Probe::new(self.core, key, number))
    }
}

impl CallId {
    pub(super) fn new() -> Self {
        CallId(dice())
    }
}

/// A call or poll of the inner service of a layer. Meanwhile the layer's mark is on the thread, or
/// its permits are known. Dropping this removes both, also if the inner service panics.
#[derive(Debug)]
pub(crate) struct InnerCall {
    /// What the layers around had left there.
    sight: Sight,
    count: u8,
}

impl InnerCall {
    #[inline]
    fn begin(sight: Sight) -> Self {
        AROUND.with(|around| InnerCall {
            sight: around.sight.replace(sight),
            count: around.count.get(),
        })
    }

    /// Marks the thread. Returns `None` if no layer can be around another one.
    #[inline]
    pub(super) fn mark() -> Option<Self> {
        engine::are_several().then(|| InnerCall::begin(Sight::Mark))
    }

    /// Makes `permits` known.
    pub(super) fn publish(permits: impl Iterator<Item = OuterPermit>) -> Self {
        let this = InnerCall::begin(Sight::Permits);
        AROUND.with(|around| {
            for permit in permits {
                let count = around.count.get();
                if let Some(place) = around.permits.get(usize::from(count)) {
                    place.set(Some(permit));
                    around.count.set(count + 1);
                }
            }
        });
        this
    }

    /// Returns whether the mark is still as the layer has left it. If not, an inner layer has found
    /// it, or the layer has made its permits known instead.
    #[inline]
    pub(super) fn is_unseen(&self) -> bool {
        AROUND.with(|around| around.sight.get() == Sight::Mark)
    }

    /// Returns the permits of the layer, in their order, if an inner layer has used or renewed them.
    pub(super) fn changed(&self) -> SmallVec<[OuterPermit; 1]> {
        AROUND.with(|around| {
            let own = around.known().iter().skip(usize::from(self.count));
            own.filter_map(Cell::get)
                .filter(|permit| permit.use_of.by.is_some())
                .collect()
        })
    }
}

impl Drop for InnerCall {
    #[inline]
    fn drop(&mut self) {
        AROUND.with(|around| {
            around.count.set(self.count);
            around.sight.set(self.sight);
        });
    }
}

/// Returns the permits of the layers around, the outermost first.
pub(super) fn all() -> SmallVec<[OuterPermit; 2]> {
    AROUND.with(|around| around.known().iter().filter_map(Cell::get).collect())
}

/// Returns when the first of the permits of the layers around expires. `None` if none expires.
pub(super) fn first_expiry() -> Option<Instant> {
    all().iter().filter_map(|permit| permit.until).min()
}

/// Replaces the permits of the layers around.
fn set_all(permits: &[OuterPermit]) {
    AROUND.with(|around| {
        for (place, permit) in around.permits.iter().zip(permits) {
            place.set(Some(*permit));
        }
    });
}

/// Returns whether the call `call` of an inner layer may use the outer permits now. Then they count
/// as used by it.
pub(super) fn use_all(call: CallId, now: Instant) -> bool {
    let mut permits = all();
    let is_alive = |permit: &OuterPermit| permit.until.is_none_or(|until| now < until);
    let are_usable = permits.iter().all(is_alive) && are_unused_but_by(&permits, None);
    if are_usable {
        mark_used(&mut permits, call);
        set_all(&permits);
    }
    are_usable
}

/// Takes out the slots of the outer permits with which no request was sent, to give them back or to bring
/// them along. Their calls are no probes any more. The call `call` of an inner layer does so, and may have renewed them before. From then on these
/// permits count as used by it, so that no later call takes them again.
pub(super) fn take_unused(call: CallId) -> SmallVec<[(CoreId, Key, Reservation); 2]> {
    let mut permits = all();
    let are_unused = are_unused_but_by(&permits, Some(call));
    let slots = permits.iter_mut().filter_map(|permit| {
        let slot = permit.slot.take().filter(|_| are_unused)?;
        Some((permit.core, permit.key, slot))
    });
    let unused: SmallVec<_> = slots.collect();
    let mut probes = SmallVec::<[Probe; 2]>::new();
    if !unused.is_empty() {
        mark_used(&mut permits, call);
        for permit in &mut permits {
            probes.extend(permit.probes());
            permit.probes = [None; 2];
        }
    }
    set_all(&permits);
    unused
}

/// Returns whether no request was sent with these permits. Each of them may have been used by the
/// layer inside it, down to the innermost, which may be the call `last`.
fn are_unused_but_by(permits: &[OuterPermit], last: Option<CallId>) -> bool {
    let is_unused = |(index, permit): (usize, &OuterPermit)| {
        let used_by = permit.use_of.by;
        used_by.is_none() || used_by == next_call(permits, index).or(last)
    };
    permits.iter().enumerate().all(is_unused)
}

/// Replaces the slots of the permits of the layers around, the outermost first, and takes their probes out of
/// `probes`. The call `call` of an inner layer uses them.
pub(super) fn renew(
    slots: impl Iterator<Item = Option<Reservation>>,
    probes: &mut Vec<Probe>,
    call: CallId,
) {
    let mut permits = all();
    // A limiter that was dropped has no permits any more.
    let counted = permits
        .iter_mut()
        .filter(|permit| permit.core.find().is_some());
    for (permit, slot) in counted.zip(slots) {
        permit.until = slot.map(|slot| slot.until);
        permit.slot = slot;
        let is_own = |probe: &mut Probe| {
            let host = permit
                .core
                .find()
                .map(|core| core.hold_key(permit.key, permit.host));
            probe.is_of(permit.core, permit.key)
                || host.is_some_and(|host| probe.is_of(permit.core, host))
        };
        let own: SmallVec<[Probe; 2]> = probes.extract_if(.., is_own).collect();
        permit.probes = OuterPermit::first_probes(&own);
        own.into_iter().for_each(|probe| _ = probe.into_number());
    }
    mark_used(&mut permits, call);
    set_all(&permits);
}

/// Returns the call of the layer inside that of permit `index`.
fn next_call(permits: &[OuterPermit], index: usize) -> Option<CallId> {
    let own = permits[index].use_of.call;
    let inside = permits[index..].iter().map(|permit| permit.use_of.call);
    inside.into_iter().find(|call| *call != own).flatten()
}

/// Marks each permit as used by the call of the next layer inside, and those of the innermost layer
/// as used by `call`.
fn mark_used(permits: &mut [OuterPermit], call: CallId) {
    for index in 0..permits.len() {
        permits[index].use_of.by = next_call(permits, index).or(Some(call));
    }
}
