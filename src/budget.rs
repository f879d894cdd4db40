//! Limits of the process that chunks spend: open files and memory map entries.
//!
//! ```text
//! soft limit  |<-- others held -->|<-- headroom -->|<--------- ours --------->|  free  |
//! ```

#[cfg(all(test, loom))]
mod models;

use core::fmt;
use std::io;
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::driver::ProcessLimits;
use crate::error::Shortage;
use crate::pool::Sizing;
use crate::sync::Mutex;
use crate::sys::fork::PerProcess;
use crate::sys::limits::ThisProcess;

/// What is kept for the application where the limit can be raised: sockets, logs, model files.
const HEADROOM: u64 = 1024;
/// What is kept for the application beyond the files it holds, whatever the limit.
const LEAST_HEADROOM: u64 = 64;
/// After how many acquisitions the holdings of the rest of the process are counted again.
const RECOUNT: u64 = 1024;

/// The open files this process may spend on chunks.
///
/// Some drivers keep one open file per chunk (ROCm 7.14, the host driver). The budget reads the limits, counts what the
/// process holds, keeps a headroom for the application and raises the soft limit when it has to, as far as the hard
/// limit allows. It is shared by all devices of the process. Nothing is read or raised before the first chunk needs it.
///
/// ```
/// use growspan::{Bytes, OpenFileBudget, Sizing};
///
/// // A 24 GiB arena needs 12,288 files in 2 MiB chunks, and about a hundred on the ladder.
/// let granularity = Bytes::mib(2);
/// assert_eq!(OpenFileBudget::needed_for(Bytes::gib(24), Sizing::Uniform(Bytes::mib(2)), granularity), 12_288);
/// assert!(OpenFileBudget::needed_for(Bytes::gib(24), Sizing::Ladder, granularity) < 130);
/// ```
pub struct OpenFileBudget(Budget);

/// The memory map entries this process may spend on mappings (`vm.max_map_count`). It cannot be raised from inside.
pub struct MapBudget(Budget);

impl OpenFileBudget {
    /// The budget of this process.
    #[must_use]
    pub fn process() -> Arc<Self> {
        static PROCESS: PerProcess<Arc<OpenFileBudget>> = PerProcess::new();
        Arc::clone(PROCESS.get_or(|| Arc::new(Self::new(Arc::new(ThisProcess)))))
    }

    /// A budget of its own, under limits of its own (a simulated driver's).
    #[must_use]
    pub fn new(limits: Arc<dyn ProcessLimits>) -> Self {
        Self(Budget::new(Resource::OpenFiles, limits))
    }

    /// How many chunks, and so open files where each keeps one, `bytes` take under a sizing policy.
    #[must_use]
    pub fn needed_for(bytes: Bytes, sizing: Sizing, granularity: Bytes) -> u64 {
        sizing.chunks_for(bytes, granularity)
    }

    /// The figures: held by us, held by others, limits; counted anew.
    #[must_use]
    pub fn usage(&self) -> BudgetUsage {
        self.0.usage()
    }

    /// The same as last counted, which is cheap.
    pub(crate) fn last_usage(&self) -> BudgetUsage {
        self.0.last_usage()
    }

    /// Makes room for `chunks` more files in all, raising the soft limit if that is needed and allowed. Nothing is
    /// taken yet.
    ///
    /// # Errors
    /// What is needed and what the limits are, when they leave no room.
    pub(crate) fn ensure(&self, chunks: u64) -> Result<BudgetUsage, Shortage> {
        self.0.ensure(chunks)
    }

    /// Says that a device may come to hold `chunks` at most, so that a raise is made once and large enough.
    pub(crate) fn expect_at_most(&self, chunks: u64) {
        let mut state = self.0.state.lock();
        state.expected = state.expected.saturating_add(chunks);
    }

    pub(crate) fn acquire(&self, n: u64) -> Result<(), Shortage> {
        self.0.acquire(n)
    }

    pub(crate) fn release(&self, n: u64) {
        self.0.release(n);
    }
}

