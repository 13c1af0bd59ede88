//! The errors of a store.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "redis")]
use super::BoxError;

/// Why a store granted nothing.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum StoreError {
    /// The store has `max_keys` keys, and all of them are in use.
    Full {
        /// The most keys that the store may have.
        max_keys: usize,
    },
    /// The store could not be reached, or did not answer in time. What it may have granted counts
    /// as used.
    Away(Arc<dyn StdError + Send + Sync>),
    /// The store answered with an error.
    Failed(Arc<dyn StdError + Send + Sync>),
    /// The store answers so slowly that its permits have expired when they arrive. Move the store
    /// closer, or use a longer window.
    TooSlow {
        /// How long the call took.
        took: Duration,
        /// How long a permit of this quota can be valid.
        longest: Duration,
    },
    /// The store has not answered, and the request has waited for `max_wait`, or for a second if
    /// that is longer.
    ///
    /// A permit that the store grants later goes to another request, or back. A request whose
    /// [`Deadline`](crate::Deadline) ends first is refused locally instead.
    NoAnswer {
        /// How long ago the store was asked.
        waited: Duration,
    },
    /// The store's answer was lost. What it may have granted counts as used.
    Lost,
    /// This process lost contact with the store for longer than
    /// [`in_flight_ttl`](crate::RateLimitBuilder::in_flight_ttl). The store may have granted the
    /// call's in-flight slot to another process, so the call was cancelled.
    InFlightSlotLost,
    /// The store cannot be reached, and the request costs more than the [fallback
    /// share](crate::OnStoreError::FallbackShare) of this process allows at once.
    AboveShare {
        /// The cost of the request, in units.
        cost: u32,
        /// The largest cost that the fallback share allows, in units.
        share: u32,
    },
    /// The store does not support what the quota needs, which is the value.
    Unsupported(&'static str),
}

#[cfg(feature = "redis")]
impl StoreError {
    pub(crate) fn away(source: impl Into<BoxError>) -> Self {
        StoreError::Away(Arc::from(source.into()))
    }

    pub(crate) fn failed(source: impl Into<BoxError>) -> Self {
        StoreError::Failed(Arc::from(source.into()))
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Full { max_keys } => {
                write!(
                    f,
                    "the store holds {max_keys} keys and all are in use: raise max_keys or use fewer keys"
                )
            }
            StoreError::Away(source) => write!(f, "the store cannot be reached: {source}"),
            StoreError::Failed(source) => write!(f, "the store failed: {source}"),
            StoreError::TooSlow { took, longest } => write!(
                f,
                "the store took {took:.1?} to answer, and a permit of this quota is valid for at most {longest:?}: \
                 move the store closer, or use a longer window"
            ),
            StoreError::NoAnswer { waited } => {
                write!(f, "the store has not answered for {waited:.1?}")
            }
            StoreError::Lost => write!(f, "the store's answer was lost"),
            StoreError::InFlightSlotLost => {
                write!(
                    f,
                    "lost contact with the store for longer than in_flight_ttl"
                )
            }
            StoreError::AboveShare { cost, share } => write!(
                f,
                "the store cannot be reached, and the request costs {cost}: the fallback share of this process allows \
                 {share} at once"
            ),
            StoreError::Unsupported(what) => write!(f, "this store does not support {what}"),
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            StoreError::Away(source) | StoreError::Failed(source) => Some(source.as_ref()),
            _ => None,
        }
    }
}
