//! What was measured, as a table or as lines of JSON.

use std::error::Error;
use std::io::{self, Write};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// What a figure has to be.
#[derive(Clone, Copy)]
pub(crate) enum Bar {
    None,
    AtMost(f64),
    AtLeast(f64),
}

impl Bar {
    fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::AtMost(bar) => format!("at most {bar}"),
            Self::AtLeast(bar) => format!("at least {bar}"),
        }
    }

    fn is_met(self, value: f64) -> Option<bool> {
        match self {
            Self::None => None,
            Self::AtMost(bar) => Some(value <= bar),
            Self::AtLeast(bar) => Some(value >= bar),
        }
    }
}

/// Where rows go as they come.
pub(crate) struct Table {
    json: bool,
    section: String,
}

impl Table {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, section: String::new() }
    }

    /// Begins with what is measured on.
    pub(crate) fn head(&self, device: &str) {
        if self.json {
            return print(&serde_json::json!({ "device": device }).to_string());
        }
        print(&format!("{device}\n\n| what | median | least .. most | n | bar | |\n|---|---|---|---|---|---|"));
    }

    pub(crate) fn section(&mut self, name: &str) {
        name.clone_into(&mut self.section);
        if !self.json {
            print(&format!("| **{name}** | | | | | |"));
        }
    }

    /// A figure, measured so many times.
    pub(crate) fn row(&self, what: &str, unit: &str, values: &[f64], bar: Bar) {
        let (median, section) = (median(values), &self.section);
        let met = if median.is_finite() { bar.is_met(median) } else { None };
        if self.json {
            return print(
                &serde_json::json!({
                    "section": section, "what": what, "unit": unit, "median": median, "values": values,
                    "bar": bar.text(), "met": met,
                })
                .to_string(),
            );
        }
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let met = match met {
            None => "",
            Some(true) => "met",
            Some(false) => "**missed**",
        };
        let spread = if values.len() > 1 { format!("{} .. {}", short(least), short(most)) } else { String::new() };
        let (value, n, bar) = (short(median), values.len(), bar.text());
        print(&format!("| {what} | {value} {unit} | {spread} | {n} | {bar} | {met} |"));
    }

    /// That a section could not be measured.
    pub(crate) fn failed(&self, why: &str) {
        if self.json {
            return print(&serde_json::json!({ "section": self.section, "failed": why }).to_string());
        }
        print(&format!("| failed: {why} | | | | | |"));
    }
}

/// A line at once, so that it is there whatever comes next.
fn print(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// Four digits or so.
fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// The middle one; not a number if there is none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// One by the other, turn by turn.
pub(crate) fn ratios(of: &[f64], to: &[f64]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of / to).collect()
}
