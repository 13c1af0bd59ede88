//! Parses time values: one reader for waits, resets and windows, and one table of units.
//!
//! A value is a number (its size decides whether it is a span or a moment), a span with units, or a
//! date. Moments are converted to spans by the server's own clock, the header `Date`, if it is
//! credible: that cancels the difference between the two clocks.

use crate::signal::parse::date;
use crate::signal::parse::number::{Number, digits, unquoted};
use crate::signal::parse::text::Text;

/// A day, in milliseconds.
pub(in crate::signal) const MILLIS_OF_DAY: u64 = 86_400_000;

/// The longest span, 366 days; longer ones are cut to this.
pub(in crate::signal) const LONGEST: u64 = 366 * MILLIS_OF_DAY;

/// One millisecond, in the unit in which spans are added up: 10^-15 s.
const MILLI: u128 = 1_000_000_000_000;
const SECOND: u128 = 1000 * MILLI;
const MINUTE: u128 = 60 * SECOND;
const HOUR: u128 = 60 * MINUTE;
const DAY: u128 = 24 * HOUR;

/// When the response arrived, by both clocks, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::signal) struct Base {
    pub(in crate::signal) now: i64,
    pub(in crate::signal) date: Option<i64>,
}

impl Base {
    /// Returns the span until a moment; 0 if the moment is over.
    fn until(&self, moment: i64) -> u64 {
        match self.date.map(|date| millis_between(date, moment)) {
            Some(span) if span <= LONGEST => span,
            _ => millis_between(self.now, moment).min(LONGEST),
        }
    }

    /// Parses a span in milliseconds, rounded up. A number is in seconds, or a moment.
    pub(in crate::signal) fn read(&self, text: &str) -> Option<u64> {
        let text = unquoted(text);
        match Number::read(text) {
            Some(number) => Some(self.number(number)),
            None => span(text).or_else(|| self.moment(text)),
        }
    }

    /// Parses a date.
    pub(in crate::signal) fn moment(&self, text: &str) -> Option<u64> {
        Some(self.until(date::read(text, self.now)?))
    }

    /// Parses the same for a field whose numbers count `unit` milliseconds.
    pub(in crate::signal) fn read_in(&self, unit: u32, text: &str) -> Option<u64> {
        match Number::read(text) {
            Some(number) => Some(of(number, unit)),
            None => self.read(text),
        }
    }

    /// Parses the same for a field whose name may state a unit. A number from 10^9 on that is too large for a
    /// span of three years is a moment, whatever the name says.
    pub(in crate::signal) fn read_with(&self, unit: Option<u32>, text: &str) -> Option<u64> {
        let is_span = |number: Number, unit: u32| {
            let is_short = number.whole < 1_000_000_000;
            is_short || number.whole.saturating_mul(unit.into()) < 100_000_000_000
        };
        match (unit, Number::read(text)) {
            (Some(unit), Some(number)) if is_span(number, unit) => Some(of(number, unit)),
            _ => self.read(text),
        }
    }

    /// Converts a number that is in seconds, or a moment.
    pub(in crate::signal) fn number(&self, number: Number) -> u64 {
        let unit = match number.whole {
            _ if number.negative => return 0,
            0..1_000_000_000 => return of(number, 1000),
            1_000_000_000..100_000_000_000 => SECOND,
            100_000_000_000..100_000_000_000_000 => MILLI,
            100_000_000_000_000..100_000_000_000_000_000 => MILLI / 1000,
            100_000_000_000_000_000..100_000_000_000_000_000_000 => MILLI / 1_000_000,
            // Later than any moment that can be written.
            _ => return LONGEST,
        };
        let moment = number.times_up(unit).div_ceil(MILLI);
        self.until(i64::try_from(moment).unwrap_or(i64::MAX))
    }
}

/// Returns the span from one moment to a later one; 0 if that is not later.
fn millis_between(one: i64, later: i64) -> u64 {
    u64::try_from(later.saturating_sub(one)).unwrap_or(0)
}

/// Converts a number of units of `unit` milliseconds to a span; a negative number means 0.
fn of(number: Number, unit: u32) -> u64 {
    match number.negative {
        true => 0,
        false => millis_up(number.times_up(u128::from(unit) * MILLI)),
    }
}

/// Parses a window: a number that counts `unit` milliseconds, a span with units, or the name of a
/// period. A window of length 0 is invalid.
pub(in crate::signal) fn window(unit: u32, text: &str) -> Option<u64> {
    let text = unquoted(text);
    match Number::read(text) {
        Some(number) => window_of(unit, number),
        None => span(text).or_else(|| period(text)).filter(|span| *span > 0),
    }
}

/// Converts a number that counts `unit` milliseconds to a span that is not 0.
pub(in crate::signal) fn window_of(unit: u32, number: Number) -> Option<u64> {
    Some(of(number, unit)).filter(|span| *span > 0)
}

/// Parses `6m0s`, `120ms`, `30 seconds`, `1d 2h`, `PT30S`.
pub(in crate::signal) fn span(text: &str) -> Option<u64> {
    span_at_start(text).and_then(|(span, rest)| rest.is_empty().then_some(span))
}

