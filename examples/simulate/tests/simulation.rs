//! The simulator: it agrees with published results, and the recommended pace reaches its promises.

use tollgate_simulate::{
    Group, Metrics, Scenario, Scenarios, Strategy, picture, report, run, sweep, trace,
};

fn scenario(name: &str) -> Scenario {
    let mut all = Scenarios::public()
        .0
        .into_iter()
        .chain(Scenarios::limited().0);
    all.find(|(other, _)| other == name)
        .expect("it is in one of the sets")
        .1
}

/// The means over `seeds` runs.
fn mean(name: &str, strategy: &str, seeds: u64) -> Metrics {
    let (scenario, strategy) = (scenario(name), Strategy::named(strategy).unwrap());
    let runs: Vec<Metrics> = (1..=seeds)
        .map(|seed| run(&scenario, &strategy, seed).unwrap())
        .collect();
    Metrics::mean_and_deviation(&runs).0
}

#[test]
fn seed_determines_the_run() {
    let (scenario, strategy) = (scenario("churn"), Strategy::named("fair").unwrap());
    let one = run(&scenario, &strategy, 1).unwrap();
    assert_eq!(one, run(&scenario, &strategy, 1).unwrap());
    assert_eq!(one, trace(&scenario, &strategy, 1).unwrap().0);
    assert_ne!(one, run(&scenario, &strategy, 2).unwrap());
}

#[test]
fn runs_with_gates_repeat_with_identical_events() {
    let mut scenario = scenario("torture-limit");
    scenario.duration = 600.0;
    for strategy in ["limit", "fair-gate"].map(|name| Strategy::named(name).unwrap()) {
        let (one, other) = (
            trace(&scenario, &strategy, 1).unwrap(),
            trace(&scenario, &strategy, 1).unwrap(),
        );
        assert_eq!(one.0, other.0);
        assert_eq!((one.1.held, one.1.judged), (other.1.held, other.1.judged));
        assert_ne!(one.0, run(&scenario, &strategy, 2).unwrap());
    }
}

/// The asynchronous gate passes what its pure queue passes, apart from the milliseconds of its
/// timers.
#[test]
fn gate_decides_as_its_pace_s_queue_does() {
    for (name, duration) in [
        ("n10", 900.0),
        ("churn", 1800.0),
        ("50-per-s", 60.0),
        ("rem+retry-after", 900.0),
    ] {
        let mut scenario = scenario(name);
        scenario.duration = duration;
        let of = |strategy: &str| {
            let strategy = Strategy::named(strategy).unwrap();
            let runs: Vec<Metrics> = (1..=4)
                .map(|seed| run(&scenario, &strategy, seed).unwrap())
                .collect();
            Metrics::mean_and_deviation(&runs)
        };
        let ((line, noise), (gate, _)) = (of("fair"), of("fair-gate"));
        for ((metric, line), ((_, gate), (_, noise))) in line
            .named()
            .into_iter()
            .zip(gate.named().into_iter().zip(noise.named()))
        {
            let (Some(line), Some(gate), Some(noise)) = (line, gate, noise) else {
                continue;
            };
            // Two means of four differ by at most three of their errors, and the effect of one
            // request.
            let within = 3.0 * noise / 2_f64.sqrt() + 0.03 * line.abs() + 0.02;
            assert!(
                (line - gate).abs() <= within,
                "{name}, {metric}: {line} in line, {gate} at the gate"
            );
        }
    }
}

#[test]
fn known_limit_avoids_refusals_unless_store_fails_open() {
    for name in [
        "limit-4",
        "limit-50",
        "limit-minute",
        "away-closed",
        "lost-answers",
    ] {
        let mut scenario = scenario(name);
        scenario.duration =
            scenario
                .duration
                .min(if name == "limit-minute" { 600.0 } else { 120.0 });
        let limit = Strategy::named("limit").unwrap();
        for seed in 1..=u64::from(histories::cases(1).min(2)) {
            let metrics = run(&scenario, &limit, seed).unwrap();
            assert_eq!(metrics.retry_pct_pooled, 0.0, "{name}");
            assert!(
                metrics.jain > 0.99 && metrics.store_calls.unwrap() < 1.0,
                "{name}: {metrics:?}"
            );
            let used = if name.starts_with("limit") {
                97.0
            } else {
                80.0
            };
            assert!(metrics.util_pct > used, "{name}: {metrics:?}");
        }
    }
}

