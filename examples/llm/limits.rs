//! The limits of a caller, in the ways that the example compares.

use std::time::Duration;

use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{Key, Llm, Quota, RateLimitLayer};

use crate::WINDOW;
use crate::api::{Api, INPUT, OUTPUT, REQUESTS, TOKENS};
use crate::common;

/// How callers keep the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// They count requests, and leave tokens to the 429s.
    Requests,
    /// They count requests and tokens. The stream states the true cost, which is settled.
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

/// Makes the client of a process. All processes share their limits through a Redis.
pub(crate) async fn client(
    api: Api,
    way: Way,
    redis: &str,
) -> Result<ClientWithMiddleware, BoxError> {
    let store = RedisStore::builder(redis)
        .prefix(format!("llm-{}", way.name()))
        .store_timeout(Duration::from_secs(2)) // a job is not in a hurry
        .build()?;
    store.connect().await?;
    let limit = |quota: Quota| {
        RateLimitLayer::builder(quota)
            .key(move |_| Key::new(api.name()))
            .store(store)
            .max_wait(Duration::from_secs(600))
    };
    let requests = Quota::new(REQUESTS, WINDOW);
    let client = ClientBuilder::new(common::client()?);
    let client = match (way, api) {
        (Way::Requests, _) => client.with(limit(requests).build()?),
        (Way::Settled, Api::Tokens) => {
            let quota = requests.and(Quota::new(TOKENS, WINDOW).of("tokens"));
            client.with(limit(quota).build_llm(Llm::reserving().gives_back())?)
        }
        (Way::Settled, Api::InputAndOutput) => {
            let input = Quota::new(INPUT, WINDOW).of("input_tokens");
            let output = Quota::new(OUTPUT, WINDOW).of("output_tokens");
            client.with(limit(requests.and(input).and(output)).build_llm(Llm::anthropic())?)
        }
    };
    Ok(client.build())
}
