//! Allocators stacked on allocators.

mod arena;
mod limited;
mod retry;
mod stats;
mod tracking;

pub use arena::ArenaAllocator;
pub use limited::LimitedAllocator;
pub use retry::{Failure, RetryAllocator};
pub use stats::{AllocatorStats, StatsAllocator};
pub use tracking::{LiveBlock, TrackingAllocator};

/// The methods that reach into blocks, and the device: they go to the allocator below as they are.
macro_rules! reach_through {
    ($inner:ident) => {
        fn device(&self) -> &Device {
            self.$inner.device()
        }

        unsafe fn copy_in(&self, to: NonNull<u8>, from: &[u8]) -> Result<()> {
            // SAFETY: the contract is the same.
            unsafe { self.$inner.copy_in(to, from) }
        }

        unsafe fn copy_out(&self, to: &mut [u8], from: NonNull<u8>) -> Result<()> {
            // SAFETY: the contract is the same.
            unsafe { self.$inner.copy_out(to, from) }
        }

        unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, bytes: usize) -> Result<()> {
            // SAFETY: the contract is the same.
            unsafe { self.$inner.copy(to, from, bytes) }
        }

        unsafe fn clear(&self, at: NonNull<u8>, bytes: usize) -> Result<()> {
            // SAFETY: the contract is the same.
            unsafe { self.$inner.clear(at, bytes) }
        }
    };
}
use reach_through;
