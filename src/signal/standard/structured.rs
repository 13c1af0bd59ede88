//! Structured fields (RFC 9651): Lists and Dictionaries, as far as `RateLimit` needs them.
//!
//! The crate `sfv` parses all structured fields, but needs a field of several lines joined, and
//! allocates memory for each text with a backslash and each byte sequence. This reader does
//! neither; a test compares it with `sfv`.

use std::iter::Peekable;

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
    /// A digest of the text.
    pub(in crate::signal) pk: Option<u64>,
}

/// Parses a List from the lines of a field. Returns whether it is valid.
pub(in crate::signal) fn list<'a>(
    lines: impl Iterator<Item = &'a str>,
    mut each: impl FnMut(&Item),
) -> bool {
    let mut reader = Reader::new(lines);
    let member = |reader: &mut Reader<_>| {
        each(&reader.member()?);
        Some(())
    };
    reader.members(member).is_some()
}

/// Parses a Dictionary from the lines of a field. Returns whether it is valid.
pub(in crate::signal) fn dictionary<'a>(
    lines: impl Iterator<Item = &'a str>,
    mut each: impl FnMut(&str, Option<Bare>),
) -> bool {
    let mut reader = Reader::new(lines);
    let member = |reader: &mut Reader<_>| {
        let key = reader.key()?;
        let item = match reader.take(b'=') {
            true => reader.member()?,
            false => reader.parameters(Item {
                bare: Some(Bare::Other),
                ..Item::default()
            })?,
        };
        each(key.as_str(), item.bare);
        Some(())
    };
    reader.members(member).is_some()
}

struct Reader<I: Iterator<Item = u8>> {
    bytes: Peekable<I>,
    /// The digest of all bytes since the start of the bare item.
    digest: u64,
}

impl<'a> Reader<std::iter::Empty<u8>> {
    /// Reads the lines as if they were joined with commas.
    fn new(lines: impl Iterator<Item = &'a str>) -> Reader<impl Iterator<Item = u8>> {
        let joined = lines
            .enumerate()
            .flat_map(|(line, text)| if line > 0 { ", " } else { "" }.bytes().chain(text.bytes()));
        Reader {
            bytes: joined.peekable(),
            digest: 0,
        }
    }
}

impl<I: Iterator<Item = u8>> Reader<I> {
    fn peek(&mut self) -> Option<u8> {
        self.bytes.peek().copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.bytes.next()?;
        self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Some(byte)
    }

    fn next_if(&mut self, wanted: impl Fn(u8) -> bool) -> Option<u8> {
        self.peek().filter(|byte| wanted(*byte))?;
        self.next()
    }

    fn take(&mut self, byte: u8) -> bool {
        self.next_if(|next| next == byte).is_some()
    }

    fn skip(&mut self, wanted: impl Fn(u8) -> bool) {
        while self.next_if(&wanted).is_some() {}
    }

    /// Parses members with commas between them, to the end.
    fn members(&mut self, mut member: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        let is_space = |byte| byte == b' ' || byte == b'\t';
        self.skip(|byte| byte == b' ');
        while self.peek().is_some() {
            member(self)?;
            self.skip(is_space);
            match self.next() {
                None => break,
                Some(b',') => self.skip(is_space),
                Some(_) => return None,
            }
            self.peek()?;
        }
        Some(())
    }

    /// Parses an Item or an Inner List.
    fn member(&mut self) -> Option<Item> {
        if !self.take(b'(') {
            let bare = Some(self.bare()?);
            return self.parameters(Item {
                bare,
                ..Item::default()
            });
        }
        loop {
            self.skip(|byte| byte == b' ');
            if self.take(b')') {
                return Some(Item {
                    bare: None,
                    ..self.parameters(Item::default())?
                });
            }
            self.bare()?;
            self.parameters(Item::default())?;
            matches!(self.peek()?, b' ' | b')').then_some(())?;
        }
    }

    fn parameters(&mut self, mut item: Item) -> Option<Item> {
        while self.take(b';') {
            self.skip(|byte| byte == b' ');
            let key = self.key()?;
            let bare = if self.take(b'=') {
                self.bare()?
            } else {
                Bare::Other
            };
            match key.as_str() {
                "q" | "quota" => item.q = bare.number(),
                "r" | "remaining" => item.r = bare.number(),
                "t" | "reset" => item.t = bare.number(),
                "w" | "window" => item.w = bare.number(),
                "qu" => item.qu = bare.text(),
                "name" => item.name = bare.text(),
                "pk" => item.pk = Some(self.digest),
                _ => {}
            }
        }
        Some(item)
    }

