//! Calls and answers of the script, packed. [`guide::redis_format`](crate::guide::redis_format) has the formats, for other languages.

use std::time::Duration;

use smallvec::SmallVec;

use super::layout::{
    BUCKET, CALL_VERSION, CLAIM, CUT, CUT_HOLD_MESSAGE, FIXED, GRANTED, HOLD, HOLD_MESSAGE,
    IN_FLIGHT_MESSAGE, LEARNING, LEASE, NEVER, PEEK, REFUSED, RELEASE, REMAINING_MESSAGE, RETURN, SHARED,
    UNSURE, WINDOW,
};
use crate::limit::{Charge, Left, Micros, Terms, Unused, micros_down, micros_up};
use crate::quota::Limit;
use crate::store::{
    Ask, Claim, Held, Lease, LimitUsage, Memory, Need, News, Refusal, Segment, Segments, Usage,
};

/// How long a call and its answer may have been on their way, at most.
const LONGEST_ON_WAY: Duration = Duration::from_millis(250);

/// The most permits that one call gives back; the script must not keep the server long.
pub(super) const MOST_RETURNS: usize = 256;

/// The bytes of a large number.
const LONG: usize = 7;

// ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────

pub(super) struct Call(pub(super) Vec<u8>);

impl Call {
    /// What all calls begin with.
    fn new(operation: u8, memory: Memory, dice: u64) -> Self {
        let mut call = Call(Vec::with_capacity(128));
        call.byte(CALL_VERSION);
        call.byte(operation);
        call.long(dice % (NEVER - 1) + 1);
        call.long(memory.incarnation);
        call.long(memory.writes);
        call.long(memory.seen);
        call.long(micros_down(memory.since));
        call.long(micros_up(memory.trip.saturating_mul(4).min(LONGEST_ON_WAY)));
        // The server's time, if it was asked for: see `Call::ask_again`.
        call.long(0);
        call.long(0);
        call
    }

    /// Where in a call stand: how long ago the last answer arrived, and the server's time with how long ago that arrived.
    const SINCE: usize = 2 + 4 * LONG;
    const SERVER_SEEN: usize = 2 + 6 * LONG;

    /// Changes a packed call into a call that is sent `later` than it was packed, to a server whose clock has just shown
    /// `server_seen`.
    pub(super) fn ask_again(call: &mut [u8], later: Duration, server_seen: u64) {
        let mut write = |at: usize, value: u64| {
            call[at..at + LONG].copy_from_slice(&value.min(NEVER).to_le_bytes()[..LONG]);
        };
        write(Call::SERVER_SEEN, server_seen);
        let mut earlier = [0; 8];
        earlier[..LONG].copy_from_slice(&call[Call::SINCE..Call::SINCE + LONG]);
        let since = u64::from_le_bytes(earlier).saturating_add(micros_down(later));
        call[Call::SINCE..Call::SINCE + LONG].copy_from_slice(&since.min(NEVER).to_le_bytes()[..LONG]);
    }

    pub(super) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    fn short(&mut self, value: usize) {
        self.0.extend(u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes());
    }

    fn int(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn long(&mut self, value: u64) {
        self.0.extend(&value.min(NEVER).to_le_bytes()[..LONG]);
    }

    fn limit(&mut self, limit: Limit) {
        let (kind, capacity) = match limit {
            Limit::Sliding { .. } => (WINDOW, 0),
            Limit::Bucket { capacity, .. } => (BUCKET, capacity),
            Limit::Fixed { .. } => (FIXED, 0),
            Limit::InFlight { .. } => unreachable!("Quota::limits are of rate"),
        };
        self.byte(kind);
        self.int(limit.count());
        self.long(micros_up(limit.window()));
        self.int(capacity);
    }
}

/// What a call states besides the limits, the needs and the returns.
struct Spans {
    latest: Micros,
    life: Micros,
    prefetch: u32,
    prefetch_life: Micros,
    held: Held,
    left: Option<Left>,
}

impl Spans {
    const NONE: Spans = Spans {
        latest: 0,
        life: 0,
        prefetch: 0,
        prefetch_life: 0,
        held: Held { left: Duration::ZERO, releases: 0, cut: false },
        left: None,
    };
}

/// What a call asks for and brings.
#[derive(Default)]
struct Lists<'a> {
    needs: &'a [Need],
    returns: &'a [Unused],
    charges: &'a [Charge],
}

