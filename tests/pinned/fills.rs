//! Filling from files and other sources.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use growspan::pinned::{FileOptions, ReadAt};
use growspan::{Bytes, Error};

use crate::{MIB, World, small_pieces};

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Gives few bytes at a time, and is interrupted now and then.
struct Halting(AtomicU64, u64);

impl ReadAt for Halting {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let turn = self.0.fetch_add(1, Relaxed);
        if turn % 5 == 4 {
            return Err(ErrorKind::Interrupted.into());
        }
        let len = target.len().min(1 + (turn as usize * 7919) % 90_000).min(self.1.saturating_sub(offset) as usize);
        for (at, byte) in target[..len].iter_mut().enumerate() {
            *byte = byte_at(offset + at as u64);
        }
        Ok(len)
    }
}

#[test]
fn every_byte_comes_from_its_place() {
    let world = World::sim();
    let mut buffer = small_pieces::<u8>(&world.device, 20 * MIB);
    buffer.grow_to(20 * MIB).unwrap();
    for threads in [0, 1, 3] {
        buffer.fill(0);
        let fill = buffer.fill_from(777..19 * MIB + 3, Halting(AtomicU64::new(0), u64::MAX), 12_345, threads).unwrap();
        assert_eq!(fill.bytes.get() as usize, 19 * MIB + 3 - 777);
        assert!(fill.direct.is_zero() && fill.bytes_per_second() > 0.0);
        assert!(threads == 0 || fill.threads as usize == threads);
        let right = |(at, byte): (usize, &u8)| *byte == byte_at(12_345 + at as u64);
        assert!(buffer[777..19 * MIB + 3].iter().enumerate().all(right));
        assert!(buffer[..777].iter().chain(&buffer[19 * MIB + 3..]).all(|byte| *byte == 0), "the rest is left alone");
    }
}

#[test]
fn a_source_that_ends_or_fails_is_an_error() {
    let world = World::sim();
    let mut buffer = small_pieces::<u32>(&world.device, 4 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    let error = buffer.fill_from(0..4 * MIB, Halting(AtomicU64::new(0), 9 << 20), 0, 4).unwrap_err();
    let Error::Fill { asked, source } = &error else { panic!("{error}") };
    assert_eq!((*asked, source.kind()), (Bytes::mib(16), ErrorKind::UnexpectedEof));
    assert!(source.to_string().contains("ends at byte 9437184"), "{source}");

    struct Broken;
    impl ReadAt for Broken {
        fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
            if offset > 5 << 20 { Err(io::Error::other("worn out")) } else { Ok(target.len()) }
        }
    }
    let error = buffer.fill_from(0..4 * MIB, Broken, 0, 4).unwrap_err().to_string();
    assert!(error.contains("worn out") && error.contains("16 MiB"), "{error}");
    // One that lies about how much it gave.
    struct Liar;
    impl ReadAt for Liar {
        fn read_at(&self, target: &mut [u8], _: u64) -> io::Result<usize> {
            Ok(target.len() + 1)
        }
    }
    assert!(matches!(buffer.fill_from(0..3, Liar, 0, 1), Err(Error::Fill { .. })));
    for range in [4 * MIB..4 * MIB + 1, 5..4 * MIB + 1] {
        assert!(matches!(buffer.fill_from(range, Liar, 0, 1), Err(Error::OutOfBounds { .. })));
    }
    assert!(buffer.fill_from(7..7, Liar, 0, 1).unwrap().bytes.is_zero());
}

/// A file that is gone at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: u64) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let content: Vec<u8> = (0..bytes).map(byte_at).collect();
        File::create(&path).unwrap().write_all(&content).unwrap();
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn files_are_read_through_the_cache_and_past_it() {
    let world = World::host();
    let bytes = 9 * MIB + 1234;
    let file = Temporary::new("fill", bytes as u64);
    let mut buffer = small_pieces::<u8>(&world.device, 10 * MIB);
    buffer.grow_to(10 * MIB).unwrap();
    let has_direct = {
        use std::os::unix::fs::OpenOptionsExt;
        fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&file.0).is_ok()
    };
    for (start, offset, direct) in [(0, 0, false), (0, 0, true), (4096, 8192, true), (5, 0, true), (0, 7, true)] {
        buffer.fill(0xEE);
        let options = FileOptions::new().offset(offset).direct(direct).threads(3);
        let end = start + bytes - offset as usize;
        let fill = buffer.fill_from_file(start..end, &file.0, options).unwrap();
        let right = |(at, byte): (usize, &u8)| *byte == byte_at(offset + at as u64);
        assert!(buffer[start..end].iter().enumerate().all(right), "{start} {offset} {direct}");
        assert!(buffer[end..].iter().all(|byte| *byte == 0xEE));
        let aligned = start.is_multiple_of(4096) && offset.is_multiple_of(4096);
        if direct && aligned && has_direct {
            assert!(fill.direct.get() + 4096 > fill.bytes.get(), "{fill:?}");
        } else {
            assert!(fill.direct.is_zero(), "{fill:?}");
        }
    }
    let missing = buffer.fill_from_file(0..1, "/nowhere/at/all", FileOptions::new()).unwrap_err();
    assert!(matches!(missing, Error::Fill { .. }));
    let short = buffer.fill_from_file(0..10 * MIB, &file.0, FileOptions::new().direct(true)).unwrap_err();
    assert!(short.to_string().contains("too early"), "{short}");
}
