//! One group of headers with the same family and name: one quota, or several parallel ones.

use crate::signal::generic::family::{Family, Header, Role};
use crate::signal::generic::lines::{parameter, split, trim};
use crate::signal::generic::words;
use crate::signal::observed::{Drafts, ObservedQuota};
use crate::signal::parse::number::{Count, Number, digits, unquoted};
use crate::signal::parse::text::{Bounded, Text};
use crate::signal::parse::time::{self, Base};
use crate::signal::refusal;

/// A line of a generic family.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct GroupEntry<'a> {
    pub(in crate::signal) header: Header<'a>,
    /// The whole name of the header.
    pub(in crate::signal) line: &'a str,
    pub(in crate::signal) value: &'a str,
}

impl GroupEntry<'_> {
    pub(in crate::signal) fn same_group(&self, other: &GroupEntry<'_>) -> bool {
        let (one, other) = (&self.header, &other.header);
        (one.family, one.part, one.name) == (other.family, other.part, other.name)
    }

    /// Returns whether the header says in a word that the limit is exceeded.
    pub(in crate::signal) fn is_throttled(&self) -> bool {
        self.header.role == Role::State && refusal::is_code(self.value)
    }
}

/// The most items of a list that are read.
const MOST_ITEMS: usize = 64;

/// The most parallel limits.
const MANY: usize = 8;

/// Limits with a window that a header states besides its quota; older drafts have no name for them.
pub(in crate::signal) type Policies = Bounded<ObservedQuota, 8>;

/// The quotas that the headers of a group state.
#[derive(Debug, Default)]
pub(in crate::signal) struct Group {
    pub(in crate::signal) quotas: Bounded<ObservedQuota, MANY>,
    /// The policies that describe none of the quotas.
    policies: Policies,
    unit: Option<&'static str>,
}

impl Group {
    /// Returns whether the group has more than one quota.
    pub(in crate::signal) fn is_parallel(&self) -> bool {
        self.quotas.len() > 1
    }

    /// Reports the policies that describe none of the quotas as separate quotas.
    pub(in crate::signal) fn report_policies(&mut self, quotas: &mut Drafts) {
        for policy in std::mem::take(&mut self.policies) {
            quotas.push(ObservedQuota {
                unit: self.unit.map(Box::from),
                ..policy
            });
        }
    }
}

/// The values of one role.
type Values<T> = Bounded<T, MOST_ITEMS>;

/// Returns the value of one of several quotas, or of all values the most restrictive one.
fn at<'a, T: Copy>(
    values: &'a [T],
    place: Option<usize>,
    worst: fn(std::slice::Iter<'a, T>) -> Option<&'a T>,
) -> Option<T> {
    match place {
        Some(place) => values.get(place).copied(),
        None => worst(values.iter()).copied(),
    }
}

/// All values of a group, as they were sent.
#[derive(Debug, Default)]
pub(in crate::signal) struct Stated {
    limit: Values<Count>,
    /// Whether a limit or its window has been read.
    has_limit: bool,
    remaining: Values<Count>,
    used: Values<Count>,
    resets: [Values<u64>; 3],
    /// Stated as part of a value: `w=60`. That of a limit comes before that of what remains.
    window: Option<u64>,
    /// Stated as part of each limit: `10/second, 100/minute`.
    windows: Values<u64>,
    /// Stated in a separate header.
    window_header: Option<u64>,
    utilization: Option<u64>,
    policies: Policies,
    /// Whether `RateLimit-DailyLimit` names the quota.
    daily: bool,
    /// Both headers of Strava, whose two windows are known.
    strava: [bool; 2],
    /// `32/80`: used of the limit, or the limit in a number of seconds.
    ratio: Option<(Count, u64)>,
    /// The part of a value that states one quota of several, which may be a period.
    period: Option<u64>,
}

