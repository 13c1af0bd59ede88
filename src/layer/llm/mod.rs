//! The layer for APIs of language models: how they count tokens, as code.
//!
//! A request is charged an estimate when it waits for its permit, from its body, and its true cost when the body of its
//! response has ended. What the two differ by is learned.

mod meter;
mod prompt;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::body::BodyLayer;
use super::rate_limit_builder::RateLimitBuilder;
use crate::config_error::ConfigError;
#[cfg(doc)]
use crate::layer::RateLimitLayer;

use meter::{Meter, OUTPUT, TOTAL};

/// How an API of language models counts tokens, for [`RateLimitBuilder::build_llm`].
///
/// | | for | `tokens` of the quota | `input_tokens` | `output_tokens` |
/// |---|---|---|---|---|
/// | [`openai`](Llm::openai) | OpenAI | the larger of the prompt and `max_tokens` | the prompt | `max_tokens` |
/// | [`reserving`](Llm::reserving) | Azure OpenAI, Databricks, Bedrock, and most others | the prompt and `max_tokens` | the prompt | `max_tokens` |
/// | [`anthropic`](Llm::anthropic) | Anthropic, `bedrock-mantle` | the prompt, and what answers usually take | the prompt | what answers usually take, counted as it is produced |
///
/// A quota has those of these units that the provider limits: see [`guide::llm_apis`](crate::guide::llm_apis).
///
/// # Estimates
///
/// - **The prompt** is measured in the JSON body of the request: three bytes of text are a token, until the responses have
///   shown how many tokens the texts for a model have. [`tokenizer`](Llm::tokenizer) measures in another way.
/// - **`max_tokens`** is what the request states under this or a similar name, times the number of answers.
/// - **A body that cannot be seen** ([`RequestRef::body`](crate::RequestRef::body)), or that is no JSON, and a request without
///   `max_tokens` take the [first estimate](Llm::first_estimate) until responses have stated more.
/// - A `GET`, `HEAD` or `DELETE` takes no tokens. A [`Cost`](crate::Cost) in the extensions of a request replaces the estimate.
/// - If an estimate is above the whole limit, the request waits until all of the limit is free
///   ([`wait_above_limit`](RateLimitBuilder::wait_above_limit)).
///
/// # True costs
///
/// The response states them, at the end of its body or stream ([`Spent`](crate::signal::Spent)). What a request took beyond
/// its estimate is charged. What it did not take is given back if the server does that: see [`gives_back`](Llm::gives_back).
/// A refused request takes no tokens. If a response states nothing, or the stream breaks, the estimate counts.
#[derive(Clone)]
pub struct Llm {
    counts: CountsBy,
    gives_back: bool,
    first_estimate: u32,
    tokenizer: Option<Tokenizer>,
}

/// Returns how many tokens a text has.
type Tokenizer = Arc<dyn Fn(&str) -> u32 + Send + Sync>;

/// What a server counts as the tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CountsBy {
    /// At admission, the larger of the prompt and `max_tokens`.
    Larger,
    /// At admission, the prompt and `max_tokens`.
    Both,
    /// The prompt at admission, and the answer as it is produced.
    Produced,
}

impl Llm {
    const DEFAULT_FIRST_ESTIMATE: u32 = 4096;

    /// How late a server may count the end of an answer, if nothing else is set.
    pub(super) const LONGEST_ANSWER: Duration = Duration::from_secs(60);

    fn new(counts: CountsBy) -> Self {
        Llm {
            counts,
            gives_back: counts == CountsBy::Produced,
            first_estimate: Llm::DEFAULT_FIRST_ESTIMATE,
            tokenizer: None,
        }
    }

    /// OpenAI: counts the larger of the prompt and `max_tokens` when a request arrives.
    pub fn openai() -> Self {
        Llm::new(CountsBy::Larger)
    }

    /// A server that counts the prompt and `max_tokens` when a request arrives, such as Azure OpenAI and Databricks. Use it
    /// also if it is not known how a server counts: no estimate is larger.
    pub fn reserving() -> Self {
        Llm::new(CountsBy::Both)
    }

    /// Anthropic: counts the prompt when a request arrives, and the answer as it is produced. `max_tokens` does not matter.
    ///
    /// Output tokens are [counted within](RateLimitBuilder::counted_within) 60 s, the time of the longest answer, if nothing
    /// else is set.
    pub fn anthropic() -> Self {
        Llm::new(CountsBy::Produced)
    }

