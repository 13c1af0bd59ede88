//! The guide: one page for each task. Each page begins with code that works.
//!
//! To begin:
//!
//! - [Choosing a limiter](choosing_a_limiter): tollgate beside other crates, when not to use it, and how
//!   to come from governor and from Tower's `RateLimit`.
//! - [First steps](first_steps): the first program, and one for each kind of client.
//! - [Choosing a quota](choosing_a_quota): how to describe the limit of a server, such as requests per
//!   minute, and how long a request may wait.
//! - [Keys](crate::key): whose limit it is.
//! - [Handling a refusal](refusals): why a request was refused, and when to try again (`Retry-After`, 429).
//! - [Retry and timeout](retry_and_timeout): the order of the layers.
//!
//! For a client or a kind of API:
//!
//! - [Clients](clients): recipes for hyper-util, reqwest-middleware, octocrab, kube, async-openai, the
//!   AWS SDK and graphql_client.
//! - [gRPC](crate::grpc): tonic and other clients.
//! - [Blocking code](crate::blocking): threads without a Tokio runtime, `ureq` and `reqwest::blocking`.
//! - [LLM APIs](llm_apis): tokens per minute, how providers count them, and what to use for each.
//! - [True costs](true_costs): limits on tokens or points, where the response states the cost.
//!
//! For more than one limit:
//!
//! - [Keys, plans and routes](keys_plans_routes): quotas of customers and of routes.
//! - [Who goes first](classes): shares of a quota for classes of requests.
//! - [Several limits](several_limits): limits with different keys on one request.
//! - [Calls in flight](in_flight): a concurrency limit, on calls at the same time.
//! - [Limits you do not know](crate::pace): a throttle that finds the speed by itself.
//! - [Learning from responses](learning): other clients of the same limit, and limits that a server
//!   states.
//! - [Headers](crate::signal): the response headers that tollgate understands.
//!
//! To operate a fleet:
//!
//! - [Many processes](many_processes): one limit, counted in Redis.
//! - [In Redis](crate::store#in-redis): which keys exist, what a Redis user may do, how to inspect.
//! - [Operate](operate): metrics, why a request waits, a guard against bans, shutdown.
//! - [Guarantees](guarantees): what tollgate promises, and where each promise ends.
//! - [Costs](costs): calls, CPU and memory, and how they grow.
//! - [Testing](testing): tests of your program that wait for nothing.
//!
//! To change tollgate: [architecture], with the picture, five walks through the code, and
//! the glossary.

#[doc = include_str!("architecture.md")]
pub mod architecture {}

#[doc = include_str!("choosing_a_limiter.md")]
pub mod choosing_a_limiter {}

#[doc = include_str!("choosing_a_quota.md")]
pub mod choosing_a_quota {}

#[doc = include_str!("clients.md")]
pub mod clients {}

#[doc = include_str!("costs.md")]
pub mod costs {}

#[doc = include_str!("first_steps.md")]
pub mod first_steps {}

#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("in_flight.md")]
pub mod in_flight {}

#[doc = include_str!("classes.md")]
pub mod classes {}

#[doc = include_str!("keys_plans_routes.md")]
pub mod keys_plans_routes {}

#[doc = include_str!("learning.md")]
pub mod learning {}

#[doc = include_str!("llm_apis.md")]
pub mod llm_apis {}

#[doc = include_str!("many_processes.md")]
pub mod many_processes {}

#[doc = include_str!("operate.md")]
pub mod operate {}

#[doc = include_str!("refusals.md")]
pub mod refusals {}

#[doc = include_str!("retry_and_timeout.md")]
pub mod retry_and_timeout {}

#[doc = include_str!("several_limits.md")]
pub mod several_limits {}

#[doc = include_str!("testing.md")]
pub mod testing {}

#[doc = include_str!("true_costs.md")]
pub mod true_costs {}
