//! The page of headers in the guide, made from the tables in the code and the recorded responses.
//!
//! `TOLLGATE_WRITE_PAGES=1 cargo test --all-features --lib page` writes it.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::generic::lines;
use super::standard::retry_after;
use super::vendor::{Form, ROWS, Row};
use super::{combine, refusal};

fn page() -> String {
    let mut page = String::from(
        "Headers: which response headers tollgate reads.\n\n\
         <!-- Made from the tables in src/signal by its tests: do not write here. -->\n\n\
         ```\n\
         use std::time::Duration;\n\
         use tollgate::Signal;\n\n\
         let response = http::Response::builder()\n    \
             .status(429)\n    \
             .header(\"retry-after\", 3)\n    \
             .header(\"x-ratelimit-remaining\", 0)\n    \
             .body(())?;\n\
         let signal = Signal::read(&response);\n\
         assert_eq!(signal.retry_after(), Some(Duration::from_secs(3)));\n\
         assert_eq!(signal.quotas()[0].remaining(), Some(0));\n\
         # Ok::<(), http::Error>(())\n\
         ```\n\n\
         You need not name the server: a [`Signal`](crate::Signal) is read from the names and values of the headers.\n\
         The case of names does not matter.\n\n",
    );
    let code = |names: &[&str]| {
        names
            .iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    page += "## When to retry\n\nThe first entry of this list with a value that can be read counts. If it has several values, the longest counts.\n\n";
    let _ = writeln!(page, "1. in milliseconds: {}", code(&retry_after::MILLIS));
    let _ = writeln!(page, "2. {}", code(&[retry_after::STANDARD]));
    let _ = writeln!(
        page,
        "3. {}, and any header with `retry-after`, `retry-in` or `towait` in its name",
        code(&[retry_after::OTHER])
    );
    page += "4. for a refusal, by [`Signal::read_with_body`](crate::Signal::read_with_body): `retry_after` and similar names in the\n   \
             body; else words such as `try again in 634ms`\n\
             5. for a refusal: the reset of the quotas that are used up\n\
             6. for a refusal: `resets_at` or `resets in 16 days` in the body\n\n\
             Values may be seconds, moments of the Unix clock in seconds to nanoseconds, spans such as `6m0s`, or dates as\n\
             in HTTP, ISO 8601 and JavaScript. Moments are compared with the server's own clock, in its header `date`.\n\n";
    page += "## Quotas of the standard\n\n\
             `ratelimit` and `ratelimit-policy`, as structured fields (RFC 9651) of all drafts, also with a prefix such as\n\
             `beta-`.\n\n";
    page += "## Quotas in generic headers\n\n\
             Every header with `ratelimit` or `rate-limit` in its name. One word says what the value is, such as `remaining` in\n\
             `x-ratelimit-remaining-tokens`; the rest is the name of the quota. A time may end in its unit: `-ms`, `-sec`.\n\
             Headers such as `x-vendor-call-limit` or `x-quota-remaining` count if together they describe a quota.\n\n\
             | words | the value is |\n|---|---|\n";
    for (meaning, words) in super::generic::family::words() {
        let words: Vec<_> = words.into_iter().collect();
        let _ = writeln!(page, "| {} | {meaning} |", code(&words));
    }
    let _ = writeln!(
        page,
        "\nIf several headers state the reset of a quota, the first choice counts. If the name of a quota is in no header\n\
         name, its name may be the value of `x-ratelimit-…` with {}.\n\n\
         | values | meaning |\n|---|---|\n\
         | `100, 100;w=60`, `600/15m`, `10/s, 100/m` | limits with their windows |\n\
         | `32/80` | 32 are used of 80 |\n\
         | `10:60,100:3600` | limits in seconds, or what is used (`-count`, `-state`) |\n\
         | `100, 1000`, `300/3000/12000` | several quotas |\n\
         | `{{\"limit\":10,\"remaining\":9}}`, `limit=10&remaining=9`, `day-lim:10;day-rem:9` | each member is read as a header |\n\n\
         What contradicts itself is not read.\n",
        code(&combine::NAMES)
    );
    page += "## Formats of one vendor\n\n| sender | headers | form |\n|---|---|---|\n";
    for Row {
        sender,
        headers,
        form,
    } in ROWS
    {
        let form = match form {
            Form::Fields(_, _, fields) => fields
                .iter()
                .map(|field| format!("{field:?}").to_lowercase())
                .collect::<Vec<_>>()
                .join(", "),
            Form::Own(form, _) => (*form).to_owned(),
        };
        let _ = writeln!(page, "| {sender} | {} | {form} |", code(headers));
    }
    page += "\n## Which responses are refusals\n\n\
             | status | a refusal |\n|---|---|\n\
             | 429, 420, 430, 509, 529 | always |\n\
             | 400, 402, 403, 503 | with a time to retry, a code, a phrase in the body, or a header below; not for 400: a quota that is used up |\n\
             | 418 | with a time to retry, a code, or a header of Binance |\n\
             | 300 to 399 | never |\n\
             | 400 to 599 | with a code, or a phrase in the body |\n\
             | others | with a code or a phrase in what the body calls an error |\n\n";
    let _ = writeln!(
        page,
        "A header below is one of {}. A code is an error code such as `TooManyRequests`, in\n\
         `{}` or in the body. A phrase says that a limit of requests is exceeded.\n",
        code(&refusal::FLAGS),
        refusal::ERROR_TYPE
    );
    let _ = writeln!(
        page,
        "The [scope](crate::Signal::scope) is that of `x-ratelimit-global`, or else the first of {}.\n",
        { code(&refusal::SCOPES) }
    );
    let _ = writeln!(
        page,
        "Responses of {} servers are tests: `src/signal/*vectors.json` of the repository.",
        recorded()
    );
    page
}

/// Names in the recorded responses that are no server.
const NOBODY: [&str; 10] = [
    "any",
    "app",
    "buggy server",
    "cdn",
    "gateway + app",
    "hostile",
    "ietf",
    "lenient",
    "proxy",
    "rfc",
];

/// Returns the number of servers whose recorded responses have headers that matter.
fn recorded() -> usize {
    let files = [
        include_str!("vectors.json"),
        include_str!("more_vectors.json"),
    ];
    let files = files.map(|file| serde_json::from_str::<serde_json::Value>(file).unwrap());
    let mut servers = BTreeSet::new();
    for vector in files
        .iter()
        .flat_map(|file| file["vectors"].as_array().unwrap())
    {
        let server = vector["vendor"].as_str().unwrap();
        let mut headers = vector["headers"].as_array().unwrap().iter();
        let has_one =
            headers.any(|line| lines::may_matter(&line[0].as_str().unwrap().to_lowercase()));
        if has_one && !NOBODY.contains(&server) {
            servers.insert(server.to_owned());
        }
    }
    servers.len()
}

#[test]
fn the_page_of_headers_is_made_from_the_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/guide/headers.md");
    let page = page();
    if std::env::var_os("TOLLGATE_WRITE_PAGES").is_some() {
        std::fs::write(path, page).unwrap();
    } else {
        let written = std::fs::read_to_string(path).unwrap();
        assert!(
            written == page,
            "src/guide/headers.md is old: see src/signal/page_tests.rs how to write it anew"
        );
    }
}
