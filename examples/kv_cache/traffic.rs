//! The requests that arrive: from a trace, or drawn from the distribution of one.
//!
//! Only lengths matter here. There always is a next request waiting, so that every slot is busy: no traffic asks for
//! more memory.

use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::num::NonZero;
use std::path::Path;

use crate::pattern::mix;

/// One request: the tokens of its prompt and of its answer.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) context: u32,
    pub(crate) generated: u32,
}

/// Requests, one after the other. The built-in traffic never ends.
pub(crate) enum Traffic {
    Trace(std::vec::IntoIter<Request>),
    /// The number of values drawn so far.
    BuiltIn(u64),
}

impl Traffic {
    /// The same requests at every run.
    pub(crate) fn built_in() -> Self {
        Self::BuiltIn(0)
    }

    /// How many of `requests` there are.
    pub(crate) fn at_most(&self, requests: usize) -> usize {
        match self {
            Self::Trace(all) => all.len().min(requests),
            Self::BuiltIn(_) => requests,
        }
    }

    /// Reads all of a trace, so that a mistake in it is found before anything runs.
    pub(crate) fn from_trace(path: &Path) -> Result<Self, Box<dyn Error>> {
        let name = path.display();
        let file = File::open(path).map_err(|error| format!("{name}: {error}"))?;
        let mut lines = (1_u64..).zip(BufReader::new(file).lines());
        let Some((_, header)) = lines.next() else {
            return Err(format!("{name}: the file is empty; a header with {CONTEXT} and {GENERATED} is needed").into());
        };
        let columns = Columns::find(&header.map_err(|error| format!("{name}:1: {error}"))?);
        let columns = columns.map_err(|error| format!("{name}:1: {error}"))?;
        let requests: Vec<Request> = lines
            .map(|(number, line)| {
                let request = line.map_err(|error| error.to_string()).and_then(|line| columns.read(&line));
                request.map_err(|error| format!("{name}:{number}: {error}"))
            })
            .collect::<Result<_, _>>()?;
        if requests.is_empty() {
            return Err(format!("{name}: there is no request after the header").into());
        }
        Ok(Self::Trace(requests.into_iter()))
    }
}

impl Iterator for Traffic {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        match self {
            Self::Trace(requests) => requests.next(),
            Self::BuiltIn(drawn) => {
                let mut draw = |table: &[_]| {
                    *drawn += 1;
                    quantile(table, mix(*drawn))
                };
                Some(Request { context: draw(&CONTEXT_TOKENS), generated: draw(&GENERATED_TOKENS) })
            }
        }
    }
}

const CONTEXT: &str = "ContextTokens";
const GENERATED: &str = "GeneratedTokens";

/// Where a trace has its figures.
struct Columns {
    context: usize,
    generated: usize,
    all: usize,
}

impl Columns {
    fn find(header: &str) -> Result<Self, String> {
        let names: Vec<_> = header.trim_start_matches('\u{feff}').split(',').map(str::trim).collect();
        let place = |wanted: &str| {
            let missing = || format!("the header is {header:?}, without the column {wanted}");
            names.iter().position(|name| *name == wanted).ok_or_else(missing)
        };
        Ok(Self { context: place(CONTEXT)?, generated: place(GENERATED)?, all: names.len() })
    }

    fn read(&self, line: &str) -> Result<Request, String> {
        let fields: Vec<_> = line.split(',').map(str::trim).collect();
        if fields.len() != self.all {
            return Err(format!("{line:?} has {} fields, and the header has {}", fields.len(), self.all));
        }
        let tokens = |name: &str, place: usize| {
            let text = fields.get(place).copied().unwrap_or_default();
            let wrong = |_| format!("{name} is {text:?}; it has to be a whole number from 1 to {}", u32::MAX);
            text.parse::<NonZero<u32>>().map(NonZero::get).map_err(wrong)
        };
        Ok(Request { context: tokens(CONTEXT, self.context)?, generated: tokens(GENERATED, self.generated)? })
    }
}

// Percentiles of the Azure LLM inference trace 2023 (conversation): 19,366 requests of a production service within an
// hour. CC-BY 4.0; P. Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024,
// https://github.com/Azure/AzurePublicDataset. As (share of the requests in thousandths, at most this many tokens).
// Lengths between two entries are taken as evenly spread, and prompt and answer as independent (in the trace their
// correlation is -0.11).
const CONTEXT_TOKENS: [(u16, u32); 15] = [
    (0, 2),
    (10, 29),
    (50, 181),
    (100, 207),
    (200, 387),
    (300, 403),
    (400, 703),
    (500, 1_020),
    (750, 1_189),
    (850, 1_877),
    (900, 2_735),
    (950, 4_083),
    (990, 4_142),
    (999, 6_212),
    (1000, 14_050),
];
const GENERATED_TOKENS: [(u16, u32); 13] = [
    (0, 7),
    (10, 16),
    (50, 41),
    (100, 54),
    (250, 85),
    (500, 129),
    (600, 177),
    (700, 384),
    (900, 424),
    (950, 451),
    (990, 601),
    (999, 954),
    (1000, 1_000),
];

/// The length at a random place of a distribution.
fn quantile(table: &[(u16, u32)], random: u64) -> u32 {
    // 53 bits: all that a float between 0 and 1 holds.
    let at = (random >> 11) as f64 / (1_u64 << 53) as f64 * 1000.0;
    let between = table.windows(2).find_map(|pair| match pair {
        [(from, least), (to, most)] if at < f64::from(*to) => {
            let share = (at - f64::from(*from)) / f64::from(to - from);
            Some(f64::from(*least) + share * f64::from(most - least))
        }
        _ => None,
    });
    // A token at least; rounding down keeps it within the table.
    between.map_or(1, |tokens| tokens as u32)
}
