//! The allocator over page-locked memory: what it holds stays where it is, and nothing is let go of too early or never.

use core::alloc::Layout;
use core::ptr::NonNull;
use std::fs;
use std::sync::Arc;

use growspan::driver::fault::FaultPlan;
use growspan::driver::host::HostOptions;
use growspan::driver::sim::{SimDriver, SimOptions, ViolationKind};
use growspan::driver::{Call, DriverErrorKind, RawStream};
use growspan::{Block, Bytes, ChunkPool, Device, Error, GrowableBuffer, Headroom, SpanAllocator, SpanAllocatorBuilder};

use crate::child::role_well;
use crate::{MIB, World};

/// Where the simulated device sees what the host sees.
const OFFSET: u64 = 1 << 57;

pub(crate) fn as_child(role: &str) {
    match role {
        "allocator limit" => locked_memory_limit(),
        "allocator kept" => kept_by_the_kernel(),
        "allocator lost" => outlives_its_device(),
        "allocator fork" => forked(),
        other => panic!("no role {other}"),
    }
}

fn options() -> HostOptions {
    HostOptions::default().with_capacity(Bytes::mib(96)).with_granularity(Bytes::kib(64))
}

fn builder(device: &Device) -> SpanAllocatorBuilder {
    let headroom = Headroom::default().with_least(Bytes::mib(64));
    SpanAllocator::builder(device).headroom(headroom).keep(Bytes::mib(1)).heaps(2)
}

fn page_locked(device: &Device) -> SpanAllocator {
    builder(device).build_page_locked(options()).unwrap()
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).unwrap()
}

/// A block with bytes of its own in it.
struct Filled {
    block: Block,
    layout: Layout,
    seed: u8,
}

impl Filled {
    fn new(allocator: &SpanAllocator, bytes: usize, seed: u8) -> growspan::Result<Self> {
        let layout = layout(bytes);
        let mut this = Self { block: allocator.allocate(layout)?, layout, seed };
        this.fill(0);
        Ok(this)
    }

    /// Writes its bytes from one on.
    fn fill(&mut self, from: usize) {
        // SAFETY: the block has so many bytes, which hold something, and is ours.
        let bytes = unsafe { core::slice::from_raw_parts_mut(self.block.ptr().as_ptr(), self.layout.size()) };
        (from..bytes.len()).for_each(|at| bytes[at] = self.byte(at));
    }

    fn byte(&self, at: usize) -> u8 {
        self.seed.wrapping_add((at >> 8) as u8)
    }

    fn slice(&self) -> &[u8] {
        // SAFETY: the block has so many bytes, which were written; it lives as long as this.
        unsafe { core::slice::from_raw_parts(self.block.ptr().as_ptr(), self.layout.size()) }
    }

    fn is_whole(&self) -> bool {
        self.slice().iter().enumerate().all(|(at, byte)| *byte == self.byte(at))
    }

    fn grow(&mut self, allocator: &SpanAllocator, bytes: usize) -> growspan::Result<()> {
        let (old, new) = (self.layout, layout(bytes));
        // SAFETY: the block is live and has this layout.
        self.block = unsafe { allocator.grow(self.block.ptr(), old, new) }?;
        self.layout = new;
        self.fill(old.size());
        Ok(())
    }

    fn free(self, allocator: &SpanAllocator) {
        // SAFETY: the block is live, has this layout, and is used no more.
        unsafe { allocator.deallocate(self.block.ptr(), self.layout) };
    }
}

