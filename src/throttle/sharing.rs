//! How the processes that share the pace of a key take turns.
//!
//! The processes share one pace and one order of turns through a register of the store. The
//! register has the pace state, and for each process how many requests wait and since when.
//!
//! A process writes events: an answer, a departure, a waiter. It applies them to the register as it
//! last knew it, and sends the result as a compare-and-set. If another process has written the
//! register meanwhile, that is a *conflict*. The process then applies its events to what the other
//! process has written, and tries again. A request leaves once the register has its departure, so
//! no slot is taken twice. The process that writes notifies the process whose turn is next.
//!
//! If the pace has much room, requests leave without asking the store. The process writes their
//! departures later, many at a time. During an outage of the store, each process goes on alone,
//! with its part of the last known speed.
//!
//! The states of one process, by the two fields of [`SyncState`], `pending` and `outage`: it is idle if it has neither, asks
//! with a compare-and-set, is away in an outage, and probes with both.
//!
//! ```text
//!             next_cas                        next_cas
//!   ┌──────┐ ─────────▶ ┌────────┐    ┌──────┐ ─────────▶ ┌─────────┐
//!   │ Idle │            │ Asking │    │ Away │            │ Probing │
//!   └──────┘ ◀───────── └────────┘    └──────┘ ◀───────── └─────────┘
//!      ▲   written,         │             ▲      error          │
//!      │   conflict, read   └─────────────┘                     │
//!      │                         error                          │
//!      └────────────────────────────────────────────────────────┘
//!                 answer: goes on from the register again
//! ```
//!
//! | from | event | to | what the process does |
//! |---|---|---|---|
//! | Idle | something to write or to read | Asking | sends the compare-and-set |
//! | Asking | written | Idle | drops the written events; its granted requests may leave |
//! | Asking | read, or a conflict | Idle | adopts the register and replays its events; rests after every fourth conflict |
//! | Asking | error | Away | saves the pace state, divides the pace by the number of processes |
//! | Away | the pause is over | Probing | reads the register |
//! | Probing | error | Away | doubles the pause |
//! | Probing | answer | Idle | restores the saved pace state, then as after Asking |

use std::time::{Duration, Instant};

use super::event_log::{EventLog, FleetEvent};
use super::local_queue::LocalQueue;
use super::pace_state::Load;
use super::peer_view::PeerView;
use super::peers::Peer;
use super::sync_state::{CasRequest, Outage, PendingCas, StoreChange, SyncState};
use crate::clock;
use crate::error::StoreError;
use crate::store::{Recipients, Register};

/// How long a process gathers events before it writes them, if no request waits. It is one round
/// trip for each process, within these bounds.
const GATHERING: Duration = Duration::from_millis(100);
const LONGEST_GATHERING: Duration = Duration::from_secs(1);
/// For how long after it has seen a version of the register a process lets requests leave without
/// asking the store.
const FRESH: Duration = Duration::from_secs(2);
/// Requests leave without asking the store only if the pace would allow about this many times as
/// many requests in flight. Requests of other processes may have left and ended since the last
/// notification.
const ROOM: usize = 4;

/// How one process takes turns with the others. The methods take the process's own queue.
#[derive(Debug)]
pub(super) struct Sharing {
    view: PeerView,
    sync: SyncState,
    pub(super) log: EventLog,
    /// How many requests may leave because the register has their departure.
    granted: usize,
    /// A register that was received while a compare-and-set was under way.
    received: Option<Register>,
}

impl Sharing {
    /// Shares the pace as process `id`, which the store notifies at `address`.
    pub(super) fn new(id: u64, address: u64, now: Instant) -> Self {
        Sharing {
            view: PeerView::new(id, address, now),
            sync: SyncState::default(),
            log: EventLog::default(),
            granted: 0,
            received: None,
        }
    }

    /// Returns whether the queue works alone, because the store is unreachable.
    pub(super) fn is_alone(&self) -> bool {
        self.sync.outage.is_some()
    }

    /// Returns how many processes have requests, this one included.
    pub(super) fn process_count(&self) -> u32 {
        self.view.process_count()
    }

    /// Returns the load of all processes, or of this one if it is alone.
    pub(super) fn load(&self, local: &LocalQueue) -> Load {
        let own = local.load();
        if self.is_alone() {
            own
        } else {
            self.view.with_others(own)
        }
    }

    fn slot(&self, local: &LocalQueue) -> Option<Instant> {
        local.pace_state.slot(self.load(local))
    }

    /// Returns whether a request may leave without a compare-and-set, because this process is alone
    /// or the pace has much room.
    pub(super) fn may_leave_alone(&self, local: &LocalQueue, now: Instant) -> bool {
        let Load { waiting, in_flight } = self.load(local);
        self.is_alone()
            || self.view.version.is_some()
                && now.saturating_duration_since(self.view.version_seen_at) < FRESH
                && local
                    .pace_state
                    .is_open(ROOM * (in_flight + 2) + waiting, now)
    }

