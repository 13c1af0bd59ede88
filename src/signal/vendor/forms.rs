//! Formats that are neither separate fields nor JSON.

use super::Here;
use crate::signal::generic::lines::{parameter, split, trim};
use crate::signal::observed::{Drafts, ObservedQuota};
use crate::signal::parse::number::{Count, Number, digits, plain};
use crate::signal::parse::text::Text;
use crate::signal::parse::time;

/// `x-amzn-ratelimit-limit: 0.0167`
pub(super) fn amazon(here: &Here<'_, '_>, quotas: &mut Drafts) {
    quotas.extend(here.first().and_then(Number::read).and_then(per_second));
}

/// Returns the quota of a rate. One below 1 is a request in a longer window.
fn per_second(rate: Number) -> Option<ObservedQuota> {
    let (limit, window) = match rate.count().known()? {
        0 => (1, u64::try_from(rate.inverse_up(1000)?).unwrap_or(u64::MAX)),
        limit => (limit, 1000),
    };
    Some(ObservedQuota {
        limit: Some(limit),
        window: Some(window.min(time::LONGEST)),
        ..ObservedQuota::default()
    })
}

/// `b=per_hour;q=10;r=9;t=774,b=per_day;q=100;r=99;t=22374`
pub(super) fn auth0(here: &Here<'_, '_>, quotas: &mut Drafts) {
    for (header, value) in here.all() {
        let owner = match header.contains("client") {
            true => "client",
            false => "organization",
        };
        for item in split(value, ',') {
            let head = split(item, ';').next().filter(|head| !head.contains('='));
            let bucket = parameter(item, "b").or(head).unwrap_or_default();
            let colon = if bucket.is_empty() { "" } else { ":" };
            let quota = ObservedQuota {
                window: time::period_of(bucket),
                ..ObservedQuota::named(&[owner, colon, bucket].concat())
            };
            quotas.extend(here.quota(quota, ["q", "r", "t"].map(|key| parameter(item, key))));
        }
    }
}

/// `Microsoft.Compute/PutVM3Min;239,Microsoft.Compute/PutVM30Min;1198`
pub(super) fn azure(here: &Here<'_, '_>, quotas: &mut Drafts) {
    for (name, remaining) in here.items().filter_map(|item| item.rsplit_once(';')) {
        let name = trim(name);
        let draft = ObservedQuota {
            window: period_at_end(name),
            ..ObservedQuota::named(name)
        };
        quotas.extend(here.quota(draft, [None, Some(trim(remaining)), None]));
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

/// `x-mbx-used-weight-1m: 70`; the older form has no window.
pub(super) fn binance(here: &Here<'_, '_>, quotas: &mut Drafts) {
    for header in here.row.headers {
        let start = header.trim_end_matches('*');
        let name = start
            .trim_start_matches("x-mbx-")
            .trim_start_matches("x-sapi-used-");
        let unit = match name.ends_with("weight") {
            true => "weight",
            false => "orders",
        };
        let (mut plain, mut has_window) = (None, false);
        for line in here.lines.iter() {
            let Some(suffix) = line.name.strip_prefix(start) else {
                continue;
            };
            let window = suffix.strip_prefix('-').filter(|suffix| is_short(suffix));
            let quota = ObservedQuota {
                unit: Some(unit.into()),
                used: Count::read(line.value).and_then(Count::known),
                window: window.and_then(time::period),
                ..ObservedQuota::named(name)
            };
            if quota.window.is_some() {
                has_window = true;
                quotas.push(quota);
            } else if suffix.is_empty() {
                plain = plain.or(Some(quota));
            }
        }
        quotas.extend(plain.filter(|_| !has_window));
    }
}

/// `10s`
fn is_short(suffix: &str) -> bool {
    matches!(digits(suffix), (count, "s" | "m" | "h" | "d") if !count.is_empty())
}

/// `api-usage=25/5000; per-app-api-usage=17/250(appName=sample-connected-app)`
pub(super) fn salesforce(here: &Here<'_, '_>, quotas: &mut Drafts) {
    let lines = here.all().map(|(_, value)| value);
    quotas.extend(
        lines
            .flat_map(|line| line.split([',', ';', ' ']))
            .filter_map(usage),
    );
}

/// `api-usage=25/5000`
fn usage(item: &str) -> Option<ObservedQuota> {
    let (name, usage) = item.split_once('=').filter(|(name, _)| !name.is_empty())?;
    let (used, limit) = usage.split_once('/')?;
    Some(ObservedQuota {
        name: Some(Text::lower(name).into()),
        limit: Some(plain(digits(limit).0)?),
        used: Some(plain(used)?),
        window: Some(time::MILLIS_OF_DAY),
        ..ObservedQuota::default()
    })
}

/// `60:transaction:key, 2700:default;error;security:organization`
pub(super) fn sentry(here: &Here<'_, '_>, quotas: &mut Drafts) {
    for item in here.items() {
        let mut parts = item.split(':');
        let reset = parts.next().and_then(|text| here.base.read(trim(text)));
        let categories = parts
            .next()
            .map(trim)
            .filter(|categories| !categories.is_empty());
        if reset.is_some() {
            quotas.push(ObservedQuota {
                remaining: Some(0),
                reset_after: reset,
                ..ObservedQuota::named(categories.unwrap_or("all"))
            });
        }
    }
}
