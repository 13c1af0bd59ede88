//! What a layer reads from a request.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use http::Extensions;

use super::response_policy::ResponsePolicy;
use super::routes::RouteTable;
use crate::cost::{Cost, RequestCost};
use crate::error::Reason;
use crate::key::{Class, Deadline, HostKey, Key, RequestInfo, RequestRef, by_host};
use crate::limiter::{Limiter, QuotaId};
use crate::quota::Quota;

/// What a layer reads from a request, and its policy for responses.
#[derive(Default)]
pub(super) struct Extractors {
    key: KeyOf,
    /// Whether this is a limit besides the first. The key in the extensions of a request is that of the
    /// first limit.
    is_further: bool,
    pub(super) cost: Option<Extractor<Cost>>,
    /// Returns the quota of the key of a request, or `None` for that of the builder.
    pub(super) quota: Option<Extractor<Option<Quota>>>,
    pub(super) deadline: Option<Extractor<Option<Instant>>>,
    /// Returns the class of a request, for a quota that is divided among classes.
    pub(super) class: Option<Extractor<Option<&'static str>>>,
    /// The routes that have a key and a quota of their own. Requests without a route count under the
    /// first limit of the layer as usual, and not at all under a further limit.
    pub(super) routes: Option<RouteTable>,
    pub(super) policy: ResponsePolicy,
    /// Returns the kind of a request, in place of [`kind_of`].
    pub(super) kind: Option<Extractor<Option<Key>>>,
    /// Names the key of a request in the stats.
    pub(super) key_name: Option<Extractor<Option<String>>>,
}

/// How the key of a request is found.
#[derive(Default)]
enum KeyOf {
    /// All requests have one key.
    #[default]
    All,
    /// [`by_host`]. The layer reads the host itself, which saves a call through a `dyn`, and hashes it
    /// once for all limits.
    Host,
    Function(Extractor<Option<Key>>),
    /// That of the first limit of the layer, without its routes.
    OfLayer,
}

