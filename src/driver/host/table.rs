//! What the host driver has given out, and whether a call about it keeps to the rules.
//!
//! Nothing here makes a system call: the table says what may be done, the driver does it with the table unlocked and
//! tells the outcome. In between a mapping is *busy*, and every other call about it is refused.

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use crate::driver::RawHandle;
use crate::driver::layout::{Checked, Layout};

/// The bytes taken of a capacity.
#[derive(Debug)]
pub(super) struct Account {
    capacity: u64,
    taken: AtomicU64,
}

impl Account {
    pub(super) fn new(capacity: u64) -> Arc<Self> {
        Arc::new(Self { capacity, taken: AtomicU64::new(0) })
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn free(&self) -> u64 {
        self.capacity - self.taken.load(Relaxed)
    }

    /// Takes `bytes`, or says how many are free.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Result<Memory, u64> {
        let more = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.capacity);
        match self.taken.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => Ok(Memory { bytes, account: Some(Arc::clone(self)) }),
            Err(taken) => Err(self.capacity - taken),
        }
    }
}

/// Memory that is taken; dropping it gives it back to its account. Handles and mappings share one, so that it returns
/// with the last of them.
#[derive(Debug)]
pub(super) struct Memory {
    bytes: u64,
    /// `None` for memory of another driver, which counts there.
    account: Option<Arc<Account>>,
}

impl Memory {
    pub(super) fn of_others(bytes: u64) -> Self {
        Self { bytes, account: None }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.taken.fetch_sub(self.bytes, Relaxed);
        }
    }
}

/// What a handle stands for. The file comes first, to be closed before its memory counts as returned.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) file: File,
    pub(super) memory: Arc<Memory>,
    /// Whether it may be exported, as was asked when it was created.
    pub(super) shareable: bool,
}

/// Device and inode number: what a file is, whatever descriptor it is reached by.
pub(super) type FileId = (u64, u64);

#[derive(Debug)]
struct Mapping {
    busy: bool,
    memory: Arc<Memory>,
}

#[derive(Debug)]
pub(super) struct Table {
    layout: Layout<(), Mapping>,
    /// The last number given to a handle. Numbers are not used twice, so an old one is always found out.
    last_handle: u64,
    handles: HashMap<u64, Arc<Chunk>>,
    blocks: HashMap<u64, (u64, Memory)>,
    exported: Vec<(FileId, Weak<Memory>)>,
}

impl Table {
    pub(super) fn new(granularity: u64) -> Self {
        Self {
            layout: Layout::new(granularity),
            last_handle: 0,
            handles: HashMap::new(),
            blocks: HashMap::new(),
            exported: Vec::new(),
        }
    }

    /// Whether nothing is given out.
    pub(super) fn is_empty(&self) -> bool {
        self.counts() == [0; 4]
    }

    /// The numbers of spans, handles, mappings and blocks.
    pub(super) fn counts(&self) -> [usize; 4] {
        let [spans, mappings] = self.layout.counts();
        [spans, self.handles.len(), mappings, self.blocks.len()]
    }

    // Spans.

    pub(super) fn add_span(&mut self, addr: u64, bytes: u64) {
        self.layout.add_span(addr, bytes, ());
    }

    /// Takes a span out. Before it is unmapped, since another thread may be given the same addresses right after.
    pub(super) fn remove_span(&mut self, addr: u64, bytes: u64) -> Checked<()> {
        self.layout.remove_span(addr, bytes)
    }

    // Handles.

    pub(super) fn add_handle(&mut self, chunk: Chunk) -> RawHandle {
        self.last_handle += 1;
        self.handles.insert(self.last_handle, Arc::new(chunk));
        RawHandle(self.last_handle)
    }

    pub(super) fn handle(&self, handle: RawHandle) -> Checked<Arc<Chunk>> {
        self.handles.get(&handle.0).map(Arc::clone).ok_or_else(|| self.no_handle(handle))
    }

    pub(super) fn remove_handle(&mut self, handle: RawHandle) -> Checked<Arc<Chunk>> {
        self.handles.remove(&handle.0).ok_or_else(|| self.no_handle(handle))
    }

    fn no_handle(&self, RawHandle(number): RawHandle) -> String {
        match number {
            n if (1..=self.last_handle).contains(&n) => format!("handle {n} was released before"),
            n => format!("there is no handle {n}"),
        }
    }

    pub(super) fn note_export(&mut self, id: FileId, memory: &Arc<Memory>) {
        self.exported.retain(|(other, memory)| *other != id && memory.strong_count() > 0);
        self.exported.push((id, Arc::downgrade(memory)));
    }

    /// The memory of a file that this driver exported, if it is still alive.
    pub(super) fn exported(&self, id: FileId) -> Option<Arc<Memory>> {
        self.exported.iter().find(|(other, _)| *other == id)?.1.upgrade()
    }

    // Mappings.

    /// Claims `[addr, addr + bytes)` for a mapping of `handle`, busy until [`settle`](Self::settle) or
    /// [`forget`](Self::forget).
    pub(super) fn begin_map(&mut self, addr: u64, bytes: u64, handle: RawHandle) -> Checked<Arc<Chunk>> {
        let chunk = self.handle(handle)?;
        let actual = chunk.memory.bytes;
        if bytes != actual {
            return Err(format!("handle {} has {actual} bytes, not {bytes}", handle.0));
        }
        self.layout.map(addr, bytes, Mapping { busy: true, memory: Arc::clone(&chunk.memory) })?;
        Ok(chunk)
    }

