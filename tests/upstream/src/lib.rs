//! An HTTP server on loopback that enforces a limit and logs every arrival: the oracle of
//! tollgate's tests and examples.
//!
//! The upstream's log, and not a limiter's own report, proves that a limit holds. The server runs
//! on a thread of its own with a runtime of its own, so a busy or paused caller disturbs neither
//! its clock nor its responses.
//!
//! ```
//! use std::time::Duration;
//! use upstream::{Rule, Upstream};
//!
//! let upstream = Upstream::start([Rule::new(25, Duration::from_secs(5)), Rule::per_second(10)]);
//! // ... call upstream.url(): 200, or 429 with Retry-After ...
//! assert_eq!(upstream.log().over(Rule::per_second(10), Duration::from_millis(10)), None);
//! ```
//!
//! Not supported: HTTP/2, TLS.

#![allow(
    clippy::disallowed_methods,
    reason = "tollgate asks its clock; its oracle must not"
)]

mod keyed;
mod load;
mod log;
mod rules;
mod sent;

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::RETRY_AFTER;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

pub use keyed::{KeyedRule, Keys};
pub use load::closed_loops;
pub use log::{Arrival, Log, Tally};
pub use rules::{Bucket, Rule};
pub use sent::{SENT_HEADER, sent_now};

use keyed::{Decided, KeyedWindows};
use rules::{Tokens, Windows};

/// The request header in which a caller names itself; any text.
pub const WHO_HEADER: &str = "x-who";

/// A running server. Dropping it stops it: its port is closed and its connections are cut.
#[derive(Debug)]
pub struct Upstream {
    address: SocketAddr,
    desk: Arc<Mutex<Desk>>,
    stop: Option<oneshot::Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    /// Starts a server that enforces `rules`, all or nothing: a call that one of them refuses
    /// counts in none.
    ///
    /// It answers 200, or 429 with `Retry-After` in whole seconds, rounded up.
    ///
    /// # Panics
    ///
    /// If a rule has a count of 0, or the machine has no port or thread left.
    pub fn start(rules: impl Into<Vec<Rule>>) -> Upstream {
        let desk = Arc::new(Mutex::new(Desk::new(rules.into())));
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .expect("loopback has a free port");
        let address = listener
            .local_addr()
            .expect("a bound socket has an address");
        listener
            .set_nonblocking(true)
            .expect("a listener can be made nonblocking");
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("upstream".into())
            .spawn({
                let desk = Arc::clone(&desk);
                move || serve(listener, &desk, stopped)
            })
            .expect("the machine has a thread left");
        Upstream {
            address,
            desk,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Starts a server that never refuses.
    pub fn open() -> Upstream {
        Upstream::start([])
    }

    /// Sets how long it takes to respond. Default: no time. A call is logged, and decided, when it
    /// arrives.
    pub fn latency(self, latency: Duration) -> Self {
        lock(&self.desk).latency = latency;
        self
    }

    /// Sets the body of the responses to accepted calls, for clients that parse it. Default: a line
    /// of text.
    pub fn body(self, body: impl Into<String>) -> Self {
        lock(&self.desk).body = body.into();
        self
    }

    /// States the remaining units of the first rule in each response: `X-RateLimit-Limit`,
    /// `-Remaining`, and `-Reset` in seconds.
    pub fn stating(self) -> Self {
        lock(&self.desk).stating = true;
        self
    }

    /// Takes a token of `bucket` for each call, in place of the rules. Each response states how
    /// many remain: `RateLimit-Remaining`, and nothing else.
    ///
    /// ```
    /// use upstream::{Bucket, Upstream};
    ///
    /// let upstream = Upstream::open().bucket(Bucket { size: 4500.0, refill: 1.25, start: 0.0 });
    /// ```
    pub fn bucket(self, bucket: Bucket) -> Self {
        lock(&self.desk).tokens = Some(Tokens::new(bucket));
        self
    }

    /// Responds by `script`, which is called with the number of the call, from 0. If it returns
    /// `None`, the rules decide; a call that the script answered counts in no rule.
    ///
    /// ```
    /// use upstream::{Upstream, refusal};
    ///
    /// let twice = Upstream::open().script(|call| (call < 2).then(|| refusal(1))); // 429, 429, 200, 200, ...
    /// ```
    pub fn script(
        self,
        script: impl Fn(usize) -> Option<Response<String>> + Send + 'static,
    ) -> Self {
        lock(&self.desk).script = Box::new(script);
        self
    }

    /// Refuses all calls of this path, without a header: a call that is refused counts in no rule.
    pub fn refusing(self, path: impl Into<String>) -> Self {
        lock(&self.desk).refused_path = Some(path.into());
        self
    }

    /// Enforces `rules` in place of those that it was started with, all or nothing. The log names the
    /// keys of each call.
    pub fn keyed(self, rules: impl Into<Vec<KeyedRule>>) -> Self {
        lock(&self.desk).keyed = Some(KeyedWindows::new(rules.into()));
        self
    }

    /// Returns its URL, `http://127.0.0.1:port/`.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Returns its address, for callers that use TCP directly.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns all calls that arrived up to now.
    pub fn log(&self) -> Log {
        Log::from(lock(&self.desk).arrivals.clone())
    }

    /// Returns how many calls were accepted and refused up to now; cheap.
    pub fn tally(&self) -> Tally {
        lock(&self.desk).tally
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // If it panicked, the panic was printed, and the test saw its connections fail.
            let _ = thread.join();
        }
    }
}

/// Returns a 429 with `Retry-After: retry_after`, for scripts.
pub fn refusal(retry_after: u64) -> Response<String> {
    let mut response = Response::new("too many\n".to_owned());
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response
        .headers_mut()
        .insert(RETRY_AFTER, retry_after.into());
    response
}

/// Decides and logs calls, one at a time.
struct Desk {
    started: Instant,
    windows: Windows,
    tokens: Option<Tokens>,
    script: Box<dyn Fn(usize) -> Option<Response<String>> + Send>,
    refused_path: Option<String>,
    keyed: Option<KeyedWindows>,
    latency: Duration,
    body: String,
    stating: bool,
    arrivals: Vec<Arrival>,
    tally: Tally,
}

impl Desk {
    fn new(rules: Vec<Rule>) -> Self {
        Desk {
            started: Instant::now(),
            windows: Windows::new(rules),
            tokens: None,
            script: Box::new(|_| None),
            refused_path: None,
            keyed: None,
            latency: Duration::ZERO,
            body: "welcome\n".to_owned(),
            stating: false,
            arrivals: Vec::new(),
            tally: Tally::default(),
        }
    }

