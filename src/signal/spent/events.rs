//! Reads a body in chunks: a JSON document, or the JSON in server-sent events.

use super::Spent;
use super::json::Scanner;

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
    form: Form,
    scanner: Scanner,
    spent: Spent,
}

/// The form of a body, which its first byte tells.
#[derive(Clone, Copy, Debug, Default)]
enum Form {
    #[default]
    Unknown,
    Json,
    Events {
        line: Line,
        after_return: bool,
    },
}

/// The part of a line in which the next byte is.
#[derive(Clone, Copy, Debug)]
enum Line {
    /// In the name of its field, which was `data:` so far, for this many bytes.
    Name(usize),
    Data,
    Other,
}

const DATA: &[u8] = b"data:";

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

    fn push(&mut self, byte: u8) {
        match self.form {
            Form::Json => self.scanner.push(byte, &mut self.spent),
            Form::Events { line, after_return } => self.in_events(line, after_return, byte),
            Form::Unknown => match byte {
                // Blanks, and the three bytes of a byte order mark.
                b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf => {}
                b'{' | b'[' => {
                    self.form = Form::Json;
                    self.scanner.push(byte, &mut self.spent);
                }
                _ => self.in_events(Line::Name(0), false, byte),
            },
        }
    }

    fn in_events(&mut self, line: Line, after_return: bool, byte: u8) {
        let line = match (line, byte) {
            // The second half of the end of a line.
            (_, b'\n') if after_return => line,
            (Line::Name(0), b'\r' | b'\n') => {
                // An empty line ends the event. An event that was cut does not spoil the next one.
                self.scanner = Scanner::default();
                line
            }
            (_, b'\r' | b'\n') => {
                if let Line::Data = line {
                    self.scanner.push(b'\n', &mut self.spent);
                }
                Line::Name(0)
            }
            (Line::Name(length), _) if DATA.get(length) == Some(&byte) => {
                match length + 1 == DATA.len() {
                    true => Line::Data,
                    false => Line::Name(length + 1),
                }
            }
            (Line::Name(_) | Line::Other, _) => Line::Other,
            (Line::Data, _) => {
                self.scanner.push(byte, &mut self.spent);
                Line::Data
            }
        };
        let after_return = byte == b'\r';
        self.form = Form::Events { line, after_return };
    }
}
