//! The host driver, through its public door.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the driver's preconditions are what is tested here")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "as above")]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use growspan::Bytes;
use growspan::driver::host::{HostDriver, HostError, HostOptions};
use growspan::driver::{Backend, ChunkProps, Driver, DriverErrorKind as Kind, RawHandle, RawStream, Shareable};

mod process;

const MIB: u64 = 1 << 20;
/// The default granularity.
const G: u64 = 2 * MIB;

fn open(capacity: u64) -> HostDriver {
    HostDriver::open(HostOptions::default().with_capacity(Bytes::new(capacity))).unwrap()
}

fn free(host: &HostDriver) -> u64 {
    host.memory().unwrap().free
}

/// Creates a chunk, maps it at `addr` and makes it accessible.
fn put(host: &HostDriver, addr: u64, bytes: u64) -> RawHandle {
    let handle = host.create(bytes, ChunkProps::PLAIN).unwrap();
    unsafe {
        host.map(addr, bytes, handle).unwrap();
        host.set_access(addr, bytes).unwrap();
    }
    handle
}

fn read(host: &HostDriver, addr: u64) -> u8 {
    let mut byte = [0];
    unsafe { host.copy_out(byte.as_mut_ptr(), addr, 1, None).unwrap() };
    byte[0]
}

fn write(host: &HostDriver, addr: u64, byte: u8) {
    unsafe { host.copy_in(addr, [byte].as_ptr(), 1, None).unwrap() };
}

#[track_caller]
fn misuse<T: std::fmt::Debug>(result: Result<T, growspan::driver::DriverError>, figures: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Misuse, "{error}");
    assert!(error.to_string().contains(figures), "{error} does not say {figures}");
}

/// The ranges of the memory map within `[addr, addr + bytes)`, with their permissions.
fn entries(addr: u64, bytes: u64) -> Vec<(u64, u64, String)> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let entry = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        // Spans side by side are one entry.
        Some((start.max(addr), end.min(addr + bytes), rest[..4].to_owned()))
    };
    text.lines().filter_map(entry).filter(|(start, end, _)| start < end).collect()
}

#[test]
fn it_says_what_it_is() {
    let host = open(64 * MIB + 4096);
    let info = host.info();
    assert_eq!((info.backend, info.id().as_str()), (Backend::Host, "host"));
    assert!(info.name.starts_with("host memory (64 MiB of "), "{}", info.name);
    assert!(info.runtime.starts_with("Linux ") && info.runtime.len() > 8, "{}", info.runtime);
    assert!(info.host_visible && !info.wants_2_mib);
    assert_eq!((info.open_files_per_chunk, info.maps_per_chunk), (1, 1));
    assert_eq!(host.memory().unwrap().total, 64 * MIB, "rounded down to the granularity");
    assert_eq!(host.granularity().unwrap().minimum, G);
    host.support().unwrap();
    assert!(host.limits().is_none());
}

#[test]
fn the_options_are_checked() {
    let open = |options: HostOptions| HostDriver::open(options).map(|host| host.granularity().unwrap().minimum);
    let granularity = |bytes| HostOptions::default().with_capacity(Bytes::mib(8)).with_granularity(Bytes::new(bytes));
    for bad in [0, 1, 2048, 6144, 3 * MIB, u64::MAX] {
        let asked = Bytes::new(bad);
        assert_eq!(open(granularity(bad)), Err(HostError::Granularity { asked, page: Bytes::kib(4) }));
    }
    assert_eq!(open(granularity(4096)), Ok(4096));
    assert_eq!(open(granularity(8 * MIB)), Ok(8 * MIB));
    let too_small = HostError::CapacityTooSmall { asked: Bytes::mib(8), granularity: Bytes::mib(16) };
    assert_eq!(open(granularity(16 * MIB)), Err(too_small));
    let error = open(HostOptions::default().with_capacity(Bytes::new(u64::MAX))).unwrap_err();
    assert!(matches!(error, HostError::CapacityTooLarge { asked, total } if asked.get() == u64::MAX && total < asked));

    let half = HostDriver::open(HostOptions::default()).unwrap().memory().unwrap();
    assert!(half.total > 0 && half.total.is_multiple_of(G) && half.free == half.total);
    let all = open(HostOptions::default().with_capacity(Bytes::new(half.total)));
    assert_eq!(all, Ok(G), "half of the available memory is less than all of it");
}