    fn arrive<B>(&mut self, request: &Request<B>) -> Response<String> {
        let at = Instant::now();
        let header = |name| request.headers().get(name)?.to_str().ok();
        let mut scripted = (self.script)(self.arrivals.len());
        if self.refused_path.as_deref() == Some(request.uri().path()) {
            let mut refused = Response::new("too many\n".to_owned());
            *refused.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            scripted = Some(refused);
        }
        let now = at - self.started;
        let decided = |response| Decided {
            keys: Vec::new(),
            refused_by: None,
            response,
        };
        let decided = match (scripted, &mut self.keyed) {
            (Some(response), _) => decided(response),
            (None, Some(keyed)) => keyed.decide(request.uri().path(), request.headers(), now),
            (None, None) => decided(self.decide(now)),
        };
        let mut response = decided.response;
        if let Some((left, count, reset)) = self.windows.left(now).filter(|_| self.stating) {
            let headers = response.headers_mut();
            headers.insert("x-ratelimit-limit", count.into());
            headers.insert("x-ratelimit-remaining", left.into());
            headers.insert("x-ratelimit-reset", rules::whole_seconds(reset).into());
        }
        let accepted = response.status().is_success();
        self.tally.add(accepted);
        self.arrivals.push(Arrival {
            at,
            sent: header(SENT_HEADER).and_then(sent::read),
            who: header(WHO_HEADER).map(str::to_owned),
            accepted,
            ended: None,
            body: 0,
            keys: decided.keys,
            refused_by: decided.refused_by,
        });
        response
    }

