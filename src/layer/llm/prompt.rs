//! What a request asks of a model, read from its JSON body.

use serde_json::Value;

/// What a request asks of a model.
pub(super) struct Prompt {
    pub(super) model: Option<String>,
    /// How large the texts of the prompt are, by the measure that was given.
    pub(super) size: u64,
    /// The most output tokens that the request allows, of all its answers together.
    pub(super) max_tokens: Option<u32>,
}

/// Where a request states the most output tokens of an answer: for OpenAI, Anthropic, Gemini and Bedrock.
const MAX_TOKENS: [&str; 5] = [
    "/max_completion_tokens",
    "/max_output_tokens",
    "/max_tokens",
    "/generationConfig/maxOutputTokens",
    "/inferenceConfig/maxTokens",
];

/// Where a request states how many answers it wants.
const ANSWERS: [&str; 3] = ["/n", "/best_of", "/generationConfig/candidateCount"];

/// Members with files and images in base64. What these cost does not follow from their length.
const FILES: [&str; 3] = ["data", "file_data", "bytes"];

impl Prompt {
    /// Reads a body. Returns `None` if it is no JSON object. `measure` returns the size of a text.
    pub(super) fn read(body: &[u8], measure: &dyn Fn(&str) -> u64) -> Option<Self> {
        let body: Value = serde_json::from_slice(body).ok()?;
        let root = body.as_object()?;
        // A completion may have several prompts, each with its answers.
        let prompts = match root.get("prompt") {
            Some(Value::Array(prompts)) if !prompts.iter().any(Value::is_number) => prompts.len(),
            _ => 1,
        };
        let answers = largest(&body, &ANSWERS).unwrap_or(1).max(1);
        let answers = answers.saturating_mul(prompts.max(1) as u64);
        let max_tokens = largest(&body, &MAX_TOKENS).map(|most| most.saturating_mul(answers));
        let mut size = 0_u64;
        let mut add = |text: &str| size = size.saturating_add(measure(text));
        each_text(&body, &mut add);
        Some(Prompt {
            model: root.get("model").and_then(Value::as_str).map(str::to_owned),
            size,
            max_tokens: max_tokens.map(|most| u32::try_from(most).unwrap_or(u32::MAX)),
        })
    }
}

/// Returns the largest number that stands in one of `places`.
fn largest(body: &Value, places: &[&str]) -> Option<u64> {
    let places = places.iter();
    let numbers = places.filter_map(|place| body.pointer(place)?.as_u64());
    numbers.max()
}

/// Calls `act` with each text in `value`.
fn each_text(value: &Value, act: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) if !is_data_url(text) => act(text),
        Value::Array(values) => {
            for value in values {
                match value {
                    // A prompt may be a list of tokens.
                    Value::Number(token) => act(&token.to_string()),
                    _ => each_text(value, act),
                }
            }
        }
        Value::Object(members) => {
            let texts = members
                .iter()
                .filter(|(name, value)| !(FILES.contains(&name.as_str()) && is_base64(value)));
            texts.for_each(|(_, value)| each_text(value, act));
        }
        _ => {}
    }
}

fn is_data_url(text: &str) -> bool {
    let start = &text.as_bytes()[..text.len().min(128)];
    text.starts_with("data:") && start.windows(8).any(|part| part == b";base64,")
}

/// Returns whether a value may be base64, as far as its start says.
fn is_base64(value: &Value) -> bool {
    value.as_str().is_some_and(|text| {
        let mut start = text.bytes().take(256);
        start.all(|byte| byte.is_ascii_alphanumeric() || b"+/-_=\r\n".contains(&byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Option<(Option<String>, u64, Option<u32>)> {
        let Prompt {
            model,
            size,
            max_tokens,
        } = Prompt::read(body.as_bytes(), &|text| text.len() as u64)?;
        Some((model, size, max_tokens))
    }

    #[test]
    fn prompts_of_each_api_are_read() {
        for (body, model, size, max_tokens) in [
            (
                r#"{"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "hello"}]}"#,
                Some("m"),
                10,
                Some(7),
            ),
            (
                r#"{"input": "hello", "max_output_tokens": 9, "n": 2}"#,
                None,
                5,
                Some(18),
            ),
            (
                r#"{"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 5}}"#,
                None,
                2,
                Some(5),
            ),
            (
                r#"{"source": {"type": "base64", "data": "aaaa"}, "url": "data:image/png;base64,aaaa"}"#,
                None,
                6,
                None,
            ),
            (
                r#"{"prompt": ["one", "two"], "max_tokens": 5, "n": 2}"#,
                None,
                6,
                Some(20),
            ),
            (
                r#"{"input": [[9906, 1917]], "max_tokens": 5}"#,
                None,
                8,
                Some(5),
            ),
            (
                r#"{"source": {"type": "text", "data": "a plain text"}, "text": "data: 1,2"}"#,
                None,
                25,
                None,
            ),
            (r#"{"max_tokens": 99999999999}"#, None, 0, Some(u32::MAX)),
            (r#"{"max_tokens": -1}"#, None, 0, None),
        ] {
            assert_eq!(
                read(body),
                Some((model.map(str::to_owned), size, max_tokens)),
                "{body}"
            );
        }
        for body in ["", "[]", "hello", "{"] {
            assert_eq!(read(body), None, "{body}");
        }
    }
}
