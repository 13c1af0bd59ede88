//! Reads what a body says: throttle codes, messages, waits, quotas that are exceeded.
//!
//! Bodies are parsed as JSON. If that fails, they are a message, which is searched for the `<Code>`
//! of S3's XML, too.

use http::StatusCode;
use json_event_parser::JsonEvent;

use super::generic::lines::{Lines, may_matter};
use super::generic::words;
use super::observed::{Drafts, ObservedQuota};
use super::parse::json::{Node, visit};
use super::parse::number::{Count, Number};
use super::parse::text::{Bounded, Text};
use super::parse::time::{Base, MILLIS_OF_DAY, unit_of_name};
use super::prose;
use super::refusal::{Said, is_code};

/// The deepest container whose members count; the root has depth 0.
const DEEPEST: usize = 8;

/// The most messages of a body that are read.
const MOST_MESSAGES: usize = 16;

// Keys are compared in lower case, without the marks between their words.

/// The keys whose values may be throttle codes.
const CODE_KEYS: [&str; 10] = [
    "code",
    "errorcode",
    "type",
    "errortype",
    "error",
    "errors",
    "reason",
    "status",
    "errorstatus",
    "errorname",
];

/// Words in the keys of messages.
const MESSAGE_KEYS: [&str; 9] = [
    "message", "msg", "error", "detail", "descr", "info", "reason", "fault", "result",
];

/// The starts of the keys whose values are waits. A unit may follow, as in `retryInSeconds`.
const WAIT_KEYS: [&str; 6] = [
    "retryafter",
    "retrydelay",
    "retryin",
    "retryat",
    "tryagainin",
    "backoff",
];

/// The starts of the keys whose values are waits if a unit follows.
const WAIT_KEYS_WITH_UNIT: [&str; 5] = ["retry", "wait", "waittime", "throttle", "cooldown"];

/// What may follow `reset` in the keys whose values are resets, before a unit.
const RESET_KEYS: [&str; 7] = ["in", "at", "after", "delay", "timestamp", "time", ""];

/// The keys of the name of a quota that is exceeded, and of its limit.
const QUOTA_KEYS: [&str; 2] = ["quotaid", "quotalimit"];
const QUOTA_LIMIT_KEYS: [&str; 2] = ["quotavalue", "quotalimitvalue"];

/// The codes of long quotas that are used up: what they count, unless requests, and their window in milliseconds. A budget has
/// none: it is bought for a month as a rule.
const USED_UP: [(&str, Option<&str>, u64); 3] = [
    ("insufficient_quota", Some("credits"), 30 * MILLIS_OF_DAY),
    (
        "billing_hard_limit_reached",
        Some("credits"),
        30 * MILLIS_OF_DAY,
    ),
    ("dailyLimitExceeded", None, MILLIS_OF_DAY),
];

/// Values of a root's status that say that the request has failed.
const FAILURES: [&str; 6] = ["0", "error", "fail", "failed", "failure", "NOTOK"];

/// Headers that make the codes of Meta's errors believable.
const META: [&str; 3] = [
    "x-app-usage",
    "x-business-use-case-usage",
    "x-ad-account-usage",
];

pub(super) fn read(
    body: &[u8],
    status: Option<StatusCode>,
    lines: &Lines<'_>,
    base: &Base,
    quotas: &mut Drafts,
) -> Said {
    let status = status.map_or(0, |status| status.as_u16());
    let mut reader = BodyReader {
        status,
        base: *base,
        ..BodyReader::default()
    };
    let text = std::str::from_utf8(body);
    let is_json = text.is_ok_and(|text| visit(text, |node| reader.node(node)));
    if is_json {
        reader.said.code |=
            reader.meta && (reader.trace || META.iter().any(|name| lines.has(name)));
        reader.said.code |= reader.refused && reader.failed;
        quotas.extend(std::mem::take(&mut reader.quotas));
    } else if status >= 400 {
        reader.said.phrase = reader.message(text.unwrap_or_default());
        reader.said.code = element(text.unwrap_or_default()).is_some_and(is_code);
    }
    Said {
        wait: reader.said.wait.or(reader.retry),
        ..reader.said
    }
}

/// Returns the headers that a body repeats, as the members of an object `headers`: the names in lower
/// case, and the values.
pub(super) fn repeated(body: &[u8]) -> Bounded<(Text, &str), 16> {
    let mut lines = Bounded::new();
    let text = std::str::from_utf8(body).unwrap_or_default();
    if !text.contains("\"headers\"") {
        return lines;
    }
    let mut inside = None;
    visit(text, |node| {
        inside = inside.filter(|outer| node.depth > *outer);
        if node.value == JsonEvent::StartObject && node.key.as_deref() == Some("headers") {
            inside = Some(node.depth);
        }
        if let (Some(_), Some(key), Some(value)) = (inside, node.plain_key(), node.plain_value())
            && key.len() <= Text::LONGEST
        {
            let name = Text::lower(key);
            if may_matter(name.as_str()) {
                lines.push((name, value));
            }
        }
    });
    lines
}

