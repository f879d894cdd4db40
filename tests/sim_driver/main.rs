//! The simulated driver: what it pretends, what it imitates, and what it catches.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

mod card;
mod personalities;

use std::thread;

use growspan::Bytes;
use growspan::driver::sim::{Outcome, Personality, SimDriver, SimOptions, ViolationKind};
use growspan::driver::{
    Backend, Call, CheckForm, ChunkProps, Driver, DriverErrorKind, DriverResult, RawEvent, RawHandle, RawStream,
    Shareable,
};

use card::{CHUNK, Card, kind_of};

const DEFAULT: RawStream = RawStream::DEFAULT;

#[test]
fn a_life_cycle_leaves_nothing() {
    let card = Card(SimDriver::new());
    let info = card.0.info();
    assert_eq!((info.backend, info.id()), (Backend::Sim, "sim:0".to_owned()));
    assert_eq!((info.name.as_str(), info.runtime.as_str()), ("simulated card", "sim driver 1.0"));
    assert_eq!((info.memory_word, info.host_visible, info.wants_2_mib), ("VRAM", false, true));
    assert_eq!((info.check, info.open_files_per_chunk, info.maps_per_chunk), (CheckForm::Full, 0, 0));
    card.0.support().unwrap();
    let all = card.free_memory();
    assert_eq!(all, 24 << 30);

    let span = card.reserve(8);
    assert_eq!(card.free_memory(), all);
    let handles = [card.chunk(span, CHUNK), card.chunk(span + CHUNK, 4 * CHUNK)];
    assert_eq!(card.free_memory(), all - 5 * CHUNK);

    // New memory is poisoned, copies cross chunk borders, and bytes stay where they were put.
    assert_eq!(card.read(span, 5).unwrap(), [0xA5; 5]);
    let data: Vec<u8> = (0..100_000_u32).map(|i| (i * 7 + i / 256) as u8).collect();
    let at = span + CHUNK - 50_001;
    card.write(at, &data).unwrap();
    card.copy_within(span + 3 * CHUNK + 1, at, data.len() as u64, None).unwrap();
    card.fill(at, 9, data.len() as u64, None).unwrap();
    assert_eq!(card.read(span + 3 * CHUNK + 1, data.len()).unwrap(), data);
    assert_eq!(card.read(at - 1, 3).unwrap(), [0xA5, 9, 9]);

    // A chunk keeps its bytes when it is mapped elsewhere; the same handle may be mapped twice.
    card.unmap(span, CHUNK).unwrap();
    card.map(span + 5 * CHUNK, CHUNK, handles[0]).unwrap();
    card.map(span + 7 * CHUNK, CHUNK, handles[0]).unwrap();
    card.set_access(span + 5 * CHUNK, CHUNK).unwrap();
    card.set_access(span + 7 * CHUNK, CHUNK).unwrap();
    assert_eq!(card.read(span + 6 * CHUNK - 1, 1).unwrap(), [9]);
    card.fill(span + 5 * CHUNK, 3, 1, None).unwrap();
    assert_eq!(card.read(span + 7 * CHUNK, 1).unwrap(), [3]);

    // Released while mapped: its memory returns at the last unmap.
    card.release(handles[0]).unwrap();
    assert_eq!(card.free_memory(), all - 5 * CHUNK);
    card.unmap(span + 5 * CHUNK, CHUNK).unwrap();
    assert_eq!(card.free_memory(), all - 5 * CHUNK);
    card.unmap(span + 7 * CHUNK, CHUNK).unwrap();
    assert_eq!(card.free_memory(), all - 4 * CHUNK);
    card.unmap(span + CHUNK, 4 * CHUNK).unwrap();
    card.release(handles[1]).unwrap();
    card.free_span(span, 8 * CHUNK).unwrap();
    assert_eq!(card.free_memory(), all);
    card.0.assert_clean();
}

