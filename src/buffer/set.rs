//! Several buffers that grow and shrink together.

use core::any::Any;
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::GrowableBuffer;
use crate::backing::{AheadPolicy, Growth, Shrunk};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::quiesce::Quiesce;

/// Several buffers that grow and shrink as one: all of them or none.
///
/// The set counts rows; each member holds a number of elements per row. A KV cache has a row per token and two members
/// per layer, or four where scales lie beside quantised values. Elements may be of different types, and members on
/// different devices.
///
/// ```
/// use growspan::{BufferSet, Device, GrowableBuffer, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut cache = BufferSet::new();
/// let keys = cache.add(GrowableBuffer::<i8>::builder(&device).max_len(8192 * 1024).build()?, 1024)?;
/// let scales = cache.add(GrowableBuffer::<f32>::builder(&device).max_len(8192 * 8).build()?, 8)?;
///
/// cache.grow_to(100)?;
/// assert_eq!(cache.get(keys).map(|keys| keys.len()), Some(100 * 1024));
/// assert_eq!(cache.get(scales).map(|scales| scales.len()), Some(100 * 8));
///
/// assert!(cache.grow_to(8193).is_err(), "both are full");
/// assert_eq!(cache.rows(), 100);
/// cache.shrink_to(0, &Quiesce::Device)?;
/// # Ok(())
/// # }
/// ```
pub struct BufferSet {
    members: Vec<Box<dyn AnyBuffer>>,
    rows: usize,
    /// Different from that of every other set.
    id: u64,
}

/// A buffer's place in a set, and the type of its elements.
pub struct Member<T> {
    set: u64,
    index: usize,
    _elements: PhantomData<fn() -> T>,
}

impl BufferSet {
    /// A set without members and rows.
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { members: Vec::new(), rows: 0, id: NEXT.fetch_add(1, Relaxed) }
    }

    /// Takes a buffer in, with so many elements per row, and grows it to the set's rows.
    ///
    /// # Errors
    /// [`Error::ZeroLength`] for no elements per row; those of [`GrowableBuffer::grow_to`]; [`Error::OutOfStep`] if it
    /// has more elements than that already. The buffer is dropped then.
    pub fn add<T: Send + Sync + 'static>(
        &mut self,
        buffer: GrowableBuffer<T>,
        elements_per_row: usize,
    ) -> Result<Member<T>> {
        if elements_per_row == 0 {
            return Err(Error::ZeroLength { what: "a row" });
        }
        let index = self.members.len();
        let mut member = Box::new(Joined { buffer, per_row: elements_per_row });
        let target = member.target(index, self.rows)?;
        member.buffer.grow_to(target)?;
        self.members.push(member);
        Ok(Member { set: self.id, index, _elements: PhantomData })
    }

    /// How many rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many members there are.
    #[must_use]
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// What all members together have memory under.
    #[must_use]
    pub fn committed(&self) -> Bytes {
        Bytes::new(self.members.iter().map(|member| member.committed()).sum())
    }

    /// A member; none if it is another set's.
    #[must_use]
    pub fn get<T: Send + Sync + 'static>(&self, member: Member<T>) -> Option<&GrowableBuffer<T>> {
        let joined: &dyn Any = self.members.get(member.index).filter(|_| member.set == self.id)?.as_any();
        joined.downcast_ref::<Joined<T>>().map(|joined| &joined.buffer)
    }

    /// A member, to change what it holds. Its length is the set's business: a member that was made longer stops the
    /// set with [`Error::OutOfStep`], one that was made shorter is grown again by the next [`grow_to`](Self::grow_to).
    #[must_use]
    pub fn get_mut<T: Send + Sync + 'static>(&mut self, member: Member<T>) -> Option<&mut GrowableBuffer<T>> {
        let ours = member.set == self.id;
        let joined: &mut dyn Any = self.members.get_mut(member.index).filter(|_| ours)?.as_any_mut();
        joined.downcast_mut::<Joined<T>>().map(|joined| &mut joined.buffer)
    }

    /// Grows all members to `rows` rows; does nothing if there are as many.
    ///
    /// # Errors
    /// That of the first member that cannot grow. All members are then as they were, unless it is
    /// [`Error::Rollback`]: then no length has changed, but some member has kept memory.
    pub fn grow_to(&mut self, rows: usize) -> Result<()> {
        if rows < self.rows {
            return Ok(());
        }
        let mut growths = Vec::with_capacity(self.members.len());
        for (index, member) in self.members.iter_mut().enumerate() {
            match member.target(index, rows).and_then(|len| Ok((member.begin(len)?, len))) {
                Ok(growth) => growths.push(growth),
                Err(error) => return Err(self.undo(growths, error)),
            }
        }
        for (member, (growth, len)) in self.members.iter_mut().zip(growths) {
            member.settle(growth, len);
        }
        self.rows = rows;
        Ok(())
    }

    /// Grows all members by `rows` rows.
    ///
    /// # Errors
    /// As for [`grow_to`](Self::grow_to).
    pub fn grow_by(&mut self, rows: usize) -> Result<()> {
        let overflow = Error::Overflow { what: "rows of a set", count: rows as u64, size: 1 };
        let rows = self.rows.checked_add(rows).ok_or(overflow)?;
        self.grow_to(rows)
    }

    /// Keeps memory mapped ahead of all members, as [`GrowableBuffer::grow_ahead`] does.
    ///
    /// # Errors
    /// That of the first member that cannot; those before it do.
    pub fn grow_ahead(&mut self, policy: AheadPolicy) -> Result<()> {
        self.members.iter_mut().try_for_each(|member| member.grow_ahead(policy))
    }

    /// Takes growths back after one failed with `error`; gives the error to report.
    fn undo(&mut self, growths: Vec<(Growth, usize)>, mut error: Error) -> Error {
        // The latest first, as a backing wants it.
        for (member, (growth, _)) in self.members.iter_mut().zip(growths).rev() {
            if let Err(then) = member.undo(growth) {
                error = then.after(error);
            }
        }
        error
    }

    /// Gives everything back, as [`GrowableBuffer::close`] does.
    ///
    /// # Errors
    /// That of the first member that cannot; the others are closed all the same.
    pub fn close(self) -> Result<()> {
        self.members.into_iter().map(AnyBuffer::close).fold(Ok(()), Result::and)
    }

    /// Shortens all members to `rows` rows and keeps the memory; does nothing if there are not as many.
    pub fn truncate(&mut self, rows: usize) {
        self.rows = self.rows.min(rows);
        for member in &mut self.members {
            member.truncate(self.rows);
        }
    }

    /// Shrinks all members to `rows` rows, as [`GrowableBuffer::shrink_to`] does.
    ///
    /// # Errors
    /// [`Error::ShrinkAboveLen`], and a [`Quiesce`] that a member cannot wait for, change nothing. If a member cannot give its memory up, all lengths fall all the
    /// same, its memory stays committed, and the error is its own.
    pub fn shrink_to(&mut self, rows: usize, quiesce: &Quiesce<'_>) -> Result<Shrunk> {
        if rows > self.rows {
            return Err(Error::ShrinkAboveLen { asked: rows, len: self.rows });
        }
        self.members.iter().try_for_each(|member| member.check(quiesce))?;
        self.truncate(rows);
        let mut all =
            Shrunk { released: Bytes::ZERO, retiring: Bytes::ZERO, committed: Bytes::ZERO, waited: None, why: None };
        let mut first = None;
        for member in &mut self.members {
            match member.give_up(quiesce) {
                Ok(shrunk) => {
                    all.released = Bytes::new(all.released.get() + shrunk.released.get());
                    all.retiring = Bytes::new(all.retiring.get() + shrunk.retiring.get());
                    all.waited =
                        shrunk.waited.map_or(all.waited, |waited| Some(all.waited.unwrap_or_default() + waited));
                    all.why = all.why.or(shrunk.why);
                }
                Err(error) => {
                    first.get_or_insert(error);
                }
            }
        }
        all.committed = self.committed();
        first.map_or(Ok(all), Err)
    }
}

