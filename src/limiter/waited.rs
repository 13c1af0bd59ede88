//! How a request waited, for whom its response is.

use std::fmt;
use std::time::Duration;

use super::explanation::Because;
use crate::key::Label;

/// How a request waited for its permit, in the extensions of its response.
///
/// The layers add it to the response of a request that waited: for its slot, for the end of a hold, or for an
/// in-flight slot. The response to a request that got its permit at once, or with the answer of a store, has none. But
/// with a limit of [calls in flight](crate::Quota::in_flight), a request that waits for the store to grant its in-flight
/// slot has waited for that slot. A request that leaves uncounted after its store failed has one only if it had waited
/// for a hold or for an in-flight slot before. So a program can tell its own wait from the time of the server:
///
/// ```
/// # use http::{Request, Response};
/// # use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
/// use tollgate::{Quota, RateLimitLayer, Waited};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let limit = RateLimitLayer::new(Quota::per_second(1))?;
/// let mut service = ServiceBuilder::new().layer(limit).service(client);
/// # let request = || Request::get("https://api.example.com/users").body(String::new());
/// # service.ready().await?.call(request()?).await?;
/// let response = service.ready().await?.call(request()?).await?;
/// if let Some(waited) = response.extensions().get::<Waited>() {
///     println!("{waited}"); // waited 1.03s: 1/1s is used up
/// }
/// # assert!(response.extensions().get::<Waited>().is_some());
/// # Ok(())
/// # }
/// ```
///
/// The feature `tracing` makes a span of each wait: see [operate](crate::guide::operate#traces).
#[derive(Clone, Debug)]
pub struct Waited {
    span: Duration,
    because: Because,
    key: Label,
    limit_name: Option<&'static str>,
}

impl Waited {
    pub(crate) fn new(
        span: Duration,
        because: Because,
        key: Label,
        limit_name: Option<&'static str>,
    ) -> Self {
        Waited {
            span,
            because,
            key,
            limit_name,
        }
    }

    /// Returns how long the request waited.
    pub fn duration(&self) -> Duration {
        self.span
    }

    /// Returns what the request waited for. If a hold stopped it at any time, that is the hold, and otherwise what it waited
    /// for first. If several limits may have delayed it, this is [`Because::Queue`].
    pub fn because(&self) -> Because {
        self.because
    }

    /// Returns the [label](crate::Key#what-logs-show-of-a-key) of its key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the name of the limit that delayed it, if it has a name, as
    /// [`LimitedInfo::name`](crate::error::LimitedInfo::name) does.
    pub fn limit_name(&self) -> Option<&str> {
        self.limit_name
    }
}

/// Writes one line for a log.
impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waited {:?}: ", self.span)?;
        self.because.write(f, None, None)
    }
}
