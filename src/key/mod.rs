#![doc = include_str!("../guide/keys.md")]

mod body;
#[cfg(feature = "grpc")]
mod grpc;
mod host_key;
pub(crate) mod host_names;
pub(crate) mod label;
mod last_host;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::time::Instant;

use http::{Extensions, HeaderMap, HeaderName, Method};
use siphasher::sip128::SipHasher13;

use crate::rng::secret_of_process;
#[cfg(feature = "grpc")]
pub use grpc::{by_grpc_method, by_grpc_service};
pub(crate) use host_key::HostKey;
pub(crate) use label::Label;

/// Says whose limit applies to a request: requests with the same key share one count.
///
/// A key is made from any bytes. It keeps only a 128-bit hash of them, the same in every process
/// and on every machine.
///
/// # What logs show of a key
///
/// Errors and events show a label: `all` for [`Key::ALL`], the host if that is the key, else eight
/// hex digits. The digits are a digest under a secret. So a reader of the log cannot find out
/// whether a guessed name, such as an e-mail address, is in it.
///
/// If the [store](crate::store) has a secret, this secret is used, and a key has the
/// same label in all processes. Otherwise each process draws a secret when it starts. `Debug` and
/// `Display` always show digits under the secret of the process.
///
/// # Names that tenants choose
///
/// The hash is long enough that two names do not have the same key by accident. But it has no
/// secret. So a tenant that may choose any name can compute two names with the same key. If that
/// matters, name tenants by a number that you gave them, or by a keyed digest of their name.
///
/// ```
/// use tollgate::Key;
///
/// let search = Key::new("search");
/// assert_eq!(search, Key::new(b"search"));
///
/// let of_customer = search.and("customer 17");
/// assert_ne!(of_customer, search);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    high: u64,
    low: u64,
}

impl Key {
    /// The key of all requests of a layer without a key function. They share one count.
    ///
    /// In a [`RateLimitLayer`](crate::RateLimitLayer), a refusal of such a request
    /// [holds](crate::RateLimitBuilder::max_hold) only the requests to its host: see
    /// [`host_hold`](Key::host_hold).
    pub const ALL: Key = Key {
        high: 0x746f_6c6c_6761_7465,
        low: 0x0061_6c6c,
    };

    /// Makes the key of `name`, which may be any text or bytes.
    pub fn new(name: impl AsRef<[u8]>) -> Self {
        let hash = SipHasher13::new().hash(name.as_ref());
        Key {
            high: hash.h1,
            low: hash.h2,
        }
    }

    /// Makes the key of this key and `part` together, such as host *and* token.
    ///
    /// `Key::new("a").and("b")` differs from `Key::new("ab")`, and from `Key::new("b").and("a")`.
    #[must_use]
    pub fn and(self, part: impl AsRef<[u8]>) -> Self {
        let hash = SipHasher13::new_with_keys(self.high, self.low).hash(part.as_ref());
        Key {
            high: hash.h1,
            low: hash.h2,
        }
    }

    /// Returns the key under which units of a kind are counted: see [`Quota::of`](crate::Quota::of).
    pub(crate) fn of_unit(self, unit: &str) -> Self {
        self.and("tollgate unit").and(unit)
    }

    /// Returns the key under which the requests of a class are counted. Applied to that key, it returns this one again.
    pub(crate) fn of_class(self, class: &str) -> Self {
        let class = Key::new("tollgate class").and(class);
        Key {
            high: self.high ^ class.high,
            low: self.low ^ class.low,
        }
    }

    /// Returns the key that has the holds of one kind of the requests with this key.
    pub(crate) fn of_kind(self, kind: Key) -> Self {
        let kind = [kind.high.to_le_bytes(), kind.low.to_le_bytes()];
        self.and("tollgate kind").and(kind.as_flattened())
    }

    /// Returns the number of a class of requests: the same in all processes, and not 0.
    pub(crate) fn number_of_class(class: &str) -> u32 {
        let hash = Key::new("tollgate class").and(class).low;
        (hash as u32).max(1)
    }

    /// Returns the key that [`by_host`] gives the requests to `host`, to look at with
    /// [`peek`](crate::Limiter::peek).
    ///
    /// The comparison of hosts ignores case, the port and a final dot.
    pub fn host(host: &str) -> Self {
        let plain = host.strip_suffix('.').unwrap_or(host);
        if is_plain_host(plain.as_bytes()) {
            return Key::new(plain);
        }
        let host = without_port(host);
        let host = host.strip_suffix('.').unwrap_or(host);
        Key::new(host.to_ascii_lowercase())
    }

