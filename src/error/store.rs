//! What can go wrong in a store.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "redis")]
use super::BoxError;

/// What a store could not do.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum StoreError {
    /// It holds as many keys as it may, and all of them are in use.
    Full {
        /// The most keys it may hold.
        max_keys: usize,
    },
    /// It could not be reached, or it did not answer in time: what it may have granted counts as spent.
    Away(Arc<dyn StdError + Send + Sync>),
    /// It answered that it cannot do it.
    Failed(Arc<dyn StdError + Send + Sync>),
    /// It answers so slowly that what it grants has run out when it arrives.
    TooSlow {
        /// How long the call took.
        took: Duration,
        /// The longest that a permit of this quota may live.
        longest: Duration,
    },
    /// It has not answered yet, and the request can wait no longer: it has waited for `max_wait`, and for a second at least.
    /// What the store grants to it later goes to another request, or back. A request that ends at a
    /// [`Deadline`](crate::Deadline) is refused instead.
    NoAnswer {
        /// How long ago the store was asked.
        waited: Duration,
    },
    /// It was asked, and the answer was lost: what it may have granted counts as spent.
    Lost,
    /// It could not be told for so long that a call is in flight that others may take its place: the call was given up.
    SeatLost,
    /// It is away, and the request costs more than the share with which the process goes on meanwhile.
    AboveShare {
        /// The units it costs.
        cost: u32,
        /// The most units that one request can cost of the share.
        share: u32,
    },
    /// It cannot do what the quota needs.
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
            StoreError::Away(source) => write!(f, "the store is away: {source}"),
            StoreError::Failed(source) => write!(f, "the store failed: {source}"),
            StoreError::TooSlow { took, longest } => write!(
                f,
                "the store took {took:.1?} to answer, but a permit of this quota lives for {longest:?} at most: \
                 bring the store nearer, or use a longer window"
            ),
            StoreError::NoAnswer { waited } => write!(f, "the store has not answered for {waited:.1?}"),
            StoreError::Lost => write!(f, "the answer of the store was lost"),
            StoreError::SeatLost => write!(
                f,
                "the store was away for longer than calls in flight are counted without it: this one was given up"
            ),
            StoreError::AboveShare { cost, share } => write!(
                f,
                "the store is away, and a request that costs {cost} is more than the {share} that this process may use \
                 at once meanwhile"
            ),
            StoreError::Unsupported(what) => write!(f, "this store does not know {what}"),
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
