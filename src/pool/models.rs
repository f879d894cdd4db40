//! The pool under every interleaving of its users.
//!
//! The driver is the simulated one: each of its calls is one step, as a real driver's are under its own lock.

use loom::thread;

use super::*;
use crate::driver::sim::SimDriver;
use crate::sync::model;

const MIB: u64 = 1 << 20;
const SMALL: u64 = 2 * MIB;
const LARGE: u64 = 4 * MIB;

/// A pool with this policy, with a chunk of each size in it, and the card behind.
fn pool(policy: PoolPolicy) -> (ChunkPool, SimDriver) {
    let sim = SimDriver::builder().total(Bytes::gib(1)).build();
    let card = Card::new(sim.driver());
    let pool = ChunkPool::new(&card, ChunkProps::PLAIN, policy, Vec::new());
    let taken: Vec<_> = [SMALL, LARGE].into_iter().map(|size| take(&pool, size)).collect();
    taken.into_iter().for_each(|chunk| pool.put(chunk));
    (pool, sim)
}

fn take(pool: &ChunkPool, size: u64) -> Chunk {
    match pool.take_one(size) {
        Ok(taken) => taken.chunk,
        Err(error) => panic!("{error}"),
    }
}

/// What must hold when nobody is at work: no chunk is lost or there twice, and the books are right.
fn check(pool: &ChunkPool, sim: &SimDriver, most: u64) {
    let accounts = pool.card().accounts();
    let by_class: u64 = pool.classes().iter().map(|(size, count)| size.get() * *count as u64).sum();
    assert_eq!((pool.kept().get(), accounts.pooled.get(), accounts.in_hand.get()), (by_class, by_class, 0));
    let memory = pool.card().gate().memory().map(|memory| memory.total - memory.free);
    assert_eq!(memory.ok(), Some(by_class), "what the driver gave out");
    assert!(by_class <= most, "{by_class} kept, {most} at most");
    assert!(pool.trim(Bytes::ZERO).error.is_none());
    assert_eq!((pool.kept(), sim.figures().handles), (Bytes::ZERO, 0));
    assert_eq!(sim.violations(), []);
}

#[test]
fn takes_and_puts_beside_a_trim_lose_no_chunk() {
    model(|| {
        let (pool, sim) = pool(PoolPolicy::from(Bytes::mib(6)));
        let others: Vec<_> = [SMALL, LARGE]
            .into_iter()
            .map(|size| {
                let pool = pool.clone();
                thread::spawn(move || {
                    let chunk = take(&pool, size);
                    pool.put(chunk);
                })
            })
            .collect();
        let trimmed = pool.trim(Bytes::mib(2));
        assert!(trimmed.error.is_none());
        for other in others {
            assert!(other.join().is_ok());
        }
        check(&pool, &sim, 6 * MIB);
    });
}

#[test]
fn the_limit_holds_however_puts_come_together() {
    model(|| {
        let (pool, sim) = pool(PoolPolicy::from(Bytes::mib(8)));
        let fresh: Vec<_> = [LARGE, LARGE].into_iter().map(|size| take(&pool, size)).collect();
        // 2 MiB are there and 8 may be: of two more of 4 MiB one stays.
        let others: Vec<_> = fresh
            .into_iter()
            .map(|chunk| {
                let pool = pool.clone();
                thread::spawn(move || pool.put(chunk))
            })
            .collect();
        for other in others {
            assert!(other.join().is_ok());
        }
        assert_eq!(pool.kept(), Bytes::mib(6));
        check(&pool, &sim, 8 * MIB);
    });
}

#[test]
fn ageing_and_watermarks_beside_takes_keep_the_books() {
    model(|| {
        let policy = PoolPolicy::from(Bytes::mib(64)).watermarks(Bytes::mib(4), Bytes::mib(6));
        let (pool, sim) = pool(policy);
        let one = take(&pool, SMALL);
        let other = {
            let pool = pool.clone();
            // Two chunks more: above the high mark, down to the low one.
            thread::spawn(move || {
                let two = take(&pool, SMALL);
                pool.put(two);
                pool.put(one);
            })
        };
        let ager = {
            let pool = pool.clone();
            thread::spawn(move || {
                let trimmed = pool.set_policy(policy.max_age(core::time::Duration::ZERO));
                assert!(trimmed.error.is_none());
            })
        };
        assert!(other.join().is_ok());
        assert!(ager.join().is_ok());
        check(&pool, &sim, 6 * MIB);
    });
}

#[test]
fn a_pool_that_gives_way_beside_a_prewarming_loses_nothing() {
    model(|| {
        let (pool, sim) = pool(PoolPolicy::from(Bytes::mib(10)));
        let warmer = {
            let pool = pool.clone();
            thread::spawn(move || {
                let warm = pool.prewarm([SMALL, SMALL, LARGE].into_iter(), 8 * MIB);
                assert!(warm.is_ok_and(|warm| warm.made.get() + warm.found.get() + warm.missing.get() >= 8 * MIB));
            })
        };
        let given = pool.inner.give_way();
        assert!(given <= 14 * MIB, "what was there and what was made");
        assert!(warmer.join().is_ok());
        check(&pool, &sim, 10 * MIB);
    });
}
