//! What moves chunks about: loans between buffers, cuts, coalescing, prewarming. Each driver call of each fails in turn.

use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, DriverErrorKind};
use growspan::{Bytes, Error, GrowableBuffer, Loan, Prewarm, Quiesce, Result, Sizing};

use crate::world::{Contents, UNIT, World, contents, look, shrink, stamp, units};
use crate::{GRANULE, KINDS, SPARSE, worlds};

/// Two buffers, and what one has of the other.
struct Pair {
    lender: GrowableBuffer<u8>,
    borrower: GrowableBuffer<u8>,
    loan: Option<Loan>,
}

/// A state to start from, and what to do in it.
struct Deed {
    name: &'static str,
    /// Whether a failure leaves even the chunks as they were, and not only what they hold.
    whole: bool,
    prepare: fn(&World) -> Pair,
    act: fn(&World, &mut Pair) -> Result<()>,
}

const DEEDS: [Deed; 8] = [
    Deed { name: "lend", whole: true, prepare: ready, act: |_, pair| pair.lend(20 * UNIT) },
    Deed { name: "lend all", whole: true, prepare: ready, act: |_, pair| pair.lend(0) },
    Deed { name: "give back", whole: true, prepare: lent, act: |_, pair| pair.give_back() },
    Deed {
        name: "give back with more behind",
        whole: true,
        prepare: |world| {
            let mut pair = lent(world);
            pair.borrower.grow_to(62 * UNIT).unwrap();
            stamp(&mut pair.borrower, 4);
            pair
        },
        act: |_, pair| pair.give_back(),
    },
    Deed {
        name: "cut into several",
        whole: true,
        prepare: |world| Pair::of(large(world, 128, 80), world.buffer()),
        // On the ladder the last two chunks have eight units, and the first of them is cut at six.
        act: |_, pair| pair.lender.shrink_exact((64 + 5) * UNIT, Quiesce::Device).map(drop),
    },
    Deed {
        name: "coalesce one run",
        whole: true,
        prepare: |world| Pair::of(small(world, 36), world.buffer()),
        act: |_, pair| pair.lender.coalesce(Quiesce::Device).map(drop),
    },
    Deed {
        name: "coalesce many",
        whole: false,
        prepare: |world| Pair::of(small(world, 44), world.buffer()),
        act: |_, pair| pair.lender.coalesce(Quiesce::Device).map(drop),
    },
    Deed {
        name: "prewarm",
        whole: true,
        prepare: |world| {
            let mut pair = Pair::of(world.buffer(), world.buffer());
            pair.lender.grow_to(10 * UNIT).unwrap();
            shrink(&mut pair.lender, 0);
            pair
        },
        act: |world, _| world.device.prewarm(Prewarm::span(units(24))).map(drop),
    },
];

impl Pair {
    fn of(lender: GrowableBuffer<u8>, borrower: GrowableBuffer<u8>) -> Self {
        Self { lender, borrower, loan: None }
    }

    fn lend(&mut self, len: usize) -> Result<()> {
        self.loan = Some(self.lender.lend(len, Quiesce::Device, &mut self.borrower)?);
        Ok(())
    }

    fn give_back(&mut self) -> Result<()> {
        let loan = self.loan.as_mut().unwrap();
        loan.give_back(&mut self.borrower, &mut self.lender, Quiesce::Device).map(drop)
    }

    fn each(&self) -> [&GrowableBuffer<u8>; 2] {
        [&self.lender, &self.borrower]
    }

    /// That no length has risen, and that what is left of each buffer is what it was.
    fn assert_kept(&self, before: &[(usize, Contents); 2], what: &str) {
        for (buffer, (len, contents)) in self.each().into_iter().zip(before) {
            assert!(buffer.len() <= *len, "{what}");
            assert!(contents.still_in(buffer, buffer.len()), "{what}");
        }
    }
}

/// A lender of 60 units, grown in two steps, and a borrower of 5.
fn ready(world: &World) -> Pair {
    let roomy = GrowableBuffer::builder(&world.device).max_len(128 * UNIT).build().unwrap();
    let mut pair = Pair::of(world.buffer(), roomy);
    pair.lender.grow_to(20 * UNIT).unwrap();
    pair.lender.grow_to(60 * UNIT).unwrap();
    pair.borrower.grow_to(5 * UNIT).unwrap();
    stamp(&mut pair.lender, 0);
    stamp(&mut pair.borrower, 1);
    pair
}