    /// Returns the key that a [`RateLimitLayer`](crate::RateLimitLayer) without a key function
    /// holds after a refusal by `host`, for [`peek`](crate::Limiter::peek),
    /// [`hold_for`](crate::Limiter::hold_for) and [`release`](crate::Limiter::release).
    ///
    /// A hold of this key stops the requests to that host and no others. A hold of [`Key::ALL`]
    /// stops the requests to all hosts.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = RateLimitLayer::new(Quota::per_second(50))?;
    /// // No request to this host for a minute.
    /// let host = Key::host_hold("api.example.com");
    /// limit.limiter().hold_for(host, Duration::from_secs(60)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn host_hold(host: &str) -> Self {
        Key::host(host).within_all()
    }

    /// Returns the key for holds of [`Key::ALL`] that concern the host of this key only. No counter
    /// has this key.
    pub(crate) fn within_all(self) -> Self {
        Key {
            high: self.high ^ Key::ALL.high,
            low: self.low ^ Key::ALL.low,
        }
    }

    /// Returns the key under a secret. It cannot be computed without the secret.
    pub(crate) fn sealed(self, secret: Key) -> Key {
        secret.and(self.bytes())
    }

    /// Returns the whole key in 32 hex digits.
    #[cfg(feature = "redis")]
    pub(crate) fn hex(self) -> String {
        format!("{:016x}{:016x}", self.high, self.low)
    }

    /// Returns the whole key, the high half first.
    pub(crate) fn bytes(self) -> [u8; 16] {
        (u128::from(self.high) << 64 | u128::from(self.low)).to_be_bytes()
    }

    /// Returns the key with these [`bytes`](Key::bytes).
    #[cfg(feature = "redis")]
    pub(crate) fn of_bytes(bytes: [u8; 16]) -> Self {
        let number = u128::from_be_bytes(bytes);
        Key {
            high: (number >> 64) as u64,
            low: number as u64,
        }
    }

    /// Returns the hash for a table. `seed` is the process's own, so an attacker who chooses names
    /// cannot aim at a bucket.
    #[inline]
    pub(crate) fn spread(self, seed: u64) -> u64 {
        let product = u128::from(self.high ^ seed) * u128::from(self.low | 1);
        (product >> 64) as u64 ^ product as u64
    }

    /// Returns what errors and events call this key if that needs no digest: `all`, or the host of
    /// `request` if that is the key, or a host that a layer is known to have as the key.
    pub(crate) fn plain_label(self, request: Option<&RequestRef<'_>>) -> Option<Label> {
        match request.and_then(RequestRef::host) {
            _ if self == Key::ALL => Some("all".into()),
            Some(host) if Key::host(host) == self => Some(Label::of_host(host)),
            _ => host_names::of(self),
        }
    }

    /// Returns what errors and events call this key if there is no store that has a label for it.
    pub(crate) fn own_label(self, request: Option<&RequestRef<'_>>) -> Label {
        self.plain_label(request)
            .unwrap_or_else(|| self.process_label())
    }

    /// Returns eight hex digits of a digest under the secret of the process.
    pub(crate) fn process_label(self) -> Label {
        let [high, low] = secret_of_process();
        self.digits(Key { high, low })
    }

    /// Returns eight hex digits of a digest under `secret`.
    pub(crate) fn digits(self, secret: Key) -> Label {
        Label::of_digits((self.sealed(secret).high >> 32) as u32)
    }
}

/// Formats eight hex digits of a digest, different in each process.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.process_label())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// The moment by which a request must leave, for the extensions of the request. Default: the result
/// of [`RateLimitBuilder::deadline`](crate::RateLimitBuilder::deadline), or else none.
///
/// If its slot is later, the request is refused ([`Reason::Deadline`](crate::Reason::Deadline)).
/// The layer's [`max_wait`](crate::RateLimitBuilder::max_wait) limits the wait as well.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// let mut request = http::Request::get("http://example.com/").body(())?;
/// let in_a_second = Instant::now() + Duration::from_secs(1);
/// request.extensions_mut().insert(tollgate::Deadline::at(in_a_second));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(pub(crate) Instant);

impl Deadline {
    /// Makes the deadline at this moment. In a test with a paused clock, it is one of that clock.
    pub fn at(moment: Instant) -> Self {
        Deadline(moment)
    }
}

