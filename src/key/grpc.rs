//! Key functions for gRPC: the path of a request is `/package.Service/Method`.

use super::{Key, RequestRef};

/// Returns the key of the service that a gRPC request calls: a key function for one limit for each
/// service, such as `shop.v1.Orders`.
///
/// The key is `Key::new("shop.v1.Orders")`. A request whose path is not `/service/method` is refused
/// ([`Reason::NoKey`](crate::Reason::NoKey)).
///
/// ```
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// use tollgate::{Quota, RateLimitLayer, by_grpc_service};
///
/// let limit = RateLimitLayer::builder(Quota::per_second(50)).key(by_grpc_service).build()?;
/// let limit = limit.grpc();
/// # Ok(())
/// # }
/// ```
#[cfg_attr(docsrs, doc(cfg(feature = "grpc")))]
pub fn by_grpc_service(request: &RequestRef<'_>) -> Option<Key> {
    let (service, _) = parts(request.path())?;
    Some(Key::new(service))
}

/// Returns the key of the method that a gRPC request calls: a key function for one limit for each
/// method of each service, such as `shop.v1.Orders/Create`.
///
/// The key is `Key::new("shop.v1.Orders/Create")`. A request whose path is not `/service/method` is
/// refused ([`Reason::NoKey`](crate::Reason::NoKey)).
#[cfg_attr(docsrs, doc(cfg(feature = "grpc")))]
pub fn by_grpc_method(request: &RequestRef<'_>) -> Option<Key> {
    let path = request.path();
    parts(path)?;
    Some(Key::new(&path[1..]))
}

/// Returns the service and the method in a path.
fn parts(path: &str) -> Option<(&str, &str)> {
    // A proxy may have put a prefix before the service.
    let (service, method) = path.strip_prefix('/')?.rsplit_once('/')?;
    (!service.is_empty() && !method.is_empty()).then_some((service, method))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn only_paths_of_methods_have_a_key() {
        let keys = |path: &str| {
            let request = Request::post(path).body(()).unwrap();
            let request = RequestRef::new(&request);
            (by_grpc_service(&request), by_grpc_method(&request))
        };
        let of = |service: &str, method: &str| (Some(Key::new(service)), Some(Key::new(method)));
        for path in ["http://h:1/shop.v1.Orders/Create", "/shop.v1.Orders/Create"] {
            assert_eq!(keys(path), of("shop.v1.Orders", "shop.v1.Orders/Create"));
        }
        assert_eq!(keys("/api/Orders/Get"), of("api/Orders", "api/Orders/Get"));
        for path in ["/", "/Create", "//Create", "/shop.v1.Orders/", "http://h"] {
            assert_eq!(keys(path), (None, None), "{path}");
        }
    }
}
