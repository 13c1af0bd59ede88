//! ureq: permits for threads without a runtime.

// [recipe]
use std::time::Duration;

use tollgate::error::BoxError;
use tollgate::{Error, Key, Limiter, Permit, Reason, Signal};
use ureq::http::{Request, Response};
use ureq::{Agent, AsSendBody, Body};

/// Returns an agent for [`send`]. An attempt may take `timeout`, its wait for a permit not included.
pub fn agent(timeout: Duration) -> Agent {
    Agent::config_builder()
        .http_status_as_error(false) // a 429 is a response, with its headers
        .max_redirects(0)
        .timeout_global(Some(timeout))
        .build()
        .into()
}

/// Sends `request` with a permit for `key`. If the server refuses it, the next attempt waits until
/// the hold ends.
pub fn send<B: AsSendBody + Clone>(
    agent: &Agent,
    limiter: &Limiter,
    key: &Key,
    attempts: u32,
    request: &Request<B>,
) -> Result<Response<Body>, BoxError> {
    let mut attempt = 1;
    loop {
        let permit = limiter.acquire(*key).blocking();
        let sent = match permit.and_then(Permit::begin) {
            // The thread stood still until the permit had expired.
            Err(limited) if limited.reason() == Some(Reason::Expired) => continue,
            sent => sent.map_err(Error::from)?,
        };
        let response = agent.run(request.clone())?;
        match sent.answered(&Signal::read(&response)) {
            Some(_) if attempt < attempts => attempt += 1,
            Some(refused) => return Err(Error::from(refused).into()),
            None => return Ok(response),
        }
    }
}
// [end]
