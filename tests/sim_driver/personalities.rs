//! Each personality, by what its runtime is known to do.

use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use growspan::Bytes;
use growspan::driver::sim::{Personality, SimDriver, ViolationKind};
use growspan::driver::{ChunkProps, Driver, DriverErrorKind};

use crate::card::{CHUNK, Card, kind_of};

#[test]
fn granularity_4k() {
    let card = Card::with(&[Personality::Granularity4K]);
    let granularity = card.0.granularity().unwrap();
    assert_eq!((granularity.minimum, granularity.recommended), (4096, 4096));
    let handle = card.create(4096);
    card.release(handle).unwrap();
    let sim = SimDriver::builder().granularity(Bytes::kib(64)).recommended(Bytes::mib(3)).build();
    let granularity = sim.granularity().unwrap();
    assert_eq!((granularity.minimum, granularity.recommended), (64 << 10, 4 << 20));
}

#[test]
fn release_keeps_memory() {
    let card = Card::with(&[Personality::ReleaseKeepsMemory]);
    let all = card.free_memory();
    let spans = [card.reserve(2), card.reserve(1)];
    // Never mapped: returns. Mapped once: waits for every span it was in.
    let handle = card.create(CHUNK);
    card.release(handle).unwrap();
    assert_eq!(card.free_memory(), all);
    let handle = card.chunk(spans[0], CHUNK);
    card.unmap(spans[0], CHUNK).unwrap();
    card.map(spans[1], CHUNK, handle).unwrap();
    card.unmap(spans[1], CHUNK).unwrap();
    card.release(handle).unwrap();
    assert_eq!(card.free_memory(), all - CHUNK);
    assert!(card.0.check_clean().unwrap_err().ends_with("withheld: 2 MiB"));
    card.free_span(spans[0], 2 * CHUNK).unwrap();
    assert_eq!(card.free_memory(), all - CHUNK);
    card.free_span(spans[1], CHUNK).unwrap();
    assert_eq!(card.free_memory(), all);
    // Released when the span is gone already.
    let span = card.reserve(1);
    let handle = card.chunk(span, CHUNK);
    card.unmap(span, CHUNK).unwrap();
    card.free_span(span, CHUNK).unwrap();
    card.release(handle).unwrap();
    assert_eq!(card.free_memory(), all);
    card.0.assert_clean();
}

