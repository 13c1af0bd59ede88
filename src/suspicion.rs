//! Whether a refusal is about the key, or about one kind of its requests.
//!
//! A server may refuse some requests always, whatever the limits are: those that name a model which was retired, or an
//! endpoint with a limit of its own. If each of these refusals held the key, all other requests would wait for
//! nothing. So a key is under *suspicion* from its first refusal on: the refusals and the accepted requests are counted by
//! [kind](crate::RateLimitBuilder::kind). The first refusal holds the key, as if it were about all requests. It is about its
//! kind alone if, since the first refusal of that kind, [`ENOUGH`] requests of other kinds were accepted and none of
//! its own.
//!
//! What speaks against that, and what is done about it:
//!
//! - A limit of all requests refuses whichever comes next. After a hold it accepts requests of this kind, too. So an
//!   accepted request of a kind clears it.
//! - Requests of several kinds that leave at once are refused at once. So refusals that arrive while the key is on hold
//!   are the key's.
//! - A process may see one kind alone. That another process had a request accepted, it learns from the end of the hold.
//! - A kind may be about a limit of its own that ends. Its hold ends as that of a key does: one request goes first.
//!
//! A server gains nothing by this: to hold one kind takes as many refusals as to hold the key, and stops less. What leaves
//! in spite of a refusal is within the quota.
//!
//! A kind is not held at its first refusal, even if others were accepted lately: when a limit of all requests is reached, each
//! of 15 kinds would be refused once, instead of one.

use std::time::{Duration, Instant};

use crate::clock;
use crate::key::Key;
use crate::uncertain::{LatestMoment, UNCERTAIN_UNTIL};

/// So many requests of other kinds have to be accepted.
const ENOUGH: u32 = 3;

/// For how long after its last refusal a key is under suspicion.
const SUSPECTED: Duration = Duration::from_secs(60);

/// The same for a key of which one kind was found to be refused alone: it comes back once a minute at most.
const SUSPECTED_KIND: Duration = Duration::from_secs(600);

/// What follows a longer hold has another cause: an operator may hold a key for months.
const LONGEST_HOLD: Duration = Duration::from_secs(3600);

/// The most kinds that are counted. A key with more is that of a server that refuses most requests, or the kinds are too
/// fine: then the refusals are the key's.
const MOST_KINDS: usize = 8;

/// The most requests for which the store is asked whether another process holds their kind.
const MOST_ASKED: u32 = 64;

/// Until when any key of the process may be under suspicion.
static SUSPECTED_UNTIL: LatestMoment = LatestMoment::new();

/// Returns whether kinds of requests are told apart, because a key of this process may be under suspicion.
#[inline]
pub(crate) fn is_any_suspected() -> bool {
    SUSPECTED_UNTIL.is_ahead()
}

/// Which kinds of requests of a key are refused, and which are accepted.
#[derive(Debug)]
pub(crate) struct Suspicion {
    /// When the last request was refused.
    last: Instant,
    /// A refusal whose kind is not known, because the request was sent before the suspicion.
    unknown: Option<Unknown>,
    refused: Vec<RefusedKind>,
    /// For how many requests the store was asked whether another process holds their kind.
    asked: u32,
}

/// A refusal of a kind that is not known. It counts as the first one of the next kind that is refused.
#[derive(Debug)]
struct Unknown {
    since: Instant,
    /// The kinds that were accepted since: it was none of them. `None` if they are too many.
    accepted: Option<Vec<Key>>,
    count: u32,
}

/// A kind of which a request was refused, and none accepted since.
#[derive(Debug)]
struct RefusedKind {
    kind: Key,
    since: Instant,
    last: Instant,
    /// How many requests of other kinds were accepted since.
    others: u32,
    /// Whether its refusals are its own.
    is_alone: bool,
}

impl Suspicion {
    pub(crate) fn new(now: Instant) -> Self {
        let suspicion = Suspicion {
            last: now,
            unknown: None,
            refused: Vec::new(),
            asked: 0,
        };
        suspicion.note(now);
        suspicion
    }

    /// Notes that the key, or a kind, is on hold until `end`: what happens after that is still about this refusal.
    pub(crate) fn lasts_beyond(&mut self, end: Instant) {
        let now = clock::now();
        self.last = self.last.max(end.min(clock::after(now, LONGEST_HOLD)));
        self.note(now);
    }

