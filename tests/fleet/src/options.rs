//! The options of a worker, as passed on its command line.

use std::time::Duration;

use anyhow::{Context, bail};

/// The store of a process that counts for itself.
pub const MEMORY: &str = "memory";

/// A prefix of the URL of a Redis server: the worker uses one counter for each second, without
/// tollgate's store.
pub const INCR: &str = "incr";

/// What a worker does.
#[derive(Clone, Debug)]
pub struct Options {
    /// The quota, in the format that tollgate parses.
    pub quota: String,
    /// Further limits of each call, each with a name and a quota. [`key_in`] finds their keys in
    /// the path.
    pub and_per: Vec<(String, String)>,
    /// The classes that have a share of the quota, each with its percentage.
    pub shares: Vec<(String, u8)>,
    /// The class of all calls; empty for none.
    pub class: String,
    /// Instead of the quota's limiter, an adaptive throttle with this pace, by its name in the
    /// simulator; empty for none. Its only known limit is `quota`. `fair-shared` shares its pace
    /// through the store.
    pub pace: String,
    /// The URL of a Redis server, or [`MEMORY`]; or `cluster` and the URLs of its servers; or
    /// `sentinel`, the URL of the master and the URLs of the Sentinels.
    pub store: String,
    /// The file with the trusted certificate; empty for the certificates of the system.
    pub certificate: String,
    /// The URL to call behind the gate; empty for none.
    pub url: String,
    /// The paths to call in turn; empty for the URL only. Each worker begins at another one.
    pub paths: Vec<String>,
    /// The number of tasks that call at the same time.
    pub tasks: usize,
    /// When the tasks call.
    pub arrivals: Arrivals,
    /// How long the worker runs.
    pub span: Duration,
    /// The longest wait at the gate.
    pub max_wait: Duration,
    /// The layer's `transit_slack`.
    pub slack: Duration,
    /// The longest time that a call to the store may take.
    pub store_timeout: Duration,
    /// The layer's `in_flight_ttl`.
    pub life: Duration,
    /// The layer's `max_hold`.
    pub max_hold: Duration,
    /// The cost of a call, before its response.
    pub cost: u32,
    /// The true cost of a call, which the layer settles when the response arrives. `None`: the layer
    /// does not settle.
    pub actual: Option<u32>,
    /// The layer's `counted_within`.
    pub late: Duration,
    /// How long the worker drains after SIGTERM. It then ends.
    pub drain: Duration,
    /// How long a task rests after a refusal.
    pub pause: Duration,
    /// Whether a call passes when the store does not answer.
    pub fail_open: bool,
    /// The fallback share of a process that was granted nothing before the store failed; 0 turns
    /// fallback shares off.
    pub share: f64,
    /// Whether the script is not yet loaded at the first call.
    pub cold: bool,
    /// Whether each call is printed when it ends, so that the report of a killed worker is
    /// complete.
    pub live: bool,
    /// The name of the worker in the upstream's log.
    pub who: String,
}

/// When the tasks of a worker call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// Each task calls again when its call has ended.
    Loop,
    /// Each task calls once, all at the same time.
    Once,
    /// A new call begins after each such span, whether or not the others have ended.
    Every(Duration),
    /// New calls begin at random moments, whether or not the others have ended, one for each such span
    /// in the mean (a Poisson process).
    Random(Duration),
    /// Each task calls again when its call has ended, in turns: the first turn begins after `first`
    /// and lasts for `on`; the next begins `off` after its end. A call that is not served by the
    /// end of its turn gives up.
    Turns {
        /// The time until the first turn.
        first: Duration,
        /// How long a turn lasts.
        on: Duration,
        /// The time between two turns.
        off: Duration,
    },
}

impl Default for Options {
    fn default() -> Self {
        Options {
            quota: "10/1s".into(),
            and_per: Vec::new(),
            shares: Vec::new(),
            class: String::new(),
            pace: String::new(),
            store: MEMORY.into(),
            certificate: String::new(),
            url: String::new(),
            paths: Vec::new(),
            tasks: 1,
            arrivals: Arrivals::Loop,
            span: Duration::from_secs(5),
            max_wait: Duration::from_secs(15),
            slack: Duration::from_millis(10),
            store_timeout: Duration::from_millis(250),
            life: Duration::from_secs(10),
            max_hold: Duration::from_secs(60),
            cost: 1,
            actual: None,
            late: Duration::ZERO,
            drain: Duration::ZERO,
            pause: Duration::from_millis(50),
            fail_open: false,
            share: 0.0,
            cold: false,
            live: false,
            who: String::new(),
        }
    }
}

