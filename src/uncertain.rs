//! Whether an accepted request would change what any key knows of its upstream.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Exists while an accepted request would change what a key knows of its upstream: it is on probation, or under
/// suspicion. While there is one in the process, all responses are read.
#[derive(Debug)]
pub(crate) struct Uncertain(());

/// How many [`Uncertain`] there are in the process.
static UNCERTAIN: AtomicUsize = AtomicUsize::new(0);

impl Uncertain {
    pub(crate) fn new() -> Self {
        UNCERTAIN.fetch_add(1, Ordering::Relaxed);
        Uncertain(())
    }
}

impl Drop for Uncertain {
    fn drop(&mut self) {
        UNCERTAIN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns whether responses other than refusals matter to any key.
#[inline]
pub(crate) fn is_any_uncertain() -> bool {
    UNCERTAIN.load(Ordering::Relaxed) > 0
}