#[test]
fn a_card_of_128_gib_costs_nothing_and_runs_out() {
    let card = Card(SimDriver::builder().total(Bytes::gib(128)).build());
    let block = card.0.allocate(100 << 30).unwrap();
    card.fill(block, 0, 100 << 30, None).unwrap();
    assert_eq!(card.read(block + (99 << 30), 2).unwrap(), [0, 0]);
    assert_eq!(kind_of(card.0.allocate((28 << 30) + 1)), DriverErrorKind::OutOfMemory);
    let handle = card.create(28 << 30);
    assert_eq!(kind_of(card.0.create(CHUNK, ChunkProps::PLAIN)), DriverErrorKind::OutOfMemory);
    card.release(handle).unwrap();

    card.0.set_used_by_others(Bytes::gib(27));
    assert_eq!(card.free_memory(), 1 << 30);
    assert_eq!(kind_of(card.0.create(2 << 30, ChunkProps::PLAIN)), DriverErrorKind::OutOfMemory);
    card.free(block, 100 << 30).unwrap();
    card.0.assert_clean();
}

#[test]
fn addresses_are_aligned_apart_and_nobodys() {
    let card = Card(SimDriver::new());
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for i in 0..200_u64 {
        let bytes = (1 + i % 5) * CHUNK;
        let align = CHUNK << (i % 12);
        let addr = if i % 3 == 0 { card.0.allocate(bytes) } else { card.0.reserve(bytes, align) }.unwrap();
        assert!(addr > 1 << 55);
        assert!(i % 3 == 0 || addr.is_multiple_of(align));
        assert!(ranges.iter().all(|&(start, end)| addr + bytes < start || end < addr));
        ranges.push((addr, addr + bytes));
    }
    assert_eq!(kind_of(card.0.reserve(1 << 48, CHUNK)), DriverErrorKind::OutOfAddresses);
    assert_eq!(kind_of(card.0.reserve(CHUNK, 1 << 63)), DriverErrorKind::OutOfAddresses);
    assert_eq!(kind_of(card.0.reserve(0_u64.wrapping_sub(CHUNK), CHUNK)), DriverErrorKind::OutOfAddresses);
    assert_eq!(kind_of(card.0.create(CHUNK, ChunkProps::PLAIN.with_rdma(true))), DriverErrorKind::NotSupported);
    let shared = ChunkProps::PLAIN.with_shareable(Shareable::PosixFd);
    assert_eq!(kind_of(card.0.create(CHUNK, shared)), DriverErrorKind::NotSupported);
    assert!(card.0.violations().is_empty());
}

