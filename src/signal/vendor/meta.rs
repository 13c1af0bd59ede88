//! Meta's formats: JSON in a header, with percentages of the limit.

use std::borrow::Cow;

use json_event_parser::JsonEvent;

use super::Here;
use crate::signal::observed::{Drafts, ObservedQuota};
use crate::signal::parse::json::{Node, visit};
use crate::signal::parse::number::Number;
use crate::signal::parse::time;

/// The keys of the percentages of a use case.
pub(super) const SHARES: [&str; 3] = ["call_count", "total_cputime", "total_time"];

/// What an object states: the largest of its percentages, and the time to a reset.
#[derive(Clone, Copy, Debug, Default)]
struct MetaUsage {
    used: Option<u64>,
    reset: Option<u64>,
}

impl MetaUsage {
    /// Adds a member. `reset` is the key of a time, which counts `unit` milliseconds.
    fn member(&mut self, node: Node<'_>, shares: &[&str], reset: Option<&str>, unit: u32) {
        let (Some(key), JsonEvent::Number(number)) = (node.key, node.value) else {
            return;
        };
        let Some(number) = Number::read(&number).filter(|number| !number.negative) else {
            return;
        };
        if shares.contains(&&*key) {
            self.used = self.used.max(Some(number.count_up(1)));
        } else if reset == Some(&*key) {
            self.reset = time::window_of(unit, number);
        }
    }

    fn draft(self, name: &str) -> Option<ObservedQuota> {
        let draft = ObservedQuota {
            reset_after: self.reset,
            ..ObservedQuota::named(name)
        };
        self.used.map(|used| draft.percent(used))
    }
}

/// Reads the members of one object: `{"acc_id_util_pct":9.67,"reset_time_duration":100}`
pub(super) fn object(
    here: &Here<'_, '_>,
    name: &str,
    shares: &[&str],
    reset: Option<&str>,
    quotas: &mut Drafts,
) {
    let mut usage = MetaUsage::default();
    visit(here.first().unwrap_or_default(), |node| {
        if node.depth == 1 {
            usage.member(node, shares, reset, 1000);
        }
    });
    quotas.extend(usage.draft(name));
}

/// `{"66782684":[{"type":"ads_management","call_count":95,"estimated_time_to_regain_access":19}]}`
pub(super) fn business(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let mut case = UseCase::default();
    visit(here.first().unwrap_or_default(), |node| {
        match (node.depth, &node.value) {
            (1, value) => {
                quotas.extend(case.end());
                case.owner = node.key.filter(|_| *value == JsonEvent::StartArray);
            }
            (2, value) => {
                quotas.extend(case.end());
                case.is_open = *value == JsonEvent::StartObject;
            }
            (3, JsonEvent::String(kind)) if node.key.as_deref() == Some("type") => {
                case.kind = Some(kind.clone());
            }
            (3, _) => {
                let reset = Some("estimated_time_to_regain_access");
                case.usage.member(node, &SHARES, reset, 60_000);
            }
            _ => {}
        }
    });
    quotas.extend(case.end());
}

/// The last use case of a business.
#[derive(Debug, Default)]
struct UseCase<'a> {
    owner: Option<Cow<'a, str>>,
    is_open: bool,
    kind: Option<Cow<'a, str>>,
    usage: MetaUsage,
}

impl UseCase<'_> {
    /// Returns the quota of the case, if there is one, and forgets the case but for its owner.
    fn end(&mut self) -> Option<ObservedQuota> {
        let usage = std::mem::take(&mut self.usage);
        let kind = self.kind.take();
        let is_open = std::mem::take(&mut self.is_open);
        let owner = self.owner.as_deref().filter(|_| is_open)?;
        let name = match kind {
            Some(kind) => &[owner, ":", &kind].concat(),
            None => owner,
        };
        let draft = usage.draft(name)?;
        let remaining = usage.reset.map_or(draft.remaining, |_| Some(0));
        Some(ObservedQuota { remaining, ..draft })
    }
}