    /// Claims the one mapping that is exactly `[addr, addr + bytes)`, busy until [`settle`](Self::settle) or
    /// [`forget`](Self::forget).
    pub(super) fn begin_unmap(&mut self, addr: u64, bytes: u64) -> Checked<()> {
        self.layout.exactly(addr, bytes)?;
        self.begin_access(addr, bytes)
    }

    /// Claims the mappings that `[addr, addr + bytes)` exactly consists of, busy until [`settle`](Self::settle).
    pub(super) fn begin_access(&mut self, addr: u64, bytes: u64) -> Checked<()> {
        self.layout.whole(addr, bytes)?;
        if let Some((at, mapping)) = self.layout.within(addr, bytes).find(|(_, mapping)| mapping.of.busy) {
            return Err(format!("another call about the {} bytes at {at:#x} is still running", mapping.bytes));
        }
        self.mark(addr, bytes, true);
        Ok(())
    }

    /// What was begun about these mappings is over, and they are there.
    pub(super) fn settle(&mut self, addr: u64, bytes: u64) {
        self.mark(addr, bytes, false);
    }

    /// What was begun about the mapping at `addr` is over, and it is gone. The memory is to be dropped with the table
    /// unlocked.
    pub(super) fn forget(&mut self, addr: u64) -> Option<Arc<Memory>> {
        self.layout.unmap(addr).map(|mapping| mapping.memory)
    }

    fn mark(&mut self, addr: u64, bytes: u64, busy: bool) {
        self.layout.within_mut(addr, bytes).for_each(|(_, mapping)| mapping.of.busy = busy);
    }

    // Blocks.

    pub(super) fn add_block(&mut self, addr: u64, bytes: u64, memory: Memory) {
        self.blocks.insert(addr, (bytes, memory));
    }

    /// Takes a block out, for the same reason as [`remove_span`](Self::remove_span).
    pub(super) fn remove_block(&mut self, addr: u64, bytes: u64) -> Checked<Memory> {
        match self.blocks.remove(&addr) {
            Some((actual, memory)) if actual == bytes => Ok(memory),
            Some((actual, memory)) => {
                self.blocks.insert(addr, (actual, memory));
                Err(format!("the block at {addr:#x} has {actual} bytes, not {bytes}"))
            }
            None => Err(format!("no block starts at {addr:#x}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(account: &Arc<Account>) -> Chunk {
        let memory = Arc::new(account.take(4096).unwrap());
        Chunk { file: File::open("/dev/null").unwrap(), memory, shareable: true }
    }

    #[test]
    fn a_busy_mapping_is_refused_to_everybody_else() {
        let account = Account::new(4096);
        let mut table = Table::new(4096);
        let handle = table.add_handle(chunk(&account));
        table.add_span(8192, 8192);
        drop(table.begin_map(8192, 4096, handle).unwrap());
        let refused = |table: &mut Table| {
            assert!(table.begin_access(8192, 4096).unwrap_err().contains("still running"));
            assert!(table.begin_unmap(8192, 4096).unwrap_err().contains("still running"));
            assert!(table.begin_map(8192, 4096, handle).unwrap_err().contains("meets"));
            assert!(table.remove_span(8192, 8192).unwrap_err().contains("mapped"));
        };
        refused(&mut table);
        table.settle(8192, 4096);
        table.begin_access(8192, 4096).unwrap();
        refused(&mut table);
        table.settle(8192, 4096);
        table.begin_unmap(8192, 4096).unwrap();
        refused(&mut table);

        drop(table.remove_handle(handle).unwrap());
        assert_eq!(account.free(), 0, "the mapping keeps the memory");
        drop(table.forget(8192).unwrap());
        assert_eq!(account.free(), 4096);
        table.remove_span(8192, 8192).unwrap();
        assert!(table.is_empty());
    }

    #[test]
    fn an_account_never_gives_more_than_it_has() {
        let account = Account::new(100);
        let most = account.take(60).unwrap();
        assert_eq!(account.take(41).unwrap_err(), 40);
        assert_eq!(account.take(u64::MAX).unwrap_err(), 40);
        let rest = account.take(40).unwrap();
        assert_eq!(account.free(), 0);
        drop((most, Memory::of_others(50)));
        assert_eq!(account.free(), 60);
        drop(rest);
        assert_eq!((account.free(), account.capacity()), (100, 100));
    }

    #[test]
    fn exported_memory_is_found_while_it_lives() {
        let account = Account::new(8192);
        let mut table = Table::new(4096);
        let (first, second) = (chunk(&account), chunk(&account));
        table.note_export((1, 1), &first.memory);
        table.note_export((1, 1), &first.memory);
        assert_eq!(table.exported.len(), 1);
        assert!(table.exported((1, 1)).is_some() && table.exported((1, 2)).is_none());
        drop(first);
        assert!(table.exported((1, 1)).is_none());
        table.note_export((1, 2), &second.memory);
        assert_eq!(table.exported.len(), 1, "what is gone is not kept");
    }
}
