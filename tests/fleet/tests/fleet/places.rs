//! Redis in a cluster, behind Sentinels, behind TLS: a fleet that shares a limit through a
//! failover.

use std::fs;
use std::process::{Command, Stdio};

use fleet::{Fleet, Options};
use redis_server::{RedisCluster, Watched, free_port};

use super::*;

fn options(store: String, upstream: &Upstream, span: Duration) -> Options {
    Options {
        quota: "50/1s".into(),
        store,
        url: upstream.url(),
        tasks: 16,
        span,
        ..Options::default()
    }
}

/// Checks that the limit is kept, and that calls flow in the last 2.5 seconds.
fn check(what: &str, options: &Options, upstream: &Upstream, reports: &[Report], start: Instant) {
    let log = upstream.log();
    println!(
        "{what}: {:?} calls in each second, none for {:.1?} at most",
        per_second(&log),
        longest_silence(&log)
    );
    assert_all_ended(reports);
    assert_never_over(&log, &options.quota.parse().unwrap());
    let last = between(&log, start + options.span - ms(2500), start + options.span);
    assert!(last > 0, "no calls in the last two and a half seconds");
    figure(
        last >= 75,
        &format!("{last} calls in the last two and a half seconds"),
    );
}

#[test]
fn cluster_failover_and_a_moved_key_keep_the_limit() {
    let _turn = turn_beside_others();
    let mut cluster = RedisCluster::start().unwrap();
    let upstream = Upstream::open();
    let options = options(
        format!("cluster {}", cluster.urls().join(" ")),
        &upstream,
        ms(13_000),
    );
    let mut fleet = Fleet::start(WORKER, 4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(1500));
    let key = (0..6).find_map(|number| {
        let keys: Vec<String> = cluster.node(number).command(&["KEYS", "tollgate:*"]);
        keys.into_iter().next()
    });
    let slot = cluster.slot(&key.expect("the limit has a key"));
    let new = cluster.move_slot(slot, ms(300));
    wait_until(start, ms(4500));
    cluster.node(new).kill();
    let reports = fleet.finish();
    check(
        "a cluster, the key moved at 1.5 s, its server killed at 4.5 s",
        &options,
        &upstream,
        &reports,
        start,
    );
}

#[test]
fn sentinels_replace_the_master_and_the_limit_holds() {
    let _turn = turn_beside_others();
    let mut watched = Watched::start().unwrap();
    let upstream = Upstream::open();
    let store = format!(
        "sentinel redis://{}/ {}",
        Watched::NAME,
        watched.urls().join(" ")
    );
    let options = options(store, &upstream, ms(10_000));
    let mut fleet = Fleet::start(WORKER, 4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(2500));
    watched.servers()[0].kill();
    let reports = fleet.finish();
    check(
        "Sentinels, the master killed at 2.5 s",
        &options,
        &upstream,
        &reports,
        start,
    );
}

/// Runs openssl, which makes the certificates.
fn openssl(words: &[&str]) {
    let made = Command::new("openssl")
        .args(words)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(
        made.is_ok_and(|status| status.success()),
        "openssl {words:?}"
    );
}

#[test]
fn a_fleet_talks_to_redis_behind_tls() {
    let _turn = turn_beside_others();
    let directory = tempfile::TempDir::new().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let [ca, ca_key, cert, key, request, names] = [
        "ca.pem", "ca.key", "cert.pem", "cert.key", "request", "names",
    ]
    .map(file);
    let new = ["-newkey", "rsa:2048", "-nodes", "-days", "2"];
    let subject = |name| ["-subj", name];
    openssl(
        &[
            &["req", "-x509", "-keyout", &ca_key, "-out", &ca][..],
            &new,
            &subject("/CN=tests"),
        ]
        .concat(),
    );
    openssl(
        &[
            &["req", "-keyout", &key, "-out", &request][..],
            &new[..3],
            &subject("/CN=redis"),
        ]
        .concat(),
    );
    fs::write(
        &names,
        "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n",
    )
    .unwrap();
    let signed = [
        "x509",
        "-req",
        "-in",
        &request,
        "-CA",
        &ca,
        "-CAkey",
        &ca_key,
        "-CAcreateserial",
        "-days",
        "2",
    ];
    openssl(&[&signed[..], &["-extfile", &names, "-out", &cert]].concat());

    let port = free_port();
    let tls = [
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
    ];
    let tls = [
        &["--save", ""][..],
        &tls,
        &["--tls-ca-cert-file", &ca, "--tls-auth-clients", "no"],
    ]
    .concat();
    let redis = RedisServer::with_options(&tls).unwrap();
    let upstream = Upstream::open();
    let options = Options {
        certificate: ca,
        store_timeout: ms(2000),
        ..options(format!("rediss://127.0.0.1:{port}/"), &upstream, ms(3000))
    };
    let mut fleet = Fleet::start(WORKER, 2, &options);
    let start = Instant::now();
    fleet.go();
    let reports = fleet.finish();
    check("behind TLS", &options, &upstream, &reports, start);
    let clients: String = redis.command(&["CLIENT", "LIST"]);
    println!(
        "{} connections in the end, this one included",
        clients.lines().count()
    );
}
