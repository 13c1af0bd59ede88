//! One limit of the server: units in any window.

use std::time::{Duration, Instant};

/// A sliding window, and all units that were ever counted.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) limit: u32,
    span: Duration,
    /// Units, and when they were counted; in order.
    entries: Vec<(Instant, u32)>,
    /// The first entry that is in the window.
    first: usize,
}

impl Window {
    pub(crate) fn new(limit: u32, span: Duration) -> Self {
        Window {
            limit,
            span,
            entries: Vec::new(),
            first: 0,
        }
    }

    /// Counts units, whether or not there is room. Returns the number of the entry.
    pub(crate) fn count(&mut self, now: Instant, units: u32) -> usize {
        self.entries.push((now, units));
        self.entries.len() - 1
    }

    /// Corrects the units of an entry.
    pub(crate) fn correct(&mut self, entry: usize, units: u32) {
        self.entries[entry].1 = units;
    }

    /// Returns how many units are left.
    pub(crate) fn left(&mut self, now: Instant) -> u32 {
        while let Some((at, _)) = self.entries.get(self.first)
            && *at + self.span <= now
        {
            self.first += 1;
        }
        let used: u32 = self.entries[self.first..].iter().map(|entry| entry.1).sum();
        self.limit.saturating_sub(used)
    }

    /// Returns how long it takes until `units` are left, if no more are counted.
    pub(crate) fn wait(&mut self, now: Instant, units: u32) -> Duration {
        let mut left = self.left(now);
        let mut wait = Duration::ZERO;
        for (at, used) in &self.entries[self.first..] {
            if left >= units {
                break;
            }
            left = left.saturating_add(*used);
            wait = (*at + self.span).saturating_duration_since(now);
        }
        wait
    }

    /// Returns how much of the limit was used from a window after `start` to `end`, in per cent.
    pub(crate) fn used(&self, start: Instant, end: Instant) -> f64 {
        let start = start + self.span;
        let counted = self
            .entries
            .iter()
            .filter(|(at, _)| (start..end).contains(at));
        let used: u64 = counted.map(|(_, units)| u64::from(*units)).sum();
        let windows = end.saturating_duration_since(start).as_secs_f64() / self.span.as_secs_f64();
        used as f64 / (f64::from(self.limit) * windows) * 100.0
    }

    /// Returns the most units of any window, in per cent of the limit.
    pub(crate) fn most(&self) -> f64 {
        let (mut sum, mut from, mut most) = (0_u64, 0, 0);
        for (at, units) in &self.entries {
            sum += u64::from(*units);
            while self.entries[from].0 + self.span <= *at {
                sum -= u64::from(self.entries[from].1);
                from += 1;
            }
            most = most.max(sum);
        }
        most as f64 / f64::from(self.limit) * 100.0
    }
}
