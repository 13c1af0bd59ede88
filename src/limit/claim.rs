//! What a holder of in-flight slots states.

use std::time::Duration;

use crate::key::Key;

/// How many calls of a key a limiter has in flight, and how many more in-flight slots it wants.
///
/// A claim states the whole state and not a change. So if a claim is lost, the next one replaces
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// The key whose calls are counted.
    pub key: Key,
    /// The number of the holder: of this limiter and this key. A limiter takes a new number each
    /// time it begins to use the key.
    pub holder: u64,
    /// The number of the claim, which grows with each claim of the holder. A store ignores a claim
    /// that arrives after a later one.
    pub number: u64,
    /// How many calls may be in flight at the same time, over all holders.
    pub limit: u32,
    /// The class of the holder's requests, as a number that is the same in all processes. 0 for
    /// requests of no class with a share, and if the limit is not divided.
    pub class: u32,
    /// The percentage of the limit that the class has, from 0 to 100; 0 if the limit is not
    /// [divided](crate::guide::classes). A free slot goes to the first waiter whose class, over all
    /// holders, has fewer slots than its share, else to the first of all. The share in slots is
    /// rounded down, and at least one.
    pub share: u8,
    /// How many in-flight slots the holder uses: one for each of its calls in flight.
    pub in_use: u32,
    /// How many more slots the holder wants, for its waiters.
    pub wanted: u32,
    /// How many slots the store has ever granted to the holder, by the events that the holder
    /// received.
    pub granted_seen: u64,
    /// How long the claim is valid after it was sent, unless it is repeated. After that time, the
    /// slots of a crashed process are free.
    pub ttl: Duration,
}

impl Claim {
    /// Returns a claim of holder `holder` of `key` that uses and wants no slot. All other fields are 0.
    pub const fn new(key: Key, holder: u64, number: u64) -> Self {
        Claim {
            key,
            holder,
            number,
            limit: 0,
            class: 0,
            share: 0,
            in_use: 0,
            wanted: 0,
            granted_seen: 0,
            ttl: Duration::ZERO,
        }
    }

    /// A claim of no holder, which uses and wants no slot.
    #[cfg(feature = "redis")]
    pub(crate) const NONE: Claim = Claim::new(Key::ALL, 0, 0);

    /// Returns whether the holder leaves: it uses no slot and wants none.
    pub(crate) fn is_over(&self) -> bool {
        self.in_use == 0 && self.wanted == 0
    }
}
