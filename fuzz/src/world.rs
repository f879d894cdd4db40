//! A device, what lives on it, and what must be true of it after each step.

use std::sync::Arc;

use bytemuck::Pod;
use growspan::driver::Call;
use growspan::driver::RawStream;
use growspan::driver::fault::{FaultControl, FaultPlan, Faulty, Strike};
use growspan::driver::sim::SimDriver;
use growspan::{Chunk, Device, Error, Event, GrowableBuffer, MapHooks, Mode, Snapshot};

use crate::buffer::{Owes, Slot};
use crate::card::{Card, GRANULE, HELD};
use crate::case::{BufferOp, Ending, Fault, Kind, Op, Step, Which};
use crate::loan::LoanSlot;
use crate::model::Seen;
use crate::set::SetSlot;
use crate::told::Told;

/// How far the count of what others hold may be off, which is an estimate: it may have been taken while the background was
/// between taking something into the books and calling the driver.
const UNDER_WAY: u64 = 4;

/// What everything needs.
pub(crate) struct Env {
    pub(crate) card: Card,
    pub(crate) sim: SimDriver,
    pub(crate) device: Device,
    pub(crate) stream: RawStream,
    pub(crate) event: Event,
    pub(crate) control: FaultControl,
    told: Arc<Told>,
}

impl Env {
    /// The hooks of all buffers.
    pub(crate) fn hooks(&self) -> Arc<dyn MapHooks> {
        Arc::clone(&self.told) as Arc<dyn MapHooks>
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.device.verdict().mode() == Mode::Contiguous
    }
}

/// How an operation ended.
pub(crate) struct Done {
    pub(crate) error: Option<Error>,
    /// What was asked for is possible at all.
    pub(crate) valid: bool,
    pub(crate) effect: Effect,
}

/// What an operation does to the memory of buffers, and with that what may be left where its undoing fails too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing that would have to be undone.
    Nothing,
    /// More committed, and the same length.
    Grows,
    /// Less committed, and a length that has fallen to it.
    Shrinks,
    /// The same, and lengths fall in any case, whatever could be given up.
    Empties,
    /// Less ahead, and nothing else.
    Flushes,
    /// The same for each member of a set by itself: those before the one that failed have done it.
    FlushesEach,
}

impl Done {
    pub(crate) fn ok() -> Self {
        Self { error: None, valid: true, effect: Effect::Nothing }
    }

    pub(crate) fn of<T>(result: Result<T, Error>, valid: bool) -> Self {
        Self { error: result.err(), valid, effect: Effect::Nothing }
    }

    /// Whether the background met a device that had been lost, which takes no strike.
    pub(crate) fn is_of_a_lost_device(&self) -> bool {
        matches!(&self.error, Some(Error::Ahead { source, .. }) if matches!(**source, Error::DeviceLost(_)))
    }

    pub(crate) fn which(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }
}

pub(crate) struct World {
    pub(crate) env: Env,
    a: Slot<u32>,
    b: Slot<[u8; 3]>,
    set: SetSlot,
    loan: LoanSlot,
    pub(crate) loose: Vec<Chunk>,
    /// What the pool keeps is too old at once.
    pub(crate) ages: bool,
    /// Struck since everything was last looked at.
    strikes: Vec<Strike>,
    /// A fault struck what gives memory back or waits, so that something may be stranded.
    spoiled: bool,
    /// Memory may wait for an event.
    deferred: bool,
    /// The device was lost, or the crate was told so: nothing can be given back.
    lost: bool,
}

/// Calls that, when they fail, may leave something behind.
fn spoils(strike: &Strike) -> bool {
    use Call::{EventDestroy, Free, FreeSpan, Release, Synchronize, Unmap};
    matches!(strike.call, EventDestroy | Free | FreeSpan | Release | Synchronize | Unmap)
}

