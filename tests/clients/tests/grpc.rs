//! The layers for gRPC with a client and a server of tonic, on loopback and by the real clock; a fleet
//! over pipes and by a paused clock, because its server counts to the microsecond.
//!
//! The server's log says what arrived, and when. A message is any bytes, so no code is generated.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use clients::tonic::{channel, retry};
use http::Uri;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tollgate::grpc::{GrpcLayer, GrpcRateLimit};
use tollgate::store::MemoryStore;
use tollgate::{
    AdaptiveThrottleLayer, Key, Limited, Limiter, Quota, RateLimitLayer, Reason, by_grpc_method,
};
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tower::{Layer, Service, service_fn};

const UNARY: &str = "/echo.Echo/Unary";
const STREAM: &str = "/echo.Echo/Stream";
/// How many messages a stream has.
const MESSAGES: usize = 3;

type Message = Vec<u8>;

/// Messages that are bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Message;
    type Decode = Message;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Message;
    type Error = Status;

    fn encode(&mut self, item: Message, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(to, &item);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::default()
    }
}

impl Decoder for Raw {
    type Item = Message;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Message>, Status> {
        let mut message = vec![0; bytes::Buf::remaining(from)];
        bytes::Buf::copy_to_slice(from, &mut message);
        Ok(Some(message))
    }
}

/// What the server does with a call, besides answering it.
#[derive(Clone)]
enum Act {
    /// Refuses it at once. A stream ends with this status, after its messages.
    Refuse(Status),
    /// Answers it later.
    Wait(Duration),
}

#[derive(Default)]
struct State {
    acts: VecDeque<Act>,
    /// When calls arrived, and whether they were accepted.
    log: Vec<(Instant, bool)>,
    /// How many calls it accepts in any second, if it limits them.
    limit: Option<usize>,
}

/// A server. Clones are the same server.
#[derive(Clone, Default)]
struct Echo(Arc<Mutex<State>>);

impl Echo {
    /// Takes in a call. Returns what to do with it.
    fn arrives(&self) -> Option<Act> {
        let mut state = self.0.lock().unwrap();
        let now = Instant::now();
        let accepted = state.log.iter().rev().filter(|(_, accepted)| *accepted);
        let in_window = accepted.map_while(|(at, _)| {
            let left = Duration::from_secs(1).checked_sub(now - *at)?;
            (!left.is_zero()).then_some(left)
        });
        let lefts: Vec<Duration> = in_window.collect();
        let act = match state.limit {
            Some(limit) if lefts.len() >= limit => Some(Act::Refuse(exhausted(lefts[limit - 1]))),
            _ => state.acts.pop_front(),
        };
        let is_refused = matches!(act, Some(Act::Refuse(_)));
        state.log.push((now, !is_refused));
        act
    }

    fn then(&self, act: Act) {
        self.0.lock().unwrap().acts.push_back(act);
    }

    fn log(&self) -> Vec<(Instant, bool)> {
        self.0.lock().unwrap().log.clone()
    }

    async fn unary(self, request: Request<Message>) -> Result<Response<Message>, Status> {
        match self.arrives() {
            Some(Act::Refuse(status)) => return Err(status),
            Some(Act::Wait(span)) => sleep(span).await,
            None => {}
        }
        Ok(Response::new(request.into_inner()))
    }

    async fn stream(self, request: Request<Message>) -> Result<Response<Items>, Status> {
        let message = request.into_inner();
        let mut items: Vec<_> = (0..MESSAGES).map(|_| Ok(message.clone())).collect();
        if let Some(Act::Refuse(status)) = self.arrives() {
            items.push(Err(status));
        }
        Ok(Response::new(tokio_stream::iter(items)))
    }
}

type Items = tokio_stream::Iter<std::vec::IntoIter<Result<Message, Status>>>;

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let echo = self.clone();
        Box::pin(async move {
            let mut server = tonic::server::Grpc::new(Raw);
            let is_stream = request.uri().path() == STREAM;
            Ok(if is_stream {
                let stream = service_fn(move |request| echo.clone().stream(request));
                server.server_streaming(stream, request).await
            } else {
                let unary = service_fn(move |request| echo.clone().unary(request));
                server.unary(unary, request).await
            })
        })
    }
}

/// The status of a server that states when to retry.
fn exhausted(wait: Duration) -> Status {
    let mut status = Status::resource_exhausted("the server has had enough");
    let millis = wait.as_nanos().div_ceil(1_000_000).to_string();
    let pushback = millis.parse().unwrap();
    status
        .metadata_mut()
        .insert("grpc-retry-pushback-ms", pushback);
    status
}

