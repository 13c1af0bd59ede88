//! Plays a history: processes, their callers, and what happens to them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, sleep, timeout};

use super::api::{Gates, Link, Net, Outcomes, Permit};
use super::caller::{AsIt, Caller, count_refusal};
use super::features::Feature;
use super::known;
use super::plan::{History, Request, Step};
use super::upstream::{Change, HoldEvent, KeyOf, Log};

/// Nothing may wait for longer.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn ms(span: u64) -> Duration {
    Duration::from_millis(span)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process of the fleet.
pub(crate) struct Process {
    pub(crate) number: usize,
    pub(crate) link: Arc<Link>,
    /// When its guard tripped.
    pub(crate) trips: Arc<Mutex<Vec<Instant>>>,
    /// `None` once the process has ended.
    gates: Mutex<Option<Arc<Gates>>>,
    callers: Mutex<Vec<AbortHandle>>,
    pub(crate) stalled_until: Mutex<Instant>,
    /// What has become of its requests, as its callers saw it.
    pub(crate) outcomes: Mutex<Outcomes>,
}

impl Process {
    pub(crate) fn gates(&self) -> Option<Arc<Gates>> {
        lock(&self.gates).clone()
    }

    fn end_callers(&self) {
        lock(&self.callers)
            .drain(..)
            .for_each(|caller| caller.abort());
    }
}

pub(crate) struct World {
    pub(crate) history: History,
    pub(crate) net: Arc<Net>,
    pub(crate) processes: Mutex<Vec<Arc<Process>>>,
    pub(crate) log: Mutex<Log>,
    start: Instant,
}

impl World {
    /// Makes a world over a store in memory, or over the Redis of this URL.
    pub(crate) fn new(history: &History, redis: Option<String>) -> Arc<Self> {
        Arc::new(World {
            history: history.clone(),
            net: Net::new(&history.store, history.dice, redis),
            processes: Mutex::default(),
            log: Mutex::default(),
            start: Instant::now(),
        })
    }

    /// Returns the microseconds since the history began.
    pub(crate) fn now(&self) -> u64 {
        self.since_start(Instant::now())
    }

