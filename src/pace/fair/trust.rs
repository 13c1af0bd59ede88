//! Whether a Remaining can be believed.

/// What was said of what is left, up to now.
#[derive(Clone, Debug, Default)]
pub(super) struct Trust {
    /// How often running it was missing.
    missing: u32,
    /// How often running it was the same in answers that were no refusals.
    same: u32,
    last: Option<f64>,
    silent: bool,
}

/// So often running, it means something.
const OFTEN: u32 = 8;

impl Trust {
    /// What can be believed of an answer that says `remaining` of `limit`.
    pub(super) fn believe(
        &mut self,
        remaining: Option<f64>,
        limit: Option<f64>,
        passed: bool,
    ) -> Option<f64> {
        let most = limit.map_or(f64::INFINITY, |limit| limit * 1.01 + 1.0);
        let Some(remaining) = remaining.filter(|remaining| (0.0..=most).contains(remaining)) else {
            self.missing = self.missing.saturating_add(1);
            self.silent |= self.missing >= OFTEN;
            return None;
        };
        self.missing = 0;
        if self.last != Some(remaining) {
            if passed || self.silent {
                self.last = Some(remaining);
                self.same = u32::from(passed);
            }
        } else if passed {
            self.same = self.same.saturating_add(1);
        }
        self.silent = self.same >= OFTEN;
        (!self.silent).then_some(remaining)
    }

    /// Whether nothing was said, or always the same, for so long that it means nothing.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_wrong_or_always_the_same_falls_silent_until_it_speaks_again() {
        let mut trust = Trust::default();
        assert_eq!(trust.believe(Some(7.0), Some(10.0), true), Some(7.0));
        for wrong in [None, Some(-1.0), Some(12.0), Some(f64::NAN), Some(f64::INFINITY), None, None] {
            assert_eq!((trust.believe(wrong, Some(10.0), true), trust.is_silent()), (None, false));
        }
        assert_eq!((trust.believe(None, Some(10.0), false), trust.is_silent()), (None, true));
        for _ in 0..7 {
            assert_eq!(trust.believe(Some(3.0), Some(10.0), true), Some(3.0));
            assert_eq!(trust.believe(Some(3.0), Some(10.0), false), Some(3.0));
        }
        assert_eq!((trust.believe(Some(3.0), Some(10.0), true), trust.is_silent()), (None, true));
        assert_eq!(trust.believe(Some(3.0), Some(10.0), false), None);
        assert_eq!(trust.believe(Some(4.0), Some(10.0), false), Some(4.0));
    }
}
