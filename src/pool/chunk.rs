//! One physical allocation.

use core::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::card::{Card, is_gone, twice};
use crate::driver::{ChunkProps, DriverError, RawHandle};
use crate::error::{Error, Result};

/// One physical allocation: a driver handle, owned. It is mapped as a whole or not at all.
///
/// Dropping it releases it. [`ChunkPool::put`](crate::ChunkPool::put) keeps it for the next who needs that size.
pub struct Chunk {
    handle: RawHandle,
    /// Zero once the handle was given up.
    bytes: u64,
    /// Whether another process may have it too. Such a chunk is never kept for others.
    shared: bool,
    props: ChunkProps,
    card: Arc<Card>,
}

impl Chunk {
    /// Creates a chunk of `bytes` (not zero, a multiple of the granularity). When memory or open files run out, what nobody uses is given back and it is tried once more.
    pub(crate) fn create(card: &Arc<Card>, bytes: u64, props: ChunkProps) -> Result<Self> {
        card.with_room(|| Self::create_once(card, bytes, props))
    }

    pub(crate) fn create_once(card: &Arc<Card>, bytes: u64, props: ChunkProps) -> Result<Self> {
        let files = u64::from(card.gate().info().open_files_per_chunk);
        card.files().acquire(files).map_err(Error::OutOfFiles)?;
        match card.gate().create(bytes, props) {
            Ok(handle) => {
                let accounts = card.accounts();
                accounts.in_hand.add(bytes);
                accounts.chunks.add(1);
                Ok(Self { handle, bytes, shared: false, props, card: Arc::clone(card) })
            }
            Err(error) => {
                card.files().release(files);
                Err(card.explain(bytes, error))
            }
        }
    }

    /// A chunk that another process exported.
    ///
    /// # Safety
    /// As for [`Driver::import`](crate::driver::Driver::import).
    pub(crate) unsafe fn import(card: &Arc<Card>, fd: BorrowedFd<'_>, bytes: u64) -> Result<Self> {
        let files = u64::from(card.gate().info().open_files_per_chunk);
        card.files().acquire(files).map_err(Error::OutOfFiles)?;
        // SAFETY: the contract is the same.
        match unsafe { card.gate().import(fd, bytes) } {
            Ok(handle) => {
                let accounts = card.accounts();
                accounts.in_hand.add(bytes);
                accounts.chunks.add(1);
                Ok(Self { handle, bytes, shared: true, props: ChunkProps::PLAIN, card: Arc::clone(card) })
            }
            Err(error) => {
                card.files().release(files);
                Err(card.explain(bytes, error))
            }
        }
    }

    /// A file descriptor by which another process can have the chunk too; see [`Device::import`](crate::Device::import).
    /// From then on the chunk is shared: it is not kept in a pool when it is given up.
    ///
    /// # Errors
    /// What the driver says: exporting has to be asked for when a chunk is created, by
    /// [`Shareable::PosixFd`](crate::driver::Shareable::PosixFd) in the properties of its pool.
    pub fn export(&mut self) -> Result<OwnedFd> {
        // SAFETY: the handle is valid as long as the chunk is.
        let fd = unsafe { self.card.gate().export(self.handle) }?;
        self.shared = true;
        Ok(fd)
    }

    pub(crate) fn props(&self) -> ChunkProps {
        self.props
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// The chunk's size.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.bytes)
    }

    /// The driver's name for it.
    #[must_use]
    pub fn handle(&self) -> RawHandle {
        self.handle
    }

    pub(crate) fn size(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn card(&self) -> &Arc<Card> {
        &self.card
    }

    /// Releases the chunk, which must not be mapped; gives it back if the driver refuses.
    pub(crate) fn release(mut self) -> Result<(), (Self, DriverError)> {
        // SAFETY: the handle came from `create`, `bytes` is not zero yet so it was not released, and what follows
        // disarms the chunk, so it is not used again.
        match unsafe { self.card.gate().release(self.handle) } {
            Err(error) if !is_gone(&error) => Err((self, error)),
            _ => {
                self.disarm();
                Ok(())
            }
        }
    }

    /// Forgets a chunk that is gone with its driver, without a call.
    pub(crate) fn abandon(mut self) {
        self.disarm();
    }

    /// Gives up on a chunk that the driver will not let go: its bytes and its open file stay spent.
    pub(crate) fn strand(mut self) {
        let accounts = self.card.accounts();
        accounts.in_hand.move_to(&accounts.stranded, self.bytes);
        self.bytes = 0;
    }

    fn disarm(&mut self) {
        let accounts = self.card.accounts();
        accounts.in_hand.sub(self.bytes);
        accounts.chunks.sub(1);
        self.card.files().release(u64::from(self.card.gate().info().open_files_per_chunk));
        self.bytes = 0;
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // In a forked child nothing is done, not even to the books: another thread may have held their locks.
        if self.bytes == 0 || self.card.gate().is_forked() {
            return;
        }
        // SAFETY: as in `release`; the chunk is being dropped, so the handle is not used again. The second try comes only
        // after the first failed, when the handle is still valid.
        match twice(|| unsafe { self.card.gate().release(self.handle) }) {
            Err(error) if !is_gone(&error) => {
                tracing::warn!(device = %self.card.id(), bytes = %self.bytes(), %error, "a chunk could not be released");
                let accounts = self.card.accounts();
                accounts.in_hand.move_to(&accounts.stranded, self.bytes);
            }
            _ => self.disarm(),
        }
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk").field("handle", &self.handle).field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
