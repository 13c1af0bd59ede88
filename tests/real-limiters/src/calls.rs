//! Callers that keep a server busy.

use std::time::{Duration, SystemTime};

use reqwest::{Method, Request, Response, StatusCode, Url};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tower::{BoxError, Service, ServiceExt};

/// A call: it ends when the server has accepted one of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// When it began, in milliseconds since the Unix epoch.
    pub began: u64,
    /// How long it took, or how long it had taken when the time was over.
    pub took: Duration,
    /// Whether the server accepted it in time.
    pub accepted: bool,
}

/// Runs `callers` callers for `span`. Each makes one call after the other. A call whose request is refused sends it again
/// after `pause`.
///
/// # Errors
///
/// If a call fails, or the server answers with another status than 200 and 429.
pub async fn closed_loops<S>(
    service: S,
    url: &Url,
    callers: usize,
    span: Duration,
    pause: Duration,
) -> Result<Vec<Call>, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let end = Instant::now() + span;
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        tasks.spawn(calls(service.clone(), url.clone(), end, pause));
    }
    let mut all = Vec::new();
    while let Some(calls) = tasks.join_next().await {
        all.extend(calls??);
    }
    Ok(all)
}

async fn calls<S>(
    mut service: S,
    url: Url,
    end: Instant,
    pause: Duration,
) -> Result<Vec<Call>, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    let mut calls = Vec::new();
    loop {
        let (began, start) = (since_epoch(), Instant::now());
        let accepted = match timeout_at(end, call(&mut service, &url, pause)).await {
            Ok(called) => called.map(|()| true)?,
            Err(_) => false,
        };
        calls.push(Call {
            began,
            took: start.elapsed(),
            accepted,
        });
        if !accepted {
            return Ok(calls);
        }
    }
}

async fn call<S>(service: &mut S, url: &Url, pause: Duration) -> Result<(), BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    loop {
        let request = Request::new(Method::GET, url.clone());
        let ready = service.ready().await.map_err(Into::into)?;
        let response = ready.call(request).await.map_err(Into::into)?;
        let status = response.status();
        response.bytes().await?; // so that the connection can be used again
        match status {
            StatusCode::OK => return Ok(()),
            StatusCode::TOO_MANY_REQUESTS => sleep(pause).await,
            _ => return Err(format!("the server answered {status}").into()),
        }
    }
}

fn since_epoch() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap_or_default().as_millis() as u64
}
