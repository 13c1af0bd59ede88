//! The two APIs: what they limit, and what their responses look like.

use std::fmt::Write;

use crate::WINDOW;
use crate::window::Window;

/// An API that behaves like that of a large provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// Limits requests and tokens. When a request arrives, the prompt and `max_tokens` are counted.
    /// When its response ends, the count is corrected.
    Tokens,
    /// Limits requests, input tokens and output tokens. Output tokens are counted as they are
    /// produced. A request is refused if no output token is left.
    InputAndOutput,
}

/// The requests that each API allows in a window.
pub(crate) const REQUESTS: u32 = 300;

/// The tokens that [`Api::Tokens`] allows in a window.
pub(crate) const TOKENS: u32 = 200_000;

/// The tokens that [`Api::InputAndOutput`] allows in a window.
pub(crate) const INPUT: u32 = 150_000;
pub(crate) const OUTPUT: u32 = 50_000;

/// What callers state as `max_tokens`: the most output tokens of a response.
pub(crate) const MAX_TOKENS: u32 = 1500;

impl Api {
    pub(crate) const ALL: [Api; 2] = [Api::Tokens, Api::InputAndOutput];

    /// Returns its name on a command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Api::Tokens => "tokens",
            Api::InputAndOutput => "input-and-output",
        }
    }

    /// Returns the names of its limits on tokens, and the limits.
    pub(crate) fn windows(self) -> Vec<(&'static str, Window)> {
        let window = |limit| Window::new(limit, WINDOW);
        match self {
            Api::Tokens => vec![("tokens", window(TOKENS))],
            Api::InputAndOutput => {
                vec![
                    ("input-tokens", window(INPUT)),
                    ("output-tokens", window(OUTPUT)),
                ]
            }
        }
    }

    /// Returns the name of a header about the limit `of`, such as `remaining`.
    pub(crate) fn header(self, of: &str, what: &str) -> String {
        match self {
            Api::Tokens => format!("x-ratelimit-{what}-{of}"),
            Api::InputAndOutput => format!("anthropic-ratelimit-{of}-{what}"),
        }
    }

    /// Returns the first event of a response.
    pub(crate) fn begin(self, prompt: u32) -> String {
        match self {
            Api::Tokens => String::new(),
            Api::InputAndOutput => event(&format!(
                r#"{{"type":"message_start","message":{{"usage":{{"input_tokens":{prompt},"output_tokens":1}}}}}}"#
            )),
        }
    }

    /// Returns an event with `tokens` output tokens.
    pub(crate) fn part(self, tokens: u32) -> String {
        let text = "word ".repeat(tokens as usize);
        match self {
            Api::Tokens => event(&format!(
                r#"{{"choices":[{{"delta":{{"content":"{text}"}}}}],"usage":null}}"#
            )),
            Api::InputAndOutput => event(&format!(
                r#"{{"type":"content_block_delta","delta":{{"type":"text_delta","text":"{text}"}}}}"#
            )),
        }
    }

    /// Returns the last events of a response, which state what was used.
    pub(crate) fn end(self, prompt: u32, output: u32) -> String {
        let total = prompt + output;
        match self {
            Api::Tokens => {
                let mut end = event(&format!(
                    r#"{{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output},"total_tokens":{total}}}}}"#
                ));
                end += &event("[DONE]");
                end
            }
            Api::InputAndOutput => event(&format!(
                r#"{{"type":"message_delta","usage":{{"output_tokens":{output}}}}}"#
            )),
        }
    }
}

fn event(data: &str) -> String {
    let mut event = String::new();
    let _ = write!(event, "data: {data}\n\n"); // a string takes all text
    event
}
