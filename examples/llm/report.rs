//! What came of a run, and the table of all runs.

use std::time::{Duration, Instant};

use crate::api::Api;
use crate::common::table;
use crate::limits::Way;
use crate::server::Server;

/// A server, and the prompts that it answered.
#[derive(Debug)]
pub(crate) struct Run {
    way: Way,
    pub(crate) server: Server,
    /// How long each answered prompt waited until its answer began, in milliseconds.
    waits: Vec<u64>,
    /// What was used of each limit on tokens.
    used: Vec<String>,
    /// The most that was used in a window, in per cent of a limit.
    most: f64,
}

impl Run {
    pub(crate) fn new(way: Way, server: Server) -> Self {
        Run {
            way,
            server,
            waits: Vec::new(),
            used: Vec::new(),
            most: 0.0,
        }
    }

    /// Notes the line that a process printed about a prompt.
    pub(crate) fn answered(&mut self, line: &str) {
        let wait = line.split(' ').next();
        self.waits
            .extend(wait.and_then(|wait| wait.parse::<u64>().ok()));
    }

    /// Reads what the server has counted between these moments.
    pub(crate) fn finish(&mut self, start: Instant, end: Instant) {
        self.waits.sort_unstable();
        let counts = self.server.counts();
        let used = |name: &str, used: f64| match self.server.api {
            Api::Tokens => format!("{used:.0} %"),
            Api::InputAndOutput => format!("{} {used:.0} %", name.trim_end_matches("-tokens")),
        };
        let windows = counts.tokens.iter();
        let all = windows.map(|(name, window)| used(name, window.used(start, end)));
        self.used = all.collect();
        let most = counts.tokens.iter().map(|(_, window)| window.most());
        self.most = most.fold(0.0, f64::max);
    }

    fn wait(&self, per_cent: usize) -> String {
        let index = self.waits.len() * per_cent / 100;
        let wait = self
            .waits
            .get(index.min(self.waits.len().saturating_sub(1)));
        wait.map_or("-".to_owned(), |wait| {
            format!("{:.1} s", *wait as f64 / 1000.0)
        })
    }
}

/// Prints the table of all runs, of `time` each.
pub(crate) fn print(runs: &[Run], time: Duration) {
    let head = [
        "",
        "answers a minute",
        "429s",
        "of the tokens used",
        "most in a window",
        "wait p50",
        "p99",
    ];
    for (api, title) in [
        (
            Api::Tokens,
            "Requests and tokens, reserved when a request arrives",
        ),
        (
            Api::InputAndOutput,
            "Requests, input tokens, and output tokens as they are produced",
        ),
    ] {
        let rows: Vec<_> = runs
            .iter()
            .filter(|run| run.server.api == api)
            .map(|run| {
                let answers = run.waits.len() as f64 / time.as_secs_f64() * 60.0;
                [
                    run.way.title().to_owned(),
                    format!("{answers:.0}"),
                    run.server.counts().refused.to_string(),
                    run.used.join(", "),
                    format!("{:.0} %", run.most),
                    run.wait(50),
                    run.wait(99),
                ]
            })
            .collect();
        println!("{title}:\n{}", table(head, &rows));
    }
    println!("Used: from the end of the first window on. Waits: until the answer begins.");
}
