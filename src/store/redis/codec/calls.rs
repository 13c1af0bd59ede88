//! Packs the calls of the scripts about rates and about calls in flight.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::call_writer::on_way;
use super::{CallWriter, LONG};
use crate::key::Key;
use crate::limit::{ChangeKind, Charge, LimitSpec, UnusedPermits, micros_down, micros_up};
use crate::store::redis::layout::{
    CLAIM, HOLD, LEARN_QUOTA, LEASE, NEVER, NO_PART, OWNS, PEEK, RELEASE, RETURN, SET_QUOTA,
    UNSET_QUOTA,
};
use crate::store::{Change, Claim, ClientSession, Demand, LeaseRequest, PeekRequest};

/// The most permits that one call gives back, so that the script does not keep the server busy for
/// long.
pub(in crate::store::redis) const MOST_RETURNS: usize = 256;

/// The place in a call of how long ago the last reply arrived.
const SINCE: usize = 2 + 4 * LONG;
/// How long that reply and this call may be on their way.
const ON_WAY: usize = 2 + 5 * LONG;
/// The place in a call of the server's time, which is followed by how long ago that time was read.
const SERVER_SEEN: usize = 2 + 6 * LONG;

/// Packs a call about rates, of the fields of a request. If the call makes a new state, `random` is its
/// incarnation.
fn pack(operation: u8, request: &LeaseRequest<'_>, random: u64) -> Vec<u8> {
    let &LeaseRequest {
        spec,
        demands,
        returns,
        charges,
        ..
    } = request;
    let limits = spec.limits().len();
    let charges = &charges[..charges.len().min(Charge::MOST)];
    let mut call = CallWriter::new(operation, request.session, random);
    call.0
        .reserve(132 + 16 * limits + 15 * demands.len() + 21 * returns.len() + 14 * charges.len());
    call.long(request.session.granted);
    call.long(micros_up(spec.transit_slack()));
    call.long(micros_up(spec.boundary_guard()));
    call.long(micros_down(request.latest));
    call.long(micros_up(request.validity));
    call.int(request.prefetch);
    call.long(micros_up(request.prefetch_validity));
    call.long(micros_up(request.hold.remaining));
    call.int(request.hold.releases);
    call.byte(u8::from(request.hold.cut));
    call.byte(limits as u8); // at most nine
    call.short(demands.len());
    call.short(returns.len());
    call.byte(charges.len() as u8); // at most 64
    call.byte(u8::from(request.remaining.is_some()));
    call.int(spec.quota_version());
    call.long(micros_up(spec.quota_life()));
    call.int(spec.quota().most_in_flight().unwrap_or(0));
    call.byte(match spec.lending() {
        None => NO_PART,
        Some(lending) if request.borrows => lending.percent(),
        Some(_) => OWNS,
    });
    spec.limits().iter().for_each(|limit| call.limit(*limit));
    for demand in demands {
        call.int(demand.cost);
        call.int(demand.count);
        call.long(micros_up(demand.earliest));
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
    if let Some(remaining) = request.remaining {
        call.limit(remaining.limit);
        call.long(remaining.units);
        call.long(remaining.reset_in.map_or(0, micros_up));
        call.byte(u8::from(remaining.steady) | u8::from(remaining.urgent) << 1);
        call.long(micros_up(remaining.ago));
        call.int(remaining.refused);
        call.long(micros_up(remaining.valid_for));
        call.byte(u8::from(remaining.forget));
    }
    call.0
}

/// Packs a request for permits. The caller passes at most [`MOST_RETURNS`] permits to give back.
/// Those of another incarnation than that of the call are left out.
pub(in crate::store::redis) fn lease(request: &LeaseRequest<'_>, random: u64) -> Vec<u8> {
    let mut session = request.session;
    if let (0, Some(last)) = (session.incarnation, request.returns.last()) {
        session = ClientSession {
            incarnation: last.incarnation,
            ..ClientSession::default()
        };
    }
    let known = request
        .returns
        .iter()
        .filter(|unused| unused.incarnation == session.incarnation);
    let returns: SmallVec<[UnusedPermits; 4]> = known.copied().collect();
    let call = LeaseRequest {
        session,
        returns: &returns,
        ..*request
    };
    pack(LEASE, &call, random)
}

/// Returns a request that states nothing but the limits of `spec`.
fn bare(spec: &Arc<LimitSpec>) -> LeaseRequest<'_> {
    LeaseRequest::new(Key::ALL, spec, &[])
}

