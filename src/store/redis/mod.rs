//! Counts shared by many processes: the store in Redis.
//!
//! ```text
//!  lease, give back, peek, hold, claim, register ──> worker (a thread of its own) ──> script (one key, one step) ──> backend
//!                                      what others did <── worker <── ears (a connection to listen on)
//!
//!  backend: the server, or the server of a cluster that has the key ──> link (one connection to each)
//! ```
//!
//! [`wire`] packs calls and reads answers; [`crate::guide::redis_format`] has the format, and why
//! it is so.

mod backend;
mod builder;
#[cfg(feature = "redis-cluster")]
mod cluster;
mod codec;
mod connection;
#[cfg(test)]
mod differential;
mod endpoint;
mod failure;
mod heartbeat;
mod layout;
mod link;
mod pubsub;
mod registers;
mod script;
mod sealed_key;
mod store;
#[cfg(test)]
mod tests;
#[cfg(feature = "redis-tls-rustls")]
mod tls;
mod worker;

pub use builder::RedisStoreBuilder;
pub use store::RedisStore;
