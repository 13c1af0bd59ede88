//! Runs each recipe of the page `guide::clients` against a server that limits and logs.
//!
//! Each client has the same tests, which [`proofs`] defines. The server's log is the judge.

mod harness;
mod subjects;

use harness::proofs;

proofs!(hyper_util, subjects::HyperUtil);
proofs!(octocrab, subjects::Octocrab);
proofs!(kube, subjects::Kube);
proofs!(openai, subjects::OpenAi);
proofs!(aws, subjects::Aws);
proofs!(reqwest_middleware, subjects::ReqwestMiddleware);
proofs!(graphql, subjects::GraphQl);
