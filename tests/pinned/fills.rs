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

/// Where it ends is told whichever thread comes to the end first: often, so that they take turns in many ways.
#[test]
fn a_source_that_ends_is_an_error_that_says_where() {
    let world = World::sim();
    let mut buffer = small_pieces::<u32>(&world.device, 4 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    let content: Vec<u8> = (0..(12 << 20) + 1).map(byte_at).collect();
    for threads in [1, 2, 3, 4, 7, 16] {
        // In a part, on the border of two, and before the first byte; parts have 2 or 4 MiB here.
        for end in [9 * MIB, 8 * MIB, 12 * MIB + 1, 0] {
            for turn in 0..20 {
                let error = match turn {
                    0 => buffer.fill_from(0..4 * MIB, Halting(AtomicU64::new(3), end as u64), 0, threads),
                    _ => buffer.fill_from(0..4 * MIB, &content[..end], 0, threads),
                };
                let error = error.unwrap_err();
                let Error::Fill { asked, source } = &error else { panic!("{error}") };
                assert_eq!((*asked, source.kind()), (Bytes::mib(16), ErrorKind::UnexpectedEof));
                let words = format!("the source ends at byte {end}, {} bytes too early", 16 * MIB - end);
                assert!(source.to_string() == words, "{threads} threads: {source}, not {words}");
                let byte = |at: usize| buffer[at / 4].to_ne_bytes()[at % 4];
                assert!((0..end).step_by(4093).all(|at| byte(at) == content[at]), "what there is was read");
                buffer.fill(0);
            }
        }
    }
}

#[test]
fn a_source_that_fails_is_an_error() {
    let world = World::sim();
    let mut buffer = small_pieces::<u32>(&world.device, 4 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    struct Broken;
    impl ReadAt for Broken {
        fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
            let part = offset >> 20;
            if part >= 5 { Err(io::Error::other(format!("worn out at {part} MiB"))) } else { Ok(target.len()) }
        }
    }
    for _ in 0..200 {
        let error = buffer.fill_from(0..4 * MIB, Broken, 0, 4).unwrap_err().to_string();
        assert!(error.contains("worn out at 6 MiB") && error.contains("filling 16 MiB"), "{error}");
    }
    // There are no bytes beyond the last that can be counted.
    let error = buffer.fill_from(0..3, Broken, u64::MAX - 12, 1).unwrap_err();
    assert!(error.to_string().contains("worn out"), "{error}");
    let error = buffer.fill_from(0..3, Broken, u64::MAX - 11, 1).unwrap_err();
    assert!(matches!(&error, Error::Fill { source, .. } if source.kind() == ErrorKind::InvalidInput), "{error}");
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
