//! Layers for clients of gRPC, such as tonic.
//!
//! They are the layers for HTTP but for two things. The status of a call may only come with the
//! trailers, so the call ends there: [`GrpcBody`] keeps it, and ends it with the signal in the
//! trailers. And a client of gRPC takes an error of its service for a broken connection, so a local
//! refusal becomes a response with the status `RESOURCE_EXHAUSTED`.
//!
//! ```text
//!                 ┌─ grpc-status in the headers ──> Gate::leave ──> the response passes
//! response head ──┤
//!                 └─ no grpc-status ──> GrpcBody ── trailers ──> Gate::leave
//! ```

use std::fmt::{self, Write};
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use http::header::CONTENT_TYPE;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::response_policy::ResponsePolicy;
use super::seam::{Departure, Gate, take_call};
use super::service::{CloneService, Edge, RateLimit, edge};
use super::{AdaptiveThrottleLayer, RateLimitLayer};
use crate::clock;
use crate::error::{BoxError, Error, Limited};
use crate::key::RequestInfo;
use crate::signal::grpc::{Code, MESSAGE, PUSHBACK, STATUS};
use crate::signal::{ResponseInfo, Signal};
use crate::stats::name_of_reason;

/// The header of a local refusal: why the request was not sent, by the names of
/// [`Stats::refusals`](crate::stats::Stats::refusals), or `store`.
const REASON: HeaderName = HeaderName::from_static("tollgate-refused");

/// Says in the extensions of a response that this process refused the request: the server has not
/// seen it.
///
/// The layers of this module put it there, and no layer of this crate takes such a response for the
/// word of the server. A generated client of tonic drops the extensions: see
/// [`grpc`](crate::grpc#what-the-caller-sees).
///
/// ```
/// use tollgate::grpc::LocalRefusal;
///
/// fn limited<B>(response: &http::Response<B>) -> Option<&tollgate::Limited> {
///     response.extensions().get().map(LocalRefusal::limited)
/// }
/// # assert!(limited(&http::Response::new(())).is_none());
/// ```
#[derive(Clone, Debug)]
pub struct LocalRefusal(Limited);

impl LocalRefusal {
    /// Returns why the request was not sent.
    pub fn limited(&self) -> &Limited {
        &self.0
    }
}

/// Says in the extensions of a response that it is no word of the server: this process has refused or cancelled the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnResponse;

impl OwnResponse {
    /// Returns whether `extensions` are those of such a response.
    pub(super) fn is_in(extensions: Option<&Extensions>) -> bool {
        extensions.is_some_and(|extensions| extensions.get::<OwnResponse>().is_some())
    }

    /// Makes the response that the caller of a request gets that was limited: only trailers, in the headers.
    fn of<B>(limited: Limited) -> http::Response<GrpcBody<B>> {
        let mut response = http::Response::new(GrpcBody::new(None, None));
        *response.version_mut() = Version::HTTP_2;
        *response.headers_mut() = trailers_of(&limited);
        let content = HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(CONTENT_TYPE, content);
        response.extensions_mut().insert(OwnResponse);
        if response.headers().contains_key(REASON) {
            response.extensions_mut().insert(LocalRefusal(limited));
        }
        response
    }
}

/// Makes the trailers of a call that this process has refused or cancelled.
fn trailers_of(limited: &Limited) -> HeaderMap {
    let (code, reason) = match limited {
        Limited::Local { reason, .. } => (Code::RESOURCE_EXHAUSTED, Some(name_of_reason(reason))),
        Limited::Upstream { .. } => (Code::RESOURCE_EXHAUSTED, None),
        // A call that was cancelled was sent.
        Limited::Store { .. } => (Code::UNAVAILABLE, (!limited.was_sent()).then_some("store")),
    };
    let mut trailers = HeaderMap::new();
    trailers.insert(STATUS, HeaderValue::from(code.number()));
    if let Ok(message) = HeaderValue::try_from(percent_encoded(&limited.to_string())) {
        trailers.insert(MESSAGE, message);
    }
    if let Some(wait) = limited.retry_after() {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        // The type of the header is a signed integer of 32 bits.
        let millis = i32::try_from(millis).unwrap_or(i32::MAX);
        trailers.insert(PUSHBACK, HeaderValue::from(millis));
    }
    if let Some(reason) = reason {
        trailers.insert(REASON, HeaderValue::from_static(reason));
    }
    trailers
}

