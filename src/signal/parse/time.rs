//! Parses time values: one reader for waits, resets and windows.
//!
//! A value is a number (its size decides whether it is a span or a moment), a span with units, or a
//! date. Moments are converted to spans by the server's own clock, the header `Date`, if it is
//! credible: that cancels the difference between the two clocks.

use crate::signal::generic::words;
use crate::signal::parse::date;
use crate::signal::parse::number::{Number, Parts, unquoted};

/// The longest span, 366 days; longer ones are cut to this.
pub(in crate::signal) const LONGEST: u64 = 366 * 86_400_000;

/// One millisecond, in the unit in which spans are added up: 10^-15 s.
const MILLI: u128 = 1_000_000_000_000;
const SECOND: u128 = 1000 * MILLI;

/// When the response arrived, by both clocks, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Base {
    pub(in crate::signal) now: i64,
    pub(in crate::signal) date: Option<i64>,
}

impl Base {
    /// Returns the span until a moment; 0 if the moment is over.
    fn until(&self, moment: i64) -> u64 {
        let after = |base: i64| u64::try_from(moment.saturating_sub(base)).unwrap_or(0);
        match self.date.map(after) {
            Some(span) if span <= LONGEST => span,
            _ => after(self.now).min(LONGEST),
        }
    }

    /// Parses a span in milliseconds, rounded up. A number is in seconds, or a moment.
    pub(in crate::signal) fn read(&self, text: &str) -> Option<u64> {
        let text = unquoted(text);
        if let Some(number) = Number::read(text) {
            return self.number(number);
        }
        span(text).or_else(|| self.moment(text))
    }

    /// Parses a date.
    pub(in crate::signal) fn moment(&self, text: &str) -> Option<u64> {
        Some(self.until(date::read(text, self.now)?))
    }

    /// Parses the same for a field whose numbers count `unit` milliseconds.
    pub(in crate::signal) fn read_in(&self, unit: u32, text: &str) -> Option<u64> {
        match Number::read(text) {
            Some(number) => Some(of(number, u128::from(unit) * MILLI)),
            None => self.read(text),
        }
    }

    /// Parses the same for a field whose name may state a unit. A number that is too large for a
    /// span of three years is a moment, whatever the name says.
    pub(in crate::signal) fn read_with(&self, unit: Option<u32>, text: &str) -> Option<u64> {
        let is_moment = |number: Number| number.whole >= 100_000_000_000;
        match unit {
            Some(unit) if !Number::read(text).is_some_and(is_moment) => self.read_in(unit, text),
            _ => self.read(text),
        }
    }

    /// Converts a number that is in seconds, or a moment.
    pub(in crate::signal) fn number(&self, number: Number) -> Option<u64> {
        let unit = match number.whole {
            _ if number.negative => return Some(0),
            0..1_000_000_000 => return Some(of(number, SECOND)),
            1_000_000_000..100_000_000_000 => SECOND,
            100_000_000_000..100_000_000_000_000 => MILLI,
            100_000_000_000_000..100_000_000_000_000_000 => MILLI / 1000,
            100_000_000_000_000_000..100_000_000_000_000_000_000 => MILLI / 1_000_000,
            // Later than any moment that can be written.
            _ => return Some(LONGEST),
        };
        let moment = millis_up(number.times(unit));
        Some(self.until(i64::try_from(moment).unwrap_or(i64::MAX)))
    }
}

/// Converts a number of units to a span; a negative number means 0.
fn of(number: Number, unit: u128) -> u64 {
    if number.negative {
        return 0;
    }
    cut(millis_up(number.times(unit)))
}

/// Converts seconds to milliseconds.
pub(in crate::signal) fn seconds(number: Number) -> u64 {
    of(number, SECOND)
}

/// Converts minutes to milliseconds.
pub(in crate::signal) fn minutes(number: Number) -> u64 {
    of(number, 60 * SECOND)
}

/// Parses a window: a number that counts `unit` milliseconds, a span with units, or the name of a
/// period. A window of length 0 is invalid.
pub(in crate::signal) fn window(unit: u32, text: &str) -> Option<u64> {
    let text = unquoted(text);
    let span = match Number::read(text) {
        Some(number) => of(number, u128::from(unit) * MILLI),
        None => span(text).or_else(|| words::period(text))?,
    };
    (span > 0).then_some(span)
}

/// Parses `6m0s`, `120ms`, `30 seconds`, `1d 2h`, `PT30S`.
pub(in crate::signal) fn span(text: &str) -> Option<u64> {
    span_at_start(text).and_then(|(span, rest)| rest.is_empty().then_some(span))
}

