//! An HTTP server on loopback that limits, and logs each call.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    /// How many calls the server accepts in a sliding window.
    limit: Option<(usize, Duration)>,
    /// The answers to the next calls, in place of what the limit says.
    next: VecDeque<Answer>,
    body: &'static str,
    content_type: &'static str,
    log: Vec<Arrival>,
}

/// How the server answers a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// 200, with the body.
    Accept,
    /// 429, with `Retry-After` in seconds.
    Refuse(u64),
    /// 503, without a time.
    Fail,
    /// No answer.
    Hang,
}

/// A call that arrived.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When it arrived.
    pub at: Instant,
    /// Its path.
    pub path: String,
    /// How the server answered it.
    pub answer: Answer,
}

impl Server {
    /// Starts a server that accepts each call with this body of JSON.
    pub async fn start(body: &'static str) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let state = Arc::new(Mutex::new(State {
            limit: None,
            next: VecDeque::new(),
            body,
            content_type: "application/json",
            log: Vec::new(),
        }));
        let calls = state.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let calls = calls.clone();
                let service = service_fn(move |request| answer(calls.clone(), request));
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection);
            }
        });
        Server {
            address,
            state,
            accepting,
        }
    }

    /// Accepts only `count` calls in each `window`, and refuses the others with 429.
    pub fn limit(&self, count: usize, window: Duration) {
        self.state.lock().unwrap().limit = Some((count, window));
    }

    /// Sends the body with another content type than `application/json`.
    pub fn content_type(&self, content_type: &'static str) {
        self.state.lock().unwrap().content_type = content_type;
    }

    /// Answers the next calls so, in this order.
    pub fn next(&self, answers: impl IntoIterator<Item = Answer>) {
        self.state.lock().unwrap().next.extend(answers);
    }

    /// Returns its URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns all calls that have arrived, in order.
    pub fn log(&self) -> Vec<Arrival> {
        self.state.lock().unwrap().log.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl State {
    /// Decides about a call that arrives now, and logs it.
    fn decide(&mut self, path: &str) -> Answer {
        let now = Instant::now();
        let answer = self.next.pop_front().unwrap_or_else(|| match self.limit {
            Some((count, window)) => {
                let is_counted = |arrival: &&Arrival| {
                    arrival.answer == Answer::Accept && now - arrival.at < window
                };
                if self.log.iter().filter(is_counted).count() < count {
                    Answer::Accept
                } else {
                    Answer::Refuse(1)
                }
            }
            None => Answer::Accept,
        });
        self.log.push(Arrival {
            at: now,
            path: path.to_owned(),
            answer,
        });
        answer
    }
}

async fn answer(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (answer, body, content_type) = {
        let mut state = state.lock().unwrap();
        let answer = state.decide(request.uri().path());
        (answer, state.body, state.content_type)
    };
    let response = Response::builder().header("content-type", content_type);
    let response = match answer {
        Answer::Accept => response.body(Full::from(body)),
        Answer::Refuse(seconds) => response
            .status(StatusCode::TOO_MANY_REQUESTS)
            .header("retry-after", seconds)
            .body(Full::from("{}")),
        Answer::Fail => response
            .status(StatusCode::SERVICE_UNAVAILABLE)
            .body(Full::from("{}")),
        Answer::Hang => std::future::pending().await,
    };
    Ok(response.expect("the head is valid"))
}
