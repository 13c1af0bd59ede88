//! How long a key is put on hold after the upstream refused a call.
//!
//! If the upstream states a wait, the hold lasts for that wait. Some upstreams state too short a
//! wait: they state the moment of a reset by a clock that is behind, or they round down. A call
//! that is sent after the stated wait and is refused again proves this. Then the hold lasts for at
//! least [`FIRST_EXTRA`], and for twice as long after each further proof.
//!
//! Such a refusal may state a wait of zero. Then the upstream refuses although its stated wait is
//! over by its own clock, so all its waits are too short. When it accepts a call again, the key
//! keeps the time from the first stated end to the last end. This is the key's *lateness*, which is
//! added to each later wait. If such a refusal states another wait, other clients may have used the
//! permits that became free. Then the key keeps nothing.

use std::time::{Duration, Instant};

use crate::clock;
use crate::rng::jittered;

/// What was learned from the refusals of one key.
#[derive(Debug, Default)]
pub(super) struct UpstreamRefusals {
    /// How many refusals in a row stated no wait.
    without_wait: u32,
    /// How much longer than its stated waits the upstream refuses.
    lateness: Duration,
    /// The refusals that stated a wait, since a call was accepted.
    stated: Option<StatedWaits>,
}

/// Refusals in a row that stated a wait.
#[derive(Clone, Copy, Debug)]
struct StatedWaits {
    /// The end of the wait that the first refusal stated.
    first_end: Instant,
    /// The end of the hold after the last refusal.
    end: Instant,
    /// When the wait that was stated last ends. That is after `end` if it is longer than `max_hold`.
    stated_end: Instant,
    /// A call that is sent from `stated_end` to this moment and is refused proves that the wait was too
    /// short.
    proves_until: Instant,
    /// The shortest hold after the last proof. Zero without a proof.
    extra: Duration,
    /// Whether a refusal that proved a wait too short stated a wait of zero.
    is_zero_too_short: bool,
}

/// How long a key is put on hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HoldSpan {
    /// From now.
    pub(super) left: Duration,
    /// Whether the hold ends on probation: the upstream stated no wait or a longer one than `max_hold`, or
    /// its waits are too short.
    pub(super) cut: bool,
}

/// The first hold if the upstream states no wait. Each further hold of this kind is twice as long.
const FIRST_HOLD: Duration = Duration::from_secs(1);

/// The shortest hold after the first proof that a stated wait was too short.
const FIRST_EXTRA: Duration = Duration::from_millis(400);

/// How long after the end of a hold a refusal proves that the wait was too short. A later refusal
/// has another cause.
const PROOF: Duration = Duration::from_secs(1);

/// The most that is kept of an upstream's lateness. A greater lateness has other causes than its
/// clock.
const MOST_LATE: Duration = Duration::from_secs(5);

/// Two ends closer than this, or than a fiftieth of what is left, are one hold, observed after
/// different round trips.
pub(super) const SAME_END: Duration = Duration::from_millis(5);

impl UpstreamRefusals {
    /// Takes in the refusal of a call that was sent at `sent`, while the key is on hold for `held`. The fleet has sent so many
    /// `probes` in a row. Returns the hold that follows, if it is longer than the present one.
    pub(super) fn refused(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        held: Option<Duration>,
        probes: u8,
        sent: Instant,
        now: Instant,
    ) -> Option<HoldSpan> {
        match retry_after {
            Some(stated) => self.refused_for(stated, max_hold, held, sent, now),
            // It states nothing new: the call was sent before the hold began.
            None if held.is_some() => None,
            None => Some(self.refused_without_wait(max_hold, probes)),
        }
    }

    fn refused_without_wait(&mut self, max_hold: Duration, probes: u8) -> HoldSpan {
        // Other processes have had probes refused.
        self.without_wait = 1 + self.without_wait.max(probes.into());
        let longest = FIRST_HOLD.saturating_mul(1 << (self.without_wait - 1).min(10));
        HoldSpan {
            left: jittered(longest.min(max_hold)),
            cut: true,
        }
    }

    fn refused_for(
        &mut self,
        stated: Duration,
        max_hold: Duration,
        held: Option<Duration>,
        sent: Instant,
        now: Instant,
    ) -> Option<HoldSpan> {
        let before = self.stated.filter(|before| sent <= before.proves_until);
        // A call that was sent before the stated end proves nothing.
        let proves = before.is_some_and(|before| sent >= before.stated_end);
        let is_zero_too_short =
            before.is_some_and(|before| before.is_zero_too_short) || (proves && stated <= SAME_END);
        let extra_before = before.map_or(Duration::ZERO, |before| before.extra);
        let longer = extra_before.saturating_mul(2).max(FIRST_EXTRA);
        let extra = if proves {
            longer.min(max_hold)
        } else {
            extra_before
        };
        let corrected = stated.saturating_add(self.lateness);
        let least = if proves { extra } else { Duration::ZERO };
        let wait = corrected.max(least).min(max_hold);
        let follows = held.is_none_or(|held| wait > held + SAME_END.max(held / 50));
        let lasts = held.filter(|_| !follows).unwrap_or(wait);
        let end = clock::after(now, lasts);
        let first_end = before.map_or(end, |before| before.first_end);
        let stated_end = end.max(clock::after(now, corrected));
        let proves_until = clock::after(stated_end, PROOF + extra);
        self.stated = Some(StatedWaits {
            first_end,
            end,
            stated_end,
            proves_until,
            extra,
            is_zero_too_short,
        });
        follows.then_some(HoldSpan {
            left: wait,
            cut: stated > max_hold || is_zero_too_short,
        })
    }