/// The class of one request, in its extensions, for a layer whose quota is divided by
/// [`share`](crate::RateLimitBuilder::share). It takes precedence over
/// [`class`](crate::RateLimitBuilder::class).
///
/// ```
/// use tollgate::Class;
///
/// let mut request = http::Request::get("http://example.com/").body(())?;
/// request.extensions_mut().insert(Class::new("web"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class(pub(crate) &'static str);

impl Class {
    /// Makes the class of this name, one of those that got a share. Requests of any other class have
    /// none.
    pub fn new(name: &'static str) -> Self {
        Class(name)
    }
}

/// Returns whether `text` is a host without port and user, and without upper case: most can be used as they are
/// written, and need no parsing.
pub(crate) fn is_plain_host(text: &[u8]) -> bool {
    !text
        .iter()
        .any(|byte| matches!(byte, b':' | b'@' | b'[') || byte.is_ascii_uppercase())
}

/// Returns `host` without its port, if it has one. An IPv6 address may have colons, but no port, if it
/// stands in no brackets.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit())
                && (name.ends_with(']') || !name.contains(':')) =>
        {
            name
        }
        _ => host,
    }
}

/// The properties of a request that tollgate uses.
///
/// Implemented for `http::Request<B>` and, with the feature `reqwest`, for `reqwest::Request`.
/// Implement it for requests of your own; every method has a default.
///
/// ```
/// struct Job {
///     customer: String,
/// }
///
/// impl tollgate::key::RequestInfo for Job {
///     fn host(&self) -> Option<&str> {
///         Some(&self.customer)
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "tollgate cannot read `{Self}` as a request",
    label = "this request is unknown to tollgate",
    note = "for `reqwest::Request`, switch on tollgate's feature `reqwest`",
    note = "for a request of your own, write `impl tollgate::key::RequestInfo for {Self}`"
)]
pub trait RequestInfo {
    /// Returns the host of the request, without port. Default: `None`.
    fn host(&self) -> Option<&str> {
        None
    }

    /// Returns whether this is the [host](Self::host) of the request. Default: compares them. A layer asks this
    /// of the host that it knows best, if that has neither port nor user.
    #[inline]
    fn is_to(&self, host: &str) -> bool {
        self.host() == Some(host)
    }

    /// Returns the path of the request's URL. Default: empty.
    fn path(&self) -> &str {
        ""
    }

    /// Returns the method of the request. Default: GET.
    fn method(&self) -> &Method {
        &Method::GET
    }

    /// Returns the headers of the request. Default: `None`.
    fn headers(&self) -> Option<&HeaderMap> {
        None
    }

    /// Returns the extensions of the request, which may have a [`Key`], a [`Cost`](crate::Cost) and a
    /// [`Deadline`]. Default: `None`.
    fn extensions(&self) -> Option<&Extensions> {
        None
    }

    /// Returns the bytes of the request's body. Default: `None`, which also a body returns that is not in memory, such as
    /// a stream.
    ///
    /// Seen are the bodies `Bytes`, `Vec<u8>`, `String`, `&'static str` and `Full<Bytes>` of an `http::Request`, and, with
    /// the feature `reqwest`, a `reqwest::Body` in memory.
    fn body(&self) -> Option<Cow<'_, [u8]>> {
        None
    }

    /// Returns whether the client inside may follow redirects by itself, so that a response may
    /// come from another [host](crate::signal::ResponseInfo::host). Default: no; for
    /// `reqwest::Request`: yes.
    fn follows_redirects(&self) -> bool {
        false
    }
}

impl<B: 'static> RequestInfo for http::Request<B> {
    fn host(&self) -> Option<&str> {
        if let Some(authority) = self.uri().authority() {
            // Most hosts have neither port nor user, so `host()` need not split them.
            let authority = authority.as_str();
            return if is_plain_host(authority.as_bytes()) {
                Some(authority)
            } else {
                self.uri().host()
            };
        }
        let authority = http::Request::headers(self)
            .get(http::header::HOST)?
            .to_str()
            .ok()?;
        Some(without_port(authority)).filter(|host| !host.is_empty())
    }

    #[inline]
    fn is_to(&self, host: &str) -> bool {
        match self.uri().authority() {
            // It may have a port or a user only if it is longer than the host.
            Some(authority) if authority.as_str().len() <= host.len() => authority == host,
            _ => self.host() == Some(host),
        }
    }

    fn path(&self) -> &str {
        self.uri().path()
    }

    fn method(&self) -> &Method {
        http::Request::method(self)
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(http::Request::headers(self))
    }

    fn extensions(&self) -> Option<&Extensions> {
        Some(http::Request::extensions(self))
    }

    fn body(&self) -> Option<Cow<'_, [u8]>> {
        body::bytes_of(http::Request::body(self))
    }
}

