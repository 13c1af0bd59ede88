//! What judges each arrival at a server or counts by many threads: nothing else runs beside it.

#[path = "../support/mod.rs"]
mod support;

mod blocking;
mod http;
mod runtimes;
mod threads;
mod unit_names;
