//! What is told to `tracing` (feature `tracing`): waits, refusals and upstream limits. Keys appear by label only.

#[cfg(feature = "tracing")]
mod told {
    use std::time::Duration;

    use crate::error::{Limited, StoreError};
    use crate::quota::{Limit, Quota};

    /// A request waits for its slot.
    pub(crate) fn waiting(key: &str, in_line: usize) {
        tracing::debug!(target: "tollgate", key, in_line, "waiting for a slot");
    }

    /// A request got its slot after a wait.
    pub(crate) fn waited(key: &str, waited: Duration, turns: u32) {
        tracing::debug!(target: "tollgate", key, ?waited, turns, "slot reached");
    }

    /// A request was not sent.
    pub(crate) fn limited(limited: &Limited) {
        tracing::info!(target: "tollgate", key = limited.key(), %limited, "refused");
    }

    /// The store failed, and the request passed uncounted.
    pub(crate) fn passed(key: &str, error: &StoreError) {
        tracing::warn!(target: "tollgate", key, %error, "passed uncounted");
    }

    /// The store is away, and this process goes on with its share.
    pub(crate) fn alone(key: &str, share: &Quota, error: &StoreError) {
        tracing::warn!(target: "tollgate", key, %share, %error, "the store is away: this process goes on with its share");
    }

    /// The store is back, and has been told what was used without it.
    pub(crate) fn together(key: &str) {
        tracing::info!(target: "tollgate", key, "the store is back: the limit is shared again");
    }

    /// The store is away, and this process goes on at its part of the pace that was shared.
    pub(crate) fn pace_alone(key: &str, error: &StoreError) {
        tracing::warn!(target: "tollgate", key, %error, "the store is away: this process goes on at its part of the pace");
    }

    /// The store is back.
    pub(crate) fn pace_shared(key: &str) {
        tracing::info!(target: "tollgate", key, "the store is back: the pace is shared again");
    }

    /// Another process asserts another limit for the same key.
    pub(crate) fn foreign_limit(key: &str, limit: Limit, quota: &Quota) {
        tracing::warn!(
            target: "tollgate",
            key, %limit, %quota,
            "another process asserts another limit for this key, or has learned it: until it stops, all of them hold"
        );
    }

    /// The upstream states a limit, which holds from now on.
    pub(crate) fn learned(key: &str, limit: Limit, quota: Option<&str>) {
        tracing::info!(target: "tollgate", key, %limit, quota, "the upstream states a limit");
    }

    /// There is a connection to the store, or to one of its servers.
    #[cfg(feature = "redis")]
    pub(crate) fn store_connected(server: Option<&str>) {
        tracing::info!(target: "tollgate", server, "connected to the store");
    }

    /// The connection to the store broke, or could not be made.
    #[cfg(feature = "redis")]
    pub(crate) fn store_away(error: &StoreError) {
        tracing::warn!(target: "tollgate", %error, "the store is away");
    }

    /// The store may drop keys for want of memory: then limits start anew.
    #[cfg(feature = "redis")]
    pub(crate) fn store_may_evict(policy: &str) {
        tracing::warn!(
            target: "tollgate",
            policy,
            "the store may evict keys: a limit whose key is evicted learns anew what was granted; set \
             maxmemory-policy to noeviction"
        );
    }

    /// A key is held, because the upstream refused a call.
    pub(crate) fn held(key: &str, left: Duration) {
        tracing::warn!(target: "tollgate", key, ?left, "held: the upstream said it is too much");
    }

    /// Who waits in other processes cannot be told that it is their turn.
    #[cfg(feature = "redis")]
    pub(crate) fn store_cannot_tell() {
        tracing::warn!(
            target: "tollgate",
            "PUBLISH is forbidden: those who wait for calls in flight to end have to ask; allow +publish, +subscribe and \
             the channels of the prefix"
        );
    }

    /// The upstream answered that it was too much.
    pub(crate) fn upstream_limited(key: &str, status: http::StatusCode, retry_after: Option<Duration>) {
        tracing::warn!(target: "tollgate", key, %status, ?retry_after, "limited by the upstream");
    }
}

#[cfg(not(feature = "tracing"))]
mod told {
    use std::time::Duration;

    use crate::error::{Limited, StoreError};
    use crate::quota::{Limit, Quota};

    pub(crate) fn waiting(_key: &str, _in_line: usize) {}

    pub(crate) fn waited(_key: &str, _waited: Duration, _turns: u32) {}

    pub(crate) fn limited(_limited: &Limited) {}

    #[cfg(feature = "redis")]
    pub(crate) fn store_connected(_server: Option<&str>) {}

    #[cfg(feature = "redis")]
    pub(crate) fn store_away(_error: &StoreError) {}

    #[cfg(feature = "redis")]
    pub(crate) fn store_may_evict(_policy: &str) {}

    #[cfg(feature = "redis")]
    pub(crate) fn store_cannot_tell() {}

    pub(crate) fn held(_key: &str, _left: Duration) {}

    pub(crate) fn passed(_key: &str, _error: &StoreError) {}

    pub(crate) fn learned(_key: &str, _limit: Limit, _quota: Option<&str>) {}

    pub(crate) fn alone(_key: &str, _share: &Quota, _error: &StoreError) {}

    pub(crate) fn together(_key: &str) {}

    pub(crate) fn pace_alone(_key: &str, _error: &StoreError) {}

    pub(crate) fn pace_shared(_key: &str) {}

    pub(crate) fn foreign_limit(_key: &str, _limit: Limit, _quota: &Quota) {}

    pub(crate) fn upstream_limited(_key: &str, _status: http::StatusCode, _retry_after: Option<Duration>) {}
}

pub(crate) use told::*;
