//! Reads a body in chunks: a JSON document, or the JSON in server-sent events.

use std::mem;

use super::Spent;
use super::json::Scanner;
use super::start::Start;

/// Reads from a body what the request has used, while the body passes through.
///
/// Pass it each chunk of the body, in order. It copies nothing, and takes about 100 bytes of memory,
/// however long the body is. A kilobyte takes 3 to 5 µs. It reads a JSON document and a stream of server-sent events, such as
/// that of OpenAI or Anthropic. If several events of a stream state the same unit, the last one
/// counts. Reading never fails and never panics.
///
/// OpenAI sends the counts only if the request has `"stream_options": {"include_usage": true}`. A
/// stream that breaks before its last event states nothing, or too little: do not settle then, and
/// the estimate counts.
///
/// ```
/// use tollgate::signal::SpentReader;
///
/// let chunks: [&[u8]; 3] = [
///     b"data: {\"choices\": [{\"delta\": {\"content\": \"Hello\"}}]}\n\nda",
///     b"ta: {\"choices\": [], \"usage\": {\"prompt_tokens\": 13, \"total_",
///     b"tokens\": 18}}\n\ndata: [DONE]\n\n",
/// ];
/// let mut reader = SpentReader::new();
/// for chunk in chunks {
///     reader.read(chunk);
///     // ... pass the chunk on ...
/// }
/// assert_eq!(reader.spent().count("tokens"), Some(18));
/// ```
#[derive(Clone, Debug, Default)]
pub struct SpentReader {
    form: BodyForm,
    scanner: Scanner,
    spent: Spent,
    /// The start of the line of a stream.
    line: Start<LONGEST>,
    /// Whether the last byte of a stream was a carriage return.
    after_return: bool,
    progress: StreamProgress,
}

/// The form of a body, which its first byte tells.
#[derive(Clone, Copy, Debug, Default)]
enum BodyForm {
    #[default]
    Unknown,
    Json,
    /// Events, outside of the data of a line.
    Events,
    /// Events, in the data of a line.
    Data,
}

/// Whether what a body has stated is all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StreamProgress {
    /// All, if the body ends here.
    #[default]
    Whole,
    /// Not all: a stream has begun or failed.
    Part,
    /// All, and nothing follows.
    Ended,
}

const DATA: &[u8] = b"data:";

/// The starts of lines that end the streams of OpenAI and Anthropic. Many clients drop the body when
/// they have read them. JSON has no line ends inside of a text, so no answer of a model contains them.
const ENDS: [&[u8]; 3] = [b"data: [DONE]", b"data:[DONE]", b"event: message_stop"];

/// The starts of lines after which a stream is not whole before its end: what Anthropic states at
/// the start is not what was produced.
const PARTS: [&[u8]; 2] = [b"event: message_start", b"event: error"];

/// The length of the longest of these starts.
const LONGEST: usize = PARTS[0].len();

impl SpentReader {
    /// Makes a reader for one body.
    pub fn new() -> Self {
        SpentReader::default()
    }

    /// Reads the next chunk of the body. Its bounds do not matter.
    pub fn read(&mut self, chunk: &[u8]) {
        chunk.iter().for_each(|byte| self.push(*byte));
    }

    /// Returns what the body has stated so far. A number counts when the byte after it was read.
    pub fn spent(&self) -> Spent {
        self.spent
    }

    /// Returns whether a stream has ended, so that the rest of the body states nothing.
    pub(crate) fn has_ended(&self) -> bool {
        self.progress == StreamProgress::Ended
    }

    /// Returns whether the counts are all, if the body ends here: not in a stream that has begun or
    /// failed.
    pub(crate) fn is_whole(&self) -> bool {
        self.progress != StreamProgress::Part
    }

    fn push(&mut self, byte: u8) {
        match self.form {
            BodyForm::Json => self.scanner.push(byte, &mut self.spent),
            BodyForm::Events | BodyForm::Data => self.in_events(byte),
            BodyForm::Unknown => match byte {
                // Blanks, and the three bytes of a byte order mark.
                b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf => {}
                b'{' | b'[' => {
                    self.form = BodyForm::Json;
                    self.scanner.push(byte, &mut self.spent);
                }
                _ => self.in_events(byte),
            },
        }
    }

    fn in_events(&mut self, byte: u8) {
        let after_return = mem::replace(&mut self.after_return, byte == b'\r');
        let in_data = matches!(self.form, BodyForm::Data);
        match byte {
            // The second half of the end of a line.
            b'\n' if after_return => return,
            // An empty line ends the event. An event that was cut does not spoil the next one.
            b'\r' | b'\n' if self.line.bytes().is_empty() => self.scanner = Scanner::default(),
            b'\r' | b'\n' if in_data => self.scanner.push(b'\n', &mut self.spent),
            b'\r' | b'\n' => {}
            _ if in_data => self.scanner.push(byte, &mut self.spent),
            _ => {}
        }
        if let b'\r' | b'\n' = byte {
            self.line = Start::EMPTY;
            self.form = BodyForm::Events;
        } else if self.line.push(byte) {
            self.at_start(in_data);
        }
    }

    /// Reads the start of a line, as far as it has come.
    fn at_start(&mut self, in_data: bool) {
        let line = self.line.bytes();
        self.form = match in_data || line == DATA {
            true => BodyForm::Data,
            false => BodyForm::Events,
        };
        if ENDS.contains(&line) {
            self.progress = StreamProgress::Ended;
        } else if PARTS.contains(&line) && !self.has_ended() {
            self.progress = StreamProgress::Part;
        }
    }
}