#[test]
fn open_file_per_chunk() {
    for (as_out_of_memory, kind) in [(false, DriverErrorKind::OutOfFiles), (true, DriverErrorKind::OutOfMemory)] {
        let held = Personality::OpenFilePerChunk { held: 10, soft: 12, hard: 13, as_out_of_memory };
        let sim = SimDriver::builder().personality(held).open_files_by("ROCm").build();
        assert_eq!((sim.info().open_files_per_chunk, sim.info().open_files_by), (1, "ROCm"));
        let card = Card(sim);
        let limits = card.0.limits().unwrap();
        let handles = [card.create(CHUNK), card.create(CHUNK)];
        let files = limits.open_files().unwrap();
        assert_eq!((files.held, files.soft, files.hard), (12, 12, 13));
        assert_eq!(kind_of(card.0.create(CHUNK, ChunkProps::PLAIN)), kind);
        assert_eq!(limits.raise_open_files(14).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(kind_of(card.0.create(CHUNK, ChunkProps::PLAIN)), kind);
        limits.raise_open_files(13).unwrap();
        let third = card.create(CHUNK);
        assert_eq!(kind_of(card.0.create(CHUNK, ChunkProps::PLAIN)), kind);
        for handle in handles.into_iter().chain([third]) {
            card.release(handle).unwrap();
        }
        assert_eq!(limits.open_files().unwrap().held, 10);
        card.0.assert_clean();
    }
}

#[test]
fn map_count_limit() {
    let card = Card::with(&[Personality::MapCountLimit { held: 7, limit: 8 }]);
    assert_eq!(card.0.info().maps_per_chunk, 1);
    let span = card.reserve(2);
    let (first, second) = (card.chunk(span, CHUNK), card.create(CHUNK));
    assert_eq!(kind_of(card.map(span + CHUNK, CHUNK, second)), DriverErrorKind::OutOfMaps);
    assert_eq!(card.0.limits().unwrap().maps().unwrap().held, 8);
    card.unmap(span, CHUNK).unwrap();
    card.map(span + CHUNK, CHUNK, second).unwrap();
    card.unmap(span + CHUNK, CHUNK).unwrap();
    card.release(first).unwrap();
    card.release(second).unwrap();
    card.free_span(span, 2 * CHUNK).unwrap();
    card.0.assert_clean();
}

#[test]
fn uniform_chunks_only() {
    let card = Card::with(&[Personality::UniformChunksOnly]);
    let (mixed, other) = (card.reserve(8), card.reserve(8));
    card.chunk(mixed, CHUNK);
    card.chunk(mixed + CHUNK, CHUNK);
    // Another span may have another size.
    card.chunk(other, 4 * CHUNK);
    let handle = card.create(2 * CHUNK);
    card.map(mixed + 2 * CHUNK, 2 * CHUNK, handle).unwrap();
    assert_eq!(kind_of(card.set_access(mixed + 2 * CHUNK, 2 * CHUNK)), DriverErrorKind::InvalidValue);
    assert!(card.0.violations().is_empty());
    card.unmap(mixed + 2 * CHUNK, 2 * CHUNK).unwrap();
    card.chunk(mixed + 2 * CHUNK, CHUNK);
}

#[test]
fn hangs() {
    for (personality, maps) in [(Personality::HangsInMap, true), (Personality::HangsInSetAccess, false)] {
        let card = Card::with(&[personality]);
        let span = card.reserve(1);
        let handle = card.create(CHUNK);
        let hung = {
            let card = card.clone();
            thread::spawn(move || card.map(span, CHUNK, handle).and_then(|()| card.set_access(span, CHUNK)))
        };
        let start = Instant::now();
        while card.0.hung() == 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "it does not hang");
            thread::yield_now();
        }
        // The rest of the driver goes on.
        card.0.memory().unwrap();
        assert!(!hung.is_finished());
        card.0.let_go();
        assert_eq!(kind_of(hung.join().unwrap()), DriverErrorKind::Other);
        assert_eq!((card.0.hung(), card.0.figures().mappings), (0, u64::from(!maps)));
        if maps {
            assert_eq!(kind_of(card.map(span, CHUNK, handle)), DriverErrorKind::Other);
        } else {
            card.unmap(span, CHUNK).unwrap();
        }
        card.release(handle).unwrap();
        card.free_span(span, CHUNK).unwrap();
        card.0.assert_clean();
    }
}

#[test]
fn stale_after_map() {
    let card = Card::with(&[Personality::StaleAfterMap]);
    let span = card.reserve(4);
    let old = card.chunk(span + CHUNK, CHUNK);
    card.fill(span + CHUNK, 1, CHUNK, None).unwrap();
    card.unmap(span + CHUNK, CHUNK).unwrap();
    // Also after the old chunk is gone, and for the part of a larger chunk that lies there.
    card.release(old).unwrap();
    let unrelated = card.reserve(1);
    card.free_span(unrelated, CHUNK).unwrap();
    let new = card.chunk(span, 4 * CHUNK);
    assert_eq!(card.read(span + CHUNK - 1, 2).unwrap(), [0xA5, 1]);
    assert_eq!(card.read(span + 2 * CHUNK - 1, 2).unwrap(), [1, 0xA5]);
    card.fill(span, 2, 4 * CHUNK, None).unwrap();
    card.unmap(span, 4 * CHUNK).unwrap();
    // The new chunk elsewhere: what was written through the stale part never reached it.
    let other = card.reserve(4);
    card.map(other, 4 * CHUNK, new).unwrap();
    card.set_access(other, 4 * CHUNK).unwrap();
    assert_eq!(card.read(other + CHUNK - 1, 2).unwrap(), [2, 0xA5]);
    card.unmap(other, 4 * CHUNK).unwrap();
    card.release(new).unwrap();
    // The oldest translation stays, however often the memory is swapped.
    let third = card.chunk(span, 4 * CHUNK);
    assert_eq!(card.read(span + 2 * CHUNK - 1, 2).unwrap(), [2, 2]);
    card.fill(span + CHUNK, 3, 1, None).unwrap();
    card.unmap(span, 4 * CHUNK).unwrap();
    card.release(third).unwrap();
    let fourth = card.chunk(span + CHUNK, CHUNK);
    assert_eq!(card.read(span + CHUNK, 2).unwrap(), [3, 2]);
    card.unmap(span + CHUNK, CHUNK).unwrap();
    card.release(fourth).unwrap();
    card.free_span(span, 4 * CHUNK).unwrap();
    card.free_span(other, 4 * CHUNK).unwrap();
    card.0.assert_clean();
}

