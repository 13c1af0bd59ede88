//! Why a request would wait now, or be refused: the answer, and its words.

use std::fmt;
use std::time::Duration;

use crate::error::{Reason, whole_millis};
use crate::quota::Limit;
use crate::stats::Cause;

/// Why a request would wait now, or be refused, as
/// [`Limiter::explain`](crate::Limiter::explain), [`Acquire::explain`](super::Acquire::explain) and
/// [`Throttle::explain`](crate::Throttle::explain) return it.
///
/// Its `Display` is a text of several lines for a person:
///
/// ```text
/// github, key 3f9a01bc: a request now would wait 312ms, because 50/1s is used up
///   50/1s    50 used, 0 free; free in 312ms
///   5000/1h  1204 used, 3796 free
///   hold     none
///   waiting  12 here, the first for 800ms
///   at hand  0
/// ```
///
/// That of a [`Throttle`](crate::Throttle):
///
/// ```text
/// search, key all: a request now would wait 1.3s, because 12 requests leave before it
///   pace       one request every 100ms; the next in 50ms
///   hold       none
///   waiting    12 here, the first for 800ms
///   in flight  3 here
/// ```
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Explanation {
    /// What would happen to the request. The waits of a throttle are estimates, because each response
    /// may change the pace.
    pub verdict: Verdict,
    text: Box<str>,
}

impl Explanation {
    pub(crate) fn new(verdict: Verdict, text: String) -> Self {
        Explanation {
            verdict,
            text: text.into(),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What would happen to a request.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It would leave at once.
    Goes,
    /// It would wait.
    Waits {
        /// For how long, if nothing changes. `None` if that is not known, as for the end of calls in
        /// flight.
        wait: Option<Duration>,
        /// What for.
        because: Because,
    },
    /// It would be refused.
    Refused {
        /// The reason in its error.
        reason: Reason,
        /// When a new attempt may succeed. `None` if that is not known.
        retry_after: Option<Duration>,
        /// What it would have had to wait for. `None` if `reason` says all.
        because: Option<Because>,
    },
}

/// What a request waits for.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Because {
    /// The key is on hold.
    Held,
    /// After a hold, the first request tests whether the upstream accepts requests again. The others
    /// wait for its response.
    Probing,
    /// The store has lost its state, and grants nothing until the permits from before are over.
    Recovering,
    /// The limit of calls in flight is used up.
    InFlight(Limit),
    /// The limit is used up. Of several such limits, this one allows the request last.
    Limit(Limit),
    /// What is left of the limit is reserved for clients that do not share the store.
    Reserved(Limit),
    /// Other requests leave before it: those of this process, or of all that share the pace of a
    /// [`Throttle`](crate::Throttle).
    Queue {
        /// How many.
        before: usize,
    },
    /// The pace of a [`Throttle`](crate::Throttle) lets the next request leave later.
    Pace,
}

/// The hold of a key, and its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// How long the key stays on hold.
    pub(crate) left: Duration,
    /// Why it was put on hold. `None` if this process has learned of the hold from the store.
    pub(crate) cause: Option<Cause>,
    /// How long ago this process put the key on hold, or learned that another process did. `None` if
    /// `cause` is.
    pub(crate) age: Option<Duration>,
}

impl Verdict {
    /// How bad it is. A refusal is worse than any wait, and an unknown time worse than any other.
    pub(super) fn severity(&self) -> (u8, Duration) {
        match *self {
            Verdict::Goes => (0, Duration::ZERO),
            Verdict::Waits { wait, .. } => (1, wait.unwrap_or(Duration::MAX)),
            Verdict::Refused { retry_after, .. } => (2, retry_after.unwrap_or(Duration::MAX)),
        }
    }

    /// Writes what would happen, after the words "a request".
    pub(crate) fn write(
        &self,
        f: &mut fmt::Formatter<'_>,
        because: impl Fn(&mut fmt::Formatter<'_>, Because) -> fmt::Result,
    ) -> fmt::Result {
        match self {
            Verdict::Goes => f.write_str("now would leave at once"),
            Verdict::Waits {
                wait,
                because: cause,
            } => {
                f.write_str("now would wait ")?;
                match wait {
                    Some(wait) => write!(f, "{}", Shown(*wait))?,
                    None => f.write_str("for an unknown time")?,
                }
                f.write_str(", because ")?;
                because(f, *cause)
            }
            Verdict::Refused {
                reason,
                retry_after,
                because: cause,
            } => {
                f.write_str("now would be refused")?;
                match (reason, cause) {
                    (Reason::Held, Some(_)) => f.write_str(", because ")?,
                    (reason, Some(_)) => write!(f, ": {reason}; ")?,
                    (reason, None) => write!(f, ": {reason}")?,
                }
                if let Some(cause) = cause {
                    because(f, *cause)?;
                }
                match retry_after {
                    Some(retry_after) => write!(f, "; retry in {}", Shown(*retry_after)),
                    None => Ok(()),
                }
            }
        }
    }
}

impl Because {
    /// Returns the limit that is used up, if that is what a request waits for.
    pub(crate) fn limit(&self) -> Option<Limit> {
        match *self {
            Because::InFlight(limit) | Because::Limit(limit) | Because::Reserved(limit) => {
                Some(limit)
            }
            _ => None,
        }
    }

