//! The pattern of a route: the methods and the path that it matches.

use std::fmt;

use http::Method;

use crate::config_error::ConfigError;
use crate::key::Key;

/// The most segments that a path may have. A lookup goes one call deeper for each.
const MOST_SEGMENTS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    /// As the user wrote it.
    text: Box<str>,
    /// Empty if the pattern names no method: then it matches all.
    methods: Vec<Method>,
    /// At least one.
    segments: Vec<Segment>,
    /// The index of the last segment that is a `{name}`.
    last_value: Option<usize>,
}

/// What one segment of a path is to be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    /// This text, which may be empty.
    Text(Box<str>),
    /// `{name}`: any one segment that is not empty. Each value has a count of its own.
    Value,
    /// `*`: any one segment that is not empty.
    Any,
    /// `*` at the end: the rest of the path, which is not empty.
    Rest,
}

impl Pattern {
    /// Reads a pattern such as `GET /users/{user}`.
    pub(super) fn parse(text: &str) -> Result<Self, ConfigError> {
        let (methods, path) = match text.split_once(' ') {
            Some((methods, path)) => (parse_methods(methods), path.trim_start()),
            None => (Ok(Vec::new()), text),
        };
        let pattern = methods.and_then(|methods| {
            let segments = parse_path(path)?;
            Ok(Pattern {
                text: text.into(),
                methods,
                last_value: segments.iter().rposition(|one| *one == Segment::Value),
                segments,
            })
        });
        pattern.map_err(|problem| error(text, problem))
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn methods(&self) -> &[Method] {
        &self.methods
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the key of a request with the key `key` and `path`, which matches the pattern: `key`
    /// and the pattern, and the values of `{name}` from left to right.
    pub(super) fn key(&self, key: Key, path: &str) -> Key {
        let key = key.and(&*self.text);
        let Some(last) = self.last_value else {
            return key;
        };
        let found = path.split('/').skip(1).zip(&self.segments[..=last]);
        let values = found.filter(|(_, segment)| matches!(segment, Segment::Value));
        values.fold(key, |key, (value, _)| key.and(value))
    }
}

/// Makes the error of a pattern.
pub(super) fn error(pattern: &str, problem: impl fmt::Display) -> ConfigError {
    let pattern: String = pattern.chars().take(200).collect();
    ConfigError::new(format!("route {pattern:?}: {problem}"))
}

fn parse_methods(text: &str) -> Result<Vec<Method>, &'static str> {
    let mut methods = Vec::new();
    for name in text.split('|') {
        let is_method = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase());
        let method = Method::from_bytes(name.as_bytes());
        let Some(method) = method.ok().filter(|_| is_method) else {
            return Err(
                "a method is upper-case letters, such as GET, and | stands between several",
            );
        };
        if methods.contains(&method) {
            return Err("a method is named twice");
        }
        methods.push(method);
    }
    Ok(methods)
}

fn parse_path(path: &str) -> Result<Vec<Segment>, &'static str> {
    let Some(segments) = path.strip_prefix('/') else {
        return Err("a path begins with /; to tell hosts apart, use .key(by_host)");
    };
    let count = segments.split('/').count();
    if count > MOST_SEGMENTS {
        return Err("a path has at most 64 segments");
    }
    let parsed = segments.split('/').enumerate().map(|(index, segment)| {
        let name = segment
            .strip_prefix('{')
            .and_then(|name| name.strip_suffix('}'));
        match (segment, name) {
            ("*", _) if index + 1 == count => Ok(Segment::Rest),
            ("*", _) => Ok(Segment::Any),
            (_, Some(name)) if is_name(name) => Ok(Segment::Value),
            _ => parse_text(segment),
        }
    });
    parsed.collect()
}

fn is_name(text: &str) -> bool {
    let mut letters = text.bytes();
    !text.is_empty() && letters.all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
}

fn parse_text(text: &str) -> Result<Segment, &'static str> {
    if text.contains(['{', '}', '*']) {
        return Err("{name} and * are whole segments, and a name is letters, digits, _ and -");
    }
    if text.contains(['?', '#']) {
        return Err("a path has no query and no fragment");
    }
    if text.contains(|letter: char| letter.is_whitespace() || letter.is_control()) {
        return Err("a path has no spaces and no control characters");
    }
    Ok(Segment::Text(text.into()))
}
