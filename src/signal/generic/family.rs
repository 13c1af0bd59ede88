//! The generic families of headers: reads the meaning of a name from its words.

use crate::signal::generic::words;
use crate::signal::parse::text::Text;
use crate::signal::parse::time::{period_of, unit_of_name};

/// A family: its headers describe the limits of one server in one spelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::signal) enum Family<'a> {
    /// `RateLimit-…`
    Plain,
    /// `X-RateLimit-…`
    X,
    /// `X-Rate-Limit-…`
    XSplit,
    /// `Rate-Limit-…`
    Split,
    /// Any other prefix, which is the name of the family.
    Vendor(&'a str),
    /// `…RateLimitBySize-…`: counts tokens.
    BySize,
    /// `X-ReadRateLimit-…`
    Read,
    /// `X-Vendor-…-Remaining`, without `ratelimit`. The word of the vendor is the name of the family.
    Loose(&'a str),
}

impl Family<'_> {
    /// The families that describe the same bucket if a quota has no name, best first.
    pub(in crate::signal) const SYNONYMS: [Family<'static>; 4] =
        [Family::Plain, Family::X, Family::XSplit, Family::Split];
}

/// The meaning of a header's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::signal) enum Role {
    Limit,
    Remaining,
    Used,
    /// One of three kinds of reset; the best kind with a valid value counts.
    Reset(u8),
    Window,
    /// A fraction of the limit.
    Utilization,
    Percent,
    RetryAfter,
    /// Whether the limit is exceeded, in a word.
    State,
    /// The name of the quota; only inside of a value.
    Name,
    /// No word states a meaning.
    Open,
}

/// The words of each role; roles of several words first.
const ROLES: [(&str, Role); 49] = [
    ("reset-after", Role::Reset(0)),
    ("resets-in", Role::Reset(0)),
    ("reset-in", Role::Reset(0)),
    ("reset-at", Role::Reset(1)),
    ("reset-timestamp", Role::Reset(1)),
    ("next-replenishment-time", Role::Reset(1)),
    ("reset-time", Role::Reset(2)),
    ("reset-date", Role::Reset(2)),
    ("retry-after", Role::RetryAfter),
    ("retry-in", Role::RetryAfter),
    ("current-token-count", Role::Remaining),
    ("burst-capacity", Role::Limit),
    ("bucket-level", Role::Used),
    ("limit", Role::Limit),
    ("max", Role::Limit),
    ("remaining", Role::Remaining),
    ("remain", Role::Remaining),
    ("left", Role::Remaining),
    ("available", Role::Remaining),
    ("used", Role::Used),
    ("observed", Role::Used),
    ("usage", Role::Used),
    ("reset", Role::Reset(1)),
    ("resets", Role::Reset(1)),
    ("resetat", Role::Reset(1)),
    ("next", Role::Reset(1)),
    ("resettime", Role::Reset(2)),
    ("period", Role::Window),
    ("window", Role::Window),
    ("utilization", Role::Utilization),
    ("towait", Role::RetryAfter),
    // Words that count if no word above is in the name.
    ("quota", Role::Limit),
    ("total", Role::Limit),
    ("capacity", Role::Limit),
    ("allowed", Role::Limit),
    ("count", Role::Used),
    ("interval", Role::Window),
    ("duration", Role::Window),
    ("retry", Role::RetryAfter),
    ("state", Role::State),
    // Words of the members of a value.
    ("q", Role::Limit),
    ("lim", Role::Limit),
    ("r", Role::Remaining),
    ("rem", Role::Remaining),
    ("t", Role::Reset(1)),
    ("until", Role::Reset(1)),
    ("w", Role::Window),
    ("name", Role::Name),
    ("group", Role::Name),
];
const STRONG: usize = 31;
const WORDS: usize = 40;

/// The mark between the words of a header. In the keys of a value it may be `_` as well.
const DASH: &[u8] = b"-";