impl World {
    /// None if the check lost the device, or was made to leave something on it.
    pub(crate) fn open(card: &Card) -> Option<Self> {
        let sim = card.sim();
        let faulty = Faulty::new(sim.driver(), FaultPlan::count());
        let control = faulty.control();
        control.disarm();
        let device = card.options().open(Arc::new(faulty)).unwrap();
        arm(&control, card.check_fault.as_ref());
        let mode = device.verdict().mode();
        control.disarm();
        assert_eq!(sim.violations(), [], "during the check");
        let figures = sim.figures();
        let strikes = control.strikes();
        if device.memory().is_err() {
            return None;
        }
        if !strikes.iter().any(spoils) {
            let left = (figures.handles, figures.spans, figures.mappings);
            assert_eq!(left, (0, 0, 0), "the check left something: {strikes:?}");
        }
        if strikes.is_empty() && card.is_broken() {
            assert_eq!(mode, Mode::Contiguous, "{}", device.verdict().report());
        }
        if figures.handles > 0 || figures.spans > 0 || figures.mappings > 0 {
            return None;
        }
        let (card, stream, event, told) = (card.clone(), sim.stream(), device.event().unwrap(), Arc::default());
        let env = Env { card, stream, event, sim, device, control, told };
        let mut world = Self {
            a: Slot::new(40 * usize::try_from(GRANULE).unwrap() / 4),
            b: Slot::new(14 * usize::try_from(GRANULE).unwrap() / 3 + 1),
            set: SetSlot::new(),
            loan: LoanSlot::default(),
            loose: Vec::new(),
            ages: false,
            strikes: Vec::new(),
            spoiled: false,
            deferred: false,
            lost: false,
            env,
        };
        let built = [world.a.build(&world.env), world.b.build(&world.env), world.set.build(&world.env)];
        for done in built {
            world.judge(&done, &[]);
        }
        world.env.device.wait_ahead();
        world.check(&Before::default(), None, &[]);
        Some(world)
    }

    pub(crate) fn step(&mut self, number: usize, step: &Step) {
        let before = self.before();
        arm(&self.env.control, step.fault.as_ref());
        self.deferred |= step.op.defers();
        let done = self.apply(&step.op);
        let struck = self.env.control.strikes().len();
        // The background works under the same plan.
        let looks = !self.env.card.races || number % 4 == 3;
        if looks {
            self.env.device.wait_ahead();
        }
        self.env.control.disarm();
        if looks {
            // What it put off for want of an answer that was struck.
            self.env.device.wait_ahead();
        }
        let now = self.env.control.strikes();
        self.strikes.extend(&now);
        let strikes = self.strikes.clone();
        self.spoiled |= strikes.iter().any(spoils);
        let context = Context { number, step, done: &done, strikes: &strikes };
        // A panic shows where it came from.
        let guard = Guard(&context);
        self.lost |= self.env.device.memory().is_err();
        if !self.lost {
            self.judge(&done, &strikes);
        }
        self.owe(step, &now, struck);
        if looks {
            self.strikes.clear();
            match self.env.card.races {
                // What came before was not looked at.
                true => self.check(&Before::default(), None, &strikes),
                false => self.check(&before, Some((&step.op, &done)), &strikes),
            }
        }
        if !self.env.card.races && done.error.is_none() && !self.spoiled && !self.lost && now.is_empty() {
            self.check_ahead(&step.op);
        }
        std::mem::forget(guard);
    }

    /// What is ahead after an operation that went well, with nothing in its way.
    fn check_ahead(&self, op: &Op) {
        let card = &self.env.card;
        let Op::Buffer(which, op) = op else { return };
        let ahead = match which {
            Which::A => self.a.ahead(),
            Which::B => self.b.ahead(),
        };
        match op {
            // Unless something may run out by itself.
            BufferOp::GrowAhead(_) if card.has_plenty() && !card.limits_files() && !card.limits_maps() => match which {
                Which::A => self.a.check_reach(),
                Which::B => self.b.check_reach(),
            },
            // A chunk that was mapped ahead in part is only cut by an exact one.
            BufferOp::ShrinkTo(..) | BufferOp::ShrinkExact(..) | BufferOp::FlushAhead if !card.is_exact() => {
                assert!(ahead.is_zero(), "{ahead} ahead after {op:?}");
            }
            _ => {}
        }
    }

    /// What growths have to say later: calls after the first `struck` ones were the background's.
    fn owe(&mut self, step: &Step, strikes: &[Strike], struck: usize) {
        if strikes.is_empty() {
            return;
        }
        let alone =
            [self.a.maps_ahead(), self.b.maps_ahead(), self.set.maps_ahead()].iter().filter(|it| **it).count() == 1;
        let kind = step.fault.as_ref().map(|fault| &fault.kind);
        // Nobody is told that something is short.
        let said = matches!(kind, Some(Kind::Usual | Kind::NotSupported));
        let maps = strikes[struck..].iter().any(|strike| matches!(strike.call, Call::Map | Call::SetAccess));
        let must = alone && said && maps && !self.env.card.races && !self.lost;
        let owe = |owes: &mut Owes, maps_ahead: bool| {
            owes.may |= owes.background;
            owes.must |= must && maps_ahead;
        };
        let (a, b) = (self.a.maps_ahead(), self.b.maps_ahead());
        owe(&mut self.a.owes, a);
        owe(&mut self.b.owes, b);
        self.set.owe();
    }

