//! The hosts of requests that share [`Key::ALL`].
//!
//! Without a key function all requests share one count, but each host has holds of its own. A hold
//! that a host causes is kept under another key, the host's [`within_all`](Key::within_all). The
//! state of that key has holds only. It counts no requests.
//!
//! A request first waits until its host is not on hold. Then it queues under [`Key::ALL`], and
//! looks at the hold again when it gets its slot. So a request to a host on hold keeps neither
//! slots nor calls in flight from requests to other hosts.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::key::{Key, RequestInfo, is_plain_host};

/// The hosts of requests under [`Key::ALL`].
#[derive(Debug)]
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
    pub(super) fn new(unit: Option<&'static str>, class: Option<&'static str>) -> Self {
        Hosts {
            unit,
            class,
            all: of_class(of_unit(Key::ALL, unit), class),
            first: OnceLock::new(),
            several: AtomicBool::new(false),
        }
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
        of_class(of_unit(host.within_all(), self.unit), self.class)
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

/// Returns the key under which requests with `key` count.
fn of_unit(key: Key, unit: Option<&str>) -> Key {
    unit.map_or(key, |unit| key.of_unit(unit))
}

/// Returns the key of the requests of a class, if it has a share.
fn of_class(key: Key, class: Option<&str>) -> Key {
    class.map_or(key, |class| key.of_class(class))
}
