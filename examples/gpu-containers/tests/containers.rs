//! The containers beside std's, on every device there is: host memory with virtual memory and without, a simulated card,
//! AMD's runtime or the stand-in for it, an NVIDIA card.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

use std::collections::{BTreeMap, VecDeque};

use gpu_containers::{DeviceSlab, DeviceVec, RingBuffer};
use growspan::driver::host::HostOptions;
use growspan::driver::sim::SimDriver;
use growspan::{
    ArenaAllocator, Bytes, Device, DeviceOptions, Headroom, LimitedAllocator, RawAllocator, SpanAllocator,
    StatsAllocator,
};

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

fn vectors<A: RawAllocator + Clone>(allocator: &A) {
    let mut dice = Dice(1);
    let mut ours: DeviceVec<u64, A> = DeviceVec::new_in(allocator.clone());
    let mut theirs: Vec<u64> = Vec::new();
    for step in 0..600_u64 {
        match dice.roll(10) {
            0..=2 => {
                ours.push(step).unwrap();
                theirs.push(step);
            }
            3..=5 => {
                let more: Vec<u64> = (0..dice.roll(20_000) as u64).map(|n| n * 3 + step).collect();
                ours.extend_from_slice(&more).unwrap();
                theirs.extend(&more);
            }
            6 => {
                let at = dice.roll(theirs.len() + 1);
                let tail = ours.split_off(at).unwrap().unwrap();
                assert_eq!(tail.to_vec().unwrap(), theirs[at..]);
                // Device to device, and back as it was.
                ours.append(&tail).unwrap();
                assert_eq!(ours.len(), theirs.len());
            }
            7 => assert_eq!(ours.pop().unwrap(), theirs.pop()),
            8 => {
                let len = dice.roll(theirs.len() + 1).max(theirs.len() / 2);
                ours.truncate(len);
                theirs.truncate(len);
                ours.shrink_to_fit().unwrap();
                assert_eq!(ours.capacity(), len);
            }
            _ => {
                let at = dice.roll(theirs.len() + 3);
                assert_eq!(ours.set(at, step).unwrap(), theirs.get_mut(at).map(|place| *place = step).is_some());
                assert_eq!(ours.get(at).unwrap(), theirs.get(at).copied());
            }
        }
        assert_eq!(ours.len(), theirs.len());
        if step % 40 == 0 {
            assert!(ours.to_vec().unwrap() == theirs);
        }
    }
    assert!(ours.to_vec().unwrap() == theirs);
    assert!(ours.split_off(theirs.len() + 1).unwrap().is_none());
}

/// From the threshold on a vector keeps its address, where there is virtual memory.
fn address<A: RawAllocator + Clone>(allocator: &A) {
    let mut vec: DeviceVec<u32, A> = DeviceVec::with_capacity_in(1 << 20, allocator.clone()).unwrap();
    let address = vec.device_ptr();
    for n in 0..16 {
        vec.extend_from_slice(&vec![n; 1 << 18]).unwrap();
    }
    let stays = allocator.device().verdict().mode() == growspan::Mode::Virtual;
    assert!(!stays || vec.device_ptr() == address);
    assert_eq!(vec.get(15 << 18).unwrap(), Some(15));
}

fn slabs<A: RawAllocator + Clone>(allocator: &A) {
    let mut dice = Dice(2);
    let mut slab = DeviceSlab::new_in(allocator.clone());
    let mut live = BTreeMap::new();
    let mut gone = Vec::new();
    for step in 0..3000_u32 {
        if dice.roll(5) > 1 || live.is_empty() {
            live.insert(step, slab.insert([step; 8]).unwrap());
        } else {
            let number = *live.keys().nth(dice.roll(live.len())).unwrap();
            let key = live.remove(&number).unwrap();
            assert_eq!(slab.remove(key).unwrap(), Some([number; 8]));
            gone.push(key);
        }
        assert_eq!(slab.len(), live.len());
    }
    for (number, key) in &live {
        assert_eq!(slab.get(*key).unwrap(), Some([*number; 8]));
    }
    for key in gone {
        assert_eq!(slab.get(key).unwrap(), None);
        assert_eq!(slab.remove(key).unwrap(), None);
    }
}

