//! What an exporter of metrics gets besides the stats: each wait, and the counts of dropped gates.
//!
//! The exporter sets [`Exporter`] when it publishes for the first time. Before that, nothing is kept
//! for it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::values::Stats;

/// Takes in one wait of a gate.
pub(crate) type WaitRecorder = Box<dyn Fn(Duration) + Send + Sync>;

/// The functions of an exporter.
pub(crate) struct Exporter {
    /// Makes what records the waits of all gates with this name.
    pub(crate) wait_recorder: fn(&Arc<str>) -> WaitRecorder,
    /// Takes in the last counts of a gate that is dropped.
    pub(crate) dropped: fn(&Stats),
}

static EXPORTER: OnceLock<Exporter> = OnceLock::new();

/// Starts to pass waits and the counts of dropped gates to `exporter`. Only the first one counts.
pub(crate) fn export_to(exporter: Exporter) {
    let _ = EXPORTER.set(exporter);
}

/// Notes that a gate is dropped. `stats` reads its last counts.
pub(crate) fn note_dropped(stats: impl FnOnce() -> Stats) {
    if let Some(exporter) = EXPORTER.get() {
        (exporter.dropped)(&stats());
    }
}

/// What records the waits of one gate. It is made at the first wait after the first publish.
#[derive(Default)]
pub(super) struct ExportedWaits(OnceLock<WaitRecorder>);

impl ExportedWaits {
    /// Records a wait of the gate `name`, if there is an exporter.
    pub(super) fn add(&self, name: &Arc<str>, wait: Duration) {
        if let Some(exporter) = EXPORTER.get() {
            let record = self.0.get_or_init(|| (exporter.wait_recorder)(name));
            record(wait);
        }
    }
}
