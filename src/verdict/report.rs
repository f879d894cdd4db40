//! What the check did, step by step.

use core::fmt;
use core::time::Duration;

use super::Reason;
use crate::backing::Mode;
use crate::driver::CheckForm;

/// One step of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Symbols and the device's attribute.
    Support,
    /// The sizes the driver maps in.
    Granularity,
    /// Open files and memory map entries against their limits.
    Limits,
    /// Addresses, the wished size first and then down.
    Reserve,
    /// Two chunks, and the open files that one keeps.
    Create,
    /// At the span's base and behind the first.
    Map,
    /// Access for the device.
    SetAccess,
    /// Free memory has fallen by what was mapped.
    MemoryTaken,
    /// What is written can be read at once, over the border between the chunks too.
    ReadBack,
    /// The chunks are taken away and mapped again in each other's place; reads must follow them.
    Remap,
    /// Chunks of different sizes side by side.
    MixedSizes,
    /// Taken away, one by one.
    Unmap,
    /// Handles given up.
    Release,
    /// Free memory has risen by what was released.
    MemoryReturned,
    /// Addresses given back.
    FreeSpan,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 15] = [
        Self::Support,
        Self::Granularity,
        Self::Limits,
        Self::Reserve,
        Self::Create,
        Self::Map,
        Self::SetAccess,
        Self::MemoryTaken,
        Self::ReadBack,
        Self::Remap,
        Self::MixedSizes,
        Self::Unmap,
        Self::Release,
        Self::MemoryReturned,
        Self::FreeSpan,
    ];

    /// The step in a few words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Support => "symbols and attribute",
            Self::Granularity => "granularity",
            Self::Limits => "open files and map entries",
            Self::Reserve => "reserving addresses",
            Self::Create => "creating chunks",
            Self::Map => "mapping",
            Self::SetAccess => "setting access",
            Self::MemoryTaken => "free memory falls",
            Self::ReadBack => "reading back",
            Self::Remap => "mapping again",
            Self::MixedSizes => "mixed chunk sizes",
            Self::Unmap => "unmapping",
            Self::Release => "releasing chunks",
            Self::MemoryReturned => "free memory rises",
            Self::FreeSpan => "giving addresses back",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a step went.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It did what it should; with what was seen.
    Passed(String),
    /// It did not, and that decides.
    Failed(String),
    /// It did not, and the crate works around it.
    Worked(String),
    /// It was not needed in this form of the check, or an earlier step decided.
    Skipped,
}

/// One step with its outcome and time.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepReport {
    /// The step.
    pub step: Step,
    /// How it went.
    pub outcome: Outcome,
    /// How long it took.
    pub took: Duration,
}

/// Every step of a check. Printed, it is a table that people can read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The device.
    pub device: String,
    /// The runtime and its version.
    pub runtime: String,
    /// How thorough the check was.
    pub form: CheckForm,
    /// The steps in order.
    pub steps: Vec<StepReport>,
    /// How long it took in all.
    pub took: Duration,
    /// What was decided.
    pub mode: Mode,
    /// Why virtual memory is off, where it is.
    pub reason: Option<Reason>,
}

impl Report {
    /// How a step went; none if the check has no such step on record.
    #[must_use]
    pub fn outcome(&self, step: Step) -> Option<&Outcome> {
        self.steps.iter().find(|report| report.step == step).map(|report| &report.outcome)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for StepReport { step, outcome, took } in &self.steps {
            let (mark, text) = match outcome {
                Outcome::Passed(text) => ("ok", text.as_str()),
                Outcome::Failed(text) => ("FAILED", text.as_str()),
                Outcome::Worked(text) => ("noted", text.as_str()),
                Outcome::Skipped => continue,
            };
            let line = format!("  {:<27} {mark:<7} {:>9.3} ms  {text}", step.name(), took.as_secs_f64() * 1e3);
            writeln!(f, "{}", line.trim_end())?;
        }
        match &self.reason {
            Some(reason) => write!(f, "  => {}: {reason}", self.mode),
            None => write!(f, "  => {} memory, checked in {:.1} ms", self.mode, self.took.as_secs_f64() * 1e3),
        }
    }
}
