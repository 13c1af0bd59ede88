//! The upstream refuses one process: all processes hold for as long as the refusal states, whatever
//! happens to Redis and to the processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use fleet::{Arrivals, Options, Report};
use http::Response;
use upstream::{Arrival, refusal};

use super::*;

/// How long the upstream accepts calls before it refuses them.
const CALM: Duration = Duration::from_secs(2);

/// An upstream that refuses all calls for `span`, from the first call after `CALM` on.
struct Anger {
    site: Site,
    span: Duration,
    first: Arc<OnceLock<Instant>>,
}

/// How a refusal states its end.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// `Retry-After` in seconds.
    Seconds,
    /// `Retry-After` as a date, by the clock of the upstream.
    Date,
    /// As GitHub: a 403 with `x-ratelimit-remaining: 0` and a Unix time.
    Reset,
    /// `Retry-After-Ms`, as OpenAI and others.
    Millis,
}

impl Form {
    /// Returns a refusal that ends at `end` (`left` from now) or up to a second later.
    fn says(self, end: SystemTime, left: Duration) -> Response<String> {
        let whole = end.duration_since(UNIX_EPOCH).unwrap().as_secs() + 1;
        let refused = |status: u16| Response::builder().status(status);
        let response = match self {
            Form::Seconds => return refusal(left.as_secs_f64().ceil() as u64),
            Form::Date => {
                let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(whole));
                refused(429).header("retry-after", date)
            }
            Form::Reset => refused(403)
                .header("x-ratelimit-remaining", 0)
                .header("x-ratelimit-reset", whole),
            Form::Millis => refused(429).header("retry-after-ms", left.as_millis() as u64 + 1),
        };
        response.body("too many\n".to_owned()).unwrap()
    }
}

impl Anger {
    fn of(span: Duration) -> Anger {
        Anger::in_form(Form::Seconds, span)
    }

    fn in_form(form: Form, span: Duration) -> Anger {
        let (first, start) = (Arc::new(OnceLock::new()), Instant::now());
        let script = {
            let first = first.clone();
            move |_| {
                let now = Instant::now();
                if now < start + CALM {
                    return None;
                }
                let end = *first.get_or_init(|| now) + span;
                (now < end).then(|| form.says(SystemTime::now() + (end - now), end - now))
            }
        };
        let site = Site {
            upstream: Upstream::open().script(script),
            ..Site::new()
        };
        Anger { site, span, first }
    }

    /// Waits for the first refusal, and returns its moment.
    fn begin(&self) -> Instant {
        let start = Instant::now();
        while self.first.get().is_none() {
            assert!(start.elapsed() < 5 * CALM, "a process calls");
            sleep(ms(1));
        }
        self.first.get().copied().expect("as above")
    }

    /// Returns the calls that were sent while the upstream refused.
    fn sent(&self) -> Vec<Arrival> {
        let from = self.begin();
        let log = self.site.upstream.log();
        let within = |arrival: &&Arrival| {
            arrival
                .sent
                .is_some_and(|sent| (from..from + self.span).contains(&sent))
        };
        log.iter().filter(within).cloned().collect()
    }
}

/// Checks that a process sends nothing from its first refusal until the end of the hold. Both
/// moments are taken by the process's own clock, so a slow machine cannot fail this check. The gate
/// reads the refusal, and starts the hold, a moment before the caller notes it.
fn assert_each_keeps_its_own(reports: &[Report], hold: Duration) {
    let hold = u64::try_from((hold - ms(100)).as_nanos()).unwrap();
    for (number, report) in reports.iter().enumerate() {
        let Some(first) = report
            .events
            .iter()
            .filter_map(|event| event.refused_at())
            .min()
        else {
            continue;
        };
        let left = report
            .events
            .iter()
            .filter(|event| event.outcome == fleet::Outcome::Granted);
        let early: Vec<_> = left
            .filter(|event| (first + 1..first + hold).contains(&event.ended))
            .collect();
        assert!(
            early.is_empty(),
            "process {number}, refused at {first}, still sent {early:?}"
        );
    }
}

