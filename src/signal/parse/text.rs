//! Bounded memory: short text, and lists that do not grow.

use std::fmt;

use smallvec::SmallVec;

/// Text of at most [`Text::LONGEST`] bytes, without heap memory; longer text is cut.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::signal) struct Text {
    length: u8,
    bytes: [u8; Text::LONGEST],
}

impl Text {
    pub(in crate::signal) const LONGEST: usize = 95;

    pub(in crate::signal) const EMPTY: Text = Text {
        length: 0,
        bytes: [0; Text::LONGEST],
    };

    /// Joins the pieces.
    pub(in crate::signal) fn of(pieces: &[&str]) -> Text {
        pieces.iter().flat_map(|piece| piece.chars()).collect()
    }

    /// Returns the text in lower case.
    pub(in crate::signal) fn lower(text: &str) -> Text {
        let letters = text.chars();
        letters.map(|letter| letter.to_ascii_lowercase()).collect()
    }

    /// Returns the text to be kept. `None` if it is empty.
    pub(in crate::signal) fn boxed(text: &str) -> Option<Box<str>> {
        (!text.is_empty()).then(|| Text::of(&[text]).into())
    }

    /// Appends the character, if it fits.
    pub(in crate::signal) fn push(&mut self, character: char) {
        let start = usize::from(self.length);
        let end = start + character.len_utf8();
        if let Some(room) = self.bytes.get_mut(start..end) {
            character.encode_utf8(room);
            self.length = end as u8;
        }
    }

    pub(in crate::signal) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }
}

impl Default for Text {
    fn default() -> Text {
        Text::EMPTY
    }
}

/// Takes the characters up to the first that does not fit.
impl FromIterator<char> for Text {
    fn from_iter<I: IntoIterator<Item = char>>(characters: I) -> Text {
        let mut text = Text::EMPTY;
        for character in characters {
            if usize::from(text.length) + character.len_utf8() > Text::LONGEST {
                break;
            }
            text.push(character);
        }
        text
    }
}

impl From<Text> for Box<str> {
    fn from(text: Text) -> Self {
        text.as_str().into()
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

/// A list of at most `N` items, on the stack; further items are dropped.
#[derive(Clone, Debug)]
pub(in crate::signal) struct Bounded<T, const N: usize>(SmallVec<[T; N]>);

impl<T, const N: usize> Bounded<T, N> {
    pub(in crate::signal) fn new() -> Self {
        Bounded(SmallVec::new())
    }

    pub(in crate::signal) fn push(&mut self, item: T) {
        if self.0.len() < N {
            self.0.push(item);
        }
    }

    pub(in crate::signal) fn remove(&mut self, place: usize) -> T {
        self.0.remove(place)
    }
}

impl<T, const N: usize> Default for Bounded<T, N> {
    fn default() -> Self {
        Bounded::new()
    }
}

impl<T, const N: usize> IntoIterator for Bounded<T, N> {
    type Item = T;
    type IntoIter = smallvec::IntoIter<[T; N]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<T, const N: usize> Extend<T> for Bounded<T, N> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        items.into_iter().for_each(|item| self.push(item));
    }
}

impl<T: PartialEq, const N: usize> Bounded<T, N> {
    /// Keeps the items for which `finish` returns true, without duplicates.
    pub(in crate::signal) fn keep(&mut self, mut finish: impl FnMut(&mut T) -> bool) {
        let mut kept = 0;
        for place in 0..self.0.len() {
            if finish(&mut self.0[place]) && !self.0[..kept].contains(&self.0[place]) {
                self.0.swap(kept, place);
                kept += 1;
            }
        }
        self.0.truncate(kept);
    }
}

impl<T, const N: usize> std::ops::Deref for Bounded<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T, const N: usize> std::ops::DerefMut for Bounded<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_after_a_whole_character() {
        assert_eq!(Text::of(&["a", "", "µ"]).as_str(), "aµ");
        assert_eq!(Text::of(&[&"x".repeat(500)]).as_str().len(), Text::LONGEST);
        assert_eq!(Text::of(&[&"µ".repeat(500)]).as_str(), "µ".repeat(47));
    }

    #[test]
    fn full_list_drops_further_items() {
        let mut list = Bounded::<u8, 2>::new();
        (0..9).for_each(|item| list.push(item));
        assert_eq!(list[..], [0, 1]);
    }

    #[test]
    fn bounded_list_keeps_each_item_once() {
        let mut list = Bounded::<u8, 9>::new();
        [3, 1, 3, 2, 9, 1]
            .into_iter()
            .for_each(|item| list.push(item));
        list.keep(|item| *item < 9);
        assert_eq!(list[..], [3, 1, 2]);
    }
}
