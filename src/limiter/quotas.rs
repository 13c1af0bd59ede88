//! The quotas that requests state for their keys.
//!
//! A limiter has one quota for all keys, unless requests state others
//! ([`quota`](crate::RateLimitBuilder::quota)). Each different quota is checked once and gets a number.
//! A request carries the number, and the state of its key is compared with it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use crate::config_error::ConfigError;
use crate::limit::LimitSpec;
use crate::locks::{read, write};
use crate::quota::{Division, Quota, Slacks};

/// Identifies a quota of one limiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuotaId(u32);

impl QuotaId {
    /// The request states no quota: that of its key applies.
    pub(crate) const NONE: QuotaId = QuotaId(0);

    /// The quota of the builder.
    pub(crate) const CONFIGURED: QuotaId = QuotaId(1);

    const FIRST: u32 = 2;
}

/// How late the upstream counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CountedLate {
    pub(crate) within: Duration,
    /// The only unit that is counted late. `None` if all are.
    pub(crate) unit: Option<&'static str>,
}

impl CountedLate {
    /// Returns how late the unit of `quota` is counted, which counts one unit.
    fn within(&self, quota: &Quota) -> Duration {
        match self.unit {
            Some(unit) if quota.unit() != Some(unit) => Duration::ZERO,
            _ => self.within,
        }
    }
}

/// The quotas of one limiter.
#[derive(Debug)]
pub(crate) struct Quotas {
    configured: Quota,
    /// How each quota is divided among classes, if it is.
    division: Option<Division>,
    slacks: Slacks,
    late: CountedLate,
    known: RwLock<KnownQuotas>,
    /// Whether a key may have a quota of its own. It is read without the lock.
    is_any: AtomicBool,
}

/// The quotas that requests have stated.
#[derive(Debug, Default)]
struct KnownQuotas {
    ids: HashMap<Quota, QuotaId>,
    /// By their numbers.
    stated: HashMap<u32, StatedQuota>,
    /// How many numbers were given out. A number is of one quota only.
    numbers: u32,
}

/// A quota that requests have stated, or that of a route.
#[derive(Debug)]
struct StatedQuota {
    /// The limits of each part. If quotas are not divided, there is one.
    parts: Vec<Specs>,
    /// The pattern of the route.
    route: Option<Arc<str>>,
    /// Whether a request has stated it again since quotas were last forgotten.
    is_used: AtomicBool,
}

impl KnownQuotas {
    /// Forgets the quotas that no key has, so that a program may compute its quotas. Those that requests have
    /// stated lately stay: a key may be about to get one.
    fn forget_unused(&mut self) {
        let newest = self.numbers.saturating_sub(Quotas::NEWEST);
        self.stated.retain(|number, stated| {
            let is_used = std::mem::take(stated.is_used.get_mut());
            let mut specs = stated.parts.iter().flatten();
            let has_key = specs.any(|spec| Arc::strong_count(spec) > 1);
            is_used || has_key || stated.route.is_some() || *number >= newest
        });
        let stated = &self.stated;
        self.ids.retain(|_, id| stated.contains_key(&id.0));
    }
}

/// The limits of a part, one for each unit that they count.
pub(super) type Specs = Vec<Arc<LimitSpec>>;

impl Quotas {
    /// The most different quotas that keys may have at the same time.
    const MOST: usize = 10_000;

    /// How many of the last quotas are never forgotten.
    const NEWEST: u32 = 1_000;

    pub(crate) fn new(
        configured: Quota,
        division: Option<Division>,
        slacks: Slacks,
        late: CountedLate,
    ) -> Self {
        Quotas {
            configured,
            division,
            slacks,
            late,
            known: RwLock::default(),
            is_any: AtomicBool::new(false),
        }
    }

    /// Returns the limits of the part number `part` of a quota, which counts one unit.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the quota is out of range.
    pub(crate) fn limits(&self, quota: Quota, part: usize) -> Result<LimitSpec, ConfigError> {
        let spec = LimitSpec::checked(quota, self.slacks, self.late.within(&quota))?;
        Ok(match &self.division {
            Some(division) => spec.with_lending(division.lends(part)),
            None => spec,
        })
    }

    /// Returns the parts of a quota: that of the rest, and then those of the classes with a share. If
    /// quotas are not divided, the only part is the quota.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the quota cannot be divided.
    pub(crate) fn parts(&self, quota: &Quota) -> Result<Vec<Quota>, ConfigError> {
        match &self.division {
            Some(division) => division.parts(quota),
            None => Ok(vec![*quota]),
        }
    }

    /// Returns the percentage of each limit that the part number `part` has. 0 if quotas are not divided.
    pub(super) fn percent(&self, part: usize) -> u8 {
        let division = self.division.as_ref();
        division.map_or(0, |division| division.percent(part))
    }

