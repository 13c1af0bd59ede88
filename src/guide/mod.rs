//! Pages for people: what does not belong to one item.

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
#[doc = include_str!("costs.md")]
pub mod costs {}

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("headers.md")]
pub mod headers {}

#[doc = include_str!("learning.md")]
pub mod learning {}

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
#[doc = include_str!("many_processes.md")]
pub mod many_processes {}

#[doc = include_str!("pace.md")]
pub mod pace {}

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
#[doc = include_str!("redis_format.md")]
pub mod redis_format {}