impl MapBudget {
    /// The budget of this process.
    #[must_use]
    pub fn process() -> Arc<Self> {
        static PROCESS: PerProcess<Arc<MapBudget>> = PerProcess::new();
        Arc::clone(PROCESS.get_or(|| Arc::new(Self::new(Arc::new(ThisProcess)))))
    }

    /// A budget of its own, under limits of its own (a simulated driver's).
    #[must_use]
    pub fn new(limits: Arc<dyn ProcessLimits>) -> Self {
        Self(Budget::new(Resource::MapEntries, limits))
    }

    /// The figures: held by us, held by others, limits; counted anew.
    #[must_use]
    pub fn usage(&self) -> BudgetUsage {
        self.0.usage()
    }

    /// The same as last counted, which is cheap.
    pub(crate) fn last_usage(&self) -> BudgetUsage {
        self.0.last_usage()
    }

    pub(crate) fn ensure(&self, mappings: u64) -> Result<BudgetUsage, Shortage> {
        self.0.ensure(mappings)
    }

    pub(crate) fn acquire(&self, n: u64) -> Result<(), Shortage> {
        self.0.acquire(n)
    }

    pub(crate) fn release(&self, n: u64) {
        self.0.release(n);
    }
}

impl fmt::Debug for OpenFileBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OpenFileBudget").field(&*self.0.state.lock()).finish()
    }
}

impl fmt::Debug for MapBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MapBudget").field(&*self.0.state.lock()).finish()
    }
}

/// How a budget stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetUsage {
    /// Spent on chunks.
    pub ours: u64,
    /// The most that was spent on chunks at any time.
    pub peak: u64,
    /// Held by the rest of the process when it was last counted.
    pub others: u64,
    /// The limit in force.
    pub limit: u64,
    /// How far the process may raise it itself.
    pub hard: u64,
    /// What is kept for the application, in it what it holds.
    pub headroom: u64,
}

impl BudgetUsage {
    /// Whether there is none left, whatever is kept for whom.
    pub(crate) const fn is_used_up(&self) -> bool {
        self.ours + self.others >= self.limit
    }
}

#[derive(Clone, Copy, Debug)]
enum Resource {
    OpenFiles,
    MapEntries,
}

struct Budget {
    resource: Resource,
    limits: Arc<dyn ProcessLimits>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ours: u64,
    peak: u64,
    others: u64,
    soft: u64,
    hard: u64,
    /// The most all devices together may come to hold.
    expected: u64,
    /// Acquisitions until the rest of the process is counted again; zero at first.
    until_recount: u64,
    /// Whether only the least headroom is left, as last counted.
    tight: bool,
}

impl State {
    /// What the application keeps, in it what it holds: as much as is polite, and as little as can be.
    fn headroom(&self) -> (u64, u64) {
        let least = self.others.saturating_add(LEAST_HEADROOM);
        (least.max(HEADROOM), least)
    }

    fn usage(&self) -> BudgetUsage {
        let (polite, least) = self.headroom();
        let roomy = self.ours.saturating_add(polite) <= self.soft;
        BudgetUsage {
            ours: self.ours,
            peak: self.peak,
            others: self.others,
            limit: self.soft,
            hard: self.hard,
            headroom: if roomy { polite } else { least },
        }
    }
}

impl Budget {
    fn new(resource: Resource, limits: Arc<dyn ProcessLimits>) -> Self {
        Self { resource, limits, state: Mutex::new(State::default()) }
    }

    fn read(&self, state: &mut State) -> io::Result<()> {
        let (held, soft, hard) = match self.resource {
            Resource::OpenFiles => {
                let files = self.limits.open_files()?;
                (files.held, files.soft, files.hard)
            }
            Resource::MapEntries => {
                let maps = self.limits.maps()?;
                (maps.held, maps.limit, maps.limit)
            }
        };
        state.others = held.saturating_sub(state.ours);
        state.soft = soft;
        state.hard = hard;
        state.until_recount = RECOUNT;
        Ok(())
    }

