//! Meta's formats: JSON in a header, with percentages of the limit.

use super::Here;
use crate::signal::draft::{Draft, Drafts};
use crate::signal::parse::json::{Node, Str, Value, visit};
use crate::signal::parse::number::Number;
use crate::signal::parse::text::Text;
use crate::signal::parse::time;

/// The percentages of a use case; the largest counts.
const SHARES: [&str; 3] = ["call_count", "total_cputime", "total_time"];

/// `{"call_count":28,"total_time":25,"total_cputime":25}`
pub(super) fn app(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let mut used = None;
    each_member(here, |key, number| {
        if SHARES.iter().any(|share| key.is(share)) {
            used = used.max(Some(number.count_up(1)));
        }
    });
    used.into_iter()
        .for_each(|used| quotas.push(Draft::named("app").percent(used)));
}

/// `{"acc_id_util_pct":9.67,"reset_time_duration":100}`
pub(super) fn ad_account(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let (mut used, mut reset) = (None, None);
    each_member(here, |key, number| {
        if key.is("acc_id_util_pct") {
            used = Some(number.count_up(1));
        } else if key.is("reset_time_duration") {
            reset = time::window_of(1000, number);
        }
    });
    let draft = |used| Draft {
        reset,
        ..Draft::named("ad-account").percent(used)
    };
    used.into_iter().for_each(|used| quotas.push(draft(used)));
}

/// `{"app_id_util_pct":100,"acc_id_util_pct":10}`
pub(super) fn ads_insights(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let (mut of_app, mut of_account) = (None, None);
    each_member(here, |key, number| {
        if key.is("app_id_util_pct") {
            of_app = Some(number.count_up(1));
        } else if key.is("acc_id_util_pct") {
            of_account = Some(number.count_up(1));
        }
    });
    let mut report = |used: Option<u64>, name| {
        used.into_iter()
            .for_each(|used| quotas.push(Draft::named(name).percent(used)));
    };
    report(of_app, "ads-insights-app");
    report(of_account, "ads-insights-account");
}

/// `{"66782684":[{"type":"ads_management","call_count":95,"estimated_time_to_regain_access":19}]}`
pub(super) fn business(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let Some(text) = here.first() else { return };
    let mut owner: Option<Str<'_>> = None;
    let mut case: Option<Case<'_>> = None;
    let mut is_object = false;
    visit(text, |Node { depth, key, value }| {
        is_object |= depth == 0 && matches!(value, Value::Object);
        match (depth, key, value) {
            (1, _, _) => {
                case.take().into_iter().for_each(|case| case.report(quotas));
                owner = key.filter(|_| is_object && matches!(value, Value::Array));
            }
            (2, None, _) => {
                case.take().into_iter().for_each(|case| case.report(quotas));
                let object = matches!(value, Value::Object);
                case = owner.filter(|_| object).map(|owner| Case {
                    owner,
                    kind: None,
                    used: None,
                    reset: None,
                });
            }
            (3, Some(key), value) => case.iter_mut().for_each(|case| case.member(key, value)),
            _ => {}
        }
    });
    case.into_iter().for_each(|case| case.report(quotas));
}

/// One use case of a business.
struct Case<'a> {
    owner: Str<'a>,
    kind: Option<Str<'a>>,
    used: Option<u64>,
    reset: Option<u64>,
}

impl<'a> Case<'a> {
    fn member(&mut self, key: Str<'a>, value: Value<'a>) {
        let number = if let Value::Number(number) = value {
            Number::read(number)
        } else {
            None
        };
        match (value, number) {
            (Value::Text(kind), _) if key.is("type") => self.kind = Some(kind),
            (_, Some(share)) if SHARES.iter().any(|name| key.is(name)) => {
                self.used = self.used.max(Some(share.count_up(1)));
            }
            (_, Some(minutes)) if key.is("estimated_time_to_regain_access") => {
                self.reset = time::window_of(60_000, minutes);
            }
            _ => {}
        }
    }

    fn report(self, quotas: &mut Drafts) {
        let Some(used) = self.used else { return };
        let mut name = self.owner.chars().collect::<Text>();
        if let Some(kind) = self.kind {
            name.push(':');
            kind.chars().for_each(|letter| name.push(letter));
        }
        let name = Some(name).filter(|name| *name != Text::EMPTY);
        let mut draft = Draft {
            name,
            ..Draft::default()
        }
        .percent(used);
        if self.reset.is_some() {
            draft = Draft {
                reset: self.reset,
                remaining: Some(0),
                ..draft
            };
        }
        quotas.push(draft);
    }
}

/// Returns the numbers that are members of the object, in the first line.
fn each_member(here: &Here<'_, '_>, mut each: impl FnMut(Str<'_>, Number)) {
    let Some(text) = here.first() else { return };
    visit(text, |node| {
        if let Node {
            depth: 1,
            key: Some(key),
            value: Value::Number(number),
        } = node
        {
            Number::read(number)
                .filter(|number| !number.negative)
                .into_iter()
                .for_each(|number| each(key, number));
        }
    });
}
