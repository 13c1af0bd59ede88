//! The recommended pace. It estimates how many clients compete for the limit.

mod curve;
mod estimate;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod recovery_tests;
mod scale;
mod search;
#[cfg(test)]
mod search_properties;
mod short_window;
#[cfg(test)]
mod short_window_tests;
mod trust;

use std::time::{Duration, Instant};

use super::reading::{QuotaAnswer, QuotaNumbers, wait_said};
use super::{CallState, Dice, LONGEST, Pace, Pause, Reply, StateCodec, Traffic, seconds, span};
use estimate::Estimate;
use scale::Scale;
use search::Search;
use trust::Trust;

/// Estimates how many equal competitors share the limit, and takes one fair share. The recommended
/// pace.
///
/// It needs no coordination: independent clients settle at the same interval, with next to no
/// refusals. Each waits no longer than in a fair round robin. It works best if the answers state
/// what is left, and tolerates answers that do not, or that are wrong. Nothing has to be
/// configured; if responses state what is left, it settles faster with [`limit`](Fair::limit).
///
/// # How it works
///
/// Its unit is the token time `t0` = window / limit. Its state, for one key in one process or in a
/// fleet that shares it:
///
/// | | initially | meaning |
/// |---|---|---|
/// | `n` | 1 | the estimated number of equal competitors, this one included |
/// | `m` | 0 | the least interval, in token times, because of refusals that Remaining does not explain |
/// | `drain` | 1 | the tokens that all competitors take per request of ours, on average |
/// | `v` | unknown | the tokens left after the last answer |
///
/// The next request leaves `t0 x max(q, m)` after the last one. If `v` is unknown, `q` is 0.
/// Otherwise it is
///
/// ```text
/// n + 0.75 x (s - (v - in flight))              one fair share, corrected by shortage and surplus
/// at least min(r, r - v), r = s + drain         one token time for each token that is missing
/// ```
///
/// The set point `s` is the level that the pace aims at: 5 tokens, or a quarter of the limit if
/// that is less.
///
/// What is left works as a ticket number: clients that ask at the same instant read consecutive
/// values. A wait of one token time for each missing token spreads them one token time apart. `r`
/// grows with the speed at which all others drain the bucket, so clients slow down before it is
/// empty. Far above `r`, requests leave at once.
///
/// An answer that is not a refusal multiplies `n` by `exp(0.22 u)`, once in a round trip, and by
/// `exp(-0.0044 (1 - u))` for each token time since the answer before. `u` is 1 at an empty bucket
/// and 0 from twice the set point on. `n` grows per *request* and falls over *time*: a client that
/// is too fast asks more often, so its `n` grows more. That asymmetry makes the shares even. Growth
/// and release balance at `n = 50 u / (1 - u)`, the same for all clients. So the level of the very
/// first answer, if it is not a refusal, shows the `n` of earlier clients, and `n` starts there, at
/// most at 20.
///
/// A refusal multiplies `n` by `1 + 1 / (1 + p / 2)`, once in a round trip. `p` is the number of
/// our requests that passed since the refusal before: one refusal of few requests means more
/// competitors than one of many. The first refusal sets `n` to 5, divided by the number of requests
/// that wait. Then no request leaves for half to all of `2.5 n` token times. If the server states a
/// wait, no request leaves for that wait and up to `2.5 n` token times more. No request leaves
/// earlier than it would have without the refusal.
///
/// A refusal while plenty is left has another cause, such as a second limit or a wrong header. It
/// raises `m`, which falls again, slowly at first and then ever faster, so that the pace notices
/// when that limit is gone. If answers do not state what is left, a refusal multiplies `m` by 1.2.
/// `m` then starts at the interval that was too short, or at 7.5, divided by the number of requests that
/// wait, if the token time is known and a response has stated what is left.
///
/// - **The token time** is the configured one. Without it, a header that states limit and window
///   counts; then, for a bucket, Reset / (Limit - Remaining). Otherwise it is a guess that starts
///   at 0.3 s and falls when Remaining rises faster. `n` grows by the same factor, so that no
///   interval changes.
/// - **A fixed window** is a limit whose reset stays at the same moment while Remaining does not
///   rise. Half of the quota may be used at once; the other half is kept for an even pace. `v` is
///   Remaining minus a straight line from half of the limit to 0 at the reset. Below the line, the
///   rest is spread evenly over the rest of the window, and `n` grows by how much more than that
///   all clients take, `drain / n`. At a new window the pace starts afresh, and a client that was
///   refused in the old window sends within one share of the new one.
/// - **A window of at most 10 s** is placed by what is certain: if Remaining rises between two
///   responses, a window ended between the moment at which the earlier request left and the moment at
///   which the later response arrived. The bounds of all windows together become narrow. The quota is
///   used evenly: what is left is spread over the rest of the window, with one share of it for each
///   `n` clients. `u` is a half if just as much is used as by an even pace, for any of the possible ends.
///   If nothing is left, the next request leaves at the latest end of the window. `n` falls faster than in a bucket.
/// - **A sliding window of at most 10 s**, and a bucket that is filled as fast, are recognised because
///   Remaining rises little by little. The effect of a request lasts for a window, so Remaining is no
///   ticket number: a refusal raises `m`, as if nothing were stated. `m` falls by 0.2 % for each token
///   time that is unused, and is at least a half. The interval is `m` token times, times the used part of
///   the window, so a burst may use what is left.
/// - **A fast limit** refills more than 8 tokens in a round trip, 4 in a short window. So many requests
///   leave before a response shows the effect of one that all steps are smaller, and the set point is
///   higher, by the same factor.
/// - **A Remaining that is missing, negative, suddenly larger than the limit, or constant** is
///   ignored, and `m` takes over, at `n` if a request was ever refused. A value above the limit counts
///   if it was reached gradually, because a bucket may be larger than its limit. A constant value
///   counts while we take as much as is refilled, unless it is 0. If Remaining appears only after
///   refusals without it, `n` becomes what `m` has learned.
///
/// - **A server that states neither a limit nor what is left**, and of which this pace is the
///   [sole client](Fair::sole_client), is searched for its speed. What passes between the ends of two
///   outages is what the server allows, and the rate that was refused is what it does not allow. The
///   next rates lie between the two, and the distance narrows as in a bisection. Above the rate
///   that was refused last the speed rises slowly. A limit that is found again is tested less
///   often. Until the first refusal, the requests in flight grow by one in a round trip. Processes
///   that share the pace search, too, and so does every client of an unknown limit if the last
///   refusal stated a wait, and any stated more than a second. A sole client and processes that
///   share the pace also search before a sliding window of at most 10 s.
/// - **Refusals in a row** that state nothing are an outage: from the fourth on the speed stays, or from the
///   second on after 50 token times without a refusal, and from the fifth on the pause grows, up to 20 s. If nothing
///   passed before the first refusal, `m` is only a guess, which falls by a factor of e in 35 token times until the next
///   refusal. After an outage of six a search lowers its speed by at most a third. It starts again if nothing
///   passed before, or once if the outage took longer than 90 s and no rate is known.
/// - **A wait that a refusal states** is exceeded by at most a tenth if the limit is unknown.
///   Otherwise clients spread over their shares of the limit.
///
/// # Constants
///
/// | constant | value | effect of half / of one and a half times the value |
/// |---|---|---|
/// | set point | 5 tokens, or a quarter of the limit | fifty clients are refused more often / a bucket is emptied more slowly |
/// | growth | 0.22 for each answer at 0 | ten clients wait up to 24 s instead of 10 s / fifty wait longer |
/// | release | 0.0044 for each token time | slower to follow / fifty are refused more often |
/// | shortage | 0.75 token times for each token | slower to empty / fifty are refused more often |
/// | most that a first look makes of `n` | 20 | newcomers are refused more often / they wait longer |
/// | first guess of `n` after a refusal | 5 | refused more often / longer first waits |
/// | first guess of `m` without Remaining | 7.5 | ten are refused more often / fewer use less at first |
/// | factor after a refusal | 2 if no request passed since the last | below 1.3 it fails / fifty wait longer |
/// | pause | 2.5 `n` token times | refused more often / longer waits |
/// | kept of a window of more than 10 s | a half | bursts against an even pace later |
///
/// The shortage term reacts first. Each client samples once in `n` token times, so the loop gain is
/// 0.4 rad, far from where the level would oscillate. `n` follows in about 200 token times.
///
/// # What it is bad at
///
/// - Sliding windows that do not state their reset: a burst repeats one window later.
/// - Sliding windows of a few seconds with few requests: shares are uneven. One client uses 90 %, a
///   [sole client](Fair::sole_client) 94 %.
/// - Servers that state nothing: one client may use only a fifth of the limit, or less, unless it is a
///   [sole client](Fair::sole_client).
/// - Bursts in a window of at most 10 s: they are spread over the window.
/// - Hundreds of clients on an empty bucket: learning `n` from refusals alone takes about one
///   refusal per client and doubling.
#[derive(Clone, Debug, Default)]
pub struct Fair {
    start: f64,
    is_sole_client: bool,
    /// Whether processes share this pace.
    is_shared: bool,
    first_call: Option<Instant>,
    estimate: Estimate,
    search: Search,
    /// Whether responses state a limit, or plausibly what is left. Refusals alone may have stated it until now.
    is_told: bool,
    /// Whether the last refusal stated how long to wait.
    states_wait: bool,
    /// The longest wait that a refusal stated, in seconds.
    longest_wait: f64,
    /// How many refusals followed one another before the last one, each of a request that left after
    /// the one before.
    refused_in_row: u32,
    /// Whether the last refusals in a row followed a calm time.
    was_calm: bool,
    level: Option<f64>,
    scale: Scale,
    trust: Trust,
    /// The slot before the last refusal, until a request leaves. Only the pause may postpone it.
    slot_before: Option<Instant>,
    passed_since_refusal: u32,
    /// Whether a request was refused after another one had passed.
    has_met_limit: bool,
    last_answer: Option<Instant>,
    last_refusal: Option<Instant>,
    /// The last step up: growth, or a reaction to a refusal.
    last_step: Option<Instant>,
    last_sent: Option<Instant>,
    /// The average time between two of our requests, in seconds.
    interval: Option<f64>,
    /// The random part of its share of a new window after which this client starts.
    place: Option<f64>,
}