/// The same after all above 20 units was lent, and written to.
fn lent(world: &World) -> Pair {
    let mut pair = ready(world);
    pair.lend(20 * UNIT).unwrap();
    pair.borrower.grow_to(30 * UNIT).unwrap();
    stamp(&mut pair.borrower, 3);
    pair
}

/// A buffer of so many units whose last chunks have many granules.
fn large(world: &World, max: usize, len: usize) -> GrowableBuffer<u8> {
    let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(max * UNIT).build().unwrap();
    buffer.grow_to(len * UNIT).unwrap();
    stamp(&mut buffer, 5);
    buffer
}

/// A buffer of so many units, all in chunks of one granule where the device lets us choose.
fn small(world: &World, len: usize) -> GrowableBuffer<u8> {
    let sizing = Sizing::Uniform(Bytes::new(GRANULE as u64));
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(128 * UNIT).sizing(sizing);
    let mut buffer = builder.build().unwrap();
    buffer.grow_to(len * UNIT).unwrap();
    stamp(&mut buffer, 6);
    buffer
}

fn virtual_worlds() -> impl Iterator<Item = World> {
    worlds().into_iter().filter(World::is_virtual)
}

pub(crate) fn a_failed_move_changes_nothing() {
    for world in virtual_worlds() {
        for deed in &DEEDS {
            for k in 1.. {
                let what = format!("{}: {} with call {k} failing", world.name, deed.name);
                assert!(k < 1000, "{what}: no end of calls");
                let mut pair = (deed.prepare)(&world);
                let before = (pair.each().map(look), world.picture());
                let chunks = pair.each().map(GrowableBuffer::chunks);
                world.faults.arm(FaultPlan::nth(k));
                let result = (deed.act)(&world, &mut pair);
                world.faults.disarm();
                let struck = world.faults.struck();
                if let Err(error) = &result {
                    assert!(struck, "{what}: {error}");
                    if deed.whole {
                        assert_eq!((pair.each().map(look), world.picture()), before, "{what}: {error}");
                        assert_eq!(pair.each().map(GrowableBuffer::chunks), chunks, "{what}: {error}");
                    } else {
                        assert_eq!(pair.each().map(look), before.0, "{what}: {error}");
                    }
                    (deed.act)(&world, &mut pair).unwrap_or_else(|error| panic!("{what}, then not: {error}"));
                }
                world.assert_balanced(&what);
                drop(pair);
                world.assert_empty(&what);
                if !struck {
                    assert!(k > 1, "{what}: so few calls");
                    break;
                }
            }
        }
    }
}

pub(crate) fn two_failures_of_a_move_cost_no_byte_of_what_is_left() {
    for world in virtual_worlds() {
        for deed in &DEEDS {
            let mut pair = (deed.prepare)(&world);
            world.faults.arm(FaultPlan::count());
            let _ = (deed.act)(&world, &mut pair);
            let calls = world.faults.counted();
            world.faults.disarm();
            drop(pair);
            for first in 1..=calls {
                let seconds = first + 1..=(calls + 8).min(first + 9);
                for second in seconds.filter(|second| (first + second).is_multiple_of(SPARSE)) {
                    let what = format!("{}: {}, calls {first} and {second} failing", world.name, deed.name);
                    let mut pair = (deed.prepare)(&world);
                    let before = pair.each().map(|buffer| (buffer.len(), contents(buffer)));
                    world.faults.arm(FaultPlan::list([first, second]));
                    let _ = (deed.act)(&world, &mut pair);
                    world.faults.disarm();
                    pair.assert_kept(&before, &what);
                    world.assert_balanced(&what);
                    drop(pair);
                    world.assert_only_stranded(&what);
                }
            }
        }
    }
}

pub(crate) fn lasting_failures_of_a_move_are_accounted_for() {
    use Call::{CopyWithin, Create, FreeSpan, Map, Release, Reserve, SetAccess, Synchronize, Unmap};
    for call in [Reserve, FreeSpan, Create, Release, Map, SetAccess, Unmap, CopyWithin, Synchronize] {
        for kind in KINDS {
            for world in virtual_worlds() {
                for deed in &DEEDS {
                    for n in [0, 2] {
                        moves_while_it_keeps_failing(&world, deed, call, n, *kind);
                    }
                }
            }
        }
    }
}