impl Stated {
    pub(in crate::signal) fn read<'a>(
        entries: impl Iterator<Item = GroupEntry<'a>> + Clone,
        base: &Base,
    ) -> Self {
        let mut values = Stated::default();
        let counts = entries.clone().filter(|entry| {
            let role = entry.header.role;
            matches!(role, Role::Limit | Role::Remaining | Role::Used)
        });
        let counts = counts.map(|entry| entry.value);
        let is_grouped = counts.clone().any(|value| value.contains(',')) && are_grouped(counts);
        for entry in entries {
            let GroupEntry { header, value, .. } = entry;
            match header.role {
                Role::Limit | Role::Remaining | Role::Used if is_grouped => {
                    values.count(header.role, without_commas(value).as_str());
                }
                Role::Limit | Role::Remaining | Role::Used => values.count(header.role, value),
                Role::Reset(priority) => {
                    // The one vendor whose resets are in milliseconds without saying so.
                    let gw = header.family == Family::Vendor("gw");
                    let unit = header.unit.or(gw.then_some(1));
                    let times = times(value, |text| base.read_with(unit, text));
                    values.resets[usize::from(priority)].extend(times);
                }
                Role::Window => {
                    let window = time::window(header.unit.unwrap_or(1000), value);
                    values.window_header = values.window_header.or(window);
                }
                Role::Utilization | Role::Percent => {
                    let percent = if header.role == Role::Percent { 1 } else { 100 };
                    if let Some(share) = Number::read(value).filter(|share| !share.negative) {
                        let percent = share.count_up(percent);
                        values.utilization = values.utilization.max(Some(percent));
                    }
                }
                Role::State if entry.is_throttled() => {
                    values.remaining.push(Count::Of(0));
                }
                _ => {}
            }
            values.daily |= entry.line == "ratelimit-dailylimit";
            values.strava[0] |= matches!(entry.line, "x-ratelimit-limit" | "x-readratelimit-limit");
            values.strava[1] |= matches!(entry.line, "x-ratelimit-usage" | "x-readratelimit-usage");
            if !header.part.is_empty() {
                values.period = values.period.or_else(|| time::period_of(header.part));
            }
        }
        values
    }

    /// Reads the counts of a line.
    fn count(&mut self, role: Role, line: &str) {
        if let Some(percent) = line.strip_suffix('%').and_then(Count::read) {
            self.utilization = self.utilization.max(percent.known());
        }
        for item in list(line).take(MOST_ITEMS) {
            let Some(head) = split(item, ';').next().filter(|head| !head.is_empty()) else {
                continue;
            };
            if role == Role::Limit {
                self.limit(head, item);
                continue;
            }
            // `9/10`: of a limit.
            let (head, limit) = head.split_once('/').unwrap_or((head, ""));
            match Count::read(trim(head)) {
                Some(count) if role == Role::Used => self.used.push(count),
                Some(count) => {
                    if self.remaining.is_empty() && self.window.is_none() {
                        self.window = window_parameter(item).and_then(seconds);
                    }
                    self.remaining.push(count);
                }
                None => continue,
            }
            let limit = Count::read(trim(limit)).into_iter();
            limit.for_each(|limit| self.limit.push(limit));
        }
    }

    /// Takes the values of the single field of draft 07.
    pub(in crate::signal) fn of(
        limit: Option<Count>,
        remaining: Option<Count>,
        reset: Option<u64>,
    ) -> Self {
        let mut values = Stated::default();
        values.limit.extend(limit);
        values.remaining.extend(remaining);
        values.resets[0].extend(reset);
        values
    }

    /// Reads an item of `100, 100;w=60, 1000;w=3600`: the limit, then policies with a window, and
    /// parallel limits without one.
    fn limit(&mut self, text: &str, item: &str) {
        let text_of_window = window_parameter(item);
        let window = text_of_window.and_then(seconds);
        match (Count::read(text), text_of_window) {
            (Some(count), _) if !self.has_limit => {
                self.window = window.or(self.window);
                self.limit.push(count);
            }
            (Some(count), None) => self.limit.push(count),
            (Some(Count::Of(limit)), Some(_)) => {
                self.policies.push(ObservedQuota {
                    limit: Some(limit),
                    window,
                    ..ObservedQuota::named(parameter(item, "name").unwrap_or_default())
                });
            }
            (Some(Count::Negative), Some(_)) => {}
            (None, _) => match text.split_once('/').or_else(|| text.split_once(" per ")) {
                Some((count, of)) => self.ratio(trim(count), trim(of)),
                None if !self.has_limit && time::span(unquoted(text)).is_some() => {
                    self.window = seconds(text).or(self.window);
                }
                None => return,
            },
        }
        self.has_limit = true;
    }

    /// Reads `600/15m`, `100 requests per minute` and `32/80`.
    fn ratio(&mut self, count: &str, of: &str) {
        let count = count.split_once(' ').map_or(count, |(count, _)| count);
        match (Count::read(count), Count::read(of)) {
            (Some(count), Some(Count::Of(of))) => self.ratio = Some((count, of)),
            (Some(count), None) => {
                if let Some(window) = seconds(of) {
                    self.limit.push(count);
                    self.windows.push(window);
                }
            }
            _ => {}
        }
    }

    /// Decides what `32/80` means: used of the limit, unless other headers state what is used.
    fn settle_ratio(&mut self) {
        let Some((count, of)) = self.ratio.filter(|_| self.limit.is_empty()) else {
            return;
        };
        let is_used = self.remaining.is_empty() && self.used.is_empty();
        if is_used && count <= Count::Of(of) {
            self.used.push(count);
            self.limit.push(Count::Of(of));
        } else if !is_used && of > 0 {
            self.limit.push(count);
            self.window = Some(of.saturating_mul(1000).min(time::LONGEST));
        }
    }

    /// Builds the quotas of the group, with policies that other fields state for it.
    pub(in crate::signal) fn group(mut self, name: &str, by_size: bool, others: Policies) -> Group {
        self.settle_ratio();
        self.policies.extend(others);
        self.policies.keep(|_| true);
        let unit = if by_size {
            Some("tokens")
        } else {
            words::unit_of(name)
        };
        let mut group = Group {
            policies: self.policies,
            unit,
            ..Group::default()
        };
        let resets = self
            .resets
            .iter()
            .find(|values| !values.is_empty())
            .unwrap_or(&self.resets[0]);
        // Lists of the same length state parallel quotas: entry n of each list is of quota n. If the lengths differ,
        // it is unknown which entries belong together: there is one quota, with the most restrictive values.
        let counts = [
            self.limit.len(),
            self.remaining.len(),
            self.used.len(),
            resets.len(),
        ];
        let longest = counts.into_iter().max().unwrap_or(0);
        let parallel = (2..=MANY).contains(&longest)
            && counts.iter().all(|count| [0, longest].contains(count));
        let no_reset = self.remaining.is_empty() && resets.is_empty();
        // Strava states neither windows nor resets: its limits are of 15 minutes and of a day.
        let strava = parallel && longest == 2 && no_reset && self.strava == [true; 2];

        for number in 0..if parallel { longest } else { 1 } {
            let place = parallel.then_some(number);
            let mut draft = ObservedQuota {
                unit: group.unit.map(Box::from),
                ..ObservedQuota::named(name)
            };
            let limit = at(&self.limit, place, Iterator::min);
            draft.limit = limit.and_then(Count::known);
            draft.used = at(&self.used, place, Iterator::max).and_then(Count::known);
            draft.reset_after = at(resets, place, Iterator::max);
            draft.window = at(&self.windows, place, Iterator::min).or(self.window);
            if !parallel {
                describe(&mut draft, &mut group.policies);
            }
            let remaining = at(&self.remaining, place, Iterator::min);
            draft.remaining = remaining.and_then(|remaining| remaining.left_of(draft.limit));
            if let (Some(used), None) = (self.utilization, limit) {
                draft = draft.percent(used);
            }
            draft.window = draft
                .window
                .or(self.window_header)
                .or(self.period)
                .or_else(|| time::period_of(name));
            if self.daily {
                draft.name = draft.name.or_else(|| Some("daily".into()));
                draft.window = draft.window.or(Some(time::MILLIS_OF_DAY));
            }
            if strava {
                draft.window = Some([900_000, time::MILLIS_OF_DAY][number]);
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
fn describe(draft: &mut ObservedQuota, policies: &mut Policies) {
    let found = match policies.len() {
        // The only policy, unless the quota has stated a window of its own.
        1 if draft.window.is_none() => Some(0),
        _ => policies
            .iter()
            .position(|policy| draft.limit == policy.limit),
    };
    if let Some(found) = found {
        draft.fill(policies.remove(found));
    }
}

/// Returns the digits of a count in groups, as far as they fit.
fn without_commas(count: &str) -> Text {
    count.chars().filter(|letter| *letter != ',').collect()
}

/// Returns the text of the window that an item states: `100;w=60`, `100;window=60`.
fn window_parameter(item: &str) -> Option<&str> {
    item.contains(';').then_some(())?;
    parameter(item, "w").or_else(|| parameter(item, "window"))
}

/// Reads a window in seconds, or with a unit.
fn seconds(text: &str) -> Option<u64> {
    time::window(1000, text)
}

/// Returns the items of a list. Commas separate them, or slashes if there are several and no comma.
fn list(value: &str) -> impl Iterator<Item = &str> + Clone {
    let is_slashed = value.split('/').nth(2).is_some() && !value.contains(',');
    split(value, if is_slashed { '/' } else { ',' })
}

/// Returns whether the commas in counts group digits, as in `1,200.00`. `1,200` may be two limits:
/// it is one number if it cannot be two, or if another count is one number.
fn are_grouped<'a>(values: impl Iterator<Item = &'a str> + Clone) -> bool {
    values.clone().all(may_be_one) && { values }.any(cannot_be_two)
}

/// Returns the parts of a count between the commas before its point.
fn groups(count: &str) -> impl Iterator<Item = &str> {
    let (whole, _) = count.split_once('.').unwrap_or((count, ""));
    whole.split(',')
}

fn may_be_one(count: &str) -> bool {
    let mut lengths = groups(count).map(|group| match digits(group) {
        (digits, "") => digits.len(),
        _ => 0,
    });
    let first = lengths.next().unwrap_or(0);
    (1..=3).contains(&first) && lengths.all(|length| length == 3)
}

fn cannot_be_two(count: &str) -> bool {
    !count.contains(',')
        || count.contains('.')
        || groups(count).skip(1).any(|group| group.starts_with('0'))
}

/// Returns the times in a line: the whole line, or the parts of the list.
pub(in crate::signal) fn times<'a>(
    line: &'a str,
    read: impl Fn(&str) -> Option<u64> + 'a,
) -> impl Iterator<Item = u64> {
    let whole = read(line);
    let most = if whole.is_none() { MOST_ITEMS } else { 0 };
    whole
        .into_iter()
        .chain(list(line).take(most).filter_map(read))
}
