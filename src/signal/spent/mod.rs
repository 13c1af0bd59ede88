//! What a response states that its request has used: tokens or points.
//!
//! The counts stand in a body as JSON, or in the events of a stream. [`SpentReader`] reads both, in
//! chunks of any size, and keeps none of them: `json` follows the few paths of keys that lead to a
//! count, and `events` finds the JSON in server-sent events.

mod events;
mod json;
#[cfg(test)]
mod properties;
mod start;
#[cfg(test)]
mod vector_tests;

use std::fmt;

use crate::cost::Cost;
pub use events::SpentReader;

/// The units of a [`Spent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Tokens,
    InputTokens,
    OutputTokens,
    CacheCreationInputTokens,
    CacheReadInputTokens,
    Points,
}

/// The names of all units, in the order of [`Unit`].
const NAMES: [&str; 6] = [
    "tokens",
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "points",
];

/// What a response states that its request has used: a count for each unit.
///
/// Each unit has one name, whatever the server calls it. A count is what the server states: nothing
/// is added up, and a unit that the response does not state is missing.
///
/// | unit | where it stands |
/// |---|---|
/// | `tokens` | `usage.total_tokens`, `usage.totalTokens`, `usageMetadata.totalTokenCount` |
/// | `input_tokens` | `usage.prompt_tokens`, `usage.input_tokens`, `usage.inputTokens`, `usageMetadata.promptTokenCount` |
/// | `output_tokens` | `usage.completion_tokens`, `usage.output_tokens`, `usage.outputTokens`, `usageMetadata.candidatesTokenCount` |
/// | `cache_creation_input_tokens` | `usage.cache_creation_input_tokens`, `usage.cacheWriteInputTokens` |
/// | `cache_read_input_tokens` | `usage.cache_read_input_tokens`, `usage.cacheReadInputTokens` |
/// | `points` | `extensions.cost.actualQueryCost` (Shopify), `data.rateLimit.cost` (GitHub) |
///
/// In the events of a stream, `usage` may also stand in `response` (OpenAI's Responses) or in
/// `message` (Anthropic). With a [`Settlement`](crate::Settlement), the count becomes the [true
/// cost](crate::guide::true_costs) of the request. [The page on LLM APIs](crate::guide::llm_apis) says
/// which provider counts which of them.
///
/// ```
/// # use tollgate::Signal;
/// let response = http::Response::new(());
/// let body = br#"{"usage": {"prompt_tokens": 13, "completion_tokens": 5, "total_tokens": 18}}"#;
/// let spent = Signal::read_with_body(&response, body).spent();
/// assert_eq!(spent.count("tokens"), Some(18));
/// assert_eq!(spent.count("points"), None);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// In the order of [`Unit`].
    counts: [Option<u32>; NAMES.len()],
}

impl Spent {
    /// Reads a whole body: JSON or server-sent events.
    pub(super) fn in_body(body: &[u8]) -> Self {
        let mut reader = SpentReader::new();
        reader.read(body);
        reader.spent()
    }

    /// Returns the count of `unit`, such as `tokens`. `None` if the response does not state it, or
    /// if it is none of the units above.
    ///
    /// A fraction is rounded up. A count above `u32::MAX` is cut.
    pub fn count(&self, unit: &str) -> Option<u32> {
        self.iter()
            .find_map(|(name, count)| (name == unit).then_some(count))
    }

    /// Returns the units that the response states, each with its count.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let all = NAMES.into_iter().zip(self.counts);
        all.filter_map(|(unit, count)| Some((unit, count?)))
    }

    /// Sets the count of a unit. The last one counts: in a stream, later events have larger counts.
    fn set(&mut self, unit: Unit, count: u32) {
        self.counts[unit as usize] = Some(count);
    }
}

/// States each unit that the response states, and no number of requests.
///
/// ```
/// # use tollgate::{Cost, Signal};
/// let response = http::Response::new(());
/// let body = br#"{"usage": {"prompt_tokens": 13, "completion_tokens": 5, "total_tokens": 18}}"#;
/// let spent = Signal::read_with_body(&response, body).spent();
/// assert_eq!((spent.count("tokens"), spent.count("requests")), (Some(18), None));
/// let cost = Cost::from(spent);
/// # let _ = cost;
/// ```
impl From<Spent> for Cost {
    fn from(spent: Spent) -> Self {
        let stated = spent.iter();
        stated.fold(Cost::NOTHING_STATED, |cost, (unit, count)| {
            cost.and(unit, count)
        })
    }
}

impl fmt::Debug for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}
