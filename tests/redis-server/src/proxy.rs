//! A proxy in front of a server that injects faults: it delays or drops data, breaks connections, or
//! breaks them right after a script ran.

use std::io::{Error, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Forwards data between its clients and a server. Dropping it breaks its connections.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    way: Arc<Way>,
}

#[derive(Debug, Default)]
struct Way {
    /// Whether all data is dropped, with connections left open.
    swallows: AtomicBool,
    /// By how many milliseconds what clients send is delayed.
    delay: AtomicU64,
    /// Whether all connections are broken.
    refuses: AtomicBool,
    /// How many more scripts run without their answer being forwarded.
    breaks: AtomicUsize,
    /// When each client tried to connect.
    tries: Mutex<Vec<Instant>>,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Starts a proxy to the server at `port`.
    ///
    /// # Errors
    ///
    /// If it cannot listen.
    pub fn start(port: u16) -> Result<Self, Error> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let proxy = Proxy {
            port: listener.local_addr()?.port(),
            way: Arc::default(),
        };
        let way = Arc::downgrade(&proxy.way);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Some(way) = way.upgrade() else { break };
                lock(&way.tries).push(Instant::now());
                if !way.refuses.load(Ordering::Relaxed) {
                    // An unreachable server breaks the connection.
                    let _ = way.connect(client, port);
                }
            }
        });
        Ok(proxy)
    }

    /// Returns its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns its URL, `redis://127.0.0.1:port/`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// From now on drops all data it receives; or stops doing so, and breaks the affected
    /// connections.
    pub fn swallow(&self, swallows: bool) {
        self.way.swallows.store(swallows, Ordering::Relaxed);
        if !swallows {
            self.way.break_all();
        }
    }

    /// From now on delays what clients send by `delay`, in whole milliseconds.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.way.delay.store(millis, Ordering::Relaxed);
    }

    /// From now on breaks every connection, or forwards again.
    pub fn refuse(&self, refuses: bool) {
        self.way.refuses.store(refuses, Ordering::Relaxed);
        self.way.break_all();
    }

    /// Breaks all connections; new connections are forwarded.
    pub fn break_all(&self) {
        self.way.break_all();
    }

    /// Lets the next script run, and then breaks the connection in place of the answer.
    pub fn break_after_script(&self) {
        self.way.breaks.store(1, Ordering::Relaxed);
    }

    /// Returns whether that has happened.
    pub fn has_broken(&self) -> bool {
        self.way.breaks.load(Ordering::Relaxed) == 0
    }

    /// Returns when clients tried to connect, since `start`.
    pub fn tries_since(&self, start: Instant) -> Vec<Instant> {
        lock(&self.way.tries)
            .iter()
            .copied()
            .filter(|at| *at >= start)
            .collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.way.refuses.store(true, Ordering::Relaxed);
        self.way.break_all();
        // The thread wakes, and ends.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

impl Way {
    fn break_all(&self) {
        for stream in lock(&self.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn connect(self: Arc<Self>, client: TcpStream, port: u16) -> Result<(), Error> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        [&client, &server]
            .into_iter()
            .try_for_each(|stream| stream.set_nodelay(true))?;
        lock(&self.open).extend([client.try_clone()?, server.try_clone()?]);
        // Whether the server's next answer must be lost.
        let lost = Arc::new(AtomicBool::new(false));
        let (there, asked) = ((client.try_clone()?, server.try_clone()?), lost.clone());
        let way = self.clone();
        thread::spawn(move || {
            way.pass(there.0, there.1, |bytes| {
                thread::sleep(Duration::from_millis(way.delay.load(Ordering::Relaxed)));
                let script = bytes.windows(7).any(|word| word == b"EVALSHA");
                if script && way.breaks.load(Ordering::Relaxed) > 0 {
                    asked.store(true, Ordering::Relaxed);
                }
                true
            })
        });
        thread::spawn(move || {
            self.pass(server, client, |_| {
                if lost.load(Ordering::Relaxed) {
                    self.breaks.store(0, Ordering::Relaxed);
                }
                !lost.load(Ordering::Relaxed)
            })
        });
        Ok(())
    }

    /// Forwards data until it ends, or `goes_on` returns false.
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, goes_on: impl Fn(&[u8]) -> bool) {
        let mut bytes = [0; 16 * 1024];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if self.swallows.load(Ordering::Relaxed) {
                continue;
            }
            if !goes_on(&bytes[..count]) || to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
