//! What the server enforces: exact sliding windows, or a token bucket.

use std::collections::VecDeque;
use std::time::Duration;

/// At most `count` calls in any interval of the length `window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// How many calls.
    pub count: u32,
    /// In an interval of this length, half open: two calls exactly `window` apart do not share one.
    pub window: Duration,
}

impl Rule {
    /// At most `count` calls in any interval of the length `window`.
    pub const fn new(count: u32, window: Duration) -> Self {
        Rule { count, window }
    }

    /// At most `count` calls in any second.
    pub const fn per_second(count: u32) -> Self {
        Rule::new(count, Duration::from_secs(1))
    }
}

/// A single rule converts to a list of rules, so `Upstream::start(Rule::per_second(50))` compiles.
impl From<Rule> for Vec<Rule> {
    fn from(rule: Rule) -> Self {
        vec![rule]
    }
}

/// The accepted calls, and the rules that they must keep.
///
/// All rules use one list, so a call counts in all of them or in none.
pub(crate) struct Windows {
    rules: Vec<Rule>,
    /// The latest calls, oldest first: as many as the largest count.
    accepted: VecDeque<Duration>,
}

impl Windows {
    pub(crate) fn new(rules: Vec<Rule>) -> Self {
        assert!(
            rules.iter().all(|rule| rule.count > 0),
            "a rule with a count of 0 would refuse everything"
        );
        Windows {
            rules,
            accepted: VecDeque::new(),
        }
    }

    /// Accepts a call at `now`, or returns how long it should have waited; a refused call leaves no
    /// trace.
    pub(crate) fn admit(&mut self, now: Duration) -> Result<(), Duration> {
        let wait = self.wait_of_all(now);
        if !wait.is_zero() {
            return Err(wait);
        }
        self.count(now);
        Ok(())
    }

    /// Returns how long a call must wait until all rules allow it.
    pub(crate) fn wait_of_all(&self, now: Duration) -> Duration {
        let waits = self.rules.iter().map(|rule| self.wait(*rule, now));
        waits.max().unwrap_or_default()
    }

    /// Counts an accepted call.
    pub(crate) fn count(&mut self, now: Duration) {
        let most = self
            .rules
            .iter()
            .map(|rule| rule.count as usize)
            .max()
            .unwrap_or(0);
        self.accepted.push_back(now);
        if self.accepted.len() > most {
            self.accepted.pop_front();
        }
    }

    /// Returns the remaining units of the first rule, its limit, and the time until its oldest call
    /// leaves.
    pub(crate) fn left(&self, now: Duration) -> Option<(u32, u32, Duration)> {
        let &Rule { count, window } = self.rules.first()?;
        let mut inside = self
            .accepted
            .iter()
            .filter(|at| at.saturating_add(window) > now)
            .peekable();
        let reset = inside
            .peek()
            .map_or(Duration::ZERO, |oldest| oldest.saturating_add(window) - now);
        Some((count.saturating_sub(inside.count() as u32), count, reset))
    }

    /// Returns how long a call must wait: until the `count`-th call before it has left the window.
    fn wait(&self, rule: Rule, now: Duration) -> Duration {
        let leaves = self
            .accepted
            .len()
            .checked_sub(rule.count as usize)
            .and_then(|index| self.accepted.get(index))
            .map_or(Duration::ZERO, |at| at.saturating_add(rule.window));
        leaves.saturating_sub(now)
    }
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// How many tokens it holds.
    pub size: f64,
    /// How many tokens are added in a second.
    pub refill: f64,
    /// How many tokens it holds when the first call arrives; none is added before that.
    pub start: f64,
}

/// A bucket in use.
pub(crate) struct Tokens {
    bucket: Bucket,
    left: f64,
    last: Option<Duration>,
}

impl Tokens {
    pub(crate) fn new(bucket: Bucket) -> Self {
        Tokens {
            bucket,
            left: bucket.start,
            last: None,
        }
    }

