//! The store in Redis: counts that many processes share.
//!
//! ```text
//!  lease, give back, peek, hold, claim, register
//!      ──> client (a task for each) ──> script (one key, one step) ──> backend ──> link (one connection)
//!  claims ──> worker (a task) ──> script
//!  events of other processes <── worker <── pubsub (a connection with a subscription)
//! ```
//!
//! The backend is one server, or the servers of a cluster with a link to each. All tasks run on
//! the thread of the store.
//!
//! | file | what it has |
//! |---|---|
//! | `store`, `builder` | the store as a limiter calls it; its settings |
//! | `client`, `joint`, `returns` | runs each call as a task; calls about several keys; permits that come back |
//! | `worker` | the thread; the task that passes on messages of other processes, and keeps the claims |
//! | `heartbeat` | the claims of this process about calls in flight, which the worker repeats |
//! | `script` | sends a script to the server; `lua/` has the scripts |
//! | `codec`, `registers`, `layout` | pack calls and read replies; the numbers that Rust and Lua share |
//! | `sealed_key` | the name of a key in messages to other processes |
//! | `backend`, `cluster` | which server a call goes to |
//! | `link`, `connection` | the connection to one server, which is replaced when it breaks |
//! | `endpoint`, `tls` | how to connect, by the URLs of the user |
//! | `pubsub` | the subscription to messages of other processes |
//! | `stats` | the counts of a store, and the stores of this process |
//! | `failure` | why a command has no result |
//!
//! `lua/layout.lua` has the formats, and `benches/README.md` why the state is one string.

mod backend;
mod builder;
mod client;
mod cluster;
mod codec;
mod connection;
#[cfg(test)]
mod differential;
mod endpoint;
mod failure;
mod heartbeat;
mod joint;
mod layout;
mod link;
mod pubsub;
mod registers;
mod returns;
mod script;
mod sealed_key;
#[cfg(test)]
mod set_quota_tests;
mod stats;
mod store;
#[cfg(test)]
mod tests;
#[cfg(feature = "redis-tls-rustls")]
mod tls;
mod worker;

pub use builder::RedisStoreBuilder;
#[cfg(feature = "metrics")]
pub(crate) use stats::{CALL_SECONDS, stores};
pub use stats::{StoreCalls, StoreStats};
pub use store::RedisStore;