/// Suffixes that count if no word matches.
const ENDINGS: [(&str, Role); 3] = [
    ("limit", Role::Limit),
    ("remaining", Role::Remaining),
    ("reset", Role::Reset(1)),
];

/// Words for a percentage.
const PERCENT: [&str; 3] = ["percent", "percentage", "pct"];

/// Words of headers that count something else than requests.
const OTHERS: [&str; 14] = [
    "page",
    "pagination",
    "total",
    "offset",
    "items",
    "results",
    "rows",
    "records",
    "file",
    "upload",
    "content",
    "cache",
    "storage",
    "session",
];

/// A header of a generic family, or a member of its value.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Header<'a> {
    pub(in crate::signal) family: Family<'a>,
    pub(in crate::signal) role: Role,
    /// The unit of the value, in milliseconds, if the name states one.
    pub(in crate::signal) unit: Option<u32>,
    /// The name of the quota: the parts before and after the role, and the member of the value.
    pub(in crate::signal) name: Text,
    /// The part of a value that describes one quota of several.
    pub(in crate::signal) part: &'a str,
}

impl<'a> Header<'a> {
    /// Reads the name of a header in lower case.
    pub(in crate::signal) fn read(name: &'a str) -> Option<Header<'a>> {
        let (family, read) = match name {
            "ratelimit-dailylimit" => (Family::Plain, Read::of(Role::Limit, ["", ""])),
            "x-readratelimit-limit" => (Family::Read, Read::of(Role::Limit, ["read", ""])),
            "x-readratelimit-usage" => (Family::Read, Read::of(Role::Used, ["read", ""])),
            _ => match family(name) {
                Some((family, rest)) => {
                    let mut read = read_words(rest, &ROLES[..WORDS], DASH)?;
                    let is_open = read.role == Role::Open;
                    if is_open && (rest.is_empty() || period_of(rest).is_some()) {
                        read.role = Role::Limit;
                    }
                    (family, read)
                }
                None => loose(name)?,
            },
        };
        Some(Header {
            family,
            role: read.role,
            unit: read.unit,
            name: with_dashes(&read.pieces),
            part: "",
        })
    }

    /// Returns the header for a member of its value, such as `limit` in `{"limit":10}`. If the key
    /// does not state a meaning, the member has that of the header.
    pub(in crate::signal) fn member(
        &self,
        key: &'a str,
        label: Option<&'a str>,
        part: &'a str,
    ) -> Header<'a> {
        let read = match read_words(key, &ROLES, b"-_") {
            Some(read) if read.role != Role::Open => read,
            _ => Read {
                role: self.role,
                unit: self.unit,
                pieces: [key, ""],
            },
        };
        let [before, after] = read.pieces;
        let rest = if before.is_empty() { after } else { before };
        let (name, part) = match (label, part) {
            (Some(label), "") => (Text::of(&[label]), rest),
            (Some(label), part) => (Text::of(&[label]), part),
            (None, part) => (with_dashes(&[self.name.as_str(), rest]), part),
        };
        Header {
            role: read.role,
            unit: read.unit,
            name,
            part,
            ..*self
        }
    }

