//! What was asked of a store, kept while it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::lease::STANDALONE;
use super::{Ask, Held, Memory, Need};
use crate::clock;
use crate::key::Key;
use crate::limit::{Charge, Left, Terms, Unused};

/// An [`Ask`] that outlives its call.
pub(crate) struct Asked {
    pub(crate) key: Key,
    pub(crate) terms: Arc<Terms>,
    pub(crate) needs: SmallVec<[Need; 2]>,
    pub(crate) prefetch: u32,
    pub(crate) latest: Duration,
    pub(crate) life: Duration,
    pub(crate) prefetch_life: Duration,
    /// What the store granted.
    pub(crate) returns: SmallVec<[Unused; 4]>,
    pub(crate) charges: Vec<Charge>,
    pub(crate) memory: Memory,
    pub(crate) held: Held,
    pub(crate) left: Option<Left>,
    pub(crate) at: Instant,
}

impl Asked {
    pub(crate) fn new(ask: &Ask<'_>) -> Self {
        let of_store = ask.returns.iter().filter(|unused| unused.incarnation != STANDALONE);
        Asked {
            key: ask.key,
            terms: ask.terms.clone(),
            needs: ask.needs.into(),
            prefetch: ask.prefetch,
            latest: ask.latest,
            life: ask.life,
            prefetch_life: ask.prefetch_life,
            returns: of_store.copied().collect(),
            charges: ask.charges.to_vec(),
            memory: ask.memory,
            held: ask.held,
            left: ask.left,
            at: clock::now(),
        }
    }

    /// Makes a call that asks for no permits.
    pub(crate) fn without_needs(key: Key, terms: &Arc<Terms>, memory: Memory) -> Self {
        Asked {
            key,
            terms: terms.clone(),
            needs: SmallVec::new(),
            prefetch: 0,
            latest: Duration::ZERO,
            life: Duration::ZERO,
            prefetch_life: Duration::ZERO,
            returns: SmallVec::new(),
            charges: Vec::new(),
            memory,
            held: Held::default(),
            left: None,
            at: clock::now(),
        }
    }

    pub(crate) fn ask<'a>(&'a self, needs: &'a [Need]) -> Ask<'a> {
        Ask {
            key: self.key,
            terms: &self.terms,
            needs,
            prefetch: self.prefetch,
            latest: self.latest,
            life: self.life,
            prefetch_life: self.prefetch_life,
            returns: &self.returns,
            charges: &self.charges,
            memory: self.memory,
            held: self.held,
            left: self.left,
        }
    }
}