/// Encodes a text for `grpc-message`: bytes beside printable ASCII, and `%`, as `%` and two digits.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            // Writing to a string never fails.
            _ => drop(write!(encoded, "%{byte:02X}")),
        }
    }
    encoded
}

/// The headers or trailers of a response, with their signal.
struct Answer<'a> {
    status: Option<StatusCode>,
    signal: Signal,
    headers: Option<&'a HeaderMap>,
    extensions: Extensions,
}

impl ResponseInfo for Answer<'_> {
    fn status(&self) -> Option<StatusCode> {
        self.status
    }

    fn headers(&self) -> Option<&HeaderMap> {
        self.headers
    }

    fn signal(&self) -> Option<Signal> {
        Some(self.signal.clone())
    }

    fn extensions(&self) -> Option<&Extensions> {
        Some(&self.extensions)
    }

    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        Some(&mut self.extensions)
    }
}

/// Ends `call` with the head of `response`, or returns the call that its trailers end.
fn leave_at_head<G, B, T>(
    call: &mut Option<G::Call>,
    response: &mut http::Response<B>,
    policy: &ResponsePolicy,
    repeat: Option<T>,
) -> Departure<G::Wait, T, Option<Box<dyn OpenCall>>>
where
    G: Gate + 'static,
    B: Body,
{
    if OwnResponse::is_in(Some(response.extensions())) {
        // A layer inside refused or cancelled the request. So it has no response, as if that layer had failed.
        drop(call.take());
        return Departure::Pass(None);
    }
    let is_http = response.status() != StatusCode::OK;
    let code = Code::read(response.headers()).filter(|_| !is_http);
    let extensions = mem::take(response.extensions_mut());
    // Without gRPC, a proxy has answered.
    let (status, signal) = if is_http {
        (Some(response.status()), Signal::read(response))
    } else {
        (
            code.map(Code::http_status),
            Signal::read_grpc(response.headers()),
        )
    };
    let mut answer = Answer {
        status,
        signal,
        headers: Some(response.headers()),
        extensions,
    };
    if is_http || code.is_some() || response.body().is_end_stream() {
        let departure = G::leave(call, &mut answer, policy, repeat);
        *response.extensions_mut() = answer.extensions;
        return match departure {
            // The response is the error, in the words of gRPC.
            Departure::Pass(_) | Departure::Refuse(_) => Departure::Pass(None),
            Departure::Retry(wait, repeat) => Departure::Retry(wait, repeat),
        };
    }
    let call = take_call(call);
    G::settle(&call, &mut answer, policy);
    let wait = answer.signal.retry_after();
    let open = Open::<G> {
        call,
        policy: policy.without_settle(),
        retry_at: wait.map(|wait| clock::after(clock::now(), wait)),
        head: answer.signal,
    };
    *response.extensions_mut() = answer.extensions;
    Departure::Pass(Some(Box::new(open)))
}

/// A call whose trailers have not arrived.
trait OpenCall: Send + Sync {
    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<Limited>;

    /// Ends the call, with its trailers if there are any.
    fn end(self: Box<Self>, trailers: Option<&HeaderMap>);
}

/// The call of a gate.
struct Open<G: Gate> {
    call: G::Call,
    policy: ResponsePolicy,
    /// What the headers have stated.
    head: Signal,
    /// When to retry, as the headers have stated it. It counts if the trailers refuse, and state no time.
    retry_at: Option<Instant>,
}

