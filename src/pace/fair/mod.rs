//! The recommended pace: how many compete for this limit?

#[cfg(test)]
mod properties;
mod scale;
mod trust;

use std::time::{Duration, Instant};

use super::reading::{Told, wait_said};
use super::{Call, Dice, LONGEST, Notes, Pace, Pause, Reply, Traffic, seconds, span};
use scale::Scale;
use trust::{Trust, Word};

/// Learns how many equal competitors share the limit, and takes one fair share. The recommended pace.
///
/// It needs no coordination: clients that never talk to each other settle at the same interval, with next to no
/// refusals, and each waits no longer than a fair round robin would make it wait. It works best where the answers say what
/// is left, and does what can be done where they do not, or lie. Nothing has to be configured;
/// [`limit`](Fair::limit) makes it quicker.
///
/// # How it works
///
/// Its unit is the token time `t0` = window / limit, one token's worth of time. Its state, for one key in one process or in a fleet that shares it:
///
/// | | starts as | is |
/// |---|---|---|
/// | `n` | 1 | how many equal competitors there seem to be, this one included |
/// | `m` | 0 | the least interval, in token times, for what Remaining cannot explain: other limits, lies, silence |
/// | `drain` | 1 | how many tokens all of them take for each request of ours, on average |
/// | `v` | none | how many tokens were left after the last answer |
///
/// The next request leaves `t0 x max(q, m)` after the last one. Where `v` is not known, `q` is 0; else it is
///
/// ```text
/// n + 0.75 x (s - (v - in flight))              one fair share, corrected by shortage and surplus
/// at least min(r, r - v), r = s + drain         one token time for each token that is missing
/// ```
///
/// The set point `s` is what the level is held at: 5 tokens, or a quarter of the limit where that is less.
///
/// What is left is a ticket number: clients that ask at the same instant read consecutive values, and a wait of one token
/// time for each missing token spreads them one token time apart. The brake comes before the wall, because `r` grows with
/// how fast all others drain the bucket. Far above it nothing is held back at all.
///
/// An answer that is no refusal moves `n` up by `exp(0.22 u)`, once in a round trip, and down by `exp(-0.0044 (1 - u))` for
/// each token time since the answer before; `u` is 1 at an empty bucket and 0 from twice the set point on. Growth for each
/// *request*, release over *time*: who is too fast asks more often and grows more, and all share one clock. That one
/// asymmetry makes the shares even. The two balance at `n = 50 u / (1 - u)`, the same for all; so where the very first
/// answer passed, its level tells what `n` those have who came before, and `n` starts there, at most at 20.
///
/// A refusal multiplies `n` by `1 + 1 / (1 + p / 2)`, once in a round trip, where `p` of our requests passed since the one
/// before: one refusal of few requests tells of more competitors than one of many. The first sets it to 5 for all calls
/// that wait. Then nothing leaves for half to all of `2.5 n` token times, or for as long as the server said and up to
/// `2.5 n` token times more; and nothing leaves earlier than it would have without the refusal.
///
/// A refusal while plenty is left has another cause, a second limit or a lie: it raises `m`, which falls again, slowly at
/// first and then faster and faster, so that a limit that has gone is found out. So does a refusal where nothing is said
/// of what is left: by 1.2, from 7.5 on for all calls that wait, or from the interval that was too short where not even the
/// token time is known.
///
/// - **The token time** is what was configured; else what a header says of limit and window; else, for a bucket, Reset /
///   (Limit - Remaining); else a guess that starts at 0.3 s and falls as Remaining is seen to rise; `n` grows by as much,
///   so that no interval changes.
/// - **A fixed window** is a bucket in disguise. It is one if the moment of its reset stays put while Remaining does not
///   rise. Half of the quota may go at once, the other half is kept for an even pace: `v` is Remaining less a straight line
///   from half of the limit to 0 at the reset. Below the line, what is left is spread evenly over what is left of the
///   window; there `n` grows by how much more than that the fleet takes, `drain / n`. A new window forgives the pace, and
///   who was refused in the old one comes within one share of the new.
/// - **A Remaining that is missing, negative, larger than the limit all of a sudden, or always the same** is not believed
///   (a bucket may hold more than the limit, where that is a speed, but comes to it by and by; the same though more or
///   less came than we took, or always 0: who takes just what comes sees no change); `m` takes over
///   at the interval that was reached. Where it speaks for the first time only after refusals that were silent, what `m`
///   has learned becomes `n`.
///
/// # Constants
///
/// | | | halved, or one and a half times |
/// |---|---|---|
/// | set point | 5 tokens, or a quarter of the limit | fifty clients are refused more often / a bucket is emptied more slowly |
/// | growth | 0.22 for each answer at 0 | ten clients wait up to 24 s instead of 10 s / fifty wait longer |
/// | release | 0.0044 for each token time | slower to follow / fifty are refused more often |
/// | shortage | 0.75 token times for each token | slower to empty / fifty are refused more often |
/// | most that a first look makes of `n` | 20 | newcomers are refused more often / they wait longer |
/// | first guess of `n` after a refusal | 5 | refused more often / longer first waits |
/// | first guess of `m` in silence | 7.5 | ten are refused more often / fewer use less at first |
/// | factor after a refusal | 2 where none passed since the last | below 1.3 it fails / fifty wait longer |
/// | pause | 2.5 `n` token times | refused more often / longer waits |
/// | kept of a window | a half | bursts against an even pace later |
///
/// The shortage term is what is quick: with each client sampling once in `n` token times the loop gain is 0.4 rad, far from where
/// it would swing. `n` follows in about 200 token times.
///
/// # What it is bad at
///
/// Sliding windows that say nothing of their reset: a burst comes back as a burst one window later. Windows of a few
/// seconds with a reset in whole seconds. Hundreds of clients on an empty bucket: to learn `n` from refusals alone costs
/// about one refusal for each client and doubling.
#[derive(Clone, Debug)]
pub struct Fair {
    start: f64,
    first_call: Option<Instant>,
    n: f64,
    m: f64,
    drain: f64,
    level: Option<f64>,
    scale: Scale,
    trust: Trust,
    /// If nothing left since the last refusal: the slot there was before it, which the pause alone may put off.
    slot_before: Option<Instant>,
    passed_since_refusal: u32,
    last_answer: Option<Instant>,
    last_refusal: Option<Instant>,
    /// The last step up: growth, or a reaction to a refusal.
    last_step: Option<Instant>,
    last_sent: Option<Instant>,
    /// Between two requests of ours, in seconds, on average.
    interval: Option<f64>,
    /// Where in its share of a new window this client starts; rolled once.
    place: Option<f64>,
}