/// The set point, in tokens. From twice as many on, `n` does not grow.
const SET_POINT: f64 = 5.0;
/// Token times for each token of shortage.
const SHORTAGE: f64 = 0.75;
/// The pause after a refusal, in n token times.
const PAUSE: f64 = 2.5;
/// The most by which a pause is longer than the wait that a refusal states, as a fraction of it.
const LONGER: f64 = 0.1;
/// The largest `r`, in tokens.
const LONGEST_TICKET: f64 = 200.0;
/// `u` below the line of a window, when all clients together take just what they may.
const BELOW_USE: f64 = 0.2;
/// The weight of a new interval in the average.
const INTERVAL_WEIGHT: f64 = 0.05;
/// A stated wait of one second may be the shortest that a server states, and shows nothing of its limit.
const WHOLE_SECOND: f64 = 1.0;
/// From this number of refusals in a row before the last one on, the server is out.
const OUTAGE: u32 = 3;
/// The factor of the pause for each further refusal.
const LONGER_OUTAGE: f64 = 1.2;
/// The token times without a refusal that are a calm time.
const CALM: f64 = 50.0;
/// The longest pause of an outage, in seconds, unless one interval is longer. A server that is healthy again is used
/// after it.
const LONGEST_PAUSE: f64 = 20.0;

