//! The machine, and what this process costs there: read from `/proc`, to the nanosecond if the
//! kernel tells it.

use std::fs;
use std::time::Duration;

/// Returns the processor, the cores and the command.
pub(crate) fn machine(command: &str) -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("a machine of unknown make", |(_, model)| model);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("On {model}, {cores} cores, with `cargo run --release -p tollgate-benches{command}`.")
}

/// Returns the processor time of all threads of this process that still run.
pub(crate) fn cpu_time() -> Duration {
    let threads = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let run = |thread: fs::DirEntry| -> Option<u64> {
        let times = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        times.split(' ').next()?.parse().ok()
    };
    Duration::from_nanos(threads.filter_map(run).sum())
}

/// Returns the processor time of the whole machine since it started: busy, and all.
pub(crate) fn machine_time() -> [Duration; 2] {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat
        .lines()
        .find_map(|line| line.strip_prefix("cpu "))
        .unwrap_or_default();
    // User, nice, system, idle, waiting for disks, two kinds of interrupts, stolen by other
    // machines. The remaining columns are included in these.
    let ticks: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .filter_map(|ticks| ticks.parse().ok())
        .collect();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    let all: u64 = ticks.iter().sum();
    // A tick is a hundredth of a second on every Linux.
    [all - idle, all].map(|ticks| Duration::from_millis(10 * ticks))
}

/// Returns the resident memory of this process, in bytes.
pub(crate) fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: Option<u64> =
        line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    1024 * kilobytes.unwrap_or_default()
}
