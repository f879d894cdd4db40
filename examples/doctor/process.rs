//! The limits of this process.

use std::fmt;
use std::io;

use growspan::Bytes;
use growspan::driver::{MapCount, OpenFiles, ProcessLimits};
use growspan::sys::limits::{Limit, ThisProcess, locked_memory};
use growspan::sys::thp::Thp;

use crate::json::{Value, object};

/// Locked memory below this is soon used up by pinned buffers.
const LITTLE_LOCKED: u64 = 64 << 20;

/// What binds this process.
pub(crate) struct Process {
    files: io::Result<OpenFiles>,
    maps: io::Result<MapCount>,
    locked: io::Result<Limit>,
    thp: Thp,
}

impl Process {
    pub(crate) fn read() -> Self {
        Self { files: ThisProcess.open_files(), maps: ThisProcess.maps(), locked: locked_memory(), thp: Thp::read() }
    }

    /// What is unlimited or cannot be read is null.
    pub(crate) fn json(&self) -> Value {
        let limit = |limit: u64| Value::from((limit != u64::MAX).then_some(limit));
        let files = self.files.as_ref().ok().map(|files| {
            object([("held", files.held.into()), ("soft", limit(files.soft)), ("hard", limit(files.hard))])
        });
        let maps = self.maps.as_ref().ok();
        let maps = maps.map(|maps| object([("held", maps.held.into()), ("limit", limit(maps.limit))]));
        let locked = self.locked.as_ref().ok();
        let locked = locked.map(|locked| object([("soft", limit(locked.soft)), ("hard", limit(locked.hard))]));
        object([
            ("open_files", files.into()),
            ("map_entries", maps.into()),
            ("locked_memory_bytes", locked.into()),
            (
                "transparent_huge_pages",
                object([
                    ("anonymous", self.thp.anonymous.clone().into()),
                    ("shared", self.thp.shared.clone().into()),
                    ("process", self.thp.process.into()),
                ]),
            ),
        ])
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "this process")?;
        match &self.files {
            Ok(OpenFiles { held, soft, hard }) => {
                writeln!(f, "  open files:    {held} held, limit {}, hard limit {}", count(*soft), count(*hard))?;
                if soft < hard {
                    writeln!(f, "                 (the crate raises the limit itself when it has to)")?;
                }
            }
            Err(error) => writeln!(f, "  open files:    cannot be read: {error}")?,
        }
        match &self.maps {
            Ok(MapCount { held, limit }) => {
                writeln!(f, "  map entries:   {held} held, limit {limit} (vm.max_map_count)")?;
            }
            Err(error) => writeln!(f, "  map entries:   cannot be read: {error}")?,
        }
        match &self.locked {
            Ok(Limit { soft, hard }) => {
                writeln!(f, "  locked memory: limit {}, hard limit {}", size(*soft), size(*hard))?;
                if *soft < LITTLE_LOCKED {
                    writeln!(f, "                 (little for locked host memory; ulimit -l raises it)")?;
                }
            }
            Err(error) => writeln!(f, "  locked memory: cannot be read: {error}")?,
        }
        let Thp { anonymous, shared, process, .. } = &self.thp;
        let word = |setting: &Option<String>| setting.clone().unwrap_or_else(|| "not said".to_owned());
        write!(f, "  huge pages:    {} for anonymous memory, {} for shared", word(anonymous), word(shared))?;
        if *process == Some(false) {
            write!(f, "; off for this process")?;
        }
        writeln!(f)
    }
}

fn count(limit: u64) -> String {
    if limit == u64::MAX { "none".to_owned() } else { limit.to_string() }
}

fn size(limit: u64) -> String {
    if limit == u64::MAX { "none".to_owned() } else { Bytes::new(limit).to_string() }
}
