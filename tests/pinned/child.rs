//! Processes of their own, for what is about the whole process.

use std::process::Command;
use std::time::Duration;

use crate::process::{self, Ended};

const ROLE: &str = "GROWSPAN_PINNED_ROLE";

/// How long a child may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs a role, by a program that starts the others where one is given.
pub(crate) fn role(role: &str, by: &[&str]) -> Ended {
    let test = std::env::current_exe().unwrap();
    let mut command = match by {
        [] => Command::new(&test),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(&test);
            command
        }
    };
    let arguments = ["child::as_child", "--exact", "--nocapture", "--ignored", "--test-threads=1"];
    process::run(command.args(arguments).env(ROLE, role), PATIENCE)
}

/// Runs a role that has to end well; gives what it printed.
pub(crate) fn role_well(name: &str, by: &[&str]) -> String {
    let Ended { status, text, took } = role(name, by);
    let status = status.unwrap_or_else(|| panic!("{name} did not end in {took:?}:\n{text}"));
    assert!(status.success() && text.contains("role done"), "{name}: {status}\n{text}");
    text
}

#[test]
#[ignore = "not a test of its own: others start it in a process of its own"]
fn as_child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    tracing_subscriber::fmt().with_ansi(false).init();
    crate::kernel::as_child(&role);
    println!("role done");
}
