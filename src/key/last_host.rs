//! The key of the host that this thread has looked up last.
//!
//! Many requests in a row go to one host, and to compare two names takes a fifth of the time that it
//! takes to hash one.

use std::cell::RefCell;

use super::{Key, RequestInfo};

/// The longest name that is kept.
const MOST_BYTES: usize = 253;

/// A host, and its key.
struct LastHost {
    /// Empty if no host was looked up.
    name: String,
    key: Key,
}

thread_local! {
    static LAST: RefCell<LastHost> = const {
        RefCell::new(LastHost {
            name: String::new(),
            key: Key::ALL,
        })
    };
}

/// Returns [`Key::host`] of the host of `request`.
#[inline]
pub(super) fn key_of(request: &impl RequestInfo) -> Option<Key> {
    let find = |last: &RefCell<LastHost>| {
        let mut last = last.borrow_mut();
        if !last.name.is_empty() && request.is_to(&last.name) {
            return Some(last.key);
        }
        request.host().map(|name| last.replace(name))
    };
    // A thread that ends keeps none.
    LAST.try_with(find)
        .unwrap_or_else(|_| request.host().map(Key::host))
}

impl LastHost {
    /// Returns the key of `name`, and keeps both if the name is short enough.
    #[inline(never)]
    fn replace(&mut self, name: &str) -> Key {
        let key = Key::host(name);
        if name.len() <= MOST_BYTES {
            self.name.clear();
            self.name.push_str(name);
            self.key = key;
        }
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request to this host.
    struct To<'a>(&'a str);

    impl RequestInfo for To<'_> {
        fn host(&self) -> Option<&str> {
            Some(self.0)
        }
    }

    #[test]
    fn keys_are_those_of_the_names() {
        let long = "a".repeat(MOST_BYTES + 1);
        let longest = &long[1..];
        let names = [
            "",
            "a.example",
            "a.example.",
            "A.example",
            "b.example",
            longest,
            &long,
        ];
        for name in names {
            for other in names {
                for name in [name, other, other, name] {
                    assert_eq!(key_of(&To(name)), Some(Key::host(name)), "{name}");
                }
            }
        }
    }
}
