//! Runs the recipes of the pages `guide::clients` and `blocking` against a server that limits and logs.
//!
//! Each client has the same tests, which [`proofs`] defines. The server's log is the judge.

mod aws_waits;
mod harness;
mod llm;
mod subjects;

use harness::proofs;

proofs!(hyper_util, subjects::HyperUtil);
proofs!(octocrab, subjects::Octocrab);
proofs!(kube, subjects::Kube);
proofs!(openai, subjects::OpenAi);
proofs!(aws, subjects::Aws);
proofs!(reqwest_middleware, subjects::ReqwestMiddleware);
proofs!(graphql, subjects::GraphQl);
proofs!(ureq, subjects::Ureq, blocking);
proofs!(reqwest_blocking, subjects::ReqwestBlocking, blocking);
