//! Which route each of some requests takes, which patterns are errors, and the keys of routes.

use http::Method;

use super::Routes;
use crate::config_error::ConfigError;
use crate::key::Key;
use crate::quota::Quota;

/// A table with these patterns, and a quota that is not of interest.
fn table<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Routes, ConfigError> {
    let quota = Quota::per_second(1);
    Routes::new(patterns.into_iter().map(|pattern| (pattern, quota)))
}

/// The pattern that `request`, such as `GET /users`, takes. Empty for none.
fn taken<'a>(routes: &'a Routes, request: &'a str) -> &'a str {
    let (method, path) = request.split_once(' ').unwrap();
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    routes.find(&method, path).unwrap_or_default()
}

const PATTERNS: [&str; 28] = [
    "/",
    "/users",
    "GET /users",
    "GET /users/{user}",
    "GET /users/me",
    "PUT|PATCH|DELETE /users/{user}",
    "/users/{user}/keys",
    "/users/me/keys/",
    "GET /users/{user}/keys/{key}",
    "GET /users/*/keys/latest",
    "GET /search/*",
    "GET /search/code",
    "/search/code/*",
    "POST /search/*",
    "POST /channels/{channel}/messages",
    "DELETE /channels/{channel}/messages/{message}",
    "PUT /channels/{channel}/messages/{message}/reactions/*/me",
    "/files/*/raw/*",
    "/files/a/raw/b",
    "/files/*/meta",
    "/caf%C3%A9/{table}",
    "/UPPER/case",
    "/v1//double",
    "PROPFIND /dav/*",
    "/repos/*",
    "/repos/{owner}/{repo}/issues",
    "/repos/{owner}/*",
    "GET /repos/{a}/{b}/{c}/{d}/{e}/{f}",
];

