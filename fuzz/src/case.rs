//! What the fuzzer makes.

use arbitrary::Arbitrary;
use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, DriverErrorKind};
use growspan::{AheadPolicy, Bytes};

use crate::card::{Card, GRANULE};

/// Longer cases find nothing that two shorter ones do not.
pub(crate) const MOST_STEPS: usize = 48;

/// A card, what is done on it, and how it ends.
#[derive(Arbitrary, Clone, Debug)]
pub struct Case {
    pub(crate) card: Card,
    pub(crate) steps: Vec<Step>,
    pub(crate) ending: Ending,
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Step {
    pub(crate) fault: Option<Fault>,
    pub(crate) op: Op,
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) fault: Option<Fault>,
    /// The order in which things are dropped.
    pub(crate) order: u8,
    /// Buffers are closed and not dropped.
    pub(crate) close: bool,
}

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    A,
    B,
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Op {
    Buffer(Which, BufferOp),
    Set(SetOp),
    Pool(PoolOp),
    /// Other programs take this share of the memory.
    Others(u8),
    /// The device gets done with its work.
    Finish,
    /// The device is lost. Rare: little is left to be tried after it.
    Lose([bool; 4]),
    Loan(LoanOp),
    /// Everything that waits for events that have passed is given up.
    Drain,
    Synchronize,
}

impl Op {
    /// Whether it may leave memory waiting for an event.
    pub(crate) fn defers(&self) -> bool {
        matches!(
            self,
            Self::Buffer(_, BufferOp::ShrinkTo(_, How::Deferred)) | Self::Set(SetOp::ShrinkTo(_, How::Deferred))
        )
    }

    /// Whether it may change the buffer at that place: A, B, and the two of the set.
    pub(crate) fn touches(&self, place: usize) -> bool {
        match self {
            Self::Buffer(Which::A, _) => place == 0,
            Self::Buffer(Which::B, _) => place == 1,
            Self::Set(_) => place >= 2,
            Self::Loan(_) => place < 2,
            Self::Pool(_) | Self::Others(_) | Self::Finish | Self::Lose(_) | Self::Drain | Self::Synchronize => false,
        }
    }
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum BufferOp {
    /// Closes it if there is one, and builds it if there is none.
    Cycle,
    GrowTo(Place),
    GrowBy(Place),
    GrowZeroed(Place),
    Append {
        elements: u8,
        seed: u8,
    },
    Push(u8),
    Truncate(Place),
    ShrinkTo(Place, How),
    ShrinkExact(Place, How),
    CopyIn {
        start: Place,
        elements: u8,
        seed: u8,
    },
    CopyWithin {
        from: Place,
        elements: Place,
        to: Place,
    },
    Fill {
        from: Place,
        to: Place,
        seed: u8,
        plain: bool,
    },
    /// Work that touches part of it is queued, and stays pending.
    Work {
        from: Place,
        to: Place,
    },
    GrowAhead(Reserve),
    FlushAhead,
    Coalesce(How),
}

/// How much is kept mapped ahead.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) enum Reserve {
    Off,
    Granules(u8),
    Percent(u8),
    /// More than there can be.
    Bytes(u64),
}

impl Reserve {
    pub(crate) fn policy(self) -> AheadPolicy {
        match self {
            Self::Off => AheadPolicy::Off,
            Self::Granules(granules) => AheadPolicy::Bytes(Bytes::new(GRANULE * u64::from(granules % 16))),
            // The last ones reach far beyond any length.
            Self::Percent(percent) => AheadPolicy::Percent(u32::from(percent).pow(1 + u32::from(percent > 250) * 3)),
            Self::Bytes(bytes) => AheadPolicy::Bytes(Bytes::new(bytes)),
        }
    }
}

/// Chunks between A and B. There is one loan at a time; another one takes its place.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum LoanOp {
    Lend {
        lender: Which,
        to: Place,
        how: How,
    },
    GiveBack {
        how: How,
        /// To each other, which the loan was not made for.
        swapped: bool,
    },
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum SetOp {
    GrowTo(Place),
    GrowBy(Place),
    Truncate(Place),
    ShrinkTo(Place, How),
    Write { row: Place, seed: u8 },
    GrowAhead(Reserve),
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum PoolOp {
    Take {
        granules: u8,
    },
    Put,
    /// Released by its own drop.
    Drop,
    Trim {
        granules: u8,
    },
    Keep {
        granules: u8,
    },
    Policy {
        keep: Option<u8>,
        marks: Option<(u8, u8)>,
        age: Option<bool>,
    },
    AgeOut,
    Prewarm {
        granules: u8,
        /// None for a span.
        count: Option<u8>,
    },
}

/// How a shrink is quiesced. All are right, since all work is queued on one stream.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) enum How {
    Device,
    Stream,
    Event,
    Deferred,
}

/// An element, as a share of the most there can be, and beyond that.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(crate) struct Place(pub(crate) u8, pub(crate) i8);

impl Place {
    pub(crate) fn within(self, most: usize) -> usize {
        match self.0 {
            255 => usize::MAX - usize::from(self.1.unsigned_abs()),
            share => (most * usize::from(share) / 240).saturating_add_signed(isize::from(self.1)),
        }
    }
}

/// The calls that buffers make.
const CALLS: [Call; 16] = [
    Call::Map,
    Call::Unmap,
    Call::SetAccess,
    Call::Create,
    Call::Release,
    Call::Reserve,
    Call::FreeSpan,
    Call::Allocate,
    Call::Free,
    Call::Memory,
    Call::CopyIn,
    Call::CopyWithin,
    Call::Fill,
    Call::Synchronize,
    Call::SynchronizeStream,
    Call::EventRecord,
];

/// Driver calls that fail.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) when: When,
    pub(crate) of: Of,
    pub(crate) kind: Kind,
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum When {
    Nth(u8),
    After(u8),
    Two(u8, u8),
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Of {
    Any,
    Memory,
    One(u8),
    Two(u8, u8),
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Kind {
    Usual,
    OutOfMemory,
    OutOfFiles,
    OutOfMaps,
    NotSupported,
    Lost([bool; 4]),
}

impl Fault {
    pub(crate) fn plan(&self) -> FaultPlan {
        // Of one call an operation makes few, of all together more.
        let most = if matches!(self.of, Of::Any | Of::Memory) { 24 } else { 6 };
        let number = |n: u8| u64::from(n % most);
        let call = |n: u8| CALLS[usize::from(n) % CALLS.len()];
        let plan = match self.when {
            When::Nth(n) => FaultPlan::nth(1 + number(n)),
            When::After(n) => FaultPlan::after(number(n)),
            When::Two(m, n) => FaultPlan::list([1 + number(m), 1 + number(n)]),
        };
        let plan = match self.of {
            Of::Any => plan,
            Of::Memory => plan.of_memory(),
            Of::One(n) => plan.of(call(n)),
            Of::Two(m, n) => plan.of(call(m)).of(call(n)),
        };
        match self.kind {
            Kind::OutOfMemory => plan.kind(DriverErrorKind::OutOfMemory),
            Kind::OutOfFiles => plan.kind(DriverErrorKind::OutOfFiles),
            Kind::OutOfMaps => plan.kind(DriverErrorKind::OutOfMaps),
            Kind::NotSupported => plan.kind(DriverErrorKind::NotSupported),
            Kind::Lost([true, true, true, true]) => plan.kind(DriverErrorKind::DeviceLost),
            Kind::Usual | Kind::Lost(_) => plan,
        }
    }
}
