//! A table of routes with a quota for each, and which of them a request takes.
//!
//! | file | what it has |
//! |---|---|
//! | `pattern` | [`Pattern`]: a method and a path, as the user wrote them |
//! | `router` | [`Router`]: which pattern a method and a path match |
//! | `mod` | [`Routes`]: the table, as the user makes it |
//! | `table` | [`RouteTable`]: the table as a limit of a layer has it |

mod pattern;
#[cfg(test)]
mod properties;
mod router;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use http::Method;

use crate::config_error::ConfigError;
use crate::key::Key;
use crate::quota::{Quota, Slacks};
use pattern::{Pattern, error};
use router::Router;
pub(super) use table::RouteTable;

/// A table of routes, each with a quota of its own, for
/// [`RateLimitBuilder::routes`](crate::RateLimitBuilder::routes).
///
/// ```
/// use tollgate::{Quota, RateLimitLayer, Routes};
///
/// // 5000 requests per hour in all. Of these, at most 30 per minute search, and each channel gets at
/// // most five messages per 5 s.
/// let routes = Routes::new([
///     ("GET /search/*", Quota::per_minute(30)),
///     ("POST /channels/{channel}/messages", "5/5s".parse()?),
/// ])?;
/// let limit = RateLimitLayer::builder(Quota::per_hour(5000)).routes(routes).build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
///
/// # Patterns
///
/// A pattern is a path that begins with `/`, and before it, if only some methods are meant, a method
/// or several with `|` between them: `/users`, `GET /users`, `PUT|PATCH /users/{user}`. Each segment
/// of the path is one of these:
///
/// | segment | matches |
/// |---|---|
/// | text | the same text |
/// | `{name}` | any one segment. Each value has a count of its own |
/// | `*` | any one segment. All values share one count |
/// | `*` at the end | one segment or more: the rest of the path |
///
/// Paths are compared as they are sent: letters in their case, percent-encoding as written, `/users/`
/// is not `/users`. No segment but text matches an empty one. Host and query do not matter. To tell
/// hosts apart, use [`key(by_host)`](crate::by_host): the key of a route is made from the
/// [key](crate::RateLimitBuilder::key) of the request.
///
/// # Which route a request takes
///
/// A request takes one route, or none. If several patterns match, the segments decide, from left to
/// right: text goes before `{name}` and `*`, and these go before the rest. Of two patterns with the
/// same path, the one that names the method goes before the one without a method.
///
/// [`find`](Routes::find) returns the route of a method and path, for your tests.
#[derive(Clone)]
pub struct Routes {
    table: Arc<Table>,
    name: &'static str,
    is_instead: bool,
}

/// The routes, and what finds them.
struct Table {
    rows: Vec<RouteRow>,
    router: Router,
}

struct RouteRow {
    pattern: Pattern,
    quota: Quota,
}

impl Routes {
    /// The most routes that a table may have.
    pub(crate) const MOST: usize = 1000;

    /// The name of a table that has no other.
    const DEFAULT_NAME: &'static str = "route";

    /// Makes a table of `routes`, pairs of a [pattern](Routes#patterns) and its quota. Their order
    /// does not matter.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first pattern that is wrong, or that matches the same requests
    /// as another one, and what to change, or that there are more than 1000.
    /// [`build`](crate::RateLimitBuilder::build) checks the quotas.
    pub fn new<P: AsRef<str>>(
        routes: impl IntoIterator<Item = (P, Quota)>,
    ) -> Result<Self, ConfigError> {
        let routes = routes.into_iter().map(|(pattern, quota)| {
            let pattern = Pattern::parse(pattern.as_ref())?;
            Ok(RouteRow { pattern, quota })
        });
        let rows: Vec<RouteRow> = routes.collect::<Result<_, ConfigError>>()?;
        ConfigError::unless(
            rows.len() <= Routes::MOST,
            "routes",
            format_args!("{} routes", rows.len()),
            "at most 1000 routes; with * or {name}, one pattern is enough for many paths",
        )?;
        let patterns: Vec<&Pattern> = rows.iter().map(|row| &row.pattern).collect();
        let router = Router::new(&patterns)?;
        Ok(Routes {
            table: Arc::new(Table { rows, router }),
            name: Routes::DEFAULT_NAME,
            is_instead: false,
        })
    }

