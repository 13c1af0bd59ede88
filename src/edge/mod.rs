//! Where requests arrive: Tower services and reqwest-middleware. Thin: no rule lives here.

pub(crate) mod held;
#[cfg(feature = "reqwest")]
mod reqwest;
pub(crate) mod tower;