fn moves_while_it_keeps_failing(world: &World, deed: &Deed, call: Call, n: u64, kind: DriverErrorKind) {
    let what = format!("{}: {} with every {call} after {n} failing", world.name, deed.name);
    let mut pair = (deed.prepare)(world);
    let before = pair.each().map(|buffer| (buffer.len(), contents(buffer)));
    world.faults.arm(FaultPlan::after(n).of(call).kind(kind));
    let result = (deed.act)(world, &mut pair);
    let struck = world.faults.struck();
    world.faults.disarm();
    assert!(struck || result.is_ok(), "{what}: {result:?}");
    pair.assert_kept(&before, &what);
    world.assert_balanced(&what);
    drop(pair);
    match call {
        Call::FreeSpan => world.assert_gone(&what),
        // What could not be unmapped is given up, and the books say so.
        Call::Unmap => world.assert_only_stranded(&what),
        // Where unmapping waits for the device, that is not done either.
        Call::Synchronize if !world.device.verdict().quirks().map_beside_kernels => world.assert_only_stranded(&what),
        _ => world.assert_empty(&what),
    }
}

/// The chunks themselves go over, with what they hold, and come back to where they were.
pub(crate) fn a_loan_moves_chunks_and_nothing_else() {
    for world in counted_worlds().filter(World::is_virtual) {
        let name = &world.name;
        let mut pair = ready(&world);
        let (before, lenders) = (look(&pair.lender), contents(&pair.lender));
        let handles =
            |buffer: &GrowableBuffer<u8>| buffer.chunks().iter().map(|chunk| chunk.handle).collect::<Vec<_>>();
        let (mine, own) = (handles(&pair.lender), handles(&pair.borrower));
        let (kept, had) = (world.device.pool().kept(), pair.borrower.committed());
        world.faults.arm(FaultPlan::count().of(Call::Create).of(Call::Release));
        pair.lend(20 * UNIT).unwrap();
        let loan = pair.loan.as_ref().unwrap();
        let stayed = handles(&pair.lender);
        assert_eq!(handles(&pair.borrower), [&own[..], &mine[stayed.len()..]].concat(), "{name}: in their order");
        assert_eq!(mine[..stayed.len()], stayed, "{name}");
        assert_eq!(loan.chunks(), mine.len() - stayed.len(), "{name}");
        assert_eq!(loan.bytes().get(), before.committed.get() - pair.lender.committed().get(), "{name}");
        assert_eq!(pair.borrower.committed().get(), had.get() + loan.bytes().get(), "{name}");
        assert_eq!((pair.lender.len(), pair.borrower.len()), (20 * UNIT, 5 * UNIT), "{name}");
        world.assert_balanced("lent");

        // What the borrower has now is what the lender had there.
        let (at, from) = (had.get() as usize, pair.lender.committed().get() as usize);
        pair.borrower.grow_to(at + 60 * UNIT - from).unwrap();
        for offset in (0..60 * UNIT - from).step_by(GRANULE) {
            let mut byte = [0];
            pair.borrower.copy_out(at + offset, &mut byte).unwrap();
            assert_eq!(Some(byte[0]), lenders.at(from + offset), "{name}: at {offset} of the loan");
        }
        let returned = pair.loan.as_mut().unwrap().give_back(&mut pair.borrower, &mut pair.lender, Quiesce::Device);
        let returned = returned.unwrap();
        assert_eq!((returned.missing, returned.released), (Bytes::ZERO, Bytes::ZERO), "{name}");
        assert_eq!((handles(&pair.lender), handles(&pair.borrower)), (mine, own), "{name}");
        pair.lender.grow_to(60 * UNIT).unwrap();
        assert_eq!(look(&pair.lender), before, "{name}: at its place, as it was");
        assert_eq!(pair.borrower.len(), had.get() as usize, "{name}: what it had memory for");
        world.faults.disarm();
        assert_eq!(
            (world.faults.counted(), world.device.pool().kept()),
            (0, kept),
            "{name}: no chunk made or released"
        );

        // Once is enough.
        let again = pair.loan.as_mut().unwrap().give_back(&mut pair.borrower, &mut pair.lender, Quiesce::Device);
        assert_eq!(again.unwrap().returned, Bytes::ZERO, "{name}");
        assert_eq!(look(&pair.lender), before, "{name}");
        drop(pair);
        world.assert_empty("a loan");
    }
}

