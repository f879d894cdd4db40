//! The runtime as an instance: what all calls have in common before they do anything.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::time::Instant;

use crate::abi::code;
use crate::memory::Memory;
use crate::misuse::{broken, misuse};
use crate::personality::Config;
use crate::streams::Streams;
use crate::table::Table;

/// What a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing: it works without a device and before everything else.
    Free,
    /// A runtime with a device.
    Usual,
    /// The same, and that nobody else is inside a call of virtual memory management.
    Vmm,
}

/// What a thread has of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Thread {
    /// Which runtime it is about; a thread has one at a time.
    runtime: u64,
    /// Tells threads apart; never 0.
    pub(crate) number: u64,
    pub(crate) device: usize,
    pub(crate) last_error: u32,
    pub(crate) capture_mode: u32,
}

thread_local! {
    // A plain value without a destructor, so that it can be used while the thread is being torn down.
    static THREAD: Cell<Thread> =
        const { Cell::new(Thread { runtime: 0, number: 0, device: 0, last_error: 0, capture_mode: 0 }) };
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// The failures that a test asked for.
#[derive(Debug, Default)]
struct Plans {
    /// By function: how many calls from now, and the code.
    calls: BTreeMap<String, (u64, u32)>,
    /// How many maps from now; 0 is never.
    map: u64,
}

/// Everything that changes.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) memory: Memory,
    pub(crate) table: Table,
    pub(crate) streams: Streams,
    /// The addresses of spans that were freed, and when.
    pub(crate) freed: Vec<(usize, Instant)>,
    counts: BTreeMap<&'static str, u64>,
    plans: Plans,
    next_id: u64,
}

impl State {
    /// A number that was never used before and could be a pointer.
    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        0x5fa4_0000_0000 + self.next_id * 16
    }

    /// Whether the map that is being made is the one that a test wants to fail.
    pub(crate) fn map_is_to_fail(&mut self) -> bool {
        self.plans.map = match self.plans.map {
            0 => return false,
            1 => {
                self.plans.map = 0;
                return true;
            }
            n => n - 1,
        };
        false
    }
}

/// One call: what it may look at and change.
pub(crate) struct Call<'a> {
    pub(crate) name: &'static str,
    pub(crate) config: &'a Config,
    pub(crate) thread: &'a mut Thread,
    pub(crate) state: &'a mut State,
}

impl Call<'_> {
    /// Ends the process for what the caller did.
    pub(crate) fn misuse(&self, what: impl core::fmt::Display) -> ! {
        misuse(self.name, what)
    }
}

/// A HIP runtime.
#[derive(Debug)]
pub(crate) struct Runtime {
    id: u64,
    config: Config,
    /// The process that used it first; 0 before.
    pid: AtomicU32,
    /// The number of the thread that is inside a call of virtual memory management.
    inside: AtomicU64,
    /// A thread hangs in virtual memory management.
    vmm_hangs: AtomicBool,
    state: Mutex<State>,
}

/// Leaves the call of virtual memory management.
struct Inside<'a>(&'a AtomicU64);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Runtime {
    pub(crate) fn new(config: Config) -> Self {
        let state = State {
            memory: Memory::default(),
            table: Table::default(),
            streams: Streams::new(config.devices),
            freed: Vec::new(),
            counts: BTreeMap::new(),
            plans: Plans::default(),
            next_id: 0,
        };
        Self {
            id: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            config,
            pid: AtomicU32::new(0),
            inside: AtomicU64::new(0),
            vmm_hangs: AtomicBool::new(false),
            state: Mutex::new(state),
        }
    }

    /// The one that the exported functions work on.
    pub(crate) fn get() -> &'static Self {
        static RUNTIME: OnceLock<Runtime> = OnceLock::new();
        RUNTIME.get_or_init(|| match Config::read(|name| std::env::var(name).ok()) {
            Ok(config) => Self::new(config),
            Err(message) => broken(message),
        })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock ends the process, except in tests that look at one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn thread(&self) -> Thread {
        let thread = THREAD.get();
        if thread.runtime == self.id {
            return thread;
        }
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        Thread { runtime: self.id, number, device: 0, last_error: 0, capture_mode: 0 }
    }

