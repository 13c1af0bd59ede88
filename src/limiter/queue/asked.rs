//! What a call to the store asks for those who wait, and what its answer means for them.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{ANSWER, Answered, Calling, Gathering, Number, Queue};
use crate::clock;
use crate::limiter::key_state::{CallNumber, next_number};
use crate::limiter::reservation::{Settled, Slot};
use crate::store::Need;
use crate::wakers::Wakers;

/// The most needs of one call: as many as there are changes from one cost to another.
const MOST_NEEDS: usize = 64;

impl Queue {
    /// What those without a slot need, in the order in which they came; `most` permits in all.
    pub(in crate::limiter) fn needs(&self, most: usize) -> SmallVec<[Need; 2]> {
        let mut waiting: SmallVec<[(Number, Need); 2]> = SmallVec::new();
        let alone = self.classes.len() == 1;
        for (&cost, class) in self.classes.iter().filter(|(_, class)| class.missing() > 0) {
            if alone {
                let count = u32::try_from(class.missing()).unwrap_or(u32::MAX);
                waiting.push((0, Need { cost, count }));
            } else {
                // Others stand between those of one cost.
                let first = class.without().take(most);
                waiting.extend(first.map(|number| (number, Need { cost, count: 1 })));
            }
        }
        waiting.sort_by_key(|(number, _)| *number);
        let mut needs: SmallVec<[Need; 2]> = SmallVec::new();
        let mut left = u32::try_from(most).unwrap_or(u32::MAX);
        for (_, need) in waiting {
            let count = need.count.min(left);
            left -= count;
            let more = needs.len() < MOST_NEEDS;
            match needs.last_mut() {
                Some(last) if last.cost == need.cost => last.count += count,
                _ if count > 0 && more => needs.push(Need { count, ..need }),
                _ => break,
            }
        }
        needs
    }

    /// A call asks for `needs`. If it is `watched`, waiters without a slot wake when it counts as lost.
    pub(in crate::limiter) fn asking(&mut self, needs: &[Need], now: Instant, watched: bool) -> CallNumber {
        let last = self.classes.values().filter_map(|class| class.waiting.keys().next_back()).max();
        let number = next_number();
        self.call = Some(Calling { number, sent: now, last: last.copied(), watched });
        self.unanswered.get_or_insert(now);
        if !needs.is_empty() {
            self.gathering = Gathering::NotYet;
        }
        self.asked.clear();
        self.asked.extend_from_slice(needs);
        for need in needs {
            let class = self.classes.entry(need.cost).or_default();
            class.asked += need.count as usize;
            class.asked_at(now);
        }
        if watched {
            let lost_at = clock::after(now, ANSWER);
            self.classes.values_mut().for_each(|class| class.wake_by(lost_at));
        }
        number
    }

    /// The first of the needs that were asked for of which not all was granted, and how much was not. Those after it were
    /// not decided.
    fn refused(&self, granted: &[(u32, usize, usize)]) -> Option<(u32, usize)> {
        let mut granted: SmallVec<[(u32, usize); 2]> =
            granted.iter().map(|&(cost, all, _)| (cost, all)).collect();
        self.asked.iter().find_map(|need| {
            let count = need.count as usize;
            let of_cost = granted.iter_mut().find(|(cost, _)| *cost == need.cost);
            let got = of_cost.map_or(0, |(_, all)| {
                let got = count.min(*all);
                *all -= got;
                got
            });
            (got < count).then_some((need.cost, count - got))
        })
    }

    /// The call has been answered with `slots`, and `end` for those of its needs that got none. A slot that lies ahead is of
    /// no use if it can be used for less than `least`.
    pub(in crate::limiter) fn answered(
        &mut self,
        slots: impl IntoIterator<Item = Slot>,
        end: Option<&Settled>,
        least: Duration,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Answered {
        let call = self.call.take();
        self.unanswered = None;
        let mut died = false;
        // For each cost, the permits that were granted, and those of them that are of use.
        let mut granted: SmallVec<[(u32, usize, usize); 2]> = SmallVec::new();
        for slot in slots {
            let usable = slot.until.saturating_duration_since(slot.at.max(now));
            let alive = !usable.is_zero() && (slot.at <= now || usable >= least);
            let (all, good) = (slot.count as usize, if alive { slot.count as usize } else { 0 });
            match granted.iter_mut().find(|(cost, ..)| *cost == slot.cost) {
                Some(granted) => (granted.1, granted.2) = (granted.1 + all, granted.2 + good),
                None => granted.push((slot.cost, all, good)),
            }
            if alive {
                self.add(slot);
            } else {
                // It died on its way: the store is asked again, as if it had not answered.
                died = true;
                self.returns.push(slot.unused());
            }
        }
        let refused = self.refused(&granted);
        self.asked.clear();
        for (cost, class) in &mut self.classes {
            let asked = std::mem::take(&mut class.asked);
            let granted = granted.iter().find(|(other, ..)| other == cost);
            let (all, good) = granted.map_or((0, 0), |&(_, all, good)| (all, good));
            let refused_at = call.and_then(|call| Some((call.sent, call.last?)));
            let refused_at = refused_at.filter(|_| matches!(end, Some(Settled::Refused(_))));
            // Of what was refused, others may have had some: they are asked for again.
            let without = match (end, refused) {
                (Some(Settled::Refused(_)), Some((refused, count))) if refused == *cost => count,
                (Some(Settled::Refused(_)), _) => 0,
                _ => asked.saturating_sub(all),
            };
            let ended = class.settle(good, without, end, refused_at, now);
            for (number, waker, settled) in ended {
                self.waiting -= 1;
                self.settled.insert(number, settled);
                wakers.add(waker);
            }
        }
        Answered { died, refused: refused.map(|(cost, _)| cost) }
    }
}
