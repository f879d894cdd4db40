//! Every row of the table is needed: what it is for works with it, and does not without.

use core::time::Duration;
use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;

use growspan::driver::hip::quirks::{Quirk, TABLE};
use growspan::driver::hip::{HipDriver, HipOptions};
use growspan::driver::{CheckForm, ChunkProps, Driver, DriverErrorKind, Shareable};
use growspan::{Bytes, Device, DeviceOptions, Granularity, GrowableBuffer, Mode, Quiesce, Sizing};

use crate::child::Child;
use crate::stand_in::StandIn;
use crate::world::MIB;

const CHUNK: u64 = 2 << 20;

/// Where a row is proved.
struct Proof {
    quirk: Quirk,
    child: fn() -> Child,
    /// What is seen without the row.
    without: &'static str,
    scene: fn(HipOptions),
}

fn proofs() -> Vec<Proof> {
    use Quirk as Q;
    let proof = |quirk, child, without, scene| Proof { quirk, child, without, scene };
    vec![
        proof(
            Q::NoVirtualMemory,
            || Child::of("5.7"),
            "VirtualMemoryManagementSupported is 0",
            |hip| {
                off(hip, "HIP has virtual memory on Linux since ROCm 6.1");
            },
        ),
        proof(
            Q::NeverReturns,
            || Child::of("6.4.0"),
            "and rose by 0 MiB after its release",
            |hip| {
                off(hip, "never gives released memory back");
            },
        ),
        proof(
            Q::OldKernel,
            || Child::of("old-drm"),
            "did not return within",
            |hip| {
                off(hip.kernel_driver(3, 57), "older than 3.64 (this one is 3.57)");
            },
        ),
        proof(Q::Gfx12, || Child::of("gfx1201"), "virtual memory is on", |hip| off(hip, "this one is gfx1201")),
        proof(Q::OneChunkSize, || Child::of("7.2.4"), "call: SetAccess", mixed_sizes),
        proof(Q::SmallChunks, || Child::of("6.4.3"), "OutOfMemory", large_chunks),
        proof(Q::CurrentDevice, || Child::of("7.2.4").set("FAKE_AMDHIP_DEVICES", "2"), "on device 0", other_device),
        proof(Q::SilentMap, || Child::of("6.4.3"), "misuse: hipMemUnmap", failed_map),
        proof(Q::KeptReference, || Child::of("6.4.3"), "bytes are still used", failed_map),
        proof(Q::KeptUnderSpan, || Child::of("7.2.4"), "rose by 0 MiB after its release", memory_returns),
        proof(Q::FilePerChunk, || Child::of("7.14.1").under(&["-Sn 1024", "-Hn 4096"]), "OutOfFiles", many_chunks),
        proof(Q::MapEntryPerChunk, || Child::of("10.0"), "no map entries are counted", map_entries),
        proof(
            Q::PeersFirst,
            || Child::of("7.14.1").set("FAKE_AMDHIP_DEVICES", "2"),
            "the contents are gone",
            |hip| peers(hip.peers([1])),
        ),
        proof(
            Q::LateMapping,
            || Child::of("gfx1201").set("GROWSPAN_HIP_FORCE", "1"),
            "0xa1 was written at offset 0 and 0x00 was read back",
            virtual_memory_works,
        ),
        proof(Q::CopyInOneChunk, || Child::of("6.1"), "reading back: copy in failed", virtual_memory_works),
        proof(Q::AlignByHand, || Child::of("6.4.3"), "is not aligned", aligned),
        proof(Q::AlignByHand, || Child::of("7.2.4"), "call: Reserve", aligned),
        proof(Q::LateRelease, || Child::of("6.4.3"), "was forgotten with the one that was there", spans_come_and_go),
        proof(Q::FileForAccess, || Child::of("10.0"), "call: SetAccess", imported),
        proof(
            Q::FreeIgnoresGraphics,
            || Child::of("7.14.1").set("FAKE_AMDHIP_GRAPHICS_MIB", "4096"),
            "more is said to be free than there is",
            graphics,
        ),
        proof(Q::MovedMemory, || Child::of("7.14.1"), "is not told", |hip| told(hip, "memory that the kernel moves")),
        proof(Q::LostFiles, || Child::of("7.2.4"), "is not told", |hip| told(hip, "an open file may be lost")),
        proof(Q::AnyFailureIsOutOfMemory, || Child::of("7.14.1").under(&["-n 64"]), "OutOfMemory", out_of_files),
    ]
}