impl Fair {
    /// Creates a pace that knows nothing of the limit.
    pub fn new() -> Self {
        Fair::default()
    }

    /// Sets the limit, in requests per window. Default: unknown.
    ///
    /// A limit that is four times too high or too low still works, but less well. A limit that the
    /// server states in its headers need not be set.
    pub fn limit(mut self, limit: u32, window: Duration) -> Self {
        self.scale
            .configure(f64::from(limit.max(1)), window.as_secs_f64().max(1e-3));
        self
    }

    /// Sets the interval of each caller before the first answer. Default: zero, the first request
    /// leaves at once.
    ///
    /// If five callers wait, the first request leaves after a fifth of it.
    pub fn start_with(mut self, interval: Duration) -> Self {
        self.start = interval.as_secs_f64().min(LONGEST);
        self
    }

    /// States that no other client uses the limit. Default: other clients may use it.
    ///
    /// It matters for a server that states neither its limit nor what is left, and for a short sliding window. The pace then
    /// searches for the highest speed at which the server refuses next to nothing. Without it, the pace keeps
    /// at a speed that is fair to other clients, and may use only a fifth of the limit.
    ///
    /// Set it only if all requests that count against the limit pass through this pace. Two processes
    /// that each search get uneven shares, and are refused more often. If the processes of a fleet
    /// [share](crate::AdaptiveThrottleBuilder::store) the pace, it searches without this setting.
    pub fn sole_client(mut self) -> Self {
        self.is_sole_client = true;
        self
    }

