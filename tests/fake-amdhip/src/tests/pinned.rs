//! Page-locked memory.

use super::*;

/// Pages of the host's, not there until they are touched.
struct Pages(usize, usize);

impl Pages {
    fn new(size: usize) -> Self {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: asks for new memory, where nothing is.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), size, access, kind, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at.expose_provenance(), size)
    }

    /// Where nothing else comes to lie, so that it stays empty once they are gone.
    fn far_away(size: usize) -> Self {
        Self(crate::space::reserve(size, 0, 0x2345_6000_0000).unwrap(), size)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the pages are this value's own, which is borrowed.
        unsafe { core::slice::from_raw_parts_mut(core::ptr::with_exposed_provenance_mut(self.0), self.1) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the pages are this value's own.
        unsafe { libc::munmap(core::ptr::with_exposed_provenance_mut(self.0), self.1) };
    }
}

impl Hip {
    fn register(&self, at: usize, size: usize) -> Result<(), u32> {
        self.do_("hipHostRegister", Kind::Usual, |call| call.host_register(at, size, 3))
    }

    fn unregister(&self, at: usize) -> Result<(), u32> {
        self.do_("hipHostUnregister", Kind::Usual, |call| call.host_unregister(at))
    }

    fn host_malloc(&self, size: usize) -> Result<usize, u32> {
        self.do_("hipHostMalloc", Kind::Usual, |call| call.host_malloc(size, 3))
    }

    fn host_free(&self, at: usize) -> Result<(), u32> {
        self.do_("hipHostFree", Kind::Usual, |call| call.host_free(at))
    }

    fn retries(&self) -> u64 {
        self.0.look(|state| state.table.pin_retries)
    }

    fn block(&self, size: usize) -> usize {
        self.do_("hipMalloc", Kind::Usual, |call| call.malloc(size)).unwrap()
    }
}

fn refused<R>(words: &str, body: impl FnOnce() -> R) {
    let message = misuse_of(body);
    assert!(message.contains(words), "{message:?} has no {words:?}");
}

#[test]
fn what_is_registered_twice_or_let_go_of_wrongly() {
    let hip = Hip::new("7.14.1");
    let pages = Pages::new(8 * MIB);
    hip.register(pages.0, 4 * MIB).unwrap();
    for (at, size) in [(0, 4 * MIB), (MIB, MIB), (3 * MIB, 2 * MIB)] {
        assert_eq!(hip.register(pages.0 + at, size), Err(712));
    }
    refused("no page-locked memory starts", || hip.unregister(pages.0 + MIB));
    refused("was registered, and not allocated", || hip.host_free(pages.0));
    let block = hip.host_malloc(100).unwrap();
    refused("was allocated, and not registered", || hip.unregister(block));
    hip.host_free(block).unwrap();
    refused("no page-locked memory starts", || hip.host_free(block));
    hip.unregister(pages.0).unwrap();
    refused("no page-locked memory starts", || hip.unregister(pages.0));
    // Unmapped while it is registered.
    let pages = Pages::far_away(MIB);
    let gone = pages.0;
    hip.register(gone, MIB).unwrap();
    drop(pages);
    refused("were unmapped while they were registered", || hip.unregister(gone));
    assert_eq!(hip.register(gone, MIB), Err(1), "nothing is there");
}

#[test]
fn flags_and_places_that_are_refused() {
    let hip = Hip::new("7.14.1");
    let (block, pages) = (hip.block(MIB), Pages::new(MIB));
    let register = |at, flags| hip.do_("hipHostRegister", Kind::Usual, |call| call.host_register(at, MIB, flags));
    let pointer = |flags| {
        hip.do_("hipHostGetDevicePointer", Kind::Usual, |call| call.host_device_pointer(pages.0, flags)).map(|_| ())
    };
    refused("is device memory", || register(block, 3));
    assert_eq!((register(pages.0, 16), register(0, 3)), (Err(1), Err(1)));
    assert_eq!(pointer(0), Err(1), "it is not page-locked");
    register(pages.0, 1).unwrap();
    assert_eq!(pointer(0), Err(1), "it is not mapped");
    hip.unregister(pages.0).unwrap();
    register(pages.0, 3).unwrap();
    assert_eq!((pointer(0), pointer(1)), (Ok(()), Err(1)));
    let malloc = |flags| hip.do_("hipHostMalloc", Kind::Usual, |call| call.host_malloc(MIB, flags));
    assert_eq!((malloc(8), hip.host_malloc(0)), (Err(1), Ok(0)));
}

#[test]
fn copies_stay_in_one_piece_and_read_when_their_turn_comes() {
    let hip = Hip::new("7.14.1");
    let mut pages = Pages::new(4 * MIB);
    pages.bytes().fill(1);
    let block = hip.block(4 * MIB);
    let (at, unpinned) = (pages.0, MIB);
    hip.register(at, MIB).unwrap();
    hip.register(at + MIB, MIB).unwrap();
    let pinned = |from: usize, len| hip.do_("hipMemcpyHtoDAsync", Kind::Usual, |call| call.is_pinned(from, len));
    assert_eq!(pinned(at, MIB), Ok(true));
    assert_eq!(pinned(at + 2 * MIB, unpinned), Ok(false));
    assert_eq!((pinned(at, MIB + 1), pinned(at + MIB + 1, MIB)), (Err(1), Err(1)));

    let fetch = || hip.do_("hipMemcpyHtoDAsync", Kind::Usual, |call| call.fetch(block, at, MIB, 0));
    fetch().unwrap();
    refused("hipMemcpyHtoDAsync is queued and not done yet", || hip.unregister(at));
    pages.bytes()[..MIB].fill(2);
    hip.do_("hipDeviceSynchronize", Kind::Usual, |call| call.device_synchronize()).unwrap();
    let mut back = vec![0_u8; MIB];
    let to = back.as_mut_ptr().expose_provenance();
    hip.do_("hipMemcpyDtoHAsync", Kind::Usual, |call| call.download(to, block, MIB, 0)).unwrap();
    hip.do_("hipDeviceSynchronize", Kind::Usual, |call| call.device_synchronize()).unwrap();
    assert!(back.iter().all(|byte| *byte == 2), "the bytes of when the copy was done");
    hip.unregister(at).unwrap();
}

#[test]
fn the_walk_is_disturbed_where_a_page_is_missing() {
    let hip = Hip::with("7.14.1", &[("FAKE_AMDHIP_DISTURBED", "3"), ("FAKE_AMDHIP_PIN_OFFSET", "0x1000000000")]);
    let mut pages = Pages::new(2 * MIB);
    hip.register(pages.0, 2 * MIB).unwrap();
    assert_eq!(hip.retries(), 3);
    hip.unregister(pages.0).unwrap();
    pages.bytes().fill(1);
    hip.register(pages.0, 2 * MIB).unwrap();
    assert_eq!(hip.retries(), 3, "all is there");
    let device = hip.do_("hipHostGetDevicePointer", Kind::Usual, |call| call.host_device_pointer(pages.0 + 5, 0));
    assert_eq!(device, Ok(pages.0 + 5 + (1 << 36)));
    let block = hip.host_malloc(MIB).unwrap();
    assert_eq!(hip.retries(), 6, "what the runtime allocates is never there");
    hip.host_free(block).unwrap();
    hip.unregister(pages.0).unwrap();
}