#[test]
fn broken_rules_are_caught_and_change_nothing() {
    use ViolationKind::*;
    let card = Card(SimDriver::new());
    let span = card.reserve(8);
    let (one, four) = (card.create(CHUNK), card.create(4 * CHUNK));
    let gone = card.create(CHUNK);
    card.release(gone).unwrap();
    card.map(span + CHUNK, 4 * CHUNK, four).unwrap();
    let block = card.0.allocate(777).unwrap();

    card.breaks(ZeroSize, |c| c.0.reserve(0, CHUNK));
    card.breaks(ZeroSize, |c| c.0.create(0, ChunkProps::PLAIN));
    card.breaks(ZeroSize, |c| c.0.allocate(0));
    card.breaks(ZeroSize, |c| c.map(span, 0, one));
    card.breaks(ZeroSize, |c| c.set_access(span, 0));
    card.breaks(ZeroSize, |c| c.fill(block, 0, 0, None));
    card.breaks(OddSize, |c| c.0.reserve(CHUNK + 1, CHUNK));
    card.breaks(OddSize, |c| c.0.create(CHUNK / 2, ChunkProps::PLAIN));
    card.breaks(OddSize, |c| c.map(span, CHUNK + 4096, one));
    card.breaks(Misaligned, |c| c.0.reserve(CHUNK, 4096));
    card.breaks(Misaligned, |c| c.0.reserve(CHUNK, 3 * CHUNK));
    card.breaks(Misaligned, |c| c.0.reserve(CHUNK, 0));
    card.breaks(Misaligned, |c| c.map(span + 4096, CHUNK, one));
    card.breaks(WrongSize, |c| c.map(span, CHUNK, four));
    card.breaks(WrongSize, |c| c.unmap(span + CHUNK, CHUNK));
    card.breaks(WrongSize, |c| c.free_span(span, CHUNK));
    card.breaks(WrongSize, |c| c.free(block, 776));
    card.breaks(UnknownHandle, |c| c.release(RawHandle(99)));
    card.breaks(UnknownHandle, |c| c.map(span, CHUNK, RawHandle(0)));
    card.breaks(ReleasedHandle, |c| c.release(gone));
    card.breaks(ReleasedHandle, |c| c.map(span, CHUNK, gone));
    card.breaks(UnknownSpan, |c| c.free_span(span + CHUNK, CHUNK));
    card.breaks(UnknownSpan, |c| c.free_span(block, 777));
    card.breaks(UnknownBlock, |c| c.free(span, 8 * CHUNK));
    card.breaks(SpanInUse, |c| c.free_span(span, 8 * CHUNK));
    card.breaks(OutsideSpan, |c| c.map(span + 8 * CHUNK, CHUNK, one));
    card.breaks(OutsideSpan, |c| c.map(span + 5 * CHUNK, 4 * CHUNK, four));
    card.breaks(OutsideSpan, |c| c.map(0_u64.wrapping_sub(CHUNK), CHUNK, one));
    card.breaks(AlreadyMapped, |c| c.map(span + 4 * CHUNK, CHUNK, one));
    card.breaks(AlreadyMapped, |c| c.map(span, 4 * CHUNK, four));
    card.breaks(NotMapped, |c| c.unmap(span, CHUNK));
    card.breaks(NotMapped, |c| c.set_access(span, CHUNK));
    card.breaks(NotMapped, |c| c.set_access(span + CHUNK, 5 * CHUNK));
    card.breaks(NotMapped, |c| c.set_access(0_u64.wrapping_sub(CHUNK), 2 * CHUNK));
    card.breaks(PartOfMapping, |c| c.unmap(span + 2 * CHUNK, CHUNK));
    card.breaks(PartOfMapping, |c| c.set_access(span + CHUNK, CHUNK));
    card.breaks(PartOfMapping, |c| c.set_access(span + 2 * CHUNK, 3 * CHUNK));
    card.breaks(BadCopy, |c| c.copy_within(block + 1, block, 10, None));
    // SAFETY: a null pointer is refused, not read.
    card.breaks(BadCopy, |c| unsafe { c.0.copy_in(block, core::ptr::null(), 1, None) });
    card.breaks(UnknownEvent, |c| c.event_query(RawEvent(1)));
    card.breaks(UnknownEvent, |c| c.event_destroy(RawEvent(0)));
    let event = card.0.event_create().unwrap();
    let stranger = SimDriver::new().stream();
    card.breaks(UnknownStream, |c| c.event_record(event, stranger));
    card.breaks(UnknownStream, |c| c.synchronize_stream(stranger));
    card.breaks(UnknownStream, |c| c.fill(block, 0, 1, Some(stranger)));
    card.event_destroy(event).unwrap();
    card.breaks(DestroyedEvent, |c| c.event_record(event, DEFAULT));
    card.breaks(DestroyedEvent, |c| c.event_query(event));
    card.breaks(DestroyedEvent, |c| c.event_wait(event));
    card.breaks(DestroyedEvent, |c| c.event_destroy(event));

    card.release(four).unwrap();
    card.breaks(ReleasedHandle, |c| c.release(four));
    card.unmap(span + CHUNK, 4 * CHUNK).unwrap();
    card.release(one).unwrap();
    card.free_span(span, 8 * CHUNK).unwrap();
    card.breaks(DoubleFree, |c| c.free_span(span, 8 * CHUNK));
    card.free(block, 777).unwrap();
    card.breaks(DoubleFree, |c| c.free(block, 777));
    card.0.assert_clean();
}

