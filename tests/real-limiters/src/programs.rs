//! The programs of the servers: their settings, and how they are started.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use crate::kind::{ExpressHeaders, Limit, ServerKind, Strategy};

/// Where and with what limit a server runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// The server's own directory.
    pub(crate) directory: &'a Path,
    /// The file to which it appends `STATUS TIME` for each request.
    pub(crate) log: &'a Path,
    /// Where the packages of npm and PyPI are.
    pub(crate) packages: &'a Path,
    pub(crate) port: u16,
    pub(crate) limit: Limit,
}

impl ServerKind {
    /// Returns the name by which the server's program is installed.
    pub(crate) fn program(self) -> &'static str {
        match self {
            ServerKind::NginxBurst | ServerKind::NginxStrict => "nginx",
            ServerKind::Haproxy => "haproxy",
            ServerKind::Express(_) => "express",
            ServerKind::Slowapi(_) => "slowapi",
        }
    }

    /// Writes the settings of the server, and returns the command that starts it.
    pub(crate) fn command(self, place: Place<'_>) -> io::Result<Command> {
        match self {
            ServerKind::NginxBurst => nginx(place, &format!("burst={} nodelay", ServerKind::BURST)),
            ServerKind::NginxStrict => nginx(place, ""),
            ServerKind::Haproxy => haproxy(place),
            ServerKind::Express(headers) => Ok(express(place, headers)),
            ServerKind::Slowapi(strategy) => Ok(slowapi(place, strategy)),
        }
    }
}

/// A rate of nginx is a whole number, so it is stated per minute.
fn nginx(place: Place<'_>, burst: &str) -> io::Result<Command> {
    let path = |name: &str| place.directory.join(name).display().to_string();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|of| format!("{of}_temp_path {};\n", path(of)))
        .concat();
    let settings = format!(
        "daemon off;
        master_process off;
        pid {};
        error_log {} error;
        events {{}}
        http {{
            {temporary}
            log_format status '$status $msec';
            access_log {} status;
            limit_req_zone $binary_remote_addr zone=all:1m rate={:.0}r/m;
            limit_req_status 429;
            limit_req_log_level info;
            keepalive_requests 1000000;
            keepalive_timeout 1h;
            server {{
                listen 127.0.0.1:{};
                root {};
                location / {{ limit_req zone=all {burst}; }}
            }}
        }}",
        path("pid"),
        path("errors"),
        place.log.display(),
        60.0 * place.limit.rate(),
        place.port,
        path(""),
    );
    fs::write(path("nginx.conf"), settings)?;
    fs::write(path("index.html"), "ok")?;
    let mut command = Command::new("nginx");
    command.args(["-c", &path("nginx.conf"), "-e", &path("errors")]);
    Ok(command)
}

fn haproxy(place: Place<'_>) -> io::Result<Command> {
    let settings = format!(
        "global
            log stdout format raw local0 info
            nbthread 1
        defaults
            mode http
            log global
            log-format \"%ST %[date(0,ms)]\"
            option dontlognull
            timeout connect 5s
            timeout server 5s
            timeout client 1h
        frontend all
            bind 127.0.0.1:{port}
            stick-table type ip size 1k expire 1h store http_req_rate({window}ms)
            http-request track-sc0 src
            http-request deny deny_status 429 if {{ sc_http_req_rate(0) gt {count} }}
            http-request return status 200 content-type text/plain string ok\n",
        port = place.port,
        window = place.limit.window.as_millis(),
        count = place.limit.count,
    );
    let file = place.directory.join("haproxy.cfg");
    fs::write(&file, settings)?;
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(place.log)?;
    let mut command = Command::new("haproxy");
    command.arg("-db").arg("-f").arg(file).stdout(log);
    Ok(command)
}

fn express(place: Place<'_>, headers: ExpressHeaders) -> Command {
    let headers = match headers {
        ExpressHeaders::Draft6 => "draft-6",
        ExpressHeaders::Draft7 => "draft-7",
        ExpressHeaders::Draft8 => "draft-8",
        ExpressHeaders::Legacy => "legacy",
        ExpressHeaders::RetryAfter => "retry-after",
        ExpressHeaders::Silent => "silent",
    };
    let mut command = Command::new("node");
    command
        .env("NODE_PATH", place.packages.join("express/node_modules"))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/express.js"));
    command.args([place.port.to_string(), place.limit.count.to_string()]);
    command.args([&*place.limit.window.as_millis().to_string(), headers]);
    command.arg(place.log);
    command
}

fn slowapi(place: Place<'_>, strategy: Strategy) -> Command {
    let strategy = match strategy {
        Strategy::Fixed => "fixed-window",
        Strategy::Moving => "moving-window",
    };
    let mut command = Command::new(place.packages.join("slowapi/bin/python"));
    command.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/slowapi_server.py"
    ));
    command.args([place.port.to_string(), place.limit.count.to_string()]);
    command.args([&*place.limit.window.as_secs().to_string(), strategy]);
    command.arg(place.log);
    command
}
