//! Free and used ranges of addresses: good fit in constant time, by two levels of size classes.
//!
//! The rule is that of TLSF: free ranges are kept in lists by size, sixteen lists to a doubling, and bits say which
//! lists hold any; neighbours that are free become one. All of it is kept apart from the memory it is about.
//!
//! `offset-allocator` goes by the same rule, and was measured beside this (`measured`): 33 to 35 ns an operation there, 30
//! to 44 here; but it takes the first range of a list that is surely large enough, and so refuses when 93 % of the space
//! is filled, where the best of the first few fills 99.8 %. It also knows one space only, no alignment, no growing or
//! shrinking in place, and not which ranges have memory already. Hence our own.

use super::slab::NONE;

/// Lists per doubling.
const STEPS_LOG: u32 = 4;
const STEPS: usize = 1 << STEPS_LOG;
/// Sizes are 32-bit numbers of units.
const LEVELS: usize = 32 - STEPS_LOG as usize + 1;
/// How many free ranges of a list are looked at for the best one. More than one list is only asked where the first few of
/// one do not do: a bound on the work, at the price of a range that is overlooked now and then.
const LOOK: usize = 8;

/// How many lists are asked for a range that costs nothing.
const LISTS: u32 = 8;

/// Two kinds of regions, so that what is small does not keep memory under what is large: a chunk in which one small block
/// lies stays, whatever lay beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Area {
    Fine,
    Coarse,
}

/// A range of one region, in units.
#[derive(Clone, Debug)]
pub(super) struct Range {
    area: Area,
    pub(super) region: u32,
    pub(super) at: u32,
    pub(super) size: u32,
    pub(super) used: bool,
    /// The ranges beside it.
    before: u32,
    after: u32,
    /// Its neighbours in the list of free ones, or `next` of a spare entry.
    prev: u32,
    next: u32,
}

/// Where a range would be, in units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) region: u32,
    pub(super) at: u32,
    pub(super) size: u32,
}

/// All ranges of one heap.
#[derive(Debug)]
pub(super) struct Ranges {
    ranges: Vec<Range>,
    spare: u32,
    /// The free ones, for each area.
    lists: [Lists; 2],
}

/// What a place would cost: slots that nothing touches yet, then those of them that have no memory.
pub(super) type Cost = (u32, u32);

/// Free ranges by size, and bits for the lists that hold any.
#[derive(Debug)]
struct Lists {
    level_bits: u32,
    step_bits: [u16; LEVELS],
    heads: [u32; LEVELS * STEPS],
}

/// The list that a free range of this size is in.
fn list_of(size: u32) -> (usize, usize) {
    if size < STEPS as u32 {
        return (0, size as usize);
    }
    let log = size.ilog2();
    let step = (size >> (log - STEPS_LOG)) as usize & (STEPS - 1);
    ((log - STEPS_LOG) as usize + 1, step)
}

impl Lists {
    /// The next list of larger ranges that has any.
    fn next(&self, level: usize, step: usize) -> Option<(usize, usize)> {
        // Lists above, on this level and then on the next that has any.
        let above = self.step_bits[level] & u16::MAX.checked_shl(step as u32 + 1).unwrap_or(0);
        if above != 0 {
            return Some((level, above.trailing_zeros() as usize));
        }
        let levels = self.level_bits & u32::MAX.checked_shl(level as u32 + 1).unwrap_or(0);
        let level = (levels != 0).then(|| levels.trailing_zeros() as usize)?;
        Some((level, self.step_bits[level].trailing_zeros() as usize))
    }
}

impl Ranges {
    pub(super) fn new() -> Self {
        let lists = || Lists { level_bits: 0, step_bits: [0; LEVELS], heads: [NONE; LEVELS * STEPS] };
        Self { ranges: Vec::new(), spare: NONE, lists: [lists(), lists()] }
    }

    pub(super) fn get(&self, number: u32) -> &Range {
        &self.ranges[number as usize]
    }

    fn get_mut(&mut self, number: u32) -> &mut Range {
        &mut self.ranges[number as usize]
    }

    /// A region of `size` units, all free.
    pub(super) fn add_region(&mut self, area: Area, region: u32, size: u32) -> u32 {
        let (before, after, prev, next) = (NONE, NONE, NONE, NONE);
        let number = self.entry(Range { area, region, at: 0, size, used: false, before, after, prev, next });
        self.link(number);
        number
    }

    /// Forgets a region, of which this one free range is all.
    pub(super) fn remove_region(&mut self, number: u32) {
        self.unlink(number);
        self.spare(number);
    }