impl Options {
    /// Returns the options as words of a command line. Spans are in milliseconds, spans between
    /// arrivals in microseconds.
    pub fn to_words(&self) -> Vec<String> {
        let ms = |span: Duration| span.as_millis().to_string();
        let us = |span: Duration| span.as_micros().to_string();
        let arrivals = match self.arrivals {
            Arrivals::Loop => "loop".into(),
            Arrivals::Once => "once".into(),
            Arrivals::Every(gap) => us(gap),
            Arrivals::Random(mean) => format!("random,{}", us(mean)),
            Arrivals::Turns { first, on, off } => format!("{},{},{}", us(first), us(on), us(off)),
        };
        let and_per = self.and_per.iter();
        let and_per = and_per.map(|(name, quota)| format!("{name}={quota}"));
        let shares = self.shares.iter();
        let shares = shares.map(|(class, percent)| format!("{class}={percent}"));
        let pairs = [
            ("quota", self.quota.clone()),
            ("and-per", and_per.collect::<Vec<_>>().join(";")),
            ("shares", shares.collect::<Vec<_>>().join(";")),
            ("class", self.class.clone()),
            ("pace", self.pace.clone()),
            ("store", self.store.clone()),
            ("certificate", self.certificate.clone()),
            ("url", self.url.clone()),
            ("paths", self.paths.join(" ")),
            ("tasks", self.tasks.to_string()),
            ("arrivals", arrivals),
            ("span", ms(self.span)),
            ("max-wait", ms(self.max_wait)),
            ("slack", ms(self.slack)),
            ("store-timeout", ms(self.store_timeout)),
            ("life", ms(self.life)),
            ("max-hold", ms(self.max_hold)),
            ("cost", self.cost.to_string()),
            (
                "actual",
                self.actual
                    .map_or(String::new(), |actual| actual.to_string()),
            ),
            ("late", ms(self.late)),
            ("drain", ms(self.drain)),
            ("pause", ms(self.pause)),
            ("fail-open", self.fail_open.to_string()),
            ("share", self.share.to_string()),
            ("cold", self.cold.to_string()),
            ("live", self.live.to_string()),
            ("who", self.who.clone()),
        ];
        pairs
            .into_iter()
            .flat_map(|(name, value)| [format!("--{name}"), value])
            .collect()
    }

