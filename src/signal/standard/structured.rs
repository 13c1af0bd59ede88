//! Structured fields (RFC 9651): Lists and Dictionaries, as far as `RateLimit` needs them.
//!
//! The crate `sfv` parses all structured fields, but depends on a derive macro, which is more than the rest
//! of this crate compiles. As in `sfv`, one part that is no item makes the whole field invalid. A test
//! checks that this reader finds all that `sfv` finds.

use crate::signal::generic::lines::split;
use crate::signal::parse::number::Number;
use crate::signal::parse::text::Text;

/// A bare item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::signal) enum Bare {
    /// An Integer or a Decimal.
    Number(Number),
    /// A String or a Token.
    Text(Text),
    Other,
}

impl Bare {
    pub(in crate::signal) fn number(self) -> Option<Number> {
        match self {
            Bare::Number(number) => Some(number),
            _ => None,
        }
    }

    pub(in crate::signal) fn text(self) -> Option<Text> {
        match self {
            Bare::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// A member that is an Item, with the parameters that tollgate uses.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::signal) struct Item {
    /// `None` for an Inner List.
    pub(in crate::signal) bare: Option<Bare>,
    pub(in crate::signal) q: Option<Number>,
    pub(in crate::signal) r: Option<Number>,
    pub(in crate::signal) t: Option<Number>,
    pub(in crate::signal) w: Option<Number>,
    pub(in crate::signal) qu: Option<Text>,
    pub(in crate::signal) name: Option<Text>,
    /// As it was written.
    pub(in crate::signal) pk: Option<Text>,
}

/// Returns the members of a List, if the field is one.
pub(in crate::signal) fn list(field: &str) -> Option<impl Iterator<Item = Item>> {
    let items = split(field, ',').map(item);
    let is_list = items.clone().all(|item| item.is_some());
    is_list.then(|| items.flatten())
}

/// Returns the keys and bare items of a Dictionary, if the field is one.
pub(in crate::signal) fn dictionary(
    field: &str,
) -> Option<impl Iterator<Item = (&str, Option<Bare>)>> {
    let members = split(field, ',').map(member);
    let is_dictionary = members.clone().all(|member| member.is_some());
    is_dictionary.then(|| members.flatten())
}

fn member(text: &str) -> Option<(&str, Option<Bare>)> {
    let (key, value) = key(text)?;
    match value.strip_prefix('=') {
        Some(value) => Some((key, item(value)?.bare)),
        None => Some((key, Some(Bare::Other))),
    }
}

/// Parses an Item with its parameters. Inner Lists have none that count.
fn item(text: &str) -> Option<Item> {
    if text.starts_with('(') {
        return text.contains(')').then(Item::default);
    }
    let mut parts = split(text, ';');
    let mut item = Item {
        bare: Some(bare(parts.next()?)?),
        ..Item::default()
    };
    for parameter in parts {
        let (key, value) = key(parameter)?;
        let text = value.strip_prefix('=').unwrap_or("?1");
        let bare = bare(text)?;
        match key {
            "q" | "quota" => item.q = bare.number(),
            "r" | "remaining" => item.r = bare.number(),
            "t" | "reset" => item.t = bare.number(),
            "w" | "window" => item.w = bare.number(),
            "qu" => item.qu = bare.text(),
            "name" => item.name = bare.text(),
            "pk" => item.pk = Some(Text::of(&[text])),
            _ => {}
        }
    }
    Some(item)
}

/// Parses a key at the start of a text. Returns the rest, too: nothing, or what begins with `=` or `;`.
fn key(text: &str) -> Option<(&str, &str)> {
    let (key, rest) = text.split_at(text.find(['=', ';']).unwrap_or(text.len()));
    let is_key = key.starts_with(|first: char| first.is_ascii_lowercase() || first == '*')
        && key
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'*' | b'_' | b'-' | b'.'));
    is_key.then_some((key, rest))
}

fn bare(text: &str) -> Option<Bare> {
    match text.as_bytes().first()? {
        b'-' | b'0'..=b'9' => {
            let digits = text.bytes().filter(u8::is_ascii_digit).count();
            Number::read(text)
                .filter(|_| digits <= 15)
                .map(Bare::Number)
        }
        b'"' => string(text).map(Bare::Text),
        b':' => {
            let base64 = text[1..].strip_suffix(':')?.trim_end_matches('=');
            let mut bytes = base64.bytes();
            let are_digits =
                bytes.all(|byte| byte.is_ascii_alphanumeric() || b"+/".contains(&byte));
            are_digits.then_some(Bare::Other)
        }
        // A Boolean, a Date, a Display String.
        b'?' | b'@' | b'%' => Some(Bare::Other),
        first if first.is_ascii_alphabetic() || *first == b'*' => {
            let mut bytes = text.bytes();
            let is_token = bytes
                .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte));
            is_token.then(|| Bare::Text(Text::of(&[text])))
        }
        _ => None,
    }
}

