//! hashbrown's map, set and table.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::RandomState;

use growspan::{ArenaAllocator, Bytes, LimitedAllocator, StatsAllocator, TrackingAllocator};
use hashbrown::{HashMap, HashSet, HashTable};

use crate::{Dice, allocators, assert_empty};

/// Random operations on a map of texts beside a map of std's.
fn map_life<A: allocator_api2_02::alloc::Allocator + Clone>(allocator: &A, seed: u64, steps: usize) {
    let mut dice = Dice(seed);
    let mut ours: HashMap<u64, String, RandomState, A> = HashMap::with_hasher_in(RandomState::new(), allocator.clone());
    let mut theirs: BTreeMap<u64, String> = BTreeMap::new();
    for step in 0..steps {
        let key = dice.roll(4000) as u64;
        match dice.roll(20) {
            0..=9 => {
                let value = "x".repeat(dice.roll(40));
                assert_eq!(ours.insert(key, value.clone()), theirs.insert(key, value));
            }
            10..=13 => assert_eq!(ours.remove(&key), theirs.remove(&key)),
            14 => {
                ours.entry(key).or_default().push('y');
                theirs.entry(key).or_default().push('y');
            }
            15 => ours.reserve(dice.roll(6000)),
            16 => ours.shrink_to_fit(),
            17 if dice.roll(10) == 0 => {
                ours.retain(|key, _| key % 3 != 0);
                theirs.retain(|key, _| key % 3 != 0);
            }
            18 if dice.roll(20) == 0 => {
                let copy = ours.clone();
                ours = copy;
            }
            19 if dice.roll(40) == 0 => {
                let gone: BTreeMap<u64, String> = ours.drain().collect();
                assert_eq!(gone, core::mem::take(&mut theirs));
            }
            _ => assert_eq!(ours.get(&key), theirs.get(&key)),
        }
        assert_eq!(ours.len(), theirs.len());
        if step % 500 == 0 {
            assert_eq!(ours.iter().collect::<BTreeMap<_, _>>(), theirs.iter().collect());
        }
    }
    assert_eq!(ours.into_iter().collect::<BTreeMap<_, _>>(), theirs);
}

#[test]
fn maps_agree_with_std() {
    for (device, allocator) in allocators() {
        for seed in 0..3 {
            map_life(&allocator, seed, 6000);
        }
        assert_empty(&device, allocator);
    }
}

#[test]
fn maps_on_stacked_allocators() {
    for (device, allocator) in allocators() {
        let stack =
            TrackingAllocator::new(StatsAllocator::new(LimitedAllocator::new(allocator.clone(), Bytes::gib(1))));
        map_life(&stack, 7, 4000);
        assert!(stack.live().is_empty() && stack.inner().stats().number_allocs > 10);
        drop(stack);
        let mut arena = ArenaAllocator::new(allocator.clone(), Bytes::kib(256));
        map_life(&&arena, 8, 2000);
        arena.reset();
        drop(arena);
        assert_empty(&device, allocator);
    }
}

#[test]
fn a_limit_is_an_error_and_the_map_stays() {
    let (_, allocator) = allocators().swap_remove(0);
    let limited = LimitedAllocator::new(allocator, Bytes::kib(100));
    let mut map: HashMap<u64, u64, RandomState, _> = HashMap::with_hasher_in(RandomState::new(), limited);
    map.extend((0..1000).map(|n| (n, n * n)));
    map.try_reserve(1_000_000).unwrap_err();
    assert!((0..1000).all(|n| map[&n] == n * n));
}

#[test]
fn sets_and_tables_agree_with_std() {
    for (device, allocator) in allocators() {
        let mut dice = Dice(5);
        let mut ours: HashSet<usize, RandomState, _> = HashSet::with_hasher_in(RandomState::new(), allocator.clone());
        let mut theirs = BTreeSet::new();
        let mut table: HashTable<usize, _> = HashTable::new_in(allocator.clone());
        for _ in 0..20_000 {
            let value = dice.roll(9000);
            if dice.roll(3) > 0 {
                assert_eq!(ours.insert(value), theirs.insert(value));
                let hash = value as u64 * 31;
                table.entry(hash, |known| *known == value, |known| *known as u64 * 31).or_insert(value);
            } else {
                assert_eq!(ours.remove(&value), theirs.remove(&value));
                if let Ok(entry) = table.find_entry(value as u64 * 31, |known| *known == value) {
                    entry.remove();
                }
            }
        }
        assert_eq!(ours.iter().copied().collect::<BTreeSet<_>>(), theirs);
        assert_eq!(table.iter().copied().collect::<BTreeSet<_>>(), theirs);
        drop((ours, table));
        assert_empty(&device, allocator);
    }
}

#[test]
fn maps_on_threads() {
    for (device, allocator) in allocators() {
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let allocator = allocator.clone();
                scope.spawn(move || map_life(&allocator, seed, 2000));
            }
        });
        assert_empty(&device, allocator);
    }
}
