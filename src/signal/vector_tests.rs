//! Recorded and documented responses of many servers, each with the expected signal:
//! `vectors.json` and `more_vectors.json`.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::{Value, json};

use super::{ObservedQuota, Signal, read};

fn signal(vector: &Value) -> Signal {
    let mut headers = HeaderMap::new();
    for line in vector["headers"].as_array().unwrap() {
        let name: HeaderName = line[0].as_str().unwrap().parse().unwrap();
        headers.append(
            name,
            HeaderValue::from_bytes(line[1].as_str().unwrap().as_bytes()).unwrap(),
        );
    }
    let status =
        StatusCode::from_u16(u16::try_from(vector["status"].as_u64().unwrap()).unwrap()).unwrap();
    let now = SystemTime::UNIX_EPOCH + Duration::from_millis(vector["now"].as_u64().unwrap());
    read::signal(
        Some(status),
        Some(&headers),
        vector["body"].as_str().map(str::as_bytes),
        now,
    )
}

fn millis(span: Option<Duration>) -> Value {
    json!(span.map(|span| u64::try_from(span.as_millis()).unwrap()))
}

fn quota(quota: &ObservedQuota) -> Value {
    json!({
        "name": quota.name(),
        "unit": quota.unit(),
        "limit": quota.limit(),
        "remaining": quota.remaining(),
        "used": quota.used(),
        "window_ms": millis(quota.window()),
        "reset_after_ms": millis(quota.reset_after()),
    })
}

/// Returns the same list of quotas, sorted and without some fields.
fn sorted(quotas: &Value, without: &[&str]) -> Vec<String> {
    let strip = |quota: &Value| {
        let mut quota = quota.clone();
        without
            .iter()
            .for_each(|field| drop(quota.as_object_mut().unwrap().remove(*field)));
        quota.to_string()
    };
    let mut quotas: Vec<_> = quotas.as_array().unwrap().iter().map(strip).collect();
    quotas.sort();
    quotas
}

/// Checks the vectors of a file, of which there are `count`.
fn check(file: &str, count: usize) {
    let file: Value = serde_json::from_str(file).unwrap();
    let (mut core, mut extended, mut all) = (0, 0, 0);
    let mut failures = Vec::new();
    for vector in file["vectors"].as_array().unwrap() {
        let (signal, expect) = (signal(vector), &vector["expect"]);
        let quotas = Value::Array(signal.quotas().iter().map(quota).collect());
        let same =
            |without: &[&str]| sorted(&quotas, without) == sorted(&expect["quotas"], without);
        let is_core = json!(signal.refusal().is_some()) == expect["limited"]
            && millis(signal.retry_after()) == expect["retry_after_ms"]
            && same(&["unit", "used"]);
        let is_extended = is_core && json!(signal.scope()) == expect["scope"] && same(&[]);
        all += 1;
        core += usize::from(is_core);
        extended += usize::from(is_extended);
        if !is_extended {
            failures.push(format!(
                "{} {}\n  expected {expect}\n  read {signal:?}",
                vector["id"], vector["headers"]
            ));
        }
    }
    println!("{core} of {all} with the core fields, {extended} with all");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(all, count);
}

#[test]
fn every_response_says_what_it_is_known_to_say() {
    check(include_str!("vectors.json"), 278);
}

/// Responses whose kinds are read by words: prefixes, units, groups, values in JSON, messages.
#[test]
fn responses_of_any_server_are_read_by_their_words() {
    check(include_str!("more_vectors.json"), 168);
}
