//! Combines the quotas of all headers of a response, so that each bucket appears once.

use super::draft::{Draft, Drafts};
use super::generic::family::{Family, Header, Role};
use super::generic::group::{Entry, Group, Stated, own};
use super::generic::lines::Lines;
use super::parse::text::{Bounded, Text};
use super::parse::time::Base;
use super::standard::ratelimit::{self, Fields};
use super::vendor;

/// The lines of the generic families.
pub(super) type Entries<'a> = Bounded<Entry<'a>, { Lines::MOST }>;

/// The headers that name the bucket of a quota without a name, best first.
pub(super) const NAMES: [&str; 4] = [
    "ratelimit-name",
    "x-ratelimit-name",
    "x-ratelimit-resource",
    "x-ratelimit-bucket",
];

/// Sorts the lines into the generic families and the rows of the table.
pub(super) fn sort<'a>(lines: &Lines<'a>, entries: &mut Entries<'a>) -> vendor::Present {
    let mut present = vendor::Present::default();
    for line in lines.iter() {
        let header = Header::read(line.name);
        let is_vendors = !header.is_some_and(|header| Family::SYNONYMS.contains(&header.family));
        if is_vendors && present.mark(line.name) {
            continue;
        }
        if let Some(header) = header.filter(|_| !ratelimit::is_ours(line.name)) {
            let known = entries
                .iter()
                .find(|entry| entry.header.same_group(&header));
            let group = known.map_or(entries.len(), |entry| entry.group);
            entries.push(Entry {
                header,
                group,
                line: line.name,
                value: line.value,
            });
        }
    }
    present
}

/// Adds all quotas that the lines state.
pub(super) fn read(
    lines: &Lines<'_>,
    entries: &Entries<'_>,
    present: vendor::Present,
    base: &Base,
    quotas: &mut Drafts,
) {
    let fields = ratelimit::read(lines, base, quotas);
    same_bucket(lines, entries, &fields, base, quotas);
    for (place, entry) in entries.iter().enumerate() {
        let header = entry.header;
        let same = |other: &&Entry<'_>| is_of_quota(other) && other.group == entry.group;
        let is_first = !entries[..place].iter().any(|other| same(&other));
        if is_first && is_of_quota(entry) && !is_same_bucket(entry) {
            let name = Text::of(&header.pieces());
            let group = Stated::read(entries[place..].iter().filter(same).copied(), base).group(
                name.as_str(),
                header.family == Family::BySize,
                &[],
            );
            group.quotas.iter().for_each(|quota| quotas.push(*quota));
            if !fields.service {
                group.report_policies(quotas);
            }
        }
    }
    vendor::read(lines, present, base, quotas);
    quotas.keep(Draft::finish);
}

/// Combines the headers without a name of the families that describe the same bucket, and policies
/// without a name.
fn same_bucket(
    lines: &Lines<'_>,
    entries: &Entries<'_>,
    fields: &Fields,
    base: &Base,
    quotas: &mut Drafts,
) {
    // A limit of the service states all of this in the newer form.
    if fields.service {
        return;
    }
    let mut first: Option<Group> = None;
    for family in Family::SYNONYMS {
        let of_family = |entry: &&Entry<'_>| entry.header.family == family && is_same_bucket(entry);
        let policies = if family == Family::Plain {
            &fields.unnamed[..]
        } else {
            &[]
        };
        let stated = match fields.dictionary {
            Some(dictionary) if family == Family::Plain => Stated::of(&dictionary),
            _ if entries.iter().any(|entry| of_family(&entry)) => {
                Stated::read(entries.iter().filter(of_family).copied(), base)
            }
            _ => {
                policies.iter().for_each(|policy| quotas.push(own(policy)));
                continue;
            }
        };
        let group = stated.group("", false, policies);
        group.report_policies(quotas);
        match &mut first {
            None => first = Some(group),
            Some(first) if is_other(first, &group) => report(&group, lines, quotas),
            Some(first) => {
                let filling = group.quotas.first();
                match first.quotas.first_mut() {
                    Some(quota) => filling.into_iter().for_each(|filling| quota.fill(filling)),
                    None => filling
                        .into_iter()
                        .for_each(|filling| first.quotas.push(*filling)),
                }
            }
        }
    }
    first
        .into_iter()
        .for_each(|group| report(&group, lines, quotas));
}

/// Returns whether the line describes a quota, and not a wait.
fn is_of_quota(entry: &Entry<'_>) -> bool {
    entry.header.role != Role::RetryAfter
}

/// Returns whether the line has no name and belongs to the families that describe the same bucket.
fn is_same_bucket(entry: &Entry<'_>) -> bool {
    let header = &entry.header;
    Family::SYNONYMS.contains(&header.family) && header.is_unnamed() && is_of_quota(entry)
}

/// Returns whether two groups cannot describe the same bucket.
fn is_other(first: &Group, other: &Group) -> bool {
    let limit = |group: &Group| group.quotas.first().and_then(|quota| quota.limit);
    let differ = matches!((limit(first), limit(other)), (Some(one), Some(two)) if one != two);
    differ || first.is_parallel() || other.is_parallel()
}

/// Reports quotas, which a separate header may name.
fn report(group: &Group, lines: &Lines<'_>, quotas: &mut Drafts) {
    let name = || {
        NAMES
            .iter()
            .find_map(|name| lines.first(name))
            .and_then(Text::some)
    };
    group.quotas.iter().for_each(|quota| {
        quotas.push(Draft {
            name: quota.name.or_else(name),
            ..*quota
        })
    });
}
