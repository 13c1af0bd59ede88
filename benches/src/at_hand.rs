//! The cost of a permit at hand: a call through a limiter that lets it pass at once, less the same
//! call without a limiter.
//!
//! This benchmark never waits.

use std::sync::Arc;

use crate::inner::Inner;
use crate::machine::machine;
use crate::measure::{Contender, Measured, Plan, quantile, run};
use crate::peers::tollgate::{Counted, Tollgate};
use crate::peers::{governor, leaky_bucket, ratelimit, throttle_net, tollgate, tower};

/// Measures, and prints the table. If `only` is given, only the groups of that title.
pub(crate) fn report(only: Option<&str>) {
    println!("# A permit at hand\n");
    println!(
        "Nanoseconds a call spends in the limiter: `poll_ready`, `call` and one poll of the future, less the same \
         without a limiter; medians over rounds in which everybody has a turn.\n"
    );
    println!("{}\n", machine(""));

    let hosts = |hosts| {
        let title = format!("by host, {hosts}");
        Group::of_services(title, hosts, tollgate::hosts(hosts))
            .with(governor::hosts(hosts))
            .with(governor::hashed_hosts(hosts))
    };
    let constant = || {
        Group::of_services("one key", 1, tollgate::constant())
            .with(governor::constant())
            .with(ratelimit::constant())
            .with(leaky_bucket::constant())
            .with(throttle_net::constant())
    };
    let raw = || {
        Group::raw("without Tower", tollgate::raw())
            .with(governor::raw())
            .with(governor::raw_keyed())
            .with(ratelimit::raw())
            .with(leaky_bucket::raw())
            .with(throttle_net::raw())
            .with(throttle_net::raw_keyed())
    };

    println!("## One thread\n");
    let groups = vec![
        constant().with(tower::constant()),
        Group::of_services("one key, with a deadline", 1, tollgate::deadline()),
        hosts(1),
        Group::of_services("by a closure, 1", 1, tollgate::closure()),
        Group::of_services("two keys", 1, tollgate::several_keys(2)),
        Group::of_services("four keys", 1, tollgate::several_keys(4)),
        hosts(1_000),
        hosts(1_000_000),
        raw(),
        Group::raw("refused, without Tower", tollgate::refused()).with(governor::refused()),
    ];
    compare(
        only,
        groups,
        Plan {
            threads: 1,
            rounds: 2_000,
            calls: 1_000,
        },
    );

    println!("## Two threads that share the limiter\n");
    compare(
        only,
        vec![constant(), hosts(1_000), raw()],
        Plan {
            threads: 2,
            rounds: 60,
            calls: 50_000,
        },
    );
}

/// Contenders that do the same work.
struct Group {
    title: String,
    /// The call without a limiter, if the group has one.
    bare: Option<Contender>,
    /// tollgate first.
    contenders: Vec<Contender>,
    store: Arc<Counted>,
}

impl Group {
    fn of_services(title: impl Into<String>, hosts: usize, tollgate: Tollgate) -> Self {
        let bare = Contender::service("the call without a limiter", hosts, || Inner);
        Group {
            bare: Some(bare),
            ..Group::raw(title, tollgate)
        }
    }

    fn raw(title: impl Into<String>, tollgate: Tollgate) -> Self {
        let Tollgate { contender, store } = tollgate;
        Group {
            title: title.into(),
            bare: None,
            contenders: vec![contender],
            store,
        }
    }

    fn with(mut self, contender: Contender) -> Self {
        self.contenders.push(contender);
        self
    }
}

fn compare(only: Option<&str>, mut groups: Vec<Group>, plan: Plan) {
    groups.retain(|group| only.is_none_or(|only| group.title == only));
    let contenders: Vec<_> = groups
        .iter()
        .flat_map(|group| group.bare.iter().chain(&group.contenders))
        .collect();
    let warm = || groups.iter().for_each(|group| _ = group.store.take());
    let measured = run(&contenders, plan, warm);

    println!("| keys | limiter | ns | 10 % to 90 % | to tollgate | allocations |");
    println!("|---|---|--:|--:|--:|--:|");
    let mut measured = measured.iter();
    for group in &groups {
        rows(group, &mut measured);
    }
    println!();

    println!("| keys | tollgate's store calls a call |");
    println!("|---|--:|");
    // Before each batch, a tenth of it runs unmeasured to warm up.
    let calls = plan.threads * plan.rounds * (plan.calls + plan.calls / 10);
    for group in &groups {
        println!(
            "| {} | {:.6} |",
            group.title,
            group.store.take() as f64 / calls as f64
        );
    }
    println!();
}

/// Prints the rows of a group; its members are the next ones in `measured`.
fn rows<'a>(group: &Group, measured: &mut impl Iterator<Item = &'a Measured>) {
    let bare = group.bare.as_ref().and_then(|contender| {
        let bare = measured.next()?;
        row(
            &group.title,
            &contender.name,
            &bare.nanos,
            None,
            bare.allocations,
        );
        Some(&bare.nanos)
    });
    let mut tollgate = None;
    for (contender, measured) in group.contenders.iter().zip(measured) {
        let above: Vec<f64> = match bare {
            Some(bare) => measured
                .nanos
                .iter()
                .zip(bare)
                .map(|(mine, bare)| mine - bare)
                .collect(),
            None => measured.nanos.clone(),
        };
        let first = *tollgate.get_or_insert_with(|| quantile(&above, 0.5));
        row(
            &group.title,
            &contender.name,
            &above,
            Some(first),
            measured.allocations,
        );
    }
}

fn row(keys: &str, name: &str, nanos: &[f64], tollgate: Option<f64>, allocations: f64) {
    let [low, median, high] = [0.1, 0.5, 0.9].map(|share| quantile(nanos, share));
    let ratio = tollgate.map_or("".into(), |tollgate| format!("{:.2}", median / tollgate));
    println!("| {keys} | {name} | {median:.1} | {low:.1} to {high:.1} | {ratio} | {allocations} |");
}