#[test]
fn blocks_are_page_locked_and_the_device_sees_them_where_its_driver_says() {
    for world in World::all() {
        let allocator = page_locked(&world.device);
        assert!(allocator.device().is(&world.device));
        let offset = if world.sim.is_some() { OFFSET } else { 0 };
        let mut blocks = Vec::new();
        for (number, bytes) in [1, 100, 40_000, 70_000, MIB, 5 * MIB + 3].into_iter().enumerate() {
            blocks.push(Filled::new(&allocator, bytes, number as u8).unwrap());
        }
        for filled in &blocks {
            assert!(filled.is_whole());
            let (host, bytes) = (filled.block.ptr().addr().get() as u64, filled.layout.size() as u64);
            assert_eq!(allocator.device_ptr(filled.slice()), Some(host + offset), "{}", world.name);
            // Pieces follow one another and have no more than was asked about.
            let mut end = 0;
            for piece in allocator.pinned_pieces(filled.slice()) {
                assert_eq!((piece.offset.get(), piece.host_ptr), (end, host + end));
                assert_eq!(piece.device_ptr, Some(host + end + offset));
                end += piece.bytes.get();
            }
            assert_eq!(end, bytes);
            let last = &filled.slice()[filled.layout.size() - 1..];
            assert_eq!(allocator.device_ptr(last), Some(host + bytes - 1 + offset));
        }
        if let Some(sim) = &world.sim {
            let figures = sim.figures();
            assert_eq!(figures.pinned, allocator.figures().bytes_committed, "all of it and nothing else");
        }
        // What is not this allocator's, or reaches beyond what is there.
        let other = [0_u8; 100];
        let other = other.as_slice();
        assert_eq!((allocator.device_ptr(other), allocator.pinned_pieces(other)), (None, vec![]));
        assert_eq!(allocator.device_ptr(other.get(..0).unwrap()), None);
        let last = &blocks[5];
        let beyond = core::ptr::slice_from_raw_parts(last.block.ptr().as_ptr(), 1 << 40);
        assert_eq!((allocator.device_ptr(beyond), allocator.pinned_pieces(beyond)), (None, vec![]));
        let wraps = core::ptr::slice_from_raw_parts(last.block.ptr().as_ptr().cast::<u64>(), usize::MAX);
        assert_eq!(allocator.device_ptr(wraps), None);
        blocks.into_iter().for_each(|filled| filled.free(&allocator));
        drop(allocator);
        world.assert_clean();
        assert_eq!(world.pins().unwrap_or(0), 0);
    }
}

#[test]
fn large_blocks_grow_and_shrink_where_they_are() {
    for world in World::all() {
        let allocator = page_locked(&world.device);
        let mut filled = Filled::new(&allocator, 70_000, 3).unwrap();
        let address = filled.block.ptr();
        for bytes in [200_000, MIB, 4 * MIB + 1, 20 * MIB] {
            filled.grow(&allocator, bytes).unwrap();
            assert_eq!(filled.block.ptr(), address);
            assert!(filled.is_whole() && allocator.device_ptr(filled.slice()).is_some());
        }
        let before = world.pins();
        let small = layout(300_000);
        // SAFETY: the block is live and has this layout.
        filled.block = unsafe { allocator.shrink(address, filled.layout, small) }.unwrap();
        filled.layout = small;
        assert!(filled.is_whole() && filled.block.ptr() == address);
        assert!(allocator.figures().bytes_committed < Bytes::mib(1), "{}", allocator.figures());
        assert!(before.is_none_or(|before| world.pins() < Some(before)), "what was given up is let go of");
        // More than there may be.
        let error = filled.grow(&allocator, 100 * MIB).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        assert!(filled.is_whole());
        filled.free(&allocator);
        drop(allocator);
        world.assert_clean();
    }
}

#[test]
fn what_is_freed_is_let_go_of_by_threshold_and_by_trim() {
    let world = World::sim();
    let allocator = page_locked(&world.device);
    let pinned = || world.sim.as_ref().unwrap().figures().pinned.get();
    for sizes in [vec![30_000; 600], vec![3 * MIB; 6]] {
        let blocks: Vec<_> = sizes.iter().map(|bytes| Filled::new(&allocator, *bytes, 1).unwrap()).collect();
        assert!(pinned() >= 16 << 20);
        blocks.into_iter().for_each(|filled| filled.free(&allocator));
        assert!(pinned() <= 2 << 20, "{} stay locked", pinned());
        assert_eq!(allocator.figures().bytes_committed.get(), pinned());
        allocator.trim();
        assert_eq!((pinned(), allocator.figures().bytes_committed), (0, Bytes::ZERO));
    }
    drop(allocator);
    world.assert_clean();
}

