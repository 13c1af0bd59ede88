//! The state of a key, to look at.

use std::time::Duration;

use super::engine::Limiter;
use super::key_state::Learned;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::quota::Limit;
use crate::store::{LimitUsage, Usage};

/// The state of a key, as [`Limiter::peek`] tells it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Peek {
    /// Each limit with the units used of it.
    pub limits: Vec<LimitUsage>,
    /// How many units could go now, those this process has at hand included.
    pub free: u64,
    /// Until one unit could go: zero when `free` is not 0. Nobody knows when a call in flight ends: as far as rates allow.
    pub next_slot: Duration,
    /// How many wait in this process.
    pub waiting: usize,
    /// For how long the key is held: nothing is sent, because the upstream or an operator said so.
    pub held: Option<Duration>,
    /// The limits that the upstream has stated to this process, if it [learns](crate::Learn) them, and in which quotas.
    pub learned: Vec<Learned>,
    /// Whether the store is away, and `limits` are the share with which this process goes on: see
    /// [`OnStoreError::FallbackShare`](crate::OnStoreError::FallbackShare).
    pub alone: bool,
}

impl Limiter {
    /// The state of `key`: limits, used, free, waiting. Consumes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the store could not be asked.
    pub async fn peek(&self, key: Key) -> Result<Peek, StoreError> {
        let answer = self.0.settings.store.peek(key, &self.terms(key));
        let Usage { limits, free, next_slot, held, alone } = answer.arrives().await?;
        let now = clock::now();
        let (waiting, at_hand) =
            self.0.lines.find(key, |line| (line.waiting(), line.at_hand(now))).unwrap_or_default();
        let seats = limits.iter().filter(|usage| matches!(usage.limit, Limit::InFlight { .. }));
        let free = seats.fold(free.saturating_add(u64::from(at_hand)), |free, seats| free.min(seats.free));
        let waiting = waiting + self.waiting_for_seats(key);
        let next_slot = if free > 0 { Duration::ZERO } else { next_slot };
        let held = self.held(key, now).max(Some(held.left).filter(|left| !left.is_zero()));
        let free = if held.is_some() { 0 } else { free };
        let next_slot = next_slot.max(held.unwrap_or_default());
        let learned = self.0.lines.find(key, |line| line.learned()).unwrap_or_default();
        Ok(Peek { limits, free, next_slot, waiting, held, learned, alone })
    }
}