#[test]
fn every_row_works_and_is_needed() {
    for Proof { quirk, child, without, .. } in proofs() {
        child().role_well(&format!("row {quirk:?} with"));
        let ended = child().role(&format!("row {quirk:?} without"));
        let status = ended.status.unwrap_or_else(|| panic!("{quirk:?} hangs without its row:\n{}", ended.text));
        assert!(!status.success(), "{quirk:?} is not needed:\n{}", ended.text);
        assert!(ended.text.contains(without), "{quirk:?}: {without:?} is not what is seen without it:\n{}", ended.text);
    }
}

#[test]
fn every_row_has_its_proof() {
    for row in TABLE {
        // Windows is looked for by its name alone, which a test of the table does.
        let proved = row.quirk == Quirk::Windows || proofs().iter().any(|proof| proof.quirk == row.quirk);
        assert!(proved, "{:?} has no proof", row.quirk);
    }
}

pub(crate) fn as_child(which: &str) {
    let (name, how) = which.split_once(' ').unwrap();
    let proof = proofs().into_iter().find(|proof| format!("{:?}", proof.quirk) == name).unwrap();
    let options = HipOptions::new();
    (proof.scene)(match how {
        // SAFETY: the runtime is the stand-in, which ends this process where a real one would do harm.
        "without" => unsafe { options.without(proof.quirk) },
        _ => options,
    });
}

/// What most scenes open: in chunks of 2 MiB or more whatever is recommended, and not for long if it hangs.
fn options() -> DeviceOptions {
    DeviceOptions::new().granularity(Granularity::AtLeast2MiB).patience(Duration::from_secs(1))
}

fn open(hip: HipOptions, options: DeviceOptions) -> Device {
    options.open(Arc::new(HipDriver::open_with(0, hip).unwrap())).unwrap()
}

/// Virtual memory is off for this reason.
fn off(hip: HipOptions, text: &str) {
    let device = open(hip, options());
    let reason = device.verdict().reason().map_or("virtual memory is on".to_owned(), ToString::to_string);
    assert!(reason.contains(text), "{reason}");
}

/// Of what cannot be treated, whoever asks is told.
fn told(hip: HipOptions, text: &str) {
    let driver = HipDriver::open_with(0, hip).unwrap();
    assert!(driver.info().known_faults.iter().any(|fault| fault.what.starts_with(text)), "{text} is not told");
}

fn virtual_memory_works(hip: HipOptions) {
    let device = open(hip, options());
    if let Some(reason) = device.verdict().reason() {
        panic!("{reason}");
    }
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    for n in 0..9 {
        buffer.append(&vec![n; MIB]).unwrap();
    }
    let mut back = vec![0; 9 * MIB];
    buffer.copy_out(0, &mut back).unwrap();
    assert!(back.chunks(MIB).zip(0..).all(|(part, n)| part.iter().all(|byte| *byte == n)), "the contents are gone");
}

fn mixed_sizes(hip: HipOptions) {
    // The full check would find it by itself.
    let device = open(hip, options().check(CheckForm::Cheap));
    let builder = GrowableBuffer::<u8>::builder(&device).max_len(256 * MIB);
    let mut buffer = builder.sizing(Sizing::Exact).build().unwrap();
    // Sizes from the start that never add up to the last one: the ladder's do, at every step, but for exact shrinks.
    for len in [2, 4, 6, 14].map(|mib| mib * MIB) {
        buffer.grow_to(len).unwrap();
    }
}

fn large_chunks(hip: HipOptions) {
    let device = open(hip, options());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(16 << 30).build().unwrap();
    buffer.grow_to(8 << 30).unwrap();
    assert!(buffer.chunks().iter().all(|chunk| chunk.bytes <= Bytes::mib(256)));
}

/// The memory is that of the device asked for, with another one current.
fn other_device(hip: HipOptions) {
    let stand_in = StandIn::get();
    let driver = HipDriver::open_with(1, hip).unwrap();
    stand_in.make_current(0);
    let span = driver.reserve(CHUNK, CHUNK).unwrap();
    let handle = driver.create(CHUNK, ChunkProps::PLAIN).unwrap();
    // SAFETY: the chunk is mapped nowhere, whole, within the span.
    unsafe { driver.map(span, CHUNK, handle) }.unwrap();
    let on = stand_in.device_of(span);
    assert_eq!(on, 1, "the chunk is on device {on}");
    // SAFETY: the mapping is whole, and nothing uses it.
    unsafe { driver.unmap(span, CHUNK) }.unwrap();
    // SAFETY: the handle is mapped nowhere and not used again.
    unsafe { driver.release(handle) }.unwrap();
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, CHUNK) }.unwrap();
}

