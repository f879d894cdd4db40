//! A stand-in for AMD's HIP runtime: the C ABI of `libamdhip64` over real memory files, for tests without an AMD card.
//!
//! It is loaded as the real library is, through the dynamic loader, and has the name that the real one has inside
//! (`libamdhip64.so.7`), so that a copy that is loaded already is found by that name. It is stricter than any real runtime:
//! whatever would crash one of them, lose memory or give garbage without a word ends the process with
//! `fake amdhip: misuse: <function>: <what>`. What a version does its own way is in its personality.
//!
//! # The environment
//!
//! Read once, at the first call.
//!
//! | variable | meaning | otherwise |
//! |---|---|---|
//! | `FAKE_AMDHIP` | the personality, of the table below; an unknown one ends the process | `7.14.1` |
//! | `FAKE_AMDHIP_DEVICES` | how many devices; 0 is as `none` | 1 |
//! | `FAKE_AMDHIP_MEMORY_MIB` | memory of each | 32624 |
//! | `FAKE_AMDHIP_GRAPHICS_MIB` | how much of it is in use by what draws: `hipMemGetInfo` calls it free, and it cannot be had | 0 |
//! | `FAKE_AMDHIP_GFX` | the compiler's name of the devices | `gfx942:sramecc+:xnack-`, or the personality's |
//! | `FAKE_AMDHIP_INTEGRATED` | anything but 0: the devices say that they share the host's memory | 0 |
//! | `FAKE_AMDHIP_DISTURBED` | how often the kernel begins each 2 GiB step of page-locking again, with a millisecond between, where a page is not there yet | 0 |
//! | `FAKE_AMDHIP_PIN_OFFSET` | how far from the host's address the devices see page-locked memory | 0 |
//! | `HIP_VMEM_MANAGE_SUPPORT` | 0 for no virtual memory management, as an old kernel driver has none: as `5.7` has it | on |
//! | `FAKE_AMDHIP_HANG` | a function whose first call never returns, or its nth as `hipGetDeviceCount:2`; the thread stays inside it, and others go on | none hangs |
//! | `FAKE_AMDHIP_SAYS` | what functions say instead of the truth, as `hipGetDeviceCount=-1;hipMemGetInfo=10,5`; also `hipRuntimeGetVersion=N` and `hipMemGetAllocationGranularity=MINIMUM,RECOMMENDED` | the truth |
//! | `FAKE_AMDHIP_PCI` | PCI bus of device 0, decimal or `0x`; device n is n further | 3 |
//!
//! # Personalities
//!
//! | | version | what it does |
//! |---|---|---|
//! | `5.2` | 5.2.21153 | every call returns 101, `hipGetDeviceCount` 100 |
//! | `5.7` | 5.7.31921 | attribute 89 is 0; a reservation succeeds with a null pointer; other virtual memory management 801; blocks work; no `hipGetDevicePropertiesR0600` (801) |
//! | `6.1` | 6.1.40093 | as 6.4.3; nothing can be shared (801); a copy or fill over the border of two mappings returns 1 |
//! | `6.4.0` | 6.4.43482 | as 6.4.3; a handle's memory never comes back |
//! | `6.4.3` | 6.4.43484 | memory from the device that is asked for; a create over 256 MiB returns 2; the alignment of a reservation is ignored; sizes that do not fit return 2; `hipMemRetainAllocationHandle` adds no reference; a failed map is silent; unmap is right or the end |
//! | `7.2.4` | 7.2.53211 | memory from the current device; an alignment returns 1; sizes that do not fit return 1; unmap takes a run of whole mappings or returns 1; access needs a sum of mapping sizes, from the span's first one on, that equals the size; a failed map is silent; **released memory stays in use while addresses map it** (map over them or free them) |
//! | `7.10` | 7.2.53210 | as 7.2.4 |
//! | `7.12` | 7.12.60610 | as 7.2.4; recommended granularity 2 MiB |
//! | `7.13` | 7.13.99004 | as 7.12, and released memory comes back |
//! | `7.14.1` | 7.14.60850 | memory from the current device; recommended granularity 2 MiB; alignments are honoured; a failed map says so (205, or 1 where something is mapped) and keeps no reference; **one open file per handle**; access for a peer after the owner ruins the mapping: it reads zeros and loses writes; access to imported memory needs the descriptor still open |
//! | `10.0` | 7.15.60900 | as 7.14.1, without the open files and without the ruined mappings |
//! | `gfx1201` | 7.14.60850 | as 7.14.1 on a gfx1201 |
//! | `old-drm` | 7.14.60850 | as 7.14.1, and `hipMemSetAccess` never returns; the thread stays inside it, what allocates or frees memory of any kind hangs then too, and everything else goes on |
//! | `none` | 7.14.60850 | no device: every call returns 100 |
//!
//! On all of them: the minimum granularity is 4096 (recommended too, where the table says nothing); a create of 0 bytes or no
//! multiple of 2048 returns 1, and any other failure 2, also of too many open files; a map with an offset or flags, outside
//! reserved addresses, or not of the handle's size, returns 1; access is given to whole mappings or returns 1; addresses with
//! mappings are not freed (999), nor on 6.x those where a handle was released while it was mapped. A map and a grant of access
//! each open a file for as long as they take: where the process may open none, the map fails as maps do, and the grant fails
//! with 1. From 7.0 on, every mapping is an entry of the process's memory map, and a fresh mapping on a `gfx12` device reads zeros and
//! loses writes for 1.5 ms after its access was set. A silently failed map maps nothing and keeps a reference, so that one more
//! release is needed.
//!
//! # What ends the process
//!
//! * `hipMemUnmap` on 6.x of what is not mapped, of another size than was mapped, of several mappings at once.
//! * `hipMemAddressFree` of what is not the start of a reservation, or of another size; also a second one, where the first failed
//!   because it was told to: it has forgotten the addresses then.
//! * `hipFree` of virtual memory management's memory, or of what is no block.
//! * Handles that never were or have been released, to whatever function.
//! * Streams and events that never were, have been destroyed, or are of another device than the current one.
//! * Unmapping or freeing memory that queued work will use.
//! * Copies and fills where nothing is mapped or the device has no access; a copy onto itself; a host pointer that is device
//!   memory, or to memory that is gone when a copy writes it.
//! * Unregistering or freeing page-locked memory that is none, came the other way, has been unmapped meanwhile, or that
//!   queued work will use.
//! * A call of virtual memory management while another thread is inside one.
//! * Any call in a forked child of a process that has used the runtime.
//! * A descriptor where `hipMemImportFromShareableHandle` takes a pointer to one.
//!
//! # Streams
//!
//! Work waits in its stream until something waits for it: for the stream, the device, or an event behind it. A question about
//! an event does one piece of work and then answers. Copies from the host take the bytes at once, as from pageable memory;
//! from page-locked memory when their turn comes, and copies to the host write then. A copy whose host side is page-locked
//! in part, or in two pieces, returns 1. The null stream waits for streams with flags 0 and they for it. What a
//! destroyed stream still had to do is done when the device or an event is waited for.
//!
//! Of captures there is as much as tells what was called during one: virtual memory management and `hipDeviceSynchronize`
//! return 900 and break the capture (not for a relaxed capture or thread), work on a captured stream is not done, and the
//! null stream returns 906 if it would have to wait for one.
//!
//! # Where the memory is
//!
//! A device's memory is one sparse memory file; a handle made to be shared has one of its own, which it keeps open on every
//! version. Reserved addresses are real, and nothing can be read at them. Errors are kept for `hipGetLastError`, by thread.
//!
//! # Asking the stand-in itself
//!
//! [`fake_amdhip_figures`], [`fake_amdhip_calls`], [`fake_amdhip_device_of`], [`fake_amdhip_fail_map`],
//! [`fake_amdhip_fail_call`], [`fake_amdhip_pins`] and [`fake_amdhip_pin_retries`] are for tests that open the same file.

mod abi;
mod blocks;
mod capture;
mod control;
mod copies;
mod devices;
mod exports;
mod memory;
mod misuse;
mod personality;
mod pinned;
mod pointers;
mod runtime;
mod space;
mod streams;
mod table;
#[cfg(test)]
mod tests;
mod vmm;

pub use abi::*;
pub use control::*;
pub use exports::*;
pub use pointers::{In, Out};
