//! How long a key is held after the upstream refused a call.
//!
//! If the upstream states a wait, that wait counts. Some upstreams state too short a wait: their clock is behind and they
//! name the moment of a reset, or they round down. A call that is sent when the stated wait is over and is refused again
//! proves it. Then the key is held for at least [`FIRST_EXTRA`], and twice as long with each further proof.
//!
//! If the upstream then states a wait of zero and refuses, its waits are always too short. When a call passes, the time from
//! the first stated end to the last is kept for the key, and added to each later wait. If the upstream states another wait,
//! other clients may have used the permits that became free, and nothing is kept.

use std::time::{Duration, Instant};

use crate::clock;
use crate::rng::jittered;

/// What was learned from refusals of one key.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// Refusals in a row that stated no wait.
    without_wait: u32,
    /// By how much the upstream's stated waits are too short.
    late: Duration,
    /// Refusals in a row that stated a wait.
    told: Option<Told>,
}

/// Refusals that stated a wait, since a call passed.
#[derive(Clone, Copy, Debug)]
struct Told {
    /// When a call might leave, by the first refusal and by the last.
    first_end: Instant,
    end: Instant,
    /// Until when a refusal proves that the last stated wait was too short.
    proves_until: Instant,
    /// The wait that was added, if the stated wait was proved too short.
    extra: Duration,
    /// Whether the refusal that proved it stated a wait of zero.
    said_now: bool,
}

/// How long a key is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) left: Duration,
    /// Whether it ends on probation: the upstream stated a longer wait, or its stated waits were too short.
    pub(super) cut: bool,
}

/// The first hold if the upstream states no wait; each further one is twice as long.
const FIRST_HOLD: Duration = Duration::from_secs(1);

/// The first wait that is added to a stated wait that was too short.
const FIRST_EXTRA: Duration = Duration::from_millis(400);

/// How long after the stated end a refusal proves that the wait was too short; a later refusal is a new one.
const PROOF: Duration = Duration::from_secs(1);

/// The most that is kept of an upstream's lateness; a greater lateness is no error of its clock.
const MOST_LATE: Duration = Duration::from_secs(5);

/// Two ends closer than this, or than a fiftieth of what is left, are one hold, observed after different round trips.
pub(super) const SAME: Duration = Duration::from_millis(5);

impl Refusals {
    /// Takes in the refusal of a call that was sent at `sent`, while the key is held for `held`. Returns the hold that
    /// follows, if it is longer.
    pub(super) fn refused(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        held: Option<Duration>,
        sent: Instant,
        now: Instant,
    ) -> Option<Wait> {
        if retry_after.is_none() && held.is_some() {
            // It states nothing new: that call was sent before the hold began.
            return None;
        }
        let Some(told) = retry_after else {
            self.without_wait += 1;
            let longest = FIRST_HOLD.saturating_mul(1 << (self.without_wait - 1).min(10));
            return Some(Wait { left: jittered(longest.min(max_hold)), cut: false });
        };
        let before = self.told.filter(|before| sent <= before.proves_until);
        let proves = before.is_some_and(|before| sent >= before.end);
        let said = told.saturating_add(self.late).min(max_hold);
        let said_now = before.is_some_and(|before| before.said_now) || (proves && told <= SAME);
        let (wait, extra) = match before {
            Some(before) if proves => {
                let extra = (before.extra * 2).max(FIRST_EXTRA);
                (said.max(extra).min(max_hold), extra)
            }
            // A call that was sent before the stated end proves nothing.
            Some(before) => (said, before.extra),
            None => (said, Duration::ZERO),
        };
        let follows = held.is_none_or(|held| wait > held + SAME.max(held / 50));
        let end = clock::after(now, if follows { wait } else { held.unwrap_or_default() });
        let first_end = before.map_or(end, |before| before.first_end);
        let proves_until = clock::after(end, PROOF + extra);
        self.told = Some(Told { first_end, end, proves_until, extra, said_now });
        follows.then_some(Wait { left: wait, cut: told > max_hold || said_now })
    }

