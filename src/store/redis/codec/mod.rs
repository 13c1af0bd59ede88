//! Calls, replies and messages of the scripts, packed.
//! `lua/layout.lua` has the formats. They are private to this crate.
//!
//! `calls` packs with a [`CallWriter`]; `replies` and `messages` read with a [`ReplyReader`].
//! `registers.rs`, beside this folder, has the codec of registers.

mod call_writer;
mod calls;
mod messages;
mod replies;
mod reply_reader;

pub(super) use call_writer::CallWriter;
pub(super) use calls::{
    MOST_RETURNS, change, claim, give_back, lease, peek, peek_in_flight, set_server_time,
};
pub(super) use messages::{read_event, read_holder_message};
pub(super) use replies::{
    ClaimReply, HolderState, read_claim_reply, read_joint, read_lease, read_peek,
    read_peek_in_flight, read_unsure,
};
pub(super) use reply_reader::{Garbled, ReplyReader};

/// The bytes of a large number.
const LONG: usize = 7;