    /// Sets the name of the limit that the routes are. Default: `route`. Each limit of a layer has
    /// another name.
    ///
    /// The name stands in errors, and a refusal with this [scope](crate::Signal::scope) holds the key
    /// of the route: see [`and_per`](crate::RateLimitBuilder::and_per). Routes that apply
    /// [`instead`](Routes::instead) do not use it: they are a part of the layer's first limit.
    #[must_use]
    pub fn name(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Lets the quota of a route apply in place of the layer's own quota. Default: a request takes a
    /// permit of both.
    ///
    /// The request then counts under the key and the quota of its route, and not under those of the
    /// layer's first limit. Limits of [`and_per`](crate::RateLimitBuilder::and_per) still apply.
    ///
    /// Holds and [guards](crate::Guard) are about keys, too: a hold of the key without routes does not stop
    /// such a request. A guard counts its bad answers under the key of the route, unless
    /// [`Guard::key`](crate::Guard::key) returns one key for all.
    ///
    /// ```
    /// use tollgate::{Quota, RateLimitLayer, Routes};
    ///
    /// // The server counts searches apart: 30 per minute, and 5000 other requests per hour.
    /// let routes = Routes::new([("GET /search/*", Quota::per_minute(30))])?.instead();
    /// let limit = RateLimitLayer::builder(Quota::per_hour(5000)).routes(routes).build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    #[must_use]
    pub fn instead(mut self) -> Self {
        self.is_instead = true;
        self
    }

    /// Returns the pattern of the route that a request with this method and path takes.
    ///
    /// ```
    /// use http::Method;
    /// use tollgate::{Quota, Routes};
    ///
    /// let routes = Routes::new([
    ///     ("GET /search/*", Quota::per_minute(30)),
    ///     ("GET /search/code", Quota::per_minute(10)),
    /// ])?;
    /// let pattern = |path| routes.find(&Method::GET, path);
    /// assert_eq!(pattern("/search/code"), Some("GET /search/code"));
    /// assert_eq!(pattern("/search/issues"), Some("GET /search/*"));
    /// assert_eq!(pattern("/users"), None);
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn find(&self, method: &Method, path: &str) -> Option<&str> {
        Some(self.row(method, path)?.pattern.text())
    }

    /// Returns the key of the route that a request with this method and path takes: `key`, which is
    /// that of the request without routes, [`and`](Key::and) the pattern, and the value of each
    /// `{name}`.
    ///
    /// If the table applies [`instead`](Routes::instead), the request counts under this key. Otherwise
    /// it counts under this key `.and(name)`, as for each limit of
    /// [`and_per`](crate::RateLimitBuilder::and_per).
    pub fn key(&self, method: &Method, path: &str, key: Key) -> Option<Key> {
        Some(self.row(method, path)?.pattern.key(key, path))
    }

    fn row(&self, method: &Method, path: &str) -> Option<&RouteRow> {
        let index = self.table.router.find(method, path)?;
        Some(&self.table.rows[index])
    }
}

/// What the builder of a layer reads.
impl Routes {
    pub(super) fn limit_name(&self) -> &'static str {
        self.name
    }

    pub(super) fn is_instead(&self) -> bool {
        self.is_instead
    }

    /// Checks that each quota is in range.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first route whose quota is not.
    pub(super) fn check(&self, slacks: Slacks) -> Result<(), ConfigError> {
        self.table.rows.iter().try_for_each(|row| {
            let checked = row.quota.check(slacks);
            checked
                .map(drop)
                .map_err(|problem| error(row.pattern.text(), problem.to_string()))
        })
    }

    pub(super) fn first_quota(&self) -> Option<Quota> {
        self.table.rows.first().map(|row| row.quota)
    }
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.table.rows.iter();
        f.debug_map()
            .entries(rows.map(|row| (row.pattern.text(), row.quota)))
            .finish()
    }
}
