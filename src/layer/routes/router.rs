//! Which pattern a method and a path match.
//!
//! The patterns are a tree: a level for each segment of a path. At each node, a lookup tries the
//! text of the segment first, then any one segment, then the rest of the path. If the way it took
//! leads to no pattern of the method, it goes back and tries the next. So the first pattern that it
//! finds is the most specific one. It visits no node twice, and allocates nothing: the values of
//! `{name}` are read from the path when the pattern is known.

use std::collections::HashMap;

use http::Method;

use super::pattern::{Pattern, Segment, error};
use crate::config_error::ConfigError;

/// Finds the pattern that a method and a path match.
#[derive(Default)]
pub(super) struct Router {
    root: PathNode,
}

/// What may follow the segments on the way from the root to this node.
#[derive(Default)]
struct PathNode {
    /// The next segment is this text.
    texts: HashMap<Box<str>, PathNode>,
    /// The next segment is any one that is not empty.
    one: Option<Box<PathNode>>,
    /// The patterns of which the rest of the path follows, if it is not empty.
    rest: Ends,
    /// The patterns that end here.
    end: Ends,
}

/// The patterns with one path, by their index: at most one for each method, and one for the other
/// methods (`None`).
#[derive(Default)]
struct Ends(Vec<(Option<Method>, usize)>);

impl Router {
    /// Makes a router. It finds a pattern by its index in `patterns`.
    pub(super) fn new(patterns: &[&Pattern]) -> Result<Self, ConfigError> {
        let mut router = Router::default();
        for (index, pattern) in patterns.iter().enumerate() {
            let ends = router.root.ends_of(pattern.segments());
            ends.insert(pattern.methods(), index).map_err(|same| {
                let other = patterns[same].text();
                let problem = format!("it matches the same requests as {other:?}");
                error(pattern.text(), problem)
            })?;
        }
        Ok(router)
    }

    /// Returns the index of the pattern that `method` and `path` match.
    pub(super) fn find(&self, method: &Method, path: &str) -> Option<usize> {
        self.root.find(method, Some(path.strip_prefix('/')?))
    }
}

impl PathNode {
    /// Returns where patterns with these segments end, below this node.
    fn ends_of(&mut self, segments: &[Segment]) -> &mut Ends {
        let Some((first, after)) = segments.split_first() else {
            return &mut self.end;
        };
        match first {
            Segment::Text(text) => self.texts.entry(text.clone()).or_default().ends_of(after),
            Segment::Value | Segment::Any => self.one.get_or_insert_default().ends_of(after),
            Segment::Rest => &mut self.rest,
        }
    }

    /// Returns the most specific pattern below this node that matches `left`, which is what is left
    /// of the path: `None` after its last segment.
    fn find(&self, method: &Method, left: Option<&str>) -> Option<usize> {
        let Some(left) = left else {
            return self.end.of(method);
        };
        let (segment, after) = match left.bytes().position(|byte| byte == b'/') {
            Some(slash) => (&left[..slash], Some(&left[slash + 1..])),
            None => (left, None),
        };
        let text = self.texts.get(segment);
        let found = text.and_then(|node| node.find(method, after));
        found
            .or_else(|| {
                let one = self.one.as_ref().filter(|_| !segment.is_empty())?;
                one.find(method, after)
            })
            .or_else(|| self.rest.of(method).filter(|_| !left.is_empty()))
    }
}

impl Ends {
    /// Adds a pattern with these methods, or with none.
    ///
    /// # Errors
    ///
    /// The index of another pattern that has one of the methods, or has none either.
    fn insert(&mut self, methods: &[Method], index: usize) -> Result<(), usize> {
        let others = methods.is_empty().then_some(None);
        for method in methods.iter().map(Some).chain(others) {
            if let Some(same) = self.exactly(method) {
                return Err(same);
            }
            self.0.push((method.cloned(), index));
        }
        Ok(())
    }

    /// Returns the pattern of `method`.
    fn of(&self, method: &Method) -> Option<usize> {
        self.exactly(Some(method)).or_else(|| self.exactly(None))
    }

    fn exactly(&self, method: Option<&Method>) -> Option<usize> {
        let mut ends = self.0.iter();
        let found = ends.find(|(own, _)| own.as_ref() == method);
        found.map(|(_, index)| *index)
    }
}
