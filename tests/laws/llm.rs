//! The layer for language models, before servers that count as the large providers do. Under a paused clock.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::{Instant, sleep, timeout};
use tollgate::limiter::Limiter;
use tollgate::{Cost, Key, Limited, Llm, RateLimitBuilder, RateLimitLayer, Reason};
use tower::{Layer, ServiceExt, service_fn};

const DAY: Duration = Duration::from_secs(86_400);
const MINUTE: Duration = Duration::from_secs(60);

fn builder(quota: &str) -> RateLimitBuilder {
    RateLimitLayer::builder(quota.parse().unwrap()).max_wait(DAY)
}

/// Returns a prompt of `words` of four letters.
fn prompt(words: usize, max_tokens: u32) -> String {
    let words = "word ".repeat(words);
    format!(
        r#"{{"model": "m", "max_tokens": {max_tokens}, "messages": [{{"content": "{words}"}}]}}"#
    )
}

/// Sends `body` to a server that answers with `pieces`. Returns what is used of each unit before the body of the response
/// was read and after it.
async fn used_by(
    builder: RateLimitBuilder,
    llm: Llm,
    request: Request<String>,
    answer: (u16, &[&'static str]),
) -> [Vec<u64>; 2] {
    let layer = builder.build_llm(llm).unwrap();
    let limiter = layer.limiter();
    let (status, pieces) = answer;
    let server = service_fn(move |_: Request<String>| async move {
        let frames = pieces
            .iter()
            .map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::from_static(piece.as_bytes()))));
        let body = StreamBody::new(futures::stream::iter(frames.collect::<Vec<_>>()));
        Response::builder().status(status).body(body)
    });
    let response = layer.layer(server).oneshot(request).await.unwrap();
    let before = used(&limiter).await;
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, pieces.concat());
    [before, used(&limiter).await]
}

async fn used(limiter: &Limiter) -> Vec<u64> {
    let status = limiter.peek(Key::ALL).await.unwrap();
    status.limits.iter().map(|usage| usage.used).collect()
}

fn post(body: String) -> Request<String> {
    Request::post("http://example.com/v1/chat")
        .body(body)
        .unwrap()
}

const WHOLE: [&str; 1] =
    [r#"{"usage":{"prompt_tokens":300,"completion_tokens":50,"total_tokens":350}}"#];

#[tokio::test(start_paused = true)]
async fn each_api_counts_by_its_rule() {
    let long = || post(prompt(300, 1000));
    let tokens = || builder("500/min, 80000 tokens/min");
    // 1500 bytes and the model are 501 tokens, and 16 for the frame.
    let openai = used_by(tokens(), Llm::openai(), long(), (200, &WHOLE)).await;
    assert_eq!(openai, [[1, 1000], [1, 1000]]);
    let reserving = used_by(tokens(), Llm::reserving(), long(), (200, &WHOLE)).await;
    assert_eq!(reserving, [[1, 1517], [1, 1517]]);
    let back = Llm::reserving().gives_back();
    assert_eq!(
        used_by(tokens(), back, long(), (200, &WHOLE)).await,
        [[1, 1517], [1, 350]]
    );
    // More than was reserved is charged in any case.
    let short = post(prompt(1, 10));
    let charged = used_by(tokens(), Llm::reserving(), short, (200, &WHOLE)).await;
    assert_eq!(charged, [[1, 29], [1, 350]]);
    let words = Llm::reserving().tokenizer(|text| text.split(' ').count() as u32);
    assert_eq!(
        used_by(tokens(), words, long(), (200, &WHOLE)).await[0],
        [1, 1318]
    );

    let parts = || builder("500/min, 80000 input_tokens/min, 40000 output_tokens/min");
    let stream = [
        "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":290,\"cache_creation_input_tokens\":10,",
        "\"cache_read_input_tokens\":7,\"output_tokens\":1}}}\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":50}}\n\n",
        "event: message_stop\ndata: {}\n\n",
    ];
    let anthropic = used_by(parts(), Llm::anthropic(), long(), (200, &stream)).await;
    assert_eq!(anthropic, [[1, 517, 1000], [1, 300, 50]]);
    let failed = [stream[0], stream[1], "event: error\ndata: {}\n\n"];
    for broken in [&["data: {}\n\n"][..], &stream[..2], &failed] {
        let used = used_by(parts(), Llm::anthropic(), long(), (200, broken)).await;
        assert_eq!(used[1], [1, 517, 1000], "{broken:?}");
    }
}

