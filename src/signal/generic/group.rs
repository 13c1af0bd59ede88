//! One group of headers with the same family and name: one quota, or several parallel ones.

use crate::signal::draft::{Draft, Drafts, Unit};
use crate::signal::generic::family::{Family, Header, Role};
use crate::signal::generic::lines::{parameter, split, trim};
use crate::signal::parse::number::{Count, LARGEST, Number};
use crate::signal::parse::text::{Bounded, Text};
use crate::signal::parse::time::{self, Base};
use crate::signal::standard::ratelimit::{Dictionary, Policies, Policy};

/// A line of a generic family.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Entry<'a> {
    pub(in crate::signal) header: Header<'a>,
    /// The number of the group; entries of one group have the same number.
    pub(in crate::signal) group: usize,
    /// The whole name of the header.
    pub(in crate::signal) line: &'a str,
    pub(in crate::signal) value: &'a str,
}

/// The most parallel limits.
const MANY: usize = 8;

/// The quotas that the headers of a group state.
#[derive(Debug)]
pub(in crate::signal) struct Group {
    pub(in crate::signal) quotas: Bounded<Draft, MANY>,
    /// The policies that describe none of the quotas.
    pub(in crate::signal) policies: Policies,
    pub(in crate::signal) unit: Unit,
}

impl Group {
    /// Returns whether the group has more than one quota.
    pub(in crate::signal) fn is_parallel(&self) -> bool {
        self.quotas.len() > 1
    }

    /// Reports the policies that describe none of the quotas as separate quotas.
    pub(in crate::signal) fn report_policies(&self, quotas: &mut Drafts) {
        self.policies.iter().for_each(|policy| {
            quotas.push(Draft {
                unit: self.unit,
                ..own(policy)
            })
        });
    }
}

/// Returns a policy as a separate quota.
pub(in crate::signal) fn own(policy: &Policy) -> Draft {
    let Policy {
        name,
        limit,
        window,
    } = *policy;
    Draft {
        name,
        limit: Some(limit),
        window,
        ..Draft::default()
    }
}

/// The values of one role: the first values, their number, and the most restrictive value.
#[derive(Debug)]
struct Values<T> {
    list: Bounded<T, MANY>,
    count: usize,
    worst: Option<T>,
}

impl<T: Copy> Values<T> {
    fn new() -> Self {
        Values {
            list: Bounded::new(),
            count: 0,
            worst: None,
        }
    }

    fn push(&mut self, value: T, worse: impl Fn(T, T) -> T) {
        self.list.push(value);
        self.count += 1;
        self.worst = Some(self.worst.map_or(value, |worst| worse(worst, value)));
    }

    fn at(&self, place: Option<usize>) -> Option<T> {
        place.map_or(self.worst, |place| self.list.get(place).copied())
    }
}

/// All values of a group, as they were sent.
#[derive(Debug)]
pub(in crate::signal) struct Stated {
    limit: Values<Count>,
    remaining: Values<Count>,
    used: Values<Count>,
    resets: [Values<u64>; 3],
    /// Stated as part of a value: `w=60`.
    window: Option<u64>,
    /// Stated in a separate header.
    window_header: Option<u64>,
    utilization: Option<u64>,
    policies: Policies,
    daily: bool,
    /// Both headers of Strava, whose two windows are known.
    strava: [bool; 2],
}

