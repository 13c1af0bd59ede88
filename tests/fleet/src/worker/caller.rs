//! A caller: sends requests over HTTP, or only passes the gate.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fleet::{Event, Options, Outcome, refusal};
use reqwest::header::HeaderValue;
use reqwest::{Client, Method, Request, Response, StatusCode, Url};
use tollgate::{Key, Limited, Limiter, RateLimitLayer};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, Service, ServiceExt};
use upstream::{SENT_HEADER, WHO_HEADER};

/// Clones share one HTTP client.
#[derive(Clone)]
pub(crate) enum Caller {
    Bare(Limiter),
    Http {
        layer: RateLimitLayer,
        client: Client,
        /// The URLs to call in turn, and how many calls there were.
        urls: Arc<[Url]>,
        calls: Arc<AtomicUsize>,
        who: HeaderValue,
    },
}

impl Caller {
    pub(crate) fn new(layer: &RateLimitLayer, options: &Options) -> anyhow::Result<Self> {
        if options.url.is_empty() {
            return Ok(Caller::Bare(layer.limiter()));
        }
        let client = Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .build()?;
        let url: Url = options.url.parse()?;
        let urls = match options.paths.is_empty() {
            true => vec![url],
            false => {
                let urls = options.paths.iter().map(|path| url.join(path));
                urls.collect::<Result<_, _>>()?
            }
        };
        Ok(Caller::Http {
            layer: layer.clone(),
            client,
            urls: urls.into(),
            calls: Arc::default(),
            who: options.who.parse()?,
        })
    }

    pub(crate) async fn call(&mut self) -> Event {
        let asked = fleet::now();
        match self {
            Caller::Bare(limiter) => match limiter.acquire(Key::ALL).await {
                Ok(permit) => {
                    let ended = fleet::now();
                    drop(permit);
                    Event {
                        asked,
                        ended,
                        outcome: Outcome::Granted,
                        text: String::new(),
                    }
                }
                Err(error) => failed(asked, fleet::now(), &error),
            },
            Caller::Http {
                layer,
                client,
                urls,
                calls,
                who,
            } => {
                let number = calls.fetch_add(1, Ordering::Relaxed);
                let request = Request::new(Method::GET, urls[number % urls.len()].clone());
                let granted = Arc::new(AtomicU64::new(0));
                let mut service = stamped(layer, client.clone(), who.clone(), Arc::clone(&granted));
                let answer = async {
                    let response = service.ready().await?.call(request).await?;
                    let text = match response.status() {
                        StatusCode::TOO_MANY_REQUESTS => refusal(fleet::now()),
                        _ => String::new(),
                    };
                    response.bytes().await?;
                    Ok::<_, BoxError>(text)
                };
                let result = answer.await;
                let granted = granted.load(Ordering::Relaxed);
                match result {
                    Ok(text) => Event {
                        asked,
                        ended: granted,
                        outcome: Outcome::Granted,
                        text,
                    },
                    Err(error) => failed(
                        asked,
                        if granted > 0 { granted } else { fleet::now() },
                        &*error,
                    ),
                }
            }
        }
    }
}

/// Builds the client behind the gate. It notes in each request when the gate let it through.
fn stamped(
    layer: &RateLimitLayer,
    client: Client,
    who: HeaderValue,
    granted: Arc<AtomicU64>,
) -> BoxCloneSyncService<Request, Response, BoxError> {
    let stamped = client.map_request(move |mut request: Request| {
        let now = fleet::now();
        granted.store(now, Ordering::Relaxed);
        request.headers_mut().insert(SENT_HEADER, now.into());
        request.headers_mut().insert(WHO_HEADER, who.clone());
        request
    });
    BoxCloneSyncService::new(layer.layer(stamped).map_err(BoxError::from))
}

fn failed(asked: u64, ended: u64, error: &(dyn Error + 'static)) -> Event {
    let outcome = match Limited::find(error) {
        Some(Limited::Store { .. }) => Outcome::StoreFailed,
        Some(_) => Outcome::Refused,
        None => Outcome::Broken,
    };
    Event {
        asked,
        ended,
        outcome,
        text: error.to_string(),
    }
}
