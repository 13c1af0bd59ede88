//! The hosts of the requests of a limiter, and which keys a response of a host may reach.
//!
//! Without a key function all requests share one count, but each host has holds of its own. A hold
//! that a host causes is kept under another key, the host's [`within_all`](Key::within_all). The
//! state of that key has holds only. It counts no requests.
//!
//! A request first waits until its host is not on hold. Then it queues under [`Key::ALL`], and
//! looks at the hold again when it gets its slot. So a request to a host on hold keeps neither
//! slots nor calls in flight from requests to other hosts.
//!
//! # Which keys a response may reach
//!
//! A server must not stop the requests to another one. But a request may have several keys, and requests
//! to other hosts may have some of them, too ([`Reach`]). A limiter of several notes the hosts of its keys. If all
//! requests go to one host, it notes nothing but that host.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::clock;
use crate::key::{Key, RequestInfo, is_plain_host};
use crate::key_map::{Evict, KeyMap};

/// How far the response of a host may reach: which of the requests of a key go to this host. The larger,
/// the fewer requests to other hosts have the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reach {
    /// Requests to several hosts have had the key.
    #[default]
    Shared,
    /// All requests of the key that were seen went to this host, or named no host, like this one. So do all of a key that
    /// has holds by host: the response reaches the holds of its host only.
    Own,
    /// The key is that of the host.
    Host,
}

/// For how long the host of a key is remembered after its last request.
const REMEMBERED: Duration = Duration::from_secs(600);

/// The hosts that the requests of one key went to.
struct KeyHost {
    /// The host of all requests of the key. `None` if they went to several.
    only: Option<Key>,
    /// When a request of the key was last seen.
    seen: Instant,
}

impl Evict for KeyHost {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        Some(self.seen)
    }

    fn worthless_from(&self) -> Option<Instant> {
        Some(clock::after(self.seen, REMEMBERED))
    }
}

/// The hosts of the keys of a limit that is one of several.
pub(super) struct KeyHosts {
    max_keys: usize,
    first: OnceLock<Key>,
    /// The hosts of keys. Made when there are several hosts. Until then all keys are of the first host.
    hosts: OnceLock<KeyMap<KeyHost>>,
}

impl KeyHosts {
    pub(super) fn new(max_keys: usize) -> Self {
        KeyHosts {
            max_keys,
            first: OnceLock::new(),
            hosts: OnceLock::new(),
        }
    }

    /// Notes a request of `key` to `host`. `is_known` returns whether there were requests of the key before.
    #[inline]
    pub(super) fn note(&self, key: Key, host: Key, is_known: impl FnOnce() -> bool) {
        let is_only = *self.first.get_or_init(|| host) == host && self.hosts.get().is_none();
        if !is_only {
            self.note_slow(key, host, is_known);
        }
    }

    #[inline(never)]
    fn note_slow(&self, key: Key, host: Key, is_known: impl FnOnce() -> bool) {
        let hosts = self.hosts.get_or_init(|| KeyMap::new(self.max_keys));
        let now = clock::now();
        // If there is no room, the key counts as one of several hosts.
        let _ = hosts.enter(
            key,
            now,
            || {
                // A key that was used before there were several hosts is of the first one.
                let earlier = self.first.get().filter(|_| is_known());
                let only = Some(*earlier.unwrap_or(&host));
                KeyHost { only, seen: now }
            },
            |_, _| {},
            |known| {
                known.only = known.only.filter(|only| *only == host);
                known.seen = now;
            },
        );
    }

    /// Returns whether no request of `key` with a host was seen since there are several hosts. With one host,
    /// requests that name none count as its requests.
    fn is_of_none(&self, key: Key) -> bool {
        let hosts = self.hosts.get();
        // A full map may have forgotten the key.
        hosts.is_none_or(|hosts| hosts.find(key, |_| ()).is_none() && hosts.len() < self.max_keys)
    }

    /// Returns whether all requests of `key` went to `host`, as far as is known.
    fn is_of(&self, key: Key, host: Key) -> bool {
        match self.hosts.get() {
            None => true,
            Some(hosts) => hosts.find(key, |known| known.only) == Some(Some(host)),
        }
    }
}

/// The hosts of the requests of a limiter.
pub(super) struct Hosts {
    /// What the limits count, if they count no requests.
    unit: Option<&'static str>,
    /// The class of the requests, if it has a share.
    class: Option<&'static str>,
    /// The key of requests to all hosts: [`Key::ALL`], or its key for the unit and the class.
    all: Key,
    first: OnceLock<FirstHost>,
    /// Whether requests went to another host than the first.
    several: AtomicBool,
    /// The hosts of other keys than [`Key::ALL`].
    pub(super) of_keys: KeyHosts,
}

/// The host of the first request. Most programs call one host. Requests to this host need neither
/// hash its name nor look up its hold.
#[derive(Debug)]
pub(super) struct FirstHost {
    name: Box<str>,
    /// Whether a request can be asked for the name by [`RequestInfo::is_to`]: see [`is_plain_host`].
    is_plain: bool,
    /// The key of `name`.
    host: Key,
    /// The key that has its holds. Each visit of a state compares it, so it is not computed there.
    hold: Key,
    /// Whether the host is known to be neither on hold nor on probation. If not, its state has to
    /// be read. Written under the lock of the state that has the host's holds.
    is_clear: AtomicBool,
}