fn check(quota: &str, processes: usize, tasks: usize) {
    check_form(Form::Seconds, quota, processes, tasks);
}

fn check_form(form: Form, quota: &str, processes: usize, tasks: usize) {
    let _turn = turn_beside_others();
    let hold = Duration::from_secs(2);
    let anger = Anger::in_form(form, hold);
    let options = Options {
        quota: quota.into(),
        tasks,
        span: ms(8000),
        ..Options::default()
    };
    let mut fleet = anger.site.start(processes, &options);
    fleet.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let (log, quota) = (anger.site.upstream.log(), quota.parse().unwrap());
    let (first, sent) = (anger.begin(), anger.sent());
    let who = log
        .iter()
        .find(|arrival| !arrival.accepted)
        .and_then(|arrival| arrival.who.clone());
    let others = sent.iter().filter(|arrival| arrival.who != who);
    let others: Vec<_> = others
        .filter_map(|arrival| Some(arrival.sent? - first))
        .collect();
    let refused: Vec<_> = log.iter().filter(|arrival| !arrival.accepted).collect();
    let mut saw: Vec<_> = refused.iter().map(|arrival| arrival.who.clone()).collect();
    saw.sort();
    saw.dedup();
    let end = first + hold;
    let after = part(&log, end, end + ms(60_000));
    let rule = rules(&quota)[0];
    let resumed = after.first().map(|arrival| arrival.at - end);
    // Calls of the next window may arrive early by the jitter.
    let shortest = rule.window.saturating_sub(log.jitter());
    let herd = after
        .first()
        .map_or(0, |first| between(&after, first.at, first.at + shortest));
    println!(
        "{quota}, {processes} processes, {form:?}: {} calls refused, of {} processes; after the first, others sent {}, the last \
         {:.1?} after it; resumed {:.1?} after the end with {herd} in the first window; jitter {:.1?}",
        refused.len(),
        saw.len(),
        others.len(),
        others.iter().max().copied().unwrap_or_default(),
        resumed.unwrap_or_default(),
        log.jitter()
    );
    // Each task of the other processes may have one call that was released before. Its response is
    // a refusal, which starts a hold in its process.
    assert!(
        others.len() <= (processes - 1) * tasks,
        "{} by others",
        others.len()
    );
    assert_each_keeps_its_own(&reports, hold);
    assert_never_over(&log, &quota);
    assert!(herd <= rule.count as usize, "{herd}");
    assert!(after.len() >= rule.count as usize, "calls flow again");
}

#[test]
fn holds_of_4_processes_begin_with_one_refusal() {
    check("100/1s", 4, 50);
}

#[test]
fn holds_begin_and_end_as_a_date_says() {
    check_form(Form::Date, "100/1s", 4, 50);
}

#[test]
fn holds_survive_a_killed_redis_when_calls_are_refused() {
    redis_is_killed_in_a_hold(false);
}

#[test]
fn holds_survive_a_killed_redis_when_calls_pass() {
    redis_is_killed_in_a_hold(true);
}

fn redis_is_killed_in_a_hold(fail_open: bool) {
    let _turn = turn_beside_others();
    let mut anger = Anger::of(Duration::from_secs(3));
    let options = Options {
        quota: "20/200ms".into(),
        tasks: 20,
        span: ms(7000),
        fail_open,
        ..Options::default()
    };
    let mut fleet = anger.site.start(4, &options);
    fleet.go();
    let first = anger.begin();
    wait_until(first, ms(1000));
    anger.site.redis.kill();
    let killed = Instant::now();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let late = anger
        .sent()
        .iter()
        .filter(|arrival| arrival.sent > Some(killed))
        .count();
    let log = anger.site.upstream.log();
    let after = between(&log, first + anger.span, first + ms(60_000));
    println!(
        "fail_open {fail_open}: {late} calls in the hold after Redis was killed, {after} after its end"
    );
    assert_each_keeps_its_own(&reports, anger.span);
    assert_eq!(late, 0, "all knew of it by then");
    assert_eq!(after > 0, fail_open, "{after} after the end");
}

