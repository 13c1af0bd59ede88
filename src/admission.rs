//! What a gate decides about a request.

use crate::error::Limited;

/// What a limiter or a throttle decides about a request, as the edges pass it on.
pub(crate) enum Admission<T, W> {
    /// The request leaves now.
    Go(T),
    /// It waits for its permit.
    Wait(W),
    /// It is refused.
    No(Limited),
}

impl<T, W> Admission<T, W> {
    /// Makes what a request leaves with into what is sent.
    pub(crate) fn map<U>(self, go: impl FnOnce(T) -> U) -> Admission<U, W> {
        match self {
            Admission::Go(leaves) => Admission::Go(go(leaves)),
            Admission::Wait(wait) => Admission::Wait(wait),
            Admission::No(limited) => Admission::No(limited),
        }
    }
}
