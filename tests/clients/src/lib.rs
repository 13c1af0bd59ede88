//! The clients of the README's table that no other test uses: each line of the table, with the
//! types of the real crate.
//!
//! `cargo check --package clients` is the test. The functions have no callers: what they prove is
//! that they compile.

pub mod kubernetes;
pub mod octocrab;
pub mod tonic;
