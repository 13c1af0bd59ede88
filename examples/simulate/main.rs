//! Runs scenarios x strategies x seeds, in virtual time, on all cores, and shows fairness, waits
//! and refusals.
//!
//! ```text
//! cargo run --release -p tollgate-simulate --example simulate
//! cargo run --release -p tollgate-simulate --example simulate -- --scenarios seed-run,n10 --strategies fair,mine --seeds 20
//! cargo run --release -p tollgate-simulate --example simulate -- --file my-scenarios.json --report report.html
//! cargo run --release -p tollgate-simulate --example simulate -- --scenarios seed-run --chart examples/simulate/fair.svg
//! cargo run --release -p tollgate-simulate --example simulate -- --scenarios limited --strategies limit,fair-gate --chart limited.png
//! ```

mod mine;
#[allow(dead_code, reason = "it serves other examples, too")]
#[path = "../common/options.rs"]
mod options;
mod png;
mod table;

use std::error::Error;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use options::{Options, Usage};
use tollgate_simulate::{Runs, Scenario, Scenarios, Strategy, picture, report, sweep};

const HELP: &str = "\
Simulates fleets of clients against servers with limits, in virtual time.

  --file FILE         scenarios to run (JSON); without it, the public set
  --scenarios A,B     only these of them, or of four other sets: known limits that are counted in a store
                      (`limited` for all of that), servers that count as real limiters do (`real`),
                      limits of tens and hundreds per second (`fast`), and requests that are always refused (`poison`)
  --strategies A,B    what to try: the paces fair, fair-sole (Fair::sole_client), blog-remaining, blog-proportional,
                      blog-gradual, blog-backoff, blog-backoff-2, aimd, none, mine (see mine.rs); the gates limit, which is told the quota,
                      fair-gate, and fair-shared, whose processes share one pace; limit-layer and fair-layer, which tell kinds of
                      requests apart; default: fair,blog-remaining
  --seeds N           how many runs of each, default 10
  --first-seed N      the seed of the first of them, default 1
  --report FILE       writes a page with table and charts (HTML that needs nothing else)
  --chart FILE        writes the charts of the first scenario alone: PNG or SVG, as FILE ends
  --json FILE         writes the metrics of all runs, their means and deviations
";

fn main() -> ExitCode {
    let failed = |error: &dyn Error, code| {
        eprintln!("simulate: {error}");
        ExitCode::from(code)
    };
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(usage) => return failed(&usage, 2),
    };
    match work(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&*error, if error.is::<Usage>() { 2 } else { 1 }),
    }
}