    /// Returns the current interval between two requests, with `in_flight` requests in flight.
    #[cfg(test)]
    fn interval(&self, in_flight: usize) -> Duration {
        span(self.pace(in_flight))
    }

    /// Reports whether the pace searches for the speed, because no response states what is left, or because that is no guide.
    fn is_searching(&self) -> bool {
        match self.is_told {
            true => self.is_alone() && self.scale.sliding_rate().is_some(),
            false => self.is_alone() || (self.states_wait && self.longest_wait > WHOLE_SECOND),
        }
    }

    /// Reports whether all requests that count against the limit pass through this pace.
    fn is_alone(&self) -> bool {
        self.is_sole_client || self.is_shared
    }

    fn pace(&self, in_flight: usize) -> f64 {
        if self.is_searching() {
            return self.search.slot(in_flight);
        }
        let share = self.share_of(in_flight).unwrap_or(0.0);
        (self.scale.paced_time * share.max(self.estimate.m)).clamp(0.0, LONGEST)
    }

    /// Returns `q` of the type's docs: the interval in token times that follows from what is left.
    fn share_of(&self, in_flight: usize) -> Option<f64> {
        let (level, set_point) = (self.level?, self.scale.set_point());
        if self.scale.is_short() {
            return Some(self.estimate.n);
        }
        let shortage = SHORTAGE / self.scale.lag() * (set_point - (level - in_flight as f64));
        if self.scale.is_below {
            return Some((self.estimate.n + shortage.min(0.0)).max(0.0));
        }
        let ticket = LONGEST_TICKET
            .min(self.scale.limit() / 2.0)
            .min(set_point + self.estimate.drain);
        Some(
            (self.estimate.n + shortage)
                .max(ticket.min(ticket - level))
                .max(0.0),
        )
    }

    /// Reads what is left from an answer. Returns `None` if it is unknown.
    fn look(&mut self, mut answer: QuotaAnswer) -> Option<f64> {
        let was_blind = self.trust.is_silent();
        let limit = self.scale.known_limit(&answer.told);
        let believed = self.trust.believe(&answer, limit, self.scale.token_time);
        answer.told.remaining = believed;
        let states = believed.is_some() || answer.told.limit.is_some();
        if states && !self.is_told {
            if self.is_searching() {
                self.leave_search();
            }
            self.is_told = true;
        } else if self.is_told && !states && answer.passed && self.trust.is_missing() {
            self.return_to_search();
        }
        let slid = self.scale.sliding_rate().is_some();
        // While the limit slides, `m` has nothing to do with whether Remaining is believed.
        match (was_blind, self.trust.is_silent()) {
            _ if slid => {}
            (false, true) if self.level.is_some() && self.last_refusal.is_some() => {
                self.estimate.m = self.estimate.m.max(self.estimate.n);
            }
            (true, false) => self.estimate.m = 0.0,
            (false, false) if believed.is_some() && self.level.is_none() => {
                // Remaining appears for the first time: what m has learned before belongs to n.
                self.estimate.n = self.estimate.n.max(self.estimate.m);
                self.estimate.m = 0.0;
            }
            _ => {}
        }
        let (token_time, was_guess) = (self.scale.token_time, self.scale.is_guess);
        let level = self.scale.look(&answer);
        let sliding_rate = self.scale.sliding_rate();
        match (slid, sliding_rate) {
            (false, Some(rate)) => {
                self.search.start_at(rate);
                self.estimate.slides(true);
            }
            (true, None) => {
                if self.is_alone() {
                    self.leave_search();
                }
                self.estimate.slides(false);
            }
            _ => {}
        }
        if sliding_rate.is_some() {
            return None;
        }
        if was_guess && self.scale.is_short() {
            // The guess was too short, so `n` has made up for it.
            self.estimate.n *= (token_time / self.scale.token_time).min(1.0);
        }
        if self.scale.is_guess {
            // A better guess changes no interval, so clients with different guesses stay equal.
            self.estimate.n *= token_time / self.scale.token_time;
        }
        match level {
            Some(_) => level,
            None if self.trust.is_silent() => None,
            None => self.level.map(|level| level - 1.0),
        }
    }

