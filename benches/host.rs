//! What growing costs on host memory, beside the system calls it is made of.
//!
//! ```text
//! cargo bench --bench host
//! cargo bench --bench host -- --quick
//! ```
//!
//! Where two things are compared they take turns within every iteration, and only the one asked for is timed; so what
//! the machine does meanwhile meets both. At the end the pairs are run once more and their medians and the medians of
//! their ratios are printed.

use std::ffi::c_void;
use std::fmt::Display;
use std::hint::black_box;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use criterion::Criterion;
use growspan::driver::host::HostOptions;
use growspan::{Bytes, Device, DeviceOptions, GrowableBuffer, Quiesce, Sizing};

/// The chunk that a growth maps.
const CHUNK: usize = 2 << 20;
/// The turns of the final comparison.
const TURNS: usize = 1001;

fn main() {
    // `cargo test --benches` runs this too, without the argument: then criterion runs everything once.
    let benchmark = std::env::args().any(|word| word == "--bench");
    let quick = std::env::args().any(|word| word == "--quick");
    let mut criterion = Criterion::default().configure_from_args();
    inside_committed(&mut criterion);
    let names = [("one new chunk of 2 MiB", Bytes::ZERO), ("one chunk of 2 MiB from the pool", Bytes::gib(1))];
    for (name, keep) in names {
        let mut group = criterion.benchmark_group(name);
        for which in [Which::Ours, Which::Raw] {
            let mut pair = Pair::new(keep);
            group.bench_function(which.name(), |bencher| {
                bencher.iter_custom(|turns| (0..turns).map(|_| which.of(pair.turn())).sum());
            });
        }
        group.finish();
    }
    criterion.final_summary();
    if benchmark {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "| growing by | growspan, us | system calls, us | ratio | bar |\n|---|---|---|---|---|");
        for (name, keep) in names {
            let _ = writeln!(out, "{}", row(name, keep, if quick { TURNS / 10 } else { TURNS }));
        }
    }
}

/// Growing where there is memory already: a compare and a store.
fn inside_committed(criterion: &mut Criterion) {
    let mut buffer = buffer(&device(Bytes::ZERO));
    must(buffer.grow_to(CHUNK));
    criterion.bench_function("inside committed memory", |bencher| {
        bencher.iter(|| {
            buffer.truncate(black_box(0));
            must(buffer.grow_to(black_box(CHUNK / 2)));
        });
    });
    criterion.bench_function("push inside committed memory", |bencher| {
        bencher.iter(|| {
            buffer.truncate(black_box(CHUNK / 2));
            must(buffer.push(black_box(1)));
        });
    });
}

/// The medians of the two and of the ratios of their turns.
fn row(name: &str, keep: Bytes, turns: usize) -> String {
    let mut pair = Pair::new(keep);
    let turns: Vec<[Duration; 2]> = (0..turns).map(|_| pair.turn()).collect();
    let us = |which: Which| median(turns.iter().map(|turn| which.of(*turn).as_secs_f64() * 1e6).collect());
    let ratio = median(turns.iter().map(|turn| turn[0].as_secs_f64() / turn[1].as_secs_f64()).collect());
    let bar = if keep.is_zero() { "1.15" } else { "" };
    format!("| {name} | {:.1} | {:.1} | {ratio:.3} | {bar} |", us(Which::Ours), us(Which::Raw))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[derive(Clone, Copy)]
enum Which {
    Ours,
    Raw,
}

impl Which {
    const fn name(self) -> &'static str {
        ["growspan", "system calls"][self as usize]
    }

    fn of(self, turn: [Duration; 2]) -> Duration {
        turn[self as usize]
    }
}

/// A buffer, and the system calls that it would make, taking turns.
struct Pair {
    buffer: GrowableBuffer<u8>,
    raw: Raw,
    first: bool,
}

impl Pair {
    /// With a pool that keeps so much: nothing, and every growth makes its chunk; or enough, and it only maps it.
    fn new(keep: Bytes) -> Self {
        let mut this = Self { buffer: buffer(&device(keep)), raw: Raw::new(!keep.is_zero()), first: false };
        // What happens once happens now: the pool gets its chunk, the budgets are counted.
        this.turn();
        this
    }

