//! What the upstream sees, and the count of it by brute force. All moments are in microseconds since the
//! history began.

use std::collections::BTreeMap;

use super::dice;
use super::features::{Feature, Features};
use super::plan::{Part, Rate};

/// A key of a limiter.
pub(crate) type KeyOf = (usize, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unit {
    Requests,
    Tokens,
}

/// Units that the upstream counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) at: u64,
    pub(crate) units: u32,
    /// By how much more than the estimate that is.
    pub(crate) underestimated: u32,
    /// From when on the store knows it.
    pub(crate) known_at: Option<u64>,
}

/// A change of a quota: when it was asked for, since when it is certain, and what it is in per cent of
/// the configured quota. `None`: it is not known whether it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) asked: u64,
    pub(crate) done: u64,
    pub(crate) percent: u32,
    pub(crate) is_certain: bool,
}

/// A hold, or a release.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HoldEvent {
    pub(crate) key: KeyOf,
    pub(crate) process: usize,
    pub(crate) asked: u64,
    /// When it was certain.
    pub(crate) at: u64,
    /// Until when the key is on hold. `None`: a release.
    pub(crate) until: Option<u64>,
    /// Whether only this process is known to have learned of it.
    pub(crate) is_private: bool,
}

/// A bad answer, and the time of its call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BadAnswer {
    pub(crate) sent: u64,
    pub(crate) at: u64,
}

/// What equal requests of a process have in common.
pub(crate) type Line = (usize, Vec<Part>, Option<&'static str>);

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) uses: BTreeMap<(usize, u8, Unit), Vec<Use>>,
    /// From when until when calls were in flight.
    pub(crate) calls: BTreeMap<KeyOf, Vec<(u64, u64)>>,
    /// The requests of a line that got permits: their numbers, and when.
    pub(crate) grants: BTreeMap<Line, Vec<(usize, u64)>>,
    pub(crate) holds: Vec<HoldEvent>,
    /// Refusals without a stated wait: tollgate chooses for how long they hold their key.
    pub(crate) unstated: Vec<(KeyOf, u64)>,
    /// How many requests of a key were accepted since one was refused. After some, a refusal may hold one kind of
    /// requests alone.
    pub(crate) accepted: BTreeMap<KeyOf, u32>,
    pub(crate) changes: BTreeMap<KeyOf, Vec<Change>>,
    pub(crate) bad: BTreeMap<KeyOf, Vec<BadAnswer>>,
    /// How often each request has arrived, and how often it has ended.
    pub(crate) arrivals: BTreeMap<usize, u32>,
    pub(crate) ends: BTreeMap<usize, u32>,
    pub(crate) met: Features,
    /// What happened, in its order, if somebody wants to read it: see [`note`](Log::note).
    pub(crate) transcript: Vec<String>,
    pub(crate) wrong: Vec<String>,
}

impl Log {
    pub(crate) fn met(&mut self, feature: Feature) {
        self.met.add(feature);
    }

    /// Writes a line of the transcript.
    pub(crate) fn note(&mut self, at: u64, text: impl FnOnce() -> String) {
        if dice::is_transcribed() {
            self.transcript.push(format!("{at} {}", text()));
        }
    }

    pub(crate) fn wrong(&mut self, at: u64, text: &str) {
        if self.wrong.len() < 20 {
            self.wrong
                .push(format!("at {:.3} s: {text}", at as f64 / 1e6));
        }
    }
}

/// Returns the first excess of `rate` in the `uses`, which are in the order of time. `more` returns how
/// much more a window with these uses may have.
pub(crate) fn over(rate: Rate, uses: &[Use], more: impl Fn(&[Use]) -> u64) -> Option<String> {
    match rate {
        Rate::Sliding { count, window } => {
            let (window, mut end, mut sum) = (window * 1000, 0, 0_u64);
            uses.iter().enumerate().find_map(|(first, from)| {
                while end < uses.len() && uses[end].at < from.at + window {
                    sum += u64::from(uses[end].units);
                    end += 1;
                }
                let inside = sum;
                sum -= u64::from(from.units);
                let may = u64::from(count);
                (inside > may && inside > may + more(&uses[first..end]))
                    .then(|| format!("{inside} of {rate:?} from {:.3} s on", from.at as f64 / 1e6))
            })
        }
        Rate::Fixed { count, window } => {
            let mut windows = BTreeMap::<u64, Vec<Use>>::new();
            for one in uses {
                windows
                    .entry(one.at / (window * 1000))
                    .or_default()
                    .push(*one);
            }
            windows.into_iter().find_map(|(number, inside)| {
                let units: u64 = inside.iter().map(|one| u64::from(one.units)).sum();
                (units > u64::from(count) + more(&inside)).then(|| {
                    let moments: Vec<u64> = inside.iter().map(|one| one.at).collect();
                    format!(
                        "{units} of {rate:?} in the window from {:.3} s on, at {moments:?} us",
                        (number * window) as f64 / 1e3
                    )
                })
            })
        }
        Rate::Bucket {
            capacity,
            count,
            window,
        } => {
            let (full, per_micro) = (
                f64::from(capacity),
                f64::from(count) / (window * 1000) as f64,
            );
            let (mut level, mut last) = (full, 0);
            uses.iter().enumerate().find_map(|(index, one)| {
                level =
                    (level + (one.at - last) as f64 * per_micro).min(full) - f64::from(one.units);
                last = one.at;
                let slack = more(&uses[..=index]) as f64;
                (level + slack < -1e-6)
                    .then(|| format!("{level:.2} in {rate:?} at {:.3} s", one.at as f64 / 1e6))
            })
        }
    }
}

/// Returns what the requests of a window were underestimated by, at the moment at which that was most.
/// Slots are booked up to 50 ms ahead.
pub(crate) fn underestimated(window: &[Use]) -> u64 {
    let unknown = |moment: u64| {
        let sent = window.iter().filter(|one| one.at <= moment);
        let unknown = sent.filter(|one| one.known_at.is_none_or(|known| known + 60_000 >= moment));
        unknown.map(|one| u64::from(one.underestimated)).sum()
    };
    window.iter().map(|one| unknown(one.at)).max().unwrap_or(0)
}

/// Returns the most calls at the same time.
pub(crate) fn most_at_once(calls: &[(u64, u64)]) -> u32 {
    let ends = calls
        .iter()
        .filter(|(from, to)| from < to)
        .map(|(_, to)| (*to, -1));
    let starts = calls
        .iter()
        .filter(|(from, to)| from < to)
        .map(|(from, _)| (*from, 1));
    let mut all: Vec<(u64, i32)> = ends.chain(starts).collect();
    all.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, change) in all {
        now += change;
        most = most.max(now);
    }
    most.unsigned_abs()
}