/// Starts a server. Returns it with its address.
async fn start() -> (Echo, Endpoint) {
    let echo = Echo::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::spawn(Server::builder().serve_with_incoming(echo.clone(), incoming));
    let address = Endpoint::from_shared(format!("http://{address}"));
    (echo, address.unwrap())
}

/// Makes a unary call, as a generated client does.
async fn unary<T>(service: T, request: Request<Message>) -> Result<Message, Status>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as tonic::transport::Body>::Error: Into<BoxError>,
{
    let mut client = Grpc::new(service);
    let ready = client.ready().await;
    ready.map_err(|error| Status::from_error(error.into()))?;
    let path = PathAndQuery::from_static(UNARY);
    client
        .unary(request, path, Raw)
        .await
        .map(Response::into_inner)
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Makes a call whose response is a stream, and reads all of it. Returns how many messages it had.
async fn stream<T>(service: T) -> (usize, Result<(), Status>)
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as tonic::transport::Body>::Error: Into<BoxError>,
{
    let mut messages = match begin_stream(service).await {
        Ok(messages) => messages,
        Err(status) => return (0, Err(status)),
    };
    let mut count = 0;
    loop {
        match messages.message().await {
            Ok(Some(_)) => count += 1,
            Ok(None) => return (count, Ok(())),
            Err(status) => return (count, Err(status)),
        }
    }
}

async fn begin_stream<T>(service: T) -> Result<tonic::Streaming<Message>, Status>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as tonic::transport::Body>::Error: Into<BoxError>,
{
    let mut client = Grpc::new(service);
    let ready = client.ready().await;
    ready.map_err(|error| Status::from_error(error.into()))?;
    let path = PathAndQuery::from_static(STREAM);
    let response = client.server_streaming(Request::new(b"hello".to_vec()), path, Raw);
    response.await.map(Response::into_inner)
}

fn hello() -> Request<Message> {
    Request::new(b"hello".to_vec())
}

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// Returns when to retry, as the metadata of a status states.
fn pushback(metadata: &MetadataMap) -> Option<Duration> {
    let value = metadata.get("grpc-retry-pushback-ms")?;
    Some(millis(value.to_str().unwrap().parse().unwrap()))
}

/// Returns why this process refused a call.
fn refused(status: &Status) -> Option<&str> {
    status.metadata().get("tollgate-refused")?.to_str().ok()
}

/// How long requests are on hold. The channel adds the host to a request, inside of the layer: so no
/// host has a hold of its own.
async fn hold(limiter: &Limiter) -> Option<Duration> {
    limiter.peek(Key::ALL).await.unwrap().held
}

/// Returns how many calls are in flight.
fn in_flight(limiter: &Limiter) -> u64 {
    let stats = limiter.stats();
    let mut values = stats.values();
    let count = values.find_map(|(name, count)| (name == "in_flight").then_some(count));
    count.unwrap() as u64
}

#[tokio::test]
async fn calls_and_streams_pass() {
    let (echo, server) = start().await;
    let layer = RateLimitLayer::new(Quota::per_second(50)).unwrap();
    let service = channel(layer, &server);
    assert_eq!(unary(service.clone(), hello()).await.unwrap(), b"hello");
    let (count, ended) = stream(service).await;
    assert_eq!(count, MESSAGES);
    ended.unwrap();
    let throttle = AdaptiveThrottleLayer::new()
        .grpc()
        .layer(server.connect().await.unwrap());
    assert_eq!(unary(throttle.clone(), hello()).await.unwrap(), b"hello");
    let (count, ended) = stream(throttle).await;
    assert_eq!(count, MESSAGES);
    ended.unwrap();
    assert_eq!(echo.log().len(), 4);
}

#[tokio::test]
async fn a_local_refusal_is_a_status() {
    let (echo, server) = start().await;
    let layer = RateLimitLayer::builder(Quota::per_minute(1)).max_wait(millis(1500));
    let service = layer
        .build()
        .unwrap()
        .grpc()
        .layer(server.connect().await.unwrap());
    unary(service.clone(), hello()).await.unwrap();
    let (count, of_stream) = stream(service.clone()).await;
    assert_eq!(count, 0);
    for status in [
        unary(service, hello()).await.unwrap_err(),
        of_stream.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::ResourceExhausted);
        let message = status.message();
        assert!(message.starts_with("refused locally (all)"), "{message}");
        assert!(message.contains("max_wait (1.5s)"), "{message}");
        assert!(pushback(status.metadata()) > Some(millis(50_000)));
        assert_eq!(refused(&status), Some("max_wait"));
    }
    assert_eq!(echo.log().len(), 1);
}

