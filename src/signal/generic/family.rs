//! The generic families of headers: reads the meaning of any name with `ratelimit` in it.

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
    Reset(usize),
    Window,
    WindowMillis,
    Utilization,
    RetryAfter,
}

/// The words of each role; roles of two words first.
const ROLES: [(&str, Role); 25] = [
    ("reset-after", Role::Reset(0)),
    ("resets-in", Role::Reset(0)),
    ("reset-in", Role::Reset(0)),
    ("reset-time", Role::Reset(2)),
    ("reset-date", Role::Reset(2)),
    ("interval-ms", Role::WindowMillis),
    ("interval-milliseconds", Role::WindowMillis),
    ("retry-after", Role::RetryAfter),
    ("limit", Role::Limit),
    ("max", Role::Limit),
    ("remaining", Role::Remaining),
    ("left", Role::Remaining),
    ("used", Role::Used),
    ("observed", Role::Used),
    ("usage", Role::Used),
    ("reset", Role::Reset(1)),
    ("resets", Role::Reset(1)),
    ("next", Role::Reset(1)),
    ("resettime", Role::Reset(2)),
    ("period", Role::Window),
    ("window", Role::Window),
    ("utilization", Role::Utilization),
    // Suffixes that count if no word above matches.
    ("limit", Role::Limit),
    ("remaining", Role::Remaining),
    ("reset", Role::Reset(1)),
];
const WORDS: usize = 22;

/// A header of a generic family.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Header<'a> {
    pub(in crate::signal) family: Family<'a>,
    pub(in crate::signal) role: Role,
    /// The name of the quota: the parts before and after the role.
    pub(in crate::signal) name: [&'a str; 2],
    /// The digest of the name, which tells different names apart.
    digest: u64,
    /// Whether the header is `RateLimit-DailyLimit`, which names the quota without a name.
    pub(in crate::signal) daily: bool,
}

impl<'a> Header<'a> {
    /// Reads the name of a header in lower case.
    pub(in crate::signal) fn read(name: &'a str) -> Option<Header<'a>> {
        let (family, role, pieces) = match name {
            "ratelimit-dailylimit" => (Family::Plain, Role::Limit, ["", ""]),
            "x-readratelimit-limit" => (Family::Read, Role::Limit, ["read", ""]),
            "x-readratelimit-usage" => (Family::Read, Role::Used, ["read", ""]),
            _ => {
                let (family, rest) = family(name)?;
                let (role, pieces) = role(rest)?;
                (family, role, pieces)
            }
        };
        let mut header = Header {
            family,
            role,
            name: pieces,
            digest: 0,
            daily: name == "ratelimit-dailylimit",
        };
        let add = |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        header.digest = header.bytes().fold(0, add);
        Some(header)
    }

    pub(in crate::signal) fn same_group(&self, other: &Header<'_>) -> bool {
        self.family == other.family && self.digest == other.digest && self.bytes().eq(other.bytes())
    }

    pub(in crate::signal) fn is_unnamed(&self) -> bool {
        self.name == ["", ""]
    }

    /// Returns the pieces of the name of the quota.
    pub(in crate::signal) fn pieces(&self) -> [&'a str; 5] {
        let size = if self.family == Family::BySize {
            "size"
        } else {
            ""
        };
        let dash = |before: &str, after: &str| {
            if before.is_empty() || after.is_empty() {
                ""
            } else {
                "-"
            }
        };
        let [before, after] = self.name;
        let first = if before.is_empty() { after } else { before };
        [size, dash(size, first), before, dash(before, after), after]
    }

    fn bytes(&self) -> impl Iterator<Item = u8> + use<'a> {
        self.pieces().into_iter().flat_map(str::bytes)
    }
}

/// Returns the family of a name, and the rest of the name.
fn family(name: &str) -> Option<(Family<'_>, &str)> {
    let mut start = 0;
    while let Some(rest) = name.get(start..) {
        let before = || name[..start].trim_end_matches('-');
        if let Some(after) = word(rest, "ratelimitbysize") {
            return Some((Family::BySize, after));
        }
        if let Some(after) = word(rest, "ratelimit") {
            let family = match before() {
                "" => Family::Plain,
                "x" => Family::X,
                vendor => Family::Vendor(vendor),
            };
            return Some((family, after));
        }
        if let Some(after) = word(rest, "rate-limit") {
            let family = match before() {
                "" => Family::Split,
                "x" => Family::XSplit,
                vendor => Family::Vendor(vendor),
            };
            return Some((family, after));
        }
        start += rest.find('-')? + 1;
    }
    None
}

/// Returns the rest of the text after whole words at its start, without the dash between.
fn word<'a>(text: &'a str, words: &str) -> Option<&'a str> {
    match text.strip_prefix(words)? {
        "" => Some(""),
        rest => rest.strip_prefix('-'),
    }
}

/// Returns the only role in the words, and the parts before and after it.
fn role(rest: &str) -> Option<(Role, [&str; 2])> {
    let mut found = None;
    let mut at = 0;
    while at < rest.len() {
        let words = &rest[at..];
        let known = ROLES[..WORDS]
            .iter()
            .find_map(|(known, role)| Some((role, word(words, known)?)));
        if let Some((role, after)) = known {
            let before = rest[..at].trim_end_matches('-');
            if found.replace((*role, [before, after])).is_some() {
                return None;
            }
            at = rest.len() - after.len();
        } else {
            at += words.find('-').map_or(words.len(), |dash| dash + 1);
        }
    }
    found.or_else(|| ending(rest)).or_else(|| {
        let is_limit = rest.is_empty() || crate::signal::generic::words::period_of(rest).is_some();
        is_limit.then_some((Role::Limit, [rest, ""]))
    })
}

/// Returns the first word that ends in a role, such as `dailyremaining`.
fn ending(rest: &str) -> Option<(Role, [&str; 2])> {
    let mut at = 0;
    for word in rest.split('-') {
        let end = at + word.len();
        for (known, role) in &ROLES[WORDS..] {
            if word.len() > known.len() && word.ends_with(known) {
                let after = rest[end..].trim_start_matches('-');
                return Some((*role, [&rest[..end - known.len()], after]));
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
        Role::Window => "the window, in seconds or with a unit",
        Role::WindowMillis => "the window, in milliseconds",
        Role::Utilization => "the part that is used",
        Role::RetryAfter => "when to retry",
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
                WindowMillis,
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
        ] {
            let header = Header::read(name).unwrap();
            assert_eq!(
                (header.family, header.role, &*header.pieces().concat()),
                (family, role, quota),
                "{name}"
            );
        }
        for name in [
            "x-ratelimit-limit-remaining",
            "x-ratelimit-cost",
            "x-limit",
            "x-ratelimited-limit",
            "rate-x-limit",
            "",
            "x-ratelimit-scope",
            "x-xratelimit-limit",
        ] {
            assert!(Header::read(name).is_none(), "{name}");
        }
    }
}
