//! Formats that are neither separate fields nor JSON.

use super::{Here, set_limit, set_remaining};
use crate::signal::draft::{Draft, Drafts};
use crate::signal::generic::lines::{parameter, split, trim};
use crate::signal::parse::number::{Count, Number, digits, plain};
use crate::signal::parse::text::{Bounded, Text};
use crate::signal::parse::time;

/// `x-amzn-ratelimit-limit: 0.0167`
pub(super) fn amazon(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let Some(rate) = here
        .first()
        .and_then(Number::read)
        .filter(|rate| !rate.negative)
    else {
        return;
    };
    let (limit, window) = match rate.count().known() {
        Some(0) => {
            let Some(window) = rate.inverse_up(1000) else {
                return;
            };
            (
                1,
                u64::try_from(window).unwrap_or(u64::MAX).min(time::LONGEST),
            )
        }
        Some(limit) => (limit, 1000),
        None => return,
    };
    quotas.push(Draft {
        limit: Some(limit),
        window: Some(window),
        ..Draft::default()
    });
}

/// `b=per_hour;q=10;r=9;t=774,b=per_day;q=100;r=99;t=22374`
pub(super) fn auth0_client(here: &Here<'_, '_>, quotas: &mut Drafts) {
    auth0(here, "client", quotas);
}

pub(super) fn auth0_organization(here: &Here<'_, '_>, quotas: &mut Drafts) {
    auth0(here, "organization", quotas);
}

fn auth0(here: &Here<'_, '_>, owner: &str, quotas: &mut Drafts) {
    for item in here.all().flat_map(|(_, value)| split(value, ',')) {
        let head = split(item, ';').next().filter(|head| !head.contains('='));
        let bucket = parameter(item, "b").or(head).unwrap_or_default();
        let colon = if bucket.is_empty() { "" } else { ":" };
        let mut draft = Draft {
            name: Some(Text::of(&[owner, colon, bucket])),
            ..Draft::default()
        };
        draft.window = time::period_of(bucket);
        let mut unlimited = false;
        parameter(item, "q")
            .into_iter()
            .for_each(|limit| set_limit(&mut draft, &mut unlimited, limit));
        parameter(item, "r")
            .into_iter()
            .for_each(|remaining| set_remaining(&mut draft, remaining));
        draft.reset = parameter(item, "t").and_then(|reset| here.base.read(reset));
        if !unlimited {
            quotas.push(draft);
        }
    }
}

/// `Microsoft.Compute/PutVM3Min;239,Microsoft.Compute/PutVM30Min;1198`
pub(super) fn azure(here: &Here<'_, '_>, quotas: &mut Drafts) {
    for item in here.all().flat_map(|(_, value)| split(value, ',')) {
        let Some((name, remaining)) = item.rsplit_once(';') else {
            continue;
        };
        let name = trim(name);
        let mut draft = Draft {
            window: period_at_end(name),
            ..Draft::named(name)
        };
        set_remaining(&mut draft, trim(remaining));
        quotas.push(draft);
    }
}

/// `…3Min`
fn period_at_end(name: &str) -> Option<u64> {
    let start = ["Sec", "Min", "Hour", "Day"]
        .iter()
        .find_map(|unit| name.strip_suffix(unit))?;
    let count = start.len() - start.bytes().rev().take_while(u8::is_ascii_digit).count();
    (count < start.len()).then(|| time::period(&name[count..]))?
}

pub(super) fn binance_weight(here: &Here<'_, '_>, quotas: &mut Drafts) {
    binance(here, "used-weight", "weight", quotas);
}

pub(super) fn binance_orders(here: &Here<'_, '_>, quotas: &mut Drafts) {
    binance(here, "order-count", "orders", quotas);
}

pub(super) fn binance_ip(here: &Here<'_, '_>, quotas: &mut Drafts) {
    binance(here, "ip-weight", "weight", quotas);
}

pub(super) fn binance_uid(here: &Here<'_, '_>, quotas: &mut Drafts) {
    binance(here, "uid-weight", "weight", quotas);
}

/// `x-mbx-used-weight-1m: 70`; the older form has no window.
fn binance(here: &Here<'_, '_>, name: &str, unit: &str, quotas: &mut Drafts) {
    let start = here.row.headers[0].len() - 1;
    let (mut plain, mut with_window) = (None, false);
    let mut seen = Bounded::<&str, 16>::new();
    for (header, value) in here.all() {
        let used = Count::read(value).and_then(Count::known);
        let draft = Draft {
            unit: Text::some(unit),
            used,
            ..Draft::named(name)
        };
        match header[start..].strip_prefix('-') {
            None if header.len() == start => plain = plain.or(Some(draft)),
            None => {}
            Some(suffix) => {
                let window = time::period(suffix).filter(|_| is_short(suffix));
                if window.is_some() && !seen.contains(&suffix) {
                    with_window = true;
                    seen.push(suffix);
                    quotas.push(Draft { window, ..draft });
                }
            }
        }
    }
    plain
        .filter(|_| !with_window)
        .into_iter()
        .for_each(|draft| quotas.push(draft));
}

/// `10s`
fn is_short(suffix: &str) -> bool {
    matches!(digits(suffix), (count, "s" | "m" | "h" | "d") if !count.is_empty())
}

/// `api-usage=25/5000; per-app-api-usage=17/250(appName=sample-connected-app)`
pub(super) fn salesforce(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let read = |item: &str| {
        let (name, usage) = item.split_once('=').filter(|(name, _)| !name.is_empty())?;
        let (used, limit) = usage.split_once('/')?;
        let (used, limit) = (plain(used)?, plain(digits(limit).0)?);
        let (limit, used, window) = (Some(limit), Some(used), Some(super::DAY));
        Some(Draft {
            name: Some(Text::lower(name)),
            limit,
            used,
            window,
            ..Draft::default()
        })
    };
    for item in here
        .all()
        .flat_map(|(_, value)| value.split([',', ';', ' ']))
    {
        read(item).into_iter().for_each(|draft| quotas.push(draft));
    }
}

/// `60:transaction:key, 2700:default;error;security:organization`
pub(super) fn sentry(here: &Here<'_, '_>, quotas: &mut Drafts) {
    for item in here.all().flat_map(|(_, value)| split(value, ',')) {
        let mut parts = item.split(':');
        let reset = parts.next().and_then(|text| here.base.read(trim(text)));
        let categories = parts
            .next()
            .map(trim)
            .filter(|categories| !categories.is_empty());
        if reset.is_some() {
            quotas.push(Draft {
                remaining: Some(0),
                reset,
                ..Draft::named(categories.unwrap_or("all"))
            });
        }
    }
}