#[test]
fn data_survives_being_mapped_elsewhere() {
    let host = open(8 * MIB);
    let span = host.reserve(8 * MIB, 64 * MIB).unwrap();
    assert!(span.is_multiple_of(64 * MIB) && span != 0);
    let chunk = put(&host, span, G);
    assert_eq!(read(&host, span + G - 1), 0, "new memory is zero");
    unsafe {
        host.fill(span, 0xAB, G, None).unwrap();
        write(&host, span + G - 1, 0xCD);
        host.unmap(span, G).unwrap();
        host.map(span + 6 * MIB, G, chunk).unwrap();
        // Two mappings of one chunk are one memory.
        host.map(span, G, chunk).unwrap();
        host.set_access(span + 6 * MIB, G).unwrap();
        host.set_access(span, G).unwrap();
        assert_eq!((read(&host, span), read(&host, span + 8 * MIB - 1)), (0xAB, 0xCD));
        write(&host, span + 5, 1);
        assert_eq!(read(&host, span + 6 * MIB + 5), 1);
        host.unmap(span, G).unwrap();
        host.unmap(span + 6 * MIB, G).unwrap();
        host.release(chunk).unwrap();
        host.free_span(span, 8 * MIB).unwrap();
    }
    assert_eq!(free(&host), 8 * MIB);
}

#[test]
fn access_goes_over_several_mappings_at_once() {
    let host = open(8 * MIB);
    let span = host.reserve(8 * MIB, G).unwrap();
    let chunks = [(0, G), (G, 2 * G)].map(|(at, bytes)| {
        let chunk = host.create(bytes, ChunkProps::PLAIN).unwrap();
        unsafe { host.map(span + at, bytes, chunk).unwrap() };
        (at, bytes, chunk)
    });
    unsafe {
        host.set_access(span, 3 * G).unwrap();
        host.fill(span, 9, 3 * G, None).unwrap();
        host.copy_within(span, span + G + 17, 100, Some(RawStream::DEFAULT)).unwrap();
        for (at, bytes, chunk) in chunks {
            host.unmap(span + at, bytes).unwrap();
            host.release(chunk).unwrap();
        }
        host.free_span(span, 8 * MIB).unwrap();
    }
}

#[test]
fn the_accounts_are_exact() {
    let host = open(10 * MIB);
    let span = host.reserve(1 << 40, G).unwrap();
    assert_eq!(free(&host), 10 * MIB, "addresses cost nothing");
    let chunk = host.create(2 * G, ChunkProps::PLAIN).unwrap();
    assert_eq!(free(&host), 6 * MIB);
    unsafe {
        host.map(span, 2 * G, chunk).unwrap();
        host.map(span + 8 * G, 2 * G, chunk).unwrap();
        assert_eq!(free(&host), 6 * MIB, "mapping takes no more");
        host.release(chunk).unwrap();
        assert_eq!(free(&host), 6 * MIB, "still mapped twice");
        host.unmap(span, 2 * G).unwrap();
        assert_eq!(free(&host), 6 * MIB, "still mapped once");
        host.set_access(span + 8 * G, 2 * G).unwrap();
        write(&host, span + 8 * G, 1);
        host.unmap(span + 8 * G, 2 * G).unwrap();
        assert_eq!(free(&host), 10 * MIB);

        let block = host.allocate(5000).unwrap();
        assert_eq!(free(&host), 10 * MIB - 8192, "a block takes whole pages");
        host.fill(block, 3, 5000, None).unwrap();
        misuse(host.free(block, 8192), "5000 bytes, not 8192");
        host.free(block, 5000).unwrap();
        misuse(host.free(block, 5000), "no block starts");
        assert_eq!(free(&host), 10 * MIB);
        host.free_span(span, 1 << 40).unwrap();
    }
    assert!(format!("{host:?}").contains("spans: 0, handles: 0, mappings: 0, blocks: 0"), "{host:?}");
}

