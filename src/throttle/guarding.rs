//! What a ban guard does to a throttle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::ThrottleCore;
use crate::clock;
use crate::guarded::{Guarded, SAME_CAUSE, report_stopped};
use crate::key::Key;
use crate::stats::{Cause, Gate};

impl Guarded for ThrottleCore {
    fn hold(self: Arc<Self>, key: Key, span: Duration) {
        let now = clock::now();
        let until = clock::after(now, span);
        let is_known = self.find(key, |_| ()).is_some();
        // If there is no room for one more key, the key is held when it gets its waiters.
        let _ = self.open(key, now, |waiters, wakers| {
            waiters.hold_until(until, Cause::Guard, now, wakers);
        });
        if is_known {
            self.report_hold(key, span, Cause::Guard);
        } else {
            // The hold was counted when the key got its waiters.
            self.tell_hold(key, span, Cause::Guard);
        }
    }

    fn hold_all(self: Arc<Self>, keys: &[Key], span: Duration) {
        let now = clock::now();
        let until = clock::after(now, span);
        let begun = keys.iter().copied().filter(|key| {
            let is_new = self.at(*key, |waiters, wakers| {
                let before = waiters.queue.held_until();
                let is_longer = before.is_none_or(|end| clock::after(end, SAME_CAUSE) < until);
                if is_longer {
                    waiters.hold_until(until, Cause::Guard, now, wakers);
                }
                is_longer
            });
            is_new == Some(true)
        });
        report_stopped(&*self, begun, span);
    }

    fn release_all(self: Arc<Self>, keys: &[Key], until: Instant) {
        let now = clock::now();
        for key in keys.iter().copied() {
            self.at(key, |waiters, wakers| {
                let held_until = waiters.queue.held_until();
                let is_of_stop = |end| end > now && end <= clock::after(until, SAME_CAUSE);
                if held_until.is_some_and(is_of_stop) {
                    waiters.release(now, wakers);
                }
            });
        }
    }
}
