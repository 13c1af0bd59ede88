//! A server on loopback that produces tokens: it enforces the limits of one API, and counts what it
//! has produced.
//!
//! So that the example needs no model, each word of a prompt is a token, and a header of the request states how long its
//! answer will be. The limits do not look at that.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{HeaderName, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep;
use tollgate::error::BoxError;

use crate::WINDOW;
use crate::api::{Api, MAX_TOKENS, REQUESTS};
use crate::window::Window;

/// The request header that states the tokens of the answer.
pub(crate) const ANSWER: HeaderName = HeaderName::from_static("x-answer-tokens");

/// How many tokens are in an event, and how long it takes to produce them: 1000 per second.
const PART: u32 = 50;
const PART_TAKES: Duration = Duration::from_millis(50);

/// A running server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) api: Api,
    pub(crate) url: String,
    counts: Arc<Mutex<Counts>>,
}

/// What a server has counted.
#[derive(Debug)]
pub(crate) struct Counts {
    api: Api,
    requests: Window,
    /// The limits on tokens, with their names.
    pub(crate) tokens: Vec<(&'static str, Window)>,
    pub(crate) refused: u32,
}

/// The tokens that a request was admitted with.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    prompt: u32,
    answer: u32,
    /// The entry in the first limit on tokens.
    entry: usize,
}

impl Server {
    /// Starts a server in the runtime of the caller.
    pub(crate) async fn start(api: Api) -> Result<Self, BoxError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let url = format!("http://{}/", listener.local_addr()?);
        let counts = Counts {
            api,
            requests: Window::new(REQUESTS, WINDOW),
            tokens: api.windows(),
            refused: 0,
        };
        let counts = Arc::new(Mutex::new(counts));
        tokio::spawn(serve(listener, counts.clone()));
        Ok(Server { api, url, counts })
    }

    pub(crate) fn counts(&self) -> MutexGuard<'_, Counts> {
        lock(&self.counts)
    }
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(listener: TcpListener, counts: Arc<Mutex<Counts>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true); // if it cannot be set, responses are late
        let counts = counts.clone();
        let answer = service_fn(move |request: Request<Incoming>| {
            let counts = counts.clone();
            async move { Ok::<_, Infallible>(answer(&counts, request).await) }
        });
        // A caller may close its connection at any time.
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
    }
}

/// Admits or refuses a request, and begins to produce its answer.
async fn answer(counts: &Arc<Mutex<Counts>>, request: Request<Incoming>) -> Response<Stream> {
    let tokens = request.headers().get(ANSWER);
    let tokens = tokens.and_then(|tokens| tokens.to_str().ok()?.parse::<u32>().ok());
    // A body that breaks, or that is no JSON, is a prompt without words.
    let body = request.into_body().collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let words = body["messages"][0]["content"].as_str().unwrap_or_default();
    let prompt = u32::try_from(words.split_whitespace().count()).unwrap_or(u32::MAX);
    let most = body["max_tokens"].as_u64();
    let most = most.map_or(MAX_TOKENS, |most| u32::try_from(most).unwrap_or(u32::MAX));
    let tokens = tokens.unwrap_or(0).min(most);
    let now = Instant::now();
    let (sender, stream) = unbounded_channel();
    let mut response = Response::new(Stream(stream));
    let mut at_desk = lock(counts);
    match at_desk.admit(now, prompt, most) {
        Ok(entry) => {
            let admitted = Admitted {
                prompt,
                answer: tokens,
                entry,
            };
            tokio::spawn(produce(counts.clone(), admitted, sender));
        }
        Err(wait) => {
            at_desk.refused += 1;
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
    }
    for (name, value) in at_desk.headers(now) {
        response.headers_mut().insert(name, value.into());
    }
    response
}

/// Produces the answer of an admitted request, and counts it.
async fn produce(counts: Arc<Mutex<Counts>>, admitted: Admitted, sender: UnboundedSender<String>) {
    let Admitted { prompt, answer, .. } = admitted;
    let api = lock(&counts).api;
    // The receiver is gone if the caller has closed its connection.
    let _ = sender.send(api.begin(prompt));
    let mut left = answer;
    while left > 0 {
        sleep(PART_TAKES).await;
        let part = left.min(PART);
        left -= part;
        lock(&counts).produced(part);
        let _ = sender.send(api.part(part));
    }
    lock(&counts).finished(admitted);
    let _ = sender.send(api.end(prompt, answer));
}

impl Counts {
    /// Counts a request that arrives, or returns how long it should wait. It counts in all limits, or
    /// in none.
    fn admit(&mut self, now: Instant, prompt: u32, most: u32) -> Result<usize, Duration> {
        let tokens = match self.api {
            Api::Tokens => [prompt + most, 0],
            Api::InputAndOutput => [prompt, 1],
        };
        let mut wait = self.requests.wait(now, 1);
        for ((_, window), units) in self.tokens.iter_mut().zip(tokens) {
            wait = wait.max(window.wait(now, units));
        }
        if wait > Duration::ZERO {
            return Err(wait);
        }
        self.requests.count(now, 1);
        Ok(self.tokens[0].1.count(now, tokens[0]))
    }

    /// Counts output tokens as they are produced.
    fn produced(&mut self, tokens: u32) {
        if let (Api::InputAndOutput, Some((_, output))) = (self.api, self.tokens.get_mut(1)) {
            output.count(Instant::now(), tokens);
        }
    }

    /// Corrects what a request was admitted with.
    fn finished(&mut self, admitted: Admitted) {
        if self.api == Api::Tokens {
            let tokens = admitted.prompt + admitted.answer;
            self.tokens[0].1.correct(admitted.entry, tokens);
        }
    }

    /// Returns the headers about all limits.
    fn headers(&mut self, now: Instant) -> Vec<(HeaderName, u64)> {
        let Counts {
            api,
            requests,
            tokens,
            ..
        } = self;
        let all = tokens.iter_mut().map(|(name, window)| (*name, window));
        let mut headers = Vec::new();
        for (of, window) in all.chain([("requests", requests)]) {
            for (what, value) in [("limit", window.limit), ("remaining", window.left(now))] {
                let name = api.header(of, what).parse();
                headers.extend(name.ok().map(|name| (name, value.into())));
            }
        }
        headers
    }
}

/// The body of a response.
#[derive(Debug)]
struct Stream(UnboundedReceiver<String>);

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let text = self.0.poll_recv(context);
        text.map(|text| text.map(|text| Ok(Frame::data(Bytes::from(text)))))
    }
}
