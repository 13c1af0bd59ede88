//! The states of the limits of a key, without a heap block for the common case of one limit.
//!
//! A limit is *paused* while a set quota applies that does not have it: it counts, and refuses nothing.

use std::slice::{self, Iter, IterMut};

use super::limit_state::LimitState;
use crate::quota::Limit;

/// The states of the limits of a key.
///
/// A vector alone would be simpler. But a store in memory keeps one of these for each of many keys,
/// and most keys have one limit: the enum needs no tag of its own, no capacity and no heap block.
#[derive(Clone, Debug)]
pub(super) enum LimitStates {
    /// One limit, which is not paused.
    One(LimitState),
    /// None, or several. Only the first `limiting` of them are not paused.
    Many {
        states: Vec<LimitState>,
        limiting: usize,
    },
}

impl LimitStates {
    pub(super) const NONE: LimitStates = LimitStates::Many {
        states: Vec::new(),
        limiting: 0,
    };

    /// Returns all states, the paused ones last.
    pub(super) fn all(&self) -> Iter<'_, LimitState> {
        let states = match self {
            LimitStates::One(state) => slice::from_ref(state),
            LimitStates::Many { states, .. } => states,
        };
        states.iter()
    }

    pub(super) fn all_mut(&mut self) -> IterMut<'_, LimitState> {
        let states = match self {
            LimitStates::One(state) => slice::from_mut(state),
            LimitStates::Many { states, .. } => states,
        };
        states.iter_mut()
    }

    /// Returns the states of the limits that are not paused.
    pub(super) fn limiting(&self) -> Iter<'_, LimitState> {
        let states = match self {
            LimitStates::One(state) => slice::from_ref(state),
            LimitStates::Many { states, limiting } => &states[..*limiting],
        };
        states.iter()
    }

    pub(super) fn limiting_mut(&mut self) -> IterMut<'_, LimitState> {
        let states = match self {
            LimitStates::One(state) => slice::from_mut(state),
            LimitStates::Many { states, limiting } => &mut states[..*limiting],
        };
        states.iter_mut()
    }

    /// Adds the state of a limit that is not paused. No limit is.
    pub(super) fn push(&mut self, state: LimitState) {
        let mut states = match std::mem::replace(self, LimitStates::NONE) {
            LimitStates::One(first) => vec![first],
            LimitStates::Many { states, .. } if states.is_empty() => {
                *self = LimitStates::One(state);
                return;
            }
            LimitStates::Many { states, .. } => states,
        };
        states.push(state);
        let limiting = states.len();
        *self = LimitStates::Many { states, limiting };
    }

    /// Removes the states for which `keep` returns false.
    pub(super) fn retain(&mut self, keep: impl Fn(&LimitState) -> bool) {
        match self {
            LimitStates::One(state) if keep(state) => {}
            LimitStates::One(_) => *self = LimitStates::NONE,
            LimitStates::Many { states, limiting } => {
                let (limited, _) = states.split_at(*limiting);
                *limiting = limited.iter().filter(|state| keep(state)).count();
                states.retain(keep);
            }
        }
    }

    /// Pauses all limits but `limits`, which all have a state. These come first from now on, in this
    /// order.
    pub(super) fn pause_others(&mut self, limits: &[Limit]) {
        if let LimitStates::Many { states, limiting } = self {
            states.sort_by_key(|state| {
                let place = limits.iter().position(|limit| *limit == state.limit);
                place.unwrap_or(limits.len())
            });
            *limiting = states.partition_point(|state| limits.contains(&state.limit));
        }
    }

    pub(super) fn pause_none(&mut self) {
        if let LimitStates::Many { states, limiting } = self {
            *limiting = states.len();
        }
    }
}