#[test]
fn holds_outlast_a_redis_that_forgets_them() {
    let _turn = turn_beside_others();
    let mut anger = Anger::of(Duration::from_secs(6));
    let options = Options {
        quota: "20/200ms".into(),
        tasks: 20,
        span: ms(12_000),
        ..Options::default()
    };
    let mut fleet = anger.site.start(4, &options);
    fleet.go();
    let first = anger.begin();
    wait_until(first, ms(1000));
    anger.site.redis.restart().unwrap();
    let restarted = Instant::now();
    // By then the processes are connected again, and have published the hold.
    wait_until(restarted, ms(2500));
    let heirs = Options {
        who: "heir".into(),
        span: ms(8000),
        ..options
    };
    let mut heirs = anger.site.start(2, &heirs);
    heirs.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    assert_all_ended(&heirs.finish());
    let late = anger
        .sent()
        .iter()
        .filter(|arrival| arrival.sent > Some(restarted))
        .count();
    let log = anger.site.upstream.log();
    let after = part(&log, first + anger.span, first + ms(60_000));
    let resumed = after.first().map(|arrival| arrival.at - first - anger.span);
    println!(
        "Redis forgot: {late} calls in the rest of the hold; {} after its end, from {:.1?} on",
        after.len(),
        resumed.unwrap_or_default()
    );
    assert_each_keeps_its_own(&reports, anger.span);
    assert_eq!(late, 0);
    assert!(!after.is_empty(), "calls flow again");
}

#[test]
fn holds_are_not_prolonged_by_retries() {
    let _turn = turn_beside_others();
    let anger = Anger::of(Duration::from_secs(2));
    // Requests never wait: each task tries twenty times a second.
    let options = Options {
        quota: "100/1s".into(),
        tasks: 10,
        span: ms(7000),
        max_wait: ms(0),
        ..Options::default()
    };
    let mut fleet = anger.site.start(4, &options);
    fleet.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let first = anger.begin();
    let end = first + anger.span;
    let log = anger.site.upstream.log();
    let last = log
        .iter()
        .filter(|arrival| !arrival.accepted)
        .map(|arrival| arrival.at - first)
        .max();
    let resumed = log
        .iter()
        .filter(|arrival| arrival.at > end)
        .map(|arrival| arrival.at - end)
        .min();
    let tries = reports
        .iter()
        .map(|report| report.of(fleet::Outcome::Refused).count())
        .sum::<usize>();
    println!(
        "{tries} tries refused; the last refusal by the upstream {:.1?} after the first; resumed {:.1?} after the end",
        last.unwrap_or_default(),
        resumed.unwrap_or_default()
    );
    assert_each_keeps_its_own(&reports, anger.span);
    assert_never_over(&log, &"100/1s".parse().unwrap());
    assert!(resumed.is_some(), "the hold ends");
}

#[test]
fn holds_are_kept_by_processes_started_during_them() {
    let _turn = turn_beside_others();
    let anger = Anger::of(Duration::from_secs(4));
    let options = Options {
        quota: "20/200ms".into(),
        tasks: 20,
        span: ms(9000),
        ..Options::default()
    };
    let mut fleet = anger.site.start(4, &options);
    fleet.go();
    let first = anger.begin();
    wait_until(first, ms(500));
    // This includes the process that was refused.
    (0..4).for_each(|number| fleet.kill(number));
    let heirs = Options {
        who: "heir".into(),
        span: ms(6000),
        ..options
    };
    let mut heirs = anger.site.start(2, &heirs);
    heirs.go();
    assert_all_ended(&heirs.finish());
    drop(fleet);
    let log = anger.site.upstream.log();
    let theirs = |arrival: &&Arrival| {
        arrival
            .who
            .as_ref()
            .is_some_and(|who| who.starts_with("heir"))
    };
    let earliest = log
        .iter()
        .filter(theirs)
        .filter_map(|arrival| arrival.sent)
        .min();
    let resumed = earliest.map(|sent| sent.saturating_duration_since(first + anger.span));
    println!(
        "all killed; the first call of their successors {:.1?} after the end",
        resumed.unwrap_or_default()
    );
    assert!(
        earliest.is_some_and(|sent| sent >= first + anger.span),
        "{earliest:?}"
    );
}

