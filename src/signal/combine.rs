//! Combines the quotas of all headers of a response, so that each bucket appears once.

use super::generic::family::{Family, Header, Role, family};
use super::generic::group::{Group, GroupEntry, Policies, Stated};
use super::generic::lines::Lines;
use super::generic::{members, words};
use super::observed::{Drafts, ObservedQuota};
use super::parse::text::{Bounded, Text};
use super::parse::time::Base;
use super::standard::ratelimit::{self, Fields};
use super::vendor;

/// The lines of the generic families.
pub(super) type Entries<'a> = Bounded<GroupEntry<'a>, { Lines::MOST }>;

/// The last words of the headers that name the bucket of a quota without a name, best first.
pub(super) const NAMES: [&str; 5] = ["name", "resource", "bucket", "group", "category"];

/// Sorts the lines into the generic families and the rows of the table.
pub(super) fn sort<'a>(lines: &Lines<'a>) -> Entries<'a> {
    let mut entries = Entries::new();
    for line in lines.iter() {
        if vendor::has(line.name) || ratelimit::is_ours(line.name) {
            continue;
        }
        let Some(header) = Header::read(line.name) else {
            continue;
        };
        let mut add = |header: Header<'a>, value| {
            if header.role != Role::Open {
                entries.push(GroupEntry {
                    header,
                    line: line.name,
                    value,
                });
            }
        };
        if !members::read(&header, line.value, &mut add) {
            add(header, line.value);
        }
    }
    for place in 0..entries.len() {
        let named = entries[place];
        let mut before = entries[..place].iter();
        // Once for each family.
        if has_plain_name(&named)
            && !before
                .any(|entry| entry.header.family == named.header.family && has_plain_name(entry))
        {
            join(&mut entries, &named);
        }
    }
    entries
}

/// Returns whether the line describes a quota of this family.
fn is_quota_of(entry: &GroupEntry<'_>, family: Family<'_>) -> bool {
    entry.header.family == family && is_of_quota(entry)
}

/// Returns whether the line describes a quota whose name only names what is counted.
fn has_plain_name(entry: &GroupEntry<'_>) -> bool {
    is_of_quota(entry) && words::is_plain(entry.header.name.as_str())
}

/// Joins two groups of a family that describe one quota: one without a name, and that of `named`,
/// which only names the requests, if no value is in both. The group with the limit names the quota.
fn join<'a>(entries: &mut Entries<'a>, named: &GroupEntry<'a>) {
    let family = named.header.family;
    let both = entries.iter().filter(|entry| is_quota_of(entry, family));
    let Some(unnamed) = both.clone().find(|entry| entry.header.is_unnamed()) else {
        return;
    };
    for entry in both.clone() {
        let is_of_third = !entry.header.is_unnamed() && !entry.same_group(named);
        let mut others = both.clone().filter(|other| !other.same_group(entry));
        if is_of_third || others.any(|other| is_same_role(other, entry)) {
            return;
        }
    }
    let has_limit = both.clone().find(|entry| entry.header.role == Role::Limit);
    let like = has_limit.unwrap_or(unnamed).header;
    for entry in entries.iter_mut() {
        if is_quota_of(entry, family) {
            entry.header.name = like.name;
            entry.header.part = like.part;
        }
    }
}

/// Returns whether both lines state the same of a quota. Resets of all kinds do.
fn is_same_role(one: &GroupEntry<'_>, other: &GroupEntry<'_>) -> bool {
    std::mem::discriminant(&one.header.role) == std::mem::discriminant(&other.header.role)
}

/// Adds all quotas that the lines state.
pub(super) fn read(lines: &Lines<'_>, entries: &Entries<'_>, base: &Base, quotas: &mut Drafts) {
    let mut fields = ratelimit::read(lines, base, quotas);
    same_bucket(lines, entries, &mut fields, base, quotas);
    for (place, entry) in entries.iter().enumerate() {
        let header = entry.header;
        let mut before = entries[..place].iter();
        let is_first = !before.any(|other| is_of_quota(other) && other.same_group(entry));
        if !is_first || !is_of_quota(entry) || is_same_bucket(entry) {
            continue;
        }
        let of_group = entries[place..]
            .iter()
            .filter(|other| is_of_quota(other) && other.same_group(entry));
        let mut group = Stated::read(of_group.clone().copied(), base).group(
            header.quota_name().as_str(),
            header.family == Family::BySize,
            Policies::new(),
        );
        let is_loose = matches!(header.family, Family::Loose(_));
        let is_marked = is_loose && of_group.clone().any(|entry| is_marked(entry.line));
        let given_name = match header.family {
            Family::Vendor(_) if header.is_unnamed() => {
                label(lines, |family| family == header.family)
            }
            _ => None,
        };
        for quota in std::mem::take(&mut group.quotas) {
            if quota.is_believable(is_marked, is_loose) {
                quotas.push(ObservedQuota {
                    name: quota.name.or_else(|| given_name.clone()),
                    ..quota
                });
            }
        }
        if !fields.service && !is_loose {
            group.report_policies(quotas);
        }
    }
    vendor::read(lines, base, quotas);
}