    /// Keeps requests and responses of this process from the fast path until the suspicion ends.
    fn note(&self, now: Instant) {
        SUSPECTED_UNTIL.note(self.ends_at(), now);
        UNCERTAIN_UNTIL.note(self.ends_at(), now);
    }

    /// Returns whether one more kind may be asked about at the store.
    pub(crate) fn may_ask(&mut self) -> bool {
        self.asked += 1;
        self.asked <= MOST_ASKED
    }

    /// Returns when it ends, if no request is refused.
    pub(crate) fn ends_at(&self) -> Instant {
        let is_any_alone = self.refused.iter().any(|refused| refused.is_alone);
        let span = if is_any_alone {
            SUSPECTED_KIND
        } else {
            SUSPECTED
        };
        clock::after(self.last, span)
    }

    /// Takes in the refusal of a request of `kind`, if that is known. The key may be on hold. Returns whether the refusal is
    /// about its kind alone.
    pub(crate) fn refused(&mut self, kind: Option<Key>, is_held: bool, now: Instant) -> bool {
        self.lasts_beyond(now);
        let Some(kind) = kind else {
            self.unknown = Some(Unknown {
                since: now,
                accepted: Some(Vec::new()),
                count: 0,
            });
            return false;
        };
        let known = self.refused.iter().position(|refused| refused.kind == kind);
        let Some(index) = known.or_else(|| self.begin(kind, now)) else {
            return false;
        };
        let refused = &mut self.refused[index];
        refused.last = now;
        // During a hold it says no more than the refusal that holds the key.
        refused.is_alone |= !is_held && refused.others >= ENOUGH;
        refused.is_alone
    }

    /// Begins to count a kind. Returns its index, or `None` if there are too many.
    fn begin(&mut self, kind: Key, now: Instant) -> Option<usize> {
        self.refused
            .retain(|refused| clock::after(refused.last, SUSPECTED_KIND) > now);
        if self.refused.len() >= MOST_KINDS {
            return None;
        }
        let first = self.unknown.take_if(|unknown| {
            let accepted = unknown.accepted.as_ref();
            accepted.is_some_and(|accepted| !accepted.contains(&kind))
        });
        let (since, others) = first.map_or((now, 0), |first| (first.since, first.count));
        self.refused.push(RefusedKind {
            kind,
            since,
            last: now,
            others,
            is_alone: false,
        });
        Some(self.refused.len() - 1)
    }

    /// Takes in that a request of `kind` was accepted, which was sent at `sent`.
    pub(crate) fn accepted(&mut self, kind: Key, sent: Instant) {
        self.refused
            .retain(|refused| refused.kind != kind || sent < refused.last);
        for refused in &mut self.refused {
            if refused.kind != kind && sent >= refused.since {
                refused.others = refused.others.saturating_add(1);
            }
        }
        if let Some(unknown) = self
            .unknown
            .as_mut()
            .filter(|unknown| sent >= unknown.since)
        {
            unknown.count = unknown.count.saturating_add(1);
            if let Some(accepted) = unknown.accepted.as_mut().filter(|all| !all.contains(&kind)) {
                match accepted.len() < MOST_KINDS {
                    true => accepted.push(kind),
                    false => unknown.accepted = None,
                }
            }
        }
    }

    /// Takes in that another process that shares the store has had a request accepted, whose kind is not
    /// known. It counts as [`ENOUGH`], because this process may send one kind alone. If all processes send one
    /// kind, a limit of all requests may hold the kind and not the key: that is the same for them. Tried: to count it as one
    /// request. Then a process that sends nothing but poison holds the key ten times as long.
    pub(crate) fn accepted_elsewhere(&mut self) {
        for refused in &mut self.refused {
            refused.others = refused.others.saturating_add(ENOUGH);
        }
        if let Some(unknown) = &mut self.unknown {
            unknown.count = unknown.count.saturating_add(ENOUGH);
        }
    }

    /// Returns whether the upstream refuses each kind alone of which a request was refused.
    pub(crate) fn are_all_alone(&self) -> bool {
        self.unknown.is_none() && self.refused.iter().all(|refused| refused.is_alone)
    }

    /// Returns the kinds that the upstream refuses alone.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Key> {
        let alone = self.refused.iter().filter(|refused| refused.is_alone);
        alone.map(|refused| refused.kind)
    }
}
