//! A response as closures of a layer see it.

use http::StatusCode;

use super::{ResponseInfo, Signal};

/// A view of a response, for [`RateLimitBuilder::settle`](crate::RateLimitBuilder::settle).
#[derive(Clone, Copy)]
pub struct ResponseRef<'a> {
    response: &'a dyn ResponseInfo,
    refusal: Option<StatusCode>,
}

impl<'a> ResponseRef<'a> {
    /// Makes a view of `response`.
    pub fn new(response: &'a dyn ResponseInfo) -> Self {
        ResponseRef {
            response,
            refusal: None,
        }
    }

    /// States what the layer has read of the response.
    pub(crate) fn with_signal(self, signal: &Signal) -> Self {
        ResponseRef {
            refusal: signal.refusal(),
            ..self
        }
    }

    /// Returns the status of the response.
    pub fn status(&self) -> Option<StatusCode> {
        self.response.status()
    }

    /// Returns the status with which the upstream refused the request: see [`Signal::refusal`]. `None` also if the view
    /// was not made by a layer.
    pub fn refusal(&self) -> Option<StatusCode> {
        self.refusal
    }

    /// Returns the bytes of the response's header `name`; the first value if there are several.
    pub fn header(&self, name: impl http::header::AsHeaderName) -> Option<&'a [u8]> {
        Some(self.response.headers()?.get(name)?.as_bytes())
    }

    /// Returns the whole number in the response's header `name`. `None` if there is none, or if it
    /// is negative or above `u32::MAX`.
    pub fn number(&self, name: impl http::header::AsHeaderName) -> Option<u32> {
        std::str::from_utf8(self.header(name)?)
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// Returns the extension of type `T` of the response.
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.response.extensions()?.get::<T>()
    }
}

impl std::fmt::Debug for ResponseRef<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseRef")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
