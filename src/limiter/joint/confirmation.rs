//! The confirmation of a joint slot that is due.
//!
//! If a store has not replied for some time, it may have lost its state, and the slots with it. Then
//! it has to confirm that it still has them. Slots that were booked before the quota of a key changed
//! are never confirmed, so that their requests book anew. The set waits for its reply, and no request behind
//! leaves before the first one: see [`JointSet`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use super::set::JointSet;
use crate::clock;
use crate::limiter::effects::StoreCall;
use crate::limiter::key_state::{ask_to_confirm, confirmed, is_confirmed};
use crate::limiter::part::{Part, PerPart};
use crate::limiter::slots::Slots;

/// Returns the parts whose stores have to confirm their slots before `slot` may be used.
pub(in crate::limiter) fn doubtful(parts: &[Part], slot: &Slots, now: Instant) -> PerPart<usize> {
    let is_doubtful = |index: &usize| {
        let Some(of_part) = &slot.slots[*index] else {
            return false;
        };
        let &Part { ref core, key, .. } = &parts[*index];
        let confirmed = core.with_state(key, now, |state, ctx| {
            is_confirmed(state, ctx, of_part, slot.changes[*index])
        });
        confirmed != Some(true)
    };
    (0..parts.len()).filter(is_doubtful).collect()
}

/// Asks the stores of the parts `doubtful` to confirm what they have granted.
pub(super) fn begin(set: &Arc<JointSet>, doubtful: &[usize]) {
    let Some(first) = doubtful.first() else {
        return;
    };
    let calls = doubtful.iter().map(|part| {
        let call: Call = Box::pin(confirm(set.parts[*part].clone()));
        call
    });
    set.parts[*first].core.start(confirm_all(Confirmation {
        set: set.clone(),
        calls: calls.collect(),
        is_done: false,
    }));
}

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The calls to the stores. If it is dropped before its end, another one begins.
struct Confirmation {
    set: Arc<JointSet>,
    calls: PerPart<Call>,
    is_done: bool,
}

impl Drop for Confirmation {
    fn drop(&mut self) {
        if !self.is_done {
            self.set.confirmation_lost();
        }
    }
}

async fn confirm_all(mut confirmation: Confirmation) {
    let calls = &mut confirmation.calls;
    std::future::poll_fn(|cx| {
        calls.retain(|call| call.as_mut().poll(cx).is_pending());
        if calls.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    confirmation.is_done = true;
    confirmation.set.confirmed();
}

async fn confirm(part: Part) {
    let Part { core, key, .. } = part;
    let asked = core.with_state(key, clock::now(), ask_to_confirm);
    let Some((call, reply)) = asked else { return };
    let open = StoreCall::new(&core, key, call);
    open.answered(reply.arrives().await, confirmed);
}
