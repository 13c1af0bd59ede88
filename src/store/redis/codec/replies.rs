//! Reads the replies of the scripts about rates and about calls in flight.

use std::time::Duration;

use super::{Garbled, ReplyReader};
use crate::store::redis::layout::{
    CUT, GRANTED, LAST, NEVER, RECOVERING, REFUSED, SHARED, UNSURE, WITH_QUOTA,
};
use crate::store::{Grant, Grants, HoldState, Lease, LimitUsage, Refusal, Source, Usage};

/// The place of the status in a reply.
const STATUS: usize = 1;

/// Returns the server's time if the script did nothing, and the call must be sent again with that
/// time.
pub(in crate::store::redis) fn read_unsure(reply: &[u8]) -> Option<u64> {
    let mut reply = ReplyReader(reply);
    reply.format().ok()?;
    let status = reply.byte().ok()?;
    let server_time = reply.long().ok()?;
    (status == UNSURE).then_some(server_time)
}

/// Reads the reply to [`lease`](super::lease).
pub(in crate::store::redis) fn read_lease(reply: &[u8]) -> Result<Lease, Garbled> {
    let mut reply = ReplyReader(reply);
    reply.format()?;
    let flags = reply.byte()?;
    let status = flags & !(SHARED | CUT | LAST | WITH_QUOTA);
    let incarnation = reply.long()?;
    let writes = reply.long()?;
    let now = reply.long()?;
    let session_ttl = reply.span()?;
    let wait = reply.long()?;
    let free = reply.long()?;
    let hold = HoldState {
        remaining: reply.span()?,
        releases: reply.int()?,
        cut: flags & CUT != 0,
    };
    let limit = reply.limit()?;
    let foreign = reply.limit()?;
    let grant = |cost, count, wait: u64, life: u64, span: u64| Grant {
        cost,
        count,
        wait: Duration::from_micros(wait),
        validity: Duration::from_micros(life),
        slot: now + wait,
        stamp: now + wait + span,
    };
    let prefetched_count = reply.int()?;
    let (life, span) = (reply.long()?, reply.long()?);
    let prefetched = (prefetched_count > 0).then(|| grant(1, prefetched_count, 0, life, span));
    let mut grants = Grants::default();
    for _ in 0..reply.number(2)? {
        grants.push(grant(
            reply.int()?,
            reply.int()?,
            reply.long()?,
            reply.long()?,
            reply.long()?,
        ));
    }
    let set_quota = reply.set_quota_by(flags)?;
    let until_wait_ends = Duration::from_micros(wait);
    let refused = match status {
        GRANTED | RECOVERING => None,
        REFUSED => Some(Refusal {
            wait: (wait < NEVER).then_some(until_wait_ends),
            limit,
        }),
        _ => return Err(Garbled),
    };
    Ok(Lease {
        grants,
        prefetched,
        refused,
        recovering: (status == RECOVERING).then_some(until_wait_ends),
        incarnation,
        writes,
        now,
        session_ttl,
        hold,
        foreign,
        external_usage: flags & SHARED != 0,
        set_quota,
        free,
        source: Source::Store,
        is_last: flags & LAST != 0,
    })
}

/// Reads the reply to a joint request about `keys` keys. Returns the reply of each key. It is an
/// error if the script failed for this key.
pub(in crate::store::redis) fn read_joint(
    reply: &[u8],
    keys: usize,
) -> Result<Vec<Result<Vec<u8>, String>>, Garbled> {
    let mut reply = ReplyReader(reply);
    reply.format()?;
    reply.begins_with(GRANTED)?;
    (0..keys).map(|_| read_part(&mut reply)).collect()
}

/// Reads the reply of the next key of a joint request.
fn read_part(reply: &mut ReplyReader<'_>) -> Result<Result<Vec<u8>, String>, Garbled> {
    let (added, size) = (reply.byte()?, reply.number(2)?);
    let mut part = reply.bytes(size as usize)?.to_vec();
    if let Some(error) = part.strip_prefix(b"-") {
        return Ok(Err(String::from_utf8_lossy(error).into_owned()));
    }
    *part.get_mut(STATUS).ok_or(Garbled)? |= added;
    Ok(Ok(part))
}