#[test]
fn a_failure_in_the_middle_gives_everything_back() {
    for world in World::all() {
        for sizes in [[30_000, 500_000], [3 * MIB, 11 * MIB]] {
            for call in [Call::Pin, Call::PinnedDevicePtr] {
                let mut struck = 0;
                for k in 1.. {
                    let allocator = builder(&world.device).threshold(Bytes::mib(1)).build_page_locked(options());
                    let allocator = allocator.unwrap();
                    let mut kept = Filled::new(&allocator, sizes[0], 9).unwrap();
                    let (before, pins, address) = (allocator.figures(), world.pins(), kept.block.ptr());
                    world.control.arm(FaultPlan::nth(k).of(call));
                    let result = kept.grow(&allocator, sizes[1]);
                    world.control.disarm();
                    assert!(kept.is_whole());
                    if !world.control.struck() {
                        result.unwrap();
                    } else {
                        struck += 1;
                        result.unwrap_err();
                        assert_eq!((kept.block.ptr(), world.pins()), (address, pins), "{} {call:?} {k}", world.name);
                        let after = allocator.figures();
                        assert_eq!((after.blocks, after.bytes_committed), (before.blocks, before.bytes_committed));
                        kept.grow(&allocator, sizes[1]).unwrap();
                    }
                    assert!(kept.is_whole() && allocator.device_ptr(kept.slice()).is_some());
                    kept.free(&allocator);
                    drop(allocator);
                    world.assert_clean();
                    if !world.control.struck() {
                        break;
                    }
                }
                assert!(struck > 0, "{} {call:?}: no call was struck", world.name);
            }
        }
    }
}

/// Memory that the driver does not let go of stays where it is, and is used again.
#[test]
fn memory_that_is_not_let_go_of_stays_and_counts() {
    for world in World::all() {
        let allocator = page_locked(&world.device);
        let filled = Filled::new(&allocator, 6 * MIB, 4).unwrap();
        world.control.arm(FaultPlan::every().of(Call::Unpin));
        filled.free(&allocator);
        allocator.trim();
        world.control.disarm();
        let again = Filled::new(&allocator, 6 * MIB, 5).unwrap();
        assert!(again.is_whole() && allocator.device_ptr(again.slice()).is_some());
        again.free(&allocator);
        // Once is no failure: it is tried again.
        let filled = Filled::new(&allocator, 6 * MIB, 4).unwrap();
        world.control.arm(FaultPlan::nth(1).of(Call::Unpin));
        filled.free(&allocator);
        allocator.trim();
        assert!(world.control.struck());
        world.control.disarm();
        assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
        drop(allocator);
        if let Some(sim) = &world.sim {
            assert!(sim.violations().is_empty(), "{:?}", sim.violations());
        }
    }
}

/// Where memory that is there cannot be registered, the driver makes it: in blocks, which do not grow.
#[test]
fn without_registering_blocks_are_the_driver_s() {
    for world in World::all() {
        world.control.arm(FaultPlan::every().of(Call::Pin).kind(DriverErrorKind::NotSupported));
        let allocator = page_locked(&world.device);
        for bytes in [100, 70_000, 3 * MIB] {
            let mut filled = Filled::new(&allocator, bytes, 8).unwrap();
            assert!(filled.is_whole() && allocator.device_ptr(filled.slice()).is_some(), "{}", world.name);
            filled.grow(&allocator, 2 * bytes).unwrap();
            assert!(filled.is_whole() && allocator.device_ptr(filled.slice()).is_some());
            filled.free(&allocator);
        }
        let count = world.sim.as_ref().map_or(1, |sim| sim.count(Call::AllocatePinned));
        assert!(count > 0);
        // Not more than there may be, and all of that again and again.
        for _ in 0..3 {
            let error = allocator.allocate(layout(97 * MIB)).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory(_)), "{}: {error}", world.name);
            let filled = Filled::new(&allocator, 60 * MIB, 9).unwrap();
            assert!(matches!(allocator.allocate(layout(60 * MIB)), Err(Error::OutOfMemory(_))), "{}", world.name);
            filled.free(&allocator);
        }
        world.control.arm(FaultPlan::every().of(Call::PinnedDevicePtr));
        allocator.allocate(layout(9 * MIB)).unwrap_err();
        world.control.disarm();
        drop(allocator);
        world.assert_clean();
    }
}

