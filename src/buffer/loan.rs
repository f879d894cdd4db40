//! Chunks from one buffer to another, and fewer of them.

use core::fmt;

use super::GrowableBuffer;
use crate::backing::{Coalesced, Handed, Mode, Party, Segmented};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::quiesce::Quiesce;

/// Memory that one buffer has of another, by [`GrowableBuffer::lend`].
///
/// It is a note of what went where, and needs not be kept: dropped, or with one of the buffers gone, it leaves everything
/// as it is, and the borrower has the chunks for good.
///
/// ```
/// use growspan::{Bytes, Device, GrowableBuffer, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut experts = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).build()?;
/// let mut cache = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).build()?;
/// experts.grow_to(16 << 20)?;
/// let created = device.snapshot().chunks;
///
/// let mut loan = experts.lend(6 << 20, Quiesce::Device, &mut cache)?;
/// assert_eq!(loan.bytes(), Bytes::mib(10));
/// assert_eq!((experts.len(), cache.capacity()), (6 << 20, 10 << 20));
/// cache.grow_to(10 << 20)?; // costs nothing
///
/// let returned = loan.give_back(&mut cache, &mut experts, Quiesce::Device)?;
/// assert_eq!(returned.returned, Bytes::mib(10));
/// assert_eq!((experts.capacity(), cache.capacity()), (16 << 20, 0));
/// assert_eq!(device.snapshot().chunks, created);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Loan {
    lender: Party,
    borrower: Party,
    handed: Handed,
}

/// What a [`Loan::give_back`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Returned {
    /// What the lender has again.
    pub returned: Bytes,
    /// What the borrower had given up before, or has in chunks that do not fit what was lent.
    pub missing: Bytes,
    /// What the borrower gave up besides, to the pool: what it had mapped behind the borrowed chunks.
    pub released: Bytes,
}

impl fmt::Display for Returned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned", self.returned)?;
        if !self.missing.is_zero() {
            write!(f, ", {} missing", self.missing)?;
        }
        if !self.released.is_zero() {
            write!(f, ", {} given up besides", self.released)?;
        }
        Ok(())
    }
}

impl Loan {
    /// How much the borrower got; zero once it was given back.
    #[must_use]
    pub const fn bytes(&self) -> Bytes {
        Bytes::new(self.handed.bytes)
    }

    /// In how many chunks.
    #[must_use]
    pub const fn chunks(&self) -> usize {
        self.handed.chunks
    }

    /// Gives the chunks back: the borrower shrinks to what it had memory for before, and the chunks are mapped behind what
    /// the lender has now, at the addresses where they were if it has not grown meanwhile. The lender's length stays; growing
    /// to what it was costs nothing. `quiesce` is of the borrower's work, and is waited for as in
    /// [`lend`](GrowableBuffer::lend).
    ///
    /// What the borrower has given up meanwhile is missing, and what it mapped behind the chunks goes to the pool. Giving
    /// back once more does nothing.
    ///
    /// # Errors
    /// As for [`lend`](GrowableBuffer::lend), [`Error::NotLent`] also if these are not the two buffers of the loan. It can
    /// then be given back later.
    pub fn give_back<B, L>(
        &mut self,
        borrower: &mut GrowableBuffer<B>,
        lender: &mut GrowableBuffer<L>,
        quiesce: Quiesce<'_>,
    ) -> Result<Returned> {
        let asked = self.bytes();
        if asked.is_zero() {
            return Ok(Returned::default());
        }
        let of_these = borrower.segmented(asked).is_ok_and(|it| self.borrower.is(it))
            && lender.segmented(asked).is_ok_and(|it| self.lender.is(it));
        if !of_these {
            return Err(Error::NotLent { asked, why: "the loan was made between two other buffers".to_owned() });
        }
        let at = self.handed.at;
        let below = usize::try_from(at / size_of::<B>() as u64).unwrap_or(usize::MAX);
        let handed = borrower.hand_over(borrower.len.min(below), at, asked.get(), &quiesce, lender)?;
        self.handed.bytes = 0;
        self.handed.chunks = 0;
        Ok(Returned {
            returned: Bytes::new(handed.bytes),
            missing: Bytes::new(asked.get() - handed.bytes),
            released: Bytes::new(handed.released),
        })
    }
}