fn call(operation: u8, terms: &Terms, memory: Memory, dice: u64, spans: Spans, lists: &Lists<'_>) -> Vec<u8> {
    let limits = terms.quota().limits().len();
    let &Lists { needs, returns, charges } = lists;
    let charges = &charges[..charges.len().min(Charge::MOST)];
    let mut call = Call::new(operation, memory, dice);
    call.0.reserve(100 + 16 * limits + 8 * needs.len() + 21 * returns.len() + 14 * charges.len());
    call.long(memory.granted);
    call.long(micros_up(terms.transit_slack()));
    call.long(micros_up(terms.boundary_guard()));
    call.long(spans.latest);
    call.long(spans.life);
    call.int(spans.prefetch);
    call.long(spans.prefetch_life);
    call.long(micros_up(spans.held.left));
    call.int(spans.held.releases);
    call.byte(u8::from(spans.held.cut));
    call.byte(limits as u8); // at most eight
    call.short(needs.len());
    call.short(returns.len());
    call.byte(charges.len() as u8); // at most 64
    call.byte(u8::from(spans.left.is_some()));
    terms.quota().limits().iter().for_each(|limit| call.limit(*limit));
    for need in needs {
        call.int(need.cost);
        call.int(need.count);
    }
    for unused in returns {
        call.long(unused.slot);
        call.long(unused.stamp);
        call.long(unused.units);
    }
    for charge in charges {
        call.long(micros_down(charge.age));
        call.long(charge.units);
    }
    if let Some(left) = spans.left {
        call.limit(left.limit);
        call.long(left.units);
        call.long(left.reset_in.map_or(0, micros_up));
        call.byte(u8::from(left.steady) | u8::from(left.urgent) << 1);
        call.long(micros_up(left.ago));
        call.int(left.refused);
        call.long(micros_up(left.valid_for));
        call.byte(u8::from(left.forget));
    }
    call.0
}

/// The call that asks for `ask`, which returns at most [`MOST_RETURNS`] permits. Permits of an earlier life of the state are
/// not given back.
pub(super) fn lease(ask: &Ask<'_>, dice: u64) -> Vec<u8> {
    let spans = Spans {
        latest: micros_down(ask.latest),
        life: micros_up(ask.life),
        prefetch: ask.prefetch,
        prefetch_life: micros_up(ask.prefetch_life),
        held: ask.held,
        left: ask.left,
    };
    let mut memory = ask.memory;
    if let (0, Some(last)) = (memory.incarnation, ask.returns.last()) {
        memory = Memory { incarnation: last.incarnation, ..Memory::default() };
    }
    let known = ask.returns.iter().filter(|unused| unused.incarnation == memory.incarnation);
    let returns: SmallVec<[Unused; 4]> = known.copied().collect();
    let lists = Lists { needs: ask.needs, returns: &returns, charges: ask.charges };
    call(LEASE, ask.terms, memory, dice, spans, &lists)
}

/// The call that gives back `unused`, all of one life of the state.
pub(super) fn give_back(terms: &Terms, unused: &[Unused], dice: u64) -> Vec<u8> {
    // It states neither the time nor what was granted, because its answer is not read.
    let incarnation = unused.first().map_or(0, |unused| unused.incarnation);
    let memory = Memory { incarnation, ..Memory::default() };
    call(RETURN, terms, memory, dice, Spans::NONE, &Lists { returns: unused, ..Lists::default() })
}

/// The call that holds the key.
pub(super) fn hold(terms: &Terms, held: Held, left: Option<Left>, dice: u64) -> Vec<u8> {
    let spans = Spans { held, left, ..Spans::NONE };
    call(HOLD, terms, Memory::default(), dice, spans, &Lists::default())
}

/// The call that ends the hold of the key.
pub(super) fn release(terms: &Terms, dice: u64) -> Vec<u8> {
    call(RELEASE, terms, Memory::default(), dice, Spans::NONE, &Lists::default())
}

/// The call that asks for the state.
pub(super) fn peek(terms: &Terms, dice: u64) -> Vec<u8> {
    call(PEEK, terms, Memory::default(), dice, Spans::NONE, &Lists::default())
}