/// One process sends requests that the upstream refuses always, and the others send those that it accepts.
#[test]
fn refusals_of_one_kind_hold_no_other() {
    let _turn = turn_beside_others();
    let site = Site {
        upstream: Upstream::open().refusing("/bad"),
        ..Site::new()
    };
    let good = Options {
        quota: "50/1s".into(),
        paths: vec!["/good".into()],
        arrivals: Arrivals::Every(ms(100)),
        span: ms(12_000),
        ..Options::default()
    };
    let bad = Options {
        paths: vec!["/bad".into()],
        arrivals: Arrivals::Every(ms(1000)),
        who: "bad".into(),
        ..good.clone()
    };
    let (mut good, mut bad) = (site.start(3, &good), site.start(1, &bad));
    good.go();
    bad.go();
    assert_all_ended(&good.finish());
    drop(bad.finish());
    let log = site.upstream.log();
    let served: Vec<_> = log.iter().filter(|arrival| arrival.accepted).collect();
    let gaps = served.windows(2).map(|pair| pair[1].at - pair[0].at);
    let held: Duration = gaps.filter(|gap| *gap > ms(300)).sum();
    println!(
        "{} accepted, {} of the kind refused; the others stood still for {held:.1?}",
        served.len(),
        log.iter().count() - served.len()
    );
    // If each refusal held the key, three quarters of the time.
    assert!(held < ms(5000), "{held:?}");
    figure(
        served.len() >= 340,
        "the others leave as if nothing had happened",
    );
}

/// The upstream states a wait beyond `max_hold`, and makes it longer for each early call.
#[test]
fn bans_are_probed_by_one_process_at_a_time() {
    let _turn = turn_beside_others();
    let start = Instant::now();
    let banned_until = Mutex::new(None);
    let script = move |_| {
        let now = Instant::now();
        let mut banned_until = banned_until.lock().unwrap();
        let until = match *banned_until {
            _ if now < start + CALM => return None,
            None => now + ms(6000),
            // Calls that were on their way at the first refusal are not early.
            Some(until) if until > now + ms(5700) => until,
            Some(until) if until > now => until + ms(2000),
            Some(_) => return None,
        };
        *banned_until = Some(until);
        Some(refusal((until - now).as_secs_f64().ceil() as u64))
    };
    let site = Site {
        upstream: Upstream::open().script(script),
        ..Site::new()
    };
    let options = Options {
        quota: "100/1s".into(),
        tasks: 5,
        span: ms(16_000),
        max_hold: ms(1000),
        ..Options::default()
    };
    let mut fleet = site.start(3, &options);
    fleet.go();
    assert_all_ended(&fleet.finish());
    let log = site.upstream.log();
    let first = log.iter().find(|arrival| !arrival.accepted).unwrap().at;
    let refused = log.iter().filter(|arrival| !arrival.accepted);
    let early: Vec<_> = refused
        .map(|arrival| arrival.at - first)
        .filter(|at| *at > ms(500))
        .collect();
    let after = log.iter().filter(|arrival| arrival.at > first + ms(6000));
    println!("early calls {early:.1?} after the first refusal");
    assert!(early.len() <= 2, "{early:?}");
    assert!(after.filter(|arrival| arrival.accepted).count() > 100);
}

