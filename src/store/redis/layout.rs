//! The numbers that Rust and the scripts share.
//!
//! Each has one literal, in `lua/layout.lua`. Rust reads it there when the crate is compiled, so
//! the two cannot differ. A number that is missing there does not compile.

const LAYOUT: &[u8] = include_str!("lua/layout.lua").as_bytes();

/// Returns the number of the line `local NAME = number` of `lua/layout.lua`. `name` is NAME.
const fn number(name: &str) -> u64 {
    let mut start = 0;
    while start < LAYOUT.len() {
        if is_assignment(start, name.as_bytes()) {
            return digits(start + PREFIX.len() + name.len() + ASSIGNS.len());
        }
        start += 1;
    }
    panic!("lua/layout.lua has no line `local NAME = number` of this name");
}

const PREFIX: &[u8] = b"\nlocal ";
const ASSIGNS: &[u8] = b" = ";

/// Returns whether `\nlocal NAME = ` stands at `start`.
const fn is_assignment(start: usize, name: &[u8]) -> bool {
    is_at(start, PREFIX)
        && is_at(start + PREFIX.len(), name)
        && is_at(start + PREFIX.len() + name.len(), ASSIGNS)
}

/// Returns whether `word` stands at `start`.
const fn is_at(start: usize, word: &[u8]) -> bool {
    let mut index = 0;
    while index < word.len() {
        if start + index >= LAYOUT.len() || LAYOUT[start + index] != word[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Returns the decimal number that ends the line.
const fn digits(mut at: usize) -> u64 {
    let mut value = 0;
    while LAYOUT[at] != b'\n' {
        assert!(
            LAYOUT[at].is_ascii_digit(),
            "a number of lua/layout.lua has decimal digits only"
        );
        value = value * 10 + (LAYOUT[at] - b'0') as u64;
        at += 1;
    }
    value
}

/// Returns a number that fits into one byte.
const fn byte(name: &str) -> u8 {
    let value = number(name);
    assert!(
        value <= u8::MAX as u64,
        "the number of lua/layout.lua does not fit into a byte"
    );
    value as u8
}

/// The first byte of every call, reply and state.
pub(super) const FORMAT: u8 = byte("FORMAT");

/// The first byte of a message about a hold or a release, to all stores.
pub(super) const HOLD_MESSAGE: u8 = byte("HOLD_MESSAGE");
/// The first byte of a message about a register.
pub(super) const REGISTER_MESSAGE: u8 = byte("REGISTER_MESSAGE");
/// The first byte of a message that less of a limit remains than the state knew.
pub(super) const REMAINING_MESSAGE: u8 = byte("REMAINING_MESSAGE");
/// The first byte of a message that a quota was set, or has ended.
pub(super) const QUOTA_MESSAGE: u8 = byte("QUOTA_MESSAGE");
/// The first byte of a message to a holder of calls in flight, to one store.
pub(super) const IN_FLIGHT_MESSAGE: u8 = byte("IN_FLIGHT_MESSAGE");

/// The operation that requests permits.
pub(super) const LEASE: u8 = byte("LEASE");
/// The operation that reads the state of a key, about rates or calls in flight.
pub(super) const PEEK: u8 = byte("PEEK");
/// The operation that only gives permits back.
pub(super) const RETURN: u8 = byte("RETURN");
/// The operation that begins a hold.
pub(super) const HOLD: u8 = byte("HOLD");
/// The operation that ends a hold.
pub(super) const RELEASE: u8 = byte("RELEASE");
/// The operation that sets a quota.
pub(super) const SET_QUOTA: u8 = byte("SET_QUOTA");
/// The operation that ends a set quota.
pub(super) const UNSET_QUOTA: u8 = byte("UNSET_QUOTA");
/// The operation that makes the limits of the call those of a learned quota.
pub(super) const LEARN_QUOTA: u8 = byte("LEARN_QUOTA");
/// What a call states in place of the percentage that it may borrow, if its key is the part of no class.
pub(super) const NO_PART: u8 = byte("NO_PART");
/// The same, if the caller owns the part.
pub(super) const OWNS: u8 = byte("OWNS");
/// The operation of a claim about calls in flight.
pub(super) const CLAIM: u8 = byte("CLAIM");

/// The status of a call whose needs are all granted.
pub(super) const GRANTED: u8 = byte("GRANTED");
/// The status of a call whose needs are not all granted.
pub(super) const REFUSED: u8 = byte("REFUSED");
/// The status of a call to a state that recovers from a loss, and grants nothing yet.
pub(super) const RECOVERING: u8 = byte("RECOVERING");
/// The status of a call that did nothing, because the server's clock is too far ahead of what the
/// caller expects.
pub(super) const UNSURE: u8 = byte("UNSURE");
/// Added to the status if clients outside of the fleet use a limit, too.
pub(super) const SHARED: u8 = byte("SHARED");
/// Added to the status if the hold was cut.
pub(super) const CUT: u8 = byte("CUT");
/// Added to the status of the key that allows a joint request last.
pub(super) const LAST: u8 = byte("LAST");
/// Added to the status if a set quota follows.
pub(super) const WITH_QUOTA: u8 = byte("WITH_QUOTA");

/// The kind of a sliding window.
pub(super) const WINDOW: u8 = byte("WINDOW");
/// The kind of a bucket.
pub(super) const BUCKET: u8 = byte("BUCKET");
/// The kind of a fixed window.
pub(super) const FIXED: u8 = byte("FIXED");

/// The largest number, 2^53. Beyond it, numbers of Lua are no longer exact. As a wait it means
/// never.
pub(super) const NEVER: u64 = number("NEVER");
