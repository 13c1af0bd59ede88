//! The right to send one request.

use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::counting;
use super::engine::{self, Core};
use super::holds;
use super::in_flight_slot::InFlightSlot;
use super::outer::{CallId, UseOf};
use super::reservation::Reservation;
use super::sent::{More, PastWait, Sent};
use super::settlement::{Settlement, Unsettled};
use crate::clock::{self, Moment};
use crate::cost::Cost;
use crate::error::{Limited, StoreError};
use crate::key::Key;
use crate::signal::Signal;
use crate::stats::Outcome;

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it. A permit ends exactly once:
///
/// - [`answered`](Permit::answered) takes the response, so that a 429 puts the key on hold.
/// - [`give_back`](Permit::give_back) is for a request that was certainly not sent.
/// - If the permit is dropped, it counts as used, because the request may have left.
///
/// If calls in flight are limited ([`Quota::in_flight`](crate::Quota::in_flight)), the call is in
/// flight until its permit ends. Keep the permit until the response has arrived.
#[must_use = "a permit that is dropped counts as used"]
pub struct Permit {
    core: Arc<Core>,
    key: Key,
    /// `None` if the request costs nothing, or if rates are not limited.
    slot: Option<Reservation>,
    /// `None` if calls in flight are not limited, or could not be counted.
    in_flight_slot: Option<InFlightSlot>,
    /// `None` if the request did not wait.
    wait: Option<Box<PastWait>>,
    /// The permits of the other keys of a joint request.
    joint: Option<Box<Joint>>,
}

/// What a joint request has of each of its keys, in their order.
type OfKeys<T> = SmallVec<[Option<T>; 4]>;

/// What the permit of a joint request has besides that of its first key.
#[derive(Default)]
struct Joint {
    /// The key of the host, if it matters to the first key: see [`Entry::host`](super::entry::Entry::host).
    host: Option<Key>,
    others: Vec<JointPermit>,
    /// If other layers are around: the call of this layer, and when the first of their permits
    /// expires.
    inside: Option<(CallId, Option<Instant>)>,
    /// Set once the true cost of the request was stated.
    settlement: Option<Settlement>,
}

/// The permit of another key of a joint request.
pub(super) struct JointPermit {
    pub(super) permit: Permit,
    /// The key of the host, if it matters to this key.
    pub(super) host: Option<Key>,
}

impl Permit {
    #[inline]
    pub(super) fn new(
        core: Arc<Core>,
        key: Key,
        slot: Option<Reservation>,
        in_flight_slot: Option<InFlightSlot>,
    ) -> Self {
        Permit {
            core,
            key,
            slot,
            in_flight_slot,
            wait: None,
            joint: None,
        }
    }

    /// Returns whether the request leaves uncounted, because a store failed.
    pub(super) fn is_uncounted(&self) -> bool {
        self.wait.as_ref().is_some_and(|wait| wait.is_uncounted)
    }

    /// Returns how a request counts that leaves with this permit.
    pub(super) fn outcome(&self) -> Outcome {
        match &self.wait {
            Some(wait) if wait.is_uncounted => Outcome::Uncounted,
            Some(wait) if !wait.is_at_once => Outcome::Waited,
            _ => Outcome::Passed,
        }
    }

    /// Adds how the request waited.
    pub(super) fn after(self, wait: PastWait) -> Self {
        Permit {
            wait: Some(Box::new(wait)),
            ..self
        }
    }

    /// Adds the permits of the other keys of a joint request. `host` is the key of the host, if it
    /// matters to the first key.
    pub(super) fn with(self, host: Option<Key>, others: Vec<JointPermit>) -> Self {
        let joint = Joint {
            host,
            others,
            inside: None,
            settlement: None,
        };
        Permit {
            joint: Some(Box::new(joint)),
            ..self
        }
    }

    /// Makes this the permit of the call `call` of a layer that other layers are around. `until` is
    /// when the first of their permits expires.
    pub(super) fn inside(mut self, call: CallId, until: Option<Instant>) -> Self {
        self.joint.get_or_insert_default().inside = Some((call, until));
        self
    }

    /// Returns this permit and those of the other keys of a joint request.
    fn all(&self) -> impl Iterator<Item = &Permit> {
        let joint = self.joint.iter();
        let others = joint.flat_map(|joint| joint.others.iter().map(|other| &other.permit));
        std::iter::once(self).chain(others)
    }

    /// Returns the moment by which the request must have left, 10 to 50 ms after its slot. `None`
    /// if the request costs nothing, or if rates are not limited.
    ///
    /// If the permit is used later, the upstream may see more requests than its limit allows. Give
    /// the permit back and acquire another one.
    pub fn deadline(&self) -> Option<Instant> {
        self.all()
            .filter_map(|permit| permit.slot)
            .map(|slot| slot.until)
            .chain(self.inside_call().and_then(|(_, until)| until))
            .min()
    }

    fn inside_call(&self) -> Option<(CallId, Option<Instant>)> {
        self.joint.as_ref()?.inside
    }

    /// Returns whether the request may still be sent: whether the deadline has not passed.
    pub fn is_valid(&self) -> bool {
        self.deadline().is_none_or(|until| clock::now() < until)
    }

