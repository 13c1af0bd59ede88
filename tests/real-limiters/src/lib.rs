//! Servers whose limiters others wrote: nginx, HAProxy, express-rate-limit and slowapi.
//!
//! A [`Server`] is installed if it is missing, started for one [`Limit`], and stopped for its [`Log`]. The log has the
//! decision on each request, so it is what a limiter of tollgate is judged by. [`closed_loops`] keeps a server busy, and
//! [`Figures`] has what came of it.

mod calls;
mod figures;
mod kind;
mod log;
mod programs;
mod server;

pub use calls::{Call, closed_loops};
pub use figures::{Figures, jain};
pub use kind::{ExpressHeaders, Limit, ServerKind, Strategy};
pub use log::{Arrival, Log};
pub use server::{Server, install};
