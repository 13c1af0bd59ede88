//! An estimate of a sliding window from two fixed windows.

use super::server::Verdict;

/// Two windows, of which the previous one counts for the part of the current one that is left.
///
/// `previous x (1 - f) + current` estimates the requests in the last `window` seconds, rounded down. `f` is the part of
/// the current window that is over. HAProxy, Cloudflare, Upstash and Kong decide by it.
#[derive(Debug)]
pub(super) struct WeightedWindows {
    limit: f64,
    window: f64,
    counts_refused: bool,
    previous: f64,
    current: f64,
    /// When the current window began; `None` before the first request.
    begin: Option<f64>,
    /// The part of the current window that is left, from 0 to 1.
    left: f64,
}

impl WeightedWindows {
    pub(super) fn new(limit: f64, window: f64, counts_refused: bool) -> Self {
        WeightedWindows {
            limit,
            window,
            counts_refused,
            previous: 0.0,
            current: 0.0,
            begin: None,
            left: 1.0,
        }
    }

    /// Begins a new window if that is due.
    pub(super) fn advance(&mut self, now: f64) {
        let begin = self.begin.get_or_insert(now);
        let windows = ((now - *begin) / self.window).floor();
        if windows >= 1.0 {
            self.previous = if windows < 2.0 { self.current } else { 0.0 };
            self.current = 0.0;
            *begin += windows * self.window;
        }
        self.left = 1.0 - (now - *begin) / self.window;
    }

    pub(super) fn is_free(&self) -> bool {
        self.estimate() + 1.0 <= self.limit
    }

    pub(super) fn take(&mut self) {
        self.current += 1.0;
    }

    pub(super) fn refuse(&mut self) {
        if self.counts_refused {
            self.current += 1.0;
        }
    }

    fn estimate(&self) -> f64 {
        (self.previous * self.left).floor() + self.current
    }

    pub(super) fn verdict(&self, ok: bool) -> Verdict {
        let reset = self.left * self.window;
        // The part of a window that is left when fewer than `free` of the `counted` units count.
        let due = |counted: f64, free: f64| (free / counted.max(1.0)).clamp(0.0, 1.0);
        let wait = match self.limit - self.current {
            free if free >= 1.0 => self.left - due(self.previous, free),
            _ => self.left + 1.0 - due(self.current, self.limit),
        };
        Verdict {
            ok,
            remaining: (self.limit - self.estimate()).max(0.0),
            limit: self.limit,
            window: self.window,
            reset,
            wait: (wait * self.window).max(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a request arrive, and returns whether it is accepted.
    fn request(windows: &mut WeightedWindows, now: f64) -> bool {
        windows.advance(now);
        let ok = windows.is_free();
        match ok {
            true => windows.take(),
            false => windows.refuse(),
        }
        ok
    }

    /// Four requests in 2 s. Half-way through a window, half of the window before counts.
    #[test]
    fn previous_window_counts_for_what_is_left_of_the_current_one() {
        let mut windows = WeightedWindows::new(4.0, 2.0, false);
        let accepted =
            |windows: &mut WeightedWindows, now| (0..9).filter(|_| request(windows, now)).count();
        assert_eq!(accepted(&mut windows, 10.0), 4);
        assert_eq!(accepted(&mut windows, 11.9), 0);
        assert_eq!(accepted(&mut windows, 12.0), 0);
        assert_eq!(accepted(&mut windows, 13.0), 2);
        assert_eq!(accepted(&mut windows, 13.9), 2);
        // Two windows later nothing of it counts.
        assert_eq!(accepted(&mut windows, 16.0), 4);
    }

    #[test]
    fn refused_requests_count_where_the_server_says_so() {
        for (counts_refused, accepted) in [(false, true), (true, false)] {
            let mut windows = WeightedWindows::new(4.0, 2.0, counts_refused);
            for _ in 0..8 {
                request(&mut windows, 0.0);
            }
            assert_eq!(request(&mut windows, 3.0), accepted, "{counts_refused}");
        }
    }

    #[test]
    fn verdict_states_when_the_next_request_is_accepted() {
        let mut windows = WeightedWindows::new(4.0, 2.0, false);
        for _ in 0..4 {
            request(&mut windows, 0.0);
        }
        let check = |windows: &mut WeightedWindows, now: f64| {
            windows.advance(now);
            let at = now + windows.verdict(false).wait;
            windows.advance(at - 1e-3);
            assert!(!windows.is_free(), "asked at {now}");
            windows.advance(at + 1e-9);
            assert!(windows.is_free(), "asked at {now}");
        };
        check(&mut windows, 1.0);
        assert!(request(&mut windows, 2.4));
        check(&mut windows, 2.4);
    }
}
