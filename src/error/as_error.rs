//! Errors in which a retry policy looks for a limit.

use std::convert::Infallible;
use std::error::Error as StdError;

use super::{BoxError, Error};

/// An error in which [`RetryLimited`](crate::RetryLimited) looks for a [`Limited`](super::Limited):
/// the error of a layer, or a boxed one.
pub trait AsError {
    /// Returns the value as an error.
    fn as_error(&self) -> &(dyn StdError + 'static);
}

impl AsError for Error {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self
    }
}

impl AsError for BoxError {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        &**self
    }
}

impl AsError for Infallible {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self
    }
}