    /// Returns whether the first waiter waits for an answer of the store.
    pub(super) fn awaits_register(&self, local: &LocalQueue) -> bool {
        let is_asking = self.sync.pending.is_some();
        !self.is_alone() && (is_asking || self.view.written_first != local.first_since())
    }

    /// Uses a grant: a departure that the register has. Returns false if there is none.
    pub(super) fn take_grant(&mut self) -> bool {
        let is_granted = self.granted > 0;
        self.granted -= usize::from(is_granted);
        is_granted
    }

    /// Keeps the grant of a request that was not sent, for the next one. If the store is unreachable, each process goes by
    /// itself.
    pub(super) fn give_grant_back(&mut self) {
        self.granted += usize::from(!self.is_alone());
    }

    /// Gives up all grants, because no request waits for them.
    pub(super) fn drop_grants(&mut self, now: Instant) {
        if std::mem::take(&mut self.granted) > 0 {
            self.log.touch(now);
        }
    }

    /// Records an event for the other processes, unless the store is unreachable. `event` takes the
    /// number of releases that this process knows of.
    pub(super) fn record(
        &mut self,
        local: &LocalQueue,
        now: Instant,
        event: impl FnOnce(Option<u32>) -> FleetEvent,
    ) {
        if !self.is_alone() {
            self.log.push(event(self.releases(local)));
        }
        self.log.touch(now);
    }

    /// Returns how many releases this process knows of; `None` if it has not read the register.
    fn releases(&self, local: &LocalQueue) -> Option<u32> {
        self.view.version.map(|_| local.pace_state.releases)
    }
}

/// The next compare-and-set.
impl Sharing {
    /// Returns when the compare-and-set under way was sent.
    pub(super) fn cas_sent_at(&self) -> Option<Instant> {
        self.sync.pending.as_ref().map(|cas| cas.sent)
    }

    /// Returns when the next compare-and-set is due if nothing else happens.
    pub(super) fn next_cas_at(&self, local: &LocalQueue) -> Option<Instant> {
        if self.sync.pending.is_some() {
            return None;
        }
        let turn_at = local.first_since().map(|first| {
            let turn_at = self.view.turn_at(first, self.slot(local), || {
                local.pace_state.interval(self.load(local))
            });
            // Turns rest only in an outage: otherwise one process at a time takes its turn.
            match self.is_alone() {
                true => self.sync.after_rest(turn_at),
                false => turn_at,
            }
        });
        let write_at = self.write_at(local).map(|at| self.sync.after_rest(at));
        write_at.into_iter().chain(turn_at).min()
    }

    /// Returns when to write what the register lacks.
    fn write_at(&self, local: &LocalQueue) -> Option<Instant> {
        let first = local.first_since();
        if self.view.written_first != first {
            return Some(self.view.version_seen_at);
        }
        let since = self.log.unwritten_since?;
        let is_waiting = first.is_some() || self.view.peers.others.iter().any(Peer::is_waiting);
        if is_waiting || self.log.has_hold() {
            return Some(since);
        }
        let gathering = self
            .view
            .round_trip
            .saturating_mul(self.view.process_count());
        Some(clock::after(
            since,
            gathering.clamp(GATHERING, LONGEST_GATHERING),
        ))
    }

    /// Returns the compare-and-set to send now, if one is due. The caller ends it with
    /// [`cas_answered`](Self::cas_answered).
    pub(super) fn next_cas(&mut self, local: &mut LocalQueue, now: Instant) -> Option<CasRequest> {
        if self.next_cas_at(local).is_none_or(|at| at > now) {
            return None;
        }
        let slot = self.slot(local);
        let mut peers = self.view.peers.clone();
        let mut grants = 0;
        if self.view.version.is_some() && !self.is_alone() {
            grants = self
                .view
                .grant_turns(&mut peers, local, self.load(local), now);
        }
        let small = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let waiting = small(local.waiting.len() - grants);
        let in_flight = small(local.in_flight + grants);
        let first = local.waiting.values().nth(grants).map(|call| call.since);
        let since = first.map(|first| self.view.place(first));
        let me = Peer {
            waiting,
            since,
            in_flight,
            seen: now,
            ..self.view.me
        };
        let is_news =
            self.log.unwritten_since.is_some() || first != self.view.written_first || grants > 0;
        let seen = self.view.version.filter(|_| is_news && !self.is_alone());
        let writes = seen.is_some();
        let mut cas = PendingCas {
            sent: now,
            events: self.log.len(),
            grants,
            me,
            first,
            peers,
            writes,
        };
        let request = match seen {
            Some(seen) => self.write(local, seen, &mut cas, slot, now),
            None => CasRequest {
                seen: 0,
                value: None,
                tell: Recipients::None,
            },
        };
        self.sync.pending = Some(cas);
        Some(request)
    }

