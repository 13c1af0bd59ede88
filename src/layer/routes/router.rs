//! Which pattern a method and a path match.
//!
//! There is one [`matchit::Router`] for each method that a pattern names, and one for all other
//! methods. A pattern without a method is in each of them, unless it has the same path there as a
//! pattern with the method.

use std::collections::HashMap;

use http::Method;

use super::pattern::{Pattern, Segment, error};
use crate::config_error::ConfigError;

/// Finds the pattern that a method and a path match.
pub(super) struct Router {
    by_method: Vec<(Method, Paths)>,
    /// For the methods that no pattern names.
    others: Paths,
    /// For each pattern: for each of its `{name}` and `*`, whether its value counts.
    counted: Vec<Box<[bool]>>,
}

/// The paths of one method, with the index of their pattern.
type Paths = matchit::Router<usize>;

/// What a method and a path match.
pub(super) struct Found<'a> {
    route: usize,
    values: matchit::Params<'a, 'a>,
    counted: &'a [bool],
}

impl Router {
    /// Makes a router. It finds a pattern by its index in `patterns`.
    pub(super) fn new(patterns: &[&Pattern]) -> Result<Self, ConfigError> {
        let mut methods: Vec<&Method> = patterns.iter().flat_map(|p| p.methods()).collect();
        methods.sort_by_key(|method| method.as_str());
        methods.dedup();
        let by_method = methods.into_iter().map(|method| {
            let paths = paths(patterns, Some(method))?;
            Ok((method.clone(), paths))
        });
        Ok(Router {
            by_method: by_method.collect::<Result<_, _>>()?,
            others: paths(patterns, None)?,
            counted: patterns.iter().map(|pattern| counted(pattern)).collect(),
        })
    }

    /// Returns the pattern that `method` and `path` match.
    pub(super) fn find<'a>(&'a self, method: &Method, path: &'a str) -> Option<Found<'a>> {
        let own = self.by_method.iter().find(|(own, _)| own == method);
        let paths = own.map_or(&self.others, |(_, paths)| paths);
        let matched = paths.at(path).ok()?;
        Some(Found {
            route: *matched.value,
            values: matched.params,
            counted: &self.counted[*matched.value],
        })
    }
}

impl Found<'_> {
    /// Returns the index of the pattern.
    pub(super) fn route(&self) -> usize {
        self.route
    }

    /// Returns the values of `{name}` in the path, from left to right.
    pub(super) fn counted(&self) -> impl Iterator<Item = &str> {
        let values = self.values.iter().map(|(_, value)| value);
        let counted = values.zip(self.counted);
        counted.filter_map(|(value, counts)| counts.then_some(value))
    }
}

/// Makes the paths of `method`, or of the methods that no pattern names.
fn paths(patterns: &[&Pattern], method: Option<&Method>) -> Result<Paths, ConfigError> {
    let mut paths = Paths::new();
    let mut taken = HashMap::new();
    let names = |pattern: &Pattern| method.is_some_and(|method| pattern.methods().contains(method));
    let named = patterns.iter().enumerate().filter(|(_, p)| names(p));
    let without = patterns.iter().enumerate();
    let without = without.filter(|(_, p)| p.methods().is_empty());
    for (index, pattern) in named.chain(without) {
        let path = path(pattern);
        if let Some(&other) = taken.get(&path) {
            let other: &Pattern = patterns[other];
            if other.methods().is_empty() == pattern.methods().is_empty() {
                let problem = format!("it matches the same requests as {:?}", other.text());
                return Err(error(pattern.text(), problem));
            }
            continue;
        }
        if paths.insert(path.clone(), index).is_err() {
            let problem = "a * at the end stands where another pattern has {name} or *: write one of them as text";
            return Err(error(pattern.text(), problem));
        }
        taken.insert(path, index);
    }
    Ok(paths)
}

/// Returns the path of `pattern` as matchit has it. Two patterns with the same path match the same.
fn path(pattern: &Pattern) -> String {
    let segments = pattern.segments().iter().map(|segment| match segment {
        Segment::Text(text) => format!("/{text}"),
        Segment::Value | Segment::Any => "/{value}".to_owned(),
        Segment::Rest => "/{*rest}".to_owned(),
    });
    segments.collect()
}

/// Returns for each value of a match of `pattern` whether it counts.
fn counted(pattern: &Pattern) -> Box<[bool]> {
    let segments = pattern.segments().iter();
    let values = segments.filter(|segment| !matches!(segment, Segment::Text(_)));
    values
        .map(|segment| matches!(segment, Segment::Value))
        .collect()
}
