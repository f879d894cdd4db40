//! Processes that are one personality of the stand-in.

use std::process::Command;
use std::time::Duration;

use crate::process::{self, Ended};
use crate::stand_in;

const ROLE: &str = "GROWSPAN_HIP_ROLE";

/// How long a child may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process to be.
pub(crate) struct Child {
    limits: String,
    settings: Vec<(String, String)>,
    without_library: bool,
}

impl Child {
    /// One in which the runtime is of this version.
    pub(crate) fn of(personality: &str) -> Self {
        Self { limits: String::new(), settings: Vec::new(), without_library: false }.set("FAKE_AMDHIP", personality)
    }

    /// With a variable of its environment set.
    pub(crate) fn set(mut self, name: &str, value: impl Into<String>) -> Self {
        self.settings.push((name.to_owned(), value.into()));
        self
    }

    /// Under limits, as the shell's `ulimit` takes them: `-Sn 1024`.
    pub(crate) fn under(mut self, limits: &[&str]) -> Self {
        self.limits = limits.iter().map(|limit| format!("ulimit {limit}; ")).collect();
        self
    }

    /// Without being told where the library is.
    pub(crate) fn left_to_search(mut self) -> Self {
        self.without_library = true;
        self
    }

    /// The same for any program.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{} exec \"$0\" \"$@\"", self.limits)]).arg(program);
        if self.without_library {
            command.env_remove("GROWSPAN_HIP_LIBRARY");
        } else {
            command.env("GROWSPAN_HIP_LIBRARY", stand_in::path());
        }
        // What the caller's shell has set is not what is tested.
        for name in ["ROCM_PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "GROWSPAN_HIP_FORCE", "RUST_LOG"] {
            command.env_remove(name);
        }
        command.envs(self.settings.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs tests of this program.
    pub(crate) fn tests(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(std::env::current_exe().unwrap().to_str().unwrap());
        process::run(command.args(arguments).args(["--ignored", "--test-threads=1"]), PATIENCE)
    }

    /// Runs one role.
    pub(crate) fn role(self, role: &str) -> Ended {
        self.set(ROLE, role).tests(&["child::as_child", "--exact", "--nocapture"])
    }

    /// Runs a role that has to end well; gives what it printed.
    pub(crate) fn role_well(self, role: &str) -> String {
        let Ended { status, text, took } = self.role(role);
        let status = status.unwrap_or_else(|| panic!("{role} did not end in {took:?}:\n{text}"));
        assert!(status.success() && text.contains("role done"), "{role}: {status}\n{text}");
        text
    }
}

#[test]
#[ignore = "not a test of its own: others start it in a process of its own"]
fn as_child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    tracing_subscriber::fmt().with_ansi(false).init();
    match role.split_once(' ') {
        Some(("row", rest)) => crate::rows::as_child(rest),
        Some(("limits", rest)) => crate::limits::as_child(rest),
        Some(("loading", rest)) => crate::loading::as_child(rest),
        Some(("devices", rest)) => crate::devices::as_child(rest),
        Some(("pinned", rest)) => crate::pinned::as_child(rest),
        Some(("quiesce", rest)) => crate::quiesce::as_child(rest),
        Some(("hangs", rest)) => crate::hangs::as_child(rest),
        Some(("odd", rest)) => crate::odd::as_child(rest),
        Some(("sweep", rest)) => crate::sweep::as_child(rest),
        _ => panic!("no role {role}"),
    }
    println!("role done");
}
