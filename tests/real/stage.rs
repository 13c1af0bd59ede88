//! The environment of a test of the programs of `examples/`: a Redis and a server.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis_server::RedisServer;
use tokio::process::Command;
use tokio::time::timeout;
use upstream::Upstream;

use crate::children::{Children, Line};

/// The longest wait for events that should come within seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The environment of one test.
pub(crate) struct Stage {
    pub(crate) redis: RedisServer,
    pub(crate) upstream: Upstream,
    pub(crate) children: Children,
    example: &'static str,
}

impl Stage {
    pub(crate) fn set(example: &'static str, upstream: Upstream) -> Stage {
        let redis = RedisServer::start().unwrap();
        Stage {
            redis,
            upstream,
            children: Children::of(program(example)),
            example,
        }
    }

    /// Starts a process of the example, called `who`.
    pub(crate) fn start(&mut self, who: &str, words: &[&str]) {
        let (redis, api) = (self.redis.url(), self.upstream.url());
        let words = [&["--redis", &redis, "--api", &api], words].concat();
        self.children.start(who, words).unwrap();
    }

    /// Returns what the processes print until all have ended without error.
    pub(crate) async fn lines(&mut self) -> Vec<Line> {
        let all = async {
            self.children.close();
            let mut lines = Vec::new();
            while let Some(line) = self.children.line().await {
                lines.push(line);
            }
            self.children.end().await.unwrap();
            lines
        };
        timeout(PATIENCE, all)
            .await
            .unwrap_or_else(|_| panic!("{} goes on and on", self.example))
    }

    /// Waits until a process prints what starts with `text`, and returns the line.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        let mut last = Vec::new();
        let wait = async {
            loop {
                let line = self.children.line().await.expect("the process goes on");
                if line.text.starts_with(text) {
                    return line.text;
                }
                last.push(line.text);
            }
        };
        match timeout(PATIENCE, wait).await {
            Ok(line) => line,
            Err(_) => {
                panic!(
                    "no {text:?} within {PATIENCE:?}, but {:#?}",
                    &last[last.len().saturating_sub(20)..]
                )
            }
        }
    }
}

/// Returns where cargo put an example: beside the directory of this test.
pub(crate) fn program(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples")
        .join(example);
    assert!(
        path.exists(),
        "{} is missing: run `cargo build --examples`",
        path.display()
    );
    path
}

/// Runs an example to its end, as a user does. Returns its exit code, and what it printed on both
/// streams.
pub(crate) async fn run(example: &str, words: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(program(example))
        .args(words)
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, output)
        .await
        .unwrap_or_else(|_| panic!("{example} goes on and on"))
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Counts the lines that contain `what`.
pub(crate) fn count(lines: &[Line], what: &str) -> usize {
    lines.iter().filter(|line| line.text.contains(what)).count()
}

/// Returns the text between the first `from` and the next `to`.
pub(crate) fn ends<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(from)?;
    Some(rest.split_once(to).map_or(rest, |(found, _)| found))
}

/// Returns all data of Redis, keys, values and scripts, as Redis writes it to disk.
pub(crate) fn everything_in(redis: &RedisServer) -> Vec<u8> {
    let () = redis.command(&["CONFIG", "SET", "rdbcompression", "no"]);
    let () = redis.command(&["SAVE"]);
    let [_, directory]: [String; 2] = redis
        .command::<Vec<String>>(&["CONFIG", "GET", "dir"])
        .try_into()
        .unwrap();
    std::fs::read(PathBuf::from(directory).join("dump.rdb")).unwrap()
}

/// Records what clients send to a Redis.
pub(crate) struct Spy(Arc<Mutex<Vec<u8>>>);

impl Spy {
    pub(crate) fn of(redis: &RedisServer) -> Spy {
        let mut stream = TcpStream::connect(("127.0.0.1", redis.port())).unwrap();
        stream.write_all(b"MONITOR\r\n").unwrap();
        let mut ok = [0; 5];
        stream.read_exact(&mut ok).unwrap();
        assert_eq!(&ok, b"+OK\r\n");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let spy = Spy(Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            loop {
                match stream.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(read) => seen.lock().unwrap().extend_from_slice(&buffer[..read]),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return,
                }
            }
        });
        spy
    }

    /// Returns everything recorded up to now.
    pub(crate) fn seen(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    /// Waits until it has recorded something.
    pub(crate) fn until(&self, what: impl Fn(&[u8]) -> bool) {
        let start = Instant::now();
        while !what(&self.seen()) {
            assert!(start.elapsed() < PATIENCE, "the text was never sent");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
