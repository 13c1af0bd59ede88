//! The states of the limits of a key, without a heap block for the common case of one limit.
//!
//! A limit is *paused* while a set quota applies that does not have it: it counts, and refuses nothing.

use std::ops::{Deref, DerefMut};

use super::limit_state::LimitState;

/// The states of the limits of a key. As a slice, they are the limits that are not paused.
#[derive(Clone, Debug)]
pub(super) enum LimitStates {
    /// Most keys have one limit.
    One(LimitState),
    /// None, or several.
    Many(Vec<LimitState>),
    /// Some limits are paused.
    Paused(Box<WithPaused>),
}

/// Limits of which some are paused.
#[derive(Clone, Debug)]
pub(super) struct WithPaused {
    limiting: Vec<LimitState>,
    paused: Vec<LimitState>,
}

impl LimitStates {
    pub(super) const NONE: LimitStates = LimitStates::Many(Vec::new());

    /// Makes the states of limits, of which the last ones are paused.
    pub(super) fn new(limiting: Vec<LimitState>, paused: Vec<LimitState>) -> Self {
        if paused.is_empty() {
            LimitStates::Many(limiting)
        } else {
            LimitStates::Paused(Box::new(WithPaused { limiting, paused }))
        }
    }

    /// Removes all states and returns them: those of limits that are not paused, and the others.
    pub(super) fn take(&mut self) -> (Vec<LimitState>, Vec<LimitState>) {
        match std::mem::replace(self, LimitStates::NONE) {
            LimitStates::One(state) => (vec![state], Vec::new()),
            LimitStates::Many(states) => (states, Vec::new()),
            LimitStates::Paused(states) => (states.limiting, states.paused),
        }
    }

    /// Returns the states of the paused limits.
    pub(super) fn paused(&self) -> &[LimitState] {
        match self {
            LimitStates::Paused(states) => &states.paused,
            _ => &[],
        }
    }

    /// Returns all states, the paused ones last.
    pub(super) fn all(&self) -> impl Iterator<Item = &LimitState> {
        self.iter().chain(self.paused())
    }

    /// Returns all states, the paused ones last.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut LimitState> {
        let (limiting, paused) = match self {
            LimitStates::One(state) => (std::slice::from_mut(state), &mut [][..]),
            LimitStates::Many(states) => (&mut states[..], &mut [][..]),
            LimitStates::Paused(states) => (&mut states.limiting[..], &mut states.paused[..]),
        };
        limiting.iter_mut().chain(paused)
    }

    /// Adds a state of a limit that is not paused. No limit is.
    pub(super) fn push(&mut self, state: LimitState) {
        *self = match self.take() {
            (mut states, _) if !states.is_empty() => {
                states.push(state);
                LimitStates::Many(states)
            }
            _ => LimitStates::One(state),
        };
    }

    /// Removes the states for which `keep` returns false. No limit is paused.
    pub(super) fn retain(&mut self, keep: impl Fn(&LimitState) -> bool) {
        match self {
            LimitStates::One(state) if keep(state) => {}
            LimitStates::One(_) => *self = LimitStates::NONE,
            LimitStates::Many(states) => states.retain(keep),
            LimitStates::Paused(states) => states.limiting.retain(keep),
        }
    }

    /// Removes the paused states for which `keep` returns false.
    pub(super) fn retain_paused(&mut self, keep: impl Fn(&LimitState) -> bool) {
        if let LimitStates::Paused(states) = self {
            states.paused.retain(keep);
            if states.paused.is_empty() {
                *self = LimitStates::Many(std::mem::take(&mut states.limiting));
            }
        }
    }

    /// Removes the state at `index` of [`all`](LimitStates::all).
    pub(super) fn remove(&mut self, index: usize) {
        let (mut limiting, mut paused) = self.take();
        if index < limiting.len() {
            limiting.remove(index);
        } else {
            paused.remove(index - limiting.len());
        }
        *self = LimitStates::new(limiting, paused);
    }
}

impl Deref for LimitStates {
    type Target = [LimitState];

    fn deref(&self) -> &[LimitState] {
        match self {
            LimitStates::One(state) => std::slice::from_ref(state),
            LimitStates::Many(states) => states,
            LimitStates::Paused(states) => &states.limiting,
        }
    }
}

impl DerefMut for LimitStates {
    fn deref_mut(&mut self) -> &mut [LimitState] {
        match self {
            LimitStates::One(state) => std::slice::from_mut(state),
            LimitStates::Many(states) => states,
            LimitStates::Paused(states) => &mut states.limiting,
        }
    }
}
