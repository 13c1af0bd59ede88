//! Runs histories, and says how to repeat one that fails.

use std::fs::OpenOptions;
use std::io::Write;
use std::{env, fmt};

use super::api;
use super::dice;
use super::features::Features;
use super::fleet::{self, World, lock};
use super::generate;
use super::judge;
use super::plan::History;

/// What has become of a history.
#[derive(Default)]
pub(crate) struct Played {
    pub(crate) met: Features,
    pub(crate) wrong: Vec<String>,
    transcript: Vec<String>,
}

/// Runs a history.
pub(crate) fn play(history: &History) -> Played {
    let played = history.clone();
    let outcome = api::in_virtual_time(history.dice, async move {
        let world = World::new(&played, None);
        world.play().await;
        // What the last calls of the store do.
        tokio::time::sleep(fleet::ms(1000)).await;
        judge::judge(&world);
        judge::capacity_comes_back(&world).await;
        for process in lock(&world.processes).iter() {
            process.link.end();
        }
        world.note(|| format!("store calls: {}", world.net.calls()));
        let mut log = lock(&world.log);
        Played {
            met: log.met,
            wrong: std::mem::take(&mut log.wrong),
            transcript: std::mem::take(&mut log.transcript),
        }
    });
    let mut played = outcome.unwrap_or_else(|panic| Played {
        wrong: vec![panic],
        ..Played::default()
    });
    let features = history.features.all();
    features.for_each(|feature| played.met.add(feature));
    played
}

/// Adds what happened in a history to the file that `TOLLGATE_TRANSCRIPT` names.
fn transcribe(number: u64, played: &Played) {
    if !dice::is_transcribed() {
        return;
    }
    let path = env::var_os(dice::TRANSCRIPT).expect("it is set");
    let file = OpenOptions::new().create(true).append(true).open(path);
    let mut text = format!("history {number}\n");
    for line in played.transcript.iter().chain(&played.wrong) {
        text.extend([line.as_str(), "\n"]);
    }
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.expect("the transcript can be written");
}

/// A history that has failed.
pub(crate) struct Failure {
    seed: u64,
    number: u64,
    history: History,
    wrong: Vec<String>,
}

/// Runs history `number` of a seed. Returns what met in it.
pub(crate) fn history(seed: u64, number: u64) -> Result<Features, Box<Failure>> {
    let history = generate::history(&mut dice::of_history(seed, number), number);
    let played = play(&history);
    transcribe(number, &played);
    let Played { met, wrong, .. } = played;
    if wrong.is_empty() {
        return Ok(met);
    }
    Err(Box::new(Failure {
        seed,
        number,
        history,
        wrong,
    }))
}

impl Failure {
    /// Returns one line.
    pub(crate) fn brief(&self) -> String {
        let features: Vec<_> = self.history.features.all().collect();
        format!("history {}: {} {features:?}", self.number, self.wrong[0])
    }
}

/// Returns the command that repeats one history.
pub(crate) fn command(seed: u64, number: u64) -> String {
    // These decide which histories are drawn.
    let stated = |name: &str| std::env::var(name).map(|value| format!("{name}={value} "));
    let stated: String = ["TOLLGATE_MENDED", "TOLLGATE_FEATURES"]
        .into_iter()
        .flat_map(stated)
        .collect();
    let test = "cargo test --all-features --test laws everything::everything";
    format!("{stated}TOLLGATE_SEED={seed} TOLLGATE_HISTORY={number} {test} -- --exact")
}

/// What was wrong, the steps of a shorter history that fails, too, and how to repeat it.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure {
            seed,
            number,
            history,
            wrong,
        } = self;
        let shrunk = shrink(history.clone());
        let again = play(&shrunk).wrong;
        writeln!(
            f,
            "history {number} of seed {seed}: {wrong:#?}\nwith fewer steps: {again:#?}\n{}",
            shrunk.list()
        )?;
        write!(f, "repeat it with\n{}", command(*seed, *number))
    }
}

/// Runs one history and prints its steps.
pub(crate) fn one(seed: u64, number: u64) {
    let drawn = generate::history(&mut dice::of_history(seed, number), number);
    println!("{}", drawn.list());
    if let Err(failure) = history(seed, number) {
        panic!("{failure}");
    }
}

/// How often a history is played at most to find a shorter one.
const MOST_PLAYS: u32 = 400;

/// Drops steps while the history still fails: halves first, then one after the other.
fn shrink(mut history: History) -> History {
    let mut plays = 0;
    let mut size = history.steps.len() / 2;
    while size > 0 {
        let mut from = 0;
        while from < history.steps.len() && plays < MOST_PLAYS {
            let mut shorter = history.clone();
            let dropped: Vec<_> = shorter
                .steps
                .drain(from..(from + size).min(history.steps.len()))
                .collect();
            // What follows keeps its time.
            if let Some((pause, _)) = shorter.steps.get_mut(from) {
                *pause += dropped.iter().map(|(pause, _)| pause).sum::<u64>();
            }
            plays += 1;
            if play(&shorter).wrong.is_empty() {
                from += size;
            } else {
                history = shorter;
            }
        }
        size /= 2;
    }
    history
}

/// Plays a history through Redis by the real clock. Returns what was wrong.
pub(crate) fn play_for_real(history: &History, url: &str) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("the machine has timers").block_on(async {
        let world = World::new(history, Some(url.to_owned()));
        let longest = std::time::Duration::from_secs(300);
        if tokio::time::timeout(longest, world.play()).await.is_err() {
            world.wrong("the history never ends");
        }
        judge::judge(&world);
        judge::stats_agree(&world);
        let mut log = lock(&world.log);
        std::mem::take(&mut log.wrong)
    })
}