/// Reads the reply to [`peek`](super::peek).
pub(in crate::store::redis) fn read_peek(reply: &[u8]) -> Result<Usage, Garbled> {
    let mut reply = ReplyReader(reply);
    reply.format()?;
    let flags = reply.byte()?;
    if flags & !WITH_QUOTA != GRANTED {
        return Err(Garbled);
    }
    let free = reply.long()?;
    let next_slot = span_or_never(&mut reply)?;
    let hold = reply.hold()?;
    let recovering = reply.span()?;
    let mut limits = Vec::new();
    for _ in 0..reply.byte()? {
        let limit = reply.limit()?.ok_or(Garbled)?;
        let (used, free) = (reply.long()?, reply.long()?);
        limits.push(LimitUsage {
            reserved: reply.long()?,
            wait: span_or_never(&mut reply)?,
            ..LimitUsage::new(limit, used, free)
        });
    }
    let set_quota = reply.set_quota_by(flags)?;
    Ok(Usage {
        limits,
        free,
        next_slot,
        hold,
        recovering,
        set_quota,
        degraded: false,
    })
}

/// Reads a span that may be endless.
fn span_or_never(reply: &mut ReplyReader<'_>) -> Result<Duration, Garbled> {
    let span = reply.long()?;
    Ok(if span < NEVER {
        Duration::from_micros(span)
    } else {
        Duration::MAX
    })
}

/// The state of a holder in Redis: in the reply to its claim, or in a message after the claim of
/// another holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::redis) struct HolderState {
    /// The incarnation of the key's state.
    pub(in crate::store::redis) incarnation: u64,
    /// How often the key's state was changed.
    pub(in crate::store::redis) changes: u64,
    /// The number of the holder's last claim that the script took in.
    pub(in crate::store::redis) number: u64,
    /// Slots that the holder was ever granted.
    pub(in crate::store::redis) granted: u64,
    /// Whether other holders wait.
    pub(in crate::store::redis) others_wait: bool,
}

impl HolderState {
    /// Reads the fields that replies and messages share.
    pub(super) fn read(reply: &mut ReplyReader<'_>) -> Result<Self, Garbled> {
        Ok(HolderState {
            incarnation: reply.long()?,
            changes: reply.long()?,
            number: reply.long()?,
            granted: reply.long()?,
            others_wait: reply.byte()? != 0,
        })
    }
}

/// The reply to [`claim`](super::claim).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::redis) struct ClaimReply {
    /// The state of the holder.
    pub(in crate::store::redis) state: HolderState,
    /// Whether other holders could not be notified, because `PUBLISH` failed.
    pub(in crate::store::redis) publish_failed: bool,
    /// The store's time.
    pub(in crate::store::redis) now: u64,
    /// How long until the first claim of another holder expires, unless it is repeated.
    pub(in crate::store::redis) first_expiry: Option<Duration>,
    /// For how long the script grants no slot, because it recovers a lost state. Zero if it does
    /// not.
    pub(in crate::store::redis) recovering: Duration,
}

/// Reads the reply to [`claim`](super::claim).
pub(in crate::store::redis) fn read_claim_reply(reply: &[u8]) -> Result<ClaimReply, Garbled> {
    let mut reply = ReplyReader(reply);
    reply.format()?;
    let publish_failed = reply.byte()? != 0;
    let now = reply.long()?;
    let state = HolderState::read(&mut reply)?;
    let first_expiry = Some(reply.span()?).filter(|span| !span.is_zero());
    Ok(ClaimReply {
        state,
        publish_failed,
        now,
        first_expiry,
        recovering: reply.span()?,
    })
}

/// Reads the reply to [`peek_in_flight`](super::peek_in_flight). Returns the slots in use and the
/// free slots.
pub(in crate::store::redis) fn read_peek_in_flight(reply: &[u8]) -> Result<(u32, u32), Garbled> {
    let mut reply = ReplyReader(reply);
    reply.format()?;
    reply.begins_with(0)?;
    Ok((reply.int()?, reply.int()?))
}
