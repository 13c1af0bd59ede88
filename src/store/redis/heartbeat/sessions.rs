//! The last session of each key, for the next holder of this process.

use std::collections::HashMap;
use std::sync::Arc;

use super::holder::Holder;
use crate::clock;
use crate::store::StoreSession;

const SMALLEST_SWEEP: usize = 64;

/// Sessions by the name of the state in Redis. With them, a new holder finds out that a server has
/// lost the state of other holders.
pub(super) struct LastSessions {
    sessions: HashMap<Arc<str>, StoreSession>,
    /// At this many, sessions that are of no more use are dropped.
    sweep_at: usize,
}

impl LastSessions {
    pub(super) fn new() -> Self {
        LastSessions {
            sessions: HashMap::new(),
            sweep_at: SMALLEST_SWEEP,
        }
    }

    /// Returns the session of a state, for a new holder.
    pub(super) fn get(&self, name: &str) -> Option<StoreSession> {
        self.sessions.get(name).copied()
    }

    /// Keeps the session of a holder, if it has one.
    pub(super) fn keep(&mut self, holder: &Holder) {
        if let Some(session) = holder.session {
            self.sessions.insert(holder.name.clone(), session);
            self.drop_expired();
        }
    }

    /// Drops sessions of no more use, if the sessions have doubled in number since the last time.
    fn drop_expired(&mut self) {
        if self.sessions.len() >= self.sweep_at {
            let now = clock::now();
            self.sessions.retain(|_, session| session.is_of_use(now));
            self.sweep_at = (2 * self.sessions.len()).max(SMALLEST_SWEEP);
        }
    }
}
