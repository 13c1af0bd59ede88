//! Parses dates: the three formats of HTTP, ISO 8601, and the format of JavaScript, as whole
//! milliseconds since 1970.
//!
//! `httpdate` parses the first three, but neither second 60, nor letters of the other case, nor
//! `UTC`. A test compares this file with it.

use crate::signal::parse::number::Number;

const DAY: i64 = 86_400_000;

/// Parses any date; `now` decides the century of a year of two digits.
pub(in crate::signal) fn read(text: &str, now: i64) -> Option<i64> {
    http(text, now)
        .or_else(|| iso(text))
        .or_else(|| script(text))
}

/// Parses an HTTP date (RFC 9110, section 5.6.7).
pub(in crate::signal) fn http(text: &str, now: i64) -> Option<i64> {
    let forms = [
        // `Thu, 01 Jan 2026 00:02:00 GMT`; Java does not pad the day, and Python ends with `-0000`.
        "%a, %d %b %Y %H:%M:%S %Z",
        // `Thursday, 01-Jan-26 00:02:00 GMT`
        "%a, %d-%b-%y %H:%M:%S GMT",
        // `Thu Jan  1 00:02:00 2026`
        "%a %b %e %H:%M:%S %Y",
    ];
    forms.into_iter().find_map(|form| {
        let (at, rest) = scan(form, text, now)?;
        rest.is_empty().then_some(at)
    })
}

/// `2026-01-01T00:05:00.5+01:00`
fn iso(text: &str) -> Option<i64> {
    let (day, rest) = scan("%Y-%m-%d", text, 0)?;
    let (minute, rest) = scan("%H:%M", rest.strip_prefix(['T', 't', ' '])?, 0)?;
    let mut at = day + minute;
    let mut zone = rest;
    if let Some((seconds, rest)) = scan(":%S", rest, 0) {
        (at, zone) = (at + seconds, rest);
        if let Some(digits) = rest.strip_prefix('.') {
            digits
                .starts_with(|first: char| first.is_ascii_digit())
                .then_some(())?;
            let (fraction, rest) = Number::start(rest)?;
            (at, zone) = (at + i64::try_from(fraction.times_up(1000)).ok()?, rest);
        }
    }
    match zone.strip_prefix(' ').unwrap_or(zone) {
        "" | "Z" | "z" => Some(at),
        utc if is_utc(utc) => Some(at),
        zone => Some(at - offset(zone)?),
    }
}

/// `Thu Jan 01 2026 01:02:00 GMT+0100 (Central European Standard Time)`
fn script(text: &str) -> Option<i64> {
    let (at, rest) = scan("%a %b %d %Y %H:%M:%S GMT", text, 0)?;
    let (zone, name) = rest.split_once(' ').unwrap_or((rest, "()"));
    let is_named = name.starts_with('(') && name.ends_with(')');
    is_named.then_some(at - offset(zone)?)
}

/// `+hh:mm`, `+hhmm` or `+hh`
fn offset(text: &str) -> Option<i64> {
    let time = text.strip_prefix(['+', '-'])?;
    let forms = ["%H:%M", "%H%M", "%H"];
    let (offset, rest) = forms.iter().find_map(|form| scan(form, time, 0))?;
    let sign = if text.starts_with('-') { -1 } else { 1 };
    rest.is_empty().then_some(sign * offset)
}

fn is_utc(zone: &str) -> bool {
    ["GMT", "UTC", "+0000", "-0000"]
        .iter()
        .any(|utc| zone.eq_ignore_ascii_case(utc))
}

const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];

/// Parses the start of a text by its form, as `strptime` does: `%a` is any word, because the day of the week is
/// not checked, `%d` is a day of one or two digits, `%e` is one of two places, and `%Z` is UTC. Returns the milliseconds since 1970 and the rest. A date that the form does not state is
/// the first day of 1970.
fn scan<'a>(form: &str, text: &'a str, now: i64) -> Option<(i64, &'a str)> {
    let (mut year, mut month, mut day, mut time) = (1970, 1, 1, 0);
    let mut rest = text;
    let mut marks = form.chars();
    while let Some(mark) = marks.next() {
        if mark != '%' {
            let mut letters = rest.chars();
            letters
                .next()
                .filter(|letter| letter.eq_ignore_ascii_case(&mark))?;
            rest = letters.as_str();
            continue;
        }
        let field = marks.next()?;
        let value;
        (value, rest) = match field {
            'a' => (
                0,
                rest.trim_start_matches(|letter: char| letter.is_ascii_alphabetic()),
            ),
            'b' => month_of(rest)?,
            'e' if rest.starts_with(' ') => digits(&rest[1..], 1)?,
            'Z' if is_utc(rest) => (0, ""),
            'Z' => return None,
            'Y' => digits(rest, 4)?,
            'd' => digits(rest, 2).or_else(|| digits(rest, 1))?,
            _ => digits(rest, 2)?,
        };
        match field {
            'd' | 'e' => day = value,
            'b' | 'm' => month = value,
            'Y' => year = value,
            'y' => year = near(value, now),
            // Second 60 is second 0 of the next minute.
            'H' if value < 24 => time += value * 3_600_000,
            'M' if value < 60 => time += value * 60_000,
            'S' if value <= 60 => time += value * 1000,
            'a' | 'Z' => {}
            _ => return None,
        }
    }
    Some((days(year, month, day)? * DAY + time, rest))
}

