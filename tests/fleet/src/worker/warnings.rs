//! Collects the warnings that tollgate logs, for the report of the worker.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Ear;

/// Starts to collect warnings.
pub(crate) fn collect() {
    tracing::subscriber::set_global_default(Ear).expect("it is the only subscriber");
}

pub(crate) fn collected() -> Vec<String> {
    std::mem::take(&mut *TOLD.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Subscriber for Ear {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "tollgate" && *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        // This event repeats for each uncounted call. The report counts those calls by their
        // grants.
        if !line.0.contains("sent uncounted") {
            TOLD.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line.0);
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The fields of an event, on one line.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}
