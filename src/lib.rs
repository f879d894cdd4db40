#![cfg_attr(any(feature = "sim", not(doctest)), doc = include_str!("../README.md"))]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(growspan_std_allocator, feature(allocator_api))]

pub mod allocator;
mod background;
pub mod backing;
mod budget;
mod buffer;
mod bytes;
mod card;
mod device;
pub mod driver;
mod error;
mod neighbours;
pub mod pinned;
mod pool;
mod quiesce;
mod range;
mod slots;
mod stats;
mod sync;
pub mod sys;
pub mod verdict;
mod waiting;

pub use allocator::{
    AllocatorStats, ArenaAllocator, Block, DeviceAllocator, DeviceMemory, Failure, Figures, Headroom, HostMemory,
    LimitedAllocator, LiveBlock, PointerAllocator, RawAllocator, RetryAllocator, SpanAllocator, SpanAllocatorBuilder,
    StatsAllocator, TrackingAllocator,
};
pub use backing::{AheadPolicy, Backing, Coalesced, Fallback, FallbackContiguous, MapHooks, Mode, Shrunk};
pub use budget::{BudgetUsage, MapBudget, OpenFileBudget};
pub use buffer::{BufferBuilder, BufferSet, GrowableBuffer, Leaked, Loan, Member, Returned};
pub use bytes::Bytes;
pub use device::{Device, DeviceOptions};
pub use error::{Error, OutOfMemory, Result, Shortage};
pub use pinned::PinnedBuffer;
pub use pool::{Chunk, ChunkPool, PoolPolicy, PoolStats, Prewarm, Prewarmed, Sizing, Trimmed, UnknownSizing};
pub use quiesce::{Event, Idle, Quiesce};
pub use range::{MappedChunk, Rejected, ReservedRange};
pub use stats::{Snapshot, Stats};
pub use verdict::{BackingRequest, Granularity, Reason, Report, Verdict};