/// Parses the same at the start of a text. Returns the rest, too.
pub(in crate::signal) fn span_at_start(text: &str) -> Option<(u64, &str)> {
    let start = match text.as_bytes().first()? {
        b'-' | b'+' => &text[1..],
        // ISO 8601
        b'P' => text.strip_prefix("PT")?,
        _ => text,
    };
    let (mut sum, mut rest) = (0u128, start);
    while let Some((span, after)) = number_and_unit(rest) {
        (sum, rest) = (sum.saturating_add(span), after);
    }
    let span = if text.starts_with('-') {
        0
    } else {
        millis_up(sum)
    };
    (rest.len() < start.len()).then_some((span, rest))
}

fn number_and_unit(text: &str) -> Option<(u128, &str)> {
    text.starts_with(|first: char| first.is_ascii_digit() || first == '.')
        .then_some(())?;
    let (number, after) = Number::start(text)?;
    let after = after.trim_start_matches([' ', '\t']);
    let end = after.find(|unit: char| !unit.is_alphabetic());
    let (name, rest) = after.split_at(end.unwrap_or(after.len()));
    let span = number.times_up(unit(name)?);
    Some((span, rest.trim_start_matches([' ', '\t'])))
}

/// Returns the length of a unit: the one table of its words.
fn unit(name: &str) -> Option<u128> {
    Some(match Text::lower(name).as_str() {
        "ns" | "nanosecond" | "nanoseconds" => MILLI / 1_000_000,
        "us" | "µs" | "microsecond" | "microseconds" => MILLI / 1000,
        "ms" | "msec" | "msecs" | "millis" | "millisecond" | "milliseconds" => MILLI,
        "s" | "sec" | "secs" | "second" | "seconds" => SECOND,
        "m" | "min" | "mins" | "minute" | "minutes" => MINUTE,
        "h" | "hr" | "hrs" | "hour" | "hours" => HOUR,
        "d" | "day" | "days" => DAY,
        _ => return None,
    })
}

/// Returns the milliseconds of a unit at the end of a name, such as `reset-seconds`. It is a plural
/// or short: `minutes` is a unit, and `minute` names a quota.
pub(in crate::signal) fn unit_of_name(name: &str) -> Option<u32> {
    let is_short = ["sec", "msec"]
        .iter()
        .any(|short| name.eq_ignore_ascii_case(short));
    (is_short || name.ends_with(['s', 'S'])).then_some(())?;
    let millis = u32::try_from(unit(name)? / MILLI).ok();
    millis.filter(|millis| *millis > 0)
}

/// Returns the length of a period word, in milliseconds: `minute`, `5h`, `15min`, `perday`. A single
/// letter counts only after a number.
pub(in crate::signal) fn period(word: &str) -> Option<u64> {
    let (count, name) = digits(word.strip_prefix("per").unwrap_or(word));
    let length = match Text::lower(name).as_str() {
        "secondly" | "rps" | "qps" => SECOND,
        "minutely" | "rpm" | "qpm" | "tpm" => MINUTE,
        "hourly" | "rph" => HOUR,
        "daily" | "rpd" | "tpd" => DAY,
        "w" | "week" | "weeks" | "weekly" => 7 * DAY,
        "month" | "months" | "monthly" => 30 * DAY,
        name => unit(name).filter(|length| *length >= SECOND)?,
    };
    let count = match (count, name.len()) {
        ("", 1) => return None,
        ("", _) => 1,
        _ => count.parse().unwrap_or(u128::MAX),
    };
    Some(millis_up(count.saturating_mul(length))).filter(|span| *span > 0)
}

/// Returns the period at the end of a name: `requests-minute`, `per_hour`.
pub(in crate::signal) fn period_of(name: &str) -> Option<u64> {
    period(name.rsplit(['-', '_']).next()?)
}

/// Converts a span to milliseconds, rounded up and cut.
fn millis_up(span: u128) -> u64 {
    u64::try_from(span.div_ceil(MILLI))
        .unwrap_or(LONGEST)
        .min(LONGEST)
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
            ("500 millis", Some(500)),
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
    fn last_word_may_be_a_period() {
        for (name, expected) in [
            ("requests-minute", Some(60_000)),
            ("unified-5h", Some(5 * 3_600_000)),
            ("per_hour", Some(3_600_000)),
            ("15min", Some(900_000)),
            ("24hour", Some(86_400_000)),
            ("monthly", Some(30 * 86_400_000)),
            ("99999999999999999999d", Some(LONGEST)),
            ("0s", None),
            ("h", None),
            ("minute-requests", None),
            ("permin", Some(60_000)),
            ("limit-rpd", Some(86_400_000)),
            ("perform", None),
        ] {
            assert_eq!(period_of(name), expected, "{name}");
        }
    }

    #[test]
    fn names_end_in_plural_or_short_units() {
        for (name, expected) in [
            ("ms", Some(1)),
            ("millis", Some(1)),
            ("sec", Some(1000)),
            ("Seconds", Some(1000)),
            ("hrs", Some(3_600_000)),
            ("days", Some(86_400_000)),
            ("minute", None),
            ("m", None),
            ("us", None),
            ("requests", None),
        ] {
            assert_eq!(unit_of_name(name), expected, "{name}");
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
