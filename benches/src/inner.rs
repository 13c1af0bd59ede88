//! The inner service: each layer is measured by what it adds to it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::rc::Rc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower::Service;

thread_local! {
    static LAST: Cell<Option<Request<()>>> = const { Cell::new(None) };
    static REQUESTS: RefCell<HashMap<usize, Requests>> = RefCell::default();
}

/// A service that responds at once and keeps the request ([`last_request`]), so that no request is
/// made or dropped while time is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inner;

impl Service<Request<()>> for Inner {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    // Not inlined, because a real client is too large for that.
    #[inline(never)]
    fn call(&mut self, request: Request<()>) -> Self::Future {
        LAST.set(Some(request));
        ready(Ok(Response::new(())))
    }
}

/// Returns the request that reached [`Inner`] last on this thread.
pub(crate) fn last_request() -> Option<Request<()>> {
    LAST.take()
}

/// Requests that are taken and put back.
pub(crate) type Requests = Rc<RefCell<Vec<Option<Request<()>>>>>;

/// Returns one request to each of `hosts` hosts, by absolute URI. All contenders of a thread use
/// the same requests.
pub(crate) fn requests(hosts: usize) -> Requests {
    let request = |host| {
        let uri = format!("https://api-{host:06}.example.com/v1/items?page=1");
        Some(Request::get(uri).body(()).expect("the URI is well formed"))
    };
    let make = || Rc::new(RefCell::new((0..hosts).map(request).collect()));
    REQUESTS.with_borrow_mut(|made| made.entry(hosts).or_insert_with(make).clone())
}
