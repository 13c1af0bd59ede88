//! A table of routes as a limit of a layer has it.

use super::Routes;
use super::pattern::error;
use crate::config_error::ConfigError;
use crate::key::{Key, RequestInfo};
use crate::limiter::{Limiter, QuotaId};

/// The routes of one limit, with the number that the limiter gave the quota of each.
pub(in crate::layer) struct RouteTable {
    routes: Routes,
    /// In the order of the routes.
    quotas: Box<[QuotaId]>,
}

impl RouteTable {
    /// Makes the table of a limit that `limiter` keeps.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first route whose quota the limiter cannot keep.
    pub(in crate::layer) fn new(routes: Routes, limiter: &Limiter) -> Result<Self, ConfigError> {
        let rows = routes.table.rows.iter();
        let quotas = rows.map(|row| {
            let id = limiter.quota_id_of_route(&row.quota, row.pattern.text());
            id.map_err(|problem| error(row.pattern.text(), problem.to_string()))
        });
        let quotas = quotas.collect::<Result<_, _>>()?;
        Ok(RouteTable { routes, quotas })
    }

    /// Returns the key and the quota of the route that `request` takes. `key` is that of the request
    /// without routes.
    pub(in crate::layer) fn find(
        &self,
        request: &impl RequestInfo,
        key: Key,
    ) -> Option<(Key, QuotaId)> {
        let router = &self.routes.table.router;
        let index = router.find(request.method(), request.path())?;
        let pattern = &self.routes.table.rows[index].pattern;
        Some((pattern.key(key, request.path()), self.quotas[index]))
    }
}
