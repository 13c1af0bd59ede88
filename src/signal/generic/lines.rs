//! The few lines of a response that may concern limits, found in one pass over the names of its
//! headers.

use http::HeaderMap;

use crate::signal::parse::number::unquoted;
use crate::signal::parse::text::Bounded;

/// One line: the name in lower case, and its trimmed value, which is never empty.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Line<'a> {
    pub(in crate::signal) name: &'a str,
    pub(in crate::signal) value: &'a str,
}

/// The lines that may matter, at most [`Lines::MOST`]. Lines of one name keep their order.
#[derive(Debug)]
pub(in crate::signal) struct Lines<'a>(Bounded<Line<'a>, { Lines::MOST }>);

/// The replacement for a value that is not UTF-8: the line is present, but matches nothing.
const UNREADABLE: &str = "\u{fffd}";

/// The longest value that is read, in bytes. The readers of 60 kB took 6 ms for each response.
const LONGEST: usize = 4096;

impl<'a> Lines<'a> {
    pub(in crate::signal) const MOST: usize = 64;

    /// Creates an empty list.
    pub(in crate::signal) fn none() -> Self {
        Lines(Bounded::new())
    }

    /// Adds the headers that may matter.
    pub(in crate::signal) fn read(&mut self, headers: &'a HeaderMap) {
        for (name, value) in headers {
            if may_matter(name.as_str()) {
                self.add(Line {
                    name: name.as_str(),
                    value: value_of(value),
                });
            }
        }
    }

    /// Adds a line, unless it has no value.
    pub(in crate::signal) fn add(&mut self, mut line: Line<'a>) {
        if line.value.len() > LONGEST {
            line.value = UNREADABLE;
        }
        if !line.value.is_empty() {
            self.0.push(line);
        }
    }

    /// Returns whether any line may state a limit.
    pub(in crate::signal) fn has_limit(&self) -> bool {
        self.0.iter().any(|line| line.name.contains("limit"))
    }

    pub(in crate::signal) fn iter(&self) -> impl Iterator<Item = Line<'a>> + Clone {
        self.0.iter().copied()
    }

    /// Returns the values of the lines with this name.
    pub(in crate::signal) fn all(&self, name: &str) -> impl Iterator<Item = &'a str> + Clone {
        self.iter()
            .filter(move |line| line.name == name)
            .map(|line| line.value)
    }

    /// Returns the field that the lines with this name are together.
    pub(in crate::signal) fn joined(&self, name: &str) -> String {
        self.all(name).collect::<Vec<_>>().join(", ")
    }

    /// Returns the value of the first line with this name.
    pub(in crate::signal) fn first(&self, name: &str) -> Option<&'a str> {
        self.all(name).next()
    }

    pub(in crate::signal) fn has(&self, name: &str) -> bool {
        self.first(name).is_some()
    }
}

/// Returns the first value of a header that need not be in the lists above.
pub(in crate::signal) fn first_of<'a>(
    headers: &'a HeaderMap,
    name: &http::HeaderName,
) -> Option<&'a str> {
    headers
        .get_all(name)
        .iter()
        .map(value_of)
        .find(|value| !value.is_empty())
}

fn value_of(value: &http::HeaderValue) -> &str {
    if value.len() > LONGEST {
        return UNREADABLE;
    }
    std::str::from_utf8(value.as_bytes())
        .unwrap_or(UNREADABLE)
        .trim_matches([' ', '\t'])
}

/// Returns whether any line may matter.
pub(in crate::signal) fn any(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| may_matter(name.as_str()))
}

/// Returns whether a header with this name may matter. This cheap check rejects nearly all other
/// headers.
///
/// Almost all relevant names contain `limit`; the others begin or end with one of a few words.
#[inline]
pub(in crate::signal) fn may_matter(name: &str) -> bool {
    let name = name.as_bytes();
    let [first, second, .., last] = name else {
        return false;
    };
    if name.len() < SHORTEST {
        return false;
    }
    let stands_out = match (first, second, last) {
        (b'x', b'-', _) => is_start(&name[2..]) || is_end(name),
        (b'r', b'e', _) => name.starts_with(b"retry-") || name.starts_with(b"remain"),
        (_, _, b'g') => name.ends_with(b"-remaining"),
        (_, _, b'r') => name.ends_with(b"-retry-after"),
        _ => false,
    };
    stands_out || has_limit(name)
}

/// The length of `ratelimit`, the shortest name.
const SHORTEST: usize = 9;

/// Returns whether a name that starts with `x-` goes on with one of the words that count.
fn is_start(rest: &[u8]) -> bool {
    match rest[0] {
        b'a' => rest.starts_with(b"amzn-errortype"),
        b'f' => rest.starts_with(b"fb-ads-insights-throttle"),
        b'm' => rest.starts_with(b"mbx-") || rest.starts_with(b"ms-throttle-scope"),
        b'r' => [&b"remaining-"[..], b"retry-", b"rl-"]
            .iter()
            .any(|start| rest.starts_with(start)),
        b's' => rest.starts_with(b"sapi-"),
        _ => false,
    }
}

