//! The limits of a caller, in the ways that the example compares.

use std::sync::Arc;
use std::time::Duration;

use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Cost, Estimates, Key, Quota, RateLimitLayer, RequestRef};

use crate::WINDOW;
use crate::api::{Api, INPUT, MAX_TOKENS, OUTPUT, REQUESTS, TOKENS};
use crate::server::{MOST, PROMPT};

/// How callers keep the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// They count requests, and leave tokens to the 429s.
    Requests,
    /// They count requests and tokens. The stream states the true cost, and they settle it.
    Settled,
}

impl Way {
    pub(crate) const ALL: [Way; 2] = [Way::Requests, Way::Settled];

    /// Returns its name on a command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Requests => "requests",
            Way::Settled => "settled",
        }
    }

    /// Returns its name in the table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Way::Requests => "requests only",
            Way::Settled => "requests and tokens, settled",
        }
    }
}

/// The longest that a response takes: 1500 tokens at 1000 per second, on a busy machine.
const LONGEST: Duration = Duration::from_secs(2);

/// The limits of one API, in one of the ways.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) api: Api,
    pub(crate) layer: RateLimitLayer,
    /// What answers usually cost.
    pub(crate) estimates: Estimates,
}

impl Limits {
    /// Makes the limits of a process, all of which share a Redis.
    pub(crate) async fn new(api: Api, way: Way, redis: &str) -> Result<Self, BoxError> {
        let store = RedisStore::builder(redis)
            .prefix(format!("llm-{}", way.name()))
            .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
            .build()?;
        store.connect().await?;
        let store = Arc::new(store);
        let limit = |quota: Quota| {
            RateLimitLayer::builder(quota)
                .key(move |_| Key::new(api.name()))
                .store(store.clone())
                .max_wait(Duration::from_secs(600))
        };
        let requests = Quota::new(REQUESTS, WINDOW);
        // The median: a server that counts what it produces refuses no answer that is longer.
        let estimates = Estimates::new(0.5);
        let learned = estimates.clone();
        let layer = match (way, api) {
            (Way::Requests, _) => limit(requests).build()?,
            // The server reserves the same, and gives back the same.
            (Way::Settled, Api::Tokens) => {
                limit(requests.and(Quota::new(TOKENS, WINDOW).of("tokens")))
                    .cost(|request| {
                        Cost::of("tokens", number(request, PROMPT) + number(request, MOST))
                    })
                    .settle_by_hand()
                    .build()?
            }
            // The prompt is known. The answer counts as it is produced, and has a layer of its own,
            // because only its units count late.
            (Way::Settled, Api::InputAndOutput) => {
                let input = limit(requests.and(Quota::new(INPUT, WINDOW).of("input_tokens")))
                    .cost(|request| Cost::of("input_tokens", number(request, PROMPT)))
                    .settle_by_hand()
                    .build()?;
                let output = limit(Quota::new(OUTPUT, WINDOW).of("output_tokens"))
                    .cost(move |_| {
                        Cost::of(
                            "output_tokens",
                            learned.estimate(api.name()).unwrap_or(MAX_TOKENS),
                        )
                    })
                    .settle_by_hand()
                    .counted_within(LONGEST)
                    .build()?;
                input.and(output)
            }
        };
        Ok(Limits {
            api,
            layer,
            estimates,
        })
    }
}

/// Returns the number in a header of the request.
fn number(request: &RequestRef<'_>, name: http::HeaderName) -> u32 {
    let text = request
        .header(name)
        .and_then(|bytes| std::str::from_utf8(bytes).ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}