impl Stated {
    pub(in crate::signal) fn read<'a>(
        entries: impl Iterator<Item = Entry<'a>> + Clone,
        base: &Base,
    ) -> Self {
        let mut values = Stated::none();
        let of = |role: Role| {
            let entries = entries.clone();
            entries
                .filter(move |entry| entry.header.role == role)
                .map(|entry| entry.value)
        };
        values.limits(of(Role::Limit));
        let mut remaining_window = None;
        for item in of(Role::Remaining).flat_map(|line| split(line, ',')) {
            if let Some(count) = head(item).and_then(Count::read) {
                if values.remaining.count == 0 {
                    remaining_window = parameter(item, "w").and_then(time::window_seconds);
                }
                values.remaining.push(count, Count::min);
            }
        }
        values.window = values.window.or(remaining_window);
        for count in of(Role::Used)
            .flat_map(|line| split(line, ','))
            .filter_map(head)
            .filter_map(Count::read)
        {
            values.used.push(count, Count::max);
        }
        values.window_header = (of(Role::Window).find_map(time::window))
            .or_else(|| of(Role::WindowMillis).find_map(time::window_millis));
        for entry in entries.clone() {
            match entry.header.role {
                Role::Reset(priority) => {
                    let millis = entry.header.family == Family::Vendor("gw");
                    let read = |text: &str| {
                        if millis {
                            base.read_millis(text)
                        } else {
                            base.read(text)
                        }
                    };
                    each_time(entry.value, read, |time| {
                        values.resets[priority].push(time, u64::max)
                    });
                }
                Role::Utilization => {
                    if let Some(share) = Number::read(entry.value).filter(|share| !share.negative) {
                        let percent = u64::try_from(share.times_up(100))
                            .unwrap_or(LARGEST)
                            .min(LARGEST);
                        values.utilization = values.utilization.max(Some(percent));
                    }
                }
                _ => {}
            }
            values.daily |= entry.header.daily;
            values.strava[0] |= matches!(entry.line, "x-ratelimit-limit" | "x-readratelimit-limit");
            values.strava[1] |= matches!(entry.line, "x-ratelimit-usage" | "x-readratelimit-usage");
        }
        values
    }

    /// Reads the single field of draft 07.
    pub(in crate::signal) fn of(dictionary: &Dictionary) -> Self {
        let mut values = Stated::none();
        dictionary
            .limit
            .into_iter()
            .for_each(|limit| values.limit.push(limit, Count::min));
        dictionary
            .remaining
            .into_iter()
            .for_each(|remaining| values.remaining.push(remaining, Count::min));
        dictionary
            .reset
            .into_iter()
            .for_each(|reset| values.resets[0].push(reset, u64::max));
        values
    }

    fn none() -> Self {
        Stated {
            limit: Values::new(),
            remaining: Values::new(),
            used: Values::new(),
            resets: [Values::new(), Values::new(), Values::new()],
            window: None,
            window_header: None,
            utilization: None,
            policies: Policies::new(),
            daily: false,
            strava: [false; 2],
        }
    }

    /// Reads `100, 100;w=60, 1000;w=3600`: the limit, then policies with a window, and parallel
    /// limits without one.
    fn limits<'a>(&mut self, lines: impl Iterator<Item = &'a str>) {
        let mut first = true;
        for item in lines.flat_map(|line| split(line, ',')) {
            let Some(text) = head(item) else { continue };
            let window = parameter(item, "w");
            let seconds = window.and_then(time::window_seconds);
            match (Count::read(text), window) {
                (Some(count), _) if first => {
                    self.window = seconds;
                    self.limit.push(count, Count::min);
                }
                (Some(count), None) => self.limit.push(count, Count::min),
                (Some(Count::Of(limit)), Some(_)) => {
                    let name = parameter(item, "name").and_then(Text::some);
                    self.policies.push(Policy {
                        name,
                        limit,
                        window: seconds,
                    });
                }
                (Some(Count::Negative), Some(_)) => {}
                (None, _)
                    if first
                        && time::span(crate::signal::parse::number::unquoted(text)).is_some() =>
                {
                    self.window = time::window(text);
                }
                (None, _) => continue,
            }
            first = false;
        }
    }

    /// Builds the quotas of the group, with policies that other fields state for it.
    pub(in crate::signal) fn group(
        mut self,
        name: &str,
        by_size: bool,
        others: &[Policy],
    ) -> Group {
        let mut group = Group {
            quotas: Bounded::new(),
            policies: Policies::new(),
            unit: Unit::Open,
        };
        group.unit = match crate::signal::generic::words::unit_of(name) {
            _ if by_size => Unit::Known("tokens"),
            Some(unit) => Unit::Known(unit),
            None => Unit::Open,
        };
        others.iter().for_each(|policy| self.policies.push(*policy));
        for policy in self.policies.iter() {
            if !group.policies.contains(policy) {
                group.policies.push(*policy);
            }
        }
        let resets = self
            .resets
            .iter()
            .find(|values| values.count > 0)
            .unwrap_or(&self.resets[0]);
        let counts = [
            self.limit.count,
            self.remaining.count,
            self.used.count,
            resets.count,
        ];
        let longest = counts.into_iter().max().unwrap_or(0);
        let parallel = (2..=MANY).contains(&longest)
            && counts.iter().all(|count| [0, longest].contains(count));
        let no_reset = self.remaining.count == 0 && resets.count == 0;
        let strava = parallel && longest == 2 && no_reset && self.strava == [true; 2];

        for place in 0..if parallel { longest } else { 1 } {
            let at = parallel.then_some(place);
            let mut draft = Draft {
                unit: group.unit,
                ..Draft::named(name)
            };
            let limit = self.limit.at(at);
            draft.limit = limit.and_then(Count::known);
            draft.used = self.used.at(at).and_then(Count::known);
            draft.reset = resets.at(at);
            draft.window = self.window;
            if !parallel {
                describe(&mut draft, &mut group.policies);
            }
            draft.remaining = match self.remaining.at(at) {
                Some(Count::Negative) => draft.limit.map(|_| 0),
                remaining => remaining.and_then(Count::known),
            };
            if let (Some(used), None) = (self.utilization, limit) {
                draft = draft.percent(used);
            }
            draft.window = draft
                .window
                .or(self.window_header)
                .or_else(|| crate::signal::generic::words::period_of(name));
            if self.daily {
                draft.name = draft.name.or(Text::some("daily"));
                draft.window = draft.window.or(Some(86_400_000));
            }
            if strava {
                draft.window = Some([900_000, 86_400_000][place]);
            }
            // Servers send -1 for "no limit" or "not known".
            if limit != Some(Count::Negative) {
                group.quotas.push(draft);
            }
        }
        group
    }
}

/// Takes out the policy that describes the quota, and fills in what the quota lacks.
fn describe(draft: &mut Draft, policies: &mut Policies) {
    let found = match policies.len() {
        1 => Some(0),
        _ => policies
            .iter()
            .position(|policy| draft.limit == Some(policy.limit)),
    };
    let Some(found) = found else { return };
    let Policy {
        name,
        limit,
        window,
    } = policies[found];
    draft.name = draft.name.or(name);
    draft.limit = draft.limit.or(Some(limit));
    draft.window = draft.window.or(window);
    let rest = policies
        .iter()
        .enumerate()
        .filter(|(place, _)| *place != found);
    let mut others = Policies::new();
    rest.for_each(|(_, policy)| others.push(*policy));
    *policies = others;
}

/// Returns the head of an item, if there is one.
fn head(item: &str) -> Option<&str> {
    split(item, ';').next().filter(|head| !head.is_empty())
}

/// Returns the times in a line: the whole line, or the parts between its commas.
pub(in crate::signal) fn each_time(
    line: &str,
    read: impl Fn(&str) -> Option<u64>,
    each: impl FnMut(u64),
) {
    match read(line) {
        Some(time) => [time].into_iter().for_each(each),
        None => line.split(',').map(trim).filter_map(read).for_each(each),
    }
}