fn work(mut options: Options) -> Result<(), Box<dyn Error>> {
    let scenarios = match options.find("--file") {
        Some(file) => {
            let text =
                std::fs::read_to_string(&file).map_err(|error| format!("{file}: {error}"))?;
            Some(Scenarios::read(&text).map_err(|error| format!("{file}: {error}"))?)
        }
        None => None,
    };
    let scenarios = chosen(scenarios, options.find("--scenarios"))?;
    if scenarios.is_empty() {
        return Err("the file has no scenarios".into());
    }
    let names = options.text("--strategies", "fair,blog-remaining");
    let strategies = names
        .split(',')
        .map(strategy)
        .collect::<Result<Vec<_>, _>>()?;
    let seeds = u64::from(options.number("--seeds", 10, 1..=10_000)?);
    let first = u64::from(options.number("--first-seed", 1, 0..=u32::MAX)?);
    let [json, page, chart] = ["--json", "--report", "--chart"].map(|name| options.find(name));
    options.finish()?;
    let draws_png = chart.as_deref().is_some_and(|file| ends_in(file, "png"));
    if let Some(file) = chart
        .as_deref()
        .filter(|file| !draws_png && !ends_in(file, "svg"))
    {
        let complaint = format!("--chart takes a file that ends in .png or .svg, not {file:?}");
        return Err(Usage::new(complaint).into());
    }
    // Opens the output files before the runs, so that an error shows at once.
    for file in [&json, &page, &chart].into_iter().flatten() {
        let opened = OpenOptions::new().create(true).append(true).open(file);
        opened.map_err(|error| format!("{file}: {error}"))?;
    }

    let bar = ProgressBar::new(scenarios.len() as u64 * strategies.len() as u64 * seeds);
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {pos}/{len} runs, {elapsed}, {eta} to go",
    )?);
    let runs = sweep(&scenarios, &strategies, first..=first + seeds - 1, || {
        bar.inc(1)
    })?;
    bar.finish_and_clear();

    print!("{}", table::table(&runs));
    let each = if seeds == 1 {
        "one run".into()
    } else {
        format!("means of {seeds} runs")
    };
    println!("{each} of each; it took {:.1?}", bar.elapsed());
    let write = |file: &str, data: &[u8]| {
        std::fs::write(file, data).map_err(|error| format!("{file}: {error}"))
    };
    if let Some(file) = json {
        write(&file, metrics(&runs).to_string().as_bytes())?;
    }
    if let Some(file) = page {
        write(
            &file,
            report(&scenarios, &strategies, &runs, first)?.as_bytes(),
        )?;
    }
    if let (Some(file), Some((name, scenario))) = (chart, scenarios.first()) {
        let svg = picture(
            name,
            scenario,
            &strategies,
            &runs[..strategies.len()],
            first,
        )?;
        match draws_png {
            true => write(&file, &png::png(&svg)?)?,
            false => write(&file, svg.as_bytes())?,
        }
    }
    Ok(())
}

fn ends_in(file: &str, ending: &str) -> bool {
    Path::new(file)
        .extension()
        .is_some_and(|its| its.eq_ignore_ascii_case(ending))
}

fn strategy(name: &str) -> Result<Strategy, Usage> {
    let mut all = Strategy::all();
    all.push(mine::strategy());
    let names: Vec<_> = all
        .iter()
        .map(|strategy| strategy.name().to_owned())
        .collect();
    let found = all.into_iter().find(|strategy| strategy.name() == name);
    found.ok_or_else(|| none_such("strategy", name, &names))
}

fn none_such(what: &str, name: &str, names: &[String]) -> Usage {
    Usage::new(format!(
        "there is no {what} {name:?}; there are {}",
        names.join(", ")
    ))
}

/// Returns the scenarios of `file`, or the public set without a file. With `names`: these
/// scenarios, of the file or of all built-in sets. The names `limited`, `poison`, `real` and `fast` select a
/// whole built-in set.
fn chosen(
    file: Option<Scenarios>,
    names: Option<String>,
) -> Result<Vec<(String, Scenario)>, Usage> {
    let built_in = file.is_none();
    let mut all = file.unwrap_or_else(Scenarios::public).0;
    let Some(names) = names else { return Ok(all) };
    if built_in {
        match names.as_str() {
            "limited" => return Ok(Scenarios::limited().0),
            "poison" => return Ok(Scenarios::poison().0),
            "real" => return Ok(Scenarios::real().0),
            "fast" => return Ok(Scenarios::fast().0),
            _ => all.extend(
                Scenarios::limited()
                    .0
                    .into_iter()
                    .chain(Scenarios::real().0)
                    .chain(Scenarios::fast().0)
                    .chain(Scenarios::poison().0),
            ),
        }
    }
    let find = |name: &str| {
        let found = all.iter().find(|(other, _)| other == name);
        let names = || all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        found
            .cloned()
            .ok_or_else(|| none_such("scenario", name, &names()))
    };
    names.split(',').map(find).collect()
}

/// `{scenario: {strategy: {mean, deviation, runs}}}`.
fn metrics(all: &[Runs]) -> serde_json::Value {
    let mut file = serde_json::json!({});
    for runs in all {
        file[&runs.scenario][&runs.strategy] = serde_json::json!({ "mean": runs.mean(), "deviation": runs.deviation(), "runs": runs.runs });
    }
    file
}