/// A map that the runtime says it has made: the growth fails, and everything is as it was.
fn failed_map(hip: HipOptions) {
    let (stand_in, device) = (StandIn::get(), open(hip, options().pool_keep(Bytes::ZERO)));
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&[7; MIB]).unwrap();
    let before = stand_in.figures(0);
    for nth in 1..=3 {
        stand_in.fail_map(nth);
        let error = buffer.grow_to(9 * MIB).unwrap_err();
        println!("{error}");
        assert!(error.to_string().contains("set access failed"), "{error}");
        let after = stand_in.figures(0);
        assert_eq!(after.bytes_used, before.bytes_used, "{} bytes are still used", after.bytes_used);
        assert_eq!(after, before);
    }
    buffer.grow_to(9 * MIB).unwrap();
    buffer.close().unwrap();
    assert_eq!(stand_in.figures(0).bytes_used, 0, "bytes are still used");
}

fn memory_returns(hip: HipOptions) {
    let device = open(hip, options().pool_keep(Bytes::ZERO));
    if let Some(reason) = device.verdict().reason() {
        panic!("{reason}");
    }
    let free = device.memory().unwrap().free;
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.grow_to(64 * MIB).unwrap();
    assert_eq!(device.memory().unwrap().free, free - (64 << 20));
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    assert_eq!(device.memory().unwrap().free, free, "the span is still reserved");
    // And what is mapped there again is memory as before.
    buffer.append(&[5; 3 * MIB]).unwrap();
    let mut back = vec![0; 3 * MIB];
    buffer.copy_out(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 5));
}

fn many_chunks(hip: HipOptions) {
    let arena = options().arena(Bytes::mib(2400)).sizing(Sizing::Uniform(Bytes::mib(2)));
    let device = open(hip, arena);
    assert_eq!(device.verdict().mode(), Mode::Virtual, "{}", device.verdict().report());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(2400 * MIB).build().unwrap();
    buffer.grow_to(2400 * MIB).unwrap();
    assert_eq!(buffer.chunks().len(), 1200);
    assert_eq!(device.snapshot().open_files.unwrap().ours, 1200);
}

fn map_entries(hip: HipOptions) {
    let device = open(hip, options());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.grow_to(64 * MIB).unwrap();
    let entries = device.snapshot().map_entries.map_or(0, |entries| entries.ours);
    assert_eq!(entries, buffer.chunks().len() as u64, "no map entries are counted");
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert_eq!(entries, maps.matches("/memfd:fake-amdhip").count() as u64, "as the kernel counts");
}

/// A chunk that keeps its contents from one place to the next, with a peer that has access too.
fn peers(hip: HipOptions) {
    let driver = HipDriver::open_with(0, hip).unwrap();
    let span = driver.reserve(4 * CHUNK, CHUNK).unwrap();
    let handle = driver.create(CHUNK, ChunkProps::PLAIN).unwrap();
    let wrote = [0x5e; 4096];
    let mut read = [0; 4096];
    for n in 0..4 {
        let at = span + n * CHUNK;
        // SAFETY: the chunk is mapped nowhere, whole, within the span.
        unsafe { driver.map(at, CHUNK, handle) }.unwrap();
        // SAFETY: it is mapped just there.
        unsafe { driver.set_access(at, CHUNK) }.unwrap();
        if n == 0 {
            // SAFETY: the memory is mapped, and the copy is over when this returns.
            unsafe { driver.copy_in(at, wrote.as_ptr(), 4096, None) }.unwrap();
        }
        // SAFETY: as above.
        unsafe { driver.copy_out(read.as_mut_ptr(), at, 4096, None) }.unwrap();
        assert_eq!(read, wrote, "the contents are gone");
        // SAFETY: the mapping is whole, and nothing uses it.
        unsafe { driver.unmap(at, CHUNK) }.unwrap();
    }
    // SAFETY: the handle is mapped nowhere and not used again.
    unsafe { driver.release(handle) }.unwrap();
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, 4 * CHUNK) }.unwrap();
}

