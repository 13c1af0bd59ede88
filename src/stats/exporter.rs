//! What an exporter of metrics gets besides the stats: each wait, and the counts of dropped gates.
//!
//! The exporter sets [`Exporter`] when it publishes for the first time. Before that, nothing is kept
//! for it.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::labelled_keys::WithKeys;
use super::tally::Doing;

/// Takes in one wait of a gate.
pub(crate) type WaitRecorder = Box<dyn Fn(Duration) + Send + Sync>;

/// The functions of an exporter.
pub(crate) struct Exporter {
    /// Makes what records the waits of all gates with this name.
    pub(crate) wait_recorder: fn(&Arc<str>) -> WaitRecorder,
    /// Makes what records how long the calls of this kind took, of all stores with this prefix.
    #[cfg(feature = "redis")]
    pub(crate) call_recorder: fn(&Arc<str>, &'static str) -> WaitRecorder,
    /// Takes in the last counts of a gate that is dropped.
    pub(crate) dropped: fn(&WithKeys),
}

static EXPORTER: OnceLock<Exporter> = OnceLock::new();

/// Starts to pass waits and the counts of dropped gates to `exporter`. Only the first one counts.
pub(crate) fn export_to(exporter: Exporter) {
    let _ = EXPORTER.set(exporter);
}

#[cfg(feature = "redis")]
pub(crate) fn is_exporting() -> bool {
    EXPORTER.get().is_some()
}

thread_local! {
    /// Whether this thread reads the last counts of a gate.
    static IS_NOTING: Cell<bool> = const { Cell::new(false) };
}

/// Notes that a gate is dropped. `stats` reads its last counts.
pub(super) fn note_dropped(stats: impl FnOnce() -> WithKeys) {
    if let Some(exporter) = EXPORTER.get() {
        let _noting = Doing::begin(&IS_NOTING);
        (exporter.dropped)(&stats());
    }
}

/// Returns whether this thread reads the last counts of a gate: a store of the user may publish meanwhile.
pub(super) fn is_noting() -> bool {
    IS_NOTING.try_with(Cell::get).unwrap_or(false)
}

/// What records the waits of one gate, or the calls of one store. It is made at the first wait after the first publish.
#[derive(Default)]
pub(crate) struct ExportedWaits(OnceLock<WaitRecorder>);

impl ExportedWaits {
    /// Records a wait, if there is an exporter. `make` makes the recorder.
    pub(crate) fn add(&self, wait: Duration, make: impl FnOnce(&Exporter) -> WaitRecorder) {
        if let Some(exporter) = EXPORTER.get() {
            let record = self.0.get_or_init(|| make(exporter));
            record(wait);
        }
    }
}
