//! The builder of an [`AdaptiveThrottleLayer`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::guard;
use super::settings::{Common, common_setters};
use super::throttle::AdaptiveThrottleLayer;
use crate::config_error::ConfigError;
use crate::guarded::Watch;
use crate::limiter::read_marks;
use crate::pacing::{Fair, Pace};
use crate::rng::{Dice, dice};
#[cfg(doc)]
use crate::store::Store;
use crate::throttle::{Throttle, ThrottleSettings};

/// Configures an [`AdaptiveThrottleLayer`].
///
/// ```
/// use std::time::Duration;
/// use tollgate::pace::Fair;
/// use tollgate::{AdaptiveThrottleLayer, by_host};
///
/// // The server allows about 4500 requests an hour. With this hint, the pace finds its speed sooner.
/// let throttle = AdaptiveThrottleLayer::builder()
///     .key(by_host)
///     .pace(|| Fair::new().limit(4500, Duration::from_secs(3600)))
///     .max_wait(Duration::from_secs(60))
///     .build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
#[must_use = "a builder does nothing until build"]
pub struct AdaptiveThrottleBuilder {
    common: Common,
    pace: Box<dyn Fn() -> Box<dyn Pace> + Send + Sync>,
}

const DEFAULT_MAX_HOLD: Duration = Duration::from_secs(3600);

impl AdaptiveThrottleBuilder {
    pub(super) fn new() -> Self {
        AdaptiveThrottleBuilder {
            common: Common::new(DEFAULT_MAX_HOLD),
            pace: Box::new(|| Box::new(Fair::new())),
        }
    }

    common_setters! {
        /// The layer learns a pace for each key, and a refusal holds its key. Without a key
        /// function, it learns one pace for the requests to all hosts, and a refusal holds them
        /// all.
        key;
        /// With [`retrying`](AdaptiveThrottleLayer::retrying), the limit is for all attempts of a
        /// request together. The throttle does not know in advance how long a request has to wait.
        /// So a request without a turn is refused only after it has waited for `max_wait`. If the
        /// server has stated a longer wait, the request is refused at once.
        max_wait;
        /// The layer keeps what it learned for a key for an hour after the last request of the key.
        /// It forgets a key earlier if it needs the room for another key.
        max_keys;
        /// Default: an hour; at most a day. With `Duration::ZERO`, a response holds nothing.
        ///
        /// If the server states a longer time, the hold is cut to `max_hold`. The pace may add a
        /// wait of its own, which is not cut. With a [`guard`](Self::guard), `max_hold` is at least as long as the longest stop of
        /// the guard. [`Throttle::release`] ends a hold. If the processes
        /// share a [store](Self::store), a hold continues after a process restarts.
        max_hold;
        /// Sets the store through which processes share, for each key, one queue and what they
        /// learn. Default: none, so each process learns for itself.
        ///
        /// Fleets of more than about 30 processes need a store: without it, each process has to
        /// learn from refusals how many processes there are. With a store, a request costs [two to
        /// five calls](crate::pace#a-fleet-that-shares-its-pace) of the store, more in
        /// fleets of hundreds. While no request has to wait for its turn, none waits for these
        /// calls. While the store is unreachable, each process continues alone, at its part of the
        /// speed.
        ///
        /// All processes need the same pace, and it is [`Fair`] that can be shared.
        /// A store that cannot push notifications, such as a `RedisStore` over a connection of your
        /// own, leaves much of a scarce limit unused.
        store;
        /// [`RateLimitBuilder::dialect`](super::RateLimitBuilder::dialect) has an example.
        dialect;
        name;
    }

    /// Sets the rule by which the speed of a key follows signals, a [`Fair`] or
    /// [`NoPacing`](crate::pace::NoPacing). The layer calls `pace` once for each key. Default:
    /// [`Fair::new`], because it shares a limit evenly with next to no refusals.
    pub fn pace<P: Pace + 'static>(mut self, pace: impl Fn() -> P + Send + Sync + 'static) -> Self {
        self.pace = Box::new(move || Box::new(pace()));
        self
    }

    /// Checks the settings and builds the layer.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first setting that is out of range, and what to change.
    pub fn build(self) -> Result<AdaptiveThrottleLayer, ConfigError> {
        self.common.check()?;
        // Without a store, the bad answers of this process count.
        let shared = self.common.store_or_memory();
        let guard = guard::build(&self.common, &shared)?;
        let mut max_hold = self.common.max_hold;
        if let Some(guard) = &guard
            && !max_hold.is_zero()
        {
            // A client that goes on although the server named a long wait may be banned.
            max_hold = max_hold.max(guard.longest());
        }
        let throttle = Throttle::new(ThrottleSettings {
            pace: self.pace,
            dice: Box::new(|| Dice::seeded(dice())),
            max_wait: self.common.max_wait,
            max_queue: self.common.max_queue,
            max_keys: self.common.max_keys,
            max_hold,
            tally: self.common.tally(self.common.name()),
            store: self.common.store,
            guard: guard.clone().map(|guard| guard as Arc<dyn Watch>),
        })?;
        if let Some(guard) = guard {
            guard.guard(vec![throttle.guarded()], &*shared);
        }
        // The layer may be inside of a rate limit layer.
        read_marks();
        Ok(AdaptiveThrottleLayer {
            throttle,
            extractors: Arc::new(self.common.extractors),
            reads_kinds: false,
        })
    }
}

impl fmt::Debug for AdaptiveThrottleBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("AdaptiveThrottleBuilder");
        self.common.debug(&mut shown);
        shown.finish_non_exhaustive()
    }
}
