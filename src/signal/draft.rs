//! A quota under construction: on the stack, and copied freely.

use super::generic::words;
use super::observed::{ObservedQuota, small};
use super::parse::number::LARGEST;
use super::parse::text::{Bounded, Text};

/// What is known so far of a quota, in counts and milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Draft {
    pub(super) name: Option<Text>,
    /// `None` if it is not stated: the unit in the name, else requests.
    pub(super) unit: Option<Text>,
    pub(super) limit: Option<u64>,
    pub(super) remaining: Option<u64>,
    pub(super) used: Option<u64>,
    pub(super) window: Option<u64>,
    pub(super) reset: Option<u64>,
}

/// The quotas of a response under construction.
pub(super) type Drafts = Bounded<Draft, 32>;

impl Draft {
    pub(super) fn named(name: &str) -> Draft {
        Draft {
            name: Text::some(name),
            ..Draft::default()
        }
    }

    /// Sets the percentage that is used.
    pub(super) fn percent(self, used: u64) -> Draft {
        let remaining = Some(100u64.saturating_sub(used));
        Draft {
            unit: Text::some("percent"),
            limit: Some(100),
            used: Some(used),
            remaining,
            ..self
        }
    }

    /// Fills the missing fields from another draft of the same quota.
    pub(super) fn fill(&mut self, other: &Draft) {
        self.name = self.name.or(other.name);
        self.limit = self.limit.or(other.limit);
        self.remaining = self.remaining.or(other.remaining);
        self.used = self.used.or(other.used);
        self.window = self.window.or(other.window);
        self.reset = self.reset.or(other.reset);
    }

    /// Returns whether headers describe a quota. What is used is not enough: it may be the cost of
    /// this request. Headers without a word for a limit have to state more than what is left.
    pub(super) fn is_believable(&self, is_marked: bool, is_loose: bool) -> bool {
        let used = self.used.filter(|_| self.limit.or(self.window).is_some());
        if !is_loose {
            return self
                .limit
                .or(self.remaining)
                .or(self.reset)
                .or(used)
                .is_some();
        }
        let other = self.limit.or(self.reset).or(self.used);
        let is_less = self.limit.is_none_or(|limit| self.remaining <= Some(limit));
        let is_left = self.remaining.is_some() && (is_marked || other.is_some());
        is_less && (is_left || used.is_some())
    }

    /// Derives fields from the others. Returns whether the draft states anything.
    pub(super) fn finish(&mut self) -> bool {
        if let (Some(limit), None, Some(used)) = (self.limit, self.remaining, self.used) {
            self.remaining = Some(limit.saturating_sub(used));
        }
        // Some servers state as used what the one request has cost.
        if let (Some(limit), Some(remaining), Some(used)) = (self.limit, self.remaining, self.used)
            && used.saturating_add(remaining) < limit
            && self.unit != Text::some("percent")
        {
            self.used = None;
        }
        if let (None, Some(remaining), Some(used)) = (self.limit, self.remaining, self.used) {
            self.limit = Some((used + remaining).min(LARGEST));
        }
        if self.unit.is_none() {
            let name = self.name.as_ref().map_or("", Text::as_str);
            self.unit = Text::some(words::unit_of(name).unwrap_or(ObservedQuota::REQUESTS));
        }
        let states = self.limit.or(self.remaining).or(self.used).or(self.reset);
        states.is_some()
    }

    /// Returns how much memory the quota takes in a signal.
    pub(super) fn size(&self) -> usize {
        let texts = [&self.name, &self.unit].into_iter().flatten();
        size_of::<ObservedQuota>() + texts.map(|text| text.as_str().len()).sum::<usize>()
    }

    pub(super) fn observed(&self) -> ObservedQuota {
        let unit = self
            .unit
            .filter(|unit| unit.as_str() != ObservedQuota::REQUESTS);
        ObservedQuota {
            name: self.name.map(Box::from),
            unit: unit.map(Box::from),
            limit: self.limit.and_then(small),
            remaining: self.remaining.and_then(small),
            used: self.used.and_then(small),
            window: self.window.and_then(small),
            reset_after: self.reset.and_then(small),
        }
    }
}
