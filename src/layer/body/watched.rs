//! A response body that a layer watches while the caller reads it.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};

use super::AtEnd;
use crate::error::{BoxError, Error};
use crate::limiter::{InFlightSlot, Settlement};
use crate::signal::SpentReader;

/// A response body behind a [`BodyLayer`](super::BodyLayer). It keeps its call in flight, and states the true cost of its
/// request, if the layer does that. Its frames are those of the body of type `B`.
pub struct WatchedBody<B: Body> {
    // Boxed, so that it can be read before it has its place in the hands of the caller. `None` if nothing comes after `ahead`.
    body: Option<Pin<Box<B>>>,
    /// What was read before the response was passed on.
    ahead: VecDeque<Result<Frame<B::Data>, B::Error>>,
    /// `None` once the body has ended.
    call: Option<InFlightSlot>,
    /// `None` once the body has ended.
    watch: Option<BodyWatch>,
}

/// No field is pinned.
impl<B: Body> Unpin for WatchedBody<B> {}

/// The most frames that are read ahead. They may be empty.
const MOST_FRAMES: usize = 1024;

impl<B: Body> WatchedBody<B> {
    pub(super) fn new(body: B) -> Self {
        WatchedBody {
            body: (!body.is_end_stream()).then(|| Box::pin(body)),
            ahead: VecDeque::new(),
            call: None,
            watch: None,
        }
    }

    /// Reads ahead, up to `most` bytes, which are added to `text`. Returns whether that is the whole body: not if it breaks,
    /// is longer, or has a part that is not in one piece.
    pub(super) fn poll_ahead(
        &mut self,
        cx: &mut Context<'_>,
        most: usize,
        text: &mut Vec<u8>,
    ) -> Poll<bool> {
        loop {
            let Some(body) = &mut self.body else {
                return Poll::Ready(true);
            };
            let Some(frame) = ready!(body.as_mut().poll_frame(cx)) else {
                self.body = None;
                continue;
            };
            if frame.is_err() || body.is_end_stream() {
                self.body = None;
            }
            let data = frame.as_ref().ok().and_then(Frame::data_ref);
            let is_readable = data.is_none_or(|data| {
                let chunk = data.chunk();
                let fits = chunk.len() == data.remaining() && text.len() + chunk.len() <= most;
                if fits {
                    text.extend_from_slice(chunk);
                }
                fits
            });
            let is_readable = is_readable && frame.is_ok() && self.ahead.len() < MOST_FRAMES;
            self.ahead.push_back(frame);
            if !is_readable {
                return Poll::Ready(false);
            }
        }
    }

    /// Keeps `call` in flight until the body ends, and then does what is due.
    pub(super) fn watch(&mut self, call: Option<InFlightSlot>, watch: Option<BodyWatch>) {
        self.call = call;
        self.watch = watch;
        if self.is_at_end() {
            self.end(true);
        }
    }

    fn is_at_end(&self) -> bool {
        self.ahead.is_empty() && self.body.as_ref().is_none_or(|body| body.is_end_stream())
    }

    /// Ends the call, and states what the body has stated if it is whole.
    fn end(&mut self, is_whole: bool) {
        self.call = None;
        let watch = self.watch.take();
        watch
            .into_iter()
            .filter(|_| is_whole)
            .for_each(BodyWatch::end);
    }

    pub(super) fn remaining_size(&self) -> SizeHint {
        let frames = self.ahead.iter().flatten().filter_map(Frame::data_ref);
        let ahead: u64 = frames.map(|data| data.remaining() as u64).sum();
        let of_body = match &self.body {
            Some(body) => body.size_hint(),
            None => SizeHint::with_exact(0),
        };
        let mut all = SizeHint::new();
        // A body may state any size.
        all.set_lower(of_body.lower().saturating_add(ahead));
        if let Some(upper) = of_body.upper() {
            all.set_upper(upper.saturating_add(ahead));
        }
        all
    }
}

impl<B> Body for WatchedBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let this = &mut *self;
        if let Some(Poll::Ready(lost)) = this.call.as_ref().map(|call| call.poll_limited(cx)) {
            this.end(false);
            // Dropping the body cancels the call.
            this.ahead.clear();
            this.body = None;
            return Poll::Ready(Some(Err(Error::from(lost).into())));
        }
        let frame = match (this.ahead.pop_front(), &mut this.body) {
            (Some(frame), _) => Some(frame),
            (None, Some(body)) => ready!(body.as_mut().poll_frame(cx)),
            (None, None) => None,
        };
        match &frame {
            None => this.end(true),
            Some(Err(_)) => this.end(false),
            Some(Ok(frame)) => {
                let data = frame.data_ref();
                if let Some(watch) = this
                    .watch
                    .take_if(|watch| data.is_some_and(|data| watch.read(data)))
                {
                    watch.end();
                }
                if this.is_at_end() {
                    this.end(true);
                }
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_at_end()
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining_size()
    }
}

impl<B: Body> fmt::Debug for WatchedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedBody").finish_non_exhaustive()
    }
}

/// Reads what a body states, and does what is due at its end.
pub(super) struct BodyWatch {
    reader: SpentReader,
    /// Whether each piece of the body was in one piece of memory, so that it could be read.
    is_readable: bool,
    at_end: AtEnd,
    settlement: Option<Settlement>,
}

impl BodyWatch {
    pub(super) fn new(at_end: AtEnd, settlement: Option<Settlement>) -> Self {
        BodyWatch {
            reader: SpentReader::new(),
            is_readable: true,
            at_end,
            settlement,
        }
    }

    /// Reads a piece of the body. Returns whether the body has nothing more to state.
    fn read(&mut self, data: &impl Buf) -> bool {
        let chunk = data.chunk();
        self.reader.read(chunk);
        self.is_readable &= chunk.len() == data.remaining();
        self.reader.has_ended()
    }

    fn end(self) {
        if self.is_readable && self.reader.is_whole() {
            (self.at_end)(self.reader.spent(), self.settlement);
        }
    }
}
