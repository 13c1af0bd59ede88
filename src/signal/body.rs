//! Reads the body of a response: throttle codes, throttle phrases, and waits.
//!
//! Bodies are parsed as JSON. If that fails, they are searched for the `<Code>` of S3's XML.

use http::StatusCode;

use super::generic::lines::Lines;
use super::parse::json::{Node, Str, Value, visit};
use super::parse::number::Number;
use super::parse::time::Base;
use super::refusal::{Said, is_code};

/// The deepest container whose members count; the root has depth 0.
const DEEPEST: usize = 8;

/// The keys whose values may be throttle codes, without underscores.
const CODE_KEYS: [&str; 7] = [
    "code",
    "errorcode",
    "type",
    "errortype",
    "error",
    "reason",
    "status",
];

/// The keys whose values are waits.
const WAIT_KEYS: [&str; 5] = [
    "retry_after",
    "retryAfter",
    "retry_after_seconds",
    "retryAfterSeconds",
    "retryDelay",
];
const WAIT_MILLIS_KEY: &str = "retry_after_ms";

const PHRASES: [&str; 5] = [
    "rate limit exceeded",
    "exceeded a secondary rate limit",
    "rate limit reached",
    "too many requests",
    "throttled",
];

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
) -> Said {
    let status = status.map_or(0, |status| status.as_u16());
    let mut reader = Reader {
        status,
        base,
        ..Reader::new(base)
    };
    let is_json = std::str::from_utf8(body).is_ok_and(|text| visit(text, |node| reader.node(node)));
    let mut said = reader.said;
    if is_json {
        said.code |= reader.meta && (reader.trace || META.iter().any(|name| lines.has(name)));
        said.code |= reader.error && reader.not_ok;
    } else if status >= 400 {
        said.code =
            element(body).is_some_and(|code| is_code(code.iter().map(|byte| char::from(*byte))));
    }
    said
}

/// A container around a value.
#[derive(Clone, Copy, Debug)]
struct Around<'a> {
    array: bool,
    key: Option<Str<'a>>,
}

struct Reader<'a, 'b> {
    status: u16,
    base: &'b Base,
    said: Said,
    /// The containers around the value, from the root on.
    around: [Around<'a>; DEEPEST + 2],
    /// Whether `error.code` is one of Meta's codes, and `error` has `fbtrace_id`.
    meta: bool,
    trace: bool,
    /// Whether the body is an envelope: `error` is a code, and `ok` is false.
    error: bool,
    not_ok: bool,
}

impl<'a, 'b> Reader<'a, 'b> {
    fn new(base: &'b Base) -> Self {
        let around = [Around {
            array: true,
            key: None,
        }; DEEPEST + 2];
        let said = Said::default();
        Reader {
            status: 0,
            base,
            said,
            around,
            meta: false,
            trace: false,
            error: false,
            not_ok: false,
        }
    }

    fn node(&mut self, node: Node<'a>) {
        let Node { depth, key, value } = node;
        if let (Value::Object | Value::Array, Some(around)) = (value, self.around.get_mut(depth)) {
            *around = Around {
                array: matches!(value, Value::Array),
                key,
            };
        }
        if let (Some(key), 1..) = (key, depth) {
            if depth <= DEEPEST + 1 {
                self.wait(key, value);
            }
            if depth == 1 && key.is("global") {
                self.said.global |= matches!(value, Value::Bool(true));
            }
        }
        match self.status {
            400.. => self.of_error(depth, key, value),
            200..300 => self.of_envelope(depth, key, value),
            _ => {}
        }
    }

    fn wait(&mut self, key: Str<'a>, value: Value<'a>) {
        let millis = is_in_any_case(key, WAIT_MILLIS_KEY);
        if !millis && !WAIT_KEYS.iter().any(|wait| is_in_any_case(key, wait)) {
            return;
        }
        let read = |text: &str| {
            if millis {
                self.base.read_millis(text)
            } else {
                self.base.read(text)
            }
        };
        let wait = match value {
            Value::Number(number) => read(number),
            Value::Text(text) => read(text.text().as_str()),
            _ => None,
        };
        self.said.wait = self.said.wait.max(wait);
    }