#[test]
fn the_capacity_is_the_end() {
    let host = open(6 * MIB);
    let chunks = [(); 3].map(|()| host.create(G, ChunkProps::PLAIN).unwrap());
    for error in [host.create(G, ChunkProps::PLAIN).unwrap_err(), host.allocate(1).unwrap_err()] {
        assert_eq!(error.kind(), Kind::OutOfMemory);
        assert!(error.to_string().ends_with("0 B free of 6 MiB"), "{error}");
    }
    assert_eq!(free(&host), 0);
    unsafe { host.release(chunks[1]).unwrap() };
    assert_eq!(host.create(2 * G, ChunkProps::PLAIN).unwrap_err().kind(), Kind::OutOfMemory);
    assert_eq!(free(&host), G, "what failed took nothing");
    let again = host.create(G, ChunkProps::PLAIN).unwrap();
    for chunk in [chunks[0], again, chunks[2]] {
        unsafe { host.release(chunk).unwrap() };
    }
    assert_eq!(free(&host), 6 * MIB);
}

#[test]
fn more_than_the_machine_has_left_is_an_error_and_kills_nobody() {
    let total = {
        let error = HostDriver::open(HostOptions::default().with_capacity(Bytes::new(u64::MAX))).unwrap_err();
        let HostError::CapacityTooLarge { total, .. } = error else { panic!("{error}") };
        total.round_down(Bytes::mib(2)).unwrap().get()
    };
    let host = open(total);
    for error in [host.create(total, ChunkProps::PLAIN).unwrap_err(), host.allocate(total).unwrap_err()] {
        assert_eq!(error.kind(), Kind::OutOfMemory);
        assert!(error.to_string().contains("available to this process"), "{error}");
    }
    assert_eq!(free(&host), total);
    unsafe { host.release(host.create(G, ChunkProps::PLAIN).unwrap()).unwrap() };
}