    /// Grows both by a chunk, in changing order, and back. The times of the growths.
    fn turn(&mut self) -> [Duration; 2] {
        self.first = !self.first;
        let mut raw = Duration::ZERO;
        if self.first {
            raw = self.raw.turn();
        }
        let start = Instant::now();
        must(self.buffer.grow_to(CHUNK));
        let ours = start.elapsed();
        must(self.buffer.shrink_to(0, Quiesce::Device));
        if !self.first {
            raw = self.raw.turn();
        }
        [ours, raw]
    }
}

fn device(keep: Bytes) -> Device {
    let options = HostOptions::default().with_capacity(Bytes::gib(1));
    let device = must(DeviceOptions::new().pool_keep(keep).host(options));
    device.verdict();
    device
}

fn buffer(device: &Device) -> GrowableBuffer<u8> {
    let sizing = Sizing::Uniform(Bytes::new(CHUNK as u64));
    must(GrowableBuffer::builder(device).max_len(1 << 30).sizing(sizing).build())
}

/// The system calls of a growth by one chunk.
struct Raw {
    span: *mut c_void,
    /// The file, where it is kept from turn to turn.
    kept: Option<i32>,
}

impl Raw {
    fn new(keeps: bool) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the call makes a mapping where none was.
        let span = unsafe { libc::mmap(std::ptr::null_mut(), 2 * CHUNK, libc::PROT_NONE, flags, -1, 0) };
        check("mmap", span != libc::MAP_FAILED);
        let aligned = span.map_addr(|addr| addr.next_multiple_of(CHUNK));
        Self { span: aligned, kept: keeps.then(Self::file) }
    }

    /// Maps a chunk and takes it away again. The time of the first.
    fn turn(&self) -> Duration {
        let start = Instant::now();
        let file = self.kept.unwrap_or_else(Self::file);
        self.map(file);
        let took = start.elapsed();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the addresses are this value's own, and nothing refers to them.
        let at = unsafe { libc::mmap(self.span, CHUNK, libc::PROT_NONE, flags, -1, 0) };
        check("mmap", at == self.span);
        if self.kept.is_none() {
            // SAFETY: the descriptor was opened above and is not used again.
            check("close", unsafe { libc::close(file) } == 0);
        }
        took
    }

    /// A file in memory with all its pages.
    fn file() -> i32 {
        // SAFETY: the name ends with a zero.
        let file = unsafe { libc::memfd_create(c"raw".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        check("memfd_create", file >= 0);
        // Once for the pages, once more to clear them.
        for _ in 0..2 {
            // SAFETY: the descriptor is open, and no memory is passed.
            check("fallocate", unsafe { libc::fallocate(file, 0, 0, CHUNK as i64) } == 0);
        }
        file
    }

    fn map(&self, file: i32) {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the addresses are this value's own, and nothing refers to them.
        let at = unsafe { libc::mmap(self.span, CHUNK, libc::PROT_NONE, flags, file, 0) };
        check("mmap", at == self.span);
        // SAFETY: they are mapped.
        check("madvise", unsafe { libc::madvise(self.span, CHUNK, libc::MADV_DONTFORK) } == 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: as above.
        check("mprotect", unsafe { libc::mprotect(self.span, CHUNK, access) } == 0);
        // SAFETY: as above.
        check("madvise", unsafe { libc::madvise(self.span, CHUNK, libc::MADV_POPULATE_READ) } == 0);
    }
}

fn check(call: &str, worked: bool) {
    if !worked {
        must::<(), _>(Err(format!("{call}: {}", io::Error::last_os_error())));
    }
}

/// The value, or the end of the benchmark.
#[inline]
fn must<T, E: Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => give_up(&error),
    }
}

#[cold]
fn give_up(error: &dyn Display) -> ! {
    let _ = writeln!(io::stderr(), "host: {error}");
    std::process::exit(1)
}
