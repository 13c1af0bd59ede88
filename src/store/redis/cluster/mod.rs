//! The servers of a cluster. Each has a link of its own, so a server that hangs or is down affects
//! its own keys only.
//!
//! A map, which any server can send, names the primary of each slot. A call goes to the primary of
//! its slot. The map may be out of date when a link breaks, while a link is down, and after a
//! server has replied `MOVED`. Then the cluster requests it again. A call is sent a second time
//! only if the first server has replied `MOVED` or `ASK`. With this reply, the server states that
//! it did not execute the call, and which server would. A call is never sent a third time.
//!
//! ```text
//!            ┌─ slot map ─┐        ┌─> link to 10.0.0.1:6379
//!  call ──>  │ key ─> slot│ ──────>├─> link to 10.0.0.2:6379   (each with its keeper, up or down for itself)
//!            └─────▲──────┘        └─> link to 10.0.0.3:6379
//!                  └── CLUSTER SLOTS <── any server that replies
//! ```

mod hedge;
mod redirection;
mod seeds;
mod slots;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use redis::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};

use super::connection::{self, ServerRequest};
use super::endpoint::{FindServer, PubSubServer};
use super::failure::{RedisFailure, of_server};
use super::link::{LONGEST_CONNECTING, Link, Links};
use super::worker::again_after_panics;
use crate::clock;
use crate::error::{BoxError, StoreError};
use crate::events;
use crate::locks::{read, write};
use crate::rng::{Backoff, jittered};
use hedge::{first, in_turn};
use redirection::{Redirection, redirection};
pub(super) use seeds::Seeds;
pub(super) use slots::Address;
use slots::{SlotMap, slot_of};

/// After a map arrived and while all servers are well, no map is requested for this time; jittered.
/// While a cluster is resharded, many calls get the reply `MOVED`, and each of these replies
/// corrects the map.
const SPACING: Duration = Duration::from_secs(1);

/// The longest pause between two requests for the map while a server is down. So calls go to the
/// new primary at most this long after a failover.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The most links to servers that are no primaries, as `ASK` and outdated maps name them. With more, they are all
/// dropped: the next map does the same, but none may arrive.
const MOST_OTHERS: usize = 16;

/// The servers of a cluster, and the map of its slots.
pub(super) struct Cluster {
    seeds: Arc<Seeds>,
    links: Links,
    state: watch::Sender<MapState>,
    table: RwLock<SlotTable>,
    /// Whether a server did not reply in time, since the other servers were last pinged.
    silent: AtomicBool,
}

/// Whether there is a map of slots.
enum MapState {
    /// The first attempt to get one is under way.
    Unknown,
    Known,
    /// There is none, and the last attempt to get one has failed.
    Failed(StoreError),
}

/// The map of slots, and the links to servers.
struct SlotTable {
    map: SlotMap,
    nodes: HashMap<Address, ServerLink>,
}

impl SlotTable {
    fn link(&self, server: &Address) -> Option<&Arc<Link>> {
        self.nodes.get(server).map(|node| &node.link)
    }

    /// Returns whether there is a map and no server is down.
    fn is_well(&self) -> bool {
        let mut nodes = self.nodes.values();
        !self.map.is_empty() && nodes.all(|node| node.link.down().is_none())
    }

    /// Drops the links to servers that are no primaries.
    fn drop_others(&mut self) {
        let SlotTable { map, nodes } = self;
        let primaries = map.primaries();
        nodes.retain(|server, _| primaries.contains(server));
    }
}

/// A server that calls go to.
struct ServerLink {
    link: Arc<Link>,
    /// Keeps the link. It ends when this is dropped.
    _keeper: JoinSet<()>,
}

impl Cluster {
    pub(super) fn new(seeds: Arc<Seeds>, links: Links) -> Self {
        Cluster {
            seeds,
            links,
            state: watch::Sender::new(MapState::Unknown),
            table: RwLock::new(SlotTable {
                map: SlotMap::empty(),
                nodes: HashMap::new(),
            }),
            silent: AtomicBool::new(false),
        }
    }

    // ── calls ───────────────────────────────────────────────────────────────────────────────────

    /// Returns why a call about `key` would fail now, if that is known without a call.
    pub(super) fn down(&self, key: &str) -> Option<StoreError> {
        if let MapState::Failed(error) = &*self.state.borrow() {
            return Some(error.clone());
        }
        let table = read(&self.table);
        table.link(table.map.primary(slot_of(key))?)?.down()
    }

    /// Returns whether the map and the connections to all servers in use are there. `None` if none was
    /// tried.
    pub(super) fn is_up(&self) -> Option<bool> {
        match &*self.state.borrow() {
            MapState::Unknown => return None,
            MapState::Failed(_) => return Some(false),
            MapState::Known => {}
        }
        Some(read(&self.table).is_well())
    }

