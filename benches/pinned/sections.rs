//! What is measured.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use growspan::driver::{Driver, PinFlags};
use growspan::pinned::{PinStrategy, PinTiming, PinnedBuffer, ThpPolicy};
use growspan::sys::thp::ThpOff;
use growspan::{Bytes, Device, GrowableBuffer};

use crate::raw::{self, Life};
use crate::{Bar, Outcome, Row, pressure};

/// What to measure on.
pub(crate) struct Setting {
    pub(crate) device: String,
    pub(crate) sizes: Vec<u64>,
    pub(crate) repeats: usize,
    /// Threads of the raw side; ours choose by themselves.
    pub(crate) threads: usize,
    pub(crate) hog: Option<u64>,
    /// The size of a file that is made to fill the page cache with, and one that is there.
    pub(crate) cache: Option<u64>,
    pub(crate) cache_file: Option<PathBuf>,
    pub(crate) compact: bool,
    /// About how long the section on pressure may take; the first turn of each size is made all the same.
    pub(crate) seconds: Option<u64>,
}

impl Default for Setting {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
        Self {
            device: "cuda:0".into(),
            sizes: Vec::new(),
            repeats: 3,
            threads,
            hog: None,
            cache: None,
            cache_file: None,
            compact: false,
            seconds: None,
        }
    }
}

