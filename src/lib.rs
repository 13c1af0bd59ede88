//! tollgate keeps your HTTP client inside the rate limits of the services it calls.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod clock;
mod edge;
mod error;
mod gate;
mod key;
mod keyed;
mod layer;
mod limit;
mod quota;
mod signal;
pub mod store;

pub use edge::tower::{RateLimit, ResponseFuture};
pub use error::{BoxError, ConfigError, Error, Limited, Reason, Report};
pub use gate::{Acquire, Limiter, Peek, Permit};
pub use key::{AsRequestInfo, Cost, Deadline, Key, RequestInfo, by_header, by_host};
pub use layer::{RateLimitBuilder, RateLimitLayer};
pub use quota::{Bucket, Limit, Quota};
pub use signal::{AsResponseInfo, Signal};
