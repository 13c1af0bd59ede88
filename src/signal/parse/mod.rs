//! Readers of values: numbers, times, dates, text and JSON.

pub(super) mod date;
pub(super) mod json;
pub(super) mod number;
pub(super) mod text;
pub(super) mod time;
