//! An upstream without sockets, which logs requests and responds by a script.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode};
use tower::{BoxError, Service};

use super::clock;

/// The next response.
pub(crate) type Answer = Result<Response<String>, &'static str>;

/// An upstream that logs requests. Clones are the same upstream.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    opened: Instant,
    takes: Duration,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    log: Vec<(Duration, String)>,
    script: VecDeque<Answer>,
}

impl Upstream {
    /// An upstream that responds 200 at once.
    pub(crate) fn new() -> Self {
        Upstream::taking(Duration::ZERO)
    }

    /// An upstream that responds 200 after `takes`.
    pub(crate) fn taking(takes: Duration) -> Self {
        Upstream {
            opened: clock::now(),
            takes,
            state: Arc::default(),
        }
    }

    /// An upstream that responds with `script` first, then 200.
    pub(crate) fn answering(script: impl IntoIterator<Item = Answer>) -> Self {
        let upstream = Upstream::new();
        upstream.lock().script.extend(script);
        upstream
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what arrived: paths, and when, in milliseconds.
    pub(crate) fn log(&self) -> Vec<(String, u64)> {
        self.lock()
            .log
            .iter()
            .map(|(at, path)| (path.clone(), millis(*at)))
            .collect()
    }

    /// Returns when requests arrived, in milliseconds.
    pub(crate) fn arrivals(&self) -> Vec<u64> {
        self.lock().log.iter().map(|(at, _)| millis(*at)).collect()
    }

    /// Returns the paths that arrived, in order.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.lock()
            .log
            .iter()
            .map(|(_, path)| path.clone())
            .collect()
    }

    /// Returns how many requests arrived.
    pub(crate) fn count(&self) -> usize {
        self.lock().log.len()
    }

    /// Panics if more than `limit` requests arrived in any interval of the length `window`.
    pub(crate) fn was_never_over(&self, limit: usize, window: Duration) {
        let log = &self.lock().log;
        for (first, after) in log.iter().zip(log.iter().skip(limit)) {
            assert!(
                after.0 - first.0 >= window,
                "more than {limit} in {window:?}: {log:?}"
            );
        }
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

impl Service<Request<String>> for Upstream {
    type Response = Response<String>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<String>, BoxError>> + Send + Sync>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let answer = {
            let mut state = self.lock();
            state
                .log
                .push((clock::now() - self.opened, request.uri().path().to_owned()));
            state.script.pop_front().unwrap_or_else(ok)
        };
        let takes = self.takes;
        Box::pin(async move {
            if !takes.is_zero() {
                clock::pass(takes).await;
            }
            answer.map_err(BoxError::from)
        })
    }
}

/// A request for `uri`.
pub(crate) fn get(uri: &str) -> Request<String> {
    Request::get(uri)
        .body(String::new())
        .expect("the tests know how to write a URI")
}

/// 200.
pub(crate) fn ok() -> Answer {
    Ok(Response::new("hello".to_owned()))
}

/// 429 with a `Retry-After`.
pub(crate) fn limited(retry_after: &str) -> Answer {
    let mut response = Response::new("too much".to_owned());
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    if let Ok(value) = http::HeaderValue::from_bytes(retry_after.as_bytes()) {
        response
            .headers_mut()
            .insert(http::header::RETRY_AFTER, value);
    }
    Ok(response)
}

/// A call that fails without a response.
pub(crate) fn other_error() -> Answer {
    Err("broken pipe")
}