    /// Returns the name of the cause, as in a trace.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Because::Held => "hold",
            Because::Probing => "probe",
            Because::Recovering => "recovery",
            Because::InFlight(_) => "in_flight",
            Because::Limit(_) => "rate",
            Because::Reserved(_) => "reserved",
            Because::Queue { .. } => "queue",
            Because::Pace => "pace",
        }
    }

    /// Writes what a request waits for. Limits count `unit`, and the key has this `hold`.
    pub(crate) fn write(
        self,
        f: &mut fmt::Formatter<'_>,
        hold: Option<&Held>,
        unit: Option<&'static str>,
    ) -> fmt::Result {
        match self {
            Because::Held => f.write_str(match hold.and_then(|hold| hold.cause) {
                Some(Cause::Upstream | Cause::UsedUp) => "the upstream has put its key on hold",
                Some(Cause::Kind) => "the upstream refuses its kind of requests",
                Some(Cause::Operator) => "hold_for has put its key on hold",
                Some(Cause::Guard) => "the ban guard has put its key on hold",
                Some(Cause::Elsewhere) | None => "its key is on hold",
            }),
            Because::Probing => f.write_str("a probe tests whether the upstream accepts requests"),
            Because::Recovering => f.write_str("the store has lost its state"),
            Because::InFlight(limit) => write!(f, "the limit of {limit} is used up"),
            Because::Limit(limit) => write!(f, "{} is used up", limit.counting(unit)),
            Because::Reserved(limit) => {
                let limit = limit.counting(unit);
                write!(f, "the rest of {limit} is reserved for other clients")
            }
            Because::Queue { before: 1 } => f.write_str("1 request leaves before it"),
            Because::Queue { before } => write!(f, "{before} requests leave before it"),
            Because::Pace => f.write_str("the pace lets the next request leave later"),
        }
    }
}

impl Held {
    /// Writes how long a hold lasts, and its cause.
    pub(crate) fn write(hold: Option<&Held>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(&Held { left, cause, age }) = hold else {
            return f.write_str("none");
        };
        write!(f, "{} left", Shown(left))?;
        if let Some(age) = age {
            write!(f, ", since {}", Shown(age))?;
        }
        f.write_str(": ")?;
        f.write_str(match cause {
            Some(Cause::Upstream) => "the upstream refused a request of this process",
            Some(Cause::UsedUp) => "the upstream stated that nothing is left of a quota",
            Some(Cause::Kind) => "the upstream refuses this kind of requests",
            Some(Cause::Operator) => "hold_for of this process",
            Some(Cause::Guard) => "the ban guard of this process",
            Some(Cause::Elsewhere) => "another process or limiter",
            None => "known from the store",
        })
    }
}

/// A time for a person, rounded up: `0.4ms`, `312ms`, `1.02s`, `42s`, `5min`. Up to 10 s, it has the
/// milliseconds that the error of a refusal has.
pub(crate) struct Shown(pub(crate) Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_nanos().div_ceil(1000);
        match micros {
            0..10_000 => {
                let tenths = micros.div_ceil(100);
                match tenths % 10 {
                    0 => write!(f, "{}ms", tenths / 10),
                    rest => write!(f, "{}.{rest}ms", tenths / 10),
                }
            }
            10_000..999_001 => write!(f, "{}ms", micros.div_ceil(1000)),
            999_001..9_999_001 => write!(f, "{:?}", whole_millis(self.0)),
            9_999_001..599_000_001 => write!(f, "{}s", micros.div_ceil(1_000_000)),
            599_000_001..7_140_000_001 => write!(f, "{}min", micros.div_ceil(60_000_000)),
            _ => write!(f, "{}h", micros.div_ceil(3_600_000_000)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short_and_rounded_up() {
        let shown = |micros| Shown(Duration::from_micros(micros)).to_string();
        let table = [
            (0, "0ms"),
            (1, "0.1ms"),
            (400, "0.4ms"),
            (9_900, "9.9ms"),
            (9_901, "10ms"),
            (311_001, "312ms"),
            (999_000, "999ms"),
            (999_001, "1s"),
            (1_020_000, "1.02s"),
            (1_700_001, "1.701s"),
            (9_900_000, "9.9s"),
            (9_999_001, "10s"),
            (41_000_001, "42s"),
            (599_000_000, "599s"),
            (599_000_001, "10min"),
            (7_140_000_000, "119min"),
            (7_140_000_001, "2h"),
        ];
        for (micros, text) in table {
            assert_eq!(shown(micros), text, "{micros} us");
        }
    }
}