/// Asserts that a refusal of the server holds the key for three seconds.
async fn assert_held(server: &Endpoint, echo: &Echo, status: Status) {
    for is_stream in [false, true] {
        let layer = RateLimitLayer::builder(Quota::per_second(50)).max_wait(Duration::ZERO);
        let layer = layer.build().unwrap();
        let limiter = layer.limiter();
        let service = layer.grpc().layer(server.connect().await.unwrap());
        echo.then(Act::Refuse(status.clone()));
        let of_server = if is_stream {
            let (count, ended) = stream(service.clone()).await;
            assert_eq!(count, MESSAGES, "the messages before the status arrive");
            ended.unwrap_err()
        } else {
            unary(service.clone(), hello()).await.unwrap_err()
        };
        assert_eq!(of_server.code(), status.code());
        assert_eq!(of_server.message(), status.message());
        assert_eq!(refused(&of_server), None);
        let held = hold(&limiter).await.unwrap();
        assert!(held <= millis(3000), "{held:?}");
        let calls = echo.log().len();
        let local = unary(service, hello()).await.unwrap_err();
        assert_eq!(refused(&local), Some("held"));
        assert_eq!(echo.log().len(), calls);
    }
}

#[tokio::test]
async fn refusals_of_the_server_hold_the_key() {
    let (echo, server) = start().await;
    assert_held(&server, &echo, exhausted(millis(3000))).await;
    let mut unavailable = Status::unavailable("restarting");
    let pushback = "3000".parse().unwrap();
    unavailable
        .metadata_mut()
        .insert("grpc-retry-pushback-ms", pushback);
    assert_held(&server, &echo, unavailable).await;
    // google.rpc.Status with the code 14 and a RetryInfo of three seconds.
    let mut retry_info = vec![0x08, 14, 0x1a, 48, 0x0a, 40];
    retry_info.extend(b"type.googleapis.com/google.rpc.RetryInfo");
    retry_info.extend([0x12, 4, 0x0a, 2, 0x08, 3]);
    let details = Status::with_details(Code::Unavailable, "restarting", retry_info.into());
    assert_held(&server, &echo, details).await;
}

#[tokio::test]
async fn other_statuses_hold_no_key() {
    let (echo, server) = start().await;
    let layer = RateLimitLayer::new(Quota::per_second(50)).unwrap();
    let limiter = layer.limiter();
    let service = layer.grpc().layer(server.connect().await.unwrap());
    for code in [Code::Unavailable, Code::NotFound, Code::Internal] {
        echo.then(Act::Refuse(Status::new(code, "no")));
        let status = unary(service.clone(), hello()).await.unwrap_err();
        assert_eq!(status.code(), code);
        assert_eq!(hold(&limiter).await, None);
    }
}

/// Four clients, each with a layer and a connection of its own, over one store.
async fn fleet(server: &impl AsyncFn() -> Channel, quota: Quota) -> Vec<GrpcRateLimit<Channel>> {
    let store = Arc::new(MemoryStore::default());
    let mut fleet = Vec::new();
    for _ in 0..4 {
        let layer = RateLimitLayer::builder(quota)
            .store(store.clone())
            .max_wait(Duration::from_secs(120));
        let layer: GrpcLayer<RateLimitLayer> = layer.build().unwrap().grpc();
        fleet.push(layer.layer(server().await));
    }
    fleet
}

/// Starts a server. Returns it with a function that makes a connection of its own, over a pipe.
fn start_over_pipes() -> (Echo, impl AsyncFn() -> Channel) {
    let echo = Echo::default();
    let (pipes, accepted) = mpsc::unbounded_channel::<io::Result<DuplexStream>>();
    let incoming = UnboundedReceiverStream::new(accepted);
    tokio::spawn(Server::builder().serve_with_incoming(echo.clone(), incoming));
    let connect = async move || {
        let pipes = pipes.clone();
        let pipe = service_fn(move |_: Uri| {
            let (client, server) = tokio::io::duplex(64 * 1024);
            let accepted = pipes.send(Ok(server)).map(|()| TokioIo::new(client));
            ready(accepted.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe)))
        });
        let server = Endpoint::from_static("http://server.test");
        server.connect_with_connector(pipe).await.unwrap()
    };
    (echo, connect)
}