    /// Returns the database of all connections.
    pub(super) fn database(&self) -> i64 {
        self.seeds.settings.redis_settings().db()
    }

    /// Sends a command about `key` to the primary of its slot. If that server replies that another
    /// one has the key, it has not executed the command. The command is then sent to the other
    /// server, once.
    pub(super) async fn send(
        &self,
        key: &str,
        request: ServerRequest,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        self.known(deadline).await?;
        let slot = slot_of(key);
        let primary = {
            let table = read(&self.table);
            table.map.primary(slot).cloned()
        };
        let Some(primary) = primary else {
            self.links.broke.notify_one();
            let error = StoreError::away(format!("no server of the cluster has slot {slot}"));
            return Err(RedisFailure::down(error));
        };
        let failure = match self.send_to(&primary, request.clone(), deadline).await {
            Ok(reply) => return Ok(reply),
            Err(failure) => failure,
        };
        match redirection(&failure, &primary) {
            Some(Redirection { to, asking }) => {
                if !asking {
                    self.moved(slot, &to);
                }
                self.send_to(&to, ServerRequest { asking, ..request }, deadline)
                    .await
            }
            None => {
                // A server that does not know the host of another one replies so that it cannot be followed.
                if failure
                    .error()
                    .is_some_and(|error| error.redirect_node().is_some())
                {
                    self.links.broke.notify_one();
                }
                Err(failure)
            }
        }
    }

    /// Sends a command that any server can execute to a server that replies.
    pub(super) async fn send_any(
        self: &Arc<Self>,
        request: ServerRequest,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        let (server, _) = self.responsive(deadline).await?;
        self.send_to(&server, request, deadline).await
    }

    /// Sends a command to one server. If the server is silent, the others are checked.
    async fn send_to(
        &self,
        server: &Address,
        request: ServerRequest,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        let reply = self.link(server).send(request, deadline).await;
        if reply.as_ref().is_err_and(RedisFailure::is_silent) {
            self.silent.store(true, Ordering::Relaxed);
            self.links.broke.notify_one();
        }
        reply
    }

    /// Waits until there is a map, until `deadline` at most.
    async fn known(&self, deadline: Instant) -> Result<(), RedisFailure> {
        let mut states = self.state.subscribe();
        let tried = states.wait_for(|state| !matches!(state, MapState::Unknown));
        let state = timeout_at(deadline.into(), tried).await;
        match state.ok().and_then(Result::ok).as_deref() {
            Some(MapState::Known) => Ok(()),
            Some(MapState::Failed(error)) => Err(RedisFailure::down(error.clone())),
            Some(MapState::Unknown) | None => Err(RedisFailure::silent(self.links.store_timeout)),
        }
    }

    /// Returns the link to `server`, and makes it if there is none.
    fn link(&self, server: &Address) -> Arc<Link> {
        let table = read(&self.table);
        if let Some(link) = table.link(server) {
            return link.clone();
        }
        drop(table);
        let mut table = write(&self.table);
        let nodes = table.nodes.len();
        // To find the primaries takes long.
        if nodes >= MOST_OTHERS && nodes >= table.map.primaries().len() + MOST_OTHERS {
            table.drop_others();
        }
        let node = table.nodes.entry(server.clone()).or_insert_with(|| {
            let (seeds, address) = (self.seeds.clone(), server.clone());
            let factory = Arc::new(move || {
                let client = seeds.client(&address);
                Box::pin(async move { connection::connect(&client?).await }) as _
            });
            let link = Arc::new(Link::new(
                Some(server.to_string()),
                factory,
                self.links.clone(),
            ));
            let (mut keeper, kept) = (JoinSet::new(), link.clone());
            keeper.spawn(again_after_panics(move || kept.clone().keep()));
            ServerLink {
                link,
                _keeper: keeper,
            }
        });
        node.link.clone()
    }

