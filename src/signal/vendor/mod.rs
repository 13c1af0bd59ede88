//! Formats of single vendors: a table with one row for each format that the generic families do not
//! cover.
//!
//! To add a format, add a row, and a recorded response to its tests. The page of headers is made
//! from the table.

use super::generic::lines::{Lines, split};
use super::observed::{Drafts, ObservedQuota};
use super::parse::number::Count;
use super::parse::time::{Base, MILLIS_OF_DAY};

mod forms;
mod meta;

/// A row: the vendor, its headers, and how they are read.
#[derive(Debug)]
pub(super) struct Row {
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the page of headers is made from it")
    )]
    pub(super) sender: &'static str,
    /// The names in lower case; a name that ends in `*` stands for all names with this prefix.
    pub(super) headers: &'static [&'static str],
    pub(super) form: Form,
}

/// How the headers of a row are read.
#[derive(Debug)]
pub(super) enum Form {
    /// One quota, with its name and its window in milliseconds: each header is one field of it.
    Fields(&'static str, u64, &'static [Field]),
    /// A special format, and an example of it.
    Own(
        #[cfg_attr(
            not(test),
            expect(dead_code, reason = "the page of headers is made from it")
        )]
        &'static str,
        fn(&Here<'_, '_>, &mut Drafts),
    ),
}

/// A field of a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Limit,
    Remaining,
    Reset,
}

/// The input of a format.
#[derive(Debug)]
pub(super) struct Here<'h, 'a> {
    pub(super) row: &'static Row,
    pub(super) lines: &'h Lines<'a>,
    pub(super) base: &'h Base,
}

use Field::{Limit, Remaining, Reset};
use Form::{Fields, Own};

const MINUTE: u64 = 60_000;

pub(super) const ROWS: &[Row] = &[
    Row {
        sender: "Amazon Selling Partner API",
        headers: &["x-amzn-ratelimit-limit"],
        form: Own("requests per second", forms::amazon),
    },
    Row {
        sender: "Auth0",
        headers: &[
            "x-quota-client-limit",
            "auth0-quota-client-limit",
            "x-quota-organization-limit",
            "x-quota-organisation-limit",
            "auth0-quota-organization-limit",
            "auth0-quota-organisation-limit",
        ],
        form: Own("`b=per_hour;q=10;r=9;t=774, …`", forms::auth0),
    },
    Row {
        sender: "Azure Resource Manager",
        headers: &["x-ms-ratelimit-remaining-resource"],
        form: Own("`name;remaining, …`; a window from `…3Min`", forms::azure),
    },
    Row {
        sender: "Binance",
        headers: &[
            "x-mbx-used-weight*",
            "x-mbx-order-count*",
            "x-sapi-used-ip-weight*",
            "x-sapi-used-uid-weight*",
        ],
        form: Own(
            "used weight, or orders; a window from `-1m`",
            forms::binance,
        ),
    },
    Row {
        sender: "Bybit",
        headers: &[
            "x-bapi-limit",
            "x-bapi-limit-status",
            "x-bapi-limit-reset-timestamp",
        ],
        form: Fields("", 0, &[Limit, Remaining, Reset]),
    },
    Row {
        sender: "Cohere",
        headers: &[
            "x-trial-endpoint-call-limit",
            "x-trial-endpoint-call-remaining",
        ],
        form: Fields("trial-endpoint-call", 0, &[Limit, Remaining]),
    },
    Row {
        sender: "Cohere",
        headers: &[
            "x-endpoint-monthly-call-limit",
            "x-endpoint-monthly-call-remaining",
        ],
        form: Fields(
            "endpoint-monthly-call",
            30 * MILLIS_OF_DAY,
            &[Limit, Remaining],
        ),
    },
    Row {
        sender: "Etsy",
        headers: &["x-limit-per-second", "x-remaining-this-second"],
        form: Fields("second", 1000, &[Limit, Remaining]),
    },
    Row {
        sender: "Etsy",
        headers: &["x-limit-per-day", "x-remaining-today"],
        form: Fields("day", MILLIS_OF_DAY, &[Limit, Remaining]),
    },
    Row {
        sender: "Meta",
        headers: &["x-app-usage"],
        form: Own("JSON: percent used", |here, quotas| {
            meta::object(here, "app", &meta::SHARES, None, quotas);
        }),
    },
    Row {
        sender: "Meta",
        headers: &["x-ad-account-usage"],
        form: Own(
            "JSON: percent used, seconds to the reset",
            |here, quotas| {
                meta::object(
                    here,
                    "ad-account",
                    &["acc_id_util_pct"],
                    Some("reset_time_duration"),
                    quotas,
                );
            },
        ),
    },
    Row {
        sender: "Meta",
        headers: &["x-fb-ads-insights-throttle"],
        form: Own(
            "JSON: percent used, of the app and of the account",
            |here, quotas| {
                meta::object(here, "ads-insights-app", &["app_id_util_pct"], None, quotas);
                meta::object(
                    here,
                    "ads-insights-account",
                    &["acc_id_util_pct"],
                    None,
                    quotas,
                );
            },
        ),
    },
    Row {
        sender: "Meta",
        headers: &["x-business-use-case-usage"],
        form: Own(
            "JSON: percent used, minutes until access is regained",
            meta::business,
        ),
    },
    Row {
        sender: "Salesforce",
        headers: &["sforce-limit-info"],
        form: Own("`api-usage=used/limit`, of a day", forms::salesforce),
    },
    Row {
        sender: "Sentry",
        headers: &["x-sentry-rate-limits"],
        form: Own("`seconds:categories:scope, …`", forms::sentry),
    },
    Row {
        sender: "Xero",
        headers: &["x-minlimit-remaining"],
        form: Fields("minute", MINUTE, &[Remaining]),
    },
    Row {
        sender: "Xero",
        headers: &["x-appminlimit-remaining"],
        form: Fields("app-minute", MINUTE, &[Remaining]),
    },
];

