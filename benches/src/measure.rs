//! Measures time: all contenders in turn, many times over, so that disturbances of the machine
//! affect them all.

use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Barrier;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Instant;

use http::{Request, Response};
use tower::Service;

use crate::inner::{last_request, requests};

/// A contender.
pub(crate) struct Contender {
    pub(crate) name: String,
    /// The function that builds and warms up the batch for the thread of that number.
    make: Box<dyn Fn(usize) -> Batch + Sync>,
}

/// A function that makes the given number of calls.
type Batch = Box<dyn FnMut(usize)>;

/// How many calls are made before any time is measured.
const WARM_UP: usize = 20_000;

/// Returns how many calls in a row each key gets at least before any time is measured: enough for a
/// stock of permits that lasts.
///
/// A million keys have fewer, of which each needs two or three: a stock doubles when it is used up.
fn warm_up_of_a_key(hosts: usize) -> usize {
    if hosts > 100_000 { 24 } else { 192 }
}

impl Contender {
    /// Builds a contender from a service, called with requests to `hosts` hosts in turn. Each
    /// thread gets a service from `make`.
    pub(crate) fn service<S>(
        name: impl Into<String>,
        hosts: usize,
        make: impl Fn() -> S + Sync + 'static,
    ) -> Self
    where
        S: Service<Request<()>, Response = Response<()>> + 'static,
    {
        let make = move |thread| {
            let mut service = make();
            let requests = requests(hosts);
            let calls = warm_up_of_a_key(hosts).max(WARM_UP / hosts);
            for request in requests.borrow_mut().iter_mut() {
                (0..calls).for_each(|_| call(&mut service, request));
            }
            // If there are several hosts, threads use different ones at a time.
            let mut next = (thread * hosts / 2) % hosts;
            Box::new(move |calls: usize| {
                let mut requests = requests.borrow_mut();
                for _ in 0..calls {
                    call(&mut service, &mut requests[next]);
                    next = if next + 1 < requests.len() {
                        next + 1
                    } else {
                        0
                    };
                }
            }) as Batch
        };
        Contender {
            name: name.into(),
            make: Box::new(make),
        }
    }

    /// Builds a contender from a function that is no service.
    pub(crate) fn raw<C: FnMut() + 'static>(
        name: impl Into<String>,
        make: impl Fn() -> C + Sync + 'static,
    ) -> Self {
        let make = move |_| {
            let mut call = make();
            (0..WARM_UP).for_each(|_| call());
            Box::new(move |calls| (0..calls).for_each(|_: usize| call())) as Batch
        };
        Contender {
            name: name.into(),
            make: Box::new(make),
        }
    }
}

/// Polls the future once, by hand. A permit that is not at hand ends the run.
#[inline(always)]
fn call<S>(service: &mut S, request: &mut Option<Request<()>>)
where
    S: Service<Request<()>, Response = Response<()>>,
{
    let cx = &mut Context::from_waker(Waker::noop());
    let sent = request.take().expect("it was put back");
    assert!(
        matches!(service.poll_ready(cx), Poll::Ready(Ok(()))),
        "not ready"
    );
    match pin!(service.call(sent)).poll(cx) {
        Poll::Ready(Ok(response)) => drop(black_box(response)),
        _ => panic!("no permit was at hand"),
    }
    *request = last_request();
}

/// The number of threads, calls and rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) threads: usize,
    pub(crate) rounds: usize,
    /// How many calls are timed together.
    pub(crate) calls: usize,
}

/// The times of one contender.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// Nanoseconds a call, for each round on each thread.
    pub(crate) nanos: Vec<f64>,
    pub(crate) allocations: f64,
}

/// Runs all contenders in turn on all threads. `warm` is called once all are warm, before any time
/// is measured.
pub(crate) fn run(contenders: &[&Contender], plan: Plan, warm: impl Fn() + Sync) -> Vec<Measured> {
    let barrier = Barrier::new(plan.threads);
    let mut sum = vec![Measured::default(); contenders.len()];
    let runtime = &tokio::runtime::Handle::current();
    thread::scope(|scope| {
        let (barrier, warm) = (&barrier, &warm);
        let start = |thread| {
            scope.spawn(move || {
                let _guard = runtime.enter();
                run_thread(contenders, plan, thread, barrier, warm)
            })
        };
        let threads: Vec<_> = (0..plan.threads).map(start).collect();
        for thread in threads {
            let measured = thread.join().expect("no thread panics");
            for (sum, measured) in sum.iter_mut().zip(measured) {
                sum.nanos.extend(measured.nanos);
                sum.allocations += measured.allocations / plan.threads as f64;
            }
        }
    });
    sum
}

fn run_thread(
    contenders: &[&Contender],
    plan: Plan,
    thread: usize,
    barrier: &Barrier,
    warm: &impl Fn(),
) -> Vec<Measured> {
    let mut batches: Vec<Batch> = contenders
        .iter()
        .map(|contender| (contender.make)(thread))
        .collect();
    let mut measured = vec![Measured::default(); contenders.len()];
    for (batch, measured) in batches.iter_mut().zip(&mut measured) {
        let counted = allocation_counter::measure(|| batch(plan.calls)).count_total;
        measured.allocations = counted as f64 / plan.calls as f64;
    }
    if barrier.wait().is_leader() {
        warm();
    }
    for round in 0..plan.rounds {
        for turn in 0..contenders.len() {
            // Each contender is the first of a round once.
            let index = (round + turn) % contenders.len();
            let batch = &mut batches[index];
            barrier.wait();
            allocation_counter::opt_out(|| {
                batch(plan.calls / 10);
                let start = Instant::now();
                batch(plan.calls);
                let nanos = start.elapsed().as_nanos();
                measured[index].nanos.push(nanos as f64 / plan.calls as f64);
            });
        }
    }
    measured
}

/// Returns the value below which the fraction `share` of `values` lies.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
