//! The structured fields `RateLimit-Policy` and `RateLimit` of the IETF draft "RateLimit header
//! fields for HTTP".

use crate::signal::draft::{Draft, Drafts, Unit};
use crate::signal::generic::lines::Lines;
use crate::signal::parse::number::{Count, Number};
use crate::signal::parse::text::{Bounded, Text};
use crate::signal::parse::time::{self, Base};
use crate::signal::standard::structured::{self, Bare, Item};

/// A limit that a policy states; older drafts have no name for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::signal) struct Policy {
    pub(in crate::signal) name: Option<Text>,
    pub(in crate::signal) limit: u64,
    pub(in crate::signal) window: Option<u64>,
}

pub(in crate::signal) type Policies = Bounded<Policy, 8>;

/// The content of both fields.
#[derive(Debug)]
pub(in crate::signal) struct Fields {
    /// Whether there was a limit of the service; older forms are then ignored.
    pub(in crate::signal) service: bool,
    /// The policies without name, of older drafts.
    pub(in crate::signal) unnamed: Policies,
    /// `RateLimit: limit=100, remaining=50, reset=5` of draft 07.
    pub(in crate::signal) dictionary: Option<Dictionary>,
}

/// The values that replace `RateLimit-Limit`, `-Remaining` and `-Reset`.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::signal) struct Dictionary {
    pub(in crate::signal) limit: Option<Count>,
    pub(in crate::signal) remaining: Option<Count>,
    pub(in crate::signal) reset: Option<u64>,
}

const POLICY: &str = "ratelimit-policy";
const SERVICE: &str = "ratelimit";

/// A named policy, and the quota made of it.
struct Named {
    draft: Draft,
    key: Option<u64>,
    referred: bool,
}

/// Returns whether the name is the name of one of the two fields.
pub(in crate::signal) fn is_ours(name: &str) -> bool {
    name == POLICY || name == SERVICE
}

/// Reads both fields. The quotas are the limits of the service, and the named policies to which
/// none of them refers.
pub(in crate::signal) fn read(lines: &Lines<'_>, base: &Base, quotas: &mut Drafts) -> Fields {
    let mut fields = Fields {
        service: false,
        unnamed: Policies::new(),
        dictionary: None,
    };
    if !lines.iter().any(|line| is_ours(line.name)) {
        return fields;
    }
    let mut named = Bounded::<Named, 16>::new();
    if structured::list(lines.all(POLICY), |_| ()) {
        structured::list(lines.all(POLICY), |item| {
            policy(item, &mut named, &mut fields.unnamed)
        });
    }
    if structured::list(lines.all(SERVICE), |_| ()) {
        structured::list(lines.all(SERVICE), |item| {
            if let Some(draft) = service(item, &mut named, base) {
                quotas.push(draft);
                fields.service = true;
            }
        });
    } else if structured::dictionary(lines.all(SERVICE), |_, _| ()) {
        fields.dictionary = dictionary(lines, base);
    }
    named
        .iter()
        .filter(|policy| !policy.referred)
        .for_each(|policy| quotas.push(policy.draft));
    fields
}

fn policy(item: &Item, named: &mut Bounded<Named, 16>, unnamed: &mut Policies) {
    let window = item.w.and_then(seconds);
    match item.bare {
        Some(Bare::Text(name)) => {
            if let Some(Count::Of(limit)) = item.q.map(|number| number.count()) {
                let unit = item.qu.map_or(Unit::Open, Unit::Stated);
                let draft = Draft {
                    name: Some(name),
                    limit: Some(limit),
                    window,
                    unit,
                    ..Draft::default()
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
                unnamed.push(Policy {
                    name: item.name,
                    limit,
                    window,
                });
            }
        }
        _ => {}
    }
}

fn service(item: &Item, named: &mut Bounded<Named, 16>, base: &Base) -> Option<Draft> {
    let Some(Bare::Text(name)) = item.bare else {
        return None;
    };
    item.r.or(item.t)?;
    let mut draft = Draft {
        name: Some(name),
        ..Draft::default()
    };
    draft.limit = item.q.and_then(|number| number.count().known());
    draft.remaining = item.r.map(|number| number.count().known().unwrap_or(0));
    draft.reset = item.t.and_then(|number| base.number(number));
    draft.window = item.w.and_then(seconds);
    let same_key = |key: Option<u64>| key == item.pk || key.is_none() || item.pk.is_none();
    if let Some(policy) = named
        .iter_mut()
        .find(|policy| policy.draft.name == draft.name && same_key(policy.key))
    {
        policy.referred = true;
        draft.limit = draft.limit.or(policy.draft.limit);
        draft.window = draft.window.or(policy.draft.window);
        draft.unit = policy.draft.unit;
    }
    Some(draft)
}

fn dictionary(lines: &Lines<'_>, base: &Base) -> Option<Dictionary> {
    let (mut found, mut any) = (Dictionary::default(), false);
    structured::dictionary(lines.all(SERVICE), |key, bare| {
        let number = if let Some(Bare::Number(number)) = bare {
            Some(number)
        } else {
            None
        };
        let count = number.map(|number| number.count());
        match key {
            "limit" => found.limit = count,
            "remaining" => found.remaining = count,
            "reset" => found.reset = number.and_then(|number| base.number(number)),
            _ => return,
        }
        any |= number.is_some();
    });
    any.then_some(found)
}

/// Returns a window of `seconds` seconds.
fn seconds(number: Number) -> Option<u64> {
    Some(time::seconds(number)).filter(|span| *span > 0)
}
