//! The engine: slots, each with a buffer, and the requests that pass through them.

use std::error::Error;
use std::time::Instant;

use growspan::{Bytes, Device, GrowableBuffer, OpenFileBudget, Quiesce, Sizing};

use crate::args::Args;
use crate::pattern;
use crate::times::Times;
use crate::traffic::Request;

/// Tokens are copied to and from the device in blocks of about this many bytes.
const BLOCK: usize = 256 << 10;

/// What the engine did, and what it needed for that.
#[derive(Default)]
pub(crate) struct Figures {
    /// Requests served to their end.
    pub(crate) requests: u64,
    /// Requests whose prompt left no room for an answer.
    pub(crate) refused: u64,
    /// Requests whose answer was cut short at the end of the slot.
    pub(crate) truncated: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) generated_tokens: u64,
    pub(crate) verified_bytes: u64,
    /// Bytes that were not what was stored.
    pub(crate) mismatches: u64,
    /// Growths after which a buffer was somewhere else.
    pub(crate) address_moves: u64,
    /// All growths: most stay inside memory that is there already.
    pub(crate) grows: Times,
    /// The growths among them that had to get memory.
    pub(crate) mapping_grows: Times,
    pub(crate) shrinks: Times,
    /// The most bytes of tokens at any time.
    pub(crate) peak_stored: u64,
    /// The most bytes under slots and in the pool at any time.
    pub(crate) peak_held: u64,
    /// The most open files of the process, looked at whenever a prompt was stored.
    pub(crate) peak_open_files: u64,
    /// What is under the slots and in the pool now.
    pub(crate) held: u64,
}

/// A place for one request at a time.
struct Slot {
    cache: GrowableBuffer<u8>,
    /// Where the cache was when it was built. A kernel or a captured graph would keep this.
    address: u64,
    running: Option<Running>,
}

/// The request in a slot.
#[derive(Clone, Copy)]
struct Running {
    /// Its number, which its bytes depend on.
    id: u64,
    /// Tokens stored so far.
    stored: u32,
    /// Tokens it ends with.
    end: u32,
}

pub(crate) struct Engine {
    device: Device,
    slots: Vec<Slot>,
    bytes_per_token: usize,
    max_context: u32,
    scratch: Vec<u8>,
    figures: Figures,
}

impl Engine {
    /// Reserves the addresses of every slot. In contiguous mode this allocates their memory too.
    pub(crate) fn new(device: &Device, args: &Args) -> Result<Self, Box<dyn Error>> {
        let slot_bytes = args.slot_bytes()?;
        let slots = (1..=args.slots).map(|number| {
            let cache = GrowableBuffer::builder(device)
                .max_len(slot_bytes)
                .build()
                .map_err(|error| format!("slot {number} of {}: {error}", args.slots))?;
            Ok(Slot { address: cache.device_ptr(), cache, running: None })
        });
        Ok(Self {
            device: device.clone(),
            slots: slots.collect::<Result<_, Box<dyn Error>>>()?,
            bytes_per_token: args.bytes_per_token,
            max_context: args.max_context,
            scratch: vec![0; (BLOCK / args.bytes_per_token).max(1) * args.bytes_per_token],
            figures: Figures::default(),
        })
    }

    /// The sizing rule in force; none in contiguous mode.
    pub(crate) fn sizing(&self) -> Option<Sizing> {
        self.slots.first().and_then(|slot| slot.cache.stats().sizing)
    }

    /// Serves requests until the last one has ended. `watch` sees the figures after every step.
    pub(crate) fn run(
        &mut self,
        requests: impl Iterator<Item = Request>,
        mut watch: impl FnMut(&Figures),
    ) -> growspan::Result<()> {
        let mut requests = (0..).zip(requests);
        loop {
            let mut busy = false;
            for slot in &mut self.slots {
                let mut work = Work {
                    bytes_per_token: self.bytes_per_token,
                    scratch: &mut self.scratch,
                    figures: &mut self.figures,
                };
                match slot.running {
                    Some(running) if running.stored == running.end => work.finish(slot, running)?,
                    Some(running) => work.store(slot, running, 1)?,
                    None => {}
                }
                if slot.running.is_none()
                    && let Some((id, request)) = admit(&mut requests, self.max_context, work.figures)
                {
                    let end = request.context + request.generated;
                    work.store(slot, Running { id, stored: 0, end }, request.context)?;
                    let files = OpenFileBudget::process().usage();
                    work.figures.peak_open_files = work.figures.peak_open_files.max(files.ours + files.others);
                }
                busy |= slot.running.is_some();
            }
            if !busy {
                return Ok(());
            }
            self.measure();
            watch(&self.figures);
        }
    }

