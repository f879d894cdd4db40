//! A device under test: its driver wrapped in faults, and what can be asked of it from outside.
//!
//! What differs between the test programs that share this is theirs to say: `GRANULE`, `SLACK` and `WINDOW` in
//! their main file.

use core::ops::Range;
use std::sync::Arc;

use growspan::driver::Driver;
use growspan::driver::fault::{FaultControl, FaultPlan, Faulty};
use growspan::driver::sim::SimDriver;
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions, GrowableBuffer, Mode, Quiesce, Sizing, Snapshot};

use crate::{GRANULE, SLACK, WINDOW};

pub(crate) const MIB: usize = 1 << 20;

/// Half a granule: what the sizes of most tests are counted in, as MiB are with chunks of 2 MiB.
pub(crate) const UNIT: usize = GRANULE / 2;

/// So many units.
pub(crate) fn units(n: usize) -> Bytes {
    Bytes::new((n * UNIT) as u64)
}

/// A small generator of its own, so that a failure can be repeated.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

/// One device, with the means to make its driver fail and to look behind it.
pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) device: Device,
    pub(crate) faults: FaultControl,
    pub(crate) sim: Option<SimDriver>,
    /// How much its buffers map ahead.
    pub(crate) ahead: AheadPolicy,
    /// Free memory before anything was done.
    free: u64,
}

/// What must be the same before and after an operation that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    bytes: [Bytes; 7],
    chunks: u64,
    free: Option<Bytes>,
    files: Option<u64>,
    maps: Option<u64>,
}

impl World {
    /// A device over this driver.
    pub(crate) fn over(name: &str, driver: Arc<dyn Driver>, sim: Option<SimDriver>, options: DeviceOptions) -> Self {
        Self::ahead_over(name, driver, sim, options, AheadPolicy::Off)
    }

    /// The same, with buffers that map ahead.
    pub(crate) fn ahead_over(
        name: &str,
        driver: Arc<dyn Driver>,
        sim: Option<SimDriver>,
        options: DeviceOptions,
        ahead: AheadPolicy,
    ) -> Self {
        let faulty = Faulty::new(driver, FaultPlan::count());
        let faults = faulty.control();
        faults.disarm();
        let device = options.ahead(ahead).open(Arc::new(faulty)).unwrap();
        // Decided here, so that no operation under test makes the check's calls.
        let _ = device.verdict().mode();
        let free = device.memory().unwrap().free;
        let name = if ahead == AheadPolicy::Off { name.to_owned() } else { format!("{name}, ahead") };
        Self { name, device, faults, sim, ahead, free }
    }

    pub(crate) fn is_virtual(&self) -> bool {
        self.device.verdict().mode() == Mode::Virtual
    }

    /// Whether a buffer of this device gets the ladder, with chunks of several sizes.
    pub(crate) fn has_a_ladder(&self) -> bool {
        self.buffer().stats().sizing == Some(Sizing::Ladder)
    }

    /// Whether what a buffer of this device gives up stays in the pool.
    pub(crate) fn keeps_chunks(&self) -> bool {
        self.is_virtual() && self.device.pool().keep_limit() >= units(64)
    }

    /// Whether buffers of this device map ahead, in the background.
    pub(crate) fn maps_ahead(&self) -> bool {
        self.ahead != AheadPolicy::Off && self.is_virtual()
    }

    /// Lets the background get done.
    pub(crate) fn settle(&self) {
        self.device.wait_ahead();
    }

    /// Lets the background map ahead of a buffer as if it had just grown.
    pub(crate) fn warm(&self, buffer: &mut GrowableBuffer<u8>) {
        if self.maps_ahead() {
            buffer.grow_ahead(self.ahead).unwrap();
            self.settle();
        }
    }