/// Returns whether a name that starts with `x-` ends with one of the words that count.
fn is_end(name: &[u8]) -> bool {
    let ends: &[&[u8]] = match name[name.len() - 2..] {
        [b'n', b'g'] => &[b"remaining"],
        [b'i', b'n'] => &[b"remain", b"resets-in", b"reset-in", b"retry-in"],
        [b'f', b't'] => &[b"left"],
        [b'e', b't'] => &[b"reset"],
        [b'n', b't'] => &[b"percent", b"token-count"],
        [b'e', b'd'] => &[b"used"],
        [b'g', b'e'] => &[b"usage"],
        [b'm', b'e'] => &[b"replenishment-time", b"reset-time", b"resettime"],
        [b'a', b't'] => &[b"reset-at", b"resetat"],
        [b't', b'e'] => &[b"reset-date"],
        [b't', b's'] => &[b"resets"],
        [b'o', b'w'] => &[b"window"],
        [b'o', b'd'] => &[b"period"],
        [b'l', b'e'] => &[b"available"],
        [b'e', b'r'] => &[b"after"],
        [b'd', b's'] => &[b"seconds"],
        [b'e', b's'] => &[b"minutes"],
        [b'm', b's'] => &[b"after-ms", b"reset-ms", b"window-ms"],
        [b'm', b'p'] => &[b"timestamp"],
        [b'e', b'l'] => &[b"level"],
        [b't', b'a'] => &[b"quota"],
        _ => &[],
    };
    ends.iter().any(|end| name.ends_with(end))
}

/// Returns whether the name contains `limit`. Of any five letters in a row it checks one, and the
/// other four only if that one occurs in `limit`.
fn has_limit(name: &[u8]) -> bool {
    let mut at = 4;
    while let Some(letter) = name.get(at) {
        let start = match letter {
            b't' => at - 4,
            b'm' => at - 2,
            b'l' => at,
            // The letter has two possible places.
            b'i' if name.get(at - 1) == Some(&b'l') => at - 1,
            b'i' => at - 3,
            _ => {
                at += 5;
                continue;
            }
        };
        if name[start..].starts_with(b"limit") {
            return true;
        }
        at += 5;
    }
    false
}

/// Splits at each `mark` outside of double quotes, and trims the parts.
///
/// A backslash escapes the next character in `"…"`, and not in `%"…"`, a Display String (RFC 9651).
pub(in crate::signal) fn split(text: &str, mark: char) -> impl Iterator<Item = &str> + Clone {
    let (mut quoted, mut escapes, mut before) = (false, false, None);
    text.split(move |character| {
        let escaped = quoted && escapes && before == Some('\\');
        if character == '"' && !escaped {
            escapes = before != Some('%');
            quoted = !quoted;
        }
        // What is escaped is no backslash.
        before = Some(character).filter(|_| !escaped);
        character == mark && !quoted
    })
    .map(trim)
}

/// Returns the value of `key=value`, without quotes, from the parameters of an item.
pub(in crate::signal) fn parameter<'a>(item: &'a str, key: &str) -> Option<&'a str> {
    split(item, ';').find_map(|part| {
        let (name, value) = part.split_once('=')?;
        let is_it = trim(name).eq_ignore_ascii_case(key);
        is_it.then(|| unquoted(trim(value)))
    })
}

pub(in crate::signal) fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_found_wherever_it_stands() {
        for before in 0..12 {
            for after in 0..12 {
                let name = format!("{}limit{}", "i".repeat(before), "l".repeat(after));
                assert!(has_limit(name.as_bytes()), "{name}");
                assert!(
                    !has_limit(name.replace("limit", "limi").as_bytes()),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn every_header_that_is_read_matters() {
        use crate::signal::standard::retry_after;
        use crate::signal::{refusal, vendor};
        let rows = vendor::ROWS.iter().flat_map(|row| row.headers).copied();
        let lists = rows
            .chain(retry_after::MILLIS)
            .chain(refusal::FLAGS)
            .chain(refusal::SCOPES);
        for name in lists.chain([
            retry_after::STANDARD,
            retry_after::OTHER,
            refusal::ERROR_TYPE,
            "ratelimit",
            "x-vendor-primary-used-percent",
            "x-vendor-primary-window-minutes",
            "x-vendor-primary-reset-after-seconds",
            "x-current-token-count",
            "x-next-replenishment-time",
            "x-rl-daily-reset",
            "x-quota-reset-at",
            "x-quota-reset-time",
            "x-quota-resets",
            "x-quota-window",
            "x-quota-period",
            "remaining-req",
            "vendor-credits-remaining",
        ]) {
            assert!(may_matter(name), "{name}");
        }
    }

    #[test]
    fn ordinary_headers_do_not_matter() {
        for name in [
            "date",
            "content-type",
            "content-length",
            "server",
            "age",
            "x-request-id",
            "x-powered-by",
            "via",
            "x-content-type-options",
            "strict-transport-security",
            "access-control-allow-origin",
            "x-amz-request-id",
            "cache-control",
            "x-app-version",
            "x-ms-request-id",
            "x-response-time",
            "x-total-count",
            "content-encoding",
        ] {
            assert!(!may_matter(name), "{name}");
        }
    }

    #[test]
    fn quotes_keep_a_mark_from_splitting() {
        assert_eq!(
            split(r#"1;a=",;" , 2"#, ',').collect::<Vec<_>>(),
            [r#"1;a=",;""#, "2"]
        );
        assert_eq!(split(r#""\",";"#, ',').count(), 1);
        assert_eq!(split(r#""\\",a"#, ',').count(), 2);
        assert_eq!(parameter(r#"1; a=",;"; W = 3"#, "w"), Some("3"));
    }

    #[test]
    fn backslash_escapes_nothing_in_a_display_string() {
        let parts = |text| split(text, ',').collect::<Vec<_>>();
        assert_eq!(parts(r#"%"\",a"#), [r#"%"\""#, "a"]);
        assert_eq!(parts(r#"%"a,b",c"#), [r#"%"a,b""#, "c"]);
        // The quote after it opens a String again.
        assert_eq!(parts(r#"%"a%","\",b""#), [r#"%"a%""#, r#""\",b""#]);
    }
}
