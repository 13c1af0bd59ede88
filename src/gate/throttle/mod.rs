//! The gate that learns its pace.
//!
//! [`Line`] is its pure core, one for each key: who waits, who is on the way, until when nothing may leave. It has no
//! timer, no task and no clock; it is told the moment, and tells who may leave and when to look again. The simulator
//! drives it in virtual time, the gate with wakers.

#[cfg(test)]
mod laws;
mod line;

pub(crate) use line::{Flight, Line, Number};
