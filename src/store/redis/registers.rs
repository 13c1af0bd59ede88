//! Calls and replies of the script for registers, packed.
//! `lua/layout.lua` has the formats.

use super::backend::TO_ALL;
use super::codec::{CallWriter, Garbled, ReplyReader};
use super::layout::{FORMAT, REGISTER_MESSAGE};
use super::script::Argument;
use super::sealed_key;
use crate::key::Key;
use crate::limit::micros_up;
use crate::rng::dice;
use crate::store::{Recipients, Register, RegisterRequest, StoreEvent};

/// The bytes of a sealed key in a message.
const TOKEN: usize = 24;

/// Returns the arguments of the script for a request.
pub(super) fn call(change: &RegisterRequest, secret: Option<Key>) -> Vec<Argument> {
    let mut call = CallWriter(Vec::new());
    call.byte(FORMAT);
    call.byte(u8::from(change.value.is_some()));
    call.long(change.version);
    call.long(micros_up(change.ttl));
    let channel = match change.notify {
        Recipients::None => Argument::Is(Vec::new()),
        Recipients::One(address) => Argument::Channel(address.to_string()),
        Recipients::All => Argument::Channel(TO_ALL.into()),
    };
    let mut named = CallWriter(sealed_key::of(change.key, secret, dice()));
    named.long(change.kind);
    let value = change.value.clone().unwrap_or_default();
    vec![
        Argument::Is(call.0),
        Argument::Is(value),
        channel,
        Argument::Is(named.0),
    ]
}

/// Reads the reply to [`call`] about a register of `kind`.
pub(super) fn read(reply: &[u8], kind: u64) -> Result<Register, Garbled> {
    let mut reply = ReplyReader(reply);
    reply.begins_with(FORMAT)?;
    let changed = reply.byte()? != 0;
    let version = reply.long()?;
    let age = reply.span()?;
    Ok(Register {
        kind,
        changed,
        version,
        value: reply.0.to_vec(),
        age,
    })
}

/// Reads a message about a register. Returns its key and the register, or `None` if the message is
/// about something else.
pub(super) fn read_event(message: &[u8], secret: Option<Key>) -> Option<(Key, StoreEvent)> {
    let mut message = ReplyReader(message.strip_prefix(&[REGISTER_MESSAGE])?);
    let version = message.long().ok()?;
    let (token, rest) = message.0.split_at_checked(TOKEN)?;
    message.0 = rest;
    let kind = message.long().ok()?;
    let register = Register {
        kind,
        version,
        value: message.0.to_vec(),
        ..Register::default()
    };
    Some((
        sealed_key::read(token, secret)?,
        StoreEvent::Register(register),
    ))
}
