//! Cases that once broke a promise, spelled out.

use crate::card::Card;
use crate::case::{BufferOp, Case, Ending, Fault, How, Kind, Of, Op, Place, Step, When, Which};

fn buffer(op: BufferOp) -> Step {
    Step { fault: None, op: Op::Buffer(Which::A, op) }
}

fn run(steps: Vec<Step>) {
    crate::run(&Case { card: Card::sound(), steps, ending: Ending { fault: None, order: 0, close: false } });
}

/// When the last chunk could be swapped neither for its copy nor back, the chunks above it were mapped again in its
/// place, and the buffer went on with their bytes at the wrong address.
#[test]
fn an_exact_shrink_that_cannot_be_undone_keeps_what_is_below() {
    let append = || buffer(BufferOp::Append { elements: 255, seed: 7 });
    let shrink = BufferOp::ShrinkExact(Place(128, 0), How::Device);
    let second_and_third_map = Fault { when: When::Two(1, 2), of: Of::One(0), kind: Kind::Usual };
    run(vec![
        append(),
        append(),
        append(),
        append(),
        Step { fault: Some(second_and_third_map), op: Op::Buffer(Which::A, shrink) },
    ]);
}

/// A growth that fails gives chunks from the pool back to the pool, and not to the driver.
#[test]
fn a_growth_that_fails_leaves_the_pool_as_it_was() {
    let set_access = Fault { when: When::Nth(0), of: Of::One(2), kind: Kind::Usual };
    run(vec![
        buffer(BufferOp::Append { elements: 255, seed: 7 }),
        buffer(BufferOp::ShrinkTo(Place(0, 0), How::Device)),
        Step { fault: Some(set_access), op: Op::Buffer(Which::A, BufferOp::GrowTo(Place(24, 0))) },
    ]);
}
