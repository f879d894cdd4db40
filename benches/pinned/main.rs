//! What page-locked host memory costs, beside one allocation of the driver's and beside the raw calls.
//!
//! ```text
//! cargo bench --bench pinned -- --device cuda:0
//! cargo bench --bench pinned -- --device cuda:0 --size 4GiB --size 28.47GiB --repeats 5 --json
//! cargo bench --bench pinned -- --device host --size 256MiB freeing threads
//! cargo bench --bench pinned -- --device hip:0 --size 4GiB --cache 96GiB --hog 16GiB --compact --seconds 60 pressure
//! ```
//!
//! `--cache` makes a file of that size that takes no room on the disk, `--cache-file` names one that is there: it is read
//! until next to nothing is free.
//!
//! Whatever is compared takes turns in the same run. A virtual machine gets its own memory at first touch, so the first
//! turn of a size is another thing than the later ones, and is told apart: `cold`, all sides of which are in the order of
//! the columns.

#[path = "../../examples/shared/json.rs"]
mod json;
mod pressure;
mod raw;
mod sections;

use std::io::{self, Write};
use std::process::ExitCode;

use growspan::Bytes;
use json::{Value, object};
use sections::{SECTIONS, Setting};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A figure: what, where, how much, and what it has to be.
pub(crate) struct Row {
    pub(crate) section: &'static str,
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) bar: Option<Bar>,
}

#[derive(Clone, Copy)]
pub(crate) enum Bar {
    AtMost(f64),
    AtLeast(f64),
}

impl Row {
    fn is_met(&self) -> Option<bool> {
        Some(match self.bar? {
            Bar::AtMost(bar) => self.value <= bar,
            Bar::AtLeast(bar) => self.value >= bar,
        })
    }

    fn print(&self, json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let bar = match self.bar {
            Some(Bar::AtMost(bar)) => format!("at most {bar}"),
            Some(Bar::AtLeast(bar)) => format!("at least {bar}"),
            None => String::new(),
        };
        if json {
            let row = object([
                ("section", self.section.into()),
                ("what", self.what.as_str().into()),
                ("value", Value::Real(self.value)),
                ("unit", self.unit.into()),
                ("bar", (!bar.is_empty()).then_some(bar).into()),
                ("met", self.is_met().into()),
            ]);
            return writeln!(out, "{row}");
        }
        let met = match self.is_met() {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        };
        let Self { section, what, value, unit, .. } = self;
        writeln!(out, "| {section} | {what} | {value:.3} {unit} | {bar} | {met} |")
    }
}

fn main() -> ExitCode {
    let mut setting = Setting::default();
    let (mut json, mut wanted) = (false, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        let mut size = || Bytes::parse(&value()).filter(|size| !size.is_zero());
        let understood = match word.as_str() {
            "--be-a-hog" => return pressure::be_a_hog(size().map_or(0, Bytes::get)),
            "--json" | "--compact" | "--bench" => {
                // The last is what cargo adds.
                json |= word == "--json";
                setting.compact |= word == "--compact";
                true
            }
            "--device" | "--cache-file" => {
                let value = value();
                match word.as_str() {
                    "--device" => setting.device.clone_from(&value),
                    _ => setting.cache_file = Some(value.as_str().into()),
                }
                !value.is_empty()
            }
            "--repeats" | "--threads" | "--seconds" => {
                let count = value().parse().unwrap_or(0);
                match word.as_str() {
                    "--repeats" => setting.repeats = count,
                    "--threads" => setting.threads = count,
                    _ => setting.seconds = Some(count as u64),
                }
                count > 0
            }
            "--size" | "--hog" | "--cache" => {
                let size = size().map(Bytes::get);
                match word.as_str() {
                    "--size" => setting.sizes.extend(size),
                    "--cache" => setting.cache = size,
                    _ => setting.hog = size,
                }
                size.is_some()
            }
            name => {
                let known = SECTIONS.iter().find(|(known, _)| *known == name);
                wanted.extend(known.map(|(known, _)| *known));
                known.is_some()
            }
        };
        if !understood {
            let known: Vec<&str> = SECTIONS.iter().map(|(name, _)| *name).collect();
            return say(2, &format!("{word:?} is not understood; sections are {}", known.join(", ")));
        }
    }
    if let Err(why) = growspan::Device::named(&setting.device) {
        return say(0, &format!("skipped: {why}"));
    }
    if setting.sizes.is_empty() {
        setting.sizes = match setting.device.as_str() {
            "host" => vec![256 << 20],
            _ => vec![4 << 30, (28.47 * (1_u64 << 30) as f64) as u64 >> 21 << 21],
        };
    }
    let mut missed = 0;
    for (name, section) in SECTIONS {
        // Pressure is for those who ask.
        if if wanted.is_empty() { name == "pressure" } else { !wanted.contains(&name) } {
            continue;
        }
        let mut report = |row: Row| {
            missed += u32::from(row.is_met() == Some(false));
            let _ = row.print(json);
        };
        if let Err(error) = section(&setting, &mut report) {
            missed += 1;
            say(1, &format!("{name}: {error}"));
        }
    }
    say(u8::from(missed > 0), &format!("{missed} missed or failed"))
}

fn say(code: u8, text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "pinned: {text}");
    ExitCode::from(code)
}