impl Default for Fair {
    fn default() -> Self {
        Fair {
            start: 0.0,
            first_call: None,
            n: 1.0,
            m: 0.0,
            drain: 1.0,
            level: None,
            scale: Scale::default(),
            trust: Trust::default(),
            slot_before: None,
            passed_since_refusal: 0,
            last_answer: None,
            last_refusal: None,
            last_step: None,
            last_sent: None,
            interval: None,
            place: None,
        }
    }
}

/// The set point; twice as many tokens are comfortable.
const SET_POINT: f64 = 5.0;
/// Growth of ln n for an answer at an empty bucket.
const GROWTH: f64 = 0.22;
/// Release of ln n for each token time.
const RELEASE: f64 = 0.0044;
/// Release of ln n for each second, where the token time is a guess: clients whose guesses differ settle at the same
/// interval then.
const RELEASE_A_SECOND: f64 = 0.005;
/// The most that one answer releases.
const MOST_RELEASE: f64 = 1.5;
/// Token times for each token of shortage.
const SHORTAGE: f64 = 0.75;
/// The most that n is taken to be from a first look at what is left.
const FIRST_LOOK: f64 = 20.0;
/// The first guess of n after a refusal, for all calls that wait here together.
const FIRST_GUESS: f64 = 5.0;
/// The same of m, where nothing says how much is left: more, because nothing but refusals corrects it.
const FIRST_GUESS_BLIND: f64 = 7.5;
/// What a refusal multiplies n by, where none of our requests passed since the last.
const REFUSED: f64 = 2.0;
/// Where so many passed, it adds half as much.
const REFUSED_PASSED: f64 = 2.0;
/// What a refusal multiplies m by, where nothing says how much is left: less, because who is refused is chance.
const REFUSED_BLIND: f64 = 1.2;
/// The same where plenty is left.
const REFUSED_SEEN: f64 = 1.3;
/// Release of ln m for each token time, where Remaining is known, and where it is not.
const SEEN_RELEASE: f64 = 0.0004;
const BLIND_RELEASE: f64 = 0.0001;
/// So many token times without a refusal, and m falls twice as fast, where Remaining is known, and where it is not.
const SEEN_CALM: f64 = 320.0;
const BLIND_CALM: f64 = 1000.0;
/// The pause after a refusal, in n token times.
const PAUSE: f64 = 2.5;
/// A ticket of more tokens holds nothing back earlier.
const LONGEST_TICKET: f64 = 200.0;
/// More tokens than anybody takes meanwhile.
const MOST_DRAIN: f64 = 1e8;
/// The weight of a new sample in an average.
const WEIGHT: f64 = 0.2;
/// Below the line of a window n grows as if at a fifth of the bucket, when the fleet takes just what it may.
const BELOW_USE: f64 = 0.2;
/// The weight of a new interval in the average.
const INTERVAL_WEIGHT: f64 = 0.05;
/// If Remaining falls silent so many token times after a refusal, the pace that was reached is kept.
const REMEMBERED: f64 = 1000.0;

