//! The requests and responses of reqwest, and the middleware of reqwest-middleware.

use std::borrow::Cow;

use http::{Extensions, HeaderMap, Method, StatusCode};
use reqwest::ResponseBuilderExt;

use super::body::{TrackBody, WatchedBody};
use crate::key::RequestInfo;
use crate::signal::ResponseInfo;

impl RequestInfo for reqwest::Request {
    fn host(&self) -> Option<&str> {
        self.url().host_str()
    }

    fn path(&self) -> &str {
        self.url().path()
    }

    fn method(&self) -> &Method {
        reqwest::Request::method(self)
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(reqwest::Request::headers(self))
    }

    fn body(&self) -> Option<Cow<'_, [u8]>> {
        reqwest::Request::body(self)?.as_bytes().map(Cow::Borrowed)
    }

    fn follows_redirects(&self) -> bool {
        true
    }
}

/// The host that reqwest makes up for a response that was made from an `http::Response` without a
/// URL.
const NO_HOST: &str = "no.url.provided.local";

impl ResponseInfo for reqwest::Response {
    fn status(&self) -> Option<StatusCode> {
        Some(reqwest::Response::status(self))
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(reqwest::Response::headers(self))
    }

    fn host(&self) -> Option<&str> {
        self.url().host_str().filter(|host| *host != NO_HOST)
    }

    fn extensions(&self) -> Option<&Extensions> {
        Some(reqwest::Response::extensions(self))
    }

    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        Some(reqwest::Response::extensions_mut(self))
    }
}

impl TrackBody for reqwest::Response {
    type Body = reqwest::Body;
    type Tracked = reqwest::Response;

    fn open(self) -> http::Response<reqwest::Body> {
        // The conversion to `http::Response` loses the URL, so the new response gets it anew.
        let url = self.url().clone();
        let mut response = http::Response::from(self);
        let with_url = http::Response::builder().url(url).body(());
        let extensions = with_url.map(|response| response.into_parts().0.extensions);
        response
            .extensions_mut()
            .extend(extensions.unwrap_or_default());
        response
    }

    fn close(response: http::Response<WatchedBody<reqwest::Body>>) -> reqwest::Response {
        response.map(reqwest::Body::wrap).into()
    }
}

#[cfg(feature = "reqwest-middleware")]
mod middleware {
    use std::future::{self, Future, poll_fn};
    use std::pin::pin;
    use std::task::Poll;

    use http::Extensions;
    use reqwest::{Request, Response};
    use reqwest_middleware::{Error as MiddlewareError, Middleware, Next, Result};

    use crate::admission::Admission;
    use crate::error::Error;
    use crate::key::RequestRef;
    use crate::layer::body::{AtEnd, BodyLayer, BodyPlan};
    use crate::layer::seam::{Departure, Gate};
    use crate::layer::service::CloneFn;
    use crate::layer::{AdaptiveThrottleLayer, Attempts, RateLimitLayer, RetryingThrottleLayer};
    use crate::limiter::{InFlightSlot, forget_panic};
    use crate::signal::{ResponseInfo, Signal};

    /// A refusal becomes a [`MiddlewareError::Middleware`], in which
    /// [`Limited::find`](crate::Limited::find) finds it. Errors of the inner client stay as they
    /// are.
    impl From<Error> for MiddlewareError {
        fn from(error: Error) -> Self {
            MiddlewareError::middleware(error)
        }
    }

    /// Implements [`Middleware`] for a layer. `$clone` copies a request that may be sent again.
    macro_rules! middleware {
        ($layer:ty, $clone:expr) => {
            #[async_trait::async_trait]
            impl Middleware for $layer {
                async fn handle(
                    &self,
                    request: Request,
                    extensions: &mut Extensions,
                    next: Next<'_>,
                ) -> Result<Response> {
                    let (response, _) = run(
                        self.gate(),
                        None,
                        |response, _| future::ready(response),
                        request,
                        extensions,
                        next,
                        $clone,
                    )
                    .await?;
                    Ok(response)
                }
            }
        };
    }