/// A container around a value.
#[derive(Clone, Copy, Debug, Default)]
struct Around {
    array: bool,
    /// Its plain key; that of the array around it if it has none.
    key: Text,
    /// Whether it is, or is in, what the body calls an error.
    error: bool,
}

#[derive(Default)]
struct BodyReader {
    status: u16,
    base: Base,
    said: Said,
    /// The containers around the value, from the root on.
    around: [Around; DEEPEST + 2],
    /// The longest wait that a message names in words, in milliseconds.
    retry: Option<u64>,
    messages: usize,
    /// The quotas that are exceeded.
    quotas: Bounded<ObservedQuota, 4>,
    /// Whether `error.code` is one of Meta's codes, and `error` has `fbtrace_id`.
    meta: bool,
    trace: bool,
    /// Whether the root of a successful response has a code or a message of a refusal, and whether
    /// it says that the request has failed.
    refused: bool,
    failed: bool,
}

impl BodyReader {
    fn node(&mut self, node: Node<'_>) {
        let Node { depth, key, value } = node;
        if depth > DEEPEST + 1 {
            return;
        }
        let parent = depth.checked_sub(1).map(|place| self.around[place]);
        let plain = match &key {
            Some(key) => plain_key(key),
            None => parent
                .filter(|parent| parent.array)
                .map_or(Text::EMPTY, |list| list.key),
        };
        let is_called_error = (1..=2).contains(&depth) && plain.as_str().starts_with("err");
        let in_error = is_called_error || parent.is_some_and(|parent| parent.error);
        if let JsonEvent::StartObject | JsonEvent::StartArray = value {
            self.around[depth] = Around {
                array: value == JsonEvent::StartArray,
                key: plain,
                error: in_error,
            };
        }
        let is_error = self.status >= 400;
        if !is_error && !in_error && depth > 2 {
            return;
        }
        let plain = plain.as_str();
        if key.is_some() {
            self.member(plain, &value);
            self.said.global |=
                depth == 1 && plain == "global" && value == JsonEvent::Boolean(true);
        }
        match self.status {
            400.. => self.of_error(depth, plain, &value),
            200..300 => self.of_envelope(depth, plain, &value, in_error),
            _ => {}
        }
    }

    /// Reads the members that are waits, and the quotas that are exceeded.
    fn member(&mut self, key: &str, value: &JsonEvent<'_>) {
        let is_quota = QUOTA_KEYS.contains(&key) && self.status >= 400;
        let is_limit = QUOTA_LIMIT_KEYS.contains(&key);
        let (wait, reset) = (unit_of_wait(key), unit_of_reset(key));
        if !is_quota && !is_limit && wait.or(reset).is_none() {
            return;
        }
        let text = match value {
            JsonEvent::Number(text) | JsonEvent::String(text) => Text::of(&[text]),
            _ => return,
        };
        let text = text.as_str();
        if let Some(unit) = wait {
            let wait = self.base.read_with(unit_of_name(unit), text);
            self.said.wait = self.said.wait.max(wait);
        } else if let Some(unit) = reset {
            let reset = self.base.read_with(unit_of_name(unit), text);
            self.said.reset = self.said.reset.max(reset);
        } else if is_quota {
            let (window, unit) = words::of_quota_id(text);
            self.quotas.push(ObservedQuota {
                unit: unit.map(Box::from),
                window,
                remaining: Some(0),
                ..ObservedQuota::named(text)
            });
        } else if let Some(quota) = self.quotas.last_mut() {
            quota.limit = Count::read(text).and_then(Count::known);
        }
    }

    /// Reads what a message says in words. Returns whether it says that a limit is exceeded.
    fn message(&mut self, text: &str) -> bool {
        let said = prose::read(text, &self.base);
        self.retry = self.retry.max(said.retry);
        self.said.reset = self.said.reset.max(said.reset);
        said.refused
    }

    /// Reads a value that may be a code or a message. Returns which of them says that a limit is
    /// exceeded.
    fn code_and_message(&mut self, key: &str, value: &JsonEvent<'_>) -> (bool, bool) {
        let is_code_key = CODE_KEYS.contains(&key);
        let JsonEvent::String(text) = value else {
            let codes = ["20429", "99991400", "-1003", "-1015"];
            let is_one = matches!(value, JsonEvent::Number(number) if codes.contains(&&**number));
            return (is_code_key && is_one, false);
        };
        let is_message = MESSAGE_KEYS.iter().any(|word| key.contains(word));
        let mut says = false;
        if is_message && self.messages < MOST_MESSAGES {
            self.messages += 1;
            says = self.message(text);
        }
        (is_code_key && is_code(text), says)
    }