impl Fair {
    /// Knows nothing of the limit, and learns it.
    pub fn new() -> Self {
        Fair::default()
    }

    /// What is known of the limit: so many requests in a window. Default: nothing.
    ///
    /// A limit that is four times too high or too low still works, only less well. One that the server states in its
    /// headers need not be told.
    pub fn limit(mut self, limit: u32, window: Duration) -> Self {
        self.scale.configure(f64::from(limit.max(1)), window.as_secs_f64().max(1e-3));
        self
    }

    /// The pace each caller starts with, before the first answer. Default: none, the first request leaves at once.
    ///
    /// Where five callers wait, the first request leaves after a fifth of it.
    pub fn start_with(mut self, interval: Duration) -> Self {
        self.start = interval.as_secs_f64().min(LONGEST);
        self
    }

    /// How many equal competitors there seem to be, this one included: from 1 to as many as make the interval 900 s.
    pub fn competitors(&self) -> f64 {
        self.n
    }

    /// The interval between two requests that follows from all that was seen, with so many on their way.
    pub fn interval(&self, in_flight: usize) -> Duration {
        span(self.pace(in_flight))
    }

    fn pace(&self, in_flight: usize) -> f64 {
        let share = self.share_of(in_flight).unwrap_or(0.0);
        (self.scale.paced_time * share.max(self.m)).clamp(0.0, LONGEST)
    }

    /// The interval in token times, as far as it follows from what is left.
    fn share_of(&self, in_flight: usize) -> Option<f64> {
        let (level, set_point) = (self.level?, self.set_point());
        let shortage = SHORTAGE * (set_point - (level - in_flight as f64));
        if self.scale.is_below {
            return Some((self.n + shortage.min(0.0)).max(0.0));
        }
        let ticket = LONGEST_TICKET.min(self.scale.limit() / 2.0).min(set_point + self.drain);
        Some((self.n + shortage).max(ticket.min(ticket - level)).max(0.0))
    }

    /// What the level is held at: less where the bucket is small, for else even a full one would seem short.
    fn set_point(&self) -> f64 {
        SET_POINT.min(self.scale.limit() / 4.0)
    }

    /// What an answer says of what is left; `None` where it cannot be believed.
    fn look(&mut self, told: &Told, passed: bool, sent: Instant, now: Instant) -> Option<f64> {
        let was_blind = self.trust.is_silent();
        let limit = self.scale.known_limit(told);
        let word = Word { remaining: told.remaining, limit, passed, sent, now };
        let believed = self.trust.believe(word, self.scale.token_time);
        match (was_blind, self.trust.is_silent()) {
            (false, true) => {
                let since = self.last_refusal.map(|last| seconds(last, now) / self.scale.token_time);
                if self.level.is_some() && since.is_some_and(|since| since < REMEMBERED) {
                    self.m = self.m.max(self.n);
                }
            }
            (true, false) => self.m = 0.0,
            (false, false) if believed.is_some() && self.level.is_none() => {
                // It speaks for the first time: what was learned before it did was about n.
                self.n = self.n.max(self.m);
                self.m = 0.0;
            }
            _ => {}
        }
        let token_time = self.scale.token_time;
        let level = self.scale.look(told, believed, sent, now);
        if self.scale.is_guess {
            // A better guess changes no interval: those who guess differently stay equal.
            self.n *= token_time / self.scale.token_time;
        }
        match level {
            Some(_) => level,
            None if self.trust.is_silent() => None,
            None => self.level.map(|level| level - 1.0),
        }
    }

    /// Takes an answer that another process shares late: what is known is newer, but by how much is uncertain, and many
    /// requests may have left since.
    fn passed_late(&mut self, reply: &Reply<'_>) {
        self.trust.passed();
        if let (Some(level), Some(said)) = (self.level, Told::of(reply.signal).remaining)
            && !self.scale.is_window()
        {
            self.level = Some(level.min(said));
        }
        self.passed_since_refusal = self.passed_since_refusal.saturating_add(1);
    }