/// Notifications of the store are delayed too, and a process catches up on those sent while the
/// store was unreachable.
#[test]
fn in_flight_slots_pass_between_processes_through_the_store() {
    let text = r#"{"flights": {
        "fleet": [{"procs": 6, "tasks": 4}],
        "server": {"kind": "bucket", "cap": 1e6, "refill": 1e6, "start": 1e6},
        "quota": "8 in flight", "store": {"trip": [0.001, 0.003, 0], "away": [[30, 32]], "lose": 0.01},
        "latency": [0.1, 0.1, 0], "duration": 60
    }}"#;
    let flights = &Scenarios::read(text).unwrap().0[0].1;
    let limit = Strategy::named("limit").unwrap();
    let (metrics, trace) = trace(flights, &limit, 1).unwrap();
    // Each request that the server has decided is in flight for the second half of its trip.
    let judged: Vec<f64> = trace.judged.iter().map(|judged| judged.0).collect();
    let most = judged.iter().map(|at| {
        judged
            .iter()
            .filter(|other| (*at - 0.05..=*at).contains(*other))
            .count()
    });
    assert!(most.max() <= Some(8));
    let after = judged.iter().filter(|at| **at > 40.0).count();
    assert!(
        (1200..=1600).contains(&after),
        "{after} in 20 s, of the 1600 that 8 places make at most"
    );
    assert!(metrics.max_wait < 5.0, "{metrics:?}");
}

#[test]
fn unreachable_store_costs_as_configured() {
    let limit = Strategy::named("limit").unwrap();
    let [closed, open, share] = ["away-closed", "away-open", "away-share"].map(|name| {
        let mut scenario = scenario(name);
        scenario.duration = 120.0;
        run(&scenario, &limit, 1).unwrap()
    });
    assert!(
        closed.max_wait > 10.0 && closed.retry_pct == 0.0,
        "{closed:?}"
    );
    assert!(open.max_wait < 5.0 && open.retry_pct > 0.1, "{open:?}");
    assert!(share.max_wait < 5.0 && share.retry_pct < 0.1, "{share:?}");
    assert!(closed.util_pct < share.util_pct, "{closed:?}, {share:?}");
}

#[test]
fn cores_change_nothing() {
    let scenarios: Vec<_> = ["n2", "noisy"]
        .map(|name| (name.to_owned(), scenario(name)))
        .into();
    let strategies = ["fair", "aimd"].map(|name| Strategy::named(name).unwrap());
    let runs = sweep(&scenarios, &strategies, 3..=4, || {}).unwrap();
    assert_eq!(runs.len(), 4);
    assert_eq!((&*runs[1].scenario, &*runs[1].strategy), ("n2", "aimd"));
    assert_eq!(
        runs[2].runs[1],
        run(&scenarios[1].1, &strategies[0], 4).unwrap()
    );
}

