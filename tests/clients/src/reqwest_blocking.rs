//! `reqwest::blocking`: permits for threads without a runtime.

// [recipe]
use std::time::Duration;

use reqwest::blocking::{Client, Request, Response};
use reqwest::header::HeaderMap;
use reqwest::{StatusCode, redirect, retry};
use tollgate::error::BoxError;
use tollgate::signal::ResponseInfo;
use tollgate::{Error, Key, Limiter, Permit, Reason, Signal};

/// Returns a client for [`send`]. An attempt may take `timeout`, its wait for a permit not included.
pub fn client(timeout: Duration) -> reqwest::Result<Client> {
    Client::builder()
        .redirect(redirect::Policy::none())
        .retry(retry::never())
        .timeout(timeout)
        .build()
}

/// Sends `request` with a permit for `key`. If the server refuses it, the next attempt waits until
/// the hold ends.
pub fn send(
    client: &Client,
    limiter: &Limiter,
    key: &Key,
    attempts: u32,
    request: &Request,
) -> Result<Response, BoxError> {
    let mut attempt = 1;
    loop {
        let request = request
            .try_clone()
            .ok_or("its body can be sent only once")?;
        let permit = limiter.acquire(*key).blocking();
        let sent = match permit.and_then(Permit::begin) {
            // The thread stood still until the permit had expired.
            Err(limited) if limited.reason() == Some(Reason::Expired) => continue,
            sent => sent.map_err(Error::from)?,
        };
        let response = client.execute(request)?;
        match sent.answered(&Signal::read(&Head(&response))) {
            Some(_) if attempt < attempts => attempt += 1,
            Some(refused) => return Err(Error::from(refused).into()),
            None => return Ok(response),
        }
    }
}

/// What `Signal::read` needs of a response: the type of reqwest is no `http::Response`.
struct Head<'a>(&'a Response);

impl ResponseInfo for Head<'_> {
    fn status(&self) -> Option<StatusCode> {
        Some(self.0.status())
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(self.0.headers())
    }
}
// [end]