/// The claim of a holder in `instance`, numbered anew; `memory` is what it remembers of earlier answers.
pub(super) fn claim(claim: &Claim, number: u64, instance: u64, memory: Memory, dice: u64) -> Vec<u8> {
    let mut call = Call::new(CLAIM, memory, dice);
    call.0.reserve(47);
    call.long(instance);
    call.long(claim.holder);
    call.long(number);
    call.int(claim.most);
    call.int(claim.sits);
    call.int(claim.wants);
    call.long(claim.heard);
    call.long(micros_up(claim.life));
    call.0
}

/// The call that asks how many are in flight, of `most`.
pub(super) fn peek_seats(most: u32, dice: u64) -> Vec<u8> {
    let nobody = Claim { most, ..Claim::NONE };
    let mut call = claim(&nobody, 0, 0, Memory::default(), dice);
    call[1] = PEEK;
    call
}

// ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

/// An answer that does not follow the format in `src/guide/redis_format.md`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Garbled;

impl std::fmt::Display for Garbled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "its answer cannot be read; does a proxy change what the script answers?")
    }
}

impl std::error::Error for Garbled {}

pub(super) struct Answer<'a>(pub(super) &'a [u8]);

impl Answer<'_> {
    fn number(&mut self, bytes: usize) -> Result<u64, Garbled> {
        let (number, rest) = self.0.split_at_checked(bytes).ok_or(Garbled)?;
        self.0 = rest;
        let mut le = [0; 8];
        le[..bytes].copy_from_slice(number);
        Ok(u64::from_le_bytes(le))
    }

    pub(super) fn byte(&mut self) -> Result<u8, Garbled> {
        self.number(1).map(|byte| byte as u8)
    }

    fn int(&mut self) -> Result<u32, Garbled> {
        self.number(4).map(|int| int as u32)
    }

    pub(super) fn long(&mut self) -> Result<u64, Garbled> {
        self.number(LONG)
    }

    pub(super) fn span(&mut self) -> Result<Duration, Garbled> {
        self.long().map(Duration::from_micros)
    }

    fn limit(&mut self) -> Result<Option<Limit>, Garbled> {
        let (kind, count, window, capacity) = (self.byte()?, self.int()?, self.span()?, self.int()?);
        match kind {
            0 => Ok(None),
            WINDOW => Ok(Some(Limit::Sliding { count, window })),
            BUCKET => Ok(Some(Limit::Bucket { capacity, count, window })),
            FIXED => Ok(Some(Limit::Fixed { count, window })),
            _ => Err(Garbled),
        }
    }

    fn version(&mut self) -> Result<(), Garbled> {
        self.begins_with(CALL_VERSION)
    }

    pub(super) fn begins_with(&mut self, byte: u8) -> Result<(), Garbled> {
        if self.byte()? == byte { Ok(()) } else { Err(Garbled) }
    }
}

/// Returns the server's time, if the answer to a call about rates or calls in flight states that the call must be sent again.
pub(super) fn read_unsure(answer: &[u8]) -> Option<u64> {
    let mut answer = Answer(answer);
    answer.version().ok()?;
    let status = answer.byte().ok()?;
    let (_incarnation, _writes) = (answer.long().ok()?, answer.long().ok()?);
    let now = answer.long().ok()?;
    (status == UNSURE).then_some(now)
}

/// Reads the answer to [`lease`]; `slack` is the transit slack that was asked with.
pub(super) fn read_lease(answer: &[u8], slack: Duration) -> Result<Lease, Garbled> {
    let mut answer = Answer(answer);
    answer.version()?;
    let status = answer.byte()?;
    let (status, shared, cut) = (status & !(SHARED | CUT), status & SHARED != 0, status & CUT != 0);
    let (incarnation, writes) = (answer.long()?, answer.long()?);
    let (now, remember, wait, free) = (answer.long()?, answer.span()?, answer.long()?, answer.long()?);
    let held = Held { left: answer.span()?, releases: answer.int()?, cut };
    let (limit, foreign) = (answer.limit()?, answer.limit()?);
    let wait_for = Duration::from_micros(wait);
    let segment = |cost, count, wait: u64, span: u64| Segment {
        cost,
        count,
        wait: Duration::from_micros(wait),
        life: Duration::from_micros(span).saturating_sub(slack),
        slot: now + wait,
        stamp: now + wait + span,
    };
    let (ahead, ahead_span) = (answer.int()?, answer.long()?);
    let prefetched = (ahead > 0).then(|| segment(1, ahead, 0, ahead_span));
    let mut segments = Segments::default();
    for _ in 0..answer.number(2)? {
        segments.push(segment(answer.int()?, answer.int()?, answer.long()?, answer.long()?));
    }
    let refused = match status {
        GRANTED | LEARNING => None,
        REFUSED => Some(Refusal { wait: (wait < NEVER).then_some(wait_for), limit }),
        _ => return Err(Garbled),
    };
    let learning = (status == LEARNING).then_some(wait_for);
    Ok(Lease {
        segments,
        prefetched,
        refused,
        learning,
        incarnation,
        writes,
        now,
        remember,
        held,
        foreign,
        shared,
        free,
        own: None,
    })
}