    /// Reads the body of an error response: codes anywhere in it, and phrases in its message.
    fn of_error(&mut self, depth: usize, key: Option<Str<'a>>, value: Value<'a>) {
        match (key, value, self.list(depth)) {
            (Some(key), _, _) if depth <= DEEPEST + 1 => {
                self.said.code |= is_code_key(key) && is_code_value(value)
            }
            (None, Value::Text(text), Some(list)) => {
                self.said.code |= is_code_key(list) && is_code(text.chars())
            }
            _ => {}
        }
        let in_error = depth == 2 && !self.around[0].array && self.key_of(1, "error");
        let is = |name: &str| key.is_some_and(|key| key.is(name));
        if let Value::Text(text) = value {
            let speaks =
                (depth == 1 && (is("message") || is("error"))) || (in_error && is("message"));
            self.said.phrase |= speaks && PHRASES.iter().any(|phrase| contains(text, phrase));
        }
        if in_error {
            self.trace |= is("fbtrace_id");
            self.meta |=
                is("code") && matches!(value, Value::Number(number) if is_meta_code(number));
        }
    }

    /// Reads the body of a successful response: codes count only if the server wraps errors in a
    /// success.
    fn of_envelope(&mut self, depth: usize, key: Option<Str<'a>>, value: Value<'a>) {
        let is = |name: &str| key.is_some_and(|key| key.is(name));
        if depth == 0 || self.around[0].array {
            return;
        }
        let in_errors =
            depth > 2 && self.key_of(1, "errors") && self.around[1].array && !self.around[2].array;
        match depth {
            1 => {
                self.error |=
                    is("error") && matches!(value, Value::Text(text) if is_code(text.chars()));
                self.not_ok |= is("ok") && matches!(value, Value::Bool(false));
                self.said.code |= is("retCode") && matches!(value, Value::Number("10006"));
            }
            2 if self.key_of(1, "error") && self.around[1].array => {
                self.said.code |= matches!(value, Value::Text(text) if is_code(text.chars()));
            }
            3 if in_errors => self.said.code |= (is("code") || is("type")) && is_code_value(value),
            4 if in_errors && self.key_of(3, "extensions") => {
                self.said.code |= (is("code") || is("type")) && is_code_value(value);
            }
            _ => {}
        }
    }

    fn key_of(&self, container: usize, name: &str) -> bool {
        self.around[container].key.is_some_and(|key| key.is(name))
    }

    /// Returns the key of the array that contains the value.
    fn list(&self, depth: usize) -> Option<Str<'a>> {
        self.around.get(depth.checked_sub(1)?)?.key
    }
}

/// Returns whether the texts are equal, ignoring case.
fn is_in_any_case(text: Str<'_>, other: &str) -> bool {
    let lower = |letter: char| letter.to_ascii_lowercase();
    text.chars().map(lower).eq(other.chars().map(lower))
}

fn is_code_key(key: Str<'_>) -> bool {
    let plain = key
        .chars()
        .filter(|letter| *letter != '_')
        .map(|letter| letter.to_ascii_lowercase());
    CODE_KEYS.iter().any(|code| plain.clone().eq(code.chars()))
}

fn is_code_value(value: Value<'_>) -> bool {
    match value {
        Value::Text(text) => is_code(text.chars()),
        Value::Number(number) => ["20429", "99991400", "-1003", "-1015"].contains(&number),
        _ => false,
    }
}

fn is_meta_code(number: &str) -> bool {
    let code = Number::read(number).and_then(|number| number.count().known());
    matches!(code, Some(4 | 17 | 32 | 341 | 613 | 80_000..=80_014)) && !number.contains('.')
}

/// Returns whether the text contains the phrase, ignoring case.
fn contains(text: Str<'_>, phrase: &str) -> bool {
    let mut rest = text.chars().map(|letter| letter.to_ascii_lowercase());
    loop {
        let mut ahead = rest.clone();
        if phrase.chars().all(|letter| ahead.next() == Some(letter)) {
            return true;
        }
        if rest.next().is_none() {
            return false;
        }
    }
}

/// Returns the first `<Code>…</Code>`: letters, digits and dots.
fn element(body: &[u8]) -> Option<&[u8]> {
    const START: &[u8] = b"<Code>";
    let mut rest = body;
    loop {
        let start = rest
            .windows(START.len())
            .position(|window| window == START)?;
        rest = &rest[start + START.len()..];
        let length = rest
            .iter()
            .take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'.')
            .count();
        if length > 0 && rest[length..].starts_with(b"</Code>") {
            return Some(&rest[..length]);
        }
    }
}