#[test]
fn memory_is_not_managed_during_a_capture() {
    let card = Card(SimDriver::new());
    let span = card.reserve(1);
    let stream = card.0.stream();
    card.0.capture(stream, true);
    assert!(card.stream_is_capturing(stream).unwrap());
    assert!(!card.stream_is_capturing(DEFAULT).unwrap());
    card.breaks(ViolationKind::DuringCapture, |c| c.0.create(CHUNK, ChunkProps::PLAIN));
    card.breaks(ViolationKind::DuringCapture, |c| c.free_span(span, CHUNK));
    card.0.memory().unwrap();
    card.0.capture(stream, false);
    card.free_span(span, CHUNK).unwrap();
    card.0.assert_clean();
}

#[test]
fn illegal_accesses_lose_the_device() {
    type Access = fn(&Card, u64, u64) -> DriverResult<()>;
    let cases: [Access; 7] = [
        |card, span, _| card.fill(span + CHUNK, 0, 1, None),
        |card, span, _| card.fill(span + CHUNK - 1, 0, 2, None),
        |card, span, _| card.read(span + 2 * CHUNK, 1).map(drop),
        |card, _, block| card.write(block + 99, &[1, 2]),
        |card, span, block| card.copy_within(span + CHUNK, block, 4, None),
        |card, span, block| card.copy_within(block, span + CHUNK - 1, 4, None),
        |card, _, _| card.fill(u64::MAX, 0, 2, None),
    ];
    for (i, access) in cases.into_iter().enumerate() {
        let card = Card(SimDriver::new());
        let (span, block) = (card.reserve(4), card.0.allocate(100).unwrap());
        card.chunk(span, CHUNK);
        // Mapped, but without access.
        let handle = card.create(CHUNK);
        card.map(span + 2 * CHUNK, CHUNK, handle).unwrap();
        let error = access(&card, span, block).unwrap_err();
        assert_eq!((error.kind(), error.code()), (DriverErrorKind::DeviceLost, Some(700)), "case {i}");
        card.lost_by(ViolationKind::IllegalAddress);
    }
    let card = Card(SimDriver::new());
    card.0.lose();
    assert_eq!(kind_of(card.0.support()), DriverErrorKind::DeviceLost);
    card.0.assert_clean();
}

#[test]
fn leaks_are_named() {
    let card = Card(SimDriver::new());
    let span = card.reserve(4);
    let handles = [card.chunk(span, CHUNK), card.create(2 * CHUNK)];
    let block = card.0.allocate(4096).unwrap();
    let event = card.0.event_create().unwrap();
    card.0.queue_work(DEFAULT, block, 1);
    let text = card.0.check_clean().unwrap_err();
    for line in [
        "left over: 2 handles (6 MiB)",
        "left over: 1 mapping (2 MiB)",
        "left over: 1 span (8 MiB)",
        "left over: 1 block (4 KiB)",
        "left over: 1 event",
        "left over: 1 piece of pending work",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} in {text}");
    }
    let figures = card.0.figures();
    assert_eq!((figures.handles, figures.mappings, figures.spans, figures.blocks, figures.events), (2, 1, 1, 1, 1));
    assert_eq!((figures.mapped, figures.reserved), (Bytes::new(CHUNK), Bytes::new(4 * CHUNK)));
    assert_eq!((figures.allocated, figures.chunks), (Bytes::kib(4), Bytes::new(3 * CHUNK)));
    assert_eq!(figures.free, Bytes::new((24 << 30) - 3 * CHUNK - 4096));

    card.0.synchronize().unwrap();
    card.event_destroy(event).unwrap();
    card.free(block, 4096).unwrap();
    card.unmap(span, CHUNK).unwrap();
    card.free_span(span, 4 * CHUNK).unwrap();
    card.release(handles[0]).unwrap();
    assert!(card.0.check_clean().unwrap_err().ends_with("left over: 1 handle (4 MiB)"));
    card.release(handles[1]).unwrap();
    card.0.assert_clean();
    let _ = card.release(handles[1]);
    let text = card.0.check_clean().unwrap_err();
    assert!(text.contains("1 call against the rules:") && text.contains("ReleasedHandle: handle 2"), "{text}");
}

