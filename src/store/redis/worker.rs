//! The thread on which a store talks to Redis: it outlives every caller and every runtime of theirs.
//!
//! A call is a job, answered over a channel; so dropping who waits for it drops nothing else. What is given back needs
//! no answer: it is gathered for a moment, so that many who leave at once make one call.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::claims::Claims;
use super::ears::{self, Channels, Heard};
use super::link::{Factory, Link};
use super::place::Ears;
use super::registers;
use super::script::{REGISTER, Script, TEXT};
use super::token;
use super::wire::{self, MOST_RETURNS};
use crate::clock;
use crate::error::StoreError;
use crate::jitter::dice;
use crate::key::Key;
use crate::limit::{Terms, Unused};
use crate::store::flight::Listeners;
use crate::store::{Claim, Listener, News};

/// How long what is given back waits for more.
const GATHERING: Duration = Duration::from_millis(2);

pub(super) type Jobs = mpsc::UnboundedSender<Job>;

/// What the thread is to do.
pub(super) enum Job {
    /// Runs a script once, if anybody still waits for its answer.
    Call {
        about: About,
        key: String,
        call: Vec<Vec<u8>>,
        answer: oneshot::Sender<Result<Vec<u8>, StoreError>>,
    },
    GiveBack {
        key: String,
        terms: Arc<Terms>,
        unused: Vec<Unused>,
    },
    /// Holds a key or releases it, and tells all; whether or not anybody waits for the answer.
    Hold {
        name: String,
        call: Vec<u8>,
        /// How the key is named to the others.
        token: Vec<u8>,
        answer: oneshot::Sender<Result<Vec<u8>, StoreError>>,
    },
    Claim {
        name: String,
        claim: Claim,
        listener: Arc<dyn Listener>,
    },
    /// Answers when all that was given back before has arrived.
    Flush(oneshot::Sender<Result<(), StoreError>>),
    /// Answers whether Redis does.
    Ping(oneshot::Sender<Result<(), StoreError>>),
}

/// What a script is about.
#[derive(Clone, Copy, Debug)]
pub(super) enum About {
    Rates,
    Seats,
    Registers,
}

/// The thread, as others see it.
pub(super) struct Thread {
    pub(super) jobs: Jobs,
    /// Why there is no connection now is known without asking.
    pub(super) link: Arc<Link>,
}

/// What the thread is started with.
pub(super) struct Setup {
    pub(super) factory: Factory,
    pub(super) store_timeout: Duration,
    /// What the names of channels begin with.
    pub(super) channels: String,
    /// Which store of all it is.
    pub(super) instance: u64,
    pub(super) secret: Option<Key>,
    /// Whom to ask for a connection to listen on, where that is known.
    pub(super) ears: Option<Ears>,
    /// Who is told of holds and registers; the store adds to them.
    pub(super) listeners: Arc<Listeners>,
}

/// Starts the thread. It ends when the last sender of jobs is dropped and all is done.
pub(super) fn start(setup: Setup) -> Result<Thread, StoreError> {
    let (jobs, incoming) = mpsc::unbounded_channel();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StoreError::away)?;
    let Setup { factory, store_timeout, channels, instance, secret, ears, listeners } = setup;
    let link = Arc::new(Link::new(factory, store_timeout));
    let thread = Thread { jobs, link: link.clone() };
    std::thread::Builder::new()
        .name("tollgate-redis".into())
        .spawn(move || {
            let (script, registers) = (Arc::new(Script::new(TEXT)), Arc::new(Script::new(REGISTER)));
            let to_all = format!("{channels}all");
            let listening = Channels { ours: format!("{channels}{instance}"), all: to_all.clone() };
            let (told, heard) = mpsc::unbounded_channel();
            if let Some(ears) = ears {
                runtime.spawn(ears::listen(ears, listening, link.clone(), told));
            }
            let claims = Claims::new(link.clone(), instance, channels, store_timeout);
            let worker = Worker {
                link,
                script,
                registers,
                returns: Returns::new(),
                release_at: None,
                lost: None,
                claims,
                heard,
                listeners,
                secret,
                to_all,
            };
            runtime.block_on(worker.run(incoming));
            // A resolver of names may be at work still; nobody waits for it.
            runtime.shutdown_background();
        })
        .map_err(StoreError::away)?;
    Ok(thread)
}

/// What was given back, by key and by the life of the state that granted it.
type Returns = HashMap<(String, u64), (Arc<Terms>, Vec<Unused>)>;

type Releases = JoinSet<Result<(), StoreError>>;

struct Worker {
    link: Arc<Link>,
    script: Arc<Script>,
    registers: Arc<Script>,
    returns: Returns,
    /// When what was given back is sent.
    release_at: Option<Instant>,
    /// Why something that was given back did not arrive; told to who asks next whether all has.
    lost: Option<StoreError>,
    claims: Claims,
    heard: mpsc::UnboundedReceiver<Heard>,
    /// Who is told of holds and registers.
    listeners: Arc<Listeners>,
    secret: Option<Key>,
    /// The channel on which all are told.
    to_all: String,
}