/// Reads the answer to [`peek`].
pub(super) fn read_peek(answer: &[u8]) -> Result<Usage, Garbled> {
    let mut answer = Answer(answer);
    answer.version()?;
    answer.begins_with(GRANTED)?;
    let (free, next_slot) = (answer.long()?, answer.span()?);
    let held = Held { left: answer.span()?, releases: answer.int()?, cut: answer.byte()? != 0 };
    let mut limits = Vec::new();
    for _ in 0..answer.byte()? {
        let limit = answer.limit()?.ok_or(Garbled)?;
        let (used, free, reserved) = (answer.long()?, answer.long()?, answer.long()?);
        limits.push(LimitUsage { limit, used, free, reserved });
    }
    Ok(Usage { limits, free, next_slot, held, alone: false })
}

/// The news for a holder: in the reply to its claim, or in a message after the claim of another holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ToldSeats {
    pub(super) incarnation: u64,
    pub(super) changes: u64,
    pub(super) number: u64,
    pub(super) given: u64,
    pub(super) others_wait: bool,
}

/// The answer to [`claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claimed {
    pub(super) told: ToldSeats,
    /// Whether other holders could not be notified.
    pub(super) mute: bool,
    pub(super) now: u64,
    /// How long until the first claim of another holder expires, unless it is renewed.
    pub(super) first_end: Option<Duration>,
    /// How long no seat is granted, because a lost state is being recovered.
    pub(super) learning: Duration,
}

/// Reads the answer to [`claim`].
pub(super) fn read_claimed(answer: &[u8]) -> Result<Claimed, Garbled> {
    let mut answer = Answer(answer);
    answer.version()?;
    let mute = answer.byte()? != 0;
    let (incarnation, changes, now) = (answer.long()?, answer.long()?, answer.long()?);
    let (number, given, others_wait) = (answer.long()?, answer.long()?, answer.byte()? != 0);
    let told = ToldSeats { incarnation, changes, number, given, others_wait };
    let first_end = Some(answer.span()?).filter(|span| !span.is_zero());
    Ok(Claimed { told, mute, now, first_end, learning: answer.span()? })
}

/// Reads a message to a holder on its channel.
pub(super) fn read_told(message: &[u8]) -> Result<(u64, ToldSeats), Garbled> {
    let mut message = Answer(message);
    message.begins_with(IN_FLIGHT_MESSAGE)?;
    let (incarnation, changes, holder) = (message.long()?, message.long()?, message.long()?);
    let (number, given, others_wait) = (message.long()?, message.long()?, message.byte()? != 0);
    Ok((holder, ToldSeats { incarnation, changes, number, given, others_wait }))
}

/// Reads the answer to [`peek_seats`]: taken and free.
pub(super) fn read_peek_seats(answer: &[u8]) -> Result<(u32, u32), Garbled> {
    let mut answer = Answer(answer);
    answer.version()?;
    answer.begins_with(0)?;
    Ok((answer.int()?, answer.int()?))
}

/// Reads a message to all processes about a key. Returns the news and the key, as the sender wrote it.
pub(super) fn read_news(message: &[u8]) -> Result<(News, &[u8]), Garbled> {
    let mut message = Answer(message);
    let cut = match message.byte()? {
        HOLD_MESSAGE => false,
        CUT_HOLD_MESSAGE => true,
        REMAINING_MESSAGE => return Ok((News::Less { writes: message.long()? }, message.0)),
        _ => return Err(Garbled),
    };
    let held = Held { left: message.span()?, releases: message.int()?, cut };
    Ok((News::Held(held), message.0))
}