#[test]
fn requests_take_the_most_specific_route() {
    let routes = table(PATTERNS).unwrap();
    for (request, pattern) in [
        // The root, and text.
        ("GET /", "/"),
        ("OPTIONS /", "/"),
        ("GET /users", "GET /users"),
        ("POST /users", "/users"),
        ("HEAD /users", "/users"),
        ("PURGE /users", "/users"),
        ("GET /users/", ""),
        ("GET /Users", ""),
        ("GET /user", ""),
        ("GET /userss", ""),
        ("GET /unknown", ""),
        ("GET ", ""),
        ("GET users", ""),
        ("GET *", ""),
        ("GET //", ""),
        ("GET /UPPER/case", "/UPPER/case"),
        ("GET /upper/case", ""),
        // One segment.
        ("GET /users/17", "GET /users/{user}"),
        ("GET /users/me", "GET /users/me"),
        ("GET /users/met", "GET /users/{user}"),
        ("GET /users/m", "GET /users/{user}"),
        ("GET /users/{user}", "GET /users/{user}"),
        ("GET /users/*", "GET /users/{user}"),
        ("GET /users/é", "GET /users/{user}"),
        ("GET /users/%2F", "GET /users/{user}"),
        ("PUT /users/17", "PUT|PATCH|DELETE /users/{user}"),
        ("PATCH /users/17", "PUT|PATCH|DELETE /users/{user}"),
        ("DELETE /users/me", "PUT|PATCH|DELETE /users/{user}"),
        ("POST /users/17", ""),
        ("HEAD /users/17", ""),
        // A pattern without method, below one with.
        ("GET /users/17/keys", "/users/{user}/keys"),
        ("POST /users/17/keys", "/users/{user}/keys"),
        ("GET /users/me/keys", "/users/{user}/keys"),
        ("GET /users/me/keys/", "/users/me/keys/"),
        ("GET /users/17/keys/", ""),
        ("GET /users//keys", ""),
        ("GET /users/17/keys/9", "GET /users/{user}/keys/{key}"),
        ("GET /users/me/keys/9", "GET /users/{user}/keys/{key}"),
        ("GET /users/17/keys/latest", "GET /users/*/keys/latest"),
        ("GET /users/17/keys/9/", ""),
        ("POST /users/17/keys/9", ""),
        // The rest.
        ("GET /search/issues", "GET /search/*"),
        ("GET /search/issues/", "GET /search/*"),
        ("GET /search/issues/by/age", "GET /search/*"),
        ("GET /search/code", "GET /search/code"),
        ("GET /search/codes", "GET /search/*"),
        ("GET /search/code/x", "/search/code/*"),
        ("GET /search/code/", "GET /search/*"),
        ("GET /search//", "GET /search/*"),
        ("GET /search/", ""),
        ("GET /search", ""),
        ("POST /search/code", "POST /search/*"),
        ("POST /search/code/x", "/search/code/*"),
        ("PUT /search/code", ""),
        ("PROPFIND /dav/a/b", "PROPFIND /dav/*"),
        ("GET /dav/a/b", ""),
        // The rest beside one segment.
        ("GET /repos/a", "/repos/*"),
        ("GET /repos/a/", "/repos/*"),
        ("GET /repos/a/b", "/repos/{owner}/*"),
        ("GET /repos/a/b/issues", "/repos/{owner}/{repo}/issues"),
        ("GET /repos/a/b/issues/1", "/repos/{owner}/*"),
        (
            "GET /repos/a/b/c/d/e/f",
            "GET /repos/{a}/{b}/{c}/{d}/{e}/{f}",
        ),
        ("PUT /repos/a/b/c/d/e/f", "/repos/{owner}/*"),
        ("GET /repos//b", "/repos/*"),
        // Several values, and text after them.
        (
            "POST /channels/1/messages",
            "POST /channels/{channel}/messages",
        ),
        ("POST /channels//messages", ""),
        ("GET /channels/1/messages", ""),
        (
            "DELETE /channels/1/messages/2",
            "DELETE /channels/{channel}/messages/{message}",
        ),
        (
            "PUT /channels/1/messages/2/reactions/%F0%9F%91%8D/me",
            "PUT /channels/{channel}/messages/{message}/reactions/*/me",
        ),
        ("PUT /channels/1/messages/2/reactions/x/17", ""),
        ("GET /files/a/raw/b", "/files/a/raw/b"),
        ("GET /files/a/raw/b/c", "/files/*/raw/*"),
        ("GET /files/b/raw/b", "/files/*/raw/*"),
        ("GET /files/a/meta", "/files/*/meta"),
        ("GET /files/a/raw/", ""),
        ("GET /caf%C3%A9/4", "/caf%C3%A9/{table}"),
        ("GET /caf%c3%a9/4", ""),
        ("GET /café/4", ""),
        ("GET /v1//double", "/v1//double"),
        ("GET /v1/double", ""),
    ] {
        assert_eq!(taken(&routes, request), pattern, "{request}");
    }
}

#[test]
fn each_value_of_a_name_has_a_key_of_its_own() {
    let routes = table([
        "/channels/{channel}/messages/*/reactions/{reaction}",
        "/channels/{channel}",
        "GET /search/*",
    ])
    .unwrap();
    let key_of = |path| {
        let key = |key| routes.key(&Method::GET, path, key).unwrap();
        (key(Key::ALL), key(Key::new("other")))
    };
    let pattern = "/channels/{channel}/messages/*/reactions/{reaction}";
    let by_hand = |key: Key| key.and(pattern).and("1").and("up");
    let (key, of_other) = key_of("/channels/1/messages/2/reactions/up");
    assert_eq!(key, by_hand(Key::ALL));
    assert_eq!(of_other, by_hand(Key::new("other")));
    assert_eq!(key, key_of("/channels/1/messages/3/reactions/up").0);
    assert_ne!(key, key_of("/channels/2/messages/2/reactions/up").0);
    assert_ne!(key, key_of("/channels/1/messages/2/reactions/down").0);

    assert_eq!(
        key_of("/channels/1").0,
        Key::ALL.and("/channels/{channel}").and("1")
    );
    assert_eq!(key_of("/search/code").0, Key::ALL.and("GET /search/*"));
    assert_eq!(key_of("/search/code"), key_of("/search/a/b"));
}