impl Worker {
    async fn run(mut self, mut jobs: mpsc::UnboundedReceiver<Job>) {
        let (link, mut connections) = (self.link.clone(), self.link.connections());
        let keeper = tokio::spawn(async move { link.keep().await });
        let (mut calls, mut releases) = (JoinSet::new(), Releases::new());
        // Until the last gate is gone, and the store has heard of all who left.
        let mut open = true;
        while open || !self.claims.all_heard() {
            if jobs.is_empty() {
                self.claims.rest();
            }
            let (release_at, claims_at) = (self.release_at, self.claims.due_at());
            tokio::select! {
                job = jobs.recv(), if open => match job {
                    Some(job) => self.take(job, &mut calls, &mut releases),
                    None => open = false,
                },
                () = clock::sleep_until(release_at.unwrap_or_else(clock::now)), if release_at.is_some() => {
                    self.release(&mut releases);
                }
                () = clock::sleep_until(claims_at.unwrap_or_else(clock::now)), if claims_at.is_some() => {
                    self.claims.due();
                }
                Some((id, answer)) = self.claims.answer() => self.claims.answered(id, answer),
                Some(heard) = self.heard.recv() => self.hear(heard),
                // Who was asked before may have been another server, or have lost its state.
                () = connections.next() => self.listeners.tell(Key::ALL, &News::Missed),
                Some(_) = calls.join_next() => {}
                Some(released) = releases.join_next() => self.note(released.unwrap_or(Err(StoreError::Lost))),
            }
        }
        self.release(&mut releases);
        calls.join_all().await;
        releases.join_all().await;
        keeper.abort();
    }

    fn take(&mut self, job: Job, calls: &mut JoinSet<()>, releases: &mut Releases) {
        match job {
            // Nobody waits for it any more: it need not be made.
            Job::Call { answer, .. } if answer.is_closed() => {}
            Job::Call { about, key, call, answer } => {
                let script = match about {
                    About::Rates => self.script.clone(),
                    About::Seats => self.claims.script(),
                    About::Registers => self.registers.clone(),
                };
                let link = self.link.clone();
                calls.spawn(async move {
                    let call: Vec<_> = call.iter().map(Vec::as_slice).collect();
                    // Whoever asked may have gone meanwhile: what was granted runs out by itself.
                    let _ = answer.send(script.run(&link, &key, &call).await);
                });
            }
            Job::GiveBack { key, terms, unused } => {
                for unused in unused {
                    let of_key = self.returns.entry((key.clone(), unused.incarnation));
                    of_key.or_insert_with(|| (terms.clone(), Vec::new())).1.push(unused);
                }
                self.release_at.get_or_insert_with(|| clock::after(clock::now(), GATHERING));
            }
            Job::Hold { name, call, token, answer } => {
                let (script, link, to_all) = (self.script.clone(), self.link.clone(), self.to_all.clone());
                calls.spawn(async move {
                    let held = script.run(&link, &name, &[&call, to_all.as_bytes(), &token]).await;
                    let _ = answer.send(held);
                });
            }
            Job::Claim { name, claim, listener } => {
                self.claims.take(name, claim, listener);
            }
            Job::Flush(answer) => {
                self.release(releases);
                let (releases, lost) = (std::mem::take(releases), self.lost.take());
                let (all_left, left) = oneshot::channel();
                self.claims.flush(all_left);
                calls.spawn(async move {
                    let flushed: Result<(), StoreError> = releases.join_all().await.into_iter().collect();
                    let left = left.await.unwrap_or(Err(StoreError::Lost));
                    let _ = answer.send(lost.map_or(flushed.and(left), Err));
                });
            }
            Job::Ping(answer) => {
                let link = self.link.clone();
                calls.spawn(async move {
                    let deadline = link.deadline();
                    let pong = link.ask(redis::cmd("PING"), deadline).await;
                    let _ = answer.send(pong.map(|_| ()).map_err(|failure| failure.to_error()));
                });
            }
        }
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::Open => {
                self.claims.set_told(true);
                self.listeners.tell(Key::ALL, &News::Missed);
            }
            Heard::Deaf => {
                self.claims.set_told(false);
                self.listeners.tell(Key::ALL, &News::Deaf);
            }
            Heard::Message(message) if !self.hear_of_register(&message) => self.claims.hear(&message),
            Heard::MessageToAll(message) if !self.hear_of_register(&message) => {
                if let Ok((held, token)) = wire::read_hold(&message)
                    && let Some(key) = token::read(token, self.secret)
                {
                    self.listeners.tell(key, &News::Held(held));
                }
            }
            Heard::Message(_) | Heard::MessageToAll(_) => {}
        }
    }

    /// Whether it is a message of a register.
    fn hear_of_register(&self, message: &[u8]) -> bool {
        let news = registers::read_news(message, self.secret);
        news.map(|(key, news)| self.listeners.tell(key, &news)).is_some()
    }

    fn note(&mut self, released: Result<(), StoreError>) {
        self.lost = self.lost.take().or(released.err());
    }

    /// Sends what was given back. If it does not arrive, it runs out by itself.
    fn release(&mut self, releases: &mut Releases) {
        self.release_at = None;
        for ((key, _), (terms, unused)) in self.returns.drain() {
            for unused in unused.chunks(MOST_RETURNS) {
                let call = wire::give_back(&terms, unused, dice());
                let (script, link, key) = (self.script.clone(), self.link.clone(), key.clone());
                releases.spawn(async move { script.run(&link, &key, &[&call]).await.map(|_| ()) });
            }
        }
    }
}