    /// Lowers `m`, the faster the longer the last refusal is past. The answer before was `since` seconds ago.
    fn relax_m(&mut self, since: f64, now: Instant) {
        if self.m <= 0.0 {
            return;
        }
        let tokens = since / self.scale.paced_time;
        let calm = self.last_refusal.map_or(0.0, |last| seconds(last, now)) / self.scale.token_time;
        let (rate, calm) = match self.level {
            Some(_) => (SEEN_RELEASE, calm / SEEN_CALM),
            None => (BLIND_RELEASE, calm / BLIND_CALM),
        };
        self.m *= (-rate * tokens * (1.0 + calm * calm)).exp();
    }

    /// Averages how many tokens all clients took since the answer before, `since` seconds ago.
    fn track_drain(&mut self, level_before: Option<f64>, since: f64) {
        let (Some(level), Some(before)) = (self.level, level_before) else { return };
        if level > 0.0 || self.scale.is_below {
            let drain = before - level + since / self.scale.token_time;
            let drain = drain.clamp(1.0, 2.0 * self.drain + 5.0);
            self.drain += WEIGHT * (drain - self.drain);
        }
    }

    /// Returns `u` of the type's docs: 1 at an empty bucket, 0 from twice the set point on or if the level is unknown.
    fn used(&self) -> f64 {
        match self.level {
            Some(_) if self.scale.is_below => (BELOW_USE * self.drain / self.n).min(1.0),
            Some(level) => (1.0 - level / (2.0 * self.set_point())).clamp(0.0, 1.0),
            None => 0.0,
        }
    }

    /// Sets `n` from the level of the very first answer: other clients that hold the bucket at a level have this `n`.
    fn seed_n(&mut self, used: f64) {
        if self.last_answer.is_none() && used < 1.0 && !self.scale.is_below {
            let n = GROWTH / RELEASE * used / (1.0 - used);
            self.n = n.min(self.scale.limit()).clamp(1.0, FIRST_LOOK);
        }
    }

    /// Raises `n`, once in a round trip.
    fn grow_n(&mut self, used: f64, reply: &Reply<'_>, now: Instant) {
        if used > 0.0 && self.is_news(reply) {
            self.n *= (GROWTH * used).exp();
            self.last_step = Some(now);
        }
    }

    /// Lowers `n` for the time since the answer before, `since` seconds ago. If the level is unknown, `n` stays as it is.
    fn release_n(&mut self, used: f64, since: f64) {
        if self.level.is_some() {
            let release = match self.scale.is_guess {
                true => RELEASE_A_SECOND * since,
                false => RELEASE * (since / self.scale.paced_time),
            };
            self.n *= (-(release * (1.0 - used)).min(MOST_RELEASE)).exp();
        }
        if self.scale.is_mostly_free() {
            self.n *= (-GROWTH).exp();
        }
    }

    /// Reports whether the answer's request left after the last step up, so that the answer shows the effect of the step.
    fn is_news(&self, reply: &Reply<'_>) -> bool {
        self.last_step.is_none_or(|step| reply.sent > step)
    }

    fn settle(&mut self, now: Instant) {
        self.bound();
        self.last_answer = Some(now);
    }

    fn bound(&mut self) {
        self.n = self.n.clamp(1.0, (LONGEST / self.scale.token_time).max(1.0));
        self.m = self.m.clamp(0.0, (LONGEST / self.scale.token_time).max(1.0));
        self.drain = self.drain.clamp(1.0, MOST_DRAIN);
    }
}

