//! The few lines of a response that may concern limits, found in one pass over the names of its
//! headers.

use http::HeaderMap;

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
                let value = value_of(value);
                if !value.is_empty() {
                    self.0.push(Line {
                        name: name.as_str(),
                        value,
                    });
                }
            }
        }
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
/// Almost all relevant names contain `limit`; the others have one of a few prefixes.
#[inline]
pub(in crate::signal) fn may_matter(name: &str) -> bool {
    let name = name.as_bytes();
    if name.len() < SHORTEST {
        return false;
    }
    let begins = match name {
        [b'r', b'e', b't', b'r', b'y', b'-', ..] => true,
        [
            b'x',
            b'-',
            b'a' | b'b' | b'e' | b'f' | b'm' | b'r' | b's' | b't',
            ..,
        ] => OTHERS
            .iter()
            .any(|other| name[2..].starts_with(other.as_bytes())),
        _ => false,
    };
    begins || has_limit(name)
}

/// The length of `ratelimit`, the shortest name.
const SHORTEST: usize = 9;

/// The prefixes, after `x-`, of the names that do not contain `limit`.
const OTHERS: [&str; 15] = [
    "ad-account-usage",
    "amz-retry-after",
    "amzn-errortype",
    "app-usage",
    "business-use-case-usage",
    "endpoint-monthly-call-",
    "fb-ads-insights-throttle",
    "mbx-",
    "ms-retry-after-ms",
    "ms-throttle-scope",
    "remaining-",
    "retry-after",
    "sapi-",
    "toggl-quota-",
    "trial-endpoint-call-",
];

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
pub(in crate::signal) fn split(text: &str, mark: char) -> impl Iterator<Item = &str> + Clone {
    let mut quoted = false;
    text.split(move |character| {
        quoted ^= character == '"';
        character == mark && !quoted
    })
    .map(trim)
}

/// Returns the value of `key=value`, without quotes, from the parameters of an item.
pub(in crate::signal) fn parameter<'a>(item: &'a str, key: &str) -> Option<&'a str> {
    let of = |part: &'a str| {
        let (name, value) = part.split_once('=')?;
        trim(name)
            .eq_ignore_ascii_case(key)
            .then_some(crate::signal::parse::number::unquoted(trim(value)))
    };
    split(item, ';').find_map(of)
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
        use crate::signal::{combine, refusal, vendor};
        let rows = vendor::ROWS.iter().flat_map(|row| row.headers).copied();
        let lists = rows
            .chain(retry_after::MILLIS)
            .chain(combine::NAMES)
            .chain(refusal::FLAGS)
            .chain(refusal::SCOPES);
        for name in lists.chain([
            retry_after::STANDARD,
            retry_after::OTHER,
            refusal::ERROR_TYPE,
            "ratelimit",
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
        assert_eq!(parameter(r#"1; a=",;"; W = 3"#, "w"), Some("3"));
    }
}