fn aligned(hip: HipOptions) {
    let driver = HipDriver::open_with(0, hip).unwrap();
    let mut spans = Vec::new();
    for align in (21..34).map(|bits| 1 << bits) {
        let span = driver.reserve(3 * CHUNK, align).unwrap();
        assert!(span.is_multiple_of(align), "{span:#x} is not aligned to {align:#x}");
        spans.push(span);
    }
    for span in spans {
        // SAFETY: nothing is mapped in the span.
        unsafe { driver.free_span(span, 3 * CHUNK) }.unwrap();
    }
    assert_eq!(StandIn::get().figures(0).spans, 0);
}

fn spans_come_and_go(hip: HipOptions) {
    let driver = HipDriver::open_with(0, hip).unwrap();
    for n in 1..=200 {
        let bytes = n % 5 * CHUNK + CHUNK;
        let span = driver.reserve(bytes, CHUNK).unwrap();
        // SAFETY: nothing is mapped in the span.
        unsafe { driver.free_span(span, bytes) }.unwrap();
    }
    // No more addresses are kept than it takes, and not for longer.
    let kept = || fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let before = kept();
    std::thread::sleep(Duration::from_millis(350));
    let span = driver.reserve(CHUNK, CHUNK).unwrap();
    assert!(kept() <= before, "addresses stay held");
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, CHUNK) }.unwrap();
}

fn imported(hip: HipOptions) {
    let driver = HipDriver::open_with(0, hip).unwrap();
    let span = driver.reserve(2 * CHUNK, CHUNK).unwrap();
    let handle = driver.create(CHUNK, ChunkProps::PLAIN.with_shareable(Shareable::PosixFd)).unwrap();
    // SAFETY: the handle is valid.
    let file = unsafe { driver.export(handle) }.unwrap();
    // SAFETY: the file was just exported, for so many bytes.
    let import = unsafe { driver.import(file.as_fd(), CHUNK) }.unwrap();
    drop(file);
    for (handle, at) in [(handle, span), (import, span + CHUNK)] {
        // SAFETY: the chunk is mapped nowhere, whole, within the span.
        unsafe { driver.map(at, CHUNK, handle) }.unwrap();
        // SAFETY: it is mapped just there.
        unsafe { driver.set_access(at, CHUNK) }.unwrap();
    }
    // SAFETY: the memory is mapped, and the fill is over when this returns.
    unsafe { driver.fill(span, 0x77, CHUNK, None) }.unwrap();
    let mut read = [0; 100];
    // SAFETY: as above.
    unsafe { driver.copy_out(read.as_mut_ptr(), span + 2 * CHUNK - 100, 100, None) }.unwrap();
    assert_eq!(read, [0x77; 100], "both are the same memory");
    for (handle, at) in [(handle, span), (import, span + CHUNK)] {
        // SAFETY: the mapping is whole, and nothing uses it.
        unsafe { driver.unmap(at, CHUNK) }.unwrap();
        // SAFETY: the handle is mapped nowhere and not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, 2 * CHUNK) }.unwrap();
}

/// A desktop holds memory that the runtime does not count; the kernel does.
fn graphics(hip: HipOptions) {
    let root = std::env::temp_dir().join(format!("growspan-hip-sysfs-{}", std::process::id()));
    let folder = root.join("bus/pci/devices/0000:03:00.0");
    fs::create_dir_all(&folder).unwrap();
    let total = 32_624_u64 << 20;
    fs::write(folder.join("mem_info_vram_total"), format!("{total}\n")).unwrap();
    fs::write(folder.join("mem_info_vram_used"), format!("{}\n", 4096_u64 << 20)).unwrap();
    let driver = HipDriver::open_with(0, hip.sysfs(&root)).unwrap();
    let memory = driver.memory().unwrap();
    fs::remove_dir_all(&root).unwrap();
    assert_eq!(memory.total, total);
    assert!(memory.free <= total - (4096 << 20), "more is said to be free than there is: {memory:?}");
}

/// ROCm calls it out of memory when it runs out of open files.
fn out_of_files(hip: HipOptions) {
    let driver = HipDriver::open_with(0, hip).unwrap();
    let mut handles = Vec::new();
    let error = loop {
        match driver.create(CHUNK, ChunkProps::PLAIN) {
            Ok(handle) => handles.push(handle),
            Err(error) => break error,
        }
    };
    println!("after {} chunks: {error}", handles.len());
    for handle in handles {
        // SAFETY: the handle is mapped nowhere and not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
    assert_eq!(error.kind(), DriverErrorKind::OutOfFiles, "{:?}", error.kind());
    assert!(error.to_string().ends_with("files open, limit 64"), "{error}");
}
