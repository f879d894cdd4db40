//! Buffers, a set of buffers and the pool, over a simulated driver that fails on purpose, held against a model.
//!
//! A [`Case`] is what the fuzzer makes: a card with the faults of some runtime, and steps that each may have driver
//! calls fail under them. [`run`] goes through it and panics at the first broken promise. After each step:
//!
//! * no rule of the driver was broken, and nothing was unmapped under pending work;
//! * an operation that failed has changed nothing, but for what its documentation names; one that no fault struck fails
//!   only for want of something;
//! * addresses have not moved, lengths and capacities fit what is mapped, the chunks lie side by side;
//! * every byte that was written is still there, and cleared ones are zero;
//! * hooks were told of what is mapped, and of nothing else;
//! * what is mapped ahead is as much as was asked for where nothing stood in the way, and nothing after a shrink; errors
//!   of the background thread, which works under the same plan, are said once by the growth that comes next;
//! * the accounts say what the driver says: bytes, handles, addresses, open files, map entries.
//!
//! The background is waited for before anything is looked at. Where a card `races` that is only every fourth step, so that
//! it works beside the operations in between, and what is compared then is what holds whatever it does. That is for long runs
//! by hand (`FUZZ_RACES=1`), since such a case may end otherwise the next time.
//!
//! And when everything is dropped and the pool trimmed, the device is as it was, or the accounts say what it kept.

mod buffer;
mod card;
mod case;
mod loan;
mod model;
mod pool;
mod set;
#[cfg(test)]
mod tests;
mod told;
mod world;

use std::sync::OnceLock;

use arbitrary::{Arbitrary, Unstructured};

pub use case::Case;

/// Runs one case.
///
/// # Panics
/// When the crate breaks a promise, saying which, at which step.
pub fn run(case: &Case) {
    let Some(mut world) = world::World::open(&case.card) else { return };
    for (number, step) in case.steps.iter().take(case::MOST_STEPS).enumerate() {
        world.step(number, step);
    }
    world.end(&case.ending);
}

/// Runs the case that these bytes make, if they make one: what the fuzzer does with an input.
///
/// # Panics
/// As [`run`].
pub fn run_bytes(bytes: &[u8]) {
    static RACES: OnceLock<bool> = OnceLock::new();
    if let Ok(mut case) = Case::arbitrary_take_rest(Unstructured::new(bytes)) {
        // How a race ends is not the input's to say.
        case.card.races &= *RACES.get_or_init(|| std::env::var_os("FUZZ_RACES").is_some());
        run(&case);
    }
}

/// Prints the case that these bytes make, a line per step.
pub fn show(bytes: &[u8]) {
    match Case::arbitrary_take_rest(Unstructured::new(bytes)) {
        Err(error) => println!("no case: {error}"),
        Ok(Case { card, steps, ending }) => {
            println!("{card:?}");
            steps.iter().enumerate().for_each(|(number, step)| println!("{number}: {step:?}"));
            println!("{ending:?}");
        }
    }
}
