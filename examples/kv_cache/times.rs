//! How long calls took.

use std::time::{Duration, Instant};

/// Values below this have a bucket each; above, there are half as many buckets for every power of two.
const FINE: u64 = 64;

/// The times of many calls in little memory: buckets of nanoseconds, at most 3 % wide.
#[derive(Default)]
pub(crate) struct Times {
    buckets: Vec<u64>,
    calls: u64,
    total: Duration,
    longest: Duration,
}

impl Times {
    /// Makes a call and records how long it took.
    pub(crate) fn record<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = call();
        self.add(started.elapsed());
        result
    }

    pub(crate) fn add(&mut self, took: Duration) {
        let bucket = bucket(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        if bucket >= self.buckets.len() {
            self.buckets.resize(bucket + 1, 0);
        }
        if let Some(count) = self.buckets.get_mut(bucket) {
            *count += 1;
        }
        self.calls += 1;
        self.total += took;
        self.longest = self.longest.max(took);
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    pub(crate) fn total(&self) -> Duration {
        self.total
    }

    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }

    /// The time that so many in a hundred calls stayed within; none without calls.
    pub(crate) fn percentile(&self, percent: u64) -> Option<Duration> {
        let rank = (self.calls * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(Duration::from_nanos(upper_edge(bucket)).min(self.longest))
    }
}

fn bucket(nanos: u64) -> usize {
    let shift = u64::from((nanos | (FINE - 1)).ilog2() - (FINE - 1).ilog2());
    (shift * FINE / 2 + (nanos >> shift)) as usize
}

fn upper_edge(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < FINE {
        return bucket;
    }
    let shift = bucket / (FINE / 2) - 1;
    let first = (bucket - shift * FINE / 2) << shift;
    first + ((1 << shift) - 1)
}
