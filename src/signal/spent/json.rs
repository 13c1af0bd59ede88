//! Finds counts in JSON that arrives byte by byte.
//!
//! The scanner knows the depth of the byte and the objects on a path to a count. Everything else of
//! the text is passed over, so its memory does not grow. It does not check that the text is valid
//! JSON: text that is not gives some counts or none.

use super::start::Start;
use super::{Spent, Unit};
use crate::signal::parse::number::Number;

/// An object on a path to a count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Object {
    #[default]
    Root,
    /// `response` and `message` in events of a stream.
    Envelope,
    Usage,
    UsageMetadata,
    Extensions,
    QueryCost,
    Data,
    RateLimit,
}

/// What a key leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Object(Object),
    Count(Unit),
}

impl Object {
    /// The most objects on a path.
    const DEEPEST: usize = 3;

    /// Returns what `key` leads to. A key that is written with escapes is never found: no server
    /// writes these keys so.
    fn member(self, key: &[u8]) -> Option<Member> {
        use Member::{Count, Object as Inner};
        Some(match (self, key) {
            (Object::Root | Object::Envelope, b"usage") => Inner(Object::Usage),
            (Object::Root, b"response" | b"message") => Inner(Object::Envelope),
            (Object::Root, b"usageMetadata") => Inner(Object::UsageMetadata),
            (Object::Root, b"extensions") => Inner(Object::Extensions),
            (Object::Root, b"data") => Inner(Object::Data),
            (Object::Usage, b"total_tokens" | b"totalTokens") => Count(Unit::Tokens),
            (Object::Usage, b"prompt_tokens" | b"input_tokens" | b"inputTokens") => {
                Count(Unit::InputTokens)
            }
            (Object::Usage, b"completion_tokens" | b"output_tokens" | b"outputTokens") => {
                Count(Unit::OutputTokens)
            }
            (Object::Usage, b"cache_creation_input_tokens" | b"cacheWriteInputTokens") => {
                Count(Unit::CacheCreationInputTokens)
            }
            (Object::Usage, b"cache_read_input_tokens" | b"cacheReadInputTokens") => {
                Count(Unit::CacheReadInputTokens)
            }
            (Object::UsageMetadata, b"totalTokenCount") => Count(Unit::Tokens),
            (Object::UsageMetadata, b"promptTokenCount") => Count(Unit::InputTokens),
            (Object::UsageMetadata, b"candidatesTokenCount") => Count(Unit::OutputTokens),
            (Object::Extensions, b"cost") => Inner(Object::QueryCost),
            (Object::QueryCost, b"actualQueryCost") => Count(Unit::Points),
            (Object::Data, b"rateLimit") => Inner(Object::RateLimit),
            (Object::RateLimit, b"cost") => Count(Unit::Points),
            _ => return None,
        })
    }
}

/// Where in the text the next byte is.
#[derive(Clone, Copy, Debug, Default)]
enum ScanState {
    #[default]
    Between,
    Text {
        escaped: bool,
    },
    /// A text has ended. It is a key if a colon follows.
    AfterText,
    /// In a number that is not negative and has no exponent, so far.
    Number(Unit),
}

/// A byte longer than the longest key, so that a longer text is no key when it is cut.
const MOST_BYTES: usize = "cache_creation_input_tokens".len() + 1;

/// Walks JSON that arrives byte by byte.
#[derive(Clone, Debug, Default)]
pub(super) struct Scanner {
    state: ScanState,
    /// The containers around the next byte.
    depth: u64,
    /// The outermost containers, as far as they are on a path to a count.
    path: [Object; Object::DEEPEST],
    /// How many of `path` there are.
    known: usize,
    /// The start of the last text or number, as it was written.
    text: Start<MOST_BYTES>,
    /// What the last key leads to, until its value begins.
    member: Option<Member>,
}

impl Scanner {
    /// Takes the next byte, and sets the counts that are complete with it.
    pub(super) fn push(&mut self, byte: u8, spent: &mut Spent) {
        match &mut self.state {
            ScanState::Text { escaped } => match byte {
                _ if *escaped => *escaped = false,
                b'"' => self.state = ScanState::AfterText,
                _ => {
                    *escaped = byte == b'\\';
                    self.text.push(byte);
                }
            },
            ScanState::Number(unit) => match byte {
                b'0'..=b'9' | b'.' => {
                    self.text.push(byte);
                }
                b',' | b'}' | b' ' | b'\t' | b'\r' | b'\n' => {
                    let text = std::str::from_utf8(self.text.bytes()).unwrap_or_default();
                    if let Some(number) = Number::read(text) {
                        let count = u32::try_from(number.count_up(1));
                        spent.set(*unit, count.unwrap_or(u32::MAX));
                    }
                    self.structure(byte);
                }
                // A sign or an exponent: it is no count.
                _ => self.structure(byte),
            },
            ScanState::Between | ScanState::AfterText => self.structure(byte),
        }
    }

    /// Takes a byte that is not in a text or a number.
    fn structure(&mut self, byte: u8) {
        let after_text = matches!(self.state, ScanState::AfterText);
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => {
                if !after_text {
                    self.state = ScanState::Between;
                }
                return;
            }
            b':' if after_text => {
                let object = self.object();
                self.member = object.and_then(|object| object.member(self.text.bytes()));
                self.state = ScanState::Between;
                return;
            }
            _ => {}
        }
        let member = self.member.take();
        self.state = ScanState::Between;
        match byte {
            b'"' => {
                self.text = Start::EMPTY;
                self.state = ScanState::Text { escaped: false };
            }
            b'{' => self.open(match (self.depth, member) {
                (0, _) => Some(Object::Root),
                (_, Some(Member::Object(object))) => Some(object),
                _ => None,
            }),
            b'[' => self.open(None),
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                let depth = usize::try_from(self.depth).unwrap_or(usize::MAX);
                self.known = self.known.min(depth);
            }
            b'0'..=b'9' => {
                if let Some(Member::Count(unit)) = member {
                    self.text = Start::EMPTY;
                    self.text.push(byte);
                    self.state = ScanState::Number(unit);
                }
            }
            _ => {}
        }
    }

    fn open(&mut self, object: Option<Object>) {
        let is_known = usize::try_from(self.depth) == Ok(self.known);
        let place = self.path.get_mut(self.known).filter(|_| is_known);
        if let (Some(place), Some(object)) = (place, object) {
            *place = object;
            self.known += 1;
        }
        self.depth = self.depth.saturating_add(1);
    }

    /// Returns the innermost container, if it is on a path to a count.
    fn object(&self) -> Option<Object> {
        let is_known = usize::try_from(self.depth) == Ok(self.known);
        let innermost = self.known.checked_sub(1).filter(|_| is_known)?;
        Some(self.path[innermost])
    }
}