    /// Parses the words of a command line. Options that are missing have their defaults.
    ///
    /// # Errors
    ///
    /// If a name is unknown or a value is invalid.
    pub fn from_words(words: impl IntoIterator<Item = String>) -> anyhow::Result<Self> {
        let ms = |text: &str| text.parse().map(Duration::from_millis);
        let mut options = Options::default();
        let mut words = words.into_iter();
        while let Some(name) = words.next() {
            let value = words
                .next()
                .with_context(|| format!("{name} needs a value"))?;
            let mut read = || -> anyhow::Result<()> {
                match name.as_str() {
                    "--quota" => options.quota = value.clone(),
                    "--and-per" => {
                        let limits = value.split_terminator(';').map(|limit| {
                            let (name, quota) = limit.split_once('=').context("no quota")?;
                            Ok((name.to_owned(), quota.to_owned()))
                        });
                        options.and_per = limits.collect::<anyhow::Result<_>>()?;
                    }
                    "--shares" => {
                        let shares = value.split_terminator(';').map(|share| {
                            let (class, percent) = share.split_once('=').context("no share")?;
                            Ok((class.to_owned(), percent.parse()?))
                        });
                        options.shares = shares.collect::<anyhow::Result<_>>()?;
                    }
                    "--class" => options.class = value.clone(),
                    "--pace" => options.pace = value.clone(),
                    "--store" => options.store = value.clone(),
                    "--certificate" => options.certificate = value.clone(),
                    "--url" => options.url = value.clone(),
                    "--paths" => {
                        let paths = value.split_ascii_whitespace();
                        options.paths = paths.map(str::to_owned).collect();
                    }
                    "--tasks" => options.tasks = value.parse()?,
                    "--arrivals" if value == "loop" => options.arrivals = Arrivals::Loop,
                    "--arrivals" if value == "once" => options.arrivals = Arrivals::Once,
                    "--arrivals" if value.starts_with("random,") => {
                        let mean = value["random,".len()..].parse()?;
                        options.arrivals = Arrivals::Random(Duration::from_micros(mean));
                    }
                    "--arrivals" => {
                        let spans = value
                            .split(',')
                            .map(|text| text.parse().map(Duration::from_micros));
                        options.arrivals = match spans.collect::<Result<Vec<_>, _>>()?[..] {
                            [gap] => Arrivals::Every(gap),
                            [first, on, off] => Arrivals::Turns { first, on, off },
                            _ => bail!("one span, or three"),
                        }
                    }
                    "--span" => options.span = ms(&value)?,
                    "--max-wait" => options.max_wait = ms(&value)?,
                    "--slack" => options.slack = ms(&value)?,
                    "--store-timeout" => options.store_timeout = ms(&value)?,
                    "--life" => options.life = ms(&value)?,
                    "--max-hold" => options.max_hold = ms(&value)?,
                    "--cost" => options.cost = value.parse()?,
                    "--actual" if value.is_empty() => options.actual = None,
                    "--actual" => options.actual = Some(value.parse()?),
                    "--late" => options.late = ms(&value)?,
                    "--drain" => options.drain = ms(&value)?,
                    "--pause" => options.pause = ms(&value)?,
                    "--fail-open" => options.fail_open = value.parse()?,
                    "--share" => options.share = value.parse()?,
                    "--cold" => options.cold = value.parse()?,
                    "--live" => options.live = value.parse()?,
                    "--who" => options.who = value.clone(),
                    _ => bail!("no such option"),
                }
                Ok(())
            };
            read().with_context(|| format!("{name} {value}"))?;
        }
        Ok(options)
    }
}

/// Returns the key of limit `name` in a path such as `/channel/17/route/3`: what follows the name.
pub fn key_in<'a>(path: &'a str, name: &str) -> Option<&'a str> {
    let mut parts = path.split('/');
    parts.find(|part| *part == name)?;
    parts.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_parse_back_from_their_words() {
        let options = Options {
            quota: "25/5s, 60/12s".into(),
            shares: vec![("web".into(), 50), ("jobs".into(), 30)],
            class: "web".into(),
            and_per: ["channel", "route"]
                .map(|name| (name.into(), "8/5s, 9/9s".into()))
                .into(),
            paths: ["channel/1", "channel/2"].map(str::to_owned).into(),
            arrivals: Arrivals::Every(Duration::from_millis(7)),
            cost: 40,
            actual: Some(4),
            late: Duration::from_millis(1500),
            drain: Duration::from_millis(500),
            fail_open: true,
            share: 0.25,
            ..Options::default()
        };
        let [first, on, off] = [0, 1000, 500].map(Duration::from_millis);
        let turns = Options {
            arrivals: Arrivals::Turns { first, on, off },
            live: true,
            ..options.clone()
        };
        let random = Options {
            arrivals: Arrivals::Random(Duration::from_micros(1700)),
            ..turns.clone()
        };
        for options in [options, turns, random] {
            let read = Options::from_words(options.to_words()).unwrap();
            assert_eq!(format!("{read:?}"), format!("{options:?}"));
        }
        assert!(Options::from_words(["--and-per", "channel"].map(str::to_owned)).is_err());
        assert!(Options::from_words(["--tasks".to_owned()]).is_err());
        assert!(Options::from_words(["--task", "1"].map(str::to_owned)).is_err());
    }

    #[test]
    fn keys_of_limits_follow_their_names() {
        let path = "/channel/17/route/3";
        assert_eq!(key_in(path, "channel"), Some("17"));
        assert_eq!(key_in(path, "route"), Some("3"));
        assert_eq!(key_in("/route", "route"), None);
        assert_eq!(key_in("/", "route"), None);
    }
}
