//! Where permits are counted: in this process, or in Redis for many processes.
//!
//! By default each layer counts in a [`MemoryStore`] of its own. Layers that share a store share the
//! counts of equal keys. With `RedisStore` (feature `redis`), so do all processes: see [many
//! processes](crate::guide::many_processes).
//!
//! # In Redis
//!
#![doc = include_str!("../guide/redis_format.md")]
//!
//! # A store of your own
//!
//! The feature `unstable-store` adds the trait `Store` and its types. They are outside of semver: any
//! release may change them, because they follow the protocol between limiters and stores. Depend on
//! an exact version (`tollgate = "=0.1.0"`) if you turn it on.

#![cfg_attr(not(feature = "unstable-store"), allow(unreachable_pub, dead_code))]

mod change;
mod event;
mod fallback;
mod hold;
mod interface;
// The laboratory shows it.
#[cfg_attr(not(feature = "__lab"), allow(unreachable_pub))]
pub(crate) mod joint_call;
mod lease;
mod memory;
mod owned_request;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
mod redis;
mod register;
mod session;
mod shared;
mod source;
mod unlearning;
mod usage;

use std::time::Duration;

pub use crate::error::StoreError;
#[cfg(not(feature = "unstable-store"))]
pub(crate) use custom::*;
#[cfg(feature = "unstable-store")]
#[cfg_attr(docsrs, doc(cfg(feature = "unstable-store")))]
pub use custom::*;
pub(crate) use fallback::{FallbackStore, Share};
pub(crate) use interface::{label, spawn, unless_lost};
pub(crate) use joint_call::JointCall;
#[cfg(feature = "redis")]
pub(crate) use joint_call::KeyCall;
pub use memory::MemoryStore;
pub(crate) use owned_request::OwnedLeaseRequest;
#[cfg(all(feature = "redis", feature = "metrics"))]
pub(crate) use redis::{CALL_SECONDS, stores};
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use redis::{RedisStore, RedisStoreBuilder, StoreCalls, StoreStats};
pub(crate) use session::StoreSession;
pub use shared::SharedStore;
pub(crate) use source::Source;
pub(crate) use unlearning::UnlearningStore;
pub use usage::LimitUsage;

/// Returns how long permits may be used after the last reply of the store. After this time, the
/// store has to confirm them first. A store that lost its state grants no permits for a window and
/// this time, because processes may still use earlier ones.
pub(crate) fn trust(longest_window: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(1500);
    const LONGEST: Duration = Duration::from_secs(15);
    (longest_window / 4).clamp(SHORTEST, LONGEST)
}

/// What a store of your own implements and meets.
#[cfg_attr(not(feature = "unstable-store"), allow(unused_imports))]
mod custom {
    pub use super::change::{Change, InForce};
    pub use super::event::{StoreEvent, StoreListener};
    pub use super::hold::HoldState;
    pub use super::interface::{Background, Store, StoreReply, Task};
    pub use super::lease::{ClientSession, Demand, Grant, Grants, Lease, LeaseRequest, Refusal};
    pub use super::register::{Recipients, Register, RegisterRequest};
    pub use super::usage::{PeekRequest, Usage};
    pub use crate::key::label::Label;
    pub use crate::limit::{
        ChangeKind, Charge, Claim, Lending, LimitSpec, SetQuota, UnusedPermits, UpstreamRemaining,
    };
}