    fn key(&mut self) -> Option<Text> {
        let first = self.next_if(|byte| byte.is_ascii_lowercase() || byte == b'*')?;
        let inner = |byte: u8| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte)
        };
        Some(self.collect(first, inner))
    }

    fn collect(&mut self, first: u8, inner: impl Fn(u8) -> bool) -> Text {
        let mut text = Text::of(&[char::from(first).encode_utf8(&mut [0; 4])]);
        while let Some(byte) = self.next_if(&inner) {
            text.push(char::from(byte));
        }
        text
    }

    fn bare(&mut self) -> Option<Bare> {
        self.digest = 0;
        match self.peek()? {
            b'-' | b'0'..=b'9' => self.number().map(|(number, _)| Bare::Number(number)),
            b'"' => self.string().map(Bare::Text),
            b':' => self.bytes().map(|()| Bare::Other),
            b'%' => self.display_string().map(|()| Bare::Other),
            b'?' => {
                self.next();
                self.next_if(|byte| byte == b'0' || byte == b'1')
                    .map(|_| Bare::Other)
            }
            b'@' => {
                self.next();
                self.number()
                    .filter(|(_, decimal)| !decimal)
                    .map(|_| Bare::Other)
            }
            first if first.is_ascii_alphabetic() || first == b'*' => {
                self.next();
                let inner =
                    |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte);
                Some(Bare::Text(self.collect(first, inner)))
            }
            _ => None,
        }
    }

    /// Parses an Integer of up to 15 digits, or a Decimal of up to 12 and 3. Returns whether it is
    /// a Decimal.
    fn number(&mut self) -> Option<(Number, bool)> {
        let mut text = Text::EMPTY;
        if self.take(b'-') {
            text.push('-');
        }
        let digits = |reader: &mut Self, text: &mut Text, most: usize| {
            let mut count = 0;
            while let Some(digit) = reader.next_if(|byte| byte.is_ascii_digit()) {
                count += 1;
                (count <= most).then(|| text.push(char::from(digit)))?;
            }
            (count > 0).then_some(count)
        };
        let whole = digits(self, &mut text, 15)?;
        let decimal = self.take(b'.');
        if decimal {
            (whole <= 12).then_some(())?;
            text.push('.');
            digits(self, &mut text, 3)?;
        }
        Some((Number::read(text.as_str())?, decimal))
    }

    fn string(&mut self) -> Option<Text> {
        let mut text = Text::EMPTY;
        self.next();
        loop {
            match self.next()? {
                b'"' => return Some(text),
                b'\\' => text.push(char::from(
                    self.next_if(|byte| byte == b'"' || byte == b'\\')?,
                )),
                byte @ b' '..=b'~' => text.push(char::from(byte)),
                _ => return None,
            }
        }
    }

    /// Parses a Byte Sequence; its padding may be missing.
    fn bytes(&mut self) -> Option<()> {
        self.next();
        let (mut digits, mut padding) = (0usize, 0usize);
        loop {
            match self.next()? {
                b':' => break,
                b'=' => padding += 1,
                b'+' | b'/' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' if padding == 0 => {
                    digits += 1
                }
                _ => return None,
            }
        }
        let fits = match digits % 4 {
            0 => padding == 0,
            1 => false,
            rest => padding <= 4 - rest,
        };
        fits.then_some(())
    }

    /// Parses a Display String; its content must be UTF-8.
    fn display_string(&mut self) -> Option<()> {
        self.next();
        self.take(b'"').then_some(())?;
        let (mut open, mut length) = ([0; 4], 0);
        loop {
            let byte = match self.next()? {
                b'"' => return (length == 0).then_some(()),
                b'%' => self.hex()? << 4 | self.hex()?,
                byte @ b' '..=b'~' => byte,
                _ => return None,
            };
            *open.get_mut(length)? = byte;
            length += 1;
            match std::str::from_utf8(&open[..length]) {
                Ok(_) => length = 0,
                Err(error) if error.error_len().is_none() => {}
                Err(_) => return None,
            }
        }
    }

    fn hex(&mut self) -> Option<u8> {
        match self.next()? {
            digit @ b'0'..=b'9' => Some(digit - b'0'),
            digit @ b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sfv::visitor::Ignored;

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

    proptest! {
        #![proptest_config(histories::config(1000))]

        #[test]
        fn list_and_dictionary_parsers_agree_with_sfv(field in field()) {
            let sfv = sfv::Parser::new(field.as_bytes()).parse_list_with_visitor(Ignored).is_ok();
            prop_assert_eq!(list([&*field].into_iter(), |_| ()), sfv, "list");
            let sfv = sfv::Parser::new(field.as_bytes()).parse_dictionary_with_visitor(Ignored).is_ok();
            prop_assert_eq!(dictionary([&*field].into_iter(), |_, _| ()), sfv, "dictionary");
        }
    }

    #[test]
    fn lines_are_one_field_even_inside_of_a_text() {
        let mut names = Vec::new();
        let text = |item: &Item| match item.bare {
            Some(Bare::Text(text)) => text.as_str().to_owned(),
            _ => "-".to_owned(),
        };
        assert!(list(
            [r#""a"#, r#"b";r=1, (c d)"#, "e;pk=:YQ==:"].into_iter(),
            |item| names.push(text(item))
        ));
        assert_eq!(names, ["a, b", "-", "e"]);
        assert!(!list(["a,", "b"].into_iter(), |_| ()));
    }
}
