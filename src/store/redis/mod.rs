//! The store in Redis: counts that many processes share.
//!
//! ```text
//!  lease, give back, peek, hold, claim, register
//!      ──> worker (a thread) ──> script (one key, one step) ──> backend ──> link (one connection)
//!  events of other processes <── worker <── pubsub (a connection with a subscription)
//! ```
//!
//! `store` turns each call of a limiter into a `job`. `thread` starts the thread and sends it the
//! jobs. `worker` is what runs on the thread.
//!
//! The backend is one server, or the servers of a cluster with a link to each. `codec` packs calls
//! and reads replies. [`crate::guide::redis_format`] describes the format, and the reasons for it.

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
mod job;
mod layout;
mod link;
mod pubsub;
mod registers;
mod script;
mod sealed_key;
mod store;
#[cfg(test)]
mod tests;
mod thread;
#[cfg(feature = "redis-tls-rustls")]
mod tls;
mod worker;

pub use builder::RedisStoreBuilder;
pub use store::RedisStore;
