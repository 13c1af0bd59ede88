//! A store whose processes go on with a fallback share of the limit while it cannot be reached.
//!
//! ```text
//!  together ──> the store fails: alone ──> it answers again: back ──> 2.5 s later: together
//! ```
//!
//! *Together*, the process notes what the store grants. *Alone*, it has a ledger of its own with its share of every limit, in which
//! the noted grants count. *Back*, it charges the store with what it used alone, each unit once and with its age, and asks the
//! store for no more than its share. After 2.5 s all processes have done so, and the limit is shared again.
//!
//! A charge is never repeated: before the first one, a call that books nothing finds out whether the store answers.
//!
//! Calls in flight have no shares: while the store cannot be reached, none is granted.

mod history;
mod standalone;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::SmallVec;

use super::memory::usage;
use super::{
    ClientSession, Demand, Grant, Grants, Lease, LeaseRequest, LimitSpec, OwnedLeaseRequest, Source, Store,
    StoreError, StoreReply, UnusedPermits, Usage, label, spawn,
};
use crate::clock;
use crate::events;
use crate::key::Key;
use crate::key_map::KeyMap;
use crate::limit::Micros;
use history::GrantHistory;
use standalone::{Stage, StandaloneLedger};

/// A share of a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    pub(super) part: u64,
    pub(super) of: u64,
}

impl Share {
    const WHOLE: u64 = 1_000_000_000;

    /// Makes a share of more than nothing and at most all.
    pub(crate) fn new(share: f64) -> Option<Self> {
        let part = (share * Share::WHOLE as f64).round();
        // NaN is in no range.
        (1.0..=Share::WHOLE as f64).contains(&part).then_some(Share { part: part as u64, of: Share::WHOLE })
    }
}

/// A store with a fallback.
pub(crate) struct FallbackStore(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    /// The share of a process that was granted nothing lately.
    share: Option<Share>,
    histories: KeyMap<GrantHistory>,
    /// Whether a task charges the store for keys that no request asks for.
    is_charging: AtomicBool,
}

impl FallbackStore {
    pub(crate) fn new(store: Arc<dyn Store>, share: Option<Share>, max_keys: usize) -> Self {
        FallbackStore(Arc::new(Inner {
            store,
            share,
            histories: KeyMap::new(max_keys),
            is_charging: AtomicBool::new(false),
        }))
    }
}

/// Returns the needs that a lease grants.
fn needs_of(lease: &Lease) -> SmallVec<[Demand; 2]> {
    let mut demands: SmallVec<[Demand; 2]> = SmallVec::new();
    for grant in lease.grants.iter() {
        match demands.last_mut() {
            Some(demand) if demand.cost == grant.cost => demand.count += grant.count,
            _ => demands.push(Demand { cost: grant.cost, count: grant.count }),
        }
    }
    demands
}

/// Returns what the store granted, no earlier than it was planned.
fn no_earlier(granted: &[Grant], plan: &[Grant]) -> Grants {
    let mut planned: VecDeque<Grant> = plan.iter().copied().collect();
    let mut grants = Grants::default();
    for &grant in granted {
        let mut left = grant.count;
        while left > 0 {
            let (count, from) = match planned.front_mut() {
                Some(first) if first.count > left => {
                    first.count -= left;
                    (left, first.wait)
                }
                Some(_) => {
                    planned.pop_front().map_or((left, Duration::ZERO), |first| (first.count, first.wait))
                }
                None => (left, Duration::ZERO),
            };
            left -= count;
            let until = grant.wait.saturating_add(grant.validity);
            let wait = grant.wait.max(from);
            grants.push(Grant { count, wait, validity: until.saturating_sub(wait), ..grant });
        }
    }
    grants
}

/// Returns whether the process goes on alone after `error`.
fn is_away(error: &StoreError) -> bool {
    !matches!(error, StoreError::Full { .. } | StoreError::Unsupported(_))
}

