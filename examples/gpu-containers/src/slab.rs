//! A slab.

use core::fmt;

use bytemuck::Pod;
use growspan::{Error, RawAllocator, Result};

use crate::DeviceVec;

/// Elements in device memory that keep their place, each with a key. Places of removed elements are used again; what is
/// free is known on the host alone.
pub struct DeviceSlab<T, A: RawAllocator> {
    elements: DeviceVec<T, A>,
    /// For each place: how often it was used, and whether it is.
    places: Vec<(u32, bool)>,
    free: Vec<u32>,
}

/// The key of an element. One of an element that was removed finds nothing, also when its place is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    place: u32,
    turn: u32,
}

impl Key {
    /// The number of the element's place, by which kernels find it.
    pub fn index(self) -> usize {
        self.place as usize
    }
}

impl<T: Pod, A: RawAllocator> DeviceSlab<T, A> {
    /// An empty slab, without memory.
    pub fn new_in(allocator: A) -> Self {
        Self { elements: DeviceVec::new_in(allocator), places: Vec::new(), free: Vec::new() }
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device address of place 0; none while there is no memory.
    pub fn device_ptr(&self) -> Option<u64> {
        self.elements.device_ptr()
    }

    /// Puts an element somewhere.
    ///
    /// # Errors
    /// When there is no memory; what the driver says. The slab is then as it was.
    pub fn insert(&mut self, element: T) -> Result<Key> {
        if let Some(&place) = self.free.last() {
            self.elements.set(place as usize, element)?;
            self.free.pop();
            let (turn, used) = &mut self.places[place as usize];
            (*turn, *used) = (turn.wrapping_add(1), true);
            return Ok(Key { place, turn: *turn });
        }
        let count = self.places.len();
        let full = |_| Error::Overflow { what: "a slab", count: count as u64, size: size_of::<T>() as u64 };
        let place = u32::try_from(count).map_err(full)?;
        self.elements.push(element)?;
        self.places.push((0, true));
        Ok(Key { place, turn: 0 })
    }

    fn holds(&self, key: Key) -> bool {
        self.places.get(key.index()) == Some(&(key.turn, true))
    }

    /// The element of a key; none if it was removed.
    ///
    /// # Errors
    /// What the driver says.
    pub fn get(&self, key: Key) -> Result<Option<T>> {
        if self.holds(key) { self.elements.get(key.index()) } else { Ok(None) }
    }

    /// Takes the element of a key out; none if that was done before.
    ///
    /// # Errors
    /// What the driver says; the element then stays.
    pub fn remove(&mut self, key: Key) -> Result<Option<T>> {
        let element = self.get(key)?;
        if element.is_some() {
            self.places[key.index()].1 = false;
            self.free.push(key.place);
        }
        Ok(element)
    }
}

impl<T, A: RawAllocator> fmt::Debug for DeviceSlab<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlab")
            .field("elements", &self.elements)
            .field("free", &self.free.len())
            .finish_non_exhaustive()
    }
}