    /// Whether the range is free and all of its region.
    pub(super) fn is_whole_region(&self, number: u32) -> bool {
        let range = self.get(number);
        !range.used && range.before == NONE && range.after == NONE
    }

    /// The free ranges that are all of their regions.
    pub(super) fn whole_regions(&self) -> Vec<u32> {
        let listed = |mut number: u32| {
            core::iter::from_fn(move || {
                let this = number;
                let range = self.ranges.get(this as usize)?;
                number = range.next;
                Some(this)
            })
        };
        let heads = self.lists.iter().flat_map(|lists| &lists.heads);
        heads.flat_map(|head| listed(*head)).filter(|number| self.is_whole_region(*number)).collect()
    }

    /// A used range of an area, of `size` units (not zero) at a multiple of `align` units (a power of two); none if no free
    /// one holds it. Of the few that are looked at, and their two ends, the place with the least `cost` is taken; of equal
    /// ones that in the smallest range, and the lowest of those.
    pub(super) fn take(&mut self, area: Area, size: u32, align: u32, cost: impl Fn(Place) -> Cost) -> Option<u32> {
        let (number, at) = self.find(area, size, align, cost)?;
        self.unlink(number);
        let gap = at - self.get(number).at;
        let number = if gap > 0 {
            let rest = self.split(number, gap);
            self.link(number);
            rest
        } else {
            number
        };
        self.cut(number, size);
        self.get_mut(number).used = true;
        Some(number)
    }

    /// A free range in which `size` units fit, and where: among the first few of the list of that size, and of the next
    /// ones that have any, in which all are large enough but for the alignment.
    fn find(&self, area: Area, size: u32, align: u32, cost: impl Fn(Place) -> Cost) -> Option<(u32, u32)> {
        let all = &self.lists[area as usize];
        let mut best = None;
        let mut list = Some(list_of(size));
        let mut lists = 0;
        while let Some((level, step)) = list {
            let mut number = all.heads[level * STEPS + step];
            for _ in 0..LOOK {
                if number == NONE {
                    break;
                }
                let range = self.get(number);
                let first = range.at.next_multiple_of(align);
                if range.size > first - range.at && range.size - (first - range.at) >= size {
                    let last = (range.at + range.size - size) & !(align - 1);
                    // Where they are one place it is looked at twice, for want of a reason to ask.
                    for at in [first, last] {
                        let cost = cost(Place { region: range.region, at, size });
                        let key = (cost, range.size, range.region, at);
                        if best.is_none_or(|(least, _)| key < least) {
                            best = Some((key, number));
                        }
                    }
                }
                number = range.next;
            }
            lists += 1;
            // The lists above are asked as long as nothing was found, and a few more for one that costs nothing.
            let enough = best.is_some_and(|((cost, ..), _)| cost.0 == 0 || lists >= LISTS);
            list = all.next(level, step).filter(|_| !enough);
        }
        best.map(|((.., at), number)| (number, at))
    }

    /// Gives back what is behind the first `size` units of a range that is in no list.
    fn cut(&mut self, number: u32, size: u32) {
        if self.get(number).size > size {
            let rest = self.split(number, size);
            self.link(rest);
        }
    }

    /// Frees a used range and joins it with free neighbours. Returns the free range it became.
    pub(super) fn put(&mut self, number: u32) -> u32 {
        self.get_mut(number).used = false;
        let mut number = number;
        let before = self.get(number).before;
        if before != NONE && !self.get(before).used {
            self.unlink(before);
            self.join(before);
            number = before;
        }
        let after = self.get(number).after;
        if after != NONE && !self.get(after).used {
            self.unlink(after);
            self.join(number);
        }
        self.link(number);
        number
    }

    /// Makes a used range larger where it is, up to `size` units. False if what follows is not free, or too small.
    pub(super) fn grow(&mut self, number: u32, size: u32) -> bool {
        let Range { size: old, after, .. } = *self.get(number);
        if after == NONE || self.get(after).used || self.get(after).size < size - old {
            return false;
        }
        self.unlink(after);
        self.join(number);
        self.cut(number, size);
        true
    }

    /// Makes a used range smaller.
    pub(super) fn shrink(&mut self, number: u32, size: u32) {
        if self.get(number).size > size {
            let rest = self.split(number, size);
            self.put(rest);
        }
    }

    /// Puts a free range into the list of its size.
    fn link(&mut self, number: u32) {
        let Range { area, size, .. } = *self.get(number);
        let (level, step) = list_of(size);
        let lists = &mut self.lists[area as usize];
        let head = core::mem::replace(&mut lists.heads[level * STEPS + step], number);
        lists.step_bits[level] |= 1 << step;
        lists.level_bits |= 1 << level;
        let range = self.get_mut(number);
        range.prev = NONE;
        range.next = head;
        if head != NONE {
            self.get_mut(head).prev = number;
        }
    }