    /// States that the server gives back what it has reserved for a request and the answer did not need, as Databricks
    /// does. Default: it does not, but for [`anthropic`](Llm::anthropic).
    ///
    /// If it does not, and the layer did, the server would refuse requests.
    pub fn gives_back(mut self) -> Self {
        self.gives_back = true;
        self
    }

    /// Sets how many tokens a prompt, or the longest answer, has if the request does not show it. Default: 4096 tokens.
    pub fn first_estimate(mut self, tokens: u32) -> Self {
        self.first_estimate = tokens;
        self
    }

    /// Sets how many tokens a text of a prompt has. Default: a token for three bytes. In both cases, responses correct it.
    ///
    /// It is called at least twice for each text of a request, so it should be fast.
    pub fn tokenizer<F>(mut self, tokenizer: F) -> Self
    where
        F: Fn(&str) -> u32 + Send + Sync + 'static,
    {
        self.tokenizer = Some(Arc::new(tokenizer));
        self
    }
}

impl fmt::Debug for Llm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Llm")
            .field("counts", &self.counts)
            .field("gives_back", &self.gives_back)
            .field("first_estimate", &self.first_estimate)
            .field("tokenizer", &self.tokenizer.is_some())
            .finish()
    }
}

impl RateLimitBuilder {
    /// Checks the settings and builds a layer for an API of language models: requests are charged the tokens that they take,
    /// by the rules of [`Llm`].
    ///
    /// The quota limits `tokens`, or `input_tokens` and `output_tokens`, and maybe requests. The layer also
    /// [reads bodies](RateLimitLayer::read_bodies), and keeps calls
    /// [in flight](RateLimitLayer::in_flight_until_body_end) until their body ends.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use http_body_util::{BodyExt, Full};
    /// use tollgate::{Key, Llm, Quota, RateLimitLayer};
    /// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// # let client = service_fn(|_: Request<String>| async {
    /// #     let body = r#"{"usage":{"prompt_tokens":13,"completion_tokens":5,"total_tokens":18}}"#;
    /// #     Ok::<_, BoxError>(Response::new(Full::new(bytes::Bytes::from(body))))
    /// # });
    /// let quota: Quota = "500/min, 80000 tokens/min".parse()?;
    /// let limit = RateLimitLayer::builder(quota).build_llm(Llm::reserving().gives_back())?;
    /// let limiter = limit.limiter();
    /// let client = ServiceBuilder::new().layer(limit).service(client);
    ///
    /// let prompt = r#"{"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}]}"#;
    /// let request = Request::post("https://api.example.com/v1/chat/completions").body(prompt.to_owned())?;
    /// let answer = client.oneshot(request).await?.into_body().collect().await?;
    /// assert_eq!(limiter.peek(Key::ALL).await?.limits[1].used, 18);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`build`](Self::build). Also if the quota limits none of these units or another one, or if
    /// [`cost`](Self::cost) is set.
    #[cfg_attr(docsrs, doc(cfg(feature = "llm")))]
    pub fn build_llm(self, llm: Llm) -> Result<BodyLayer, ConfigError> {
        let longest = (llm.counts == CountsBy::Produced).then_some(Llm::LONGEST_ANSWER);
        let units = self.units();
        check(&units, self.has_cost(), self.has_settle())?;
        // Without a limit of its own, what is produced is a part of all tokens.
        let late = if units.contains(&OUTPUT) {
            OUTPUT
        } else {
            TOTAL
        };
        let meter = Arc::new(Meter::new(llm, units));
        let (estimates, settles) = (meter.clone(), meter.clone());
        let layer = self
            .cost(move |request| estimates.estimate(request))
            .settle(move |response| response.refusal().map(|_| settles.nothing()))
            .settle_by_hand()
            .late_unit(late, longest)
            .build()?;
        let layer = layer.read_bodies().in_flight_until_body_end();
        Ok(layer.at_end_of_bodies(Arc::new(move |request| meter.begin(request))))
    }
}

/// Checks that a meter charges each of these `units`, and nobody else does.
fn check(units: &[&'static str], has_cost: bool, has_settle: bool) -> Result<(), ConfigError> {
    for (setting, is_set) in [("cost", has_cost), ("settle", has_settle)] {
        ConfigError::unless(!is_set, setting, "set", "left out: build_llm sets it")?;
    }
    ConfigError::unless(
        !units.is_empty() && units.iter().all(|unit| Meter::charges(unit)),
        "the quota of build_llm",
        format_args!("one of these units besides requests: {units:?}"),
        "one of tokens, or of input_tokens and output_tokens, such as 500/min, 80000 tokens/min",
    )
}
