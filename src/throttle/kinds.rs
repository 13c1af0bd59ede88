//! The kinds of requests of one key, once the upstream has refused a request: which of them it refuses alone, and until when
//! these are held.
//!
//! The pace does not learn from a refusal that is about one kind: it says nothing about the speed of the others. When a
//! kind is found, what the pace has learned from its refusals until then is forgotten: three in a row cost minutes, with 25
//! requests a second. (Not if processes share the pace: the others know of no kind.) A request
//! of a kind on hold is refused here, at once. If it waited in the queue, it would be first there when its time comes.

use std::time::{Duration, Instant};

use super::pace_state::SavedPace;
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
    held: Vec<HeldKind>,
    /// The pace before the first refusal, if it can be restored.
    before: Option<SavedPace>,
}

/// A kind that the upstream refuses alone.
#[derive(Debug)]
struct HeldKind {
    kind: Key,
    /// When the last refusal arrived.
    since: Instant,
    until: Instant,
    /// How long the hold was that the upstream did not state.
    span: Duration,
}

impl Kinds {
    pub(super) fn new(before: Option<SavedPace>, now: Instant) -> Self {
        Kinds {
            suspicion: Suspicion::new(now),
            held: Vec::new(),
            before,
        }
    }

    /// Notes that the key is on hold until `end`.
    pub(super) fn lasts_beyond(&mut self, end: Instant) {
        self.suspicion.lasts_beyond(end);
    }

    /// Returns the latest end of a hold of a kind, if there was one.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.held.iter().map(|held| held.until).max()
    }

    /// Lets the holds end earlier by `span`, for which the clock of this process stood still.
    pub(super) fn holds_are_shorter(&mut self, span: Duration) {
        for held in &mut self.held {
            held.until = clock::before(held.until, span);
        }
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

    /// Takes in the refusal of a request. The key may be on hold. Returns for how long the kind is held, at most
    /// `max_hold`, if the refusal is about its kind alone.
    pub(super) fn refused(
        &mut self,
        kind: Option<Key>,
        is_held: bool,
        stated: Option<Duration>,
        max_hold: Duration,
        now: Instant,
    ) -> Option<Duration> {
        if !self.suspicion.refused(kind, is_held, now) {
            return None;
        }
        let kind = kind?;
        let known = self.held.iter().position(|held| held.kind == kind);
        let before = known.map(|index| self.held.swap_remove(index).span);
        let span = before.map_or(FIRST, |span| LONGEST.min(span * 2));
        let span = span.min(max_hold);
        let left = stated.unwrap_or(span).min(max_hold);
        let until = clock::after(now, left);
        self.suspicion.lasts_beyond(until);
        self.held.push(HeldKind {
            kind,
            since: now,
            until,
            span,
        });
        Some(left)
    }

    /// Takes what the pace knew before the first refusal, if all refusals since were about kinds. Not if that is long ago: the
    /// pace has learned other things since.
    pub(super) fn take_pace_before(&mut self, now: Instant) -> Option<SavedPace> {
        let before = match self.suspicion.are_all_alone() {
            true => self.before.take(),
            false => None,
        };
        before.filter(|before| clock::after(before.at, LONGEST) > now)
    }

    /// Takes in that a request of `kind` was accepted, which was sent at `sent`: if that was before its last refusal, its
    /// hold stays.
    pub(super) fn accepted(&mut self, kind: Key, sent: Instant) {
        self.suspicion.accepted(kind, sent);
        self.held
            .retain(|held| held.kind != kind || sent < held.since);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_from_before_the_refusals_ends_no_hold() {
        let start = clock::now();
        let at = |millis| clock::after(start, Duration::from_millis(millis));
        let (kind, other) = (Key::new("a"), Key::new("b"));
        let mut kinds = Kinds::new(None, start);
        let mut sent = 0;
        while kinds.pass(kind, at(sent)).is_ok() {
            kinds.accepted(other, at(sent + 5));
            sent += 10;
            let stated = Some(Duration::from_secs(60));
            _ = kinds.refused(Some(kind), false, stated, LONGEST, at(sent));
            assert!(sent < 1000, "the kind is never found");
        }
        kinds.accepted(kind, start);
        assert_eq!(kinds.pass(kind, at(sent)), Err(at(sent + 60_000)));
        kinds.accepted(kind, at(sent));
        assert_eq!(kinds.pass(kind, at(sent)), Ok(()));
    }
}