/// The layer and the body of the response have one verdict.
#[tokio::test(start_paused = true)]
async fn a_dialect_decides_whether_a_request_takes_tokens() {
    for (status, verdict, used) in [(429, None, 350), (200, Some(429), 0)] {
        let verdict = verdict.map(|verdict| http::StatusCode::from_u16(verdict).unwrap());
        let tokens = builder("500/min, 80000 tokens/min")
            .dialect(move |_, _, signal| signal.with_refusal(verdict));
        let llm = Llm::reserving().gives_back();
        let [_, after] = used_by(tokens, llm, post(prompt(300, 1000)), (status, &WHOLE)).await;
        assert_eq!(after, [1, used], "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn refused_and_other_requests_take_no_tokens() {
    let tokens = || builder("500/min, 80000 tokens/min");
    let refused = used_by(
        tokens(),
        Llm::openai(),
        post(prompt(300, 1000)),
        (429, &["{}"]),
    )
    .await;
    assert_eq!(refused, [[1, 0], [1, 0]]);
    let usage =
        r#"{"error":{},"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}"#;
    let request = post(prompt(300, 1000));
    let refused = used_by(tokens(), Llm::reserving(), request, (429, &[usage])).await;
    assert_eq!(refused, [[1, 0], [1, 0]]);
    // A refusal by its status, whose body is too long to be read before it is passed on.
    let long = format!(
        r#"{{"usage":{{"total_tokens":0}},"error":"{}"}}"#,
        "x".repeat(70_000)
    );
    let request = post(prompt(300, 1000));
    let refused = used_by(tokens(), Llm::reserving(), request, (529, &[long.leak()])).await;
    assert_eq!(refused, [[1, 0], [1, 0]]);
    let mut list = post(String::new());
    *list.method_mut() = Method::GET;
    assert_eq!(
        used_by(tokens(), Llm::openai(), list, (200, &["{}"])).await[0],
        [1, 0]
    );
    // What cannot be read takes the first estimate, for the prompt and for the answer.
    let unseen = Llm::reserving().first_estimate(700);
    assert_eq!(
        used_by(tokens(), unseen, post("hello".to_owned()), (200, &WHOLE)).await[0],
        [1, 1400]
    );
    let mut own = post(prompt(300, 1000));
    own.extensions_mut().insert(Cost::of("tokens", 7));
    assert_eq!(
        used_by(tokens(), Llm::openai(), own, (200, &["{}"])).await[0],
        [1, 7]
    );
}

/// Many clients drop the body of a stream when they have read its last line.
#[tokio::test(start_paused = true)]
async fn streams_are_settled_at_their_last_line() {
    let layer = builder("80000 tokens/min")
        .build_llm(Llm::reserving().gives_back())
        .unwrap();
    let limiter = layer.limiter();
    let server = service_fn(|_: Request<String>| async {
        let pieces = [
            "data: {\"usage\":{\"total_tokens\":18}}\n\nda",
            "ta: [DO",
            "NE]\n\n",
        ];
        let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::from(piece))));
        let frames = futures::stream::iter(frames);
        Ok::<_, Infallible>(Response::new(StreamBody::new(futures::StreamExt::chain(
            frames,
            futures::stream::pending(),
        ))))
    });
    let response = layer
        .layer(server)
        .oneshot(post(prompt(300, 1000)))
        .await
        .unwrap();
    let mut body = response.into_body();
    for expected in [1517, 1517, 1517, 18] {
        assert_eq!(used(&limiter).await, [expected]);
        if expected != 18 {
            body.frame().await.unwrap().unwrap();
        }
    }
    drop(body);
    assert_eq!(used(&limiter).await, [18]);
}

