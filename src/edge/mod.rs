//! Where requests arrive: Tower services and reqwest-middleware. Thin: no rule lives here.

#[cfg(feature = "reqwest")]
mod reqwest;
pub(crate) mod tower;
