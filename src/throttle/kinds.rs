//! The kinds of requests of one key, once the upstream has refused a request: which of them it refuses alone, and until when
//! these are held.
//!
//! The pace does not learn from a refusal that is about one kind: it says nothing about the speed of the others. A request
//! of a kind on hold is refused here, at once. Tried: to let it wait in the queue. Then it is first in the queue when its
//! time comes, whatever others do meanwhile.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::clock;
use crate::key::Key;
use crate::suspicion::Suspicion;

/// The first hold of a kind if the upstream states none. Each further one is twice as long, up to `LONGEST`.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// The kinds of a key under suspicion.
#[derive(Debug)]
pub(super) struct Kinds {
    suspicion: Suspicion,
    held: SmallVec<[HeldKind; 1]>,
}

/// A kind that the upstream refuses alone.
#[derive(Debug)]
struct HeldKind {
    kind: Key,
    until: Instant,
    /// How long the hold was that the upstream did not state.
    span: Duration,
}

impl Kinds {
    pub(super) fn new(now: Instant) -> Self {
        Kinds {
            suspicion: Suspicion::new(now),
            held: SmallVec::new(),
        }
    }

    /// Notes that the key is on hold until `end`.
    pub(super) fn lasts_beyond(&mut self, end: Instant) {
        self.suspicion.lasts_beyond(end);
    }

    /// Returns whether the suspicion has ended.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.suspicion.ends_at() <= now
    }

    /// Lets a request of `kind` pass. After a hold the first one does, and the others follow if it is accepted.
    ///
    /// # Errors
    ///
    /// Until when the kind is on hold.
    pub(super) fn pass(&mut self, kind: Key, now: Instant) -> Result<(), Instant> {
        let Some(held) = self.held.iter_mut().find(|held| held.kind == kind) else {
            return Ok(());
        };
        if held.until > now {
            return Err(held.until);
        }
        held.until = clock::after(now, held.span);
        Ok(())
    }

    /// Takes in the refusal of a request. The key may be on hold. Returns for how long the kind is held, if the refusal is
    /// about its kind alone.
    pub(super) fn refused(
        &mut self,
        kind: Option<Key>,
        is_held: bool,
        stated: Option<Duration>,
        now: Instant,
    ) -> Option<Duration> {
        if !self.suspicion.refused(kind, is_held, now) {
            return None;
        }
        let kind = kind?;
        let known = self.held.iter().position(|held| held.kind == kind);
        let before = known.map(|index| self.held.swap_remove(index).span);
        let span = before.map_or(FIRST, |span| LONGEST.min(span * 2));
        let left = stated.unwrap_or(span);
        let until = clock::after(now, left);
        self.suspicion.lasts_beyond(until);
        self.held.push(HeldKind { kind, until, span });
        Some(left)
    }

    /// Takes in that a request of `kind` was accepted, which was sent at `sent`.
    pub(super) fn accepted(&mut self, kind: Key, sent: Instant) {
        self.suspicion.accepted(kind, sent);
        self.held.retain(|held| held.kind != kind);
    }
}
