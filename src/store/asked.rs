//! What was asked of a store, kept while it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::ALONE;
use crate::clock;
use crate::key::Key;
use crate::limit::{Left, Terms, Unused};
use crate::store::{Ask, Held, Memory, Need};

/// An [`Ask`] that outlives its call.
pub(super) struct Asked {
    pub(super) key: Key,
    pub(super) terms: Arc<Terms>,
    pub(super) needs: SmallVec<[Need; 2]>,
    pub(super) prefetch: u32,
    pub(super) latest: Duration,
    pub(super) life: Duration,
    pub(super) prefetch_life: Duration,
    /// What the store granted.
    pub(super) returns: SmallVec<[Unused; 4]>,
    pub(super) memory: Memory,
    pub(super) held: Held,
    pub(super) left: Option<Left>,
    pub(super) at: Instant,
}

impl Asked {
    pub(super) fn new(ask: &Ask<'_>) -> Self {
        let of_store = ask.returns.iter().filter(|unused| unused.incarnation != ALONE);
        Asked {
            key: ask.key,
            terms: ask.terms.clone(),
            needs: ask.needs.into(),
            prefetch: ask.prefetch,
            latest: ask.latest,
            life: ask.life,
            prefetch_life: ask.prefetch_life,
            returns: of_store.copied().collect(),
            memory: ask.memory,
            held: ask.held,
            left: ask.left,
            at: clock::now(),
        }
    }

    /// One who wants nothing for itself.
    pub(super) fn to_charge(key: Key, terms: &Arc<Terms>, memory: Memory) -> Self {
        Asked {
            key,
            terms: terms.clone(),
            needs: SmallVec::new(),
            prefetch: 0,
            latest: Duration::ZERO,
            life: Duration::ZERO,
            prefetch_life: Duration::ZERO,
            returns: SmallVec::new(),
            memory,
            held: Held::default(),
            left: None,
            at: clock::now(),
        }
    }

    pub(super) fn ask<'a>(&'a self, needs: &'a [Need]) -> Ask<'a> {
        Ask {
            key: self.key,
            terms: &self.terms,
            needs,
            prefetch: self.prefetch,
            latest: self.latest,
            life: self.life,
            prefetch_life: self.prefetch_life,
            returns: &self.returns,
            memory: self.memory,
            held: self.held,
            left: self.left,
        }
    }
}