    /// Takes a token at `now`, if there is one, and returns how many whole tokens remain.
    pub(crate) fn take(&mut self, now: Duration) -> (bool, u64) {
        let since = now - self.last.replace(now).unwrap_or(now);
        self.left = self
            .bucket
            .size
            .min(self.left + since.as_secs_f64() * self.bucket.refill);
        let ok = self.left >= 1.0;
        if ok {
            self.left -= 1.0;
        }
        (ok, self.left as u64)
    }
}

/// Returns the value of `Retry-After`: whole seconds, rounded up, at least 1.
pub(crate) fn whole_seconds(wait: Duration) -> u64 {
    wait.as_secs()
        .saturating_add(u64::from(wait.subsec_nanos() > 0))
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Checks calls at (ms), each with the wait (ms) that its refusal states; 0 is accepted.
    fn replay(rules: &[Rule], calls: &[(u64, u64)]) {
        let mut windows = Windows::new(rules.to_vec());
        for (index, &(at, wait)) in calls.iter().enumerate() {
            let told = windows.admit(ms(at)).err().unwrap_or_default();
            assert_eq!(told, ms(wait), "call {index}, at {at} ms");
        }
    }

    #[test]
    fn a_window_slides_and_is_half_open() {
        replay(
            &[Rule::new(2, ms(100))],
            &[
                (0, 0),
                (60, 0),
                (60, 40),
                (99, 1),
                (100, 0),
                (100, 60),
                (159, 1),
                (160, 0),
                (160, 40),
                (500, 0),
            ],
        );
    }

    #[test]
    fn a_call_that_one_rule_refuses_counts_in_none() {
        let rules = [Rule::new(1, ms(10)), Rule::new(3, ms(1000))];
        replay(
            &rules,
            &[
                (0, 0),
                (1, 9),
                (2, 8),
                (10, 0),
                (11, 9),
                (20, 0), // the third of the long window; the refused ones took nothing of it
                (30, 970),
                (999, 1),
                (1000, 0),
                (1009, 1), // the short window has the longer wait again, or the same
                (1010, 0),
            ],
        );
        replay(
            &[rules[1], rules[0]],
            &[(0, 0), (1, 9), (10, 0), (20, 0), (25, 975)],
        );
    }

    #[test]
    fn it_knows_what_is_left_and_until_when() {
        let mut windows = Windows::new(vec![Rule::new(3, ms(100))]);
        assert_eq!(windows.left(ms(0)), Some((3, 3, ms(0))));
        windows.admit(ms(10)).unwrap();
        windows.admit(ms(30)).unwrap();
        assert_eq!(windows.left(ms(40)), Some((1, 3, ms(70))));
        assert_eq!(windows.left(ms(110)), Some((2, 3, ms(20))));
        assert_eq!(Windows::new(Vec::new()).left(ms(0)), None);
    }

    #[test]
    fn bucket_fills_from_first_call_up_to_its_size() {
        let mut tokens = Tokens::new(Bucket {
            size: 2.0,
            refill: 10.0,
            start: 0.0,
        });
        let calls = [
            (5000, (false, 0)),
            (5099, (false, 0)),
            (5100, (true, 0)),
            (5100, (false, 0)),
            (9000, (true, 1)),
            (9000, (true, 0)),
            (9000, (false, 0)),
        ];
        for (at, answer) in calls {
            assert_eq!(tokens.take(ms(at)), answer, "{at} ms");
        }
    }

    #[test]
    fn without_a_rule_everything_goes() {
        replay(&[], &[(0, 0), (0, 0), (0, 0)]);
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_0() {
        for (wait, seconds) in [
            (0, 1),
            (1, 1),
            (999, 1),
            (1000, 1),
            (1001, 2),
            (59_000, 59),
            (59_001, 60),
        ] {
            assert_eq!(whole_seconds(ms(wait)), seconds, "{wait} ms");
        }
    }

    #[test]
    #[should_panic(expected = "a count of 0")]
    fn rule_that_allows_nothing_is_a_test_mistake() {
        Windows::new(vec![Rule::per_second(0)]);
    }
}
