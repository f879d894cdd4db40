//! Chunks that A and B lend each other.

use bytemuck::Pod;
use growspan::{Error, Loan};

use crate::buffer::{Slot, quiesce};
use crate::case::{How, LoanOp, Place, Which};
use crate::world::{Done, Effect, Env};

/// The loan there is.
#[derive(Default)]
pub(crate) struct LoanSlot(Option<Lent>);

struct Lent {
    loan: Loan,
    lender: Which,
    /// Where it begins at the borrower, in bytes.
    at: u64,
    /// One of the buffers is another now.
    stale: bool,
}

impl LoanSlot {
    /// A buffer was closed.
    pub(crate) fn spoil(&mut self) {
        if let Some(lent) = &mut self.0 {
            lent.stale = true;
        }
    }

    pub(crate) fn apply(&mut self, env: &Env, a: &mut Slot<u32>, b: &mut Slot<[u8; 3]>, op: &LoanOp) -> Done {
        match *op {
            LoanOp::Lend { lender: Which::A, to, how } => self.lend(env, a, b, to, (Which::A, how)),
            LoanOp::Lend { lender: Which::B, to, how } => self.lend(env, b, a, to, (Which::B, how)),
            LoanOp::GiveBack { how, swapped } => match &mut self.0 {
                None => Done::ok(),
                Some(lent) if (lent.lender == Which::A) != swapped => lent.give_back(env, b, a, how, swapped),
                Some(lent) => lent.give_back(env, a, b, how, swapped),
            },
        }
    }

    fn lend<L: Pod + Send, B: Pod + Send>(
        &mut self,
        env: &Env,
        lender: &mut Slot<L>,
        borrower: &mut Slot<B>,
        to: Place,
        (which, how): (Which, How),
    ) -> Done {
        let (Some(from), Some(taker)) = (&mut lender.buffer, &mut borrower.buffer) else { return Done::ok() };
        let (was, borrowed) = (Both::of(from, taker), taker.len());
        let (len, to) = (from.len(), to.within(from.len()));
        let result = quiesce(env, how).and_then(|quiesce| from.lend(to, quiesce, taker));
        let is = Both::of(from, taker);
        let done = match result {
            Ok(loan) => {
                let (bytes, got) = (loan.bytes().get(), is.borrower - was.borrower);
                // What was mapped ahead in the same chunk counts from now on, where chunks have any size.
                assert!(got == bytes || env.card.is_exact() && got > bytes, "{loan:?}: {was:?}, {is:?}");
                assert!(
                    bytes == 0 || was.lender - is.lender <= bytes,
                    "all it gave up was lent: {loan:?}: {was:?}, {is:?}"
                );
                assert_eq!(bytes == 0, loan.chunks() == 0, "{loan:?}");
                let at = is.borrower - bytes;
                self.0 = Some(Lent { loan, lender: which, at, stale: false });
                Done::of(Ok(()), to <= len)
            }
            Err(error) => Done::of(Err::<(), _>(error), to <= len),
        };
        let done = done.which(Effect::Shrinks).lends(env, was);
        lender.follow(len, to, &done, &"a loan");
        borrower.follow(borrowed, borrowed, &done, &"a loan");
        done
    }
}

impl Lent {
    fn give_back<B: Pod + Send, L: Pod + Send>(
        &mut self,
        env: &Env,
        borrower: &mut Slot<B>,
        lender: &mut Slot<L>,
        how: How,
        swapped: bool,
    ) -> Done {
        let (Some(from), Some(taker)) = (&mut borrower.buffer, &mut lender.buffer) else { return Done::ok() };
        let (was, lent) = (Both::of(taker, from), taker.len());
        let (len, asked) = (from.len(), self.loan.bytes().get());
        let below = usize::try_from(self.at).unwrap() / size_of::<B>();
        let result = quiesce(env, how).and_then(|quiesce| self.loan.give_back(from, taker, quiesce));
        let is = Both::of(taker, from);
        let done = match result {
            Ok(returned) => {
                assert_eq!(returned.returned.get() + returned.missing.get(), asked, "{returned:?}");
                let got = is.lender - was.lender;
                let all = got == returned.returned.get() || env.card.is_exact() && got > returned.returned.get();
                assert!(all, "{returned:?}: {was:?}, {is:?}");
                assert!(self.loan.bytes().is_zero() && self.loan.chunks() == 0);
                let more = was.borrower.saturating_sub(is.borrower);
                assert!(returned.returned.get() <= more, "{returned:?}: {was:?}, {is:?}");
                Done::of(Ok(()), asked == 0 || !self.stale && !swapped)
            }
            Err(error) => {
                assert_eq!(self.loan.bytes().get(), asked, "it can be given back later");
                Done::of(Err::<(), _>(error), !self.stale && !swapped)
            }
        };
        let done = done.which(Effect::Shrinks).lends(env, was);
        borrower.follow(len, if asked == 0 { len } else { len.min(below) }, &done, &"a loan given back");
        lender.follow(lent, lent, &done, &"a loan given back");
        done
    }
}

/// What the two have, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Both {
    lender: u64,
    borrower: u64,
    room: u64,
}

impl Both {
    fn of<L, B>(lender: &growspan::GrowableBuffer<L>, borrower: &growspan::GrowableBuffer<B>) -> Self {
        let room = |reserved: u64, committed| reserved.saturating_sub(committed);
        let (lender, borrower) = (lender.stats(), borrower.stats());
        let rooms = [&lender, &borrower].map(|it| room(it.bytes_reserved.get(), it.bytes_committed.get()));
        let (lender, borrower) = (lender.bytes_committed.get(), borrower.bytes_committed.get());
        Self { lender, borrower, room: rooms[0].min(rooms[1]) }
    }
}

impl Done {
    /// Whether it may be that the chunks do not fit.
    fn lends(mut self, env: &Env, was: Both) -> Self {
        // Where chunks have any size, the last one may be larger than what was committed of it.
        let short = was.room < was.lender.max(was.borrower) || env.card.is_exact();
        let fair = short || env.card.is_uniform() || env.is_contiguous();
        if fair && matches!(self.error, Some(Error::NotLent { .. })) {
            self.valid = false;
        }
        self
    }
}