    /// Keeps the interval that the search has reached.
    fn leave_search(&mut self) {
        self.estimate.m = self.search.reached() / self.scale.token_time;
    }

    /// Goes on as if nothing had ever been stated: only refusals state anything, or nothing does any more.
    fn return_to_search(&mut self) {
        let interval = self.pace(0);
        self.is_told = false;
        if self.is_searching() && interval > 0.0 {
            self.search.start_at(1.0 / interval);
        }
    }

    /// Takes an answer that another process shares late: what is known is newer, but by how much is
    /// uncertain, and many requests may have left since.
    fn passed_late(&mut self, reply: &Reply<'_>) {
        self.trust.passed();
        if let (Some(level), Some(said)) = (self.level, QuotaNumbers::of(reply.signal).remaining)
            && !self.scale.is_window()
        {
            self.level = Some(level.min(said));
        }
        self.passed_since_refusal = self.passed_since_refusal.saturating_add(1);
    }

    /// Returns `u` of the type's docs: 1 at an empty bucket, 0 from twice the set point on or if
    /// the level is unknown.
    fn used(&self) -> f64 {
        match self.level {
            Some(_) if self.scale.is_below => {
                (BELOW_USE * self.estimate.drain / self.estimate.n).min(1.0)
            }
            Some(level) => (1.0 - level / (2.0 * self.scale.set_point())).clamp(0.0, 1.0),
            None => 0.0,
        }
    }

    /// Reports whether the last refusals in a row are an outage, which says nothing of the limit. A limit with a window
    /// also refuses some in a row, but soon after those before.
    fn is_outage(&self) -> bool {
        self.refused_in_row >= if self.was_calm { 1 } else { OUTAGE }
    }

    /// Reports whether the answer's request left after the last step up, so that the answer shows
    /// the effect of the step.
    fn is_news(&self, reply: &Reply<'_>) -> bool {
        self.last_step.is_none_or(|step| reply.sent > step)
    }

    /// Takes in a refusal that shows the effect of the last step. `passed` requests have passed since the refusal before it,
    /// which was at `refused_before`.
    fn learn_from_refusal(
        &mut self,
        passed: u32,
        refused_before: Option<Instant>,
        traffic: &Traffic,
    ) {
        let now = traffic.now;
        self.refused_in_row = match passed {
            0 => self.refused_in_row.saturating_add(1),
            _ => 0,
        };
        if self.refused_in_row == 0 {
            let calm = refused_before.or(self.first_call);
            let calm = calm.map_or(0.0, |since| seconds(since, now));
            self.was_calm = calm / self.scale.token_time > CALM;
        }
        let since = self.last_answer.map_or(0.0, |last| seconds(last, now));
        let waiting = traffic.waiting.max(1) as f64;
        match self.level {
            Some(level)
                if level <= self.scale.set_point()
                    || self.scale.short.exhausted_until(0).is_some() =>
            {
                self.estimate
                    .refused_at_low_level(&self.scale, passed, waiting, since)
            }
            Some(_) => self
                .estimate
                .refused_at_high_level(&self.scale, self.interval),
            // The server is out, which says nothing of its limit. Only the pause grows.
            None if self.is_outage() => {}
            None => self
                .estimate
                .refused_blind(&self.scale, waiting, self.interval),
        }
    }

