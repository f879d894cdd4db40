//! What this driver has had from the runtime: a wrong size or an unknown address crashes some runtimes and is passed over
//! in silence by others, so no call gets there that this book does not bear out.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use super::ffi::{hipDeviceptr_t, hipMemGenericAllocationHandle_t};
use crate::driver::RawHandle;
use crate::driver::layout::{Checked, Layout};

/// All maps are multiples of this, whatever the runtime recommends.
const PAGE: u64 = 4096;

/// What the runtime reserved for a span, which is more than the span where it had to be aligned by hand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserved {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// The runtime failed to free it. It forgets a span before it does what may fail, and crashes on one it does not know.
    pub(super) refused: bool,
}

/// A handle of the runtime.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) raw: HandlePtr,
    pub(super) bytes: u64,
    /// The file it was imported from, where the runtime may need it.
    _file: Option<OwnedFd>,
    /// How many references failed maps have left on it.
    pub(super) kept: u32,
    pub(super) mapped: bool,
}

/// The runtime's pointer to what it calls a handle. Nobody follows it here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandlePtr(pub(super) hipMemGenericAllocationHandle_t);

// SAFETY: the pointer is a name to us, and the runtime takes it from any thread.
unsafe impl Send for HandlePtr {}

/// A mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapped {
    pub(super) handle: RawHandle,
    pub(super) seen: Seen,
}

/// What is known of a mapping beyond that the runtime said it had made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing.
    Unproven,
    /// It was given access, so it is there.
    There,
    /// It is not there.
    Phantom,
}

#[derive(Debug)]
pub(super) struct Book {
    pub(super) layout: Layout<Reserved, Mapped>,
    /// By number, never the same twice: the runtime's own pointers are handed out again, so that a stale one might be
    /// somebody else's.
    handles: HashMap<u64, Handle>,
    last_handle: u64,
    blocks: HashMap<u64, u64>,
}

impl Book {
    pub(super) fn new() -> Self {
        Self { layout: Layout::new(PAGE), handles: HashMap::new(), last_handle: 0, blocks: HashMap::new() }
    }

    /// The numbers of spans, handles, mappings and blocks.
    pub(super) fn counts(&self) -> [usize; 4] {
        let [spans, mappings] = self.layout.counts();
        [spans, self.handles.len(), mappings, self.blocks.len()]
    }

    pub(super) fn add_handle(&mut self, raw: HandlePtr, bytes: u64, file: Option<OwnedFd>) -> RawHandle {
        self.last_handle += 1;
        self.handles.insert(self.last_handle, Handle { raw, bytes, _file: file, kept: 0, mapped: false });
        RawHandle(self.last_handle)
    }

    pub(super) fn handle(&mut self, RawHandle(number): RawHandle) -> Checked<&mut Handle> {
        let last = self.last_handle;
        self.handles.get_mut(&number).ok_or_else(|| match number {
            n if (1..=last).contains(&n) => format!("handle {n} was released before"),
            n => format!("there is no handle {n}"),
        })
    }

    /// A handle that is mapped nowhere, so that it may be released.
    pub(super) fn idle_handle(&mut self, handle: RawHandle) -> Checked<&mut Handle> {
        let found = self.handle(handle)?;
        match found.mapped {
            true => Err(format!("handle {} is still mapped", handle.0)),
            false => Ok(found),
        }
    }

    pub(super) fn remove_handle(&mut self, RawHandle(number): RawHandle) {
        self.handles.remove(&number);
    }

    /// Notes a mapping of a whole handle. Where the runtime then refuses, [`unmapped`](Self::unmapped) takes it back.
    pub(super) fn map(&mut self, addr: u64, bytes: u64, handle: RawHandle) -> Checked<HandlePtr> {
        let found = self.idle_handle(handle)?;
        let (raw, actual) = (found.raw, found.bytes);
        if bytes != actual {
            return Err(format!("handle {} has {actual} bytes, not {bytes}", handle.0));
        }
        self.layout.map(addr, bytes, Mapped { handle, seen: Seen::Unproven })?;
        if let Ok(found) = self.handle(handle) {
            found.mapped = true;
        }
        Ok(raw)
    }

    /// Notes what is known of a mapping; of one that is none, whether its handle has one reference more.
    pub(super) fn saw(&mut self, addr: u64, bytes: u64, seen: Seen, kept: bool) {
        let Some((_, mapping)) = self.layout.within_mut(addr, bytes).find(|(at, _)| *at == addr) else { return };
        mapping.of.seen = seen;
        let handle = mapping.of.handle;
        if let Ok(handle) = self.handle(handle) {
            handle.kept += u32::from(kept);
        }
    }

    /// Notes that a mapping is gone.
    pub(super) fn unmapped(&mut self, addr: u64) {
        let handle = self.layout.unmap(addr).map(|mapped| mapped.handle);
        if let Some(Ok(handle)) = handle.map(|handle| self.handle(handle)) {
            handle.mapped = false;
        }
    }

    pub(super) fn add_block(&mut self, addr: u64, bytes: u64) {
        self.blocks.insert(addr, bytes);
    }

    /// Takes a block out. Before it is freed, since another thread may be given the same address right after.
    pub(super) fn remove_block(&mut self, addr: u64, bytes: u64) -> Checked<()> {
        match self.blocks.get(&addr) {
            Some(&actual) if actual == bytes => {
                self.blocks.remove(&addr);
                Ok(())
            }
            Some(actual) => Err(format!("the block at {addr:#x} has {actual} bytes, not {bytes}")),
            None => Err(format!("no block starts at {addr:#x}")),
        }
    }
}

/// A device address as the runtime takes it.
pub(super) fn pointer(addr: u64) -> hipDeviceptr_t {
    // `ffi` asserts that a pointer has 64 bits.
    core::ptr::with_exposed_provenance_mut(addr as usize)
}
