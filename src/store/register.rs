//! Registers: small values that the processes of a fleet share and change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::key::Key;
use crate::key_map::{Evict, Full, KeyMap};
use crate::limit::{Micros, micros_up};

/// A request to read or change a register, for
/// [`Store::compare_and_set`](super::Store::compare_and_set).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegisterRequest {
    /// The key that the register belongs to.
    pub key: Key,
    /// Which register of the key. A key may have any number of registers.
    pub kind: u64,
    /// The version that the caller read last. 0 if there was no register.
    pub version: u64,
    /// The new value, which is set only if the register still has the version `version`. `None`
    /// only reads the register.
    pub value: Option<Vec<u8>>,
    /// How long the register is kept, unless it is changed again.
    pub ttl: Duration,
    /// Which listeners are notified of a change.
    pub notify: Recipients,
}

impl RegisterRequest {
    /// Returns a request that reads register `kind` of `key`.
    pub const fn new(key: Key, kind: u64) -> Self {
        RegisterRequest {
            key,
            kind,
            version: 0,
            value: None,
            ttl: Duration::ZERO,
            notify: Recipients::None,
        }
    }
}

/// The listeners that are notified of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recipients {
    /// No listener.
    None,
    /// The listeners of the store with this [address](super::Store::address).
    One(u64),
    /// All listeners.
    All,
}

/// The state of a register.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Register {
    /// Which register of the key.
    pub kind: u64,
    /// Whether the requested change was made. `false` if another process had changed the register
    /// since [`RegisterRequest::version`].
    pub changed: bool,
    /// The version, another one after each change. 0 if there is no register. A version never
    /// repeats with another value.
    pub version: u64,
    /// The value. Empty if the requested change was made, or if there is no register.
    pub value: Vec<u8>,
    /// How long ago the register was last changed. Zero if there is no register.
    pub age: Duration,
}

/// The registers of a store in memory.
pub(super) struct Registers {
    kept: KeyMap<Kept>,
    /// How many changes were made. Each change takes the next version.
    versions: AtomicU64,
}

/// A register that is kept. By default one that has expired.
#[derive(Default)]
struct Kept {
    version: u64,
    value: Vec<u8>,
    /// When the register was last changed.
    changed: Micros,
    /// When the register expires.
    until: Micros,
}

impl Registers {
    /// Makes room for `max_keys` registers.
    pub(super) fn new(max_keys: usize) -> Self {
        Registers {
            kept: KeyMap::new(max_keys),
            versions: AtomicU64::new(0),
        }
    }

    /// Reads or changes a register.
    ///
    /// # Errors
    ///
    /// [`Full`] if there is no room for one more register.
    pub(super) fn compare_and_set(
        &self,
        change: &RegisterRequest,
        now: Micros,
    ) -> Result<Register, Full> {
        let kind = change.kind;
        let key = change.key.and(kind.to_le_bytes());
        let Some(value) = &change.value else {
            let read = self.kept.find(key, |kept| kept.read(kind, now));
            return Ok(read.unwrap_or_else(|| Kept::default().read(kind, now)));
        };
        self.kept.enter(
            key,
            now,
            Kept::default,
            |_, _| (),
            |kept| {
                if kept.version_at(now) != change.version {
                    return kept.read(kind, now);
                }
                kept.version = 1 + self.versions.fetch_add(1, Ordering::Relaxed);
                kept.value.clone_from(value);
                kept.changed = now;
                kept.until = now.saturating_add(micros_up(change.ttl));
                Register {
                    kind,
                    changed: true,
                    version: kept.version,
                    value: Vec::new(),
                    age: Duration::ZERO,
                }
            },
        )
    }
}

impl Kept {
    /// Returns the version, or 0 once the register has expired.
    fn version_at(&self, now: Micros) -> u64 {
        if self.until <= now { 0 } else { self.version }
    }

    /// Returns the register, which is empty once it has expired.
    fn read(&self, kind: u64, now: Micros) -> Register {
        if self.version_at(now) == 0 {
            return Register {
                kind,
                ..Register::default()
            };
        }
        Register {
            kind,
            changed: false,
            version: self.version,
            value: self.value.clone(),
            age: Duration::from_micros(now.saturating_sub(self.changed)),
        }
    }
}

impl Evict for Kept {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        Some(self.until)
    }
}
