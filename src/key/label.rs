//! The name of a key in errors and events.

use std::fmt;
use std::ops::Deref;

use smallvec::SmallVec;

/// The name of a key in errors and events: see [`Key`](crate::Key#what-logs-show-of-a-key). It
/// dereferences to its text, in which no character can forge a line of a log.
///
/// A label of up to 39 bytes needs no allocation. Eight digits fit, and so do most hosts of APIs.
///
/// ```
/// use tollgate::store::Label;
///
/// let label = Label::from("api.example.com");
/// assert_eq!(&*label, "api.example.com");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Label(SmallVec<[u8; 39]>);

/// The longest name of a host, and the longest label, in bytes.
const LONGEST: usize = 253;

/// Returns whether a character of a name could make a line of a log read as something else: it ends the line,
/// commands the terminal, is invisible, or changes the direction in which the text around it is shown.
pub(crate) fn may_mislead(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200b}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
        )
}

impl Label {
    /// Makes the label of eight hex digits.
    pub(super) fn of_digits(number: u32) -> Self {
        let digits = (0..8).rev().map(|place| {
            let digit = number >> (4 * place) & 15;
            b"0123456789abcdef"[digit as usize]
        });
        Label(digits.collect())
    }

    /// Makes the label of a host. A header may be of any length and have any characters, so a log line
    /// could be forged with it: others than those of hosts become `_`, and what is too long is cut.
    pub(super) fn of_host(host: &str) -> Self {
        let bytes = host.bytes().take(LONGEST);
        let shown = bytes.map(|byte| match byte {
            b'-' | b'.' | b'_' | b':' | b'[' | b']' | b'%' => byte,
            _ if byte.is_ascii_alphanumeric() => byte,
            _ => b'_',
        });
        Label(shown.collect())
    }
}

/// Makes the label of a text. Control characters, invisible ones and those that change the direction of the text
/// become `_`. The label is cut after 253 bytes, between two characters.
impl From<&str> for Label {
    fn from(text: &str) -> Self {
        let ends = text.char_indices().map(|(start, c)| start + c.len_utf8());
        let end = ends.take_while(|end| *end <= LONGEST).last();
        let text = &text[..end.unwrap_or(0)];
        if !text.contains(may_mislead) {
            return Label(SmallVec::from_slice(text.as_bytes()));
        }
        let shown = text.replace(may_mislead, "_");
        Label(SmallVec::from_slice(shown.as_bytes()))
    }
}

impl Deref for Label {
    type Target = str;

    fn deref(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a label is made of text or of digits")
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&**self, f)
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_keep_their_text() {
        for length in [0, 1, 8, 39, 40, 253] {
            let text = "ä".repeat(length / 2) + &"x".repeat(length % 2);
            let label = Label::from(&*text);
            assert_eq!(*label, *text);
            assert_eq!(label.to_string(), text);
            assert_eq!(format!("{label:?}"), format!("{text:?}"));
        }
    }

    #[test]
    fn digits_are_those_of_the_number() {
        for number in [0, 1, 0x0123_4567, 0x89ab_cdef, u32::MAX] {
            assert_eq!(*Label::of_digits(number), *format!("{number:08x}"));
        }
    }
}
