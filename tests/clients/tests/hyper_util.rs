//! hyper-util's client, behind the layer.

use clients::hyper_util::{Body, limited};
use clients::server::Server;
use clients::suite::{self, Client};
use http::{Request, StatusCode};
use hyper_util::client::legacy::{self, connect::HttpConnector};
use tollgate::service::RateLimit;
use tollgate::{Error, RateLimitLayer};
use tower::ServiceExt;

#[derive(Clone)]
struct HyperUtil {
    client: RateLimit<legacy::Client<HttpConnector, Body>>,
    url: String,
}

/// Why a call failed.
#[derive(Debug)]
enum Failure {
    Call(Error),
    Status(StatusCode),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Call(_) => f.write_str("the call failed"),
            Failure::Status(status) => write!(f, "the server answered {status}"),
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Failure::Call(error) => Some(error),
            Failure::Status(_) => None,
        }
    }
}

impl Client for HyperUtil {
    type Error = Failure;

    const BODY: &'static str = "{}";

    fn new(limit: &RateLimitLayer, server: &Server) -> Self {
        HyperUtil {
            client: limited(limit),
            url: server.url(),
        }
    }

    async fn call(&self) -> Result<(), Failure> {
        let request = Request::get(&self.url).body(Body::new());
        let request = request.expect("the URL is valid");
        let response = self.client.clone().oneshot(request).await;
        match response.map_err(Failure::Call)?.status() {
            StatusCode::OK => Ok(()),
            status => Err(Failure::Status(status)),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hyper_util_keeps_the_limit() {
    suite::run::<HyperUtil>().await;
}
