//! A process that calls through tollgate.
//!
//! It prints `ready` and begins when it reads `go`. It ends after its span or when its input ends.
//! After SIGTERM it drains, and ends. It then returns its unused permits, and prints each call, each warning and `done`. The options
//! are those of `fleet::Options`.

mod caller;
mod naive;
mod paced;
mod warnings;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use fleet::{Arrivals, Event, INCR, MEMORY, Options, Outcome, key_in};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tollgate::store::{RedisStore, StoreError};
use tollgate::{Key, OnStoreError, Quota, RateLimitLayer};

use caller::Caller;

/// The longest time that the return of unused permits may take.
const FAREWELL: Duration = Duration::from_secs(3);

fn main() -> anyhow::Result<()> {
    let options = Options::from_words(std::env::args().skip(1))?;
    warnings::collect();
    // tollgate leaves the choice of the TLS provider to the program.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        anyhow::bail!("another TLS provider is installed");
    }
    // One thread a process: there are more processes than cores.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let events = runtime.block_on(work(&options))?;
    for event in events {
        println!("{event}");
    }
    for warning in warnings::collected() {
        println!("warned {warning}");
    }
    println!("done");
    Ok(())
}

async fn work(options: &Options) -> anyhow::Result<Vec<Event>> {
    if !options.pace.is_empty() {
        let layer = paced::layer(options).await?;
        let (go, _stop) = ears();
        println!("ready");
        return match go.await {
            Ok(()) => paced::work(options, layer, Instant::now() + options.span).await,
            Err(_) => Ok(Vec::new()),
        };
    }
    let layer = layer(options).await?;
    let caller = Caller::new(&layer, options)?;
    if !options.cold {
        // Loads the script first, so that it delays no first call of a test.
        soon(async || layer.limiter().peek(Key::ALL).await).await?;
    }
    let (go, stop) = ears();
    println!("ready");
    if go.await.is_err() {
        return Ok(Vec::new());
    }
    let end = Instant::now() + options.span;
    let events = Arc::default();
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        () = calls(options, &caller, &events, end) => {}
        // A dropped sender means that the input has ended.
        _ = stop => {}
        // The tasks go on to call.
        _ = terminated.recv() => {
            tollgate::drain_all(options.drain).await?;
            println!("drained {}", fleet::now());
        }
    }
    match timeout(FAREWELL, layer.limiter().shutdown()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => eprintln!("{}: shutdown: {error}", options.who),
        Err(_) => eprintln!("{}: shutdown takes longer than {FAREWELL:?}", options.who),
    }
    Ok(std::mem::take(
        &mut *events.lock().unwrap_or_else(PoisonError::into_inner),
    ))
}

async fn layer(options: &Options) -> anyhow::Result<RateLimitLayer> {
    let quota: Quota = options.quota.parse()?;
    let mut builder = RateLimitLayer::builder(quota)
        .max_wait(options.max_wait)
        .transit_slack(options.slack);
    builder = builder
        .in_flight_ttl(options.life)
        .max_hold(options.max_hold);
    builder = builder.on_event(|event| {
        if let tollgate::stats::Event::QuotaSet { .. } = event {
            println!("quota set {}", fleet::now());
        }
    });
    let cost = options.cost;
    builder = builder.cost(move |_| cost).counted_within(options.late);
    if let Some(actual) = options.actual {
        builder = builder.settle(move |_| Some(actual));
    }
    let urls: Vec<_> = options.store.split_ascii_whitespace().collect();
    if let [INCR, url] = urls[..] {
        let redis = redis::Client::open(url)?
            .get_multiplexed_async_connection()
            .await?;
        builder = builder.store(Arc::new(naive::Incr(redis)));
    } else if options.store != MEMORY {
        let store = match urls[..] {
            ["cluster", ref nodes @ ..] => RedisStore::cluster(nodes),
            ["sentinel", master, ref sentinels @ ..] => RedisStore::sentinel(sentinels, master),
            _ => RedisStore::builder(&options.store),
        };
        let store = store.store_timeout(options.store_timeout).build()?;
        // The same for connections.
        soon(async || store.connect().await).await?;
        builder = builder.store(Arc::new(store));
    }
    for (class, percent) in &options.shares {
        builder = builder.share(class.clone().leak(), *percent);
    }
    if !options.class.is_empty() && !options.shares.is_empty() {
        let class: &'static str = options.class.clone().leak();
        builder = builder.class(move |_| Some(class));
    }
    for (name, quota) in &options.and_per {
        // The layer is made once, and lives as long as the process.
        let name: &'static str = name.clone().leak();
        builder = builder.and_per(name, quota.parse()?, move |request| {
            key_in(request.path(), name).map(Key::new)
        });
    }
    if options.fail_open {
        builder = builder.on_store_error(OnStoreError::FailOpen);
    }
    if options.share > 0.0 {
        builder = builder
            .on_store_error(OnStoreError::FallbackShare)
            .fallback_share(options.share);
    }
    Ok(builder.build()?)
}

