//! What the workers report while they work, and what the service saw.

use std::collections::BTreeMap;
use std::time::Duration;

use tollgate::error::BoxError;
use upstream::{Log, Rule};

use crate::{Args, common};

/// The progress of a campaign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Calls that were answered.
    pub(crate) answered: u64,
    /// How often a call was refused by this process and deferred.
    pub(crate) put_off: u64,
    /// How often the service refused a call, which was then deferred.
    pub(crate) refused_there: u64,
    /// How often the store did not respond, and the call was deferred.
    pub(crate) not_counted: u64,
}

impl Counts {
    /// Returns the line that a worker prints.
    pub(crate) fn line(&self, campaign: u32) -> String {
        let Counts {
            answered,
            put_off,
            refused_there,
            not_counted,
        } = self;
        format!("campaign {campaign} counts {answered} {put_off} {refused_there} {not_counted}")
    }

    fn add(&mut self, other: Counts) {
        self.answered += other.answered;
        self.put_off += other.put_off;
        self.refused_there += other.refused_there;
        self.not_counted += other.not_counted;
    }

    fn read(line: &str) -> Option<(u32, Counts)> {
        let (campaign, counts) = line.strip_prefix("campaign ")?.split_once(" counts ")?;
        let counts: Vec<u64> = counts
            .split(' ')
            .map(|count| count.parse().ok())
            .collect::<Option<_>>()?;
        let [answered, put_off, refused_there, not_counted] = counts[..] else {
            return None;
        };
        Some((
            campaign.parse().ok()?,
            Counts {
                answered,
                put_off,
                refused_there,
                not_counted,
            },
        ))
    }
}

/// The latest report of each campaign.
#[derive(Debug, Default)]
pub(crate) struct Told(BTreeMap<u32, (Counts, String)>);

impl Told {
    pub(crate) fn on_event(&mut self, who: String, line: &str) {
        if let Some((campaign, counts)) = Counts::read(line) {
            self.0.insert(campaign, (counts, who));
        }
    }

    /// Returns which fraction of `calls` was answered.
    pub(crate) fn done(&self, calls: u64) -> f64 {
        self.answered() as f64 / calls.max(1) as f64
    }

    /// Describes the progress of all campaigns, of `calls` in sum, after `elapsed`.
    pub(crate) fn summary(&self, elapsed: Duration, calls: u64) -> String {
        let answered = self.answered();
        let put_off: u64 = self.0.values().map(|(counts, _)| counts.put_off).sum();
        let rate = answered as f64 / elapsed.as_secs_f64().max(0.1);
        let left = calls.saturating_sub(answered) as f64 / rate.max(0.1);
        format!(
            "{:6.1} s   {answered} answered, {rate:.0}/s, {put_off} times put off, {left:.0} s to go",
            elapsed.as_secs_f64(),
        )
    }

    fn answered(&self) -> u64 {
        self.0.values().map(|(counts, _)| counts.answered).sum()
    }
}

/// Returns one line for each campaign, and one for all.
pub(crate) fn table(args: &Args, told: &Told, log: Option<&Log>) -> String {
    let arrived = log.map(|log| arrived(args, log));
    let seen = |campaign: u32| match &arrived {
        Some(arrived) => arrived[campaign as usize]
            .iter()
            .map(|count| u64::from(*count))
            .sum(),
        None => 0,
    };
    let row = |name: String, who: String, counts: Counts, seen: u64| {
        let seen = if log.is_some() {
            seen.to_string()
        } else {
            "-".to_owned()
        };
        let Counts {
            answered,
            put_off,
            refused_there,
            not_counted,
        } = counts;
        let [answered, put_off, refused_there, not_counted] =
            [answered, put_off, refused_there, not_counted].map(|count| count.to_string());
        [
            name,
            who,
            answered,
            seen,
            put_off,
            refused_there,
            not_counted,
        ]
    };
    let mut all = Counts::default();
    let mut rows: Vec<_> = (0..args.campaigns)
        .map(|campaign| {
            let (counts, who) = told.0.get(&campaign).cloned().unwrap_or_default();
            all.add(counts);
            row(format!("campaign {campaign}"), who, counts, seen(campaign))
        })
        .collect();
    rows.push(row(
        "all".to_owned(),
        String::new(),
        all,
        (0..args.campaigns).map(seen).sum(),
    ));
    common::table(
        [
            "",
            "by",
            "answered",
            "accepted there",
            "put off",
            "refused there",
            "store away",
        ],
        &rows,
    )
}

/// Compares what the service saw with the calls that were to be made.
pub(crate) fn check(args: &Args, rule: Rule, log: &Log) -> Result<(), BoxError> {
    let took = log
        .first()
        .zip(log.last())
        .map_or(Duration::ZERO, |(first, last)| last.at - first.at);
    println!(
        "All within {}. In any second at most {} left and {} arrived, where {} are allowed; {} of the limit used.",
        common::span(took),
        log.largest_count_sent(rule.window),
        log.largest_count(rule.window),
        rule.count,
        log.used(rule)
            .map_or("-".to_owned(), |used| format!("{:.1} %", used * 100.0)),
    );
    if let Some(broken) = common::not_kept(log, &[rule], args.transit_slack) {
        return Err(format!("the limit was not kept: {broken}").into());
    }
    if log.jitter() > args.transit_slack {
        println!(
            "The way to the service varied by {:.0?}, and --transit-slack covers {:.0?}: what came late together may look \
             like too much there.",
            log.jitter(),
            args.transit_slack,
        );
    }
    let arrived = arrived(args, log);
    let how_many = |what: fn(u16) -> bool| {
        arrived
            .iter()
            .flatten()
            .filter(|count| what(**count))
            .count()
    };
    match (how_many(|count| count == 0), how_many(|count| count > 1)) {
        (0, 0) => {
            println!("Each call was sent exactly once.");
            Ok(())
        }
        (lost, twice) => {
            Err(format!("{lost} calls were lost, and {twice} sent more than once").into())
        }
    }
}

/// Returns how often each call of each campaign was accepted.
fn arrived(args: &Args, log: &Log) -> Vec<Vec<u16>> {
    let mut arrived = vec![vec![0u16; args.calls as usize]; args.campaigns as usize];
    for arrival in log.iter().filter(|arrival| arrival.accepted) {
        let call = arrival.who.as_deref().and_then(|who| who.split_once('/'));
        let place = call.and_then(|(campaign, number)| {
            arrived
                .get_mut(campaign.parse::<usize>().ok()?)?
                .get_mut(number.parse::<usize>().ok()?)
        });
        if let Some(count) = place {
            *count = count.saturating_add(1);
        }
    }
    arrived
}
