//! Pages for people: what does not belong to one item.

#[doc = include_str!("costs.md")]
pub mod costs {}

#[doc = include_str!("many_processes.md")]
pub mod many_processes {}

#[doc = include_str!("redis_format.md")]
pub mod redis_format {}