    /// Counts again. Where the figures cannot be read (no `/proc`), the driver's own errors are the limit.
    fn recount(&self, state: &mut State) {
        if let Err(error) = self.read(state) {
            // Not one is left to count with; the limits are what they were.
            if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) && state.soft > 0 {
                state.others = state.soft.saturating_sub(state.ours);
                return;
            }
            tracing::debug!(resource = ?self.resource, %error, "limits cannot be read; going without a budget");
            state.soft = u64::MAX;
            state.hard = u64::MAX;
            state.until_recount = RECOUNT;
        }
    }

    fn usage(&self) -> BudgetUsage {
        let mut state = self.state.lock();
        self.recount(&mut state);
        state.usage()
    }

    fn last_usage(&self) -> BudgetUsage {
        let mut state = self.state.lock();
        if state.until_recount == 0 && state.ours == 0 {
            self.recount(&mut state);
        }
        state.usage()
    }

    fn raise(&self, state: &mut State, wanted: u64) {
        let target = wanted.max(state.expected).saturating_add(state.headroom().0).min(state.hard);
        if target <= state.soft {
            return;
        }
        match self.limits.raise_open_files(target) {
            Ok(()) => {
                tracing::info!("open-file limit {} -> {target}", state.soft);
                state.soft = target;
            }
            Err(error) => tracing::warn!(%error, "open-file limit {} -> {target} was refused", state.soft),
        }
    }

    /// Makes sure that `total` of ours fit, by raising the limit if need be.
    fn fit(&self, state: &mut State, total: u64) -> Result<(), Shortage> {
        let fits = |state: &State, headroom: u64| total.saturating_add(headroom) <= state.soft;
        let (polite, least) = state.headroom();
        if state.until_recount > 0 && fits(state, if state.tight { least } else { polite }) {
            state.until_recount -= 1;
            return Ok(());
        }
        self.recount(state);
        state.tight = false;
        if fits(state, state.headroom().0) {
            return Ok(());
        }
        if matches!(self.resource, Resource::OpenFiles) {
            self.raise(state, total);
        }
        if fits(state, state.headroom().1) {
            // Counting is dear, and the headroom covers what the application opens in between.
            state.tight = !fits(state, state.headroom().0);
            state.until_recount = if state.tight { LEAST_HEADROOM / 2 } else { RECOUNT };
            return Ok(());
        }
        let needed = total.saturating_add(state.headroom().0);
        Err(Shortage { needed, limit: state.soft, hard: state.hard })
    }

    fn ensure(&self, more: u64) -> Result<BudgetUsage, Shortage> {
        let mut state = self.state.lock();
        let total = state.ours.saturating_add(more);
        self.fit(&mut state, total)?;
        Ok(state.usage())
    }

    fn acquire(&self, n: u64) -> Result<(), Shortage> {
        if n == 0 {
            return Ok(());
        }
        let mut state = self.state.lock();
        let total = state.ours.saturating_add(n);
        self.fit(&mut state, total)?;
        state.ours = total;
        state.peak = state.peak.max(total);
        Ok(())
    }

    fn release(&self, n: u64) {
        if n > 0 {
            let mut state = self.state.lock();
            debug_assert!(state.ours >= n, "released more than was acquired");
            state.ours = state.ours.saturating_sub(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{MapCount, OpenFiles};
    use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

    #[derive(Debug)]
    struct Limits {
        held: AtomicU64,
        soft: AtomicU64,
        hard: u64,
        raises: AtomicU64,
        /// What reading them fails with, 0 for nothing.
        errno: AtomicI32,
    }

    impl Limits {
        fn new(held: u64, soft: u64, hard: u64) -> Arc<Self> {
            Arc::new(Self { held: held.into(), soft: soft.into(), hard, raises: 0.into(), errno: 0.into() })
        }
    }

    impl ProcessLimits for Limits {
        fn open_files(&self) -> io::Result<OpenFiles> {
            match self.errno.load(Relaxed) {
                0 => Ok(OpenFiles { held: self.held.load(Relaxed), soft: self.soft.load(Relaxed), hard: self.hard }),
                errno => Err(io::Error::from_raw_os_error(errno)),
            }
        }
        fn raise_open_files(&self, soft: u64) -> io::Result<()> {
            assert!(soft <= self.hard);
            self.raises.fetch_add(1, Relaxed);
            self.soft.store(soft, Relaxed);
            Ok(())
        }
        fn maps(&self) -> io::Result<MapCount> {
            Ok(MapCount { held: self.held.load(Relaxed), limit: self.soft.load(Relaxed) })
        }
    }

    #[test]
    fn the_limit_is_raised_once_and_to_what_the_card_may_need() {
        let limits = Limits::new(10, 1024, 1 << 20);
        let budget = OpenFileBudget::new(Arc::clone(&limits) as Arc<dyn ProcessLimits>);
        budget.expect_at_most(16_312);
        for _ in 0..16_312 {
            budget.acquire(1).unwrap();
            limits.held.fetch_add(1, Relaxed);
        }
        assert_eq!(limits.soft.load(Relaxed), 17_336);
        assert_eq!(limits.raises.load(Relaxed), 1);
        assert_eq!(budget.usage().others, 10);
    }

    #[test]
    fn under_a_hard_limit_the_headroom_falls_but_never_under_64() {
        let limits = Limits::new(100, 1024, 1024);
        let budget = OpenFileBudget::new(Arc::clone(&limits) as Arc<dyn ProcessLimits>);
        let room = 1024 - 100 - 64;
        budget.acquire(room).unwrap();
        limits.held.fetch_add(room, Relaxed);
        assert_eq!(budget.acquire(1), Err(Shortage { needed: room + 1 + 1024, limit: 1024, hard: 1024 }));
        budget.release(1);
        limits.held.fetch_sub(1, Relaxed);
        budget.acquire(1).unwrap();
        assert_eq!(limits.raises.load(Relaxed), 0);
    }

    #[test]
    fn files_that_the_application_opens_later_are_counted() {
        let limits = Limits::new(10, 4096, 4096);
        let budget = OpenFileBudget::new(Arc::clone(&limits) as Arc<dyn ProcessLimits>);
        budget.acquire(3000).unwrap();
        limits.held.store(3000 + 1000, Relaxed);
        assert!(budget.acquire(100).is_err(), "1000 of the application, 64 kept, 3000 ours: 32 are left");
        budget.acquire(32).unwrap();
    }

    #[test]
    fn without_a_file_to_count_with_none_is_left() {
        let limits = Limits::new(10, 4096, 4096);
        let budget = OpenFileBudget::new(Arc::clone(&limits) as Arc<dyn ProcessLimits>);
        budget.acquire(1000).unwrap();
        limits.errno.store(libc::EMFILE, Relaxed);
        assert_eq!(budget.usage().others, 3096);
        assert_eq!(budget.acquire(1).map_err(|short| short.limit), Err(4096));
        // Then the application closes some.
        limits.errno.store(0, Relaxed);
        limits.held.store(1100, Relaxed);
        assert_eq!(budget.usage().others, 100);
        budget.acquire(1).unwrap();
        // What cannot be read for another reason is left to the driver.
        limits.errno.store(libc::ENOENT, Relaxed);
        assert_eq!(budget.usage().limit, u64::MAX);
        budget.acquire(1 << 20).unwrap();
    }

    #[test]
    fn map_entries_cannot_be_raised() {
        let limits = Limits::new(200, 1000, u64::MAX);
        let budget = MapBudget::new(Arc::clone(&limits) as Arc<dyn ProcessLimits>);
        budget.acquire(736).unwrap();
        limits.held.fetch_add(736, Relaxed);
        let short = budget.acquire(1).unwrap_err();
        assert_eq!((short.limit, short.hard), (1000, 1000));
        assert_eq!(limits.raises.load(Relaxed), 0);
    }
}