    fn decide(&mut self, now: Duration) -> Response<String> {
        if let Some(tokens) = &mut self.tokens {
            let (ok, left) = tokens.take(now);
            let mut response =
                Response::new(if ok { "welcome\n" } else { "too many\n" }.to_owned());
            if !ok {
                *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            }
            response
                .headers_mut()
                .insert("ratelimit-remaining", left.into());
            return response;
        }
        match self.windows.admit(now) {
            Ok(()) => Response::new(self.body.clone()),
            Err(wait) => refusal(rules::whole_seconds(wait)),
        }
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk")
            .field("latency", &self.latency)
            .field("tally", &self.tally)
            .finish_non_exhaustive()
    }
}

/// A script that panics breaks its own connection; the log stays valid.
fn lock(desk: &Mutex<Desk>) -> MutexGuard<'_, Desk> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until `stopped`; dropping the runtime ends the connections.
fn serve(
    listener: std::net::TcpListener,
    desk: &Arc<Mutex<Desk>>,
    stopped: oneshot::Receiver<Infallible>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("the machine has a poller left");
    runtime.block_on(async {
        let listener =
            TcpListener::from_std(listener).expect("a nonblocking listener on a runtime");
        tokio::select! {
            _ = stopped => {}
            () = accept(listener, desk) => {}
        }
    });
}

async fn accept(listener: TcpListener, desk: &Arc<Mutex<Desk>>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of file descriptors: calls that end free some.
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        };
        // Responses are sent at once (`TCP_NODELAY`); if that cannot be set they are late, not
        // wrong.
        let _ = stream.set_nodelay(true);
        let desk = Arc::clone(desk);
        let service = service_fn(move |request| answer(Arc::clone(&desk), request));
        // A caller may close its connection at any time: that is no error.
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(
    desk: Arc<Mutex<Desk>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (response, latency, call) = {
        let mut at_desk = lock(&desk);
        let call = Call {
            desk: Arc::clone(&desk),
            number: at_desk.arrivals.len(),
        };
        (at_desk.arrive(&request), at_desk.latency, call)
    };
    // An unread body would end the connection.
    let body = request.into_body().collect().await?.to_bytes();
    lock(&desk).arrivals[call.number].body = body.len();
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    Ok(response.map(|body| Full::new(Bytes::from(body))))
}

/// A call in flight. It is dropped when its response is ready, or its connection is closed.
struct Call {
    desk: Arc<Mutex<Desk>>,
    number: usize,
}

impl Drop for Call {
    fn drop(&mut self) {
        lock(&self.desk).arrivals[self.number].ended = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    /// Sends one call on a connection of its own, with `headers`, and returns the whole response in
    /// lower case.
    fn call(upstream: &Upstream, headers: &[(&str, &str)]) -> String {
        let mut stream = TcpStream::connect(upstream.address()).unwrap();
        let headers: String = headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}\r\n"))
            .collect();
        write!(
            stream,
            "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.to_lowercase()
    }

    fn statuses(upstream: &Upstream, calls: usize) -> Vec<String> {
        (0..calls)
            .map(|_| call(upstream, &[])["http/1.1 ".len()..][..3].to_owned())
            .collect()
    }

    #[test]
    fn upstream_refuses_above_the_limit_with_retry_after() {
        let upstream = Upstream::start(Rule::new(2, Duration::from_secs(3600)));
        assert_eq!(statuses(&upstream, 2), ["200", "200"]);
        let refused = call(&upstream, &[]);
        assert!(refused.starts_with("http/1.1 429"), "{refused}");
        assert!(refused.contains("\r\nretry-after: 3600\r\n"), "{refused}");
        assert_eq!(
            upstream.tally(),
            Tally {
                accepted: 2,
                refused: 1
            }
        );
        let accepted: Vec<_> = upstream
            .log()
            .iter()
            .map(|arrival| arrival.accepted)
            .collect();
        assert_eq!(accepted, [true, true, false]);
    }

    #[test]
    fn what_left_the_window_makes_room() {
        let window = Duration::from_millis(200);
        let upstream = Upstream::start(Rule::new(1, window));
        assert_eq!(statuses(&upstream, 2), ["200", "429"]);
        std::thread::sleep(window);
        assert_eq!(statuses(&upstream, 1), ["200"]);
    }

    #[test]
    fn upstream_logs_the_caller_and_the_sent_time() {
        let upstream = Upstream::open();
        let before = Instant::now();
        let sent = sent_now();
        let after = Instant::now();
        call(
            &upstream,
            &[
                (SENT_HEADER, sent.to_str().unwrap()),
                (WHO_HEADER, "task 7"),
            ],
        );
        call(&upstream, &[(SENT_HEADER, "yesterday")]);
        let log = upstream.log();
        let logged = log[0].sent.unwrap();
        assert!(before <= logged && logged <= after && after < log[0].at);
        assert_eq!(log[0].who.as_deref(), Some("task 7"));
        assert_eq!((log[1].sent, log[1].who.as_deref()), (None, None));
    }

    #[test]
    fn a_script_answers_first_and_counts_in_no_rule() {
        let teapot = || {
            Response::builder()
                .status(418)
                .header("x-pot", "short")
                .body("stout".to_owned())
                .unwrap()
        };
        let upstream = Upstream::start(Rule::new(1, Duration::from_secs(3600))).script(
            move |call| match call {
                0 | 1 => Some(refusal(7)),
                3 => Some(teapot()),
                _ => None,
            },
        );
        assert!(call(&upstream, &[]).contains("\r\nretry-after: 7\r\n"));
        assert_eq!(statuses(&upstream, 2), ["429", "200"]);
        let scripted = call(&upstream, &[]);
        assert!(
            scripted.contains("\r\nx-pot: short\r\n") && scripted.ends_with("stout"),
            "{scripted}"
        );
        assert_eq!(statuses(&upstream, 1), ["429"]);
    }

    #[test]
    fn the_body_is_that_of_accepted_calls() {
        let upstream = Upstream::start(Rule::new(1, Duration::from_secs(3600))).body("{}");
        let post = [("content-length", "0")];
        assert!(call(&upstream, &post).ends_with("\r\n\r\n{}"));
        assert!(call(&upstream, &post).ends_with("\r\n\r\ntoo many\n"));
    }

    #[test]
    fn upstream_logs_how_many_bytes_a_call_brought() {
        let upstream = Upstream::open();
        let mut stream = TcpStream::connect(upstream.address()).unwrap();
        stream
            .write_all(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello")
            .unwrap();
        stream.read_to_string(&mut String::new()).unwrap();
        call(&upstream, &[]);
        let lengths: Vec<_> = upstream.log().iter().map(|arrival| arrival.body).collect();
        assert_eq!(lengths, [5, 0]);
    }

    #[test]
    fn latency_delays_the_answer_and_not_the_log() {
        let latency = Duration::from_millis(80);
        let upstream = Upstream::open().latency(latency);
        let start = Instant::now();
        call(&upstream, &[]);
        assert!(start.elapsed() >= latency);
        assert!(upstream.log()[0].at + latency <= Instant::now());
    }

    #[test]
    fn a_call_ends_with_its_answer_or_its_connection() {
        let upstream = Upstream::open().latency(Duration::from_millis(50));
        call(&upstream, &[]);
        let answered = &upstream.log()[0];
        assert!(answered.ended.unwrap() >= answered.at + Duration::from_millis(50));
        let upstream = Upstream::open().latency(Duration::from_secs(3600));
        let mut stream = TcpStream::connect(upstream.address()).unwrap();
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .unwrap();
        while upstream.log().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(upstream.log()[0].ended, None);
        drop(stream);
        while upstream.log()[0].ended.is_none() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn dropping_it_closes_its_port() {
        let is_closed = || {
            let upstream = Upstream::open();
            let address = upstream.address();
            drop(upstream);
            TcpStream::connect(address).is_err()
        };
        // Another program may get the port at once.
        assert!((0..5).any(|_| is_closed()));
    }
}
