//! The text of an explanation: what would happen to a request, and what was found for each of its keys.

use std::fmt;
use std::time::{Duration, Instant};

use super::found::Found;
use crate::cost::Cost;
use crate::limiter::explanation::{Held, Shown, Verdict};
use crate::limiter::key_state::StatedLimit;
use crate::limiter::part::NewPart;
use crate::limiter::status::QuotaSource;
use crate::quota::Limit;
use crate::stats::Engine;
use crate::store::LimitUsage;

/// The text about a request.
pub(super) struct RequestText<'a> {
    pub(super) verdict: &'a Verdict,
    /// One for each key of the request, and for each [unit](crate::Quota::of) that the limits of a key
    /// count.
    pub(super) keys: Vec<KeyText<'a>>,
    /// Which of `keys` the verdict is about.
    pub(super) decisive: usize,
}

/// The text about one key of a request.
pub(super) struct KeyText<'a> {
    pub(super) part: &'a NewPart,
    pub(super) found: &'a Found,
    /// The name of the key, as in [`KeyStats::name`](crate::stats::KeyStats::name).
    pub(super) name: Box<str>,
    pub(super) now: Instant,
}

impl fmt::Display for RequestText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(decisive) = self.keys.get(self.decisive) else {
            return Ok(());
        };
        decisive.heading(f)?;
        f.write_str(" a request ")?;
        let (cost, unit) = (decisive.part.entry.cost, decisive.unit());
        if cost != 1 || unit.is_some() {
            let (space, unit) = unit.map_or(("", ""), |unit| (" ", unit));
            write!(f, "that costs {cost}{space}{unit} ")?;
        }
        self.verdict.write(f, |f, because| {
            because.write(f, decisive.hold().as_ref(), unit)
        })?;
        if *self.verdict == Verdict::Goes && decisive.found.usage.is_err() {
            f.write_str(", uncounted")?;
        }
        decisive.topics(f)?;
        for (index, other) in self.keys.iter().enumerate() {
            if index != self.decisive {
                f.write_str("\n")?;
                other.heading(f)?;
                other.topics(f)?;
            }
        }
        Ok(())
    }
}

impl KeyText<'_> {
    fn heading(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, key {}:", self.part.core.tally().name(), self.name)
    }

    /// Writes what was found, in a line for each topic.
    fn topics(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeyText { part, found, .. } = *self;
        let outlook = &found.outlook;
        let unit = self.unit();
        let named = self.limits().iter().map(|usage| match usage.limit {
            Limit::InFlight { .. } => usage.limit.to_string(),
            limit => limit.counting(unit).to_string(),
        });
        let named: Vec<String> = named.collect();
        let width = named.iter().map(String::len).max().unwrap_or(0);
        let width = width.max("waiting".len());
        let topic = |f: &mut fmt::Formatter<'_>, name: &str| write!(f, "\n  {name:width$}  ");
        for (name, usage) in named.iter().zip(self.limits()) {
            topic(f, name)?;
            write!(f, "{} used, {} free", usage.used, usage.free)?;
            if usage.reserved > 0 {
                write!(f, ", {} reserved for other clients", usage.reserved)?;
            }
            if usage.wait == Duration::MAX && usage.is_in_flight() {
                write!(f, "; free when a call ends")?;
            } else if usage.wait == Duration::MAX {
                write!(f, "; allows no such request")?;
            } else if !usage.wait.is_zero() {
                write!(f, "; free in {}", Shown(usage.wait))?;
            }
        }
        let quota_source = self.quota_source();
        if quota_source != QuotaSource::Builder {
            topic(f, "quota")?;
        }
        match quota_source {
            QuotaSource::Builder => {}
            QuotaSource::Upstream { left } => {
                write!(f, "learned from the upstream, ends in {}", Shown(left))?;
            }
            QuotaSource::Route => f.write_str("that of its route")?,
            QuotaSource::Request => f.write_str("stated by requests")?,
            QuotaSource::Set { left } => {
                let left = Shown(left);
                write!(f, "set by an operator, kept for {left} if it is not used")?;
            }
        }
        topic(f, "hold")?;
        Held::write(self.hold().as_ref(), f)?;
        if outlook.kinds > 0 {
            topic(f, "kinds")?;
            write!(
                f,
                "{} on hold, which the upstream refuses while it accepts others",
                outlook.kinds
            )?;
        }
        topic(f, "waiting")?;
        // A request of several keys counts at the first.
        let (waiting, since) = part.core.tally().waiting_of(part.entry.key);
        write!(f, "{waiting} here")?;
        if let Some(since) = since {
            let oldest = self.now.saturating_duration_since(since);
            write!(f, ", the first for {}", Shown(oldest))?;
        }
        topic(f, "at hand")?;
        write!(f, "{}", outlook.at_hand)?;
        if !self.is_known() {
            topic(f, "known")?;
            f.write_str("no request of this key")?;
        }
        for StatedLimit { limit, name, .. } in &outlook.learned {
            topic(f, "learned")?;
            let limit = limit.counting(unit);
            match name {
                Some(name) => write!(f, "{name:?} states {limit}")?,
                None => write!(f, "the upstream states {limit}")?,
            }
        }
        let store = match &found.usage {
            Err(error) => error.to_string(),
            Ok(usage) if usage.degraded => "unreachable; limits are the fallback share".to_owned(),
            Ok(usage) if !usage.recovering.is_zero() => {
                format!("lost its state, recovers in {}", Shown(usage.recovering))
            }
            Ok(_) => match found.took {
                Some(took) => format!("answered in {}", Shown(took)),
                // It is in this process.
                None => return Ok(()),
            },
        };
        topic(f, "store")?;
        f.write_str(&store)
    }

    /// Returns the unit of the limits. `None` for requests, which are not written.
    fn unit(&self) -> Option<&'static str> {
        let unit = self.part.core.unit();
        unit.filter(|unit| *unit != Cost::REQUESTS)
    }

    /// Returns each limit that applies to the key, with the wait of this request. There is none if the store has
    /// failed.
    fn limits(&self) -> &[LimitUsage] {
        self.found.usage.as_ref().map_or(&[], |usage| &usage.limits)
    }

    fn hold(&self) -> Option<Held> {
        let outlook = &self.found.outlook;
        let left = self.found.held()?;
        let origin = outlook.held.and(outlook.origin);
        Some(Held {
            left,
            cause: origin.map(|origin| origin.cause),
            age: origin.map(|origin| self.now.saturating_duration_since(origin.since)),
        })
    }

    fn quota_source(&self) -> QuotaSource {
        let usage = self.found.usage.as_ref().ok();
        let set = usage.and_then(|usage| usage.set_quota.as_deref());
        let stated = self.found.outlook.stated;
        QuotaSource::of(set, stated, &self.part.core.settings.quotas)
    }

    /// Returns whether a request of the key is known, lately and here or in the store, or may be. If not, it may be
    /// another key than that of the caller's requests: the one of
    /// [`and_per`](crate::RateLimitBuilder::and_per) is `key.and(name)`.
    fn is_known(&self) -> bool {
        let is_in_store = match &self.found.usage {
            Err(_) => true,
            Ok(usage) => {
                !usage.recovering.is_zero() || usage.limits.iter().any(|usage| usage.used > 0)
            }
        };
        let NewPart { core, entry, .. } = self.part;
        is_in_store
            || self.hold().is_some()
            || self.quota_source() != QuotaSource::Builder
            || core.states.find(entry.key, |_| ()).is_some()
    }
}
