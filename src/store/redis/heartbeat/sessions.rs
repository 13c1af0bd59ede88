//! The sessions of keys that no holder of this process claims any more.

use std::collections::HashMap;
use std::sync::Arc;

use super::holder::Holder;
use crate::clock;
use crate::store::StoreSession;

const SMALLEST_SWEEP: usize = 64;

/// Sessions by the name of the state in Redis. With them, a new holder finds out that a server has
/// lost the state of other processes.
pub(super) struct FormerSessions {
    sessions: HashMap<Arc<str>, StoreSession>,
    /// At this many, sessions that are of no more use are dropped.
    sweep_at: usize,
}

impl FormerSessions {
    pub(super) fn new() -> Self {
        FormerSessions {
            sessions: HashMap::new(),
            sweep_at: SMALLEST_SWEEP,
        }
    }

    /// Removes the session of a state, for a new holder.
    pub(super) fn take(&mut self, name: &Arc<str>) -> Option<StoreSession> {
        self.sessions.remove(name)
    }

    /// Keeps the session of a holder that leaves, if it has one.
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