/// Buffers and loan may go in any order, with the loan given back, or not, or not in full.
pub(crate) fn lender_and_borrower_go_in_any_order() {
    for world in virtual_worlds() {
        for order in ["lbn", "bln", "nlb", "nbl", "lnb", "bnl", "glb", "gbl", "slb", "sgb", "ugl"] {
            let Pair { lender, borrower, loan } = lent(&world);
            let (mut lender, mut borrower, mut loan) = (Some(lender), Some(borrower), loan);
            let kept = contents(lender.as_ref().unwrap());
            for step in order.chars() {
                match step {
                    'l' => lender = None,
                    'b' => borrower = None,
                    'n' => loan = None,
                    // Shrinks below what it borrowed, or grows by chunks of its own behind.
                    's' => shrink(borrower.as_mut().unwrap(), 5 * UNIT),
                    'u' => borrower.as_mut().unwrap().grow_to(62 * UNIT).unwrap(),
                    _ => {
                        let (borrower, lender) = (borrower.as_mut().unwrap(), lender.as_mut().unwrap());
                        let owed = loan.as_ref().unwrap().bytes();
                        let back = loan.as_mut().unwrap().give_back(borrower, lender, Quiesce::Device).unwrap();
                        assert_eq!(back.returned.get() + back.missing.get(), owed.get(), "{} {order}", world.name);
                        assert_eq!(back.missing.is_zero(), !order.starts_with('s'), "{} {order}", world.name);
                        assert_eq!(!back.released.is_zero(), order.starts_with('u'), "{} {order}", world.name);
                    }
                }
                if let Some(lender) = &lender {
                    assert!(kept.still_in(lender, 20 * UNIT), "{} {order}", world.name);
                }
                world.assert_balanced(order);
            }
            drop((lender, borrower, loan));
            world.assert_empty(order);
        }
    }
}

/// What is cut leaves sizes that the ladder makes too, so that whoever comes next finds them in the pool.
pub(crate) fn cuts_leave_chunks_that_fit_elsewhere() {
    let mut seen = 0;
    for world in worlds().into_iter().filter(World::has_a_ladder) {
        let name = &world.name;
        let mut buffer = large(&world, 1024, 450);
        for end in [449, 429, 415, 333, 257, 255, 100, 97, 33] {
            let before = contents(&buffer);
            let shrunk = buffer.shrink_exact(end * UNIT - 1, Quiesce::Device).unwrap();
            assert_eq!(shrunk.why, None, "{name} to {end}");
            assert_eq!(buffer.committed(), units(end.next_multiple_of(2)), "{name} to {end}");
            assert!(before.still_in(&buffer, buffer.len()), "{name} to {end}");
            world.assert_balanced("cut");
        }
        let granules = |bytes: Bytes| bytes.get() / GRANULE as u64;
        assert!(buffer.chunks().iter().all(|chunk| granules(chunk.bytes).is_power_of_two()), "{name}: {buffer:?}");
        // Growing again goes on from there.
        buffer.grow_to(500 * UNIT).unwrap();
        drop(buffer);
        let classes = world.device.pool().classes();
        assert!(classes.iter().all(|(size, _)| granules(*size).is_power_of_two()), "{name}: {classes:?}");
        world.assert_empty("cut");
        seen += 1;
    }
    assert_eq!(seen > 0, crate::expects_a_ladder(), "whether any device has a ladder");
}

/// Devices whose buffers map nothing ahead, where every chunk and every call can be counted.
fn counted_worlds() -> impl Iterator<Item = World> {
    worlds().into_iter().filter(|world| !world.maps_ahead())
}

/// Runs of small chunks become what the ladder would have there, at the same addresses, with what they held.
pub(crate) fn coalescing_makes_the_ladders_chunks_of_small_ones() {
    let mut seen = 0;
    for world in counted_worlds() {
        let name = &world.name;
        let mut buffer = small_or_as_the_device_wants(&world);
        let before = look(&buffer);
        let chunks = world.device.snapshot().chunks;
        let coalesced = buffer.coalesce(Quiesce::Device).unwrap();
        assert_eq!(look(&buffer), before, "{name}");
        assert_eq!((buffer.chunks().len(), world.device.pool().kept()), (coalesced.after, Bytes::ZERO), "{name}");
        if world.device.verdict().quirks().uniform_chunks_only || !world.is_virtual() {
            assert_eq!(coalesced.saved(), 0, "{name}");
            assert!(coalesced.why.is_some(), "{name}");
        } else {
            assert_eq!((coalesced.before, coalesced.why.as_deref()), (50, None), "{name}");
            let mut ladder = GrowableBuffer::<u8>::builder(&world.device)
                .max_len(128 * UNIT)
                .sizing(Sizing::Ladder)
                .build()
                .unwrap();
            ladder.grow_to(96 * UNIT).unwrap();
            let sizes = |buffer: &GrowableBuffer<u8>| buffer.chunks().iter().map(|it| it.bytes).collect::<Vec<_>>();
            // 96 units are whole on the ladder; the next chunk there has eight, of which half is mapped here.
            let expected = [&sizes(&ladder)[..], &[units(4)]].concat();
            assert_eq!(sizes(&buffer), expected, "{name}");
            assert_eq!(coalesced.saved(), 50 - expected.len(), "{name}");
            drop(ladder);
            world.device.pool().trim(Bytes::ZERO);
            assert_eq!(
                chunks - world.device.snapshot().chunks,
                coalesced.saved() as u64,
                "{name}: the small ones went"
            );
            // There is nothing left to do, and the buffer goes on as it was.
            let again = buffer.coalesce(Quiesce::Device).unwrap();
            assert_eq!((again.saved(), again.copied), (0, Bytes::ZERO), "{name}");
            seen += 1;
        }
        buffer.grow_to(120 * UNIT).unwrap();
        shrink(&mut buffer, 100 * UNIT);
        shrink(&mut buffer, 50 * UNIT);
        let mut first = [0; 16];
        buffer.copy_out(0, &mut first).unwrap();
        drop(buffer);
        world.assert_empty("coalesced");
    }
    assert_eq!(seen > 0, crate::expects_a_ladder(), "whether chunks of several sizes may lie side by side");
}