#[test]
#[should_panic(expected = "left over: 1 span (2 MiB)")]
fn assert_clean_says_what_is_left() {
    let card = Card(SimDriver::new());
    card.reserve(1);
    card.0.assert_clean();
}

#[test]
fn the_ledger_has_every_call() {
    let card = Card(SimDriver::builder().ledger(3).build());
    let span = card.reserve(2);
    let handle = card.create(CHUNK);
    card.map(span, CHUNK, handle).unwrap();
    let _ = card.map(span, CHUNK, handle);
    let ledger = card.0.ledger();
    assert_eq!(ledger.iter().map(|entry| entry.sequence).collect::<Vec<_>>(), [2, 3, 4]);
    assert_eq!(ledger[0].outcome, Outcome::Gave(handle.0));
    assert_eq!((ledger[1].call, ledger[1].outcome), (Call::Map, Outcome::Done));
    assert_eq!((ledger[1].args.addr, ledger[1].args.bytes), (Some(span), Some(CHUNK)));
    assert_eq!(ledger[2].outcome, Outcome::Failed(DriverErrorKind::Misuse));
    let line = ledger[2].to_string();
    assert_eq!(line, format!("#4 map at {span:#x} of 2 MiB, handle 1 failed: called against its rules"));
    assert_eq!(card.0.violations()[0].sequence, 4);
    assert_eq!((card.0.count(Call::Map), card.0.count(Call::Unmap), card.0.calls()), (2, 0, 4));

    card.0.clear_ledger();
    assert_eq!((card.0.ledger().len(), card.0.calls(), card.0.violations().len()), (0, 0, 1));
    card.0.memory().unwrap();
    assert_eq!(card.0.ledger()[0].sequence, 5);

    let silent = Card(SimDriver::builder().ledger(0).build());
    silent.reserve(1);
    assert_eq!((silent.0.ledger().len(), silent.0.count(Call::Reserve)), (0, 1));
}

/// A block with work pending on it, and an event behind the work.
fn busy(options: SimOptions) -> (Card, u64, RawStream, RawEvent) {
    let card = Card(options.build());
    let (block, stream, event) = (card.0.allocate(64).unwrap(), card.0.stream(), card.0.event_create().unwrap());
    assert!(card.event_query(event).unwrap(), "not recorded yet counts as reached");
    card.0.queue_work(stream, block, 64);
    card.event_record(event, stream).unwrap();
    assert!(!card.event_query(event).unwrap());
    (card, block, stream, event)
}

#[test]
fn work_stays_pending_until_something_waits() {
    let waits: [fn(&Card, RawStream, RawEvent); 5] = [
        |card, stream, _| card.0.finish(stream),
        |card, _, _| card.0.finish_all(),
        |card, _, event| card.event_wait(event).unwrap(),
        |card, _, _| card.0.synchronize().unwrap(),
        |card, stream, _| card.synchronize_stream(stream).unwrap(),
    ];
    for wait in waits {
        let (card, block, stream, event) = busy(SimDriver::builder());
        // Other streams, and copies on none, do not wait for it.
        card.synchronize_stream(DEFAULT).unwrap();
        card.0.finish(card.0.stream());
        card.fill(block, 1, 64, None).unwrap();
        assert!(!card.event_query(event).unwrap());
        wait(&card, stream, event);
        assert!(card.event_query(event).unwrap());
        card.event_destroy(event).unwrap();
        card.free(block, 64).unwrap();
        card.0.assert_clean();
    }
}

#[test]
fn an_event_waits_for_what_was_queued_before_it() {
    let (card, block, stream, event) = busy(SimDriver::builder());
    card.fill(block, 5, 64, Some(stream)).unwrap();
    card.event_wait(event).unwrap();
    assert_eq!(card.0.figures().pending, 1);
    assert_eq!(card.read(block, 1).unwrap(), [0xA5]);
    // Recorded again, it waits for more.
    card.event_record(event, stream).unwrap();
    assert!(!card.event_query(event).unwrap());
    card.event_wait(event).unwrap();
    assert_eq!(card.read(block, 1).unwrap(), [5]);
}

