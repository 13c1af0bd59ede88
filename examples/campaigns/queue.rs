//! The queue of a worker: new calls and deferred calls.

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
    /// Send this call.
    Send(Call),
    /// No call is due for this long.
    Wait(Duration),
    /// No call is left.
    Nothing,
}

/// All calls of some campaigns that were not taken yet. It stores the numbers of deferred calls,
/// and of each campaign only its progress: two million calls need almost no memory.
#[derive(Debug)]
pub(crate) struct Queue {
    campaigns: Vec<u32>,
    calls: u32,
    /// How many new calls were taken: one of each campaign in turn.
    taken: u64,
    put_off: BinaryHeap<Reverse<(SystemTime, Call)>>,
}

impl Queue {
    pub(crate) fn new(campaigns: Vec<u32>, calls: u32) -> Self {
        Queue {
            campaigns,
            calls,
            taken: 0,
            put_off: BinaryHeap::new(),
        }
    }

    /// Takes the next call that is due. While a call is deferred, a new one would be refused too,
    /// so it stays in the queue.
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

    /// Defers a call until `due`.
    pub(crate) fn put_off(&mut self, call: Call, due: SystemTime) {
        self.put_off.push(Reverse((due, call)));
    }
}