    /// Looks at what is stored and held now.
    fn measure(&mut self) {
        let stored = self.slots.iter().map(|slot| slot.cache.len() as u64).sum();
        let committed: u64 = self.slots.iter().map(|slot| slot.cache.committed().get()).sum();
        let figures = &mut self.figures;
        figures.held = committed + self.device.pool().kept().get();
        figures.peak_held = figures.peak_held.max(figures.held);
        figures.peak_stored = figures.peak_stored.max(stored);
    }

    /// Gives everything back. Dropping would do so too, but could not say what went wrong.
    pub(crate) fn close(self) -> growspan::Result<Figures> {
        for slot in self.slots {
            slot.cache.close()?;
        }
        match self.device.pool().trim(Bytes::ZERO).error {
            Some(error) => Err(error.into()),
            None => Ok(self.figures),
        }
    }
}

/// The next request that can be served, cut to what a slot holds. Those that cannot are counted.
fn admit(
    requests: &mut impl Iterator<Item = (u64, Request)>,
    max_context: u32,
    figures: &mut Figures,
) -> Option<(u64, Request)> {
    for (id, mut request) in requests {
        let room = max_context.saturating_sub(request.context);
        if room == 0 {
            figures.refused += 1;
            continue;
        }
        figures.truncated += u64::from(request.generated > room);
        request.generated = request.generated.min(room);
        figures.prompt_tokens += u64::from(request.context);
        figures.generated_tokens += u64::from(request.generated);
        return Some((id, request));
    }
    None
}

/// What work on a slot needs.
struct Work<'a> {
    bytes_per_token: usize,
    /// Room for a block of whole tokens.
    scratch: &'a mut [u8],
    figures: &'a mut Figures,
}

impl Work<'_> {
    /// Grows a slot in place by some tokens, and stores them.
    fn store(&mut self, slot: &mut Slot, running: Running, tokens: u32) -> growspan::Result<()> {
        let from = slot.cache.len();
        let bytes = tokens as usize * self.bytes_per_token;
        let mapping = from + bytes > slot.cache.capacity();

        let started = Instant::now();
        slot.cache.grow_by(bytes)?;
        let took = started.elapsed();

        self.figures.grows.add(took);
        if mapping {
            self.figures.mapping_grows.add(took);
        }
        self.figures.address_moves += u64::from(slot.cache.device_ptr() != slot.address);

        let mut token = running.stored;
        let mut at = from;
        while at < from + bytes {
            let size = self.scratch.len().min(from + bytes - at);
            let block = &mut self.scratch[..size];
            for bytes in block.chunks_exact_mut(self.bytes_per_token) {
                pattern::write(bytes, running.id, token);
                token += 1;
            }
            slot.cache.copy_in(at, block)?;
            at += size;
        }
        slot.running = Some(Running { stored: token, ..running });
        Ok(())
    }

    /// Checks all that a request has stored, and gives its memory to the requests that follow.
    fn finish(&mut self, slot: &mut Slot, running: Running) -> growspan::Result<()> {
        let mut token = 0;
        let mut at = 0;
        while at < slot.cache.len() {
            let size = self.scratch.len().min(slot.cache.len() - at);
            let block = &mut self.scratch[..size];
            slot.cache.copy_out(at, block)?;
            for bytes in block.chunks_exact(self.bytes_per_token) {
                self.figures.mismatches += pattern::mismatches(bytes, running.id, token);
                token += 1;
            }
            at += size;
        }
        self.figures.verified_bytes += at as u64;
        // A request that lost tokens on the way is as wrong as one whose bytes changed.
        self.figures.mismatches += u64::from(running.stored.abs_diff(token)) * self.bytes_per_token as u64;

        self.figures.shrinks.record(|| slot.cache.shrink_to(0, Quiesce::Device))?;
        self.figures.requests += 1;
        slot.running = None;
        Ok(())
    }
}
