//! The key of the host of a request, which a request with several limits needs more than once.

use super::{Key, RequestInfo, last_host};

/// The key of the host of one request. It is computed when it is first needed, and only once.
pub(crate) struct HostKey<'a, R> {
    request: &'a R,
    key: Option<Key>,
}

impl<'a, R: RequestInfo> HostKey<'a, R> {
    #[inline]
    pub(crate) fn of(request: &'a R) -> Self {
        HostKey { request, key: None }
    }

    /// Returns the key. `None` if the request has no host.
    #[inline]
    pub(crate) fn get(&mut self) -> Option<Key> {
        if self.key.is_none() {
            self.key = last_host::key_of(self.request);
        }
        self.key
    }

    /// The same, by a function that knows the keys of some hosts. It is called in any case, because
    /// it may note the host.
    #[inline]
    pub(crate) fn get_by(&mut self, key_of: impl FnOnce(&R) -> Option<Key>) -> Option<Key> {
        self.key = key_of(self.request);
        self.key
    }

    /// Returns the key if the client follows redirects: then another host may answer.
    #[inline]
    pub(crate) fn get_if_redirected(&mut self) -> Option<Key> {
        if self.request.follows_redirects() {
            self.get()
        } else {
            None
        }
    }
}
