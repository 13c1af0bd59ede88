//! The details of a request that was limited.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::cost::Cost;
use crate::key::Label;
use crate::quota::Limit;

/// The details of a limited request: its key, how long it waited, and when to retry.
#[derive(Clone, Debug)]
pub struct LimitedInfo(Box<ErrorFacts>);

/// The fields of a [`LimitedInfo`], boxed so that errors stay small.
///
/// Without the box, an error has at least 120 bytes instead of 40. Then a call through a layer whose
/// permit is at hand takes 12 ns more, and a refusal takes 12 ns less.
#[derive(Clone, Debug)]
pub(crate) struct ErrorFacts {
    pub(crate) key: Label,
    pub(crate) limit_name: LimitName,
    pub(crate) limit: Option<Limit>,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) at: SystemTime,
    pub(crate) waited: Duration,
    pub(crate) turns: u32,
}

/// What the error of a request calls its limit.
#[derive(Clone, Debug, Default)]
pub(crate) struct LimitName {
    /// The name of the limit, if it has one.
    pub(crate) name: Option<&'static str>,
    /// The pattern of the route whose quota it is, if it is that of a route.
    pub(crate) route: Option<Arc<str>>,
    /// What the limit counts. `None` for requests.
    pub(crate) unit: Option<&'static str>,
    /// The class whose share it is, if the quota is divided.
    pub(crate) class: Option<&'static str>,
}

impl LimitedInfo {
    pub(crate) fn new(facts: ErrorFacts) -> Self {
        LimitedInfo(Box::new(facts))
    }

    /// Removes the time to retry.
    pub(crate) fn without_retry(mut self) -> Self {
        self.0.retry_after = None;
        self.0.limit = None;
        self
    }

    #[cfg(test)]
    pub(super) fn with_waited(mut self, waited: Duration) -> Self {
        self.0.waited = waited;
        self
    }

    /// Returns what the text of an error calls the limit and the key.
    pub(super) fn subject(&self) -> impl fmt::Display {
        Subject(&self.0)
    }

    /// Returns the label of the key: the host for `by_host`, `all` without a key function, `none` if the request has no key or
    /// no valid quota, else eight hex digits: see [`Key`](crate::Key#what-logs-show-of-a-key).
    pub fn key(&self) -> &str {
        &self.0.key
    }

    /// Returns the name of the limit that refused the request, if
    /// [`and_per`](crate::RateLimitBuilder::and_per) or [`name`](crate::RateLimitBuilder::name) gave
    /// it one. [`key`](Self::key) is then the label of that limit's key.
    pub fn name(&self) -> Option<&str> {
        self.0.limit_name.name
    }

    /// Returns the class whose [share](crate::RateLimitBuilder::share) refused the request. `None` if the
    /// quota is not divided, or if the request has no class with a share.
    pub fn class(&self) -> Option<&'static str> {
        self.0.limit_name.class
    }

    /// Returns the pattern of the [route](crate::Routes) whose quota refused the request, as the table
    /// has it. `None` if it was not the quota of a route.
    pub fn route(&self) -> Option<&str> {
        self.0.limit_name.route.as_deref()
    }

    /// Returns the limit that refused the request. It may be one that another process states for the key.
    /// `None` if no limit did, or if it is not known which one.
    pub fn limit(&self) -> Option<Limit> {
        self.0.limit
    }

    /// Returns what the limit that refused the request counts:
    /// [`Cost::REQUESTS`](crate::Cost::REQUESTS), or the name given to
    /// [`Quota::of`](crate::Quota::of).
    pub fn unit(&self) -> &'static str {
        self.0.limit_name.unit.unwrap_or(Cost::REQUESTS)
    }

    /// Returns what the text of an error calls the limit.
    pub(super) fn shown_limit(&self) -> Option<impl fmt::Display> {
        let limit = self.0.limit?;
        Some(limit.counting(self.0.limit_name.unit))
    }

    /// Returns how long to wait before the next attempt, counted from the refusal.
    ///
    /// If this process refused the request, that is the time to its slot or to the end of the hold.
    /// If the upstream refused it, that is the time that the upstream named. `None` if that is not
    /// known, or if no wait helps.
    #[doc(alias = "retry-after")]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// Returns [`retry_after`](LimitedInfo::retry_after) as a moment of the wall clock.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.0.at.checked_add(self.0.retry_after?)
    }

    /// Returns when the request began to wait, by the wall clock.
    pub fn since(&self) -> SystemTime {
        self.0.at.checked_sub(self.0.waited).unwrap_or(self.0.at)
    }

    /// Returns how long the request waited before it was limited. Zero if it was refused at once.
    pub fn waited(&self) -> Duration {
        self.0.waited
    }

    /// Returns how often the request waited for a slot: 0 if it was refused at once, more than 1 if
    /// it missed a slot.
    pub fn turns(&self) -> u32 {
        self.0.turns
    }
}

/// The limit and the key of an error: `channel 3fa94c01`, `route GET /search/* 3fa94c01`, or the label of
/// the key alone.
struct Subject<'a>(&'a ErrorFacts);

impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LimitName {
            name, route, class, ..
        } = &self.0.limit_name;
        for word in [*name, route.as_deref(), *class].into_iter().flatten() {
            write!(f, "{word} ")?;
        }
        f.write_str(&self.0.key)
    }
}