#[test]
fn errors_of_patterns_name_pattern_and_remedy() {
    for (pattern, problem) in [
        ("", "begins with /"),
        ("users", "begins with /"),
        ("GET", "begins with /"),
        ("GET users", "begins with /"),
        ("https://api.example.com/users", "begins with /"),
        ("api.example.com/users", "begins with /"),
        ("get /users", "a method is upper-case letters"),
        ("GET| /users", "a method is upper-case letters"),
        ("GET,PUT /users", "a method is upper-case letters"),
        (" /users", "a method is upper-case letters"),
        ("GET|PUT|GET /users", "a method is named twice"),
        ("/users/{}", "whole segments"),
        ("/users/{user", "whole segments"),
        ("/users/user}", "whole segments"),
        ("/users/{us er}", "a method is upper-case letters"),
        ("GET /users/{us er}", "whole segments"),
        ("/users/{{user}}", "whole segments"),
        ("/users/{*user}", "whole segments"),
        ("/users/{a}-{b}", "whole segments"),
        ("/users/id-{user}", "whole segments"),
        ("/users/**", "whole segments"),
        ("/users/*.png", "whole segments"),
        ("/users?active=1", "no query"),
        ("/users#top", "no fragment"),
        ("GET /users/a b", "no spaces"),
        (&"/a".repeat(65), "at most 64 segments"),
        ("GET /users\n", "no spaces"),
    ] {
        let error = table(["/", pattern]).unwrap_err().to_string();
        let found = error.strip_prefix(&format!("route {pattern:?}: "));
        let found = found.unwrap_or_else(|| panic!("{pattern:?}: {error}"));
        assert!(found.contains(problem), "{pattern:?}: {found}");
    }
    let error = table(["/users/{user}", "/users/{id}"]).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"route "/users/{id}": it matches the same requests as "/users/{user}""#
    );
}

#[test]
fn patterns_that_match_the_same_requests_are_errors() {
    for (one, other) in [
        ("/users", "/users"),
        ("/users/{a}", "/users/{b}"),
        ("/users/*/keys", "/users/{user}/keys"),
        ("GET /users", "GET /users"),
        ("GET|PUT /users", "PUT|DELETE /users"),
        ("/search/*", "/search/*"),
    ] {
        let error = table([one, other]).unwrap_err();
        let problem = format!("matches the same requests as {one:?}");
        assert!(error.to_string().contains(&problem), "{error}");
    }
    for (one, other) in [
        ("/users", "/users/"),
        ("/users", "GET /users"),
        ("GET /users", "PUT /users"),
        ("/users/{a}", "GET|PUT /users/{b}"),
        ("/users/{a}/keys", "/users/*/names"),
    ] {
        table([one, other]).unwrap();
        table([other, one]).unwrap();
    }
}

#[test]
fn a_table_has_at_most_a_thousand_routes() {
    let patterns: Vec<String> = (0..=Routes::MOST).map(|i| format!("/{i}/{{id}}")).collect();
    let routes = table(patterns[1..].iter().map(String::as_str)).unwrap();
    assert_eq!(taken(&routes, "GET /1000/7"), "/1000/{id}");
    let error = table(patterns.iter().map(String::as_str)).unwrap_err();
    assert!(error.to_string().contains("1001 routes"), "{error}");

    assert_eq!(taken(&table([]).unwrap(), "GET /"), "");
}

#[test]
fn a_lookup_allocates_nothing() {
    let routes = table(PATTERNS).unwrap();
    for (path, key) in [
        ("/users", Key::ALL),
        ("/users/17", Key::ALL),
        ("/users/me", Key::ALL),
        ("/users/me/keys/9", Key::ALL),
        ("/channels/1/messages/2", Key::ALL),
        ("/search/a/b/c", Key::ALL),
        ("/files/a/raw/b/c", Key::ALL),
        ("/repos/a/b/c/d/e/f", Key::ALL),
        ("/unknown", Key::ALL),
    ] {
        for method in [Method::GET, Method::PUT, Method::DELETE, Method::OPTIONS] {
            let info = allocation_counter::measure(|| {
                std::hint::black_box(routes.key(&method, path, key));
            });
            assert_eq!(info.count_total, 0, "{method} {path}");
        }
    }
}

#[test]
fn debug_shows_patterns() {
    let routes = table(["/users/{user}"]).unwrap();
    let shown = format!("{routes:?}");
    assert!(shown.contains("/users/{user}"), "{shown}");
}