    /// Makes a call: counts it, refuses what must be refused, does `body`, remembers an error for `hipGetLastError`.
    pub(crate) fn call(
        &self,
        name: &'static str,
        kind: Kind,
        body: impl FnOnce(&mut Call<'_>) -> Result<(), u32>,
    ) -> u32 {
        let mut thread = self.thread();
        let result = self.enter(name, kind, &mut thread, body);
        let code = result.err().unwrap_or(0);
        if code != 0 && name != "hipGetLastError" {
            thread.last_error = code;
        }
        THREAD.set(thread);
        code
    }

    fn enter(
        &self,
        name: &'static str,
        kind: Kind,
        thread: &mut Thread,
        body: impl FnOnce(&mut Call<'_>) -> Result<(), u32>,
    ) -> Result<(), u32> {
        self.refuse_in_a_forked_child(name);
        let _inside = self.enter_vmm(name, kind, thread);
        let nth = self.count(name);
        let allocates = matches!(
            name,
            "hipMalloc" | "hipFree" | "hipHostMalloc" | "hipHostFree" | "hipHostRegister" | "hipHostUnregister"
        );
        let hangs = self.config.hang.as_ref().is_some_and(|hang| (hang.0.as_str(), hang.1) == (name, nth));
        let hangs = hangs || (self.config.rules.set_access_hangs && name == "hipMemSetAccess");
        if hangs || (allocates && self.vmm_hangs.load(Ordering::Relaxed)) {
            // One lock of the real runtime is for both.
            self.vmm_hangs.fetch_or(kind == Kind::Vmm, Ordering::Relaxed);
            loop {
                // Inside for ever, so that a second call of virtual memory management is found out, and without the
                // lock, so that all that allocates nothing goes on.
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
        let mut state = self.lock();
        // What was to be freed is forgotten before freeing fails.
        if name != "hipMemAddressFree"
            && let Some(code) = planned_failure(&mut state, name)
        {
            return Err(code);
        }
        if kind != Kind::Free {
            if let Some(code) = self.config.rules.dead {
                // The one function that says the same on every version.
                return Err(if name == "hipGetDeviceCount" { code::NO_DEVICE } else { code });
            }
            self.start(&mut state);
        }
        let mut call = Call { name, config: &self.config, thread, state: &mut state };
        if kind == Kind::Vmm {
            call.refuse_in_capture()?;
        }
        body(&mut call)
    }

    fn start(&self, state: &mut State) {
        if self.pid.swap(std::process::id(), Ordering::Relaxed) == 0 {
            state.memory.open(&self.config);
        }
    }

    /// The lock may be held for ever in such a child, so this comes first.
    fn refuse_in_a_forked_child(&self, name: &str) {
        let pid = self.pid.load(Ordering::Relaxed);
        if pid != 0 && pid != std::process::id() {
            misuse(name, format_args!("called in a forked child of the process {pid} that used the runtime first"));
        }
    }

    fn enter_vmm(&self, name: &str, kind: Kind, thread: &Thread) -> Option<Inside<'_>> {
        if kind != Kind::Vmm || self.config.rules.dead.is_some() {
            return None;
        }
        if let Err(other) = self.inside.compare_exchange(0, thread.number, Ordering::Acquire, Ordering::Relaxed) {
            let me = thread.number;
            misuse(
                name,
                format_args!(
                    "entered by thread {me} while thread {other} is inside a call of virtual memory management"
                ),
            );
        }
        let inside = Inside(&self.inside);
        // Long enough for others to be caught.
        std::thread::yield_now();
        Some(inside)
    }

    /// Counts a call of a function, and says which it is, from 1.
    fn count(&self, name: &'static str) -> u64 {
        let mut state = self.lock();
        let count = state.counts.entry(name).or_default();
        *count += 1;
        *count
    }

    /// How often a function was called.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.lock().counts.get(name).copied().unwrap_or(0)
    }

    /// Lets the `nth` call from now of a function return `code` and do nothing; 0 takes that back.
    pub(crate) fn fail_call(&self, name: &str, nth: u64, code: u32) {
        let mut state = self.lock();
        if nth == 0 {
            state.plans.calls.remove(name);
        } else {
            state.plans.calls.insert(name.to_owned(), (nth, code));
        }
    }

    /// Lets the `nth` map from now fail below the runtime; 0 takes that back.
    pub(crate) fn fail_map(&self, nth: u64) {
        self.lock().plans.map = nth;
    }

    /// Looks at everything from outside a call.
    pub(crate) fn look<R>(&self, body: impl FnOnce(&mut State) -> R) -> R {
        body(&mut self.lock())
    }
}

pub(crate) fn planned_failure(state: &mut State, name: &str) -> Option<u32> {
    let (left, code) = state.plans.calls.get_mut(name)?;
    *left -= 1;
    if *left > 0 {
        return None;
    }
    let code = *code;
    state.plans.calls.remove(name);
    Some(code)
}