/// Packs a call that gives back `unused`, which are all of one incarnation.
pub(in crate::store::redis) fn give_back(
    spec: &Arc<LimitSpec>,
    unused: &[UnusedPermits],
    random: u64,
) -> Vec<u8> {
    // The reply is not read, so the call states neither the time nor what was granted.
    let incarnation = unused.first().map_or(0, |unused| unused.incarnation);
    let session = ClientSession {
        incarnation,
        ..ClientSession::default()
    };
    let call = LeaseRequest {
        session,
        returns: unused,
        ..bare(spec)
    };
    pack(RETURN, &call, random)
}

/// Packs a change of the key. A set quota gets the limits of `spec`. The script makes its new version, which
/// is larger than that of `spec`.
pub(in crate::store::redis) fn change(
    spec: &Arc<LimitSpec>,
    change: Change,
    random: u64,
) -> Vec<u8> {
    match change {
        Change::Hold { hold, remaining } => {
            let call = LeaseRequest {
                hold,
                remaining,
                ..bare(spec)
            };
            pack(HOLD, &call, random)
        }
        Change::Release => pack(RELEASE, &bare(spec), random),
        Change::Quota { kind, life } => {
            let operation = match kind {
                ChangeKind::Set => SET_QUOTA,
                ChangeKind::Learn => LEARN_QUOTA,
                ChangeKind::End => UNSET_QUOTA,
            };
            let spec = LimitSpec::clone(spec).with_quota_version(spec.quota_version(), life);
            pack(operation, &bare(&Arc::new(spec)), random)
        }
    }
}

/// Packs a call that reads the state of the key. Its last demand is the request that it asks about.
pub(in crate::store::redis) fn peek(request: &PeekRequest, random: u64) -> Vec<u8> {
    let mut demands = request.ahead.clone();
    demands.push(Demand::new(request.cost, 1));
    let call = LeaseRequest {
        validity: request.validity,
        demands: &demands,
        ..bare(&request.spec)
    };
    pack(PEEK, &call, random)
}

/// Packs a claim of the store `instance`. In Redis it has the number `number`.
pub(in crate::store::redis) fn claim(
    claim: &Claim,
    number: u64,
    instance: u64,
    session: ClientSession,
    random: u64,
) -> Vec<u8> {
    in_flight_call(CLAIM, claim, number, instance, session, random)
}

/// Packs a call that reads how many slots are in use, under a limit of `limit`.
pub(in crate::store::redis) fn peek_in_flight(limit: u32, random: u64) -> Vec<u8> {
    let claim = Claim {
        limit,
        ..Claim::NONE
    };
    in_flight_call(PEEK, &claim, 0, 0, ClientSession::default(), random)
}

/// Packs a call about calls in flight.
fn in_flight_call(
    operation: u8,
    claim: &Claim,
    number: u64,
    instance: u64,
    session: ClientSession,
    random: u64,
) -> Vec<u8> {
    let mut call = CallWriter::new(operation, session, random);
    call.0.reserve(52);
    call.long(instance);
    call.long(claim.holder);
    call.long(number);
    call.int(claim.limit);
    call.int(claim.in_use);
    call.int(claim.wanted);
    call.long(claim.granted_seen);
    call.long(micros_up(claim.ttl));
    if claim.share > 0 {
        call.int(claim.class);
        call.byte(claim.share);
    }
    call.0
}

/// Changes a packed call for another attempt, `later` than it was packed, to a server whose clock
/// has just shown `server_seen`. The next attempt may be on its way for as long as the last one was.
pub(in crate::store::redis) fn set_server_time(call: &mut [u8], later: Duration, server_seen: u64) {
    let since = read_long(call, SINCE).saturating_add(micros_down(later));
    let on_way = read_long(call, ON_WAY).max(on_way(later));
    write_long(call, SINCE, since);
    write_long(call, ON_WAY, on_way);
    write_long(call, SERVER_SEEN, server_seen);
}

/// Returns the large number at `at`.
fn read_long(call: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value[..LONG].copy_from_slice(&call[at..at + LONG]);
    u64::from_le_bytes(value)
}

/// Overwrites the large number at `at`.
fn write_long(call: &mut [u8], at: usize, value: u64) {
    call[at..at + LONG].copy_from_slice(&value.min(NEVER).to_le_bytes()[..LONG]);
}
