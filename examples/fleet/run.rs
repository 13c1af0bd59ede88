//! One run: tasks that call in a closed loop, and a line that tells how it goes.

#![allow(clippy::disallowed_methods, reason = "a user of tollgate has its own clock")]

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use reqwest::header::{HeaderValue, RETRY_AFTER};
use reqwest::{Method, Request, Response, StatusCode, Url};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tollgate::{BoxError, Key, Limited, Limiter};
use tower::{Service, ServiceExt};
use upstream::{Tally, Upstream, WHO_HEADER};

use crate::args::Args;

/// What the tasks saw; what the service saw is in its log.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// From when a task wanted an answer to when it had it, for each 200: waits, refusals and further tries included.
    /// The shortest first.
    pub(crate) took: Vec<Duration>,
    /// How often tollgate said no: the slot was further away than `max_wait`.
    pub(crate) held_back: u64,
}

/// Lets `args.tasks` tasks call `upstream` through `service` for `args.time`.
pub(crate) async fn fleet<S>(
    name: &str,
    args: &Args,
    upstream: &Upstream,
    service: S,
    gate: Option<Limiter>,
) -> Result<Outcome, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static,
{
    let url: Url = upstream.url().parse()?;
    let start = Instant::now();
    let shared = Arc::new(Shared::default());
    let mut tasks = JoinSet::new();
    for number in 0..args.tasks {
        let mut request = Request::new(Method::GET, url.clone());
        request.headers_mut().insert(WHO_HEADER, number.into());
        let caller = Caller {
            service: service.clone(),
            request,
            polite: args.polite,
            bounded: gate.is_none(),
            shared: Arc::clone(&shared),
            outcome: Outcome::default(),
        };
        tasks.spawn(caller.call_until(start + args.time));
    }

    let mut progress = Progress::new(name, args.time);
    let mut everybody = pin!(gather(tasks));
    let outcome = loop {
        tokio::select! {
            outcome = &mut everybody => break outcome?,
            () = sleep(Duration::from_millis(100)) => {}
        }
        let in_line = match &gate {
            Some(gate) => gate.peek(Key::ALL).await?.waiting,
            None => 0,
        };
        let waiting = in_line + shared.backing_off.load(Ordering::Relaxed);
        progress.tell(start.elapsed(), upstream.tally(), waiting);
    };
    progress.finish(start.elapsed(), upstream.tally());
    Ok(outcome)
}

async fn gather(mut tasks: JoinSet<Result<Outcome, BoxError>>) -> Result<Outcome, BoxError> {
    let mut all = Outcome::default();
    while let Some(joined) = tasks.join_next().await {
        let Outcome { took, held_back } = joined??;
        all.took.extend(took);
        all.held_back += held_back;
    }
    all.took.sort_unstable();
    Ok(all)
}

/// What the tasks of a run have in common.
#[derive(Default)]
struct Shared {
    calls: AtomicU32,
    /// How many tasks wait because they were refused.
    backing_off: AtomicUsize,
}

impl Shared {
    async fn back_off(&self, wait: Duration) {
        self.backing_off.fetch_add(1, Ordering::Relaxed);
        sleep(wait).await;
        self.backing_off.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One task.
struct Caller<S> {
    service: S,
    request: Request,
    polite: bool,
    bounded: bool,
    shared: Arc<Shared>,
    outcome: Outcome,
}

impl<S> Caller<S>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    /// Gets one answer after the other. At `end` it drops the call it is in, wherever that is; at the gate its place
    /// goes to the next.
    async fn call_until(mut self, end: Instant) -> Result<Outcome, BoxError> {
        match timeout_at(end, self.call_on()).await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(self.outcome),
        }
    }

    async fn call_on(&mut self) -> Result<(), BoxError> {
        let mut wanted = Instant::now();
        while self.shared.calls.fetch_add(1, Ordering::Relaxed) < MOST_CALLS || !self.bounded {
            let request = self.request.try_clone().expect("a request without a body can be cloned");
            let service = self.service.ready().await.map_err(Into::into)?;
            match service.call(request).await.map_err(Into::into) {
                Ok(response) if response.status() == StatusCode::TOO_MANY_REQUESTS => {
                    let wait = self.patience(&response);
                    response.bytes().await?; // so that the connection can be used again
                    self.shared.back_off(wait).await;
                }
                Ok(response) => {
                    response.error_for_status()?.bytes().await?;
                    self.outcome.took.push(wanted.elapsed());
                    wanted = Instant::now();
                }
                Err(error) => match Limited::find(error.as_ref()).and_then(Limited::retry_after) {
                    Some(wait) => {
                        self.outcome.held_back += 1;
                        self.shared.back_off(wait).await;
                    }
                    None => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// How long a refused task waits before it tries again.
    fn patience(&self, refused: &Response) -> Duration {
        let asked = refused.headers().get(RETRY_AFTER).filter(|_| self.polite).and_then(seconds);
        asked.unwrap_or(IMPATIENCE)
    }
}

fn seconds(value: &HeaderValue) -> Option<Duration> {
    Some(Duration::from_secs(value.to_str().ok()?.parse().ok()?))
}

/// The line that tells how it goes: drawn anew in a terminal; elsewhere a new line every two seconds.
struct Progress {
    name: String,
    bar: ProgressBar,
    /// What the service had seen at each tick of the last second.
    recent: VecDeque<(Duration, u64)>,
    next_line: Duration,
}

impl Progress {
    fn new(name: &str, time: Duration) -> Self {
        let style = ProgressStyle::with_template("{prefix:16} {wide_bar:.cyan/dim} {msg}")
            .expect("the template is well formed")
            .progress_chars("━╸─");
        let length = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let bar = ProgressBar::new(length).with_style(style).with_prefix(name.to_owned());
        Progress { name: name.to_owned(), bar, recent: VecDeque::new(), next_line: LINE_EVERY }
    }

    fn tell(&mut self, elapsed: Duration, seen: Tally, waiting: usize) {
        self.recent.push_back((elapsed, seen.all()));
        while self.recent.len() > 2 && self.recent[1].0 + Duration::from_secs(1) < elapsed {
            self.recent.pop_front();
        }
        let (since, before) = self.recent[0];
        let rate = (seen.all() - before) as f64 / (elapsed - since).as_secs_f64().max(0.1);
        self.show(elapsed, format!("{} {waiting:4} waiting {rate:5.0}/s", counts(elapsed, seen)));
    }

    fn finish(&mut self, elapsed: Duration, seen: Tally) {
        self.next_line = elapsed;
        self.bar.set_length(1);
        self.show(elapsed, counts(elapsed, seen));
        self.bar.abandon();
    }

    fn show(&mut self, elapsed: Duration, line: String) {
        if !self.bar.is_hidden() {
            self.bar.set_position(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX));
            self.bar.set_message(line);
        } else if elapsed >= self.next_line {
            self.next_line = elapsed + LINE_EVERY;
            eprintln!("{:16} {line}", self.name);
        }
    }
}

fn counts(elapsed: Duration, seen: Tally) -> String {
    let Tally { accepted, refused } = seen;
    format!("{:4.1}s {:5} sent {accepted:5}x200 {refused:5}x429", elapsed.as_secs_f64(), seen.all())
}

/// How long a refused task waits that does not read `Retry-After`; many clients do not.
const IMPATIENCE: Duration = Duration::from_millis(100);

/// Without a gate nothing else bounds how many calls are made under a generous limit.
pub(crate) const MOST_CALLS: u32 = 20_000;

/// How often the progress is told where it cannot be drawn.
const LINE_EVERY: Duration = Duration::from_secs(2);