    pub(crate) fn picture(&self) -> Picture {
        self.settle();
        let mut snapshot = self.device.snapshot();
        if self.maps_ahead() {
            // What is ahead is nobody's yet: it may go to the pool and on to the driver at any time, or come from there.
            snapshot.bytes_pooled = Bytes::ZERO;
            (snapshot.chunks, snapshot.free) = (0, None);
            (snapshot.open_files, snapshot.map_entries) = (None, None);
        }
        Picture {
            bytes: [
                snapshot.bytes_reserved,
                snapshot.bytes_mapped,
                snapshot.bytes_pooled,
                snapshot.bytes_retiring,
                snapshot.bytes_in_hand,
                snapshot.bytes_contiguous,
                snapshot.bytes_stranded,
            ],
            chunks: snapshot.chunks,
            // A driver that takes memory for itself may take it at any call.
            free: snapshot.free.filter(|_| SLACK == 0),
            // Those of the real process belong to all tests that run beside this one.
            files: snapshot.open_files.filter(|_| self.sim.is_some()).map(|files| files.ours),
            maps: snapshot.map_entries.filter(|_| self.sim.is_some()).map(|maps| maps.ours),
        }
    }

    /// A buffer of bytes with room for 64 units.
    pub(crate) fn buffer(&self) -> GrowableBuffer<u8> {
        GrowableBuffer::builder(&self.device).max_len(64 * UNIT).build().unwrap()
    }

    /// How much less memory is free than at first.
    fn gone(&self, snapshot: &Snapshot) -> i64 {
        self.free.cast_signed() - snapshot.free.unwrap().get().cast_signed()
    }

    /// A look at the device's figures. Where others take memory too, free memory may need a moment to follow.
    fn settled(&self, right: impl Fn(&Snapshot) -> bool) -> Snapshot {
        let mut snapshot = self.device.snapshot();
        for _ in 0..50 {
            if SLACK == 0 || right(&snapshot) {
                break;
            }
            std::thread::sleep(core::time::Duration::from_millis(20));
            snapshot = self.device.snapshot();
        }
        snapshot
    }

    /// Promise 4: what we say we hold is what the driver says is gone, and the simulated driver found no fault of ours.
    pub(crate) fn assert_balanced(&self, when: &str) {
        self.settle();
        let off = |snapshot: &Snapshot| self.gone(snapshot) - snapshot.bytes_held().get().cast_signed();
        let snapshot = self.settled(|snapshot| off(snapshot).abs() <= SLACK);
        let (held, off) = (snapshot.bytes_held(), off(&snapshot));
        assert!(off.abs() <= SLACK, "{} {when}: {off} bytes more are gone than {held}: {snapshot}", self.name);
        assert_eq!(snapshot.bytes_in_hand, Bytes::ZERO, "{} {when}", self.name);
        if let Some(sim) = &self.sim {
            assert_eq!(sim.violations(), [], "{} {when}", self.name);
            if let Some(files) = snapshot.open_files {
                assert_eq!(files.ours, sim.figures().handles, "{} {when}: open files", self.name);
            }
        }
    }

    /// After the last drop the ledger reads zero.
    pub(crate) fn assert_empty(&self, when: &str) {
        self.assert_gone(when);
        // A driver that hangs keeps what the abandoned check held.
        if let Some(sim) = self.sim.as_ref().filter(|sim| sim.hung() == 0) {
            sim.check_clean().unwrap_or_else(|left| panic!("{} {when}: {left}", self.name));
        }
    }

    /// The same, but for chunks that the driver would not unmap.
    pub(crate) fn assert_only_stranded(&self, when: &str) {
        self.assert_balanced(when);
        self.device.pool().trim(Bytes::ZERO);
        let snapshot = self.device.snapshot();
        assert_eq!(snapshot.bytes_held(), snapshot.bytes_stranded, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.bytes_reserved, Bytes::ZERO, "{} {when}: {snapshot}", self.name);
    }

