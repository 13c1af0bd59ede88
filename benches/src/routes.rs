//! The cost of a table of routes: which route a request takes, and a call through a layer with one.

use std::hint::black_box;
use std::time::Instant;

use http::Method;
use tollgate::{Key, Quota, RateLimitBuilder, RateLimitLayer, Routes, by_host};
use tower::Layer;

use crate::inner::Inner;
use crate::machine::machine;
use crate::measure::{Contender, Plan, quantile, run};

const ROUNDS: usize = 400;
const CALLS: u32 = 2_000;

/// The nouns of an API that has the same routes for each.
const NOUNS: [&str; 10] = [
    "repos", "gists", "users", "orgs", "teams", "issues", "projects", "packages", "runners",
    "secrets",
];

/// The routes of a noun, with it in place of `_`.
const OF_NOUN: [&str; 13] = [
    "GET /_",
    "POST /_",
    "GET /_/public",
    "GET /_/{owner}",
    "GET /_/{owner}/{name}",
    "PUT|PATCH|DELETE /_/{owner}/{name}",
    "GET /_/{owner}/{name}/comments",
    "POST /_/{owner}/{name}/comments",
    "GET /_/{owner}/{name}/comments/{comment}",
    "DELETE /_/{owner}/{name}/comments/{comment}",
    "GET /_/{owner}/{name}/contents/*",
    "PUT /_/{owner}/{name}/contents/*",
    "GET /search/_",
];

/// What is measured: requests, and the route that each takes.
const REQUESTS: [(&str, &str); 6] = [
    ("/repos", "GET /repos"),
    ("/gists/public", "GET /gists/public"),
    ("/search/issues", "GET /search/issues"),
    ("/users/octocat", "GET /users/{owner}"),
    (
        "/repos/octocat/hello-world/comments/1347",
        "GET /repos/{owner}/{name}/comments/{comment}",
    ),
    (
        "/repos/octocat/hello-world/contents/src/main.rs",
        "GET /repos/{owner}/{name}/contents/*",
    ),
];

fn patterns() -> Vec<String> {
    let nouns = NOUNS.iter();
    let of_nouns = nouns.flat_map(|noun| OF_NOUN.map(|pattern| pattern.replace('_', noun)));
    of_nouns.chain(["GET /v1/{kind}".to_owned()]).collect()
}

fn table() -> Routes {
    let routes = patterns().into_iter().map(|pattern| (pattern, PLENTY));
    Routes::new(routes).expect("the patterns make sense")
}

const PLENTY: Quota = Quota::per_day(1_000_000_000);

/// Measures, and prints both tables.
pub(crate) fn report() {
    let routes = table();
    println!(
        "# Routes\n\nA table of {} routes. {}\n",
        patterns().len(),
        machine("")
    );
    println!("## Which route a request takes, and its key\n");
    println!("Medians of {ROUNDS} rounds.\n");
    println!("| request | route | ns | with its key | allocations |\n|---|---|--:|--:|--:|");
    for (path, pattern) in REQUESTS.into_iter().chain([("/unknown/path", "none")]) {
        let find = || routes.find(&Method::GET, black_box(path));
        assert_eq!(find().unwrap_or("none"), pattern);
        let key = || routes.key(&Method::GET, black_box(path), Key::ALL);
        let allocations = allocation_counter::measure(|| _ = black_box(key())).count_total;
        let (find, key) = (nanos(find), nanos(key));
        println!("| `GET {path}` | `{pattern}` | {find:.0} | {key:.0} | {allocations} |");
    }

    println!("\n## A call through a layer, with a permit at hand\n");
    println!("Less the same call without a layer, for a request to `/v1/items`.\n");
    println!("| layer | ns | 10 % to 90 % | allocations |\n|---|--:|--:|--:|");
    let layer = |with: &dyn Fn(RateLimitBuilder) -> RateLimitBuilder| {
        let builder = RateLimitLayer::builder(PLENTY).key(by_host);
        with(builder).build().expect("the settings make sense")
    };
    let service =
        |name: &str, layer: RateLimitLayer| Contender::service(name, 1, move || layer.layer(Inner));
    let contenders = [
        Contender::service("none", 1, || Inner),
        service("by host", layer(&|builder| builder)),
        service(
            "by host, and routes in its place",
            layer(&|builder| builder.routes(table().instead())),
        ),
        service(
            "by host, and a second key by host",
            layer(&|builder| builder.and_per("second", PLENTY, by_host)),
        ),
        service(
            "by host, and routes besides",
            layer(&|builder| builder.routes(table())),
        ),
    ];
    let plan = Plan {
        threads: 1,
        rounds: 2_000,
        calls: 1_000,
    };
    let all: Vec<_> = contenders.iter().collect();
    let measured = run(&all, plan, || ());
    let bare = &measured[0].nanos;
    for (contender, measured) in contenders.iter().zip(&measured).skip(1) {
        let above = measured.nanos.iter().zip(bare);
        let above: Vec<f64> = above.map(|(mine, bare)| mine - bare).collect();
        let [low, median, high] = [0.1, 0.5, 0.9].map(|share| quantile(&above, share));
        let (name, allocations) = (&contender.name, measured.allocations);
        println!("| {name} | {median:.1} | {low:.1} to {high:.1} | {allocations} |");
    }
}

/// Returns the median time of a call, in nanoseconds.
fn nanos<T>(call: impl Fn() -> T) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| _ = black_box(call()));
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    quantile(&rounds, 0.5)
}
