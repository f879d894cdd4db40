//! What the command line asks for.

use std::error::Error;
use std::ffi::OsString;
use std::fmt;
use std::num::NonZero;
use std::path::PathBuf;

use growspan::{Bytes, Sizing};

pub(crate) const HELP: &str = "\
The KV cache of an LLM engine under real traffic, every byte checked.

Usage: kv_cache [OPTIONS]

  --device NAME           auto, host, cuda:N, cuda:GPU-UUID or hip:N [auto]; built with the feature sim also sim, a
                          simulated card, and sim:vgpu, one without virtual memory
  --bytes-per-token SIZE  keys and values of one token [8KiB: Llama 3.2 1B with a 4-bit cache]
  --slots N               requests served at a time [32]
  --max-context N         tokens a slot can hold [16384]; a prompt that leaves no room for an answer is refused,
                          an answer that does not fit is cut short
  --requests N            requests that arrive [500]; a trace may have fewer
  --trace FILE.csv        take their lengths from a trace with the columns ContextTokens and GeneratedTokens,
                          instead of the built-in generator
  --policy POLICY         how chunks are sized: ladder, uniform:SIZE or exact [ladder]
  --contiguous            virtual memory off: every slot allocates all of its tokens at the start
  --json                  print one JSON object instead of a table
  --help                  print this

Sizes are in units of 1024: 512, 64KiB, 1.5MiB. The exit status is 0 when all bytes were right, 1 when some were not,
2 when it could not run.
";

/// The largest token that is taken: far more than any model needs, and small enough for a scratch buffer.
const LARGEST_TOKEN: Bytes = Bytes::mib(64);

pub(crate) struct Args {
    pub(crate) device: String,
    /// Keys and values of one token, in bytes.
    pub(crate) bytes_per_token: usize,
    pub(crate) slots: u32,
    /// Tokens a slot can hold.
    pub(crate) max_context: u32,
    pub(crate) requests: usize,
    pub(crate) trace: Option<PathBuf>,
    pub(crate) policy: Policy,
    pub(crate) contiguous: bool,
    pub(crate) json: bool,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            device: "auto".to_owned(),
            bytes_per_token: 8 << 10,
            slots: 32,
            max_context: 16_384,
            requests: 500,
            trace: None,
            policy: Policy(Sizing::Ladder),
            contiguous: false,
            json: false,
        }
    }
}

impl Args {
    /// Reads the command line; none if it asks for help.
    pub(crate) fn read(words: impl Iterator<Item = OsString>) -> Result<Option<Self>, Box<dyn Error>> {
        let mut args = Self::default();
        let mut words =
            words.map(|word| word.into_string().map_err(|word| format!("{} is not UTF-8; see --help", word.display())));
        while let Some(word) = words.next().transpose()? {
            // Both `--slots 8` and `--slots=8`.
            let (option, inline) = match word.split_once('=') {
                Some((option, value)) => (option, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            match option {
                "--help" | "-h" | "--json" | "--contiguous" if inline.is_some() => {
                    return Err(format!("{option} takes no value; see --help").into());
                }
                "--help" | "-h" => return Ok(None),
                "--json" => args.json = true,
                "--contiguous" => args.contiguous = true,
                "--device" | "--bytes-per-token" | "--slots" | "--max-context" | "--requests" | "--trace"
                | "--policy" => {
                    let value = match inline {
                        Some(value) => value,
                        None => words.next().ok_or_else(|| format!("{option} needs a value; see --help"))??,
                    };
                    args.set(option, value)?;
                }
                _ => return Err(format!("{word:?} is not an option; see --help").into()),
            }
        }
        Ok(Some(args))
    }

    fn set(&mut self, option: &str, value: String) -> Result<(), Box<dyn Error>> {
        match option {
            "--device" => self.device = value,
            "--slots" => self.slots = count(option, &value)?,
            "--max-context" => self.max_context = count(option, &value)?,
            "--requests" => self.requests = usize::try_from(count(option, &value)?)?,
            "--trace" => self.trace = Some(value.into()),
            "--policy" => self.policy = Policy::parse(&value)?,
            _ => self.bytes_per_token = token_size(option, &value)?,
        }
        Ok(())
    }

    /// What the slots would take if each allocated all of its tokens at the start.
    pub(crate) fn preallocation(&self) -> Result<Bytes, Box<dyn Error>> {
        let slot = Bytes::new(self.slot_bytes()? as u64);
        slot.checked_mul(self.slots.into())
            .ok_or_else(|| format!("{} slots of {slot} do not fit in 64 bits; ask for less", self.slots).into())
    }

    /// What a slot can hold, in bytes.
    pub(crate) fn slot_bytes(&self) -> Result<usize, Box<dyn Error>> {
        let tokens = usize::try_from(self.max_context)?;
        tokens
            .checked_mul(self.bytes_per_token)
            .ok_or_else(|| format!("a slot of {tokens} tokens does not fit in memory; ask for less").into())
    }
}

fn count(option: &str, value: &str) -> Result<u32, String> {
    match value.parse::<NonZero<u32>>() {
        Ok(count) => Ok(count.get()),
        Err(_) => Err(format!("{option} is {value:?}; it has to be a whole number from 1 to {}", u32::MAX)),
    }
}

fn token_size(option: &str, value: &str) -> Result<usize, String> {
    Bytes::parse(value)
        .filter(|size| !size.is_zero() && *size <= LARGEST_TOKEN)
        .and_then(|size| usize::try_from(size.get()).ok())
        .ok_or_else(|| format!("{option} is {value:?}; it has to be a size from 1 to {LARGEST_TOKEN}, like 8KiB"))
}

/// A sizing policy that can be read and printed.
#[derive(Clone, Copy)]
pub(crate) struct Policy(Sizing);

impl Policy {
    fn parse(text: &str) -> Result<Self, String> {
        let sizing = match (text, text.strip_prefix("uniform:").map(Bytes::parse)) {
            ("ladder", _) => Some(Sizing::Ladder),
            ("exact", _) => Some(Sizing::Exact),
            (_, Some(size)) => size.map(Sizing::Uniform),
            _ => None,
        };
        sizing.map(Self).ok_or_else(|| format!("--policy is {text:?}; it has to be ladder, uniform:SIZE or exact"))
    }

    /// The policy as the crate takes it.
    pub(crate) fn sizing(self) -> Sizing {
        self.0
    }
}

impl From<Sizing> for Policy {
    fn from(sizing: Sizing) -> Self {
        Self(sizing)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Sizing::Ladder => f.write_str("ladder"),
            Sizing::Uniform(size) => write!(f, "uniform:{}", size.to_string().replace(' ', "")),
            Sizing::Exact => f.write_str("exact"),
            other => write!(f, "{other:?}"),
        }
    }
}
