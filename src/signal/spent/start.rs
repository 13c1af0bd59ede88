//! The first bytes of a text that arrives byte by byte.

/// The first `N` bytes of a text. A list of `smallvec` takes twice the time for each byte.
#[derive(Clone, Debug)]
pub(super) struct Start<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Start<N> {
    pub(super) const EMPTY: Self = Start {
        bytes: [0; N],
        length: 0,
    };

    /// Appends a byte, if it fits. Returns whether it does.
    pub(super) fn push(&mut self, byte: u8) -> bool {
        let place = self.bytes.get_mut(self.length);
        let fits = place.map(|place| *place = byte).is_some();
        self.length += usize::from(fits);
        fits
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl<const N: usize> Default for Start<N> {
    fn default() -> Self {
        Start::EMPTY
    }
}
