//! What reads and writes blocks.

use super::Core;
use crate::driver::RawStream;
use crate::error::Result;
use crate::quiesce::Quiesce;

impl Core {
    /// Waits for what was queued on a handle's stream: clearing, and moving, and what last used the memory.
    fn behind(&self, stream: Option<RawStream>) -> Result<()> {
        match stream.filter(|_| !self.host_visible) {
            Some(stream) => Quiesce::Stream(stream).wait(self.ground.card()),
            None => Ok(()),
        }
    }

    /// Copies into a block, which is the caller's to change.
    pub(in crate::allocator) fn copy_in(&self, to: u64, from: &[u8], stream: Option<RawStream>) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.behind(stream)?;
        // SAFETY: the place lies in a committed block; the slice outlives the call, and without a stream the copy is over
        // when this returns.
        Ok(unsafe { self.ground.card().gate().copy_in(to, from.as_ptr(), from.len() as u64, None) }?)
    }

    /// Copies out of a block.
    pub(in crate::allocator) fn copy_out(&self, to: &mut [u8], from: u64, stream: Option<RawStream>) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.behind(stream)?;
        // SAFETY: the same the other way.
        Ok(unsafe { self.ground.card().gate().copy_out(to.as_mut_ptr(), from, to.len() as u64, None) }?)
    }

    /// Copies between blocks. The two places do not overlap.
    pub(in crate::allocator) fn copy(&self, to: u64, from: u64, bytes: usize, stream: Option<RawStream>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if let Some((to, from)) = self.host(to).zip(self.host(from)) {
            // SAFETY: both places lie in blocks of the caller's, which the driver says the host may touch; the caller says
            // that they do not overlap.
            unsafe { from.copy_to_nonoverlapping(to, bytes) };
            return Ok(());
        }
        // SAFETY: both blocks are committed for `bytes` bytes and do not overlap. Without a stream the copy is over when
        // this returns; with one, whatever next uses either is queued behind it, since blocks freed on a stream wait for
        // it.
        Ok(unsafe { self.ground.card().gate().copy_within(to, from, bytes as u64, stream) }?)
    }

    /// Clears a part of a block.
    pub(in crate::allocator) fn clear(&self, address: u64, bytes: usize, stream: Option<RawStream>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if let Some(at) = self.host(address) {
            // SAFETY: the part lies in a block of the caller's, which the driver says the host may touch.
            unsafe { at.write_bytes(0, bytes) };
            return Ok(());
        }
        // SAFETY: the part lies in a committed block of the caller's. On a stream the clearing is ordered before whatever
        // else is queued there, and the block is reused behind it.
        Ok(unsafe { self.ground.card().gate().fill(address, 0, bytes as u64, stream) }?)
    }

    /// An address as the host sees it, where it does.
    fn host(&self, address: u64) -> Option<*mut u8> {
        let address = usize::try_from(address).ok()?;
        self.host_visible.then(|| core::ptr::with_exposed_provenance_mut(address))
    }
}