/// Host memory is not the card's: neither gives way to the other.
#[test]
fn a_full_allocator_takes_nothing_of_the_card() {
    let (_sim, device) = card();
    let mut hoarder = GrowableBuffer::<u8>::builder(&device).max_len(32 * MIB).build().unwrap();
    hoarder.grow_to(32 * MIB).unwrap();
    hoarder.shrink_to(0, growspan::Quiesce::Device).unwrap();
    let kept = device.snapshot().bytes_pooled;
    assert!(kept >= Bytes::mib(32), "{kept}");
    let allocator = page_locked(&device);
    let block = Filled::new(&allocator, 40 * MIB, 1).unwrap();
    assert!(matches!(Filled::new(&allocator, 80 * MIB, 2), Err(Error::OutOfMemory(_))));
    assert_eq!(device.snapshot().bytes_pooled, kept);
    block.free(&allocator);
}

#[test]
fn blocks_that_outlive_their_allocator_stay_locked() {
    for world in World::all() {
        let allocator = page_locked(&world.device);
        let filled = Filled::new(&allocator, 3 * MIB, 6).unwrap();
        drop(allocator);
        assert!(filled.is_whole());
        assert!(world.pins().is_none_or(|pins| pins > 0));
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let world = World::host();
    let pool = world.device.pool().clone();
    let _: &ChunkPool = &pool;
    let error = builder(&world.device).pool(&pool).build_page_locked(options()).unwrap_err();
    assert!(matches!(error, Error::PinOptions { .. }) && error.to_string().contains("leave it out"), "{error}");
    let much = HostOptions::default().with_capacity(Bytes::gib(1 << 20));
    assert!(matches!(builder(&world.device).build_page_locked(much), Err(Error::Host(_))));
    // One over the host's own memory has nothing page-locked.
    let plain = SpanAllocator::new(&world.device).unwrap();
    let filled = Filled::new(&plain, 100, 1).unwrap();
    assert_eq!((plain.device_ptr(filled.slice()), plain.pinned_pieces(filled.slice())), (None, vec![]));
    filled.free(&plain);
}

/// A card on which copies on streams wait to be waited for.
fn card() -> (SimDriver, Device) {
    let sim = SimOptions::new().queue_copies(true).build();
    let device = Device::from_driver(Arc::new(sim.clone())).unwrap();
    (sim, device)
}

#[test]
fn nothing_is_let_go_of_under_copies_and_kernels() {
    for form in ["trim", "drop", "excess", "shrink"] {
        let (sim, device) = card();
        let mut there = GrowableBuffer::<u8>::builder(&device).max_len(4 * MIB).build().unwrap();
        there.grow_to(4 * MIB).unwrap();
        let allocator = page_locked(&device);
        let filled = Filled::new(&allocator, 4 * MIB, 7).unwrap();
        let stream = sim.stream();
        // SAFETY: the memory stays, and is not written to, until the stream was waited for, which is what is tested.
        unsafe { there.copy_in_on(0, filled.slice(), stream) }.unwrap();
        sim.queue_work(stream, allocator.device_ptr(filled.slice()).unwrap(), 4096);
        match form {
            // Above what may stay: it goes at once.
            "excess" => filled.free(&allocator),
            "trim" => {
                filled.free(&allocator);
                allocator.trim();
            }
            "shrink" => {
                // SAFETY: the block is live and has this layout.
                unsafe { allocator.shrink(filled.block.ptr(), filled.layout, layout(300_000)) }.unwrap();
            }
            _ => {
                filled.free(&allocator);
                drop(allocator);
            }
        }
        assert!(!sim.is_lost() && sim.violations().is_empty(), "{form}: {:?}", sim.violations());
        device.synchronize().unwrap();
        let mut back = vec![0; 4 * MIB];
        there.copy_out(0, &mut back).unwrap();
        assert!(back.iter().enumerate().all(|(at, byte)| *byte == 7_u8.wrapping_add((at >> 8) as u8)), "{form}");
    }
}

/// So that the test above can fail: the work is noticed if nobody waits.
#[test]
fn the_simulated_device_sees_the_memory_of_an_allocator() {
    let (sim, device) = card();
    let allocator = page_locked(&device);
    let filled = Filled::new(&allocator, MIB, 7).unwrap();
    let at = allocator.device_ptr(filled.slice()).unwrap();
    filled.free(&allocator);
    allocator.trim();
    sim.queue_work(sim.stream(), at, 4096);
    sim.finish_all();
    assert_eq!(sim.violations()[0].kind, ViolationKind::IllegalAddress);
}

#[test]
fn blocks_given_back_on_a_stream_are_nobody_s_until_it_has_passed() {
    for bytes in [30_000, 3 * MIB] {
        let (sim, device) = card();
        let allocator = page_locked(&device);
        let stream = sim.stream();
        let handle = allocator.with_stream(stream).unwrap();
        let first = Filled::new(&handle, bytes, 1).unwrap();
        let at = first.block.ptr();
        sim.queue_work(stream, allocator.device_ptr(first.slice()).unwrap(), bytes as u64);
        first.free(&handle);
        // Neither by the same stream, as on the device, nor by another.
        let (same, other) = (Filled::new(&handle, bytes, 2).unwrap(), Filled::new(&allocator, bytes, 3).unwrap());
        assert!(same.block.ptr() != at && other.block.ptr() != at, "{bytes}");
        sim.finish(stream);
        let again = (0..3).map(|seed| Filled::new(&handle, bytes, seed).unwrap()).collect::<Vec<_>>();
        assert!(again.iter().any(|filled| filled.block.ptr() == at), "{bytes}: it is not used again");
        for filled in again.into_iter().chain([same, other]) {
            assert!(filled.is_whole());
            filled.free(&handle);
        }
        drop((handle, allocator));
        assert!(!sim.is_lost() && sim.violations().is_empty(), "{:?}", sim.violations());
        assert_eq!(sim.figures().pins, 0);
    }
}

/// What a block gives up when it shrinks on a stream, work that is queued there may still use.
#[test]
fn what_is_given_up_on_a_stream_stays_with_its_block() {
    let (sim, device) = card();
    let allocator = builder(&device).threshold(Bytes::mib(1)).heaps(1).build_page_locked(options()).unwrap();
    let handle = allocator.with_stream(sim.stream()).unwrap();
    let (old, new) = (layout(500_000), layout(300_000));
    for (of, stays) in [(&handle, true), (&allocator, false)] {
        let block = of.allocate(old).unwrap();
        // SAFETY: the block is live and has this layout.
        let shrunk = unsafe { of.shrink(block.ptr(), old, new) }.unwrap();
        assert_eq!(shrunk.ptr(), block.ptr());
        let others: Vec<_> = (0..20).map(|seed| Filled::new(&allocator, 60_000, seed).unwrap()).collect();
        let tail = block.ptr().addr().get() + 300_000..block.ptr().addr().get() + 500_000;
        let inside = others.iter().any(|other| tail.contains(&other.block.ptr().addr().get()));
        assert_eq!(inside, !stays);
        others.into_iter().for_each(|other| other.free(&allocator));
        // SAFETY: the block is live, has this layout, and is used no more.
        unsafe { allocator.deallocate(block.ptr(), new) };
    }
}

#[test]
fn nothing_is_registered_while_a_graph_is_captured() {
    let (sim, device) = card();
    let allocator = page_locked(&device);
    let filled = Filled::new(&allocator, 3 * MIB, 1).unwrap();
    sim.capture(RawStream::DEFAULT, true);
    let refused = |result: growspan::Result<Block>| matches!(result, Err(Error::Capturing { .. }));
    assert!(refused(allocator.allocate(layout(3 * MIB))) && refused(allocator.allocate(layout(30_000))));
    // Nor let go of; it goes later.
    filled.free(&allocator);
    allocator.trim();
    assert!(sim.figures().pins > 0 && sim.violations().is_empty());
    sim.capture(RawStream::DEFAULT, false);
    allocator.trim();
    assert_eq!(sim.figures().pins, 0);
    drop(allocator);
    sim.assert_clean();
}

#[test]
fn threads_share_it() {
    for world in World::all() {
        let allocator = page_locked(&world.device);
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let allocator = &allocator;
                scope.spawn(move || {
                    let mut mine: Vec<Filled> = Vec::new();
                    for turn in 0..150 {
                        let bytes = 1 + (turn * 7919 + thread * 104_729) % 120_000;
                        match turn % 5 {
                            0..=2 => mine.push(Filled::new(allocator, bytes, turn as u8).unwrap()),
                            3 if !mine.is_empty() => mine.swap_remove(turn % mine.len()).free(allocator),
                            _ => {
                                if let Some(last) = mine.last_mut().filter(|last| last.layout.size() < bytes) {
                                    last.grow(allocator, bytes).unwrap();
                                }
                                allocator.trim();
                            }
                        }
                        assert!(mine.iter().all(|filled| allocator.device_ptr(filled.slice()).is_some()));
                    }
                    for filled in mine {
                        assert!(filled.is_whole());
                        filled.free(allocator);
                    }
                });
            }
        });
        drop(allocator);
        world.assert_clean();
        assert_eq!(world.pins().unwrap_or(0), 0);
    }
}