    /// Takes in that the upstream accepted a call. The call was sent at `sent`.
    pub(super) fn accepted(&mut self, sent: Instant) {
        if let Some(stated) = self.stated.filter(|stated| sent >= stated.end) {
            if stated.is_zero_too_short {
                self.lateness = (self.lateness + (stated.end - stated.first_end)).min(MOST_LATE);
            }
            self.stated = None;
        }
        self.without_wait = 0;
    }

    /// Forgets the refusals in a row that stated no wait. Stated waits have a moment until which they prove anything.
    pub(super) fn expire(&mut self) {
        self.without_wait = 0;
    }

    /// Returns for how long after the end of a hold the refusals matter.
    pub(super) fn matters_for(&self) -> Duration {
        match self.without_wait {
            0 if self.stated.is_some() => PROOF,
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

    /// Returns how many refusals there are until the server accepts calls, `late` after the stated
    /// moment.
    fn refusals(
        known: &mut UpstreamRefusals,
        at: &mut Instant,
        first_wait: Duration,
        late: Duration,
    ) -> u32 {
        let opens = *at + first_wait + late;
        for count in 0.. {
            if *at >= opens {
                known.accepted(*at);
                return count;
            }
            let stated = (opens - *at).saturating_sub(late);
            let wait = known.refused(Some(stated), HOUR, None, 0, *at, *at);
            *at += wait.unwrap().left;
        }
        unreachable!("the server opens");
    }

    #[test]
    fn waits_that_are_too_short_are_learned() {
        for late in [5, 300, 900, 1200, 4000] {
            let (mut known, mut at) = (UpstreamRefusals::default(), clock::now());
            let first = refusals(&mut known, &mut at, ms(8000), ms(late));
            assert!(
                first <= if late <= 1200 { 3 } else { 5 },
                "{late} ms: {first} refusals"
            );
            for _ in 0..10 {
                at += ms(500);
                assert_eq!(
                    refusals(&mut known, &mut at, ms(8000), ms(late)),
                    1,
                    "{late} ms late"
                );
            }
        }
    }

    /// Other clients take the permits that become free, and the upstream states the next moment.
    #[test]
    fn waits_that_follow_each_other_teach_nothing() {
        let (mut known, mut at) = (UpstreamRefusals::default(), clock::now());
        for _ in 0..3 {
            at += known
                .refused(Some(ms(1000)), HOUR, None, 0, at, at)
                .unwrap()
                .left;
        }
        known.accepted(at);
        assert_eq!(known.lateness, Duration::ZERO);
    }

    #[test]
    fn waits_of_zero_are_no_loop() {
        let (mut known, start) = (UpstreamRefusals::default(), clock::now());
        let mut at = start;
        for _ in 0..8 {
            at += known
                .refused(Some(Duration::ZERO), ms(60_000), None, 0, at, at)
                .unwrap()
                .left
                .max(ms(1));
        }
        assert!(at - start > ms(20_000), "{:?}", at - start);
    }

    #[test]
    fn refusals_that_come_together_prove_nothing() {
        let (mut known, now) = (UpstreamRefusals::default(), clock::now());
        let first = known.refused(Some(ms(100)), HOUR, None, 0, now, now);
        assert_eq!(
            first,
            Some(HoldSpan {
                left: ms(100),
                cut: false
            })
        );
        for after in [1, 3] {
            assert_eq!(
                known.refused(
                    Some(ms(100)),
                    HOUR,
                    Some(ms(100 - after)),
                    0,
                    now,
                    now + ms(after)
                ),
                None
            );
        }
        // The hold ended 100 ms after the first.
        assert_eq!(known.stated.map(|stated| stated.end), Some(now + ms(100)));
        known.accepted(now + ms(101));
        let again = known.refused(Some(ms(100)), HOUR, None, 0, now + ms(900), now + ms(901));
        assert_eq!(again.unwrap().left, ms(100));
    }

    /// A day is used up: each probe after a cut hold is refused. When the server states a short wait at last, it lasts
    /// as long as that.
    #[test]
    fn refusals_after_cut_waits_prove_nothing() {
        let (mut known, mut at) = (UpstreamRefusals::default(), clock::now());
        for left in (0..1440).rev() {
            let stated = ms(60_000) * left + ms(5000);
            let wait = known.refused(Some(stated), ms(60_000), None, 0, at, at);
            let left = wait.unwrap().left;
            assert_eq!(left, stated.min(ms(60_000)));
            at += left;
        }
    }

    /// The same server, with a clock that is ahead of ours by more than `max_hold`: the holds stay that long.
    #[test]
    fn proofs_without_end_hold_for_max_hold() {
        let (mut known, mut at) = (UpstreamRefusals::default(), clock::now());
        for count in 0..200 {
            let wait = known.refused(Some(Duration::ZERO), ms(60_000), None, 0, at, at);
            let left = wait.map_or(ms(1), |wait| wait.left);
            assert!(count < 10 || left == ms(60_000), "{count}: {left:?}");
            at += left;
        }
    }

    #[test]
    fn long_waits_are_cut() {
        let (mut known, now) = (UpstreamRefusals::default(), clock::now());
        let wait = known.refused(Some(HOUR), ms(60_000), None, 0, now, now);
        assert_eq!(
            wait,
            Some(HoldSpan {
                left: ms(60_000),
                cut: true
            })
        );
    }
}