    fn apply(&mut self, op: &Op) -> Done {
        if let Op::Buffer(_, BufferOp::Cycle) = op {
            self.loan.spoil();
        }
        match op {
            Op::Loan(op) => self.loan.apply(&self.env, &mut self.a, &mut self.b, op),
            Op::Drain => {
                self.env.device.drain();
                Done::ok()
            }
            Op::Synchronize => Done::of(self.env.device.synchronize(), true),
            Op::Buffer(Which::A, op) => self.a.apply(&self.env, op),
            Op::Buffer(Which::B, op) => self.b.apply(&self.env, op),
            Op::Set(op) => self.set.apply(&self.env, op),
            Op::Pool(op) => self.pool(op),
            Op::Others(share) => {
                let total = self.env.device.snapshot().total.map_or(0, |total| total.get());
                self.env.sim.set_used_by_others(growspan::Bytes::new(total / 256 * u64::from(*share)));
                Done::ok()
            }
            Op::Finish => {
                self.env.sim.finish_all();
                Done::ok()
            }
            Op::Lose([true, true, true, true]) => {
                self.env.sim.lose();
                Done::ok()
            }
            Op::Lose(_) => Done::ok(),
        }
    }

    fn before(&self) -> Before {
        Before { seen: self.seen(), snapshot: Some(self.env.device.snapshot()) }
    }

    /// Whether the operation was allowed to end so.
    fn judge(&self, done: &Done, strikes: &[Strike]) {
        let Some(error) = &done.error else {
            assert!(done.valid, "it succeeded, and cannot have");
            return;
        };
        assert!(!error.to_string().is_empty());
        let card = &self.env.card;
        let fair = match error {
            Error::BeyondMax { .. } | Error::ShrinkAboveLen { .. } | Error::OutOfBounds { .. } => !done.valid,
            Error::Overflow { .. } | Error::ChunkSize { .. } | Error::ZeroLength { .. } => !done.valid,
            Error::FallbackFull { .. } => card.has_capacity() && self.env.device.verdict().mode() == Mode::Contiguous,
            // What got stuck at the borrower costs it addresses.
            Error::NotLent { .. } => !done.valid || self.spoiled,
            // Whether it has met one is the buffer's to know.
            Error::Ahead { source, .. } => !matches!(**source, Error::Ahead { .. }),
            Error::Refused { .. } => self.env.device.verdict().mode() == Mode::Contiguous,
            // Something may run out by itself; that undoing it fails takes a strike.
            Error::Rollback { .. } if done.effect == Effect::Grows => strikes.iter().any(spoils),
            Error::Rollback { .. } => done.effect != Effect::Nothing && !strikes.is_empty(),
            _ if !strikes.is_empty() => true,
            Error::OutOfMemory(_) => true,
            Error::OutOfFiles(_) => card.limits_files(),
            Error::OutOfMaps(_) => card.limits_maps(),
            Error::Reserve { .. } => card.limits_spans(),
            Error::Blocked { .. } => self.spoiled,
            _ => false,
        };
        assert!(fair, "an error without a cause: {error:?}");
    }

    fn seen(&self) -> Vec<Option<Seen>> {
        let [c, d] = self.set.seen();
        vec![self.a.seen(), self.b.seen(), c, d]
    }

