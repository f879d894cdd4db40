//! Captures: enough of them to find out what is called during one. Graphs are not kept.

use crate::abi::code;
use crate::runtime::Call;
use crate::streams::StreamKind;

/// What a thread's mode and a capture's can be.
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// A capture that is under way on a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capture {
    mode: u32,
    /// The thread that began it.
    thread: u64,
    invalid: bool,
}

impl Call<'_> {
    pub(crate) fn capture_begin(&mut self, stream: u64, mode: u32) -> Result<(), u32> {
        let thread = self.thread.number;
        let id = self.stream_id(stream);
        let stream = self.stream_mut(id);
        if mode > RELAXED {
            return Err(code::INVALID_VALUE);
        }
        if stream.kind == StreamKind::Null {
            return Err(code::CAPTURE_UNSUPPORTED);
        }
        if stream.capture.is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        stream.capture = Some(Capture { mode, thread, invalid: false });
        Ok(())
    }

    /// The number of the graph.
    pub(crate) fn capture_end(&mut self, stream: u64) -> Result<u64, u32> {
        let id = self.stream_id(stream);
        match self.stream_mut(id).capture.take() {
            None => Err(code::ILLEGAL_STATE),
            Some(capture) if capture.invalid => Err(code::CAPTURE_INVALIDATED),
            Some(_) => Ok(self.state.fresh_id()),
        }
    }

    /// 0 for none, 1 for under way, 2 for broken.
    pub(crate) fn capture_status(&mut self, stream: u64) -> Result<u32, u32> {
        let id = self.stream_id(stream);
        if self.stream_mut(id).kind == StreamKind::Null && self.a_blocking_stream_captures().is_some() {
            return Err(code::CAPTURE_IMPLICIT);
        }
        Ok(match self.stream_mut(id).capture {
            None => 0,
            Some(Capture { invalid: false, .. }) => 1,
            Some(_) => 2,
        })
    }

    /// Sets the thread's mode and returns what it was.
    pub(crate) fn capture_exchange(&mut self, mode: u32) -> Result<u32, u32> {
        if mode > RELAXED {
            return Err(code::INVALID_VALUE);
        }
        Ok(core::mem::replace(&mut self.thread.capture_mode, mode))
    }

    fn a_blocking_stream_captures(&self) -> Option<u64> {
        let streams = &self.state.streams;
        let captures = |id: &u64| streams.streams.get(id).is_some_and(|stream| stream.capture.is_some());
        streams.blocking_of(self.thread.device).find(captures)
    }

    fn invalidate(&mut self, id: u64) {
        if let Some(capture) = &mut self.stream_mut(id).capture {
            capture.invalid = true;
        }
    }

    /// Refuses a call that must not be made while streams are captured, and breaks those captures.
    ///
    /// # Errors
    /// `hipErrorStreamCaptureUnsupported` if a capture under way forbids it to this thread.
    pub(crate) fn refuse_in_capture(&mut self) -> Result<(), u32> {
        let (mode, me) = (self.thread.capture_mode, self.thread.number);
        let forbids = |capture: Capture| match (mode, capture.mode) {
            (RELAXED, _) | (_, RELAXED) => false,
            (GLOBAL, GLOBAL) => true,
            (THREAD_LOCAL, _) | (_, THREAD_LOCAL) => capture.thread == me,
            _ => true,
        };
        let mut refused = false;
        for stream in self.state.streams.streams.values_mut() {
            if let Some(capture) = stream.capture.as_mut().filter(|capture| forbids(**capture)) {
                capture.invalid = true;
                refused = true;
            }
        }
        if refused { Err(code::CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Refuses to wait for a stream that is being captured, which breaks the capture.
    ///
    /// # Errors
    /// `hipErrorStreamCaptureUnsupported`, or `hipErrorStreamCaptureImplicit` for a null stream that would have to wait for
    /// one that is captured.
    pub(crate) fn refuse_wait_for_capture(&mut self, id: u64) -> Result<(), u32> {
        if self.stream_mut(id).capture.is_some() {
            self.invalidate(id);
            return Err(code::CAPTURE_UNSUPPORTED);
        }
        self.refuse_on_null_stream(id)
    }

    fn refuse_on_null_stream(&mut self, id: u64) -> Result<(), u32> {
        if self.stream_mut(id).kind == StreamKind::Null
            && let Some(captured) = self.a_blocking_stream_captures()
        {
            self.invalidate(captured);
            return Err(code::CAPTURE_IMPLICIT);
        }
        Ok(())
    }

    /// Whether work that is queued on the stream becomes part of a graph instead.
    ///
    /// # Errors
    /// `hipErrorStreamCaptureInvalidated` if the capture is broken, `hipErrorStreamCaptureImplicit` for the null stream while
    /// one is captured that waits for it.
    pub(crate) fn goes_into_a_graph(&mut self, id: u64) -> Result<bool, u32> {
        self.refuse_on_null_stream(id)?;
        match self.stream_mut(id).capture {
            None => Ok(false),
            Some(capture) if capture.invalid => Err(code::CAPTURE_INVALIDATED),
            Some(_) => Ok(true),
        }
    }
}