pub(crate) type Report<'a> = &'a mut dyn FnMut(Row);
type Section = fn(&Setting, Report<'_>) -> Outcome<()>;

pub(crate) const SECTIONS: [(&str, Section); 7] = [
    ("allocating", allocating),
    ("freeing", freeing),
    ("copying", copying),
    ("growing", growing),
    ("threads", threads),
    ("guard", guard),
    ("pressure", pressure::section),
];

const GIB: f64 = (1_u64 << 30) as f64;

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Ours, with default settings but for the policy.
pub(crate) fn ours(device: &Device, bytes: u64, thp: Option<ThpPolicy>) -> Outcome<(PinTiming, Duration)> {
    let mut builder = PinnedBuffer::<u8>::builder(device).max_len(bytes as usize);
    if let Some(thp) = thp {
        builder = builder.thp(thp);
    }
    let began = Instant::now();
    let mut buffer = builder.build()?;
    let mut timing = buffer.grow_to(bytes as usize)?;
    // Addresses too.
    timing.total = began.elapsed();
    let began = Instant::now();
    buffer.close()?;
    Ok((timing, began.elapsed()))
}

/// Three sides of one size, in turns.
struct Sides {
    driver: Vec<Life>,
    raw: Vec<Life>,
    ours: Vec<(PinTiming, Duration)>,
}

fn sides(setting: &Setting, bytes: u64) -> Outcome<Sides> {
    let (device, driver) = (Device::named(&setting.device)?, raw::driver(&setting.device)?);
    let mut sides = Sides { driver: Vec::new(), raw: Vec::new(), ours: Vec::new() };
    // One turn more: the first is the cold one.
    for _ in 0..=setting.repeats {
        sides.driver.push(raw::allocation(&*driver, bytes)?);
        sides.ours.push(ours(&device, bytes, None)?);
        sides.raw.push(raw::touch_and_register(&*driver, bytes, setting.threads)?);
    }
    Ok(sides)
}

fn allocating(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    for &bytes in &setting.sizes {
        let sides = sides(setting, bytes)?;
        let size = Bytes::new(bytes);
        let mut say = |what: String, value, unit, bar| report(Row { section: "allocating", what, value, unit, bar });
        let (driver, raw): (Vec<_>, Vec<_>) = (
            sides.driver.iter().map(|life| ms(life.make)).collect(),
            sides.raw.iter().map(|life| ms(life.make)).collect(),
        );
        let ours: Vec<f64> = sides.ours.iter().map(|(timing, _)| ms(timing.total)).collect();
        for (name, all) in
            [("one driver allocation", &driver), ("default settings", &ours), ("touch and register", &raw)]
        {
            say(format!("{size}, {name}, cold"), all[0], "ms", None);
            say(format!("{size}, {name}, median"), median(all[1..].to_vec()), "ms", None);
        }
        let of = |part: fn(&PinTiming) -> Duration| median(sides.ours[1..].iter().map(|(t, _)| ms(part(t))).collect());
        say(format!("{size}, of it prefault"), of(|timing| timing.prefault), "ms", None);
        say(format!("{size}, of it register"), of(|timing| timing.register), "ms", None);
        // The first allocation of all pays for the machine's own memory: only later ones compare.
        let times = median(driver[1..].to_vec()) / median(ours[1..].to_vec());
        let bar = (setting.device != "host").then_some(Bar::AtLeast(3.0));
        say(format!("{size}, driver allocation / default settings"), times, "times", bar);
        let ratios = ours[1..].iter().zip(&raw[1..]).map(|(ours, raw)| ours / raw).collect();
        say(format!("{size}, default settings / touch and register"), median(ratios), "times", Some(Bar::AtMost(1.10)));
        for (timing, _) in &sides.ours {
            eprintln!("# {timing}");
        }
    }
    Ok(())
}

fn freeing(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    for &bytes in &setting.sizes {
        let sides = sides(setting, bytes)?;
        let size = Bytes::new(bytes);
        let driver = median(sides.driver.iter().map(|life| ms(life.free)).collect());
        let raw = median(sides.raw.iter().map(|life| ms(life.free)).collect());
        let ours = median(sides.ours.iter().map(|(_, free)| ms(*free)).collect());
        let mut say = |what: String, value, unit, bar| report(Row { section: "freeing", what, value, unit, bar });
        say(format!("{size}, one driver allocation"), driver, "ms", None);
        say(format!("{size}, default settings"), ours, "ms", None);
        say(format!("{size}, unregister and unmap"), raw, "ms", None);
        let bar = (setting.device != "host").then_some(Bar::AtLeast(5.0));
        say(format!("{size}, driver / default settings"), driver / ours, "times", bar);
    }
    Ok(())
}

/// Copies to the device from both, and over borders.
fn copying(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    let device = Device::named(&setting.device)?;
    let bytes = (setting.sizes.iter().copied().min().unwrap_or(1 << 30)).min(4 << 30) as usize;
    let mut target = GrowableBuffer::<u8>::builder(&device).max_len(bytes).build()?;
    target.grow_to(bytes)?;
    let buffer = |strategy, piece: Option<Bytes>| -> Outcome<PinnedBuffer<u8>> {
        let mut builder = PinnedBuffer::<u8>::builder(&device).max_len(bytes).strategy(strategy);
        if let Some(piece) = piece {
            builder = builder.piece(piece);
        }
        let mut buffer = builder.build()?;
        buffer.grow_to(bytes)?;
        buffer.fill(1);
        Ok(buffer)
    };
    let sources = [
        ("driver allocation", buffer(PinStrategy::Driver, None)?),
        ("default settings", buffer(PinStrategy::Pieces, None)?),
        ("pieces of 256 MiB", buffer(PinStrategy::Pieces, Some(Bytes::mib(256)))?),
    ];
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..setting.repeats * 3 {
        for ((_, source), times) in sources.iter().zip(&mut times) {
            let began = Instant::now();
            target.copy_in(0, source)?;
            times.push(bytes as f64 / GIB / began.elapsed().as_secs_f64());
        }
    }
    let rates = times.map(median);
    for ((name, _), rate) in sources.iter().zip(rates) {
        let what = format!("to the device from {name}, {}", Bytes::new(bytes as u64));
        report(Row { section: "copying", what, value: rate, unit: "GiB/s", bar: None });
    }
    for (number, name) in [(1, "default settings"), (2, "pieces of 256 MiB")] {
        let what = format!("{name} / driver allocation");
        let bar = Some(Bar::AtLeast(0.97));
        report(Row { section: "copying", what, value: rates[number] / rates[0], unit: "times", bar });
    }
    target.close()?;
    Ok(())
}

/// In steps, beside at once.
fn growing(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    let device = Device::named(&setting.device)?;
    let bytes = setting.sizes.iter().copied().max().unwrap_or(4 << 30);
    let step = (2 << 30).min(bytes / 4).max(2 << 20);
    let (mut at_once, mut in_steps) = (Vec::new(), Vec::new());
    for _ in 0..=setting.repeats {
        at_once.push(ms(ours(&device, bytes, None)?.0.total));
        let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(bytes as usize).build()?;
        let began = Instant::now();
        let mut len = 0;
        while len < bytes {
            len = (len + step).min(bytes);
            buffer.grow_to(len as usize)?;
        }
        in_steps.push(ms(began.elapsed()));
        buffer.close()?;
    }
    let (at_once, in_steps) = (median(at_once[1..].to_vec()), median(in_steps[1..].to_vec()));
    let gib = bytes as f64 / GIB;
    let (size, step) = (Bytes::new(bytes), Bytes::new(step));
    let mut say = |what: String, value, unit, bar| report(Row { section: "growing", what, value, unit, bar });
    say(format!("{size} at once"), at_once / gib, "ms/GiB", None);
    say(format!("{size} in steps of {step}"), in_steps / gib, "ms/GiB", None);
    say("in steps / at once".into(), in_steps / at_once, "times", Some(Bar::AtMost(1.10)));
    Ok(())
}

/// Prefault by 1, 2, 4, ... threads.
fn threads(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    let device = Device::named(&setting.device)?;
    let bytes = setting.sizes.iter().copied().min().unwrap_or(4 << 30).min(8 << 30);
    let most = std::thread::available_parallelism().map_or(1, usize::from).min(64);
    let counts: Vec<usize> = (0..).map(|power| 1 << power).take_while(|count| *count <= most).collect();
    let mut times = vec![Vec::new(); counts.len()];
    for _ in 0..=setting.repeats {
        for (count, times) in counts.iter().zip(&mut times) {
            let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(bytes as usize).threads(*count).build()?;
            times.push(ms(buffer.grow_to(bytes as usize)?.prefault));
            buffer.close()?;
        }
    }
    let medians: Vec<f64> = times.iter().map(|times| median(times[1..].to_vec())).collect();
    for (count, time) in counts.iter().zip(&medians) {
        let what = format!("prefault of {} by {count} threads", Bytes::new(bytes));
        report(Row { section: "threads", what, value: *time, unit: "ms", bar: None });
    }
    let best = medians.iter().copied().fold(f64::INFINITY, f64::min);
    let what = "one thread / the best number of them".into();
    report(Row { section: "threads", what, value: medians[0] / best, unit: "times", bar: None });
    Ok(())
}

fn guard(_: &Setting, report: Report<'_>) -> Outcome<()> {
    let mut times = Vec::new();
    for _ in 0..10_001 {
        let began = Instant::now();
        drop(ThpOff::enter()?);
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    let what = "huge pages off and on again".into();
    report(Row { section: "guard", what, value: median(times), unit: "us", bar: Some(Bar::AtMost(5.0)) });
    let outer = ThpOff::enter()?;
    let mut nested = Vec::new();
    for _ in 0..10_001 {
        let began = Instant::now();
        drop(ThpOff::enter()?);
        nested.push(began.elapsed().as_secs_f64() * 1e6);
    }
    drop(outer);
    let what = "the same inside another".into();
    report(Row { section: "guard", what, value: median(nested), unit: "us", bar: Some(Bar::AtMost(5.0)) });
    Ok(())
}

/// One driver allocation, for the section on pressure.
pub(crate) fn driver_allocation(driver: &dyn Driver, bytes: u64, off: bool) -> Outcome<Duration> {
    let _off = off.then(ThpOff::enter).transpose()?;
    let began = Instant::now();
    let addr = driver.allocate_pinned(bytes, PinFlags::USUAL)?;
    let time = began.elapsed();
    // SAFETY: it was allocated just now, and nobody uses it.
    unsafe { driver.free_pinned(addr, bytes) }?;
    Ok(time)
}
