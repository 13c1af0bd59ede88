//! Finds rate limit layers behind a `tower::buffer::Buffer`.

use std::any::type_name;

/// Returns whether the type of a service names a `Buffer` with a service of this crate inside.
///
/// A buffer calls its inner service in a task of its own. There, an inner layer cannot see that another one is
/// around it: see [`InnerCall`](crate::limiter::InnerCall). A box hides the type, so the
/// answer may be `false` although there is such a layer.
pub(super) fn is_layer_behind_buffer<S>() -> bool {
    let buffer = type_name::<S>().split_once("::buffer::");
    buffer.is_some_and(|(_, inside)| inside.contains("tollgate::layer::"))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::ready;

    use http::{Request, Response};
    use tower::buffer::Buffer;
    use tower::{Service, ServiceBuilder, service_fn};

    use super::is_layer_behind_buffer;
    use crate::{Quota, RateLimitLayer};

    fn is_seen<S>(_service: &S) -> bool {
        is_layer_behind_buffer::<S>()
    }

    async fn ok(_: Request<String>) -> Result<Response<String>, Infallible> {
        Ok(Response::default())
    }

    fn layered()
    -> impl Service<Request<String>, Future: Send, Error: Into<crate::error::BoxError> + Send + Sync>
    + Send {
        let layer = RateLimitLayer::new(Quota::per_second(1)).unwrap();
        ServiceBuilder::new().layer(layer).service(service_fn(ok))
    }

    #[tokio::test]
    async fn only_a_layer_behind_a_buffer_is_found() {
        let (direct, _) = Buffer::pair(layered(), 1);
        assert!(is_seen(&direct));
        let nested = ServiceBuilder::new()
            .timeout(std::time::Duration::MAX)
            .service(direct);
        assert!(is_seen(&nested));
        assert!(!is_seen(&layered()));
        let other = service_fn(|_: Request<String>| {
            ready(Ok::<Response<String>, Infallible>(Response::default()))
        });
        let (other, _) = Buffer::pair(other, 1);
        assert!(!is_seen(&other));
    }
}
