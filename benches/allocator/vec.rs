//! A `Vec` of bytes that is pushed to gigabytes, each in a process of its own, whose peak of resident memory is looked at.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use allocator_api2_04::vec::Vec as VecIn;
use growspan::{Bytes, Device, DeviceOptions, Headroom, SpanAllocator, driver::host::HostOptions};

use crate::{Row, bar, median};

/// What a child found: seconds, moves, and the peak of resident memory in KiB, without what it had at first.
struct Found {
    seconds: f64,
    moves: u64,
    peak: f64,
}

pub(crate) fn run(quick: bool) -> Vec<Row> {
    let bytes: u64 = if quick { 64 << 20 } else { 4 << 30 };
    let turns = if quick { 1 } else { 8 };
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..turns {
        // Each goes first as often as the other: who comes second finds the memory that the first gave back.
        let first = (turn % 2 == 0).then(|| measure("spans", bytes)).flatten();
        let Some(global) = measure("global", bytes) else { continue };
        let Some(spans) = first.or_else(|| measure("spans", bytes)) else { continue };
        ratios.push(spans.seconds / global.seconds);
        ours.push(spans);
        theirs.push(global);
    }
    let ratio = median(&mut ratios);
    let time = |found: &[Found]| median(&mut found.iter().map(|found| found.seconds).collect::<Vec<_>>());
    let peak =
        |found: &[Found]| median(&mut found.iter().map(|found| found.peak * 1024.0 / bytes as f64).collect::<Vec<_>>());
    let moves = |found: &[Found]| found.iter().map(|found| found.moves).max().unwrap_or(u64::MAX);
    let size = Bytes::new(bytes);
    vec![
        Row::new(
            format!("`Vec<u8>` pushed to {size}"),
            format!("{:.3} s, {ratio:.2} times", time(&ours)),
            format!("global allocator {:.3} s", time(&theirs)),
            bar("no slower", ratio <= 1.0),
        ),
        Row::new(
            "the same: how often its address changed",
            moves(&ours).to_string(),
            moves(&theirs).to_string(),
            bar("0", moves(&ours) == 0),
        ),
        Row::new(
            "the same: the most that was resident",
            format!("{:.3} times its size", peak(&ours)),
            format!("{:.3}", peak(&theirs)),
            bar("1.0 times", peak(&ours) < 1.02),
        ),
    ]
}

fn measure(which: &str, bytes: u64) -> Option<Found> {
    let program = std::env::current_exe().ok()?;
    let output = Command::new(program).args(["--child", which, &bytes.to_string()]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut words = text.split_whitespace().map(str::parse::<f64>);
    let mut next = || words.next()?.ok();
    Some(Found { seconds: next()?, moves: next()? as u64, peak: next()? })
}

/// The most memory of this process that was resident, in KiB.
fn peak_kib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(f64::NAN)
}

pub(crate) fn child(words: &[String]) {
    let bytes = words.get(1).and_then(|word| word.parse().ok()).unwrap_or(0_u64);
    let before = peak_kib();
    let result = match words.first().map(String::as_str) {
        Some("spans") => spans(bytes),
        _ => Some(global(bytes)),
    };
    if let Some((seconds, moves)) = result {
        println!("{seconds} {moves} {}", peak_kib() - before);
    }
}

/// Starts with a mapped chunk, as a vector that is known to become large does; grows by doubling like any other.
fn spans(bytes: u64) -> Option<(f64, u64)> {
    let options = HostOptions::default().with_capacity(Bytes::new(bytes + (64 << 20)));
    let device: Device = DeviceOptions::new().host(options).ok()?;
    let headroom = Headroom::default().with_least(Bytes::new(bytes));
    let allocator = SpanAllocator::builder(&device).headroom(headroom).build().ok()?;
    // The verdict was decided by now.
    let start = Instant::now();
    let mut vec: VecIn<u8, _> = VecIn::with_capacity_in(2 << 20, allocator);
    let (mut moves, mut address) = (0, vec.as_ptr());
    let mut pushed = 0_u64;
    while pushed < bytes {
        let step = (bytes - pushed).min(1 << 20);
        for n in 0..step {
            vec.push(black_box(n as u8));
        }
        pushed += step;
        moves += u64::from(vec.as_ptr() != address);
        address = vec.as_ptr();
    }
    Some((start.elapsed().as_secs_f64(), moves))
}

fn global(bytes: u64) -> (f64, u64) {
    let start = Instant::now();
    let mut vec: Vec<u8> = Vec::with_capacity(2 << 20);
    let (mut moves, mut address) = (0, vec.as_ptr());
    let mut pushed = 0_u64;
    while pushed < bytes {
        let step = (bytes - pushed).min(1 << 20);
        for n in 0..step {
            vec.push(black_box(n as u8));
        }
        pushed += step;
        moves += u64::from(vec.as_ptr() != address);
        address = vec.as_ptr();
    }
    (start.elapsed().as_secs_f64(), moves)
}
