//! The states of the limits of a key, without a heap block for the common case of one limit.

use std::ops::{Deref, DerefMut};

use super::limit_state::LimitState;

/// The states of the limits of a key.
#[derive(Clone, Debug)]
pub(super) enum LimitStates {
    /// Most keys have one limit.
    One(LimitState),
    /// None, or several.
    Many(Vec<LimitState>),
}

impl LimitStates {
    pub(super) const NONE: LimitStates = LimitStates::Many(Vec::new());

    /// Adds a state.
    pub(super) fn push(&mut self, state: LimitState) {
        *self = match std::mem::replace(self, LimitStates::NONE) {
            LimitStates::One(first) => LimitStates::Many(vec![first, state]),
            LimitStates::Many(states) if states.is_empty() => LimitStates::One(state),
            LimitStates::Many(mut states) => {
                states.push(state);
                LimitStates::Many(states)
            }
        };
    }

    /// Removes the states for which `keep` returns false.
    pub(super) fn retain(&mut self, keep: impl Fn(&LimitState) -> bool) {
        match self {
            LimitStates::One(state) if keep(state) => {}
            LimitStates::One(_) => *self = LimitStates::NONE,
            LimitStates::Many(states) => states.retain(keep),
        }
    }

    /// Removes the state at `index`.
    pub(super) fn remove(&mut self, index: usize) {
        match self {
            LimitStates::One(_) => *self = LimitStates::NONE,
            LimitStates::Many(states) => drop(states.remove(index)),
        }
    }
}

impl Deref for LimitStates {
    type Target = [LimitState];

    fn deref(&self) -> &[LimitState] {
        match self {
            LimitStates::One(state) => std::slice::from_ref(state),
            LimitStates::Many(states) => states,
        }
    }
}

impl DerefMut for LimitStates {
    fn deref_mut(&mut self) -> &mut [LimitState] {
        match self {
            LimitStates::One(state) => std::slice::from_mut(state),
            LimitStates::Many(states) => states,
        }
    }
}
