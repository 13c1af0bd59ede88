//! Parses dates: the three formats of HTTP, ISO 8601, and the format of JavaScript, as whole
//! milliseconds since 1970.
//!
//! `httpdate` parses the first three, but neither second 60, nor letters of the other case, nor
//! `UTC`. A test compares this file with it.

use crate::signal::parse::number::{Number, digits};

const DAY: i64 = 86_400_000;

/// Parses any date; `now` decides the century of a year of two digits.
pub(in crate::signal) fn read(text: &str, now: i64) -> Option<i64> {
    http(text, now)
        .or_else(|| iso(text))
        .or_else(|| script(text))
}

/// Parses an HTTP date (RFC 9110, section 5.6.7).
pub(in crate::signal) fn http(text: &str, now: i64) -> Option<i64> {
    imf(text)
        .or_else(|| rfc850(text, now))
        .or_else(|| asctime(text))
}

/// `Thu, 01 Jan 2026 00:02:00 GMT`
fn imf(text: &str) -> Option<i64> {
    let (name, rest) = text.split_once(", ")?;
    let mut words = rest.splitn(5, ' ');
    let (day, month, year) = (
        fixed(words.next()?, 2)?,
        month(words.next()?)?,
        fixed(words.next()?, 4)?,
    );
    let time = clock(words.next()?)?;
    (is_day(name, 3) && is_utc(words.next()?)).then_some(())?;
    Some(days(year, month, day)? * DAY + time)
}

/// `Thursday, 01-Jan-26 00:02:00 GMT`
fn rfc850(text: &str, now: i64) -> Option<i64> {
    let (name, rest) = text.split_once(", ")?;
    let mut words = rest.splitn(3, ' ');
    let mut date = words.next()?.splitn(3, '-');
    let (day, month, year) = (
        fixed(date.next()?, 2)?,
        month(date.next()?)?,
        fixed(date.next()?, 2)?,
    );
    let time = clock(words.next()?)?;
    (name.len() > 3 && is_day(name, name.len()) && words.next()?.eq_ignore_ascii_case("GMT"))
        .then_some(())?;
    let this_year = year_of(now);
    let year = this_year - this_year.rem_euclid(100) + year;
    let year = if year > this_year + 50 {
        year - 100
    } else {
        year
    };
    Some(days(year, month, day)? * DAY + time)
}

/// `Thu Jan  1 00:02:00 2026`
fn asctime(text: &str) -> Option<i64> {
    let (name, rest) = text.split_once(' ')?;
    let (month_name, rest) = rest.split_once(' ')?;
    let (day, rest) = rest.split_at_checked(2)?;
    let (time, year) = rest.strip_prefix(' ')?.split_once(' ')?;
    let day = match day.strip_prefix(' ') {
        Some(day) => fixed(day, 1)?,
        None => fixed(day, 2)?,
    };
    is_day(name, 3).then_some(())?;
    Some(days(fixed(year, 4)?, month(month_name)?, day)? * DAY + clock(time)?)
}

/// `2026-01-01T00:05:00.5+01:00`
fn iso(text: &str) -> Option<i64> {
    let (date, rest) = text.split_at_checked(10)?;
    let mut parts = date.splitn(3, '-');
    let (year, month, day) = (
        fixed(parts.next()?, 4)?,
        fixed(parts.next()?, 2)?,
        fixed(parts.next()?, 2)?,
    );
    let rest = rest.strip_prefix(['T', 't', ' '])?;
    let end = rest
        .bytes()
        .take_while(|byte| byte.is_ascii_digit() || *byte == b':')
        .count();
    let (time, mut zone) = rest.split_at(end);
    let mut at = match time.split_at_checked(5)? {
        (hours_and_minutes, "") => minutes(hours_and_minutes)?,
        _ => clock(time)?,
    };
    if zone.starts_with('.') && time.len() > 5 {
        let (fraction, rest) = Number::start(zone)
            .filter(|_| zone[1..].starts_with(|next: char| next.is_ascii_digit()))?;
        at += i64::try_from(fraction.times_up(1000)).ok()?;
        zone = rest;
    }
    let zone = match zone.strip_prefix(' ').unwrap_or(zone) {
        "" | "Z" | "z" => 0,
        utc if is_utc(utc) => 0,
        zone => offset(zone)?,
    };
    Some(days(year, month, day)? * DAY + at - zone)
}