/// The fleet always has another request, unary or a stream. The server enforces the same limit.
#[tokio::test(start_paused = true)]
async fn a_fleet_keeps_the_limit_of_its_server() {
    const LIMIT: u32 = 100;
    const CALLS: usize = 1000;
    /// How many calls a client makes at the same time.
    const WORKERS: usize = 15;
    let (echo, connect) = start_over_pipes();
    echo.0.lock().unwrap().limit = Some(LIMIT as usize);
    let fleet = fleet(&connect, Quota::per_second(LIMIT)).await;
    let begun = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for worker in 0..4 * WORKERS {
        let (client, begun) = (fleet[worker % 4].clone(), begun.clone());
        workers.spawn(async move {
            let mut refused = Vec::new();
            while begun.fetch_add(1, Ordering::Relaxed) < CALLS {
                let result = if worker % 3 == 0 {
                    stream(client.clone()).await.1
                } else {
                    unary(client.clone(), hello()).await.map(drop)
                };
                refused.extend(result.err());
            }
            refused
        });
    }
    let refused = workers.join_all().await.concat();
    assert!(
        refused.is_empty(),
        "{} refused: {}",
        refused.len(),
        refused[0]
    );
    let log = echo.log();
    assert_eq!(log.len(), CALLS);
    let took = log[CALLS - 1].0 - log[0].0;
    // The first window begins with all of its calls.
    let used = (CALLS - LIMIT as usize) as f64 / (f64::from(LIMIT) * took.as_secs_f64());
    println!("{:.1} % of the limit used in {took:?}", used * 100.0);
    assert!(used >= 0.97, "{used}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pushback_holds_the_fleet() {
    let (echo, server) = start().await;
    let connect = async || server.connect().await.unwrap();
    let fleet = fleet(&connect, Quota::per_second(50)).await;
    echo.then(Act::Refuse(exhausted(millis(1500))));
    let status = unary(fleet[0].clone(), hello()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let mut calls = JoinSet::new();
    for client in fleet {
        for _ in 0..5 {
            calls.spawn(unary(client.clone(), hello()));
        }
    }
    for result in calls.join_all().await {
        assert_eq!(result.unwrap(), b"hello");
    }
    let log = echo.log();
    let first = log[1].0 - log[0].0;
    assert!(first >= millis(1500), "a call arrived after {first:?}");
    assert_eq!(log.len(), 21);
}

#[tokio::test]
async fn a_retry_follows_the_pushback() {
    let (echo, server) = start().await;
    // A refusal of the server.
    let layer = RateLimitLayer::new(Quota::per_second(50)).unwrap().grpc();
    let service = layer.layer(server.connect().await.unwrap());
    let mut refused = exhausted(millis(200));
    echo.then(Act::Refuse(refused.clone()));
    let answer = retry(2, || unary(service.clone(), hello())).await;
    assert_eq!(answer.unwrap(), b"hello");
    let log = echo.log();
    assert_eq!(log.len(), 2);
    assert!(log[1].0 - log[0].0 >= millis(200));
    // One that states no time is held by the layer.
    refused.metadata_mut().remove("grpc-retry-pushback-ms");
    echo.then(Act::Refuse(refused));
    let answer = retry(2, || unary(service.clone(), hello())).await;
    assert_eq!(answer.unwrap(), b"hello");
    let log = echo.log();
    assert!(log[3].0 - log[2].0 >= millis(400));
    // Local refusals.
    let layer = RateLimitLayer::builder(Quota::per_second(1)).max_wait(Duration::ZERO);
    let service = layer
        .build()
        .unwrap()
        .grpc()
        .layer(server.connect().await.unwrap());
    for _ in 0..2 {
        let answer = retry(10, || unary(service.clone(), hello())).await;
        assert_eq!(answer.unwrap(), b"hello");
    }
    // The last refusal, and each other status, passes.
    let status = retry(1, || unary(service.clone(), hello())).await;
    assert_eq!(self::refused(&status.unwrap_err()), Some("max_wait"));
    assert_eq!(echo.log().len(), 6);
}

/// The timeout of a request counts from when it has its permit: the channel enforces it.
#[tokio::test]
async fn a_timeout_does_not_include_the_wait() {
    let (echo, server) = start().await;
    let layer = RateLimitLayer::new(Quota::per_second(1).and(Quota::in_flight(1))).unwrap();
    let limiter = layer.limiter();
    let service = layer.grpc().layer(server.connect().await.unwrap());
    unary(service.clone(), hello()).await.unwrap();
    let mut request = hello();
    request.set_timeout(millis(500));
    unary(service.clone(), request).await.unwrap();

    echo.then(Act::Wait(Duration::from_secs(60)));
    let mut request = hello();
    request.set_timeout(millis(100));
    let status = unary(service, request).await.unwrap_err();
    assert!(
        matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded),
        "{status}"
    );
    assert_eq!(refused(&status), None);
    assert_eq!(in_flight(&limiter), 0);
    assert_eq!(echo.log().len(), 3);
}

#[tokio::test]
async fn cancelled_calls_free_their_places() {
    let (echo, server) = start().await;
    let layer = RateLimitLayer::builder(Quota::in_flight(1)).max_wait(Duration::from_secs(60));
    let layer = layer.build().unwrap();
    let limiter = layer.limiter();
    let service = layer.grpc().layer(server.connect().await.unwrap());

    // A stream is in flight until it has ended or is dropped.
    let mut messages = begin_stream(service.clone()).await.unwrap();
    assert!(messages.message().await.unwrap().is_some());
    assert_eq!(in_flight(&limiter), 1);
    // A call that is cancelled while it waits takes nothing.
    let waiting = unary(service.clone(), hello());
    timeout(millis(50), waiting).await.unwrap_err();
    assert_eq!(limiter.stats().waiting(), 0);
    drop(messages);
    assert_eq!(in_flight(&limiter), 0);
    assert_eq!(echo.log().len(), 1);

    // A call that is cancelled at the server.
    echo.then(Act::Wait(Duration::from_secs(60)));
    let sent = unary(service.clone(), hello());
    timeout(millis(200), sent).await.unwrap_err();
    assert_eq!(in_flight(&limiter), 0);
    assert_eq!(unary(service.clone(), hello()).await.unwrap(), b"hello");
    let (count, ended) = stream(service).await;
    assert_eq!((count, ended.is_ok()), (MESSAGES, true));
    assert_eq!(in_flight(&limiter), 0);
}

/// What the guide says of a layer that is not for gRPC.
#[tokio::test]
async fn without_grpc_a_local_refusal_is_found_in_the_status() {
    let (_, server) = start().await;
    let layer = RateLimitLayer::builder(Quota::per_minute(1)).max_wait(Duration::ZERO);
    let service = layer
        .build()
        .unwrap()
        .layer(server.connect().await.unwrap());
    unary(service.clone(), hello()).await.unwrap();
    let status = unary(service, hello()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unknown);
    let limited = Limited::find(&status).unwrap();
    assert!(matches!(limited.reason(), Some(Reason::MaxWait(_))));
}

#[tokio::test]
async fn methods_have_limits_of_their_own() {
    let (echo, server) = start().await;
    let layer = RateLimitLayer::builder(Quota::per_hour(1))
        .key(by_grpc_method)
        .max_wait(Duration::ZERO);
    let service = layer
        .build()
        .unwrap()
        .grpc()
        .layer(server.connect().await.unwrap());
    unary(service.clone(), hello()).await.unwrap();
    stream(service.clone()).await.1.unwrap();
    let status = unary(service, hello()).await.unwrap_err();
    assert_eq!(refused(&status), Some("max_wait"));
    assert_eq!(echo.log().len(), 2);
}

#[tokio::test]
async fn the_throttle_follows_the_server() {
    let (echo, server) = start().await;
    let layer = AdaptiveThrottleLayer::new();
    let throttle = layer.throttle();
    let service: GrpcRateLimit<Channel, AdaptiveThrottleLayer> =
        layer.grpc().layer(server.connect().await.unwrap());
    echo.then(Act::Refuse(exhausted(millis(1000))));
    let (_, ended) = stream(service.clone()).await;
    assert_eq!(ended.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(throttle.stats().upstream_refusals().total(), 1);
    unary(service, hello()).await.unwrap();
    let log = echo.log();
    assert!(log[1].0 - log[0].0 >= millis(1000));
}

/// A service whose errors are its own fits as well.
#[tokio::test]
async fn the_error_of_a_broken_connection_stays() {
    #[derive(Clone)]
    struct Broken;

    impl Service<http::Request<Body>> for Broken {
        type Response = http::Response<Body>;
        type Error = std::io::Error;
        type Future = Ready<Result<Self::Response, std::io::Error>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), std::io::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            ready(Err(std::io::ErrorKind::ConnectionReset.into()))
        }
    }

    let layer = RateLimitLayer::new(Quota::per_second(50)).unwrap().grpc();
    let status = unary(layer.layer(Broken), hello()).await.unwrap_err();
    assert_eq!(refused(&status), None);
    assert_ne!(status.code(), Code::ResourceExhausted);
}
