//! Containers of device memory, generic over the allocator: a vector, a slab, a ring.
//!
//! They keep addresses and copy through the allocator, so the host need not see the memory, and they run on any of
//! growspan's devices and on any stack of its allocators.
//!
//! ```
//! use gpu_containers::DeviceVec;
//! use growspan::{Device, SpanAllocator};
//!
//! # fn main() -> growspan::Result<()> {
//! let device = Device::named("auto")?; // a card, or host memory where there is none
//! let allocator = SpanAllocator::builder(&device).build_on_device()?;
//! let mut numbers = DeviceVec::new_in(allocator);
//! numbers.extend_from_slice(&[1.0_f32, 2.0, 3.0])?;
//! numbers.push(4.0)?;
//! assert_eq!(numbers.to_vec()?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok(())
//! # }
//! ```
//!
//! A container gives its memory back when it is dropped, and may move when it grows: work of yours that uses it is over
//! by then, or its allocator is a handle of the stream that the work was queued on.

mod ring;
mod slab;
mod vec;

pub use ring::RingBuffer;
pub use slab::{DeviceSlab, Key};
pub use vec::DeviceVec;
