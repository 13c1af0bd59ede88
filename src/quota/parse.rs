//! Parses quotas in the text form of configurations.

use std::str::FromStr;
use std::time::Duration;

use super::{Quota, Slacks, unit};
use crate::config_error::ConfigError;

/// Reads the [text form](Quota#text-form), and checks all that `build` checks without settings.
impl FromStr for Quota {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut quota: Option<Quota> = None;
        for part in text.split(',') {
            let shown = if part.trim().is_empty() { text } else { part };
            let (one, counted) = parse_limit(part.trim()).ok_or_else(|| unreadable(shown))?;
            let one = match counted {
                None => one,
                Some(name) => one.of(unit::named(name).ok_or_else(|| {
                    ConfigError::new(format!(
                        "unit {name:?}: this process has read 256 other names of units from texts, and keeps no more; name \
                         a unit after what it counts, such as tokens, not after a customer"
                    ))
                })?),
            };
            quota = Some(match quota {
                None => one,
                Some(sofar) => sofar.and(one),
            });
        }
        let quota = quota.ok_or_else(|| unreadable(text))?;
        let none = Slacks {
            transit: Duration::ZERO,
            boundary: Duration::ZERO,
            rate_loss: 99,
        };
        quota.check(none)?;
        Ok(quota)
    }
}

fn unreadable(part: &str) -> ConfigError {
    let part: String = part.trim().chars().take(64).collect();
    ConfigError::new(format!(
        "{part:?} is not a quota; write count/window, such as 100/60s, 5/second or 25/5s, 300/60s, a unit after its \
         count, such as 200000 tokens/min, or 8 in flight"
    ))
}

/// Returns the quota of one limit, and the unit that it names.
fn parse_limit(text: &str) -> Option<(Quota, Option<&str>)> {
    if let Some(count) = text.strip_suffix("in flight") {
        let count = count.trim().parse().ok()?;
        return Some((Quota::in_flight(count), None));
    }
    let (counted, window) = text.split_once('/')?;
    let (count, counts) = match counted.trim().split_once(char::is_whitespace) {
        Some((count, name)) if unit::is_name(name.trim()) => (count, Some(name.trim())),
        Some(_) => return None,
        None => (counted.trim(), None),
    };
    let count = count.parse::<u32>().ok()?;
    let window = window.trim();
    let digits = window.bytes().take_while(u8::is_ascii_digit).count();
    let (number, time) = window.split_at(digits);
    let number = if number.is_empty() {
        1
    } else {
        number.parse::<u64>().ok()?
    };
    let millis: u64 = match time.trim() {
        "ms" => 1,
        "s" | "sec" | "secs" | "second" | "seconds" => 1000,
        "m" | "min" | "mins" | "minute" | "minutes" => 60_000,
        "h" | "hour" | "hours" => 3_600_000,
        "d" | "day" | "days" => 86_400_000,
        _ => return None,
    };
    let window = Duration::from_millis(number.checked_mul(millis)?);
    Some((Quota::new(count, window), counts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_read_as_people_write_them() {
        for (text, quota) in [
            ("100/60s", Quota::per_minute(100)),
            ("100/min", Quota::per_minute(100)),
            (" 5 / second ", Quota::per_second(5)),
            (
                "25/5s,300/1m",
                Quota::new(25, Duration::from_secs(5)).and(Quota::per_minute(300)),
            ),
            ("10/250ms", Quota::new(10, Duration::from_millis(250))),
            ("8 in flight", Quota::in_flight(8)),
            (
                "5/s, 8 in flight",
                Quota::per_second(5).and(Quota::in_flight(8)),
            ),
            ("7/2 days", Quota::new(7, Duration::from_secs(172_800))),
            ("500 requests/min", Quota::per_minute(500)),
            (
                "500/min, 200000 tokens / min",
                Quota::per_minute(500).and(Quota::per_minute(200_000).of("tokens")),
            ),
        ] {
            assert_eq!(text.parse::<Quota>().unwrap(), quota, "{text}");
        }
    }

    #[test]
    fn unreadable_quota_error_shows_a_good_example() {
        for text in [
            "",
            "100",
            "100/",
            "/60s",
            "-1/s",
            "1.5/s",
            "100/60x",
            "1/s,",
            "99999999999/s",
            "x/y",
            "5/99999999999999999999s",
            "5 6/s",
            "5 input tokens/s",
            "5 <b>/s",
        ] {
            let error = text.parse::<Quota>().unwrap_err().to_string();
            assert!(error.contains("100/60s"), "{text}: {error}");
        }
        for (text, problem) in [
            ("0/s", "a count of 0"),
            ("5/0s", "a window lasts"),
            ("5/999999999 days", "a window lasts"),
            ("5/18446744073709551615ms", "a window lasts"),
        ] {
            let error = text.parse::<Quota>().unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
