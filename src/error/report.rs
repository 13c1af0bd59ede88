//! What is told of a request that was limited.

use std::fmt;
use std::time::{Duration, SystemTime};

use crate::quota::Limit;

/// Whose limit it was, how long the request waited, when to come back.
#[derive(Clone)]
pub struct Report(Box<Facts>);

/// What a [`Report`] tells; boxed, so that errors stay small.
#[derive(Clone)]
pub(crate) struct Facts {
    pub(crate) key: Box<str>,
    pub(crate) limit: Option<Limit>,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) at: SystemTime,
    pub(crate) waited: Duration,
    pub(crate) turns: u32,
}

impl Report {
    pub(crate) fn new(facts: Facts) -> Self {
        Report(Box::new(facts))
    }

    /// The label of the key: the host for `by_host`, `all` without a key function, else eight hex digits: see
    /// [`Key`](crate::Key#what-logs-show-of-a-key).
    pub fn key(&self) -> &str {
        &self.0.key
    }

    /// The limit that refused, where it was one of ours.
    pub fn limit(&self) -> Option<Limit> {
        self.0.limit
    }

    /// How long after the refusal a slot would have been free, or how long the upstream asked to wait.
    ///
    /// `None` where that is not known, or where no wait helps.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The same as a moment: when to run the job again.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.0.at.checked_add(self.0.retry_after?)
    }

    /// Since when the request was waiting.
    pub fn since(&self) -> SystemTime {
        self.0.at.checked_sub(self.0.waited).unwrap_or(self.0.at)
    }

    /// How long it waited.
    pub fn waited(&self) -> Duration {
        self.0.waited
    }

    /// How often it waited: 0 when it was refused at once, more than 1 when it missed its slot.
    pub fn turns(&self) -> u32 {
        self.0.turns
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { key, limit, retry_after, at, waited, turns } = &*self.0;
        f.debug_struct("Report")
            .field("key", key)
            .field("limit", limit)
            .field("retry_after", retry_after)
            .field("at", at)
            .field("waited", waited)
            .field("turns", turns)
            .finish()
    }
}