#[test]
fn broken_rules_are_refused_and_change_nothing() {
    let host = open(32 * MIB);
    let span = host.reserve(16 * MIB, G).unwrap();
    let other = host.reserve(4 * MIB, G).unwrap();
    let (chunk, large) = (put(&host, span, G), host.create(2 * G, ChunkProps::PLAIN).unwrap());
    write(&host, span, 42);
    let gone = host.create(G, ChunkProps::PLAIN).unwrap();
    let before = format!("{:?}", {
        unsafe { host.release(gone).unwrap() };
        &host
    });
    unsafe {
        misuse(host.release(gone), "released before");
        misuse(host.release(RawHandle(99)), "no handle 99");
        misuse(host.map(span + G, G, gone), "released before");
        misuse(host.export(gone), "released before");

        misuse(host.map(span, 2 * G, large), "meets the 2097152 bytes mapped");
        misuse(host.map(span + G, G, large), "has 4194304 bytes, not 2097152");
        misuse(host.map(span + 7 * G, 2 * G, large), "does not lie in one span");
        misuse(host.map(span + G + 4096, 2 * G, large), "no multiple of the granularity");
        misuse(host.map(0, 2 * G, large), "does not lie in one span");
        misuse(host.map(u64::MAX - G + 1, 2 * G, large), "round the end");

        misuse(host.set_access(span, 2 * G), "go on for 2097152 bytes");
        misuse(host.set_access(span, G / 2), "not made of whole mappings");
        misuse(host.set_access(span + G, G), "not made of whole mappings");
        misuse(host.set_access(span, u64::MAX), "round the end");
        host.map(span + 4 * G, 2 * G, large).unwrap();
        misuse(host.set_access(span, 6 * G), "go on for 2097152 bytes");
        host.unmap(span + 4 * G, 2 * G).unwrap();

        misuse(host.unmap(span, 2 * G), "2097152 bytes are mapped");
        misuse(host.unmap(span + G, G), "nothing is mapped");
        misuse(host.unmap(span + 4096, G), "nothing is mapped");

        misuse(host.free_span(span, 16 * MIB), "are mapped at");
        misuse(host.free_span(span, 8 * MIB), "has 16777216 bytes, not 8388608");
        misuse(host.free_span(span + G, 8 * MIB), "no span starts");
        misuse(host.free(span, G), "no block starts");

        misuse(host.create(0, ChunkProps::PLAIN), "0 bytes");
        misuse(host.create(G + 4096, ChunkProps::PLAIN), "2 MiB");
        misuse(host.reserve(0, G), "0 bytes");
        misuse(host.reserve(G, 3 * MIB), "alignment of 3145728");
        misuse(host.reserve(G, 4096), "alignment of 4096");
        misuse(host.allocate(0), "0 bytes");
        misuse(host.allocate(u64::MAX), "bytes");
        assert_eq!(host.reserve(1 << 62, G).unwrap_err().kind(), Kind::OutOfAddresses);
        assert_eq!(host.reserve(u64::MAX - G + 1, G).unwrap_err().kind(), Kind::OutOfAddresses);
        for props in [ChunkProps::PLAIN.with_rdma(true), ChunkProps::PLAIN.with_shareable(Shareable::Fabric)] {
            assert_eq!(host.create(G, props).unwrap_err().kind(), Kind::NotSupported);
        }
        assert_eq!(format!("{host:?}"), before);

        assert_eq!(read(&host, span), 42);
        host.unmap(span, G).unwrap();
        misuse(host.unmap(span, G), "nothing is mapped");
        host.release(chunk).unwrap();
        host.release(large).unwrap();
        host.free_span(span, 16 * MIB).unwrap();
        misuse(host.free_span(span, 16 * MIB), "no span starts");
        host.free_span(other, 4 * MIB).unwrap();
    }
    assert_eq!(free(&host), 32 * MIB);
}

#[test]
fn a_span_is_whole_at_every_moment() {
    let host = open(16 * MIB);
    let size = 8 * MIB;
    let span = host.reserve(size, G).unwrap();
    let whole = |expected: &[&str]| {
        let all = entries(span, size);
        assert_eq!(all.iter().map(|entry| entry.2.as_str()).collect::<Vec<_>>(), expected, "{all:?}");
        assert!(all[0].0 == span && all[all.len() - 1].1 == span + size, "{all:?}");
        assert!(all.windows(2).all(|pair| pair[0].1 == pair[1].0), "a hole: {all:?}");
    };
    whole(&["---p"]);
    let chunk = put(&host, span + G, G);
    whole(&["---p", "rw-s", "---p"]);
    unsafe { host.unmap(span + G, G).unwrap() };
    whole(&["---p"]);

    // Somebody who takes addresses as soon as they are free. If any were, the mapping would succeed.
    let (over, tries) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let thief = scope.spawn(|| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            while !over.load(SeqCst) {
                let at = std::ptr::with_exposed_provenance_mut((span + G) as usize);
                let got = unsafe { libc::mmap(at, 4096, libc::PROT_NONE, flags, -1, 0) };
                assert_eq!(got, libc::MAP_FAILED, "the address was free");
                assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EEXIST));
                tries.fetch_add(1, SeqCst);
            }
        });
        let mut rounds = 0;
        while (rounds < 3000 || tries.load(SeqCst) < 1000) && !thief.is_finished() {
            unsafe {
                host.map(span + G, G, chunk).unwrap();
                host.unmap(span + G, G).unwrap();
            }
            rounds += 1;
        }
        over.store(true, SeqCst);
        thief.join().unwrap();
    });
    unsafe {
        host.release(chunk).unwrap();
        host.free_span(span, size).unwrap();
    }
}

