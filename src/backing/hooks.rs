//! Who is told of chunks as they come and go.

use core::panic::AssertUnwindSafe;
use std::sync::Arc;

use crate::range::MappedChunk;
use crate::waiting::NoWaiting;

/// What is told of chunks as they come and go, for libraries that register device memory (NCCL, UCX, GPUDirect).
///
/// A chunk is told of when it is mapped and before it is the buffer's: where memory is mapped
/// [ahead](crate::AheadPolicy), long before, and on the background thread. All else is called on the thread that grows,
/// shrinks or drops the buffer, or on one that takes back memory that nobody uses.
///
/// Meanwhile the memory of this buffer is locked, and nothing else is. So a hook may call the device: make and wait for
/// events, copy, drain it, look at its figures, use, grow and close other buffers (whose own hooks must not come back to
/// this one). It must not use a [`SpanAllocator`](crate::SpanAllocator): one that is short of memory may be what has the
/// chunk unmapped, and waits here. What would have to wait for other threads leaves what they hold: memory that they are just giving up may be
/// missed. A hook must not wait by means of its own for a thread that may be about to grow or shrink this buffer: it may be
/// waiting here. A panic is logged and goes no further.
pub trait MapHooks: Send + Sync {
    /// The chunk was mapped and is accessible.
    fn mapped(&self, chunk: MappedChunk) {
        let _ = chunk;
    }

    /// The chunk is about to be unmapped. Should a shrink fail, it stays mapped and `mapped` is called for it again;
    /// nothing is said of one that a close or a drop had to leave mapped.
    fn unmapping(&self, chunk: MappedChunk) {
        let _ = chunk;
    }
}

/// Which of the two is to be said.
#[derive(Clone, Copy)]
pub(super) enum Told {
    Mapped,
    Unmapping,
}

/// Tells of the chunks. A hook that panics is logged and goes no further: memory is half way from here to there.
pub(super) fn tell(hooks: &Arc<dyn MapHooks>, device: &str, told: Told, chunks: impl Iterator<Item = MappedChunk>) {
    let _no_waiting = NoWaiting::begin();
    for chunk in chunks {
        let call = AssertUnwindSafe(|| match told {
            Told::Mapped => hooks.mapped(chunk),
            Told::Unmapping => hooks.unmapping(chunk),
        });
        if std::panic::catch_unwind(call).is_err() {
            tracing::error!(device, ?chunk, "a hook panicked");
        }
    }
}
