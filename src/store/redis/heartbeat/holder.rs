//! One holder: a limiter of this process with calls of one key in flight, or with waiters for a
//! slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::clock;
use crate::rng::{Backoff, jittered};
use crate::store::event::notify;
use crate::store::redis::codec::{ClaimReply, HolderState};
use crate::store::{Claim, ClientSession, StoreEvent, StoreListener, StoreSession};

/// How many claims this process has sent. Each has its place in that order as its number in Redis, also if it repeats
/// another one: so numbers grow for each holder, and do not run out.
static SENT: AtomicU64 = AtomicU64::new(0);

/// How often waiters poll if this process cannot be notified of slots; jittered.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long a claim that failed may be on its way. It may have been sent on a connection that broke.
const LATEST_ARRIVAL: Duration = Duration::from_secs(2);

/// Added to the time until something expires in Redis, so that it has expired when the claim
/// arrives.
const EXPIRY_MARGIN: Duration = Duration::from_millis(2);

/// A holder and its last claim.
pub(super) struct Holder {
    /// The name of the state in Redis.
    pub(super) name: Arc<str>,
    /// The last claim of the limiter.
    pub(super) claim: Claim,
    /// The limiter, which is notified.
    listener: Arc<dyn StoreListener>,
    /// The number in Redis of the last claim, when it was sent first. `None` if it was not sent yet.
    pub(super) first_number: Option<u64>,
    /// The claim that has no reply yet, and when it was sent.
    pub(super) pending: Option<(Instant, Claim)>,
    /// The session with the key, by the last reply. Messages advance its number of writes.
    pub(super) session: Option<StoreSession>,
    /// Until when the last confirmed claim is valid.
    pub(super) valid_until: Option<Instant>,
    /// Until when a claim that failed may arrive, and take slots for its whole time to live.
    late_until: Option<Instant>,
    /// Whether the limiter was notified that its last confirmed claim has expired.
    has_expired: bool,
    /// The pauses between attempts. Set if the last attempt failed.
    pub(super) backoff: Option<Backoff>,
    /// The number of the last claim that has a reply.
    pub(super) confirmed: u64,
    /// A message about a state that no reply has described yet. It may have been published after
    /// the reply and received before it.
    early: Option<HolderState>,
    /// How many events about slots the limiter was sent.
    events: u64,
    /// When the holder is due next.
    pub(super) timer: Option<Instant>,
}

impl Holder {
    /// Makes a holder without a claim. `session` is what this process remembers of the key.
    pub(super) fn new(
        name: Arc<str>,
        listener: Arc<dyn StoreListener>,
        session: Option<StoreSession>,
    ) -> Self {
        Holder {
            name,
            claim: Claim::NONE,
            listener,
            first_number: None,
            pending: None,
            session,
            valid_until: None,
            late_until: None,
            has_expired: false,
            backoff: None,
            confirmed: 0,
            early: None,
            events: 0,
            timer: None,
        }
    }

    /// Returns the number in Redis of the next attempt to send the last claim.
    pub(super) fn next_number(&mut self) -> u64 {
        let number = SENT.fetch_add(1, Ordering::Relaxed) + 1;
        self.first_number.get_or_insert(number);
        number
    }

    /// Returns the session that the next claim states, if the session is still of use.
    pub(super) fn client_session(&self, now: Instant) -> ClientSession {
        let session = self.session.as_ref();
        let known = session.and_then(|session| session.client_session(now));
        known.unwrap_or_default()
    }

    /// Takes in the reply to a claim that was sent at `sent`. Returns after how long the claim is
    /// repeated.
    pub(super) fn on_reply(
        &mut self,
        sent: Instant,
        claim: Claim,
        reply: &ClaimReply,
        now: Instant,
        is_subscribed: bool,
    ) -> Duration {
        let valid_until = clock::after(sent, claim.ttl);
        self.valid_until = Some(valid_until);
        self.has_expired = false;
        self.notify(StoreEvent::ClaimValidUntil(valid_until));
        let replied = reply.state;
        // A message that was published after the reply may have been received before it.
        let newest = match self.early.take() {
            Some(early)
                if early.incarnation == replied.incarnation && early.changes > replied.changes =>
            {
                early
            }
            _ => replied,
        };
        let known = match self.session {
            Some(session) if session.incarnation == replied.incarnation => session.writes,
            _ => 0,
        };
        self.backoff = None;
        self.confirmed = claim.number;
        self.session = Some(StoreSession::new(
            replied.incarnation,
            known.max(newest.changes),
            reply.now,
            sent,
            now,
            clock::after(now, claim.ttl),
        ));
        if known <= newest.changes {
            self.adopt(newest);
        }
        self.repeat_after(claim.ttl, reply, is_subscribed)
    }