/// Calls the store until it answers: when a fleet starts, the machine is too busy for `store_timeout`.
async fn soon<T>(call: impl AsyncFn() -> Result<T, StoreError>) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        match call().await {
            Err(error) if start.elapsed() > Duration::from_secs(10) => {
                return Err(error).context("the store");
            }
            Err(_) => sleep(Duration::from_millis(20)).await,
            Ok(answer) => return Ok(answer),
        }
    }
}

/// Reads the input: sends a message at "go", and drops the sender at the end.
fn ears() -> (oneshot::Receiver<()>, oneshot::Receiver<()>) {
    let (go, gone) = oneshot::channel();
    let (stop, stopped) = oneshot::channel();
    std::thread::spawn(move || {
        let mut lines = std::io::stdin().lines();
        if let Some(Ok(_)) = lines.next() {
            // The receiver is gone if the worker could not start.
            let _ = go.send(());
        }
        while let Some(Ok(_)) = lines.next() {}
        drop(stop);
    });
    (gone, stopped)
}

async fn calls(options: &Options, caller: &Caller, events: &Arc<Mutex<Vec<Event>>>, end: Instant) {
    let task = |end| {
        let (mut caller, events) = (caller.clone(), Arc::clone(events));
        let again = matches!(options.arrivals, Arrivals::Loop | Arrivals::Turns { .. });
        let (live, pause) = (options.live, options.pause);
        tokio::spawn(async move {
            while Instant::now() < end {
                let asked = fleet::now();
                let given_up = |_| Event {
                    asked,
                    ended: fleet::now(),
                    outcome: Outcome::GivenUp,
                    text: String::new(),
                };
                let event = timeout_at(end, caller.call())
                    .await
                    .unwrap_or_else(given_up);
                let outcome = event.outcome;
                if live {
                    println!("{event}");
                } else {
                    events
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(event);
                }
                if !again {
                    break;
                }
                if outcome != Outcome::Granted {
                    sleep(pause).await;
                }
            }
        })
    };
    let mut tasks = Vec::new();
    let start = Instant::now();
    match options.arrivals {
        Arrivals::Loop | Arrivals::Once => tasks.extend((0..options.tasks).map(|_| task(end))),
        Arrivals::Every(gap) => {
            for moment in (0..)
                .map(|number| start + gap * number)
                .take_while(|moment| *moment < end)
            {
                sleep_until(moment).await;
                tasks.push(task(end));
            }
        }
        Arrivals::Random(mean) => loop {
            sleep(mean.mul_f64(-(1.0 - fastrand::f64()).ln())).await;
            if Instant::now() >= end {
                break;
            }
            tasks.push(task(end));
        },
        Arrivals::Turns { first, on, off } => {
            let turns = (0..).map(|number| start + first + (on + off) * number);
            for turn in turns.take_while(|turn| *turn < end) {
                sleep_until(turn).await;
                tasks.extend((0..options.tasks).map(|_| task(end.min(turn + on))));
            }
        }
    }
    for task in tasks {
        task.await.expect("a task that does not panic");
    }
}
