//! One hold: when it ends, and how this process knows.
//!
//! A process learns of holds and releases in three ways. It sees them itself, another process
//! publishes them, or the store states them in its replies. These messages overtake each other. So
//! three moments describe one end:
//!
//! - `end`: requests wait until this moment.
//! - `sure_until`: this process saw the hold until this moment, or the store stated it. A published
//!   message may have been delayed, so what it states beyond this moment is not sent to the store.
//! - `stored_until`: the store knows of the hold until this moment at most. If `sure_until` is
//!   later, the hold is sent with the next call.
//!
//! The number of releases orders all messages: a hold from before a release is over. Between two
//! releases a hold only becomes longer, unless the store states less after it has learned of the
//! hold.
//!
//! | what is learned | releases | `end` | `sure_until` | `stored_until` |
//! |---|---|---|---|---|
//! | seen | more | new | new | - |
//! | seen | same | later one | later one | - |
//! | published | more | new | now | - |
//! | published | same | later one | - | - |
//! | reply | more | new | new | new |
//! | reply to a call sent before the last change | same | later one | later one | new |
//! | reply to a later call, with an end from `sure_until` on | same | new | new | new |
//! | reply to a later call, with an earlier end | same | `sure_until` | - | new |
//! | anything | fewer | - | - | - |
//! | the store lost its state | - | - | `end` | now |
//!
//! A process that sets a hold may not know the number of releases yet. It takes the number of the first
//! message, which then counts as one with the same number.
//!
//! While this machine sleeps, its clock stands still, and the hold goes on. So all three moments come earlier by
//! that ([`Hold::wake`]).
//!
//! If a reply to a later call states an earlier end than `sure_until`, the store has lost the hold.
//! Two ends at most 5 ms apart are one end, observed after different round trips.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use super::probation::{Passage, Probation};
use super::upstream_refusals::SAME_END;
use crate::clock::{self, SleepMark};
use crate::limiter::reservation::ProbeNumber;
use crate::limiter::session::TimeBounds;
use crate::store::HoldState;

/// How often the store is asked for a release that may have been missed, while requests arrive.
pub(super) const ASK_AGAIN: Duration = Duration::from_secs(1);

/// How this process learned of a hold or a release, other than by a reply of the store to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::limiter) enum HoldSource {
    /// This process caused it or saw its cause.
    Seen,
    /// Another process published it.
    Published,
}

/// A hold of a key.
#[derive(Debug)]
pub(super) struct Hold {
    /// When it ends, by what this process knows.
    end: Instant,
    /// How often holds of the key were released.
    releases: u32,
    /// Whether the store or another process has stated `releases`.
    knows_releases: bool,
    /// What follows its end.
    pub(super) probation: Probation,
    evidence: HoldEvidence,
    /// Begins with a hold: when the moments were last right. `None` if there was no hold.
    sleep: Option<SleepMark>,
}

/// How this process knows of a hold. The module's documentation explains the moments.
#[derive(Debug)]
struct HoldEvidence {
    sure_until: Instant,
    stored_until: Instant,
    /// When the hold last changed. Replies to calls that were sent before may not include it.
    changed_at: Instant,
    /// When the store or another process last confirmed the hold. `None` if a message may have been
    /// missed.
    confirmed_at: Option<Instant>,
}

impl Hold {
    /// Makes a hold that is over.
    pub(super) fn new(now: Instant) -> Self {
        Hold {
            end: now,
            releases: 0,
            knows_releases: false,
            probation: Probation::Off,
            evidence: HoldEvidence {
                sure_until: now,
                stored_until: now,
                changed_at: now,
                confirmed_at: None,
            },
            sleep: None,
        }
    }

    /// Returns for how long the machine has slept. If the key is on hold, the hold ends that much earlier than this process
    /// thought.
    pub(super) fn wake(&mut self, now: Instant) -> Duration {
        let slept = self.sleep.as_mut().map_or(Duration::ZERO, SleepMark::look);
        if slept.is_zero() || self.end <= now {
            return slept;
        }
        let evidence = &mut self.evidence;
        for moment in [&mut evidence.sure_until, &mut evidence.stored_until] {
            *moment = moment.checked_sub(slept).unwrap_or(now);
        }
        // A probation begins when it is over, so no earlier than now.
        self.end = self.end.checked_sub(slept).map_or(now, |end| end.max(now));
        // A release may have been missed, too.
        evidence.confirmed_at = None;
        slept
    }

    /// Returns when the hold ends or ended.
    pub(super) fn end(&self) -> Instant {
        self.end
    }