/// The means of a few seeds lie within three single-run deviations of the published figures, which
/// were reproduced with the original.
#[test]
fn the_published_strategies_do_what_was_published() {
    // retry %, longest sleep, stdev, each with its deviation; clear
    let published = [
        (
            "blog-backoff-2",
            (64.8, 1.3),
            (1038.0, 431.0),
            (331.0, 68.0),
            74.3,
        ),
        (
            "blog-backoff",
            (78.9, 0.8),
            (174.0, 82.0),
            (262.0, 88.0),
            74.3,
        ),
        (
            "blog-gradual",
            (47.4, 2.6),
            (201.0, 30.0),
            (897.0, 71.0),
            75.6,
        ),
        (
            "blog-proportional",
            (3.54, 0.63),
            (19.6, 4.0),
            (109.0, 27.0),
            524.2,
        ),
        (
            "blog-remaining",
            (3.83, 0.65),
            (22.5, 6.3),
            (114.0, 28.0),
            75.3,
        ),
    ];
    for (strategy, retry, sleep, stdev, clear) in published {
        let saturated = mean("seed-run", strategy, 4);
        for (value, (expected, deviation)) in [
            (saturated.retry_pct, retry),
            (saturated.max_sleep, sleep),
            (saturated.stdev, stdev),
        ] {
            assert!(
                (value - expected).abs() < 3.0 * deviation / 2.0,
                "{strategy}: {value}, not {expected}"
            );
        }
        let cleared = mean("seed-clear", strategy, 1).clear.unwrap();
        assert!(
            (cleared - clear).abs() < 0.01 * clear,
            "{strategy}: {cleared} s, not {clear} s"
        );
    }
}

#[test]
fn recommended_pace_is_fair_patient_and_rarely_refused() {
    let fair = mean("seed-run", "fair", 4);
    assert!(
        fair.retry_pct <= 0.15 && fair.max_wait <= 15.0 && fair.p99_wait <= 10.0,
        "{fair:?}"
    );
    assert!(
        fair.stdev <= 1.5 && fair.jain >= 0.998 && fair.util_pct >= 99.2,
        "{fair:?}"
    );
    assert!(mean("seed-clear", "fair", 2).clear.unwrap() <= 75.0);
    let fair = mean("n50-full", "fair", 2);
    assert!(
        fair.retry_pct <= 0.05 && fair.max_wait <= 58.3 && fair.stdev <= 3.55,
        "{fair:?}"
    );
    // A false Remaining header costs no more than a factor.
    let high = mean("stuck-high", "fair", 4);
    assert!(high.retry_pct <= 4.68 && high.util_pct >= 99.6, "{high:?}");
    let zero = mean("stuck-zero", "fair", 4);
    assert!(zero.retry_pct <= 1.21 && zero.util_pct >= 99.7, "{zero:?}");
}

/// The goals of the real set that the recommended pace misses with one process. If the server states neither a limit
/// nor what is left, the pace is `Fair::sole_client`. Remove those that a better pace reaches.
/// `examples/simulate/README.md` has all goals, and the means of ten seeds.
const MISSED: [&str; 2] = ["draft-1: used", "silent-minute-1: longest"];

#[test]
fn one_process_misses_only_the_listed_goals_of_the_real_set() {
    let mut scenarios = Scenarios::real().0;
    scenarios.retain(|(_, scenario)| matches!(scenario.fleet[..], [Group { procs: 1, .. }]));
    for (_, scenario) in &mut scenarios {
        scenario.duration = scenario.duration.min(240.0);
    }
    let is_silent = |scenario: &Scenario| !(scenario.headers.remaining || scenario.headers.limit);
    let (silent, told): (Vec<_>, Vec<_>) = scenarios
        .into_iter()
        .partition(|(_, scenario)| is_silent(scenario));
    let mut missed = Vec::new();
    for (scenarios, strategy) in [(told, "fair"), (silent, "fair-sole")] {
        let strategy = Strategy::named(strategy).unwrap();
        let all = sweep(&scenarios, &[strategy], 1..=3, || {}).unwrap();
        for (runs, (name, scenario)) in all.iter().zip(&scenarios) {
            let mut goals = Vec::new();
            for (goal, value, wanted) in scenario.goal.unwrap_or_default().missed(&runs.mean()) {
                println!("{name}: {goal} is {value:.2}, not {wanted}");
                goals.push(goal);
            }
            if !goals.is_empty() {
                missed.push(format!("{name}: {}", goals.join(", ")));
            }
        }
    }
    assert_eq!(missed, MISSED);
}