    /// Returns the same header for a part of a value that states one quota of several.
    pub(in crate::signal) fn part(&self, role: Role, part: &'a str) -> Header<'a> {
        let of_family = match self.family {
            Family::Vendor(prefix) if self.is_unnamed() => prefix.strip_prefix("x-"),
            _ => None,
        };
        Header {
            role,
            name: of_family.map_or(self.name, |name| Text::of(&[name])),
            part,
            ..*self
        }
    }

    pub(in crate::signal) fn is_unnamed(&self) -> bool {
        self.name == Text::EMPTY
    }

    /// Returns the name of the quota as it is stated.
    pub(in crate::signal) fn quota_name(&self) -> Text {
        match self.family {
            Family::BySize => with_dashes(&["size", self.name.as_str()]),
            _ => self.name,
        }
    }
}

/// Joins the pieces that are not empty.
fn with_dashes(pieces: &[&str]) -> Text {
    let mut all = pieces.iter().filter(|piece| !piece.is_empty());
    let first = all.next().copied().unwrap_or_default();
    all.fold(Text::of(&[first]), |name, piece| {
        Text::of(&[name.as_str(), "-", piece])
    })
}

/// Returns the family of a name, and the rest of the name.
pub(in crate::signal) fn family(name: &str) -> Option<(Family<'_>, &str)> {
    let mut start = 0;
    while let Some(rest) = name.get(start..) {
        if let Some(after) = word(rest, "ratelimitbysize", DASH) {
            return Some((Family::BySize, after));
        }
        for (words, plain, x) in [
            ("ratelimit", Family::Plain, Family::X),
            ("rate-limit", Family::Split, Family::XSplit),
        ] {
            if let Some(after) = word(rest, words, DASH) {
                let family = match name[..start].trim_end_matches('-') {
                    "" => plain,
                    "x" => x,
                    vendor => Family::Vendor(vendor),
                };
                return Some((family, after));
            }
        }
        start += rest.find('-')? + 1;
    }
    None
}

/// Reads a name without `ratelimit`: `X-Vendor-Name-Limit-Remaining`. The first word is that of the
/// vendor, unless it says what is counted. `limit`, `quota` and `api-call` say that a quota is meant.
fn loose(name: &str) -> Option<(Family<'_>, Read<'_>)> {
    let rest = name.strip_prefix("x-").unwrap_or(name);
    let read = read_words(rest, &ROLES[..WORDS], DASH)?;
    if read.role == Role::Open
        || !rest.contains('-')
        || rest.split('-').any(|word| OTHERS.contains(&word))
    {
        return None;
    }
    let [mut before, mut after] = read.pieces;
    // In `shop-api-call`, `api` is last only once `call` is gone.
    for mark in ["api", "call", "calls", "api", "limit", "quota"] {
        before = match before.strip_suffix(mark) {
            Some(front) if front.is_empty() || front.ends_with('-') => front.trim_end_matches('-'),
            _ => before,
        };
    }
    if let (Some((front, back)), "") = (before.split_once("-limit-"), after) {
        (before, after) = (front, back);
    }
    // `burstlimit`: what is before `limit` is no vendor.
    let glued = before
        .strip_suffix("limit")
        .filter(|front| !front.is_empty());
    before = glued.unwrap_or(before);
    let (first, others) = before.split_once('-').unwrap_or((before, ""));
    let is_glued = others.is_empty() && glued.is_some();
    let is_vendor = !is_glued && !words::is_counted(first);
    let (vendor, before) = if is_vendor {
        (first, others)
    } else {
        ("", before)
    };
    let pieces = [before, after];
    Some((Family::Loose(vendor), Read { pieces, ..read }))
}

/// The meaning of a name, and the parts of the name around the words that state it.
#[derive(Clone, Copy, Debug)]
struct Read<'a> {
    role: Role,
    unit: Option<u32>,
    pieces: [&'a str; 2],
}

impl<'a> Read<'a> {
    fn of(role: Role, pieces: [&'a str; 2]) -> Self {
        Read {
            role,
            unit: None,
            pieces,
        }
    }
}

/// Returns the rest of the text after whole words at its start, without the mark between.
fn word<'a>(text: &'a str, words: &str, marks: &[u8]) -> Option<&'a str> {
    let (start, rest) = text.as_bytes().split_at_checked(words.len())?;
    if rest.first().is_some_and(|byte| !marks.contains(byte)) {
        return None;
    }
    // The words are in lower case, with dashes.
    let are_same = start.iter().zip(words.as_bytes()).all(|(byte, word)| {
        byte.eq_ignore_ascii_case(word) || (*word == b'-' && marks.contains(byte))
    });
    are_same.then(|| text.get(words.len() + 1..).unwrap_or(""))
}