impl FirstHost {
    /// Returns whether this is the host of `request`.
    #[inline]
    fn is_of(&self, request: &impl RequestInfo) -> bool {
        if self.is_plain {
            request.is_to(&self.name)
        } else {
            request.host() == Some(&self.name)
        }
    }

    /// Returns whether the host is known to be neither on hold nor on probation.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.is_clear.load(Ordering::Relaxed)
    }

    /// Sets whether the host is known to be neither on hold nor on probation. The caller holds the
    /// lock of the state that has the host's holds.
    pub(super) fn set_clear(&self, is_clear: bool) {
        self.is_clear.store(is_clear, Ordering::Relaxed);
    }
}

impl Hosts {
    /// Makes the hosts of requests of a `class`, if it has a share, whose limits count `unit`, or requests.
    pub(super) fn new(
        unit: Option<&'static str>,
        class: Option<&'static str>,
        max_keys: usize,
    ) -> Self {
        Hosts {
            unit,
            class,
            all: counted_key(Key::ALL, unit, class),
            first: OnceLock::new(),
            several: AtomicBool::new(false),
            of_keys: KeyHosts::new(max_keys),
        }
    }

    /// Returns how far a response of `host` to a request with `key` may reach. `is_of_host` says whether the key is
    /// that of the host.
    pub(super) fn reach(&self, key: Key, host: Option<Key>, is_of_host: bool) -> Reach {
        let is_own = match host {
            _ if is_of_host => return Reach::Host,
            Some(_) if self.are_of(key) => true,
            Some(host) => self.of_keys.is_of(key, host),
            // It may be any host, and without one there is no hold by host.
            None if self.are_of(key) => !self.are_several(),
            None => self.of_keys.is_of_none(key),
        };
        if is_own { Reach::Own } else { Reach::Shared }
    }

    /// Returns the key that has the holds of `host`, if requests under `key` have holds by host.
    pub(super) fn hold_of(&self, key: Key, host: Option<Key>) -> Option<Key> {
        host.filter(|_| self.are_of(key))
            .map(|host| self.hold_within_all(host))
    }

    /// Returns whether requests under `key` have holds by host.
    #[inline]
    pub(super) fn are_of(&self, key: Key) -> bool {
        key == self.all
    }

    /// Returns the key that has the holds of `host`.
    #[inline]
    pub(super) fn hold_within_all(&self, host: Key) -> Key {
        counted_key(host.within_all(), self.unit, self.class)
    }

    /// Returns the key of the host of `request`, if it has one.
    #[inline]
    pub(super) fn key_of(&self, request: &impl RequestInfo) -> Option<Key> {
        match self.first.get() {
            Some(first) if first.is_of(request) => Some(first.host),
            _ => self.other_key_of(request),
        }
    }

    /// Returns the key of a host that is not known as the first host. If there is no first host
    /// yet, it becomes the first host.
    #[cold]
    #[inline(never)]
    fn other_key_of(&self, request: &impl RequestInfo) -> Option<Key> {
        let name = request.host()?;
        let host = Key::host(name);
        self.first.get_or_init(|| FirstHost {
            name: name.into(),
            is_plain: is_plain_host(name.as_bytes()),
            host,
            hold: self.hold_within_all(host),
            is_clear: AtomicBool::new(false),
        });
        Some(host)
    }

    /// Notes a request to `host`. Returns the first host, if it is `host`.
    #[inline]
    pub(super) fn notice(&self, host: Key) -> Option<&FirstHost> {
        if let Some(first) = self.first.get().filter(|first| first.host == host) {
            return Some(first);
        }
        // With many hosts, each request of each thread comes here: a load is cheaper than a store.
        if !self.are_several() {
            self.several.store(true, Ordering::Relaxed);
        }
        None
    }

    /// Notes that the state of `key` may change. If it has the holds of the first host, the next
    /// request reads it again. The caller holds the lock of the state.
    #[inline]
    pub(super) fn touch(&self, key: Key) {
        if let Some(first) = self.first.get().filter(|first| first.hold == key) {
            first.set_clear(false);
        }
    }

    /// Returns whether a request with a host has entered. From then on each host has holds of its
    /// own.
    pub(super) fn are_any(&self) -> bool {
        self.first.get().is_some()
    }

    /// Returns whether requests went to several hosts. Each of them may then state quotas that do
    /// not count what [`Key::ALL`] counts.
    pub(super) fn are_several(&self) -> bool {
        self.several.load(Ordering::Relaxed)
    }
}

/// Returns the key under which units of `key` count: those of a `unit`, if they are no requests, and those of a `class`,
/// if it has a share.
#[inline]
pub(super) fn counted_key(key: Key, unit: Option<&str>, class: Option<&str>) -> Key {
    let key = unit.map_or(key, |unit| key.of_unit(unit));
    class.map_or(key, |class| key.of_class(class))
}
