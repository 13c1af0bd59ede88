//! What others than this fleet use of a limit, as the upstream's word shows it.
//!
//! An upstream says how much of a limit is left, and when that starts anew. What is gone and was not granted here, somebody
//! else has used: at least so much, since of what was granted some may still be on its way. What it refuses to a fleet that
//! keeps the limit, somebody else has used as well. So much is reserved until the upstream's window ends, and in the window
//! after, less what was left over in the end. Where the log did not see all of the first, nothing is reserved in the
//! second: what was gone may have been ours, before a restart.
//!
//! A fleet that is alone never reserves anything: what its upstream counts, it has granted.

use super::Micros;

/// Units reserved for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strangers {
    /// When the upstream's window ends, and a new count begins.
    ends: Micros,
    /// Used by others in it, at least.
    seen: u32,
    /// What was expected of them.
    before: u32,
    /// Units that the upstream refused in it: granted here, and not counted there.
    refused: u32,
    /// The least that was left in it, and what this fleet was granted then.
    least: u32,
    ours: u32,
    /// Whether the log knows of all that was granted in it.
    whole: bool,
}

/// What is limited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) count: u32,
    pub(super) window: Micros,
}

/// What this fleet was granted and may have used: from so much to so much; and whether the log has all of it that the
/// upstream counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ours {
    pub(super) least: u64,
    pub(super) most: u64,
    pub(super) sure: bool,
}

impl Strangers {
    /// Before anything is known of a window that ends at `ends`, and that the log knows the `whole` of, or not.
    pub(super) fn new(ends: Micros, whole: bool) -> Self {
        Strangers { ends, seen: 0, before: 0, refused: 0, least: u32::MAX, ours: 0, whole }
    }

    /// A new count begins where the last has ended. Answers whether anything is known of it.
    pub(super) fn roll(&mut self, now: Micros, Size { count, window }: Size) -> bool {
        if now < self.ends {
            return true;
        }
        let ends = self.ends.saturating_add(window);
        // What was seen, or what was expected before, unless they cannot have used so much.
        let most = count.saturating_sub(self.least).saturating_sub(self.ours);
        let before = if self.whole && now < ends { self.seen.max(self.before.min(most)) } else { 0 };
        *self = Strangers { before, ..Strangers::new(ends, true) };
        before > 0
    }

    /// Of so many units `left` are left, as was said at a moment. Answers whether more is reserved now.
    pub(super) fn see(&mut self, size: Size, left: u32, said: Micros, ours: Ours, refused: u32) -> bool {
        let Size { count, window } = size;
        let reserved = self.reserved_now();
        self.refused = self.refused.saturating_add(refused);
        if self.refused > 0 {
            // An eighth is for finding out that they have gone.
            let by_refusals = self.before.saturating_add(self.refused).min(count - count / 8);
            self.seen = self.seen.max(by_refusals);
        }
        // What was said before says nothing of this window.
        if said.saturating_add(window) >= self.ends {
            let granted = u32::try_from(ours.least).unwrap_or(u32::MAX);
            (self.least, self.ours) = (self.least, self.ours).min((left, granted));
            if ours.sure {
                let ours = ours.most.saturating_sub(u64::from(self.refused));
                let gone = u64::from(count.saturating_sub(left));
                let by_the_log = u32::try_from(gone.saturating_sub(ours)).unwrap_or(u32::MAX);
                self.seen = self.seen.max(by_the_log);
            }
        }
        self.reserved_now() > reserved
    }

    fn reserved_now(&self) -> u32 {
        self.seen.max(self.before)
    }

    /// What is reserved until `ends`, and from then on, until something else is known.
    pub(super) fn reserves(&self) -> (Micros, [u32; 2]) {
        let reserved = self.reserved_now();
        (self.ends, [reserved, if self.whole { reserved } else { 0 }])
    }

    /// From when on nothing is known of them, if nothing is said.
    pub(super) fn forgotten_from(&self, window: Micros) -> Micros {
        let (ends, [_, after]) = self.reserves();
        let said = self.least < u32::MAX || self.seen > 0;
        if said && after > 0 { ends.saturating_add(window) } else { ends }
    }
}
