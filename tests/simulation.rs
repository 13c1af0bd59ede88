//! The laboratory: it agrees with what was published, and the recommended pace reaches what it promises.

use tollgate::sim::{Metrics, Scenario, Scenarios, Strategy, picture, report, run, sweep, trace};

fn scenario(name: &str) -> Scenario {
    let all = Scenarios::public().0;
    all.into_iter().find(|(other, _)| other == name).expect("it is in the public set").1
}

/// The means over `seeds` runs.
fn mean(name: &str, strategy: &str, seeds: u64) -> Metrics {
    let (scenario, strategy) = (scenario(name), Strategy::named(strategy).unwrap());
    let runs: Vec<Metrics> = (1..=seeds).map(|seed| run(&scenario, &strategy, seed).unwrap()).collect();
    Metrics::mean_and_deviation(&runs).0
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let (scenario, strategy) = (scenario("churn"), Strategy::named("fair").unwrap());
    let one = run(&scenario, &strategy, 1).unwrap();
    assert_eq!(one, run(&scenario, &strategy, 1).unwrap());
    assert_eq!(one, trace(&scenario, &strategy, 1).unwrap().0);
    assert_ne!(one, run(&scenario, &strategy, 2).unwrap());
}

#[test]
fn cores_change_nothing() {
    let scenarios: Vec<_> = ["n2", "noisy"].map(|name| (name.to_owned(), scenario(name))).into();
    let strategies = ["fair", "aimd"].map(|name| Strategy::named(name).unwrap());
    let runs = sweep(&scenarios, &strategies, 3..=4, || {}).unwrap();
    assert_eq!(runs.len(), 4);
    assert_eq!((&*runs[1].scenario, &*runs[1].strategy), ("n2", "aimd"));
    assert_eq!(runs[2].runs[1], run(&scenarios[1].1, &strategies[0], 4).unwrap());
}

/// Means of few seeds, within three deviations of a single run of what was published and reproduced with the original.
#[test]
fn the_published_strategies_do_what_was_published() {
    // retry %, longest sleep, stdev, each with its deviation; clear
    let published = [
        ("blog-backoff-2", (64.8, 1.3), (1038.0, 431.0), (331.0, 68.0), 74.3),
        ("blog-backoff", (78.9, 0.8), (174.0, 82.0), (262.0, 88.0), 74.3),
        ("blog-gradual", (47.4, 2.6), (201.0, 30.0), (897.0, 71.0), 75.6),
        ("blog-proportional", (3.54, 0.63), (19.6, 4.0), (109.0, 27.0), 524.2),
        ("blog-remaining", (3.83, 0.65), (22.5, 6.3), (114.0, 28.0), 75.3),
    ];
    for (strategy, retry, sleep, stdev, clear) in published {
        let saturated = mean("seed-run", strategy, 4);
        for (value, (expected, deviation)) in
            [(saturated.retry_pct, retry), (saturated.max_sleep, sleep), (saturated.stdev, stdev)]
        {
            assert!((value - expected).abs() < 3.0 * deviation / 2.0, "{strategy}: {value}, not {expected}");
        }
        let cleared = mean("seed-clear", strategy, 1).clear.unwrap();
        assert!((cleared - clear).abs() < 0.01 * clear, "{strategy}: {cleared} s, not {clear} s");
    }
}

#[test]
fn the_recommended_pace_is_fair_patient_and_next_to_never_refused() {
    let fair = mean("seed-run", "fair", 4);
    assert!(fair.retry_pct <= 0.15 && fair.max_wait <= 15.0 && fair.p99_wait <= 10.0, "{fair:?}");
    assert!(fair.stdev <= 1.5 && fair.jain >= 0.998 && fair.util_pct >= 99.2, "{fair:?}");
    assert!(mean("seed-clear", "fair", 2).clear.unwrap() <= 75.0);
    let fair = mean("n50-full", "fair", 2);
    assert!(fair.retry_pct <= 0.05 && fair.max_wait <= 58.3 && fair.stdev <= 3.55, "{fair:?}");
    let stuck = mean("stuck-high", "fair", 4);
    assert!(stuck.retry_pct <= 4.68, "a Remaining that lies costs no more than a factor: {stuck:?}");
}

/// Seven hours of everything that can go wrong: clients come and go, the limit moves, headers lie, strangers take their part.
#[test]
fn seven_hours_of_everything_at_once() {
    let text = r#"{"torture": {
        "fleet": [
            {"procs": 5, "tasks": 4},
            {"procs": 20, "tasks": 1, "join": 3600, "leave": 14400, "stagger": 60},
            {"procs": 10, "tasks": 2, "duty": [600, 900], "think": 2, "latency": [0.5, 3, 1]}
        ],
        "server": {"kind": "bucket", "cap": 4500, "refill": 1.25, "start": 4500, "changes": [
            [3000, {"refill": 5}], [7000, {"tokens": 0, "refill": 0.2}], [12000, {"cap": 100, "refill": 10}],
            [18000, {"cap": 4500, "refill": 1.25}]
        ]},
        "headers": {"remaining": true, "lie": "garbage", "p": 0.3, "retry_after": true},
        "background": [{"rate": 0.3, "from": 1000, "to": 20000}],
        "latency": [0.13, 0.2, 0.05], "hint": [4500, 3600], "duration": 25200
    }}"#;
    let torture = &Scenarios::read(text).unwrap().0[0].1;
    let fair = run(torture, &Strategy::named("fair").unwrap(), 1).unwrap();
    assert!(fair.retry_pct_pooled < 5.0 && fair.util_pct > 80.0, "{fair:?}");
}

#[test]
fn a_report_needs_nothing_else_and_shows_every_run() {
    let scenarios: Vec<_> =
        ["n2", "seed-clear", "light"].map(|name| (name.to_owned(), scenario(name))).into();
    let strategies = ["fair", "blog-remaining"].map(|name| Strategy::named(name).unwrap());
    let runs = sweep(&scenarios, &strategies, 1..=2, || {}).unwrap();
    let page = report(&scenarios, &strategies, &runs, 1).unwrap();
    assert_eq!(page.matches("<svg").count(), 3 * 2 * 4);
    assert_eq!(page.matches("</svg>").count(), 3 * 2 * 4);
    for outside in ["NaN", "inf\"", "http://", "https://", "<script", "src="] {
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
fn a_file_with_a_mistake_says_where() {
    let error = Scenarios::read(r#"{"mine": {"fleet": [{"procs": 1, "taks": 5}]}}"#).unwrap_err().to_string();
    assert!(error.contains("mine") && error.contains("taks"), "{error}");
}

#[test]
fn a_group_may_name_a_strategy_and_only_one_that_is_there() {
    let mut scenario = scenario("with-seed-fleet");
    let fair = Strategy::named("fair").unwrap();
    assert!(run(&scenario, &fair, 1).unwrap().share.is_some());
    scenario.fleet[1].strategy = Some("magic".into());
    assert_eq!(run(&scenario, &fair, 1).unwrap_err().to_string(), r#"there is no strategy "magic""#);
}
