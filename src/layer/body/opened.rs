//! A response whose body was taken in hand, and the future that reads ahead.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{Extensions, HeaderMap, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;

use super::watched::BodyWatch;
use super::{AtEnd, Looks, WatchedBody};
use crate::clock::{self, Timer};
use crate::limiter::{InFlightSlot, Settlement};
use crate::signal::{ResponseInfo, Signal};

/// How much of a body is read, in bytes.
const MOST: usize = 64 * 1024;

/// How long a body is waited for. What its head says about limits takes effect after that.
const PATIENCE: Duration = Duration::from_secs(1);

/// A response whose body a [`BodyLayer`](super::BodyLayer) can look into.
///
/// Implemented for `http::Response<B>` and, with the feature `reqwest`, for `reqwest::Response`.
pub trait TrackBody: ResponseInfo + Sized {
    /// The body of the response.
    type Body: Body;

    /// The response with the layer in its body.
    type Tracked;

    /// Takes the body of this response in hand.
    fn open(self) -> http::Response<Self::Body>;

    /// Makes the response that the caller gets.
    fn close(response: http::Response<WatchedBody<Self::Body>>) -> Self::Tracked;
}

impl<B: Body> TrackBody for http::Response<B> {
    type Body = B;
    type Tracked = http::Response<WatchedBody<B>>;

    fn open(self) -> Self {
        self
    }

    fn close(response: Self::Tracked) -> Self::Tracked {
        response
    }
}

/// A response with its body in hand, as the layer sees it.
pub struct Opened<T: TrackBody> {
    response: http::Response<WatchedBody<T::Body>>,
    /// The host of the response, which the conversion of its type loses.
    host: Option<Box<str>>,
    /// What the response says, if its body was read.
    signal: Option<Signal>,
    at_end: Option<AtEnd>,
    looks: Looks,
}

impl<T: TrackBody> Opened<T> {
    fn new(response: T, looks: Looks, at_end: Option<AtEnd>) -> Self {
        let host = response.host().map(Box::from);
        Opened {
            response: response.open().map(WatchedBody::new),
            host,
            signal: None,
            at_end,
            looks,
        }
    }

    /// Returns whether the body may say something about a limit, and will soon be there.
    fn is_read(&self) -> bool {
        let status = self.response.status();
        let most = self.response.body().remaining_size().upper();
        if !self.looks.reads || most == Some(0) {
            return false;
        }
        let is_short = most.is_some_and(|most| most <= MOST as u64);
        status.as_u16() >= 400 || status.is_success() && is_short && self.is_json()
    }

    fn is_json(&self) -> bool {
        let of_type = self.response.headers().get(CONTENT_TYPE);
        of_type.is_some_and(|of_type| of_type.as_bytes().windows(4).any(|part| part == b"json"))
    }

    /// Makes the response that the caller gets. It has let the layer pass, and `call` is in flight.
    pub(in crate::layer) fn close(self, call: Option<InFlightSlot>) -> T::Tracked {
        let Opened {
            mut response,
            at_end,
            looks,
            ..
        } = self;
        let watch = at_end.and_then(|at_end| {
            let extensions = response.extensions_mut();
            let settlement = extensions.get::<Settlement>();
            // The layer has settled a refusal. Its body states no cost.
            let is_refusal = settlement.is_some_and(Settlement::is_settled);
            (!is_refusal).then(|| BodyWatch::new(at_end, extensions.remove()))
        });
        let call = call.filter(|_| looks.holds_call);
        response.body_mut().watch(call, watch);
        T::close(response)
    }
}

impl<T: TrackBody> ResponseInfo for Opened<T> {
    fn status(&self) -> Option<StatusCode> {
        Some(self.response.status())
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(self.response.headers())
    }

    fn signal(&self) -> Option<Signal> {
        self.signal.clone()
    }

    fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    fn extensions(&self) -> Option<&Extensions> {
        Some(self.response.extensions())
    }

    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        Some(self.response.extensions_mut())
    }
}

pin_project! {
    /// The future of an [`Opened`] response.
    pub struct Opening<F, T: TrackBody> {
        #[pin]
        response: F,
        looks: Looks,
        at_end: Option<AtEnd>,
        read_ahead: Option<ReadAhead<T>>,
    }
}

impl<F, T: TrackBody> Opening<F, T> {
    pub(in crate::layer) fn new(response: F, looks: Looks, at_end: Option<AtEnd>) -> Self {
        Opening {
            response,
            looks,
            at_end,
            read_ahead: None,
        }
    }
}

impl<F, T, E> Future for Opening<F, T>
where
    F: Future<Output = Result<T, E>>,
    T: TrackBody,
{
    type Output = Result<Opened<T>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let read_ahead = match this.read_ahead {
            Some(read_ahead) => read_ahead,
            None => {
                let response = ready!(this.response.poll(cx))?;
                let opened = Opened::new(response, *this.looks, this.at_end.take());
                if !opened.is_read() {
                    return Poll::Ready(Ok(opened));
                }
                this.read_ahead.insert(ReadAhead {
                    opened,
                    text: Vec::new(),
                    patience: None,
                })
            }
        };
        ready!(read_ahead.poll(cx));
        let read = this.read_ahead.take().expect("it was just polled");
        Poll::Ready(Ok(read.opened))
    }
}

/// A response whose body is read before it is passed on.
struct ReadAhead<T: TrackBody> {
    opened: Opened<T>,
    text: Vec<u8>,
    /// `None` until the body lets the reader wait.
    patience: Option<Timer>,
}

impl<T: TrackBody> ReadAhead<T> {
    /// Polls until the response can be passed on, with the signal of its body if that could be read.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let body = self.opened.response.body_mut();
        match body.poll_ahead(cx, MOST, &mut self.text) {
            Poll::Ready(is_whole) => {
                let response = &self.opened.response;
                self.opened.signal = is_whole.then(|| Signal::read_with_body(response, &self.text));
                Poll::Ready(())
            }
            Poll::Pending => self
                .patience
                .get_or_insert_with(|| Timer::at(clock::now() + PATIENCE))
                .poll(cx),
        }
    }
}
