//! A call to the store whose answer is still to come.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::engine::Core;
use super::key_state::{KeyContext, KeyState, SentCall};
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::store::Lease;

/// A call to the store whose answer is still to come. If it is dropped before, it is lost: its waiters get
/// [`StoreError::Lost`], and the charges that it carries wait for another call.
pub(super) struct StoreCall {
    core: Arc<Core>,
    key: Key,
    call: SentCall,
    is_open: bool,
}

impl StoreCall {
    pub(super) fn new(core: &Arc<Core>, key: Key, call: SentCall) -> Self {
        StoreCall {
            core: core.clone(),
            key,
            call,
            is_open: true,
        }
    }

    /// Takes in the answer. Returns `None` if the state of the key is gone: then this process cannot use what was
    /// granted, and gives it back.
    pub(super) fn answered<R>(
        mut self,
        answer: Result<Lease, StoreError>,
        take_in: impl FnOnce(
            &mut KeyState,
            &mut KeyContext<'_>,
            SentCall,
            Result<Lease, StoreError>,
        ) -> R,
    ) -> Option<R> {
        self.is_open = false;
        let (core, key, call) = (&self.core, self.key, self.call);
        let foreign = answer.as_ref().ok().and_then(|lease| lease.foreign);
        if let Some(limit) = foreign
            // A key whose quota changed keeps its old limits for some time.
            && !core.settings.quotas.is_any()
            && !core.warned.swap(true, Ordering::Relaxed)
        {
            let quota = core.settings.spec.quota();
            let tally = &core.settings.tally;
            events::foreign_limit(tally, &core.label(key, None), limit, quota);
        }
        let mut answer = Some(answer);
        let taken_in = core.with_state(key, clock::now(), |state, ctx| {
            let answer = answer.take().unwrap_or(Err(StoreError::Lost));
            let done = take_in(state, ctx, call, answer);
            state.sweep_later();
            done
        });
        if let Some(Ok(lease)) = answer {
            core.give_back_stateless(key, &lease.unused());
        }
        taken_in
    }
}

impl Drop for StoreCall {
    fn drop(&mut self) {
        let &mut StoreCall { key, call, .. } = self;
        if self.is_open {
            self.core.with_state(key, clock::now(), |state, ctx| {
                state.call_answered(ctx, call, Err(StoreError::Lost));
            });
        }
    }
}
