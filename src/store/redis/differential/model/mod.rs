//! Rules that only the scripts need, in Rust: the models that the tests compare them with.

pub(super) mod logical_clock;
pub(super) mod recovery;