    middleware!(RateLimitLayer, None);
    middleware!(AdaptiveThrottleLayer, None);
    middleware!(RetryingThrottleLayer, Some(Request::try_clone));

    #[async_trait::async_trait]
    impl<G: Gate + 'static> Middleware for BodyLayer<G> {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> Result<Response> {
            let BodyLayer { layer, plan } = self;
            let open = |response, at_end| plan.open(response, at_end);
            let (response, call) =
                run(layer, Some(plan), open, request, extensions, next, None).await?;
            Ok(response.close(call))
        }
    }

    /// Sends `request` through `gate`, and returns its response. The call is in flight until its
    /// slot is dropped.
    ///
    /// `open` makes of a response what the gate sees, by the `plan` for its body. If `clone` is given, a refused request is
    /// sent again.
    async fn run<G: Gate, T: ResponseInfo, F: Future<Output = T>>(
        gate: &G,
        plan: Option<&BodyPlan>,
        open: impl Fn(Response, Option<AtEnd>) -> F,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
        clone: Option<CloneFn<Request>>,
    ) -> Result<(T, Option<InFlightSlot>)> {
        forget_panic();
        let policy = gate.policy();
        let admission = enter(gate, &RequestRef::new(&request).with_extensions(extensions));
        let mut call = match admission {
            Admission::Go(call) => call,
            Admission::Wait(wait) => wait_for_permit(gate, wait, &request, extensions).await?,
            Admission::No(limited) => return Err(Error::from(limited).into()),
        };
        loop {
            let repeat = clone.and_then(|clone| clone(&request));
            let at_end = plan.and_then(|plan| {
                plan.on_request(&RequestRef::new(&request).with_extensions(extensions))
            });
            let sent = async {
                let response = next.clone().run(request, extensions).await?;
                Ok(open(response, at_end).await)
            };
            let mut response = send::<G, _>(&call, sent).await?;
            // A middleware around this one may send the request again, with the same extensions.
            if Signal::is_any_in(&response) && Signal::read(&response).refusal().is_some() {
                Attempts::of_repeated(None, extensions);
            }
            match G::leave(&mut Some(call), &mut response, &policy, repeat) {
                Departure::Pass(in_flight) => return Ok((response, in_flight)),
                Departure::Refuse(limited) => return Err(Error::from(limited).into()),
                Departure::Retry(wait, repeated) => {
                    // The body may hold a connection and an in-flight slot that the next attempt
                    // needs.
                    drop(response);
                    request = repeated;
                    call = wait_for_permit(gate, wait, &request, extensions).await?;
                }
            }
        }
    }

    fn enter<G: Gate>(gate: &G, request: &RequestRef<'_>) -> Admission<G::Call, G::Wait> {
        match gate.enter_fast(request) {
            Ok(admitted) => Admission::Go(gate.sent(admitted)),
            Err(entry) => gate.enter_slow(entry, request),
        }
    }

    async fn wait_for_permit<G: Gate>(
        gate: &G,
        mut wait: G::Wait,
        request: &Request,
        extensions: &Extensions,
    ) -> std::result::Result<G::Call, Error> {
        loop {
            let permit = poll_fn(|cx| {
                let request = RequestRef::new(request).with_extensions(extensions);
                gate.poll_estimated(&mut wait, &request, cx)
            })
            .await?;
            if let Some(call) = G::send(permit, &mut wait)? {
                gate.sends(&RequestRef::new(request).with_extensions(extensions));
                return Ok(call);
            }
        }
    }

    /// Waits for the response of `call`, or for the loss of its in-flight slot.
    async fn send<G: Gate, T>(
        call: &G::Call,
        response: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut response = pin!(response);
        poll_fn(|cx| match G::around(call, || response.as_mut().poll(cx)) {
            Poll::Pending => G::poll_lost(call, cx).map(|limited| Err(Error::from(limited).into())),
            ready => ready,
        })
        .await
    }
}