    /// Returns for how long the key is on hold.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        (self.end > now).then(|| self.end - now)
    }

    /// Returns how often holds of the key were released.
    pub(super) fn releases(&self) -> u32 {
        self.releases
    }

    /// Returns whether the store or another process has stated how often holds of the key were released.
    pub(super) fn knows_releases(&self) -> bool {
        self.knows_releases
    }

    /// Takes in a hold or a release that this process saw or that another process published.
    /// Returns whether the hold changed.
    pub(super) fn adopt(&mut self, held: HoldState, source: HoldSource, now: Instant) -> bool {
        if held.releases < self.releases {
            return false;
        }
        if source == HoldSource::Published && !held.remaining.is_zero() {
            self.learn_releases(held.releases);
        }
        let until = clock::after(now, held.remaining);
        let is_released = held.releases > self.releases;
        if is_released {
            self.releases = held.releases;
            self.evidence.sure_until = now;
        }
        if source == HoldSource::Seen {
            self.evidence.sure_until = self.evidence.sure_until.max(until);
        }
        self.evidence.confirmed_at = Some(now);
        let is_same_end = self.end > now && until <= clock::after(self.end, SAME_END);
        let is_longer = until > now.max(self.end) && !is_same_end;
        if is_released || is_longer {
            self.evidence.changed_at = now;
            self.set_end(until, held.cut, now);
        }
        is_released || is_longer
    }

    /// Takes in the hold that the store replied to a call sent at `sent`. The store's time was
    /// between `earliest` and `latest`.
    ///
    /// Returns whether the store decided before a release that this process knows of. Then the rest
    /// of its reply is out of date, too.
    pub(super) fn answered(
        &mut self,
        held: HoldState,
        sent: Instant,
        TimeBounds { earliest, latest }: TimeBounds,
    ) -> bool {
        self.learn_releases(held.releases);
        let evidence = &mut self.evidence;
        if held.releases < self.releases {
            return sent < evidence.changed_at;
        }
        let sure_until = clock::after(earliest, held.remaining);
        // If the hold is over, its end is the earliest possible moment. The task that takes in the
        // reply may have read its time before `latest`, and must not see a hold.
        let until = if held.remaining.is_zero() {
            sure_until
        } else {
            clock::after(latest, held.remaining)
        };
        evidence.confirmed_at = Some(latest);
        evidence.stored_until = until;
        if held.releases > self.releases {
            evidence.sure_until = sure_until;
            evidence.changed_at = sent;
            self.releases = held.releases;
            self.set_end(until, held.cut, latest);
            return false;
        }
        evidence.sure_until = evidence.sure_until.max(sure_until);
        let is_confirmed = evidence.sure_until <= clock::after(until, SAME_END);
        if sent < evidence.changed_at {
            let is_longer = !held.remaining.is_zero() && until > clock::after(self.end, SAME_END);
            if is_longer {
                self.set_end(until, held.cut, latest);
            } else {
                self.ends_at(self.end.max(until), latest);
            }
        } else if is_confirmed {
            evidence.sure_until = evidence.sure_until.min(until);
            self.ends_at(until, latest);
            if !held.remaining.is_zero() && held.cut != self.probation.is_on() {
                self.probation = Probation::after(held.cut, held.remaining);
            }
        } else {
            // The store has lost the hold.
            let sure_until = evidence.sure_until;
            self.ends_at(sure_until, latest);
        }
        false
    }

    /// Takes in how often holds of the key were released, when the first message states it: a hold that
    /// this process has seen before is not one from before these releases.
    fn learn_releases(&mut self, releases: u32) {
        if !self.knows_releases {
            self.releases = self.releases.max(releases);
            self.knows_releases = true;
        }
    }

    /// Returns the hold for a call to the store. Its `remaining` is zero if the store knows of the
    /// hold. `is_new` states that the store does not.
    pub(super) fn for_store(&self, is_new: bool, now: Instant) -> HoldState {
        let evidence = &self.evidence;
        let (sure_until, stored_until) = (evidence.sure_until, evidence.stored_until);
        // Round trips differ. Without the tolerance, each call would move the end a little.
        let is_news = is_new || sure_until > clock::after(stored_until, SAME_END);
        let remaining = if is_news {
            sure_until.saturating_duration_since(now)
        } else {
            Duration::ZERO
        };
        HoldState {
            remaining,
            releases: self.releases,
            cut: self.probation.is_on(),
        }
    }

    /// Notes that the store has lost its state, and the hold with it.
    pub(super) fn store_lost_state(&mut self, now: Instant) {
        self.evidence.sure_until = self.end;
        self.evidence.stored_until = now;
    }

    /// Notes that a hold or a release may have been missed.
    pub(super) fn doubt(&mut self) {
        self.evidence.confirmed_at = None;
    }

    /// Returns whether the key is on hold and a release may have been missed.
    pub(super) fn is_doubted(&self, now: Instant) -> bool {
        self.evidence.confirmed_at.is_none() && self.end > now
    }

    /// Returns whether a request that is held has to ask the store for a release that may have been
    /// missed. Returns true once each [`ASK_AGAIN`], because one request asks for all.
    pub(super) fn take_inquiry(&mut self, now: Instant) -> bool {
        let confirmed_at = self.evidence.confirmed_at;
        let is_due =
            confirmed_at.is_none_or(|confirmed_at| clock::after(confirmed_at, ASK_AGAIN) <= now);
        if is_due {
            self.evidence.confirmed_at = Some(now);
        }
        is_due
    }

    /// Returns whether the hold was cut, so that it ends on probation.
    pub(super) fn is_cut(&self) -> bool {
        self.probation.is_on()
    }

    /// Returns which requests may leave once the hold is over.
    pub(super) fn passage(&self, max_hold: Duration, now: Instant) -> Passage {
        self.probation.passage(self.end, max_hold, now)
    }

    /// Ends the probation if the upstream accepted the probe, or a request that was sent, at `sent`, after the
    /// end of the hold. Returns whether there was a probation.
    ///
    /// Such a request may have left while no hold was known, or as a probe that took too long.
    pub(super) fn accepted(&mut self, probe: Option<ProbeNumber>, sent: Instant) -> bool {
        let is_probe = probe.is_some_and(|number| self.probation.is_probe(number));
        let passed = is_probe || self.is_cut() && sent >= self.end;
        if passed {
            self.probation = Probation::Off;
        }
        passed
    }

    fn set_end(&mut self, end: Instant, is_cut: bool, now: Instant) {
        self.ends_at(end, now);
        self.probation = Probation::after(is_cut, end.saturating_duration_since(now));
    }

    fn ends_at(&mut self, end: Instant, now: Instant) {
        if self.end <= now && end > now {
            self.sleep = Some(SleepMark::new());
        }
        // A hold that is over ends no later: a task that has read its time before would see a hold of a moment.
        self.end = if end > now { end } else { self.end.min(end) };
    }
}