    /// Everything that must be true between steps.
    fn check(&self, before: &Before, step: Option<(&Op, &Done)>, strikes: &[Strike]) {
        let env = &self.env;
        assert_eq!(env.sim.violations(), [], "against the driver's rules");
        let error = step.and_then(|(_, done)| done.error.as_ref());
        if self.lost {
            // Nothing can be known of the device any more; lengths may have fallen.
            return;
        }
        self.a.check(self.env.card.is_exact());
        self.b.check(self.env.card.is_exact());
        self.set.check(self.env.card.is_exact());
        let seen = self.seen();
        for (place, (was, is)) in before.seen.iter().zip(&seen).enumerate() {
            let (Some(was), Some(is)) = (was, is) else { continue };
            if was.mode == Mode::Virtual || was.moves == is.moves && was.address != 0 {
                assert_eq!(was.address, is.address, "the address moved");
            }
            let Some((op, done)) = step else { continue };
            if !op.touches(place) {
                assert_eq!(was, is, "buffer {place} changed, of which nothing was asked");
            } else if let Some(error) = &done.error {
                check_failed(was, is, error, done.effect);
            }
        }
        self.check_accounts(&seen);
        if let (Some(was), Some((_, done)), Some(error)) = (&before.snapshot, step, error) {
            let undone = !strikes.iter().any(spoils) && !matches!(error, Error::Rollback { .. });
            if undone && !matches!(done.effect, Effect::Empties | Effect::FlushesEach) {
                // Runs before the one that failed are done, and their chunks are with the driver.
                let gathers = step.is_some_and(|(op, _)| matches!(op, Op::Buffer(_, BufferOp::Coalesce(_))));
                self.check_failure(was, error, strikes, gathers);
            }
        }
    }

    /// The accounts say what the driver says.
    fn check_accounts(&self, seen: &[Option<Seen>]) {
        let env = &self.env;
        let (snapshot, figures) = (env.device.snapshot(), env.sim.figures());
        let sum = |mode| seen.iter().flatten().filter(|seen| seen.mode == mode).map(|seen| seen.committed).sum::<u64>();
        assert_eq!(snapshot.bytes_mapped.get(), sum(Mode::Virtual), "mapped");
        assert_eq!(snapshot.bytes_contiguous.get(), sum(Mode::Contiguous), "contiguous");
        assert_eq!(snapshot.bytes_pooled, self.env.device.pool().kept(), "pooled");
        let loose: u64 = self.loose.iter().map(|chunk| chunk.bytes().get()).sum();
        assert_eq!(snapshot.bytes_in_hand.get(), loose, "in hand");
        assert_eq!(snapshot.bytes_held().get(), figures.chunks.get() + figures.allocated.get(), "held: {snapshot}");
        assert_eq!(snapshot.chunks, figures.handles, "handles: {snapshot}");
        if let Some(files) = snapshot.open_files {
            assert_eq!(files.ours, figures.open_files - HELD, "open files");
            assert!(files.others.abs_diff(HELD) <= UNDER_WAY, "open files: {files:?}");
        }
        if let Some(entries) = snapshot.map_entries {
            assert_eq!(entries.ours, figures.map_entries - HELD, "map entries");
            assert!(entries.others.abs_diff(HELD) <= UNDER_WAY, "map entries: {entries:?}");
        }
        let ahead = self.a.ahead().get() + self.b.ahead().get() + self.set.ahead();
        assert_eq!(snapshot.bytes_ahead.get(), ahead, "ahead: {snapshot}");
        if !self.spoiled {
            let retiring = snapshot.bytes_retiring.get();
            assert!(self.deferred || retiring == 0, "retiring: {snapshot}");
            // Some of what is ahead may only wait to be mapped.
            let mapped = snapshot.bytes_mapped.get() + retiring;
            assert!((mapped..=mapped + ahead).contains(&figures.mapped.get()), "mapped: {snapshot}, {figures:?}");
            assert_eq!(env.told.mapped(), figures.mapped.get(), "told: {snapshot}");
            assert!(snapshot.bytes_stranded.is_zero(), "stranded: {snapshot}");
            let reserved: u64 = seen.iter().flatten().filter(|s| s.mode == Mode::Virtual).map(|s| s.reserved).sum();
            assert_eq!(snapshot.bytes_reserved.get(), reserved, "reserved: {snapshot}");
            assert_eq!(figures.reserved.get(), reserved, "spans: {snapshot}");
        }
    }

    /// A failed operation has changed nothing on the device.
    fn check_failure(&self, was: &Snapshot, error: &Error, strikes: &[Strike], gathers: bool) {
        let is = self.env.device.snapshot();
        let fixed = |it: &Snapshot| [it.bytes_mapped, it.bytes_in_hand, it.bytes_contiguous];
        assert_eq!(fixed(was), fixed(&is), "it failed, and changed the accounts");
        // What lost its buffer and waited goes when the device is waited for or memory is short: with its addresses, and
        // with what could not be unmapped before.
        let buried = is.bytes_retiring < was.bytes_retiring;
        for (is, was) in [(is.bytes_reserved, was.bytes_reserved), (is.bytes_stranded, was.bytes_stranded)] {
            assert!(is == was || buried && is < was, "it failed, and changed the accounts: {was} to {is}");
        }
        // The pool is given up before a shortage of memory or files is believed.
        let short = self.env.card.runs_short() || strikes.iter().any(|strike| strike.call == Call::Create);
        // What waited may go to the pool meanwhile, and on to the driver if that is full.
        let kept = |it: &Snapshot| it.bytes_pooled.get() + it.bytes_retiring.get() + it.bytes_ahead.get();
        let may_fall = short || self.ages || gathers || !(was.bytes_retiring.is_zero() && was.bytes_ahead.is_zero());
        assert!(kept(&is) == kept(was) || may_fall && kept(&is) < kept(was), "it failed with {error}, pooled: {is}");
    }

