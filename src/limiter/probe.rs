//! The probe of a key on probation.

use std::mem;

use super::engine::CoreId;
use super::reservation::ProbeNumber;
use crate::clock;
use crate::key::Key;

/// What a request has that leaves as the probe of a key, until its response.
///
/// No other request is the probe meanwhile. If it is dropped, the request was not sent, or its call was cancelled.
/// Then the next request can be the probe.
#[derive(Debug)]
#[must_use = "dropping a probe lets another request be the probe"]
pub(super) struct Probe {
    core: CoreId,
    /// The key of the hold: that of the request, or of its host.
    key: Key,
    number: ProbeNumber,
}

impl Probe {
    pub(super) fn new(core: CoreId, key: Key, number: ProbeNumber) -> Self {
        Probe { core, key, number }
    }

    /// Returns whether it is the probe of `key`.
    pub(super) fn is_of(&self, core: CoreId, key: Key) -> bool {
        self.core == core && self.key == key
    }

    pub(super) fn number(&self) -> ProbeNumber {
        self.number
    }

    /// Ends the probe, whose response has arrived.
    pub(super) fn answered(self) {
        mem::forget(self);
    }

    /// Returns the number, for the state of its key.
    pub(super) fn into_number(self) -> ProbeNumber {
        let number = self.number;
        mem::forget(self);
        number
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // A limiter that was dropped has no requests that wait.
        if let Some(core) = self.core.find() {
            core.with_state(self.key, clock::now(), |state, ctx| {
                state.probe_not_sent(ctx, self.number);
            });
        }
    }
}