impl Pace for Fair {
    fn arrived(&mut self, _: &mut Call, traffic: &Traffic, dice: &mut Dice) -> Duration {
        self.first_call.get_or_insert(traffic.now);
        self.place.get_or_insert_with(|| dice.roll());
        Duration::ZERO
    }

    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        let Some(last) = traffic.last_sent else {
            return Some(self.first_call? + span(self.start / traffic.waiting.max(1) as f64));
        };
        if self.slot_before.is_some() {
            return self.slot_before;
        }
        let slot = last + span(self.pace(traffic.in_flight));
        let Some((reset_at, share)) = self.scale.next_window() else { return Some(slot) };
        if self.m > 0.0 {
            return Some(slot);
        }
        Some(slot.min(last.max(reset_at) + span(self.place.unwrap_or(0.0) * self.n * share)))
    }

    fn sent(&mut self, traffic: &Traffic) {
        self.slot_before = None;
        if let Some(last) = self.last_sent.replace(traffic.now) {
            let interval = seconds(last, traffic.now);
            let mean = self.interval.get_or_insert(interval);
            *mean += INTERVAL_WEIGHT * (interval - *mean);
        }
    }

    fn passed(&mut self, reply: &mut Reply<'_>, traffic: &Traffic, _: &mut Dice) {
        let now = traffic.now;
        if self.last_answer.is_some_and(|last| now < last) {
            return self.passed_late(reply);
        }
        let level_before = self.level;
        self.level = self.look(&Told::of(reply.signal), true, reply.sent, now);
        let since = self.last_answer.map_or(0.0, |last| seconds(last, now));
        self.relax_m(since, now);
        self.track_drain(level_before, since);
        let used = self.used();
        self.seed_n(used);
        self.grow_n(used, reply, now);
        self.release_n(used, since);
        self.passed_since_refusal = self.passed_since_refusal.saturating_add(1);
        self.settle(now);
    }

    fn refused(&mut self, reply: &mut Reply<'_>, traffic: &Traffic, dice: &mut Dice) -> Pause {
        let now = traffic.now;
        let told = Told::of(reply.signal);
        let slot = self.slot(&Traffic { in_flight: traffic.in_flight + 1, ..*traffic });
        self.level = self.look(&told, false, reply.sent, now);
        if self.is_news(reply) {
            let since = self.last_answer.map_or(0.0, |last| seconds(last, now));
            let calls = traffic.waiting.max(1) as f64;
            match self.level {
                Some(level) if level <= self.set_point() => {
                    let release = (RELEASE * since / self.scale.token_time).min(MOST_RELEASE);
                    let passed = f64::from(self.passed_since_refusal) / REFUSED_PASSED;
                    let factor = 1.0 + (REFUSED - 1.0) / (1.0 + passed);
                    self.n = (self.n * factor * (-release).exp()).max(FIRST_GUESS / calls);
                }
                Some(_) => {
                    let own = self.interval.unwrap_or(0.0) / self.scale.token_time;
                    self.m = REFUSED_SEEN * self.m.max(own);
                }
                None => {
                    let first = match self.interval {
                        // Where nothing at all is known, what was too fast is the measure.
                        Some(own) if self.scale.is_guess => own / self.scale.token_time,
                        _ => FIRST_GUESS_BLIND / calls,
                    };
                    self.m = (self.m * REFUSED_BLIND).max(first);
                }
            }
            self.last_step = Some(now);
        }
        self.passed_since_refusal = 0;
        self.last_refusal = Some(now);
        self.slot_before = slot;
        self.settle(now);
        let wait = self.scale.token_time * (PAUSE * self.n).max(self.m);
        let said = wait_said(reply.signal).map(|wait| wait.as_secs_f64());
        Pause::of_all(match said.or_else(|| self.scale.empty_until_reset(&told)) {
            Some(said) => {
                // Half of a new window may go at once, so one share of it is enough to spread them.
                let spread = self.scale.next_window().map_or(wait, |(_, share)| wait.min(self.n * share));
                span(dice.roll() * spread) + Duration::try_from_secs_f64(said).unwrap_or_default()
            }
            None => span(dice.between(0.5, 1.0) * wait),
        })
    }

    fn share(&mut self, notes: &mut Notes<'_>) -> bool {
        notes.near(&mut self.first_call, Duration::ZERO);
        notes.number(&mut self.n);
        notes.number(&mut self.m);
        notes.number(&mut self.drain);
        notes.maybe(&mut self.level);
        notes.near(&mut self.slot_before, span(LONGEST));
        notes.small(&mut self.passed_since_refusal);
        notes.moment(&mut self.last_answer);
        notes.moment(&mut self.last_refusal);
        notes.moment(&mut self.last_step);
        notes.moment(&mut self.last_sent);
        notes.maybe(&mut self.interval);
        notes.maybe(&mut self.place);
        self.scale.share(notes);
        self.trust.share(notes);
        self.bound();
        true
    }

    fn divide(&mut self, processes: u32) {
        // Each of the others is a competitor now, of the share that all had together: where more is left than the set point,
        // that was less than n.
        let processes = f64::from(processes);
        let share = self.share_of(0).unwrap_or(self.n).min(self.n).max(1.0);
        self.n = share * processes;
        self.m *= processes;
        self.drain *= processes;
        self.slot_before = None;
        self.bound();
    }
}
