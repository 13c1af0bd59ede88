//! Walks the values of a JSON text, with the crate `json-event-parser`: it keeps numbers as they were
//! written, and builds no tree of a body that may be large.

use std::borrow::Cow;

use json_event_parser::{JsonEvent, JsonSyntaxError, SliceJsonParser};

/// A value, and where it is.
#[derive(Clone, Debug)]
pub(in crate::signal) struct Node<'a> {
    /// How many containers are around it.
    pub(in crate::signal) depth: usize,
    /// Its key, if it is in an object.
    pub(in crate::signal) key: Option<Cow<'a, str>>,
    /// A container is the event of its start.
    pub(in crate::signal) value: JsonEvent<'a>,
}

impl<'a> Node<'a> {
    /// Returns the key, if it has no escapes.
    pub(in crate::signal) fn plain_key(&self) -> Option<&'a str> {
        plain(self.key.as_ref()?)
    }

    /// Returns a number, or a text without escapes.
    pub(in crate::signal) fn plain_value(&self) -> Option<&'a str> {
        match &self.value {
            JsonEvent::Number(text) | JsonEvent::String(text) => plain(text),
            _ => None,
        }
    }
}

fn plain<'a>(text: &Cow<'a, str>) -> Option<&'a str> {
    match text {
        Cow::Borrowed(text) => Some(text),
        Cow::Owned(_) => None,
    }
}

/// Visits all values of a text, if the whole text is valid JSON. Returns whether it is.
///
/// Nothing is visited if it is not.
pub(in crate::signal) fn visit<'a>(text: &'a str, mut each: impl FnMut(Node<'a>)) -> bool {
    walk(text, &mut |_| ()).is_ok() && walk(text, &mut each).is_ok()
}

fn walk<'a>(text: &'a str, each: &mut dyn FnMut(Node<'a>)) -> Result<(), JsonSyntaxError> {
    let mut parser = SliceJsonParser::new(text.as_bytes());
    let (mut depth, mut key) = (0, None);
    loop {
        let value = match parser.parse_next()? {
            JsonEvent::ObjectKey(name) => {
                key = Some(name);
                continue;
            }
            JsonEvent::EndObject | JsonEvent::EndArray => {
                depth -= 1;
                continue;
            }
            JsonEvent::Eof => return Ok(()),
            value => value,
        };
        let opens = matches!(value, JsonEvent::StartObject | JsonEvent::StartArray);
        let key = key.take();
        each(Node { depth, key, value });
        depth += usize::from(opens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_place_and_text_as_written() {
        let mut read = Vec::new();
        let text = r#" {"a": [1.50, "\u00e9"], "b\n": {"c": null}, "d": 1e300} "#;
        assert!(visit(text, |node| {
            read.push((node.depth, node.key.clone(), node.plain_value()));
        }));
        let expected = [
            (0, None, None),
            (1, Some("a"), None),
            (2, None, Some("1.50")),
            (2, None, None),
            (1, Some("b\n"), None),
            (2, Some("c"), None),
            (1, Some("d"), Some("1e300")),
        ];
        assert_eq!(
            read,
            expected.map(|(depth, key, text)| (depth, key.map(Cow::from), text))
        );
    }

    #[test]
    fn invalid_text_has_no_values() {
        let deep = "[".repeat(1_000_000);
        for text in [
            "",
            "{",
            "[1,]",
            "{\"a\":1}x",
            r#"["\ud83d"]"#,
            deep.as_str(),
        ] {
            assert!(!visit(text, |node| panic!("{node:?}")));
        }
    }
}