/// A buffer in a set, whatever its elements.
trait AnyBuffer: Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
    fn committed(&self) -> u64;
    /// The length that so many rows ask of it.
    fn target(&self, index: usize, rows: usize) -> Result<usize>;
    fn begin(&mut self, len: usize) -> Result<Growth>;
    fn settle(&mut self, growth: Growth, len: usize);
    fn undo(&mut self, growth: Growth) -> Result<()>;
    fn grow_ahead(&mut self, policy: AheadPolicy) -> Result<()>;
    fn truncate(&mut self, rows: usize);
    fn close(self: Box<Self>) -> Result<()>;
    /// That it can be quiesced so.
    fn check(&self, quiesce: &Quiesce<'_>) -> Result<()>;
    /// Gives up what lies above the length.
    fn give_up(&mut self, quiesce: &Quiesce<'_>) -> Result<Shrunk>;
}

struct Joined<T> {
    buffer: GrowableBuffer<T>,
    per_row: usize,
}

impl<T: Send + Sync + 'static> AnyBuffer for Joined<T> {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn committed(&self) -> u64 {
        self.buffer.committed().get()
    }

    fn target(&self, index: usize, rows: usize) -> Result<usize> {
        let overflow = Error::Overflow { what: "a set", count: rows as u64, size: self.per_row as u64 };
        let asked = rows.checked_mul(self.per_row).ok_or(overflow)?;
        let len = self.buffer.len();
        if len > asked {
            return Err(Error::OutOfStep { member: index, len, asked });
        }
        Ok(asked)
    }

    fn begin(&mut self, len: usize) -> Result<Growth> {
        self.buffer.begin_growth(len)
    }

    fn settle(&mut self, growth: Growth, len: usize) {
        self.buffer.settle_growth(growth, len);
    }

    fn undo(&mut self, growth: Growth) -> Result<()> {
        self.buffer.undo_growth(growth)
    }

    fn grow_ahead(&mut self, policy: AheadPolicy) -> Result<()> {
        self.buffer.grow_ahead(policy)
    }

    fn truncate(&mut self, rows: usize) {
        self.buffer.truncate(rows.saturating_mul(self.per_row));
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.buffer.close()
    }

    fn check(&self, quiesce: &Quiesce<'_>) -> Result<()> {
        self.buffer.check_shrink(self.buffer.len(), quiesce).map(drop)
    }

    fn give_up(&mut self, quiesce: &Quiesce<'_>) -> Result<Shrunk> {
        self.buffer.shrink_now(self.buffer.len(), quiesce)
    }
}

impl Default for BufferSet {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Clone for Member<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Member<T> {}

impl<T> fmt::Debug for Member<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.index).finish()
    }
}

impl fmt::Debug for BufferSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferSet")
            .field("members", &self.members.len())
            .field("rows", &self.rows)
            .field("committed", &self.committed())
            .finish()
    }
}
