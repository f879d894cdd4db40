//! What tests ask of the stand-in itself. None of it counts as a call of the runtime.

use core::ffi::{CStr, c_char, c_void};

use crate::memory::GRANULE;
use crate::pointers::Out;
use crate::runtime::{Runtime, State};

/// What there is on a device now.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Reservations of addresses made while the device was current.
    pub spans: u64,
    /// Handles that anyone still has a reference to: the caller, a mapping, or a failed map that said nothing.
    pub handles: u64,
    /// Mappings of the device's memory.
    pub mappings: u64,
    /// Blocks of `hipMalloc`.
    pub blocks: u64,
    /// Streams that were made and not destroyed.
    pub streams: u64,
    /// Events that were made and not destroyed.
    pub events: u64,
    /// Bytes that are not free, those that nobody can reach included. Imported memory is its exporter's.
    pub bytes_used: u64,
    /// Bytes among them that no handle or mapping of the caller's refers to any more and that stay used: what 6.4.0 never
    /// gives back, and what only a failed map still refers to.
    pub bytes_leaked: u64,
    /// Files that are open for handles.
    pub open_handle_files: u64,
}

impl Figures {
    fn add(&mut self, state: &mut State, device: usize) {
        state.memory.sweep();
        let table = &state.table;
        let (streams, events) = state.streams.figures(device);
        self.streams += streams;
        self.events += events;
        self.spans += table.spans.values().filter(|span| span.device == device).count() as u64;
        self.blocks += table.blocks.values().filter(|block| block.store.device == device).count() as u64;
        self.bytes_used += state.memory.used(device);
        self.bytes_leaked += state.memory.leaked(device);
        for handle in table.handles.values().filter(|handle| handle.store.device == device) {
            self.handles += 1;
            self.mappings += u64::from(handle.maps);
            self.open_handle_files += handle.store.open_files();
            if handle.held == 0 && handle.maps == 0 && handle.store.imported.is_none() {
                self.bytes_leaked += handle.store.size;
            }
        }
    }
}

impl Runtime {
    /// The figures of a device, or of all with a negative number.
    pub(crate) fn figures(&self, device: i32) -> Figures {
        let mut figures = Figures::default();
        self.look(|state| match self.config().device(device) {
            Some(device) => figures.add(state, device),
            None if device < 0 => (0..self.config().devices).for_each(|device| figures.add(state, device)),
            None => {}
        });
        figures
    }

    /// The device that the memory at an address lies on, or -1.
    pub(crate) fn device_of(&self, addr: usize) -> i32 {
        self.look(|state| state.table.device_of(addr)).map_or(-1, |device| device as i32)
    }
}

/// # Safety
/// `name` is null or a C string.
unsafe fn function_name<'a>(name: *const c_char) -> &'a str {
    if name.is_null() {
        return "";
    }
    // SAFETY: not null, and the caller promises a C string.
    unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("")
}

/// Writes the figures of a device; of all of them for a negative number, and zeros for one that does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn fake_amdhip_figures(device: i32, out: Out<Figures>) {
    out.set(Runtime::get().figures(device));
}

/// How often a function was called.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_amdhip_calls(name: *const c_char) -> u64 {
    // SAFETY: the same promise.
    Runtime::get().calls(unsafe { function_name(name) })
}

/// How many pieces of page-locked memory there are.
#[unsafe(no_mangle)]
pub extern "C" fn fake_amdhip_pins() -> u64 {
    Runtime::get().look(|state| state.table.pins.len() as u64)
}

/// How often page-locking was begun again because a page was not there.
#[unsafe(no_mangle)]
pub extern "C" fn fake_amdhip_pin_retries() -> u64 {
    Runtime::get().look(|state| state.table.pin_retries)
}

/// The device that the memory at an address lies on, or -1 where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_amdhip_device_of(addr: *const c_void) -> i32 {
    Runtime::get().device_of(addr.addr())
}

/// Lets the `nth` `hipMemMap` from now fail below the runtime, which some versions say nothing of. 1 is the next, 0 none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_amdhip_fail_map(nth: u64) {
    Runtime::get().fail_map(nth);
}

/// Lets the `nth` call from now of a function return `code` and do nothing. 1 is the next, 0 none.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_amdhip_fail_call(name: *const c_char, nth: u64, code: u32) {
    // SAFETY: the same promise.
    Runtime::get().fail_call(unsafe { function_name(name) }, nth, code);
}

const _: () = assert!(GRANULE.is_power_of_two() && size_of::<Figures>() == 72);