    /// The same, but for spans that the driver kept.
    pub(crate) fn assert_gone(&self, when: &str) {
        self.assert_balanced(when);
        self.device.pool().trim(Bytes::ZERO);
        let snapshot = self.settled(|snapshot| self.gone(snapshot).abs() <= SLACK);
        assert_eq!(snapshot.bytes_held(), Bytes::ZERO, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.bytes_reserved, Bytes::ZERO, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.chunks, 0, "{} {when}", self.name);
        let gone = self.gone(&snapshot);
        assert!(gone.abs() <= SLACK, "{} {when}: {gone} bytes are gone: {snapshot}", self.name);
    }
}

/// What a buffer is and holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) len: usize,
    pub(crate) committed: Bytes,
    pub(crate) address: u64,
    pub(crate) contents: u64,
}

/// The parts of so many bytes that are written and compared: all of them, or the two ends of every granule, which
/// tells chunks apart.
fn windows(len: usize) -> Vec<Range<usize>> {
    if WINDOW >= GRANULE {
        return core::iter::once(0..len).filter(|all| !all.is_empty()).collect();
    }
    let ends = (0..len).step_by(GRANULE).flat_map(|start| {
        let end = len.min(start + GRANULE);
        let middle = end.min(start + WINDOW);
        [start..middle, middle.max(end.saturating_sub(WINDOW))..end]
    });
    ends.filter(|window| !window.is_empty()).collect()
}

/// What a buffer holds, window by window.
pub(crate) struct Contents(Vec<(usize, Vec<u8>)>);

/// Reads what a buffer holds.
pub(crate) fn contents(buffer: &GrowableBuffer<u8>) -> Contents {
    let read = |window: Range<usize>| {
        let mut bytes = vec![0; window.len()];
        buffer.copy_out(window.start, &mut bytes).unwrap();
        (window.start, bytes)
    };
    Contents(windows(buffer.len()).into_iter().map(read).collect())
}

impl Contents {
    /// The byte at an offset, if it was looked at.
    pub(crate) fn at(&self, offset: usize) -> Option<u8> {
        self.0.iter().find_map(|(start, bytes)| bytes.get(offset.checked_sub(*start)?).copied())
    }

    /// Whether the first `len` bytes of a buffer are as they were.
    pub(crate) fn still_in(&self, buffer: &GrowableBuffer<u8>, len: usize) -> bool {
        self.0.iter().filter(|(start, _)| *start < len).all(|(start, bytes)| {
            let bytes = &bytes[..bytes.len().min(len - start)];
            let mut now = vec![0; bytes.len()];
            buffer.copy_out(*start, &mut now).unwrap();
            now == bytes
        })
    }

    /// A sum that notices a byte out of place.
    fn sum(&self) -> u64 {
        let words = self.0.iter().flat_map(|(_, bytes)| bytes.chunks(8)).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        });
        words.fold(0, |sum, word| sum.rotate_left(5) ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// Looks at a buffer.
pub(crate) fn look(buffer: &GrowableBuffer<u8>) -> Look {
    Look {
        len: buffer.len(),
        committed: buffer.committed(),
        address: buffer.device_ptr(),
        contents: contents(buffer).sum(),
    }
}

/// Writes something recognisable all over a buffer: each page counts up from a number of its own.
pub(crate) fn stamp(buffer: &mut GrowableBuffer<u8>, seed: usize) {
    const PAGE: usize = 4096;
    static COUNT: [u8; 256 + PAGE] = {
        let mut count = [0; 256 + PAGE];
        let mut n = 0;
        while n < count.len() {
            count[n] = n as u8;
            n += 1;
        }
        count
    };
    let mut bytes = Vec::new();
    for window in windows(buffer.len()) {
        bytes.clear();
        let mut at = window.start;
        while at < window.end {
            let len = (PAGE - at % PAGE).min(window.end - at);
            let first = (at / PAGE * 31 + at + seed) % 256;
            bytes.extend_from_slice(&COUNT[first..first + len]);
            at += len;
        }
        buffer.copy_in(window.start, &bytes).unwrap();
    }
}

pub(crate) fn shrink(buffer: &mut GrowableBuffer<u8>, len: usize) {
    buffer.shrink_to(len, Quiesce::Device).unwrap();
}
