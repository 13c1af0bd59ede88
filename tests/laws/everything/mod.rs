//! The law of everything: random histories of a virtual fleet in which the features of tollgate meet.
//!
//! A history is a value ([`plan`]) that dice draw ([`generate`]): processes that start, stop, stand
//! still and die, a store that is late, loses or is away, and requests of every kind. [`fleet`] plays it
//! under a paused clock, [`upstream`] counts by brute force what arrives, and [`judge`] says what must
//! hold. What tollgate is known to get wrong is left out by the switches of [`known`]. [`api`] is the only
//! file that names tollgate's types.
//!
//! History `i` of seed `S` is always the same. `TOLLGATE_SEED` sets the seed, `TOLLGATE_CASES` multiplies
//! the number of histories, `TOLLGATE_HISTORY` runs one of them and prints its steps.

mod api;
mod caller;
pub(crate) mod dice;
mod features;
mod fleet;
mod generate;
mod judge;
pub(crate) mod known;
mod named;
mod plan;
mod run;
mod upstream;

use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{env, fs, process};

use features::Matrix;
use redis_server::RedisServer;

/// The histories of a usual run: about 10 s of a core in a debug build.
const HISTORIES: u32 = 300;

/// The file to which the process that runs the histories writes the number of each.
const PROGRESS: &str = "TOLLGATE_LAW_PROGRESS";

/// Histories run in a process of their own, so that one that aborts or never ends has a number, too.
#[test]
fn everything() {
    let seed = histories::seed();
    if let Some(number) = dice::only_history() {
        return run::one(seed, number);
    }
    match env::var_os(PROGRESS) {
        Some(progress) => run_all(seed, &progress.into()),
        None => watch(seed),
    }
}

fn run_all(seed: u64, progress: &PathBuf) {
    let count = histories::cases(HISTORIES);
    let mut matrix = Matrix::default();
    // To look for several faults at once.
    let (goes_on, mut failed) = (env::var_os("TOLLGATE_KEEP_GOING").is_some(), 0);
    let start = Instant::now();
    let mut play = |matrix: &mut Matrix, number: u64| {
        fs::write(progress, number.to_string()).expect("the file can be written");
        match run::history(seed, number) {
            Ok(met) => matrix.add(met),
            Err(failure) if goes_on => {
                failed += 1;
                println!("{}", failure.brief());
            }
            Err(failure) => panic!("{failure}"),
        }
    };
    for number in 0..u64::from(count) {
        play(&mut matrix, number);
    }
    // There are more pairs than usual histories: those of the pairs that chance has left out.
    let rounds = if count < HISTORIES { 0 } else { 5 };
    for round in 0..rounds {
        for (one, other) in matrix.missing(generate::cannot_meet) {
            play(&mut matrix, generate::number_of(one, other, round));
        }
    }
    let took = start.elapsed().as_secs_f64();
    println!("how often two features have met:\n{}", matrix.table());
    for known in known::ALL.iter().filter(|known| known.stands()) {
        println!(
            "known, issue {}: {}: {}",
            known.issue, known.name, known.says
        );
    }
    println!(
        "{count} histories of seed {seed} in {took:.1} s: {:.1} a second",
        f64::from(count) / took
    );
    assert_eq!(failed, 0, "histories failed");
    let missing = matrix.missing(generate::cannot_meet);
    assert!(
        rounds == 0 || missing.is_empty(),
        "these features have never met: {missing:?}"
    );
}

/// No history takes so long.
const STUCK: Duration = Duration::from_secs(300);

fn watch(seed: u64) {
    let progress = env::temp_dir().join(format!("tollgate-law-{}", process::id()));
    let output = progress.with_extension("output");
    let stdout = fs::File::create(&output).expect("a file can be made");
    let test = module_path!()
        .split_once("::")
        .map_or("everything", |(_, module)| module);
    let mut child = process::Command::new(env::current_exe().expect("the test has a program"))
        .args(["--exact", &format!("{test}::everything"), "--nocapture"])
        .env(PROGRESS, &progress)
        .stderr(stdout.try_clone().expect("a file can be shared"))
        .stdout(stdout)
        .spawn()
        .expect("a test starts");
    let number = || fs::read_to_string(&progress).unwrap_or_default();
    let (mut last, mut since, mut is_stuck) = (number(), Instant::now(), false);
    let ended = loop {
        if let Some(ended) = child.try_wait().expect("it is a child") {
            break ended;
        }
        if number() != last {
            (last, since) = (number(), Instant::now());
        }
        if since.elapsed() > STUCK {
            is_stuck = true;
            child.kill().expect("it is a child");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    print!("{}", fs::read_to_string(&output).unwrap_or_default());
    let last = number();
    for file in [&progress, &output] {
        let _ = fs::remove_file(file);
    }
    let command = run::command(seed, last.parse().unwrap_or(0));
    assert!(
        !is_stuck,
        "history {last} of seed {seed} never ends; repeat it with\n{command}"
    );
    let is_aborted = ended.code().is_none();
    assert!(
        !is_aborted,
        "history {last} of seed {seed} aborts: {ended}; repeat it with\n{command}"
    );
    assert!(ended.success(), "a history failed, see above");
}

/// Histories by the real clock through Redis. What depends on when a machine under test runs is not asserted.
#[test]
fn everything_through_redis() {
    let server = RedisServer::start().expect("redis-server is installed");
    let seed = histories::seed();
    for number in 0..u64::from(histories::cases(2)) {
        let history = generate::real_history(&mut dice::of_history(!seed, number));
        let wrong = run::play_for_real(&history, &server.url());
        assert!(
            wrong.is_empty(),
            "history {number} of seed {seed}: {wrong:#?}\n{}",
            history.list()
        );
        let (): () = server.command(&["FLUSHALL"]);
    }
}