#[test]
fn the_limit_of_locked_memory_is_an_error_that_says_so() {
    let Some(text) = crate::kernel::under_limit("allocator limit", 4096) else { return };
    assert!(text.contains("LIMIT") && text.contains("RLIMIT_MEMLOCK is 4 MiB"), "{text}");
}

fn locked_memory_limit() {
    let device = Device::host().unwrap();
    let allocator = page_locked(&device);
    let filled = Filled::new(&allocator, MIB, 2).unwrap();
    let before = allocator.figures();
    let error = allocator.allocate(layout(16 * MIB)).unwrap_err();
    assert!(matches!(&error, Error::Driver(error) if error.kind() == DriverErrorKind::LockLimit), "{error}");
    println!("LIMIT {error}");
    assert_eq!(allocator.figures().bytes_committed, before.bytes_committed);
    assert_eq!(crate::kernel::status("VmLck"), before.bytes_committed.get());
    let second = Filled::new(&allocator, MIB, 3).unwrap();
    assert!(filled.is_whole() && second.is_whole());
    filled.free(&allocator);
    second.free(&allocator);
    drop(allocator);
    assert_eq!(crate::kernel::status("VmLck"), 0);
}

#[test]
fn memory_that_the_kernel_does_not_unmap_is_locked_again() {
    role_well("allocator kept", &[]);
}