    /// Returns the pause after a refusal that states a wait of `said` seconds, if it states one.
    fn pause_after_refusal(
        &self,
        said: Option<f64>,
        told: &QuotaNumbers,
        now: Instant,
        dice: &mut Dice,
    ) -> Pause {
        let wait = self.scale.token_time * (PAUSE * self.estimate.n).max(self.estimate.m);
        let wait = match self.level {
            Some(_) => wait,
            None => {
                let longer = f64::from(self.refused_in_row.saturating_sub(OUTAGE));
                (wait * LONGER_OUTAGE.powf(longer)).min(wait.max(LONGEST_PAUSE))
            }
        };
        let is_unknown = self.scale.is_guess;
        let reset = self.scale.empty_until_reset(told, now);
        Pause::of_all(match said.or(reset) {
            Some(least) if said.is_some() && is_unknown => stated(least, dice.roll() * wait),
            Some(least) => {
                // Half of a new window may be used at once, so one share of it spreads the requests
                // enough.
                let spread = self
                    .scale
                    .next_window()
                    .map_or(wait, |(_, share)| wait.min(self.estimate.n * share));
                span(dice.roll() * spread) + Duration::try_from_secs_f64(least).unwrap_or_default()
            }
            None => span(dice.between(0.5, 1.0) * wait),
        })
    }

    fn settle(&mut self, now: Instant) {
        self.estimate.bound(&self.scale);
        self.last_answer = Some(now);
    }
}

/// Returns the pause after a refusal that states a wait of `said` seconds: up to `more` seconds
/// longer, and at most [`LONGER`] of what is stated.
fn stated(said: f64, more: f64) -> Duration {
    // A wait of zero is a part of a second that was rounded down.
    let most = if said > 0.0 { LONGER * said } else { more };
    span(more.min(most)) + Duration::try_from_secs_f64(said).unwrap_or_default()
}

impl Pace for Fair {
    fn arrived(&mut self, _: &mut CallState, traffic: &Traffic, dice: &mut Dice) -> Duration {
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
        if self.is_searching() {
            return Some(slot);
        }
        if let Some(ends) = self.scale.short.exhausted_until(traffic.in_flight) {
            // Before the end the server would refuse it.
            return Some(slot.max(ends));
        }
        if let Some(ends) = self.scale.short.ends() {
            let even = last + span(self.scale.token_time * self.estimate.n);
            return Some(slot.min(ends.max(even)));
        }
        let Some((reset_at, share)) = self.scale.next_window() else {
            return Some(slot);
        };
        if self.estimate.m > 0.0 {
            return Some(slot);
        }
        Some(
            slot.min(
                last.max(reset_at) + span(self.place.unwrap_or(0.0) * self.estimate.n * share),
            ),
        )
    }

    fn sent(&mut self, traffic: &Traffic) {
        self.slot_before = None;
        let Traffic {
            now,
            in_flight,
            last_sent,
            ..
        } = *traffic;
        self.search.sent(last_sent, in_flight, now);
        if let Some(last) = self.last_sent.replace(traffic.now) {
            let interval = seconds(last, traffic.now);
            let mean = self.interval.get_or_insert(interval);
            *mean += INTERVAL_WEIGHT * (interval - *mean);
        }
    }

    fn passed(&mut self, reply: &mut Reply<'_>, traffic: &Traffic, _: &mut Dice) {
        let (now, is_alone) = (traffic.now, self.is_alone());
        if self.last_answer.is_some_and(|last| now < last) {
            self.search
                .passed(reply.sent, now, self.states_wait, is_alone);
            return self.passed_late(reply);
        }
        self.scale.answered_after(seconds(reply.sent, now));
        let level_before = self.level;
        self.level = self.look(QuotaAnswer {
            told: QuotaNumbers::of(reply.signal),
            passed: true,
            sent: reply.sent,
            now,
        });
        self.search
            .passed(reply.sent, now, self.states_wait, is_alone);
        let since = self.last_answer.map_or(0.0, |last| seconds(last, now));
        let calm = self.last_refusal.map_or(0.0, |last| seconds(last, now));
        let (scale, knows_level) = (&self.scale, self.level.is_some());
        match scale.short.sliding_unused() {
            Some(unused) if !self.trust.is_silent() => {
                self.estimate.relax_sliding(scale, since, unused)
            }
            _ if scale.is_guess && !self.has_met_limit => self.estimate.relax_guess(scale, since),
            _ => self.estimate.relax_m(scale, since, calm, knows_level),
        }
        if let (Some(level), Some(before)) = (self.level, level_before) {
            self.estimate.track_drain(scale, level, before, since);
        }
        let used = self.used();
        if self.last_answer.is_none() {
            self.estimate.seed_n(&self.scale, used);
        }
        // Once in a round trip, unless the steps are small.
        if used > 0.0 && (self.scale.is_short() || self.scale.lag() > 1.0 || self.is_news(reply)) {
            self.estimate.grow_n(&self.scale, used);
            self.last_step = Some(now);
        }
        self.estimate
            .release_n(&self.scale, used, since, knows_level);
        self.passed_since_refusal = self.passed_since_refusal.saturating_add(1);
        self.settle(now);
    }