/// Reads the only role in the words, or the last of several if it is the end of the name. Returns
/// `None` if the name is not clear.
fn read_words<'a>(rest: &'a str, roles: &[(&str, Role)], marks: &[u8]) -> Option<Read<'a>> {
    let (mut found, mut weak) = (None, None);
    let mut several = false;
    let mut at = 0;
    while at < rest.len() {
        let words = &rest[at..];
        let first = words.as_bytes()[0].to_ascii_lowercase();
        let role = roles.iter().position(|(known, _)| {
            known.as_bytes()[0] == first && word(words, known, marks).is_some()
        });
        at = match role {
            Some(place) => {
                let (known, role) = roles[place];
                let read = around(rest, at, at + known.len(), role, marks);
                if place < STRONG {
                    several |= found.replace(read).is_some();
                } else {
                    weak = weak.or(Some(read));
                }
                at + known.len() + 1
            }
            None => {
                let next = words.bytes().position(|byte| marks.contains(&byte));
                next.map_or(rest.len(), |next| at + next + 1)
            }
        };
    }
    let read = found.or(weak).or_else(|| ending(rest));
    let read = read.unwrap_or(Read::of(Role::Open, [rest, ""]));
    // `hard-limit-remaining` is what remains of the hard limit; `limit-remaining` may be either.
    let [before, after] = read.pieces;
    let is_clear =
        !several || (after.is_empty() && ROLES.iter().all(|(known, _)| *known != before));
    is_clear.then_some(read)
}

/// Takes the words of a role out of a name, with the unit of a time after them.
fn around<'a>(rest: &'a str, at: usize, end: usize, role: Role, marks: &[u8]) -> Read<'a> {
    let is_mark = |mark: char| marks.contains(&(mark as u8));
    let mut before = rest[..at].trim_end_matches(is_mark);
    let mut after = rest.get(end + 1..).unwrap_or("");
    let (mut role, mut unit) = (role, None);
    match role {
        Role::Reset(_) | Role::Window | Role::RetryAfter => {
            let of = word(after, "in", marks).unwrap_or(after);
            let (last, rest) = of.split_once(is_mark).unwrap_or((of, ""));
            unit = unit_of_name(last);
            if unit.is_some() {
                after = rest;
            }
            // `time-reset`
            if let Some(front) = before.strip_suffix("time")
                && (front.is_empty() || front.ends_with(is_mark))
            {
                before = front.trim_end_matches(is_mark);
            }
        }
        Role::Used if PERCENT.contains(&after) => (role, after) = (Role::Percent, ""),
        Role::Used if PERCENT.contains(&before) => (role, before) = (Role::Percent, ""),
        Role::Remaining if PERCENT.contains(&after) => role = Role::Open,
        // `remaining-seconds` is a time, and `remaining-second` a quota.
        Role::Remaining if after.len() > 3 => {
            unit = unit_of_name(after);
            if unit.is_some() {
                (role, after) = (Role::Reset(0), "");
            }
        }
        _ => {}
    }
    Read {
        role,
        unit,
        pieces: [before, after],
    }
}

/// Returns the first word that ends in a role, such as `dailyremaining` or `dailylimitremaining`.
fn ending(rest: &str) -> Option<Read<'_>> {
    let mut at = 0;
    for word in rest.split('-') {
        let end = at + word.len();
        for (known, role) in ENDINGS {
            if word.len() > known.len() && word.ends_with(known) {
                let front = &rest[..end - known.len()];
                let before = front.strip_suffix("limit").unwrap_or(front);
                let after = rest[end..].trim_start_matches('-');
                return Some(Read::of(role, [before, after]));
            }
        }
        at = end + 1;
    }
    None
}