#[test]
fn copies_queue_behind_work_or_always() {
    let card = Card(SimDriver::new());
    let (block, stream) = (card.0.allocate(8).unwrap(), card.0.stream());
    card.fill(block, 1, 8, Some(stream)).unwrap();
    assert_eq!((card.0.figures().pending, card.read(block, 1).unwrap()), (0, vec![1]));

    let card = Card(SimDriver::builder().queue_copies(true).build());
    let (block, stream) = (card.0.allocate(8).unwrap(), card.0.stream());
    let (data, mut back) = ([7_u8; 4], [0_u8; 4]);
    // SAFETY: `data` lives to the end of the test, which waits for the copy.
    unsafe { card.0.copy_in(block, data.as_ptr(), 4, Some(stream)).unwrap() };
    card.copy_within(block + 4, block, 4, Some(stream)).unwrap();
    let target = back.as_mut_ptr();
    // SAFETY: `back` lives to the end of the test, and is not touched before the copy is over.
    unsafe { card.0.copy_out(target, block + 4, 4, Some(stream)).unwrap() };
    assert_eq!(card.0.figures().pending, 3);
    card.synchronize_stream(stream).unwrap();
    assert_eq!(back, data);
    // On no stream a copy is over at once, and comes after what the default stream has.
    card.fill(block, 1, 8, Some(DEFAULT)).unwrap();
    assert_eq!(card.read(block, 1).unwrap(), [1]);
    card.free(block, 8).unwrap();
    card.0.assert_clean();
}

#[test]
fn memory_that_goes_under_work_takes_the_device_with_it() {
    let under = ViolationKind::UnderRunningWork;
    let (card, block, ..) = busy(SimDriver::builder());
    card.free(block, 64).unwrap();
    card.lost_by(under);

    // Beside the work is fine, in it is not.
    let card = Card(SimDriver::new());
    let span = card.reserve(4);
    for at in 0..3 {
        card.chunk(span + at * CHUNK, CHUNK);
    }
    card.0.queue_work(DEFAULT, span + CHUNK - 1, 1);
    card.unmap(span + CHUNK, CHUNK).unwrap();
    assert!(!card.0.is_lost());
    card.unmap(span, CHUNK).unwrap();
    card.lost_by(under);

    // Both sides of a pending copy count.
    for (dst, src) in [(0, 1), (1, 0)] {
        let card = Card(SimDriver::builder().queue_copies(true).build());
        let blocks = [card.0.allocate(8).unwrap(), card.0.allocate(8).unwrap()];
        card.copy_within(blocks[dst], blocks[src], 8, Some(DEFAULT)).unwrap();
        card.free(blocks[0], 8).unwrap();
        card.lost_by(under);
    }

    // Work on addresses where nothing is mapped: the span goes first, or the work comes first.
    let card = Card(SimDriver::new());
    let span = card.reserve(1);
    card.0.queue_work(DEFAULT, span, 1);
    card.free_span(span, CHUNK).unwrap();
    card.lost_by(under);
    let card = Card(SimDriver::new());
    let span = card.reserve(1);
    card.0.queue_work(DEFAULT, span, 1);
    assert_eq!(kind_of(card.0.synchronize()), DriverErrorKind::DeviceLost);
    card.lost_by(ViolationKind::IllegalAddress);
    let card = Card(SimDriver::new());
    card.0.queue_work(DEFAULT, 4096, 1);
    card.0.finish_all();
    card.lost_by(ViolationKind::IllegalAddress);
}