impl Inner {
    /// Takes in an answer to a call of a process that shares the limit.
    fn answered(
        self: &Arc<Self>,
        asked: &OwnedLeaseRequest,
        answer: Result<Lease, StoreError>,
    ) -> Result<Lease, StoreError> {
        let now = clock::now();
        match answer {
            Ok(lease) => {
                let note = |kept: &mut GrantHistory| kept.record(&lease, &asked.spec, asked.at, now);
                // Without room for one more key, nothing is known of it.
                let _ = self.histories.enter(
                    asked.key,
                    clock::micros(now),
                    GrantHistory::default,
                    |_, _| (),
                    note,
                );
                Ok(lease)
            }
            Err(error) if is_away(&error) => {
                let part = |kept: &mut GrantHistory| {
                    let alone = kept.part(asked, now, self.share)?;
                    events::alone(&label(&*self.store, asked.key, None), alone.spec.quota(), &error);
                    let plan = alone.book(&asked.request(&asked.demands), now);
                    Some(plan.map(|plan| alone.grant(plan, now, None)))
                };
                let lease = self
                    .histories
                    .enter(asked.key, clock::micros(now), GrantHistory::default, |_, _| (), part)
                    .ok();
                let lease = lease.flatten();
                if lease.is_some() {
                    self.keep_charging();
                }
                lease.unwrap_or(Err(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Asks for permits while the process is alone. `is_back` states whether the store answered the last call.
    async fn ask_alone(
        self: &Arc<Self>,
        mut asked: OwnedLeaseRequest,
        is_back: bool,
    ) -> Result<Lease, StoreError> {
        let word = match is_back {
            true => None,
            false => match self.probe(&asked).await {
                Ok(word) => Some(word),
                Err(error) if is_away(&error) => None,
                Err(error) => return Err(error),
            },
        };
        let now = clock::now();
        let stage = self.histories.find(asked.key, |kept| {
            let alone = kept.alone()?;
            if !is_back && word.as_ref().is_none_or(|word| word.recovering.is_some()) {
                let plan = alone.book(&asked.request(&asked.demands), now);
                return Some((Stage::Alone, plan.map(|plan| alone.grant(plan, now, word.as_ref()))));
            }
            let stage = alone.back(now);
            asked.charges = alone.take_charges(now);
            Some(match stage {
                Stage::Together => {
                    kept.join();
                    events::together(&label(&*self.store, asked.key, None));
                    (stage, Ok(Lease::default()))
                }
                stage => (stage, alone.book(&asked.request(&asked.demands), now)),
            })
        });
        let (stage, plan) = match stage.flatten() {
            Some((stage, plan)) => (stage, plan?),
            None => (Stage::Together, Lease::default()),
        };
        if stage == Stage::Alone {
            return Ok(plan);
        }
        if let Some(Lease { incarnation, writes, now: seen, .. }) = word {
            let trip = now.saturating_duration_since(asked.at);
            asked.memory =
                ClientSession { incarnation, writes, seen, since: Duration::ZERO, trip, ..asked.memory };
        }
        asked.returns.clear();
        asked.at = now;
        if stage == Stage::Back {
            asked.prefetch = 0;
            asked.demands = needs_of(&plan);
            // The store may have room earlier than the share.
            let last = plan.grants.iter().map(|grant| grant.wait).max().unwrap_or_default();
            asked.life = asked.life.saturating_add(last);
        }
        let answer = self.store.lease(asked.request(&asked.demands)).arrives().await;
        if stage == Stage::Back
            && let Err(error) = &answer
            && is_away(error)
        {
            let now = clock::now();
            let grant = |kept: &mut GrantHistory| Some(kept.alone()?.gone_again(plan, now));
            return self.histories.find(asked.key, grant).flatten().ok_or(StoreError::Lost);
        }
        let mut lease = self.answered(&asked, answer)?;
        if stage == Stage::Back {
            lease.grants = no_earlier(&lease.grants, &plan.grants);
        }
        Ok(Lease { refused: lease.refused.or(plan.refused), ..lease })
    }

    /// Calls the store without needs, to find out whether it answers and knows its state.
    fn probe(&self, asked: &OwnedLeaseRequest) -> impl Future<Output = Result<Lease, StoreError>> + use<> {
        let probe = LeaseRequest { prefetch: 0, remaining: None, returns: &[], ..asked.request(&[]) };
        self.store.lease(probe).arrives()
    }

    /// Starts the task that charges the store for keys that no request asks for. Other processes rely on it that the store is charged
    /// soon after it answers again.
    fn keep_charging(self: &Arc<Self>) {
        if self.is_charging.swap(true, Ordering::Relaxed) {
            return;
        }
        let keeper = Keeper(Arc::downgrade(self));
        spawn(&*self.store, async move {
            loop {
                clock::sleep_until(clock::after(clock::now(), OFTEN)).await;
                let Some(inner) = keeper.0.upgrade() else { return };
                if inner.charge_quiet_keys().await == 0 {
                    return;
                }
            }
        });
    }

    /// Charges the store for keys that no request asks for. Returns how many keys are alone.
    async fn charge_quiet_keys(&self) -> usize {
        let now = clock::micros(clock::now());
        let (mut alone, mut quiet) = (0, Vec::new());
        self.histories.for_each(|key, kept| {
            alone += usize::from(kept.alone().is_some());
            quiet.extend(kept.alone().and_then(|alone| alone.call_in_its_place(key, now)));
        });
        for (mut asked, is_back) in quiet {
            if !is_back {
                let Ok(word) = self.probe(&asked).await else { continue };
                if word.recovering.is_some() {
                    continue;
                }
            }
            let charges = |kept: &mut GrantHistory| Some(kept.alone()?.take_charges(clock::now()));
            let Some(charges) = self.histories.find(asked.key, charges).flatten() else { continue };
            asked.charges = charges;
            let answer = self.store.lease(asked.request(&[])).arrives().await;
            let charged = |kept: &mut GrantHistory| {
                // If permits lie ahead, the key joins when the limiter asks: it gives them up then.
                let joins = |alone: &mut StandaloneLedger| alone.charged(answer.is_ok(), clock::now());
                if kept.alone().is_some_and(joins) {
                    kept.join();
                    events::together(&label(&*self.store, asked.key, None));
                }
            };
            self.histories.find(asked.key, charged);
        }
        alone
    }

    /// Takes back permits where they were granted.
    fn take_back(&self, key: Key, unused: &[UnusedPermits]) {
        let now = clock::micros(clock::now());
        self.histories.find(key, |kept| unused.iter().for_each(|unused| kept.take_back(*unused, now)));
    }
}

impl Store for FallbackStore {
    crate::delegate_store!(self => *self.0.store; implements lease, give_back, peek);

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let inner = &self.0;
        let mut asked = OwnedLeaseRequest::new(&request);
        asked.returns.retain(|unused| !Source::granted_standalone(unused));
        if !request.returns.is_empty() {
            inner.take_back(request.key, request.returns);
        }
        let asks =
            |kept: &mut GrantHistory| Some(kept.alone()?.asks(request.session, clock::micros(asked.at)));
        if let Some(is_back) = inner.histories.find(request.key, asks).flatten() {
            let inner = inner.clone();
            return StoreReply::Pending(Box::pin(async move { inner.ask_alone(asked, is_back).await }));
        }
        match inner.store.lease(asked.request(&asked.demands)) {
            StoreReply::Ready(answer) => StoreReply::Ready(inner.answered(&asked, answer)),
            StoreReply::Pending(answer) => {
                let inner = inner.clone();
                StoreReply::Pending(Box::pin(async move { inner.answered(&asked, answer.await) }))
            }
        }
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.0.take_back(key, unused);
        let of_store = unused.iter().filter(|unused| !Source::granted_standalone(unused));
        let of_store: SmallVec<[UnusedPermits; 4]> = of_store.copied().collect();
        if !of_store.is_empty() {
            self.0.store.give_back(key, spec, &of_store);
        }
    }

    fn peek(&self, key: Key, spec: &Arc<LimitSpec>) -> StoreReply<Usage> {
        let (inner, answer) = (self.0.clone(), self.0.store.peek(key, spec));
        let own = move |error| {
            let look =
                |alone: &mut StandaloneLedger| Usage { degraded: true, ..alone.look(clock::now(), usage) };
            inner.histories.find(key, |kept| kept.alone().map(look)).flatten().ok_or(error)
        };
        match answer {
            StoreReply::Ready(usage) => StoreReply::Ready(usage.or_else(own)),
            StoreReply::Pending(usage) => {
                StoreReply::Pending(Box::pin(async move { usage.await.or_else(own) }))
            }
        }
    }
}

/// The task that charges the store. When it ends, a new one may start.
struct Keeper(Weak<Inner>);

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.is_charging.store(false, Ordering::Relaxed);
        }
    }
}

/// How often the task calls the store for a key that no request asks for, while it fails; jittered.
const LOOK: Duration = Duration::from_millis(1000);

/// How often it charges the store once that answers.
const OFTEN: Duration = Duration::from_millis(100);

/// How long a process uses its share only after the store answers again. The other processes call the store once a second.
const OTHERS: Micros = 2_500_000;
