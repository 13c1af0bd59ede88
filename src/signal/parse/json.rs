//! Walks JSON from its first byte to its last, without allocating memory for its values.
//!
//! `serde_json` allocates memory for each text with an escape, and converts numbers to binary. A
//! test compares this walk with it.

use crate::signal::parse::number::digits;

/// The deepest nesting of containers, as in `serde_json`.
const DEEPEST: usize = 127;

/// A value, and where it is.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Node<'a> {
    /// How many containers are around it.
    pub(in crate::signal) depth: usize,
    /// Its key, if it is in an object.
    pub(in crate::signal) key: Option<Str<'a>>,
    pub(in crate::signal) value: Value<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::signal) enum Value<'a> {
    /// An object begins.
    Object,
    /// An array begins.
    Array,
    Text(Str<'a>),
    /// As it was written.
    Number(&'a str),
    Bool(bool),
    Null,
}

impl<'a> Value<'a> {
    /// Returns a number, or a text without escapes.
    pub(in crate::signal) fn plain(self) -> Option<&'a str> {
        match self {
            Value::Number(number) => Some(number),
            Value::Text(text) => text.plain(),
            _ => None,
        }
    }
}

/// A text as it was written, with its escapes.
#[derive(Clone, Copy, Debug)]
pub(in crate::signal) struct Str<'a>(&'a str);

impl<'a> Str<'a> {
    /// Decodes the text; half a surrogate pair becomes U+FFFD.
    pub(in crate::signal) fn chars(self) -> impl Iterator<Item = char> + Clone + 'a {
        let mut rest = self.0.chars();
        std::iter::from_fn(move || match rest.next()? {
            '\\' => Some(match rest.next()? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let unit = hex(&mut rest)?;
                    let mut ahead = rest.clone();
                    let low = match (unit, ahead.next(), ahead.next()) {
                        (0xd800..0xdc00, Some('\\'), Some('u')) => hex(&mut ahead),
                        _ => None,
                    };
                    match low.filter(|low| (0xdc00..0xe000).contains(low)) {
                        Some(low) => {
                            rest = ahead;
                            char::from_u32(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00))
                                .unwrap_or('\u{fffd}')
                        }
                        None => char::from_u32(unit).unwrap_or('\u{fffd}'),
                    }
                }
                other => other,
            }),
            plain => Some(plain),
        })
    }

    /// Returns the text if it has no escapes.
    pub(in crate::signal) fn plain(self) -> Option<&'a str> {
        (!self.0.contains('\\')).then_some(self.0)
    }

    pub(in crate::signal) fn is(self, text: &str) -> bool {
        self.chars().eq(text.chars())
    }
}

fn hex(chars: &mut std::str::Chars<'_>) -> Option<u32> {
    (0..4).try_fold(0, |sum, _| Some(sum * 16 + chars.next()?.to_digit(16)?))
}

/// Visits all values of a text, if the whole text is valid JSON. Returns whether it is.
///
/// Nothing is visited if it is not.
pub(in crate::signal) fn visit<'a>(text: &'a str, each: impl FnMut(Node<'a>)) -> bool {
    let walk = Walk {
        rest: text,
        objects: 0,
        depth: 0,
    };
    walk.run(|_| ()).is_some() && walk.run(each).is_some()
}

#[derive(Clone, Copy)]
struct Walk<'a> {
    rest: &'a str,
    /// One bit for each container around the value: whether it is an object.
    objects: u128,
    depth: usize,
}

