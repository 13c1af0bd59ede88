//! The tasks that call in a closed loop: the same with one process and in each of many.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use reqwest::header::{HeaderValue, RETRY_AFTER};
use reqwest::{Client, Method, Request, Response, StatusCode, Url};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tollgate::Limited;
use tollgate::error::BoxError;
use tower::{Service, ServiceExt};
use upstream::{SENT_HEADER, WHO_HEADER, sent_now};

use crate::args::Args;
use crate::progress::TICK;

/// What the tasks saw. The log of the service has what the service saw.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// For each 200, how long the task waited for it: waits, refusals and retries included.
    pub(crate) took: Vec<Duration>,
    /// Calls that tollgate refused because the slot was further away than `max_wait`.
    pub(crate) refused_locally: u64,
    /// Calls that tollgate refused because the store did not respond.
    pub(crate) store_failures: u64,
    /// One error of the store.
    pub(crate) store_error: Option<String>,
}

impl Outcome {
    /// Adds the outcome of other tasks.
    pub(crate) fn add(&mut self, other: Outcome) {
        self.took.extend(other.took);
        self.refused_locally += other.refused_locally;
        self.store_failures += other.store_failures;
        self.store_error = self.store_error.take().or(other.store_error);
    }
}

/// What the tasks of one process have in common.
#[derive(Debug)]
pub(crate) struct Callers {
    /// The URL of the service.
    url: Url,
    /// The number of the process.
    process: u32,
    tasks: u32,
    /// How long the tasks call.
    time: Duration,
    /// Whether a refused task reads `Retry-After`.
    polite: bool,
    /// The number of calls after which all tasks stop.
    max_calls: usize,
    counts: Counts,
}

/// What all tasks of a process do, in sum.
#[derive(Debug, Default)]
struct Counts {
    /// Calls that began, and at the end one for each task that `max_calls` stopped.
    begun: AtomicUsize,
    /// Calls of `begun` that left the limiter: sent or refused.
    left: AtomicUsize,
    /// Tasks that wait after a refusal.
    backing_off: AtomicUsize,
}

impl Callers {
    /// Prepares the tasks of the process `process`, which call the service at `url`.
    pub(crate) fn new(args: &Args, process: u32, url: &str) -> Result<Callers, BoxError> {
        Ok(Callers {
            url: url.parse()?,
            process,
            tasks: args.tasks,
            time: args.time,
            polite: args.polite,
            max_calls: usize::MAX,
            counts: Counts::default(),
        })
    }

    /// Sets the number of calls after which all tasks stop.
    pub(crate) fn max_calls(self, max_calls: usize) -> Callers {
        Callers { max_calls, ..self }
    }

    /// Returns a function that writes the send time into a request. Put it inside of the limiter,
    /// so that the time does not include the wait there.
    pub(crate) fn stamp(self: &Arc<Self>) -> impl Fn(Request) -> Request + Clone + use<> {
        let callers = Arc::clone(self);
        move |mut request| {
            callers.counts.left.fetch_add(1, Ordering::Relaxed);
            request.headers_mut().insert(SENT_HEADER, sent_now());
            request
        }
    }

    /// Builds a call of the task `task`.
    pub(crate) fn request(&self, task: impl std::fmt::Display) -> Request {
        let mut request = Request::new(Method::GET, self.url.clone());
        let who = format!("{}.{task}", self.process);
        request.headers_mut().insert(
            WHO_HEADER,
            HeaderValue::try_from(who).expect("numbers and letters"),
        );
        request
    }

    /// Returns how many tasks wait, in the limiter or after a refusal.
    fn waiting(&self) -> usize {
        // The order of the loads keeps `begun` at or above `left`.
        let left = self.counts.left.load(Ordering::Acquire);
        let begun = self.counts.begun.load(Ordering::Acquire);
        begun.saturating_sub(left) + self.counts.backing_off.load(Ordering::Relaxed)
    }

