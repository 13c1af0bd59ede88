//! Reads a signal from status, headers and body: the order of the steps.

use std::time::{Duration, SystemTime};

use http::header::{AGE, DATE};
use http::{HeaderMap, StatusCode};

use super::generic::lines::{self, Line, Lines};
use super::observed::Drafts;
use super::parse::date;
use super::parse::number::Number;
use super::parse::time::Base;
use super::refusal::{self, Said};
use super::standard::retry_after;
use super::{ObservedQuota, Signal, body, combine};

/// Reads a response that arrived at `now`.
#[inline(never)]
pub(super) fn signal(
    status: Option<StatusCode>,
    headers: Option<&HeaderMap>,
    body: Option<&[u8]>,
    now: SystemTime,
) -> Signal {
    let now = millis(now);
    let stated = headers.and_then(|headers| lines::first_of(headers, &DATE));
    let base = Base {
        now,
        date: stated.and_then(|stated| date::http(stated, now)),
    };
    let repeated;
    let mut lines = Lines::none();
    headers.into_iter().for_each(|headers| lines.read(headers));
    if let (Some(body), Some(400..)) = (body, status.map(|status| status.as_u16()))
        && !lines.has_limit()
    {
        repeated = body::repeated(body);
        for (name, value) in repeated.iter() {
            let name = name.as_str();
            lines.add(Line { name, value });
        }
    }
    let entries = combine::sort(&lines);
    let hint = retry_after::read(&lines, &entries, &base);
    let mut quotas = Drafts::new();
    if !headers.is_some_and(is_cached) {
        combine::read(&lines, &entries, &base, &mut quotas);
    }
    let mut said = body.map_or_else(Said::default, |body| {
        body::read(body, status, &lines, &base, &mut quotas)
    });
    let code = lines.first(refusal::ERROR_TYPE);
    said.code |= code.is_some_and(refusal::is_code);
    quotas.keep(ObservedQuota::finish);
    let limited =
        status.filter(|status| refusal::is_limited(*status, hint, &said, &quotas, &lines));
    let asked = hint.or_else(|| limited.and(said.wait));
    // A quota without a stated Remaining has refused: the time to its reset is what the response asks for.
    let reset = limited
        .filter(|_| asked.is_none())
        .and_then(|_| refusal::longest_reset(&quotas, Some(0)));
    let wait = asked
        .or(reset)
        .or_else(|| limited.and_then(|_| refusal::longest_reset(&quotas, None).or(said.reset)));
    let is_global = limited.is_some() && said.global;
    let scope = refusal::scope(&lines).or_else(|| is_global.then(|| "global".into()));
    Signal {
        limited,
        retry_after: wait.map(Duration::from_millis),
        waits_for_reset: reset.is_some(),
        scope,
        quotas: quotas.into_iter().take(Signal::MOST_QUOTAS).collect(),
        spent: body.map_or_else(super::Spent::default, super::Spent::in_body),
    }
}

/// Returns whether the response comes from a cache, so that its quotas are old.
fn is_cached(headers: &HeaderMap) -> bool {
    let age = lines::first_of(headers, &AGE).and_then(Number::read);
    age.is_some_and(|age| !age.negative && age.times_up(1) > 0)
}

/// Returns the whole milliseconds since 1970.
fn millis(time: SystemTime) -> i64 {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_millis()).unwrap_or(i64::MAX),
        Err(before) => {
            -i64::try_from(before.duration().as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
        }
    }
}