#[test]
fn descriptions_can_be_set_but_memory_stays_invisible() {
    let sim = SimDriver::builder()
        .ordinal(3)
        .name("card")
        .runtime("HIP runtime 7.2.53210")
        .check(CheckForm::Cheap)
        .personality(Personality::MapCountLimit { held: 0, limit: 1 })
        .info(|info| {
            info.host_visible = true;
            info.maps_per_chunk = 0;
        })
        .poison(0x11)
        .build();
    let info = sim.info();
    assert_eq!((info.id(), info.name.as_str(), info.check), ("sim:3".to_owned(), "card", CheckForm::Cheap));
    assert_eq!((info.runtime.as_str(), info.host_visible), ("HIP runtime 7.2.53210", false));
    assert_eq!(info.maps_per_chunk, 0);
    let card = Card(sim);
    let block = card.0.allocate(2).unwrap();
    assert_eq!(card.read(block, 2).unwrap(), [0x11, 0x11]);
    assert!(format!("{:?}", card.0).contains("sim:3"));
}

#[test]
fn threads_share_a_card() {
    let card = Card(SimDriver::builder().ledger(100).build());
    thread::scope(|scope| {
        for value in 0..4_u8 {
            let card = &card;
            scope.spawn(move || {
                for _ in 0..200 {
                    let span = card.reserve(2);
                    let handle = card.chunk(span + CHUNK, CHUNK);
                    card.fill(span + CHUNK, value, CHUNK, None).unwrap();
                    assert_eq!(card.read(span + 2 * CHUNK - 3, 3).unwrap(), [value; 3]);
                    card.unmap(span + CHUNK, CHUNK).unwrap();
                    card.release(handle).unwrap();
                    card.free_span(span, 2 * CHUNK).unwrap();
                }
            });
        }
    });
    card.0.assert_clean();
    assert_eq!((card.0.count(Call::Map), card.0.ledger().len()), (800, 100));
}

/// Page-locked memory: what is done to it against the rules is noticed.
#[test]
fn page_locked_memory_has_rules() {
    use growspan::driver::PinFlags;

    const PAGE: u64 = 4096;
    let sim = SimDriver::new();
    let memory = vec![0_u8; 16 * PAGE as usize];
    let at = (memory.as_ptr().addr() as u64).next_multiple_of(PAGE);
    // SAFETY: the pages are the vector's, and stay as long as it does; what is against the rules is the driver's to notice.
    let pin = |addr, bytes| unsafe { sim.pin(addr, bytes, PinFlags::USUAL) };
    // SAFETY: as above.
    let unpin = |addr, bytes| unsafe { sim.unpin(addr, bytes) };
    let mut noticed = Vec::new();
    let mut against = |result: DriverResult<()>| {
        assert_eq!(result.unwrap_err().kind(), DriverErrorKind::Misuse);
        noticed.push(sim.take_violations().pop().unwrap().kind);
    };
    pin(at, 4 * PAGE).unwrap();
    pin(at + 4 * PAGE, PAGE).unwrap();
    against(pin(at + 3 * PAGE, PAGE));
    against(pin(at + 8 * PAGE, 0));
    against(pin(at + 8 * PAGE + 1, PAGE));
    against(pin(at + 8 * PAGE, PAGE + 1));
    against(unpin(at, PAGE));
    against(unpin(at + PAGE, PAGE));
    let block = sim.allocate_pinned(100, PinFlags::USUAL).unwrap();
    against(unpin(block, 100));
    // SAFETY: it is not the driver's to free, which it is to notice.
    against(unsafe { sim.free_pinned(at, 4 * PAGE) });
    use ViolationKind::{AlreadyPinned, Misaligned, NotPinned, WrongSize, ZeroSize};
    let expected = [AlreadyPinned, ZeroSize, Misaligned, Misaligned, WrongSize, NotPinned, NotPinned, NotPinned];
    assert_eq!(noticed, expected);
    assert_eq!((sim.figures().pins, sim.figures().pinned.get()), (3, 5 * PAGE + 100));
    assert!(sim.check_clean().unwrap_err().contains("3 pins"));
    // SAFETY: it was allocated above and is not used again.
    unsafe { sim.free_pinned(block, 100) }.unwrap();
    unpin(at, 4 * PAGE).unwrap();
    unpin(at + 4 * PAGE, PAGE).unwrap();
    sim.assert_clean();
}