#[test]
fn memory_is_shared_through_a_file_descriptor() {
    let (host, guest) = (open(8 * MIB), open(8 * MIB));
    let span = host.reserve(8 * MIB, G).unwrap();
    let shareable = ChunkProps::PLAIN.with_shareable(Shareable::PosixFd);
    let chunk = host.create(G, shareable).unwrap();
    unsafe {
        host.map(span, G, chunk).unwrap();
        host.set_access(span, G).unwrap();
        let fd = host.export(chunk).unwrap();
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFD);
        assert_ne!(flags & libc::FD_CLOEXEC, 0);
        assert_ne!(libc::ftruncate(fd.as_raw_fd(), 0), 0, "nobody can cut the file short");

        misuse(guest.import(fd.as_fd(), 2 * G), "has 2097152 bytes");
        let large = host.create(2 * G, shareable).unwrap();
        misuse(guest.import(host.export(large).unwrap().as_fd(), G), "has 4194304 bytes");
        host.release(large).unwrap();
        let plain = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(guest.import(plain.as_fd(), G).unwrap_err().kind(), Kind::InvalidValue);
        let theirs = guest.import(fd.as_fd(), G).unwrap();
        let ours = host.import(fd.as_fd(), G).unwrap();
        drop(fd);
        assert_eq!((free(&host), free(&guest)), (6 * MIB, 8 * MIB), "the memory counts once, where it was made");

        let there = guest.reserve(G, G).unwrap();
        guest.map(there, G, theirs).unwrap();
        guest.set_access(there, G).unwrap();
        write(&host, span + 99, 5);
        assert_eq!(read(&guest, there + 99), 5);

        host.unmap(span, G).unwrap();
        host.release(chunk).unwrap();
        assert_eq!(free(&host), 6 * MIB, "the imported handle keeps it");
        host.release(ours).unwrap();
        assert_eq!(free(&host), 8 * MIB);
        assert_eq!(read(&guest, there + 99), 5, "as does the other driver");
        guest.unmap(there, G).unwrap();
        guest.release(theirs).unwrap();
        guest.free_span(there, G).unwrap();
        host.free_span(span, 8 * MIB).unwrap();
    }
}

#[test]
fn threads_do_not_disturb_each_other() {
    let host = open(64 * MIB);
    std::thread::scope(|scope| {
        for thread in 1..=4_u8 {
            let host = &host;
            scope.spawn(move || {
                let span = host.reserve(16 * MIB, G).unwrap();
                for round in 0..20 {
                    let chunks: Vec<_> = (0..4).map(|n| (span + n * G, put(host, span + n * G, G))).collect();
                    let value = thread.wrapping_mul(50).wrapping_add(round);
                    unsafe { host.fill(span, value, 4 * G, None).unwrap() };
                    let block = host.allocate(MIB).unwrap();
                    for (addr, chunk) in chunks {
                        assert_eq!((read(host, addr), read(host, addr + G - 1)), (value, value));
                        unsafe {
                            host.unmap(addr, G).unwrap();
                            host.release(chunk).unwrap();
                        }
                    }
                    unsafe { host.free(block, MIB).unwrap() };
                }
                unsafe { host.free_span(span, 16 * MIB).unwrap() };
            });
        }
    });
    assert_eq!(free(&host), 64 * MIB);
    assert!(format!("{host:?}").contains("spans: 0, handles: 0, mappings: 0, blocks: 0"));
}

#[test]
fn streams_and_events_are_always_idle() {
    let host = open(4 * MIB);
    let (first, second) = (host.event_create().unwrap(), host.event_create().unwrap());
    assert_ne!(first, second);
    unsafe {
        assert!(host.event_query(first).unwrap());
        host.event_record(first, RawStream::DEFAULT).unwrap();
        assert!(host.event_query(first).unwrap());
        host.event_wait(first).unwrap();
        host.synchronize_stream(RawStream::DEFAULT).unwrap();
        assert!(!host.stream_is_capturing(RawStream::DEFAULT).unwrap());
        host.event_destroy(first).unwrap();
        host.event_destroy(second).unwrap();
    }
    host.synchronize().unwrap();
}
