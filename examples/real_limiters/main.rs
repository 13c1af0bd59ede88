//! Both layers against servers whose limiters others wrote: nginx, HAProxy, express-rate-limit and slowapi.
//!
//!     cargo run --release --example real_limiters
//!     cargo run --release --example real_limiters -- --case long
//!     cargo run --release --example real_limiters -- --servers haproxy --layers fair --processes 4 --seconds 240
//!
//! What a server needs and the machine lacks is installed: packages of the system with `apt-get`, packages of npm and
//! PyPI below `target`. The figures are those of the server's log, and the time that calls take until they are accepted.
//! The last thing printed is a table in Markdown.

mod bench;
mod caller;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod layer;
mod table;

use std::process::ExitCode;

const HELP: &str = "\
Both layers against servers whose limiters others wrote.

Usage: cargo run --release --example real_limiters -- [options]

  --case <name>      which runs:                                                          [second]
                       second   100 per 2 s, 40 callers, one minute
                       long     20 per 2 s, 20 callers, four minutes
                       minute   600 per minute, 20 callers, four minutes
                       windows  5, 50 and 600 per 10 s and 100 per second in fixed windows, 8 callers, ten minutes
                       short    100 per 2 s, 40 callers, nginx and HAProxy, some seconds
  --servers <a,b>    only these servers: nginx-burst, nginx-strict, haproxy, express-draft-8,
                     express-draft-7, express-draft-6, express-legacy, express-retry-after,
                     express-silent, slowapi-fixed, slowapi-moving
  --layers <a,b>     only these layers: none, limit, limit-window, fair, fair-sole, fair-limit; with a
                     store for several processes: limit-shared, fair-shared
  --count <n>        how many requests a window allows, instead of what the case says
  --window <s>       its length, in whole seconds
  --callers <n>      how many callers, of all processes together
  --processes <n>    how many processes they are in                                       [1]
  --seconds <s>      how long a run takes
  --at-once <n>      how many runs there are at a time                                    [4]
  --role caller      be one of the processes
  --help             this text
";

#[tokio::main]
async fn main() -> ExitCode {
    common::main("real_limiters", HELP, async |mut options| {
        match options.role(&["caller"])? {
            Some(_) => caller::work(options).await,
            None => bench::run_all(options).await,
        }
    })
    .await
}
