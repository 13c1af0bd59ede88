//! The replies of the scripts about rates and calls in flight, packed.

use std::time::Duration;

use super::{Garbled, ReplyReader};
use crate::store::redis::layout::{CUT, GRANTED, LEARNING, NEVER, REFUSED, SHARED, UNSURE};
use crate::store::{Grant, Grants, HoldState, Lease, LimitUsage, Refusal, Source, Usage};

/// Returns the server's time, if the answer to a call about rates or calls in flight states that the call must be sent again.
pub(in crate::store::redis) fn read_unsure(answer: &[u8]) -> Option<u64> {
    let mut answer = ReplyReader(answer);
    answer.version().ok()?;
    let status = answer.byte().ok()?;
    let (_incarnation, _writes) = (answer.long().ok()?, answer.long().ok()?);
    let now = answer.long().ok()?;
    (status == UNSURE).then_some(now)
}

/// Reads the answer to [`lease`]; `slack` is the transit slack that was asked with.
pub(in crate::store::redis) fn read_lease(answer: &[u8], slack: Duration) -> Result<Lease, Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    let status = answer.byte()?;
    let (status, shared, cut) = (status & !(SHARED | CUT), status & SHARED != 0, status & CUT != 0);
    let (incarnation, writes) = (answer.long()?, answer.long()?);
    let (now, remember, wait, free) = (answer.long()?, answer.span()?, answer.long()?, answer.long()?);
    let held = HoldState { remaining: answer.span()?, releases: answer.int()?, cut };
    let (limit, foreign) = (answer.limit()?, answer.limit()?);
    let wait_for = Duration::from_micros(wait);
    let grant = |cost, count, wait: u64, span: u64| Grant {
        cost,
        count,
        wait: Duration::from_micros(wait),
        validity: Duration::from_micros(span).saturating_sub(slack),
        slot: now + wait,
        stamp: now + wait + span,
    };
    let (ahead, ahead_span) = (answer.int()?, answer.long()?);
    let prefetched = (ahead > 0).then(|| grant(1, ahead, 0, ahead_span));
    let mut grants = Grants::default();
    for _ in 0..answer.number(2)? {
        grants.push(grant(answer.int()?, answer.int()?, answer.long()?, answer.long()?));
    }
    let refused = match status {
        GRANTED | LEARNING => None,
        REFUSED => Some(Refusal { wait: (wait < NEVER).then_some(wait_for), limit }),
        _ => return Err(Garbled),
    };
    let learning = (status == LEARNING).then_some(wait_for);
    Ok(Lease {
        grants: grants,
        prefetched,
        refused,
        recovering: learning,
        incarnation,
        writes,
        now,
        session_ttl: remember,
        hold: held,
        foreign,
        external_usage: shared,
        free,
        source: Source::Store,
    })
}

/// Reads the answer to [`peek`].
pub(in crate::store::redis) fn read_peek(answer: &[u8]) -> Result<Usage, Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    answer.begins_with(GRANTED)?;
    let (free, next_slot) = (answer.long()?, answer.span()?);
    let held = HoldState { remaining: answer.span()?, releases: answer.int()?, cut: answer.byte()? != 0 };
    let mut limits = Vec::new();
    for _ in 0..answer.byte()? {
        let limit = answer.limit()?.ok_or(Garbled)?;
        let (used, free, reserved) = (answer.long()?, answer.long()?, answer.long()?);
        limits.push(LimitUsage { limit, used, free, reserved });
    }
    Ok(Usage { limits, free, next_slot, hold: held, degraded: false })
}

/// The news for a holder: in the reply to its claim, or in a message after the claim of another holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::redis) struct ToldSeats {
    pub(in crate::store::redis) incarnation: u64,
    pub(in crate::store::redis) changes: u64,
    pub(in crate::store::redis) number: u64,
    pub(in crate::store::redis) given: u64,
    pub(in crate::store::redis) others_wait: bool,
}

/// The answer to [`claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::redis) struct Claimed {
    pub(in crate::store::redis) told: ToldSeats,
    /// Whether other holders could not be notified.
    pub(in crate::store::redis) mute: bool,
    pub(in crate::store::redis) now: u64,
    /// How long until the first claim of another holder expires, unless it is renewed.
    pub(in crate::store::redis) first_end: Option<Duration>,
    /// How long no seat is granted, because a lost state is being recovered.
    pub(in crate::store::redis) learning: Duration,
}

/// Reads the answer to [`claim`].
pub(in crate::store::redis) fn read_claimed(answer: &[u8]) -> Result<Claimed, Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    let mute = answer.byte()? != 0;
    let (incarnation, changes, now) = (answer.long()?, answer.long()?, answer.long()?);
    let (number, given, others_wait) = (answer.long()?, answer.long()?, answer.byte()? != 0);
    let told = ToldSeats { incarnation, changes, number, given, others_wait };
    let first_end = Some(answer.span()?).filter(|span| !span.is_zero());
    Ok(Claimed { told, mute, now, first_end, learning: answer.span()? })
}

/// Reads the answer to [`peek_seats`]: taken and free.
pub(in crate::store::redis) fn read_peek_seats(answer: &[u8]) -> Result<(u32, u32), Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    answer.begins_with(0)?;
    Ok((answer.int()?, answer.int()?))
}
