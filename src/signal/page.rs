//! The page of headers in the guide, made from the tables in the code and the recorded responses.
//!
//! `TOLLGATE_WRITE_PAGES=1 cargo test --all-features --lib page` writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::generic::lines;
use super::standard::retry_after;
use super::vendor::{Form, ROWS, Row};
use super::{combine, refusal};

fn page() -> String {
    let mut page = String::from(
        "# Headers that are understood\n\n\
         <!-- Made from the tables in src/signal by its tests: do not write here. -->\n\n\
         Nobody has to say which server it is: a [`Signal`](crate::Signal) is told from names and values. Names are\n\
         shown in lower case and matter in no case.\n\n",
    );
    let code = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    page += "## When to come back\n\nThe first of these with a value that can be read; of its values the longest.\n\n";
    let _ = writeln!(page, "1. in milliseconds: {}", code(&retry_after::MILLIS));
    let _ = writeln!(page, "2. {}", code(&[retry_after::STANDARD]));
    let _ = writeln!(page, "3. {}, and `…-ratelimit-retry-after`", code(&[retry_after::OTHER]));
    page += "4. for a refusal, with the feature `body`: `retry_after` and the like in the body\n\
             5. for a refusal: the reset of the quotas that are spent\n\n\
             Values may be seconds, moments of the Unix clock in seconds to nanoseconds, spans such as `6m0s`, dates of\n\
             HTTP, of ISO 8601 and of JavaScript. Moments are reckoned by the server's own clock, its header `date`.\n\n";
    page += "## Quotas in the standard's words\n\n\
             `ratelimit` and `ratelimit-policy`, as structured fields (RFC 9651) of all drafts.\n\n";
    page += "## Quotas in anybody's words\n\n\
             Every name with `ratelimit` or `rate-limit` in it, such as `x-ratelimit-remaining-tokens`. One word of it\n\
             says what the value is; what is left of it is the name of the quota.\n\n\
             | words | the value is |\n|---|---|\n";
    for (meaning, words) in super::generic::family::words() {
        let words: Vec<_> = words.into_iter().collect();
        let _ = writeln!(page, "| {} | {meaning} |", code(&words));
    }
    let _ = writeln!(page, "\nA quota without name may be named by {}.\n", code(&combine::NAMES));
    page += "Some vendors differ a little: `ratelimit-dailylimit` (Yelp) is the limit of the quota without name and names\n\
             it; `gw-ratelimit-reset` (KuCoin) is in milliseconds; the two limits of Strava, also of its\n\
             `x-readratelimit-limit` and `-usage`, are those of 15 minutes and of a day.\n\n";
    page += "## Formats of one vendor\n\n| sender | headers | form |\n|---|---|---|\n";
    for Row { sender, headers, form } in ROWS {
        let form = match form {
            Form::Fields { fields, .. } => {
                fields.iter().map(|field| format!("{field:?}").to_lowercase()).collect::<Vec<_>>().join(", ")
            }
            Form::Own(form, _) => (*form).to_owned(),
        };
        let _ = writeln!(page, "| {sender} | {} | {form} |", code(headers));
    }
    page += "\n## What speaks for a refusal\n\n\
             429, 420, 430, 509 and 529 always are. 402, 403 and 503 are with a hint when to come back, a quota that is\n\
             spent, a code or phrase in the body, or one of the headers below; 400 is without the quota, 418 with a\n\
             hint, a code or a header of Binance. Others are with a code, and redirections never.\n\n";
    let _ = writeln!(
        page,
        "Headers: {}. A code may stand in `{}`.\n",
        code(&refusal::FLAGS),
        refusal::ERROR_TYPE
    );
    let _ =
        writeln!(page, "The [scope](crate::Signal::scope) is that of `x-ratelimit-global`, else of {}.\n", {
            code(&refusal::SCOPES)
        });
    page += "## Servers whose responses are tests\n\n| server | headers |\n|---|---|\n";
    for (server, headers) in recorded() {
        let headers: Vec<_> = headers.iter().map(String::as_str).collect();
        let _ = writeln!(page, "| {server} | {} |", code(&headers));
    }
    page
}

/// Names in the recorded responses that are no server.
const NOBODY: [&str; 10] =
    ["any", "app", "buggy server", "cdn", "gateway + app", "hostile", "ietf", "lenient", "proxy", "rfc"];

/// Returns the servers of the recorded responses, each with its headers that matter.
fn recorded() -> BTreeMap<String, BTreeSet<String>> {
    let file: serde_json::Value = serde_json::from_str(include_str!("vectors.json")).unwrap();
    let mut servers = BTreeMap::<_, BTreeSet<_>>::new();
    for vector in file["vectors"].as_array().unwrap() {
        let server = vector["vendor"].as_str().unwrap();
        if NOBODY.contains(&server) {
            continue;
        }
        let names = vector["headers"].as_array().unwrap().iter();
        let names = names.map(|line| line[0].as_str().unwrap().to_lowercase());
        let matter: Vec<_> = names.filter(|name| lines::may_matter(name)).collect();
        if !matter.is_empty() {
            servers.entry(server.to_owned()).or_default().extend(matter);
        }
    }
    servers
}

#[test]
fn the_page_of_headers_is_made_from_the_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/guide/headers.md");
    let page = page();
    if std::env::var_os("TOLLGATE_WRITE_PAGES").is_some() {
        std::fs::write(path, page).unwrap();
    } else {
        let written = std::fs::read_to_string(path).unwrap();
        assert!(written == page, "src/guide/headers.md is old: see src/signal/page.rs how to write it anew");
    }
}
