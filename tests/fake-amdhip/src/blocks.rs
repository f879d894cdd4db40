//! Memory without virtual memory management, and how much is left.

use crate::abi::code;
use crate::memory::GRANULE;
use crate::runtime::Call;
use crate::space;
use crate::table::Block;

/// What a block takes up.
fn rounded(size: usize) -> Result<usize, u32> {
    size.checked_next_multiple_of(GRANULE as usize).ok_or(code::OUT_OF_MEMORY)
}

impl Call<'_> {
    /// Free and total bytes of the current device. What programs that draw have in use is not known here.
    pub(crate) fn memory_info(&mut self) -> (usize, usize) {
        self.state.memory.sweep();
        let total = self.config.memory;
        let free = total.saturating_sub(self.state.memory.used(self.thread.device));
        (free as usize, total as usize)
    }

    pub(crate) fn malloc(&mut self, size: usize) -> Result<usize, u32> {
        if size == 0 {
            return Ok(0);
        }
        let room = rounded(size)?;
        let store = self.state.memory.take(self.config, self.thread.device, room as u64, false)?;
        // Aligned to a page at least, and to no more where it is small.
        let Some(at) = space::reserve(room, 0, 0) else {
            self.state.memory.give_back(self.config, store, false);
            return Err(code::OUT_OF_MEMORY);
        };
        self.state.table.blocks.insert(at, Block { size, store });
        Ok(at)
    }

    pub(crate) fn free(&mut self, addr: usize) -> Result<(), u32> {
        if addr == 0 {
            return Ok(());
        }
        if self.state.table.span_of(addr).is_some() {
            self.misuse(format_args!("{addr:#x} is memory of virtual memory management, which this loses"));
        }
        let Some(size) = self.state.table.blocks.get(&addr).map(|block| block.size) else {
            self.misuse(format_args!("{addr:#x} is no block of hipMalloc, or one that has been freed"));
        };
        if let Some(by) = self.state.streams.touching(addr, size) {
            self.misuse(format_args!("{by} is queued and not done yet, and it uses the block at {addr:#x}"));
        }
        if let Some(block) = self.state.table.blocks.remove(&addr) {
            space::free(addr, rounded(size)?);
            self.state.memory.give_back(self.config, block.store, false);
        }
        Ok(())
    }
}
