//! Calls and answers of the script for registers, packed. [`guide::redis_format`](crate::guide::redis_format) has the
//! formats, for other languages.

use std::time::Duration;

use super::token;
use super::wire::{Garbled, NEVER, VERSION};
use crate::jitter::dice;
use crate::key::Key;
use crate::limit::micros_up;
use crate::store::{Change, News, Register, Tell};

/// What a message of a changed register begins with.
const REGISTER: u8 = 2;

/// A number in a call.
const LONG: usize = 7;

/// How a key is named in a message.
const TOKEN: usize = 24;

/// What the script is called with.
pub(super) fn call(change: &Change, secret: Option<Key>, channels: &str) -> [Vec<u8>; 4] {
    let mut call = vec![VERSION, u8::from(change.value.is_some())];
    call.extend(long(change.seen));
    call.extend(long(micros_up(change.life)));
    let channel = match change.tell {
        Tell::Nobody => String::new(),
        Tell::One(address) => format!("{channels}{address}"),
        Tell::All => format!("{channels}all"),
    };
    let named = [token::of(change.key, secret, dice()), long(change.kind).to_vec()].concat();
    [call, change.value.clone().unwrap_or_default(), channel.into_bytes(), named]
}

/// Reads the answer.
pub(super) fn read(answer: &[u8], kind: u64) -> Result<Register, Garbled> {
    let (&[version, changed], answer) = answer.split_first_chunk().ok_or(Garbled)?;
    if version != VERSION {
        return Err(Garbled);
    }
    let (version, answer) = read_long(answer)?;
    let (age, value) = read_long(answer)?;
    let age = Duration::from_micros(age);
    Ok(Register { kind, changed: changed != 0, version, value: value.to_vec(), age })
}

/// What a message tells of a register, if it is of one: whose, and how it is.
pub(super) fn read_news(message: &[u8], secret: Option<Key>) -> Option<(Key, News)> {
    let message = message.strip_prefix(&[REGISTER])?;
    let (version, message) = read_long(message).ok()?;
    let (token, message) = message.split_at_checked(TOKEN)?;
    let (kind, value) = read_long(message).ok()?;
    let register = Register { kind, version, value: value.to_vec(), ..Register::default() };
    Some((token::read(token, secret)?, News::Register(register)))
}

fn long(value: u64) -> [u8; LONG] {
    let bytes = value.min(NEVER).to_le_bytes();
    std::array::from_fn(|index| bytes[index])
}

fn read_long(bytes: &[u8]) -> Result<(u64, &[u8]), Garbled> {
    let (long, rest) = bytes.split_first_chunk::<LONG>().ok_or(Garbled)?;
    let mut number = [0; 8];
    number[..LONG].copy_from_slice(long);
    Ok((u64::from_le_bytes(number), rest))
}