    /// States what the request cost, if that is not the cost of the permit: a number of requests, or a
    /// [`Cost`] with other units.
    ///
    /// The request was sent then: a permit that is settled cannot be given back.
    /// [`Settlement::settle`] describes what happens to the difference. Build the layer with
    /// [`settle_by_hand`](crate::RateLimitBuilder::settle_by_hand): otherwise little of what comes
    /// back is used, because requests that wait have booked their slots already.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RateLimitLayer::builder(Quota::per_minute(80_000)).settle_by_hand().build()?;
    /// let limiter = layer.limiter();
    /// let mut permit = limiter.acquire(Key::ALL).cost(4000).await?;
    /// // ... send the request, and read from the response what it cost ...
    /// permit.settle(300);
    /// drop(permit);
    /// assert_eq!(limiter.peek(Key::ALL).await?.limits[0].used, 300);
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle(&mut self, actual: impl Into<Cost>) {
        let known = self.joint.as_ref();
        let known = known.and_then(|joint| joint.settlement.clone());
        let settlement = known.unwrap_or_else(|| {
            let unsettled =
                |permit: &Permit| Unsettled::new(permit.core.id, permit.key, permit.slot.as_ref());
            Settlement::new(self.all().map(unsettled))
        });
        settlement.settle(actual);
        self.joint.get_or_insert_default().settlement = Some(settlement);
    }

    /// Waits until this call must be cancelled, and returns the reason.
    ///
    /// A call must be cancelled if this process has lost contact with the store for longer than
    /// [`in_flight_ttl`](crate::RateLimitBuilder::in_flight_ttl). The store may then have granted
    /// the call's in-flight slot to another process.
    ///
    /// The future is never ready if calls in flight are not limited, if they are counted in memory,
    /// or with [`OnStoreError::FailOpen`](crate::OnStoreError::FailOpen).
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn revoked(&self) -> StoreError {
        poll_fn(|cx| {
            let mut slots = self
                .all()
                .filter_map(|permit| permit.in_flight_slot.as_ref());
            let lost = slots.find_map(|slot| match slot.poll_lost(cx) {
                Poll::Ready(lost) => Some(lost),
                Poll::Pending => None,
            });
            lost.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Returns how long the request waited for this permit.
    pub fn waited(&self) -> Duration {
        self.wait
            .as_ref()
            .map_or(Duration::ZERO, |wait| wait.waited)
    }

    /// Ends the permit of a request that was sent, with what the response states about limits.
    ///
    /// A refusal puts the key on [hold](crate::RateLimitBuilder::max_hold). Returns
    /// [`Limited::Upstream`] if the response is a refusal, for callers that want an error; else
    /// `None`.
    #[inline]
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.sent().answered(signal, None).1
    }

    /// Marks the request as sent.
    pub(crate) fn sent(self) -> Sent {
        let Permit {
            core,
            key,
            slot,
            in_flight_slot,
            wait,
            joint,
        } = self;
        let (cost, at) = slot.map_or_else(|| (0, clock::now()), |slot| (slot.cost, slot.at));
        let at = Moment::of(at);
        let use_of = UseOf {
            call: joint
                .as_ref()
                .and_then(|joint| joint.inside)
                .map(|(call, _)| call),
            by: None,
        };
        let has_inner = core.has_inner();
        let slot = slot.filter(|_| engine::are_several() || core.settings.settles);
        let past_host = wait.as_ref().and_then(|wait| wait.host);
        let host = joint.as_ref().map_or(past_host, |joint| joint.host);
        let joint = joint.map(|joint| joint.others).unwrap_or_default();
        let is_plain = in_flight_slot.is_none()
            && wait.is_none()
            && joint.is_empty()
            && !has_inner
            && slot.is_none()
            && use_of == UseOf::default();
        let more = (!is_plain).then(|| {
            let mut more = More::empty();
            more.joint.extend(joint.into_iter().map(JointPermit::sent));
            *more = More {
                in_flight_slot,
                wait,
                joint: mem::take(&mut more.joint),
                has_inner,
                slot,
                use_of,
            };
            more
        });
        Sent {
            core: core.id,
            cost,
            key,
            host,
            at,
            more,
        }
    }

    /// Takes the permit apart: its slot, and its in-flight slot.
    pub(super) fn into_parts(self) -> (Option<Reservation>, Option<InFlightSlot>) {
        (self.slot, self.in_flight_slot)
    }

    /// Ends the permit of a request that was certainly not sent. Its slot goes to the next waiter,
    /// or else back to the store.
    pub fn give_back(mut self) {
        let joint = self.joint.take().unwrap_or_default();
        if joint.settlement.is_some() {
            return;
        }
        let host = joint
            .host
            .or_else(|| self.wait.as_ref().and_then(|wait| wait.host));
        let first = JointPermit { permit: self, host };
        for JointPermit { permit, host } in std::iter::once(first).chain(joint.others) {
            holds::host_probe_not_sent(&permit.core, permit.key, host);
            counting::give_back_units(&permit.core, permit.slot.as_ref());
            holds::not_sent(&permit.core, permit.key, permit.slot);
        }
    }

    /// Takes the permit of a joint request apart: the slots of all keys, and their in-flight slots.
    pub(super) fn into_joint_parts(mut self) -> (OfKeys<Reservation>, OfKeys<InFlightSlot>) {
        let joint = self.joint.take();
        let others = joint.map(|joint| joint.others).unwrap_or_default();
        let others = others.into_iter().map(|other| other.permit);
        let all = std::iter::once(self).chain(others);
        all.map(Permit::into_parts).unzip()
    }
}

impl JointPermit {
    /// Marks the request as sent.
    fn sent(self) -> Sent {
        let JointPermit { permit, host } = self;
        Sent {
            host,
            ..permit.sent()
        }
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit")
            .field("key", &self.key)
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}
