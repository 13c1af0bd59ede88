//! The events of one run, counted for each step of time: the data of its charts.

use crate::trace::Trace;

/// How many steps of time a chart has.
pub(super) const STEPS: usize = 200;

/// The events of one run, for each step of time.
pub(super) struct Steps {
    /// The length of a step, in seconds.
    pub(super) width: f64,
    /// The longest wait of the requests that left, at the middle of the step.
    pub(super) held: Vec<(f64, f64)>,
    /// What was left on the server, at the middle of the step.
    pub(super) left: Vec<(f64, f64)>,
    /// The accepted requests of each step.
    pub(super) accepted: Vec<f64>,
    /// The refused requests of each step.
    pub(super) refused: Vec<f64>,
    /// The accepted and the refused requests of each caller.
    pub(super) callers: Vec<(f64, f64)>,
}

impl Steps {
    /// Counts the events of a run that ends at `end` seconds, with this number of callers.
    pub(super) fn of(trace: &Trace, end: f64, callers: usize) -> Self {
        let width = end / STEPS as f64;
        let step = |at: f64| ((at / width) as usize).min(STEPS - 1);
        let middle = |index: usize| (index as f64 + 0.5) * width;
        let mut longest = vec![None::<f64>; STEPS];
        for (at, _, held) in &trace.held {
            let longest = &mut longest[step(*at)];
            *longest = Some(longest.map_or(*held, |longest| longest.max(*held)));
        }
        let mut left = vec![None; STEPS];
        let (mut accepted, mut refused) = (vec![0.0; STEPS], vec![0.0; STEPS]);
        let mut each = vec![(0.0, 0.0); callers];
        for (at, caller, ok, remaining) in &trace.judged {
            left[step(*at)] = Some(*remaining);
            let (of_time, of_caller) = match ok {
                true => (&mut accepted, &mut each[*caller].0),
                false => (&mut refused, &mut each[*caller].1),
            };
            of_time[step(*at)] += 1.0;
            *of_caller += 1.0;
        }
        let known = |values: Vec<Option<f64>>| {
            let values = values.into_iter().enumerate();
            values
                .filter_map(|(index, value)| Some((middle(index), value?)))
                .collect()
        };
        Steps {
            width,
            held: known(longest),
            left: known(left),
            accepted,
            refused,
            callers: each,
        }
    }

    /// Returns a bar for each step of time, from `low` up by `high`.
    pub(super) fn stacked(&self, low: &[f64], high: &[f64]) -> Vec<(f64, f64, f64)> {
        let both = low.iter().zip(high).enumerate();
        both.map(|(index, (low, high))| (index as f64 * self.width, *low, low + high))
            .collect()
    }

    /// Returns a bar for each caller.
    pub(super) fn of_callers(
        &self,
        from: fn(&(f64, f64)) -> f64,
        to: fn(&(f64, f64)) -> f64,
    ) -> Vec<(f64, f64, f64)> {
        let callers = self.callers.iter().enumerate();
        callers
            .map(|(index, counts)| (index as f64, from(counts), to(counts)))
            .collect()
    }

    /// Returns how many accepted requests each caller has if all have the same number.
    pub(super) fn equal_share(&self) -> f64 {
        self.callers
            .iter()
            .map(|(accepted, _)| accepted)
            .sum::<f64>()
            / self.callers.len().max(1) as f64
    }
}
