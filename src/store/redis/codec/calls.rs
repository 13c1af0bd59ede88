//! The calls of the scripts about rates and calls in flight, packed.

use std::time::Duration;

use smallvec::SmallVec;

use super::{CallWriter, LONG};
use crate::limit::{Charge, LimitSpec, Micros, UnusedPermits, UpstreamRemaining, micros_down, micros_up};
use crate::store::redis::layout::{CLAIM, HOLD, LEASE, NEVER, PEEK, RELEASE, RETURN};
use crate::store::{Claim, ClientSession, Demand, HoldState, LeaseRequest};

/// The most permits that one call gives back; the script must not keep the server long.
pub(in crate::store::redis) const MOST_RETURNS: usize = 256;

/// Where in a call stand: how long ago the last answer arrived, and the server's time with how long ago that arrived.
const SINCE: usize = 2 + 4 * LONG;
const SERVER_SEEN: usize = 2 + 6 * LONG;

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
    let mut call = CallWriter::new(operation, memory, dice);
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
pub(in crate::store::redis) fn lease(request: &LeaseRequest<'_>, dice: u64) -> Vec<u8> {
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
pub(in crate::store::redis) fn give_back(spec: &LimitSpec, unused: &[UnusedPermits], dice: u64) -> Vec<u8> {
    // It states neither the time nor what was granted, because its answer is not read.
    let incarnation = unused.first().map_or(0, |unused| unused.incarnation);
    let memory = ClientSession { incarnation, ..ClientSession::default() };
    call(RETURN, spec, memory, dice, Spans::NONE, &Lists { returns: unused, ..Lists::default() })
}

/// The call that holds the key.
pub(in crate::store::redis) fn hold(
    spec: &LimitSpec,
    held: HoldState,
    left: Option<UpstreamRemaining>,
    dice: u64,
) -> Vec<u8> {
    let spans = Spans { held, left, ..Spans::NONE };
    call(HOLD, spec, ClientSession::default(), dice, spans, &Lists::default())
}

/// The call that ends the hold of the key.
pub(in crate::store::redis) fn release(spec: &LimitSpec, dice: u64) -> Vec<u8> {
    call(RELEASE, spec, ClientSession::default(), dice, Spans::NONE, &Lists::default())
}

/// The call that asks for the state.
pub(in crate::store::redis) fn peek(spec: &LimitSpec, dice: u64) -> Vec<u8> {
    call(PEEK, spec, ClientSession::default(), dice, Spans::NONE, &Lists::default())
}

/// The claim of a holder in `instance`, numbered anew; `memory` is what it remembers of earlier answers.
pub(in crate::store::redis) fn claim(
    claim: &Claim,
    number: u64,
    instance: u64,
    memory: ClientSession,
    dice: u64,
) -> Vec<u8> {
    let mut call = CallWriter::new(CLAIM, memory, dice);
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
pub(in crate::store::redis) fn peek_seats(most: u32, dice: u64) -> Vec<u8> {
    let nobody = Claim { limit: most, ..Claim::NONE };
    let mut call = claim(&nobody, 0, 0, ClientSession::default(), dice);
    call[1] = PEEK;
    call
}

/// Changes a packed call into a call that is sent `later` than it was packed, to a server whose clock has just shown
/// `server_seen`.
pub(in crate::store::redis) fn ask_again(call: &mut [u8], later: Duration, server_seen: u64) {
    let mut write = |at: usize, value: u64| {
        call[at..at + LONG].copy_from_slice(&value.min(NEVER).to_le_bytes()[..LONG]);
    };
    write(SERVER_SEEN, server_seen);
    let mut earlier = [0; 8];
    earlier[..LONG].copy_from_slice(&call[SINCE..SINCE + LONG]);
    let since = u64::from_le_bytes(earlier).saturating_add(micros_down(later));
    call[SINCE..SINCE + LONG].copy_from_slice(&since.min(NEVER).to_le_bytes()[..LONG]);
}
