//! Meta's formats: JSON in a header, with percentages of the limit.

use super::Here;
use crate::signal::draft::{Draft, Drafts};
use crate::signal::parse::json::{Node, Str, Value, visit};
use crate::signal::parse::number::Number;
use crate::signal::parse::text::Text;
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
        let (Some(key), Value::Number(number)) = (node.key, node.value) else {
            return;
        };
        let Some(number) = Number::read(number).filter(|number| !number.negative) else {
            return;
        };
        if shares.iter().any(|share| key.is(share)) {
            self.used = self.used.max(Some(number.count_up(1)));
        } else if reset.is_some_and(|reset| key.is(reset)) {
            self.reset = time::window_of(unit, number);
        }
    }

    fn draft(self, name: Option<Text>) -> Option<Draft> {
        let draft = Draft {
            name,
            reset: self.reset,
            ..Draft::default()
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
    quotas.extend(usage.draft(Text::some(name)));
}

/// `{"66782684":[{"type":"ads_management","call_count":95,"estimated_time_to_regain_access":19}]}`
pub(super) fn business(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let mut case = UseCase::default();
    visit(here.first().unwrap_or_default(), |node| {
        match (node.depth, node.value) {
            (0, value) => case.in_object = matches!(value, Value::Object),
            (1, value) => {
                quotas.extend(case.end());
                case.owner = node
                    .key
                    .filter(|_| case.in_object && matches!(value, Value::Array));
            }
            (2, value) => {
                quotas.extend(case.end());
                case.is_open = matches!(value, Value::Object);
            }
            (3, Value::Text(kind)) if node.key.is_some_and(|key| key.is("type")) => {
                case.kind = Some(kind);
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
    in_object: bool,
    owner: Option<Str<'a>>,
    is_open: bool,
    kind: Option<Str<'a>>,
    usage: MetaUsage,
}

impl UseCase<'_> {
    /// Returns the quota of the case, if there is one, and forgets the case but for its owner.
    fn end(&mut self) -> Option<Draft> {
        let usage = std::mem::take(&mut self.usage);
        let kind = self.kind.take();
        let owner = self.owner.filter(|_| std::mem::take(&mut self.is_open))?;
        let kind = kind
            .into_iter()
            .flat_map(|kind| ":".chars().chain(kind.chars()));
        let name: Text = owner.chars().chain(kind).collect();
        let draft = usage.draft(Some(name).filter(|name| *name != Text::EMPTY))?;
        let remaining = usage.reset.map_or(draft.remaining, |_| Some(0));
        Some(Draft { remaining, ..draft })
    }
}