    pub(crate) fn since_start(&self, at: Instant) -> u64 {
        at.duration_since(self.start).as_micros() as u64
    }

    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        let now = self.now();
        lock(&self.log).note(now, text);
    }

    pub(crate) fn wrong(&self, text: &str) {
        let now = self.now();
        lock(&self.log).wrong(now, text);
    }

    pub(crate) fn start(&self, release: usize) -> Arc<Process> {
        let link = Link::new(&self.net);
        let History {
            limiters,
            releases,
            on_store_error,
            ..
        } = &self.history;
        let gates = Gates::build(limiters, &releases[release], *on_store_error, &link);
        let gates = gates.unwrap_or_else(|error| panic!("the limiters cannot be built: {error}"));
        let mut processes = lock(&self.processes);
        let process = Arc::new(Process {
            number: processes.len(),
            link,
            trips: gates.trips.clone(),
            gates: Mutex::new(Some(Arc::new(gates))),
            callers: Mutex::default(),
            stalled_until: Mutex::new(Instant::now()),
            outcomes: Mutex::default(),
        });
        processes.push(process.clone());
        process
    }

    /// Returns a process that runs. Steps name processes by any number.
    fn process(&self, number: usize) -> Option<(Arc<Process>, Arc<Gates>)> {
        let processes = lock(&self.processes);
        let process = processes[number % processes.len()].clone();
        let gates = process.gates()?;
        Some((process, gates))
    }

    /// Plays the steps of the history. Returns when all callers have ended.
    pub(crate) async fn play(self: &Arc<Self>) {
        for release in &self.history.processes {
            self.start(*release);
        }
        let mut tasks = Vec::new();
        for (number, (pause, step)) in self.history.steps.iter().enumerate() {
            if *pause > 0 {
                sleep(ms(*pause)).await;
            }
            tasks.extend(self.step(number, step).await);
            // Requests of one moment enter in their order.
            tokio::task::yield_now().await;
        }
        for task in tasks {
            match timeout(HOUR * 3, task).await {
                Ok(Err(error)) if error.is_panic() => self.wrong(&format!("{error}")),
                Ok(_) => {}
                Err(_) => self.wrong("a task never ends"),
            }
        }
    }

    async fn step(self: &Arc<Self>, number: usize, step: &Step) -> Option<JoinHandle<()>> {
        let world = self.clone();
        match *step {
            Step::Request(ref request) => {
                let (process, gates) = self.process(request.process)?;
                let request = request.clone();
                let caller = Caller {
                    world,
                    process: process.clone(),
                    gates,
                    number,
                    request: request.clone(),
                };
                let (caller, kept) = (AsIt::runs(caller.run(), &process), process);
                let task = tokio::spawn(caller);
                lock(&kept.callers).push(task.abort_handle());
                return Some(task);
            }
            Step::Explain(ref request) => {
                let (process, gates) = self.process(request.process)?;
                self.explain(number, &process, &gates, request).await;
            }
            Step::Hold {
                process,
                limiter,
                key,
                span,
            } => {
                let (process, gates) = self.process(process)?;
                lock(&self.log).met(Feature::Holds);
                return Some(tokio::spawn(async move {
                    let at = world.now();
                    let told = timeout(HOUR, gates.hold(limiter, key, span)).await;
                    let Ok(is_known) = told else {
                        return world.hangs(&process, "a hold");
                    };
                    // It ends no earlier than if it began with the call.
                    world.hold(
                        (limiter, key),
                        process.number,
                        at,
                        Some(at + span * 1000),
                        !is_known,
                    );
                }));
            }
            Step::Release {
                process,
                limiter,
                key,
            } => {
                let (process, gates) = self.process(process)?;
                self.hold((limiter, key), process.number, self.now(), None, false);
                return Some(tokio::spawn(async move {
                    let released = timeout(HOUR, gates.release(limiter, key)).await;
                    if released.is_err() {
                        return world.hangs(&process, "a release");
                    }
                    world.hold((limiter, key), process.number, world.now(), None, false);
                }));
            }
            Step::SetQuota {
                process,
                limiter,
                key,
                percent,
            } => {
                let (_, gates) = self.process(process)?;
                lock(&self.log).met(Feature::SetQuota);
                // Changes are made one after the other, so that it is known which one is the last.
                let asked = self.now();
                let is_certain = gates.set_quota(limiter, key, percent).await;
                self.change(
                    (limiter, key),
                    Change {
                        asked,
                        done: self.now(),
                        percent,
                        is_certain,
                    },
                );
            }
            Step::UnsetQuota {
                process,
                limiter,
                key,
            } => {
                let (_, gates) = self.process(process)?;
                let asked = self.now();
                let is_certain = gates.unset_quota(limiter, key).await;
                self.change(
                    (limiter, key),
                    Change {
                        asked,
                        done: self.now(),
                        percent: 100,
                        is_certain,
                    },
                );
            }
            Step::Drain { process, within } => {
                let (process, gates) = self.process(process)?;
                lock(&self.log).met(Feature::Drain);
                return Some(tokio::spawn(async move {
                    if timeout(HOUR, gates.drain(within)).await.is_err() {
                        world.hangs(&process, "a drain");
                    }
                }));
            }
            Step::Start { release } => {
                lock(&self.log).met(Feature::Restarts);
                self.start(release);
            }
            Step::Stop { process } => {
                let (process, gates) = self.process(process)?;
                drop(lock(&process.gates).take());
                process.end_callers();
                return Some(tokio::spawn(async move {
                    if timeout(HOUR, gates.shutdown()).await.is_err() {
                        world.wrong("a shutdown hangs");
                    }
                }));
            }
            Step::Kill { process } => {
                let (process, _) = self.process(process)?;
                lock(&self.log).met(Feature::Deaths);
                process.link.cut();
                drop(lock(&process.gates).take());
                process.end_callers();
            }
            Step::EndRuntime { process } => {
                let (process, _) = self.process(process)?;
                process.end_callers();
                process.link.end_tasks();
            }
            Step::Stall { process, span } => {
                let (process, _) = self.process(process)?;
                lock(&self.log).met(Feature::Stalls);
                *lock(&process.stalled_until) = Instant::now() + ms(span);
            }
            Step::Away { span } => {
                lock(&self.log).met(Feature::Outages);
                self.net.go_away(span);
            }
        }
        None
    }

    /// Notes a call without an end. That of a process that was killed has none.
    fn hangs(&self, process: &Process, call: &str) {
        if process.gates().is_some() {
            self.wrong(&format!("{call} hangs"));
        }
    }

    pub(crate) fn hold(
        &self,
        key: KeyOf,
        process: usize,
        asked: u64,
        until: Option<u64>,
        is_private: bool,
    ) {
        let at = self.now();
        lock(&self.log).holds.push(HoldEvent {
            key,
            process,
            asked,
            at,
            until,
            is_private,
        });
    }

    fn change(&self, key: KeyOf, change: Change) {
        lock(&self.log).changes.entry(key).or_default().push(change);
    }

    /// `Goes` if, and only if, the request then gets its permit.
    async fn explain(&self, number: usize, process: &Process, gates: &Gates, request: &Request) {
        lock(&self.log).met(Feature::Explain);
        let request = Request {
            deadline: Some(0),
            ..request.clone()
        };
        let explained = gates.explain(&request).await;
        let happened = gates.acquire(&request).await;
        let mut outcomes = lock(&process.outcomes);
        match &happened {
            Ok(_) => outcomes.granted += 1,
            Err(refused) => count_refusal(&mut outcomes, refused),
        }
        drop(outcomes);
        let features = self.history.features;
        let may_be_lent = known::EXPLAINED_SHARES.stands() && features.has(Feature::Classes);
        // Requests that wait for slots of the quota before are before it in the queue.
        let is_unknown = known::EXPLAINED_QUOTAS.stands()
            && features.has(Feature::SetQuota)
            && features.any(&[Feature::Joint, Feature::Units]);
        let is_right = match &explained {
            Ok((goes, _)) => *goes == happened.is_ok() || is_unknown || (may_be_lent && !goes),
            Err(_) => true,
        };
        gates.take_uncounted();
        let happened = happened.map(Permit::give_back);
        if !is_right && self.history.store.trip.is_none() && !self.net.is_real() {
            self.wrong(&format!(
                "request {number} was explained as {explained:?}, but {happened:?}"
            ));
        }
    }
}
