//! What can go wrong, each with what was asked, what was there and what to do.

use core::fmt;
use std::io;

use crate::bytes::Bytes;
use crate::driver::host::HostError;
use crate::driver::{Call, DriverError, DriverErrorKind};
use crate::neighbours::Short;
use crate::verdict::Reason;

/// The crate's result.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why an operation failed. Unless a variant says otherwise, everything is as it was before the call.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A length of zero where at least one element is needed.
    ZeroLength {
        /// What was to be that long.
        what: &'static str,
    },
    /// An element type without size.
    ZeroSizedType {
        /// The element type.
        type_name: &'static str,
    },
    /// An element larger than the smallest chunk.
    ElementTooLarge {
        /// The element type.
        type_name: &'static str,
        /// Its size.
        size: Bytes,
        /// The device's granularity.
        granularity: Bytes,
    },
    /// An element type aligned more strictly than spans are.
    Alignment {
        /// The element type.
        type_name: &'static str,
        /// Its alignment.
        align: Bytes,
        /// The device's granularity.
        granularity: Bytes,
    },
    /// A size that does not fit in 64 bits.
    Overflow {
        /// What was computed.
        what: &'static str,
        /// How many elements or bytes were asked for.
        count: u64,
        /// Bytes per element.
        size: u64,
    },
    /// A chunk size that the device cannot map.
    ChunkSize {
        /// The size asked for.
        asked: Bytes,
        /// The device's granularity.
        granularity: Bytes,
        /// The largest chunk that is sound on the device.
        max: Bytes,
    },
    /// Addresses could not be reserved.
    Reserve {
        /// The size of the span.
        asked: Bytes,
        /// What the driver said.
        source: DriverError,
    },
    /// Growing beyond the length given at build time.
    BeyondMax {
        /// The length asked for, in elements.
        asked: usize,
        /// The present length, in elements.
        len: usize,
        /// The largest length, in elements.
        max_len: usize,
    },
    /// Shrinking to a length above the present one.
    ShrinkAboveLen {
        /// The length asked for, in elements.
        asked: usize,
        /// The present length, in elements.
        len: usize,
    },
    /// A range outside the buffer's length.
    OutOfBounds {
        /// The operation.
        what: &'static str,
        /// The first element asked for.
        start: usize,
        /// How many elements were asked for.
        count: usize,
        /// The present length, in elements.
        len: usize,
    },
    /// A copy on a stream between two places that overlap.
    Overlap {
        /// The first element to copy.
        start: usize,
        /// Where it was to be copied to.
        to: usize,
        /// How many elements.
        count: usize,
    },
    /// The device has no memory left, also after the pool was emptied.
    OutOfMemory(Box<OutOfMemory>),
    /// An allocator's limit would be passed.
    OverLimit {
        /// The bytes asked for.
        asked: Bytes,
        /// The bytes in use.
        used: Bytes,
        /// The most there may be.
        limit: Bytes,
    },
    /// The process may not hold as many open files. Never reported as out of memory.
    OutOfFiles(Shortage),
    /// The process may not have as many memory map entries.
    OutOfMaps(Shortage),
    /// No device of that name.
    UnknownDevice {
        /// The name asked for.
        asked: String,
        /// The names that exist.
        known: String,
    },
    /// The device is there in name only.
    NoDevice {
        /// The name asked for.
        asked: String,
        /// Why it cannot be opened.
        why: String,
    },
    /// The host driver could not be opened.
    Host(HostError),
    /// Virtual memory is off on this device and the buffer's policy refuses to run without.
    Refused {
        /// The device.
        device: String,
        /// Why virtual memory is off.
        reason: Reason,
    },
    /// A contiguous block is full and may not move.
    FallbackFull {
        /// The bytes asked for.
        asked: Bytes,
        /// The size of the block.
        capacity: Bytes,
    },
    /// The host cannot touch this memory.
    NotHostVisible {
        /// The device.
        device: String,
    },
    /// Two things of different devices were put together.
    OtherDevice {
        /// What was given.
        what: &'static str,
        /// Its device.
        theirs: String,
        /// The device it was given to.
        ours: String,
    },
    /// A buffer of a set is longer than the set's rows.
    OutOfStep {
        /// The member's number in the set.
        member: usize,
        /// Its length, in elements.
        len: usize,
        /// The length the set asked of it, in elements.
        asked: usize,
    },
    /// The span has a place that could not be unmapped earlier; nothing can be mapped from there on.
    Blocked {
        /// The bytes asked for.
        asked: Bytes,
        /// How far the span can be used.
        usable: Bytes,
    },
    /// An operation failed and undoing it failed too. What is there is usable, but it may have more memory under it than
    /// before, or less, and then its length has fallen to what is still mapped.
    Rollback {
        /// What failed first.
        first: Box<Error>,
        /// What failed while undoing it.
        then: DriverError,
    },
    /// Memory that could not be given back on close.
    NotReturned {
        /// How much of it.
        bytes: Bytes,
        /// What the driver said first.
        source: DriverError,
    },
    /// Chunks cannot go from one buffer to another.
    NotLent {
        /// How much was to go.
        asked: Bytes,
        /// Why it cannot.
        why: String,
    },
    /// The buffer's memory is shared with another process, which may change it at any time.
    Shared,
    /// A shrink was to wait for an event that was never recorded.
    EventNotRecorded,
    /// Memory waits for an event that was made elsewhere, so it cannot be recorded again yet.
    EventInUse,
    /// A stream is capturing a graph, when memory may neither be mapped nor unmapped.
    Capturing {
        /// The device.
        device: String,
    },
    /// Options of page-locked memory that do not go together.
    PinOptions {
        /// Which, and why.
        why: &'static str,
    },
    /// The machine, or a control group of this process, has not as much memory.
    HostMemory {
        /// What was asked for.
        asked: Bytes,
        /// What could be had without swapping.
        available: Bytes,
        /// All there is.
        total: Bytes,
    },
    /// Host memory could not be set up.
    HostMap {
        /// What was to be done.
        what: &'static str,
        /// How much memory was asked for.
        asked: Bytes,
        /// What the system said.
        source: io::Error,
    },
    /// Memory was to come from a NUMA node that it cannot come from.
    NumaNode {
        /// The node.
        node: u32,
        /// The nodes with memory, as the kernel lists them.
        known: Option<String>,
        /// What the system said.
        source: io::Error,
    },
    /// Transparent huge pages could not be turned off for the process.
    ThpRefused {
        /// What the system said.
        source: io::Error,
    },
    /// Whoever was told of the progress did not want to go on. Nothing is left of what was asked for.
    Cancelled {
        /// How far it had come.
        done: Bytes,
        /// What was asked for.
        asked: Bytes,
    },
    /// Memory could not be filled from a file or reader. What was to be filled holds any mix of old and new.
    Fill {
        /// How much was asked for.
        asked: Bytes,
        /// What the system said.
        source: io::Error,
    },
    /// The device or its context is gone for good.
    DeviceLost(DriverError),
    /// A call from a forked child: device memory belongs to the parent.
    Forked,
    /// What was to be mapped ahead in the background could not be. Said once, by the next growth that needs memory; the
    /// buffer is as it was.
    Ahead {
        /// The chunk that was to be mapped.
        asked: Bytes,
        /// What went wrong.
        source: Box<Error>,
    },
    /// The background thread could not be started.
    NoThread {
        /// What the system said.
        why: String,
    },
    /// Any other error of the driver.
    Driver(DriverError),
}