/// A sole client recognises that a window slides. Clients that are told only how long to wait start at rates that
/// together do not exceed the limit. A wait of 0 s, headers on refusals alone, and a limit that is configured for a
/// server that states nothing else make nothing worse.
#[test]
fn sliding_windows_and_stated_waits_reach_their_goals() {
    let all = Scenarios::real().0;
    for (name, strategy) in [
        ("moving-1", "fair-sole"),
        ("retry-after-alone-4", "fair"),
        ("retry-after-alone-20", "fair"),
        ("rounded-down-1", "fair"),
        ("rounded-down-callers", "fair"),
        ("known-1", "fair"),
        ("known-callers", "fair"),
        ("on-429s-1", "fair"),
        ("on-429s-callers", "fair"),
        ("known-silent-1", "fair"),
        ("known-silent-callers", "fair"),
    ] {
        let scenario = all.iter().find(|(other, _)| other == name).unwrap();
        let strategy = Strategy::named(strategy).unwrap();
        let runs = sweep(std::slice::from_ref(scenario), &[strategy], 1..=3, || {}).unwrap();
        let missed = scenario.1.goal.unwrap().missed(&runs[0].mean());
        assert!(missed.is_empty(), "{name}: {missed:?}");
    }
}

/// Information never hurts: with its headers taken away, a server of the fast set refuses no fewer requests, and no caller
/// gets a more even share. The margins are for chance.
#[test]
fn headers_of_fast_limits_do_not_make_them_worse() {
    let fair = Strategy::named("fair").unwrap();
    for (name, stated) in Scenarios::fast().0 {
        let is_told = stated.headers.remaining && stated.headers.limit;
        if !is_told {
            continue;
        }
        let mut bare = stated.clone();
        bare.headers = Default::default();
        let both = [(name.clone(), stated), (name.clone(), bare)];
        let runs = sweep(&both, std::slice::from_ref(&fair), 1..=3, || {}).unwrap();
        let (with, without) = (runs[0].mean(), runs[1].mean());
        assert!(
            with.retry_pct_pooled <= without.retry_pct_pooled + 0.7
                && with.max_wait <= 1.5 * without.max_wait
                && with.util_pct >= without.util_pct - 3.0,
            "{name}: {with:?}, without headers {without:?}"
        );
        // If clients come and go, equal shares at each moment are not equal over the run.
        let asked = match with.even_jain < 0.99 {
            true => 0.9 * with.even_jain,
            false => 0.95,
        };
        let is_fair = with.jain >= asked;
        assert!(is_fair && with.retry_pct_pooled <= 2.0, "{name}: {with:?}");
    }
}

/// A stated limit is the rate at which a bucket fills; the bucket may hold twenty times as much.
#[test]
fn bucket_larger_than_limit_is_used_completely() {
    let text = r#"{"shop": {
        "fleet": [{"procs": 4, "tasks": 2}], "server": {"kind": "bucket", "cap": 40, "refill": 2.0, "start": 40},
        "headers": {"remaining": true}, "latency": [0.05, 0.15, 0.02], "hint": [2, 1.0], "duration": 900
    }}"#;
    let (_, shop) = Scenarios::read(text).unwrap().0.remove(0);
    for (strategy, refused, longest) in [("fair", 1.5, 20.0), ("fair-shared", 0.2, 8.0)] {
        for seed in 1..=4 {
            let run = run(&shop, &Strategy::named(strategy).unwrap(), seed).unwrap();
            assert!(
                run.util_pct >= 99.0 && run.max_wait <= longest,
                "{strategy}: {run:?}"
            );
            assert!(run.retry_pct <= refused, "{strategy}: {run:?}");
        }
    }
}

/// Seven hours of every fault: clients start and stop, the limit changes, headers are wrong, other
/// users take their part.
#[test]
fn seven_hours_of_everything_at_once() {
    let torture = &scenario("torture");
    let fair = run(torture, &Strategy::named("fair").unwrap(), 1).unwrap();
    assert!(
        fair.retry_pct_pooled < 5.0 && fair.util_pct > 80.0,
        "{fair:?}"
    );
}

