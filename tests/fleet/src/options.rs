//! What a worker is told on its command line.

use std::time::Duration;

use anyhow::{Context, bail};

/// The store of a process that counts for itself.
pub const MEMORY: &str = "memory";

/// Before the URL of a Redis server: a counter for each second there, without tollgate's store.
pub const INCR: &str = "incr";

/// What a worker does.
#[derive(Clone, Debug)]
pub struct Options {
    /// As tollgate reads it.
    pub quota: String,
    /// In place of a quota, the pace of an adaptive throttle, by its name in the laboratory; empty for none. It is told one
    /// limit: the quota. `fair-shared` is shared through the store.
    pub pace: String,
    /// The URL of a Redis server, or [`MEMORY`]; `cluster` and the URLs of its servers; `sentinel`, the URL of the master
    /// and those of Sentinels.
    pub store: String,
    /// The file with the certificate that is trusted; empty for those of the system.
    pub certificate: String,
    /// What is called behind the gate; empty for nothing.
    pub url: String,
    /// How many call at once.
    pub tasks: usize,
    /// When they do.
    pub arrivals: Arrivals,
    /// For how long.
    pub span: Duration,
    /// The longest wait at the gate.
    pub max_wait: Duration,
    /// The layer's `transit_slack`.
    pub slack: Duration,
    /// The longest that a call to the store may take.
    pub store_timeout: Duration,
    /// The layer's `in_flight_ttl`.
    pub life: Duration,
    /// How long a task rests after it was refused.
    pub pause: Duration,
    /// Whether a call passes when the store cannot be asked.
    pub fail_open: bool,
    /// The share with which it goes on then, where it was granted nothing before; 0 for none, and not to go on.
    pub share: f64,
    /// Whether the first call finds the server without its script.
    pub cold: bool,
    /// Whether each call is printed when it ends, so that one that is killed has told of all it did.
    pub live: bool,
    /// The name of the worker in the upstream's log.
    pub who: String,
}

/// When the tasks of a worker call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// Each again when its call has ended.
    Loop,
    /// Each once, all at the same time.
    Once,
    /// A new one after each such span, whatever becomes of the others.
    Every(Duration),
    /// Each again when its call has ended, in turns: the first begins after `first`, lasts for `on`, and the next begins
    /// `off` after its end. What is not served by the end of its turn gives up.
    Turns {
        /// Until the first.
        first: Duration,
        /// How long one lasts.
        on: Duration,
        /// Between two.
        off: Duration,
    },
}

impl Default for Options {
    fn default() -> Self {
        Options {
            quota: "10/1s".into(),
            pace: String::new(),
            store: MEMORY.into(),
            certificate: String::new(),
            url: String::new(),
            tasks: 1,
            arrivals: Arrivals::Loop,
            span: Duration::from_secs(5),
            max_wait: Duration::from_secs(15),
            slack: Duration::from_millis(10),
            store_timeout: Duration::from_millis(250),
            life: Duration::from_secs(10),
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
    /// As words of a command line; spans are in milliseconds, those between arrivals in microseconds.
    pub fn to_words(&self) -> Vec<String> {
        let ms = |span: Duration| span.as_millis().to_string();
        let us = |span: Duration| span.as_micros().to_string();
        let arrivals = match self.arrivals {
            Arrivals::Loop => "loop".into(),
            Arrivals::Once => "once".into(),
            Arrivals::Every(gap) => us(gap),
            Arrivals::Turns { first, on, off } => format!("{},{},{}", us(first), us(on), us(off)),
        };
        let pairs = [
            ("quota", self.quota.clone()),
            ("pace", self.pace.clone()),
            ("store", self.store.clone()),
            ("certificate", self.certificate.clone()),
            ("url", self.url.clone()),
            ("tasks", self.tasks.to_string()),
            ("arrivals", arrivals),
            ("span", ms(self.span)),
            ("max-wait", ms(self.max_wait)),
            ("slack", ms(self.slack)),
            ("store-timeout", ms(self.store_timeout)),
            ("life", ms(self.life)),
            ("pause", ms(self.pause)),
            ("fail-open", self.fail_open.to_string()),
            ("share", self.share.to_string()),
            ("cold", self.cold.to_string()),
            ("live", self.live.to_string()),
            ("who", self.who.clone()),
        ];
        pairs.into_iter().flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }

    /// Reads them back; what is not said is as by default.
    ///
    /// # Errors
    ///
    /// When a name is not known or a value makes no sense.
    pub fn from_words(words: impl IntoIterator<Item = String>) -> anyhow::Result<Self> {
        let ms = |text: &str| text.parse().map(Duration::from_millis);
        let mut options = Options::default();
        let mut words = words.into_iter();
        while let Some(name) = words.next() {
            let value = words.next().with_context(|| format!("{name} needs a value"))?;
            let mut read = || -> anyhow::Result<()> {
                match name.as_str() {
                    "--quota" => options.quota = value.clone(),
                    "--pace" => options.pace = value.clone(),
                    "--store" => options.store = value.clone(),
                    "--certificate" => options.certificate = value.clone(),
                    "--url" => options.url = value.clone(),
                    "--tasks" => options.tasks = value.parse()?,
                    "--arrivals" if value == "loop" => options.arrivals = Arrivals::Loop,
                    "--arrivals" if value == "once" => options.arrivals = Arrivals::Once,
                    "--arrivals" => {
                        let spans = value.split(',').map(|text| text.parse().map(Duration::from_micros));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let options = Options {
            quota: "25/5s, 60/12s".into(),
            arrivals: Arrivals::Every(Duration::from_millis(7)),
            fail_open: true,
            share: 0.25,
            ..Options::default()
        };
        let [first, on, off] = [0, 1000, 500].map(Duration::from_millis);
        let turns = Options { arrivals: Arrivals::Turns { first, on, off }, live: true, ..options.clone() };
        for options in [options, turns] {
            let read = Options::from_words(options.to_words()).unwrap();
            assert_eq!(format!("{read:?}"), format!("{options:?}"));
        }
        assert!(Options::from_words(["--tasks".to_owned()]).is_err());
        assert!(Options::from_words(["--task", "1"].map(str::to_owned)).is_err());
    }
}
