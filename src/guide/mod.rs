//! The guide: one page for each task. Each page begins with code that works.
//!
//! To use tollgate:
//!
//! - [First steps](first_steps): the first program, and one for each kind of client.
//! - [Choosing a quota](choosing_a_quota): how to describe the limit of a server, and how long a
//!   request may wait.
//! - [Keys](keys): whose limit it is.
//! - [Keys, plans and routes](keys_plans_routes): quotas of customers and of routes.
//! - [Who goes first](classes): shares of a quota for classes of requests.
//! - [Several limits](several_limits): limits with different keys on one request.
//! - [True costs](true_costs): limits on tokens or points, where the response states the cost.
//! - [LLM APIs](llm_apis): how providers count tokens and points, and what to use for each.
//! - [Handling a refusal](refusals): why a request was refused, when to try again, and what tollgate
//!   reports in production.
//! - [Retry and timeout](retry_and_timeout): the order of the layers.
//! - [Calls in flight](in_flight): limits on calls at the same time.
//! - [Blocking code](blocking): threads without a Tokio runtime, `ureq` and `reqwest::blocking`.
//! - [gRPC](grpc): tonic and other clients, statuses in trailers, and what a refused call looks like.
//! - [Clients](clients): recipes for hyper-util, reqwest-middleware, octocrab, kube, async-openai, the
//!   AWS SDK and graphql_client.
//! - [Limits you do not know](pace): a layer that finds the speed by itself.
//! - [Learning from responses](learning): other clients of the same limit, and limits that a server
//!   states.
//! - [Testing](testing): tests of your program that wait for nothing.
//!
//! To operate a fleet:
//!
//! - [Many processes](many_processes): one limit, counted in Redis.
//! - [Operate](operate): what a process has done, what happens to it, and a guard against bans.
//! - [Guarantees](guarantees): what tollgate promises, and where each promise ends.
//! - [Costs](costs): calls, CPU and memory, and how they grow.
//!
//! To look things up, or to change tollgate:
//!
//! - [Headers](headers): the response headers that tollgate understands.
//! - [The format in Redis](redis_format): for clients in other languages.
//! - [Architecture](architecture): the modules, six walks through the code, and the glossary.

// The pages are the same with and without features: a link to an item whose feature is off leads
// nowhere.
#![cfg_attr(
    not(all(feature = "grpc", feature = "redis", feature = "retry")),
    allow(rustdoc::broken_intra_doc_links)
)]

#[doc = include_str!("architecture.md")]
pub mod architecture {}

#[doc = include_str!("blocking.md")]
pub mod blocking {}

#[doc = include_str!("choosing_a_quota.md")]
pub mod choosing_a_quota {}

#[doc = include_str!("clients.md")]
pub mod clients {}

#[doc = include_str!("costs.md")]
pub mod costs {}

#[doc = include_str!("first_steps.md")]
pub mod first_steps {}

#[doc = include_str!("grpc.md")]
pub mod grpc {}

#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("headers.md")]
pub mod headers {}

#[doc = include_str!("in_flight.md")]
pub mod in_flight {}

#[doc = include_str!("keys.md")]
pub mod keys {}

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

#[doc = include_str!("pace.md")]
pub mod pace {}

#[doc = include_str!("redis_format.md")]
pub mod redis_format {}

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