    async fn back_off(&self, wait: Duration) {
        self.counts.backing_off.fetch_add(1, Ordering::Relaxed);
        sleep(wait).await;
        self.counts.backing_off.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Builds the client of a process. It uses no proxy, because the service is on this machine.
pub(crate) fn client() -> reqwest::Result<Client> {
    Client::builder().no_proxy().build()
}

/// Runs the tasks of a process through `service`. Ten times a second, passes the number of waiting
/// tasks to `watch`.
pub(crate) async fn run<S>(
    callers: &Arc<Callers>,
    service: S,
    mut watch: impl FnMut(usize),
) -> Result<Outcome, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let end = Instant::now() + callers.time;
    let mut tasks = JoinSet::new();
    for number in 0..callers.tasks {
        let caller = Caller {
            service: service.clone(),
            request: callers.request(number),
            callers: Arc::clone(callers),
            outcome: Outcome::default(),
        };
        tasks.spawn(caller.call_until(end));
    }
    let mut outcome = pin!(gather(tasks));
    loop {
        tokio::select! {
            outcome = &mut outcome => return outcome,
            () = sleep(TICK) => watch(callers.waiting()),
        }
    }
}

/// Returns the sum of the outcomes. At the first error, returns the error and drops the other
/// tasks.
pub(crate) async fn gather(
    mut tasks: JoinSet<Result<Outcome, BoxError>>,
) -> Result<Outcome, BoxError> {
    let mut all = Outcome::default();
    while let Some(joined) = tasks.join_next().await {
        all.add(joined??);
    }
    Ok(all)
}

/// One task.
struct Caller<S> {
    service: S,
    request: Request,
    callers: Arc<Callers>,
    outcome: Outcome,
}

impl<S> Caller<S>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    /// Makes one call after the other. At `end`, drops the current call, also if the call waits in
    /// the limiter.
    async fn call_until(mut self, end: Instant) -> Result<Outcome, BoxError> {
        match timeout_at(end, self.call_on()).await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(self.outcome),
        }
    }

    async fn call_on(&mut self) -> Result<(), BoxError> {
        let mut wanted = Instant::now();
        while self.callers.counts.begun.fetch_add(1, Ordering::AcqRel) < self.callers.max_calls {
            let request = self
                .request
                .try_clone()
                .expect("a request without a body can be cloned");
            let service = self.service.ready().await.map_err(Into::into)?;
            match service.call(request).await.map_err(Into::into) {
                Ok(response) if response.status() == StatusCode::TOO_MANY_REQUESTS => {
                    let wait = self.pause_after(&response);
                    response.bytes().await?; // so that the connection can be used again
                    self.callers.back_off(wait).await;
                }
                Ok(response) => {
                    response.error_for_status()?.bytes().await?;
                    self.outcome.took.push(wanted.elapsed());
                    wanted = Instant::now();
                }
                Err(error) => {
                    let wait = self.pause_after_error(error)?;
                    self.callers.counts.left.fetch_add(1, Ordering::Relaxed);
                    self.callers.back_off(wait).await;
                }
            }
        }
        Ok(())
    }

    /// Returns how long to wait after a refusal by the limiter.
    ///
    /// # Errors
    ///
    /// Any other error.
    fn pause_after_error(&mut self, error: BoxError) -> Result<Duration, BoxError> {
        match Limited::find(error.as_ref()) {
            Some(Limited::Store { source, .. }) => {
                self.outcome.store_failures += 1;
                self.outcome.store_error = Some(source.to_string());
                Ok(PAUSE)
            }
            Some(limited) if limited.retry_after().is_some() => {
                self.outcome.refused_locally += 1;
                Ok(limited.retry_after().unwrap_or(PAUSE))
            }
            _ => Err(error),
        }
    }

    /// Returns how long to wait after a refusal by the service.
    fn pause_after(&self, refused: &Response) -> Duration {
        let asked = refused
            .headers()
            .get(RETRY_AFTER)
            .filter(|_| self.callers.polite)
            .and_then(seconds);
        asked.unwrap_or(PAUSE)
    }
}

fn seconds(value: &HeaderValue) -> Option<Duration> {
    Some(Duration::from_secs(value.to_str().ok()?.parse().ok()?))
}

/// How long a refused task waits if it does not read `Retry-After`, as many clients do not.
const PAUSE: Duration = Duration::from_millis(100);

/// The most calls of a run without tollgate, because nothing else bounds them if the limit is
/// generous.
pub(crate) const MAX_CALLS: usize = 20_000;
