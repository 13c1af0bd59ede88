//! Reads the messages that the scripts publish. [`registers`](super::super::registers) reads those
//! about registers.

use super::{Garbled, HolderState, ReplyReader};
use crate::store::redis::layout::{
    CUT_HOLD_MESSAGE, HOLD_MESSAGE, IN_FLIGHT_MESSAGE, QUOTA_MESSAGE, REMAINING_MESSAGE,
};
use crate::store::{HoldState, StoreEvent};

/// Reads a message to a holder, from the channel of this store. Returns the number of the holder,
/// and its state.
pub(in crate::store::redis) fn read_holder_message(
    message: &[u8],
) -> Result<(u64, HolderState), Garbled> {
    let mut message = ReplyReader(message);
    message.begins_with(IN_FLIGHT_MESSAGE)?;
    let incarnation = message.long()?;
    let changes = message.long()?;
    let holder = message.long()?;
    Ok((
        holder,
        HolderState::read(&mut message, incarnation, changes)?,
    ))
}

/// Reads a message about a key, from the channel of all stores. Returns the event, and the key as
/// its sender sealed it.
pub(in crate::store::redis) fn read_event(message: &[u8]) -> Result<(StoreEvent, &[u8]), Garbled> {
    let mut message = ReplyReader(message);
    let cut = match message.byte()? {
        HOLD_MESSAGE => false,
        CUT_HOLD_MESSAGE => true,
        REMAINING_MESSAGE => {
            return Ok((
                StoreEvent::RemainingFell {
                    writes: message.long()?,
                },
                message.0,
            ));
        }
        QUOTA_MESSAGE => {
            let quota = Box::new(message.set_quota()?);
            return Ok((StoreEvent::SetQuota(quota), message.0));
        }
        _ => return Err(Garbled),
    };
    let hold = HoldState {
        remaining: message.span()?,
        releases: message.int()?,
        cut,
    };
    Ok((StoreEvent::Hold(hold), message.0))
}
