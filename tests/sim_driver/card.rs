//! A simulated card whose driver can be called wrongly without `unsafe`.

use growspan::driver::sim::{Personality, SimDriver, ViolationKind};
use growspan::driver::{ChunkProps, Driver, DriverErrorKind, DriverResult, RawEvent, RawHandle, RawStream};

pub(crate) const CHUNK: u64 = 2 << 20;

/// The driver's methods without `unsafe`.
///
/// SAFETY of every block in it: no handle, address, event or stream of a simulated driver leads anywhere, so calls
/// against its rules, which is what these tests make, are caught and harm nothing. Host memory is borrowed for each
/// copy that is not queued.
#[derive(Clone)]
pub(crate) struct Card(pub(crate) SimDriver);

macro_rules! safe {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*) => { $(
        pub(crate) fn $name(&self, $($arg: $ty),*) -> DriverResult<$ret> {
            // SAFETY: see the type.
            unsafe { self.0.$name($($arg),*) }
        }
    )* };
}

impl Card {
    pub(crate) fn with(personalities: &[Personality]) -> Self {
        Self(personalities.iter().fold(SimDriver::builder(), |options, &it| options.personality(it)).build())
    }

    safe! {
        fn free_span(addr: u64, bytes: u64) -> ();
        fn release(handle: RawHandle) -> ();
        fn map(addr: u64, bytes: u64, handle: RawHandle) -> ();
        fn set_access(addr: u64, bytes: u64) -> ();
        fn unmap(addr: u64, bytes: u64) -> ();
        fn free(addr: u64, bytes: u64) -> ();
        fn copy_within(dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> ();
        fn fill(dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> ();
        fn event_record(event: RawEvent, stream: RawStream) -> ();
        fn event_query(event: RawEvent) -> bool;
        fn event_wait(event: RawEvent) -> ();
        fn event_destroy(event: RawEvent) -> ();
        fn synchronize_stream(stream: RawStream) -> ();
        fn stream_is_capturing(stream: RawStream) -> bool;
    }

    pub(crate) fn create(&self, bytes: u64) -> RawHandle {
        self.0.create(bytes, ChunkProps::PLAIN).unwrap()
    }

    pub(crate) fn reserve(&self, chunks: u64) -> u64 {
        self.0.reserve(chunks * CHUNK, CHUNK).unwrap()
    }

    /// Creates a chunk, maps it and makes it accessible.
    pub(crate) fn chunk(&self, addr: u64, bytes: u64) -> RawHandle {
        let handle = self.create(bytes);
        self.map(addr, bytes, handle).unwrap();
        self.set_access(addr, bytes).unwrap();
        handle
    }

    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> DriverResult<()> {
        // SAFETY: `data` has that many bytes, and the copy is over when this returns.
        unsafe { self.0.copy_in(addr, data.as_ptr(), data.len() as u64, None) }
    }

    pub(crate) fn read(&self, addr: u64, bytes: usize) -> DriverResult<Vec<u8>> {
        let mut data = vec![0x77; bytes];
        // SAFETY: as in `write`.
        unsafe { self.0.copy_out(data.as_mut_ptr(), addr, bytes as u64, None)? };
        Ok(data)
    }

    pub(crate) fn free_memory(&self) -> u64 {
        self.0.memory().unwrap().free
    }

    /// Says that a call broke exactly this rule, was told so, and changed nothing.
    #[track_caller]
    pub(crate) fn breaks<T: core::fmt::Debug>(&self, kind: ViolationKind, call: impl FnOnce(&Self) -> DriverResult<T>) {
        let before = self.0.figures();
        assert_eq!(call(self).unwrap_err().kind(), DriverErrorKind::Misuse);
        let kinds: Vec<_> = self.0.take_violations().into_iter().map(|violation| violation.kind).collect();
        assert_eq!(kinds, [kind]);
        assert_eq!(self.0.figures(), before);
    }

    /// Says that the device was lost for this reason, and stays lost.
    #[track_caller]
    pub(crate) fn lost_by(&self, kind: ViolationKind) {
        assert!(self.0.is_lost());
        assert_eq!(self.0.figures().pending, 0);
        assert_eq!(self.0.violations().last().unwrap().kind, kind);
        let error = self.0.memory().unwrap_err();
        assert_eq!((error.kind(), error.code()), (DriverErrorKind::DeviceLost, Some(700)));
        self.0.take_violations();
        self.0.assert_clean();
    }
}

#[track_caller]
pub(crate) fn kind_of<T: core::fmt::Debug>(result: DriverResult<T>) -> DriverErrorKind {
    result.unwrap_err().kind()
}
