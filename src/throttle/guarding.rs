//! What a ban guard does to a throttle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::ThrottleCore;
use crate::clock;
use crate::guarded::{Guarded, ends_with_stop, is_longer};
use crate::key::Key;
use crate::stats::{Cause, Engine};

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

    fn hold_known(self: Arc<Self>, key: Key, span: Duration) -> bool {
        let now = clock::now();
        let begins = self.at(key, |waiters, wakers| {
            let begins = is_longer(span, waiters.held(now).map(|held| held.left));
            if begins {
                waiters.hold_until(clock::after(now, span), Cause::Guard, now, wakers);
            }
            begins
        });
        begins == Some(true)
    }

    fn release_known(self: Arc<Self>, key: Key, until: Instant) {
        let now = clock::now();
        self.at(key, |waiters, wakers| {
            let held = waiters.held(now);
            if held.is_some_and(|held| ends_with_stop(held.left, until, now)) {
                waiters.release(now, wakers);
            }
        });
    }
}