/// The figures of a device that ran out of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The chunk or block that could not be had.
    pub asked: Bytes,
    /// Bytes mapped under spans of this device and in contiguous blocks, by this process.
    pub mapped: Bytes,
    /// Bytes kept in the pool (zero after it was emptied for this request).
    pub pooled: Bytes,
    /// Bytes waiting to be unmapped.
    pub retiring: Bytes,
    /// Bytes there for the growth of buffers to come, after they were asked for (those mapped are among the mapped).
    pub ahead: Bytes,
    /// Bytes in chunks that this and other requests had taken already; this one has given its own back by now.
    pub in_hand: Bytes,
    /// Bytes that the driver would not take back.
    pub stranded: Bytes,
    /// What the driver says is free.
    pub free: Bytes,
    /// All the device has.
    pub total: Bytes,
    /// What the driver said.
    pub source: DriverError,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, mapped, pooled, retiring, ahead, in_hand, stranded, free, total, source } = self;
        write!(f, "out of memory: {asked} asked; mapped here {mapped}, pooled {pooled}, retiring {retiring}")?;
        if !ahead.is_zero() {
            write!(f, ", ahead of need {ahead}")?;
        }
        if !in_hand.is_zero() {
            write!(f, ", taken on the way {in_hand}")?;
        }
        if !stranded.is_zero() {
            write!(f, ", stranded {stranded}")?;
        }
        write!(
            f,
            ", free {free} of {total} ({source}). Close or shrink a buffer (in contiguous mode only closing gives memory \
             back), or free memory that other programs hold, and try again"
        )
    }
}