/// Parses exactly `count` digits.
fn digits(text: &str, count: usize) -> Option<(i64, &str)> {
    let (digits, rest) = text.split_at_checked(count)?;
    let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
    Some((digits.parse().ok().filter(|_| is_number)?, rest))
}

/// Parses the name of a month.
fn month_of(text: &str) -> Option<(i64, &str)> {
    let (name, rest) = text.split_at_checked(3)?;
    let mut months = (1..).zip(MONTHS);
    let (number, _) = months.find(|(_, month)| month.eq_ignore_ascii_case(name))?;
    Some((number, rest))
}

/// Returns the last year with these two last digits that is at most 50 years ahead.
fn near(digits: i64, now: i64) -> i64 {
    // To within a day: a leap year is a quarter of a day early, and makes up for it.
    let this_year = 1970 + now.div_euclid(DAY) * 400 / 146_097;
    this_year + 50 - (this_year + 50 - digits).rem_euclid(100)
}

/// Returns the days from 1970 to a day of the Gregorian calendar, if that day exists.
fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let length = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    // The year begins in March here, so that a leap day is its last day.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let (century, year) = (year.div_euclid(400), year.rem_euclid(400));
    let in_year = (153 * month + 2) / 5 + day - 1;
    (1..=length)
        .contains(&day)
        .then_some(century * 146_097 + year * 365 + year / 4 - year / 100 + in_year - 719_468)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    const NOW: i64 = 1_767_225_600_000;

    #[test]
    fn every_form_is_read() {
        for (text, after) in [
            ("Thu, 01 Jan 2026 00:02:00 GMT", 120_000),
            ("Thu, 1 Jan 2026 00:02:00 GMT", 120_000),
            ("Thu, 01 Jan 2026 00:02:00 -0000", 120_000),
            ("2026-01-01 01:02:00+01", 120_000),
            ("thu, 01 JAN 2026 00:02:00 utc", 120_000),
            ("Thu, 01 Jan 2026 00:00:60 +0000", 60_000),
            ("Thursday, 01-Jan-26 00:02:00 GMT", 120_000),
            ("Thu Jan  1 00:02:00 2026", 120_000),
            ("2026-01-01T01:02:00+01:00", 120_000),
            ("2026-01-01 00:02", 120_000),
            ("2026-01-01t00:00:19.5684431z", 19_569),
            ("2025-12-31T16:00:30-0800", 30_000),
            ("2026-01-01 00:00:30 +0000", 30_000),
            ("2026-01-01 00:00:30 UTC", 30_000),
            (
                "Thu Jan 01 2026 01:00:02 GMT+0100 (Central European Standard Time)",
                2000,
            ),
            ("Thu Jan 01 2026 01:00:02 GMT+0100", 2000),
        ] {
            assert_eq!(read(text, NOW), Some(NOW + after), "{text}");
        }
    }

    #[test]
    fn invalid_dates_are_rejected() {
        for text in [
            "",
            "tomorrow",
            "Thu, 32 Jan 2026 00:02:00 GMT",
            "Mon, 30 Feb 2026 00:00:00 GMT",
            "Thu, 01 Jan 2026 24:00:00 GMT",
            "Thu, 01 Jan 2026 00:00:61 GMT",
            "Thu, 01 Jan 2026 00:02:00 CET",
            "Thu, 01 Jan 2026 00:02:00 11",
            "2026-01-01",
            "2026-01-01T00:02.5",
            "2026-01-01T00:02:00.Z",
            "2026-01-01T00:02:00+1",
            "2026-13-01T00:02:00Z",
            "\u{b2}026-01-01T00:02:00Z",
            "Thu Jan 01 2026 01:00:02 GMT+0100 x",
        ] {
            assert_eq!(read(text, NOW), None, "{text}");
        }
    }

    #[test]
    fn years_of_two_digits_are_near() {
        for (year, expected) in [
            ("26", 2026),
            ("76", 2076),
            ("77", 1977),
            ("94", 1994),
            ("00", 2000),
        ] {
            let text = format!("Thursday, 01-Jul-{year} 00:02:00 GMT");
            let same = read(&format!("Thu, 01 Jul {expected} 00:02:00 GMT"), NOW);
            assert!(same.is_some() && read(&text, NOW) == same, "{text}");
        }
    }

    proptest::proptest! {
        #![proptest_config(histories::config(64))]

        #[test]
        fn http_dates_are_read_as_httpdate_reads_them(seconds in 0u64..253_402_300_800) {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            let text = httpdate::fmt_http_date(time);
            proptest::prop_assert_eq!(http(&text, NOW), Some(seconds as i64 * 1000));
        }

        #[test]
        fn date_reader_accepts_what_httpdate_accepts(text in "(Mon|Thursday|Fri)(, | )(0[0-9]|[1-3][0-9]|Jan|Dec)[ -](Feb|Apr|Dec| [1-9]|31)[ -](20[0-9][0-9]|[89][0-9]|1[0-9]:02:03) ([012][0-9]:[0-5][0-9]:59|1999|20[0-9][0-9])( GMT)?") {
            if let Ok(time) = httpdate::parse_http_date(&text) {
                let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as i64;
                proptest::prop_assert_eq!(http(&text, NOW), Some(since));
            }
        }
    }
}