    /// Returns after how long a claim is repeated: after a third of its time to live, or earlier if
    /// waiters may get slots earlier.
    fn repeat_after(&self, ttl: Duration, reply: &ClaimReply, is_subscribed: bool) -> Duration {
        let third = ttl / 3;
        if self.claim.wanted == 0 {
            return third;
        }
        let first_expiry = reply.first_expiry.map(|span| span + EXPIRY_MARGIN);
        let recovered = (!reply.recovering.is_zero()).then(|| reply.recovering + EXPIRY_MARGIN);
        let poll = (!is_subscribed || reply.publish_failed).then(|| jittered(POLL_INTERVAL));
        [first_expiry, recovered, poll]
            .into_iter()
            .flatten()
            .fold(third, Duration::min)
    }

    /// Takes in a message about this holder. A message about a state that no reply described is
    /// kept until the next reply.
    pub(super) fn on_message(&mut self, state: HolderState) {
        match &mut self.session {
            Some(session) if session.incarnation == state.incarnation => {
                if session.writes < state.changes {
                    session.writes = state.changes;
                    self.adopt(state);
                }
            }
            _ => self.early = Some(state),
        }
    }

    /// Adopts the state of the holder in Redis, and notifies the limiter of it.
    fn adopt(&mut self, state: HolderState) {
        self.events += 1;
        let HolderState {
            number,
            granted,
            others_wait,
            ..
        } = state;
        let is_of_last = self.first_number.is_some_and(|first| number >= first);
        let claim = &mut self.claim;
        // No claim of a limiter has the number 0.
        let number = if is_of_last { claim.number } else { 0 };
        if is_of_last {
            // A repeated claim is the whole state, because a server that lost its state does not
            // know what it granted.
            let more = granted.saturating_sub(claim.granted_seen);
            let slots = u32::try_from(more).unwrap_or(u32::MAX);
            claim.granted_seen += more;
            claim.in_use = claim.in_use.saturating_add(slots);
            claim.wanted = claim.wanted.saturating_sub(slots);
        }
        let event = StoreEvent::in_flight(number, granted, others_wait, self.events);
        self.notify(event);
    }

    /// Notifies the limiter of an event.
    pub(super) fn notify(&self, event: StoreEvent) {
        notify(
            self.listener.clone(),
            self.claim.key,
            self.claim.holder,
            event,
        );
    }

    /// Returns whether no claim is pending, and the store has confirmed it if the holder leaves.
    pub(super) fn is_settled(&self) -> bool {
        self.pending.is_none() && (!self.claim.is_over() || self.confirmed == self.claim.number)
    }

    /// Takes in that a claim has failed. One that uses or wants slots may still arrive.
    pub(super) fn on_error(&mut self, claim: &Claim, now: Instant) {
        self.notify_if_expired(now);
        if !claim.is_over() {
            self.late_until = Some(clock::after(now, LATEST_ARRIVAL));
        }
    }

    /// Returns until when an earlier claim may arrive after the one that leaves. The holder then leaves once more.
    pub(super) fn late_until(&self, now: Instant) -> Option<Instant> {
        self.late_until.filter(|until| *until > now)
    }

    /// Returns when slots in use lose their claim, if the limiter was not notified of that yet.
    pub(super) fn expires_at(&self) -> Option<Instant> {
        self.valid_until
            .filter(|_| !self.has_expired && self.claim.in_use > 0)
    }

    /// Takes in that the machine has slept: what counts in Redis went on.
    pub(super) fn wake(&mut self, slept: Duration, now: Instant) {
        let sent = self.pending.as_mut().map(|(sent, _)| sent);
        for moment in self.valid_until.iter_mut().chain(sent) {
            *moment = clock::before(*moment, slept);
        }
        self.notify_if_expired(now);
    }

    /// Notifies the limiter, once, if slots in use have lost their claim.
    pub(super) fn notify_if_expired(&mut self, now: Instant) {
        if self.expires_at().is_some_and(|expires| expires <= now) {
            self.has_expired = true;
            self.notify(StoreEvent::ClaimExpired);
        }
    }
}
