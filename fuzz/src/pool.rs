//! What is done with the device's pool.

use core::time::Duration;

use growspan::{Bytes, Mode, PoolPolicy, Prewarm};

use crate::card::GRANULE;
use crate::case::PoolOp;
use crate::world::{Done, World};

impl World {
    pub(crate) fn pool(&mut self, op: &PoolOp) -> Done {
        let pool = self.env.device.pool();
        let bytes = |granules: u8| Bytes::new(GRANULE * u64::from(granules % 24));
        let verdict = self.env.device.verdict();
        let fits = |asked: Bytes| {
            let fits = !asked.is_zero() && asked.get().is_multiple_of(verdict.granularity().get());
            verdict.mode() == Mode::Virtual && fits && asked <= verdict.quirks().max_chunk
        };
        match *op {
            PoolOp::Take { granules } => {
                // Now and then a byte more than any device maps.
                let asked = Bytes::new(bytes(granules).get() + u64::from(granules >= 240));
                let chunk = self.env.device.chunk(asked);
                assert!(chunk.as_ref().map_or(true, |chunk| chunk.bytes() == asked), "{chunk:?}");
                Done::of(chunk.map(|chunk| self.loose.push(chunk)), fits(asked))
            }
            PoolOp::Put => {
                self.loose.pop().into_iter().for_each(|chunk| pool.put(chunk));
                Done::ok()
            }
            PoolOp::Drop => {
                self.loose.pop();
                Done::ok()
            }
            PoolOp::Trim { granules } => {
                let trimmed = pool.trim(bytes(granules));
                assert!(self.env.card.races || trimmed.kept == pool.kept(), "{trimmed:?}");
                assert!(trimmed.error.is_some() || trimmed.kept <= bytes(granules), "{trimmed:?}");
                Done::ok()
            }
            PoolOp::Keep { granules } => {
                pool.set_keep_limit(bytes(granules));
                assert_eq!(pool.keep_limit(), bytes(granules));
                Done::ok()
            }
            PoolOp::Policy { keep, marks, age } => {
                // The last ones are absurd, and low may lie above high.
                let mark = |granules: u8| if granules > 240 { Bytes::new(u64::MAX) } else { bytes(granules) };
                let mut policy = PoolPolicy::new();
                let limit = keep.map_or(pool.keep_limit(), mark);
                policy = keep.map_or(policy, |keep| policy.keep(mark(keep)));
                policy = marks.map_or(policy, |(low, high)| policy.watermarks(mark(low), mark(high)));
                policy = age.map_or(policy, |now| policy.max_age(if now { Duration::ZERO } else { Duration::MAX }));
                let most = marks.map_or(limit, |(_, high)| mark(high).min(limit));
                let trimmed = pool.set_policy(policy);
                self.ages = age == Some(true);
                assert_eq!(pool.keep_limit(), limit);
                assert!(trimmed.error.is_some() || trimmed.kept <= most, "{trimmed:?} of {most}");
                assert!(trimmed.error.is_some() || !self.ages || trimmed.kept.is_zero(), "{trimmed:?}");
                Done::ok()
            }
            PoolOp::AgeOut => {
                let aged = pool.age_out();
                assert!(aged.error.is_some() || !self.ages || aged.kept.is_zero(), "{aged:?}");
                Done::ok()
            }
            PoolOp::Prewarm { granules, count } => {
                let (size, before) = (bytes(granules), pool.kept().get());
                let (what, asked, valid) = match count {
                    Some(count) => {
                        let what = Prewarm::Chunks { size, count: count.into() };
                        (what, size.get() * u64::from(count), fits(size))
                    }
                    None => (Prewarm::span(size), size.get(), verdict.mode() == Mode::Virtual),
                };
                let result = self.env.device.prewarm(what);
                if let Ok(warm) = &result {
                    let sum = warm.made.get() + warm.found.get() + warm.missing.get();
                    assert!(sum >= asked, "{warm:?} of {asked}");
                    assert_eq!(warm.why.is_some(), !warm.missing.is_zero() || sum > asked && warm.why.is_some());
                    let steady = !self.ages && !self.env.card.races && self.env.control.strikes().is_empty();
                    assert!(!steady || pool.kept().get() == before + warm.made.get(), "{warm:?} beside {before}");
                }
                Done::of(result, valid)
            }
        }
    }
}
