//! The events that the crate reports, each one function: to `tracing` (feature `tracing`), and to the
//! handler of the gate ([`on_event`](crate::RateLimitBuilder::on_event)). Keys appear by label only.

#![cfg_attr(
    not(feature = "tracing"),
    expect(unused_variables, reason = "without tracing nobody reads them")
)]

use std::time::Duration;

use crate::error::{Limited, StoreError};
use crate::quota::{Limit, Quota};
#[cfg(feature = "tracing")]
use crate::stats::name_of_reason;
use crate::stats::{Cause, Event, Tally, shown};

/// Reports an event; without the feature, nothing.
macro_rules! report {
    ($level:ident, $($event:tt)*) => {
        #[cfg(feature = "tracing")]
        tracing::$level!(target: "tollgate", $($event)*)
    };
}

/// A request waits for its slot; `queued` requests wait for the key.
pub(crate) fn waiting(key: &str, queued: usize) {
    report!(debug, key, queued, "waiting for a permit");
}

/// A request got its permit after a wait.
pub(crate) fn waited(key: &str, waited: Duration, turns: u32) {
    report!(debug, key, ?waited, turns, "permit granted");
}

/// The span `tollgate.wait` of a request that waits, inside of the span in which its caller has made it. It ends when this
/// is dropped, or before. Without the feature, it is nothing.
#[derive(Debug)]
pub(crate) struct WaitSpan {
    #[cfg(feature = "tracing")]
    span: tracing::Span,
}

impl WaitSpan {
    /// Begins the span of a request that waits because of `reason`: for a `limit`, if that is known, or a `hold`, which lasts
    /// so long. The names with a dot are those of OpenTelemetry.
    pub(crate) fn begin(
        key: &str,
        reason: &str,
        limit: Option<Limit>,
        hold: Option<Duration>,
    ) -> Self {
        WaitSpan {
            #[cfg(feature = "tracing")]
            span: tracing::info_span!(
                target: "tollgate",
                "tollgate.wait",
                otel.kind = "internal",
                key,
                reason,
                limit = limit.map(tracing::field::display),
                hold = hold.map(tracing::field::debug),
                "error.type" = tracing::field::Empty,
            ),
        }
    }

    /// Makes that of a request whose wait another span shows.
    pub(crate) fn none() -> Self {
        WaitSpan {
            #[cfg(feature = "tracing")]
            span: tracing::Span::none(),
        }
    }

    /// A hold has begun.
    pub(crate) fn held(&self, reason: &str, hold: Duration) {
        #[cfg(feature = "tracing")]
        {
            self.span.record("reason", reason);
            self.span.record("hold", tracing::field::debug(hold));
        }
    }

    /// The request is refused.
    pub(crate) fn refused(&mut self, limited: &Limited) {
        #[cfg(feature = "tracing")]
        {
            let reason = limited.reason();
            let name = reason.as_ref().map_or("store", name_of_reason);
            self.span.record("error.type", name);
        }
        self.end();
    }

    /// The wait has ended.
    pub(crate) fn end(&mut self) {
        #[cfg(feature = "tracing")]
        {
            self.span = tracing::Span::none();
        }
    }
}

/// A request was not sent. Of the refusals of a key, at most one a second is reported, with the number
/// of those that were not. Otherwise a flood of requests would become a flood of events.
pub(crate) fn limited(tally: &Tally, limited: &Limited) {
    if tally.is_of_guard() || (!tally.has_handler() && !is_traced()) {
        return;
    }
    if let Some(unreported) = tally.report_refusal(limited.report().key()) {
        report!(info, key = limited.report().key(), %limited, unreported, "request refused");
        tally.tell(&Event::Refused {
            limited,
            unreported,
        });
    }
}

/// Returns whether refusals are traced.
fn is_traced() -> bool {
    #[cfg(feature = "tracing")]
    {
        tracing::event_enabled!(target: "tollgate", tracing::Level::INFO)
    }
    #[cfg(not(feature = "tracing"))]
    false
}

/// A cost does not state a unit that is limited, or states one that is not.
pub(crate) fn units_differ(tally: &Tally, missing: Option<&str>, unknown: Option<&str>) {
    report!(
        warn,
        missing,
        unknown,
        "the units of a cost are not those of the limits: a missing one counts as 0, an unknown one is ignored"
    );
    tally.tell(&Event::UnitsDiffer { missing, unknown });
}

/// A class of requests has no share. The caller reports each class once.
pub(crate) fn unknown_class(tally: &Tally, class: &str) {
    let class = &*shown(class);
    report!(
        warn,
        class,
        "a class has no share, so its requests count among all others"
    );
    tally.tell(&Event::UnknownClass { class });
}

/// Classes have shares, and no request has a class. The caller reports it once.
pub(crate) fn no_class(tally: &Tally) {
    let event = Event::NoClass;
    report!(warn, limiter = &*tally.name(), "{event}");
    tally.tell(&event);
}

/// One request was sent `attempts` times. Reported at 5, 10, 20 and so on.
pub(crate) fn sent_again(tally: &Tally, key: &str, attempts: u32) {
    report!(
        warn,
        key,
        attempts,
        "one request was sent again and again; layers of retries multiply"
    );
    tally.tell(&Event::SentAgain { key, attempts });
}

/// Requests of the layer take a permit each that the program has acquired by hand before. The caller reports it once.
pub(crate) fn counted_twice(tally: &Tally, key: &str) {
    report!(
        warn,
        key,
        limiter = &*tally.name(),
        "each request takes two permits: one by hand, and one in the layer; leave out the one by hand, or send without the layer"
    );
    tally.tell(&Event::CountedTwice { key });
}

