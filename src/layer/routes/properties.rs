//! Laws of the router, on random tables and paths.

use http::Method;
use proptest::collection::vec;
use proptest::prelude::*;

use super::Routes;
use crate::quota::Quota;

/// How specific a segment of a pattern is: text, any one segment, the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Text,
    One,
    Rest,
}

/// Returns how specific `pattern` is for a request that it matches: the smaller, the more specific.
/// Written without a look at the router.
fn rank(pattern: &str, method: &Method, path: &str) -> Option<(Vec<Class>, bool)> {
    let (methods, pattern) = pattern.split_once(' ').unwrap_or(("", pattern));
    let is_named = methods.split('|').any(|name| name == method.as_str());
    if !methods.is_empty() && !is_named {
        return None;
    }
    let mut wanted = pattern.strip_prefix('/')?.split('/').peekable();
    let mut rest = path.strip_prefix('/');
    let mut classes = Vec::new();
    while let Some(segment) = wanted.next() {
        let left = rest?;
        let (first, after) = match left.split_once('/') {
            Some((first, after)) => (first, Some(after)),
            None => (left, None),
        };
        let is_last = wanted.peek().is_none();
        let (class, matches) = match segment {
            "*" if is_last => (Class::Rest, !left.is_empty()),
            one if one == "*" || one.starts_with('{') => (Class::One, !first.is_empty()),
            text => (Class::Text, text == first),
        };
        if !matches {
            return None;
        }
        classes.push(class);
        rest = after.filter(|_| class != Class::Rest);
    }
    rest.is_none().then_some((classes, methods.is_empty()))
}

/// Returns what two patterns with the same meaning have in common: the method, and the path with
/// names left out.
fn meaning(pattern: &str) -> Vec<(String, String)> {
    let (methods, path) = pattern.split_once(' ').unwrap_or(("", pattern));
    let segments: Vec<_> = path.split('/').collect();
    let last = segments.len() - 1;
    let segments = segments.iter().enumerate().map(|(index, &segment)| {
        if segment == "*" && index == last {
            "*"
        } else if segment == "*" || segment.starts_with('{') {
            "{}"
        } else {
            segment
        }
    });
    let path = segments.collect::<Vec<_>>().join("/");
    let methods = methods.split('|');
    methods
        .map(|method| (method.to_owned(), path.clone()))
        .collect()
}

fn have_same_meaning(patterns: &[String]) -> bool {
    let mut seen = std::collections::HashSet::new();
    let mut meanings = patterns.iter().flat_map(|pattern| meaning(pattern));
    meanings.any(|meaning| !seen.insert(meaning))
}

/// Few texts, so that patterns overlap and paths match them.
fn segment() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        5 => prop::sample::select(vec!["a", "b", "ab", "abc", "é", "%2F"]),
        2 => Just("{x}"),
        1 => Just("{y}"),
        2 => Just("*"),
        1 => Just(""),
    ]
}

fn method() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["", "", "", "GET ", "PUT ", "GET|PUT ", "DELETE|GET "])
}

fn pattern() -> impl Strategy<Value = String> {
    (method(), vec(segment(), 1..5))
        .prop_map(|(method, segments)| format!("{method}/{}", segments.join("/")))
}

fn path() -> impl Strategy<Value = String> {
    let segment = prop::sample::select(vec!["a", "b", "ab", "abc", "é", "%2F", "c", "", "{x}"]);
    vec(segment, 1..6).prop_map(|segments| format!("/{}", segments.join("/")))
}

fn table(patterns: &[String]) -> Result<Routes, crate::ConfigError> {
    Routes::new(
        patterns
            .iter()
            .map(|pattern| (pattern, Quota::per_second(1))),
    )
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn router_finds_what_a_naive_matcher_finds(
        patterns in vec(pattern(), 0..12),
        paths in vec(path(), 1..24),
    ) {
        let routes = match table(&patterns) {
            Ok(routes) => routes,
            Err(error) => {
                prop_assert!(have_same_meaning(&patterns), "{error}");
                return Ok(());
            }
        };
        prop_assert!(!have_same_meaning(&patterns));
        for path in &paths {
            for method in [Method::GET, Method::PUT, Method::DELETE, Method::OPTIONS] {
                let ranked = patterns.iter().filter_map(|pattern| {
                    Some((rank(pattern, &method, path)?, pattern.as_str()))
                });
                let best = ranked.min().map(|(_, pattern)| pattern);
                let found = routes.find(&method, path);
                prop_assert_eq!(found, best, "{} {}", method, path);
            }
        }
    }

    #[test]
    fn any_text_is_a_path(patterns in vec(pattern(), 0..12), path in any::<String>()) {
        if let Ok(routes) = table(&patterns) {
            let _ = routes.key(&Method::GET, &path, crate::Key::ALL);
        }
    }

    #[test]
    fn any_text_is_a_pattern_or_an_error(text in "\\PC{0,40}", path in path()) {
        if let Ok(routes) = table(std::slice::from_ref(&text)) {
            let _ = routes.key(&Method::GET, &path, crate::Key::ALL);
        }
    }
}