fn kept_by_the_kernel() {
    let world = World::sim();
    let allocator = page_locked(&world.device);
    let filled = Filled::new(&allocator, 3 * MIB, 2).unwrap();
    let (at, pins) = (filled.block.ptr(), world.pins());
    // Putting a bare reservation back, as at the limit of the memory map.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    crate::seccomp::refuse(libc::SYS_mmap, 3, flags, libc::ENOMEM);
    let small = layout(MIB);
    // SAFETY: the block is live and has this layout.
    let shrunk = unsafe { allocator.shrink(at, filled.layout, small) }.unwrap();
    assert_eq!((shrunk.ptr(), world.pins()), (at, pins));
    let all = core::ptr::slice_from_raw_parts(at.as_ptr(), 3 * MIB);
    assert_eq!(allocator.device_ptr(all), Some(at.addr().get() as u64 + OFFSET));
    core::mem::forget(allocator);
}

#[test]
fn the_host_s_memory_outlives_a_device_that_is_lost() {
    role_well("allocator lost", &[]);
}

fn outlives_its_device() {
    let files = || {
        let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        open.filter(|path| path.to_string_lossy().contains("memfd:growspan")).count()
    };
    for kind in [DriverErrorKind::DeviceLost, DriverErrorKind::ShutDown] {
        let world = World::sim();
        let allocator = page_locked(&world.device);
        let handle = allocator.with_stream(world.sim.as_ref().unwrap().stream()).unwrap();
        let mut filled = Filled::new(&allocator, 3 * MIB, 2).unwrap();
        Filled::new(&handle, 3 * MIB, 4).unwrap().free(&handle);
        world.control.arm(FaultPlan::nth(1).of(Call::Pin).kind(kind));
        let error = filled.grow(&allocator, 30 * MIB).unwrap_err();
        assert!(matches!(error, Error::Driver(_)), "{error}");
        world.control.disarm();
        assert!(filled.is_whole() && files() > 0);
        assert!(filled.grow(&allocator, 30 * MIB).is_err(), "the device takes no more");
        // What is there goes on, and comes back.
        filled.free(&allocator);
        allocator.trim();
        assert_eq!(files(), 0, "{kind:?}: what is not locked is not kept");
        drop((handle, allocator));
        assert_eq!(files(), 0, "{kind:?}");
    }
}