    fn refused(&mut self, reply: &mut Reply<'_>, traffic: &Traffic, dice: &mut Dice) -> Pause {
        let now = traffic.now;
        let told = match self.trust.is_missing() {
            true => QuotaNumbers::default(),
            false => QuotaNumbers::of(reply.signal),
        };
        let slot = self.slot(&Traffic {
            in_flight: traffic.in_flight + 1,
            ..*traffic
        });
        self.level = self.look(QuotaAnswer {
            told,
            passed: false,
            sent: reply.sent,
            now,
        });
        let said = wait_said(reply.signal).map(|wait| wait.as_secs_f64());
        let was_searching = self.is_searching();
        self.states_wait = said.is_some();
        self.longest_wait = self.longest_wait.max(said.unwrap_or(0.0));
        let is_news = self.is_news(reply);
        let passed = std::mem::take(&mut self.passed_since_refusal);
        let refused_before = self.last_refusal.replace(now);
        self.has_met_limit |= is_news && passed > 0;
        if self.is_searching() {
            // In an outage only the pause postpones a request.
            let was_outage = was_searching && self.search.interval() == 0.0;
            self.slot_before = slot.filter(|_| !was_outage);
            let wait = self.search.refused(reply.sent, now, dice);
            self.settle(now);
            return Pause::of_all(match said {
                Some(said) => stated(said, wait),
                None => span(wait),
            });
        }
        if was_searching {
            self.leave_search();
        }
        if is_news {
            self.learn_from_refusal(passed, refused_before, traffic);
            self.last_step = Some(now);
        }
        self.slot_before = slot;
        self.settle(now);
        self.pause_after_refusal(said, &told, now, dice)
    }

    fn share(&mut self, codec: &mut StateCodec<'_>) -> bool {
        self.is_shared |= codec.is_for_others();
        codec.near(&mut self.first_call, Duration::ZERO);
        codec.flag(&mut self.is_told);
        codec.flag(&mut self.states_wait);
        codec.number(&mut self.longest_wait);
        codec.small_count(&mut self.refused_in_row);
        codec.flag(&mut self.was_calm);
        self.search.share(codec);
        self.estimate.share(codec);
        codec.optional_number(&mut self.level);
        codec.near(&mut self.slot_before, span(LONGEST));
        codec.small_count(&mut self.passed_since_refusal);
        codec.flag(&mut self.has_met_limit);
        codec.moment(&mut self.last_answer);
        codec.moment(&mut self.last_refusal);
        codec.moment(&mut self.last_step);
        codec.moment(&mut self.last_sent);
        codec.optional_number(&mut self.interval);
        codec.optional_number(&mut self.place);
        self.scale.share(codec);
        self.trust.share(codec);
        self.estimate.bound(&self.scale);
        true
    }

    fn divide(&mut self, processes: u32) {
        // Each of the other processes is now a competitor for the share that all had together.
        // Above the set point that share was less than n.
        let processes = f64::from(processes);
        let share = self
            .share_of(0)
            .unwrap_or(self.estimate.n)
            .min(self.estimate.n)
            .max(1.0);
        self.estimate.divide(share, processes);
        self.search.divide(processes);
        self.slot_before = None;
        self.estimate.bound(&self.scale);
    }
}