impl<T> GrowableBuffer<T> {
    /// Shrinks to `len` elements, as [`shrink_to`](Self::shrink_to) does, and maps the chunks it gives up behind those of
    /// `borrower`, a buffer of the same device. Nothing is made or released, and no pool is asked, full or not. The
    /// borrower's [`capacity`](Self::capacity) grows; its length stays, and growing into the chunks costs nothing. They hold
    /// what they held.
    ///
    /// `quiesce` is waited for first; [`Quiesce::Deferred`] waits here. What waits for an event in either buffer goes
    /// before.
    ///
    /// Borrowed chunks keep their sizes, which may be larger than the borrower's own would be in their place: it gives up
    /// whole chunks only, unless it [shrinks exactly](Self::shrink_exact). A buffer of uniform chunks, by choice or because
    /// the device wants it, borrows chunks of its own size only.
    ///
    /// # Errors
    /// As for [`shrink_to`](Self::shrink_to); [`Error::OtherDevice`]; [`Error::NotLent`] with the reason: one of the two is
    /// in contiguous mode, chunk sizes or properties differ, the borrower has no addresses for so much, a chunk was
    /// exported. Both buffers are then as they were, unless the error is [`Error::Rollback`].
    pub fn lend<B>(&mut self, len: usize, quiesce: Quiesce<'_>, borrower: &mut GrowableBuffer<B>) -> Result<Loan> {
        let bytes = self.check_shrink(len, &quiesce)?;
        if !self.device.is(&borrower.device) {
            let (theirs, ours) = (borrower.device.info().id(), self.device.info().id());
            return Err(Error::OtherDevice { what: "a borrower", theirs, ours });
        }
        let asked = Bytes::new(self.backing.would_release(bytes));
        let (lender, theirs) = (Party::of(self.segmented(asked)?), Party::of(borrower.segmented(asked)?));
        let handed = self.hand_over(len, bytes, u64::MAX, &quiesce, borrower)?;
        Ok(Loan { lender, borrower: theirs, handed })
    }

    /// Hands at most `most` of the bytes above `bytes` over, and shrinks to `len` elements.
    fn hand_over<B>(
        &mut self,
        len: usize,
        bytes: u64,
        most: u64,
        quiesce: &Quiesce<'_>,
        taker: &mut GrowableBuffer<B>,
    ) -> Result<Handed> {
        if self.device.card().gate().is_forked() {
            return Err(Error::Forked);
        }
        quiesce.check(self.device.card())?;
        let releases = self.backing.would_release(bytes) > 0;
        // What is ahead goes too, and nobody has to be waited for.
        if releases || self.backing.ahead() > 0 {
            self.device.card().check_capture(None)?;
        }
        if releases {
            quiesce.wait(self.device.card())?;
        }
        let to = taker.segmented(Bytes::ZERO)?;
        // SAFETY: if chunks lie wholly above, `quiesce` made sure of the device; and `&mut self` that the host holds no
        // reference.
        let handed = self.segmented(Bytes::ZERO).and_then(|from| unsafe { from.hand_over(bytes, most, to) });
        if let Ok(handed) = &handed {
            self.shrinks += u64::from(handed.bytes + handed.released > 0);
            taker.grows += u64::from(handed.bytes > 0);
            self.len = len;
        }
        self.refresh();
        taker.refresh();
        handed
    }

    /// The chunks under it.
    fn segmented(&mut self, asked: Bytes) -> Result<&mut Segmented> {
        let why = || "a buffer in contiguous mode has no chunks to lend or to borrow".to_owned();
        self.backing.as_segmented().ok_or_else(|| Error::NotLent { asked, why: why() })
    }

    /// Puts larger chunks in the place of runs of small ones, as the ladder would have them there: fewer open files, where
    /// chunks keep them, and fewer driver calls when the buffer shrinks. For buffers that were built with
    /// [`Sizing::Uniform`](crate::Sizing::Uniform), or cut and lent much. Nothing does this by itself.
    ///
    /// Each run is copied on the device into one chunk that takes its place at the same address; its small chunks go back
    /// to the driver. Where memory for a copy is not there, what fits is done and the result says so; a device that takes
    /// one chunk size per span is left as it is. `quiesce` is waited for first ([`Quiesce::Deferred`] waits here) and speaks
    /// for all of the buffer. Chunks that were exported stay.
    ///
    /// ```
    /// use growspan::{Bytes, Device, GrowableBuffer, Quiesce, Sizing};
    ///
    /// # fn main() -> growspan::Result<()> {
    /// let device = Device::host()?;
    /// let sizing = Sizing::Uniform(Bytes::mib(2));
    /// let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).sizing(sizing).build()?;
    /// buffer.grow_to(64 << 20)?;
    /// let coalesced = buffer.coalesce(Quiesce::Device)?;
    /// assert_eq!(coalesced.to_string(), "32 chunks became 24, 32 MiB copied");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::OtherDevice`], [`Error::EventNotRecorded`] for what cannot be waited for; [`Error::Capturing`]; what the
    /// driver says. The run that failed is as it was, unless the error is [`Error::Rollback`], and those before it are
    /// done: what the buffer holds is the same either way.
    pub fn coalesce(&mut self, quiesce: Quiesce<'_>) -> Result<Coalesced> {
        quiesce.check(self.device.card())?;
        if self.backing.mode() != Mode::Virtual {
            let why = "contiguous mode: there is one block".to_owned();
            return Ok(Coalesced { why: Some(why), ..Coalesced::default() });
        }
        self.device.card().check_capture(None)?;
        quiesce.wait(self.device.card())?;
        // SAFETY: `quiesce` made sure of the device, and `&mut self` that the host holds no reference.
        let result = self.segmented(Bytes::ZERO).and_then(|chunks| unsafe { chunks.coalesce() });
        self.refresh();
        result
    }
}
