//! What computes: the layers, the limiter and the throttle under a paused clock, and random
//! histories against simple models. Nothing here starts a server of its own but the few tests that
//! repeat a history over Redis.

#[path = "../support/mod.rs"]
mod support;

mod adversary;
mod async_store;
#[cfg(feature = "retry")]
mod attempts;
mod bans;
mod bare_refusals;
mod begin;
mod bodies;
mod bursts;
mod classes;
mod classes_deploys;
mod classes_laws;
mod drain;
mod errors;
mod everything;
mod exact_rate;
mod explain;
mod explain_properties;
mod explain_throttle;
mod failures;
mod fallback;
mod features;
mod gate;
mod grpc;
mod guard;
mod holds;
mod holds_by_host;
mod holds_later;
mod hostile;
mod in_flight;
mod joint;
mod joint_properties;
mod layers_around;
mod learn;
mod limiter_properties;
#[cfg(feature = "llm")]
mod llm;
mod max_keys;
mod poison;
mod probes;
mod quotas;
mod rate_and_flight;
mod routes;
mod settle;
mod shared_pace;
mod signal;
mod stats;
mod store;
mod strangers;
mod throttle;
mod tower;
mod tower_inner;
mod tower_keys;
mod tower_refusals;
mod units;
mod unpolled;
mod waited;
