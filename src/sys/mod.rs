//! Linux calls behind safe functions. Nothing here knows of devices.
//!
//! Figures come as numbers, failures as [`std::io::Error`], and what the kernel writes as text is read by functions
//! over `&str`. The exception to the first line is the part of `map` and `pages` that changes memory in place: no signature can
//! promise that nobody uses that memory, so those functions are `unsafe` and say what their callers owe.

pub(crate) mod fork;
pub mod limits;
pub(crate) mod map;
pub mod memory;
pub(crate) mod pages;
#[cfg(feature = "hip")]
pub(crate) mod pci;
pub mod thp;
pub(crate) mod thread;
pub mod vmstat;

#[cfg(test)]
#[path = "../../tests/shared/seccomp.rs"]
pub(crate) mod seccomp;

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    /// Runs `body` in a process of its own, in which no other test opens files, maps memory or changes limits. `test`
    /// is the full path of the calling test.
    pub(crate) fn alone(test: &str, body: impl FnOnce()) {
        const CHILD: &str = "GROWSPAN_TEST_ALONE";
        if std::env::var(CHILD).is_ok_and(|name| name == test) {
            return body();
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, test)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}: {text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "no test is named {test}: {text}");
    }
}
