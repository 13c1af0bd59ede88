//! The queue of a worker: what is new, and what was put off.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, SystemTime};

/// One call of a campaign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Call {
    pub(crate) campaign: u32,
    pub(crate) number: u32,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Send this.
    Send(Call),
    /// Nothing is due for so long.
    Wait(Duration),
    /// All is taken.
    Nothing,
}

/// All calls of some campaigns that were not taken yet. It holds the numbers of those that were put off, and of each
/// campaign only how far it is: two million calls need no memory.
#[derive(Debug)]
pub(crate) struct Queue {
    campaigns: Vec<u32>,
    calls: u32,
    /// How many new ones were taken: one of each campaign in turn.
    taken: u64,
    put_off: BinaryHeap<Reverse<(SystemTime, Call)>>,
}

impl Queue {
    pub(crate) fn new(campaigns: Vec<u32>, calls: u32) -> Self {
        Queue { campaigns, calls, taken: 0, put_off: BinaryHeap::new() }
    }

    /// Takes what is due. While a call is put off, a new one would be told the same: it stays here.
    pub(crate) fn next(&mut self, now: SystemTime) -> Next {
        match self.put_off.peek() {
            None => self.new_one().map_or(Next::Nothing, Next::Send),
            Some(Reverse((due, _))) => match due.duration_since(now) {
                Ok(wait) if !wait.is_zero() => Next::Wait(wait),
                _ => Next::Send(self.put_off.pop().expect("it was seen a moment ago").0.1),
            },
        }
    }

    fn new_one(&mut self) -> Option<Call> {
        let campaigns = self.campaigns.len() as u64;
        let number = u32::try_from(self.taken.checked_div(campaigns)?).ok()?;
        if number >= self.calls {
            return None;
        }
        let campaign = self.campaigns[(self.taken % campaigns) as usize];
        self.taken += 1;
        Some(Call { campaign, number })
    }

    /// Puts a call back, to be taken again from `due` on.
    pub(crate) fn put_off(&mut self, call: Call, due: SystemTime) {
        self.put_off.push(Reverse((due, call)));
    }
}
