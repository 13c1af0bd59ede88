//! The structured fields `RateLimit-Policy` and `RateLimit` of the IETF draft "RateLimit header
//! fields for HTTP".

use crate::signal::generic::group::{Policies, Stated};
use crate::signal::generic::lines::{Lines, parameter, split};
use crate::signal::observed::{Drafts, ObservedQuota};
use crate::signal::parse::number::{Count, Number, unquoted};
use crate::signal::parse::text::{Bounded, Text};
use crate::signal::parse::time::{self, Base};
use crate::signal::standard::structured::{self, Bare, Item};

/// The content of both fields.
#[derive(Debug, Default)]
pub(in crate::signal) struct Fields {
    /// Whether there was a limit of the service; older forms are then ignored.
    pub(in crate::signal) service: bool,
    /// The policies without name, of older drafts.
    pub(in crate::signal) unnamed: Policies,
    /// `RateLimit: limit=100, remaining=50, reset=5` of draft 07.
    pub(in crate::signal) dictionary: Option<Stated>,
}

const POLICY: &str = "ratelimit-policy";
const SERVICE: &str = "ratelimit";

/// A named policy, and the quota made of it.
struct Named {
    draft: ObservedQuota,
    key: Option<Text>,
    referred: bool,
}

/// Returns whether the name is the name of one of the two fields.
pub(in crate::signal) fn is_ours(name: &str) -> bool {
    name == POLICY || name == SERVICE
}

/// Reads both fields. The quotas are the limits of the service, and the named policies to which
/// none of them refers.
///
/// A server may send both with a prefix, such as `Beta-`. Such fields state named limits alone.
pub(in crate::signal) fn read(lines: &Lines<'_>, base: &Base, quotas: &mut Drafts) -> Fields {
    let mut fields = Fields::default();
    for line in lines.iter() {
        match line.name.strip_suffix(SERVICE) {
            Some("") => fields.service = true,
            Some(prefix) if prefix.ends_with('-') && line.value.starts_with('"') => {
                both(lines, prefix, &mut Policies::new(), base, quotas);
            }
            _ => fields.service |= line.name == POLICY,
        }
    }
    if fields.service {
        fields.service = both(lines, "", &mut fields.unnamed, base, quotas);
        if !fields.service {
            fields.dictionary = dictionary(&lines.joined(SERVICE), base);
        }
    }
    fields
}

/// Reads the two fields with this prefix. Returns whether there is a limit of the service.
fn both(
    lines: &Lines<'_>,
    prefix: &str,
    unnamed: &mut Policies,
    base: &Base,
    quotas: &mut Drafts,
) -> bool {
    let mut named = Bounded::<Named, 16>::new();
    let policies = lines.joined(&[prefix, POLICY].concat());
    match structured::list(&policies) {
        Some(items) => items.for_each(|item| policy(&item, &mut named, unnamed)),
        None => split(&policies, ',').for_each(|item| policy(&spelled(item), &mut named, unnamed)),
    }
    let mut any = false;
    let services = lines.joined(&[prefix, SERVICE].concat());
    for item in structured::list(&services).into_iter().flatten() {
        if let Some(draft) = service(&item, &mut named, base) {
            quotas.push(draft);
            any = true;
        }
    }
    named
        .into_iter()
        .filter(|policy| !policy.referred)
        .for_each(|policy| quotas.push(policy.draft));
    any
}

/// Reads an item of a policy that is no valid structured field: its name is the last part without
/// `=`, as in `"fixed window";"api";q=2500;w=300`.
fn spelled(item: &str) -> Item {
    let names = split(item, ';').filter(|part| !part.is_empty() && !part.contains('='));
    let [quota, window] = [["q", "quota"], ["w", "window"]].map(|[short, long]| {
        Number::read(parameter(item, short).or_else(|| parameter(item, long))?)
    });
    Item {
        bare: names.last().map(|name| match Number::read(name) {
            Some(number) => Bare::Number(number),
            None => Bare::Text(Text::of(&[unquoted(name)])),
        }),
        q: quota,
        w: window,
        ..Item::default()
    }
}

fn policy(item: &Item, named: &mut Bounded<Named, 16>, unnamed: &mut Policies) {
    let window = item.w.and_then(|seconds| time::window_of(1000, seconds));
    match item.bare {
        Some(Bare::Text(name)) => {
            if let Some(Count::Of(limit)) = item.q.map(|number| number.count()) {
                let draft = ObservedQuota {
                    name: Some(name.into()),
                    limit: Some(limit),
                    window,
                    unit: item.qu.map(Box::from),
                    ..ObservedQuota::default()
                };
                named.push(Named {
                    draft,
                    key: item.pk,
                    referred: false,
                });
            }
        }
        Some(Bare::Number(number)) => {
            if let Count::Of(limit) = number.count() {
                unnamed.push(ObservedQuota {
                    name: item.name.map(Box::from),
                    limit: Some(limit),
                    window,
                    ..ObservedQuota::default()
                });
            }
        }
        _ => {}
    }
}

fn service(item: &Item, named: &mut Bounded<Named, 16>, base: &Base) -> Option<ObservedQuota> {
    let Some(Bare::Text(name)) = item.bare else {
        return None;
    };
    item.r.or(item.t)?;
    let mut draft = ObservedQuota {
        name: Some(name.into()),
        ..ObservedQuota::default()
    };
    draft.limit = item.q.and_then(|number| number.count().known());
    draft.remaining = item.r.map(|number| number.count().known().unwrap_or(0));
    draft.reset_after = item.t.map(|number| base.number(number));
    draft.window = item.w.and_then(|seconds| time::window_of(1000, seconds));
    let policy = named.iter_mut().find(|policy| {
        let is_same_key = policy.key == item.pk || policy.key.is_none() || item.pk.is_none();
        policy.draft.name == draft.name && is_same_key
    });
    if let Some(policy) = policy {
        policy.referred = true;
        draft.limit = draft.limit.or(policy.draft.limit);
        draft.window = draft.window.or(policy.draft.window);
        draft.unit = policy.draft.unit.clone();
    }
    Some(draft)
}

fn dictionary(field: &str, base: &Base) -> Option<Stated> {
    let (mut limit, mut remaining, mut reset) = (None, None, None);
    for (key, bare) in structured::dictionary(field)? {
        let number = bare.and_then(Bare::number);
        match key {
            "limit" => limit = number,
            "remaining" => remaining = number,
            "reset" => reset = number,
            _ => {}
        }
    }
    limit.or(remaining).or(reset)?;
    let [limit, remaining] = [limit, remaining].map(|number| Some(number?.count()));
    Some(Stated::of(
        limit,
        remaining,
        reset.map(|reset| base.number(reset)),
    ))
}
