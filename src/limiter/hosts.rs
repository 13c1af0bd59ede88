//! Hosts under one key: without a key function all requests share one count, and holds go by host.
//!
//! What a host says holds the key [`within_all`](Key::within_all) of that host, whose line in this process holds and never
//! counts. A request waits for the end of that hold first. It then takes its place in the line of [`Key::ALL`], and looks
//! again when it is its turn. So a request that is held keeps neither a slot nor a place in flight from the others.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;
use std::time::{Duration, Instant};

use super::engine::{Entry, Limiter, Reached};
use super::key_state::Line;
use super::queue::Number;
use super::reservation::Patience;
use super::settings::Settings;
use crate::clock;
use crate::error::Reason;
use crate::key::Key;
use crate::store::Refusal;

/// The hosts of requests under [`Key::ALL`].
#[derive(Debug, Default)]
pub(super) struct Hosts {
    first: OnceLock<First>,
    several: AtomicBool,
}

/// The first host: most programs call one, and look for its line only after something was done to that.
#[derive(Debug)]
struct First {
    host: Key,
    /// Whether nothing is known that holds it. Written under the lock of the line of its hold.
    is_clear: AtomicBool,
}

impl Hosts {
    /// Notices a request to `host`. Returns the first host, if it is that.
    #[inline]
    fn notice(&self, host: Key) -> Option<&First> {
        let new = || First { host, is_clear: AtomicBool::new(false) };
        let first = self.first.get_or_init(new);
        if first.host != host {
            // Read first: with many hosts, each request of each thread comes here.
            if !self.are_several() {
                self.several.store(true, Ordering::Relaxed);
            }
            return None;
        }
        Some(first)
    }

    /// Something is done to the line of `key`, which is locked.
    #[inline]
    pub(super) fn touch(&self, key: Key) {
        if let Some(first) = self.first.get().filter(|first| first.host.within_all() == key) {
            first.is_clear.store(false, Ordering::Relaxed);
        }
    }

    /// Whether there was any request with a host: then holds go by host.
    pub(super) fn are_any(&self) -> bool {
        self.first.get().is_some()
    }

    /// Whether what one host says of its quotas may be of another count than that of all.
    pub(super) fn are_several(&self) -> bool {
        self.several.load(Ordering::Relaxed)
    }
}

/// What is held by what `host` says to a request under `key`, if that is not `key`.
#[inline]
pub(super) fn apart(key: Key, host: Option<Key>) -> Option<Key> {
    if key == Key::ALL { host.map(Key::within_all) } else { None }
}

impl Entry {
    /// What is held by what its host says, if that is not its key.
    #[inline]
    pub(super) fn apart(&self) -> Option<Key> {
        apart(self.key, self.host)
    }
}

impl Limiter {
    /// Whether nothing is known that may hold the requests to the host of `entry` alone.
    #[inline]
    pub(super) fn is_clear(&self, entry: &Entry, now: Instant) -> bool {
        let Some((hold, host)) = entry.apart().zip(entry.host) else { return true };
        let first = self.0.hosts.notice(host);
        if first.is_some_and(|first| first.is_clear.load(Ordering::Relaxed)) {
            return true;
        }
        let max_hold = self.0.settings.max_hold;
        let look = |line: &mut Line| {
            let is_clear = line.is_clear(max_hold, now);
            if let Some(first) = first {
                first.is_clear.store(is_clear, Ordering::Relaxed);
            }
            is_clear
        };
        self.0.lines.find(hold, look).unwrap_or(false)
    }

    /// What keeps a request from the line of all, if its host is held: it comes later or is refused.
    pub(super) fn held_apart(&self, entry: &Entry, patience: Patience, now: Instant) -> Option<Reached> {
        let hold = entry.apart()?;
        self.0.hosts.notice(entry.host?);
        let Settings { max_hold, max_waiting, .. } = self.0.settings;
        let look = || self.0.lines.find(hold, |line| (line.waits(max_hold, now), line.waiting_for_hold()));
        let (left, waiting) = look().or_else(|| {
            // Another process may know of a hold: the store is asked once. If it takes a trip, this request does not wait.
            let _ = self.open_line(hold, now, |line, desk, wakers| ((), line.inquire(desk, wakers)));
            look()
        })?;
        let until = clock::after(now, left?);
        Some(if until > patience.latest {
            self.at_line(hold, now, |line, desk, wakers| {
                let asks = line.asks_for_release(now);
                ((), if asks { line.confirm(desk, wakers) } else { None })
            });
            Reached::Refused(Reason::Held, Refusal { wait: left, limit: None })
        } else if waiting >= max_waiting {
            Reached::Refused(Reason::LineFull(max_waiting), Refusal::NEVER)
        } else {
            Reached::Later(until)
        })
    }

    /// For how long a request whose turn it is may not leave, because its host is on `hold`. If the hold ends on probation, the
    /// request is the probe.
    pub(super) fn leaves_apart(&self, hold: Key, now: Instant) -> Option<Duration> {
        let max_hold = self.0.settings.max_hold;
        self.0.lines.find(hold, |line| line.blocked(max_hold, now)).flatten()
    }

    /// For how long a request has to wait for the end of `hold`, if at all. The task is woken when that changes.
    pub(super) fn poll_apart(
        &self,
        hold: Key,
        number: Number,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let max_hold = self.0.settings.max_hold;
        self.0.lines.find(hold, |line| line.watch_hold(number, max_hold, now, cx)).flatten()
    }
}
