//! What the parts of a divided quota do for each other: they state their limits, and lend what their classes do not need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Core;
use super::key_state::{JoinedRound, KeyState, Lent, OWN_PART, WholeLimits, fresh_for};
use super::quotas::QuotaId;
use super::session::TimeBounds;
use super::store_call::StoreCall;
use crate::clock;
use crate::error::StoreError;
use crate::join::join_all;
use crate::key::Key;
use crate::key_map::Full;
use crate::limit::LimitSpec;
use crate::store::{HoldState, LeaseRequest, PeekRequest};

/// How soon a request looks again whether a round of statements has ended.
const LOOKS_AGAIN: Duration = Duration::from_millis(5);

/// The number of the part of all other requests. Its key is the whole one, which callers without a
/// division use.
const PART_OF_THE_REST: u8 = 0;

/// Waits until the limits of the other parts are stated, if `key` is one of several parts. Only one
/// round of statements is under way for a key: if there is one, waits for its end.
///
/// # Errors
///
/// How long the round waits until callers without a division have used what they have booked, if
/// that is beyond `latest`.
pub(super) async fn wait_for_statements(
    core: &Arc<Core>,
    key: Key,
    latest: Instant,
) -> Result<(), Duration> {
    if !core.is_divided() {
        return Ok(());
    }
    loop {
        let now = clock::now();
        match core.with_new_state(key, now, KeyState::join_round) {
            Ok(JoinedRound::IsStated) | Err(Full) => return Ok(()),
            Ok(JoinedRound::Begins) => run_statements(core.clone(), key).await,
            Ok(JoinedRound::IsUnderWay { until }) => {
                let too_long =
                    core.with_state(key, now, |state, ctx| state.undivided_beyond(ctx, latest));
                if let Some(wait) = too_long.flatten() {
                    return Err(wait);
                }
                let until = until.max(Some(clock::after(now, LOOKS_AGAIN)));
                clock::sleep_until(until.unwrap_or(now)).await;
            }
        }
    }
}

/// Asks each other part for slots for the waiters of `key`, and then the own part. Each answer counts as a statement
/// of the limits. A part whose store fails lends nothing.
pub(super) async fn borrow_for(core: Arc<Core>, key: Key) {
    let wanted = core.with_state(key, clock::now(), KeyState::wanted_loans);
    let Some(mut wanted) = wanted.flatten() else {
        return;
    };
    let own = core.part_index();
    let quota = core.quota_id(key);
    let parts: Vec<_> = core.all_parts(key).enumerate().collect();
    let (before, after) = parts.split_at(own.min(parts.len()));
    // Each class begins with the part behind its own. Its own part is the last.
    let others = after.iter().skip(1).chain(before);
    for (index, (lender, lender_key)) in others.chain(after.first()) {
        let is_own = *index == own;
        let sent = clock::now();
        if !wanted.asks(*index, is_own, sent) {
            continue;
        }
        lender.choose_quota(*lender_key, quota.unwrap_or(QuotaId::CONFIGURED), sent);
        let asked = lender.with_new_state(*lender_key, sent, |state, ctx| {
            state.lend(ctx, &wanted, is_own)
        });
        let mut lent = Lent::default();
        if let Ok(Some((call, reply))) = asked {
            let open = StoreCall::new(lender, *lender_key, call);
            let answer = reply.arrives().await;
            let part = u8::try_from(*index).ok().filter(|_| !is_own);
            if let Some(number) = part.filter(|_| answer.is_ok()) {
                let spec = lender.spec_of_part(*lender_key, quota);
                core.states
                    .find(key, |state| state.note_stated(&spec, number, sent, false));
            }
            let Some(granted) = open.answered(answer, KeyState::lent) else {
                continue;
            };
            lent = granted;
            wanted.take(&lent.slots);
            lent.slots.iter_mut().for_each(|slot| slot.lender = part);
        }
        let taken_in = core.with_state(key, clock::now(), |state, ctx| {
            state.borrowed(ctx, *index, is_own, &lent);
        });
        if taken_in.is_none() {
            lent.slots
                .into_iter()
                .for_each(|slot| core.give_back(key, slot));
        }
    }
    core.with_state(key, clock::now(), KeyState::loans_ended);
}

