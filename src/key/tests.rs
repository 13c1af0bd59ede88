//! Equal names give equal keys, and no label confirms a guessed name.

use super::*;

fn get(uri: &str) -> http::Request<()> {
    http::Request::get(uri).body(()).unwrap()
}

fn host_key(request: &http::Request<()>) -> Option<Key> {
    by_host(&RequestRef::new(request))
}

#[test]
fn keys_are_equal_in_every_process_and_release() {
    // SipHash-1-3 with 128 bits and a key of zeros: other languages can make the same keys.
    assert_eq!(Key::new("search"), Key::new(b"search"));
    assert_eq!(Key::new("").high, SipHasher13::new().hash(b"").h1);
    assert_eq!(Key::new("api.example.com").high >> 32, 0x861e_d09d);
}

#[test]
fn parts_of_a_key_neither_run_together_nor_commute() {
    assert_ne!(Key::new("ab"), Key::new("a").and("b"));
    assert_ne!(Key::new("a").and("b"), Key::new("b").and("a"));
    assert_ne!(Key::new("a").and("bc"), Key::new("ab").and("c"));
}

#[test]
fn host_keys_ignore_case_port_and_final_dot() {
    let expected = host_key(&get("http://api.example.com/a"));
    for same in [
        "http://API.Example.com/b",
        "http://api.example.com:8080/",
        "http://api.example.com./",
    ] {
        assert_eq!(host_key(&get(same)), expected, "{same}");
    }
    assert_ne!(host_key(&get("http://other.example.com/")), expected);
    for host in [
        "api.example.com",
        "api.example.com:8080",
        "API.example.com.:80",
    ] {
        assert_eq!(Some(Key::host(host)), expected, "{host}");
    }
    let local = host_key(&get("http://[::1]:8080/"));
    assert_eq!(Some(Key::host("[::1]:8080")), local);
    assert_ne!(Key::host("::1"), Key::host("::2"));
}

#[test]
fn a_relative_request_takes_its_host_from_the_header() {
    let mut request = get("/users");
    assert_eq!(host_key(&request), None);
    for (value, host) in [
        ("api.example.com:443", "api.example.com"),
        ("[::1]:80", "[::1]"),
        ("a.b", "a.b"),
    ] {
        request.headers_mut().insert("host", value.parse().unwrap());
        assert_eq!(host_key(&request), Some(Key::host(host)), "{value}");
    }
}

#[test]
fn plain_label_is_the_host_only_for_host_keys() {
    let request = get("http://api.example.com/");
    let info = RequestRef::new(&request);
    let secret = Key::new("Bearer s3cr3t");
    assert_eq!(
        by_host(&info).unwrap().plain_label(Some(&info)).as_deref(),
        Some("api.example.com")
    );
    assert_eq!(secret.plain_label(Some(&info)), None);
    assert_eq!(Key::ALL.plain_label(None).as_deref(), Some("all"));
    assert!(!format!("{secret:?} {info:?}").contains("s3cr3t"));
}

#[test]
fn displayed_key_confirms_no_guess() {
    let key = Key::new("ada@example.com");
    let shown = format!("{key} {key:?}");
    for part in [
        key.high >> 32,
        key.high & 0xffff_ffff,
        key.low >> 32,
        key.low & 0xffff_ffff,
    ] {
        assert!(
            !shown.contains(&format!("{part:08x}")),
            "{shown} is a digest without a secret"
        );
    }
    assert_eq!(key.to_string().len(), 8);
    assert_eq!(key.to_string(), Key::new("ada@example.com").to_string());
    assert_ne!(key.to_string(), Key::new("bob@example.com").to_string());
    assert_ne!(
        key.digits(Key::new("one secret")),
        key.digits(Key::new("another"))
    );
}