#[test]
fn a_report_needs_nothing_else_and_shows_every_run() {
    let scenarios: Vec<_> = ["n2", "seed-clear", "light"]
        .map(|name| (name.to_owned(), scenario(name)))
        .into();
    let strategies = ["fair", "blog-remaining"].map(|name| Strategy::named(name).unwrap());
    let runs = sweep(&scenarios, &strategies, 1..=2, || {}).unwrap();
    let page = report(&scenarios, &strategies, &runs, 1).unwrap();
    assert_eq!(page.matches("<svg").count(), 3 * 2 * 4);
    assert_eq!(page.matches("</svg>").count(), 3 * 2 * 4);
    for outside in [
        "NaN", "inf\"", "http://", "https://", "<script ", "<link", "src=",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn a_picture_stands_alone() {
    let n2 = scenario("n2");
    let strategies = ["fair", "blog-remaining"].map(|name| Strategy::named(name).unwrap());
    let runs = sweep(&[("n2".into(), n2.clone())], &strategies, 1..=2, || {}).unwrap();
    let picture = picture("n2", &n2, &strategies, &runs, 1).unwrap();
    assert!(picture.starts_with(r#"<svg xmlns="http://www.w3.org/2000/svg" "#));
    assert_eq!(picture.matches("<svg").count(), 1 + 2 * 3);
    assert_eq!(picture.matches("</svg>").count(), 1 + 2 * 3);
    assert!(picture.contains("blog-remaining") && !picture.contains("NaN"));
}

#[test]
fn invalid_scenario_file_names_the_field() {
    let error = Scenarios::read(r#"{"mine": {"fleet": [{"procs": 1, "taks": 5}]}}"#)
        .unwrap_err()
        .to_string();
    assert!(error.contains("mine") && error.contains("taks"), "{error}");
}

#[test]
fn store_and_quota_options_are_validated() {
    for (said, about) in [
        (r#""quota": "100 per minute""#, "quota: "),
        (r#""store": {"trip": [0.2, 0.1, 0]}"#, "store.trip"),
        (
            r#""store": {"away": [[50, 70]], "away_every": 60}"#,
            "store.away",
        ),
        (r#""store": {"lose": 5}"#, "store.lose"),
        (r#""on_store_error": "fail""#, "fallback_share"),
    ] {
        let text = format!(
            r#"{{"mine": {{
                "fleet": [{{"procs": 1, "tasks": 1}}], "server": {{"kind": "sliding", "limit": 1, "window": 1}},
                "latency": [0.1, 0.1, 0], "duration": 10, {said}
            }}}}"#
        );
        let error = Scenarios::read(&text).unwrap_err().to_string();
        assert!(error.contains("mine") && error.contains(about), "{error}");
    }
}

#[test]
fn invalid_gate_settings_name_the_cause() {
    let limit = Strategy::named("limit").unwrap();
    let error = run(&scenario("no-hint"), &limit, 1)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("limit") && error.contains("quota"),
        "{error}"
    );

    let mut scenarios: Vec<_> = ["seed-clear", "no-hint"]
        .map(|name| (name.to_owned(), scenario(name)))
        .into();
    // The first scenario runs without an error.
    scenarios[0].1.duration = 10.0;
    let error = sweep(&scenarios, &[limit], 1..=9, || {})
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(r#"scenario "no-hint": strategy "limit": "none" is not a quota"#),
        "{error}"
    );
}

#[tokio::test]
async fn gates_may_be_tried_from_within_a_runtime() {
    let mut scenario = scenario("limit-4");
    scenario.duration = 5.0;
    assert!(
        run(&scenario, &Strategy::named("limit").unwrap(), 1)
            .unwrap()
            .util_pct
            > 90.0
    );
}

#[test]
fn group_may_name_only_an_existing_strategy() {
    let mut scenario = scenario("with-seed-fleet");
    let fair = Strategy::named("fair").unwrap();
    assert!(run(&scenario, &fair, 1).unwrap().share.is_some());
    scenario.fleet[1].strategy = Some("magic".into());
    let error = run(&scenario, &fair, 1).unwrap_err().to_string();
    assert!(
        error.starts_with(r#"there is no strategy "magic"; there are fair, "#),
        "{error}"
    );
}