    /// Drops everything and looks at what is left.
    pub(crate) fn end(mut self, ending: &Ending) {
        arm(&self.env.control, ending.fault.as_ref());
        let mut order = [0_u8, 1, 2, 3];
        order.rotate_left(usize::from(ending.order % 4));
        if ending.order & 4 != 0 {
            order.reverse();
        }
        for each in order {
            match each {
                0 => self.a.end(ending.close),
                1 => self.b.end(ending.close),
                2 => self.set.end(),
                _ => self.loose.clear(),
            }
        }
        self.env.device.wait_ahead();
        self.env.control.disarm();
        self.spoiled |= self.env.control.strikes().iter().any(spoils);
        self.lost |= self.env.device.memory().is_err();
        // What could not be waited for while buffers were dropped goes now.
        self.env.device.drain();
        self.env.device.pool().trim(growspan::Bytes::ZERO);
        let snapshot = self.env.device.snapshot();
        let Env { sim, device, event, .. } = self.env;
        drop((event, device));
        assert_eq!(sim.violations(), [], "at the end: {ending:?}");
        sim.finish_all();
        assert_eq!(sim.violations(), [], "after the end: {ending:?}");
        let held = snapshot.bytes_held();
        assert_eq!(held, snapshot.bytes_stranded, "at the end: {snapshot}, {ending:?}");
        if self.lost {
            return;
        }
        let figures = sim.figures();
        assert_eq!(held.get(), figures.chunks.get() + figures.allocated.get(), "at the end: {snapshot}, {ending:?}");
        if !self.spoiled {
            sim.assert_clean();
        }
    }
}

/// What an operation that failed left of a buffer it was about.
fn check_failed(was: &Seen, is: &Seen, error: &Error, effect: Effect) {
    if matches!(error, Error::Rollback { .. }) {
        assert_eq!((was.address, was.moves), (is.address, is.moves), "{was:?} {is:?}");
    }
    match (effect, error) {
        (Effect::Grows, Error::Rollback { .. }) => {
            assert!(is.len == was.len && is.committed >= was.committed, "{was:?} {is:?}");
        }
        (Effect::Shrinks, Error::Rollback { .. }) => {
            assert!(is.len == was.len.min(is.capacity) && is.committed <= was.committed, "{was:?} {is:?}");
        }
        (Effect::Empties, _) => assert!(is.len <= was.len && is.committed <= was.committed, "{was:?} {is:?}"),
        (Effect::FlushesEach, _) => {
            let kept = Seen { committed: was.committed, capacity: was.capacity, ..*is };
            // What is ahead in a chunk that is in use becomes the buffer's.
            assert_eq!(was, &kept, "it failed, and changed more than what is ahead");
        }
        _ => assert_eq!(was, is, "it failed, and changed a buffer"),
    }
}

#[derive(Default)]
struct Before {
    seen: Vec<Option<Seen>>,
    snapshot: Option<Snapshot>,
}

fn arm(control: &FaultControl, fault: Option<&Fault>) {
    match fault {
        Some(fault) => control.arm(fault.plan()),
        None => control.arm(FaultPlan::count()),
    }
}

struct Context<'a> {
    number: usize,
    step: &'a Step,
    done: &'a Done,
    strikes: &'a [Strike],
}

/// Prints the step if it is dropped, which only a panic does.
struct Guard<'a>(&'a Context<'a>);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let Context { number, step, done, strikes } = self.0;
        eprintln!("at step {number}: {step:?}\nended with {:?}\nstruck {strikes:?}", done.error);
    }
}

/// Shows a buffer, if there is one.
pub(crate) fn seen<T: Pod>(buffer: Option<&GrowableBuffer<T>>) -> Option<Seen> {
    buffer.map(Seen::of)
}
