//! The tasks to wake once a lock is released.

use std::task::Waker;

use smallvec::SmallVec;

/// Wakers that are collected under a lock and woken after it.
#[derive(Default)]
pub(crate) struct Wakers(SmallVec<[Waker; 4]>);

impl Wakers {
    pub(crate) fn add(&mut self, wakers: impl IntoIterator<Item = Waker>) {
        self.0.extend(wakers);
    }

    pub(crate) fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
}
