//! What a ban guard does to a throttle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::ThrottleCore;
use crate::clock;
use crate::events;
use crate::guarded::Guarded;
use crate::key::Key;
use crate::quota::Quota;
use crate::stats::Cause;

/// Two ends of holds closer than this have one cause, which processes learned at different moments.
const SAME: Duration = Duration::from_millis(500);

impl Guarded for ThrottleCore {
    fn report(&self, key: Key, quota: &Quota, span: Duration, trip: u32) {
        let label = self.label(key, None);
        events::guard_tripped(&self.settings.tally, &label, quota, span, trip);
    }

    fn hold(self: Arc<Self>, key: Key, span: Duration) {
        let now = clock::now();
        let until = clock::after(now, span);
        let is_known = self.find(key, |_| ()).is_some();
        // If there is no room for one more key, the key is held when it gets its waiters.
        let _ = self.open(key, now, |waiters, wakers| {
            waiters.hold_until(until, now, wakers);
            waiters.note_cause(Cause::Guard, now);
        });
        if is_known {
            report(&self, key, span);
        } else {
            // The hold was counted when the key got its waiters.
            tell(&self, key, span);
        }
    }

    fn hold_all(self: Arc<Self>, keys: &[Key], span: Duration) {
        let now = clock::now();
        let until = clock::after(now, span);
        for key in keys.iter().copied() {
            let is_new = self.at(key, |waiters, wakers| {
                let before = waiters.queue.held_until();
                if before.is_none_or(|before| clock::after(before, SAME) < until) {
                    waiters.hold_until(until, now, wakers);
                    waiters.note_cause(Cause::Guard, now);
                    return true;
                }
                false
            });
            if is_new == Some(true) {
                report(&self, key, span);
            }
        }
    }

    fn release_all(self: Arc<Self>, keys: &[Key], until: Instant) {
        let now = clock::now();
        for key in keys.iter().copied() {
            self.at(key, |waiters, wakers| {
                let held_until = waiters.queue.held_until();
                let is_of_stop = |end| end > now && end <= clock::after(until, SAME);
                if held_until.is_some_and(is_of_stop) {
                    waiters.release(now, wakers);
                }
            });
        }
    }
}

/// Counts and reports that the guard holds `key`.
fn report(core: &ThrottleCore, key: Key, span: Duration) {
    core.settings.tally.held(Cause::Guard);
    tell(core, key, span);
}

/// Reports that the guard holds `key`.
fn tell(core: &ThrottleCore, key: Key, span: Duration) {
    let tally = &core.settings.tally;
    events::held(tally, &core.label(key, None), span, Cause::Guard);
}
