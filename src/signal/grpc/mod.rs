//! Reads what a gRPC response says about limits: its status, and when to retry.
//!
//! The status of a gRPC call is in the headers of a response without messages, else in its trailers.
//! Two of its codes matter. `RESOURCE_EXHAUSTED` is a refusal, as 429 is in HTTP. `UNAVAILABLE` is one if
//! the server names a time, as 503 is. The time is in `grpc-retry-pushback-ms`, or in a
//! `google.rpc.RetryInfo` in `grpc-status-details-bin`.

mod retry_info;
#[cfg(test)]
mod tests;

use std::time::{Duration, SystemTime};

use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, Engine, GeneralPurpose, GeneralPurposeConfig};
use http::{HeaderMap, StatusCode};

use super::parse::number;
use super::{Signal, read};

/// The header or trailer with the status of a call.
pub(crate) const STATUS: &str = "grpc-status";
/// The header or trailer with the text for the status.
pub(crate) const MESSAGE: &str = "grpc-message";
/// The header or trailer with the time to retry, in milliseconds.
pub(crate) const PUSHBACK: &str = "grpc-retry-pushback-ms";
const DETAILS: &str = "grpc-status-details-bin";

/// A code of a gRPC status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(u32);

impl Code {
    const OK: Code = Code(0);
    pub(crate) const RESOURCE_EXHAUSTED: Code = Code(8);
    pub(crate) const UNAVAILABLE: Code = Code(14);

    /// Returns the code in `headers`, which may be trailers. `None` if there is none, or if it is not
    /// a number.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Code> {
        headers.get(STATUS)?.to_str().ok()?.parse().ok().map(Code)
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// Returns the HTTP status of this code, as Google's gateways translate it.
    pub(crate) fn http_status(self) -> StatusCode {
        match self.0 {
            0 => StatusCode::OK,
            1 => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
            3 | 9 | 11 => StatusCode::BAD_REQUEST,
            4 => StatusCode::GATEWAY_TIMEOUT,
            5 => StatusCode::NOT_FOUND,
            6 | 10 => StatusCode::CONFLICT,
            7 => StatusCode::FORBIDDEN,
            8 => StatusCode::TOO_MANY_REQUESTS,
            12 => StatusCode::NOT_IMPLEMENTED,
            14 => StatusCode::SERVICE_UNAVAILABLE,
            16 => StatusCode::UNAUTHORIZED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// Reads headers or trailers that arrived at `now`.
pub(super) fn signal(headers: &HeaderMap, now: SystemTime) -> Signal {
    let code = Code::read(headers).unwrap_or(Code::OK);
    let is_exhausted = code == Code::RESOURCE_EXHAUSTED;
    // Quotas, and the time to retry of servers that state it as in HTTP, are read as there. But
    // `UNAVAILABLE` needs a time that is stated as in gRPC.
    let as_http = if is_exhausted { code } else { Code::OK };
    let signal = read::signal(Some(as_http.http_status()), Some(headers), None, now);
    let wait = match code {
        Code::RESOURCE_EXHAUSTED | Code::UNAVAILABLE => wait(headers),
        _ => None,
    };
    match wait {
        Some(wait) => signal
            .with_refusal(code.http_status())
            .with_retry_after(wait),
        None => signal,
    }
}

/// Returns when to retry. The pushback takes precedence.
///
/// A pushback that is negative or unreadable means that the client should not retry. That is no time.
fn wait(headers: &HeaderMap) -> Option<Duration> {
    pushback(headers).or_else(|| {
        let details = headers.get(DETAILS)?;
        retry_info::wait(&decode(details.as_bytes())?)
    })
}

/// Decodes the first value of a binary header, which may be a list. `None` if it is not base64, or too long.
fn decode(text: &[u8]) -> Option<Vec<u8>> {
    /// The longest text that is decoded, in bytes. A longer one is ignored.
    const LONGEST: usize = 16 * 1024;

    /// With and without padding, as gRPC says. Bits that are left over are ignored.
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_allow_trailing_bits(true)
            .with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );

    let first = text.split(|byte| *byte == b',').next()?.trim_ascii();
    (first.len() <= LONGEST).then(|| BASE64.decode(first).ok())?
}

/// Reads the pushback. `None` if there is not exactly one, or if it is not a number of milliseconds.
fn pushback(headers: &HeaderMap) -> Option<Duration> {
    let mut values = headers.get_all(PUSHBACK).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    number::plain(value.to_str().ok()?).map(Duration::from_millis)
}
