//! What a response says about our speed.
//!
//! A [`Signal`] is read from status and headers. It never fails: what cannot be read is not there.
//!
//! What this does not do yet: read more than a plain `Retry-After` in seconds.

mod retry_after;

use std::time::Duration;

use http::{HeaderMap, StatusCode};

/// What tollgate wants to know of a response.
///
/// Implemented for `http::Response<B>` and, with the feature `reqwest`, for `reqwest::Response`. Implement it for
/// responses of your own; one that tells nothing is never limited.
///
/// ```
/// struct Done;
///
/// impl tollgate::AsResponseInfo for Done {}
/// ```
#[diagnostic::on_unimplemented(
    message = "tollgate cannot read `{Self}` as a response",
    label = "this response is unknown to tollgate",
    note = "for `reqwest::Response`, switch on tollgate's feature `reqwest`",
    note = "for a response of your own, write `impl tollgate::AsResponseInfo for {Self}`"
)]
pub trait AsResponseInfo {
    /// Its status.
    fn status(&self) -> Option<StatusCode> {
        None
    }

    /// Its headers.
    fn headers(&self) -> Option<&HeaderMap> {
        None
    }
}

impl<B> AsResponseInfo for http::Response<B> {
    fn status(&self) -> Option<StatusCode> {
        Some(http::Response::status(self))
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(http::Response::headers(self))
    }
}

/// What a response says about our speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signal {
    limited: Option<StatusCode>,
    retry_after: Option<Duration>,
}

impl Signal {
    /// Reads a response.
    pub fn read(response: &impl AsResponseInfo) -> Self {
        match response.status() {
            Some(status @ StatusCode::TOO_MANY_REQUESTS) => {
                let retry_after = response.headers().and_then(retry_after::read);
                Signal { limited: Some(status), retry_after }
            }
            _ => Signal::default(),
        }
    }

    /// The status with which the upstream refused the request because of a rate limit: 429 (RFC 6585, section 4).
    pub fn limited(&self) -> Option<StatusCode> {
        self.limited
    }

    /// How long the upstream asked to wait (RFC 9110, section 10.2.3).
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}
