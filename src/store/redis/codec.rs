//! Calls and answers of the script, packed. [`guide::redis_format`](crate::guide::redis_format) has the formats, for other languages.

use std::time::Duration;

use smallvec::SmallVec;

use super::layout::{
    BUCKET, CALL_VERSION, CLAIM, CUT, CUT_HOLD_MESSAGE, FIXED, GRANTED, HOLD, HOLD_MESSAGE,
    IN_FLIGHT_MESSAGE, LEARNING, LEASE, NEVER, PEEK, REFUSED, RELEASE, REMAINING_MESSAGE, RETURN, SHARED,
    UNSURE, WINDOW,
};
use crate::limit::{Charge, LimitSpec, Micros, UnusedPermits, UpstreamRemaining, micros_down, micros_up};
use crate::quota::Limit;
use crate::store::{
    Claim, ClientSession, Demand, Grant, Grants, HoldState, Lease, LeaseRequest, LimitUsage, Refusal, Source,
    StoreEvent, Usage,
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
    fn new(operation: u8, memory: ClientSession, dice: u64) -> Self {
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
    held: HoldState,
    left: Option<UpstreamRemaining>,
}

impl Spans {
    const NONE: Spans = Spans {
        latest: 0,
        life: 0,
        prefetch: 0,
        prefetch_life: 0,
        held: HoldState { remaining: Duration::ZERO, releases: 0, cut: false },
        left: None,
    };
}

/// What a call asks for and brings.
#[derive(Default)]
struct Lists<'a> {
    demands: &'a [Demand],
    returns: &'a [UnusedPermits],
    charges: &'a [Charge],
}

fn call(
    operation: u8,
    spec: &LimitSpec,
    memory: ClientSession,
    dice: u64,
    spans: Spans,
    lists: &Lists<'_>,
) -> Vec<u8> {
    let limits = spec.quota().limits().len();
    let &Lists { demands, returns, charges } = lists;
    let charges = &charges[..charges.len().min(Charge::MOST)];
    let mut call = Call::new(operation, memory, dice);
    call.0.reserve(100 + 16 * limits + 8 * demands.len() + 21 * returns.len() + 14 * charges.len());
    call.long(memory.granted);
    call.long(micros_up(spec.transit_slack()));
    call.long(micros_up(spec.boundary_guard()));
    call.long(spans.latest);
    call.long(spans.life);
    call.int(spans.prefetch);
    call.long(spans.prefetch_life);
    call.long(micros_up(spans.held.remaining));
    call.int(spans.held.releases);
    call.byte(u8::from(spans.held.cut));
    call.byte(limits as u8); // at most eight
    call.short(demands.len());
    call.short(returns.len());
    call.byte(charges.len() as u8); // at most 64
    call.byte(u8::from(spans.left.is_some()));
    spec.quota().limits().iter().for_each(|limit| call.limit(*limit));
    for demand in demands {
        call.int(demand.cost);
        call.int(demand.count);
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

/// The call that asks for `request`, which returns at most [`MOST_RETURNS`] permits. Permits of an earlier life of the state are
/// not given back.
pub(super) fn lease(request: &LeaseRequest<'_>, dice: u64) -> Vec<u8> {
    let spans = Spans {
        latest: micros_down(request.latest),
        life: micros_up(request.validity),
        prefetch: request.prefetch,
        prefetch_life: micros_up(request.prefetch_validity),
        held: request.hold,
        left: request.remaining,
    };
    let mut memory = request.session;
    if let (0, Some(last)) = (memory.incarnation, request.returns.last()) {
        memory = ClientSession { incarnation: last.incarnation, ..ClientSession::default() };
    }
    let known = request.returns.iter().filter(|unused| unused.incarnation == memory.incarnation);
    let returns: SmallVec<[UnusedPermits; 4]> = known.copied().collect();
    let lists = Lists { demands: request.demands, returns: &returns, charges: request.charges };
    call(LEASE, request.spec, memory, dice, spans, &lists)
}

/// The call that gives back `unused`, all of one life of the state.
pub(super) fn give_back(spec: &LimitSpec, unused: &[UnusedPermits], dice: u64) -> Vec<u8> {
    // It states neither the time nor what was granted, because its answer is not read.
    let incarnation = unused.first().map_or(0, |unused| unused.incarnation);
    let memory = ClientSession { incarnation, ..ClientSession::default() };
    call(RETURN, spec, memory, dice, Spans::NONE, &Lists { returns: unused, ..Lists::default() })
}

/// The call that holds the key.
pub(super) fn hold(spec: &LimitSpec, held: HoldState, left: Option<UpstreamRemaining>, dice: u64) -> Vec<u8> {
    let spans = Spans { held, left, ..Spans::NONE };
    call(HOLD, spec, ClientSession::default(), dice, spans, &Lists::default())
}

/// The call that ends the hold of the key.
pub(super) fn release(spec: &LimitSpec, dice: u64) -> Vec<u8> {
    call(RELEASE, spec, ClientSession::default(), dice, Spans::NONE, &Lists::default())
}

/// The call that asks for the state.
pub(super) fn peek(spec: &LimitSpec, dice: u64) -> Vec<u8> {
    call(PEEK, spec, ClientSession::default(), dice, Spans::NONE, &Lists::default())
}

/// The claim of a holder in `instance`, numbered anew; `memory` is what it remembers of earlier answers.
pub(super) fn claim(claim: &Claim, number: u64, instance: u64, memory: ClientSession, dice: u64) -> Vec<u8> {
    let mut call = Call::new(CLAIM, memory, dice);
    call.0.reserve(47);
    call.long(instance);
    call.long(claim.holder);
    call.long(number);
    call.int(claim.limit);
    call.int(claim.in_use);
    call.int(claim.wanted);
    call.long(claim.granted_seen);
    call.long(micros_up(claim.ttl));
    call.0
}

/// The call that asks how many are in flight, of `most`.
pub(super) fn peek_seats(most: u32, dice: u64) -> Vec<u8> {
    let nobody = Claim { limit: most, ..Claim::NONE };
    let mut call = claim(&nobody, 0, 0, ClientSession::default(), dice);
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

pub(super) struct ReplyReader<'a>(pub(super) &'a [u8]);

impl ReplyReader<'_> {
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
    let mut answer = ReplyReader(answer);
    answer.version().ok()?;
    let status = answer.byte().ok()?;
    let (_incarnation, _writes) = (answer.long().ok()?, answer.long().ok()?);
    let now = answer.long().ok()?;
    (status == UNSURE).then_some(now)
}

/// Reads the answer to [`lease`]; `slack` is the transit slack that was asked with.
pub(super) fn read_lease(answer: &[u8], slack: Duration) -> Result<Lease, Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    let status = answer.byte()?;
    let (status, shared, cut) = (status & !(SHARED | CUT), status & SHARED != 0, status & CUT != 0);
    let (incarnation, writes) = (answer.long()?, answer.long()?);
    let (now, remember, wait, free) = (answer.long()?, answer.span()?, answer.long()?, answer.long()?);
    let held = HoldState { remaining: answer.span()?, releases: answer.int()?, cut };
    let (limit, foreign) = (answer.limit()?, answer.limit()?);
    let wait_for = Duration::from_micros(wait);
    let grant = |cost, count, wait: u64, span: u64| Grant {
        cost,
        count,
        wait: Duration::from_micros(wait),
        validity: Duration::from_micros(span).saturating_sub(slack),
        slot: now + wait,
        stamp: now + wait + span,
    };
    let (ahead, ahead_span) = (answer.int()?, answer.long()?);
    let prefetched = (ahead > 0).then(|| grant(1, ahead, 0, ahead_span));
    let mut grants = Grants::default();
    for _ in 0..answer.number(2)? {
        grants.push(grant(answer.int()?, answer.int()?, answer.long()?, answer.long()?));
    }
    let refused = match status {
        GRANTED | LEARNING => None,
        REFUSED => Some(Refusal { wait: (wait < NEVER).then_some(wait_for), limit }),
        _ => return Err(Garbled),
    };
    let learning = (status == LEARNING).then_some(wait_for);
    Ok(Lease {
        grants: grants,
        prefetched,
        refused,
        recovering: learning,
        incarnation,
        writes,
        now,
        session_ttl: remember,
        hold: held,
        foreign,
        external_usage: shared,
        free,
        source: Source::Store,
    })
}

