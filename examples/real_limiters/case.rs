//! The runs of the command line: which servers, layers and limits.

use std::time::Duration;

use real_limiters::{ExpressHeaders, Limit, ServerKind, Strategy};

use crate::common::{Options, Usage};
use crate::layer::LayerName;

/// One run: callers in some processes, behind one kind of layer, before one server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) kind: ServerKind,
    pub(crate) layer: LayerName,
    pub(crate) limit: Limit,
    pub(crate) callers: u32,
    pub(crate) processes: u32,
    pub(crate) span: Duration,
}

/// A named set of runs.
struct Preset {
    servers: Vec<ServerKind>,
    limits: Vec<Limit>,
    callers: u32,
    seconds: f64,
}

const fn per(count: u32, seconds: u64) -> Limit {
    Limit {
        count,
        window: Duration::from_secs(seconds),
    }
}

impl Preset {
    fn named(name: &str) -> Option<Self> {
        let all = Preset {
            servers: ServerKind::ALL.to_vec(),
            limits: vec![per(100, 2)],
            callers: 40,
            seconds: 60.0,
        };
        Some(match name {
            "second" => all,
            "long" => Preset {
                limits: vec![per(20, 2)],
                callers: 20,
                seconds: 240.0,
                ..all
            },
            "minute" => Preset {
                limits: vec![per(600, 60)],
                callers: 20,
                seconds: 240.0,
                ..all
            },
            "windows" => Preset {
                servers: vec![
                    ServerKind::Express(ExpressHeaders::Draft8),
                    ServerKind::Express(ExpressHeaders::Legacy),
                    ServerKind::Slowapi(Strategy::Fixed),
                ],
                limits: vec![per(5, 10), per(50, 10), per(600, 10), per(100, 1)],
                callers: 8,
                seconds: 600.0,
            },
            "short" => Preset {
                servers: vec![
                    ServerKind::NginxBurst,
                    ServerKind::NginxStrict,
                    ServerKind::Haproxy,
                ],
                seconds: 6.0,
                ..all
            },
            _ => return None,
        })
    }
}

/// Reads the runs from the options. Takes the options of [`Case`] and of its preset.
pub(crate) fn cases(options: &mut Options) -> Result<Vec<Case>, Usage> {
    let name = options.text("--case", "second");
    let preset = Preset::named(&name).ok_or_else(|| {
        Usage::new(format!(
            "--case is second, long, minute, windows or short, not {name:?}"
        ))
    })?;
    let servers = list(options, "--servers", ServerKind::named)?;
    let servers = servers.unwrap_or(preset.servers);
    let layers = list(options, "--layers", LayerName::named)?;
    let limits = match (
        options.number("--count", 0, 1..=1_000_000)?,
        options.number("--window", 0, 1..=86_400)?,
    ) {
        (0, 0) => preset.limits,
        (0, _) | (_, 0) => return Err(Usage::new("--count and --window go together")),
        (count, window) => vec![per(count, window.into())],
    };
    let callers = options.number("--callers", preset.callers, 1..=10_000)?;
    let processes = options.number("--processes", 1, 1..=callers.min(100))?;
    let span = options.seconds("--seconds", preset.seconds)?;
    let mut cases = Vec::new();
    for limit in limits {
        for &kind in &servers {
            let of_kind = || LayerName::usual(kind, processes);
            for layer in layers.clone().unwrap_or_else(of_kind) {
                cases.push(Case {
                    kind,
                    layer,
                    limit,
                    callers,
                    processes,
                    span,
                });
            }
        }
    }
    Ok(cases)
}

/// Reads a list of names. Returns `None` if the option is not given.
fn list<T>(
    options: &mut Options,
    option: &str,
    named: impl Fn(&str) -> Option<T>,
) -> Result<Option<Vec<T>>, Usage> {
    let Some(text) = options.find(option) else {
        return Ok(None);
    };
    let unknown = |name: &str| {
        Usage::new(format!(
            "{option} has {name:?}, which is none of those that --help lists"
        ))
    };
    let read = |name| named(name).ok_or_else(|| unknown(name));
    text.split(',')
        .map(read)
        .collect::<Result<_, _>>()
        .map(Some)
}

impl Case {
    /// Describes the case in one line.
    pub(crate) fn text(&self) -> String {
        let Limit { count, window } = self.limit;
        format!(
            "{}, {count} per {} s, {}",
            self.kind,
            window.as_secs(),
            self.layer.name()
        )
    }

    /// Returns the callers of each process.
    pub(crate) fn callers_of(&self, process: u32) -> u32 {
        let (each, left) = (self.callers / self.processes, self.callers % self.processes);
        each + u32::from(process < left)
    }
}
