//! How page-locked memory is had, and the size of its pages.

use crate::driver::Backend;

/// Who makes the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PinStrategy {
    /// Memory of our own, put there by many threads and then registered with the driver: all of a growth in one piece on
    /// CUDA, in pieces of at most 2 GiB on HIP, where the kernel starts a piece again if it is disturbed. Grows in place.
    #[default]
    Pieces,
    /// One allocation of the driver's (`cuMemHostAlloc`, `hipHostMalloc`) for the whole maximum length, made at the first
    /// growth. For comparison, and for what only drivers can give: write-combined memory.
    Driver,
}

/// Whether memory gets transparent huge pages.
///
/// Huge pages are quicker to put there, to register and to give back (three times on an H200). But the kernel moves
/// memory about to make them, and AMD's runtime does not hold the pages it registers: any that moves makes the driver
/// start its walk over the range again. So the default differs:
///
/// * CUDA and host: [`Advise`](Self::Advise). Pages that are pinned or locked stay, and all of them are there before the
///   driver sees them.
/// * HIP: [`Avoid`](Self::Avoid). Prefaulting alone does not make huge pages harmless there. Where none could be had at
///   the fault, the kernel makes some later (`khugepaged`), under the driver's eyes; and the faults of the next growth
///   compact memory, which moves pages of the last one. Turning huge pages off is also the one cure that was measured on
///   a machine in that state: 34 s instead of 300 for 28 GiB. What small pages cost is divided among the threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ThpPolicy {
    /// As the system is set.
    Inherit,
    /// Huge pages, where the system lets them be asked for.
    Advise,
    /// No huge pages under this memory, now or later.
    Avoid,
    /// No huge pages in the whole process while memory is being had: the only way to keep a driver's own allocation from
    /// them. See [`ThpOff`](crate::sys::thp::ThpOff).
    DisableForProcess,
}

impl ThpPolicy {
    /// What is right for memory of our own.
    pub(super) const fn of(backend: Backend) -> Self {
        match backend {
            Backend::Hip => Self::Avoid,
            Backend::Cuda | Backend::Host | Backend::Sim => Self::Advise,
        }
    }
}