/// Parses the same at the start of a text. Returns the rest, too.
pub(in crate::signal) fn span_at_start(text: &str) -> Option<(u64, &str)> {
    let (negative, mut rest) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        // ISO 8601
        b'P' => (false, text.strip_prefix("PT")?),
        _ => (false, text),
    };
    let mut sum = None;
    while let Some((Parts { whole, more }, after)) = number_and_unit(rest) {
        let before = sum.unwrap_or(Parts {
            whole: 0,
            more: false,
        });
        sum = Some(Parts {
            whole: before.whole.saturating_add(whole),
            more: before.more | more,
        });
        rest = after;
    }
    let span = cut(millis_up(sum?));
    Some((if negative { 0 } else { span }, rest))
}

fn number_and_unit(text: &str) -> Option<(Parts, &str)> {
    text.starts_with(|first: char| first.is_ascii_digit() || first == '.')
        .then_some(())?;
    let (number, after) = Number::start(text)?;
    let after = after.trim_start_matches([' ', '\t']);
    let end = after
        .find(|unit: char| !unit.is_alphabetic())
        .unwrap_or(after.len());
    let parts = number.times(unit(&after[..end])?);
    Some((parts, after[end..].trim_start_matches([' ', '\t'])))
}

/// Returns the length of a unit.
fn unit(name: &str) -> Option<u128> {
    const UNITS: [(&[&str], u128); 7] = [
        (&["ns", "nanosecond", "nanoseconds"], SECOND / 1_000_000_000),
        (
            &["us", "µs", "microsecond", "microseconds"],
            SECOND / 1_000_000,
        ),
        (
            &["ms", "msec", "msecs", "millisecond", "milliseconds"],
            MILLI,
        ),
        (&["s", "sec", "secs", "second", "seconds"], SECOND),
        (&["m", "min", "mins", "minute", "minutes"], 60 * SECOND),
        (&["h", "hr", "hrs", "hour", "hours"], 3600 * SECOND),
        (&["d", "day", "days"], 86_400 * SECOND),
    ];
    let known = |names: &&[&str]| names.iter().any(|known| name.eq_ignore_ascii_case(known));
    UNITS
        .iter()
        .find(|(names, _)| known(names))
        .map(|(_, length)| *length)
}

fn millis_up(parts: Parts) -> u128 {
    let rest = !parts.whole.is_multiple_of(MILLI) || parts.more;
    parts.whole / MILLI + u128::from(rest)
}

fn cut(millis: u128) -> u64 {
    u64::try_from(millis).unwrap_or(LONGEST).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_767_225_600_000;

    fn read(text: &str) -> Option<u64> {
        Base {
            now: NOW,
            date: None,
        }
        .read(text)
    }

    #[test]
    fn number_size_tells_spans_from_moments() {
        for (text, expected) in [
            ("-5", Some(0)),
            ("0", Some(0)),
            ("7.66", Some(7660)),
            ("0.0001", Some(1)),
            ("999999999", Some(LONGEST)),
            ("1767225660", Some(60_000)),
            ("1767225660500", Some(60_500)),
            ("1767225600250000", Some(250)),
            ("1767225600250000001", Some(251)),
            ("1771404540", Some(4_178_940_000)),
            ("99999999999999999999", Some(LONGEST)),
            ("100000000000000000000", Some(LONGEST)),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
    }

    #[test]
    fn units_add_up() {
        for (text, expected) in [
            ("6m0s", Some(360_000)),
            ("120ms", Some(120)),
            ("2m59.56s", Some(179_560)),
            ("30 Seconds", Some(30_000)),
            ("1d\t2h ", Some(93_600_000)),
            ("\"1h\"", Some(3_600_000)),
            ("-1h", Some(0)),
            ("1µs", Some(1)),
            ("400us 600us", Some(1)),
            ("PT1M30S", Some(90_000)),
            ("999999999999999999999999999999999999999999d", Some(LONGEST)),
            ("1", Some(1000)),
            ("1 fortnight", None),
            ("1h-1m", None),
            ("h", None),
            ("1h 1", None),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
    }

    #[test]
    fn moments_are_read_by_the_servers_clock_when_plausible() {
        let base = |date| Base {
            now: NOW,
            date: Some(date),
        };
        assert_eq!(base(NOW + 600_000).read("1767226260"), Some(60_000));
        assert_eq!(base(0).read("1767225660"), Some(60_000));
        assert_eq!(base(NOW).read("2026-01-01T00:00:05Z"), Some(5000));
        assert_eq!(base(NOW).read_in(1, "1767225660000"), Some(LONGEST));
        assert_eq!(base(NOW).read_with(Some(1), "1767225660000"), Some(60_000));
        assert_eq!(base(NOW).read_with(Some(60_000), "2"), Some(120_000));
    }
}
