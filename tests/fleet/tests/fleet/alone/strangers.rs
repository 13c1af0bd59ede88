//! A process outside the store uses half of the limit, unknown to the others.

use anyhow::ensure;
use fleet::Options;
use tollgate::Quota;

use super::*;

/// The windows that pass until the use by others is known.
const WARM_UP: usize = 3;

fn look() -> anyhow::Result<()> {
    let (quota, half) = ("40/2s", "20/2s");
    let rule = rules(&quota.parse::<Quota>().unwrap())[0];
    // The margin makes the stranger's windows longer, so they drift: the limit has room for that.
    let site = Site {
        upstream: Upstream::start(rule).stating(),
        ..Site::new()
    };
    // The windows that pass in all.
    let windows = usual_or(6, 10);
    let span = windows * rule.window;
    let options = Options {
        quota: quota.into(),
        tasks: 15,
        span,
        // The upstream has no slack: it refuses requests that a busy machine delays.
        slack: ms(50),
        who: "ours ".into(),
        ..Options::default()
    };
    let stranger = Options {
        quota: half.into(),
        store: fleet::MEMORY.into(),
        url: site.upstream.url(),
        who: "stranger ".into(),
        tasks: 25,
        ..options.clone()
    };
    let mut stranger = Fleet::start(WORKER, 1, &stranger);
    let mut fleet = site.start(4, &options);
    stranger.go();
    fleet.go();
    let (reports, _) = (fleet.finish(), stranger.finish());
    assert_all_ended(&reports);
    let log = site.upstream.log();
    let from = log[0].at + rule.window * WARM_UP as u32;
    let log = part(&log, from, log[0].at + span);
    let is_ours = |arrival: &&upstream::Arrival| {
        arrival
            .who
            .as_ref()
            .is_some_and(|who| who.starts_with("ours"))
    };
    let count = |ours: bool, accepted: bool| {
        log.iter()
            .filter(|arrival| is_ours(arrival) == ours && arrival.accepted == accepted)
            .count()
    };
    let (ours, refused, theirs) = (count(true, true), count(true, false), count(false, true));
    let allowed = rule.count as usize * (windows as usize - WARM_UP);
    println!(
        "{quota} beside a stranger of {half}: of {allowed} ours {ours}, refused {refused}, theirs {theirs}; of theirs \
         refused {}",
        count(false, false)
    );
    ensure!(
        ours + theirs >= allowed * 85 / 100,
        "{ours} and {theirs} of {allowed} are used"
    );
    ensure!(refused * 10 <= ours, "{refused} refused beside {ours}");
    Ok(())
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn strangers_are_left_what_they_use() {
        // A busy machine delays requests on the way, and an upstream without slack then refuses some of
        // them.
        let _turn = turn();
        once_in_three(look);
    }
}