#[test]
fn a_forked_child_has_none_of_it() {
    role_well("allocator fork", &[]);
}

fn forked() {
    let device = Device::host().unwrap();
    let allocator = page_locked(&device);
    let filled = Filled::new(&allocator, 3 * MIB, 2).unwrap();
    // SAFETY: the child makes two calls that touch no lock and ends without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(allocator.allocate(layout(10)), Err(Error::Forked));
        let block: NonNull<u8> = filled.block.ptr();
        // SAFETY: the block is live in the parent; here nothing is done.
        unsafe { allocator.deallocate(block, filled.layout) };
        drop(allocator);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut ended = 0;
    // SAFETY: the pointer is valid for the write.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut ended, 0) }, child);
    assert!(libc::WIFEXITED(ended) && libc::WEXITSTATUS(ended) == 0, "{ended:#x}");
    assert!(filled.is_whole());
    filled.free(&allocator);
}

/// Containers of others, to whom it is an allocator like any.
#[cfg(all(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
mod collections {
    use std::hash::RandomState;

    use allocator_api2_04::boxed::Box as BoxIn;
    use allocator_api2_04::vec::Vec as VecIn;
    use hashbrown::HashMap;

    use super::*;

    #[test]
    fn vectors_and_maps_live_in_page_locked_memory() {
        for world in World::all() {
            let allocator = page_locked(&world.device);
            let mut numbers: VecIn<u64, _> = VecIn::with_capacity_in(100_000, allocator.clone());
            let address = numbers.as_ptr();
            let mut map = HashMap::with_hasher_in(RandomState::new(), allocator.clone());
            for number in 0..1_500_000 {
                numbers.push(number);
                if number % 100 == 0 {
                    map.insert(number, BoxIn::new_in(number, allocator.clone()));
                }
            }
            assert_eq!(numbers.as_ptr(), address);
            assert!(numbers.iter().copied().eq(0..1_500_000));
            assert!((0..1_500_000).step_by(100).all(|number| *map[&number] == number));
            let device_ptr = allocator.device_ptr(numbers.as_slice()).unwrap();
            assert_eq!(device_ptr, address.addr() as u64 + if world.sim.is_some() { OFFSET } else { 0 });
            // A copy to the device, over all borders.
            assert!(allocator.pinned_pieces(numbers.as_slice()).len() > 2);
            let mut there = GrowableBuffer::<u64>::builder(&world.device).max_len(2 * MIB).build().unwrap();
            there.append(&numbers).unwrap();
            let mut back = VecIn::new_in(allocator.clone());
            back.resize(numbers.len(), 0);
            there.copy_out(0, &mut back[..]).unwrap();
            assert!(back == numbers);
            drop((numbers, map, back, there));
            assert_eq!(allocator.figures().blocks, 0);
            drop(allocator);
            assert_eq!(world.pins().unwrap_or(0), 0);
        }
    }
}
