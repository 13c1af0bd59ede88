//! Words in the names of quotas: periods and units.

use crate::signal::parse::time::period;

/// Returns the period and the unit in a name such as `InputTokensPerModelPerMinute-Free`.
pub(in crate::signal) fn of_quota_id(id: &str) -> (Option<u64>, Option<&'static str>) {
    let span = id
        .match_indices("Per")
        .find_map(|(at, per)| period(first_word(&id[at + per.len()..])));
    (span, id.contains("Token").then_some("tokens"))
}

/// Returns the first of words such as `MinuteFree`.
fn first_word(words: &str) -> &str {
    let mut letters = words.char_indices().skip(1);
    let end = letters.find(|(_, letter)| !letter.is_ascii_lowercase());
    &words[..end.map_or(words.len(), |(end, _)| end)]
}

/// The words of names that state a unit, best first.
const UNITS: [(&str, &str); 10] = [
    ("tokens", "tokens"),
    ("tpm", "tokens"),
    ("tpd", "tokens"),
    ("complexity", "complexity"),
    ("bytes", "bytes"),
    ("credits", "credits"),
    ("error", "errors"),
    ("errors", "errors"),
    ("concurrent", "concurrent-requests"),
    ("concurrency", "concurrent-requests"),
];

/// Returns the unit in a name, if it is not requests.
pub(in crate::signal) fn unit_of(name: &str) -> Option<&'static str> {
    match name {
        "" => None,
        "token" => Some("tokens"),
        // Seconds of the server's work.
        _ if name.starts_with("time-") => Some("seconds"),
        _ => {
            let known = UNITS.iter().find(|(known, _)| {
                let mut words = name.split(['-', '_']);
                words.any(|word| word.eq_ignore_ascii_case(known))
            });
            known.map(|(_, unit)| *unit)
        }
    }
}

/// Returns whether a word says what is counted, or for whom.
pub(in crate::signal) fn is_counted(word: &str) -> bool {
    const OWNERS: [&str; 6] = ["user", "app", "account", "client", "ip", "burst"];
    is_plain(word) || OWNERS.contains(&word) || unit_of(word).is_some()
}

/// Returns whether a name states only a unit and a period: the quota is then for all calls.
pub(in crate::signal) fn is_plain(name: &str) -> bool {
    const PLAIN: [&str; 12] = [
        "requests",
        "request",
        "calls",
        "tokens",
        "complexity",
        "bytes",
        "credits",
        "input",
        "output",
        "per",
        "global",
        "total",
    ];
    name.split(['-', '_']).all(|word| {
        PLAIN.iter().any(|plain| word.eq_ignore_ascii_case(plain)) || period(word).is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_state_units() {
        assert_eq!(unit_of("input-tokens"), Some("tokens"));
        assert_eq!(unit_of("tokens_usage_based"), Some("tokens"));
        assert_eq!(unit_of("tokenset"), None);
        assert_eq!(unit_of("api-token"), None);
        assert_eq!(unit_of("time-xrm-requests"), Some("seconds"));
        let id = "GenerateContentInputTokensPerModelPerMinute-FreeTier";
        assert_eq!(of_quota_id(id), (Some(60_000), Some("tokens")));
        assert_eq!(of_quota_id("ReadsPerDayPerUser"), (Some(86_400_000), None));
        assert_eq!(of_quota_id("Perµ"), (None, None));
    }

    #[test]
    fn plain_name_states_only_unit_and_period() {
        for (name, expected) in [
            ("requests", true),
            ("input-tokens", true),
            ("requests_per_day", true),
            ("5h", true),
            ("search", false),
            ("requests-search", false),
            ("", false),
        ] {
            assert_eq!(is_plain(name), expected, "{name}");
        }
    }
}