    /// Notes that a key may have a quota of its own.
    pub(super) fn note_any(&self) {
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// Returns whether a key may have a quota of its own.
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Returns the number of a quota that a request states.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it is out of range, or counts other units than the configured quota, or if
    /// requests have stated too many quotas.
    pub(super) fn id(&self, quota: &Quota) -> Result<QuotaId, ConfigError> {
        if *quota == self.configured {
            return Ok(QuotaId::CONFIGURED);
        }
        let known = read(&self.known);
        match known.ids.get(quota) {
            Some(id) => {
                if let Some(stated) = known.stated.get(&id.0) {
                    stated.is_used.store(true, Ordering::Relaxed);
                }
                Ok(*id)
            }
            None => {
                drop(known);
                self.add(quota, None)
            }
        }
    }

    /// Returns the number of the quota of a route. Each route has a number of its own, so that errors
    /// name the `pattern`.
    ///
    /// # Errors
    ///
    /// Those of [`id`](Self::id).
    pub(super) fn id_of_route(&self, quota: &Quota, pattern: &str) -> Result<QuotaId, ConfigError> {
        self.add(quota, Some(pattern))
    }

    /// Returns the limits of the parts of a quota that a key may have, by their units.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it is out of range, or counts other units than the configured quota.
    pub(super) fn specs(&self, quota: &Quota) -> Result<Vec<Specs>, ConfigError> {
        quota.check(self.slacks)?;
        if self.shape(quota) != self.shape(&self.configured) {
            return Err(out_of_range(
                format!("{quota} beside {}", self.configured),
                "a quota of the same kind: with the same units, with calls in flight only if the other has them, \
                 and of sliding windows only if the other is one with counted_within",
            ));
        }
        let mut parts = Vec::new();
        for (part, quota) in self.parts(quota)?.into_iter().enumerate() {
            let mut specs = Specs::new();
            for quota in quota.by_unit() {
                specs.push(Arc::new(self.limits(quota, part)?));
            }
            parts.push(specs);
        }
        Ok(parts)
    }

    #[cold]
    fn add(&self, quota: &Quota, route: Option<&str>) -> Result<QuotaId, ConfigError> {
        let parts = self.specs(quota)?;
        let mut known = write(&self.known);
        if route.is_none()
            && let Some(id) = known.ids.get(quota)
        {
            return Ok(*id);
        }
        if known.stated.len() >= Quotas::MOST {
            known.forget_unused();
        }
        if known.stated.len() >= Quotas::MOST {
            return Err(out_of_range(
                format!("more than {} different quotas", Quotas::MOST),
                "fewer quotas, such as one for each plan or route",
            ));
        }
        let number = known.numbers.max(QuotaId::FIRST);
        known.numbers = number.saturating_add(1);
        let stated = StatedQuota {
            parts,
            route: route.map(Arc::from),
            is_used: AtomicBool::new(false),
        };
        known.stated.insert(number, stated);
        if route.is_none() {
            known.ids.insert(*quota, QuotaId(number));
        }
        self.note_any();
        Ok(QuotaId(number))
    }

    /// Returns what all quotas of one limiter have in common: the units, whether calls in flight are
    /// limited, and whether a settlement moves units.
    fn shape(&self, quota: &Quota) -> (Vec<(&'static str, bool)>, bool) {
        let units = quota.units().map(|unit| {
            let of_unit = quota.of_unit(unit);
            let moves = of_unit.is_some_and(|quota| !self.moved_within(&quota).is_zero());
            (unit, moves)
        });
        let mut units: Vec<_> = units.collect();
        units.sort_unstable();
        (units, quota.most_in_flight().is_some())
    }

    /// Returns how late the upstream counts, if a settlement moves units to its own moment. Zero if the upstream counts a
    /// request when it arrives, or if a limit is not a sliding window. `quota` counts one unit.
    pub(crate) fn moved_within(&self, quota: &Quota) -> Duration {
        match quota.is_of_sliding_windows() {
            true => self.late.within(quota),
            false => Duration::ZERO,
        }
    }

    /// Returns the limits of the part number `part` of a stated quota that count `unit`. Returns `None` for
    /// the configured quota.
    pub(super) fn spec(
        &self,
        id: QuotaId,
        part: usize,
        unit: Option<&str>,
    ) -> Option<Arc<LimitSpec>> {
        let known = read(&self.known);
        spec_of(known.stated.get(&id.0)?.parts.get(part)?, unit)
    }

    /// Returns the pattern of the route that has this quota, if it is that of a route.
    pub(super) fn route(&self, id: QuotaId) -> Option<Arc<str>> {
        let known = read(&self.known);
        known.stated.get(&id.0)?.route.clone()
    }
}

/// Returns the limits of a part that count `unit`.
pub(super) fn spec_of(specs: &Specs, unit: Option<&str>) -> Option<Arc<LimitSpec>> {
    let mut specs = specs.iter();
    specs.find(|spec| spec.quota().unit() == unit).cloned()
}

fn out_of_range(value: String, allowed: &'static str) -> ConfigError {
    ConfigError::out_of_range("quota", value, allowed)
}
