//! The lines of the guide's page on clients, one module a client, and what their tests share.
//!
//! What stands between two marks `// [recipe]` is on the page word by word. `tests/page.rs` compares
//! them.

pub mod hyper_util;
pub mod server;
pub mod suite;
