//! The recipes of the pages `guide::clients`, `grpc` and `blocking`, one file for each
//! client.
//!
//! The lines between the marks `[recipe]` and `[end]` stand on a page, word for word: the test `page`
//! compares them. The other tests run each recipe against a server that limits and logs.

pub mod aws;
#[allow(missing_docs, reason = "graphql_client derives items without docs")]
pub mod graphql;
pub mod hyper_util;
pub mod kubernetes;
pub mod octocrab;
pub mod openai;
pub mod reqwest_blocking;
pub mod reqwest_middleware;
pub mod tonic;
pub mod ureq;