fn small_or_as_the_device_wants(world: &World) -> GrowableBuffer<u8> {
    if world.is_virtual() {
        return small(world, 100);
    }
    let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(128 * UNIT).build().unwrap();
    buffer.grow_to(100 * UNIT).unwrap();
    stamp(&mut buffer, 6);
    buffer
}

/// Without memory for copies nothing is coalesced, and with some of it the smaller runs are.
pub(crate) fn coalescing_does_what_memory_allows() {
    let mixes = |world: &World| world.is_virtual() && !world.device.verdict().quirks().uniform_chunks_only;
    for world in counted_worlds().filter(mixes) {
        let name = &world.name;
        let mut buffer = small(&world, 100);
        world.device.pool().trim(Bytes::ZERO);
        let before = look(&buffer);
        world.faults.arm(FaultPlan::every().of(Call::Create));
        let coalesced = buffer.coalesce(Quiesce::Device).unwrap();
        world.faults.disarm();
        assert_eq!((coalesced.saved(), look(&buffer)), (0, before.clone()), "{name}");
        assert!(coalesced.why.unwrap().contains("out of memory"), "{name}");
        // The third copy finds none, also when others have given way: runs of its size are left, smaller ones are not.
        world.faults.arm(FaultPlan::list(10..=12).of(Call::Create));
        let coalesced = buffer.coalesce(Quiesce::Device).unwrap();
        world.faults.disarm();
        assert!(coalesced.saved() > 0 && coalesced.why.is_some(), "{name}: {coalesced}");
        assert_eq!(look(&buffer), before, "{name}");
        drop(buffer);
        world.assert_empty("coalesced in part");
    }
}

/// What is prewarmed is what the next buffer takes, whole and without a miss.
pub(crate) fn a_prewarmed_pool_has_what_a_buffer_takes() {
    for world in worlds() {
        let name = &world.name;
        let pool = world.device.pool();
        let asked = Prewarm::span(units(60));
        if !world.is_virtual() {
            assert!(matches!(world.device.prewarm(asked), Err(Error::Refused { .. })), "{name}");
            continue;
        }
        let warm = world.device.prewarm(asked).unwrap();
        assert_eq!((warm.made, warm.found), (pool.kept(), Bytes::ZERO), "{name}");
        world.assert_balanced("prewarmed");
        if world.keeps_chunks() {
            assert!(warm.made >= units(60) && warm.missing.is_zero() && warm.why.is_none(), "{name}: {warm}");
            let misses = pool.stats().misses;
            let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(60 * UNIT).build().unwrap();
            buffer.grow_to(60 * UNIT).unwrap();
            assert_eq!(pool.stats().misses, misses, "{name}");
            drop(buffer);
            let again = world.device.prewarm(asked).unwrap();
            assert_eq!((again.made, again.missing), (Bytes::ZERO, Bytes::ZERO), "{name}: {again}");
            // Beyond what may be kept it stops, and says so.
            pool.trim(Bytes::ZERO);
            pool.set_keep_limit(units(20));
            let little = world.device.prewarm(asked).unwrap();
            assert!(little.made <= units(20) && !little.missing.is_zero(), "{name}: {little}");
            assert!(little.why.unwrap().contains("raise its limit"), "{name}");
        } else {
            assert!(warm.made.is_zero() && warm.missing >= units(60), "{name}: {warm}");
        }
        world.assert_empty("prewarmed");
    }
}