fn rings<A: RawAllocator + Clone>(allocator: &A) {
    let mut dice = Dice(3);
    let mut ours = RingBuffer::with_capacity_in(10, allocator.clone()).unwrap();
    let mut theirs = VecDeque::new();
    let mut next = 0_u16;
    for _ in 0..800 {
        let most = if dice.roll(20) == 0 { 30_000 } else { 300 };
        let count = dice.roll(most);
        if dice.roll(2) == 0 {
            let more: Vec<u16> = (0..count as u16).map(|n| n.wrapping_add(next)).collect();
            next = next.wrapping_add(count as u16);
            ours.push_back(&more).unwrap();
            theirs.extend(more);
        } else {
            let expected: Vec<u16> = theirs.drain(..count.min(theirs.len())).collect();
            assert!(ours.pop_front(count).unwrap() == expected);
        }
        assert_eq!(ours.len(), theirs.len());
    }
    assert!(theirs == ours.pop_front(usize::MAX).unwrap());
}

/// Everything, on plain allocators and on stacks of them; nothing is left behind.
fn all_on(device: &Device) {
    println!("on {}: {}", device.info().id(), device.info().name);
    let headroom = Headroom::default().with_least(Bytes::mib(256));
    let spans = SpanAllocator::builder(device).headroom(headroom).build_on_device().unwrap();
    vectors(&spans);
    address(&spans);
    slabs(&spans);
    rings(&spans);
    let stack = StatsAllocator::new(LimitedAllocator::new(spans.clone(), Bytes::gib(1)));
    vectors(&stack);
    rings(&stack);
    assert_eq!((stack.stats().live(), stack.inner().used()), (0, Bytes::ZERO));
    let arena = ArenaAllocator::new(stack.clone(), Bytes::mib(1));
    slabs(&&arena);
    rings(&&arena);
    drop(arena);
    assert_eq!(spans.figures().blocks, 0);
    // What containers of two devices hold goes through the host.
    let other = SpanAllocator::builder(&host(false)).build_on_device().unwrap();
    let mut far = DeviceVec::new_in(other);
    let mut near = DeviceVec::new_in(spans.clone());
    near.extend_from_slice(&[1_u8, 2, 3]).unwrap();
    far.append(&near).unwrap();
    assert_eq!(far.to_vec().unwrap(), [1, 2, 3]);
    drop((near, stack));
    spans.trim();
    drop(spans);
    device.pool().trim(Bytes::ZERO);
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO, "{}", device.snapshot());
}

fn host(contiguous: bool) -> Device {
    let memory = HostOptions::default().with_capacity(Bytes::mib(512));
    DeviceOptions::new().contiguous(contiguous).host(memory).unwrap()
}

#[test]
fn on_the_host() {
    all_on(&host(false));
    all_on(&host(true));
}

#[test]
fn on_a_simulated_card() {
    for contiguous in [false, true] {
        let sim = SimDriver::builder().total(Bytes::gib(1)).build();
        let device = DeviceOptions::new().contiguous(contiguous).open(sim.driver()).unwrap();
        all_on(&device);
        drop(device);
        sim.assert_clean();
    }
}

/// On a stream where all copies on the device wait: what the host reads and writes waits for them.
#[test]
fn on_a_stream() {
    for contiguous in [false, true] {
        let sim = SimDriver::builder().total(Bytes::gib(1)).queue_copies(true).build();
        let device = DeviceOptions::new().contiguous(contiguous).open(sim.driver()).unwrap();
        let spans = SpanAllocator::builder(&device).build_on_device().unwrap();
        let handle = spans.with_stream(sim.stream()).unwrap();
        vectors(&handle);
        slabs(&handle);
        rings(&handle);
        spans.trim();
        assert_eq!(spans.figures().blocks, 0);
        drop((spans, handle, device));
        sim.assert_clean();
    }
}

/// On AMD's runtime, or on the library that stands in for it (ci/containers.sh); skipped where there is neither.
#[test]
fn on_hip() {
    let asked = std::env::var_os("GROWSPAN_HIP_LIBRARY").is_some();
    match DeviceOptions::new().hip(0) {
        Ok(device) => all_on(&device),
        Err(why) if asked => panic!("{why}"),
        Err(why) => println!("skipped: {why}"),
    }
}

#[test]
fn on_cuda() {
    match DeviceOptions::new().cuda(0) {
        Ok(device) => all_on(&device),
        Err(why) => println!("skipped: {why}"),
    }
}
