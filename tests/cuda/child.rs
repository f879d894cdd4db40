//! Processes of their own, for what cannot be taken back.

use std::process::{Command, ExitStatus};
use std::time::Duration;

use crate::process;

const ROLE: &str = "GROWSPAN_CUDA_ROLE";

/// How long a child may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a child ended, and all it printed.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) text: String,
}

/// Runs one role in a process of its own.
pub(crate) fn run(role: &str) -> Ended {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child::as_child", "--exact", "--ignored", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    let process::Ended { status, text, took } = process::run(&mut command, PATIENCE);
    println!("-- child {role:?}, {took:?}: {status:?}\n{text}--");
    let status = status.unwrap_or_else(|| panic!("{role} did not end within {PATIENCE:?}"));
    Ended { status, text }
}

/// Runs a role that has to end well.
pub(crate) fn run_well(role: &str) {
    let Ended { status, text } = run(role);
    assert!(status.success(), "{role}: {status:?}");
    assert!(text.contains("role done"), "{role} did not run to its end");
    assert!(!text.contains("panicked"), "{role} panicked on the way");
}

#[test]
#[ignore = "not a test of its own: others start it in a process of its own"]
fn as_child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "device" | "stream" | "event" | "deferred" => crate::quiesce::shrink_under_a_kernel(&role),
        "idle" => crate::quiesce::lose_the_context(),
        "reset" => crate::contexts::reset_under_live_buffers(false),
        "reset contiguous" => crate::contexts::reset_under_live_buffers(true),
        "exit" => crate::contexts::leave_live_buffers(),
        other => panic!("no role {other}"),
    }
    println!("role done");
}
