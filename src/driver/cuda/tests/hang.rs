//! Drivers that hang while they start or open a device: what opening a device decides is decided once a process, so each of
//! these runs in one of its own.

use core::time::Duration;

use super::super::library::OPENINGS;
use super::*;
use crate::driver::Unopened;

const SHORT: Duration = Duration::from_millis(50);

fn hangs<T>(result: Result<T, CudaOpenError>) -> bool {
    let error =
        result.err().map(|error| (error.kind(), error.to_string())).unwrap_or((DriverErrorKind::Missing, "".into()));
    error.0 == DriverErrorKind::Other && error.1.contains("opening the CUDA device: the driver has not returned for 0.")
}

fn alone(test: &str, defines: &[&str], work: fn()) {
    if std::env::var_os(CHILD).is_some() {
        return work();
    }
    let Some(path) = fake(defines) else { return };
    let (passed, output) = in_a_child(&format!("hang::{test}"), LIBRARY_VARIABLE, path.as_os_str());
    std::fs::remove_file(path).unwrap();
    assert!(passed, "{output}");
}

#[test]
fn one_that_does_not_start() {
    alone("one_that_does_not_start", &["-DINIT=pause()"], || {
        assert!(hangs(Cuda::get(SHORT)));
        // And is not asked again, or this would take minutes.
        assert!(hangs(CudaDriver::open(0)) && hangs(CudaDriver::open_uuid([1; 16])) && hangs(CudaDriver::count()));
        // Nor does a child wait for what its parent began.
        // SAFETY: the child uses this crate and the allocator, which the C library makes fit for it, and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let told = matches!(CudaDriver::open(0), Err(CudaOpenError::Forked));
            // SAFETY: it ends the process, which is what a forked child does.
            unsafe { libc::_exit(i32::from(!told)) };
        }
        let mut status = -1;
        // SAFETY: the pointer is valid for the write.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    });
}

#[test]
fn one_that_does_not_open_a_device() {
    alone("one_that_does_not_open_a_device", &[], || {
        assert_eq!(CudaDriver::count().unwrap(), 2);
        let (_go_on, wait) = std::sync::mpsc::channel::<()>();
        let device_0: Result<_, Unopened> = OPENINGS.watch(Some(0), SHORT, move || Ok(wait.recv()));
        device_0.unwrap_err();
        assert!(hangs(CudaDriver::open(0)), "it is opened where it can be left behind");
        assert!(CudaDriver::open(1).is_ok() && CudaDriver::count().is_ok());
        let (_go_on, wait) = std::sync::mpsc::channel::<()>();
        let all: Result<_, Unopened> = OPENINGS.watch(None, SHORT, move || Ok(wait.recv()));
        all.unwrap_err();
        assert!(hangs(CudaDriver::open(1)) && hangs(CudaDriver::count()) && hangs(CudaDriver::open_uuid([1; 16])));
    });
}
