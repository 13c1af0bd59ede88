//! Calls, replies and messages of the scripts, packed. [`guide::redis_format`](crate::guide::redis_format) has the
//! formats, for other languages.

mod call_writer;
mod calls;
mod messages;
mod replies;
mod reply_reader;

pub(super) use call_writer::CallWriter;
pub(super) use calls::{MOST_RETURNS, ask_again, claim, give_back, hold, lease, peek, peek_seats, release};
pub(super) use messages::{read_news, read_told};
pub(super) use replies::{
    Claimed, ToldSeats, read_claimed, read_lease, read_peek, read_peek_seats, read_unsure,
};
pub(super) use reply_reader::{Garbled, ReplyReader};

/// The bytes of a large number.
const LONG: usize = 7;
