//! Decides whether a response is a refusal, by its status and the evidence. Lists the codes and
//! phrases that count as evidence.

use http::StatusCode;

use super::generic::lines::Lines;
use super::observed::{Drafts, ObservedQuota};
use super::parse::text::Text;
use super::prose;

/// What a body states.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said {
    /// Whether there is a throttle code, in the body or in a header.
    pub(super) code: bool,
    /// Whether there is a throttle phrase.
    pub(super) phrase: bool,
    /// Whether the root has `"global": true`.
    pub(super) global: bool,
    /// The longest stated wait, in milliseconds.
    pub(super) wait: Option<u64>,
    /// The longest time to a reset, in milliseconds.
    pub(super) reset: Option<u64>,
}

/// Headers whose presence is evidence for a refusal.
pub(super) const FLAGS: [&str; 7] = [
    "x-envoy-ratelimited",
    "stripe-rate-limited-reason",
    "ratelimit-reason",
    "x-rate-limit-problem",
    "x-rate-limit-type",
    "x-ratelimit-global",
    "x-ratelimit-scope",
];

/// Headers that name the limiter that refused, best first, after `X-RateLimit-Global`.
pub(super) const SCOPES: [&str; 8] = [
    "x-ratelimit-scope",
    "x-rate-limit-scope",
    "x-ratelimit-reason",
    "x-rate-limit-type",
    "ratelimit-reason",
    "stripe-rate-limited-reason",
    "x-rate-limit-problem",
    "x-ms-throttle-scope",
];

/// The header that contains the error code of AWS.
pub(super) const ERROR_TYPE: &str = "x-amzn-errortype";

/// Statuses that mean a refusal without further evidence.
pub(super) fn is_always(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 420 | 430 | 509 | 529)
}

/// Returns whether the server refused the request because of a limit or too much load. `hint` is
/// the time to retry that a header states.
pub(super) fn is_limited(
    status: StatusCode,
    hint: Option<u64>,
    said: &Said,
    quotas: &Drafts,
    lines: &Lines<'_>,
) -> bool {
    let has_code = said.code || hint.is_some();
    let has_evidence = has_code || said.phrase || FLAGS.iter().any(|flag| lines.has(flag));
    match status.as_u16() {
        300..400 => false,
        _ if is_always(status) => true,
        402 | 403 | 503 => has_evidence || quotas.iter().any(ObservedQuota::is_used_up),
        400 => has_evidence,
        // Binance
        418 => {
            let starts = ["x-mbx-", "x-sapi-"];
            has_code
                || lines
                    .iter()
                    .any(|line| starts.iter().any(|start| line.name.starts_with(start)))
        }
        _ => said.code || said.phrase,
    }
}

/// Returns the longest time until a reset, of the quotas with this Remaining.
pub(super) fn longest_reset(quotas: &Drafts, remaining: Option<u64>) -> Option<u64> {
    quotas
        .iter()
        .filter(|quota| quota.remaining == remaining)
        .filter_map(|quota| quota.reset_after)
        .max()
}

/// Returns the limiter that refused, as the headers name it.
pub(super) fn scope(lines: &Lines<'_>) -> Option<Box<str>> {
    match lines.first("x-ratelimit-global") {
        Some(value) if value == "1" || value.eq_ignore_ascii_case("true") => Some("global".into()),
        _ => SCOPES
            .iter()
            .find_map(|name| lines.first(name))
            .map(|name| Text::lower(name).into()),
    }
}

/// Returns whether a word is a throttle code: after its last `#`, as a whole or before its first
/// `:`.
pub(super) fn is_code(word: &str) -> bool {
    let cut = Text::of(&[word.rsplit('#').next().unwrap_or(word)]);
    let code = cut.as_str();
    is_plain_code(code) || code.split(':').next().is_some_and(is_plain_code)
}

fn is_plain_code(word: &str) -> bool {
    CODES.iter().any(|code| code.eq_ignore_ascii_case(word)) || prose::is_code(word)
}

/// Codes for a rate limit or too much load whose words do not say so.
const CODES: [&str; 13] = [
    "EC2ThrottledException",
    "ProvisionedThroughputExceededException",
    "LimitExceededException",
    "SlowDown",
    "PriorRequestNotComplete",
    "quotaExceeded",
    "quota-exceeded",
    "RESOURCE_EXHAUSTED",
    "overloaded_error",
    "too_many_write_operations",
    "temporary-reduced-capacity",
    "abnormal-usage-detected",
    "COMPLEXITY_BUDGET_EXHAUSTED",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_after_hashes_and_before_colons() {
        for (word, expected) in [
            ("slowdown", true),
            (
                "ThrottlingException:http://internal.amazon.com/coral/",
                true,
            ),
            (
                "com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException",
                true,
            ),
            (
                "https://iana.org/assignments/http-problem-types#quota-exceeded",
                true,
            ),
            ("EAPI:Rate limit exceeded", true),
            ("EAPI:Invalid key", false),
            ("OVER_QUERY_LIMIT", true),
            ("policies.ratelimit.SpikeArrestViolation", true),
            ("THROTTLING_TOO_MANY_REQUESTS", true),
            ("usage_limit_reached", true),
            ("storageQuotaExceeded", false),
            ("FileSizeLimitExceeded", false),
            ("rate_limit_rule_not_found", false),
            ("TooManyParameters", false),
            ("ValidationException", false),
            ("", false),
        ] {
            assert_eq!(is_code(word), expected, "{word}");
        }
        assert!(is_code(&format!("{}Throttling", "#".repeat(1000))));
    }
}
