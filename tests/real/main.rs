//! What waits: servers, Redis and processes that are real, under the real clock. Most of these tests
//! sleep most of the time, so they run all at once.

#[path = "../../examples/common/children.rs"]
#[allow(dead_code, reason = "the examples use the rest")]
mod children;
#[path = "../support/mod.rs"]
mod support;

mod clocks;
mod examples;
mod explain_redis;
mod fleet_example;
mod guard_redis;
mod holds_redis;
mod in_flight_faults;
mod in_flight_redis;
mod joint_cluster;
mod joint_redis;
mod operate;
mod quotas_redis;
mod redis;
mod redis_away;
mod redis_faults;
mod redis_places;
mod reqwest;
mod retry;
mod routes_of_servers;
mod shared_pace_redis;
mod stage;
mod throttle_http;
mod wrong_words;
