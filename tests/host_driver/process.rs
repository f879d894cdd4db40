//! What needs a process of its own: limits, faults, forks.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use growspan::driver::{ChunkProps, Driver, DriverErrorKind as Kind};

use crate::{G, MIB, entries, free, open, put, read, write};

/// Runs `body` in a process of its own, where limits and signals hurt nobody else. `None` in that process.
fn in_child(test: &str, body: impl FnOnce()) -> Option<Output> {
    const CHILD: &str = "GROWSPAN_TEST_CHILD";
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    Some(command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test).output().unwrap())
}

/// As [`in_child`], for a body that has to end well.
fn alone(test: &str, body: impl FnOnce()) {
    if let Some(output) = in_child(test, body) {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}: {text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "no test is named {test}: {text}");
    }
}

#[test]
fn unmapped_addresses_fault() {
    for (kind, name) in ["unmapped", "without access", "freed block"].into_iter().enumerate() {
        let body = || {
            // Each process dies of its own kind.
            let wanted: usize = std::env::var("GROWSPAN_TEST_KIND").unwrap().parse().unwrap();
            let host = open(8 * MIB);
            let span = host.reserve(8 * MIB, G).unwrap();
            let chunk = put(&host, span, G);
            write(&host, span, 1);
            println!("touched {}", read(&host, span));
            let addr = match wanted {
                0 => unsafe { host.unmap(span, G).map(|()| span).unwrap() },
                1 => unsafe { host.map(span + G, G, chunk).map(|()| span + G).unwrap() },
                _ => {
                    let block = host.allocate(G).unwrap();
                    unsafe { host.fill(block, 1, G, None).unwrap() };
                    unsafe { host.free(block, G).map(|()| block).unwrap() }
                }
            };
            println!("last words");
            println!("survived {}", read(&host, addr));
        };
        if std::env::var_os("GROWSPAN_TEST_KIND").is_some() {
            in_child("process::unmapped_addresses_fault", body);
            return;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["process::unmapped_addresses_fault", "--exact", "--nocapture", "--test-threads=1"]);
        command
            .env("GROWSPAN_TEST_CHILD", "process::unmapped_addresses_fault")
            .env("GROWSPAN_TEST_KIND", kind.to_string());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{name}: {text}");
        assert!(text.contains("touched 1") && text.contains("last words"), "{name}: {text}");
    }
}

/// Forks a child that reads (and writes back) the byte at `addr` and exits; the signal it died of, if it did.
fn touch_in_fork(addr: u64) -> Option<i32> {
    let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(addr as usize);
    // The child makes no call but `_exit`, so it does not matter which locks other threads hold.
    match unsafe { libc::fork() } {
        0 => unsafe {
            pointer.write_volatile(pointer.read_volatile().wrapping_add(1));
            libc::_exit(0)
        },
        child => {
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
        }
    }
}

#[test]
fn a_forked_child_sees_no_pages() {
    let host = open(8 * MIB);
    let span = host.reserve(8 * MIB, G).unwrap();
    let chunk = put(&host, span, G);
    let block = host.allocate(4096).unwrap();
    let ordinary = Box::into_raw(Box::new(7_u8));
    assert_eq!(touch_in_fork(ordinary.expose_provenance() as u64), None, "the child can touch other memory");
    drop(unsafe { Box::from_raw(ordinary) });
    for addr in [span, span + G - 1, block] {
        write(&host, addr, 42);
        assert_eq!(touch_in_fork(addr), Some(libc::SIGSEGV));
        assert_eq!(read(&host, addr), 42);
    }
    unsafe {
        host.free(block, 4096).unwrap();
        host.unmap(span, G).unwrap();
        host.release(chunk).unwrap();
        host.free_span(span, 8 * MIB).unwrap();
    }
}

fn set_open_files(soft: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: soft };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn the_last_open_file_is_used_and_the_next_is_an_error() {
    alone("process::the_last_open_file_is_used_and_the_next_is_an_error", || {
        let host = open(64 * G);
        // The limit is one on numbers: files with higher ones, inherited from whoever started this, take no room.
        let limit = 40;
        let number = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().to_str()?.parse().ok();
        let numbers = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(number);
        let below = numbers.filter(|number: &u64| *number < limit).count() as u64;
        set_open_files(limit);
        // The directory's own handle is among them, and closed by now.
        let room = limit - (below - 1);
        let chunks: Vec<_> = (0..room).map(|_| host.create(G, ChunkProps::PLAIN).unwrap()).collect();
        let left = (64 - room) * G;
        for _ in 0..2 {
            let error = host.create(G, ChunkProps::PLAIN).unwrap_err();
            assert_eq!(error.kind(), Kind::OutOfFiles, "{error}");
            assert!(error.to_string().contains("limit 40"), "{error}");
            assert_eq!(host.allocate(G).unwrap_err().kind(), Kind::OutOfFiles);
            assert_eq!(free(&host), left, "what failed took nothing");
        }
        unsafe { host.release(chunks[3]).unwrap() };
        // A block needs a file for a moment only, so one is enough for many.
        let blocks = [(); 3].map(|()| host.allocate(G).unwrap());
        let again = host.create(G, ChunkProps::PLAIN).unwrap();
        for block in blocks {
            unsafe { host.free(block, G).unwrap() };
        }
        for chunk in chunks.into_iter().filter(|chunk| chunk.0 != 4).chain([again]) {
            unsafe { host.release(chunk).unwrap() };
        }
        assert_eq!(free(&host), 64 * G);
    });
}

