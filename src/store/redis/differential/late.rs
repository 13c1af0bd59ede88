//! Late calls, clocks that are set, and processes that were suspended: no window exceeds its limit
//! because of them.

use super::*;

fn terms() -> Arc<LimitSpec> {
    Arc::new(LimitSpec::new(
        Quota::new(50, Duration::from_secs(2)),
        millis(10),
        millis(2),
    ))
}

fn count(lease: &Lease) -> u32 {
    lease.grants.iter().map(|grant| grant.count).sum()
}

/// Requests `count` permits as a process with this session.
fn ask(world: &mut World, spec: &Arc<LimitSpec>, count: u32, memory: ClientSession) -> Lease {
    let demands = [Demand::new(1, count)];
    let call = codec::lease(
        &LeaseRequest {
            session: memory,
            ..lease_request(spec, &demands)
        },
        7,
    );
    codec::read_lease(&world.run_by_memory(call)).unwrap()
}

fn known(first: &Lease, since: Duration) -> ClientSession {
    let &Lease {
        incarnation,
        writes,
        now: seen,
        ..
    } = first;
    ClientSession {
        incarnation,
        writes,
        seen,
        since,
        trip: millis(1),
        ..ClientSession::default()
    }
}

#[test]
fn late_calls_age_no_permit_of_others() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = terms();
    let first = ask(&mut world, &spec, 1, ClientSession::default());
    // The server was suspended: it executes at 3 s a call that was sent at 0.1 s. The caller has
    // given up.
    world.now = START + 3_000_000;
    let demands = [Demand::new(1, 1)];
    let late = codec::lease(
        &LeaseRequest {
            session: known(&first, millis(100)),
            ..lease_request(&spec, &demands)
        },
        7,
    );
    assert_eq!(
        codec::read_unsure(&world.run(&late)),
        Some(START + 3_000_000)
    );
    // Then a process without a session calls, and 40 ms later a process that knows the time.
    world.now = START + 3_010_000;
    let newcomer = count(&ask(&mut world, &spec, 50, ClientSession::default()));
    world.now = START + 3_050_000;
    let old = count(&ask(&mut world, &spec, 50, known(&first, millis(3050))));
    assert_eq!((newcomer, old), (50, 0), "granted within 40 ms");
}

/// A call that is sent again with the server's clock is late once more.
#[test]
fn late_calls_that_ask_again_age_no_permit() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = terms();
    let first = ask(&mut world, &spec, 50, ClientSession::default());
    let demands = [Demand::new(1, 1)];
    let mut call = codec::lease(
        &LeaseRequest {
            session: known(&first, millis(100)),
            ..lease_request(&spec, &demands)
        },
        7,
    );
    world.now = START + 1_500_000;
    let server_seen = codec::read_unsure(&world.run(&call)).expect("it is late");
    codec::set_server_time(&mut call, Duration::ZERO, server_seen);
    world.now = START + 1_900_000;
    assert!(
        codec::read_unsure(&world.run(&call)).is_some(),
        "0.4 s later than the call states"
    );
}

#[test]
fn server_clocks_set_forward_grant_nothing_twice() {
    let server = RedisServer::start().expect("a server of our own");
    for step in [600_000, 3_000_000, 86_400_000_000] {
        let mut world = World::new(&server);
        world.calls = step;
        world.begin();
        let spec = terms();
        let first = ask(&mut world, &spec, 50, ClientSession::default());
        world.now = START + step as Micros + 100_000;
        let lease = ask(&mut world, &spec, 50, known(&first, millis(100)));
        assert_eq!(
            (count(&lease), lease.now),
            (0, START + 100_000),
            "the clock was set forward by {step} us"
        );
    }
}

/// A process that was suspended remembers an old time. The state was written later, so its time
/// applies.
#[test]
fn processes_that_slept_turn_no_time_back() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = terms();
    let first = ask(&mut world, &spec, 1, ClientSession::default());
    world.now = START + 10_000_000;
    assert_eq!(
        count(&ask(&mut world, &spec, 50, known(&first, millis(10_000)))),
        50
    );
    world.now = START + 11_000_000;
    let slept = ask(&mut world, &spec, 50, known(&first, millis(200)));
    assert_eq!((count(&slept), slept.now), (0, START + 11_000_000));
}
