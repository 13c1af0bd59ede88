//! Limits with a count for each key, as an API has them for its channels, routes or accounts.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::Response;
use hyper::header::HeaderMap;

use crate::refusal;
use crate::rules::{Rule, Windows, whole_seconds};

/// A limit with a count for each key.
#[derive(Clone, Copy, Debug)]
pub struct KeyedRule {
    /// The name of the limit in the log.
    pub name: &'static str,
    /// What each key allows.
    pub rule: Rule,
    /// Finds the key in the path and the headers of a call. `None` if the limit does not see the
    /// call.
    pub key: fn(&str, &HeaderMap) -> Option<String>,
    /// The `X-RateLimit-Scope` of a refusal by this limit.
    pub scope: &'static str,
}

/// The keys that a call counted for: the name of each limit that saw the call, and its key.
pub type Keys = Vec<(&'static str, String)>;

/// The limits, and the accepted calls of each key.
#[derive(Default)]
pub(crate) struct KeyedWindows {
    rules: Vec<KeyedRule>,
    accepted: BTreeMap<(&'static str, String), Windows>,
}

/// What the limits decided about a call.
pub(crate) struct Decided {
    pub(crate) keys: Keys,
    /// The name of the limit that refused the call.
    pub(crate) refused_by: Option<&'static str>,
    pub(crate) response: Response<String>,
}

impl KeyedWindows {
    pub(crate) fn new(rules: Vec<KeyedRule>) -> Self {
        KeyedWindows {
            rules,
            accepted: BTreeMap::new(),
        }
    }

    /// Decides a call at `now`. A call that one limit refuses counts in none.
    pub(crate) fn decide(&mut self, path: &str, headers: &HeaderMap, now: Duration) -> Decided {
        let (mut keys, mut refused) = (Keys::new(), None);
        for rule in &self.rules {
            let Some(key) = (rule.key)(path, headers) else {
                continue;
            };
            let of_key = self.accepted.entry((rule.name, key.clone()));
            let of_key = of_key.or_insert_with(|| Windows::new(vec![rule.rule]));
            let wait = of_key.wait_of_all(now);
            if refused.is_none() && !wait.is_zero() {
                refused = Some((rule, wait));
            }
            keys.push((rule.name, key));
        }
        let mut response = Response::new("welcome\n".to_owned());
        match refused {
            Some((rule, wait)) => {
                response = refusal(whole_seconds(wait));
                let scope = rule.scope.parse().expect("a scope is a header value");
                response.headers_mut().insert("x-ratelimit-scope", scope);
            }
            None => {
                for key in &keys {
                    let of_key = self.accepted.get_mut(key);
                    of_key.expect("each key has an entry").count(now);
                }
            }
        }
        Decided {
            keys,
            refused_by: refused.map(|(rule, _)| rule.name),
            response,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: [KeyedRule; 2] = [
        KeyedRule {
            name: "all",
            rule: Rule::per_second(3),
            key: |_, _| Some("all".to_owned()),
            scope: "global",
        },
        KeyedRule {
            name: "path",
            rule: Rule::per_second(1),
            key: |path, _| (path != "/free").then(|| path.to_owned()),
            scope: "user",
        },
    ];

    #[test]
    fn refused_calls_count_nowhere_and_name_the_scope() {
        let mut windows = KeyedWindows::new(RULES.to_vec());
        let mut decide = |path, ms| {
            let now = Duration::from_millis(ms);
            let decided = windows.decide(path, &HeaderMap::new(), now);
            let scope = decided.response.headers().get("x-ratelimit-scope").cloned();
            assert_eq!(decided.refused_by.is_some(), scope.is_some());
            (decided.keys.len(), decided.refused_by)
        };
        assert_eq!(decide("/a", 0), (2, None));
        assert_eq!(decide("/a", 1), (2, Some("path")));
        assert_eq!(decide("/b", 2), (2, None));
        assert_eq!(decide("/free", 3), (1, None));
        assert_eq!(decide("/free", 4), (1, Some("all")));
        assert_eq!(decide("/c", 999), (2, Some("all")));
        assert_eq!(decide("/c", 1000), (2, None));
    }
}