#[test]
fn at_the_limit_of_the_memory_map_chunks_can_still_be_unmapped() {
    alone("process::at_the_limit_of_the_memory_map_chunks_can_still_be_unmapped", || {
        let host = open(64 * MIB);
        let span = host.reserve(16 * MIB, G).unwrap();
        let chunks = [0, 2 * G, 4 * G].map(|at| (at, put(&host, span + at, G)));
        let extra = host.create(G, ChunkProps::PLAIN).unwrap();
        // Every second page of a large reservation becomes another kind of memory, until no entry is left.
        let pages = 1_usize << 20;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = unsafe { libc::mmap(std::ptr::null_mut(), pages * 4096, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let split = |page: usize| unsafe { libc::mprotect(base.byte_add(page * 4096), 4096, libc::PROT_READ) == 0 };
        let full = (1..pages).step_by(2).take_while(|page| split(*page)).count();
        assert!(full < pages / 2 - 1, "no limit was met");
        // A split takes two entries, so one may be left: new mappings take it, as the kernel allows one beyond.
        let one = || unsafe {
            libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
        };
        while one() != libc::MAP_FAILED {}

        let before = format!("{host:?}");
        let error = unsafe { host.map(span + 6 * G, G, extra).unwrap_err() };
        assert_eq!(error.kind(), Kind::OutOfMaps, "{error}");
        assert!(error.to_string().contains("vm.max_map_count"), "{error}");
        assert_eq!(host.reserve(1 << 30, 1 << 30).unwrap_err().kind(), Kind::OutOfMaps);
        assert_eq!(host.allocate(G).unwrap_err().kind(), Kind::OutOfMaps);
        assert_eq!(format!("{host:?}"), before);
        for (at, chunk) in chunks {
            unsafe {
                host.unmap(span + at, G).unwrap();
                host.release(chunk).unwrap();
            }
        }
        assert_eq!(entries(span, 16 * MIB).iter().map(|(start, end, _)| end - start).sum::<u64>(), 16 * MIB);
        unsafe {
            host.release(extra).unwrap();
            host.free_span(span, 16 * MIB).unwrap();
        }
        assert_eq!(free(&host), 64 * MIB);
    });
}

#[test]
fn everything_returned_leaves_nothing_behind() {
    alone("process::everything_returned_leaves_nothing_behind", || {
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let ours = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:growspan").count();
        let before = files();
        let host = open(16 * MIB);
        let span = host.reserve(1 << 40, G).unwrap();
        let chunks = [0, 1, 2].map(|n| put(&host, span + n * G, G));
        let block = host.allocate(G).unwrap();
        assert_eq!((files(), ours()), (before + 3, 4));
        for file in std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap) {
            let target = std::fs::read_link(file.path()).unwrap_or_default();
            if target.to_string_lossy().contains("memfd:growspan") {
                let number = file.file_name().to_str().unwrap().parse().unwrap();
                assert_eq!(unsafe { libc::fcntl(number, libc::F_GETFD) }, libc::FD_CLOEXEC);
            }
        }
        unsafe {
            for (n, chunk) in (0..).zip(chunks) {
                host.unmap(span + n * G, G).unwrap();
                host.release(chunk).unwrap();
            }
            host.free(block, G).unwrap();
            host.free_span(span, 1 << 40).unwrap();
        }
        assert_eq!((files(), ours()), (before, 0));
        assert!(entries(span, 1 << 40).is_empty());

        // What is still in use stays.
        let span = host.reserve(G, G).unwrap();
        put(&host, span, G);
        write(&host, span, 77);
        drop(host);
        assert_eq!((files(), ours()), (before, 1));
        let pointer: *const u8 = std::ptr::with_exposed_provenance(span as usize);
        assert_eq!(unsafe { pointer.read_volatile() }, 77);
    });
}
