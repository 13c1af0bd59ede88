//! What a process remembers of a store's last reply about one key, and how it maps the store's time
//! to its own. `limiter/session.rs` combines the replies of a key.

use std::time::{Duration, Instant};

use super::{ClientSession, Lease};
use crate::clock;
use crate::limit::Micros;

/// The last reply of a store about one key: the state that it described, and what the store's clock
/// showed.
///
/// A [`ClientSession`] made from it states to the store what the process knows. With that, the
/// store finds out whether it lost the state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreSession {
    /// The incarnation of the store's state; 0 for a store that loses nothing.
    pub(crate) incarnation: u64,
    /// How often the state had been written, by the reply or by a later message of the store.
    pub(crate) writes: u64,
    /// The store's time in the reply.
    pub(crate) seen: Micros,
    /// When the call was sent.
    pub(crate) sent: Instant,
    /// When the reply was received.
    pub(crate) received: Instant,
    /// Until when the reply is of use. After that, the store may have dropped the state because it was idle.
    pub(crate) until: Instant,
    /// By how many microseconds the wall clock was ahead of the monotonic clock when the reply was received.
    wall_ahead: i64,
}

impl StoreSession {
    /// Makes the session that begins with a reply: the state's `incarnation` and number of
    /// `writes`, and the store's time `seen`. The call was sent at `sent`, and the reply was
    /// received at `received`. It is of use until `until`.
    pub(crate) fn new(
        incarnation: u64,
        writes: u64,
        seen: Micros,
        sent: Instant,
        received: Instant,
        until: Instant,
    ) -> Self {
        StoreSession {
            incarnation,
            writes,
            seen,
            sent,
            received,
            until,
            wall_ahead: clock::wall_ahead(),
        }
    }

    /// Makes the session that begins with `lease`. The call was sent at `sent`.
    pub(crate) fn of(lease: &Lease, sent: Instant, received: Instant) -> Self {
        let until = clock::after(sent, lease.session_ttl);
        StoreSession::new(
            lease.incarnation,
            lease.writes,
            lease.now,
            sent,
            received,
            until,
        )
    }

    /// Maps a moment of the store's time to the time of this process.
    pub(crate) fn local_time(&self, moment: Micros) -> Micros {
        clock::micros(self.received)
            .saturating_add(moment)
            .saturating_sub(self.seen)
    }

    /// Maps a moment of this process to the store's time.
    pub(crate) fn store_time(&self, moment: Micros) -> Micros {
        self.seen
            .saturating_add(moment)
            .saturating_sub(clock::micros(self.received))
    }

    /// Returns whether the reply is of use.
    pub(crate) fn is_of_use(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Returns what the next call states about this reply. Returns `None` if the reply is of no more use, or if the
    /// machine slept since: the monotonic clock does not show for how long it slept.
    pub(crate) fn client_session(&self, now: Instant) -> Option<ClientSession> {
        let since = now.saturating_duration_since(self.received);
        if !self.is_of_use(now) || clock::has_slept(self.wall_ahead, since) {
            return None;
        }
        Some(ClientSession {
            incarnation: self.incarnation,
            writes: self.writes,
            seen: self.seen,
            since,
            trip: self.round_trip(),
            granted: 0,
        })
    }

    pub(crate) fn round_trip(&self) -> Duration {
        self.received.saturating_duration_since(self.sent)
    }
}