/// States the limits of all parts for `key`, which is one of them: see `key_state/stated_parts.rs`.
pub(super) async fn run_statements(core: Arc<Core>, key: Key) {
    let (undivided_until, again) = state_stale_parts(&core, key).await;
    core.with_state(key, clock::now(), |state, ctx| {
        state.parts_stated(ctx, undivided_until, again);
    });
}

/// States the limits of the parts about which `key` has no fresh statement. Returns two times: until when callers
/// without a division may use more than their part, and how long it may take until this is called again. A part whose
/// store fails is stated again later.
async fn state_stale_parts(core: &Arc<Core>, key: Key) -> (Option<Instant>, Duration) {
    let now = clock::now();
    let (stated, quota) = core
        .states
        .read(key, |state| (state.stated_parts(), state.limits.quota_id()));
    let parts: Vec<_> = core.all_parts(key).enumerate().collect();
    let specs = parts
        .iter()
        .map(|(_, (part, part_key))| part.spec_of_part(*part_key, quota));
    let specs: Vec<Arc<LimitSpec>> = specs.collect();
    let again = specs.iter().map(|spec| fresh_for(spec)).min();
    let again = again.unwrap_or(LOOKS_AGAIN) / 2;
    // Parts that are about to need a statement get it in this round, too.
    let fresh_at = clock::after(now, again / 2);
    let whole = WholeLimits::new(&specs);
    let calls = parts
        .iter()
        .zip(&specs)
        .filter_map(|((index, (part, part_key)), spec)| {
            let number = match u8::try_from(*index).ok()? {
                own if usize::from(own) == core.part_index() => OWN_PART,
                other => other,
            };
            // Callers without a division use the part of the rest.
            let looks_for_undivided =
                *index == usize::from(PART_OF_THE_REST) && stated.needs_search(now);
            if stated.is_fresh(number, fresh_at) && !looks_for_undivided {
                return None;
            }
            let whole = looks_for_undivided.then_some(&whole);
            Some(async move {
                let sent = clock::now();
                let stated = state_part(part, *part_key, spec, whole).await;
                (number, spec, sent, whole.is_some(), stated)
            })
        });
    let mut undivided_until = None;
    for (number, spec, sent, was_search, stated) in join_all(calls).await {
        core.states.find(key, |state| {
            state.note_stated(spec, number, sent, stated.is_err());
            if was_search {
                state.note_search(stated.is_ok());
            }
            if let Ok(StatementOutcome { answered, .. }) = stated
                && number == OWN_PART
            {
                state.note_trip(spec, TimeBounds::new(sent, answered));
            }
        });
        if let Ok(StatementOutcome { hold, .. }) = stated
            && number == PART_OF_THE_REST
            && !hold.remaining.is_zero()
        {
            // A process without shares may have held the whole key before this one knew of its class.
            core.with_state(key, clock::now(), |state, ctx| {
                state.follow_whole(ctx, hold);
            });
        }
        let until = stated.ok().and_then(|stated| stated.undivided_until);
        undivided_until = undivided_until.max(until);
    }
    (undivided_until, again)
}

/// What became of a statement.
struct StatementOutcome {
    /// When the store answered.
    answered: Instant,
    /// Until when callers without a division may use more than the part, if they were looked for.
    undivided_until: Option<Instant>,
    hold: HoldState,
}

/// States the limits of one part. If it is given the `whole` limits, looks for callers without a division.
async fn state_part(
    part: &Core,
    key: Key,
    spec: &Arc<LimitSpec>,
    whole: Option<&WholeLimits>,
) -> Result<StatementOutcome, StoreError> {
    let store = &part.settings.store;
    let request = LeaseRequest::new(key, spec, &[]);
    let lease = store.lease(request).arrives().await?;
    let answered = clock::now();
    let mut undivided_until = None;
    if let Some(whole) = whole.filter(|_| lease.foreign.is_some()) {
        let usage = store.peek(PeekRequest::new(key, spec)).arrives().await?;
        let wait = whole.undivided_for(&usage);
        undivided_until = wait.map(|wait| clock::after(clock::now(), wait));
    }
    Ok(StatementOutcome {
        answered,
        undivided_until,
        hold: lease.hold,
    })
}