/// A closure that reads one value from a request. Limits of one layer share it.
type Extractor<T> = Arc<dyn Fn(&RequestRef<'_>) -> T + Send + Sync>;

impl Extractors {
    pub(super) fn set_key<F, K>(&mut self, key: F)
    where
        F: Fn(&RequestRef<'_>) -> K + Send + Sync + 'static,
        K: Into<Option<Key>>,
    {
        self.key = if key.type_id() == by_host.type_id() {
            KeyOf::Host
        } else {
            KeyOf::Function(Arc::new(move |request| key(request).into()))
        };
    }

    /// Sets the key function of a limit besides the first.
    pub(super) fn set_own_key<F, K>(&mut self, key: F)
    where
        F: Fn(&RequestRef<'_>) -> K + Send + Sync + 'static,
        K: Into<Option<Key>>,
    {
        self.set_key(key);
        self.is_further = true;
    }

    /// Makes this the limit of `routes`, besides the first limit of the layer.
    pub(super) fn set_own_routes(&mut self, routes: RouteTable) {
        self.key = KeyOf::OfLayer;
        self.is_further = true;
        self.routes = Some(routes);
    }

    /// Returns the number that `limiter` has for the quota of the key of `request`: that of the route that was read, or
    /// else the one that the request states.
    ///
    /// # Errors
    ///
    /// [`Reason::InvalidQuota`] if the key cannot have that quota.
    #[inline]
    pub(super) fn read_quota<R: RequestInfo>(
        &self,
        read: &Reading,
        request: &R,
        limiter: &Limiter,
    ) -> Result<QuotaId, Reason> {
        if let Some(known) = read.quota {
            return Ok(known);
        }
        let extensions = request
            .extensions()
            .filter(|extensions| !extensions.is_empty() && !self.is_further);
        let quota = match (extensions.and_then(Extensions::get::<Quota>), &self.quota) {
            (Some(quota), _) => Some(*quota),
            (None, Some(quota_of)) => quota_of(&RequestRef::new(request)),
            (None, None) => return Ok(QuotaId::NONE),
        };
        let Some(quota) = quota else {
            return Ok(QuotaId::CONFIGURED);
        };
        let id = limiter.quota_id(&quota);
        id.map_err(|error| Reason::InvalidQuota(Arc::new(error)))
    }

    pub(super) fn read_class<R: RequestInfo>(&self, request: &R) -> Option<&'static str> {
        match (class_in_extensions(request), &self.class) {
            (Some(class), _) => Some(class),
            (None, Some(class_of)) => class_of(&RequestRef::new(request)),
            (None, None) => None,
        }
    }

    /// Reads the kind of `request`, which costs so many requests. A request of which the function knows none is of one kind
    /// with all such.
    pub(super) fn read_kind<R: RequestInfo>(&self, request: &R, cost: u32) -> Key {
        match &self.kind {
            Some(kind) => kind(&RequestRef::new(request)).unwrap_or(Key::ALL),
            None => kind_of(request, cost).and(self.read_class(request).unwrap_or_default()),
        }
    }

    /// Returns whether key and deadline are all that is read of requests without extensions, and the
    /// policy for responses is the default.
    pub(super) fn are_plain(&self) -> bool {
        self.cost.is_none()
            && self.quota.is_none()
            && self.class.is_none()
            && self.routes.is_none()
            && self.policy.is_default()
    }

    /// Returns whether all requests without extensions have the key [`Key::ALL`].
    #[inline]
    pub(super) fn have_one_key(&self) -> bool {
        matches!(self.key, KeyOf::All)
    }

    /// Returns whether each host has a key of its own.
    pub(super) fn are_by_host(&self) -> bool {
        matches!(self.key, KeyOf::Host)
    }

    /// Reads the key of a `request` whose extensions have none, as [`read`](Self::read) does.
    #[inline]
    pub(super) fn read_key<R: RequestInfo>(
        &self,
        request: &R,
        host: &mut HostKey<'_, R>,
        of_layer: Option<Key>,
    ) -> Option<Key> {
        match &self.key {
            KeyOf::All => Some(Key::ALL),
            KeyOf::Host => host.get(),
            KeyOf::Function(key_of) => key_of(&RequestRef::new(request)),
            KeyOf::OfLayer => of_layer,
        }
    }

    /// Reads the deadline of a `request` whose extensions have none.
    #[inline]
    pub(super) fn read_deadline<R: RequestInfo>(&self, request: &R) -> Option<Instant> {
        match &self.deadline {
            Some(deadline_of) => deadline_of(&RequestRef::new(request)),
            None => None,
        }
    }

    /// Reads key, cost and deadline of `request`. Returns `None` if the key function finds no key.
    ///
    /// Values in the extensions of the request take precedence over the functions. `host` is that of
    /// the request, and `of_layer` the key that the first limit of the layer has for it.
    // Inlined, and generic: a request that no function reads is never seen through a `dyn`.
    #[inline]
    pub(super) fn read<R: RequestInfo>(
        &self,
        request: &R,
        host: &mut HostKey<'_, R>,
        of_layer: Option<Key>,
    ) -> Option<Reading> {
        let extensions = request
            .extensions()
            .filter(|extensions| !extensions.is_empty());
        let own = extensions.filter(|_| !self.is_further);
        let key = match own.and_then(Extensions::get::<Key>) {
            Some(key) => *key,
            None => self.read_key(request, host, of_layer)?,
        };
        let without_routes = key;
        let route = match &self.routes {
            Some(routes) => routes.find(request, key),
            None => None,
        };
        let (key, quota) = match route {
            Some((key, quota)) => (key, Some(quota)),
            None if matches!(self.key, KeyOf::OfLayer) => return None,
            None => (key, None),
        };
        let cost = match (extensions.and_then(Extensions::get::<Cost>), &self.cost) {
            (Some(cost), _) => RequestCost::from(*cost),
            (None, Some(cost_of)) => RequestCost::from(cost_of(&RequestRef::new(request))),
            (None, None) => RequestCost::Requests(1),
        };
        let deadline = match extensions.and_then(Extensions::get::<Deadline>) {
            Some(Deadline(deadline)) => Some(*deadline),
            None => self.read_deadline(request),
        };
        Some(Reading {
            key,
            without_routes,
            quota,
            cost,
            deadline,
        })
    }
}

/// Returns the kind of a request that costs so many requests: its method, the first segment of its path that names something,
/// and its cost as a power of two.
///
/// Not the whole path: `/users/17` and `/users/18` are refused together.
fn kind_of<R: RequestInfo>(request: &R, cost: u32) -> Key {
    let mut segments = request.path().split('/');
    let segment = segments.find(|segment| names_something(segment));
    Key::new(request.method().as_str())
        .and(segment.unwrap_or_default())
        .and(cost.checked_ilog2().unwrap_or_default().to_le_bytes())
}

/// Returns whether a segment of a path names more than the version of an API.
fn names_something(segment: &str) -> bool {
    let version = segment.strip_prefix(['v', 'V']).unwrap_or_default();
    let is_version = version.starts_with(|first: char| first.is_ascii_digit());
    !segment.is_empty() && segment != "api" && !is_version
}

pub(super) fn class_in_extensions<R: RequestInfo>(request: &R) -> Option<&'static str> {
    let Class(class) = request.extensions()?.get::<Class>()?;
    Some(class)
}

/// What a layer has read from a request.
pub(super) struct Reading {
    pub(super) key: Key,
    /// The key that the request would have without routes.
    pub(super) without_routes: Key,
    /// The quota of its key, once that is known: that of the route, if the request takes one.
    pub(super) quota: Option<QuotaId>,
    pub(super) cost: RequestCost,
    pub(super) deadline: Option<Instant>,
}

impl fmt::Debug for Extractors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extractors")
            .field("key", &!matches!(self.key, KeyOf::All))
            .field("cost", &self.cost.is_some())
            .field("quota", &self.quota.is_some())
            .field("deadline", &self.deadline.is_some())
            .field("class", &self.class.is_some())
            .field("routes", &self.routes.is_some())
            .field("key_name", &self.key_name.is_some())
            .field("error_on_upstream_limit", &self.policy.error_on_limit())
            .field("dialect", &self.policy.dialect().is_some())
            .finish()
    }
}
