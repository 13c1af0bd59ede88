//! reqwest: its requests and responses, and the middleware of reqwest-middleware.

use http::{HeaderMap, Method, StatusCode};
use reqwest::ResponseBuilderExt;

use super::body::{HeldBody, HoldBody, InFlight};
use crate::key::AsRequestInfo;
use crate::signal::AsResponseInfo;

impl AsRequestInfo for reqwest::Request {
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

    fn follows_redirects(&self) -> bool {
        true
    }
}

/// What reqwest takes for the host of a response that was made of an `http::Response` without a URL.
const NO_HOST: &str = "no.url.provided.local";

impl AsResponseInfo for reqwest::Response {
    fn status(&self) -> Option<StatusCode> {
        Some(reqwest::Response::status(self))
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(reqwest::Response::headers(self))
    }

    fn host(&self) -> Option<&str> {
        self.url().host_str().filter(|host| *host != NO_HOST)
    }
}

impl HoldBody for reqwest::Response {
    type Held = reqwest::Response;

    fn hold(self, call: InFlight) -> reqwest::Response {
        // On its way through `http` a response forgets its URL, unless it is told again.
        let url = self.url().clone();
        let (parts, body) = http::Response::from(self).into_parts();
        let held = reqwest::Body::wrap(HeldBody::new(body, call));
        let told = http::Response::builder().url(url).body(()).map(|told| told.into_parts().0.extensions);
        let mut response = http::Response::from_parts(parts, held);
        response.extensions_mut().extend(told.unwrap_or_default());
        response.into()
    }
}

#[cfg(feature = "reqwest-middleware")]
mod middleware {
    use std::future::{Future, poll_fn};
    use std::pin::pin;
    use std::task::Poll;

    use http::Extensions;
    use reqwest::{Request, Response};
    use reqwest_middleware::{Error as MiddlewareError, Middleware, Next, Result};

    use crate::error::Error;
    use crate::key::RequestInfo;
    use crate::layer::body::{HoldBody, HoldUntilBodyEnd, InFlight};
    use crate::layer::{AdaptiveThrottleLayer, Begun, Entered, RateLimitLayer, RetryingThrottleLayer, leave};
    use crate::limiter::Seat;
    use crate::throttle::{Back, Wait};

    /// A limit is a [`MiddlewareError::Middleware`] in which [`Limited::find`](crate::Limited::find) finds it; errors
    /// of the client inside stay as they are.
    impl From<Error> for MiddlewareError {
        fn from(error: Error) -> Self {
            MiddlewareError::middleware(error)
        }
    }

    #[async_trait::async_trait]
    impl Middleware for RateLimitLayer {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> Result<Response> {
            run(self, request, extensions, next).await.map(|(response, _)| response)
        }
    }

    #[async_trait::async_trait]
    impl Middleware for HoldUntilBodyEnd {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> Result<Response> {
            let (response, seat) = run(&self.layer, request, extensions, next).await?;
            Ok(response.hold(InFlight(seat)))
        }
    }

    async fn run(
        layer: &RateLimitLayer,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<(Response, Option<Seat>)> {
        let entered = layer.enter(&RequestInfo::new(&request).with_extensions(extensions));
        let sent = match entered {
            Entered::Sent(sent) => sent,
            Entered::Waiting(waiter) => waiter.await.map_err(Error::from)?.sent(),
            Entered::Limited(limited) => return Err(Error::from(limited).into()),
        };
        let mut call = pin!(next.run(request, extensions));
        let response = poll_fn(|cx| match call.as_mut().poll(cx) {
            Poll::Pending => sent.poll_lost(cx).map(|limited| Err(Error::from(limited).into())),
            ready => ready,
        })
        .await?;
        let seat = leave(sent, &response, &layer.policy()).map_err(Error::from)?;
        Ok((response, seat))
    }

    #[async_trait::async_trait]
    impl Middleware for AdaptiveThrottleLayer {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> Result<Response> {
            throttled(self, request, extensions, next, |_| None).await
        }
    }

    #[async_trait::async_trait]
    impl Middleware for RetryingThrottleLayer {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> Result<Response> {
            throttled(&self.layer, request, extensions, next, Request::try_clone).await
        }
    }

    async fn throttled(
        layer: &AdaptiveThrottleLayer,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
        clones: fn(&Request) -> Option<Request>,
    ) -> Result<Response> {
        let host = RequestInfo::new(&request).host_if_redirected();
        let begun = layer.enter(&RequestInfo::new(&request).with_extensions(extensions));
        let mut permit = match begun {
            Begun::Leaves(permit) => permit,
            Begun::Waits(wait) => wait.await.map_err(Error::from)?,
            Begun::Limited(limited) => return Err(Error::from(limited).into()),
        };
        loop {
            let again = clones(&request);
            let response = next.clone().run(request, extensions).await?;
            let signal = layer.signal(permit.key(), host, &response);
            let Some(repeated) = again.filter(|_| signal.limited().is_some()) else {
                layer.leave(permit, &signal).map_err(Error::from)?;
                return Ok(response);
            };
            let wait: Box<Wait> = match permit.answered_or_back(&signal) {
                Some(Back::Waits(wait)) => wait,
                Some(Back::Ended(limited)) if layer.error_on_limit() => {
                    return Err(Error::from(limited).into());
                }
                _ => return Ok(response),
            };
            // Its body may hold a connection and a place in flight, which the next attempt needs.
            drop(response);
            permit = wait.await.map_err(Error::from)?;
            request = repeated;
        }
    }
}