/// Returns whether a name without `ratelimit` speaks of requests or of a limit.
fn is_marked(line: &str) -> bool {
    const MARKS: [&str; 7] = [
        "limit", "quota", "request", "-req", "call", "credit", "-rl-",
    ];
    MARKS.iter().any(|mark| line.contains(mark))
}

/// Combines the headers without a name of the families that describe the same bucket, and policies
/// without a name.
fn same_bucket(
    lines: &Lines<'_>,
    entries: &Entries<'_>,
    fields: &mut Fields,
    base: &Base,
    quotas: &mut Drafts,
) {
    // A limit of the service states all of this in the newer form.
    if fields.service {
        return;
    }
    let mut first: Option<Group> = None;
    for family in Family::SYNONYMS {
        let of_family =
            |entry: &&GroupEntry<'_>| entry.header.family == family && is_same_bucket(entry);
        // The fields of the standard belong to the first family.
        let policies = std::mem::take(&mut fields.unnamed);
        let stated = match fields.dictionary.take() {
            Some(dictionary) => dictionary,
            None if entries.iter().any(|entry| of_family(&entry)) => {
                Stated::read(entries.iter().filter(of_family).copied(), base)
            }
            None => {
                quotas.extend(policies);
                continue;
            }
        };
        let mut group = stated.group("", false, policies);
        group.report_policies(quotas);
        match &mut first {
            None => first = Some(group),
            Some(first) if is_other(first, &group) => report(group, lines, quotas),
            Some(first) => match (first.quotas.first_mut(), group.quotas.into_iter().next()) {
                (Some(quota), Some(filling)) => quota.fill(filling),
                (None, Some(filling)) => first.quotas.push(filling),
                (_, None) => {}
            },
        }
    }
    if let Some(first) = first {
        report(first, lines, quotas);
    }
}

/// Returns whether the line describes a quota, and not a wait.
fn is_of_quota(entry: &GroupEntry<'_>) -> bool {
    entry.header.role != Role::RetryAfter
}

/// Returns whether the line has no name and belongs to the families that describe the same bucket.
fn is_same_bucket(entry: &GroupEntry<'_>) -> bool {
    let header = &entry.header;
    let is_unnamed = header.is_unnamed() && header.part.is_empty();
    Family::SYNONYMS.contains(&header.family) && is_unnamed && is_of_quota(entry)
}

/// Returns whether two groups cannot describe the same bucket.
fn is_other(first: &Group, other: &Group) -> bool {
    let limits = [first, other].map(|group| group.quotas.first()?.limit);
    let differ = matches!(limits, [Some(one), Some(two)] if one != two);
    differ || first.is_parallel() || other.is_parallel()
}

/// Reports quotas, which a separate header may name.
fn report(group: Group, lines: &Lines<'_>, quotas: &mut Drafts) {
    let given_name = label(lines, |family| Family::SYNONYMS.contains(&family));
    quotas.extend(group.quotas.into_iter().map(|quota| ObservedQuota {
        name: quota.name.or_else(|| given_name.clone()),
        ..quota
    }));
}

/// Returns the name that a header such as `X-RateLimit-Name` gives to the quota of a family.
fn label<'a>(lines: &Lines<'a>, is_of: impl Fn(Family<'a>) -> bool) -> Option<Box<str>> {
    for name in NAMES {
        for line in lines.iter().filter(|line| line.name.ends_with(name)) {
            if family(line.name).is_some_and(|(family, rest)| rest == name && is_of(family)) {
                return Text::boxed(line.value);
            }
        }
    }
    None
}