impl<G: Gate> OpenCall for Open<G> {
    fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<Limited> {
        G::poll_lost(&self.call, cx)
    }

    fn end(self: Box<Self>, trailers: Option<&HeaderMap>) {
        let Open {
            call,
            policy,
            head,
            retry_at,
        } = *self;
        let mut signal = trailers.map(Signal::read_grpc).unwrap_or_default();
        if signal.quotas().is_empty() {
            for quota in head.quotas() {
                signal = signal.with_quota(quota.clone());
            }
        }
        let now = clock::now();
        if let Some(at) = retry_at.filter(|at| *at > now)
            && signal.refusal().is_some()
            && signal.retry_after().is_none()
        {
            signal = signal.with_retry_after(at - now);
        }
        let mut answer = Answer {
            status: trailers.and_then(Code::read).map(Code::http_status),
            signal,
            headers: trailers,
            extensions: Extensions::new(),
        };
        drop(G::leave(&mut Some(call), &mut answer, &policy, None::<()>));
    }
}

pin_project! {
    /// The body of a response of gRPC. It reads the status of the call in the trailers.
    ///
    /// The call is in flight until the trailers have arrived, or the body has failed or is dropped. If
    /// the body is dropped after its first message, the call counts as one that the server accepted.
    pub struct GrpcBody<B> {
        // `None` for a local refusal, and once the call was cancelled.
        #[pin]
        body: Option<B>,
        // While it is open.
        call: Option<Box<dyn OpenCall>>,
        // Whether the server has sent a message.
        has_message: bool,
    }

    impl<B> PinnedDrop for GrpcBody<B> {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            if *this.has_message {
                end(this.call, None);
            }
        }
    }
}

/// Ends the call of a body with the trailers, or without a statement about limits.
fn end(call: &mut Option<Box<dyn OpenCall>>, trailers: Option<&HeaderMap>) {
    if let Some(call) = call.take() {
        call.end(trailers);
    }
}

impl<B> GrpcBody<B> {
    fn new(body: Option<B>, call: Option<Box<dyn OpenCall>>) -> Self {
        GrpcBody {
            body,
            call,
            has_message: false,
        }
    }
}

impl<B> Body for GrpcBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let mut this = self.project();
        let Some(body) = this.body.as_mut().as_pin_mut() else {
            return Poll::Ready(None);
        };
        let open = this.call.as_ref();
        if let Some(Poll::Ready(lost)) = open.map(|call| call.poll_lost(cx)) {
            *this.call = None;
            // Dropping the body cancels the call. Clients take an error of the body for a broken connection.
            this.body.set(None);
            return Poll::Ready(Some(Ok(Frame::trailers(trailers_of(&lost)))));
        }
        let frame = match ready!(body.poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                *this.call = None;
                return Poll::Ready(Some(Err(error.into())));
            }
            None => {
                end(this.call, None);
                return Poll::Ready(None);
            }
        };
        match frame.trailers_ref() {
            Some(trailers) => end(this.call, Some(trailers)),
            None => *this.has_message = true,
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let body = self.body.as_ref().map(Body::size_hint);
        body.unwrap_or_else(|| SizeHint::with_exact(0))
    }
}

impl<B> fmt::Debug for GrpcBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcBody").finish_non_exhaustive()
    }
}

fn as_response<B>(
    result: Result<http::Response<GrpcBody<B>>, Error>,
) -> Result<http::Response<GrpcBody<B>>, Error> {
    match result {
        Err(Error::Limited(limited)) => Ok(OwnResponse::of(limited)),
        result => result,
    }
}

/// A layer for clients of gRPC: a [`RateLimitLayer`] or an [`AdaptiveThrottleLayer`].
/// [`RateLimitLayer::grpc`] and [`AdaptiveThrottleLayer::grpc`] return it.
#[derive(Clone, Debug)]
pub struct GrpcLayer<L>(L);