fn string(text: &str) -> Option<Text> {
    let mut letters = text.strip_prefix('"')?.strip_suffix('"')?.chars();
    let mut string = Text::EMPTY;
    while let Some(letter) = letters.next() {
        string.push(match letter {
            '\\' => letters
                .next()
                .filter(|escaped| ['"', '\\'].contains(escaped))?,
            '"' => return None,
            ' '..='~' => letter,
            _ => return None,
        });
    }
    Some(string)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sfv::{BareItem, ListEntry, Parser};

    use super::*;

    /// Pieces of structured fields, valid and invalid.
    fn field() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            "[a-z*][a-z0-9_.*-]{0,3}",
            "-?[0-9]{1,16}(\\.[0-9]{0,4})?",
            "\"([ -~]|\\\\[\"\\\\]){0,5}\"",
            ":[a-zA-Z0-9+/]{0,6}={0,3}:",
            "%\"([ -~]|%[0-9a-f]{2}|%c3%a9|%f0%9f%98%80){0,4}\"",
            "[?@][0-9]{1,2}(\\.1)?",
            "[;=,() \t]",
            "(, ?|;|; |=)[a-z]",
            "\"[a-z]\";[qrtw]=[0-9]{1,3}",
            "[\\x00-\\xff]",
        ];
        prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
    }

    fn of(bare: &BareItem) -> Bare {
        let number = |text: String| Bare::Number(Number::read(&text).unwrap());
        match bare {
            BareItem::Integer(integer) => number(integer.to_string()),
            BareItem::Decimal(decimal) => number(decimal.to_string()),
            BareItem::String(text) => Bare::Text(Text::of(&[text.as_str()])),
            BareItem::Token(text) => Bare::Text(Text::of(&[text.as_str()])),
            _ => Bare::Other,
        }
    }

    fn of_entry(entry: &ListEntry) -> Option<Bare> {
        match entry {
            ListEntry::Item(item) => Some(of(&item.bare_item)),
            ListEntry::InnerList(_) => None,
        }
    }

    proptest! {
        #![proptest_config(histories::config(1000))]

        #[test]
        fn reader_finds_all_that_sfv_finds(field in field()) {
            if let Ok(expected) = Parser::new(&field).parse::<sfv::List>()
                && !expected.is_empty()
            {
                let items: Vec<_> = list(&field).expect("a list").collect();
                let bare: Vec<_> = items.iter().map(|item| item.bare).collect();
                prop_assert_eq!(bare, expected.iter().map(of_entry).collect::<Vec<_>>());
                for (item, entry) in items.iter().zip(&expected) {
                    let ListEntry::Item(entry) = entry else { continue };
                    let number = |key| of(entry.params.get(key)?).number();
                    let expected = ["q", "r", "t", "w"].map(number);
                    prop_assert_eq!([item.q, item.r, item.t, item.w], expected);
                }
            }
            if let Ok(expected) = Parser::new(&field).parse::<sfv::Dictionary>()
                && !expected.is_empty()
            {
                let members: Vec<_> = dictionary(&field).expect("a dictionary").collect();
                for (key, entry) in &expected {
                    let mut known = members.iter().rev().filter(|(known, _)| *known == key.as_str());
                    prop_assert_eq!(known.next().map(|(_, bare)| *bare), Some(of_entry(entry)));
                }
            }
        }
    }

    #[test]
    fn field_is_invalid_if_one_part_is() {
        for field in [
            "",
            "a,",
            "a;R=1",
            "a;r=",
            "a;r=1234567890123456",
            "a;r=1.2.3",
            "\"a",
            r#""a"b""#,
            r#""a\x""#,
            "a;pk=:YQ*:",
            "a;pk=:YQ==",
            "a b",
            "(a",
            "1min",
            "é",
        ] {
            assert!(list(field).is_none(), "{field}");
            assert!(dictionary(&format!("a={field}")).is_none(), "{field}");
        }
    }
}