/// A limit of the process that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// How many the process would need, with what is kept for the application.
    pub needed: u64,
    /// The limit in force.
    pub limit: u64,
    /// How far the process may raise it itself.
    pub hard: u64,
}

impl Error {
    /// Whether something has run out that others may give back.
    pub(crate) const fn is_shortage(&self) -> bool {
        Short::of(self).is_some()
    }

    /// The error of an undo that failed after `first`.
    pub(crate) fn after(self, first: Self) -> Self {
        let then = match self {
            Self::Driver(error) | Self::DeviceLost(error) => error,
            other => DriverError::new(Call::Map, DriverErrorKind::Other).with_detail(other.to_string()),
        };
        Self::Rollback { first: Box::new(first), then }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroLength { what } => {
                write!(f, "{what} of nothing was asked for; ask for at least one element")
            }
            Self::ZeroSizedType { type_name } => {
                write!(f, "elements of type {type_name} have no size; use a type of at least one byte")
            }
            Self::ElementTooLarge { type_name, size, granularity } => write!(
                f,
                "an element of type {type_name} has {size}, more than the smallest chunk of {granularity}; store it as \
                 several elements"
            ),
            Self::Alignment { type_name, align, granularity } => write!(
                f,
                "type {type_name} asks for an alignment of {align}, and spans are aligned to {granularity}; lower the \
                 type's alignment"
            ),
            Self::Overflow { what, count, size } => {
                write!(f, "{what} of {count} elements of {size} bytes does not fit in 64 bits; ask for less")
            }
            Self::ChunkSize { asked, granularity, max } => write!(
                f,
                "chunks of {asked} were asked for, and this device maps multiples of {granularity} up to {max}; choose \
                 such a size"
            ),
            Self::Reserve { asked, source } => write!(
                f,
                "a span of {asked} could not be reserved ({source}); lower the maximum length, or raise the limit on \
                 address space (ulimit -v)"
            ),
            Self::BeyondMax { asked, len, max_len } => write!(
                f,
                "growing from {len} to {asked} elements was asked for, and the buffer was built for at most {max_len}; \
                 build it with a larger max_len (in virtual mode addresses cost nothing)"
            ),
            Self::ShrinkAboveLen { asked, len } => {
                write!(f, "shrinking to {asked} elements was asked for, and there are only {len}; use grow_to to grow")
            }
            Self::OutOfBounds { what, start, count, len } => {
                write!(f, "{what} of {count} elements from {start} was asked for, and the length is {len}")
            }
            Self::Overlap { start, to, count } => write!(
                f,
                "a copy of {count} elements from {start} to {to} on a stream overlaps itself; use copy_within, or copy in \
                 pieces"
            ),
            Self::OutOfMemory(figures) => figures.fmt(f),
            Self::OverLimit { asked, used, limit } => {
                write!(f, "{asked} asked for, and {used} of the limit of {limit} are used; free something, or raise it")
            }
            Self::OutOfFiles(Shortage { needed, limit, hard }) => write!(
                f,
                "no open file left for another chunk: {needed} needed, what is kept for the application included, and the \
                 open-file limit is {limit} (hard {hard}); raise it (ulimit -n), or use fewer and larger chunks"
            ),
            Self::OutOfMaps(Shortage { needed, limit, .. }) => write!(
                f,
                "no memory map entry left: {needed} needed, and vm.max_map_count is {limit}; raise it (sysctl), or use \
                 larger chunks"
            ),
            Self::UnknownDevice { asked, known } => {
                write!(f, "there is no device named {asked:?}; the names are {known}")
            }
            Self::NoDevice { asked, why } => write!(f, "device {asked} cannot be opened: {why}"),
            Self::Host(error) => error.fmt(f),
            Self::Refused { device, reason } => write!(
                f,
                "no virtual memory on {device}: {reason}; the buffer's policy refuses to run without, choose another \
                 fallback policy to run in one allocation"
            ),
            Self::FallbackFull { asked, capacity } => write!(
                f,
                "{asked} asked for, and the one contiguous block of {capacity} may not move; build the buffer with a \
                 larger capacity, or with the policy that lets it move"
            ),
            Self::NotHostVisible { device } => {
                write!(f, "the host cannot touch memory of {device} directly; use copy_in and copy_out")
            }
            Self::OtherDevice { what, theirs, ours } => {
                write!(f, "{what} belongs to {theirs}, and was used with {ours}; use one of the same device")
            }
            Self::OutOfStep { member, len, asked } => write!(
                f,
                "member {member} of the set has {len} elements already, more than the {asked} the set asks of it; \
                 change the length of members through the set alone"
            ),
            Self::Blocked { asked, usable } => write!(
                f,
                "{asked} asked for, and only {usable} of the span can be used: a mapping beyond could not be taken away \
                 earlier; build a new buffer"
            ),
            Self::Rollback { first, then } => write!(f, "{first}; and undoing it failed: {then}"),
            Self::NotReturned { bytes, source } => write!(f, "{bytes} could not be given back to the driver: {source}"),
            Self::NotLent { asked, why } => write!(f, "{asked} were to be lent, which cannot be: {why}"),
            Self::Shared => f.write_str(
                "a chunk of the buffer was exported, so others may change it at any time; use copy_in and copy_out",
            ),
            Self::EventNotRecorded => {
                f.write_str("the event was never recorded, so there is nothing to wait for; record it behind the work")
            }
            Self::EventInUse => f.write_str(
                "memory waits for where this event was recorded, and it was made elsewhere; record another event",
            ),
            Self::Capturing { device } => write!(
                f,
                "a stream of {device} is capturing a graph, when memory may neither be mapped nor unmapped; grow before \
                 the capture, shrink after it"
            ),
            Self::PinOptions { why } => f.write_str(why),
            Self::HostMemory { asked, available, total } => write!(
                f,
                "{asked} of host memory were asked for to be page-locked, and {available} of {total} can be had without \
                 swapping (MemAvailable, and the limits of the control groups); ask for less, or stop what holds it"
            ),
            Self::HostMap { what, asked, source } => write!(
                f,
                "{what} failed for {asked} of host memory ({source}); look at vm.max_map_count, vm.overcommit_memory and \
                 ulimit -v"
            ),
            Self::NumaNode { node, known, source } => match known {
                Some(known) => {
                    write!(f, "memory cannot come from NUMA node {node} ({source}); nodes with memory: {known}")
                }
                None => write!(f, "memory cannot come from NUMA node {node} ({source}); this kernel lists no nodes"),
            },
            Self::ThpRefused { source } => write!(
                f,
                "transparent huge pages could not be turned off for the process (PR_SET_THP_DISABLE: {source}); choose \
                 another policy, or turn them off before the program starts"
            ),
            Self::Cancelled { done, asked } => {
                write!(f, "cancelled at {done} of {asked}; what had been done was undone")
            }
            Self::Fill { asked, source } => write!(f, "filling {asked} of page-locked memory failed: {source}"),
            Self::DeviceLost(error) => write!(f, "the device was lost: {error}; restart the process"),
            Self::Forked => f.write_str(
                "called from a forked child process, where device memory belongs to the parent; open a device of its \
                 own after exec",
            ),
            Self::Ahead { asked, source } => write!(
                f,
                "mapping {asked} ahead of need failed in the background: {source}; the buffer is as it was, grow it again to \
                 map what it needs now"
            ),
            Self::NoThread { why } => {
                write!(f, "the thread that maps ahead of need could not be started: {why}; the buffer grows without it")
            }
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Reserve { source, .. } | Self::NotReturned { source, .. } => Some(source),
            Self::HostMap { source, .. }
            | Self::NumaNode { source, .. }
            | Self::ThpRefused { source }
            | Self::Fill { source, .. } => Some(source),
            Self::OutOfMemory(figures) => Some(&figures.source),
            Self::Rollback { first, .. } => Some(first),
            Self::Ahead { source, .. } => Some(source),
            Self::DeviceLost(error) | Self::Driver(error) => Some(error),
            Self::Host(error) => Some(error),
            _ => None,
        }
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        match error.kind() {
            DriverErrorKind::DeviceLost => Self::DeviceLost(error),
            DriverErrorKind::Forked => Self::Forked,
            _ => Self::Driver(error),
        }
    }
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}
