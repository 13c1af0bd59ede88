//! Checks scenarios before they run: an invalid one might never end, or have no result.

use super::{Latency, Scenario, Server};

impl Scenario {
    /// Returns what is wrong with the scenario, and what to set instead.
    pub(super) fn check(&self) -> Result<(), String> {
        if self
            .fleet
            .iter()
            .all(|group| group.procs * group.tasks == 0)
        {
            return Err(
                "fleet has no callers: give it a group whose procs and tasks are 1 or more".into(),
            );
        }
        above_0("duration", self.duration)?;
        not_below_0("warm_up", self.warm_up)?;
        above_0("duration - warm_up", self.duration - self.warm_up)?;
        for latency in self
            .fleet
            .iter()
            .filter_map(|group| group.latency)
            .chain([self.latency])
        {
            latency.check("latency")?;
            above_0("the longest latency", latency.1 + latency.2)?;
        }
        self.background
            .iter()
            .try_for_each(|strangers| above_0("background.rate", strangers.rate))?;
        if let Some((limit, window)) = self.hint {
            above_0("the limit of hint", limit.into())?;
            above_0("the window of hint", window)?;
        }
        let groups = self.fleet.len();
        if let Some(group) = self
            .fair_groups
            .iter()
            .flatten()
            .find(|group| **group >= groups)
        {
            return Err(format!(
                "fair_groups has {group}: the groups of fleet count from 0 to {}",
                groups - 1
            ));
        }
        self.server.check()?;
        self.store.check()
    }
}

impl Server {
    fn check(&self) -> Result<(), String> {
        match self {
            Server::Bucket {
                cap, refill, start, ..
            } => {
                above_0("cap", *cap)?;
                not_below_0("refill", *refill)?;
                not_below_0("start", *start)?;
            }
            Server::Fixed { limit, window, .. }
            | Server::Sliding { limit, window, .. }
            | Server::First { limit, window }
            | Server::Weighted { limit, window, .. } => {
                above_0("limit", *limit)?;
                above_0("window", *window)?;
            }
            Server::Dual { short, long } => return short.check().and_then(|()| long.check()),
        }
        let mut windows = self
            .changes()
            .iter()
            .filter_map(|(_, change)| change.window);
        windows.try_for_each(|window| above_0("changes.window", window))
    }
}

impl Latency {
    pub(super) fn check(self, name: &str) -> Result<(), String> {
        let Latency(low, high, tail) = self;
        if low < 0.0 || high < low || tail < 0.0 {
            return Err(format!(
                "{name} is [{low}, {high}, {tail}]: give the shortest, the longest, and the mean of what is added"
            ));
        }
        Ok(())
    }
}

fn above_0(name: &str, value: f64) -> Result<(), String> {
    if value > 0.0 {
        Ok(())
    } else {
        Err(format!("{name} is {value}: give a number above 0"))
    }
}

fn not_below_0(name: &str, value: f64) -> Result<(), String> {
    if value >= 0.0 {
        Ok(())
    } else {
        Err(format!("{name} is {value}: give 0 or more"))
    }
}

#[cfg(test)]
mod tests {
    use crate::Scenarios;

    #[test]
    fn invalid_scenario_is_rejected_before_it_runs() {
        let scenario = r#"{"mine": {
            "fleet": [{"procs": 2, "tasks": 1}],
            "server": {"kind": "bucket", "cap": 100, "refill": 1, "start": 0},
            "latency": [0.1, 0.2, 0],
            "background": [{"rate": 1}],
            "hint": [100, 60],
            "fair_groups": [0],
            "duration": 60
        }}"#;
        assert!(Scenarios::read(scenario).is_ok());
        for (good, bad, complaint) in [
            (
                r#""tasks": 1"#,
                r#""tasks": 0"#,
                "mine: fleet has no callers: give",
            ),
            (
                r#""duration": 60"#,
                r#""duration": -1"#,
                "mine: duration is -1: give a number above 0",
            ),
            (
                "[0.1, 0.2, 0]",
                "[0, 0, 0]",
                "mine: the longest latency is 0: give",
            ),
            (
                "[0.1, 0.2, 0]",
                "[0.2, 0.1, 0]",
                "mine: latency is [0.2, 0.1, 0]: give the shortest",
            ),
            (
                "[0.1, 0.2, 0]",
                "[0.1, 0.2]",
                "the shortest, the longest, and the mean of what is added",
            ),
            (
                r#""rate": 1"#,
                r#""rate": 0"#,
                "mine: background.rate is 0: give",
            ),
            (
                "[100, 60]",
                "[100, 0]",
                "mine: the window of hint is 0: give",
            ),
            (
                r#""fair_groups": [0]"#,
                r#""fair_groups": [1]"#,
                "mine: fair_groups has 1: the groups of fleet",
            ),
            (r#""cap": 100"#, r#""cap": 0"#, "mine: cap is 0: give"),
            (
                r#""refill": 1"#,
                r#""refill": -1"#,
                "mine: refill is -1: give 0 or more",
            ),
        ] {
            let told = Scenarios::read(&scenario.replace(good, bad))
                .unwrap_err()
                .to_string();
            assert!(told.contains(complaint), "{bad}: {told}");
        }
    }
}
