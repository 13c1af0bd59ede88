//! The kinds of servers, and what each of them allows.

use std::fmt;
use std::time::Duration;

/// What a server is configured to allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Requests in a window.
    pub count: u32,
    /// The length of the window, in whole seconds.
    pub window: Duration,
}

impl Limit {
    /// Returns the requests per second that the limit allows in the long run.
    pub fn rate(self) -> f64 {
        f64::from(self.count) / self.window.as_secs_f64()
    }
}

/// A server and how its limiter is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// nginx, `limit_req` with `burst=20 nodelay`.
    NginxBurst,
    /// nginx, `limit_req` without `burst`.
    NginxStrict,
    /// HAProxy, `http_req_rate` in a stick table.
    Haproxy,
    /// express-rate-limit.
    Express(ExpressHeaders),
    /// slowapi.
    Slowapi(Strategy),
}

/// The headers that express-rate-limit writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpressHeaders {
    /// `RateLimit-Limit`, `-Remaining` and `-Reset`.
    Draft6,
    /// `RateLimit: limit=.., remaining=.., reset=..`.
    Draft7,
    /// `RateLimit: "name";r=..;t=..`.
    Draft8,
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    Legacy,
    /// A 429 with `Retry-After` in whole seconds, from a handler of the program. Nothing else.
    RetryAfter,
    /// Nothing: without the headers above, express-rate-limit does not write `Retry-After` either.
    Silent,
}

/// How slowapi counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// `fixed-window`.
    Fixed,
    /// `moving-window`.
    Moving,
}

impl ServerKind {
    /// All kinds, in the order of the table.
    pub const ALL: [ServerKind; 11] = [
        ServerKind::NginxBurst,
        ServerKind::NginxStrict,
        ServerKind::Haproxy,
        ServerKind::Express(ExpressHeaders::Draft8),
        ServerKind::Express(ExpressHeaders::Draft7),
        ServerKind::Express(ExpressHeaders::Draft6),
        ServerKind::Express(ExpressHeaders::Legacy),
        ServerKind::Express(ExpressHeaders::RetryAfter),
        ServerKind::Express(ExpressHeaders::Silent),
        ServerKind::Slowapi(Strategy::Fixed),
        ServerKind::Slowapi(Strategy::Moving),
    ];

    /// Requests that `limit_req` lets pass beyond its rate: the value of `burst`.
    pub const BURST: u32 = 20;

    /// Returns the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        ServerKind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::NginxBurst => "nginx-burst",
            ServerKind::NginxStrict => "nginx-strict",
            ServerKind::Haproxy => "haproxy",
            ServerKind::Express(ExpressHeaders::Draft6) => "express-draft-6",
            ServerKind::Express(ExpressHeaders::Draft7) => "express-draft-7",
            ServerKind::Express(ExpressHeaders::Draft8) => "express-draft-8",
            ServerKind::Express(ExpressHeaders::Legacy) => "express-legacy",
            ServerKind::Express(ExpressHeaders::RetryAfter) => "express-retry-after",
            ServerKind::Express(ExpressHeaders::Silent) => "express-silent",
            ServerKind::Slowapi(Strategy::Fixed) => "slowapi-fixed",
            ServerKind::Slowapi(Strategy::Moving) => "slowapi-moving",
        }
    }

    /// Returns how many requests the limiter accepts beyond `Limit::rate` if a client starts to call it. All of them
    /// accept no more than the rate after that, in whole windows.
    ///
    /// - nginx (`ngx_http_limit_req_lookup`): `excess` falls with the rate and rises by 1 with each request that is
    ///   accepted. A request is refused if `excess` would be above `burst`. The first request leaves it at 0, so
    ///   `burst + 1` requests pass at once. Refused requests do not count. Without `burst`, a request passes if the one
    ///   before it was accepted 1 / rate ago.
    /// - HAProxy (`read_freq_ctr_period`): an estimate from two windows, `previous x (1 - f) + current`, where `f` is
    ///   the part of the current window that is over. A request is counted first, also one that is then refused, and
    ///   is refused if the estimate is above the limit. A client that is never refused uses the limit at once in its
    ///   first window, and `limit x f` until `f` in each later one: the limit in each window.
    /// - express-rate-limit (`MemoryStore.increment`) and slowapi's `fixed-window` (`MemoryStorage.incr`): windows that
    ///   begin with the first request after the window before. Refused requests count, without consequence.
    /// - slowapi's `moving-window` (`MemoryStorage.acquire_entry`): a log of accepted requests, the limit in any window.
    pub fn burst(self) -> u32 {
        match self {
            ServerKind::NginxBurst => ServerKind::BURST + 1,
            ServerKind::NginxStrict => 1,
            ServerKind::Haproxy | ServerKind::Express(_) | ServerKind::Slowapi(_) => 0,
        }
    }
}

impl fmt::Display for ServerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