/// What happens to the connections on which processes subscribe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ears {
    Whole,
    /// The test closes each connection as soon as it is open.
    Cut,
    /// Redis forbids subscribing and publishing.
    Forbidden,
}

/// Longer than the processes may still send that learn of the hold late.
const HOLD: Duration = ms(4500);

/// Starts a hold through the API, so that no process learns of it by its own refusal.
fn hold_by_hand(ears: Ears, quota: &str, tasks: usize) {
    let _turn = turn_beside_others();
    let site = Site::new();
    let options = Options {
        quota: quota.into(),
        tasks,
        span: ms(6500),
        ..Options::default()
    };
    let mut fleet = site.start(4, &options);
    let outsider = Outsider::new(&site.redis, quota.parse().unwrap());
    let start = Instant::now();
    fleet.go();
    let over = AtomicBool::new(false);
    let (held, reports) = std::thread::scope(|scope| {
        if ears == Ears::Forbidden {
            wait_until(start, ms(1000));
            let () = site
                .redis
                .command(&["ACL", "SETUSER", "default", "resetchannels"]);
        }
        if ears == Ears::Cut {
            scope.spawn(|| {
                wait_until(start, ms(1000));
                while !over.load(Ordering::Relaxed) {
                    let _: i64 = site.redis.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
                    sleep(ms(5));
                }
            });
        }
        wait_until(start, ms(2000));
        let held = Instant::now();
        outsider.hold_for(HOLD);
        wait_until(held, ms(4000));
        over.store(true, Ordering::Relaxed);
        (held, fleet.finish())
    });
    assert_all_ended(&reports);
    let log = site.upstream.log();
    assert_never_over(&log, &quota.parse().unwrap());
    let sent: Vec<_> = log
        .iter()
        .filter_map(|arrival| arrival.sent)
        .filter(|sent| (held..held + HOLD).contains(sent))
        .map(|sent| sent - held)
        .collect();
    let last = sent.iter().max().copied().unwrap_or_default();
    let before = between(&log, start, held);
    assert!(before > 0, "they were at work");
    println!(
        "{quota}, 4 processes, ears {ears:?}: {before} calls in 2 s before the hold, {} after it, the last after \
         {last:.1?}",
        sent.len()
    );
    // For 1.5 s the processes may use what they booked, without a store call; the rest allows for a
    // stall of the machine.
    assert!(last <= ms(3000), "{ears:?}: {last:?}");
}

#[test]
fn holds_reach_subscribed_processes() {
    hold_by_hand(Ears::Whole, "100/1s", 50);
}

#[test]
fn holds_reach_processes_with_cut_subscriptions() {
    hold_by_hand(Ears::Cut, "100/1s", 50);
}

#[test]
fn holds_reach_processes_when_pubsub_is_forbidden() {
    hold_by_hand(Ears::Forbidden, "100/1s", 50);
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn holds_of_16_processes_begin_with_one_refusal() {
        check("100/1s", 16, 12);
    }

    #[test]
    fn holds_begin_and_end_as_a_unix_time_says() {
        check_form(Form::Reset, "100/1s", 4, 50);
    }

    #[test]
    fn holds_begin_and_end_as_milliseconds_say() {
        check_form(Form::Millis, "100/1s", 4, 50);
    }

    #[test]
    fn holds_of_4_busy_processes_begin_with_one_refusal() {
        check("5/100ms", 4, 10);
    }

    #[test]
    fn holds_of_16_busy_processes_begin_with_one_refusal() {
        check("5/100ms", 16, 4);
    }

    #[test]
    fn holds_reach_busy_subscribed_processes() {
        hold_by_hand(Ears::Whole, "5/100ms", 10);
    }

    #[test]
    fn holds_reach_busy_processes_with_cut_subscriptions() {
        hold_by_hand(Ears::Cut, "5/100ms", 10);
    }

    #[test]
    fn holds_reach_busy_processes_when_pubsub_is_forbidden() {
        hold_by_hand(Ears::Forbidden, "5/100ms", 10);
    }
}