    /// Returns the request that writes `cas` over version `seen`. `slot` is the slot before the
    /// turns that `cas` grants.
    fn write(
        &mut self,
        local: &mut LocalQueue,
        seen: u64,
        cas: &mut PendingCas,
        slot: Option<Instant>,
        now: Instant,
    ) -> CasRequest {
        let next = cas.peers.settle(&cas.me, slot, now);
        let tell = match next {
            _ if self.log.has_hold() => Recipients::All,
            Some(next) if next.id != cas.me.id => Recipients::One(next.address),
            _ => Recipients::None,
        };
        let value = self
            .view
            .value(&cas.me, &mut cas.peers, &mut local.pace_state, now);
        CasRequest {
            seen,
            value: Some(value),
            tell,
        }
    }
}

/// Responses and notifications of the store.
impl Sharing {
    /// Ends the compare-and-set under way, if there is one, with the store's response. Returns whether
    /// the store became unreachable or reachable.
    pub(super) fn cas_answered(
        &mut self,
        local: &mut LocalQueue,
        answer: Result<Register, StoreError>,
        now: Instant,
    ) -> Option<StoreChange> {
        let (cas, outage) = self.sync.end()?;
        let register = match answer {
            Ok(register) => register,
            Err(error) => return self.on_error(local, error, outage, now),
        };
        let change = outage.is_some().then_some(StoreChange::Back);
        if let Some(outage) = outage {
            self.on_back(local, &outage, now);
        }
        let round_trip = now.saturating_duration_since(cas.sent);
        self.view.measure(round_trip);
        if register.changed {
            self.on_written(local, cas, register.version, now);
        } else {
            if cas.writes && self.view.version != Some(register.version) {
                self.on_conflict(local, now);
            }
            let read_at = clock::before(now, round_trip / 2);
            self.adopt(local, &register, read_at, now);
        }
        if let Some(received) = self.received.take() {
            self.register_changed(local, received, now);
        }
        change
    }

    /// Begins an outage, or goes on with the `outage` that there is.
    ///
    /// The store may have written the compare-and-set in spite of the error. Then the other
    /// processes wait once for a turn that this process does not take.
    fn on_error(
        &mut self,
        local: &mut LocalQueue,
        error: StoreError,
        outage: Option<Outage>,
        now: Instant,
    ) -> Option<StoreChange> {
        if let Some(outage) = outage {
            self.sync.fail(outage, now);
            return None;
        }
        let before = local.pace_state.save(now);
        self.sync.fail(Outage::new(before), now);
        self.log.begin_outage(error.clone());
        local
            .pace_state
            .divide(self.view.process_count(), &mut local.dice, now);
        Some(StoreChange::Away(error))
    }

    /// Returns to the pace state from before the outage. The register may hold a later one, which
    /// is adopted next. A hold and a release of this process stay in force.
    fn on_back(&mut self, local: &mut LocalQueue, outage: &Outage, now: Instant) {
        let held_until = local.pace_state.held_until.filter(|until| *until > now);
        let releases = self.releases(local);
        local.pace_state.restore(&outage.before);
        if self.log.has_release() {
            local.pace_state.release();
        }
        if let Some(until) = held_until {
            local.pace_state.hold_until(until);
            self.log.push(FleetEvent::Hold { until, releases });
        }
    }

    /// Notes that the store has written `cas`, and so its grants.
    fn on_written(&mut self, local: &LocalQueue, cas: PendingCas, version: u64, now: Instant) {
        self.log.written(cas.events);
        self.granted += cas.grants;
        self.sync.written();
        let in_flight = local.in_flight + self.granted;
        let is_complete = self.log.len() == 0 && in_flight == cas.me.in_flight as usize;
        self.log.unwritten_since = (!is_complete).then_some(now);
        self.view.written(cas, version, now);
    }

    /// Counts a conflict, and rests if there were several in a row.
    fn on_conflict(&mut self, local: &mut LocalQueue, now: Instant) {
        let round_trip = self.view.round_trip;
        // Within this time each of the known processes would have had its turn.
        let all = round_trip
            .saturating_mul(self.view.process_count())
            .max(LONGEST_GATHERING);
        self.sync.conflicted(round_trip, all, &mut local.dice, now);
    }

    /// Takes the register that another process has written, unless it is out of date or the store
    /// is unreachable.
    pub(super) fn register_changed(
        &mut self,
        local: &mut LocalQueue,
        register: Register,
        now: Instant,
    ) {
        let version = Some(register.version);
        if self.sync.pending.is_some() {
            if version > self.received.as_ref().map(|received| received.version) {
                self.received = Some(register);
            }
        } else if self.view.version.is_some() && version > self.view.version && !self.is_alone() {
            self.adopt(local, &register, now, now);
        }
    }

    /// Takes over the register that another process has written, and applies the events of this
    /// process to it. If the register is empty or damaged, keeps what this process knows, its
    /// events included.
    fn adopt(
        &mut self,
        local: &mut LocalQueue,
        register: &Register,
        read_at: Instant,
        now: Instant,
    ) {
        if self
            .view
            .adopt(register, &mut local.pace_state, read_at, now)
        {
            let load = self.load(local);
            self.log
                .replay(&mut local.pace_state, load, &mut local.dice);
        }
    }
}