/// The Tower service of a layer for gRPC: `GrpcRateLimit<Channel>` of a [`RateLimitLayer`], and
/// `GrpcRateLimit<Channel, AdaptiveThrottleLayer>` of an [`AdaptiveThrottleLayer`].
pub type GrpcRateLimit<S, L = RateLimitLayer> = RateLimit<S, GrpcLayer<L>>;

impl RateLimitLayer {
    /// Returns this layer for a client of gRPC, such as tonic.
    ///
    /// It reads the status and the pushback of calls, in headers and in trailers
    /// ([`Signal::read_grpc`]). A request that is refused locally gets a response with the status
    /// `RESOURCE_EXHAUSTED`, instead of an error. A call is in flight until its trailers have arrived.
    /// The page [`grpc`](crate::grpc) has more.
    #[cfg_attr(docsrs, doc(cfg(feature = "grpc")))]
    pub fn grpc(self) -> GrpcLayer<Self> {
        GrpcLayer(self)
    }
}

impl AdaptiveThrottleLayer {
    /// Returns this layer for a client of gRPC, such as tonic: see [`RateLimitLayer::grpc`].
    #[cfg_attr(docsrs, doc(cfg(feature = "grpc")))]
    pub fn grpc(self) -> GrpcLayer<Self> {
        GrpcLayer(self)
    }
}

impl<G: Gate> Edge for GrpcLayer<G> {
    type Gate = G;
}

impl<S: CloneService, G: Gate> Layer<S> for GrpcLayer<G> {
    type Service = RateLimit<S, Self>;

    fn layer(&self, inner: S) -> RateLimit<S, Self> {
        RateLimit::new(self.0.clone(), inner)
    }
}

edge! {
    impl[B: Body, G: Gate<Call: 'static> + 'static] GrpcLayer<G> {
        inner: S,
        where: [R: RequestInfo, S: Service<R, Response = http::Response<B>>],
        response: http::Response<GrpcBody<B>>,
        clone: None,
        poll: |future, cx| future
            .poll_leaving(cx, leave_at_head::<G, B, _>, |response, call| {
                response.map(|body| GrpcBody::new(Some(body), call))
            })
            .map(as_response),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Empty};

    use super::*;
    use crate::clock;
    use crate::error::{LimitName, StoreError};
    use crate::key::Key;
    use crate::refused::RefusedRequest;

    /// A call whose in-flight slot another process may have.
    struct LostCall;

    impl OpenCall for LostCall {
        fn poll_lost(&self, _: &mut Context<'_>) -> Poll<Limited> {
            let request = RefusedRequest::new(Key::ALL.own_label(None), LimitName::default());
            Poll::Ready(request.fail(StoreError::InFlightSlotLost, clock::now()))
        }

        fn end(self: Box<Self>, _: Option<&HeaderMap>) {}
    }

    /// A client takes an error of the body for a broken connection: its status would be `Unknown`.
    #[tokio::test]
    async fn calls_cancelled_after_their_head_are_unavailable() {
        let body = GrpcBody::new(Some(Empty::<&[u8]>::new()), Some(Box::new(LostCall)));
        let end = body.collect().await.unwrap();
        let trailers = end.trailers().unwrap();
        assert_eq!(trailers[STATUS], "14");
        assert!(
            trailers[MESSAGE]
                .to_str()
                .unwrap()
                .contains("in_flight_ttl")
        );
        assert!(
            !trailers.contains_key(REASON),
            "the server may have seen it"
        );
    }

    #[test]
    fn messages_are_percent_encoded() {
        for (text, encoded) in [
            ("", ""),
            ("refused locally (all)", "refused locally (all)"),
            ("100 %", "100 %25"),
            ("größer\n", "gr%C3%B6%C3%9Fer%0A"),
            ("~\u{7f}", "~%7F"),
        ] {
            assert_eq!(percent_encoded(text), encoded);
        }
    }
}
