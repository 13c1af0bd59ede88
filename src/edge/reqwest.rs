//! reqwest: its requests and responses, and the middleware of reqwest-middleware.

use http::{HeaderMap, Method, StatusCode};

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
}

impl AsResponseInfo for reqwest::Response {
    fn status(&self) -> Option<StatusCode> {
        Some(reqwest::Response::status(self))
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(reqwest::Response::headers(self))
    }
}

#[cfg(feature = "reqwest-middleware")]
mod middleware {
    use http::Extensions;
    use reqwest::{Request, Response};
    use reqwest_middleware::{Error as MiddlewareError, Middleware, Next, Result};

    use crate::error::Error;
    use crate::key::RequestInfo;
    use crate::layer::{Entered, RateLimitLayer, leave};

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
            let entered = self.enter(&RequestInfo::new(&request).with_extensions(extensions));
            let sent = match entered {
                Entered::Sent(sent) => sent,
                Entered::Waiting(waiter) => waiter.await.map_err(Error::from)?.sent(),
                Entered::Limited(limited) => return Err(Error::from(limited).into()),
            };
            let response = next.run(request, extensions).await?;
            leave(sent, &response, self.upstream_limit()).map_err(Error::from)?;
            Ok(response)
        }
    }
}