/// Reads the answer to [`peek`].
pub(super) fn read_peek(answer: &[u8]) -> Result<Usage, Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    answer.begins_with(GRANTED)?;
    let (free, next_slot) = (answer.long()?, answer.span()?);
    let held = HoldState { remaining: answer.span()?, releases: answer.int()?, cut: answer.byte()? != 0 };
    let mut limits = Vec::new();
    for _ in 0..answer.byte()? {
        let limit = answer.limit()?.ok_or(Garbled)?;
        let (used, free, reserved) = (answer.long()?, answer.long()?, answer.long()?);
        limits.push(LimitUsage { limit, used, free, reserved });
    }
    Ok(Usage { limits, free, next_slot, hold: held, degraded: false })
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
    let mut answer = ReplyReader(answer);
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
    let mut message = ReplyReader(message);
    message.begins_with(IN_FLIGHT_MESSAGE)?;
    let (incarnation, changes, holder) = (message.long()?, message.long()?, message.long()?);
    let (number, given, others_wait) = (message.long()?, message.long()?, message.byte()? != 0);
    Ok((holder, ToldSeats { incarnation, changes, number, given, others_wait }))
}

/// Reads the answer to [`peek_seats`]: taken and free.
pub(super) fn read_peek_seats(answer: &[u8]) -> Result<(u32, u32), Garbled> {
    let mut answer = ReplyReader(answer);
    answer.version()?;
    answer.begins_with(0)?;
    Ok((answer.int()?, answer.int()?))
}

/// Reads a message to all processes about a key. Returns the news and the key, as the sender wrote it.
pub(super) fn read_news(message: &[u8]) -> Result<(StoreEvent, &[u8]), Garbled> {
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