/// Returns the words for each meaning, for the page of headers.
#[cfg(test)]
pub(in crate::signal) fn words() -> Vec<(&'static str, Vec<&'static str>)> {
    let meaning = |role| match role {
        Role::Limit => "the limit",
        Role::Remaining => "what is left",
        Role::Used => "what is used",
        Role::Reset(0) => "the reset (first choice)",
        Role::Reset(1) => "the reset (second choice)",
        Role::Reset(_) => "the reset (third choice)",
        Role::Window => "the window",
        Role::Utilization => "the part that is used",
        Role::Percent => "the part that is used, in percent",
        Role::RetryAfter => "when to retry",
        Role::State => "`throttled` if nothing is left",
        Role::Name | Role::Open => "the name",
    };
    let mut all = Vec::<(_, Vec<_>)>::new();
    for (word, role) in &ROLES[..WORDS] {
        match all.iter_mut().find(|(known, _)| *known == meaning(*role)) {
            Some((_, words)) => words.push(*word),
            None => all.push((meaning(*role), vec![*word])),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        use Role::*;
        for (name, family, role, quota) in [
            ("ratelimit-limit", Family::Plain, Limit, ""),
            ("x-ratelimit-reset-after", Family::X, Reset(0), ""),
            ("x-rate-limit", Family::XSplit, Limit, ""),
            ("rate-limit-reset", Family::Split, Reset(1), ""),
            ("x-ratelimit-limit-requests", Family::X, Limit, "requests"),
            (
                "anthropic-ratelimit-input-tokens-reset",
                Family::Vendor("anthropic"),
                Reset(1),
                "input-tokens",
            ),
            (
                "x-ratelimit-requests-limit-day",
                Family::X,
                Limit,
                "requests-day",
            ),
            (
                "x-hubspot-ratelimit-daily",
                Family::Vendor("x-hubspot"),
                Limit,
                "daily",
            ),
            (
                "x-hubspot-ratelimit-interval-milliseconds",
                Family::Vendor("x-hubspot"),
                Window,
                "",
            ),
            ("x-ratelimit-userremaining", Family::X, Remaining, "user"),
            (
                "x-ratelimitbysize-limit-minute",
                Family::BySize,
                Limit,
                "size-minute",
            ),
            ("ratelimitbysize-reset", Family::BySize, Reset(1), "size"),
            ("x-ratelimit-retry-after", Family::X, RetryAfter, ""),
            (
                "x-ratelimit-remaining-second",
                Family::X,
                Remaining,
                "second",
            ),
            ("x-ratelimit-remaining-seconds", Family::X, Reset(0), ""),
            ("x-rate-limit-time-window-ms", Family::XSplit, Window, ""),
            (
                "x-ratelimit-hard-limit-remaining",
                Family::X,
                Remaining,
                "hard-limit",
            ),
            (
                "x-vendor-error-limit-remain",
                Family::Loose("vendor"),
                Remaining,
                "error",
            ),
            (
                "x-vendor-shop-api-call-limit",
                Family::Loose("vendor"),
                Limit,
                "shop",
            ),
            (
                "x-user-limit-24hour-reset",
                Family::Loose(""),
                Reset(1),
                "user-24hour",
            ),
            (
                "x-vendor-dailylimitremaining",
                Family::Loose("vendor"),
                Remaining,
                "daily",
            ),
            (
                "x-burstlimit-remaining",
                Family::Loose(""),
                Remaining,
                "burst",
            ),
            ("x-quota-remaining", Family::Loose(""), Remaining, ""),
        ] {
            let header = Header::read(name).unwrap();
            assert_eq!(
                (header.family, header.role, header.quota_name().as_str()),
                (family, role, quota),
                "{name}"
            );
        }
        for name in [
            "x-ratelimit-limit-remaining",
            "x-limit",
            "",
            "x-vendor-page-limit",
            "x-vendor-pages",
        ] {
            assert!(Header::read(name).is_none(), "{name}");
        }
        for name in ["x-ratelimit-cost", "x-ratelimit-scope"] {
            assert_eq!(Header::read(name).unwrap().role, Open, "{name}");
        }
    }
}