/// A request as key, cost and deadline functions see it.
#[derive(Clone, Copy)]
pub struct RequestRef<'a> {
    request: &'a dyn RequestInfo,
    extensions: Option<&'a Extensions>,
}

impl<'a> RequestRef<'a> {
    /// Makes a view of `request`.
    pub fn new(request: &'a dyn RequestInfo) -> Self {
        RequestRef {
            request,
            extensions: request.extensions(),
        }
    }

    /// Returns the same request, with extensions that travel beside it (reqwest-middleware's do).
    #[cfg_attr(
        not(feature = "reqwest-middleware"),
        expect(dead_code, reason = "layer/reqwest.rs is off")
    )]
    pub(crate) fn with_extensions(self, extensions: &'a Extensions) -> Self {
        RequestRef {
            extensions: Some(extensions),
            ..self
        }
    }

    /// Returns the host of the request.
    pub fn host(&self) -> Option<&'a str> {
        self.request.host()
    }

    /// Returns the path of the request's URL.
    pub fn path(&self) -> &'a str {
        self.request.path()
    }

    /// Returns the method of the request.
    pub fn method(&self) -> &'a Method {
        self.request.method()
    }

    /// Returns the bytes of the request's header `name`; the first value if there are several.
    pub fn header(&self, name: impl http::header::AsHeaderName) -> Option<&'a [u8]> {
        Some(self.request.headers()?.get(name)?.as_bytes())
    }

    /// Returns the bytes of the request's body, if the body is in memory: see [`RequestInfo::body`].
    pub fn body(&self) -> Option<Cow<'a, [u8]>> {
        self.request.body()
    }

    /// Returns the extension of type `T` of the request.
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.extensions?.get::<T>()
    }
}

impl RequestInfo for RequestRef<'_> {
    fn host(&self) -> Option<&str> {
        self.request.host()
    }

    fn is_to(&self, host: &str) -> bool {
        self.request.is_to(host)
    }

    fn path(&self) -> &str {
        self.request.path()
    }

    fn method(&self) -> &Method {
        self.request.method()
    }

    fn headers(&self) -> Option<&HeaderMap> {
        self.request.headers()
    }

    fn extensions(&self) -> Option<&Extensions> {
        self.extensions
    }

    fn body(&self) -> Option<Cow<'_, [u8]>> {
        self.request.body()
    }

    fn follows_redirects(&self) -> bool {
        self.request.follows_redirects()
    }
}

impl fmt::Debug for RequestRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The path and the headers may hold secrets.
        f.debug_struct("RequestRef")
            .field("method", self.method())
            .field("host", &self.host())
            .finish()
    }
}

/// Returns the key of the request's host: a key function for one limit for each host, whatever the
/// port.
///
/// A request without a host is refused ([`Reason::NoKey`](crate::Reason::NoKey)). The comparison of
/// hosts ignores case, the port and a final dot.
///
/// If reqwest follows a redirect to another host, the request still counts for the host that it was
/// sent to. What the other host states about limits is ignored.
///
/// ```
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// use tollgate::{by_host, Quota, RateLimitLayer};
///
/// let limit = RateLimitLayer::builder(Quota::per_second(50)).key(by_host).build()?;
/// # Ok(())
/// # }
/// ```
pub fn by_host(request: &RequestRef<'_>) -> Option<Key> {
    last_host::key_of(request)
}

/// Makes a key function for one limit for each value of the header `name`, such as an access token.
///
/// If a request has several such headers, the first one is its key. A request without that header
/// is refused ([`Reason::NoKey`](crate::Reason::NoKey)).
///
/// ```
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// use http::header::AUTHORIZATION;
/// use tollgate::{by_header, Quota, RateLimitLayer};
///
/// let limit = RateLimitLayer::builder(Quota::per_hour(5000))
///     .key(by_header(AUTHORIZATION))
///     .build()?;
/// # Ok(())
/// # }
/// ```
pub fn by_header(
    name: HeaderName,
) -> impl Fn(&RequestRef<'_>) -> Option<Key> + Send + Sync + 'static {
    move |request| request.header(&name).map(Key::new)
}
