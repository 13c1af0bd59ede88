//! One run: tasks that call in a closed loop, the same in one process and in each of many.

#![allow(clippy::disallowed_methods, reason = "a user of tollgate has its own clock")]

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

/// What the tasks saw; the log of the service has what the service saw.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// For each 200, how long the task waited for it: waits, refusals and retries included.
    pub(crate) took: Vec<Duration>,
    /// How often tollgate refused a call, because the slot was further ahead than `max_wait`.
    pub(crate) held_back: u64,
    /// How often tollgate refused a call because the store did not respond.
    pub(crate) store_away: u64,
    /// One error of the store.
    pub(crate) complaint: Option<String>,
}

impl Outcome {
    /// Adds the outcome of other tasks.
    pub(crate) fn add(&mut self, other: Outcome) {
        self.took.extend(other.took);
        self.held_back += other.held_back;
        self.store_away += other.store_away;
        self.complaint = self.complaint.take().or(other.complaint);
    }
}

/// The tasks of one process.
#[derive(Debug)]
pub(crate) struct Crew {
    url: Url,
    process: u32,
    tasks: u32,
    time: Duration,
    polite: bool,
    most_calls: usize,
    counts: Counts,
}

/// What the tasks of a crew do, in sum.
#[derive(Debug, Default)]
struct Counts {
    /// Calls that were begun, or would have been.
    begun: AtomicUsize,
    /// Calls of `begun` that left the gate, and calls that the gate refused.
    through: AtomicUsize,
    /// How many tasks wait after a refusal.
    backing_off: AtomicUsize,
}

impl Crew {
    /// Builds the crew of the process `process`, which calls the service at `url`.
    pub(crate) fn new(args: &Args, process: u32, url: &str) -> Result<Crew, BoxError> {
        Ok(Crew {
            url: url.parse()?,
            process,
            tasks: args.tasks,
            time: args.time,
            polite: args.polite,
            most_calls: usize::MAX,
            counts: Counts::default(),
        })
    }

    /// Makes at most `most_calls` calls.
    pub(crate) fn at_most(self, most_calls: usize) -> Crew {
        Crew { most_calls, ..self }
    }

    /// Writes the send time into a request. It stands behind the gate, so that a wait there does not count.
    pub(crate) fn stamp(self: &Arc<Self>) -> impl Fn(Request) -> Request + Clone + use<> {
        let crew = Arc::clone(self);
        move |mut request| {
            crew.counts.through.fetch_add(1, Ordering::Relaxed);
            request.headers_mut().insert(SENT_HEADER, sent_now());
            request
        }
    }

    /// Builds a call of the task `task`.
    pub(crate) fn request(&self, task: impl std::fmt::Display) -> Request {
        let mut request = Request::new(Method::GET, self.url.clone());
        let who = format!("{}.{task}", self.process);
        request.headers_mut().insert(WHO_HEADER, HeaderValue::try_from(who).expect("numbers and letters"));
        request
    }

    /// Returns how many tasks wait, at the gate or after a refusal.
    fn waiting(&self) -> usize {
        // The order of the loads keeps `begun` at or above `through`.
        let through = self.counts.through.load(Ordering::Acquire);
        let begun = self.counts.begun.load(Ordering::Acquire);
        begun.saturating_sub(through) + self.counts.backing_off.load(Ordering::Relaxed)
    }

    async fn back_off(&self, wait: Duration) {
        self.counts.backing_off.fetch_add(1, Ordering::Relaxed);
        sleep(wait).await;
        self.counts.backing_off.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Builds the client of a crew. It uses no proxy, as the service is on this machine.
pub(crate) fn client() -> reqwest::Result<Client> {
    Client::builder().no_proxy().build()
}

/// Runs the tasks of a crew through `service` for its time. Ten times a second it passes the number of waiting tasks to
/// `watch`.
pub(crate) async fn fleet<S>(
    crew: &Arc<Crew>,
    service: S,
    mut watch: impl FnMut(usize),
) -> Result<Outcome, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static,
{
    let end = Instant::now() + crew.time;
    let mut tasks = JoinSet::new();
    for number in 0..crew.tasks {
        let caller = Caller {
            service: service.clone(),
            request: crew.request(number),
            crew: Arc::clone(crew),
            outcome: Outcome::default(),
        };
        tasks.spawn(caller.call_until(end));
    }
    let mut everybody = pin!(gather(tasks));
    loop {
        tokio::select! {
            outcome = &mut everybody => return outcome,
            () = sleep(TICK) => watch(crew.waiting()),
        }
    }
}

/// Returns the sum of the outcomes. At the first error it returns that, and drops the other tasks.
pub(crate) async fn gather(mut tasks: JoinSet<Result<Outcome, BoxError>>) -> Result<Outcome, BoxError> {
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
    crew: Arc<Crew>,
    outcome: Outcome,
}

impl<S> Caller<S>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    /// Makes one call after the other. At `end` it drops the current call, wherever it is. If the call waits at the
    /// gate, its place goes to the next one.
    async fn call_until(mut self, end: Instant) -> Result<Outcome, BoxError> {
        match timeout_at(end, self.call_on()).await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(self.outcome),
        }
    }

    async fn call_on(&mut self) -> Result<(), BoxError> {
        let mut wanted = Instant::now();
        while self.crew.counts.begun.fetch_add(1, Ordering::AcqRel) < self.crew.most_calls {
            let request = self.request.try_clone().expect("a request without a body can be cloned");
            let service = self.service.ready().await.map_err(Into::into)?;
            match service.call(request).await.map_err(Into::into) {
                Ok(response) if response.status() == StatusCode::TOO_MANY_REQUESTS => {
                    let wait = self.patience(&response);
                    response.bytes().await?; // so that the connection can be used again
                    self.crew.back_off(wait).await;
                }
                Ok(response) => {
                    response.error_for_status()?.bytes().await?;
                    self.outcome.took.push(wanted.elapsed());
                    wanted = Instant::now();
                }
                Err(error) => {
                    let wait = self.held_back(error)?;
                    self.crew.counts.through.fetch_add(1, Ordering::Relaxed);
                    self.crew.back_off(wait).await;
                }
            }
        }
        Ok(())
    }

    /// Returns how long to wait after a refusal by the gate. Any other error is returned.
    fn held_back(&mut self, error: BoxError) -> Result<Duration, BoxError> {
        match Limited::find(error.as_ref()) {
            Some(Limited::Store { source, .. }) => {
                self.outcome.store_away += 1;
                self.outcome.complaint = Some(source.to_string());
                Ok(IMPATIENCE)
            }
            Some(limited) if limited.retry_after().is_some() => {
                self.outcome.held_back += 1;
                Ok(limited.retry_after().unwrap_or(IMPATIENCE))
            }
            _ => Err(error),
        }
    }

    /// Returns how long a refused task waits before it tries again.
    fn patience(&self, refused: &Response) -> Duration {
        let asked = refused.headers().get(RETRY_AFTER).filter(|_| self.crew.polite).and_then(seconds);
        asked.unwrap_or(IMPATIENCE)
    }
}

fn seconds(value: &HeaderValue) -> Option<Duration> {
    Some(Duration::from_secs(value.to_str().ok()?.parse().ok()?))
}

/// How long a refused task waits if it does not read `Retry-After`; many clients do not.
const IMPATIENCE: Duration = Duration::from_millis(100);

/// The most calls of a run. Without a gate, only this bounds the calls under a generous limit.
pub(crate) const MOST_CALLS: usize = 20_000;