    /// A call that was sent at `sent` has passed.
    pub(super) fn passed(&mut self, sent: Instant) {
        if let Some(told) = self.told.filter(|told| sent >= told.end) {
            if told.said_now {
                self.late = (self.late + (told.end - told.first_end)).min(MOST_LATE);
            }
            self.told = None;
        }
        self.without_wait = 0;
    }

    /// Whether a call that passes would change anything.
    pub(super) fn is_waiting(&self) -> bool {
        self.without_wait > 0 || self.told.is_some()
    }

    /// How long what is known matters after the end of a hold.
    pub(super) fn matters_for(&self) -> Duration {
        match self.without_wait {
            0 if self.told.is_some() => PROOF,
            0 => Duration::ZERO,
            refusals => FIRST_HOLD.saturating_mul(1 << refusals.min(10)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns how many refusals there are until the server accepts calls, `late` after the stated moment.
    fn refusals(known: &mut Refusals, at: &mut Instant, told: Duration, late: Duration) -> u32 {
        let opens = *at + told + late;
        for count in 0.. {
            if *at >= opens {
                known.passed(*at);
                return count;
            }
            let said = (opens - *at).saturating_sub(late);
            let wait = known.refused(Some(said), HOUR, None, *at, *at);
            *at += wait.unwrap().left;
        }
        unreachable!("the server opens");
    }

    #[test]
    fn words_that_are_too_short_are_learned() {
        for late in [5, 300, 900, 1200, 4000] {
            let (mut known, mut at) = (Refusals::default(), clock::now());
            let first = refusals(&mut known, &mut at, ms(8000), ms(late));
            assert!(first <= if late <= 1200 { 3 } else { 5 }, "{late} ms: {first} refusals");
            for _ in 0..10 {
                at += ms(500);
                assert_eq!(refusals(&mut known, &mut at, ms(8000), ms(late)), 1, "{late} ms late");
            }
        }
    }

    /// Other clients take the permits that become free, and the upstream names the next moment.
    #[test]
    fn waits_that_follow_each_other_teach_nothing() {
        let (mut known, mut at) = (Refusals::default(), clock::now());
        for _ in 0..3 {
            at += known.refused(Some(ms(1000)), HOUR, None, at, at).unwrap().left;
        }
        known.passed(at);
        assert_eq!(known.late, Duration::ZERO);
    }

    #[test]
    fn words_of_zero_are_no_loop() {
        let (mut known, start) = (Refusals::default(), clock::now());
        let mut at = start;
        for _ in 0..8 {
            at += known.refused(Some(Duration::ZERO), ms(60_000), None, at, at).unwrap().left.max(ms(1));
        }
        assert!(at - start > ms(20_000), "{:?}", at - start);
    }

    #[test]
    fn refusals_that_come_together_prove_nothing() {
        let (mut known, now) = (Refusals::default(), clock::now());
        let first = known.refused(Some(ms(100)), HOUR, None, now, now);
        assert_eq!(first, Some(Wait { left: ms(100), cut: false }));
        for after in [1, 3] {
            assert_eq!(known.refused(Some(ms(100)), HOUR, Some(ms(100 - after)), now, now + ms(after)), None);
        }
        // The hold ended 100 ms after the first.
        assert_eq!(known.told.map(|told| told.end), Some(now + ms(100)));
        known.passed(now + ms(101));
        let again = known.refused(Some(ms(100)), HOUR, None, now + ms(900), now + ms(901));
        assert_eq!(again.unwrap().left, ms(100));
    }

    #[test]
    fn waits_are_cut_and_say_so() {
        let (mut known, now) = (Refusals::default(), clock::now());
        let wait = known.refused(Some(HOUR), ms(60_000), None, now, now);
        assert_eq!(wait, Some(Wait { left: ms(60_000), cut: true }));
    }
}
