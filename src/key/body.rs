//! The bytes of a request's body, if the body is in memory.

use std::any::Any;
use std::borrow::Cow;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::Body;
use http_body_util::Full;

/// Returns the bytes of a body of one of the types that hold all of their bytes. A stream can be read only once, so it is
/// left to the client.
// By type, as a body of any type may be in a request, and Rust has no "if it is `AsRef<[u8]>`".
pub(super) fn bytes_of<B: 'static>(body: &B) -> Option<Cow<'_, [u8]>> {
    let body: &dyn Any = body;
    let bytes = body.downcast_ref().map(Bytes::as_ref);
    let bytes = bytes.or_else(|| body.downcast_ref().map(Vec::<u8>::as_slice));
    let bytes = bytes.or_else(|| body.downcast_ref().map(String::as_bytes));
    let bytes = bytes.or_else(|| {
        body.downcast_ref()
            .map(|text: &&'static str| text.as_bytes())
    });
    #[cfg(feature = "reqwest")]
    let bytes = bytes.or_else(|| body.downcast_ref().and_then(reqwest::Body::as_bytes));
    if let Some(bytes) = bytes {
        return Some(Cow::Borrowed(bytes));
    }
    full(body.downcast_ref::<Full<Bytes>>()?)
}

/// Returns the bytes of a body that shows them only as its one frame. The frame of the clone shares them.
fn full(body: &Full<Bytes>) -> Option<Cow<'_, [u8]>> {
    let mut context = Context::from_waker(Waker::noop());
    let frame = Pin::new(&mut body.clone()).poll_frame(&mut context);
    let data = match frame {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().ok()?,
        _ => Bytes::new(),
    };
    Some(Cow::Owned(data.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{RequestInfo, RequestRef};

    #[test]
    fn bodies_in_memory_are_seen() {
        fn seen<B: 'static>(body: B) -> Option<Vec<u8>> {
            let request = http::Request::new(body);
            let request: &dyn RequestInfo = &request;
            RequestRef::new(request).body().map(Cow::into_owned)
        }
        let expected = Some(b"{}".to_vec());
        assert_eq!(seen("{}"), expected);
        assert_eq!(seen("{}".to_owned()), expected);
        assert_eq!(seen(b"{}".to_vec()), expected);
        assert_eq!(seen(Bytes::from("{}")), expected);
        assert_eq!(seen(Full::new(Bytes::from("{}"))), expected);
        assert_eq!(seen(Full::<Bytes>::default()), Some(Vec::new()));
        #[cfg(feature = "reqwest")]
        assert_eq!(seen(reqwest::Body::from("{}")), expected);
        assert_eq!(seen(()), None);
        assert_eq!(seen(http_body_util::Empty::<Bytes>::new()), None);
    }
}