pub(super) fn has(name: &str) -> bool {
    ROWS.iter().any(|row| row.has(name))
}

/// Reads the rows that have lines.
pub(super) fn read(lines: &Lines<'_>, base: &Base, quotas: &mut Drafts) {
    for row in ROWS {
        let here = Here { row, lines, base };
        if here.first().is_none() {
            continue;
        }
        match &row.form {
            Fields(name, window, fields) => quotas.extend(here.fields(name, *window, fields)),
            Own(_, read) => read(&here, quotas),
        }
    }
}

impl Row {
    fn has(&self, name: &str) -> bool {
        self.headers
            .iter()
            .any(|header| match header.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => *header == name,
            })
    }
}

impl<'a> Here<'_, 'a> {
    /// Returns the lines of this row: names and values.
    fn all(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let row = self.row;
        let ours = self.lines.iter().filter(|line| row.has(line.name));
        ours.map(|line| (line.name, line.value))
    }

    /// Returns the value of the first line of this row.
    fn first(&self) -> Option<&'a str> {
        self.all().next().map(|(_, value)| value)
    }

    /// Returns the items of the lists in the lines of this row.
    fn items(&self) -> impl Iterator<Item = &'a str> {
        self.all().flat_map(|(_, value)| split(value, ','))
    }

    fn fields(&self, name: &str, window: u64, fields: &[Field]) -> Option<ObservedQuota> {
        let draft = ObservedQuota {
            window: (window > 0).then_some(window),
            ..ObservedQuota::named(name)
        };
        let values = [Limit, Remaining, Reset].map(|wanted| {
            let place = fields.iter().position(|field| *field == wanted)?;
            self.lines.first(self.row.headers[place])
        });
        self.quota(draft, values)
    }

    /// Adds the limit, what remains and the reset to a quota. Returns `None` if the limit is
    /// negative, which means that there is none.
    fn quota(&self, draft: ObservedQuota, values: [Option<&str>; 3]) -> Option<ObservedQuota> {
        let [limit, remaining, reset] = values;
        let limit = match limit.and_then(Count::read) {
            Some(Count::Negative) => return None,
            limit => limit.and_then(Count::known),
        };
        let remaining = remaining.and_then(Count::read);
        Some(ObservedQuota {
            limit,
            remaining: remaining.and_then(|remaining| remaining.left_of(limit)),
            reset_after: reset.and_then(|reset| self.base.read(reset)),
            ..draft
        })
    }
}
