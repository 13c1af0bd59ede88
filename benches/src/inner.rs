//! The service inside: what every layer is measured above.

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

/// Answers at once, and puts the request aside ([`last_request`]), so that none is made or dropped while time is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inner;

impl Service<Request<()>> for Inner {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    // A real client is too large to be inlined.
    #[inline(never)]
    fn call(&mut self, request: Request<()>) -> Self::Future {
        LAST.set(Some(request));
        ready(Ok(Response::new(())))
    }
}

/// The request that reached [`Inner`] last on this thread.
pub(crate) fn last_request() -> Option<Request<()>> {
    LAST.take()
}

/// Requests that are taken and put back.
pub(crate) type Requests = Rc<RefCell<Vec<Option<Request<()>>>>>;

/// One request to each of `hosts` hosts, by absolute URI. All who are measured on a thread take turns with the same.
pub(crate) fn requests(hosts: usize) -> Requests {
    let request = |host| {
        let uri = format!("https://api-{host:06}.example.com/v1/items?page=1");
        Some(Request::get(uri).body(()).expect("the URI is well formed"))
    };
    let make = || Rc::new(RefCell::new((0..hosts).map(request).collect()));
    REQUESTS.with_borrow_mut(|made| made.entry(hosts).or_insert_with(make).clone())
}