    /// Finds a server that replies, without waiting long for one that does not.
    async fn responsive(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(Address, Arc<Link>), RedisFailure> {
        self.known(deadline).await?;
        let mut failure = RedisFailure::silent(self.links.store_timeout);
        let servers: Vec<_> = {
            let table = read(&self.table);
            let (mut connected, mut others) = (Vec::new(), Vec::new());
            for server in table.map.primaries() {
                let link = table.link(server);
                match link.and_then(|link| link.down()) {
                    Some(error) => failure = RedisFailure::down(error),
                    None if link.is_some_and(|link| link.is_connected()) => connected.push(server),
                    None => others.push(server),
                }
            }
            in_turn(connected, &[], others).cloned().collect()
        };
        let asks = servers.into_iter().map(|server| {
            let cluster = self.clone();
            async move {
                cluster
                    .send_to(&server, redis::cmd("PING").into(), deadline)
                    .await?;
                let link = cluster.link(&server);
                Ok((server, link))
            }
        });
        first(asks, failure).await
    }

    /// Returns how to find a server for a subscription. A message that is published to one server
    /// of a cluster reaches the subscribers of all.
    pub(super) fn find_server(self: Arc<Self>) -> FindServer {
        Arc::new(move || {
            let cluster = self.clone();
            Box::pin(async move {
                let deadline = clock::after(clock::now(), LONGEST_CONNECTING);
                let (server, link) = cluster.responsive(deadline).await?;
                let client = cluster.seeds.client(&server).map_err(StoreError::away)?;
                Ok(PubSubServer {
                    client,
                    away: Box::pin(async move { link.until_down().await }),
                })
            })
        })
    }

    // ── the map ─────────────────────────────────────────────────────────────────────────────────

    /// Keeps the map up to date while it is polled.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::up_to(LONGEST_PAUSE);
        loop {
            if self.silent.swap(false, Ordering::Relaxed) {
                self.check_others();
            }
            match self.learn().await {
                Ok(map) => self.adopt(map),
                Err(error) => self.fail(error),
            }
            if read(&self.table).is_well() {
                backoff = Backoff::up_to(LONGEST_PAUSE);
                clock::sleep(jittered(SPACING)).await;
                self.links.broke.notified().await;
            } else {
                clock::sleep(backoff.pause()).await;
            }
        }
    }

    /// Pings all connected servers. If one server is silent, others may be silent as well, and the
    /// first caller of each such server would wait for `store_timeout`.
    fn check_others(&self) {
        let table = read(&self.table);
        for node in table.nodes.values() {
            if node.link.is_connected() {
                drop(node.link.ping());
            }
        }
    }

    /// Requests the map from servers that may have it.
    async fn learn(self: &Arc<Self>) -> Result<SlotMap, StoreError> {
        let servers: Vec<_> = {
            let table = read(&self.table);
            let nodes = table.nodes.iter();
            let connected = nodes
                .filter(|(_, node)| node.link.is_connected())
                .map(|(server, _)| server)
                .collect();
            in_turn(connected, &self.seeds.servers, table.map.servers())
                .map(|server| {
                    let link = table.link(server).filter(|link| link.is_connected());
                    (server.clone(), link.cloned())
                })
                .collect()
        };
        let asks = servers.into_iter().map(|(address, link)| {
            let cluster = self.clone();
            async move { cluster.request_map(&address, link).await }
        });
        let learning = first(asks, StoreError::away("no server of the cluster is known"));
        let mut learning = std::pin::pin!(learning);
        match timeout(self.links.store_timeout, &mut learning).await {
            Ok(learned) => learned,
            Err(_) => {
                // From now on callers need not wait for the end of the first try.
                let silent = format!(
                    "no server of the cluster has answered within {:?}",
                    self.links.store_timeout
                );
                self.fail(StoreError::away(silent));
                learning.await
            }
        }
    }

    async fn request_map(
        &self,
        server: &Address,
        link: Option<Arc<Link>>,
    ) -> Result<SlotMap, StoreError> {
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let reply = if let Some(link) = link {
            link.send(command.into(), self.links.deadline()).await?
        } else {
            let asking = async {
                let connection = connection::connect(&self.seeds.client(server)?).await?;
                connection.send(command.into()).await
            };
            timeout(LONGEST_CONNECTING, asking)
                .await
                .map_err(|_| away(server, format!("no answer within {LONGEST_CONNECTING:?}")))?
                .map_err(|error| away(server, error))?
        };
        let map = SlotMap::read(&reply, server);
        if map.is_empty() {
            return Err(away(server, "it knows of no server that has slots"));
        }
        Ok(map)
    }

    /// Replaces the map, and drops the links to servers that are no longer primaries.
    fn adopt(&self, map: SlotMap) {
        let mut table = write(&self.table);
        table.map = map;
        table.drop_others();
        drop(table);
        self.state.send_replace(MapState::Known);
    }

    /// Notes that there is no new map. An old map stays in use.
    fn fail(&self, error: StoreError) {
        let failed = self.state.send_if_modified(|state| {
            let unknown = !matches!(state, MapState::Known);
            if unknown {
                *state = MapState::Failed(error.clone());
            }
            unknown
        });
        if failed {
            events::store_not_reached(&error);
        }
    }

    /// Changes the primary of a slot in the map, as another server has replied.
    fn moved(&self, slot: u16, to: &Address) {
        let mut table = write(&self.table);
        table.map.set_primary(slot, to);
        self.links.broke.notify_one();
    }
}

fn away(server: &Address, error: impl Into<BoxError>) -> StoreError {
    let name = server.to_string().into();
    StoreError::away(of_server(Some(&name), error.into()))
}
