//! The messages that the scripts publish.

use super::{Garbled, ReplyReader, ToldSeats};
use crate::store::redis::layout::{CUT_HOLD_MESSAGE, HOLD_MESSAGE, IN_FLIGHT_MESSAGE, REMAINING_MESSAGE};
use crate::store::{HoldState, StoreEvent};

/// Reads a message to a holder on its channel.
pub(in crate::store::redis) fn read_told(message: &[u8]) -> Result<(u64, ToldSeats), Garbled> {
    let mut message = ReplyReader(message);
    message.begins_with(IN_FLIGHT_MESSAGE)?;
    let (incarnation, changes, holder) = (message.long()?, message.long()?, message.long()?);
    let (number, given, others_wait) = (message.long()?, message.long()?, message.byte()? != 0);
    Ok((holder, ToldSeats { incarnation, changes, number, given, others_wait }))
}

/// Reads a message to all processes about a key. Returns the news and the key, as the sender wrote it.
pub(in crate::store::redis) fn read_news(message: &[u8]) -> Result<(StoreEvent, &[u8]), Garbled> {
    let mut message = ReplyReader(message);
    let cut = match message.byte()? {
        HOLD_MESSAGE => false,
        CUT_HOLD_MESSAGE => true,
        REMAINING_MESSAGE => return Ok((StoreEvent::RemainingFell { writes: message.long()? }, message.0)),
        _ => return Err(Garbled),
    };
    let held = HoldState { remaining: message.span()?, releases: message.int()?, cut };
    Ok((StoreEvent::Hold(held), message.0))
}