/// `Thu Jan 01 2026 01:02:00 GMT+0100 (Central European Standard Time)`
fn script(text: &str) -> Option<i64> {
    let mut words = text.splitn(7, ' ');
    let name = words.next()?;
    let (month, day, year) = (
        month(words.next()?)?,
        fixed(words.next()?, 2)?,
        fixed(words.next()?, 4)?,
    );
    let time = clock(words.next()?)?;
    let zone = words.next()?;
    let zone = match zone.get(..3) {
        Some(gmt) if gmt.eq_ignore_ascii_case("GMT") => offset(&zone[3..])?,
        _ => return None,
    };
    let named = words
        .next()
        .is_none_or(|rest| rest.starts_with('(') && rest.ends_with(')'));
    (named && is_day(name, 3)).then_some(())?;
    Some(days(year, month, day)? * DAY + time - zone)
}

/// `hh:mm:ss`; second 60 is second 0 of the next minute.
fn clock(text: &str) -> Option<i64> {
    let (hours_and_minutes, seconds) = text.split_at_checked(5)?;
    let seconds = fixed(seconds.strip_prefix(':')?, 2).filter(|seconds| *seconds <= 60)?;
    Some(minutes(hours_and_minutes)? + seconds * 1000)
}

/// `hh:mm`
fn minutes(text: &str) -> Option<i64> {
    let (hours, minutes) = text.split_once(':')?;
    let hours = fixed(hours, 2).filter(|hours| *hours < 24)?;
    let minutes = fixed(minutes, 2).filter(|minutes| *minutes < 60)?;
    Some((hours * 60 + minutes) * 60_000)
}

/// `+hh:mm` or `+hhmm`
fn offset(text: &str) -> Option<i64> {
    let sign = match text.as_bytes().first()? {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let (hours, rest) = text[1..].split_at_checked(2)?;
    let hours = fixed(hours, 2).filter(|hours| *hours < 24)?;
    let minutes =
        fixed(rest.strip_prefix(':').unwrap_or(rest), 2).filter(|minutes| *minutes < 60)?;
    Some(sign * (hours * 60 + minutes) * 60_000)
}

/// Parses exactly `count` digits.
fn fixed(text: &str, length: usize) -> Option<i64> {
    match digits(text) {
        (all, "") if all.len() == length => all.parse().ok(),
        _ => None,
    }
}

fn is_utc(zone: &str) -> bool {
    ["GMT", "UTC", "+0000"]
        .iter()
        .any(|utc| zone.eq_ignore_ascii_case(utc))
}

/// Returns whether the text is the name of a day, with this number of letters.
fn is_day(name: &str, length: usize) -> bool {
    const DAYS: [&str; 7] = [
        "Monday",
        "Tuesday",
        "Wednesday",
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
    ];
    let same = |day: &str| {
        day.get(..length)
            .is_some_and(|day| name.eq_ignore_ascii_case(day))
    };
    DAYS.iter()
        .any(|day| same(day) && (length == 3 || length == day.len()))
}

fn month(name: &str) -> Option<i64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    (1..)
        .zip(MONTHS)
        .find(|(_, month)| name.eq_ignore_ascii_case(month))
        .map(|(number, _)| number)
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

/// Returns the year of a moment.
fn year_of(now: i64) -> i64 {
    let guess = 1970 + now.div_euclid(DAY) * 400 / 146_097;
    let begins = |year| days(year, 1, 1).is_some_and(|day| day * DAY <= now);
    if begins(guess + 1) {
        guess + 1
    } else if begins(guess) {
        guess
    } else {
        guess - 1
    }
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
            "Thx, 01 Jan 2026 00:02:00 GMT",
            "Thurs, 01-Jan-26 00:02:00 GMT",
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
            assert_eq!(read(&text, NOW).map(year_of), Some(expected), "{text}");
        }
        for year in 1900..2500 {
            let begins = days(year, 1, 1).unwrap() * DAY;
            assert_eq!((year_of(begins - 1), year_of(begins)), (year - 1, year));
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