    /// Reads the body of an error response: codes anywhere in it, and messages.
    fn of_error(&mut self, depth: usize, key: &str, value: &JsonEvent<'_>) {
        let (code, phrase) = self.code_and_message(key, value);
        self.said.code |= code;
        self.said.phrase |= phrase;
        if let JsonEvent::String(text) = value
            && CODE_KEYS.contains(&key)
        {
            self.used_up(text);
        }
        if depth == 2 && !self.around[0].array && self.around[1].key.as_str() == "error" {
            self.trace |= key == "fbtraceid";
            self.meta |=
                key == "code" && matches!(value, JsonEvent::Number(number) if is_meta_code(number));
        }
    }

    /// Reads the body of a successful response. Codes and messages count in what is called an error,
    /// near the root, or in a root that says that the request has failed.
    fn of_envelope(&mut self, depth: usize, key: &str, value: &JsonEvent<'_>, in_error: bool) {
        if depth == 0 || self.around[0].array {
            return;
        }
        let in_status = depth == 2 && self.around[1].key.as_str() == "status";
        if in_error {
            let (code, phrase) = self.code_and_message(key, value);
            self.said.code |= code || phrase;
        } else if depth == 1 || in_status {
            let (code, phrase) = self.code_and_message(key, value);
            self.refused |= code || phrase;
            self.failed |= match value {
                JsonEvent::Boolean(is_well) => !is_well && ["ok", "success"].contains(&key),
                // A status such as 429, or a code of Bybit.
                JsonEvent::Number(code) if key == "retcode" && code == "10006" => {
                    self.refused = true;
                    true
                }
                JsonEvent::Number(code) => {
                    let is_of_error = code.len() == 3 && code.starts_with(['4', '5']);
                    is_of_error && ["code", "status"].contains(&key)
                }
                JsonEvent::String(text) => {
                    let says = FAILURES.contains(&&**text);
                    (says && key.contains("stat")) || (in_status && phrase)
                }
                _ => false,
            };
        }
    }

    /// Adds the quota that is used up, if the code of an error names one. A type may say so again.
    fn used_up(&mut self, code: &str) {
        let known = USED_UP.iter().find(|(known, ..)| code == *known);
        let Some((code, unit, window)) = known else {
            return;
        };
        let draft = ObservedQuota {
            unit: unit.map(Box::from),
            window: Some(*window),
            remaining: Some(0),
            ..ObservedQuota::named(code)
        };
        let mut quotas = self.quotas.iter();
        if !quotas.any(|quota| quota.name == draft.name) {
            self.quotas.push(draft);
        }
    }
}

/// Returns the key in lower case, without the marks between its words.
fn plain_key(key: &str) -> Text {
    let letters = key.chars().filter(|letter| !['_', '-'].contains(letter));
    letters.map(|letter| letter.to_ascii_lowercase()).collect()
}

/// Returns the unit in the key of a wait, which may be empty.
fn unit_of_wait(key: &str) -> Option<&str> {
    let unit = unit_after(key, &WAIT_KEYS);
    unit.or_else(|| unit_after(key, &WAIT_KEYS_WITH_UNIT).filter(|unit| !unit.is_empty()))
}

/// Returns the unit in the key of a reset, which may be empty.
fn unit_of_reset(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once("reset")?;
    unit_after(rest.strip_prefix('s').unwrap_or(rest), &RESET_KEYS)
}

/// Returns what follows one of `starts` in a key: nothing, or a unit.
fn unit_after<'a>(key: &'a str, starts: &[&str]) -> Option<&'a str> {
    let mut rests = starts.iter().filter_map(|start| key.strip_prefix(start));
    rests.find(|rest| rest.is_empty() || unit_of_name(rest).is_some())
}

fn is_meta_code(number: &str) -> bool {
    let code = Number::read(number).and_then(|number| number.count().known());
    matches!(code, Some(4 | 17 | 32 | 341 | 613 | 80_000..=80_014)) && !number.contains('.')
}

/// Returns the first `<Code>…</Code>`: letters, digits and dots.
fn element(body: &str) -> Option<&str> {
    let starts = body.split("<Code>").skip(1);
    let codes = starts.filter_map(|start| Some(start.split_once("</Code>")?.0));
    codes.filter(|code| !code.is_empty()).find(|code| {
        code.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'.')
    })
}