    /// Takes a free range out of the list of its size, which is still what it was when it was put there.
    fn unlink(&mut self, number: u32) {
        let Range { area, size, prev, next, .. } = *self.get(number);
        let (level, step) = list_of(size);
        if next != NONE {
            self.get_mut(next).prev = prev;
        }
        if prev != NONE {
            self.get_mut(prev).next = next;
            return;
        }
        let lists = &mut self.lists[area as usize];
        lists.heads[level * STEPS + step] = next;
        if next == NONE {
            lists.step_bits[level] &= !(1 << step);
            if lists.step_bits[level] == 0 {
                lists.level_bits &= !(1 << level);
            }
        }
    }

    /// Cuts a range that is in no list behind its first `size` units. The rest is in no list either.
    fn split(&mut self, number: u32, size: u32) -> u32 {
        let Range { area, region, at, size: all, after, .. } = *self.get(number);
        let rest = self.entry(Range {
            area,
            region,
            at: at + size,
            size: all - size,
            used: false,
            before: number,
            after,
            prev: NONE,
            next: NONE,
        });
        if after != NONE {
            self.get_mut(after).before = rest;
        }
        let range = self.get_mut(number);
        range.after = rest;
        range.size = size;
        rest
    }

    /// Joins a range with the one after it, which is in no list.
    fn join(&mut self, number: u32) {
        let after = self.get(number).after;
        let Range { size, after: beyond, .. } = *self.get(after);
        if beyond != NONE {
            self.get_mut(beyond).before = number;
        }
        let range = self.get_mut(number);
        range.size += size;
        range.after = beyond;
        self.spare(after);
    }

    fn entry(&mut self, range: Range) -> u32 {
        if self.spare == NONE {
            self.ranges.push(range);
            return u32::try_from(self.ranges.len() - 1).unwrap_or(NONE);
        }
        let number = self.spare;
        self.spare = self.get(number).next;
        *self.get_mut(number) = range;
        number
    }

