//! The builder of an [`AdaptiveThrottleLayer`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::settings::{Common, common_setters};
use super::throttle::AdaptiveThrottleLayer;
use crate::config_error::ConfigError;
use crate::pace::{Fair, Pace};
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
/// // The server is known to allow about 4500 requests an hour. With this hint, the pace is found sooner.
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

impl AdaptiveThrottleBuilder {
    const DEFAULT_MAX_HOLD: Duration = Duration::from_secs(3600);

    pub(super) fn new() -> Self {
        AdaptiveThrottleBuilder {
            common: Common::new(AdaptiveThrottleBuilder::DEFAULT_MAX_HOLD),
            pace: Box::new(|| Box::new(Fair::new())),
        }
    }

    common_setters! {
        /// The layer learns a pace for each key, and a refusal holds its key. Without a key
        /// function, it learns one pace for the requests to all hosts, and a refusal holds them
        /// all.
        key;
        /// The limit covers all attempts of a request together. The length of a wait is not known
        /// ahead, so a request waits for up to `max_wait` before it is refused. If the server has
        /// stated a longer wait, the request is refused at once.
        max_wait;
        /// What was learned for a key is kept for an hour after its last call, as long as there is
        /// room.
        max_keys;
        /// Default: an hour; at most a day. With `Duration::ZERO`, a response holds nothing.
        ///
        /// If the server states a longer time, the hold is cut to `max_hold`. The pace may add a
        /// wait of its own, which is not cut.
        ///
        /// A hold outlives a restart if the processes share a [store](Self::store).
        /// [`Throttle::release`] ends it.
        max_hold;
        /// Sets the store through which the processes share a queue and what they learn of each
        /// key. Default: none, each process learns for itself.
        ///
        /// Fleets of more than about 30 processes need it: without it, each process has to find out
        /// how many there are. A request then costs [two to five
        /// calls](crate::guide::pace#a-fleet-that-shares-its-pace) of the store, more in fleets of
        /// hundreds. If nothing is scarce, it waits for none of them. During an outage of the
        /// store, each process goes on by itself, at its part of the speed.
        ///
        /// All processes need the same pace, and the pace must support [sharing](Pace::share):
        /// [`Fair`] and [`Aimd`](crate::pace::Aimd) do. Without
        /// [registers](Store::compare_and_set), the pace is not shared. A store that cannot push
        /// [notifications](Store::listen), such as a `RedisStore` over a connection of your own,
        /// leaves much of a scarce limit unused.
        store;
        /// [`RateLimitBuilder::dialect`](super::RateLimitBuilder::dialect) has an example.
        dialect;
    }

    /// Sets how the speed of a key follows signals. `pace` is called for each key. Default:
    /// [`Fair::new`].
    ///
    /// The methods of a pace are called under a lock, so they should be quick.
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
        let Common {
            extractors,
            store,
            max_wait,
            max_queue,
            max_keys,
            max_hold,
        } = self.common;
        let throttle = Throttle::new(ThrottleSettings {
            pace: self.pace,
            dice: Box::new(|| Dice::seeded(dice())),
            max_wait,
            max_queue,
            max_keys,
            max_hold,
            store,
        })?;
        Ok(AdaptiveThrottleLayer {
            throttle,
            extractors: Arc::new(extractors),
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
