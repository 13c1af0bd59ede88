//! The example `fleet`, as a user runs it: its table, its error messages, and what it leaves
//! behind.
//!
//! `cargo test` builds the examples first; `cargo test --test fleet_example` does not, and runs the
//! existing binary.

#![cfg(target_os = "linux")] // /proc lists the processes left behind

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The example, in a process group of its own, which identifies all processes that it starts.
fn fleet(arguments: &[&str]) -> Command {
    let mut path: PathBuf = std::env::current_exe().unwrap();
    path.pop(); // from target/debug/deps
    path.pop();
    path.extend([
        "examples",
        &format!("fleet{}", std::env::consts::EXE_SUFFIX),
    ]);
    assert!(
        path.exists(),
        "{path:?} is missing: cargo build -p tollgate-fleet --examples"
    );
    let mut command = Command::new(path);
    command
        .args(arguments)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The output of the example, and its process group.
fn run(arguments: &[&str]) -> (Output, u32) {
    let child = fleet(arguments).spawn().unwrap();
    let group = child.id();
    (child.wait_with_output().unwrap(), group)
}

/// The program names of the running processes of a group.
fn running(group: u32) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        // pid (name) state parent group ...
        let Some((name, rest)) = stat
            .split_once('(')
            .and_then(|(_, rest)| rest.rsplit_once(')'))
        else {
            continue;
        };
        let mut rest = rest.split_whitespace();
        let (state, group_of_it) = (rest.next(), rest.nth(1));
        if !matches!(state, Some("Z" | "X")) && group_of_it == Some(&group.to_string()) {
            names.push(name.to_owned());
        }
    }
    names
}

/// The processes still running at a deadline, because a process takes a moment to end.
fn left_over(group: u32) -> Vec<String> {
    let start = Instant::now();
    loop {
        let names = running(group);
        if names.is_empty() || start.elapsed() > Duration::from_secs(5) {
            return names;
        }
        sleep(Duration::from_millis(20));
    }
}

/// The cells of the row that begins with `name`.
fn row(table: &str, name: &str) -> Vec<String> {
    let line = table
        .lines()
        .find(|line| line.trim_start().starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no row {name:?} in\n{table}"));
    let cells = line.trim_start()[name.len()..].split("  ").map(str::trim);
    cells
        .filter(|cell| !cell.is_empty())
        .map(str::to_owned)
        .collect()
}

fn number(cell: &str) -> f64 {
    let digits = cell.split(' ').next().unwrap();
    digits
        .parse()
        .unwrap_or_else(|_| panic!("{cell:?} is no number"))
}

/// The text with which a table reports that the transit time varied by more than `transit_slack`
/// (10 ms): the machine paused.
fn paused(cell: &str) -> bool {
    !cell.ends_with(" ms") || number(cell) > 10.0
}

#[test]
fn processes_with_shared_count_keep_limit_and_leave_nothing() {
    for _ in 0..3 {
        let arguments = [
            "--processes",
            "3",
            "--redis",
            "spawn",
            "--seconds",
            "3",
            "--limit",
            "50/s",
        ];
        let (output, group) = run(&arguments);
        let text = String::from_utf8(output.stdout).unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{complaint}\n{text}");
        assert_eq!(left_over(group), [""; 0], "\n{text}");

        let answered = row(&text, "answered 200");
        let refused = row(&text, "refused 429");
        let most = row(&text, "most calls in any 1s (limit 50)");
        assert!(
            number(&refused[0]) > 0.0 && number(&most[0]) > 50.0,
            "three counts are too many\n{text}"
        );
        assert!(
            number(&row(&text, "calls of Redis, per call sent")[1]) <= 1.1,
            "{text}"
        );
        // Three seconds have room for 100 at least, wherever the first window starts; but store
        // calls made while the machine stalls are lost.
        if number(&answered[1]) < 100.0 {
            continue;
        }
        let per_process = &row(&text, "answers per process: fewest, most")[1];
        assert!(!per_process.starts_with("0,"), "one got nothing\n{text}");
        if refused[1] == "0" && number(&most[1]) <= 50.0 {
            return;
        }
        assert!(
            paused(&row(&text, "jitter of the way to the service")[1]),
            "{text}"
        );
    }
    panic!("three times in a row the machine paused, or less than the limit was used");
}

#[test]
fn all_processes_end_with_the_example() {
    for signal in ["TERM", "INT"] {
        let (mut child, group, _errors) =
            started(&["--processes", "3", "--redis", "spawn", "--seconds", "60"]);
        let servers = running(group)
            .iter()
            .filter(|name| name.contains("redis"))
            .count();
        assert_eq!(
            (running(group).len(), servers),
            (5, 1),
            "the parent, three children, a Redis"
        );
        kill(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(1), "SIG{signal}");
        assert_eq!(left_over(group), [""; 0], "SIG{signal}");
    }
}

#[test]
fn children_end_when_their_parent_is_killed() {
    let (mut child, group, _errors) = started(&["--processes", "3", "--seconds", "60"]);
    assert_eq!(running(group), ["fleet"; 4]);
    kill(&child, "KILL");
    child.wait().unwrap();
    assert_eq!(left_over(group), [""; 0]);
}

/// A fleet whose first run has begun, its group, and its standard error.
fn started(arguments: &[&str]) -> (Child, u32, impl BufRead) {
    let mut child = fleet(arguments).spawn().unwrap();
    let group = child.id();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    assert!(line.contains(" sent "), "{line}");
    (child, group, errors)
}

fn kill(child: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([format!("-{signal}"), child.id().to_string()])
        .status();
    assert!(sent.unwrap().success());
}

#[test]
fn missing_redis_is_reported_at_once() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap(); // accepts, and answers nothing
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    for address in [silent.local_addr().unwrap(), closed] {
        let start = Instant::now();
        let url = format!("redis://someone:secret@{address}/");
        let (output, group) = run(&["--processes", "2", "--redis", &url]);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
        assert!(
            complaint.starts_with(&format!("fleet: no Redis at {address}: ")),
            "{complaint}"
        );
        assert!(!complaint.contains("secret"), "{complaint}");
        assert_eq!(left_over(group), [""; 0]);
    }
}

#[test]
fn arguments_that_make_no_sense_are_complaints() {
    let mut complaints = BTreeSet::new();
    for arguments in [
        &["--processes", "0"][..],
        &["--processes", "four"],
        &["--processes"],
        &["--processes", "60", "--tasks", "60"],
        &["--redis"],
        &["--redis", "localhost"],
        &["--redis", "http://localhost/"],
        &["--limit", "many"],
        &["--workers", "3"],
        &["child"],
    ] {
        let (output, _) = run(arguments);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {complaint}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(
            complaint.starts_with("fleet: "),
            "{arguments:?}: {complaint}"
        );
        assert!(
            complaints.insert(complaint.clone()),
            "{arguments:?} has the message of another: {complaint}"
        );
    }
}

#[test]
fn help_names_every_option() {
    let (output, _) = run(&["--help"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for option in [
        "--limit",
        "--burst",
        "--tasks",
        "--seconds",
        "--polite",
        "--processes",
        "--redis",
    ] {
        assert!(
            text.contains(&format!("\n  {option} ")),
            "{option} is missing in\n{text}"
        );
    }
}