/// Ten callers reserve ten times the limit, or half of it, and take 58 tokens.
#[tokio::test(start_paused = true)]
async fn prompts_above_the_limit_wait_for_all_of_it() {
    for (limit, max_tokens, fits) in [(100, 1024, 1), (1000, 500, 8)] {
        let layer = builder(&format!("{limit} tokens/min"));
        let layer = layer.build_llm(Llm::reserving().gives_back()).unwrap();
        let server = service_fn(|_: Request<String>| async {
            sleep(Duration::from_secs(1)).await;
            let body = r#"{"usage":{"prompt_tokens":30,"completion_tokens":28,"total_tokens":58}}"#;
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(body))))
        });
        let answered = &Mutex::new(0);
        let callers = (0..10).map(|_| {
            let layer = layer.clone();
            async move {
                loop {
                    let request = post(prompt(30, max_tokens));
                    let response = layer.clone().layer(server).oneshot(request).await.unwrap();
                    response.into_body().collect().await.unwrap();
                    *answered.lock().unwrap() += 1;
                }
            }
        });
        let callers = join_all(callers);
        let _: Result<Vec<()>, _> = timeout(5 * MINUTE, callers).await;
        let (answered, most) = (*answered.lock().unwrap(), 5 * fits);
        assert!(
            answered * 5 >= most * 4,
            "{answered} of {most} answers under {limit}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn prompts_above_the_limit_are_refused_by_choice() {
    let strict = builder("100 tokens/min").wait_above_limit(false);
    let layer = strict.build_llm(Llm::openai()).unwrap();
    let server = service_fn(|_: Request<String>| async {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
    });
    let start = Instant::now();
    let refused = layer
        .layer(server)
        .oneshot(post(prompt(30, 1024)))
        .await
        .unwrap_err();
    assert_eq!(start.elapsed(), Duration::ZERO);
    let reason = Limited::find(&refused).unwrap().reason();
    assert!(matches!(
        reason,
        Some(Reason::CostAboveLimit { cost: 1024, .. })
    ));
}

#[test]
fn build_fails_if_the_quota_has_no_tokens() {
    for (quota, text) in [
        ("500/min", "requests: []"),
        ("500/min, 9 points/min", "\"points\""),
    ] {
        let error = builder(quota)
            .build_llm(Llm::openai())
            .unwrap_err()
            .to_string();
        assert!(error.contains(text), "{error}");
    }
    let twice = builder("9 tokens/min").cost(|_| 1).build_llm(Llm::openai());
    assert!(twice.unwrap_err().to_string().starts_with("cost is set"));
}

/// Output tokens count when they are produced, up to a minute after the request; input tokens count when it arrives.
#[tokio::test(start_paused = true)]
async fn only_output_tokens_count_late() {
    let layer = builder("1000 input_tokens/min, 100 output_tokens/min");
    let layer = layer.build_llm(Llm::anthropic()).unwrap();
    let limiter = layer.limiter();
    let cost = |input, output| {
        let cost = Cost::of("input_tokens", input).and("output_tokens", output);
        limiter.acquire(Key::ALL).cost(cost)
    };
    let start = Instant::now();
    drop(cost(1000, 100).await.unwrap());
    drop(cost(1000, 0).await.unwrap());
    assert!(
        (MINUTE..MINUTE * 3 / 2).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    drop(cost(0, 100).await.unwrap());
    assert!(start.elapsed() >= 2 * MINUTE, "{:?}", start.elapsed());

    // If all tokens have one limit, those of the answer are among them.
    let layer = builder("1000 tokens/min")
        .build_llm(Llm::anthropic())
        .unwrap();
    let limiter = layer.limiter();
    let all = || limiter.acquire(Key::ALL).cost(Cost::of("tokens", 1000));
    let start = Instant::now();
    drop(all().await.unwrap());
    drop(all().await.unwrap());
    assert!(start.elapsed() >= 2 * MINUTE, "{:?}", start.elapsed());
}

/// Few responses say more about a model than the first guess, but no prompt is thought three times as large because of that.
#[tokio::test(start_paused = true)]
async fn the_first_response_makes_no_estimate_worse() {
    let layer = builder("500/min, 80000 tokens/min")
        .build_llm(Llm::reserving())
        .unwrap();
    let limiter = layer.limiter();
    let server = service_fn(|_: Request<String>| async {
        let body = r#"{"usage":{"prompt_tokens":375,"completion_tokens":0,"total_tokens":375}}"#;
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(body))))
    });
    for expected in [517, 2 * 517] {
        let request = post(prompt(300, 0));
        let response = layer.layer(server).oneshot(request).await.unwrap();
        response.into_body().collect().await.unwrap();
        assert_eq!(used(&limiter).await[1], expected);
    }
}
