//! What the store and this process know of one key: one question to the store, and a look at the state of
//! the key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::StoreError;
use crate::limit::LimitSpec;
use crate::limiter::key_state::Outlook;
use crate::limiter::part::{Entry, NewPart};
use crate::limiter::quotas::QuotaId;
use crate::store::{StoreReply, Usage};
use crate::wait_queue::WaitBound;

impl NewPart {
    /// Returns the limits under which the request would enter.
    pub(super) fn spec(&self) -> Arc<LimitSpec> {
        match self.other_quota() {
            Some(spec) => spec,
            None => self.core.terms(self.entry.key),
        }
    }

    /// Returns the largest cost of a request that its quota allows.
    pub(super) fn largest_cost(&self) -> u32 {
        match self.other_quota() {
            Some(spec) => spec.quota().largest_cost(),
            None => self.core.largest_cost(self.entry.key),
        }
    }

    /// Makes a request that may wait for a whole limit ask for no more: see `request::awaited_cost`.
    pub(super) fn await_whole_limit(&mut self) {
        if self.core.settings.waits_above_limit {
            self.entry.cost = self.entry.cost.min(self.largest_cost());
        }
    }

    /// Returns the limits of the quota that the request states, if the key has another one.
    fn other_quota(&self) -> Option<Arc<LimitSpec>> {
        let NewPart { core, entry, .. } = self;
        if core.has_quota(entry.key, entry.quota) {
            return None;
        }
        let stated = core.spec_of(entry.quota);
        Some(stated.unwrap_or_else(|| core.settings.spec.clone()))
    }
}

/// What was found for one key.
pub(super) struct Found {
    pub(super) outlook: Outlook,
    pub(super) usage: Result<Usage, StoreError>,
    /// How long the store took. `None` if it answered at once.
    pub(super) took: Option<Duration>,
}

impl Found {
    /// Asks the store, and then looks at the state of the key.
    pub(super) async fn read(asked: &NewPart, bound: WaitBound) -> Found {
        // A request that enters brings the key up to date: slots that no waiter has come for are booked anew.
        let now = clock::now();
        asked.core.with_state(asked.entry.key, now, |state, ctx| {
            state.bring_up_to_date(ctx)
        });
        let before = outlook(asked, bound, clock::now());
        let mut request = asked.core.peek_request(asked.entry.key, &asked.spec());
        // Units that the call for the request would give back are free for it. The units of the
        // requests before it are not.
        let returning = if before.ahead.is_empty() {
            u32::try_from(before.returning).unwrap_or(u32::MAX)
        } else {
            0
        };
        request.cost = asked.entry.cost.saturating_sub(returning).max(1);
        request.validity = before.validity;
        request.ahead = before.ahead;
        let sent = clock::now();
        let (usage, took) = match asked.core.settings.store.peek(request) {
            StoreReply::Ready(usage) => (usage, None),
            StoreReply::Pending(usage) => {
                let usage = usage.await;
                (usage, Some(clock::now().saturating_duration_since(sent)))
            }
        };
        Found {
            outlook: outlook(asked, bound, clock::now()),
            usage,
            took,
        }
    }

    /// Returns the largest cost of a request that the set quota allows, if there is one.
    pub(super) fn largest_cost(&self) -> Option<u32> {
        let set = self.usage.as_ref().ok()?.set_quota.as_ref()?;
        Some(set.quota?.largest_cost())
    }

    /// Returns how long the key is on hold, by what this process and the store know.
    pub(super) fn held(&self) -> Option<Duration> {
        let in_store = self
            .usage
            .as_ref()
            .map_or(Duration::ZERO, |usage| usage.hold.remaining);
        self.outlook
            .held
            .max(Some(in_store).filter(|left| !left.is_zero()))
    }
}

/// Returns what the key would do with the request before it asks the store.
fn outlook(asked: &NewPart, bound: WaitBound, now: Instant) -> Outlook {
    let NewPart { core, entry, .. } = asked;
    let &Entry { key, cost, .. } = entry;
    let changes_quota = asked.other_quota().is_some();
    let known = core.states.find(key, |state| {
        let own = core.own_spec(state, now);
        state.outlook(cost, bound, &core.ctx(key, now, own.as_ref()))
    });
    let mut outlook = known.unwrap_or_else(|| Outlook {
        validity: asked.spec().life(),
        ..Outlook::default()
    });
    if changes_quota {
        // The permits at hand and the booked slots go back to the store.
        outlook.has_permit = false;
        outlook.returning += u64::from(outlook.at_hand);
        outlook.stated = Some(asked.entry.quota).filter(|id| *id != QuotaId::CONFIGURED);
    }
    outlook
}