    fn spare(&mut self, number: u32) {
        let spare = self.spare;
        self.get_mut(number).next = spare;
        self.spare = number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: u32 = 1 << 14;
    const AREAS: [Area; 2] = [Area::Fine, Area::Coarse];

    /// A place that costs nothing, like all others.
    fn free(_: Place) -> Cost {
        (0, 0)
    }

    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, below: u32) -> u32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) as u32) % below.max(1)
        }
    }

    /// Everything that must hold of the ranges of these regions.
    fn check(ranges: &Ranges, firsts: &[u32]) {
        let mut free = Vec::new();
        for &first in firsts {
            let mut number = first;
            let (mut at, mut before, mut last_free) = (0, NONE, false);
            while number != NONE {
                let range = ranges.get(number);
                assert_eq!((range.at, range.before), (at, before));
                assert!(range.size > 0);
                assert!(range.used || !last_free, "free neighbours were not joined");
                if !range.used {
                    free.push(number);
                }
                last_free = !range.used;
                at += range.size;
                before = number;
                number = range.after;
            }
            assert_eq!(at, UNITS);
        }
        let mut listed = Vec::new();
        for area in AREAS {
            let lists = &ranges.lists[area as usize];
            for level in 0..LEVELS {
                for step in 0..STEPS {
                    let mut number = lists.heads[level * STEPS + step];
                    assert_eq!(lists.step_bits[level] & (1 << step) != 0, number != NONE);
                    let mut prev = NONE;
                    while number != NONE {
                        let range = ranges.get(number);
                        assert_eq!((range.area, list_of(range.size), range.prev), (area, (level, step), prev));
                        listed.push(number);
                        prev = number;
                        number = range.next;
                    }
                }
                assert_eq!(lists.level_bits & (1 << level) != 0, lists.step_bits[level] != 0);
            }
        }
        free.sort_unstable();
        listed.sort_unstable();
        assert_eq!(free, listed, "all free ranges are in lists, and nothing else is");
    }

    #[test]
    fn random_lives_against_a_map_of_units() {
        for seed in 0..8 {
            let mut dice = Dice(seed);
            let mut ranges = Ranges::new();
            // The first range of a region stays the first: joins and splits keep the left entry.
            let firsts = [ranges.add_region(Area::Fine, 0, UNITS), ranges.add_region(Area::Coarse, 1, UNITS)];
            let mut owner = [vec![NONE; UNITS as usize], vec![NONE; UNITS as usize]];
            let mut live: Vec<u32> = Vec::new();
            for step in 0..4000 {
                match dice.roll(5) {
                    0..=1 => {
                        let bound = [4, 60, 900][dice.roll(3) as usize];
                        let size = 1 + dice.roll(bound);
                        let align = 1 << dice.roll(7);
                        let area = AREAS[dice.roll(2) as usize];
                        // Whichever end is dearer: both have to be right.
                        let odd = dice.roll(2);
                        let Some(number) = ranges.take(area, size, align, |place| ((place.at % 2) ^ odd, 0)) else {
                            continue;
                        };
                        let range = ranges.get(number).clone();
                        assert!(range.used && range.size == size && range.at.is_multiple_of(align));
                        assert_eq!(range.region, area as u32);
                        let units = &mut owner[range.region as usize][range.at as usize..][..size as usize];
                        assert!(units.iter().all(|unit| *unit == NONE), "a range in use was handed out");
                        units.fill(number);
                        live.push(number);
                    }
                    2 if !live.is_empty() => {
                        let number = live.swap_remove(dice.roll(live.len() as u32) as usize);
                        let range = ranges.get(number).clone();
                        owner[range.region as usize][range.at as usize..][..range.size as usize].fill(NONE);
                        ranges.put(number);
                    }
                    3 if !live.is_empty() => {
                        let number = live[dice.roll(live.len() as u32) as usize];
                        let old = ranges.get(number).clone();
                        let size = old.size + 1 + dice.roll(50);
                        let room = owner[old.region as usize][(old.at + old.size) as usize..].iter();
                        let room = room.take_while(|unit| **unit == NONE).count() as u32;
                        assert_eq!(ranges.grow(number, size), room >= size - old.size);
                        let new = ranges.get(number).clone();
                        owner[new.region as usize][new.at as usize..][..new.size as usize].fill(number);
                    }
                    4 if !live.is_empty() => {
                        let number = live[dice.roll(live.len() as u32) as usize];
                        let old = ranges.get(number).clone();
                        let size = 1 + dice.roll(old.size);
                        ranges.shrink(number, size);
                        owner[old.region as usize][(old.at + size) as usize..(old.at + old.size) as usize].fill(NONE);
                    }
                    _ => {}
                }
                if step % 64 == 0 {
                    check(&ranges, &firsts);
                }
            }
            for number in live {
                ranges.put(number);
            }
            check(&ranges, &firsts);
            assert!(firsts.iter().all(|first| ranges.is_whole_region(*first)));
            for first in firsts {
                ranges.remove_region(first);
            }
            for area in AREAS {
                assert_eq!((ranges.lists[area as usize].level_bits, ranges.take(area, 1, 1, free)), (0, None));
            }
        }
    }

    #[test]
    fn a_range_that_fits_exactly_is_found_before_a_larger_one() {
        let mut ranges = Ranges::new();
        ranges.add_region(Area::Fine, 0, UNITS);
        let taken: Vec<u32> =
            [700, 1, 690, 1, 720, 1].map(|size| ranges.take(Area::Fine, size, 1, free).unwrap()).to_vec();
        for hole in [0, 2, 4] {
            ranges.put(taken[hole]);
        }
        let number = ranges.take(Area::Fine, 690, 1, free).unwrap();
        assert_eq!(ranges.get(number).at, 701, "the hole of just that size");
        // No list above is asked although 720 is in a list whose ranges may be too small.
        let number = ranges.take(Area::Fine, 715, 1, free).unwrap();
        assert_eq!(ranges.get(number).at, 1392);
        assert_eq!(ranges.take(Area::Fine, UNITS, 1, free), None);
        assert_eq!(ranges.take(Area::Fine, u32::MAX, 64, free), None);
    }
    #[test]
    fn the_cheaper_end_of_a_hole_is_taken() {
        for cheap in [0, 1000 - 300] {
            let mut ranges = Ranges::new();
            ranges.add_region(Area::Fine, 0, UNITS);
            let hole = ranges.take(Area::Fine, 1000, 1, free).unwrap();
            ranges.take(Area::Fine, UNITS - 1000, 1, free).unwrap();
            ranges.put(hole);
            let number = ranges.take(Area::Fine, 300, 4, |place| (u32::from(place.at != cheap), 0)).unwrap();
            assert_eq!((ranges.get(number).at, ranges.get(number).size), (cheap, 300));
            // The rest is there, in one piece.
            assert!(ranges.take(Area::Fine, 700, 1, free).is_some());
            assert_eq!(ranges.take(Area::Fine, 1, 1, free), None);
        }
    }
}
