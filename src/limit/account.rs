//! One limit of a key: what it has seen, less what is reserved for others.

use super::rule::Rule;
use super::strangers::{Ours, Size, Strangers};
use super::{Left, Micros, micros_up};
use crate::quota::Limit;

/// One limit of a key, and when it was last asserted.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) limit: Limit,
    pub(super) rule: Rule,
    pub(super) asserted: Micros,
    /// Few limits are shared with others, and fewer upstreams say so.
    strangers: Option<Box<Strangers>>,
}

impl Account {
    pub(super) fn new(limit: Limit, rule: Rule, now: Micros) -> Self {
        Account { limit, rule, asserted: now, strangers: None }
    }

    fn size(&self) -> Size {
        Size { count: self.limit.count(), window: micros_up(self.limit.window()) }
    }

    /// The first moment, not before `from`, at which `cost` units may go.
    pub(super) fn first_slot(&mut self, from: Micros, cost: u64, life: Micros) -> Micros {
        let Some(strangers) = &self.strangers else { return self.rule.first_slot(from, cost, life, 0) };
        let (ends, reserves) = strangers.reserves();
        let slot = self.rule.first_slot(from, cost, life, u64::from(reserves[0]));
        if slot < ends {
            slot
        } else {
            self.rule.first_slot(from.max(ends), cost, life, u64::from(reserves[1]))
        }
    }

    /// How many units may go at `slot`, which is a first slot.
    pub(super) fn room(&mut self, slot: Micros) -> u64 {
        let reserved = self.reserved(slot);
        self.rule.room(slot).saturating_sub(reserved)
    }

    pub(super) fn free(&mut self, now: Micros) -> u64 {
        let reserved = self.reserved(now);
        self.rule.free(now).saturating_sub(reserved)
    }

    /// Whether others are known to use it too.
    pub(super) fn is_shared(&self) -> bool {
        self.strangers.is_some()
    }

    /// What is reserved for others at a moment.
    pub(super) fn reserved(&self, at: Micros) -> u64 {
        let reserves = self.strangers.as_ref().map(|strangers| strangers.reserves());
        reserves.map_or(0, |(ends, reserves)| u64::from(reserves[usize::from(at >= ends)]))
    }

    /// The upstream has said what is left, to a ledger begun at `born`; what was granted until `sent` may have reached it.
    /// Answers whether that allows less than before.
    pub(super) fn see(&mut self, left: &Left, now: Micros, sent: Micros, born: Micros) -> bool {
        let size @ Size { count, window } = self.size();
        let units = u32::try_from(left.units).unwrap_or(u32::MAX);
        let (least, most) = match &mut self.rule {
            Rule::Window(log) => log.used_until(sent),
            Rule::Fixed(fixed) => (fixed.used(now), fixed.used(now)),
            Rule::Bucket(bucket) => return bucket.see(now, micros_up(left.ago), left.units),
        };
        let (reset_in, sure) = (left.reset_in.map_or(window, micros_up), left.reset_in.is_some());
        let others = sure && u64::from(count.saturating_sub(units)) > most;
        if self.strangers.is_none() && !others && left.refused == 0 {
            return false;
        }
        let strangers = self.strangers.get_or_insert_with(|| {
            let ends = now.saturating_add(reset_in);
            // Of a count whose beginning is not known, the log has to know the whole of the window until now.
            let known_from = if sure { ends } else { now };
            let whole = born.saturating_add(window - window / 10) <= known_from;
            Box::new(Strangers::new(ends, whole))
        });
        let said = now.saturating_sub(micros_up(left.ago));
        strangers.see(size, units, said, Ours { least, most, sure }, left.refused)
    }

    /// Forgets what no longer matters at `now`.
    pub(super) fn advance(&mut self, now: Micros) {
        self.rule.advance(now);
        let size = self.size();
        if self.strangers.as_mut().is_some_and(|strangers| !strangers.roll(now, size)) {
            self.strangers = None;
        }
    }

    /// The first moment from which a fresh one would grant the same.
    pub(super) fn fresh_from(&self) -> Micros {
        let Size { window, .. } = self.size();
        let strangers = self.strangers.as_ref().map_or(0, |strangers| strangers.forgotten_from(window));
        self.rule.fresh_from().max(strangers)
    }
}
