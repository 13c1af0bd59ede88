//! Reads the messages that the scripts publish. [`registers`](super::super::registers) reads those
//! about registers.

use super::{Garbled, HolderState, ReplyReader};
use crate::store::StoreEvent;
use crate::store::redis::layout::{
    HOLD_MESSAGE, IN_FLIGHT_MESSAGE, QUOTA_MESSAGE, REMAINING_MESSAGE,
};

/// Reads a message to a holder, from the channel of this store. Returns the number of the holder,
/// and its state.
pub(in crate::store::redis) fn read_holder_message(
    message: &[u8],
) -> Result<(u64, HolderState), Garbled> {
    let mut message = ReplyReader(message);
    message.begins_with(IN_FLIGHT_MESSAGE)?;
    Ok((message.long()?, HolderState::read(&mut message)?))
}

/// Reads a message about a key, from the channel of all stores. Returns the event, and the key as
/// its sender sealed it.
pub(in crate::store::redis) fn read_event(message: &[u8]) -> Result<(StoreEvent, &[u8]), Garbled> {
    let mut message = ReplyReader(message);
    let event = match message.byte()? {
        HOLD_MESSAGE => StoreEvent::Hold(message.hold()?),
        REMAINING_MESSAGE => StoreEvent::RemainingFell {
            writes: message.long()?,
        },
        QUOTA_MESSAGE => StoreEvent::SetQuota(Box::new(message.set_quota()?)),
        _ => return Err(Garbled),
    };
    Ok((event, message.0))
}