#[test]
fn stale_translations_end_with_their_span() {
    let card = Card::with(&[Personality::StaleAfterMap]);
    // Not the first address there is, where the large span will start.
    let first = card.reserve(1);
    let old = card.reserve(1);
    card.free_span(first, CHUNK).unwrap();
    let handle = card.chunk(old, CHUNK);
    card.fill(old, 1, CHUNK, None).unwrap();
    card.unmap(old, CHUNK).unwrap();
    card.free_span(old, CHUNK).unwrap();
    let large = reserve_over(&card, old);
    let other = card.chunk(old, CHUNK);
    assert_eq!(card.read(old, 1).unwrap(), [0xA5]);
    card.unmap(old, CHUNK).unwrap();
    card.release(handle).unwrap();
    card.release(other).unwrap();
    // The address is that of another span now, and no longer one that was freed.
    card.breaks(ViolationKind::UnknownSpan, |c| c.free_span(old, CHUNK));
    card.free_span(large, TIB).unwrap();
    card.breaks(ViolationKind::DoubleFree, |c| c.free_span(large, TIB));
    card.0.assert_clean();
}

const TIB: u64 = 1 << 40;

/// Reserves and frees until a span of 1 TiB lies over an address, which takes a tour of all addresses.
fn reserve_over(card: &Card, addr: u64) -> u64 {
    for _ in 0..1000 {
        let span = card.0.reserve(TIB, CHUNK).unwrap();
        if (span..span + TIB - CHUNK).contains(&addr) {
            return span;
        }
        card.free_span(span, TIB).unwrap();
    }
    panic!("addresses do not come round again");
}

#[test]
fn maps_nothing() {
    let card = Card::with(&[Personality::MapsNothing { access_fails: true }]);
    let span = card.reserve(1);
    let handle = card.create(CHUNK);
    card.map(span, CHUNK, handle).unwrap();
    let error = card.set_access(span, CHUNK).unwrap_err();
    assert_eq!((error.kind(), error.code()), (DriverErrorKind::InvalidValue, Some(1)));
    card.unmap(span, CHUNK).unwrap();

    let card = Card::with(&[Personality::MapsNothing { access_fails: false }]);
    let span = card.reserve(1);
    card.chunk(span, CHUNK);
    card.write(span, &[1, 2, 3]).unwrap();
    assert_eq!(card.read(span, 3).unwrap(), [0, 0, 0]);
    card.unmap(span, CHUNK).unwrap();
    assert_eq!(kind_of(card.read(span, 1)), DriverErrorKind::DeviceLost);
}

#[test]
fn reserve_returns_null() {
    let card = Card::with(&[Personality::ReserveReturnsNull]);
    assert_eq!(card.0.reserve(CHUNK, CHUNK).unwrap(), 0);
    card.0.assert_clean();
    card.breaks(ViolationKind::UnknownSpan, |c| c.free_span(0, CHUNK));
}

#[test]
fn no_support_and_vgpu() {
    let card = Card::with(&[Personality::NoSupport]);
    let error = card.0.support().unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::Missing);
    assert!(error.to_string().contains("MemAddressReserve"), "{error}");
    assert_eq!(kind_of(card.0.reserve(CHUNK, CHUNK)), DriverErrorKind::Missing);
    let block = card.0.allocate(64).unwrap();
    card.free(block, 64).unwrap();

    let vgpu = Card::with(&[Personality::VgpuNotSupported]);
    vgpu.0.support().unwrap();
    let error = vgpu.0.create(CHUNK, ChunkProps::PLAIN).unwrap_err();
    assert_eq!((error.kind(), error.code()), (DriverErrorKind::NotSupported, Some(801)));
    vgpu.0.allocate(64).unwrap();
}

#[test]
fn limits_of_addresses_and_figures_of_memory() {
    let limit = Personality::ReserveLimit(4 * CHUNK);
    let card = Card::with(&[limit, Personality::FreeOverReported(1 << 30)]);
    assert_eq!(kind_of(card.0.reserve(5 * CHUNK, CHUNK)), DriverErrorKind::OutOfAddresses);
    card.reserve(4);
    card.0.set_used_by_others(Bytes::gib(20));
    assert_eq!((card.free_memory(), card.0.figures().free), (5 << 30, Bytes::gib(4)));
    assert_eq!(kind_of(card.0.create(5 << 30, ChunkProps::PLAIN)), DriverErrorKind::OutOfMemory);
}