impl<'a> Walk<'a> {
    fn run(mut self, mut each: impl FnMut(Node<'a>)) -> Option<()> {
        loop {
            let key = if self.in_object() {
                Some(self.key()?)
            } else {
                None
            };
            let value = self.value()?;
            each(Node {
                depth: self.depth,
                key,
                value,
            });
            if let Value::Object | Value::Array = value {
                (self.depth < DEEPEST).then_some(())?;
                let object = matches!(value, Value::Object);
                self.objects = self.objects << 1 | u128::from(object);
                self.depth += 1;
                if !self.take(if object { '}' } else { ']' }) {
                    continue;
                }
                self.leave();
            }
            loop {
                if self.depth == 0 {
                    self.skip();
                    return self.rest.is_empty().then_some(());
                }
                if self.take(',') {
                    break;
                }
                self.take(if self.in_object() { '}' } else { ']' })
                    .then_some(())?;
                self.leave();
            }
        }
    }

    fn in_object(&self) -> bool {
        self.objects & 1 == 1
    }

    fn leave(&mut self) {
        self.objects >>= 1;
        self.depth -= 1;
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn take(&mut self, mark: char) -> bool {
        self.skip();
        let rest = self.rest.strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn key(&mut self) -> Option<Str<'a>> {
        self.skip();
        let key = self.string()?;
        self.take(':').then_some(key)
    }

    fn value(&mut self) -> Option<Value<'a>> {
        self.skip();
        let words = [
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("null", Value::Null),
        ];
        match self.rest.as_bytes().first()? {
            b'{' => Some(self.after(1, Value::Object)),
            b'[' => Some(self.after(1, Value::Array)),
            b'"' => self.string().map(Value::Text),
            b'-' | b'0'..=b'9' => self.number().map(Value::Number),
            _ => words
                .into_iter()
                .find(|(word, _)| self.rest.starts_with(word))
                .map(|(word, value)| self.after(word.len(), value)),
        }
    }

    fn after(&mut self, length: usize, value: Value<'a>) -> Value<'a> {
        self.rest = &self.rest[length..];
        value
    }

    fn number(&mut self) -> Option<&'a str> {
        let all = self.rest;
        let rest = all.strip_prefix('-').unwrap_or(all);
        let (whole, mut rest) = digits(rest);
        (whole == "0" || !(whole.is_empty() || whole.starts_with('0'))).then_some(())?;
        if let Some(after) = rest.strip_prefix('.') {
            let (fraction, after) = digits(after);
            (!fraction.is_empty()).then_some(())?;
            rest = after;
        }
        if let Some(after) = rest.strip_prefix(['e', 'E']) {
            let (exponent, after) = digits(after.strip_prefix(['+', '-']).unwrap_or(after));
            (!exponent.is_empty()).then_some(())?;
            rest = after;
        }
        self.rest = rest;
        Some(&all[..all.len() - rest.len()])
    }

    fn string(&mut self) -> Option<Str<'a>> {
        let text = self.rest.strip_prefix('"')?;
        let mut bytes = text.bytes().enumerate();
        loop {
            match bytes.next()? {
                (end, b'"') => {
                    self.rest = &text[end + 1..];
                    return Some(Str(&text[..end]));
                }
                (_, b'\\') => match bytes.next()?.1 {
                    b'u' => {
                        for _ in 0..4 {
                            bytes.next()?.1.is_ascii_hexdigit().then_some(())?;
                        }
                    }
                    other => b"\"\\/bfnrt".contains(&other).then_some(())?,
                },
                (_, 0..0x20) => return None,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Writes the value as `serde_json` would.
    fn texts(text: &str) -> Option<Vec<String>> {
        let mut texts = Vec::new();
        visit(text, |node| {
            texts.extend(node.key.map(|key| key.chars().collect()));
            if let Value::Text(text) = node.value {
                texts.push(text.chars().collect());
            }
        })
        .then_some(texts)
    }

    fn of(value: &serde_json::Value, texts: &mut Vec<String>) {
        match value {
            serde_json::Value::String(text) => texts.push(text.clone()),
            serde_json::Value::Array(items) => items.iter().for_each(|item| of(item, texts)),
            serde_json::Value::Object(members) => members.iter().for_each(|(key, value)| {
                texts.push(key.clone());
                of(value, texts);
            }),
            _ => {}
        }
    }

    proptest! {
        #![proptest_config(histories::config(1000))]

        #[test]
        fn json_parser_agrees_with_serde_json(
            pieces in prop::collection::vec(prop_oneof![
                "[\\[\\]{},: \n]",
                "\\{\"[a-z]\":",
                "\"([a-zµ]|\\\\[nrtbf\"/\\\\]|\\\\u00e9|\\\\ud83d\\\\ude00|\\\\u[0-9]{3}){0,4}\"",
                "-?[0-9]{1,3}(\\.[0-9]{0,2})?([eE][+-]?[0-9]?)?",
                "true|false|null|nul|[\\x00-\\x7f]",
                ",\"[a-z]\":",
            ], 0..8)
        ) {
            let text = pieces.concat();
            let close: String = ["", "}", "]", "}]", "]}"].concat();
            for text in [text.clone(), format!("[{text}]"), format!("{text}}}"), format!("{text}{close}")] {
                match serde_json::from_str::<serde_json::Value>(&text) {
                    Err(error) if error.to_string().starts_with("number out of range") => {}
                    Err(_) => prop_assert!(texts(&text).is_none(), "{text}"),
                    Ok(value) => {
                        let mut expected = Vec::new();
                        of(&value, &mut expected);
                        let mut read = texts(&text);
                        prop_assert!(read.is_some(), "{text}");
                        let read = read.get_or_insert_default();
                        // A repeated key counts once in serde_json, and keys are sorted there.
                        read.sort();
                        read.dedup();
                        prop_assert!(expected.iter().all(|text| read.binary_search(text).is_ok()), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn depth_has_an_end() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(visit(&nested(DEEPEST), |_| ()));
        assert!(!visit(&nested(DEEPEST + 1), |_| ()));
        assert!(!visit(&"[".repeat(1_000_000), |_| ()));
    }
}
