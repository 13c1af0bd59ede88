//! What a request costs: how many units of each kind it takes.

use std::fmt;

/// How many units a request takes, as the result of
/// [`RateLimitBuilder::cost`](crate::RateLimitBuilder::cost) or in the extensions of the request.
/// Default: one request.
///
/// Most limits count requests. A limit may count units of another kind, such as tokens
/// ([`Quota::of`](crate::Quota::of)). A cost states a number for each kind:
///
/// ```
/// use tollgate::Cost;
///
/// let one = Cost::default();                                 // one request, and nothing else
/// let five = Cost::new(5);                                   // as much as five requests
/// let prompt = Cost::of("tokens", 1200);                     // one request with 1200 tokens
/// let both = Cost::of("input_tokens", 1200).and("output_tokens", 400);
/// # let _ = (one, five, prompt, both);
/// ```
///
/// Where a cost is expected, a number is one, too: `.cost(|_| 5)` is `.cost(|_| Cost::new(5))`.
///
/// - Requests that the cost does not state count as 1, and other units as 0. So a limit of `tokens` does
///   not see a request whose cost states none.
/// - A unit that no limit counts is ignored.
/// - If limits count units, [`Event::UnitsDiffer`](crate::stats::Event::UnitsDiffer) reports the first cost that states
///   other ones, or lacks one. If none of the first 100 requests states a unit, the next ones are refused
///   ([`Reason::NotCharged`](crate::Reason::NotCharged)). To say that a request has no tokens, state 0.
/// - A request that costs nothing under all limits needs no permit. It passes at once, even if its
///   key is on hold.
/// - A request whose cost is above a limit is refused at once
///   ([`Reason::CostAboveLimit`](crate::Reason::CostAboveLimit)), or waits for the whole limit: see
///   [`wait_above_limit`](crate::RateLimitBuilder::wait_above_limit).
///
/// An [`AdaptiveThrottleLayer`](crate::AdaptiveThrottleLayer) ignores costs.
///
/// ```
/// let mut request = http::Request::get("http://example.com/export").body(())?;
/// request.extensions_mut().insert(tollgate::Cost::new(10));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// `None` if the cost does not state it.
    requests: Option<u32>,
    /// The names of the other units. Empty where there is none.
    units: [&'static str; Cost::MOST_UNITS],
    counts: [u32; Cost::MOST_UNITS],
}

impl Cost {
    /// The most units that a cost may state besides requests. A quota cannot have more.
    pub(crate) const MOST_UNITS: usize = 8;

    /// The name of the unit that limits count if nothing else is said.
    pub const REQUESTS: &'static str = "requests";

    /// Makes the cost of this number of requests. It states no other unit.
    pub const fn new(requests: u32) -> Self {
        Cost {
            requests: Some(requests),
            ..Cost::NOTHING_STATED
        }
    }

    /// Makes a cost of `count` units of this kind. As [`Cost::default`] does, it counts as one
    /// request.
    pub const fn of(unit: &'static str, count: u32) -> Self {
        Cost::NOTHING_STATED.and(unit, count)
    }

    /// States `count` units of another kind. If the cost has stated this unit before, `count`
    /// replaces it.
    ///
    /// # Panics
    ///
    /// If the cost states more than eight units besides requests.
    #[must_use]
    pub const fn and(mut self, unit: &'static str, count: u32) -> Self {
        if is_same(unit, Cost::REQUESTS) {
            self.requests = Some(count);
            return self;
        }
        let mut index = 0;
        while index < Cost::MOST_UNITS {
            if self.units[index].is_empty() || is_same(self.units[index], unit) {
                self.units[index] = unit;
                self.counts[index] = count;
                return self;
            }
            index += 1;
        }
        panic!("a cost states at most eight units besides requests")
    }

    pub(crate) const NOTHING_STATED: Cost = Cost {
        requests: None,
        units: [""; Cost::MOST_UNITS],
        counts: [0; Cost::MOST_UNITS],
    };

    /// Returns how many units of this kind the cost states. `None` if it does not state the unit.
    pub(crate) fn stated(&self, unit: &str) -> Option<u32> {
        if unit == Cost::REQUESTS {
            return self.requests;
        }
        self.others()
            .find(|(stated, _)| *stated == unit)
            .map(|(_, count)| count)
    }

    /// Returns how many units a request of this cost takes of a limit that counts `unit`. Requests if
    /// that is `None`.
    #[inline]
    pub(crate) fn under(&self, unit: Option<&str>) -> u32 {
        match unit {
            None => self.requests.unwrap_or(1),
            Some(unit) => self.stated(unit).unwrap_or(0),
        }
    }

    /// Returns the units besides requests that the cost states.
    pub(crate) fn others(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let stated = self.units.into_iter().zip(self.counts);
        stated.take_while(|(unit, _)| !unit.is_empty())
    }
}

/// The cost of one request, as small as most requests need it: it is moved on the path at hand.
#[derive(Clone, Debug)]
pub(crate) enum RequestCost {
    /// A number of requests, and no other unit.
    Requests(u32),
    Units(Box<Cost>),
}

impl RequestCost {
    /// Returns how many units the request takes of a limit that counts `unit`. Requests if that is
    /// `None`.
    #[inline]
    pub(crate) fn under(&self, unit: Option<&str>) -> u32 {
        match (self, unit) {
            (RequestCost::Requests(requests), None) => *requests,
            (RequestCost::Requests(_), Some(_)) => 0,
            (RequestCost::Units(cost), unit) => cost.under(unit),
        }
    }

    /// Returns whether the cost states `unit`, which is not requests.
    pub(crate) fn states(&self, unit: &str) -> bool {
        self.units().any(|stated| stated == unit)
    }

    /// Returns the units besides requests that the cost states.
    pub(crate) fn units(&self) -> impl Iterator<Item = &'static str> {
        let units = match self {
            RequestCost::Requests(_) => None,
            RequestCost::Units(cost) => Some(cost.others().map(|(unit, _)| unit)),
        };
        units.into_iter().flatten()
    }
}

impl From<Cost> for RequestCost {
    #[inline]
    fn from(cost: Cost) -> Self {
        match cost.units[0] {
            "" => RequestCost::Requests(cost.under(None)),
            _ => RequestCost::Units(Box::new(cost)),
        }
    }
}

/// `str::eq`, for constants.
pub(crate) const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// One request.
impl Default for Cost {
    fn default() -> Self {
        Cost::new(1)
    }
}

/// A number of requests.
impl From<u32> for Cost {
    #[inline]
    fn from(requests: u32) -> Self {
        Cost::new(requests)
    }
}

impl fmt::Debug for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = self.requests.map(|count| (Cost::REQUESTS, count));
        f.write_str("Cost(")?;
        for (index, (unit, count)) in requests.into_iter().chain(self.others()).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{count} {unit}")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_state_what_was_given_last() {
        const COST: Cost = Cost::of("tokens", 7).and("bytes", 1).and("tokens", 9);
        assert_eq!(COST.stated("tokens"), Some(9));
        assert_eq!(COST.stated("bytes"), Some(1));
        assert_eq!(COST.stated("requests"), None);
        assert_eq!(COST.under(None), 1);
        assert_eq!(COST.under(Some("orders")), 0);
        assert_eq!(COST.and("requests", 3).under(None), 3);
        assert_eq!(Cost::from(4).under(None), 4);
        assert_eq!(format!("{COST:?}"), "Cost(9 tokens, 1 bytes)");
        assert_eq!(format!("{:?}", Cost::default()), "Cost(1 requests)");
    }
}