/// The store failed, and the request was sent uncounted.
pub(crate) fn passed(tally: &Tally, key: &str, error: &StoreError) {
    report!(warn, key, %error, "store failed; request sent uncounted");
    tally.tell(&Event::Uncounted { key, error });
}

/// The store cannot be reached, and this process goes on with its fallback share.
pub(crate) fn alone(key: &str, share: &Quota, error: &StoreError) {
    report!(warn, key, %share, %error, "store unreachable; this process uses its fallback share of the limit");
}

/// The store answers again, and knows what was used without it.
pub(crate) fn together(key: &str) {
    report!(info, key, "store reachable again; the limit is shared");
}

/// The store cannot be reached, and this process goes on at its part of the shared pace.
pub(crate) fn pace_alone(tally: &Tally, key: &str, error: &StoreError) {
    report!(warn, key, %error, "store unreachable; this process uses its part of the pace");
    tally.tell(&Event::Alone { key, error });
}

/// The store answers again.
pub(crate) fn pace_shared(tally: &Tally, key: &str) {
    report!(info, key, "store reachable again; the pace is shared");
    tally.tell(&Event::Together { key });
}

/// Another process has another limit for the same key.
pub(crate) fn foreign_limit(tally: &Tally, key: &str, limit: Limit, quota: &Quota) {
    report!(
        warn, key, %limit, %quota,
        "another process limits this key by another quota; until it stops, all limits apply"
    );
    tally.tell(&Event::ForeignLimit { key, limit });
}

/// The upstream states a limit, which applies from now on.
pub(crate) fn learned(key: &str, limit: Limit, quota: Option<&str>) {
    let quota = quota.map(shown);
    let quota = quota.as_deref();
    report!(info, key, %limit, quota, "limit learned from the upstream's headers");
}

/// A quota was set for a key, in this process or in another one.
pub(crate) fn quota_set(tally: &Tally, key: &str, quota: &Quota) {
    report!(info, key, %quota, "quota set");
    tally.tell(&Event::QuotaSet { key, quota });
}

/// The quota that was set for a key has ended.
pub(crate) fn set_quota_ended(tally: &Tally, key: &str) {
    report!(info, key, "set quota ended");
    tally.tell(&Event::QuotaUnset { key });
}

/// There is a connection to the store, or to one of its servers.
#[cfg(feature = "redis")]
pub(crate) fn store_connected(server: Option<&str>) {
    report!(info, server, "connected to the store");
}

/// The connection to the store broke, or could not be made again.
#[cfg(feature = "redis")]
pub(crate) fn store_lost(error: &StoreError) {
    report!(warn, %error, "connection to the store lost; reconnecting");
}

/// The first connection to the store could not be made.
#[cfg(feature = "redis")]
pub(crate) fn store_not_reached(error: &StoreError) {
    report!(warn, %error, "the store cannot be reached yet; trying again");
}

/// The store may evict keys when its memory is full, and their counts with them.
#[cfg(feature = "redis")]
pub(crate) fn store_may_evict(policy: &str) {
    report!(
        warn,
        policy,
        "Redis may evict keys, which stalls each evicted key for a window; set maxmemory-policy to noeviction"
    );
}

/// A key is on hold.
pub(crate) fn held(tally: &Tally, key: &str, left: Duration, cause: Cause) {
    if tally.is_of_guard() {
        return;
    }
    match cause {
        Cause::Upstream | Cause::UsedUp | Cause::Kind => {
            report!(
                warn,
                key,
                ?left,
                "key on hold after a rate-limit response from the upstream"
            );
        }
        Cause::Operator | Cause::Guard | Cause::Elsewhere => {
            report!(info, key, ?left, cause = cause.name(), "key on hold");
        }
    }
    tally.tell(&Event::Held { key, left, cause });
}

/// A ban guard stops requests.
pub(crate) fn guard_tripped(tally: &Tally, key: &str, quota: &Quota, stop: Duration, trip: u32) {
    report!(
        error, key, %quota, ?stop, trip,
        "requests stopped: more bad answers than the guard allows"
    );
    tally.tell(&Event::GuardTripped {
        key,
        quota,
        stop,
        trip,
    });
}

/// The hold of a key was ended by a call of `release`.
pub(crate) fn released(tally: &Tally, key: &str) {
    if tally.is_of_guard() {
        return;
    }
    report!(info, key, "hold of the key ended");
    tally.tell(&Event::Released { key });
}

/// Waiters in other processes cannot be notified.
#[cfg(feature = "redis")]
pub(crate) fn store_cannot_tell() {
    report!(
        warn,
        "PUBLISH is forbidden, so waiters for calls in flight poll every 50 ms; allow +publish, +subscribe and the \
         channels of the prefix"
    );
}

/// The upstream refused a request. `tally` is `None` if its gate was dropped. At most one such refusal a
/// second is reported for each key, like those of this process; all are counted.
pub(crate) fn upstream_limited(
    tally: Option<&Tally>,
    key: &str,
    status: http::StatusCode,
    retry_after: Option<Duration>,
) {
    let unreported = match tally {
        Some(tally) => {
            tally.upstream_refused(status);
            let Some(unreported) = tally.report_upstream_refusal(key) else {
                return;
            };
            unreported
        }
        None => 0,
    };
    report!(warn, key, %status, ?retry_after, unreported, "request refused by the upstream");
    if let Some(tally) = tally {
        tally.tell(&Event::UpstreamLimited {
            key,
            status,
            retry_after,
            unreported,
        });
    }
}
